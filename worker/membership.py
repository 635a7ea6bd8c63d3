"""One host in one run, over one join link: offered, admitted, put to work, and sent home (behaviour B15, B16).

    Hello -> JobOffer -> (probe) -> ProbeReport -> Accept -> WorldFormed -> (relay, ranks) -> RunEnded
                                                \\-> Reject

From Accept on both sides send a heartbeat every second. The controller's word is final: the host never decides that
a run is over, except when the controller is not heard any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from wire import failpoints
from wire.beats import Beats
from wire.codes import CloseCode
from wire.messages import (
    Accept,
    ControllerHeartbeat,
    DeclareDead,
    Hello,
    HostHeartbeat,
    JobOffer,
    Leaving,
    Message,
    ProbeReport,
    RankProgress,
    Reject,
    RunEnded,
    WorldFormed,
)
from wire.sealing import run_secret
from worker.devices import DeviceError, LocalDevice
from worker.exit_cause import log_exit
from worker.exits import ExitCode
from worker.host import PATIENCE_SECONDS, Host, HostOrders
from worker.join_link import JoinLink, LinkEnded, Target
from worker.probing import PROBE_SECONDS, probe_job
from worker.pulse import Pulse
from worker.returning import FINAL, Away, find_again
from worker.shared_dir import SharedDirError
from worker.tasks import first_to_end
from worker.versions import host_versions

FAREWELL_SECONDS = 2.0
_PASSING = ("window_closed", "no_open_window", "world_full")
"""refusals that the next run may lift, whatever their flag says"""

log = logging.getLogger("agent")


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a membership ended. ``retry``: dialling again may help; ``admitted``: the host was in."""

    code: ExitCode
    text: str
    retry: bool
    admitted: bool = False


@dataclass(frozen=True, slots=True)
class Waits:
    """The longest waits of a membership, in seconds."""

    reply: float = 30.0
    """for the controller's answer to a hello or a probe report"""
    probe: float = PROBE_SECONDS


@dataclass(frozen=True, slots=True)
class Offer:
    """What this host brings."""

    name: str
    devices: tuple[LocalDevice, ...]
    job_dir: Path
    run: int | None = None
    emulate_ms_per_batch: float | None = None
    relay_only: bool = False
    stream_data: bool = False
    """never share memory with a controller on this machine"""

    def hello(self) -> Hello:
        """It as the controller hears it."""
        return Hello(
            host=self.name,
            devices=[device.device for device in self.devices],
            versions=host_versions(),
            run=self.run,
            emulate_ms_per_batch=self.emulate_ms_per_batch,
            relay_only=self.relay_only,
        )


class Hosted(Protocol):
    """What a host runs once the world formed: relay and ranks (``worker.host``), or the fold of a relay-only host."""

    @property
    def exits(self) -> asyncio.Queue[Message]: ...

    @property
    def failed_ranks(self) -> list[int]: ...

    def progress(self) -> list[RankProgress]: ...

    async def stop(self, patience_seconds: float = PATIENCE_SECONDS) -> None: ...

    def fence(self, rank: int) -> None: ...

    def kill(self) -> None: ...


Start = Callable[[HostOrders], Awaitable[Hosted]]


