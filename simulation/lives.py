"""What comes after a controller's death: what its database knows, and the next controller's life with the hosts that
are left (decision 0018).

Every life is a play of its own, with its own clock; its oracle begins with what the lives before it agreed on.
"""

from __future__ import annotations

import json
import random

from backend.core.cohort import Cohort
from backend.core.join_phases import END_PHASES
from backend.core.model import sizes
from backend.core.returning import Kept, read_kept
from backend.core.vocabulary import Effect, Record, SendHost, SendRank
from simulation.laws import BATCHED_SECONDS, PHASES, Laws
from simulation.oracle import COMMITTED, LOST, POOL
from simulation.ordeal import Ordeal
from simulation.played import PlayedHost, PlayedRank
from simulation.props import VERSIONS
from simulation.wires import Ways
from wire.messages import (
    Accept,
    Device,
    ExitCause,
    Hello,
    JobOffer,
    Message,
    RankExited,
    RankReady,
    RequestParams,
    WorldFormed,
)

MOST_LIVES = 5
ACCURACY = 1e-6
"""seconds"""


def on_disk(play: Ordeal, dice: random.Random) -> list[Record]:
    """What the database knows of a life that was cut short: all that is durable or old enough, and what was written
    before that; of the rest as much as there was time for."""
    recorded = play.recorded
    sure = [at for at, (when, row) in enumerate(recorded) if row.durable or when <= play.now - BATCHED_SECONDS]
    known = dice.randint(sure[-1] + 1 if sure else 0, len(recorded))
    return [record for _, record in recorded[:known]]


def kept_of(records: list[Record]) -> Kept | None:
    """What the next controller reads there; none where nobody is to come back."""
    phases = [record.row["phase"] for record in records if record.table == "runs" and "phase" in record.row]
    if not phases or phases[-1] in END_PHASES:
        return None
    rows = [record.row for record in records if record.table == "continuations"]
    slots = {row["slot"]: json.loads(json.dumps(row["state"])) for row in rows}
    deaths = [record.row for record in records if record.table == "deaths"]
    kept = read_kept(slots, deaths)
    numbers = [record.row["checkpoint"] for record in records if record.table == "checkpoints"]
    return kept and kept.beyond(max(numbers, default=0))


class Return(Ordeal):
    """A controller that was started again, and what is left of the cohort of the one before."""

    def __init__(self, before: Ordeal, disk: list[Record], kept: Kept, dice: random.Random) -> None:
        super().__init__(
            before.config, samples=before.samples, layout=before.layout, cost=before.cost, seed=dice.randrange(1 << 30)
        )
        self.before = before
        self.disk = disk
        self.kept = kept
        self.plane.fixed_seconds = before.plane.fixed_seconds
        self.inbox_seconds, self.linger_seconds = before.inbox_seconds, before.linger_seconds
        self.down_seconds = before.down_seconds
        self.cohort = Cohort(1, self.config, run_salt=b"salt", run_secret=None, job_hash="", now=0.0)
        self.cohort.take_back(kept, 0.0)
        for row in kept.hosts:
            self._host_comes_back(before.hosts[row["name"]], dice)
        self._strike(dice)

    # ------------------------------------------------------------------------------------------- who comes back

    def _host_comes_back(self, old: PlayedHost, dice: random.Random) -> None:
        patience = self.config.return_seconds
        seconds = dice.choice([0.01, 0.01, 0.3, 0.9, 1.5]) * patience * dice.uniform(0.5, 1.0)
        host = PlayedHost(name=old.name, link=next(self._links), paces=old.paces, line=old.line, host=old.host)
        self.hosts[host.name] = self._host_of_link[host.link] = self._host_of_number[host.host] = host
        self.plane.lines[host.host] = host.line
        ways = self.ways[host.name] = Ways(self.stage)
        ways.join_open = ways.relay_open = False
        for wire in ways.down:
            wire.delay = self.down_seconds
        attached = seconds * dice.choice([0.5, 1.0, 1.2])
        for before in old.ranks:
            self._rank_goes_back(host, before, attached, dice)
        then = self.before.ways[old.name]
        if then.gone or then.frozen or dice.random() < 0.1:  # for good
            ways.gone, host.alive = True, False
            return
        self.stage.after(seconds, self._dial, host)
        self.stage.after(attached, self.attach, host)
        self.stage.after(patience, self._impatient, host)

    def _rank_goes_back(self, host: PlayedHost, old: PlayedRank, attached: float, dice: random.Random) -> None:
        old.settle()
        played = PlayedRank(old.rank, host, old.pace, self)
        host.ranks.append(played)
        self.ranks[old.rank] = played
        played.steps, played.alive = old.steps, old.alive
        played.pace.paused_until = 0.0
        if not old.alive and old.rank in self.before.struck:
            self.struck.add(old.rank)
        played.w = played.base = old.base
        played.held_round = old.held_round
        if old.alive and not (old.deaf and dice.random() < 0.5):
            batch = dice.choice([0.001, old.pace.ms / 1000])
            self.stage.after(attached + batch, self._say_ready, played)

    def _say_ready(self, played: PlayedRank) -> None:
        if played.alive:
            held = f"{played.base:.6f}"
            ready = RankReady("L", *sizes(self.layout), held_round=played.held_round, held_hash=held)
            self.say(played, ready, self.stage.now)

    def attach(self, host: PlayedHost) -> None:
        ways = self.ways[host.name]
        ways.relay_open = not ways.gone
        super().attach(host)

    def _dial(self, host: PlayedHost) -> None:
        devices = [Device(id=f"cpu:{index}", type="cpu") for index in range(len(host.paces))]
        ways = self.ways[host.name]
        if not ways.gone:
            ways.join_open = True
            self.host_says(host, Hello(host=host.name, devices=devices, versions=VERSIONS, returning=host.host))

    def host_hears(self, host: PlayedHost, message: Message) -> None:
        super().host_hears(host, message)
        if isinstance(message, Accept):
            for played in host.ranks:
                if not played.alive:  # an agent tells of every end again
                    struck = played.rank in self.struck
                    cause = ExitCause(code=-9, signal="SIGKILL") if struck else ExitCause(code=0, clean=True)
                    # Not at once: the controller is still doing what it told us.
                    self.stage.after(0.0, self.host_says, host, RankExited(played.rank, cause))
            self.stage.after(self.config.heartbeat_seconds, self._beat, host)

    def _impatient(self, host: PlayedHost) -> None:
        if not any(isinstance(message, Accept) for message in host.told):
            self._give_up(host, "the controller did not come back")

    # ------------------------------------------------------------------------------------------- what strikes now

    def _strike(self, dice: random.Random) -> None:
        patience = self.config.return_seconds
        for _ in range(dice.choice([0, 0, 1, 1, 2])):
            at = dice.choice([0.02, 0.4, 1.1]) * patience * dice.uniform(0.2, 1.0)
            self.stage.after(at, dice.choice([self._kill_one, self._unplug_one, self._crash_soon]), dice)
        if dice.random() < 0.15:
            self.crash(dice.choice([0, 1, 2, 4, 8, 16]))
        if dice.random() < 0.1:
            self.stage.after(dice.choice([0.0, 0.3, 1.1]) * patience, self._stop)

    def _stop(self) -> None:
        if self.end is None:
            self.operate("stop", by="operator")

    def _kill_one(self, dice: random.Random) -> None:
        alive = [rank for rank, played in sorted(self.ranks.items()) if played.alive]
        if alive and self.end is None:
            self.kill(dice.choice(alive))

    def _unplug_one(self, dice: random.Random) -> None:
        there = [name for name, host in sorted(self.hosts.items()) if host.alive]
        if there and self.end is None:
            self.unplug(dice.choice(there))

    def _crash_soon(self, dice: random.Random) -> None:
        self.crash(dice.choice([0, 1, 2, 5, 20]))


