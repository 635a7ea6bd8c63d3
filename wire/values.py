"""The values inside messages (``wire.messages`` gives them out again, so that one import is enough)."""

from __future__ import annotations

from typing import Any

import msgspec

from wire.numbers import Amount, Count, Number, Word
from wire.ranges import Ranges as Ranges


class Record(msgspec.Struct, frozen=True):
    """A value inside messages, without a tag of its own."""


class Device(Record, frozen=True):
    """One device a host offers. ``id`` is unique within the host: ``cpu:0``, ``cuda:1``."""

    id: str
    type: str
    """cpu or cuda"""
    name: str = ""
    memory_bytes: Count = 0


class Versions(Record, frozen=True):
    """What runs on a host; absent parts are empty strings."""

    marchline: str
    wire: Count
    python: str
    torch: str = ""
    cuda: str = ""
    nccl: str = ""


class TensorSpec(Record, frozen=True):
    """One tensor of the model's layout, in arena order.

    ``section`` is ``params`` or ``buffers`` (averaged, f32 in the arena) or ``local`` (kept on the rank). ``offset``
    counts f32 elements from the start of the whole arena; -1 for ``local`` tensors and for aliases. ``alias_of`` names
    the tensor whose storage a tied tensor shares.
    """

    name: str
    section: str
    dtype: str
    shape: list[Count]
    offset: Number = -1
    alias_of: str = ""
    frozen: bool = False
    """a parameter that needed no gradient when the model was built; it travels only if it moves all the same"""


class RankAssignment(Record, frozen=True):
    """A rank's number and the device that it owns on its host."""

    rank: Count
    local_rank: Count
    device: str


class TrainingPlan(Record, frozen=True):
    """What every rank of the cohort must agree on; frozen when the world forms."""

    run_id: Count
    job: str
    """``path/file.py:Name`` below the worker's own job directory"""
    params: dict[str, Any]
    mode: str
    """cpu_sync, cpu_cadence, cpu_async, nccl_sync, nccl_cadence"""
    batch_size: Count
    epochs: Count
    seed: Count
    gamma: float
    verify_consensus: bool
    """ranks report a hash of the consensus that they adopted after every round"""
    total_samples: Count
    write_back: str = "delta"
    """what a rank that worked on while the round was open does with its own progress: overwrite, blend or delta"""
    blend_alpha: float = 0.5
    """blend: the consensus' share of what the rank then holds"""
    resumed: bool = False
    """fetch your saved state before you are ready"""
    precision: str = "f32"
    """f32, bf16 or fp16: what autocast lowers training and evaluation to"""


class RankProgress(Record, frozen=True):
    """What the agent reads from a rank's shared-memory counter; user code cannot starve it."""

    rank: Count
    state: Word
    """starting, idle, working, reducing, evaluating, saving, exited"""
    steps: Count
    """local optimizer steps since the rank started"""
    state_seconds: Amount
    """how long the rank has been in this state, by the host's monotonic clock"""
    rss_bytes: Count = 0
    device_utilisation: Count | None = None
    """share of the last moment in which the rank's GPU was busy, in percent, by whomever; none where nobody can tell"""
    device_bytes: Count | None = None
    """memory of that GPU that is in use, by whomever"""
    device_peak_bytes: Count | None = None
    """the most that the rank's own tensors took of it at once"""


class ExitCause(Record, frozen=True):
    """Why a rank's process ended, as far as its host can tell."""

    code: Number
    """exit code; negative for a signal"""
    signal: str = ""
    """SIGKILL, SIGSEGV, ... by name"""
    exception: str = ""
    """exception type, when the rank could still say it"""
    message: str = ""
    last_lines: str = ""
    """end of the rank's stderr, at most 4 KiB"""
    last_step: Count = 0
    peak_rss_bytes: Count = 0
    clean: bool = False
    """the rank was told to stop and did"""
    memory_kills: Count = 0
    """processes of the host's control group that the kernel killed for memory just then, when that explains this end"""
    memory_limit_bytes: Count = 0
    """the limit that was reached; 0 when there is none, or none that the kernel tells"""
    seen_seconds_ago: Amount = 0.0
    """from the process's end to this report"""
