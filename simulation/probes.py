"""Which rare paths an ordeal really went: named sites, counted, so that a campaign can be asked what it reached.

A simulator that never lets a rank die while a sum is open proves nothing about it. ``NAMES`` is the list that the fixed
seeds must hit; a name that nobody hits any more means that the worlds got too tame, or the path is gone.
"""

from __future__ import annotations

from collections import Counter

from backend.core.vocabulary import (
    Effect,
    End,
    Event,
    HostSaid,
    Lagged,
    LinkLost,
    OpenRound,
    Operator,
    RankSaid,
    Record,
    Refused,
    RelayLost,
    RoundBroken,
    RoundFinished,
    SendRank,
    StrangerRefused,
    Tick,
)
from simulation import session_probes
from simulation.lives import Return
from simulation.ordeal import Ordeal
from simulation.session_probes import SessionProbes
from simulation.watch import Watcher
from wire.messages import (
    ChunkDone,
    Evaluate,
    Leaving,
    RankExited,
    RelayExited,
    RequestParams,
    StartChunk,
    SyncAck,
)

EVENTS = {
    "plan_issued_again": "plan issued again",
    "checkpoint_failed": "checkpoint refused by the disk",
    "state_missing": "saved without a rank's state",
    "save_requested": "operator save",
    "evaluation_failed": "evaluation failed",
    "non_finite": "contribution not finite",
    "rank_restarted": "rank starts anew",
    "round_failed": "sum failed with nobody to blame",
    "host_left": "member left the window",
    "host_refused": "host refused at the door",
    "host_turned_away": "member turned away",
    "window_extend": "window extended",
    "window_change": "quorum changed",
    "stop_requested": "operator stop",
    "controller_lagged": "controller lagged",
    "controller_returned": "controller comes back",
    "host_returned": "host comes back",
    "session_live": "session live",
    "session_failed": "session failed",
}
ENDS = {
    "MaxFailureExceeded": "end: too many deaths",
    "AllRanksLost": "end: last rank dies",
    "SingleSurvivor": "end: one rank is left",
    "RendezvousExhausted": "end: nobody is left to make a session",
    "TrainStall": "end: nobody progresses",
    "ReduceStall": "end: stall ceiling of a round",
    "RepeatedFailure": "end: the same failure again and again",
    "Aborted": "end: aborted",
    "Stopped": "end: stopped",
    "The cohort could not": "end: cannot form",
    "The cohort did not": "end: forming in vain",
    "Only": "end: quorum never met",
    "The quorum was met": "end: never started",
    "NonFinite": "end: not finite",
    "Not one sample": "end: nothing but values that are not finite",
    "controller stopped": "end: controller dies",
    "The controller was restarted": "end: cohort cannot go on",
    "The epoch": "end: trained",
    "All ": "end: all epochs trained",
}
REFUSALS = {"already_ending": "stop after stop", "run_over": "abort after finish"}
DEATHS = {
    "idle": "death between windows",
    "pending": "death while summing",
    "committed": "death between commit and adoption",
}
NAMES = frozenset(
    {
        *EVENTS.values(),
        *ENDS.values(),
        *DEATHS.values(),
        *session_probes.NAMES,
        *("death in initial broadcast", "death while forming", "death while ending", "deaths at the same moment"),
        *("death of a rank that does not progress", "death by silence", "death by a lost relay link"),
        "death by a silent relay",
        *(
            "death by values that are not finite",
            "death by a lost join link",
            "death by a refused contribution",
            "death of a process",
        ),
        *("relay exits", "host leaves", "zombie refused", "zombie acknowledges", "zombie's chunk"),
        *("clean exit after shutdown", "exit of a lost host's rank", "stale sum ignored"),
        *("attempt retried twice", "operator stop during round", "operator stop while forming"),
        *("operator abort during round", "abort after finish", "stop after stop", "late comer refused", "stranger"),
        *(
            "lag, round idle",
            "lag, round pending",
            "lag, round committed",
            "lag while ending",
            "round without work",
            "checkpoint late for the end",
        ),
        *("crash while a round is open", "crash while ending", "committed round counts without adoption"),
        "saved by the part that came back",
        *("cohort goes on", "goes on from a round that some missed", "goes on from the older position"),
        *("death of a host that stays away", "death while a cohort comes back", "crash while a cohort comes back"),
        "operator stop while a cohort comes back",
        "end: a batch that kills",
        *("evaluation moves to another rank", "returned range dealt again", "end worsened", "leaving in vain"),
    }
)
NAMES -= {
    "evaluation failed",
    "end: nothing but values that are not finite",
}  # no played job fails its evaluation; too rare


