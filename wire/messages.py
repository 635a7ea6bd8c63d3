"""Every message that crosses a process boundary, one tagged Struct each (msgpack on the wire).

Three channels carry them. *join* is the host control link between an agent and the controller; *control* and *data*
are a relay's two links. On the control channel the frame header names the rank that a message is from or for; identity
comes from the session and that header, never from a message's own fields. No decision uses a timestamp of the peer.

Adding, removing or changing a field changes ``wire/schema.json``: bump ``WIRE_VERSION`` and run ``make wire-schema``.
"""

from __future__ import annotations

from typing import Any

import msgspec

from wire.beats import RelayHeartbeat as RelayHeartbeat
from wire.collectives import AbortSession as AbortSession
from wire.collectives import NewSession as NewSession
from wire.collectives import RequestSessionId as RequestSessionId
from wire.collectives import SessionIdGenerated as SessionIdGenerated
from wire.collectives import SessionJoined as SessionJoined
from wire.collectives import SessionLost as SessionLost
from wire.collectives import SyncCommitted as SyncCommitted
from wire.collectives import Synced as Synced
from wire.collectives import SyncNow as SyncNow
from wire.collectives import SyncRefused as SyncRefused
from wire.errands import EvalResult as EvalResult
from wire.errands import Evaluate as Evaluate
from wire.errands import FetchState as FetchState
from wire.errands import LocalState as LocalState
from wire.errands import Message as Message
from wire.errands import RequestLocalState as RequestLocalState
from wire.errands import SavedState as SavedState
from wire.errands import StateTaken as StateTaken
from wire.numbers import Amount, Count, Number, Pace
from wire.values import Device as Device
from wire.values import ExitCause as ExitCause
from wire.values import Ranges as Ranges
from wire.values import RankAssignment as RankAssignment
from wire.values import RankProgress as RankProgress
from wire.values import Record as Record
from wire.values import TensorSpec as TensorSpec
from wire.values import TrainingPlan as TrainingPlan
from wire.values import Versions as Versions

WIRE_VERSION = 1
NO_RANK = 0xFFFFFFFF
"""The frame header's rank field when a frame speaks for the whole host."""


# ------------------------------------------------------------------------- join channel: agent <-> controller


class Hello(Message, frozen=True):
    """agent -> controller: a host offers its devices."""

    host: str
    devices: list[Device]
    versions: Versions
    run: Count | None = None
    """the run it wants; none takes the earliest open join window"""
    emulate_ms_per_batch: Pace | None = None
    """each training step is padded to at least this; shown wherever the host is"""
    relay_only: bool = False
    """no devices: it folds the data streams of the hosts that join through it (``python -m worker --relay-only``)"""
    returning: Count | None = None
    """its number in a run whose controller it lost: its ranks still live and wait, and nothing is probed again"""


class JobOffer(Message, frozen=True):
    """controller -> agent: the job of the run whose window is open; the agent probes it in a process of its own."""

    run_id: Count
    job: str
    params: dict[str, Any]
    job_hash: str
    """sha256 of the job's file on the controller, empty when it has none"""


class ProbeReport(Message, frozen=True):
    """agent -> controller: what the host found when it loaded the job, built the model and opened the dataset."""

    error: str = ""
    """empty, or one line naming what is wrong with the job on this host"""
    job_hash: str = ""
    """sha256 of the job file"""
    sources_hash: str = ""
    """sha256 over the job file and all it imported from below the job directory"""
    layout: list[TensorSpec] = []
    dataset_signature: str = ""
    dataset_size: Count = 0


class Accept(Message, frozen=True):
    """controller -> agent: admitted; the ranks are the host's if the window closes now."""

    run_id: Count
    host_id: Count
    ranks: list[Count]
    run_salt: bytes
    formation_wait_seconds: Amount
    heartbeat_seconds: Amount
    heartbeat_timeout_seconds: Amount
    run_secret: bytes = b""
    """sent only under open admission; otherwise both sides derive it from the join token and the salt"""


class Reject(Message, frozen=True):
    """controller -> agent: refused, and why; the link closes after it."""

    code: str
    reason: str
    permanent: bool = False
    """dialling again cannot help"""


class WorldFormed(Message, frozen=True):
    """controller -> agent: the window closed and this is your part of the world; start relay and ranks."""

    plan: TrainingPlan
    world_size: Count
    generation: Count
    assignments: list[RankAssignment]
    reattach_seconds: Amount = 0.0
    """how long a host that loses its controller keeps its ranks and dials again; 0: not at all"""


class RunEnded(Message, frozen=True):
    """controller -> agent: the run is over; stop what still runs and leave, or dial again when told to persist."""

    phase: str
    reason: str


class HostHeartbeat(Message, frozen=True):
    """agent -> controller, every second: the host lives, and how far each of its ranks is."""

    ranks: list[RankProgress]
    late: Count = 0
    """how often the controller's word came more than a whole heartbeat late"""
    worst_late_seconds: Amount = 0.0
    """the worst of it: the longest silence, less a heartbeat"""


class ControllerHeartbeat(Message, frozen=True):
    """controller -> agent, every second."""


