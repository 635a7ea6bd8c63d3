"""The feed: a snapshot, then what changed; a slow reader gets the newest, and never a gap that it can't see."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest
from runtime_scripted import turns

from backend.runtime import feed as feed_module
from backend.runtime.errors import UnknownRun
from backend.runtime.feed import MAX_EVENTS, MAX_ROUNDS, Feed, Page, Subscription

View = dict[str, Any]
Frame = dict[str, Any]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "FRAME_SECONDS", 0.02)
    monkeypatch.setattr(feed_module, "PING_SECONDS", 0.2)
    monkeypatch.setattr(feed_module, "REFRESH_SECONDS", 5.0)


class Desk:
    """A feed whose views a test writes, and how often they were asked for."""

    def __init__(self) -> None:
        self.tasks: list[asyncio.Task[None]] = []
        self.view: View = {"phase": "waiting", "round": 0}
        self.runs: View = {"runs": []}
        self.asked = 0
        self.feed = Feed(self._overview, self._history, self._spawn)

    def current(self) -> View:
        self.asked += 1
        return dict(self.view)

    async def _overview(self) -> View:
        return dict(self.runs)

    async def _history(self, run_id: int) -> Page:
        if run_id != 3:
            raise UnknownRun(run_id)
        return Page({"phase": "done"}, [{"round": 0}], [{"id": 1}])

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        self.tasks.append(asyncio.create_task(work, name=name))
        return self.tasks[-1]


@asynccontextmanager
async def desk() -> AsyncIterator[Desk]:
    made = Desk()
    try:
        yield made
    finally:
        for task in made.tasks:
            task.cancel()
        await asyncio.gather(*made.tasks, return_exceptions=True)


async def next_of(frames: AsyncIterator[Frame], kind: str) -> Frame:
    async with asyncio.timeout(30):
        frame = await anext(frames)
        assert frame["type"] == kind, frame
        return frame


async def test_a_snapshot_then_only_what_changed() -> None:
    async with desk() as it:
        it.feed.open(1, it.current)
        it.feed.add_row(1, "events", {"id": 1})
        frames = it.feed.subscribe(1)
        first = await next_of(frames, "snapshot")
        assert first == {
            "type": "snapshot", "seq": 1, "view": {"phase": "waiting", "round": 0}, "rounds": [], "events": [{"id": 1}],
        }  # fmt: skip
        it.view["round"] = 1
        it.feed.add_row(1, "rounds", {"round": 0})
        assert await next_of(frames, "delta") == {
            "type": "delta", "seq": 2, "patch": {"round": 1}, "rounds": [{"round": 0}], "events": [],
        }  # fmt: skip


async def test_what_changes_together_comes_as_one_frame() -> None:
    async with desk() as it:
        it.feed.open(1, it.current)
        frames = it.feed.subscribe(1)
        await next_of(frames, "snapshot")
        for number in range(1, 50):
            it.view["round"] = number
            it.feed.add_row(1, "rounds", {"round": number})
        frame = await next_of(frames, "delta")
        assert frame["patch"] == {"round": 49}
        assert [row["round"] for row in frame["rounds"]] == list(range(1, 50))


async def test_nothing_new_is_a_ping_with_its_number() -> None:
    async with desk() as it:
        it.feed.open(1, it.current)
        frames = it.feed.subscribe(1)
        await next_of(frames, "snapshot")
        it.feed.touch(1)
        assert await next_of(frames, "ping") == {"type": "ping", "seq": 2}


async def test_a_value_that_changes_by_itself_is_refreshed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "REFRESH_SECONDS", 0.02)
    async with desk() as it:
        it.feed.open(1, it.current)
        frames = it.feed.subscribe(1)
        await next_of(frames, "snapshot")
        it.view["round"] = 5
        assert (await next_of(frames, "delta"))["patch"] == {"round": 5}


async def test_the_view_is_computed_once_for_all_and_not_at_all_for_nobody() -> None:
    async with desk() as it:
        it.feed.open(1, it.current)
        for _ in range(5):
            it.feed.touch(1)
            await turns(1)
        assert it.asked == 0
        readers = [it.feed.subscribe(1) for _ in range(10)]
        for frames in readers:
            await next_of(frames, "snapshot")
        before = it.asked
        it.view["round"] = 1
        it.feed.touch(1)
        await asyncio.gather(*(next_of(frames, "delta") for frames in readers))
        assert it.asked - before <= 2
        assert it.feed.subscribers == 10
        for frames in readers:
            await frames.aclose()  # type: ignore[attr-defined]
        assert it.feed.subscribers == 0


def test_a_slow_reader_holds_one_merged_change() -> None:
    async def story() -> None:
        reader = Subscription(Page({"a": 0}, [], []))
        assert (await reader.next())["type"] == "snapshot"
        for number in range(5):
            reader.offer({"a": number, f"k{number}": True}, [{"round": number}], [])
        frame = await reader.next()
        assert frame["seq"] == 2
        assert frame["patch"]["a"] == 4
        assert len(frame["patch"]) == 6
        assert len(frame["rounds"]) == 5

    asyncio.run(story())


def test_a_reader_that_would_lose_rows_gets_a_fresh_snapshot() -> None:
    async def story() -> None:
        page = Page({"a": 0}, [], [])
        reader = Subscription(page)
        await reader.next()
        for number in range(MAX_ROUNDS + 5):
            page.rounds.append({"round": number})
            reader.offer({"a": number}, [{"round": number}], [])
        page.view = {"a": "newest"}
        frame = await reader.next()
        assert (frame["type"], frame["seq"], frame["view"]) == ("snapshot", 2, {"a": "newest"})
        assert [row["round"] for row in frame["rounds"]] == list(range(5, MAX_ROUNDS + 5))
        reader.offer({"a": 1}, [], [{"id": 1}])
        assert await reader.next() == {
            "type": "delta",
            "seq": 3,
            "patch": {"a": 1},
            "rounds": [],
            "events": [{"id": 1}],
        }

    asyncio.run(story())


async def test_rows_reach_the_page_of_a_run_that_nobody_watches_and_only_the_newest_stay() -> None:
    async with desk() as it:
        it.feed.open(1, it.current)
        for number in range(MAX_EVENTS + 10):
            it.feed.add_row(1, "events", {"id": number})
            it.feed.add_row(1, "deaths", {"id": number})
        await turns(1)
        frame = await next_of(it.feed.subscribe(1), "snapshot")
        assert [row["id"] for row in frame["events"]] == list(range(10, MAX_EVENTS + 10))


async def test_a_late_subscriber_sees_no_row_twice() -> None:
    async with desk() as it:
        it.feed.open(1, it.current)
        first = it.feed.subscribe(1)
        await next_of(first, "snapshot")
        it.feed.add_row(1, "events", {"id": 1})
        it.feed.add_row(1, "rounds", {"round": 0})
        late = it.feed.subscribe(1)
        for frame in (await next_of(late, "snapshot"), await next_of(first, "delta")):
            assert (frame["events"], frame["rounds"]) == ([{"id": 1}], [{"round": 0}])
        it.feed.add_row(1, "events", {"id": 2})
        for frames in (first, late):
            assert (await next_of(frames, "delta"))["events"] == [{"id": 2}]


async def test_the_end_of_a_run_is_the_last_change() -> None:
    async with desk() as it:
        it.feed.open(1, it.current)
        frames = it.feed.subscribe(1)
        await next_of(frames, "snapshot")
        it.view["phase"] = "done"
        it.feed.add_row(1, "events", {"id": 9})
        await it.feed.close(1)
        last = await next_of(frames, "delta")
        assert (last["patch"], last["events"]) == ({"phase": "done"}, [{"id": 9}])
        assert (await next_of(frames, "ping"))["seq"] == 3


async def test_a_run_that_is_over_is_shown_from_history() -> None:
    async with desk() as it:
        frames = it.feed.subscribe(3)
        assert (await next_of(frames, "snapshot"))["view"] == {"phase": "done"}
        await next_of(frames, "ping")
        assert it.feed.subscribers == 1
        await frames.aclose()  # type: ignore[attr-defined]
        assert it.feed.subscribers == 0
        with pytest.raises(UnknownRun):
            await anext(it.feed.subscribe(4))


async def test_the_overview_follows_every_run() -> None:
    async with desk() as it:
        it.feed.start()
        frames = it.feed.subscribe(None)
        assert (await next_of(frames, "snapshot"))["view"] == {"runs": []}
        it.runs = {"runs": [{"id": 1}]}
        it.feed.open(1, it.current)
        assert (await next_of(frames, "delta"))["patch"] == {"runs": [{"id": 1}]}


async def test_a_view_that_cannot_be_computed_is_logged_and_the_next_one_is_shown(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with desk() as it:
        broken = False

        def view() -> View:
            if broken:
                raise KeyError("a bug")
            return it.current()

        it.feed.open(1, view)
        frames = it.feed.subscribe(1)
        await next_of(frames, "snapshot")
        broken = True
        it.feed.touch(1)
        await next_of(frames, "ping")
        assert "a bug" in caplog.text
        broken = False
        it.view["round"] = 2
        it.feed.touch(1)
        assert (await next_of(frames, "delta"))["patch"] == {"round": 2}
