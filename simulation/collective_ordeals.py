"""A third of the ordeals, and of the random worlds, are of the collective modes: the same worlds and faults, and those
that sessions bring along.

Drawn by dice of their own, so that the others stay what they are.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

from backend.core.config import COLLECTIVE
from simulation.script import Act, HostLine, Script

SHARE = 1 / 3
STALLS = ("30.0", "30.0", "120.0")
"""seconds; under the longest one ranks give up joining by themselves, and are given up"""
ELSEWHERE = {"poison": "crooked", "spoil": "broken"}
"""faults of the CPU reduce, and what stands for them here"""
OTHERS = ("stop", "save", "abort", "away 6.0", "away 1.5")
ROUNDS, SESSIONS = ("open", "open", "commit", "commit", "summed"), ("name", "name", "join", "join", "joined", "joined")
"""moments of a round, and of a session"""


def in_sessions(seed: int, script: Script) -> Script:
    """The ordeal of a seed, which may be one of the collective modes."""
    dice = random.Random(f"{seed}/sessions")
    if dice.random() >= SHARE:
        return script
    run = {key: value for key, value in script.run.items() if key not in ("max_overshoot", "reattach_seconds")}
    run["mode"] = dice.choice(COLLECTIVE)
    run["stall_seconds"] = dice.choice(STALLS)
    if run["stall_seconds"] != "30.0":
        run["forming_seconds"] = dice.choice(["20.0", "150.0"])
    if dice.random() < 0.6:
        run["notice"] = dice.choice(["0.0", "0.001", "0.03", "0.5"])
    if dice.random() < 0.3:
        run["score"] = dice.choice(["2.0", "70.0"])
    acts = [act for act in script.acts if act.words[0] != "crash" or dice.random() < 0.4]  # nobody comes back
    script = replace(script, run=run, acts=[_translated(act, script, dice) for act in acts])
    if dice.random() < 0.7:
        script = _larger(script, dice)
    script.acts = [*script.acts, *_strikes(script, dice)]
    return script


def world_in_sessions(seed: int, script: Script) -> Script:
    """A random world, which may be one of the collective modes."""
    dice = random.Random(f"{seed}/sessions")
    if dice.random() >= SHARE:
        return script
    run = {key: value for key, value in script.run.items() if key not in ("max_overshoot", "write_back")}
    run["mode"] = dice.choice(COLLECTIVE)
    if run["mode"].endswith("_sync"):
        run.pop("speed_hint", None)
    return replace(script, run=run, acts=[_translated(act, script, dice) for act in script.acts])


def _translated(act: Act, script: Script, dice: random.Random) -> Act:
    kind, *rest = act.words
    if kind not in ELSEWHERE:
        return act
    times = rest[0] if kind == "spoil" else "1"
    return Act(act.at, [ELSEWHERE[kind], str(dice.randrange(script.ranks)), times])


def _larger(script: Script, dice: random.Random) -> Script:
    """Two ranks more, for whom a death is not the end at once."""
    pace, ranks = dice.choice([10.0, 20.0]), script.ranks
    hosts = [*script.hosts, HostLine(f"host-{len(script.hosts)}", [pace, pace], {"latency_ms": 1.0})]
    grown = {str(max(2, ranks)): str(ranks + 2), str(ranks + 2): str(ranks + 4)}
    run = script.run | {key: grown.get(script.run[key], "2") for key in ("quorum", "target") if key in script.run}
    run["samples"] = str(max(ranks + 2, int(run["samples"])))
    return replace(script, hosts=hosts, run=run)


def _strikes(script: Script, dice: random.Random) -> Iterator[Act]:
    """What strikes in sessions: often a death first, and then what meets the session that is made anew."""
    ranks = script.ranks
    if script.run.get("score") == "70.0" and dice.random() < 0.5:  # whoever scores dies, and another one is sent
        script.run["epochs"] = "2"
        paces = [ms for host in script.hosts for ms in host.ms]
        yield Act(round(dice.uniform(3.0, 30.0), 3), ["kill", str(paces.index(min(paces)))])
    if dice.random() < 0.7:
        yield Act((dice.choice(["open", "open", "commit"]), dice.choice([0, 0, 1, 2])), ["kill", _rank(dice, ranks)])
    if dice.random() < 0.12:  # and then nobody can make another one, or the controller looks away meanwhile
        act, unable = dice.choice(["mute", "outcast"]), dice.sample(range(ranks), min(ranks, dice.choice([1, ranks])))
        yield from (Act(("open", 0), [act, str(rank), "9"]) for rank in unable)
        if dice.random() < 0.5:
            yield Act((dice.choice(["name", "name", "join"]), 1), ["away", dice.choice(["1.5", "2.5"])])
    elif dice.random() < 0.2:  # one hangs instead of joining, or dies when it has done its part
        moment, number = dice.choice(
            [("join", 1), ("name", 1), ("summed", 0), ("summed", 1), ("joined", 1), ("joined", 1)]
        )
        hangs = moment in ("join", "name")
        yield Act((moment, number), ["hang", _rank(dice, ranks)] if hangs else ["kill", _nearest(script)])
    for _ in range(dice.choice([0, 1, 1, 2, 2, 3])):
        place = dice.choice(dice.choice([ROUNDS, SESSIONS, SESSIONS]))
        number = dice.choice([0, 0, 1, 2] if place in ROUNDS else [0, 1, 1, 1, 1, 2, 3])
        yield Act((place, number), _what(dice, script))


def _rank(dice: random.Random, ranks: int) -> str:
    return str(dice.randrange(ranks))


def _nearest(script: Script) -> str:
    """A rank that is heard first, when all of them speak at once."""
    near = min(script.hosts, key=lambda host: host.options.get("latency_ms", 1.0))
    return str(sum(len(host.ms) for host in script.hosts[: script.hosts.index(near)]))


def _what(dice: random.Random, script: Script) -> list[str]:
    rank, name = _rank(dice, script.ranks), dice.choice(script.hosts).name
    kind = dice.random()
    if kind < 0.35:
        return dice.choice([["kill", rank], ["hang", rank], ["hang", rank, dice.choice(["0.5", "20.0", "90.0"])]])
    if kind < 0.65:
        act = dice.choice(["mute", "outcast", "broken", "crooked", "echo", "nan"])
        return [act, rank, "1" if act in ("mute", "echo", "nan") else dice.choice(["1", "1", "2", "9"])]
    if kind < 0.9:
        return dice.choice(OTHERS).split()
    return dice.choice([f"unplug {name}", f"freeze {name} 2.0", f"relay {name}", f"slow {name} control 0.3"]).split()
