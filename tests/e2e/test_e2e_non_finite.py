"""Real processes, one of which turns NaN: the model stays finite, and every sample is accepted or listed as lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stage import THOROUGH, Stage
from test_e2e_exactness import final_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

COUNTS = (3, 1)
"""batches a window: both hold 2.5 more after each, and 3 more when rank 0 is alone"""


TWO_HOSTS = ("cpu:1", "cpu:1")


def play(
    marchline: Stage, windows: int = 4, devices: tuple[str, ...] = TWO_HOSTS, option: str = "", **changes: Any
) -> int:
    """A run of so many windows, to its end."""
    params = {"samples": windows * sum(COUNTS)} | changes.pop("params", {})
    counts = {"fixed_counts": list(COUNTS)} | changes
    run = marchline.create("spoiling.py:Spoiling", quorum=2, params=params, **counts)
    joined = 0
    for number, device in enumerate(devices):
        marchline.worker(f"host-{number}", device, *option.split())
        joined += int(device.split(":")[1])
        marchline.joined(run, joined)
    marchline.started(run, 2)
    marchline.ended(run)
    return run


def driven(marchline: Stage, run: int, into: Path) -> float:
    """What the model says, which must say it in each of its numbers."""
    model = final_model(marchline, run, into)
    values = np.concatenate([np.ravel(model[name]) for name in ("head", "body")])  # type: ignore[call-overload]
    assert np.isfinite(values).all(), marchline.story(run)
    assert (values == values[0]).all(), values
    return float(values[0])


def refusals(marchline: Stage, run: int) -> list[dict[str, Any]]:
    return [row for row in marchline.items(run, "events") if row["kind"] == "non_finite"]


@pytest.mark.parametrize(
    ("devices", "option"),
    [
        pytest.param(TWO_HOSTS, "", id="two hosts-in memory"),
        pytest.param(TWO_HOSTS, "--stream-data", id="two hosts-streamed", marks=THOROUGH),
        pytest.param(("cpu:2",), "", id="one host-in memory", marks=THOROUGH),
        pytest.param(("cpu:2",), "--stream-data", id="one host-streamed"),
    ],
)
def test_a_rank_that_turns_nan_is_left_out_of_its_round(
    marchline: Stage, tmp_path: Path, devices: tuple[str, ...], option: str
) -> None:
    run = play(marchline, devices=devices, option=option, params={"at": 1})
    view = marchline.view(run)
    assert view["phase"] == "done", marchline.story(run)
    rounds = marchline.items(run, "rounds")
    assert [row["realized"] for row in rounds] == [{"0": 3, "1": n} for n in (1, 0, 1, 1)]
    assert [row["samples"] for row in rounds] == [4, 3, 4, 4]
    assert driven(marchline, run, tmp_path) == 2.5 + 3 + 2.5 + 2.5, "exactly what was accepted"
    (event,) = refusals(marchline, run)
    host = f"host-{len(devices) - 1}"
    device = view["ranks"][1]["device"]
    assert event["text"].startswith(f"rank 1 ({host}/{device}) contributed nan in body[1, 2]: left out of round 1")
    (epoch,) = marchline.items(run, "epochs")
    (gone,) = epoch["samples_lost"]
    assert (gone["size"], gone["rank"], gone["reason"]) == (1, 1, "non-finite")
    assert epoch["samples_accepted"] == 15
    assert (view["samples_lost"], view["deaths"]) == (1, [])
    assert [rank["exclusions"] for rank in view["ranks"]] == [0, 1]


def test_the_policy_stop_saves_the_last_consensus(marchline: Stage, tmp_path: Path) -> None:
    run = play(marchline, non_finite="stop", params={"at": 1})
    view = marchline.view(run)
    assert view["phase"] == "failed", marchline.story(run)
    rank = f"rank 1 (host-1/{view['ranks'][1]['device']})"
    assert view["reason"] == f"NonFinite: Round 1 cannot be summed: {rank} contributed nan in body[1, 2]"
    assert driven(marchline, run, tmp_path) == 2.5


def test_when_every_rank_turns_nan_at_once_all_go_on_from_the_last_consensus(marchline: Stage, tmp_path: Path) -> None:
    run = play(marchline, fixed_counts=[2, 2], windows=4, params={"ranks": "0 1", "at": 2})
    view = marchline.view(run)
    assert view["phase"] == "done", marchline.story(run)
    rounds = marchline.items(run, "rounds")
    assert [row["realized"] for row in rounds] == [{"0": n, "1": n} for n in (2, 0, 2, 2)]
    assert driven(marchline, run, tmp_path) == 6.0
    assert [row["text"].split(" (")[0] for row in refusals(marchline, run)] == ["rank 0", "rank 1"]
    assert view["samples_lost"] == 4


def test_when_nobody_recovers_the_run_fails_with_the_last_consensus(marchline: Stage, tmp_path: Path) -> None:
    run = play(marchline, fixed_counts=[2, 2], windows=8, params={"ranks": "0 1", "at": 2, "times": 99})
    view = marchline.view(run)
    assert view["phase"] == "failed", marchline.story(run)
    assert view["reason"].startswith("AllRanksLost: All 2 ranks are dead"), view["reason"]
    assert "contributed nan in body[1, 2]" in view["reason"]
    assert len(view["deaths"]) == 2
    assert driven(marchline, run, tmp_path) == 2.0
    assert len(refusals(marchline, run)) == 6


def test_a_rank_that_works_ahead_starts_anew_all_the_same(marchline: Stage, tmp_path: Path) -> None:
    run = play(
        marchline, windows=20, mode="cpu_async", max_overshoot=4, params={"ranks": "1", "at": 5}, fixed_counts=[4, 2]
    )
    view = marchline.view(run)
    assert view["phase"] == "done", marchline.story(run)
    model = final_model(marchline, run, tmp_path)
    assert all(np.isfinite(np.asarray(values)).all() for values in model.values())
    assert len(refusals(marchline, run)) == 1
    (epoch,) = marchline.items(run, "epochs")
    assert {piece["rank"] for piece in epoch["samples_lost"]} == {1}
    assert epoch["samples_accepted"] + sum(piece["size"] for piece in epoch["samples_lost"]) == 80
    assert sum(row["samples"] for row in marchline.items(run, "rounds")) == epoch["samples_accepted"]
