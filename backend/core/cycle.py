"""The reduce cycle: one round at a time, idle or pending, from the request for parameters to the last acknowledgement.

    idle -> pending      open(): every living rank is asked for its parameters
    pending -> pending   attempt aborted: a contributor died or was refused before the sum was complete, or that failed
                         with nobody to blame; retry with who is left
    pending -> committed the reduce plane summed exactly the expected contributions
    committed -> idle    every living rank adopted the consensus (behaviour F4 to F7, F11; design section 6)

The cycle counts who contributes and who acknowledged; it adds no tensors and decides no allotment. How a round reaches
the ranks, and how their sum is made, is a plane's business: ``Streams`` here, ``collective.Collectives`` elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from backend.core.vocabulary import AbortRound, Effect, OpenRound, RoundFinished, SendRank, SendRelay
from wire.messages import Message, RequestParams, RoundAborted, RoundCommitted, SyncAck

INITIAL_ROUND = -1
"""The number of the broadcast that makes every rank start from rank 0's parameters; rounds count from 0."""


@dataclass(slots=True)
class OpenedRound:
    """The round that is open."""

    round: int
    attempt: int
    opened_at: float
    hosts: dict[int, tuple[int, ...]]
    """expected contributions of this attempt, ranks by host"""
    finished: RoundFinished | None = None
    acks: dict[int, SyncAck] = field(default_factory=dict)
    failures: int = 0
    """attempts that failed with nobody to blame"""
    grace: float = 0.0
    """seconds that the controller was away meanwhile"""
    regrouped: bool = False
    """its plane had to be set up anew first, which took its time"""
    ranks: frozenset[int] = field(init=False)
    """who contributes to this attempt"""
    waiting: set[int] = field(init=False)
    """contributors that have not acknowledged"""
    excluded: set[int] = field(default_factory=set)
    """contributors whose work was refused: they declare none, and start anew from the consensus"""

    def __post_init__(self) -> None:
        self.expect(self.hosts)

    def expect(self, hosts: dict[int, tuple[int, ...]]) -> None:
        """These contribute; nobody has acknowledged yet."""
        self.hosts = hosts
        self.ranks = frozenset(rank for ranks in hosts.values() for rank in ranks)
        self.waiting = set(self.ranks)


class Plane(Protocol):
    """How ranks make the sum of a round. Effects come back in order; what ranks say of it is ``heard``."""

    collective: bool
    """ranks sum among themselves: two at least are needed, and the controller holds no consensus"""

    def prepare(self, now: float) -> bool:
        """Before the first round: whether everything it needs is there. Asked again after every event."""
        ...

    def request(self, opened: OpenedRound, now: float) -> list[Effect]:
        """Ask the contributors of this attempt for their values."""
        ...

    def commit(self, opened: OpenedRound) -> list[Effect]:
        """The attempt holds exactly the expected contributions: have everybody adopt it."""
        ...

    def retract(self, opened: OpenedRound, hosts: Iterable[int], reason: str) -> list[Effect]:
        """Drop the attempt; ``hosts`` are asked again."""
        ...

    def bereaved(self, dead: set[int], now: float) -> list[Effect]:
        """These ranks are out."""
        ...

    def heard(self, rank: int, message: Message, now: float) -> bool:
        """A rank said something of the plane's; False when it has no place there."""
        ...

    def deadline(self) -> float | None: ...

    def watch(self, now: float) -> None:
        """Act on what is late."""
        ...

    def lagged(self, seconds: float) -> None: ...

    def waits(self) -> str:
        """What the plane itself waits for, as a sentence; empty for nothing."""
        ...

    def view(self) -> dict[str, Any] | None:
        """For the page, JSON-ready; none where there is nothing to show."""
        ...

    def check(self) -> None:
        """Assert what must always hold."""
        ...


class Streams:
    """The CPU reduce: contributions stream to the controller, which divides and streams the update back (section 6)."""

    collective = False

    def __init__(self, params_elements: int, buffers_elements: int, encoding: int = 0) -> None:
        self.params_elements = params_elements
        self.buffers_elements = buffers_elements
        self.encoding = encoding
        """a ``wire.frames.Encoding``: how parameters are streamed, but for the initial broadcast"""
        self.start: tuple[int, int | None] = (0, None)
        """whose values the initial broadcast brings, and the round that they are the consensus of"""

    def prepare(self, now: float) -> bool:
        return True

    def request(self, opened: OpenedRound, now: float) -> list[Effect]:
        initial = opened.round == INITIAL_ROUND
        encoding = 0 if initial else self.encoding
        effects: list[Effect] = [
            OpenRound(
                round=opened.round,
                attempt=opened.attempt,
                hosts=dict(opened.hosts),
                initial=initial,
                params_elements=self.params_elements,
                buffers_elements=self.buffers_elements,
                encoding=encoding,
            )
        ]
        for rank in sorted(opened.ranks):
            start = self.start if initial else ()
            excluded = rank in opened.excluded
            request = RequestParams(opened.round, opened.attempt, initial, encoding, excluded, *start)
            effects.append(SendRank(rank, request))
        return effects

    def commit(self, opened: OpenedRound) -> list[Effect]:
        event = opened.finished
        assert event is not None
        commit = RoundCommitted(
            round=event.round,
            attempt=event.attempt,
            realized=event.realized,
            buffers_realized=event.buffers_realized,
        )
        return [SendRelay(host, commit) for host in opened.hosts]

    def retract(self, opened: OpenedRound, hosts: Iterable[int], reason: str) -> list[Effect]:
        aborted = RoundAborted(round=opened.round, attempt=opened.attempt, reason=reason)
        dropped: list[Effect] = [AbortRound(opened.round, opened.attempt, reason)]
        return [*dropped, *(SendRelay(host, aborted) for host in hosts)]

    def bereaved(self, dead: set[int], now: float) -> list[Effect]:
        return []

    def heard(self, rank: int, message: Message, now: float) -> bool:
        return False

    def deadline(self) -> float | None:
        return None

    def watch(self, now: float) -> None:
        return

    def lagged(self, seconds: float) -> None:
        return

    def waits(self) -> str:
        return ""

    def view(self) -> None:
        return None

    def check(self) -> None:
        return