class LaterLaws(Laws):
    """The laws of a later life. Over all lives together a sample is accepted once, a rank dies once, and a round's
    number means one consensus."""

    play: Return
    phases = frozenset({*PHASES, ("forming", "interrupted"), ("training", "interrupted")})

    def __init__(self, play: Return, before: Laws) -> None:
        super().__init__(play)
        self.dead = set(play.kept.dead)
        self._buried_before = self.dead.copy()
        self.standing = dict(before.standing)
        self._begun = False
        self._back: set[int] = set()
        """links of hosts that were taken back"""

    def effect(self, now: float, effect: Effect) -> None:
        match effect:
            case SendHost(message=WorldFormed() | JobOffer()):
                raise AssertionError(f"the world starts twice: {effect}")
            case SendHost(link=link, message=Accept()):
                self._back.add(link)
            case SendRank(message=RequestParams(initial=True) as request) if not self._begun:
                self._begin(request)
        super().effect(now, effect)

    def _begin(self, request: RequestParams) -> None:
        """From here on the samples stand as they stood after that round."""
        self._begun = True
        play, held, march = self.play, request.brings, self.play.cohort.march
        assert march is not None and held is not None, "the cohort begins anew"
        assert held in self.standing, f"L2: it goes on from round {held}, which nobody adopted"
        root, first = play.ranks[request.root], march.cycle.first_round
        assert root.held_round == held, f"L4: rank {request.root} holds round {root.held_round}, not {held}"
        known = {played.held_round or -1 for rank, played in play.ranks.items() if march.world.lives(rank)}
        assert first > max(known | play.kept.positions.keys()), f"L1: round {first} means two consensuses"
        standing = self.standing[held]
        self._epochs = list(range(standing.epochs))
        self._dealt = {
            epoch: bytearray(state if state in (COMMITTED, LOST) else POOL for state in where)
            for epoch, where in standing.samples.items()
        }
        self._trained = {
            epoch: bytearray(state == COMMITTED for state in where) for epoch, where in standing.samples.items()
        }
        self._first = self._rounds = first

    def _had_left(self, exited: RankExited) -> bool:
        return exited.cause.clean and not self._begun

    def _justify(self, rank: int, reason: str) -> None:
        march = self.play.cohort.march
        assert march is not None
        host = march.world.hosts[march.world.ranks[rank].host]
        if "did not come back to the restarted controller" in reason:
            assert self._now >= self.play.config.return_seconds - ACCURACY, f"L3: {host.name} had still time"
            relay = any(played.name == host.name for played in self.play.hosts.values()) and host.relay_up
            assert not (host.link in self._back and relay), f"L3: {host.name} is back"
            return
        super()._justify(rank, reason)

    def finish(self) -> None:
        super().finish()
        march, play = self.play.cohort.march, self.play
        if march is not None and march.ending is not None and not play.crashed and not play.disk_trouble:
            assert play.rows("checkpoints") or march.ending.phase != "interrupted", "L5: nothing was saved"

    def _dead_on_record(self, known: list[Record]) -> set[int]:
        return self._buried_before | super()._dead_on_record(known)


def next_life(play: Ordeal, seed: int, life: int) -> Return | None:
    """The life after a crash; none where the run is over, or nobody is to come back."""
    if not play.crashed or life >= MOST_LIVES:
        return None
    dice = random.Random(f"{seed}/{life}")
    before = play.disk if isinstance(play, Return) else []
    disk = [*before, *on_disk(play, dice)]
    kept = kept_of(disk)
    return None if kept is None else Return(play, disk, kept, dice)
