"""The worker's half of the protocol as a pure machine: a message comes in, what the loop must do comes out.

    state      message                      to               actions
    idle       StartChunk                   working          SetClock, Train
    working    StartChunk                   working          none: a repeated chunk is dropped, another one waits
    working    (chunk done)                 idle             ChunkDone, or the next waiting chunk
    idle       RequestParams                reducing         Pack
    working    RequestParams                reducing         Pack; the chunk goes on after the round
    reducing   RequestParams, same round    reducing         Resend: the arena is untouched, only the attempt is new;
                                                             as ``excluded``, a declaration of no work
    reducing   StartChunk                   reducing         none: it waits for the round
    reducing   RoundCommitted               idle or working  Adopt
    any        Update                       same             SetClock
    any        Evaluate                     same             Score
    any        RequestLocalState            same             SendLocal (grants for it never come here)
    any        DeclareDead (own rank)       draining         Leave, as fenced
    any        Rewind                       idle             Back: whatever the last round did not hold is void
    any        Shutdown                     draining         Leave
    any        RequestSessionId             same             MakeSessionId
    any        NewSession                   same             JoinSession
    any        AbortSession                 same             DropSession; a sync stays open: it is asked for again
    idle       SyncNow                      reducing         Sync
    working    SyncNow                      reducing         Sync; the chunk goes on after the round
    reducing   SyncNow, same round          reducing         Sync again, in whatever session there is then
    reducing   SyncCommitted                idle or working  AdoptSync
    draining   anything                     draining         none

In the asynchronous modes (``overlap``) a round stops nobody: RequestParams packs between two batches and the chunk goes
on, StartChunk starts at once, and RoundCommitted is adopted between two batches. Whatever was done since the arena was
packed is *ahead* of the round; it counts in the next one.

A rank whose contribution was refused is asked again as ``excluded``. It starts anew from the consensus: what it did
since the last round, whatever came after the arena was packed included, counts nowhere.

In the collective modes (design section 7) only the initial broadcast comes as RequestParams; every later round is a
sync, which changes nothing here before it is committed. There is no way back to a round: a sync is nobody's but the
ranks'.

No clock, no tensors, no I/O. A message that has no row raises ``IllegalMessage``: somebody has a bug, and a
rank that guesses would spoil the consensus.
"""

from __future__ import annotations

from collections import deque
from enum import StrEnum

import msgspec

from wire.mass import gamma_mass, mover_mass
from wire.messages import (
    AbortSession,
    ChunkDone,
    DeclareDead,
    Evaluate,
    Message,
    NewSession,
    RequestLocalState,
    RequestParams,
    RequestSessionId,
    Rewind,
    RoundCommitted,
    Shutdown,
    SnapshotReady,
    StartChunk,
    SyncCommitted,
    SyncNow,
    Update,
    UpdateStaged,
)
from worker.actions import Action as Action
from worker.actions import Adopt as Adopt
from worker.actions import AdoptSync as AdoptSync
from worker.actions import Back as Back
from worker.actions import DropSession as DropSession
from worker.actions import JoinSession as JoinSession
from worker.actions import Leave as Leave
from worker.actions import LookAhead as LookAhead
from worker.actions import MakeSessionId as MakeSessionId
from worker.actions import Pack as Pack
from worker.actions import Resend as Resend
from worker.actions import Score as Score
from worker.actions import SendLocal as SendLocal
from worker.actions import SetClock as SetClock
from worker.actions import Sync as Sync
from worker.actions import Train as Train

REMEMBERED = 64
"""chunks; a plan that is issued again is one of those that the controller has not heard to be done"""


class State(StrEnum):
    """What the rank is about. Equal to the names of ``worker.progress`` where both know a state."""

    IDLE = "idle"
    WORKING = "working"
    REDUCING = "reducing"
    DRAINING = "draining"


class IllegalMessage(Exception):
    """A message that the protocol does not allow in this state; names message, state and reason."""

    def __init__(self, message: Message, state: State, because: str) -> None:
        super().__init__(f"{type(message).__name__} while {state}: {because}")


