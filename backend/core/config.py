"""A run's configuration: plain values, their defaults, and every refusal by name (behaviour B1, B2; design section
11)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

COLLECTIVE = ("nccl_sync", "nccl_cadence")
"""modes in which ranks sum among themselves"""
MODES = ("cpu_sync", "cpu_cadence", "cpu_async", *COLLECTIVE)
PRECISIONS = ("f32", "bf16", "fp16")
START_MODES = ("auto", "manual", "hybrid")
GUARDS = ("level", "growth", "none")
OUTER_OPTIMIZERS = ("none", "nesterov")
OUTER_LR, OUTER_MOMENTUM = 0.7, 0.9
"""defaults of the outer optimizer, and what they must stay at while there is none"""
MAX_OUTER_LR = 10.0
NON_FINITE = ("exclude", "stop")
WRITE_BACKS = ("overwrite", "blend", "delta")
BLEND_ALPHA = 0.5
WAITS = (
    *("window_seconds", "cap_seconds", "heartbeat_seconds", "heartbeat_timeout_seconds"),
    *("forming_seconds", "stall_seconds"),
)
MIN_HEARTBEAT_SECONDS = 0.05
"""the controller looks at least twice as often whether it was late itself: with much less it would do nothing else"""
MAX_HINT_RATIO = 64.0
"""ElChe counts no device as faster than this many times another"""


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong with a configuration: the field, a stable code, and a sentence with the cure."""

    field: str
    code: str
    text: str


