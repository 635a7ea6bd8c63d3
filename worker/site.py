"""``python -m worker --relay-only``: a host that trains nothing and folds the data streams of the hosts behind it.

It joins the controller as any host does, and listens. Hosts behind it dial it as if it were the controller: join and
control links pass through unread, data links end here (site_door.py), and one leaves for the controller (site_run.py).
Uses no CUDA, imports no torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable

from wire.codes import CloseCode
from wire.errors import ProtocolError
from wire.messages import ExitCause, Message, RankProgress, RelayExited
from wire.session import Channel
from worker.agent import Agent, Patience
from worker.exits import ExitCode
from worker.host import PATIENCE_SECONDS, HostOrders
from worker.join_link import Target
from worker.membership import Offer, Waits
from worker.relay_links import LinkLost, dial
from worker.relay_spec import RelaySpec
from worker.site_door import Door, SiteLimits
from worker.site_run import SiteRun

_KNOCK_SECONDS = 2.0
"""how long a host that joins may wait for this one to join first"""
_START_SECONDS = 20.0
"""between this host's hearing that its world formed and a child's first frame; either may be first"""

log = logging.getLogger("site")


class SiteHost:
    """What a relay-only host runs in one world, in place of relay and ranks."""

    def __init__(self, orders: HostOrders, run: SiteRun) -> None:
        self.exits: asyncio.Queue[Message] = asyncio.Queue()
        self.failed_ranks: list[int] = []
        self.run_id = orders.accept.run_id
        self.secret = orders.run_secret
        self.run = run
        self._spec = RelaySpec(
            url=orders.url,
            host_id=orders.accept.host_id,
            ranks=[],
            run_id=orders.accept.run_id,
            run_secret=orders.run_secret.hex(),
            shm_dir="",
            heartbeat_seconds=orders.accept.heartbeat_seconds,
            heartbeat_timeout_seconds=orders.accept.heartbeat_timeout_seconds,
        )
        self._serving = asyncio.create_task(self._serve(), name=f"fold of run {self.run_id}")

    def progress(self) -> list[RankProgress]:
        """There are no ranks."""
        return []

    async def stop(self, patience_seconds: float = PATIENCE_SECONDS) -> None:
        """Let every child go and close the uplink."""
        if patience_seconds > 0:
            await asyncio.wait((self._serving,), timeout=patience_seconds)
        self.kill()
        await asyncio.gather(self._serving, return_exceptions=True)

    def fence(self, rank: int) -> None:
        """There are no ranks."""

    def kill(self) -> None:
        """End it now."""
        self.run.finish(CloseCode.REFUSED, "the relay-only host left")
        self._serving.cancel()

    async def _serve(self) -> None:
        try:
            (link,) = await dial(self._spec, (Channel.DATA,))
            log.info("the uplink to the controller is up; data links of run %s are folded here", self.run_id)
            await self.run.run(link)
        except (LinkLost, ProtocolError, OSError) as error:
            log.error("the uplink is over: %s", error)
            self.run.finish(CloseCode.REFUSED, f"the relay-only host lost its uplink: {error}")
            self.exits.put_nowait(RelayExited(cause=ExitCause(code=1, message=str(error))))


class Site:
    """The agent of a relay-only host and its door. ``run`` ends with the process's exit code."""

    def __init__(
        self,
        target: Target,
        offer: Offer,
        patience: Patience,
        waits: Waits,
        listener: socket.socket,
        limits: SiteLimits | None = None,
    ) -> None:
        self.agent = Agent(target, offer, patience, waits, self._start)
        self.hosted: SiteHost | None = None
        self._door = Door(target.base, self, limits or SiteLimits(dial_seconds=target.connect_seconds))
        self._listener = listener

    async def run(self) -> ExitCode:
        """Listen and take part until the agent is done."""
        async with self._door.listening(self._listener):
            address = self._listener.getsockname()
            log.info("hosts behind this one join here, port %s", address[1])
            return await self.agent.run()

    # -------------------------------------------------------------------------------- what the door asks

    async def before_join(self) -> None:
        """A host is about to join through here: join first, if that is possible, so that its data is folded."""
        self.agent.knock()
        await self._soon(lambda: self.agent.run_id is not None, _KNOCK_SECONDS)

    async def hosted_run(self, run_id: int) -> SiteHost | None:
        """This host's part in a run, waiting for it to begin; none when it takes no part, so that the run's data
        passes through."""
        if self.agent.run_id != run_id:
            return None
        await self._soon(lambda: self._hosts(run_id) or self.agent.run_id != run_id, _START_SECONDS)
        return self.hosted if self._hosts(run_id) else None

    def _hosts(self, run_id: int) -> bool:
        return self.hosted is not None and self.hosted.run_id == run_id

    async def _start(self, orders: HostOrders) -> SiteHost:
        self.hosted = SiteHost(orders, SiteRun())
        self.agent.moved.fire()
        return self.hosted

    async def _soon(self, condition: Callable[[], bool], seconds: float) -> None:
        """Wait for a condition for so long at most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.agent.moved.until(condition)
