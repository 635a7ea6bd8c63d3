"""Writing: what durable means, batches, savepoints, the rule of each table, and what a row may hold."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, event
from store_cases import EVENT, RUN, Wall

from backend.store import LocalError, Store, StoreError

Look = Callable[..., list[tuple[Any, ...]]]


def error_of(future: Future[Any]) -> StoreError:
    error = future.exception(10)
    assert isinstance(error, StoreError)
    return error


# ------------------------------------------------------------------------------------ durable and batched


def test_a_durable_row_is_seen_by_others_once_its_future_resolves(store: Store, run: int, look: Look) -> None:
    for number in range(20):
        store.write(run, "events", EVENT | {"text": str(number)}, durable=True).result(10)
        assert look("select text from events order by id desc limit 1") == [(str(number),)]


def test_a_batched_row_waits_and_goes_with_the_next_durable_one_in_order(store: Store, run: int, look: Look) -> None:
    batched = [store.write(run, "events", EVENT | {"text": str(number)}) for number in range(3)]
    assert look("select count(*) from events") == [(0,)]
    assert not any(future.done() for future in batched)
    assert store.pending == 3
    last = store.write(run, "events", EVENT | {"text": "3"}, durable=True).result(10)
    assert [future.result(0)["id"] for future in batched] == [1, 2, 3]
    assert last["id"] == 4
    assert look("select text from events order by id") == [("0",), ("1",), ("2",), ("3",)]
    assert store.pending == 0


def test_a_batch_is_committed_by_time_alone(open_store: Callable[..., Store]) -> None:
    store = open_store(batch_seconds=0.02)
    run = store.create_run(RUN)
    assert store.write(run, "events", EVENT).result(10)["text"] == "hello"


def test_a_batch_is_one_transaction(store: Store, run: int) -> None:
    commits: list[Connection] = []

    def on_commit(connection: Connection) -> None:
        commits.append(connection)

    event.listen(Engine, "commit", on_commit)
    try:
        futures = [store.write(run, "events", EVENT) for _ in range(500)]
        store.flush().result(10)
    finally:
        event.remove(Engine, "commit", on_commit)
    assert all(future.done() for future in futures)
    assert len(commits) == 1


def test_a_group_larger_than_the_cap_is_written_whole(open_store: Callable[..., Store]) -> None:
    store = open_store(batch_seconds=3600.0, group_rows=7)
    run = store.create_run(RUN)
    futures = [store.write(run, "scalars", {"step": step, "name": "loss"}) for step in range(50)]
    store.flush().result(10)
    assert [future.result(0)["step"] for future in futures] == list(range(50))
    assert [row["step"] for row in store.queries.scalars(run, "loss")] == list(range(50))


def test_close_writes_what_is_queued(store: Store, run: int, look: Look) -> None:
    futures = [store.write(run, "events", EVENT) for _ in range(50)]
    store.close()
    assert all(future.result(0)["id"] for future in futures)
    assert look("select count(*) from events") == [(50,)]


def test_a_closed_store_says_so(store: Store, run: int) -> None:
    store.close()
    store.close()
    assert error_of(store.write(run, "events", EVENT, durable=True)).code == "store_closed"
    with pytest.raises(StoreError, match="closed"):
        store.create_run(RUN)
    with pytest.raises(StoreError, match="closed"):
        store.queries.get_run(run)


def test_a_future_cannot_be_cancelled(store: Store, run: int) -> None:
    future = store.write(run, "events", EVENT)
    assert future.cancel() is False
    store.flush().result(10)
    assert future.result(0)["text"] == "hello"


async def test_a_waiter_that_is_cancelled_does_not_take_the_row_with_it(store: Store, run: int) -> None:
    waiter = asyncio.wrap_future(store.write(run, "events", EVENT))
    waiter.cancel()
    await asyncio.wrap_future(store.flush())
    assert [event["text"] for event in store.queries.events(run)] == ["hello"]


def test_four_threads_lose_nothing(store: Store, run: int) -> None:
    def write(thread: int) -> None:
        for number in range(100):
            row = {"step": number, "name": f"t{thread}", "value": float(number)}
            store.write(run, "scalars", row, durable=number % 10 == 0)

    threads = [threading.Thread(target=write, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    store.flush().result(10)
    for name in store.queries.scalar_names(run):
        assert [row["step"] for row in store.queries.scalars(run, name)] == list(range(100))
    assert len(store.queries.scalar_names(run)) == 4


# ------------------------------------------------------------------------------------------------- bad rows


def test_a_row_that_fails_takes_no_neighbour_with_it(store: Store, run: int) -> None:
    first = store.write(run, "rounds", {"round": 0, "samples": 32})
    twice = store.write(run, "rounds", {"round": 0, "samples": 99})
    orphan = store.write(run + 1, "events", EVENT)
    update = store.write(run + 1, "runs", {"phase": "done"})
    last = store.write(run, "rounds", {"round": 1}, durable=True)
    assert (first.result(10)["round"], last.result(10)["round"]) == (0, 1)
    assert error_of(twice).code == "row_refused"
    assert error_of(orphan).code == "unknown_run"
    assert error_of(update).code == "unknown_run"
    assert [(row["round"], row["samples"]) for row in store.queries.rounds(run)] == [(0, 32), (1, None)]


@pytest.mark.parametrize(
    ("table", "row", "code", "named"),
    [
        ("events", EVENT | {"colour": "red"}, "unknown_column", "colour"),
        ("events", EVENT | {"at": "2026-01-01"}, "unknown_column", "events.at"),
        ("events", EVENT | {"run_id": 7}, "unknown_column", "events.run_id"),
        ("runs", {"created_at": "2026-01-01"}, "unknown_column", "runs.created_at"),
        ("hosts", {"host": 1, 5: 1}, "unknown_column", "5"),
        ("tokens", {"kind": "x"}, "unknown_table", "tokens"),
        ("nonsense", {}, "unknown_table", "nonsense"),
        ("events", {"kind": "note", "level": "info"}, "missing_column", "text"),
        ("hosts", {"name": "alpha"}, "missing_column", "host"),
        ("scalars", {"step": 1}, "missing_column", "name"),
        ("checkpoints", {"path": "model"}, "missing_column", "checkpoint"),
        ("checkpoints", {"checkpoint": 1}, "row_refused", "path"),
        ("rounds", {"round": "3"}, "bad_value", "rounds.round"),
        ("rounds", {"round": True}, "bad_value", "rounds.round"),
        ("rounds", {"round": 1, "bytes_up": 2**63}, "bad_value", "rounds.bytes_up"),
        ("rounds", {"round": 1, "loss": "0.5"}, "bad_value", "rounds.loss"),
        ("runs", {"emulated": 1}, "bad_value", "runs.emulated"),
        ("deaths", {"last_lines": ["a", "b"]}, "bad_value", "deaths.last_lines"),
        ("events", EVENT | {"data": {"when": object()}}, "bad_value", "events.data.when"),
        ("events", EVENT | {"data": {(1, 2): 3}}, "bad_value", "events.data"),
        ("rounds", {"round": 1, "planned": {0: 1, "0": 2}}, "bad_value", "'0'"),
        ("events", None, "bad_value", "events"),
    ],
)
def test_a_record_with_a_bug_fails_its_future_by_name(
    store: Store, run: int, table: str, row: dict[str, Any], code: str, named: str
) -> None:
    error = error_of(store.write(run, table, row, durable=True))
    assert isinstance(error, LocalError)
    assert error.code == code
    assert named in str(error)
    assert store.write(run, "events", EVENT, durable=True).result(10)["text"] == "hello"


def test_a_value_that_contains_itself_is_refused(store: Store, run: int) -> None:
    loop: list[Any] = []
    loop.append(loop)
    assert error_of(store.write(run, "events", EVENT | {"data": loop})).code == "bad_value"


@pytest.mark.parametrize("values", [{"mode": "cpu_sync"}, {"job": "a.py:A"}, RUN | {"nonsense": 1}, RUN | {"id": 3}])
def test_a_run_with_a_bug_is_refused_at_once(store: Store, values: dict[str, Any]) -> None:
    with pytest.raises(LocalError):
        store.create_run(values)
    assert store.queries.list_runs() == []


# ------------------------------------------------------------------------------------------------- values


def test_json_comes_back_as_it_went_in_with_text_keys(store: Store, run: int) -> None:
    row = {
        "round": 0,
        "planned": {0: 4, 1: 2, 10: 1},
        "ms_per_batch": {0: 20.25},
        "wait_seconds": {},
        "decision": "ünï ✓",
    }
    stored = store.write(run, "rounds", row, durable=True).result(10)
    assert stored["planned"] == {"0": 4, "1": 2, "10": 1}
    assert store.queries.rounds(run) == [stored]
    data = {"nested": [1, {"a": [None, True, "x"]}, 2.5], 3: ("a", "b")}
    store.write(run, "events", EVENT | {"data": data}, durable=True).result(10)
    assert store.queries.events(run)[0]["data"] == {"nested": [1, {"a": [None, True, "x"]}, 2.5], "3": ["a", "b"]}


def test_absent_json_is_null_and_not_the_word(store: Store, run: int, look: Look) -> None:
    store.write(run, "events", EVENT | {"data": None}, durable=True).result(10)
    assert look("select data from events") == [(None,)]


def test_a_row_is_copied_when_it_is_handed_over(store: Store, run: int) -> None:
    planned = {0: 4}
    future = store.write(run, "rounds", {"round": 0, "planned": planned})
    planned[0] = 99
    store.flush().result(10)
    assert future.result(0)["planned"] == {"0": 4}
    assert store.queries.rounds(run)[0]["planned"] == {"0": 4}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_become_null(store: Store, run: int, value: float) -> None:
    row = {"round": 0, "loss": value, "ms_per_batch": {0: value, 1: 2.0}}
    store.write(run, "rounds", row, durable=True).result(10)
    stored = store.queries.rounds(run)[0]
    assert stored["loss"] is None
    assert stored["ms_per_batch"] == {"0": None, "1": 2.0}


def test_a_dying_process_may_have_said_anything(store: Store, run: int) -> None:
    said = b"caf\xc3\xa9 \xff\xfe \x00 end".decode("utf-8", "surrogateescape")
    store.write(run, "deaths", {"rank": 1, "last_lines": said}, durable=True).result(10)
    kept = store.queries.deaths(run)[0]["last_lines"]
    assert kept.startswith("café ")
    assert kept.endswith(" end")
    kept.encode("utf-8")


def test_a_recovery_completes_the_row_of_its_death(store: Store, run: int) -> None:
    first = store.write(run, "deaths", {"rank": 1, "reason": "gone", "waited": {0: 1.5}}, durable=True).result(10)
    store.write(run, "deaths", {"rank": 2}, durable=True).result(10)
    row = {"rank": 1, "recovery": {"detect": 0.5, "decide": 0.0}}
    whole = store.write(run, "recoveries", row, durable=True).result(10)
    assert whole == first | {"recovery": {"detect": 0.5, "decide": 0.0}}
    assert [death["rank"] for death in store.queries.deaths(run)] == [1, 2], "one row a death"
    assert store.queries.deaths(run)[0] == whole
    assert whole["waited"] == {"0": 1.5}


# -------------------------------------------------------------------------------------- the tables' rules


def test_times_are_stamped_by_the_wall_clock_when_the_row_is_handed_over(store: Store, run: int, wall: Wall) -> None:
    early = store.write(run, "events", EVENT)
    wall.now += 60
    late = store.write(run, "events", EVENT, durable=True)
    assert early.result(10)["at"] == "2026-11-30T12:00:00.123Z"
    assert late.result(10)["at"] == "2026-11-30T12:01:00.123Z"


def test_the_future_gives_the_row_that_the_queries_give(store: Store, run: int) -> None:
    written = {
        "events": store.write(run, "events", EVENT),
        "hosts": store.write(run, "hosts", {"host": 1, "name": "alpha"}),
        "ranks": store.write(run, "ranks", {"rank": 0, "host": 1}),
        "rounds": store.write(run, "rounds", {"round": 0}),
        "epochs": store.write(run, "epochs", {"epoch": 0}),
        "deaths": store.write(run, "deaths", {"rank": 0, "reason": "exit"}),
        "checkpoints": store.write(run, "checkpoints", {"checkpoint": 1, "path": "model"}),
    }
    store.flush().result(10)
    for table, future in written.items():
        assert getattr(store.queries, table)(run) == [future.result(0)]
    update = store.write(run, "runs", {"phase": "forming"}, durable=True).result(10)
    stored = store.queries.get_run(run)
    assert stored is not None
    assert {name: stored[name] for name in update} == update


@pytest.mark.parametrize(
    ("table", "number", "first", "second", "merged"),
    [
        (
            "hosts",
            "host",
            {"name": "a", "state": "admitted"},
            {"state": "training"},
            {"name": "a", "state": "training"},
        ),
        (
            "ranks",
            "rank",
            {"device": "cpu:0", "state": "idle"},
            {"state": "dead"},
            {"device": "cpu:0", "state": "dead"},
        ),
        ("epochs", "epoch", {"loss": 0.5}, {"metrics": {"acc": 1}}, {"loss": 0.5, "metrics": {"acc": 1}}),
        ("hosts", "host", {"reason": "x"}, {}, {"reason": "x"}),
        ("hosts", "host", {"reason": "x"}, {"reason": None}, {"reason": None}),
    ],
)
def test_merged_tables_replace_what_is_given_and_keep_the_rest(
    store: Store,
    run: int,
    table: str,
    number: str,
    first: dict[str, Any],
    second: dict[str, Any],
    merged: dict[str, Any],
) -> None:
    other = store.create_run(RUN)
    store.write(other, table, {number: 3})
    store.write(run, table, {number: 3} | first)
    store.write(run, table, {number: 4})
    store.write(run, table, {number: 3} | second, durable=True).result(10)
    rows = getattr(store.queries, table)(run)
    assert [row[number] for row in rows] == [3, 4]
    assert {name: rows[0][name] for name in merged} == merged
    assert len(getattr(store.queries, table)(other)) == 1


def test_a_hosts_coming_and_going_is_stamped_once(store: Store, run: int, wall: Wall) -> None:
    for state in ("admitted", "training", "lost", "lost"):
        store.write(run, "hosts", {"host": 1, "state": state}, durable=True).result(10)
        wall.now += 60
    store.write(run, "hosts", {"host": 2, "state": "turned_away"}, durable=True).result(10)
    first, second = store.queries.hosts(run)
    assert (first["joined_at"][11:16], first["left_at"][11:16]) == ("12:00", "12:02")
    assert (second["joined_at"][11:16], second["left_at"][11:16]) == ("12:04", "12:04")


def test_a_runs_start_and_end_are_stamped_once(store: Store, run: int, wall: Wall) -> None:
    for change in (
        {"phase": "forming"},
        {"phase": "training"},
        {"phase": "training"},
        {"phase": "failed"},
        {"phase": "failed"},
        {"reason": "x"},
    ):
        store.write(run, "runs", change, durable=True).result(10)
        wall.now += 60
    stored = store.queries.get_run(run)
    assert stored is not None
    times = {name: stored[name][11:16] for name in ("created_at", "started_at", "ended_at")}
    assert times == {"created_at": "12:00", "started_at": "12:01", "ended_at": "12:03"}
    assert (stored["phase"], stored["reason"]) == ("failed", "x")


def test_an_epochs_time_is_that_of_its_end_not_of_its_evaluation(store: Store, run: int, wall: Wall) -> None:
    store.write(run, "epochs", {"epoch": 0, "samples_accepted": 90})
    wall.now += 60
    store.write(run, "epochs", {"epoch": 0, "metrics": {"accuracy": 0.9}}, durable=True).result(10)
    assert store.queries.epochs(run)[0]["at"] == "2026-11-30T12:00:00.123Z"


def test_a_checkpoint_that_is_removed_keeps_its_row_and_its_time(store: Store, run: int, wall: Wall) -> None:
    row = {"checkpoint": 1, "path": "model", "bytes": 3 * 2**40}
    first = store.write(run, "checkpoints", row, durable=True).result(10)
    assert (first["bytes"], first["pruned"]) == (3 * 2**40, None)
    wall.now += 60
    store.write(run, "checkpoints", {"checkpoint": 1, "pruned": True}, durable=True).result(10)
    assert store.queries.checkpoints(run) == [first | {"pruned": True}]


def test_a_runs_number_is_never_used_twice(store: Store, run: int, look: Look) -> None:
    look("delete from runs")
    assert store.create_run(RUN) == run + 1
