"""What every play needs on stage: versions, tensors, and what the small things take."""

from __future__ import annotations

from backend.core.round_cost import RoundCost
from wire.messages import WIRE_VERSION, TensorSpec, Versions

VERSIONS = Versions(marchline="0.1.0", wire=WIRE_VERSION, python="3.11.7", torch="2.13.0")
LOCAL_TENSOR = TensorSpec(name="batches", section="local", dtype="int64", shape=[1])
INSTANT = RoundCost(0.0, float("inf"))
RELAY_SECONDS, READY_SECONDS, CHECKPOINT_SECONDS = 0.04, 0.05, 0.01


def one_tensor(elements: int) -> list[TensorSpec]:
    """The layout of a model that is one tensor."""
    return [TensorSpec(name="w", section="params", dtype="float32", shape=[elements], offset=0)]


ONE_NUMBER = one_tensor(1)
