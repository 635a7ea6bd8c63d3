"""Tables of ``benchmarks.reduce``. Pure."""

from __future__ import annotations

from typing import Any

STAGES = ("pack", "declare", "up", "sum", "down", "load")
"""of a round, as the controller tells them"""


def one_host(found: dict[str, Any]) -> list[str]:
    """Lines of the table by world and size."""
    lines = [
        "One host: a round against gloo's all_reduce, ms, median (least to most)",
        "",
        "| ranks | MB | Marchline | gloo | ratio | others' cores | turns dropped |",
        "|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in found["rows"]:
        cells = [row["world"], f"{row['megabytes']:g}", _ms(row["ours"]), _ms(row["gloo"]), f"**{row['ratio']:.2f}**"]
        lines.append(_line([*cells, *_noise(row)]))
    return lines


def links(found: dict[str, Any]) -> list[str]:
    """Lines of the table by hosts and encoding."""
    if "skipped" in found:
        return [f"Limited links were left out: {found['skipped']}."]
    lines = [
        f"Hosts on links of {found['mbit']:g} Mbit/s each way (tc tbf at both ends, burst {found['burst_bytes'] >> 10} "
        f"KiB, queue {found['queue_bytes'] >> 10} KiB), ms, median (least to most).",
        "The controller is at the hub, on the bridge, without a limit of its own, unless the row says so.",
        "",
        "| hosts | wire | Marchline | of the line | gloo | ratio | gloo bf16 | TCP stream | others' cores | dropped |",
        "|---:|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in found["rows"]:
        wire = f"{row['encoding']}{', controller limited too' if row['controller_limited'] else ''}"
        if "failed" in row:
            lines.append(_line([row["hosts"], wire, f"did not run: {row['failed']}"]))
            continue
        small = _ms(row["gloo_bf16"]) if "gloo_bf16" in row else "-"
        cells = [row["hosts"], wire, _ms(row["ours"]), f"{row['of_line']:.2f}", _ms(row["gloo"]), f"{row['ratio']:.2f}"]
        lines.append(_line([*cells, small, f"{row['raw_mbit']:.0f} Mbit/s", *_noise(row)]))
    return lines


def memory(found: dict[str, Any]) -> list[str]:
    """Lines of the table by hosts."""
    model = found["megabytes"]
    lines = [
        f"Peak resident memory at {model:g} MB, everything streamed (VmHWM, MB: shared mappings and memfd included; in",
        "brackets what is anonymous, which no other process maps). A rank maps its arena, which its relay maps too,",
        "and both consensus files of its host; a relay those and its ranks' arenas; the controller its two consensus.",
        "",
        "| hosts | controller | per further host | relay | rank |",
        "|---:|---:|---:|---:|---:|",
    ]
    for row in found["rows"]:
        growth = f"{row['growth_per_host']:.1%} of the model" if "growth_per_host" in row else "-"
        kinds = ("controller", "relay", "rank")
        sizes = [f"{row[kind] / 1e6:.0f} ({row['anonymous'][kind] / 1e6:.0f})" for kind in kinds]
        lines.append(_line([row["hosts"], sizes[0], growth, *sizes[1:]]))
    return lines


def ticks(found: dict[str, Any]) -> list[str]:
    """Lines of the table by layout."""
    lines = [
        f"The controller's pulse during rounds of {found['megabytes']:g} MB back to back, {found['seconds']:g} s, ms.",
        "Tick: from an event or deadline to its being handled (p50, p99 at most 19 % too long). Loop lag: how late a",
        "timer was served. A heartbeat is late by what it came later than a period after the one before: here, at the",
        "controller, and there, at an agent.",
        "",
        "| layout | rounds | round | tick p50 | p99 | max | loop lag max | heartbeat late, here | there |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in found["rows"]:
        layout = f"{row['hosts']} hosts, streamed" if row["stream"] else "one host, 2 ranks"
        names = ("tick_p50", "tick_p99", "tick_max", "loop_lag_max", "heartbeat_late_max", "heard_late_max")
        figures = [f"{row['pulse'][name] * 1000:.1f}" if name in row["pulse"] else "-" for name in names]
        lines.append(_line([layout, row["round"]["times"], _ms(row["round"]), *figures]))
    return lines


def split(found: dict[str, Any]) -> list[str]:
    """Lines of the table by layout."""
    lines = [
        "Where a round's time goes, ms, medians; the stages follow each other. pack: the slowest rank's values are in",
        "its arena. declare: the last contribution is declared. up: the last of it has come; folding and most summing",
        "happen meanwhile. sum: the last sum; in shared memory all folding and summing. down: the rest of the update,",
        "and the commit, at every rank. load: the slowest rank takes the consensus in.",
        "",
        f"| layout | MB | {' | '.join(STAGES)} | whole |",
        f"|---|---:|{'---:|' * (len(STAGES) + 1)}",
    ]
    for row in found["rows"]:
        layout = f"one host, {row['world']} ranks"
        if row["stream"]:
            layout = f"{row['world']} hosts at {row['mbit']:g} Mbit/s, {row['encoding']}"
        times = [row["stages_ms"][name] for name in STAGES]
        lines.append(_line([layout, f"{row['megabytes']:g}", *(f"{ms:.1f}" for ms in (*times, sum(times)))]))
    return lines


def _ms(figures: dict[str, float]) -> str:
    digits = 1 if figures["median_ms"] < 100 else 0
    return f"{figures['median_ms']:.{digits}f} ({figures['min_ms']:.{digits}f} to {figures['max_ms']:.{digits}f})"


def _noise(row: dict[str, Any]) -> list[str]:
    others = row["others"]
    return [f"{min(others):.2f} to {max(others):.2f}", str(row["dropped"])]


def _line(cells: list[Any]) -> str:
    return f"| {' | '.join(map(str, cells))} |"
