"""A run that is served: its core, its driver, and what the core's effects do to links, reduce plane, store and disk."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from backend.core.config import RunConfig
from backend.core.preview import Outlook
from backend.core.vocabulary import (
    AbortRound,
    CheckpointWritten,
    CloseLink,
    DropHost,
    Effect,
    End,
    ExpectRelays,
    KeepState,
    OpenCheckpoint,
    OpenRound,
    Record,
    RoundBroken,
    SendHost,
    SendRank,
    SendRelay,
    SendState,
    WriteCheckpoint,
)
from backend.reduce.attempt import fold_order
from backend.reduce.outer import outer_optimizer
from backend.reduce.plane import ReducePlane
from backend.runtime.bundle import CheckpointPlace, Loaded, check_room
from backend.runtime.checkpoint import CheckpointWriter, Committed
from backend.runtime.death_files import DeathFiles
from backend.runtime.driver import Clock, Core, Driver
from backend.runtime.feed import Feed
from backend.runtime.limits import Limits
from backend.runtime.run_links import RunLinks
from backend.runtime.saver import Saver
from backend.runtime.view import View, final_figures, live_view
from backend.store import Store, StoreError
from wire import failpoints
from wire.messages import RoundAborted, RoundCommitted, RunEnded
from wire.session import ChunkHeader

OPEN_PHASES = ("waiting", "staging")
ENDED_PHASES = ("done", "failed", "interrupted")
RECORDED_SECONDS = 30.0
"""a checkpoint waits no longer for the rows of its rounds"""

Row = dict[str, Any]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Services:
    """What every served run shares."""

    store: Store
    feed: Feed
    data_dir: Path
    limits: Limits
    clock: Clock
    wall_clock: Callable[[], datetime]
    spawn: Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]]


@dataclass(slots=True)
class Tally:
    """What this run has done, for the metrics."""

    rounds: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    store_failures: int = 0
    checkpoints: int = 0
    checkpoint_failures: int = 0


class LiveRun:
    """One run from its creation to its end. ``row`` is its row in the store, as last committed."""

    _stopped = "controller stopped"

    def __init__(
        self,
        row: Row,
        config: RunConfig,
        core: Core,
        secret: bytes,
        services: Services,
        origin: Loaded | None = None,
    ) -> None:
        """``origin`` is the checkpoint that the run goes on from."""
        self.run_id: int = row["id"]
        self.row = row
        self.config = config
        self.secret = secret
        self.tally = Tally()
        self.deaths: list[Row] = []
        self.checkpoints: list[Row] = []  # by number
        self._core, self._services = core, services
        self._outcome: tuple[str, str] | None = None
        self._place = CheckpointPlace(services.data_dir, self.run_id)
        self._death_files = DeathFiles(self._place.root, row, services.spawn)
        self._origin = origin.resume.checkpoint if origin is not None else 0
        self._loop = asyncio.get_running_loop()
        self.driver = Driver(
            self.run_id,
            core,
            self.perform,
            clock=services.clock,
            heartbeat_seconds=config.heartbeat_seconds,
            inbox_events=services.limits.inbox_events,
            published=lambda: services.feed.touch(self.run_id),
        )
        self.links = RunLinks(self.driver.post)
        self.plane = ReducePlane(
            send=self._send_chunk,
            tell=self.links.send_data,
            finished=self.driver.post,
            broken=self._broken,
            clock=services.clock,
            outer=outer_optimizer(config),
        )
        self._start_from(origin)
        self._saver = Saver(
            CheckpointWriter(self._place, services.wall_clock, {"job_hash": row["job_hash"] or ""}),
            lambda: Committed(self.plane.consensus, self.plane.outer_momentum),
            self.links.send_rank,
            self._checkpoint_written,
            self._flooded,
            self._recorded,
        )

    def _flooded(self, rank: int) -> None:
        self.links.lose(rank, f"rank {rank} sends more of its state than it was granted")

    def _recorded(self) -> None:
        """Wait until what was given to the store is committed, or it is in trouble. Not for the loop's thread."""
        with contextlib.suppress(StoreError, TimeoutError):
            self._services.store.flush().result(RECORDED_SECONDS)

    def _start_from(self, origin: Loaded | None) -> None:
        """The initial broadcast brings what the checkpoint holds."""
        if origin is None:
            return
        self.plane.restore_consensus(origin.consensus)
        if origin.momentum is not None and self.config.outer_optimizer != "none":
            self.plane.restore_outer(origin.momentum)

    @property
    def window_open(self) -> bool:
        """Whether a host may still join."""
        return self._outcome is None and self._core.phase in OPEN_PHASES

    @property
    def phase(self) -> str:
        """The run's phase, whoever ended it. An end is on record before anybody is told: a crash would take it back."""
        if self._outcome is not None:
            return self._outcome[0]
        return str(self.row["phase"]) if self._core.ended else self._core.phase

    def view(self) -> View:
        """The RunView as it is now."""
        core, paths = self._core.snapshot(self._services.clock()), self.links.data_paths()
        members = [member | {"data_path": paths.get(member["host"], "")} for member in core.get("members", ())]
        core = core | {"members": members}
        if self._outcome is not None or self._core.ended:
            reason = self._outcome[1] if self._outcome is not None else self.row["reason"] or ""
            core = core | {"phase": self.phase, "reason": reason}
        trouble = self._services.store.trouble
        core["not_durable"] = "" if trouble is None else str(trouble)
        return live_view(core, self.row, self.deaths, self.checkpoints, self._services.wall_clock())

    def outlook(self) -> Outlook | None:
        """What a preview of the run rests on; none once the run is over."""
        return None if self._outcome is not None else self._core.outlook()

    async def serve(self) -> None:
        """Drive the run to its end, whichever; then let its links flush and its watchers know."""
        failure = await self.driver.run()
        if failure is not None:
            await self._conclude("failed", failure)
        elif not self._core.ended:
            await self._conclude("interrupted", self._stopped)
        self.plane.close()
        self._saver.close()
        await self._services.feed.close(self.run_id)
        await self._flushed()
        await self._death_files.written()

    def stop(self, signal_name: str = "") -> None:
        """Have the run end as interrupted; ``signal_name`` tells what ended its controller."""
        self._stopped = f"controller stopped by {signal_name}" if signal_name else self._stopped
        self.driver.stop()

    async def perform(self, effect: Effect) -> None:
        """Do what the core said. Sending never waits and never raises for a peer's sake; a durable record waits."""
        match effect:
            case SendHost(link=link, message=message):
                self.links.send_host(link, message)
            case CloseLink(link=link, reason=reason):
                self.links.close_join(link, reason)
            case SendRelay(host=host, message=RoundCommitted() as commit):
                self._announce(host, commit)
            case SendRelay(host=host, message=message):
                self.links.send_relay(host, message)
            case SendRank(rank=rank, message=message):
                self.links.send_rank(rank, message)
            case Record():
                await self._record(effect)
            case OpenRound() | AbortRound():
                self._reduce(effect)
            case _:
                self._perform_rare(effect)

    def _perform_rare(self, effect: Effect) -> None:
        match effect:
            case ExpectRelays(hosts=hosts):
                self.links.expect(hosts)
                self._services.spawn(self._warn_of_disk(), f"run {self.run_id} room for checkpoints")
            case DropHost(host=host, reason=reason):
                self.links.drop(host, reason)
            case OpenCheckpoint() | KeepState() | WriteCheckpoint() | SendState():
                self._saver.perform(effect, self._origin)
            case End(phase=phase, reason=reason):
                self._outcome = (phase, reason)
                self.links.finish_all(reason)
            case _:
                raise TypeError(f"{type(effect).__name__} is not performed here")

    def _announce(self, host: int, commit: RoundCommitted) -> None:
        where = {"run": self.run_id, "host": host, "round": commit.round, "attempt": commit.attempt}
        failpoints.hit("driver.commit.before", **where)
        self.links.send_relay(host, commit)
        failpoints.hit("driver.commit.after", **where)

    def _reduce(self, effect: OpenRound | AbortRound) -> None:
        if isinstance(effect, OpenRound):
            self._open_round(effect)
            return
        self.plane.abort(effect.round, effect.attempt, effect.reason)
        self.links.drop_chunks()
        aborted = RoundAborted(round=effect.round, attempt=effect.attempt, reason=effect.reason)
        for host in self.links.relay_only():
            self.links.send_data(host, aborted)

    def _open_round(self, effect: OpenRound) -> None:
        """The plane expects one contribution from each data link; a relay-only host is told whose work to fold."""
        uplinks = self.links.uplinks(effect.hosts)
        expected = {uplink: tuple(sorted(chain(*hosts.values()))) for uplink, hosts in uplinks.items()}
        self.plane.open(replace(effect, hosts=expected))
        self.tally.rounds += effect.attempt == 0
        for uplink, hosts in uplinks.items():
            if self.links.is_relay_only(uplink):
                self.links.send_data(uplink, fold_order(replace(effect, hosts=hosts)))

    def _broken(self, event: RoundBroken) -> None:
        """The plane knows data links; a value that came by way of a relay-only host is its own rank's, not that
        host's."""
        value = event.non_finite
        if event.host is not None and value is not None and self.links.is_relay_only(event.host):
            owner = None if value.rank is None else self.links.owner(value.rank)
            event = replace(event, non_finite=None) if owner is None else replace(event, host=owner)
        self.driver.post(event)

    def _send_chunk(self, host: int, header: ChunkHeader, payload: memoryview) -> None:
        outbox = self.links.data(host)
        if outbox is not None:
            outbox.post_chunk(header, payload)

    # ---------------------------------------------------------------------------------------------- records

    async def _record(self, record: Record) -> None:
        row = record.row
        if record.table == "runs" and "phase" in row:
            row = self._completed(row)
        if record.table == "rounds":
            self.tally.bytes_up += row.get("bytes_up") or 0
            self.tally.bytes_down += row.get("bytes_down") or 0
        # On disk as soon as can be, and nobody waits for it: ranks that hold a round that is not there are found out.
        soon = record.durable or record.table == "continuations"
        future = self._services.store.write(self.run_id, record.table, row, soon)
        future.add_done_callback(partial(self._on_loop, record.table))
        if record.durable:
            # A store in trouble must not end the training: it gives up on waiting, keeps the row, and says so itself.
            with contextlib.suppress(StoreError):
                await asyncio.wrap_future(future)

    def _completed(self, row: Row) -> Row:
        """A phase's row with what only a snapshot of the core says: an emulated run must never pass for a real one."""
        snapshot = self._core.snapshot(self._services.clock())
        known: Row = {"emulated": bool(snapshot.get("emulated"))}
        if row["phase"] in ENDED_PHASES and row["phase"] != "interrupted":
            known["summary"] = final_figures(snapshot) | (row.get("summary") or {})
        return row | known

    def _on_loop(self, table: str, done: Future[Row]) -> None:
        """From the store's thread: what was committed, or why it was not, to the loop's."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody watches any more
            self._loop.call_soon_threadsafe(self._stored, table, done)

    def _stored(self, table: str, done: Future[Row]) -> None:
        error = done.exception()
        if error is not None:
            self.tally.store_failures += 1
            kept = isinstance(error, StoreError) and error.kept  # it waits in memory; the store said so, once
            level = logging.DEBUG if kept else logging.ERROR
            log.log(level, "run %d: a row of %s was not committed: %s", self.run_id, table, error)
            return
        row = done.result()
        if table == "runs":
            self.row = row
        elif table in ("deaths", "recoveries"):
            self.deaths = [*(death for death in self.deaths if death["rank"] != row["rank"]), row]
            self._death_files.put(row)
        elif table == "checkpoints":
            self.checkpoints = [*(old for old in self.checkpoints if old["checkpoint"] != row["checkpoint"]), row]
            self.checkpoints.sort(key=lambda each: each["checkpoint"])
        if table != "continuations":
            self._services.feed.add_row(self.run_id, table, row)

    def _checkpoint_written(self, written: CheckpointWritten) -> None:
        if written.error:
            self.tally.checkpoint_failures += 1
            log.error("run %d: checkpoint %d was not written: %s", self.run_id, written.checkpoint, written.error)
        else:
            self.tally.checkpoints += 1
        self.driver.post(written)

    async def check_room(self) -> None:
        """Whether a checkpoint of this model would find room now. Raises ``OSError``."""
        outlook = self.outlook()
        await asyncio.to_thread(check_room, self._place.root, 2 * outlook.model_bytes if outlook else 0)

    async def _warn_of_disk(self) -> None:
        try:
            await self.check_room()
        except OSError as error:
            text = f"Checkpoints will fail as things are: {error.strerror} ({error.filename})"
            event = {"kind": "checkpoint_trouble", "level": "error", "text": text, "data": {}}
            await self._record(Record("events", event))

    # ------------------------------------------------------------------------------------------- the end

    async def _conclude(self, phase: str, reason: str) -> None:
        """End a run that its core did not end: durable first, then every host is told."""
        self._outcome = (phase, reason)
        level = "error" if phase == "failed" else "warning"
        text = f"The run is {phase}: {reason}"
        event = {"kind": "run_ended", "level": level, "text": text, "data": {}}
        by = {"stopped_by": "controller"} if phase == "interrupted" else {}
        for table, row in (("events", event), ("runs", {"phase": phase, "reason": reason} | by)):
            future = self._services.store.write(self.run_id, table, row, durable=True)
            future.add_done_callback(partial(self._on_loop, table))
            with contextlib.suppress(StoreError):
                await asyncio.wrap_future(future)
        self.links.finish_all(reason, RunEnded(phase=phase, reason=reason))

    async def _flushed(self) -> None:
        try:
            async with asyncio.timeout(self._services.limits.close_seconds):
                await self.links.flushed()
        except TimeoutError:
            seconds = self._services.limits.close_seconds
            log.warning("run %d: some links took more than %g s to close", self.run_id, seconds)
