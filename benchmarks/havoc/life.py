"""One life of a world: its faults strike when they are due, until all that they do is on record, or the run is over."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from typing import Any

from backend.cli.client import Client, CliError
from benchmarks.havoc.expected import Struck
from benchmarks.havoc.plans import KINDS, STALL_TIMEOUTS
from benchmarks.havoc.site import ENDED, Halted, Hung
from benchmarks.havoc.strikes import Blow, Cast, Strikes

LOOK_SECONDS = 0.1
"""between two looks at the run"""
STEP_SECONDS = 0.02
WAIT_SECONDS = (5.0, 40.0)
"""for what strikes at a moment of its own, once all else has; the longer one while fewer than ``WAIT_ROUNDS`` closed"""
WAIT_ROUNDS = 16
RECORD_SECONDS = 20.0
"""from a fault, beyond the time that it takes by itself, until its deaths are on record"""


class Life:
    """Plays the faults of one life against a world that trains."""

    def __init__(self, cast: Cast, run: int, small_disk: Any) -> None:
        self._cast = cast
        self._run = run
        self._strikes = Strikes(cast, small_disk)
        faults = cast.plan.lives[cast.life]
        self._due = deque(fault for fault in faults if not fault.points)
        self._blows = [self._strikes.strike(fault) for fault in faults if fault.points]
        self._seen: dict[int, float] = {}
        """when each death was in the interface"""
        self._began = self._looked_at = self._last = time.monotonic()
        self._over = False
        self._round = 0
        self._deadline = 0.0
        self.ended_at = 0.0
        self._push_deadline(max((fault.seconds for fault in faults), default=0.0))

    @property
    def struck(self) -> list[Struck]:
        """What was done; faults that the life did not last for are not among it."""
        return [blow.struck(self._cast.life) for blow in self._blows]

    def play(self) -> None:
        """Until everything that must be recorded is, then have the run stopped; or until the run is over, or its
        controller is gone. Raises ``Hung``, ``Halted``."""
        while not self._is_over():
            if self._cast.site.halt.is_set():
                raise Halted
            self._strike_due()
            self._watch()
            self._look()
            if not self._due and self._settled():
                self._stop()
                return
            if time.monotonic() > self._deadline:
                raise Hung(f"{self._unfinished()} within {time.monotonic() - self._began:.0f} s")
            time.sleep(STEP_SECONDS)
        self.ended_at = time.monotonic()

    def _stop(self) -> None:
        self.ended_at = time.monotonic()
        with contextlib.suppress(CliError):  # it may have ended meanwhile
            self._cast.site.client.post(f"runs/{self._run}/stop")

    def release(self) -> None:
        """See what was done at last, and undo whatever is still being done."""
        self._watch()
        for blow in self._blows:
            self._let_go(blow)

    def detected(self) -> list[tuple[str, float]]:
        """For each fault that somebody died of: its kind, and the seconds until the last of them was on record."""
        found = []
        for blow in self._blows:
            times = [self._seen[rank] for rank in blow.ranks if rank in self._seen]
            if blow.hit and KINDS[blow.fault.kind].dooms and times:
                found.append((blow.fault.kind, max(0.0, max(times) - blow.at)))
        return found

    def _is_over(self) -> bool:
        return self._over or not self._cast.site.controller.alive

    # ------------------------------------------------------------------------------------------------- striking

    def _strike_due(self) -> None:
        now = time.monotonic()
        while self._due and now >= self._began + self._due[0].at and not self._is_over():
            fault = self._due[0]
            if fault.kind in ("controller killed", "controller stopped") and not self._settled(patient=False):
                return  # what it would hide is awaited first
            self._due.popleft()
            blow = self._strikes.strike(fault)
            self._blows.append(blow)
            self._last = time.monotonic()
            self._push_deadline(fault.seconds)
            if fault.kind == "disk full":
                threading.Thread(target=self._save, daemon=True).start()
            if fault.kind == "controller killed":
                return

    def _save(self) -> None:
        """Ask for a checkpoint, which cannot be written; the answer may take as long as the disk is full."""
        site = self._cast.site
        with contextlib.suppress(CliError), Client(site.url, site.data_dir / "operator.token") as client:
            client.post(f"runs/{self._run}/checkpoints")

    def _push_deadline(self, seconds: float) -> None:
        """Everything has its bound: what the fault lasts, the longest ceiling, and the record."""
        ceiling = 2 * STALL_TIMEOUTS * self._cast.plan.timeout
        self._deadline = max(self._deadline, time.monotonic() + max(seconds, ceiling) + RECORD_SECONDS)

    def _watch(self) -> None:
        now = time.monotonic()
        for blow in self._blows:
            if blow.look is not None and blow.look(blow):
                blow.look = None
            if blow.release is not None and now >= blow.release_at:
                self._let_go(blow)

    def _let_go(self, blow: Blow) -> None:
        if blow.release is not None:
            release, blow.release = blow.release, None
            release()

    # -------------------------------------------------------------------------------------------------- looking

    def _look(self) -> None:
        now = time.monotonic()
        if self._strikes.controller_frozen or now < self._looked_at + LOOK_SECONDS:
            return
        self._looked_at = now
        try:
            view = self._cast.site.view(self._run)
        except CliError as error:
            if self._cast.site.controller.alive and not self._killing():
                raise Hung(f"the controller does not answer: {error}") from error
            return
        for death in view["deaths"]:
            self._seen.setdefault(death["rank"], now)
        self._over = view["phase"] in ENDED
        self._round = view["round"] or 0

    def _killing(self) -> bool:
        return any(blow.fault.kind.startswith("controller killed") for blow in self._blows)

    def _settled(self, *, patient: bool = True) -> bool:
        """Whether nothing is under way any more and all who must be dead are known to be. ``patient``: what strikes
        at a moment of its own is waited for a while."""
        seconds = WAIT_SECONDS[self._round < WAIT_ROUNDS]
        waiting = patient and time.monotonic() < self._last + seconds
        for blow in self._blows:
            if blow.release is not None or (blow.look is not None and waiting):
                return False
        return not self._missing()

    def _missing(self) -> set[int]:
        """Ranks that must be dead and are not known to be."""
        doomed = {
            rank for blow in self._blows if blow.hit and KINDS[blow.fault.kind].dooms == "must" for rank in blow.ranks
        }
        return doomed - self._seen.keys()

    def _unfinished(self) -> str:
        missing = sorted(self._missing())
        left = [str(fault) for fault in self._due] + [str(blow.fault) for blow in self._blows if blow.release]
        return f"ranks {missing} were not recorded dead, {left} not over" if missing or left else "it did not settle"
