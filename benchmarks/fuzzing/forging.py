"""Authentic frames around anything, as only who holds the keys can make them; and one good message of each kind."""

from __future__ import annotations

from collections.abc import Callable

from wire import frames
from wire.errands import EvalResult, Evaluate, FetchState, LocalState, RequestLocalState, SavedState, StateTaken
from wire.errors import ErrorCode
from wire.messages import (
    MESSAGES,
    NO_RANK,
    WIRE_VERSION,
    AbortSession,
    Accept,
    BatchDone,
    ChildAttached,
    ChildLost,
    ChunkDone,
    Contribution,
    ControllerHeartbeat,
    DeclareDead,
    Device,
    ExitCause,
    Exiting,
    FoldOrder,
    Hello,
    HostHeartbeat,
    JobOffer,
    Leaving,
    Message,
    NewSession,
    NonFinite,
    ProbeReport,
    RankAssignment,
    RankExited,
    RankFailed,
    RankHello,
    RankProgress,
    RankReady,
    Reject,
    RelayExited,
    RelayHeartbeat,
    RelayHello,
    RelayWelcome,
    RequestParams,
    RequestSessionId,
    Rewind,
    RoundAborted,
    RoundCommitted,
    RunEnded,
    SessionIdGenerated,
    SessionJoined,
    SessionLost,
    SharedMemory,
    Shutdown,
    SnapshotReady,
    StartChunk,
    SyncAck,
    SyncCommitted,
    Synced,
    SyncNow,
    SyncRefused,
    TensorSpec,
    TrainingPlan,
    Update,
    UpdateComing,
    UpdateStaged,
    Versions,
    WorldFormed,
    encode,
)  # fmt: skip
from wire.sealing import GCM_TAG_BYTES, DirectionKeys, join_secret
from wire.session import Channel, ChunkHeader, Session

SECRET = join_secret("a token of the fuzzers")
RUN = 7
PARAMS, BUFFERS = 6, 2
LAYOUT = [
    TensorSpec("w", "params", "float32", [2, 3], 0),
    TensorSpec("mean", "buffers", "float32", [2], PARAMS),
    TensorSpec("count", "local", "int64", [], -1),
]
VERSIONS = Versions(marchline="0.1.0", wire=WIRE_VERSION, python="3.11", torch="2.13")
"""of every host that is played"""
PLAN = TrainingPlan(RUN, "toy.py:Toy", {}, "cpu_cadence", 4, 1, 42, 1.0, True, 64)

SAMPLES: tuple[Message, ...] = (
    Hello("box", [Device("cpu:0", "cpu", "test", 1 << 30)], VERSIONS, None, 12.5),
    JobOffer(RUN, "toy.py:Toy", {"hidden": 64, "nested": {"a": [1, 2.5, None, "x"]}}, "h" * 64),
    ProbeReport("", "h" * 64, "s" * 64, LAYOUT, "d" * 64, 64),
    Accept(RUN, 1, [0, 1], b"s" * 32, 10.0, 1.0, 30.0),
    Reject("world_full", "There is no room.", True),
    WorldFormed(PLAN, 3, 0, [RankAssignment(0, 0, "cpu:0")]),
    RunEnded("done", "all epochs are trained"),
    HostHeartbeat([RankProgress(0, "working", 3, 12.0, 1 << 20)], 1, 0.2),
    ControllerHeartbeat(),
    RankExited(0, ExitCause(-9, "SIGKILL", "", "", "last words", 3, 1 << 20)),
    RelayExited(ExitCause(1)),
    Leaving("closing time"),
    RelayHeartbeat(),
    RelayHello(1, [0]),
    RelayWelcome("/proc/1/fd/3", b"p" * 32),
    SharedMemory("/dev/shm/somewhere"),
    ChildAttached(2, [1]),
    ChildLost(2, "it went"),
    FoldOrder(0, 0, {1: [0], 2: [1]}, PARAMS, BUFFERS, 0),
    RankReady("layout", PARAMS, BUFFERS, ["a note"]),
    StartChunk(0, 0, 8, 2, 0),
    BatchDone(5.0, 1.0, 1, 4, 0.25),
    ChunkDone(0, 0, 8),
    RequestParams(0, 0, False, 0, False),
    Rewind("the controller was lost"),
    SnapshotReady(0, 0, 2, 2.0, 1.0, [(0, 2)]),
    Contribution(0, 0, {0: 2}, {0: 2.0}, {0: 1.0}, PARAMS, BUFFERS, [(1, 3)]),
    NonFinite(0, 0, 0, 3, "nan"),
    UpdateComing(0, 0, False, [(0, 2)], ""),
    UpdateStaged(0, 0, "/dev/shm/consensus", 4),
    RoundCommitted(0, 0, True, True, ""),
    RoundAborted(0, 0, "rank 1 died"),
    SyncAck(0, 0.1, 1.0, 1.0, "same", 1.0, 1.0, 1.0, 3.0, 0.01),
    Update(0, 6),
    Evaluate(0),
    EvalResult(0, {"accuracy": 0.5}, 12.0),
    RequestLocalState(1),
    LocalState(1, 0, 1, b"state", 1.0),
    StateTaken(1, 0),
    FetchState(0),
    SavedState(0, 1, b"state"),
    Shutdown("the run is over"),
    Exiting(9),
    RankFailed("ValueError", "no", "Traceback", 3),
    DeclareDead(1, "its process ended"),
    RankHello(0),
    RequestSessionId(0),
    SessionIdGenerated(0, b"i" * 128),
    NewSession(0, b"i" * 128, [0, 1]),
    SessionJoined(0, "gloo on lo"),
    SessionLost(0, "the connection was closed"),
    AbortSession(0, "rank 1 died"),
    SyncNow(0, 0, 0),
    Synced(0, 0, 3, 4, 4.0, 32, 1.0),
    SyncRefused(0, 0, 2, "nan"),
    SyncCommitted(0, 0),
)  # fmt: skip
PAYLOADS = tuple(encode(sample) for sample in SAMPLES)

