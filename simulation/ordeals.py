"""Random ordeals: a seed draws a small world, what may strike it, and how often (swarm: most seeds know few kinds).

Two phases. Until ``calm`` the faults of the seed strike, in a burst or spread; then what can heal has healed, and the
rest of the world must come to an end within its bounds.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from backend.core.config import MODES
from simulation.collective_ordeals import in_sessions
from simulation.script import Act, HostLine, Script

TIMEOUT, STALL = 3.0, 30.0
"""seconds: heartbeat timeout and stall ceiling of every ordeal"""
MOST_BATCHES = 60
CLASSES = (
    *("death", "death", "hang", "freeze", "cut", "link", "slow", "plan", "plane", "disk", "away", "crash"),
    *("operator", "door", "speed", "data"),
)
TOGETHER = ("death", "death", "hang", "hang", "cut", "away", "operator")
"""what may strike at the same moment, on purpose"""


def draw(seed: int) -> Script:
    """The ordeal of a seed."""
    dice = random.Random(seed * 7919 + 5)
    hosts = list(_hosts(dice))
    ranks = sum(len(host.ms) for host in hosts)
    batches = dice.randint(1, MOST_BATCHES)
    batch_size = dice.choice([1, 1, 4])
    epochs = dice.choice([1, 1, 2])
    mode = dice.choice([mode for mode in MODES if mode.startswith("cpu_")])
    run: dict[str, object] = {
        "wires": 1,
        "samples": max(ranks, batches * batch_size - dice.choice([0, 0, batch_size // 2])),
        "batch_size": batch_size,
        "epochs": epochs,
        "mode": mode,
        "window_seconds": 5.0,
        "cap_seconds": 10.0,
        "heartbeat_timeout_seconds": TIMEOUT,
        "stall_seconds": STALL,
        "forming_seconds": 20.0,
        "initial_anchor": dice.choice([1, 2, 5]),
        "dice": seed,
        "inbox": dice.choice([0.0, 0.0, 0.001, 0.05, 0.3]),
        "linger": dice.choice([0.0, 0.5, 20.0]),
        "down": dice.choice([0.0, 0.0, 0.002, 0.02]),
    }
    run |= dice.choice([{"reduce": 0.0}, {"reduce": 0.05}, {"reduce": 0.05}, {}])
    run |= dice.choice([{}, {}, {"max_failure": 2.0}, {"max_failure": 0.5}, {"max_failure": 0.0}])
    run |= dice.choice([{}, {"local": 1}])
    run |= dice.choice([{}, {}, {"checkpoint_rounds": 1}, {"checkpoint_rounds": 2}])
    run |= dice.choice([{}, {}, {"non_finite": "stop"}])
    if mode == "cpu_async":
        run |= dice.choice([{}, {"max_overshoot": 4}, {"max_overshoot": 0}])
    run |= _door(dice, ranks)
    script = Script({key: str(value) for key, value in run.items()}, hosts)
    script.acts = [*_acts(dice, script, ranks, batches * epochs), *_lives(seed, script), *_relays(seed, script)]
    return in_sessions(seed, script)


def _relays(seed: int, script: Script) -> Iterator[Act]:
    """Some relays stand still as a round opens or is committed, or at any moment."""
    dice = random.Random(f"{seed}/relays")
    if dice.random() < 0.1:
        moment: float | tuple[str, int] = (dice.choice(["open", "commit"]), dice.choice([-1, 0, 1, 2, 4]))
        seconds = dice.choice([[], [], [_for(dice, 0.3, 1.5, TIMEOUT, 6.0)]])
        moment = dice.choice([moment, round(dice.uniform(0.3, 2.0), 4)])
        yield Act(moment, ["stop_relay", _host(dice, script), *seconds])


def _lives(seed: int, script: Script) -> Iterator[Act]:
    """Some controllers die after a round, and some of those are not waited for."""
    dice = random.Random(f"{seed}/lives")
    script.run |= {"reattach_seconds": dice.choice(["0.0", "8.0"])} if dice.random() < 0.1 else {}
    if dice.random() < 0.3:
        yield Act((dice.choice(["open", "commit"]), dice.choice([0, 1, 1, 2, 3, 5])), _crash(dice, script, 0))


def _hosts(dice: random.Random) -> Iterator[HostLine]:
    for index in range(dice.choice([1, 2, 2, 3, 3, 4])):
        count = dice.choice([1, 1, 2]) if index else dice.choice([1, 2, 2])
        options = {"latency_ms": dice.choice([0.1, 1.0, 20.0])}
        if dice.random() < 0.2:
            options["jitter"] = 0.3
        yield HostLine(f"host-{index}", [dice.choice([10.0, 10.0, 20.0, 50.0, 150.0]) for _ in range(count)], options)


def _door(dice: random.Random, ranks: int) -> dict[str, object]:
    """How the window closes: mostly at once; by hand, by the clock, or never."""
    mode = dice.choice(["auto", "auto", "auto", "manual", "hybrid"])
    door: dict[str, object] = {"start_mode": mode, "quorum": max(2, ranks)}
    if mode != "manual":
        door["target"] = max(2, ranks)
        if dice.random() < 0.15:
            door |= {"quorum": 2, "target": ranks + 2}
    return door


def _acts(dice: random.Random, script: Script, ranks: int, batches: int) -> Iterator[Act]:
    slowest = max(ms for host in script.hosts for ms in host.ms)
    formed = 0.3
    seconds = 0.5 + batches * slowest / 1000 / ranks
    if script.run["start_mode"] == "manual" and dice.random() < 0.85:
        yield Act(0.25, ["start"])
    kinds = [kind for kind in dict.fromkeys(CLASSES) if dice.random() < 0.35] or ["death"]
    if dice.random() < 0.25:  # two at once, as the round turns and before anybody hears of it
        script.run["down"] = "0.02"
        both = (dice.choice(["open", "commit", "commit"]), dice.choice([0, 0, 1]))
        for kind in dice.sample(TOGETHER, 2):
            yield Act(both, STRIKES[kind](dice, script, ranks))
    at = 0.0
    for _ in range(dice.choice([0, 1, 1, 2, 2, 3, 4, 6, 9])):
        if dice.random() < 0.1:
            at = dice.uniform(0.0, formed)
        elif at and dice.random() < 0.5:
            at += dice.choice([0.0, 0.001, 0.01, 0.1]) * dice.random()
        else:
            at = formed + dice.uniform(0.0, seconds)
        moment = (dice.choice(["open", "commit"]), dice.choice([-1, 0, 0, 1, 2, 4])) if dice.random() < 0.3 else None
        yield Act(moment or round(at, 4), STRIKES[dice.choice(kinds)](dice, script, ranks))


# ------------------------------------------------------------------------------------------------- what strikes


def _host(dice: random.Random, script: Script) -> str:
    return dice.choice(script.hosts).name


def _for(dice: random.Random, *seconds: float) -> str:
    return repr(round(dice.choice(seconds) * dice.uniform(0.8, 1.2), 3))


def _death(dice: random.Random, script: Script, ranks: int) -> list[str]:
    rank = str(dice.randrange(ranks))
    return dice.choice([["kill", rank], ["kill", rank], ["kill", rank, "SIGSEGV"], ["quit", rank]])


def _hang(dice: random.Random, script: Script, ranks: int) -> list[str]:
    rank = str(dice.randrange(ranks))
    return dice.choice([["hang", rank], ["hang", rank, _for(dice, 0.1, 2.0, 25.0, 60.0)], ["deaf", rank]])


def _freeze(dice: random.Random, script: Script, ranks: int) -> list[str]:
    name = _host(dice, script)
    return dice.choice([["freeze", name], ["freeze", name, _for(dice, 0.2, 1.5, TIMEOUT, 6.0, 40.0)]])


def _cut(dice: random.Random, script: Script, ranks: int) -> list[str]:
    return ["cut", _host(dice, script), dice.choice(["up", "down", "both"]), _for(dice, 0.05, 0.5, 1.5, TIMEOUT, 8.0)]


def _link(dice: random.Random, script: Script, ranks: int) -> list[str]:
    return [dice.choice(["unplug", "relay", "relay", "reset"]), _host(dice, script)]


def _slow(dice: random.Random, script: Script, ranks: int) -> list[str]:
    link = dice.choice(["join", "control", "data", "down"])
    return ["slow", _host(dice, script), link, _for(dice, 0.005, 0.05, 0.5)]


def _plan(dice: random.Random, script: Script, ranks: int) -> list[str]:
    act, rank = dice.choice(["lose", "lose", "double"]), str(dice.randrange(ranks))
    # In cpu_async the next plan would follow the lost one, a gap that the frames' numbers do not let through.
    return ["double" if script.run["mode"] == "cpu_async" else act, rank]


def _plane(dice: random.Random, script: Script, ranks: int) -> list[str]:
    return dice.choice([["poison", _host(dice, script)], ["spoil", "1"], ["spoil", "2"], ["spoil", "9"]])


def _disk(dice: random.Random, script: Script, ranks: int) -> list[str]:
    return ["disk", dice.choice(["full", "silent", "ok"])]


def _away(dice: random.Random, script: Script, ranks: int) -> list[str]:
    return ["away", _for(dice, 0.6, 1.5, 2.3, 6.0, 50.0)]


def _crash(dice: random.Random, script: Script, ranks: int) -> list[str]:
    return ["crash", str(dice.choice([0, 1, 2, 5, 20, -1, -1]))]


def _operator(dice: random.Random, script: Script, ranks: int) -> list[str]:
    return dice.choice(
        [["stop"], ["stop"], ["abort"], ["start"], ["save"], ["save"], ["extend", "4.0"], ["change", "2"]]
    )


def _at_the_door(dice: random.Random, script: Script, ranks: int) -> list[str]:
    name = _host(dice, script)
    late = ["join", f"late-{dice.randrange(3)}", "20.0"]
    return dice.choice([["leave", name], ["stranger"], late, late, ["turn_away", str(dice.randrange(3))]])


def _speed(dice: random.Random, script: Script, ranks: int) -> list[str]:
    rank = str(dice.randrange(ranks))
    return dice.choice([["pause", rank, _for(dice, 0.3, 5.0)], ["speed", rank, _for(dice, 5.0, 100.0, 400.0)]])


def _data(dice: random.Random, script: Script, ranks: int) -> list[str]:
    batch_size = int(script.run["batch_size"])
    batches = -(-int(script.run["samples"]) // batch_size)
    if dice.random() < 0.6:
        return ["nan", str(dice.randrange(ranks)), str(dice.choice([1, 1, 3, 40]))]
    return ["curse", str(dice.choice([0, 0, 0, 1])), str(batch_size * dice.randrange(batches))]


STRIKES: dict[str, Callable[[random.Random, Script, int], list[str]]] = {
    "death": _death,
    "hang": _hang,
    "freeze": _freeze,
    "cut": _cut,
    "link": _link,
    "slow": _slow,
    "plan": _plan,
    "plane": _plane,
    "disk": _disk,
    "away": _away,
    "crash": _crash,
    "operator": _operator,
    "door": _at_the_door,
    "speed": _speed,
    "data": _data,
}
