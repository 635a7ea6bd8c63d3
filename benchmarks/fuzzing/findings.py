"""What a campaign came to: inputs, findings by kind with an input each, memory."""

from __future__ import annotations

import re
import resource
import sys
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MAX_KEPT = 20
"""findings of one kind more are counted, not kept"""


@dataclass
class Findings:
    """Of one part of a campaign, or of all. Sizes in MiB."""

    inputs: int = 0
    found: dict[str, dict[str, Any]] = field(default_factory=dict)
    """by kind: how often, the first input that showed it, where"""
    peak_mib: float = 0.0
    grown_mib: float = 0.0
    """of the worst process, from its end of warming up to its end"""
    notes: dict[str, Any] = field(default_factory=dict)

    def note(self, error: BaseException, shown: str) -> None:
        """An input showed something that must not be."""
        text = str(error).splitlines()[0][:300] if str(error) else ""
        self.add(f"{type(error).__name__}: {text}", shown, _place(error))

    def add(self, text: str, shown: str, place: str = "", count: int = 1) -> None:
        """The same in words; numbers and quoted names in ``text`` do not make another kind of it."""
        kind = re.sub(r"\d+(\.\d+)?(e[+-]?\d+)?|'[^']*'|\"[^\"]*\"", "…", text)
        known = self.found.get(kind)
        if known is not None:
            known["count"] += count
        elif len(self.found) < MAX_KEPT:
            self.found[kind] = {"count": count, "text": text, "input": shown[:4000], "place": place}

    def take(self, other: Findings) -> None:
        """Take in what another process came to."""
        self.inputs += other.inputs
        for one in other.found.values():
            self.add(one["text"], one["input"], one["place"], one["count"])
        self.peak_mib = max(self.peak_mib, other.peak_mib)
        self.grown_mib = max(self.grown_mib, other.grown_mib)

    def lines(self, title: str) -> list[str]:
        """For people."""
        head = f"{title:<22} {self.inputs:>9} inputs  {sum(one['count'] for one in self.found.values()):>5} findings"
        head += f"  peak {self.peak_mib:.0f} MiB" + "".join(f"  {name} {value}" for name, value in self.notes.items())
        return [head, *(f"    {one['count']} x {one['text']}  [{one['place']}]" for one in self.found.values())]

    def as_json(self) -> dict[str, Any]:
        """JSON-ready."""
        return dict(vars(self))


def from_json(values: dict[str, Any]) -> Findings:
    """What ``as_json`` gave."""
    return Findings(**values)


def peak_mib() -> float:
    """The most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def resident_mib() -> float:
    """The memory that this process has now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1]) if sys.platform == "linux" else 0
    return pages * resource.getpagesize() / 2**20


def _place(error: BaseException) -> str:
    """The innermost place that is ours, and the one below which it happened."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "site-packages" not in frame.filename and "/lib/python" not in frame.filename]
    return " < ".join(f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in reversed(ours[-3:]))
