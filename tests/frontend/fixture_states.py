"""Canned runs for looking at the dashboard: one in every phase, as the REST interface and the feed would tell them.

``python tests/frontend/fixture_server.py`` serves them; the browser tests and the screenshots use the same.
"""

from __future__ import annotations

import math
from typing import Any

WAITING, STAGING, FORMING, TRAINING, DONE, FAILED, STALE, WIDE, EARLY, HOSTILE, COLLECTIVE = range(1, 12)
"""run ids; the names say what each shows"""

SPEEDS = (20.0, 40.0, 80.0)
HOSTS = ("atlas", "birch", "cedar")
GIB = 1 << 30
BATCH = 32
EPOCH_SAMPLES = 14_380
EPOCHS = 8


def at(second: float) -> str:
    minute, rest = divmod(second, 60)
    return f"2026-11-29T12:{int(minute) % 60:02d}:{rest:06.3f}Z"


def member(host: int, ranks: list[int], *, emulate: float | None, state: str, cuda: bool = False) -> dict[str, Any]:
    name = HOSTS[host % 3] if host < 3 else f"node-{host:02d}"
    kind = ("cuda", "NVIDIA RTX 4090", 24 * GIB) if cuda else ("cpu", "", 0)
    return {
        "host": host,
        "name": name,
        "address": f"10.0.0.{11 + host}",
        "ranks": ranks,
        "devices": [
            {"id": f"{kind[0]}:{n}", "type": kind[0], "name": kind[1], "memory_bytes": kind[2]}
            for n in range(len(ranks))
        ],
        "versions": {
            "marchline": "0.1.0",
            "wire": 1,
            "python": "3.11.7",
            "torch": "2.13.0",
            "cuda": "13.0" if cuda else "",
            "nccl": "",
        },
        "emulate_ms_per_batch": emulate,
        "emulated": emulate is not None,
        "state": state,
        "joined_seconds_ago": 190 - host * 42,
        "last_heard_seconds": 0.4,
    }


def window(**changes: Any) -> dict[str, Any]:
    return {
        "open": True,
        "start_mode": "manual",
        "quorum": 2,
        "target": None,
        "joined_ranks": 0,
        "joined_hosts": 0,
        "window_seconds": 300,
        "cap_seconds": 600,
        "window_remaining_seconds": 252.0,
        "cap_remaining_seconds": 552.0,
        "armed": False,
        "verdict": "Open: 0 of the 2 ranks needed have joined.",
        "missing": [
            {
                "code": "quorum_not_met",
                "text": "2 more ranks must join",
                "cure": "Run the join command on another host, or lower the quorum.",
            }
        ],
        "strangers": {"count": 0, "sources": {}},
        "refusals": [],
        "probing": [],
        **changes,
    }


def base(run_id: int, name: str, phase: str, **changes: Any) -> dict[str, Any]:
    return {
        "id": run_id,
        "name": name,
        "job": "examples/digits.py:Digits",
        "mode": "cpu_cadence",
        "phase": phase,
        "reason": "",
        "stopped_by": "",
        "created_at": at(60),
        "started_at": None,
        "ended_at": None,
        "seconds": 0.0,
        "config": {
            "job": "examples/digits.py:Digits",
            "mode": "cpu_cadence",
            "batch_size": BATCH,
            "epochs": EPOCHS,
            "seed": 42,
            "start_mode": "manual",
            "quorum": 2,
            "target": None,
            "overhead_target": 0.04,
            "gamma": 1.0,
            "max_failure": None,
            "reattach_seconds": None,
        },
        "params": {"hidden": 64, "learning_rate": 0.003},
        "emulated": True,
        "window": None,
        "members": [],
        "world_size": 0,
        "epoch": 0,
        "epochs": EPOCHS,
        "round": 0,
        "global_step": 0,
        "samples_done": 0,
        "samples_total": EPOCH_SAMPLES,
        "ranks": [],
        "decision": "",
        "loss": None,
        "eval": None,
        "throughput": {
            "batches_per_second": None,
            "samples_per_second": None,
            "ideal_batches_per_second": None,
            "efficiency": None,
        },
        "samples_accepted": [],
        "deaths": [],
        "checkpoints": [],
        "session": None,
        **changes,
    }