class Probes(Watcher):
    """Counts what one ordeal reached."""

    def __init__(self, play: Ordeal) -> None:
        self.play = play
        self.hits: Counter[str] = Counter()
        self._sessions = SessionProbes(play, self.hit)
        self._event: Event | None = None
        self._cycle = "idle"
        self._phase = "waiting"
        self._step = ""
        self._deaths = 0
        self._waiting: set[int] = set()
        self._now_acked: set[int] = set()
        self._furthest = (-1, -1)
        self._scored: set[int] = set()

    def hit(self, name: str) -> None:
        """A site was reached."""
        self.hits[name] += 1

    def event(self, now: float, event: Event) -> None:
        self._event, self._deaths = event, 0
        self._sessions.event(event)
        cohort = self.play.cohort
        march = cohort.march
        self._phase = cohort.phase
        if march is None or cohort.ended:
            return
        self._cycle, self._step = march.cycle.phase, march.ending.step if march.ending else ""
        self._waiting = march.cycle.open.waiting.copy() if self._cycle == "committed" and march.cycle.open else set()
        self._now_acked = {event.rank} if isinstance(event, RankSaid) else set()
        if isinstance(event, HostSaid):
            self._host_said(event.message)
            return
        match event:
            case RankSaid(rank=rank, message=message) if not march.world.lives(rank):
                if march.world.ranks[rank].state == "dead":
                    self.hit("zombie refused")
                    self._zombie(message)
            case RoundFinished() | RoundBroken():
                self._stale(event)
            case Operator(act="stop" | "abort" as act):
                self._operator(act)
            case StrangerRefused():
                self.hit("stranger")
            case Lagged():
                self.hit("lag while ending" if self._step else f"lag, round {self._cycle}")

    def _host_said(self, message: object) -> None:
        if isinstance(message, RankExited):
            self._exit(message.rank)
        elif isinstance(message, RelayExited):
            self.hit("relay exits")
        elif isinstance(message, Leaving):
            self.hit("host leaves")

    def _operator(self, act: str) -> None:
        if self._phase == "forming":
            coming_back = isinstance(self.play, Return) and act == "stop"
            self.hit(f"operator {act} while a cohort comes back" if coming_back else f"operator {act} while forming")
        elif self._cycle != "idle":
            self.hit(f"operator {act} during round")

    def _zombie(self, message: object) -> None:
        if isinstance(message, SyncAck):
            self.hit("zombie acknowledges")
        elif isinstance(message, ChunkDone):
            self.hit("zombie's chunk")

    def _exit(self, rank: int) -> None:
        march = self.play.cohort.march
        assert march is not None
        if march.leaving and march.world.lives(rank):
            self.hit("clean exit after shutdown")
        elif march.world.hosts[march.world.ranks[rank].host].state == "lost":
            self.hit("exit of a lost host's rank")

    def _stale(self, event: RoundFinished | RoundBroken) -> None:
        march = self.play.cohort.march
        opened = march.cycle.open if march else None
        if opened is None or (opened.round, opened.attempt) != (event.round, event.attempt):
            self.hit("stale sum ignored" if isinstance(event, RoundFinished) else "stale failure ignored")
        elif isinstance(event, RoundFinished) and not event.realized:
            self.hit("round without work")

    def effect(self, now: float, effect: Effect) -> None:
        self._sessions.effect(effect)
        match effect:
            case Record(table="events", row=row):
                self._noted(row["kind"])
            case Record(table="rounds"):
                march = self.play.cohort.march
                if march is not None and any(map(march.world.lives, self._waiting - self._now_acked)):
                    self.hit("committed round counts without adoption")
            case SendRank(rank=rank, message=message):
                self._told(rank, message)
            case Record(table="deaths", row=row):
                self._death(row["reason"])
            case OpenRound(attempt=attempt) if attempt >= 2:
                self.hit("attempt retried twice")
            case Refused(code=code) if code in REFUSALS:
                self.hit(REFUSALS[code])
            case End(reason=reason):
                self._end(reason)

    def _told(self, rank: int, message: object) -> None:
        match message:
            case StartChunk(epoch=epoch, offset=offset):
                self._dealt(epoch, offset)
            case RequestParams(initial=True, brings=int() as number):
                self._goes_on(rank, number)
            case Evaluate(epoch=epoch):
                self.hit("evaluation moves to another rank" if epoch in self._scored else "evaluation")
                self._scored.add(epoch)

    def _noted(self, kind: str) -> None:
        if kind in EVENTS:
            self.hit(EVENTS[kind])
        if kind == "host_refused" and self.play.cohort.march is not None:
            self.hit("late comer refused")

    def _goes_on(self, rank: int, number: int) -> None:
        self.hit("cohort goes on")
        if self.play.ranks[rank].held_round != number:
            self.hit("goes on from a round that some missed")
        if isinstance(self.play, Return) and number < max(self.play.kept.positions):
            self.hit("goes on from the older position")

    def _dealt(self, epoch: int, offset: int) -> None:
        if (epoch, offset) < self._furthest and not (isinstance(self._event, Tick) and self._cycle == "idle"):
            self.hit("returned range dealt again")
        self._furthest = max(self._furthest, (epoch, offset))

    def _death(self, reason: str) -> None:
        self._deaths += 1
        if self._deaths == 2:
            self.hit("deaths at the same moment")
        if self._phase == "forming":
            self.hit("death while forming" if self._cycle == "idle" else "death in initial broadcast")
        elif self._step:
            self.hit("death while ending")
        else:
            self.hit(DEATHS[self._cycle])
        if self._phase == "forming" and isinstance(self.play, Return):
            self.hit("death while a cohort comes back")
        self._death_cause(reason)

    def _death_cause(self, reason: str) -> None:
        match self._event:
            case _ if "did not come back" in reason:
                self.hit("death of a host that stays away")
            case HostSaid(message=RankExited()):
                self.hit("death of a process")
            case LinkLost():
                self.hit("death by a lost join link")
            case RelayLost():
                self.hit("death by a lost relay link")
            case RoundBroken(non_finite=value):
                self.hit("death by a refused contribution" if value is None else "death by values that are not finite")
            case _ if "TrainStall" in reason:
                self.hit("death of a rank that does not progress")
            case _ if "no sign of life" in reason:
                self.hit("death by silence")
            case _ if "its relay was not heard" in reason:
                self.hit("death by a silent relay")

    def _end(self, reason: str) -> None:
        self.hit(next((name for start, name in ENDS.items() if reason.startswith(start)), f"end: {reason}"))
        march = self.play.cohort.march
        if march is not None and self._step == "leaving" and march.world.alive():
            self.hit("leaving in vain")
        if "over the same batch" in reason:
            self.hit("end: a batch that kills")
        if ", but " in reason:
            self.hit("end worsened")
        if reason.startswith("The controller was restarted") and self._step:
            self.hit("saved by the part that came back")
        if "not written in time" in reason:
            self.hit("checkpoint late for the end")

    def finish(self) -> Counter[str]:
        """The play is over; what it reached."""
        play = self.play
        if play.crashed:
            self.hit(ENDS["controller stopped"])
            if self._phase == "forming" and isinstance(play, Return):
                self.hit("crash while a cohort comes back")
            if self._cycle != "idle":
                self.hit("crash while a round is open")
            if self._step:
                self.hit("crash while ending")
        return self.hits
