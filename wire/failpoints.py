"""Faults on purpose: places in the product where a test makes a process die, stop, wait or lose its link.

Off, and one comparison a hit, unless the process was started with ``MARCHLINE_FAILPOINTS``:

    site[@n][?key=value[&key=value]...]=action[;...]

    relay.chunk.up@3?host=2=kill          the third chunk that host 2's relay sends
    rank.adopt?rank=1&round=4=stop        rank 1, in round 4
    driver.commit.before=delay:250        every time

Without ``@n`` each hit injects; hits are counted per point and process, only those whose keys match. Actions:

    kill        SIGKILL to this process          stop        SIGSTOP to this process
    exit[:code] os._exit, code 70                close       raise ``Cut``, which ends the link that is worked on
    error       raise ``Injected``               full        raise the ``OSError`` of a disk without room
    delay:ms    block this thread: in an event loop, all of it

Every injection is a line of JSON in the file that ``MARCHLINE_FAILPOINTS_LOG`` names, written before the action: a test
proves by it that its fault happened, where, and how often. Failpoints come from the environment only, never over the
wire (reliability section 3.1; after FreeBSD's fail(9)).
"""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

POINTS_VARIABLE = "MARCHLINE_FAILPOINTS"
LOG_VARIABLE = "MARCHLINE_FAILPOINTS_LOG"
EXIT_CODE = 70
REFUSED_CODE = 2
"""exit code of a process that was asked for a failpoint that does not exist"""

SITES = {
    "rank.pack": "a rank was asked for its values and has not put them into the arena (rank, round, attempt)",
    "rank.snapshot.before": "its values are in the arena, nobody was told (rank, round, attempt)",
    "rank.snapshot.after": "its relay was told (rank, round, attempt)",
    "rank.adopt": "committed, nothing is copied in (rank, round)",
    "rank.adopt.block": "one more block of the consensus is copied in, up to a MiB (rank, round, offset)",
    "rank.ack.after": "it said that it adopted (rank, round)",
    "relay.contribution.before": "every rank of the host is ready, nobody was told (host, round, attempt)",
    "relay.contribution.after": "the controller was told whose work comes (host, round, attempt)",
    "relay.chunk.up": "before a chunk is sent (host, round, attempt, offset)",
    "relay.chunk.staged": "a chunk of the update is staged (host, round, attempt, offset)",
    "relay.commit.before": "committed and all there, no rank was told (host, round, attempt)",
    "relay.commit.after": "the ranks were told (host, round, attempt)",
    "plane.contribution": "a host's declaration was accepted (host, round, attempt)",
    "plane.summed": "a slice is summed and not sent on (round, offset)",
    "plane.chunk.down": "before a chunk is queued to a host (host, round, offset)",
    "plane.finished.before": "all is summed and queued, the core was not told (round)",
    "plane.finished.after": "it was told, and has not heard it yet (round)",
    "driver.commit.before": "the core committed a round, no host was told (run, host, round, attempt)",
    "driver.commit.after": "one host was told (run, host, round, attempt)",
    "save.begun": "a checkpoint has its directory, and nothing in it (run, checkpoint)",
    "save.kept": "one more part of a rank's state is in its file (run, checkpoint, rank)",
    "save.model": "the model's file is whole, the manifest is not there (run, checkpoint)",
    "save.manifest": "the manifest is written, the directory has no name yet (run, checkpoint)",
    "save.named": "it has its name, nobody knows (run, checkpoint)",
    "save.pruned": "older ones are gone, the core was not told of the new one (run, checkpoint)",
    "store.commit.before": "rows are in an open transaction",
    "store.commit.after": "they are committed, whoever waits for them was not told",
    "agent.beat": "before a heartbeat to the controller (name)",
    "agent.exit": "a child of the agent ended, the controller was not told (name)",
    "checkpoint.sync": "a file of a checkpoint is written and not synced (name)",
}
"""site -> when it is hit, and the keys that it can be told apart by"""

ACTIONS = ("kill", "exit", "error", "full", "close", "stop", "delay")

log = logging.getLogger(__name__)


class FailpointsRefused(ValueError):
    """What was asked for does not exist; the text says what does."""


class Injected(RuntimeError):
    """The ``error`` action."""


class Cut(ConnectionError):
    """The ``close`` action: whoever holds the link drops it without a word."""


@dataclass(slots=True)
class Point:
    """One armed failpoint. ``at`` is the hit that injects, from 1; 0 for all of them."""

    site: str
    action: str
    argument: int = 0
    at: int = 0
    where: dict[str, str] = field(default_factory=dict)
    hits: int = 0
    injected: int = 0

    def matches(self, where: Mapping[str, object]) -> bool:
        """Whether a hit with these keys counts."""
        return all(key in where and str(where[key]) == value for key, value in self.where.items())