@dataclass(frozen=True, slots=True)
class RunConfig:
    """Everything the operator decides about a run. Times in seconds, sizes in samples or batches as named."""

    job: str
    name: str = ""
    params: dict[str, Any] = field(default_factory=dict)
    mode: str = "cpu_cadence"
    precision: str = "f32"
    """what autocast lowers training and evaluation to; parameters, optimizer and rounds stay as they are"""
    batch_size: int = 32
    epochs: int = 1
    seed: int = 42

    start_mode: str = "auto"
    quorum: int = 2
    """ranks that must have joined before the world may form"""
    target: int | None = None
    """ranks at which the window closes early; none waits for the clock or the operator"""
    window_seconds: float = 300.0
    cap_seconds: float = 600.0
    open_admission: bool = False

    gamma: float = 1.0
    """work-weighting exponent of the parameter mass"""
    initial_anchor: int = 10
    """batches that the slow device does per window before tuning"""
    min_anchor: int | None = None
    max_anchor: int = 1000
    overhead_target: float = 0.04
    max_batch_diff: int | None = None
    fixed_counts: tuple[int, ...] | None = None
    """allotments by rank, forced: for experiments and exactness tests"""
    speed_hint: tuple[int, float] | None = None
    """(the slow rank, how many times as fast every other rank is): first allotments before anything is timed"""
    guard: str = "level"
    """who watches that replicas do not drift apart: level, growth or none"""
    guard_threshold: float | None = None
    """divergence that the level guard tolerates; none takes its default"""
    meta_controller: bool = True
    """shorten the window when the learning rate falls off a cliff or the guard keeps objecting"""
    relax_up: bool = False
    """asynchronous modes: grow the anchor by one batch for every verdict that finds the replicas close"""

    outer_optimizer: str = "none"
    """what a round makes of the average: adopt it as it is (none), or take the way from the last consensus to it as one
    step of an optimizer of the cohort (nesterov, which is DiLoCo)"""
    outer_lr: float = OUTER_LR
    outer_momentum: float = OUTER_MOMENTUM

    bf16_wire: bool = False
    """parameters travel as bf16, which halves what a round moves; sums stay f32, and what nobody changed keeps its
    bits"""
    non_finite: str = "exclude"
    """a contribution that holds NaN or infinity is refused; its rank is left out of the round and starts anew from the
    consensus (exclude), or the run ends (stop)"""

    max_overshoot: int | None = None
    """asynchronous modes: batches that a rank may work ahead of its allotment; none fits it to the round's duration"""
    write_back: str = "delta"
    """asynchronous modes: what a rank does with the progress that it made while the round was open"""
    blend_alpha: float = BLEND_ALPHA
    """``write_back`` blend: the consensus' share"""

    heartbeat_seconds: float = 1.0
    heartbeat_timeout_seconds: float = 30.0
    forming_seconds: float = 120.0
    """from the closing of the window until every rank must be ready"""
    stall_seconds: float = 300.0
    """a reduce or a chunk that makes no progress for this long ends the run"""
    max_failure: float | None = None
    """deaths that end the run: a count from 1 up, below 1 a share of the world, 0 any; none goes on to the last"""
    reattach_seconds: float | None = None
    """how long hosts keep their ranks for a controller that was lost, and a restarted one waits for its hosts; none:
    the heartbeat timeout, 0: not at all"""
    verify_consensus: bool = True

    checkpoint_epochs: int | None = 1
    """save after every so many epochs; none saves only for the other reasons"""
    checkpoint_rounds: int | None = None
    """save after every so many rounds"""
    keep_checkpoints: int = 3
    """complete checkpoints that stay, the newest ones; -1 keeps all"""

    def problems(self) -> list[Problem]:
        """Everything that is wrong, in field order; empty for a configuration that may run."""
        return list(self._problems())

    @property
    def collective(self) -> bool:
        """Ranks sum among themselves, in GPU memory where they have it; the controller never sees the sum."""
        return self.mode in COLLECTIVE

    @property
    def return_seconds(self) -> float:
        """``reattach_seconds``, or what takes its place: never in the collective modes, whose sessions end with their
        controller."""
        if self.collective:
            return 0.0
        return self.heartbeat_timeout_seconds if self.reattach_seconds is None else self.reattach_seconds

    def as_dict(self) -> dict[str, Any]:
        """The configuration as JSON-ready values."""
        return asdict(self)

    def _problems(self) -> Iterator[Problem]:
        yield from self._training_problems()
        yield from self._scheduler_problems()
        yield from self._guard_problems()
        yield from self._outer_problems()
        yield from self._collective_problems()
        yield from self._lookahead_problems()
        yield from self._window_problems()
        yield from self._time_problems()
        yield from self._checkpoint_problems()

    def _training_problems(self) -> Iterator[Problem]:
        if not self.job:
            yield Problem("job", "job_missing", "name the job as path/file.py:Name")
        if self.mode == "nccl_async":
            text = "a collective needs every rank at once, so none can work ahead: use nccl_cadence, or cpu_async"
            yield Problem("mode", "async_needs_cpu", text)
        elif self.mode not in MODES:
            yield Problem("mode", "mode_unknown", f"{self.mode!r} is not a mode; use one of {', '.join(MODES)}")
        if self.precision not in PRECISIONS:
            known = ", ".join(PRECISIONS)
            yield Problem("precision", "precision_unknown", f"{self.precision!r} is no precision; use one of {known}")
        for name in ("batch_size", "epochs"):
            if getattr(self, name) < 1:
                yield Problem(name, "below_minimum", f"{name} must be at least 1, not {getattr(self, name)}")

    def _scheduler_problems(self) -> Iterator[Problem]:
        for name in ("initial_anchor", "min_anchor", "max_anchor", "max_batch_diff"):
            value = getattr(self, name)
            if value is not None and value < 1:
                yield Problem(name, "below_minimum", f"{name} must be at least 1, not {value}")
        if not 0.01 <= self.overhead_target <= 0.5:
            yield Problem("overhead_target", "out_of_range", "overhead_target must lie between 0.01 and 0.5")
        if self.fixed_counts is not None and len(self.fixed_counts) < 2:
            yield Problem("fixed_counts", "too_few", "fixed_counts names one allotment for each of at least 2 ranks")
        if self.fixed_counts is not None and any(count < 1 for count in self.fixed_counts):
            yield Problem("fixed_counts", "below_minimum", "every forced allotment must be at least 1 batch")
        if self.speed_hint is None:
            return
        rank, ratio = self.speed_hint
        if rank < 0 or rank != int(rank):
            yield Problem("speed_hint", "rank_invalid", f"the hinted slow rank must be a rank's number, not {rank:g}")
        if not 1.0 <= ratio <= MAX_HINT_RATIO:
            yield Problem(
                "speed_hint",
                "out_of_range",
                f"the hinted ratio must lie between 1 and {MAX_HINT_RATIO:g}: how many times as fast the others are",
            )
        if self.fixed_counts is not None or self.mode.endswith("_sync"):
            what = f"in {self.mode}" if self.fixed_counts is None else "beside forced allotments"
            yield Problem("speed_hint", "hint_unused", f"a speed hint has no effect {what}; leave it out")

    def _guard_problems(self) -> Iterator[Problem]:
        if self.guard not in GUARDS:
            yield Problem("guard", "guard_unknown", f"{self.guard!r} is no guard; use one of {', '.join(GUARDS)}")
        if self.guard_threshold is not None:
            if not 0.0 < self.guard_threshold < math.inf:
                yield Problem("guard_threshold", "out_of_range", "guard_threshold must be a number above 0")
            if self.guard != "level":
                yield Problem(
                    "guard_threshold", "threshold_unused", "guard_threshold belongs to the level guard; leave it out"
                )
        if self.relax_up and not self.mode.endswith("_async"):
            yield Problem("relax_up", "relax_up_needs_async", f"relax_up has no place in {self.mode}; leave it out")
        if self.relax_up and self.guard == "none":
            yield Problem(
                "relax_up", "relax_up_without_guard", "without a guard relax_up would grow the anchor without bound"
            )

    def _outer_problems(self) -> Iterator[Problem]:
        if self.outer_optimizer not in OUTER_OPTIMIZERS:
            known = ", ".join(OUTER_OPTIMIZERS)
            text = f"{self.outer_optimizer!r} is no outer optimizer; use one of {known}"
            yield Problem("outer_optimizer", "outer_optimizer_unknown", text)
        if not 0.0 < self.outer_lr <= MAX_OUTER_LR:
            text = f"outer_lr must lie above 0 and be at most {MAX_OUTER_LR:g}, not {self.outer_lr:g}"
            yield Problem("outer_lr", "out_of_range", text)
        if not 0.0 <= self.outer_momentum < 1.0:
            text = f"outer_momentum must be at least 0 and below 1, not {self.outer_momentum:g}"
            yield Problem("outer_momentum", "out_of_range", text)
        if self.outer_optimizer == "none":
            for name, default in (("outer_lr", OUTER_LR), ("outer_momentum", OUTER_MOMENTUM)):
                text = f"{name} has no effect without an outer optimizer; leave it out"
                if getattr(self, name) != default:
                    yield Problem(name, "outer_unused", text)
        if self.non_finite not in NON_FINITE:
            text = f"{self.non_finite!r} is no policy for values that are not finite; use {' or '.join(NON_FINITE)}"
            yield Problem("non_finite", "non_finite_unknown", text)

    def _collective_problems(self) -> Iterator[Problem]:
        if not self.collective:
            return
        unused = {
            "outer_optimizer": (self.outer_optimizer != "none", "the outer optimizer is the controller's"),
            "bf16_wire": (self.bf16_wire, "sums travel in f32 between the ranks"),
            "reattach_seconds": (bool(self.reattach_seconds), "a session ends with its controller"),
        }
        for name, (given, because) in unused.items():
            if given:
                yield Problem(name, "cpu_modes_only", f"{because} in {self.mode}; leave {name} out or use a cpu_ mode")

    def _lookahead_problems(self) -> Iterator[Problem]:
        overlaps = self.mode.endswith("_async")
        if self.write_back not in WRITE_BACKS:
            known = ", ".join(WRITE_BACKS)
            yield Problem("write_back", "write_back_unknown", f"{self.write_back!r} is no write-back; use {known}")
        elif self.write_back != "delta" and not overlaps:
            yield Problem("write_back", "write_back_unused", f"nobody works ahead in {self.mode}; leave write_back out")
        if not 0.0 < self.blend_alpha <= 1.0:
            yield Problem("blend_alpha", "out_of_range", "blend_alpha must lie above 0 and be at most 1")
        elif self.blend_alpha != BLEND_ALPHA and self.write_back != "blend":
            yield Problem("blend_alpha", "alpha_unused", "blend_alpha belongs to the write-back blend; leave it out")
        if self.max_overshoot is None:
            return
        if self.max_overshoot < 0:
            what = "max_overshoot must not be negative; 0 waits at the round as cpu_cadence does"
            yield Problem("max_overshoot", "below_minimum", what)
        if not overlaps:
            what = f"nobody works ahead in {self.mode}; leave max_overshoot out"
            yield Problem("max_overshoot", "overshoot_unused", what)

    def _window_problems(self) -> Iterator[Problem]:
        if self.start_mode not in START_MODES:
            yield Problem("start_mode", "start_mode_unknown", f"start_mode must be one of {', '.join(START_MODES)}")
        if self.quorum < 2:
            yield Problem("quorum", "quorum_below_two", f"quorum must be at least 2 ranks, not {self.quorum}")
        if self.target is not None and self.target < self.quorum:
            yield Problem(
                "target",
                "target_below_quorum",
                f"target {self.target} is below the quorum {self.quorum}; raise it or leave it out",
            )
        if self.start_mode == "manual" and self.target is not None:
            yield Problem(
                "target",
                "manual_with_target",
                "a manual window is closed by the operator only; leave target out or use hybrid",
            )
        if self.window_seconds <= 0:
            yield Problem("window_seconds", "below_minimum", "window_seconds must be above 0")
        if self.cap_seconds < self.window_seconds:
            yield Problem(
                "cap_seconds",
                "cap_below_window",
                f"the hard cap of {self.cap_seconds:g} s is below the window of {self.window_seconds:g} s; "
                "raise cap_seconds",
            )

    def _time_problems(self) -> Iterator[Problem]:
        for name in WAITS:
            if not math.isfinite(getattr(self, name)):
                yield Problem(name, "not_finite", f"{name} must be a number of seconds: every wait has an end")
        if self.heartbeat_seconds < MIN_HEARTBEAT_SECONDS:
            what = f"heartbeat_seconds must be at least {MIN_HEARTBEAT_SECONDS:g}, not {self.heartbeat_seconds:g}"
            yield Problem("heartbeat_seconds", "below_minimum", what)
        elif self.heartbeat_timeout_seconds < 3 * self.heartbeat_seconds:
            yield Problem(
                "heartbeat_timeout_seconds",
                "heartbeat_timeout_too_short",
                f"a heartbeat timeout of {self.heartbeat_timeout_seconds:g} s is under three heartbeats; "
                f"use at least {3 * self.heartbeat_seconds:g}",
            )
        if self.stall_seconds < 10 * self.heartbeat_timeout_seconds:
            yield Problem(
                "stall_seconds",
                "stall_ceiling_too_short",
                f"stall_seconds must be at least ten heartbeat timeouts ({10 * self.heartbeat_timeout_seconds:g} s)",
            )
        if self.forming_seconds <= 0:
            yield Problem("forming_seconds", "below_minimum", "forming_seconds must be above 0")
        if self.max_failure is not None and self.max_failure < 0:
            yield Problem("max_failure", "below_minimum", "max_failure must not be negative")
        if self.reattach_seconds is not None and self.reattach_seconds < 0:
            yield Problem("reattach_seconds", "below_minimum", "reattach_seconds must not be negative; 0 means never")

    def _checkpoint_problems(self) -> Iterator[Problem]:
        for name in ("checkpoint_epochs", "checkpoint_rounds"):
            every = getattr(self, name)
            if every is not None and every < 1:
                yield Problem(name, "below_minimum", f"{name} must be at least 1, not {every}; leave it out for never")
        if self.keep_checkpoints < 1 and self.keep_checkpoints != -1:
            what = f"keep_checkpoints must be at least 1, or -1 to keep all, not {self.keep_checkpoints}"
            yield Problem("keep_checkpoints", "below_minimum", what)
