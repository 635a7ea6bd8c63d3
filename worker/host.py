"""The children of one world on this host: a relay and the ranks, from the first start to the last exit.

Nothing here decides what an exit means for the run. Each one is described and handed on; the controller judges.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from dataclasses import dataclass
from math import prod
from pathlib import Path

import msgspec

from wire.messages import (
    Accept,
    ExitCause,
    Message,
    RankAssignment,
    RankExited,
    RankProgress,
    RelayExited,
    TensorSpec,
    WorldFormed,
)
from worker.child import Child, Exit
from worker.device_watch import DeviceWatch
from worker.devices import DeviceError, LocalDevice, cores
from worker.environment import child_environment, rank_environment
from worker.exit_cause import Kernel, ended_by_kill, rank_exit_cause, read_report, relay_exit_cause
from worker.interfaces import GLOO_VARIABLE, NCCL_VARIABLE, chosen, interface_of
from worker.memory_limit import ControlGroup, MemoryKills
from worker.progress import ProgressBlock, ProgressError, Reading
from worker.relay_spec import RelaySpec
from worker.shared_dir import SharedDir
from worker.specs import RankSpec, line

GRACE_SECONDS = 5.0
"""between SIGTERM and SIGKILL"""
PATIENCE_SECONDS = 2.0
"""for children that are on their way out already"""
_SPARE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class HostOrders:
    """What the children of this world are made from. ``url`` is the one that this host's own join dialled, from
    ``local_address``."""

    formed: WorldFormed
    accept: Accept
    run_secret: bytes
    url: str
    local_address: str
    devices: tuple[LocalDevice, ...]
    layout: tuple[TensorSpec, ...]
    job_dir: Path
    emulate_ms_per_batch: float | None
    shared_memory: bool

    @property
    def needed_bytes(self) -> int:
        """Shared memory for one arena a rank, the consensus, and the one that is being built."""
        elements = sum(prod(spec.shape) for spec in self.layout if spec.offset >= 0)
        return 4 * elements * (len(self.formed.assignments) + 2) + _SPARE_BYTES

    def device(self, assignment: RankAssignment) -> LocalDevice:
        """The device that a rank was given. Raises ``DeviceError`` for one that this host did not offer."""
        for device in self.devices:
            if device.device.id == assignment.device:
                return device
        raise DeviceError(f"rank {assignment.rank} was given {assignment.device}, which this host did not offer")

    def interface(self, device: LocalDevice) -> str:
        """Where this host's ranks meet those of others, if they do at all."""
        alone = len(self.formed.assignments) == self.formed.world_size
        variable = GLOO_VARIABLE if device.device.type == "cpu" else NCCL_VARIABLE
        return chosen(os.environ, variable, interface_of(self.local_address, alone=alone))