class Failpoints:
    """The armed points of one process. Threads may hit them at once."""

    def __init__(self, points: list[Point], journal: Path | None) -> None:
        self.points = points
        self._journal = journal
        self._lock = threading.Lock()

    def hit(self, site: str, where: Mapping[str, object]) -> None:
        """Count, and inject where it's due. Raises ``Injected``, ``Cut``, ``OSError``; ``FailpointsRefused`` for a site
        that is not listed."""
        if site not in SITES:
            raise FailpointsRefused(f"{site} is not listed in failpoints.SITES")
        for point in self.points:
            if point.site == site and point.matches(where):
                with self._lock:
                    point.hits += 1
                    due = point.at in (0, point.hits)
                    if due:
                        point.injected += 1
                        self._write(point, where)
                if due:
                    _act(point)

    def _write(self, point: Point, where: Mapping[str, object]) -> None:
        if self._journal is None:
            return
        line = {"site": point.site, "action": point.action, "hit": point.hits, "pid": os.getpid(), "where": dict(where)}
        # One write to a file that is only appended to: lines of several processes don't mix.
        descriptor = os.open(self._journal, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, json.dumps(line, default=str).encode() + b"\n")
        finally:
            os.close(descriptor)


_armed: Failpoints | None = None
_identity: dict[str, object] = {}


def hit(site: str, **where: object) -> None:
    """This process is at ``site``. Does nothing unless armed; otherwise see :meth:`Failpoints.hit`."""
    if _armed is not None:
        _armed.hit(site, _identity | where)


def identify(**keys: object) -> None:
    """What every later hit of this process can be told apart by, beside its own keys: who it is, what it works on."""
    _identity.update(keys)


def arm(environment: Mapping[str, str]) -> Failpoints | None:
    """Arm what the environment asks for, in place of what was armed before; none when it asks for nothing.

    Raises ``FailpointsRefused`` naming what does not exist.
    """
    global _armed
    text = environment.get(POINTS_VARIABLE, "").strip()
    if not text:
        _armed = None
        return None
    journal = environment.get(LOG_VARIABLE, "").strip()
    _armed = Failpoints(parse(text), Path(journal) if journal else None)
    log.warning("failpoints are armed: %s", text)
    return _armed


def arm_or_exit(environment: Mapping[str, str]) -> None:
    """``arm`` for the start of a process: what does not exist ends it, with a line on stderr and exit code 2."""
    try:
        arm(environment)
    except FailpointsRefused as error:
        print(f"{POINTS_VARIABLE}: {error}", file=sys.stderr, flush=True)
        raise SystemExit(REFUSED_CODE) from error


def parse(text: str) -> list[Point]:
    """The points that a text describes, in its order. Raises ``FailpointsRefused``."""
    return [_point(part.strip()) for part in text.split(";") if part.strip()]


def _point(text: str) -> Point:
    left, equals, right = text.rpartition("=")
    if not equals:
        raise FailpointsRefused(f"{text!r} says no action; write site=action")
    head, _, conditions = left.partition("?")
    site, at_sign, number = head.partition("@")
    if site not in SITES:
        raise FailpointsRefused(f"there is no site {site!r}; there are {', '.join(sorted(SITES))}")
    if at_sign and not (number.isdecimal() and int(number) > 0):
        raise FailpointsRefused(f"{text!r}: @ takes the number of a hit, from 1, not {number!r}")
    action, argument = _action(text, right)
    return Point(site, action, argument, int(number) if at_sign else 0, _conditions(text, conditions))


def _action(text: str, words: str) -> tuple[str, int]:
    action, _, argument = words.partition(":")
    if action not in ACTIONS:
        raise FailpointsRefused(f"{text!r}: there is no action {action!r}; there are {', '.join(ACTIONS)}")
    if argument and action not in ("exit", "delay"):
        raise FailpointsRefused(f"{text!r}: {action} takes no argument")
    if argument and not argument.isdecimal():
        raise FailpointsRefused(f"{text!r}: {argument!r} is no whole number")
    if action == "delay" and not argument:
        raise FailpointsRefused(f"{text!r}: delay takes milliseconds, like delay:250")
    return action, int(argument) if argument else EXIT_CODE


def _conditions(text: str, words: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for condition in filter(None, words.split("&")):
        key, equals, value = condition.partition("=")
        if not (key and equals and value):
            raise FailpointsRefused(f"{text!r}: {condition!r} is no condition; write key=value")
        found[key] = value
    return found


def _act(point: Point) -> None:
    match point.action:
        case "kill":
            _killed()
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "exit":
            os._exit(point.argument)
        case "error":
            raise Injected(f"failpoint {point.site}")
        case "full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), f"failpoint {point.site}")
        case "close":
            raise Cut(f"failpoint {point.site}")
        case _:
            time.sleep(point.argument / 1000)


def _killed() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    while True:  # the signal may be taken by another thread a moment later; nothing more may be done here
        time.sleep(1)


def injections(journal: Path) -> list[dict[str, Any]]:
    """What was injected, by all processes that write to this file, in the order in which it happened."""
    if not journal.exists():
        return []
    return [json.loads(line) for line in journal.read_text().splitlines()]