class Control:
    """State of one rank. Steps are optimizer steps; ``steps_since_round`` is the realized work of the open
    window."""

    def __init__(self, rank: int, gamma: float, *, overlap: bool = False, collective: bool = False) -> None:
        self.rank = rank
        self.gamma = gamma
        self.overlap = overlap
        self._collective = collective
        self.state = State.IDLE
        self.steps = 0
        self.steps_since_round = 0
        self.chunk: StartChunk | None = None
        self._waiting: deque[StartChunk] = deque()
        self._done: deque[tuple[int, int, int]] = deque(maxlen=REMEMBERED)
        """the newest chunks that are done: no range is dealt to one rank twice, but its plan may come again"""
        self._snapshot: SnapshotReady | None = None
        self._packed_steps = 0
        self._excluded = False
        self._sync: SyncNow | None = None
        """the open round's, where ranks sum among themselves: its last attempt"""
        self._last_round: int | None = None
        self._brings: int | None = None
        """whose consensus the initial broadcast brings"""
        self._held: int | None = None
        """the round whose consensus was adopted last; the initial broadcast's number where that was none's"""
        self._held_before: int | None = None
        self._looked_at: tuple[int, int] | None = None
        """the attempt of the last ``LookAhead``"""

    def receive(self, message: Message) -> list[Action]:  # noqa: C901 one match, a line a case
        """What this message asks for, in order. Raises ``IllegalMessage``."""
        if self.state is State.DRAINING:
            return []
        match message:
            case StartChunk():
                return self._start(message)
            case RequestParams():
                return self._request(message)
            case UpdateStaged() | RoundCommitted():
                return self._staged(message) if isinstance(message, UpdateStaged) else self._commit(message)
            case Update():
                return [SetClock(message.global_step)]
            case Evaluate():
                return [Score(message.epoch)]
            case RequestLocalState():
                return [SendLocal(message.checkpoint, message.consensus)]
            case RequestSessionId() | NewSession() | AbortSession() if self._collective:
                return _session(message)
            case SyncNow() | SyncCommitted() if self._collective:
                return self._sync_now(message) if isinstance(message, SyncNow) else self._commit_sync(message)
            case Rewind():
                return self._rewind(message)
            case Shutdown():
                return self._leave(message.reason, fenced=False)
            case DeclareDead():
                return self._leave(message.reason, fenced=True) if message.rank == self.rank else []
        raise IllegalMessage(message, self.state, "ranks do not take it")

    def step_done(self) -> None:
        """An optimizer step was made."""
        self.steps += 1
        self.steps_since_round += 1

    def not_adopted(self) -> None:
        """The consensus of the last ``Adopt`` went with its controller: the one before is what is held."""
        self._held = self._held_before

    def chunk_done(self) -> tuple[ChunkDone, list[Action]]:
        """Every sample of the chunk was trained on: the report, and what comes next."""
        if self.state is not State.WORKING or self.chunk is None:
            raise AssertionError(f"no chunk is in work while {self.state}")
        done = ChunkDone(epoch=self.chunk.epoch, offset=self.chunk.offset, size=self.chunk.size)
        self._done.append(_range(self.chunk))
        self.chunk = None
        self.state = State.IDLE if self._snapshot is None else State.REDUCING
        return done, self._begin(self._waiting.popleft()) if self._waiting else []

    def _start(self, chunk: StartChunk) -> list[Action]:
        known = {*self._done, *(_range(queued) for queued in self._waiting)}
        if self.chunk is not None:
            known.add(_range(self.chunk))
        if _range(chunk) in known:
            return []  # plans may be issued again; training a range twice would count its samples twice
        if self.chunk is not None or (self.state is State.REDUCING and not self.overlap):
            self._waiting.append(chunk)
            return []
        return self._begin(chunk)

    def _begin(self, chunk: StartChunk) -> list[Action]:
        self.chunk = chunk
        self.state = State.WORKING
        return [SetClock(chunk.global_step), Train(chunk)]

    def _request(self, request: RequestParams) -> list[Action]:
        if self._last_round is not None and request.round <= self._last_round:
            raise IllegalMessage(request, self.state, f"round {self._last_round} is closed already")
        if self._sync is not None:
            raise IllegalMessage(request, self.state, f"sync {self._sync.round} is still open")
        if self._snapshot is not None:
            return self._retry(request, self._snapshot)
        if self.chunk is None or not self.overlap:
            self.state = State.REDUCING
        self._packed_steps = self.steps_since_round
        self._snapshot = self._initial(request) if request.initial else self._worked(request)
        return [Pack(self._snapshot)]

    def _retry(self, request: RequestParams, packed: SnapshotReady) -> list[Action]:
        if request.round != packed.round:
            raise IllegalMessage(request, self.state, f"round {packed.round} is still open")
        if request.attempt <= packed.attempt:
            return []
        self._excluded |= request.excluded
        worked = {"steps": 0, "mass": 0.0, "mover_mass": 0.0} if self._excluded else {}
        self._snapshot = msgspec.structs.replace(packed, attempt=request.attempt, **worked)
        return [Resend(self._snapshot)]

    def _initial(self, request: RequestParams) -> SnapshotReady:
        self._brings = request.brings
        root = self.rank == request.root
        mass = 1.0 if root else 0.0
        return SnapshotReady(request.round, request.attempt, steps=int(root), mass=mass, mover_mass=mass)

    def _worked(self, request: RequestParams) -> SnapshotReady:
        steps = self.steps_since_round
        return SnapshotReady(
            round=request.round,
            attempt=request.attempt,
            steps=steps,
            mass=gamma_mass(steps, self.gamma),
            mover_mass=mover_mass(steps),
        )

    def _staged(self, staged: UpdateStaged) -> list[Action]:
        """Only who has nothing else to do looks ahead."""
        number, packed = (staged.round, staged.attempt), self._snapshot
        if self.state is not State.REDUCING or packed is None or number != (packed.round, packed.attempt):
            return []
        fresh, self._looked_at = number != self._looked_at, number
        return [LookAhead(staged.consensus, staged.stop, fresh)]

    def _commit(self, commit: RoundCommitted) -> list[Action]:
        packed = self._snapshot
        if packed is None or (commit.round, commit.attempt) != (packed.round, packed.attempt):
            if self._last_round is not None and commit.round <= self._last_round:
                return []
            raise IllegalMessage(commit, self.state, "this rank has no contribution in that attempt")
        restart, self._excluded = self._excluded, False
        # What the round accepted, and nothing that came after it; of a rank that starts anew, all is void.
        self.steps_since_round -= self.steps_since_round if restart else self._packed_steps
        self._snapshot = None
        self._last_round = commit.round
        self._held_before = self._held
        self._held, self._brings = commit.round if self._brings is None else self._brings, None
        adopt = Adopt(
            commit.round,
            params=commit.realized or restart,
            buffers=(commit.realized and commit.buffers_realized) or restart,
            ahead=self.steps_since_round > 0,
            restart=restart,
            consensus=commit.consensus,
            looked=(commit.round, commit.attempt) == self._looked_at,
        )
        return [adopt, *self._resume()]

    def _sync_now(self, order: SyncNow) -> list[Action]:
        if self._held is None:
            raise IllegalMessage(order, self.state, "the initial broadcast is not over")
        if self._last_round is not None and order.round <= self._last_round:
            raise IllegalMessage(order, self.state, f"round {self._last_round} is closed already")
        opened = self._sync
        if opened is None:
            self._packed_steps = self.steps_since_round
        elif order.round != opened.round:
            raise IllegalMessage(order, self.state, f"round {opened.round} is still open")
        elif order.attempt <= opened.attempt:
            return []
        self.state = State.REDUCING
        self._excluded |= order.excluded
        self._sync = order
        steps = 0 if self._excluded else self._packed_steps
        return [Sync(order.round, order.attempt, order.generation, steps, first=opened is None)]

    def _commit_sync(self, commit: SyncCommitted) -> list[Action]:
        opened = self._sync
        if opened is None or (commit.round, commit.attempt) != (opened.round, opened.attempt):
            if self._last_round is not None and commit.round <= self._last_round:
                return []
            raise IllegalMessage(commit, self.state, "this rank has no sum of that attempt")
        restart, self._excluded = self._excluded, False
        self.steps_since_round -= self._packed_steps
        self._sync = None
        self._last_round = self._held = commit.round
        return [AdoptSync(commit.round, restart), *self._resume()]

    def _resume(self) -> list[Action]:
        if self.chunk is not None:
            self.state = State.WORKING
            return []
        self.state = State.IDLE
        return self._begin(self._waiting.popleft()) if self._waiting else []

    def _rewind(self, message: Rewind) -> list[Action]:
        """The cohort starts from the last round again, as it did from the first: with an initial broadcast. Another
        controller may be lost before that: then it is the same round still."""
        if self._held is None or self._collective:
            raise IllegalMessage(message, self.state, "there is no round to go back to")
        back = Back(self._held, restart=self._excluded)
        self.state = State.IDLE
        self.chunk = self._snapshot = self._last_round = self._brings = None
        self._excluded, self._looked_at = False, None
        self._waiting.clear()
        self._done.clear()  # what was done since is dealt again
        self.steps_since_round = self._packed_steps = 0
        return [back]

    def _leave(self, reason: str, *, fenced: bool) -> list[Action]:
        self.state = State.DRAINING
        self.chunk = None
        self._waiting.clear()
        return [Leave(reason, fenced)]


def _session(message: RequestSessionId | NewSession | AbortSession) -> list[Action]:
    match message:
        case RequestSessionId():
            return [MakeSessionId(message.generation)]
        case NewSession():
            return [JoinSession(message)]
    return [DropSession(message.generation)]


def _range(chunk: StartChunk) -> tuple[int, int, int]:
    return chunk.epoch, chunk.offset, chunk.size
