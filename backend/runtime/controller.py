"""The controller: every run that is served, who may come in, and what the API asks for (contract in docs)."""

from __future__ import annotations

import asyncio
import errno
import logging
import secrets
import socket
import time
from collections.abc import Awaitable, Callable, Container, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

import coolname
from starlette.websockets import WebSocket

from backend.core.cohort import Cohort
from backend.core.config import Problem, RunConfig
from backend.core.preview import Outlook
from backend.core.vocabulary import Operator
from backend.runtime import jobs, resuming, returning
from backend.runtime.bundle import CheckpointPlace, Loaded, check_room
from backend.runtime.commands import checked_arguments
from backend.runtime.driver import Clock, Core
from backend.runtime.errors import CommandRefused, UnknownRun
from backend.runtime.feed import MAX_EVENTS, MAX_ROUNDS, Feed, Page
from backend.runtime.health import HostBeats, LoopHealth
from backend.runtime.limits import Limits
from backend.runtime.links import Door, Served
from backend.runtime.meters import Heartbeat, loop_health, measure
from backend.runtime.perform import ENDED_PHASES, LiveRun, Services
from backend.runtime.settings import STRETCHED, Settings
from backend.runtime.tokens import Tickets, load_token
from backend.runtime.view import View, history_view, overview
from backend.store import Store
from wire.session import join_secret, run_secret

SALT_BYTES = 32
OVERVIEW_RUNS = 100
MAX_LIVE_RUNS = 64

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Ports:
    """What a test may put in the place of time and of the core."""

    clock: Clock = time.monotonic
    wall_clock: Callable[[], datetime] = field(default=lambda: datetime.now(UTC))
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    limits: Limits | None = None
    core: Callable[..., Core] = Cohort


