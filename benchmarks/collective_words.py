"""Tables of ``benchmarks.collective``. Pure."""

from __future__ import annotations

import statistics
from typing import Any

TARGET = 1.15
"""a round may take so many times what the bare sum takes"""
MEMORY = {
    "allocated": "torch, allocated",
    "reserved": "torch, reserved",
    "device": "device, used",
    "resident": "process, resident",
    "threads": "threads",
    "files": "open files",
}
COUNTS = ("threads", "files")


def headline(found: dict[str, Any]) -> str:
    """What was measured on."""
    devices = f"{found['gpus']} GPU{'s' if found['gpus'] != 1 else ''}" if found["gpus"] else "CPUs"
    return f"Backend {found['backend']} on {devices}, torch {found['torch']}."


def sync(found: dict[str, Any]) -> list[str]:
    """Lines of the table by world and size."""
    lines = [
        "A round (COUNT, PARAM, BUFFER, divergence, checksum, adoption) against one sum of as many bytes on the same",
        f"communicator, and torch.distributed's all_reduce; ms, median (least to most). Target: {TARGET} x bare.",
        "",
        "| ranks | M parameters | MB | ours | bare | ratio | torch | ratio | of ours, adoption | talk |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---|",
    ]
    for row in found["rows"]:
        ranks = f"{row['ranks']}{', one GPU shared' if row['shared'] else ''}"
        cells = [ranks, f"{row['params'] / 1e6:g}", f"{row['bytes'] / 1e6:.0f}", _ms(row["ours"]), _ms(row["bare"])]
        cells += [f"**{row['ratio']:.2f}**", _ms(row["torch"]), f"{row['ratio_torch']:.2f}"]
        lines.append(_line([*cells, f"{row['split_ms']['adopt']:.2f}", row["transport"]]))
    return lines


def memory(found: dict[str, Any]) -> list[str]:
    """Lines of the table by rank."""
    lines = [
        f"Memory over {found['rounds']} rounds of {found['params'] / 1e6:g} M parameters ({found['transport']}): after "
        "the first rounds, at the end, the most; MB, or a count.",
        "",
        f"| rank | {' | '.join(MEMORY[name] for name in found['rows'][0]['first'])} |",
        f"|---:|{'---|' * len(found['rows'][0]['first'])}",
    ]
    for row in found["rows"]:
        cells = [_from_to(name, row["first"][name], row["last"][name], row["most"][name]) for name in row["first"]]
        lines.append(_line([row["rank"], *cells]))
    return lines


def training(found: dict[str, Any]) -> list[str]:
    """Lines of the table by mode; the runs of all seeds together."""
    ms = ", ".join(f"{one:g}" for one in found["ms"])
    lines = [
        f"{found['job']} ({found['parameters'] / 1e6:.3g} M parameters) through controller and agents, emulated speeds",
        f"of {ms} ms a batch; a step alone takes {found['step_ms']:.1f} ms here. Rounds after the third; what lies",
        f"between them (evaluation) does not count. Solo rates: {found['ideal']:.0f} samples/s. Loss is of the",
        f"held-out text after {found['samples']} samples. {found['seeds']} seed(s); least to most in brackets.",
        "",
        "| mode | samples/s | of solo rates | idle by rank | round ms | rounds | loss |",
        "|---|---:|---:|---|---:|---:|---:|",
    ]
    failed = []
    for mode, runs in found["modes"].items():
        done = [run for run in runs if "failed" not in run]
        failed += [f"{mode} did not come to figures: {run['failed']}" for run in runs if "failed" in run]
        if not done:
            continue
        idle = [statistics.median(shares) for shares in zip(*(run["idle"] for run in done), strict=True)]
        cells = [
            mode,
            _spread([run["samples_per_second"] for run in done], 0),
            _spread([run["fraction"] for run in done], 3),
            " ".join(f"{share:.0%}" for share in idle),
            _spread([run["round_ms"] for run in done], 1),
            _spread([float(run["rounds"]) for run in done], 0),
            _spread([run["loss"] for run in done], 4),
        ]
        lines.append(_line(cells))
    return lines + (["", *failed] if failed else [])


def _spread(values: list[float], digits: int) -> str:
    median = f"{statistics.median(values):,.{digits}f}"
    if len(values) == 1:
        return median
    return f"{median} ({min(values):,.{digits}f} to {max(values):,.{digits}f})"


def _from_to(name: str, first: float, last: float, most: float) -> str:
    unit = 1.0 if name in COUNTS else 1e6
    return f"{first / unit:.0f}, {last / unit:.0f}, {most / unit:.0f}"


def _ms(figures: dict[str, float]) -> str:
    digits = 2 if figures["median_ms"] < 10 else 1 if figures["median_ms"] < 100 else 0
    return f"{figures['median_ms']:.{digits}f} ({figures['min_ms']:.{digits}f} to {figures['max_ms']:.{digits}f})"


def _line(cells: list[Any]) -> str:
    return f"| {' | '.join(map(str, cells))} |"
