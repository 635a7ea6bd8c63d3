"""Runs in the collective modes, for tests over gloo (CPU ranks) and over NCCL (GPU ranks)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
from stage import Stage, Worker, wait_for

MODES = ("nccl_cadence", "nccl_sync")
BATCH_MS = "10"
SHARE = {"MARCHLINE_NCCL_HOSTID_PER_RANK": "1"}
"""lets ranks share a GPU"""


def freight(marchline: Stage, tmp: Path, hosts: dict[str, int], *, samples: int, **config: Any) -> tuple[int, Path]:
    """A run whose ranks write down what every element was before each of their batches; it is not started. Each does
    another number of batches a window, so that an average without their weights is another one."""
    ledger = tmp / "ledger.txt"
    params = {"samples": samples, "elements": 1000, "path": str(ledger)}
    quorum = sum(hosts.values())
    settings = {"mode": "nccl_cadence", "quorum": quorum, "params": params} | config
    if settings["mode"].endswith("_cadence"):
        settings["fixed_counts"] = [2 + 2 * rank for rank in range(quorum)]
    return marchline.create("freight.py:Freight", **settings), ledger


def bring(
    marchline: Stage, run: int, hosts: dict[str, int], env: dict[str, str] | None = None, gpus: int = 0
) -> list[Worker]:
    """Hosts that pad their batches, so that a window lasts; then Start. With ``gpus``, their ranks have one each, or
    share the first where there are too few."""
    options, ranks, workers = ("--emulate-ms-per-batch", BATCH_MS), sum(hosts.values()), []
    free = iter(range(gpus))
    for name, count in hosts.items():
        devices = f"cpu:{count}"
        if gpus >= ranks:
            devices = ",".join(f"cuda:{next(free)}" for _ in range(count))
        elif gpus:
            devices, env = ",".join(["cuda:0"] * count), (env or {}) | SHARE
        workers.append(marchline.worker(name, devices, *options, env=env))
    marchline.started(run, ranks)
    return workers


def rounds(marchline: Stage, run: int, count: int) -> dict[str, Any]:
    view = marchline.until(
        run, lambda view: view["round"] >= count or view["phase"] == "failed", f"{count} rounds to close"
    )
    assert view["phase"] != "failed", marchline.story(run)
    return view


def sessions(marchline: Stage, run: int) -> list[str]:
    """What was said of every session that came to live."""
    return [row["text"] for row in marchline.items(run, "events") if row["kind"] == "session_live"]


def of_rank(worker: Worker, number: int) -> psutil.Process:
    """The process of this rank of the cohort."""

    def found() -> psutil.Process | None:
        for child in worker.children():
            try:
                if child.environ().get("RANK") == str(number):
                    return child
            except psutil.Error:
                continue
        return None

    return wait_for(found, f"{worker.name} to have rank {number}")
