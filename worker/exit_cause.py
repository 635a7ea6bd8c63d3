"""Why a child ended, from what can be known: its exit status, its own report, its last words, the kernel's counters."""

from __future__ import annotations

import logging
import signal
from dataclasses import dataclass
from pathlib import Path

import msgspec

from wire.messages import ExitCause, Message, RankExited, RankFailed, RelayExited
from worker.child import Exit
from worker.progress import Reading

log = logging.getLogger("agent")


@dataclass(frozen=True, slots=True)
class Kernel:
    """What the kernel says about memory at a process's end."""

    memory_kills: int = 0
    """processes of the host's control group that it killed just then, as far as no other end is explained by them"""
    memory_limit_bytes: int = 0
    """0: no limit is known"""


def rank_exit_cause(
    end: Exit, reading: Reading | None, report: RankFailed | None, tail: str, *, stopping: bool, kernel: Kernel
) -> ExitCause:
    """A rank's end. Only a rank that was told to leave and left ended cleanly: exit code 0 alone proves nothing.

    ``stopping``: this agent is ending the rank.
    """
    memory = kernel if ended_by_kill(end) and kernel.memory_kills else Kernel()
    left = end.code == 0 and reading is not None and reading.state == "exited"
    clean = left or (stopping and end.code in (0, -signal.SIGTERM))
    last_step = reading.steps if reading is not None else 0
    if report is not None:
        exception, message, lines = report.exception, report.message, report.last_lines
        last_step = max(last_step, report.last_step)
    else:
        exception, message, lines = "", "" if clean else _explain(end, memory), tail
    return ExitCause(
        code=end.code,
        signal=end.signal_name,
        exception=exception,
        message=message,
        last_lines=lines,
        last_step=last_step,
        peak_rss_bytes=end.peak_rss_bytes,
        clean=clean,
        memory_kills=memory.memory_kills,
        memory_limit_bytes=memory.memory_limit_bytes,
    )


def ended_by_kill(end: Exit) -> bool:
    """Whether a SIGKILL ended it, which is what the kernel sends for memory."""
    return end.code == -signal.SIGKILL


def relay_exit_cause(end: Exit, tail: str, *, stopping: bool) -> ExitCause:
    """A relay's end: clean when it found its own way out, or was told to go."""
    clean = end.code == 0 or (stopping and end.code == -signal.SIGTERM)
    return ExitCause(
        code=end.code,
        signal=end.signal_name,
        message="" if clean else _explain(end, Kernel()),
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


def _explain(end: Exit, memory: Kernel) -> str:
    if memory.memory_kills:
        limit = f" of {memory.memory_limit_bytes / 2**30:.2f} GiB" if memory.memory_limit_bytes else ""
        return f"killed by the kernel: the host's memory limit{limit} was reached"
    if end.signal_name:
        return f"ended by {end.signal_name}"
    if end.code == 0:
        return "exited with code 0 before the run was over"
    return f"exited with code {end.code}"


def log_exit(message: Message) -> None:
    """Tell on the agent's own log how a child ended."""
    if isinstance(message, RankExited):
        cause = message.cause
        if cause.clean:
            log.info("rank %s left", message.rank)
        else:
            what = f"{cause.exception}: {cause.message}" if cause.exception else cause.message
            log.error("rank %s died at its step %s: %s", message.rank, cause.last_step, what)
    elif isinstance(message, RelayExited) and not message.cause.clean:
        log.error("the relay died: %s", message.cause.message)
