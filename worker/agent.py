"""The agent of one host: dials the controller, takes part in its runs, and never leaves a process behind.

It uses no CUDA and imports no torch, so a GPU that hangs, or user code that holds the interpreter, cannot silence it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from worker.exits import ExitCode
from worker.host import Host
from worker.join_link import JoinLink, Refused, Target, Unreachable
from worker.membership import Membership, Offer, Outcome, Start, Waits
from worker.pulse import Pulse
from worker.shared_dir import reap_abandoned
from worker.signals import leaving_signals

CONNECT_ATTEMPTS = 60
CONNECT_PAUSE_SECONDS = 0.5
FIRST_BACK_OFF_SECONDS = 5.0
LONGEST_BACK_OFF_SECONDS = 60.0
SPREAD = 0.2

log = logging.getLogger("agent")


@dataclass(frozen=True, slots=True)
class Patience:
    """How often and how long the agent dials. ``persist``: after a run, and after a refusal that may pass, it dials
    again."""

    persist: bool = False
    attempts: int = CONNECT_ATTEMPTS
    pause_seconds: float = CONNECT_PAUSE_SECONDS
    first_back_off_seconds: float = FIRST_BACK_OFF_SECONDS
    spread: Callable[[], float] = field(default=lambda: random.uniform(1 - SPREAD, 1 + SPREAD))
    """what a pause is multiplied by: hosts that lost their controller at one moment don't all come back at one"""

    def back_off_seconds(self, failures: int) -> float:
        """The pause after so many memberships in a row that came to nothing: 5 s, doubling to 60 s (behaviour B17)."""
        return min(self.first_back_off_seconds * 2.0 ** min(failures, 16), LONGEST_BACK_OFF_SECONDS)


class Agent:
    """One agent. ``run`` ends with the process's exit code."""

    def __init__(
        self, target: Target, offer: Offer, patience: Patience, waits: Waits, start: Start = Host.start
    ) -> None:
        self.target = target
        self.offer = offer
        self.patience = patience
        self.waits = waits
        self.moved = Pulse()
        """fired when ``run_id`` may have changed"""
        self._start = start
        self._membership: Membership | None = None
        self._knocked = asyncio.Event()
        self._signals = 0

    @property
    def run_id(self) -> int | None:
        """The run that this host is in."""
        return None if self._membership is None else self._membership.run_id

    def knock(self) -> None:
        """Dial now, if this agent waits to dial again."""
        self._knocked.set()

    async def run(self) -> ExitCode:
        """Dial, take part, and dial again if told to persist. Ctrl-C, SIGTERM or SIGHUP leaves; a second one kills."""
        for left in reap_abandoned(time.time()):
            log.info("removed %s, which a killed agent left behind", left)
        devices = ", ".join(device.device.id for device in self.offer.devices) or "the relay"
        log.info("offering %s of %s to %s", devices, self.offer.name, self.target.base)
        work = asyncio.create_task(self._work())
        async with self._signals_end(work):
            try:
                return await work
            except asyncio.CancelledError:
                if not self._signals:
                    raise
                log.info("left")
                return ExitCode.OK

    async def _work(self) -> ExitCode:
        failures = 0
        while True:
            outcome = await self._one_membership()
            level = logging.INFO if outcome.code is ExitCode.OK else logging.ERROR
            log.log(level, "%s", outcome.text)
            if not (self.patience.persist and outcome.retry):
                return outcome.code
            failures = 0 if outcome.admitted else failures + 1
            pause = self.patience.back_off_seconds(max(0, failures - 1)) * self.patience.spread()
            log.info("dialling again in %.1f s", pause)
            await self._rest(pause)

    async def _rest(self, seconds: float) -> None:
        self._knocked.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._knocked.wait()

    async def _one_membership(self) -> Outcome:
        try:
            link = await self._dial()
        except Refused as refused:
            return Outcome(refused.code, str(refused), retry=False)
        except Unreachable as error:
            return Outcome(ExitCode.LOST, f"gave up: {error}", retry=True)
        self._membership = Membership(link, self.target, self.offer, self.waits, self._start)
        self._membership.moved = self.moved
        try:
            return await self._membership.run()
        finally:
            self._membership = None
            self.moved.fire()

    async def _dial(self) -> JoinLink:
        """Connect, trying again while nobody answers. Raises ``Refused``, ``Unreachable``."""
        for attempt in range(1, self.patience.attempts + 1):
            try:
                return await JoinLink.dial(self.target)
            except Unreachable as error:
                if attempt == self.patience.attempts:
                    raise
                if attempt == 1 or attempt % 20 == 0:
                    log.warning("%s; trying again", error)
            await asyncio.sleep(self.patience.pause_seconds * self.patience.spread())
        raise AssertionError("at least one attempt is made")

    @asynccontextmanager
    async def _signals_end(self, work: asyncio.Task[ExitCode]) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()

        def on_signal(number: signal.Signals) -> None:
            self._signals += 1
            if self._signals == 1:
                log.info("%s: leaving; once more kills everything", number.name)
                work.cancel(number.name)
                return
            if self._membership is not None:
                self._membership.kill()
            os._exit(ExitCode.ERROR)

        numbers = leaving_signals()
        for number in numbers:
            loop.add_signal_handler(number, on_signal, number)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)
