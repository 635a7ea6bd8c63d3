"""Random worlds: a seed draws hosts, speeds, links, epochs and faults."""

from __future__ import annotations

import random
from collections.abc import Iterator

from backend.core.config import MODES
from simulation.collective_ordeals import world_in_sessions
from simulation.script import Act, HostLine, Script

MOST_BATCHES = 1500
"""of a world, so that ten thousand of them can be played"""
SPEEDS = (1.0, 1.0, 1.5, 2.0, 2.5, 4.0, 8.0, 16.0, 64.0)
RANK_FAULTS = ("kill", "kill", "quit", "deaf", "pause", "pause", "speed", "speed")
HOST_FAULTS = ("unplug", "freeze", "relay", "poison")


def draw(seed: int) -> Script:
    """The world of a seed."""
    dice = random.Random(seed)
    ranks = min(64, round(2 * 36 ** dice.random()))
    base = dice.choice([1.0, 4.0, 10.0])
    script = Script(hosts=list(_hosts(dice, ranks, base)))
    batch_size = dice.choice([1, 1, 3, 8, 32])
    epochs = dice.choice([1, 1, 2, 3])
    batches = _epoch_batches(dice, ranks, epochs)
    tail = dice.choice([0, 0, 1, batch_size // 2])
    run: dict[str, object] = {
        "samples": max(ranks, (batches - 1) * batch_size + (tail or batch_size)),
        "batch_size": batch_size,
        "epochs": epochs,
        "mode": dice.choice([mode for mode in MODES if mode.startswith("cpu_")]),
        "quorum": ranks,
        "target": ranks,
        "window_seconds": 5.0,
        "cap_seconds": 10.0,
        "heartbeat_timeout_seconds": 3.0,
        "stall_seconds": 30.0,
        "initial_anchor": dice.choice([1, 2, 10, 30]),
        "gamma": dice.choice([1.0, 1.0, 0.0, 0.5, -1.0]),
        "dice": seed,
    }
    run |= dice.choice([{"reduce": 0.0}, {"reduce": 0.1}, {"model_mb": 1.0, "uplink_mbit": 100.0}, {}])
    run |= dice.choice([{}, {}, {"max_failure": 2.0}, {"max_failure": 0.5}, {"max_batch_diff": 2}])
    run |= dice.choice([{}, {}, {"divergence": 0.01}, {"divergence": 0.3}, {"guard": "growth", "divergence": 0.1}])
    run |= dice.choice([{}, {}, {"lr": 0.1}, {"local": 1}, {"checkpoint_error": "disk_full"}])
    if run["mode"] == "cpu_async":
        run |= dice.choice([{}, {}, {"max_overshoot": 0}, {"max_overshoot": 3}])
        run |= dice.choice([{}, {}, {"write_back": "overwrite"}, {"write_back": "blend"}])
    if dice.random() < 0.1:
        run["fixed_counts"] = ",".join(str(dice.randint(1, 5)) for _ in range(ranks))
    elif run["mode"] != "cpu_sync" and dice.random() < 0.2:
        run["speed_hint"] = f"{dice.randrange(ranks)},{dice.choice([1.5, 4.0, 64.0])}"
    script.run = {key: str(value) for key, value in run.items()}
    script.acts = list(_acts(dice, script, batches * epochs))
    _spoil(random.Random(f"{seed}/nan"), script)
    return world_in_sessions(seed, script)


def _hosts(dice: random.Random, ranks: int, base: float) -> Iterator[HostLine]:
    left = ranks
    while left:
        count = min(left, dice.choice([1, 1, 2, 3, 8]))
        options = {
            "latency_ms": dice.choice([0.1, 1.0, 1.0, 20.0, 150.0]),
            "jitter": dice.choice([0.0, 0.0, 0.05, 0.4]),
            "drift": dice.choice([0.0, 0.0, 0.5]),
            "drift_seconds": dice.choice([2.0, 20.0]),
            "data_ms": dice.choice([0.0, 0.0, base / 4, base * 2]),
            "fill_ms": dice.choice([0.0, 0.0, 20.0]),
        }
        kept = {key: value for key, value in options.items() if value}
        yield HostLine(f"host-{ranks - left}", [base * dice.choice(SPEEDS) for _ in range(count)], kept)
        left -= count


def _epoch_batches(dice: random.Random, ranks: int, epochs: int) -> int:
    most = MOST_BATCHES // epochs
    kind = dice.choice(["tiny", "short", "long"])
    if kind == "tiny":  # fewer batches than ranks, or hardly more
        return dice.randint(1, 2 * ranks)
    if kind == "short":  # about a window
        return min(most, dice.randint(1, 12 * ranks))
    return dice.randint(min(most, 4 * ranks), most)


def _acts(dice: random.Random, script: Script, batches: int) -> Iterator[Act]:
    """Faults, and now and then the operator. Half of them strike right after another one, while it is being handled."""
    paces = [ms for host in script.hosts for ms in host.ms]
    formed = 0.06 + 4.0 * max(host.options.get("latency_ms", 1.0) for host in script.hosts) / 1000
    seconds = 0.3 + 2.0 * batches / sum(1000.0 / ms for ms in paces)
    at = 0.0
    for _ in range(dice.choice([0, 0, 1, 1, 2, 3, 6])):
        if dice.random() < 0.05:
            at = dice.uniform(0.0, formed)
        elif at > formed and dice.random() < 0.5:
            at += dice.choice([0.0, 0.002, 0.05, 0.3]) * dice.random()
        else:
            at = formed + dice.uniform(0.0, seconds)
        moment = (dice.choice(["open", "commit"]), dice.choice([-1, 0, 1, 2, 5, 9])) if dice.random() < 0.3 else None
        yield Act(moment or round(at, 4), _what(dice, script, paces))


def _spoil(dice: random.Random, script: Script) -> None:
    """Ranks turn NaN, in every third world; by dice of their own, so that the world is otherwise what it was."""
    for _ in range(dice.choice([0, 0, 0, 0, 1, 2, 5])):
        moment = (dice.choice(["open", "commit"]), dice.choice([-1, 0, 0, 1, 2, 3, 5]))
        batches = dice.choice([1, 1, 3, 1000])
        script.acts.append(Act(moment, ["nan", str(dice.randrange(script.ranks)), str(batches)]))
    if dice.random() < 0.1:
        script.run["non_finite"] = "stop"


def _what(dice: random.Random, script: Script, paces: list[float]) -> list[str]:
    kind = dice.random()
    if kind < 0.05:
        return [dice.choice(["stop", "stop", "abort"])]
    if kind < 0.1:
        return dice.choice([["lag", "5.0"], ["lr", "0.001"]])
    if kind < 0.42:
        return [dice.choice(HOST_FAULTS), dice.choice(script.hosts).name]
    rank, fault = dice.randrange(len(paces)), dice.choice(RANK_FAULTS)
    values = {"pause": dice.choice([0.05, 0.5, 4.0]), "speed": paces[rank] * dice.choice([0.5, 2.0, 16.0])}
    return [fault, str(rank), *([repr(values[fault])] if fault in values else [])]
