"""A world that fails, made as small as it still fails: fewer faults, hosts, ranks, options, epochs and samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from simulation.acts import HOST_ACTS, RANK_ACTS
from simulation.script import Act, HostLine, Script
from simulation.trial import Failure, hold

MOST_PLAYS = 400
"""to shrink one failure"""
NUMBERS = ("epochs", "samples", "batch_size", "initial_anchor")
SETTINGS = (
    *("max_failure", "max_batch_diff", "fixed_counts", "speed_hint", "guard", "gamma", "reduce", "model_mb"),
    *("uplink_mbit", "mode", "divergence", "lr", "local", "checkpoint_error", "non_finite"),
)
"""what a script may do without"""

Item = TypeVar("Item")


def shrink_failure(script: Script, failure: Failure) -> Script:
    """The smallest world found that breaks in the same place."""

    def fails(candidate: Script) -> bool:
        found = hold(candidate).failure
        return found is not None and found.place == failure.place

    return shrink(script, fails)


def shrink(script: Script, fails: Callable[[Script], bool]) -> Script:
    """The smallest world found for which ``fails`` still says so, after at most ``MOST_PLAYS`` questions."""
    plays = 0
    while True:
        for candidate in _smaller(script):
            plays += 1
            if plays > MOST_PLAYS:
                return script
            if fails(candidate):
                script = candidate
                break
        else:
            return script


def _smaller(script: Script) -> Iterator[Script]:
    """Worlds a step simpler than this one, the boldest steps first."""
    for acts in _without(script.acts):
        yield replace(script, acts=acts)
    for hosts in _without(script.hosts):
        yield from _with_hosts(script, hosts)
    for index, host in enumerate(script.hosts):
        for simpler in _simpler_hosts(host):
            yield from _with_hosts(script, [*script.hosts[:index], simpler, *script.hosts[index + 1 :]])
    yield from (replace(script, acts=acts) for acts in _of_lower_ranks(script.acts))
    for key in NUMBERS:
        value = int(script.run.get(key, "1"))
        for less in dict.fromkeys((1, value // 2, value - 1)):
            if 1 <= less < value:
                yield replace(script, run=script.run | {key: str(less)})
    for key in SETTINGS:
        if key in script.run:
            yield replace(script, run={other: value for other, value in script.run.items() if other != key})


def _simpler_hosts(host: HostLine) -> Iterator[HostLine]:
    if len(host.ms) > 1:
        yield replace(host, ms=host.ms[: len(host.ms) // 2])
        yield replace(host, ms=host.ms[:-1])
    for option in host.options:
        yield replace(host, options={key: value for key, value in host.options.items() if key != option})


def _with_hosts(script: Script, hosts: list[HostLine]) -> Iterator[Script]:
    """The world of these hosts, if it is one: what counts the ranks follows."""
    ranks = sum(len(host.ms) for host in hosts)
    if ranks < 2:
        return
    run = dict(script.run)
    numbers = dict(zip(_seats(script.hosts), range(script.ranks), strict=True))
    moved = {numbers[seat]: rank for rank, seat in enumerate(_seats(hosts))}
    acts = [
        act for act in (_moved(act, moved, {host.name for host in hosts}) for act in script.acts) if act is not None
    ]
    for key in ("quorum", "target"):
        if run.get(key) == str(script.ranks):
            run[key] = str(ranks)
    if "fixed_counts" in run:
        run["fixed_counts"] = ",".join(run["fixed_counts"].split(",")[:ranks])
    yield replace(script, hosts=hosts, run=run, acts=acts)


def _seats(hosts: list[HostLine]) -> list[tuple[str, int]]:
    """Host and place of each rank, in the order of their numbers."""
    return [(host.name, place) for host in hosts for place in range(len(host.ms))]


def _moved(act: Act, moved: dict[int, int], names: set[str]) -> Act | None:
    """The act by the new numbers of the ranks; none when whom it strikes is not there any more."""
    kind, *arguments = act.words
    if kind in HOST_ACTS:
        return act if arguments[0] in names else None
    if kind not in RANK_ACTS:
        return act
    rank = moved.get(int(arguments[0]))
    return None if rank is None else replace(act, words=[kind, str(rank), *arguments[1:]])


def _of_lower_ranks(acts: list[Act]) -> Iterator[list[Act]]:
    """The same acts, of which one strikes a rank of a lower number: then those above it may go."""
    for index, act in enumerate(acts):
        kind, *arguments = act.words
        if kind in RANK_ACTS and arguments[0] != "0":
            for lower in dict.fromkeys((0, int(arguments[0]) // 2)):
                words = [kind, str(lower), *arguments[1:]]
                yield [*acts[:index], replace(act, words=words), *acts[index + 1 :]]


def _without(items: Sequence[Item]) -> Iterator[list[Item]]:
    """The list without either half, then without each item."""
    half = len(items) // 2
    if half > 1:
        yield list(items[half:])
        yield list(items[:half])
    for index in range(len(items)):
        yield [*items[:index], *items[index + 1 :]]