class RankExited(Message, frozen=True):
    """agent -> controller: a rank's process ended."""

    rank: Count
    cause: ExitCause


class RelayExited(Message, frozen=True):
    """agent -> controller: the host's relay ended, so its ranks cannot take part any more."""

    cause: ExitCause


class Leaving(Message, frozen=True):
    """agent -> controller: the host leaves on purpose (operator's Ctrl-C or SIGTERM there)."""

    reason: str


# ------------------------------------------------------------- control and data channel: relay <-> controller


class RelayHello(Message, frozen=True):
    """relay -> controller, first message on both of its links."""

    host_id: Count
    ranks: list[Count]
    """empty for a relay-only host"""


class RelayWelcome(Message, frozen=True):
    """controller -> relay, on both of its links: the link is attached. A relay-only host says so on data links that end
    there, and offers no memory.

    On the data link the controller may offer its memory: a relay that can open ``proof_path`` and finds ``proof`` there
    runs on the same machine as the same user, and answers with ``SharedMemory``.
    """

    proof_path: str = ""
    proof: bytes = b""


class SharedMemory(Message, frozen=True):
    """relay -> controller on the data link, before anything else: you can map my ranks' arenas. Neither side streams
    then: the controller reads ``{directory}/rank{N}.out``, and ``UpdateComing.path`` says where the consensus is."""

    directory: str


class ChildAttached(Message, frozen=True):
    """relay -> controller on the data link: this host's data link ends at me, a relay-only host; I fold it."""

    host: Count
    ranks: list[Count]


class ChildLost(Message, frozen=True):
    """relay -> controller on the data link: I am a relay-only host, and this host's data link to me is over.

    controller -> relay: this host's data link must end, because its claim is refused or the host is out of the run.
    """

    host: Count
    reason: str


class FoldOrder(Message, frozen=True):
    """controller -> relay on the data link: you are a relay-only host, fold these children with exactly these ranks."""

    round: Number
    attempt: Count
    hosts: dict[Count, list[Count]]
    params_elements: Count
    buffers_elements: Count
    encoding: Count = 0
    """a ``wire.frames.Encoding``, for the parameters; buffers and the initial broadcast are f32"""


class RankReady(Message, frozen=True):
    """rank -> controller: model built, arena mapped, waiting for the initial broadcast."""

    layout_hash: str
    """sha256 over the layout; refused by name when it differs from the cohort's"""
    params_elements: Count
    buffers_elements: Count
    notes: list[str] = []
    """what this rank could not take up of the state that was saved, one sentence each"""
    held_round: Number | None = None
    """after ``Rewind``: the round whose consensus this rank holds again; below 0 what the run began with"""
    held_hash: str = ""
    """XXH3-64 (hex) of that consensus"""


class StartChunk(Message, frozen=True):
    """controller -> rank: train these samples of the epoch's permutation, then report and wait."""

    epoch: Count
    offset: Count
    """first position in the permutation, in samples"""
    size: Count
    """samples; the last batch may be partial"""
    batches: Count
    global_step: Count
    """cohort steps before this window: the clock of learning-rate schedules"""


class BatchDone(Message, frozen=True):
    """rank -> controller, one a batch."""

    batch_ms: Amount
    """forward, backward, optimizer and emulated padding"""
    data_ms: Amount
    """waiting for and collating the batch"""
    steps: Count
    """the rank's local optimizer steps since it started, this one included"""
    samples: Count
    loss: float | None
    """none when the loss was not finite"""


class ChunkDone(Message, frozen=True):
    """rank -> controller: every sample of the chunk in flight was trained on."""

    epoch: Count
    offset: Count
    size: Count


class RequestParams(Message, frozen=True):
    """controller -> rank: have your values in the arena, and leave them until the round is over."""

    round: Number
    attempt: Count
    initial: bool
    """the broadcast before training: ``root`` has mass 1, the others none; values travel, not differences"""
    encoding: Count = 0
    """a ``wire.frames.Encoding``: how the host streams parameters; buffers and the initial broadcast are f32"""
    excluded: bool = False
    """what this rank contributed was refused: it declares no work this time, and starts anew from the consensus"""
    root: Count = 0
    """the rank whose values an initial broadcast brings"""
    brings: Number | None = None
    """the round whose consensus those are, where a cohort goes on from one"""


class Rewind(Message, frozen=True):
    """relay -> rank: the controller was lost. Finish the batch in hand, forget what was done since the last round, take
    its consensus again, and say ``RankReady``."""

    reason: str


class SnapshotReady(Message, frozen=True):
    """rank -> relay: the arena holds this rank's values. Stays on the host."""

    round: Number
    attempt: Count
    steps: Count
    """optimizer steps since the last committed round: the realized work"""
    mass: float
    mover_mass: float
    """buffer mass: 1 if the rank did any work"""
    still: Ranges = []
    """elements that equal the last consensus to the bit, as far as that is known without cost (frozen parameters)"""


