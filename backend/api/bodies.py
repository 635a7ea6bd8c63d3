"""What the REST interface takes: nothing unknown, nothing converted, everything bounded."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from backend.core.config import RunConfig

MAX_NUMBER = 1_000_000_000
Text = Annotated[str, Field(max_length=512)]
Count = Annotated[int, Field(ge=-MAX_NUMBER, le=MAX_NUMBER)]
Seconds = Annotated[float, Field(ge=-MAX_NUMBER, le=MAX_NUMBER, allow_inf_nan=False)]
Ratio = Annotated[float, Field(ge=-MAX_NUMBER, le=MAX_NUMBER, allow_inf_nan=False)]


class Body(BaseModel):
    """A request body: nothing unknown, nothing converted. What values mean is judged by ``RunConfig``."""

    model_config = ConfigDict(strict=True, extra="forbid")


class RunCreate(Body):
    """A new run; its join window opens at once. Only ``job`` is needed, or ``resume_from``: then the run goes on from
    a checkpoint, and what is not given is taken from the run that made it."""

    model_config = ConfigDict(
        strict=True,
        extra="forbid",
        json_schema_extra={
            "examples": [
                {
                    "job": "examples/digits.py:Digits",
                    "epochs": 5,
                    "start_mode": "manual",
                    "params": {"hidden": 64},
                }
            ]
        },
    )

    job: Text = ""
    resume_from: Annotated[str, Field(max_length=40)] | None = None
    """last, best, RUN, RUN:last, RUN:best or RUN:NUMBER"""
    name: Annotated[str, Field(max_length=100)] = ""
    params: Annotated[dict[str, Any], Field(max_length=256)] = Field(default_factory=dict)
    mode: Text = "cpu_cadence"
    precision: Text = "f32"
    batch_size: Count = 32
    epochs: Count = 1
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] = 42
    start_mode: Text = "auto"
    quorum: Count = 2
    target: Count | None = None
    window_seconds: Seconds = 300.0
    cap_seconds: Seconds = 600.0
    open_admission: bool = False
    gamma: Ratio = 1.0
    initial_anchor: Count = 10
    min_anchor: Count | None = None
    max_anchor: Count = 1000
    overhead_target: Ratio = 0.04
    max_batch_diff: Count | None = None
    fixed_counts: Annotated[list[Count], Field(max_length=4096)] | None = None
    speed_hint: Annotated[list[Ratio], Field(min_length=2, max_length=2)] | None = None
    guard: Text = "level"
    guard_threshold: Ratio | None = None
    meta_controller: bool = True
    relax_up: bool = False
    outer_optimizer: Text = "none"
    outer_lr: Ratio = 0.7
    outer_momentum: Ratio = 0.9
    bf16_wire: bool = False
    non_finite: Text = "exclude"
    max_overshoot: Count | None = None
    write_back: Text = "delta"
    blend_alpha: Ratio = 0.5
    heartbeat_seconds: Seconds = 1.0
    heartbeat_timeout_seconds: Seconds = 30.0
    forming_seconds: Seconds = 120.0
    stall_seconds: Seconds = 300.0
    max_failure: Ratio | None = None
    reattach_seconds: Seconds | None = None
    verify_consensus: bool = True
    checkpoint_epochs: Count | None = 1
    checkpoint_rounds: Count | None = None
    keep_checkpoints: Count = 3

    def config(self) -> RunConfig:
        """The same as the core's configuration; not checked yet."""
        return RunConfig(**self._values())

    def changes(self) -> dict[str, Any]:
        """What was given of a resumed run's configuration."""
        return {name: value for name, value in self._values().items() if name in self.model_fields_set}

    def _values(self) -> dict[str, Any]:
        values = self.model_dump(exclude={"resume_from"})
        if self.fixed_counts is not None:
            values["fixed_counts"] = tuple(self.fixed_counts)
        if self.speed_hint is not None:
            rank, ratio = self.speed_hint
            values["speed_hint"] = (int(rank) if rank == int(rank) else rank, ratio)
        return values


class WindowChange(Body):
    """What may change while the window is open. A ``target`` of null or 0 takes the target away."""

    quorum: Count | None = None
    target: Count | None = None


class WindowExtension(Body):
    """Keep the window, and its hard cap, open for longer."""

    seconds: Annotated[float, Field(gt=0, le=86400, allow_inf_nan=False)]


class SignIn(Body):
    """Exactly one of the two: a printed one-time ticket, or the operator token."""

    ticket: Annotated[str, Field(max_length=256)] | None = None
    token: Annotated[str, Field(max_length=1024)] | None = None