class Cycle:
    """At most one round is open; its contributors are exactly the ranks that lived when the attempt was opened."""

    def __init__(self, streams: Streams, plane: Plane | None = None, *, first_round: int = 0) -> None:
        """``first_round`` follows the initial one, which always goes over ``streams``; the others go over ``plane``, if
        that is another. A resumed run goes on counting."""
        self.streams = streams
        self.plane: Plane = plane or streams
        self.first_round = first_round
        self.next_round = INITIAL_ROUND
        self.open: OpenedRound | None = None

    @property
    def phase(self) -> str:
        """idle, pending (summing) or committed (adopting)."""
        if self.open is None:
            return "idle"
        return "pending" if self.open.finished is None else "committed"

    @property
    def collects(self) -> bool:
        """Whether the open round is summed by the ranks themselves."""
        return self.open is not None and self._over().collective

    def start(self, hosts: dict[int, tuple[int, ...]], now: float) -> list[Effect]:
        """Open the next round among these ranks."""
        assert self.open is None, f"round {self.open and self.open.round} is still open"
        self.open = OpenedRound(round=self.next_round, attempt=0, opened_at=now, hosts=hosts)
        self.next_round = self.first_round if self.next_round == INITIAL_ROUND else self.next_round + 1
        return self._over().request(self.open, now)

    def finished(self, event: RoundFinished) -> list[Effect]:
        """The sum is complete: commit it, so that relays and ranks adopt what was streamed. A stale attempt changes
        nothing."""
        current = self.open
        if current is None or current.finished or (event.round, event.attempt) != (current.round, current.attempt):
            return []
        assert set(event.steps) == current.ranks, f"accepted {sorted(event.steps)}, expected {sorted(current.ranks)}"
        current.finished = event
        return self._over().commit(current)

    def overclaim(self, event: RoundFinished) -> tuple[int, str] | None:
        """A rank whose work was refused and which contributed all the same, and why that cannot be."""
        current = self.open
        if current is None or (event.round, event.attempt) != (current.round, current.attempt):
            return None
        for rank in sorted(current.excluded & event.steps.keys()):
            if event.steps[rank]:
                return rank, f"it holds {event.steps[rank]} batches of rank {rank}, which is left out of this round"
        return None

    def claims(self, event: RoundFinished) -> dict[int, int]:
        """The contributions that say what their rank did: all but those of ranks that are left out of the round, and
        none of an attempt that is stale."""
        current = self.open
        if current is None or current.finished or (event.round, event.attempt) != (current.round, current.attempt):
            return {}
        return {rank: steps for rank, steps in event.steps.items() if rank not in current.excluded}

    def retry(self, hosts: dict[int, tuple[int, ...]], reason: str, now: float) -> list[Effect]:
        """Drop the attempt in which somebody died or was refused and ask the others again; what they hold is
        untouched."""
        current = self.open
        assert current is not None and current.finished is None, "only an unfinished attempt can be retried"
        effects = self._over().retract(current, hosts, reason)
        current.expect(hosts)
        current.attempt += 1
        return effects + self._over().request(current, now)

    def abandon(self, reason: str) -> list[Effect]:
        """Nobody is left to finish the round, or the run ends: drop it. It does not count as closed."""
        current = self.open
        if current is None or current.finished:
            self.open = None
            return []
        effects = self._over().retract(current, (), reason)
        self.open = None
        if current.round != INITIAL_ROUND:
            self.next_round = current.round  # no other will be opened, so none can be taken for this one
        return effects

    def acknowledge(self, rank: int, ack: SyncAck) -> bool:
        """A rank adopted the consensus; whether that acknowledgement counts (a late one of another round does not)."""
        current = self.open
        if current is None or current.finished is None or ack.round != current.round:
            return False
        current.acks[rank] = ack
        current.waiting.discard(rank)
        return True

    def settled(self, lives: Callable[[int], bool]) -> bool:
        """Whether every living contributor has adopted the consensus. Looks at those that have not, up to the first
        that lives: asked after every event, it must not cost more in a larger world."""
        current = self.open
        if current is None or current.finished is None:
            return False
        return not any(map(lives, current.waiting))

    def close(self) -> OpenedRound:
        """Take the settled round out; the cycle is idle again."""
        current = self.open
        assert current is not None and current.finished is not None, "only a committed round can be closed"
        self.open = None
        return current

    def check(self, alive: Iterable[int]) -> None:
        """Only contributors acknowledge; an attempt that still sums expects living ranks only."""
        current = self.open
        if current is None:
            return
        assert set(current.acks) <= current.ranks, "an acknowledgement from a rank outside the round"
        assert current.waiting == current.ranks - set(current.acks), "who is waited for is not who did not acknowledge"
        if current.finished is None:
            assert not current.acks, "acknowledged before the commit"
            assert current.ranks <= set(alive), f"round {current.round} waits for the dead {current.ranks - set(alive)}"
        else:
            assert set(current.finished.steps) == current.ranks, (
                "the divisor is not built from the accepted contributions"
            )

    def _over(self) -> Plane:
        """The plane that the open round goes over."""
        assert self.open is not None
        return self.streams if self.open.round == INITIAL_ROUND else self.plane
