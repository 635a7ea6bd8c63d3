"""One parameter of 8.8, 280 and 560 MB that nobody moves comes out of every round with the same bits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import psutil
import pytest
import xxhash
from safetensors.numpy import load_file
from stage import PATHS, THOROUGH, Stage

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
COUNTS = [3, 1]
"""masses 3 and 1: an average of values, 0.75 * v + 0.25 * v, would round"""
WINDOWS = 2


@pytest.mark.parametrize(
    ("megabytes", "path"),
    [
        (8.8, "one of each"),
        *(pytest.param(megabytes, path, marks=THOROUGH) for megabytes in (8.8, 280, 560) for path in PATHS),
    ],
)
def test_unmoved_bits_stay(marchline: Stage, tmp_path: Path, megabytes: float, path: str) -> None:
    elements, ledger = int(megabytes * 1e6) // 4, tmp_path / "hashes.txt"
    controller = psutil.Process(marchline.process.pid)
    before = controller.memory_info().rss
    run = marchline.create(
        "bulk.py:Bulk",
        fixed_counts=COUNTS,
        params={"samples": WINDOWS * sum(COUNTS), "elements": elements, "path": str(ledger)},
    )
    for number, own in enumerate(PATHS if path == "one of each" else (path, path)):
        marchline.worker(f"host-{number}", "cpu:1", *PATHS[own])
    marchline.started(run, 2)
    view = marchline.ended(run, 400)
    assert (view["phase"], view["deaths"]) == ("done", []), marchline.story(run)
    rounds = marchline.items(run, "rounds")
    assert [row["realized"] for row in rounds] == [{"0": 3, "1": 1}] * WINDOWS
    hashes = {line.split()[1] for line in ledger.read_text().splitlines()}
    final = load_file(marchline.data_dir / marchline.items(run, "checkpoints")[-1]["path"])["w"]
    assert hashes == {xxhash.xxh3_64_hexdigest(np.ascontiguousarray(final))}, "some bits changed on the way"
    assert len(np.unique(final[:10_000])) > 9_900, "and they are no zeros"
    figures = marchline.metrics()
    late = figures["marchline_heartbeats_late_total"] + figures["marchline_controller_heartbeats_late_total"]
    peak = peak_memory(controller.pid) - before
    print(
        f"{megabytes} MB, {path}: rounds of {[round(row['reduce_seconds'], 2) for row in rounds]} s, "
        f"controller +{peak / (4 * elements):.2f} models at its peak, "
        f"{late:g} heartbeats over a period late, at worst "
        f"{figures['marchline_heartbeat_worst_late_seconds']:.2f} s late, "
        f"ours {figures['marchline_controller_heartbeat_worst_late_seconds']:.2f} s, "
        f"tick latency p99 {1000 * figures['marchline_tick_latency_p99_seconds']:.1f} ms, "
        f"worst {1000 * figures['marchline_tick_latency_worst_seconds']:.1f} ms, "
        f"event loop at worst {1000 * figures['marchline_event_loop_lag_worst_seconds']:.0f} ms late"
    )
    # A machine under test may be loaded: then a heartbeat can be late by itself, but not by a third of the timeout.
    worst = ("marchline_heartbeat_worst_late_seconds", "marchline_controller_heartbeat_worst_late_seconds")
    assert max(figures[name] for name in worst) < 10
    # Two consensus buffers, and what it maps of the hosts' arenas; a checkpoint takes no copy.
    assert peak < (len(COUNTS) + 2) * 4 * elements + 100e6, f"the controller took {peak / 1e6:.0f} MB"


def peak_memory(pid: int) -> int:
    """The most bytes that a process ever had in memory, shared ones included."""
    (line,) = [row for row in Path(f"/proc/{pid}/status").read_text().splitlines() if row.startswith("VmHWM")]
    return int(line.split()[1]) * 1024
