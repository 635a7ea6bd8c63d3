"""A controller that was killed comes back to a cohort that still lives (decision 0018).

With every commit the core writes down where the run stands, before anybody is told to adopt it: two positions are kept,
since the cohort may hold either. The next controller reads them and waits for its hosts; their ranks hold the consensus
of one of the two. From there the run goes on, with every sample of an accepted round accepted and every other one dealt
again.

A round's number means one consensus for good: whoever goes on skips the numbers of rounds that he knows of and drops.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from msgspec.structs import asdict

from backend.core.config import RunConfig
from backend.core.deaths import Casualty, death_notices
from backend.core.forming import Forming
from backend.core.join_admission import MAX_NAME, Member, clipped
from backend.core.join_window import JoinWindow
from backend.core.liveness import tolerance
from backend.core.progress import coverage
from backend.core.resume import Resume, read_resume, restore_pace
from backend.core.vocabulary import CloseLink, Effect, Record, RoundFinished, SendHost
from backend.core.world import HostSeat, World
from wire.messages import Device, Hello, Message, ProbeReport, RankReady, Reject, TensorSpec, Versions

if TYPE_CHECKING:
    from backend.core.march import March
    from backend.core.membership import Membership

BASE = 2
"""slot of what does not change; the two newest positions lie in slots 0 and 1"""
Row = dict[str, Any]


# ------------------------------------------------------------------------------------------------ writing it down


def may_return(config: RunConfig, world: World) -> bool:
    """Whether the cohort is to wait for its controller. What a relay-only host folds cannot be taken up again."""
    return bool(config.return_seconds) and all(seat.ranks for seat in world.hosts.values())


def keep_world(world: World, layout: Iterable[TensorSpec], dataset_size: int, run_salt: bytes, secret: bytes) -> Record:
    """Who is in the world, once it has formed. ``secret`` is the run's where it admits anybody, else empty."""
    state = {
        "run_salt": run_salt.hex(),
        "run_secret": secret.hex(),
        "dataset_size": dataset_size,
        "layout": [asdict(spec) for spec in layout],
        "hosts": [seat.as_row() for seat in world.hosts.values()],
    }
    return Record("continuations", {"slot": BASE, "state": state})


def keep(march: March, event: RoundFinished, now: float) -> list[Effect]:
    """Where the run stands with this round, whose samples are accepted and which nobody has adopted yet."""
    if not may_return(march.config, march.world):
        return []
    training, world = march.training, march.world
    batches, loss = sum(event.steps.values()), training.ledger.mean_loss(world.alive())
    progress = coverage(march, now)
    progress["batches"] += batches
    if loss is not None:
        progress["loss_sum"] += loss * batches
        progress["loss_batches"] += batches
    state = {
        "run_id": march.run_id,
        "checkpoint": march.checkpoints.number,
        "config": {name: getattr(march.config, name) for name in ("job", "seed", "batch_size")},
        "layout": [],
        "seats": [[world.hosts[seat.host].name, seat.device] for seat in world.ranks.values()],
        "states": [],
        "round": event.round,
        "global_step": training.global_step + batches,
        "dataset_size": training.dataset_size,
        "scheduler": training.scheduler.state(),
        **training.review.state(),
        "progress": progress,
        "stopping": march.stopping,
    }
    return [Record("continuations", {"slot": event.round % BASE, "state": state})]


# ------------------------------------------------------------------------------------------------- reading it again


@dataclass(frozen=True, slots=True)
class Kept:
    """What a controller left behind. ``positions``: by round, where the run stood when that was committed."""

    run_salt: bytes
    run_secret: bytes
    dataset_size: int
    layout: tuple[TensorSpec, ...]
    hosts: tuple[Row, ...]
    positions: Mapping[int, Resume]
    deaths: tuple[Row, ...]
    stopping: str

    @property
    def dead(self) -> list[int]:
        """Ranks whose death is on record."""
        return sorted(row["rank"] for row in self.deaths)

    def world(self) -> World:
        """The world as it was, its hosts away. The dead keep their seats; whose ranks are all dead is lost."""
        world = World(_seat(row) for row in self.hosts)
        for rank in self.dead:
            world.remove(rank, "dead")
        for seat in world.hosts.values():
            seat.state = "away" if any(map(world.lives, seat.ranks)) else "lost"
        return world

    def members(self, now: float) -> Iterator[Member]:
        """Its hosts as the join window knew them, as if they had come at ``now``."""
        for seat in map(_seat, self.hosts):
            yield Member(
                host=seat.host,
                link=seat.link,
                name=seat.name,
                address=seat.address,
                devices=seat.devices,
                versions=seat.versions,
                emulate_ms_per_batch=seat.emulate_ms_per_batch,
                joined_at=now,
                ranks=seat.ranks,
            )

    def beyond(self, checkpoint: int) -> Kept:
        """It, where checkpoints up to this number are on disk."""
        positions = {
            round_: replace(resume, checkpoint=max(resume.checkpoint, checkpoint))
            for round_, resume in self.positions.items()
        }
        return replace(self, positions=positions)