assert {type(sample) for sample in SAMPLES} == set(MESSAGES), "a sample of each message"


def greeted(channel: Channel = Channel.DATA) -> tuple[Session, Session]:
    """Client and server, the server waiting for the client's first message. Nonces are fixed."""
    client = Session.client(channel, SECRET, run_id=RUN, nonce=bytes(range(32)))
    server = Session.server(lambda _channel, _run: SECRET, nonce=bytes(range(32, 64)))
    server.receive(client.opening())
    [answer] = server.pending()
    client.receive(answer)
    return client, server


def established(channel: Channel = Channel.DATA) -> tuple[Session, Session]:
    """The same, a message later."""
    client, server = greeted(channel)
    server.receive(client.seal(ControllerHeartbeat()))
    return client, server


def sealed(session: Session, payload: bytes, rank: int = NO_RANK) -> bytes:
    """An authentic message frame of this session around any payload, however long; it takes the next number."""
    keys = session._sending_keys()
    head = frames.message_head(rank % (1 << 32), session._next_sequence(), payload)
    return head + keys.tag(head)


def sealed_chunk(session: Session, header: ChunkHeader, payload: bytes) -> bytes:
    """An authentic chunk frame under any header whose fields fit theirs."""
    return chunk_frame(session._sending_keys(), session._next_sequence(), header, payload)


def chunk_frame(keys: DirectionKeys, sequence: int, header: ChunkHeader, payload: bytes) -> bytes:
    """The same from keys and a number."""
    frame = bytearray(frames.CHUNK.size + len(payload) + GCM_TAG_BYTES)
    frames.write_chunk_header(header, sequence, frame)
    view = memoryview(frame)
    start = frames.CHUNK.size
    keys.encrypt_into(sequence, view[:start], memoryview(payload), view[start:])
    return bytes(frame)


def _waiting() -> Session:
    client = Session.client(Channel.DATA, SECRET, run_id=RUN, nonce=bytes(range(32)))
    client.opening()
    return client


STATES: dict[str, Callable[[], Session]] = {
    "new server": lambda: Session.server(lambda _channel, _run: SECRET, nonce=bytes(32)),
    "greeted server": lambda: greeted()[1],
    "established server": lambda: established()[1],
    "established control server": lambda: established(Channel.CONTROL)[1],
    "waiting client": _waiting,
    "established client": lambda: established()[0],
}
"""A session in each state in which it takes a frame"""


def true_frames() -> tuple[bytes, ...]:
    """The frames of one connection, in order: hello, answer, first message, message, chunk; and a refusal."""
    client = Session.client(Channel.DATA, SECRET, run_id=RUN, nonce=bytes(range(32)))
    server = STATES["new server"]()
    opening = client.opening()
    server.receive(opening)
    [answer] = server.pending()
    client.receive(answer)
    first, second = client.seal(RelayHello(1, [0])), client.seal(Update(5, 6), 1)
    chunk = bytes(client.seal_chunk(ChunkHeader(3, 1, 0, 4096, 4), bytes(16)))
    return opening, answer, first, second, chunk, frames.refusal(ErrorCode.UNKNOWN_RUN, "no run 7")