def waiting() -> dict[str, Any]:
    return base(WAITING, "quiet-heron", "waiting", window=window(), emulated=False)


def staging() -> dict[str, Any]:
    """Staging with a host at the door, two refusals, strangers, and something missing in spite of the quorum."""
    state = window(
        joined_ranks=3,
        joined_hosts=3,
        target=None,
        verdict="3 ranks are here and 2 are needed; dogwood is still being probed.",
        missing=[
            {
                "code": "probing",
                "text": "1 host is still being probed",
                "cure": "It takes a few seconds; or turn it away.",
            }
        ],
        probing=[{"host": "dogwood", "address": "10.0.0.14"}],
        refusals=[
            {
                "host": "elm",
                "address": "10.0.0.21",
                "code": "job_mismatch",
                "seconds_ago": 48.0,
                "at": at(130),
                "reason": "examples/digits.py differs: sha256 9f2c41 here, 41ab07 on elm. Copy it there.",
            },
            {
                "host": "atlas",
                "address": "10.0.0.31",
                "code": "host_already_joined",
                "seconds_ago": 12.0,
                "at": at(166),
                "reason": "A host named atlas has already joined. Give this one another name with --name.",
            },
        ],
        strangers={"count": 17, "sources": {"10.0.0.99": 14, "192.168.7.20": 3}},
    )
    members = [member(n, [n], emulate=SPEEDS[n], state="admitted") for n in range(3)]
    members.append({**member(3, [3, 4], emulate=None, state="turned_away", cuda=True), "ranks": []})
    return base(STAGING, "brave-otter", "staging", window=state, members=members)


def rank_view(
    rank: int, *, state: str, planned: int, realized: int, steps: int, loss: float | None, ms: float | None
) -> dict[str, Any]:
    slow = rank % 3
    return {
        "rank": rank,
        "host": rank,
        "host_name": HOSTS[rank] if rank < 3 else f"node-{rank // 8:02d}",
        "device": "cpu:0" if rank < 3 else f"cuda:{rank % 8}",
        "state": state,
        "busy": state == "working" and rank == 2,
        "doing": state,
        "doing_seconds": 41 if state == "working" and rank == 2 else None,
        "planned": planned,
        "realized": realized,
        "anchor": slow == 2 and rank == 2,
        "ms_per_batch": ms,
        "emulated_ms": SPEEDS[slow] if rank < 3 else None,
        "steps": steps,
        "samples": steps * BATCH,
        "loss": loss,
        "compute_seconds": 0.79,
        "data_seconds": 0.01,
        "wait_seconds": 0.02,
        "reduce_seconds": 0.03,
        "rss_bytes": 412_000_000 + rank * 7_000_000,
        **(gpu_figures(rank) if rank >= 3 else {}),
    }


def gpu_figures(rank: int) -> dict[str, Any]:
    """As a host tells of its GPUs; every fifth is a part of one (MIG), whose use nobody can tell."""
    return {
        "device_utilisation": None if rank % 5 == 4 else 100 - rank * 7 % 60,
        "device_bytes": (13 + rank % 9) << 30,
        "device_peak_bytes": (11 + rank % 9) << 30,
        "device_total_bytes": 24 << 30,
    }


def forming() -> dict[str, Any]:
    ranks = [
        rank_view(n, state="idle" if n == 0 else "starting", planned=0, realized=0, steps=0, loss=None, ms=None)
        for n in range(3)
    ]
    members = [member(n, [n], emulate=SPEEDS[n], state="forming") for n in range(3)]
    return base(
        FORMING,
        "calm-lynx",
        "forming",
        members=members,
        ranks=ranks,
        world_size=3,
        window=window(open=False, joined_ranks=3, joined_hosts=3, missing=[]),
    )


def anchor_of(number: int) -> int:
    return 10 if number < 6 else 14 if number < 14 else 18


def counts_of(number: int, ranks: int, dead: dict[int, int]) -> dict[str, int]:
    anchor = anchor_of(number)
    share = {0: 4, 1: 2, 2: 1} if number >= 2 else {0: 1, 1: 1, 2: 1}
    return {
        str(r): anchor * share[r % 3] + (r * 7 + number) % 3 - (1 if number >= 2 else 0)
        for r in range(ranks)
        if dead.get(r, 10**9) >= number
    }