def read_kept(rows: Mapping[int, Mapping[str, Any]], deaths: Iterable[Row] = ()) -> Kept | None:
    """From the states by slot and the deaths on record; none when no round was committed. Raises ``ValueError`` naming
    what is wrong."""
    states = [dict(rows[slot]) for slot in range(BASE) if slot in rows]
    if BASE not in rows or not states:
        return None
    base, newest = rows[BASE], max(states, key=lambda state: int(state["round"]))
    try:
        layout = tuple(TensorSpec(**spec) for spec in base["layout"])
        kept = Kept(
            run_salt=bytes.fromhex(base["run_salt"]),
            run_secret=bytes.fromhex(base["run_secret"]),
            dataset_size=int(base["dataset_size"]),
            layout=layout,
            hosts=tuple(base["hosts"]),
            positions={int(state["round"]): _position(state, layout) for state in states},
            deaths=tuple(deaths),
            stopping=str(newest["stopping"]),
        )
        kept.world()
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"what the controller kept of the run cannot be read: {error!r}") from error
    return kept


def _position(state: Row, layout: tuple[TensorSpec, ...]) -> Resume:
    place = f"round {state['round']}, after which its controller was lost"
    return replace(read_resume(state), layout=layout, place=place)


def _seat(row: Row) -> HostSeat:
    return HostSeat(
        host=row["host"],
        name=row["name"],
        address=row["address"],
        link=-1 - row["host"],  # none yet; links count from 1
        ranks=tuple(row["ranks"]),
        devices=tuple(Device(**device) for device in row["devices"]),
        versions=Versions(**row["versions"]),
        emulate_ms_per_batch=row["emulate_ms_per_batch"],
    )


class ClosedWindow(JoinWindow):
    """The join window of a world that formed under another controller."""

    def __init__(self, config: RunConfig, now: float, run_id: int, kept: Kept) -> None:
        super().__init__(config, now, run_id=run_id)
        self.closed = True
        self.members = {member.host: member for member in kept.members(now)}
        self._next_host = max(self.members) + 1
        self._reference = ProbeReport(layout=list(kept.layout), dataset_size=kept.dataset_size)


# ------------------------------------------------------------------------------------------------- waiting for it


@dataclass
class Held:
    """Which rounds came back, and who holds them."""

    ranks: dict[int, dict[int, str]] = field(default_factory=dict)
    """hash of the consensus by rank, by round"""

    def by(self, world: World) -> dict[int, list[int]]:
        """Who holds a round and lives, by round."""
        living = {number: [rank for rank in sorted(ranks) if world.lives(rank)] for number, ranks in self.ranks.items()}
        return {number: ranks for number, ranks in living.items() if ranks}

    def add(self, rank: int, ready: RankReady) -> str | None:
        """Take a rank's word. Answers why it cannot be taken, or none."""
        if ready.held_round is None:
            return f"rank {rank} has no consensus that it could go on from"
        of_round = self.ranks.setdefault(ready.held_round, {})
        of_round[rank] = clipped(ready.held_hash, MAX_NAME)
        if len(set(of_round.values())) > 1:
            return f"ranks hold different values for round {ready.held_round}: {of_round}"
        return None


