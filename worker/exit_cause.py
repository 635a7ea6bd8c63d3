"""Why a child ended, from what can be known: its exit status, its own report, its last words, the kernel's counters."""

from __future__ import annotations

import signal
from pathlib import Path

import msgspec

from wire.messages import ExitCause, RankFailed
from worker.child import Exit
from worker.progress import Reading

_CGROUP = Path("/sys/fs/cgroup")


def rank_exit_cause(
    end: Exit, reading: Reading | None, report: RankFailed | None, tail: str, *, stopping: bool, memory_kills: int
) -> ExitCause:
    """A rank's end. Only a rank that was told to leave and left ended cleanly: exit code 0 alone proves nothing.

    ``stopping``: this agent is ending the rank. ``memory_kills``: how many processes of the host's control group
    the kernel has killed for memory since the rank started.
    """
    left = end.code == 0 and reading is not None and reading.state == "exited"
    clean = left or (stopping and end.code in (0, -signal.SIGTERM))
    last_step = reading.steps if reading is not None else 0
    if report is not None:
        exception, message, lines = report.exception, report.message, report.last_lines
        last_step = max(last_step, report.last_step)
    else:
        exception, message, lines = "", "" if clean else _explain(end, memory_kills), tail
    return ExitCause(
        code=end.code,
        signal=end.signal_name,
        exception=exception,
        message=message,
        last_lines=lines,
        last_step=last_step,
        peak_rss_bytes=end.peak_rss_bytes,
        clean=clean,
    )


def relay_exit_cause(end: Exit, tail: str, *, stopping: bool) -> ExitCause:
    """A relay's end: clean when it found its own way out, or was told to go."""
    clean = end.code == 0 or (stopping and end.code == -signal.SIGTERM)
    return ExitCause(
        code=end.code,
        signal=end.signal_name,
        message="" if clean else _explain(end, memory_kills=0),
        last_lines=tail,
        peak_rss_bytes=end.peak_rss_bytes,
        clean=clean,
    )


def read_report(path: Path) -> RankFailed | None:
    """What the rank wrote about its own failure, if it still could."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=RankFailed)
    except (OSError, msgspec.MsgspecError):
        return None


def memory_kills(root: Path = _CGROUP) -> int:
    """How often the kernel has killed a process of this control group for its memory limit; 0 where it does not say."""
    try:
        group = Path("/proc/self/cgroup").read_text(encoding="ascii").strip().rpartition("::")[2]
        events = (root / group.lstrip("/") / "memory.events").read_text(encoding="ascii")
    except OSError:
        return 0
    counts = dict(line.split() for line in events.splitlines())
    return int(counts.get("oom_kill", 0))


def _explain(end: Exit, memory_kills: int) -> str:
    if end.code == -signal.SIGKILL and memory_kills > 0:
        return f"killed by the kernel: the host's memory limit was reached ({memory_kills} such kills since it started)"
    if end.signal_name:
        return f"ended by {end.signal_name}"
    if end.code == 0:
        return "exited with code 0 before the run was over"
    return f"exited with code {end.code}"
