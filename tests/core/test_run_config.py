"""Refusals of a run's configuration: scheduler, guard, meta-controller."""

import json
import math

import pytest

from backend.core.config import RunConfig


def problems(**changes) -> list[tuple[str, str]]:
    return [(problem.field, problem.code) for problem in RunConfig(**({"job": "a.py:A"} | changes)).problems()]


def test_the_defaults_may_run():
    config = RunConfig(job="a.py:A")

    assert config.problems() == []
    assert (config.guard, config.guard_threshold, config.meta_controller, config.relax_up) == (
        "level",
        None,
        True,
        False,
    )
    assert (config.max_anchor, config.overhead_target, config.speed_hint) == (1000, 0.04, None)
    assert (config.outer_optimizer, config.outer_lr, config.outer_momentum) == ("none", 0.7, 0.9)
    assert json.loads(json.dumps(config.as_dict()))["guard"] == "level"


@pytest.mark.parametrize(
    "changes",
    [
        {"guard": "growth"},
        {"guard": "none"},
        {"guard_threshold": 0.3},
        {"meta_controller": False},
        {"speed_hint": (2, 2.5)},
        {"speed_hint": (0, 1.0)},
        {"speed_hint": (0, 64.0)},
        {"max_batch_diff": 1},
        {"min_anchor": 1},
        {"outer_optimizer": "nesterov"},
        {"outer_optimizer": "nesterov", "outer_lr": 1.0, "outer_momentum": 0.0},
        {"outer_optimizer": "nesterov", "outer_lr": 10.0, "outer_momentum": 0.999, "mode": "cpu_sync"},
        {"non_finite": "stop"},
        {"precision": "bf16"},
        {"precision": "fp16"},
        {"mode": "cpu_async"},
        {"mode": "cpu_async", "max_overshoot": 0},
        {"mode": "cpu_async", "write_back": "blend", "blend_alpha": 1.0},
        {"mode": "cpu_async", "relax_up": True},
    ],
)
def test_what_may_be_chosen(changes):
    assert problems(**changes) == []


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"guard": "trend"}, [("guard", "guard_unknown")]),
        ({"non_finite": "ignore"}, [("non_finite", "non_finite_unknown")]),
        ({"precision": "fp32"}, [("precision", "precision_unknown")]),
        ({"precision": ""}, [("precision", "precision_unknown")]),
        ({"guard_threshold": 0.0}, [("guard_threshold", "out_of_range")]),
        ({"guard_threshold": math.nan}, [("guard_threshold", "out_of_range")]),
        ({"guard_threshold": math.inf}, [("guard_threshold", "out_of_range")]),
        ({"guard": "growth", "guard_threshold": 0.1}, [("guard_threshold", "threshold_unused")]),
        ({"relax_up": True}, [("relax_up", "relax_up_needs_async")]),
        (
            {"relax_up": True, "mode": "cpu_async", "guard": "none"},
            [("relax_up", "relax_up_without_guard")],
        ),
        ({"mode": "nccl_async"}, [("mode", "async_needs_cpu")]),
        ({"mode": "nccl_cadence"}, []),
        ({"mode": "nccl_sync", "bf16_wire": True}, [("bf16_wire", "cpu_modes_only")]),
        ({"mode": "nccl_cadence", "outer_optimizer": "nesterov"}, [("outer_optimizer", "cpu_modes_only")]),
        ({"mode": "nccl_cadence", "reattach_seconds": 9.0}, [("reattach_seconds", "cpu_modes_only")]),
        ({"mode": "nccl_cadence", "reattach_seconds": 0.0}, []),
        ({"heartbeat_seconds": 0.0}, [("heartbeat_seconds", "below_minimum")]),
        ({"heartbeat_seconds": 1e-31}, [("heartbeat_seconds", "below_minimum")]),
        ({"heartbeat_timeout_seconds": 2.0}, [("heartbeat_timeout_seconds", "heartbeat_timeout_too_short")]),
        ({"stall_seconds": 299.0}, [("stall_seconds", "stall_ceiling_too_short")]),
        ({"stall_seconds": math.inf}, [("stall_seconds", "not_finite")]),
        ({"cap_seconds": math.inf}, [("cap_seconds", "not_finite")]),
        ({"forming_seconds": math.inf}, [("forming_seconds", "not_finite")]),
        ({"write_back": "average"}, [("write_back", "write_back_unknown")]),
        ({"write_back": "blend"}, [("write_back", "write_back_unused")]),
        ({"blend_alpha": 0.0, "write_back": "blend", "mode": "cpu_async"}, [("blend_alpha", "out_of_range")]),
        ({"blend_alpha": math.nan, "write_back": "blend", "mode": "cpu_async"}, [("blend_alpha", "out_of_range")]),
        ({"blend_alpha": 0.3, "mode": "cpu_async"}, [("blend_alpha", "alpha_unused")]),
        ({"max_overshoot": 3}, [("max_overshoot", "overshoot_unused")]),
        ({"max_overshoot": -1, "mode": "cpu_async"}, [("max_overshoot", "below_minimum")]),
        ({"speed_hint": (-1, 2.0)}, [("speed_hint", "rank_invalid")]),
        ({"speed_hint": (1.5, 2.0)}, [("speed_hint", "rank_invalid")]),
        ({"speed_hint": (1, 0.99)}, [("speed_hint", "out_of_range")]),
        ({"speed_hint": (1, 64.1)}, [("speed_hint", "out_of_range")]),
        ({"speed_hint": (1, math.nan)}, [("speed_hint", "out_of_range")]),
        ({"speed_hint": (1, 2.0), "mode": "cpu_sync"}, [("speed_hint", "hint_unused")]),
        ({"speed_hint": (1, 2.0), "fixed_counts": (1, 2)}, [("speed_hint", "hint_unused")]),
        ({"overhead_target": 0.0099}, [("overhead_target", "out_of_range")]),
        ({"overhead_target": math.nan}, [("overhead_target", "out_of_range")]),
        ({"max_batch_diff": 0}, [("max_batch_diff", "below_minimum")]),
        ({"min_anchor": 0}, [("min_anchor", "below_minimum")]),
        ({"initial_anchor": 0}, [("initial_anchor", "below_minimum")]),
        ({"max_anchor": 0}, [("max_anchor", "below_minimum")]),
        ({"outer_optimizer": "adam"}, [("outer_optimizer", "outer_optimizer_unknown")]),
        ({"outer_optimizer": "nesterov", "outer_lr": 0.0}, [("outer_lr", "out_of_range")]),
        ({"outer_optimizer": "nesterov", "outer_lr": 10.1}, [("outer_lr", "out_of_range")]),
        ({"outer_optimizer": "nesterov", "outer_lr": math.nan}, [("outer_lr", "out_of_range")]),
        ({"outer_optimizer": "nesterov", "outer_momentum": 1.0}, [("outer_momentum", "out_of_range")]),
        ({"outer_optimizer": "nesterov", "outer_momentum": -0.1}, [("outer_momentum", "out_of_range")]),
        ({"outer_optimizer": "nesterov", "outer_momentum": math.nan}, [("outer_momentum", "out_of_range")]),
        ({"outer_lr": 0.5}, [("outer_lr", "outer_unused")]),
        ({"outer_momentum": 0.5}, [("outer_momentum", "outer_unused")]),
    ],
)
def test_what_is_refused_and_under_which_name(changes, expected):
    assert problems(**changes) == expected