class Host:
    """Relay and ranks while they run. ``exits`` yields a ``RankExited`` or ``RelayExited`` for each that ends."""

    def __init__(self, shared: SharedDir, devices: DeviceWatch) -> None:
        self.exits: asyncio.Queue[Message] = asyncio.Queue()
        self.failed_ranks: list[int] = []
        self._shared = shared
        self._devices = devices
        self._relay: Child | None = None
        self._ranks: dict[int, Child] = {}
        self._device_of: dict[int, str] = {}
        self._blocks: dict[int, ProgressBlock] = {}
        self._memory_kills = MemoryKills(ControlGroup(), time.monotonic())
        self._stopping = False
        self._watchers: list[asyncio.Task[None]] = []

    @classmethod
    async def start(cls, orders: HostOrders) -> Host:
        """Start the relay and every rank. Raises ``SharedDirError``, ``DeviceError``, ``OSError``; nothing runs
        then."""
        host = cls(SharedDir.create(orders.needed_bytes), DeviceWatch(orders.devices))
        try:
            await host._spawn_relay(orders)
            for assignment in orders.formed.assignments:
                await host._spawn_rank(orders, assignment)
        except BaseException:
            await host.stop(patience_seconds=0)
            raise
        return host

    def progress(self) -> list[RankProgress]:
        """How far each rank is, as its shared counter says; user code cannot hold that up."""
        self._memory_kills.look(time.monotonic())
        return [self._progress_of(rank, child) for rank, child in sorted(self._ranks.items())]

    async def stop(self, patience_seconds: float = PATIENCE_SECONDS) -> None:
        """End everything: ranks first, then the relay; returns when all are gone and the directory is removed."""
        self._stopping = True
        await asyncio.gather(*(child.stop(GRACE_SECONDS, patience_seconds) for child in self._ranks.values()))
        if self._relay is not None:
            await self._relay.stop(GRACE_SECONDS, patience_seconds)
        await asyncio.gather(*self._watchers, return_exceptions=True)
        self._close()

    def fence(self, rank: int) -> None:
        """The cohort goes on without this rank: whatever its process is busy with, it ends, and its device is free."""
        if (child := self._ranks.get(rank)) is not None:
            self._watchers.append(asyncio.create_task(_end(child), name=f"end {child.label}"))

    def kill(self) -> None:
        """End everything at once, without waiting."""
        self._stopping = True
        for child in self._children():
            child.send_signal(signal.SIGKILL)
        self._close()

    # ------------------------------------------------------------------------------------------- starting

    async def _spawn_relay(self, orders: HostOrders) -> None:
        spec = RelaySpec(
            url=orders.url,
            host_id=orders.accept.host_id,
            ranks=[assignment.rank for assignment in orders.formed.assignments],
            run_id=orders.accept.run_id,
            run_secret=orders.run_secret.hex(),
            shm_dir=str(self._shared.path),
            heartbeat_seconds=orders.accept.heartbeat_seconds,
            heartbeat_timeout_seconds=orders.accept.heartbeat_timeout_seconds,
            reattach_seconds=orders.formed.reattach_seconds,
            shared_memory=orders.shared_memory,
        )
        self._relay = await Child.spawn("relay", "worker.relay", line(spec), child_environment(os.environ))
        self._watchers.append(asyncio.create_task(self._watch_relay(self._relay)))

    async def _spawn_rank(self, orders: HostOrders, assignment: RankAssignment) -> None:
        device = orders.device(assignment)
        interface = orders.interface(device)
        spec = RankSpec(
            plan=orders.formed.plan,
            rank=assignment.rank,
            device=device.torch_name,
            shm_dir=str(self._shared.path),
            job_dir=str(orders.job_dir),
            emulate_ms_per_batch=orders.emulate_ms_per_batch,
            interface=interface,
        )
        environment = rank_environment(
            os.environ,
            orders.formed,
            assignment,
            device,
            host_id=orders.accept.host_id,
            url=orders.url,
            cores=cores(),
            interface=interface,
        )
        child = await Child.spawn(f"rank {assignment.rank}", "worker.rank", line(spec), environment)
        self._ranks[assignment.rank] = child
        self._device_of[assignment.rank] = assignment.device
        self._watchers.append(asyncio.create_task(self._watch_rank(assignment.rank, child)))

    # ------------------------------------------------------------------------------------------- watching

    async def _watch_rank(self, rank: int, child: Child) -> None:
        end = await asyncio.shield(child.exited)
        cause = self._cause(rank, child, end)
        if not cause.clean:
            self.failed_ranks.append(rank)
        ago = max(0.0, time.monotonic() - end.seen_at)
        self.exits.put_nowait(RankExited(rank=rank, cause=msgspec.structs.replace(cause, seen_seconds_ago=ago)))

    async def _watch_relay(self, child: Child) -> None:
        end = await asyncio.shield(child.exited)
        cause = relay_exit_cause(end, child.tail.text(), stopping=self._stopping)
        self.exits.put_nowait(RelayExited(cause=cause))
        if not self._stopping:  # cut off from the cohort: whatever the ranks still do cannot count
            await asyncio.gather(*(rank.stop(GRACE_SECONDS, PATIENCE_SECONDS) for rank in self._ranks.values()))

    def _cause(self, rank: int, child: Child, end: Exit) -> ExitCause:
        killed = ended_by_kill(end) and not self._stopping
        kills = self._memory_kills.claim(time.monotonic()) if killed else 0
        return rank_exit_cause(
            end,
            self._reading(rank),
            read_report(self._shared.path / f"rank{rank}.report.json"),
            child.tail.text(),
            stopping=self._stopping,
            kernel=Kernel(kills, self._memory_kills.group.limit_bytes() if kills else 0),
        )

    def _progress_of(self, rank: int, child: Child) -> RankProgress:
        reading = self._reading(rank) or Reading("starting", 0, 0.0)
        device = self._devices.reading(self._device_of.get(rank, ""))
        return RankProgress(
            rank=rank,
            state=reading.state if child.alive else "exited",
            steps=reading.steps,
            state_seconds=reading.age_seconds,
            rss_bytes=resident_bytes(child.pid) if child.alive else 0,
            device_utilisation=device.utilisation,
            device_bytes=device.used_bytes,
            device_peak_bytes=reading.device_peak_bytes or None,
        )

    def _reading(self, rank: int) -> Reading | None:
        if rank not in self._blocks:
            with contextlib.suppress(ProgressError):  # the rank has not come that far
                self._blocks[rank] = ProgressBlock.open(self._shared.path / f"rank{rank}.progress")
        block = self._blocks.get(rank)
        return block.read(time.monotonic_ns()) if block is not None else None

    def _children(self) -> list[Child]:
        return [*self._ranks.values(), *([self._relay] if self._relay is not None else [])]

    def _close(self) -> None:
        for block in self._blocks.values():
            block.close()
        self._blocks.clear()
        self._devices.close()
        self._shared.remove()


async def _end(child: Child) -> None:
    await child.stop(GRACE_SECONDS, PATIENCE_SECONDS)


def resident_bytes(pid: int) -> int:
    """Memory that a process holds now; 0 where the system does not say."""
    try:
        fields = Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()
    except OSError:
        return 0
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")
