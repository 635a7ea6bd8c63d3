"""What the REST interface gives. Names are design section 1's; durations are seconds, sizes bytes."""

from __future__ import annotations

from typing import Any, Generic, Literal, TypeVar

from pydantic import BaseModel, Field

from backend.api.answer import Answer
from backend.api.world_schemas import Member, Model, Rank

Item = TypeVar("Item")

Phase = Literal["waiting", "staging", "forming", "training", "done", "failed", "interrupted"]


class Page(BaseModel, Generic[Item]):
    """A part of a list. ``next_cursor`` asks for the following part; none when this was the last."""

    items: list[Item]
    next_cursor: str | None = None


class Missing(Answer):
    """One thing that start would be refused for now."""

    code: str
    text: str
    cure: str


class Strangers(Answer):
    """Attempts that never proved the secret, by address."""

    count: int
    sources: dict[str, int]


class Refusal(Answer):
    """A host that was turned away, and why."""

    host: str
    address: str
    code: str
    reason: str
    seconds_ago: float | None
    at: str | None = None


class Probing(Answer):
    """A host that is loading the job right now."""

    host: str
    address: str


class Window(Answer):
    """The join window: who decides, how long still, what is missing."""

    open: bool
    start_mode: str
    quorum: int
    target: int | None
    joined_ranks: int
    joined_hosts: int
    window_seconds: float
    cap_seconds: float
    window_remaining_seconds: float | None
    cap_remaining_seconds: float | None
    armed: bool
    verdict: str
    missing: list[Missing]
    strangers: Strangers
    refusals: list[Refusal]
    probing: list[Probing]


class Evaluation(Answer):
    """The last score on the evaluation set."""

    epoch: int
    metrics: dict[str, float]


class Session(Answer):
    """Collective modes: the ranks' communicator. ``state`` is none, naming, joining or live."""

    generation: int
    state: str
    generator: int | None
    transports: dict[str, str] = Field(description="library and interface, by rank")
    rebuilds: int
    reason: str


class Guard(Answer):
    """What guard and meta-controller said about the last round."""

    verdict: str | None
    reason: str | None


class Throughput(Answer):
    """Rates of the last window; ``efficiency`` is the run's mean against the sum of its ranks' own rates."""

    batches_per_second: float | None
    samples_per_second: float | None
    ideal_batches_per_second: float | None
    efficiency: float | None


class Death(Answer):
    """A rank that was lost, and what is known of how."""

    at: str | None = None
    rank: int | None
    host: int | None
    host_name: str | None
    device: str | None
    reason: str | None
    exit_code: int | None = None
    signal: str | None = None
    exception: str | None = None
    message: str | None = None
    last_lines: str | None = None
    last_step: int | None = None
    last_round: int | None = None
    peak_rss_bytes: int | None = None
    returned_samples: int | None = None
    world_size: int | None = None
    """of the run, the dead included"""
    memory_kills: int | None = None
    """processes of its host's control group that the kernel killed for memory just then, when that explains the end"""
    memory_limit_bytes: int | None = None
    """the limit that was reached; 0 when none is known"""
    waited: dict[str, float] | None = None
    """seconds that other ranks had nothing to do because of it until it was declared dead, by rank"""
    recovery: dict[str, float] | None = None
    """seconds until it was found (detect), until a round without it was asked for (decide), until that was closed
    (resume), and until the next batch was done (first_step); phases that the run did not live to see are missing"""


class Checkpoint(Answer):
    """A saved consensus. The model file is at ``checkpoints/{checkpoint}/model``."""

    checkpoint: int
    at: str | None = None
    round: int | None
    epoch: int | None
    global_step: int | None
    reason: str | None
    bytes: int | None
    sha256: str | None
    loss: float | None = None
    pruned: bool | None = None


class Origin(Answer):
    """The checkpoint that a run goes on from: the last round and the finished epochs that it holds."""

    run: int
    checkpoint: int
    round: int
    epochs: int