class _Over(Exception):
    """The membership is over; carries its outcome up from wherever it ended."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.text)
        self.outcome = outcome


class Membership:
    """Lives from the first word on a link to its last. ``run`` may be cancelled: the host then says that it leaves."""

    def __init__(self, link: JoinLink, target: Target, offer: Offer, waits: Waits, start: Start = Host.start) -> None:
        self.link = link
        self.target = target
        self.offer = offer
        self.waits = waits
        self.host: Hosted | None = None
        self.moved = Pulse()
        """fired when this host is admitted"""
        self._start = start
        self._hosting = asyncio.Event()
        self._hurry = False
        self._beats: Beats | None = None
        """the controller's, from Accept on"""
        self._layout: ProbeReport | None = None
        self._accept: Accept | None = None
        self._patience = 0.0
        """seconds to look for a controller that is lost"""
        self._exits: list[Message] = []
        """ends of children that were told: whoever takes over from a lost controller may not know of them"""

    async def run(self) -> Outcome:
        """Take part until it is over; no child of this host is left then."""
        try:
            await self.link.send(self.offer.hello())
            accept = await self._admission()
            log.info("admitted to run %s as host %s; waiting for its world to form", accept.run_id, accept.host_id)
            while True:
                try:
                    await first_to_end(self._obey(accept), self._beat(accept), self._listen_for_silence(accept))
                except LinkEnded as ended:
                    accept = await self._return(ended, accept)
        except _Over as over:
            return over.outcome
        except LinkEnded as ended:
            return self._lost(ended)
        except asyncio.CancelledError as asked:
            self._hurry = True
            how = f" ({asked.args[0]})" if asked.args else ""
            await self._say_goodbye(f"the operator of {self.offer.name} ended its agent{how}")
            raise
        finally:
            if self.host is not None:
                await self.host.stop(0.0 if self._hurry else PATIENCE_SECONDS)
            await self.link.close()

    @property
    def run_id(self) -> int | None:
        """The run that admitted this host."""
        return None if self._accept is None else self._accept.run_id

    def kill(self) -> None:
        """End every child at once."""
        if self.host is not None:
            self.host.kill()

    # ------------------------------------------------------------------------------------------ before the world

    async def _admission(self) -> Accept:
        """From the hello to the controller's yes. Raises ``_Over`` for its no."""
        while True:
            message = await self._reply()
            match message:
                case JobOffer():
                    self._layout = await self._probe(message)
                    await self.link.send(self._layout)
                case Accept():
                    self._accept = message
                    self.moved.fire()
                    return message
                case _:
                    self._hear(message)

    async def _reply(self) -> Message:
        try:
            async with asyncio.timeout(self.waits.reply):
                return await self.link.receive()
        except TimeoutError as error:
            raise LinkEnded(CloseCode.SILENT, f"the controller did not answer for {self.waits.reply:g} s") from error

    async def _probe(self, offer: JobOffer) -> ProbeReport:
        """Look at the job; a word from the controller meanwhile can only mean that it is over."""
        log.info("run %s offers %s; looking at it", offer.run_id, offer.job)
        probing = asyncio.create_task(probe_job(offer, self.offer.job_dir, self.waits.probe))
        hearing = asyncio.create_task(self._hear_until_over())
        try:
            await asyncio.wait((probing, hearing), return_when=asyncio.FIRST_COMPLETED)
            if hearing.done():
                hearing.result()
            report = await probing
        finally:
            for task in (probing, hearing):
                task.cancel()
            await asyncio.gather(probing, hearing, return_exceptions=True)
        if report.error:
            log.error("the job does not work here: %s", report.error)
        return report

    async def _hear_until_over(self) -> None:
        while True:
            self._hear(await self.link.receive())

    # --------------------------------------------------------------------------------------------- in the run

    async def _obey(self, accept: Accept) -> None:
        """Do what the controller says until it says that it is over."""
        self._beats = Beats(accept.heartbeat_seconds)
        while True:
            message = await self.link.receive()
            self._count_beat(self._beats)
            if isinstance(message, WorldFormed):
                await self._start_host(message, accept)
            else:
                self._hear(message)

    def _count_beat(self, beats: Beats) -> None:
        """Any word of the controller is a sign of life; the worst of them is worth a line."""
        before = max(beats.worst_late_seconds, beats.period)
        late = beats.heard(self.link.heard_at)
        if late > before:
            log.warning("the controller was silent for %.1f s, %.1f s more than usual", late + beats.period, late)

    def _hear(self, message: Message) -> None:
        """What can come at any time. Raises ``_Over``."""
        match message:
            case ControllerHeartbeat():
                return
            case DeclareDead(rank=rank, reason=reason) if self.host is not None:
                log.warning("rank %s ends: the cohort goes on without it: %s", rank, reason)
                self.host.fence(rank)
            case RunEnded():
                raise _Over(self._ended(message))
            case Reject():
                retry = not message.permanent or message.code in _PASSING
                text = f"refused ({message.code}): {message.reason}"
                raise _Over(Outcome(ExitCode.REJECTED, text, retry, admitted=self._accept is not None))
            case _:
                log.warning("%s came out of turn and was ignored", type(message).__name__)

    async def _start_host(self, formed: WorldFormed, accept: Accept) -> None:
        if self.host is not None:
            log.warning("the world formed twice; the second time was ignored")
            return
        ranks = ", ".join(str(assignment.rank) for assignment in formed.assignments)
        here = f"ranks {ranks} of {formed.world_size} start here" if ranks else f"{formed.world_size} ranks elsewhere"
        log.info("the world formed: %s", here)
        try:
            self.host = await self._start(self._orders(formed, accept))
            self._patience = formed.reattach_seconds
            self._hosting.set()
        except (SharedDirError, DeviceError, OSError) as error:
            text = f"the ranks cannot start on this host: {error}"
            log.error("%s", text)
            await self._say_goodbye(text)
            raise _Over(Outcome(ExitCode.ERROR, text, retry=False, admitted=True)) from error

    def _orders(self, formed: WorldFormed, accept: Accept) -> HostOrders:
        return HostOrders(
            formed=formed,
            accept=accept,
            run_secret=accept.run_secret or run_secret(self.target.secret, accept.run_salt),
            url=self.target.base,
            local_address=self.link.local_address,
            devices=self.offer.devices,
            layout=tuple(self._layout.layout) if self._layout is not None else (),
            job_dir=self.offer.job_dir,
            emulate_ms_per_batch=self.offer.emulate_ms_per_batch,
            shared_memory=not self.offer.stream_data,
        )

    async def _beat(self, accept: Accept) -> None:
        """A heartbeat every second, and each exit of a child at once."""
        loop = asyncio.get_running_loop()
        due = loop.time()
        for message in self._exits:
            await self.link.send(message)
        while True:
            due = max(due + accept.heartbeat_seconds, loop.time())
            failpoints.hit("agent.beat", name=self.offer.name)
            await self.link.send(self._heartbeat())
            await self._report_exits(due)

    def _heartbeat(self) -> HostHeartbeat:
        ranks = self.host.progress() if self.host is not None else []
        late, worst = (self._beats.late_count, self._beats.worst_late_seconds) if self._beats else (0, 0.0)
        return HostHeartbeat(ranks=ranks, late=late, worst_late_seconds=worst)

    async def _report_exits(self, until: float) -> None:
        while (message := await self._next_exit(until)) is not None:
            log_exit(message)
            failpoints.hit("agent.exit", name=self.offer.name)
            self._exits.append(message)
            await self.link.send(message)

    async def _next_exit(self, until: float) -> Message | None:
        """The next child's end, or none when the loop's time reaches ``until``."""
        try:
            async with asyncio.timeout_at(until):
                await self._hosting.wait()
                assert self.host is not None, "set before the event"
                return await self.host.exits.get()
        except TimeoutError:
            return None

    async def _listen_for_silence(self, accept: Accept) -> None:
        """Raise ``LinkEnded`` when the controller is not heard for its heartbeat timeout.

        A host that was frozen itself gives the controller a whole timeout again: what came meanwhile was not read yet.
        """
        loop = asyncio.get_running_loop()
        timeout = accept.heartbeat_timeout_seconds
        woke = loop.time()
        while True:
            await asyncio.sleep(accept.heartbeat_seconds)
            now = loop.time()
            if now - woke > accept.heartbeat_seconds + timeout / 2:
                log.warning("this host stood still for %.0f s", now - woke)
                self.link.heard_at = now
            woke = now
            if now - self.link.heard_at > timeout:
                raise LinkEnded(CloseCode.SILENT, f"the controller was not heard for {now - self.link.heard_at:.0f} s")

    # ------------------------------------------------------------------------------------- a controller that is lost

    async def _return(self, ended: LinkEnded, accept: Accept) -> Accept:
        """Keep relay and ranks while the controller is looked for. Raises ``LinkEnded`` where there is nothing to come
        back with, ``_Over`` when it stays away or does not want this host."""
        if self.host is None or not self._patience or ended.close_code in FINAL:
            raise ended
        patience = self._patience
        log.warning("the controller was lost (%s); ranks and relay wait up to %g s for it", ended, patience)
        await self.link.close()
        hello = msgspec.structs.replace(self.offer.hello(), run=accept.run_id, returning=accept.host_id)
        try:
            self.link, self._accept = await find_again(self.target, hello, patience, self.waits.reply)
        except Away as away:
            raise _Over(Outcome(away.code, str(away), retry=away.code is ExitCode.LOST, admitted=True)) from away
        log.info("the controller is back: run %s goes on", accept.run_id)
        return self._accept

    # --------------------------------------------------------------------------------------------------- the end

    def _ended(self, message: RunEnded) -> Outcome:
        failed = self.host.failed_ranks if self.host is not None else []
        done = message.phase == "done"
        text = f"the run is {message.phase}: {message.reason}"
        if done and failed:
            text += f"; but rank {', '.join(map(str, failed))} failed here"
        code = ExitCode.OK if done and not failed else ExitCode.ERROR
        return Outcome(code, text, retry=True, admitted=self._accept is not None)

    def _lost(self, ended: LinkEnded) -> Outcome:
        admitted = self._accept is not None
        if ended.close_code == CloseCode.AUTH:
            return Outcome(ExitCode.AUTHENTICATION, f"the controller does not know this token: {ended}", retry=False)
        if ended.close_code == CloseCode.SUPERSEDED:
            return Outcome(
                ExitCode.REJECTED, f"another agent took this host's place: {ended}", retry=False, admitted=admitted
            )
        return Outcome(ExitCode.LOST, f"the controller was lost: {ended}", retry=True, admitted=admitted)

    async def _say_goodbye(self, reason: str) -> None:
        with contextlib.suppress(LinkEnded, TimeoutError):
            async with asyncio.timeout(FAREWELL_SECONDS):
                await self.link.send(Leaving(reason=reason))
