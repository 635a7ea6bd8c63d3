"""Events in, effects out: all that the pure core says and hears. Frozen, compared with ``==`` in tests.

``link`` is the runtime's opaque number of one join websocket; ``host`` is the core's number of an admitted host (also
``Accept.host_id``); ``rank`` is a rank of the cohort. Identity comes from the session, never from a message.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from wire.messages import Message

# ------------------------------------------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class HostSaid:
    """A message arrived on an authenticated join link. ``address`` is the peer's, as the controller sees it."""

    link: int
    message: Message
    address: str = ""


@dataclass(frozen=True, slots=True)
class LinkLost:
    """A join link ended, or a write to it failed. An unsent Accept is rolled back; an admitted host is lost."""

    link: int
    reason: str


@dataclass(frozen=True, slots=True)
class RelayAttached:
    """Both of a host's relay links (control and data) are up; ``via`` carries its data, when a relay-only host does."""

    host: int
    via: int | None = None


@dataclass(frozen=True, slots=True)
class RelayLost:
    """One of a host's relay links ended, or that of the relay-only host that carried its data."""

    host: int
    reason: str


@dataclass(frozen=True, slots=True)
class RelayHeard:
    """A host's relay showed on its control link that it runs; what its ranks say there shows it too."""

    host: int


@dataclass(frozen=True, slots=True)
class RankSaid:
    """A message from a rank, over its relay's control link; the runtime checked that the relay owns the rank."""

    rank: int
    message: Message


@dataclass(frozen=True, slots=True)
class RoundFinished:
    """The reduce plane closed an attempt: every expected contribution is summed, or all of them declared no work."""

    round: int
    attempt: int
    realized: bool
    buffers_realized: bool
    steps: dict[int, int]
    """accepted steps by rank: exactly the contributions in the divisor"""
    mass: float
    bytes_up: int
    bytes_down: int
    seconds: float
    """from the opening to the end of the last sum"""
    declared: float = 0.0
    """seconds after the opening at which the last contribution was declared"""
    arrived: float = 0.0
    """and at which the last element of one was here; where nothing is streamed, as it was declared"""


@dataclass(frozen=True, slots=True)
class NonFiniteValue:
    """The first value of a contribution that is not finite."""

    rank: int | None
    """whose it is; none when only the host is known"""
    element: int
    """counted from the arena's start: parameters, then buffers"""
    value: str
    """nan, inf or -inf"""


@dataclass(frozen=True, slots=True)
class RoundBroken:
    """The reduce plane refused an attempt (schema mismatch, non-finite contribution, short stream ...)."""

    round: int
    attempt: int
    reason: str
    host: int | None = None
    """the host at fault, when one is"""
    non_finite: NonFiniteValue | None = None
    """the value that the attempt was refused for, when it was that"""


@dataclass(frozen=True, slots=True)
class CheckpointWritten:
    """The runtime finished writing a checkpoint, or could not."""

    checkpoint: int
    path: str
    bytes: int
    sha256: str
    """of the model file"""
    error: str = ""
    pruned: tuple[int, ...] = ()
    """older checkpoints that were removed for it"""


@dataclass(frozen=True, slots=True)
class StrangerRefused:
    """Somebody failed before authentication: bad magic, version, MAC, silence. Counted, never ends a window."""

    address: str
    code: str
    reason: str


@dataclass(frozen=True, slots=True)
class Operator:
    """A command of the operator; ``Refused`` answers a bad one.

    ``act`` is start, stop, abort, save, extend, change or turn_away. Arguments: extend ``seconds``; change ``quorum``
    and/or ``target``; turn_away ``host`` (the number); stop, abort and save ``by`` (who).
    """

    act: str
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Lagged:
    """The controller itself stood still for so long: what its hosts said meanwhile is still unread."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Tick:
    """A deadline passed."""


Event = (
    HostSaid | LinkLost | RelayAttached | RelayLost | RelayHeard | RankSaid | RoundFinished | RoundBroken
    | CheckpointWritten | StrangerRefused | Operator | Lagged | Tick
)  # fmt: skip

# ------------------------------------------------------------------------------------------------ effects


@dataclass(frozen=True, slots=True)
class SendHost:
    """Write a message to a join link. A failed write comes back as ``LinkLost``."""

    link: int
    message: Message


@dataclass(frozen=True, slots=True)
class CloseLink:
    """Close a join link after what was sent before is flushed."""

    link: int
    reason: str


@dataclass(frozen=True, slots=True)
class SendRelay:
    """Write a host-level message to a host's control link."""

    host: int
    message: Message


@dataclass(frozen=True, slots=True)
class SendRank:
    """Write a message to a rank, over its relay's control link. A failed write comes back as ``RelayLost``."""

    rank: int
    message: Message


@dataclass(frozen=True, slots=True)
class ExpectRelays:
    """The world formed: which ranks each host's relay may speak for."""

    hosts: dict[int, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class OpenRound:
    """Reduce plane: expect one contribution from each of these hosts, with exactly these ranks in it."""

    round: int
    attempt: int
    hosts: dict[int, tuple[int, ...]]
    initial: bool
    params_elements: int
    buffers_elements: int
    encoding: int = 0
    """a ``wire.frames.Encoding``: how parameters are streamed, up and down"""


@dataclass(frozen=True, slots=True)
class AbortRound:
    """Reduce plane: drop the attempt; chunks of it that still arrive are ignored."""

    round: int
    attempt: int
    reason: str


@dataclass(frozen=True, slots=True)
class DropHost:
    """Close the relay links of a host and refuse it from now on."""

    host: int
    reason: str


@dataclass(frozen=True, slots=True)
class OpenCheckpoint:
    """Hold on to the consensus as it is now; states of ranks follow, while later rounds may already be on."""

    checkpoint: int


@dataclass(frozen=True, slots=True)
class KeepState:
    """Write down a part of a rank's own state, then grant the rank another one."""

    checkpoint: int
    rank: int
    part: int
    data: bytes


@dataclass(frozen=True, slots=True)
class WriteCheckpoint:
    """Complete the checkpoint: model, outer momentum and the states of ``states`` become one bundle, or nothing."""

    checkpoint: int
    reason: str
    states: tuple[int, ...]
    """ranks whose state came whole; the first one's local tensors go into the model"""
    manifest: dict[str, Any]
    keep: int
    """complete checkpoints that may stay, this one included; -1 all"""
    consensus_of: int | None = None
    """the rank whose state holds the consensus; none when the reduce plane does"""


@dataclass(frozen=True, slots=True)
class SendState:
    """Send a rank one part of the state that was saved of ``saved_rank``."""

    rank: int
    saved_rank: int
    part: int
    own: bool


@dataclass(frozen=True, slots=True)
class Record:
    """A row for the store. ``durable`` rows are committed before any later effect is performed."""

    table: str
    """events, hosts, ranks, rounds, epochs, scalars, deaths, checkpoints, runs (an update of the run's own row), or
    recoveries (an update of a death's)"""
    row: dict[str, Any]
    durable: bool = False


@dataclass(frozen=True, slots=True)
class Refused:
    """The answer to the operator's command that caused this batch of effects. Nothing changed."""

    code: str
    reason: str


@dataclass(frozen=True, slots=True)
class End:
    """The run is over, once and for all: ``done`` or ``failed``, and why."""

    phase: str
    reason: str


Effect = (
    SendHost | CloseLink | SendRelay | SendRank | ExpectRelays | OpenRound | AbortRound | DropHost | OpenCheckpoint
    | KeepState | WriteCheckpoint | SendState | Record | Refused | End
)  # fmt: skip