def loss_at(number: int) -> float:
    return 0.09 + 2.2 * math.exp(-number / 9) + 0.03 * math.sin(number * 1.7) * math.exp(-number / 40)


def decision_of(number: int) -> str:
    if number < 2:
        return "Measuring: every rank does 10 batches, so that their speeds can be compared."
    anchor = anchor_of(number)
    if number in (6, 14):
        before = anchor_of(number - 1)
        return f"Anchor {before} → {anchor} batches on rank 2: the reduce took 6.8 %, above its target of 5 %."
    return f"Anchor {anchor} batches on rank 2, the slow one. The reduce took 3.4 % of the window, target 5 %: holding."


def verdict_of(number: int) -> dict[str, str]:
    if number in (18, 19, 42):
        reason = "The replicas were 0.081 apart, above the guard's 0.05 and rising for 3 rounds."
        return {"verdict": "suppress_growth", "verdict_reason": reason}
    if number in (22, 45):
        reason = "The learning rate fell from 0.1 to 0.01 in one round, so the anchor is to shrink to 45 % of itself."
        return {"verdict": "nudge_down", "verdict_reason": reason}
    return {"verdict": "stable", "verdict_reason": "The replicas were 0.012 apart, within the guard's 0.05."}


def round_row(number: int, ranks: int = 3, dead: dict[int, int] | None = None) -> dict[str, Any]:
    planned = counts_of(number, ranks, dead or {})
    realized = {r: n if (number * 5 + int(r)) % 11 else max(1, n - 3) for r, n in planned.items()}
    ms = {r: SPEEDS[int(r) % 3] * (1 + 0.02 * math.sin(number + int(r))) for r in planned}
    compute = {r: realized[r] * ms[r] / 1000 for r in planned}
    longest = max(compute.values())
    return {
        "round": number,
        "at": at(120 + number),
        "epoch": number // 6,
        "attempt": 0,
        "global_step": 40 * number,
        "samples": sum(realized.values()) * BATCH,
        "seconds": longest + 0.03,
        "reduce_seconds": 0.03,
        "planned": planned,
        "realized": realized,
        "mass": float(sum(realized.values())),
        "anchor": anchor_of(number),
        "anchor_rank": 2,
        "ms_per_batch": ms,
        "compute_seconds": compute,
        "data_seconds": dict.fromkeys(planned, 0.012),
        "wait_seconds": {r: longest - compute[r] for r in planned},
        "load_seconds": dict.fromkeys(planned, 0.002),
        "divergence": 0.01,
        **verdict_of(number),
        "loss": loss_at(number),
        "bytes_up": 20_000,
        "bytes_down": 20_000,
        "decision": decision_of(number),
        "params_hash": "ab12",
    }


def epochs(done: int) -> list[dict[str, Any]]:
    return [
        {
            "epoch": e,
            "at": at(130 + 6 * e),
            "seconds": 6.2,
            "samples_accepted": EPOCH_SAMPLES,
            "samples_lost": [],
            "batches": 450,
            "loss": loss_at(6 * e + 5),
            "metrics": {"accuracy": 1 - 0.5 * math.exp(-(e + 1) / 1.6) - 0.02, "loss": loss_at(6 * e + 5) + 0.05},
        }
        for e in range(done)
    ]


EVENTS = [
    {
        "id": 1,
        "at": at(60),
        "kind": "run_created",
        "level": "info",
        "text": "Run created; the join window is open (manual, quorum 2).",
    },
    {"id": 2, "at": at(75), "kind": "host_joined", "level": "info", "text": "atlas joined with 1 device: rank 0."},
    {"id": 3, "at": at(81), "kind": "host_joined", "level": "info", "text": "birch joined with 1 device: rank 1."},
    {
        "id": 4,
        "at": at(83),
        "kind": "refused",
        "level": "warning",
        "text": "elm was refused: examples/digits.py differs from the controller's (job_mismatch).",
    },
    {"id": 5, "at": at(90), "kind": "host_joined", "level": "info", "text": "cedar joined with 1 device: rank 2."},
    {
        "id": 6,
        "at": at(118),
        "kind": "phase",
        "level": "info",
        "text": "Start pressed by the operator; the world forms with 3 ranks.",
    },
    {
        "id": 7,
        "at": at(120),
        "kind": "phase",
        "level": "info",
        "text": "Training begins: world of 3, 8 epochs of 14 380 samples.",
    },
]

