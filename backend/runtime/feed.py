"""What browsers and the command line watch: a snapshot, then what changed, at most four times a second.

A subscriber that falls behind holds one merged change, never a queue: the newest value of a key wins, and when rows
would be lost it gets a fresh snapshot instead. Its frames are numbered without a gap.

    {"type": "snapshot", "seq": 1, "view": RunView, "rounds": [last 400], "events": [last 200]}
    {"type": "delta",    "seq": 2, "patch": {keys of the view that changed}, "rounds": [new], "events": [new]}
    {"type": "ping",     "seq": 3}
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any

FRAME_SECONDS = 0.25
REFRESH_SECONDS = 1.0
"""Countdowns and silences change by themselves."""
PING_SECONDS = 2.0
MAX_ROUNDS = 400
MAX_EVENTS = 200

Row = dict[str, Any]
View = dict[str, Any]
Frame = dict[str, Any]
Spawn = Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]]

log = logging.getLogger(__name__)


class Page:
    """All that a subscriber sees of one subject: its view and its newest rows."""

    def __init__(self, view: View, rounds: list[Row], events: list[Row]) -> None:
        self.view = view
        self.rounds: deque[Row] = deque(rounds, MAX_ROUNDS)
        self.events: deque[Row] = deque(events, MAX_EVENTS)

    def snapshot(self) -> Frame:
        """The page as a frame, less its number."""
        return {"type": "snapshot", "view": self.view, "rounds": list(self.rounds), "events": list(self.events)}


class Subscription:
    """One reader of a page: at most one frame waits for it."""

    def __init__(self, page: Page) -> None:
        self._page = page
        self._seq = 0
        self._needs_snapshot = True
        self._patch: View = {}
        self._rounds: list[Row] = []
        self._events: list[Row] = []
        self._wake = asyncio.Event()
        self._wake.set()

    def offer(self, patch: View, rounds: list[Row], events: list[Row]) -> None:
        """Merge a change into what waits for this reader."""
        self._patch |= patch
        self._rounds += rounds
        self._events += events
        if len(self._rounds) > MAX_ROUNDS or len(self._events) > MAX_EVENTS:
            self._needs_snapshot = True
        if self._needs_snapshot:
            self._forget()
        self._wake.set()

    async def next(self) -> Frame:
        """The next frame; a ping when nothing changes for a while."""
        try:
            async with asyncio.timeout(PING_SECONDS):
                await self._wake.wait()
        except TimeoutError:
            return self._numbered({"type": "ping"})
        self._wake.clear()
        if self._needs_snapshot:
            self._needs_snapshot = False
            frame = self._page.snapshot()
        else:
            frame = {"type": "delta", "patch": self._patch, "rounds": self._rounds, "events": self._events}
        self._forget()
        return self._numbered(frame)

    def _forget(self) -> None:
        self._patch, self._rounds, self._events = {}, [], []

    def _numbered(self, frame: Frame) -> Frame:
        self._seq += 1
        return {"type": frame.pop("type"), "seq": self._seq, **frame}


class Topic:
    """One subject that changes: a live run, or the overview. Its task computes the view once for all subscribers."""

    def __init__(self, view: Callable[[], Awaitable[View]], rounds: list[Row] | None = None) -> None:
        self._view = view
        self._page: Page = Page({}, rounds or [], [])
        self._new_rounds: list[Row] = []
        self._new_events: list[Row] = []
        self._subscriptions: set[Subscription] = set()
        self._dirty = asyncio.Event()
        self._publishing = asyncio.Lock()

    @property
    def watched(self) -> int:
        """How many subscribers there are."""
        return len(self._subscriptions)

    def touch(self) -> None:
        """Something may have changed."""
        self._dirty.set()

    def add_row(self, table: str, row: Row) -> None:
        """A row was committed; other tables than rounds and events show in the view only."""
        if table == "rounds":
            self._new_rounds.append(row)
        elif table == "events":
            self._new_events.append(row)
        self._dirty.set()

    async def run(self) -> None:
        """Publish changes until cancelled."""
        while True:
            await self._until_due()
            try:
                await self.publish()
            except Exception:
                log.exception("a view could not be computed; its subscribers wait for the next one")
            await asyncio.sleep(FRAME_SECONDS)

    async def publish(self) -> None:
        """Compute the view and hand every subscriber what is new."""
        async with self._publishing:
            self._dirty.clear()
            self._distribute(await self._view())

    def _distribute(self, view: View) -> None:
        shown = self._page.view
        patch = {key: value for key, value in view.items() if key not in shown or shown[key] != value}
        rounds, self._new_rounds = self._new_rounds, []
        events, self._new_events = self._new_events, []
        self._page.view = view
        self._page.rounds.extend(rounds)
        self._page.events.extend(events)
        if patch or rounds or events:
            for subscription in self._subscriptions:
                subscription.offer(patch, rounds, events)

    async def subscribe(self) -> Subscription:
        """A new reader; its first frame is the page as it is now."""
        await self.publish()
        subscription = Subscription(self._page)
        self._subscriptions.add(subscription)
        self._dirty.set()
        return subscription

    def unsubscribe(self, subscription: Subscription) -> None:
        """The reader is gone."""
        self._subscriptions.discard(subscription)

    async def _until_due(self) -> None:
        while not (self._dirty.is_set() and self._subscriptions):
            if not self._subscriptions:
                # Nobody looks: rows still have to reach the page, or they would pile up.
                self._page.rounds.extend(self._new_rounds)
                self._page.events.extend(self._new_events)
                self._new_rounds, self._new_events = [], []
            self._dirty.clear()
            try:
                async with asyncio.timeout(REFRESH_SECONDS if self._subscriptions else None):
                    await self._dirty.wait()
            except TimeoutError:
                return


class Feed:
    """Topics by run, and one for the overview. ``history`` loads the page of a run that nobody serves."""

    def __init__(
        self, overview: Callable[[], Awaitable[View]], history: Callable[[int], Awaitable[Page]], spawn: Spawn
    ) -> None:
        self._history = history
        self._spawn = spawn
        self._overview = Topic(overview)
        self._topics: dict[int, Topic] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._still = 0

    @property
    def subscribers(self) -> int:
        """Readers of anything."""
        return self._overview.watched + sum(topic.watched for topic in self._topics.values()) + self._still

    def start(self) -> None:
        """Begin publishing the overview."""
        self._spawn(self._overview.run(), "feed overview")

    def open(self, run_id: int, view: Callable[[], View], rounds: list[Row] | None = None) -> None:
        """A run goes live; ``rounds`` are those of the runs that it goes on from."""

        async def current() -> View:
            return view()

        topic = self._topics[run_id] = Topic(current, rounds)
        self._tasks[run_id] = self._spawn(topic.run(), f"feed run {run_id}")
        self._overview.touch()

    def touch(self, run_id: int) -> None:
        """Something in this run may have changed."""
        topic = self._topics.get(run_id)
        if topic is not None:
            topic.touch()

    def add_row(self, run_id: int, table: str, row: Row) -> None:
        """A row of this run was committed."""
        topic = self._topics.get(run_id)
        if topic is not None:
            topic.add_row(table, row)
        if table in ("runs", "rounds", "deaths"):
            self._overview.touch()

    async def close(self, run_id: int) -> None:
        """The run is over: its subscribers get the last change, and pings from then on."""
        topic, task = self._topics.pop(run_id, None), self._tasks.pop(run_id, None)
        if task is not None:
            task.cancel()
        if topic is not None:
            try:
                await topic.publish()
            except Exception:
                log.exception("the last view of run %d could not be computed", run_id)
        self._overview.touch()

    async def subscribe(self, run_id: int | None) -> AsyncIterator[Frame]:
        """Frames of a run, or of the overview, without end. Raises ``UnknownRun`` at the first one."""
        topic = self._overview if run_id is None else self._topics.get(run_id)
        if topic is not None:
            subscription = await topic.subscribe()
        else:
            assert run_id is not None
            subscription = Subscription(await self._history(run_id))
            self._still += 1
        try:
            while True:
                yield await subscription.next()
        finally:
            if topic is not None:
                topic.unsubscribe(subscription)
            else:
                self._still -= 1
