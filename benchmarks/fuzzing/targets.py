"""Every decoder that reads bytes of somebody else. Typed refusals are what decoders are for, and no findings."""

from __future__ import annotations

from benchmarks.fuzzing import core_targets, file_targets, frame_targets, stream_targets
from benchmarks.fuzzing.laws import Target

TARGETS: dict[str, Target] = {
    target.name: target
    for part in (frame_targets, stream_targets, file_targets, core_targets)
    for target in part.TARGETS
}