class RunSummary(Answer):
    """A run in the list."""

    id: int
    name: str
    job: str
    mode: str
    phase: Phase
    reason: str | None
    created_at: str
    started_at: str | None
    ended_at: str | None
    world_size: int | None
    epochs: int | None = None
    epochs_done: int | None = None
    rounds_done: int | None = None
    loss: float | None = None
    metrics: dict[str, Any] | None = None
    emulated: bool
    deaths: int = 0


class RunView(Answer):
    """All of a run, live or from history. ``epoch`` counts from 0, ``round`` is the next one to close."""

    id: int
    name: str
    job: str
    mode: str
    phase: Phase
    reason: str | None
    stopped_by: str | None
    created_at: str
    started_at: str | None
    ended_at: str | None
    seconds: float | None
    config: dict[str, Any]
    params: dict[str, Any]
    emulated: bool
    model: Model | None = None
    window: Window
    members: list[Member]
    world_size: int | None
    epoch: int | None
    epochs: int
    round: int | None
    global_step: int | None
    samples_done: int | None
    samples_lost: int = 0
    """of the whole run: trained in vain, for what came of them was not finite"""
    samples_total: int | None
    ranks: list[Rank]
    decision: str | None
    session: Session | None = None
    guard: Guard | None = None
    loss: float | None
    eval: Evaluation | None
    throughput: Throughput
    samples_accepted: list[int]
    deaths: list[Death]
    checkpoints: list[Checkpoint]
    resumed_from: Origin | None = None
    round_stages: dict[str, float] = Field(
        default={}, description="seconds of the last round: pack, declare, up, sum, down, load; live runs only"
    )
    saving: bool = False
    checkpoint_trouble: str = Field(default="", description="why the last checkpoint could not be written")
    not_durable: str = Field(default="", description="why the database takes nothing right now, and the cure")


class Round(Answer):
    """A closed round. Maps are by rank. ``run_id`` is another run's for rounds that a resumed run goes on from."""

    run_id: int | None = None
    round: int
    at: str
    epoch: int | None
    attempt: int | None
    global_step: int | None
    samples: int | None
    seconds: float | None
    reduce_seconds: float | None
    planned: dict[str, int] | None
    realized: dict[str, int] | None
    mass: float | None
    anchor: int | None
    anchor_rank: int | None
    ms_per_batch: dict[str, float | None] | None
    compute_seconds: dict[str, float | None] | None
    data_seconds: dict[str, float | None] | None
    wait_seconds: dict[str, float | None] | None
    load_seconds: dict[str, float | None] | None
    divergence: float | None
    loss: float | None
    bytes_up: int | None
    bytes_down: int | None
    decision: str | None
    params_hash: str | None
    verdict: str | None
    verdict_reason: str | None


class Epoch(Answer):
    """A finished epoch. ``samples_lost`` lists ranges of its permutation: offset, size, rank, reason."""

    epoch: int
    at: str
    seconds: float | None
    samples_accepted: int | None
    samples_lost: Any
    batches: int | None
    loss: float | None
    metrics: dict[str, Any] | None


class Event(Answer):
    """Something that happened. ``id`` grows, so it is a cursor."""

    id: int
    at: str
    kind: str
    level: str
    text: str
    data: Any = None


class SessionState(Answer):
    """How this caller proved itself."""

    kind: Literal["session", "token"]
    name: str
    version: str


class Ticket(Answer):
    """A one-time pass for a browser, and the address that carries it. It is never shown again."""

    ticket: str
    url: str


class ControllerInfo(Answer):
    """This controller, and how another host joins it."""

    name: str
    version: str
    wire_version: int
    join_url: str
    join_command: str
    join_token: str
    loopback_only: bool


class Version(Answer):
    """What answers here."""

    product: Literal["marchline"]
    version: str
    wire_version: int
    python: str