class Returning(Forming):
    """A forming of those who were there before: every living host, relay and rank, or as many as tolerance allows."""

    def __init__(self, world: World, deadline: float, membership: Membership, kept: Kept) -> None:
        super().__init__(world, deadline, kept.layout)
        self._membership = membership
        self._kept = kept
        self._held = Held()
        self.holds_work = True
        self.first_round = max(kept.positions) + 1
        self.restored = False

    def returned(self, link: int, message: Message, address: str, now: float) -> list[Effect]:
        """A host without a seat spoke: it has come back, or is refused by name. Nothing for any other stranger."""
        if not isinstance(message, Hello) or message.returning is None:
            return []
        seat = self.world.hosts.get(message.returning)
        if seat is None or seat.name != message.host.strip() or seat.state == "lost":
            return self._refuse(link, message, "it is no living host of this run")
        if seat.state != "away":
            return self._refuse(link, message, f"{seat.name} has come back already, from {seat.address}")
        self.world.rebind(seat, link, address)
        seat.state = "forming"
        self._membership.liveness.add(seat.host, now)
        text = f"{seat.name} ({address}) came back with rank(s) {', '.join(map(str, seat.ranks))}"
        return [
            Record("hosts", {"host": seat.host, "state": "admitted", "address": address, "reason": ""}),
            SendHost(link, self._membership.admission(seat.host, seat.ranks, now)),
            _event("host_returned", text),
        ]

    def rank_ready(self, rank: int, ready: RankReady) -> str | None:
        """As before, and it must hold a consensus."""
        return super().rank_ready(rank, ready) or self._held.add(rank, ready)

    @property
    def complete(self) -> bool:
        return not self._awaited_hosts() and all(self.world.ranks[rank].ready for rank in self.world.alive())

    def missing(self) -> str:
        """What the run waits for, as a sentence."""
        hosts = [seat.name for seat in self._awaited_hosts()]
        if hosts:
            return f"The controller was restarted; waiting for {', '.join(hosts)} to come back."
        ranks = [self.world.where(rank) for rank in self.world.alive() if self.world.ranks[rank].ready is None]
        return f"Waiting for {', '.join(ranks)} to go back to the last round." if ranks else "Everybody is back."

    def begin(self, march: March, now: float) -> bool:
        """Everybody is there: put the march where they all can go on. False when there is no such place."""
        positions, held = self._kept.positions, self._held.by(self.world)
        if not self.world.alive():
            self.over(march, "its ranks have left, as they were told, and their work is saved", now)
            return False
        if not positions.keys() & held.keys():
            self.over(march, f"the cohort holds round {sorted(held)}, the controller kept {sorted(positions)}", now)
            return False
        self.brings = max(positions.keys() & held.keys())
        self.root, self.restored = held[self.brings][0], True
        self.deadline = now + march.config.forming_seconds
        # Not a number that somebody knows, nor one that would be written over the position which everybody holds.
        self.first_round = max(*positions, *held) + 1
        self.first_round += self.first_round % BASE == self.brings % BASE
        self._restore(march, positions[self.brings], now)
        for rank in self.world.dead():  # some relays were not here when it died, or have not heard
            march.out += death_notices(Casualty(rank, "before the cohort went on"), self.world)
        return True

    def _restore(self, march: March, resume: Resume, now: float) -> None:
        march.resume, march.checkpoints.number = resume, resume.checkpoint
        march.training.restore(resume, now)
        march.evaluations.restore(resume.evaluated)
        notes = list(restore_pace(march, resume))
        for rank in self.world.ranks:
            if not self.world.lives(rank):
                march.training.rank_died(rank)
        if march.config.outer_optimizer != "none":
            notes.append("The outer optimizer's momentum was the controller's: it begins at zero")
        march.out += [_event("returned_changed", note, "warning") for note in notes]

    def bereaved(self, march: March, reason: str, now: float) -> None:
        """Go on with the others, if they have not begun; where the run does not tolerate that, only to save."""
        if self.restored or not self.world.alive():
            self.over(march, reason, now)
        elif tolerance(len(self.world.dead()), len(self.world.ranks), march.config.max_failure).stop:
            self.last_words = self.last_words or _no_further(reason)

    def expired(self, march: March, now: float) -> None:
        """Time is up: go on without who stayed away. A host that is back has ranks to save with, at least."""
        if self.complete and not self.restored:
            return  # the last one came this very moment
        away = self._awaited_hosts()
        here = [host for host in self.world.alive_by_host() if self._is_back(self.world.hosts[host])]
        late = f"it was not all back within {march.config.return_seconds:g} s. {self.missing()}"
        if self.restored or not away or not here:
            self.over(march, "its initial broadcast did not end in time" if self.restored else late, now)
            return
        missing = sum(map(self.world.lives, (rank for seat in away for rank in seat.ranks)))
        if tolerance(len(self.world.dead()) + missing, len(self.world.ranks), march.config.max_failure).stop:
            self.last_words = self.last_words or _no_further(late)
        self.deadline = now + march.config.return_seconds
        for seat in away:
            march.losses.host(seat, "it did not come back to the restarted controller", now)

    def over(self, march: March, reason: str, now: float) -> None:
        """The run cannot go on by itself; it can be resumed."""
        march.out += march.cycle.abandon(reason)
        march.finish("interrupted", _no_further(reason), now)

    def _awaited_hosts(self) -> list[HostSeat]:
        hosts = self.world.hosts.values()
        return [
            seat
            for seat in hosts
            if seat.state != "lost" and any(map(self.world.lives, seat.ranks)) and not self._is_back(seat)
        ]

    @staticmethod
    def _is_back(seat: HostSeat) -> bool:
        return seat.state != "away" and seat.relay_up

    def _refuse(self, link: int, message: Hello, reason: str) -> list[Effect]:
        name = clipped(message.host.strip(), MAX_NAME)
        text = f"{name} wanted to come back as host {message.returning} and was refused: {reason}"
        return [
            SendHost(link, Reject(code="cannot_return", reason=reason, permanent=False)),
            CloseLink(link, "cannot_return"),
            _event("host_refused", text, "warning"),
        ]


def _no_further(reason: str) -> str:
    return f"The controller was restarted, and the cohort could not go on: {reason}"


def announced(kept: Kept, world: World, seconds: float) -> Iterator[Effect]:
    """What the restarted controller says first."""
    names = ", ".join(seat.name for seat in world.hosts.values() if seat.state == "away")
    text = f"The controller was restarted after round {max(kept.positions)}: {names} may come back within {seconds:g} s"
    yield _event("controller_returned", text, "warning")
    yield Record("runs", {"phase": "forming", "reason": "waiting for its cohort to come back"}, durable=True)


def _event(kind: str, text: str, level: str = "info") -> Record:
    return Record("events", {"kind": kind, "level": level, "text": text, "data": {}}, durable=True)