class Controller:
    """All that the API needs. Everything but ``store`` belongs to the event loop on which ``start`` was called."""

    def __init__(self, settings: Settings, store: Store, ports: Ports | None = None) -> None:
        """Read or make the tokens. Raises ``SettingsError`` when their files can't be used."""
        self.settings = settings
        self.store = store
        self.name = socket.gethostname()
        self.join_token = load_token(settings.data_dir / "join.token", settings.join_token)
        self.operator_token = load_token(settings.data_dir / "operator.token", settings.operator_token)
        self._ports = ports or Ports()
        self._limits = (self._ports.limits or Limits()).scaled(settings.time_scale)
        self._join_secret = join_secret(self.join_token)
        self._tickets = Tickets(self._ports.clock)
        self._pool = ThreadPoolExecutor(max_workers=4, thread_name_prefix="sealing")
        self._runs: dict[int, LiveRun] = {}
        self._serving: dict[int, asyncio.Task[None]] = {}
        self._creating = 0
        self._closing = asyncio.Event()
        self._root: asyncio.Task[None] | None = None
        self._group: asyncio.TaskGroup | None = None
        self._heartbeat = Heartbeat(self._ports.clock)
        self._door = Door(
            self._served,
            self._join_secret,
            self._limits,
            clock=self._ports.clock,
            sleep=self._ports.sleep,
            pool=self._pool,
        )
        self.feed = Feed(self._overview, self._history, self._spawn)

    # ---------------------------------------------------------------------------------------------- lifetime

    async def start(self) -> None:
        """Mark what a dead controller left running, then be ready for hosts and operators."""
        if self._root is not None:
            return
        started = asyncio.Event()
        self._root = asyncio.create_task(self._own_tasks(started), name="controller")
        await started.wait()
        kept = await asyncio.to_thread(returning.find, self.store.queries, self._join_secret)
        for run_id in await asyncio.to_thread(self.store.interrupt_unserved, tuple(kept)):
            log.warning("run %d was being served when the controller stopped; it is interrupted", run_id)
            await asyncio.to_thread(self._recover_checkpoints, run_id)
        self.feed.start()
        for run_id, found in kept.items():
            log.warning("run %d was being trained when the controller stopped; its cohort may come back", run_id)
            await asyncio.to_thread(self._recover_checkpoints, run_id)
            self._serve(*returning.take_back(self.store.queries, found, self._services()))
        self._spawn(self._heartbeat.run(), "loop lag")

    async def close(self, signal_name: str = "") -> None:
        """End the live runs by name, flush, and let go of everything. May be called twice."""
        if self._root is None or self._closing.is_set():
            return
        self._closing.set()
        for run in self._runs.values():
            run.stop(signal_name)
        if self._serving:
            await asyncio.wait(self._serving.values(), timeout=3 * self._limits.close_seconds)
        self._root.cancel()
        await asyncio.wait([self._root])
        self._pool.shutdown(wait=False, cancel_futures=True)
        await asyncio.to_thread(self.store.close)

    async def _own_tasks(self, started: asyncio.Event) -> None:
        """The root of every task: none is left behind."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            started.set()
            await asyncio.Event().wait()

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        assert self._group is not None, "start() comes first"
        return self._group.create_task(_contained(work, name), name=name)

    # -------------------------------------------------------------------------------------------------- runs

    async def create_run(self, config: RunConfig) -> int:
        """Make a run and open its join window. Raises ``CommandRefused`` naming every field that won't do."""
        return await self._create(config, None, STRETCHED)

    async def resume_run(self, source: str, changes: dict[str, Any]) -> int:
        """Make a run that goes on from a checkpoint (``resuming`` says how one is named), with that run's configuration
        but for ``changes``. Raises ``CommandRefused``."""
        row, origin = await asyncio.to_thread(resuming.find, self.store.queries, self.settings.data_dir, source)
        live = self._runs.get(row["id"])
        if live is not None and live.phase not in ENDED_PHASES:
            raise CommandRefused("run_live", f"Run {row['id']} is still live; stop it before it is resumed.")
        return await self._create(resuming.config_of(row, changes), origin, changes)

    async def _create(self, config: RunConfig, origin: Loaded | None, scaled: Container[str]) -> int:
        if self._closing.is_set() or self._group is None:
            raise CommandRefused("controller_stopping", "the controller is stopping; start the run when it is back")
        if len(self._runs) + self._creating >= MAX_LIVE_RUNS:
            raise CommandRefused("too_many_runs", f"{MAX_LIVE_RUNS} runs are live already; end one first")
        self._creating += 1
        try:
            config, job_hash = await asyncio.to_thread(self._checked, config, origin, scaled)
            if origin is not None:
                origin = resuming.compared(origin, config, job_hash)
            row = await asyncio.to_thread(self._insert, config, job_hash, origin)
        finally:
            self._creating -= 1
        if self._closing.is_set():
            # Its row says waiting; the next start interrupts it by name.
            raise CommandRefused("controller_stopping", "the controller is stopping; start the run when it is back")
        salt = secrets.token_bytes(SALT_BYTES)
        secret = secrets.token_bytes(SALT_BYTES) if config.open_admission else run_secret(self._join_secret, salt)
        core = self._ports.core(
            row["id"],
            config,
            run_salt=salt,
            run_secret=secret if config.open_admission else None,
            job_hash=job_hash,
            now=self._ports.clock(),
            **({} if origin is None else {"resume": origin.resume}),
        )
        run = LiveRun(row, config, core, secret, self._services(), origin)
        before: list[dict[str, Any]] = []
        if origin is not None:
            before = await asyncio.to_thread(self.store.queries.rounds, run.run_id, newest=True)
            run.checkpoints += await asyncio.to_thread(self.store.queries.checkpoints, run.run_id)
        self._serve(run, before)
        if config.open_admission:
            log.warning("run %d admits any host without a token: open_admission is on", row["id"])
        return int(row["id"])

    async def command(self, run_id: int, act: str, **arguments: Any) -> None:
        """Have a live run do something. Raises ``CommandRefused``, and ``UnknownRun`` when it isn't live."""
        run = self._runs.get(run_id)
        if run is None:
            raise UnknownRun(run_id)
        if act == "start":
            await self._refuse_without_room(run)
        refused = await run.driver.command(Operator(act, checked_arguments(act, arguments)))
        if refused is not None:
            raise CommandRefused(refused.code, refused.reason)

    def live_view(self, run_id: int) -> View | None:
        """The RunView of a served run; none when it isn't live."""
        run = self._runs.get(run_id)
        return None if run is None else run.view()

    def live_outlook(self, run_id: int) -> Outlook | None:
        """What a preview of a served run rests on; none when it isn't live. Reckon with it off the event loop."""
        run = self._runs.get(run_id)
        return None if run is None else run.outlook()

    def live_run_ids(self) -> list[int]:
        """Served runs, oldest first."""
        return list(self._runs)

    def metrics(self) -> dict[str, float]:
        """Numbers for ``/metrics``, by name; names that end in ``_total`` only grow."""
        return measure(self._door, self._heartbeat, list(self._runs.values()), self.feed, self.store)

    def loop_health(self) -> LoopHealth:
        """How promptly all runs since the start were served."""
        return loop_health(self._heartbeat, list(self._runs.values()))

    def run_health(self, run_id: int) -> tuple[LoopHealth, dict[str, HostBeats]] | None:
        """How promptly a live run is served, and its hosts' heartbeats by name; none when it isn't live."""
        run = self._runs.get(run_id)
        return None if run is None else (run.driver.health, run.links.beats)

    def issue_ticket(self) -> str:
        """A one-time pass for a browser, good for ten minutes."""
        return self._tickets.issue()

    def redeem_ticket(self, ticket: str) -> bool:
        """Whether the pass was good; it is not any more."""
        return self._tickets.redeem(ticket)

    # ------------------------------------------------------------------------------------------------- links

    async def join_socket(self, websocket: WebSocket) -> None:
        """Serve an agent's websocket to its end."""
        await self._door.join(websocket)

    async def control_socket(self, websocket: WebSocket) -> None:
        """Serve a relay's control websocket to its end."""
        await self._door.control(websocket)

    async def data_socket(self, websocket: WebSocket) -> None:
        """Serve a relay's data websocket to its end."""
        await self._door.data(websocket)

    # ----------------------------------------------------------------------------------------------- private

    def _served(self) -> list[Served]:
        return list(self._runs.values())

    def _services(self) -> Services:
        return Services(
            store=self.store,
            feed=self.feed,
            data_dir=self.settings.data_dir,
            limits=self._limits,
            clock=self._ports.clock,
            wall_clock=self._ports.wall_clock,
            spawn=self._spawn,
        )

    def _serve(self, run: LiveRun, before: list[dict[str, Any]]) -> None:
        async def to_the_end() -> None:
            try:
                await run.serve()
            finally:
                self._heartbeat.retire(run)
                del self._runs[run.run_id], self._serving[run.run_id]

        self._runs[run.run_id] = run
        self.feed.open(run.run_id, run.view, before)
        self._serving[run.run_id] = self._spawn(to_the_end(), f"run {run.run_id}")

    async def _refuse_without_room(self, run: LiveRun) -> None:
        try:
            await run.check_room()
        except OSError as error:
            raise _no_room(error) from error

    def _recover_checkpoints(self, run_id: int) -> None:
        """After a crash: remove what is half-written, list what is whole and was not announced any more, and take from
        the list what was removed for it."""
        place = CheckpointPlace(self.settings.data_dir, run_id)
        place.sweep()
        for row in (*resuming.lost_rows(self.store.queries, place), *resuming.gone_rows(self.store.queries, place)):
            self.store.write(run_id, "checkpoints", row, durable=True)

    def _checked(self, config: RunConfig, origin: Loaded | None, scaled: Container[str]) -> tuple[RunConfig, str]:
        """The configuration as it will be run, and its job's hash. Blocks on the job's file and on the disk."""
        problems = config.problems()
        if origin is not None:
            problems += origin.resume.problems(config)
        job_hash = ""
        if config.job:
            try:
                info = jobs.inspect(self.settings.job_dir, config.job)
                config = replace(config, params=jobs.check_params(info, config.params))
                job_hash = info.file_hash
            except jobs.JobProblem as problem:
                field_name = f"params.{problem.field}" if problem.field else "job"
                problems.append(Problem(field_name, problem.code, problem.text))
        if problems:
            raise CommandRefused("invalid_config", "; ".join(problem.text for problem in problems), problems)
        try:
            check_room(self.settings.data_dir / "runs")
        except OSError as error:
            raise _no_room(error) from error
        name = config.name or coolname.generate_slug(2)
        return replace(self.settings.scaled(config, scaled), name=name), job_hash

    def _insert(self, config: RunConfig, job_hash: str, origin: Loaded | None) -> dict[str, Any]:
        run_id = self.store.create_run(
            resuming.columns(origin)
            | {
                "name": config.name,
                "job": config.job,
                "params": config.params,
                "config": config.as_dict(),
                "mode": config.mode,
                "phase": "waiting",
                "job_hash": job_hash,
            }
        )
        if origin is not None:
            self._take_over(run_id, origin)
        row = self.store.queries.get_run(run_id)
        assert row is not None, f"run {run_id} was committed and is not there"
        return row

    def _take_over(self, run_id: int, origin: Loaded) -> None:
        """The checkpoint becomes the new run's first one, which then needs the old run's no more."""
        place = CheckpointPlace(self.settings.data_dir, run_id)
        try:
            place.take_over(origin.directory, origin.resume.checkpoint)
        except OSError as error:
            refusal = _no_room(error)
            self.store.write(run_id, "runs", {"phase": "failed", "reason": refusal.reason}, durable=True).result()
            raise refusal from error
        for row in resuming.lost_rows(self.store.queries, place):
            reason = f"from run {origin.resume.run_id}"
            self.store.write(run_id, "checkpoints", row | {"reason": reason}, durable=True).result()

    async def _overview(self) -> View:
        rows = await asyncio.to_thread(self.store.queries.list_runs, OVERVIEW_RUNS)
        runs = overview(rows, {run_id: run.view() for run_id, run in self._runs.items()})
        trouble = self.store.trouble
        return {
            "runs": runs,
            "controller": {
                "name": self.name,
                "live_runs": self.live_run_ids(),
                "not_durable": None if trouble is None else str(trouble),
            },
        }

    async def _history(self, run_id: int) -> Page:
        return await asyncio.to_thread(self._load_page, run_id)

    def _load_page(self, run_id: int) -> Page:
        queries = self.store.queries
        view = history_view(queries, run_id, self._ports.wall_clock())
        if view is None:
            raise UnknownRun(run_id)
        rounds = queries.rounds(run_id, limit=MAX_ROUNDS, newest=True)
        return Page(view, rounds, queries.events(run_id, limit=MAX_EVENTS, newest=True))


def _no_room(error: OSError) -> CommandRefused:
    code = "disk_full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "data_dir_unwritable"
    cure = "free some space" if code == "disk_full" else "make it writable, or name another --data-dir"
    return CommandRefused(code, f"Checkpoints could not be kept: {error.strerror} ({error.filename}); {cure}.")


async def _contained(work: Coroutine[Any, Any, None], name: str) -> None:
    """One task's bug must not take the others down with it; it's logged whole."""
    try:
        await work
    except Exception:
        log.exception("the task %r failed", name)