class Contribution(Message, frozen=True):
    """relay -> controller on the data link, before the host's chunks: whose work they carry, and how much.

    A host whose masses are all zero declares that and sends no chunk. The chunks hold, element by element,
    ``sum over its ranks of mass * (consensus - value)``, the pseudo-gradient that the host's work amounts to; in the
    initial broadcast ``sum of mass * value``. Elements in ``still`` amount to nothing and are left out.
    """

    round: Number
    attempt: Count
    steps: dict[Count, Count]
    masses: dict[Count, float]
    mover_masses: dict[Count, float]
    params_elements: Count
    buffers_elements: Count
    still: Ranges = []


class NonFinite(Message, frozen=True):
    """relay -> controller on the data link: a rank contributes this; no further chunk of the attempt follows."""

    round: Number
    attempt: Count
    rank: Count
    element: Count
    """first bad element, counted from the arena's start"""
    value: str
    """nan, inf or -inf"""


class UpdateComing(Message, frozen=True):
    """controller -> relay on the data link: what comes down for this attempt.

    The chunks hold the update: everybody subtracts it, in f32, from the consensus that they hold. Elements in ``still``
    do not change and are left out.
    """

    round: Number
    attempt: Count
    absolute: bool
    """the initial broadcast: the chunks are the values themselves"""
    still: Ranges = []
    path: str = ""
    """no chunks: the whole new consensus, params then buffers in f32, is this file, which the relay can map"""


class UpdateStaged(Message, frozen=True):
    """relay -> rank, now and then while an update streams in: the new consensus is in this file up to there. Nothing is
    committed; a rank that waits may hash and measure it in the meantime. Stays on the host."""

    round: Number
    attempt: Count
    consensus: str
    stop: Count
    """elements from the arena's start"""


class RoundCommitted(Message, frozen=True):
    """controller -> relay and rank: adopt what was streamed for this attempt."""

    round: Number
    attempt: Count
    realized: bool
    """false: nobody worked, nothing was streamed, keep what you have"""
    buffers_realized: bool
    consensus: str = ""
    """relay -> rank: the file that holds it, params then buffers in f32; empty from the controller"""


class RoundAborted(Message, frozen=True):
    """controller -> relay: forget this attempt; the next one follows as RequestParams. Relay-only hosts hear it on the
    data link."""

    round: Number
    attempt: Count
    reason: str


class SyncAck(Message, frozen=True):
    """rank -> controller: the consensus is adopted."""

    round: Number
    divergence: float
    """norm(before - after) / norm(after) over the parameters"""
    pre_norm: float
    post_norm: float
    params_hash: str
    """hash of the consensus as this rank read it for this round, empty when not asked for"""
    pack_ms: Amount
    load_ms: Amount
    """copying the consensus in"""
    wait_ms: Amount
    """between the end of the last batch and the request for parameters; where work goes on during a round, all the time
    without work since the previous request"""
    reduce_ms: Amount
    """from the request to adoption, packing and loading included; where work goes on meanwhile, those two only"""
    lr: float | None = None
    """learning rate of the optimizer's first parameter group; none when it has none"""


class Update(Message, frozen=True):
    """controller -> rank: the round is closed; the cohort's clock."""

    round: Number
    global_step: Count


class Shutdown(Message, frozen=True):
    """controller -> rank: leave now; the run is over."""

    reason: str


class Exiting(Message, frozen=True):
    """rank -> controller: last message of a rank that leaves on purpose."""

    steps: Count


class RankFailed(Message, frozen=True):
    """rank -> agent (through its report file) and controller: the job raised; the process exits 1 after it."""

    exception: str
    message: str
    last_lines: str
    last_step: Count


class DeclareDead(Message, frozen=True):
    """controller -> relays and ranks: this rank is out; its frames are refused from now on. controller -> agent of its
    host: end what is left of it."""

    rank: Count
    reason: str


class RankHello(Message, frozen=True):
    """rank -> relay on the host's unix socket: who speaks."""

    rank: Count


MESSAGES: tuple[type[Message], ...] = tuple(Message.__subclasses__())
AnyMessage = (
    Hello | JobOffer | ProbeReport | Accept | Reject | WorldFormed | RunEnded | HostHeartbeat | ControllerHeartbeat
    | RankExited | RelayExited | Leaving | RelayHello | RelayWelcome | SharedMemory | ChildAttached | ChildLost
    | FoldOrder | RankReady | StartChunk | BatchDone | ChunkDone | RequestParams | SnapshotReady | Contribution
    | NonFinite | UpdateComing | UpdateStaged | RoundCommitted | RoundAborted | SyncAck | Update | Evaluate
    | EvalResult | RequestLocalState | LocalState | StateTaken | FetchState | SavedState | Shutdown | Exiting
    | RankFailed | DeclareDead | RankHello | Rewind | RequestSessionId | SessionIdGenerated | NewSession
    | SessionJoined | SessionLost | AbortSession | SyncNow | Synced | SyncRefused | SyncCommitted | RelayHeartbeat
)  # fmt: skip

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: Message) -> bytes:
    """Pack a message; the caller frames and seals it."""
    return _encoder.encode(message)


def decode(payload: bytes | memoryview) -> Message:
    """Unpack one message. Raises ``msgspec.ValidationError`` for an unknown kind or a field of the wrong type."""
    message: Message = _decoder.decode(payload)
    return message