DEATH = {
    "id": 1,
    "at": at(151),
    "rank": 1,
    "host": 1,
    "host_name": "birch",
    "device": "cpu:0",
    "reason": "the process was killed: out of memory, as its host says",
    "exit_code": -9,
    "signal": "SIGKILL",
    "exception": "",
    "message": "",
    "last_lines": "epoch 4: 61 batches\nRuntimeWarning: allocator retries: 3\n<script>alert('no')</script>",
    "last_step": 1266,
    "last_round": 31,
    "peak_rss_bytes": 15_900_000_000,
    "returned_samples": 896,
    "world_size": 3,
    "memory_kills": 1,
    "memory_limit_bytes": 16_000_000_000,
    "waited": {"0": 0.412, "2": 0.3},
    "recovery": {"detect": 0.021, "decide": 0.0, "resume": 1.304, "first_step": 0.26},
}


def training(run_id: int, name: str, rounds: int, *, ranks: int = 3, progress: float = 0.5) -> dict[str, Any]:
    """A view after so many closed rounds; ``progress`` is how far the next window is."""
    planned = counts_of(rounds, ranks, {})
    views = [
        rank_view(
            r,
            state="working",
            planned=planned[str(r)],
            realized=int(planned[str(r)] * min(1.0, progress * (1 + 0.05 * (r % 3)))),
            steps=(rounds * (72, 36, 18)[r % 3]),
            loss=loss_at(rounds) * (1 + 0.04 * (r % 3)),
            ms=SPEEDS[r % 3],
        )
        for r in range(ranks)
    ]
    epoch = rounds // 6
    members = [member(n, [n], emulate=SPEEDS[n], state="training") for n in range(3)]
    if ranks > 3:
        members = [
            member(h, list(range(h * 8, h * 8 + 8)), emulate=None, state="training", cuda=True)
            for h in range(ranks // 8)
        ]
    ideal = sum(1000 / SPEEDS[r % 3] for r in range(ranks))
    return base(
        run_id,
        name,
        "training",
        started_at=at(120),
        seconds=rounds * 1.03,
        members=members,
        ranks=views,
        world_size=ranks,
        epoch=epoch,
        round=rounds,
        global_step=rounds * 126,
        samples_done=int(EPOCH_SAMPLES * (rounds % 6 + progress) / 6),
        decision=decision_of(rounds),
        loss=loss_at(rounds),
        eval={"epoch": epoch - 1, "metrics": epochs(epoch)[-1]["metrics"]} if epoch else None,
        emulated=ranks == 3,
        throughput={
            "batches_per_second": ideal * 0.962,
            "samples_per_second": ideal * 0.962 * BATCH,
            "ideal_batches_per_second": ideal,
            "efficiency": 0.962,
        },
        samples_accepted=[EPOCH_SAMPLES] * epoch,
        window=window(open=False, joined_ranks=ranks, joined_hosts=len(members), missing=[]),
    )


def checkpoint(number: int, rounds: int, reason: str) -> dict[str, Any]:
    return {
        "checkpoint": number,
        "at": at(120 + rounds),
        "round": rounds,
        "epoch": rounds // 6,
        "global_step": rounds * 126,
        "reason": reason,
        "path": f"runs/5/checkpoint-{number}",
        "bytes": 21_144,
        "sha256": "7f3ac81b22d94e5f6a7b8c9d0e1f2a3b4c5d6e7f8091a2b3c4d5e6f708192a3b",
    }


def done() -> dict[str, Any]:
    view = training(DONE, "golden-march", 48, progress=0.0)
    ranks = [{**rank, "state": "left", "planned": 0, "realized": 0} for rank in view["ranks"]]
    return {
        **view,
        "phase": "done",
        "reason": "All 8 epochs were trained.",
        "ended_at": at(170),
        "ranks": ranks,
        "seconds": 49.6,
        "members": [{**m, "state": "left"} for m in view["members"]],
        "checkpoints": [checkpoint(0, 48, "finished")],
    }


def failed() -> dict[str, Any]:
    view = training(FAILED, "stormy-finch", 38, progress=0.3)
    ranks = [{**rank, "state": "left" if rank["rank"] == 0 else "dead"} for rank in view["ranks"]]
    second = {
        **DEATH,
        "id": 2,
        "memory_kills": 0,
        "waited": {},
        "recovery": {"detect": 0.004},
        "at": at(158),
        "rank": 2,
        "host": 2,
        "host_name": "cedar",
        "signal": "",
        "exit_code": 1,
        "last_round": 37,
        "reason": "the job raised an exception",
        "exception": "FloatingPointError",
        "message": "loss is not finite at step 1330",
        "last_lines": '  File "examples/digits.py", line 41, in training_step\nFloatingPointError: loss is not finite',
    }
    return {
        **view,
        "phase": "failed",
        "reason": "2 of 3 ranks died and 1 is fewer than the 2 that a cohort needs.",
        "ended_at": at(160),
        "ranks": ranks,
        "deaths": [DEATH, second],
        "checkpoints": [checkpoint(0, 37, "too_few_survivors")],
        "members": [{**m, "state": ("left", "lost", "lost")[m["host"]]} for m in view["members"]],
    }


def collective() -> dict[str, Any]:
    """GPUs that average among themselves, after one of them was lost: the second session is live."""
    view = training(COLLECTIVE, "bright-lattice", 33, ranks=16)
    lost = {**DEATH, "rank": 5, "host": 0, "host_name": HOSTS[0], "device": "cuda:5", "waited": {}, "world_size": 16}
    ranks = [{**rank, "host": rank["rank"] // 8, "host_name": HOSTS[rank["rank"] // 8]} for rank in view["ranks"]]
    ranks[5] = {**ranks[5], "state": "dead", "planned": 0, "realized": 0}
    session = {
        "generation": 1,
        "state": "live",
        "generator": 0,
        "transports": {str(r): f"NCCL 2.28.9 on {'eth0' if r < 8 else 'ens5'}" for r in range(16) if r != 5},
        "rebuilds": 1,
        "reason": "rank 5 died",
    }
    config = view["config"] | {"mode": "nccl_cadence"}
    return view | {"mode": "nccl_cadence", "config": config, "ranks": ranks, "deaths": [lost], "session": session}


def hostile() -> dict[str, Any]:
    """Names as an enemy would choose them: they must be text and nothing else."""
    name = "<img src=x onerror=alert(1)>" + "W" * 80
    host = {**member(0, [0], emulate=None, state="admitted"), "name": name, "address": "10.0.0.11"}
    return base(
        HOSTILE,
        name,
        "waiting",
        window=window(joined_ranks=1, joined_hosts=1, verdict=f"Waiting for {name}"),
        members=[host],
        emulated=False,
    )


def preview(view: dict[str, Any]) -> dict[str, Any]:
    """What the controller would foresee for a run whose window is open."""
    numbers = [rank for member in view["members"] for rank in member["ranks"]]
    ranks = [
        {"rank": rank, "ms_per_batch": 20.0 * 2**index, "source": "declared", "batches": 40 // 2**index, "share": 0.3,
         "idle_share": 0.004}
        for index, rank in enumerate(numbers)
    ]  # fmt: skip
    expected = {
        "anchor": 10, "anchor_rank": numbers[-1] if numbers else None, "window_batches": 70, "window_seconds": 0.81,
        "round_seconds": 0.012, "windows": 2, "epoch_seconds": 1.1, "idle_share": 0.004, "round_share": 0.015,
        "batches_per_second": 84.0, "efficiency": 0.96, "gain": 1.68,
    }  # fmt: skip
    reason = "Speeds are as the hosts declared them; a round is assumed to take 12 ms for 0.02 MB at 1 Gbit/s."
    found = len(numbers) > 1
    return {
        "ranks": ranks if found else [],
        "expectation": expected if found else None,
        "guess": False,
        "round_assumed": True,
        "reason": reason if found else "Too few ranks have joined.",
    }
