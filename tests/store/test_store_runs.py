"""Runs that nobody serves, one-time tokens, and the queries' pages."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable

import pytest
from store_cases import RUN, Wall

from backend.store import LocalError, Store, StoreError


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


# -------------------------------------------------------------------------------------------- interruption


def test_what_a_dead_controller_left_running_is_interrupted(open_store: Callable[..., Store], wall: Wall) -> None:
    store = open_store()
    phases = ("waiting", "staging", "forming", "training", "done", "failed", "interrupted")
    runs = {phase: store.create_run(RUN | {"phase": phase}) for phase in phases}
    store.write(runs["done"], "runs", {"reason": "finished"}, durable=True).result(10)
    store.close()

    wall.now += 3600
    store = open_store()
    assert store.interrupt_unserved() == [runs[phase] for phase in phases[:4]]
    for phase in phases[:4]:
        stored = store.queries.get_run(runs[phase])
        assert stored is not None
        assert (stored["phase"], stored["reason"]) == ("interrupted", "controller stopped")
        assert stored["ended_at"] == "2026-11-30T13:00:00.123Z"
        [event] = store.queries.events(runs[phase])
        assert event["kind"] == "run_interrupted"
        assert phase in event["text"]
    done = store.queries.get_run(runs["done"])
    assert done is not None
    assert (done["phase"], done["reason"]) == ("done", "finished")
    assert store.queries.events(runs["done"]) == []
    assert store.interrupt_unserved() == []


@pytest.mark.parametrize("phase", ["done", "failed", "interrupted"])
def test_what_was_kept_of_a_run_for_another_controller_goes_with_its_end(store: Store, phase: str) -> None:
    run, other = store.create_run(RUN | {"phase": "training"}), store.create_run(RUN | {"phase": "training"})
    for number in (run, other):
        for slot in (2, 0):
            store.write(number, "continuations", {"slot": slot, "state": {}}, durable=True).result(10)
    store.write(run, "runs", {"phase": "forming"}, durable=True).result(10)
    assert [row["slot"] for row in store.queries.continuations(run)] == [0, 2]
    store.write(run, "runs", {"phase": phase, "reason": "it is over"}, durable=True).result(10)
    assert store.queries.continuations(run) == []
    assert len(store.queries.continuations(other)) == 2, "each to its own run"
    assert store.interrupt_unserved() == [other]
    assert store.queries.continuations(other) == []


# ------------------------------------------------------------------------------------------------- tokens


def test_a_token_is_used_once(store: Store) -> None:
    store.add_token("browser", digest("ticket"))
    store.add_token("invite", digest("other"))
    assert store.use_token(digest("nobody's")) is None
    assert store.use_token(digest("ticket")) == "browser"
    assert store.use_token(digest("ticket")) is None
    assert store.use_token(digest("other")) == "invite"


def test_of_many_who_use_a_token_at_once_one_gets_in(store: Store) -> None:
    store.add_token("browser", digest("ticket"))
    barrier = threading.Barrier(8)
    answers: list[str | None] = []

    def use() -> None:
        barrier.wait(10)
        answers.append(store.use_token(digest("ticket")))

    threads = [threading.Thread(target=use) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(answers, key=str) == [None] * 7 + ["browser"]


def test_a_used_token_stays_used_after_a_restart(open_store: Callable[..., Store]) -> None:
    store = open_store()
    store.add_token("browser", digest("ticket"))
    assert store.use_token(digest("ticket")) == "browser"
    store.close()
    assert open_store().use_token(digest("ticket")) is None


@pytest.mark.parametrize("hash", ["", "ticket", "A" * 64, "a" * 63, "a" * 65, "a" * 64 + "\n"])
def test_only_a_hash_is_ever_stored(store: Store, hash: str) -> None:
    with pytest.raises(LocalError):
        store.add_token("browser", hash)


def test_the_same_token_twice_is_refused_without_repeating_it(store: Store) -> None:
    store.add_token("browser", digest("ticket"))
    with pytest.raises(StoreError) as refusal:
        store.add_token("browser", digest("ticket"))
    assert digest("ticket") not in str(refusal.value)


# ------------------------------------------------------------------------------------------------- queries


def test_an_unknown_run_is_none_and_its_lists_are_empty(store: Store) -> None:
    queries = store.queries
    assert queries.get_run(7) is None
    assert queries.list_runs() == []
    for ask in (queries.hosts, queries.ranks, queries.rounds, queries.epochs, queries.events, queries.deaths):
        assert ask(7) == []
    assert queries.checkpoints(7) == []
    assert queries.scalars(7, "loss") == []


def test_a_new_run_has_its_defaults(store: Store, run: int) -> None:
    stored = store.queries.get_run(run)
    assert stored is not None
    assert stored["created_at"] == "2026-11-30T12:00:00.123Z"
    assert (stored["phase"], stored["emulated"], stored["world_size"], stored["loss"]) == ("waiting", False, 0, None)
    assert (stored["config"], stored["params"], stored["epochs"], stored["deaths"]) == ({"epochs": 3}, {}, 3, 0)


def test_run_summaries_have_the_contracts_columns_newest_first(store: Store) -> None:
    runs = [store.create_run(RUN | {"name": f"r{number}"}) for number in range(5)]
    store.write(runs[4], "deaths", {"rank": 0}, durable=True).result(10)
    store.write(runs[4], "deaths", {"rank": 1}, durable=True).result(10)
    listed = store.queries.list_runs()
    assert [row["id"] for row in listed] == runs[::-1]
    assert set(listed[0]) == {
        "id", "name", "job", "mode", "phase", "reason", "created_at", "started_at", "ended_at", "world_size", "epochs",
        "epochs_done", "rounds_done", "loss", "metrics", "emulated", "deaths",
    }  # fmt: skip
    assert [row["deaths"] for row in listed] == [2, 0, 0, 0, 0]
    assert listed[0]["epochs"] == 3
    assert listed[0]["emulated"] is False


def test_pages_of_runs_neither_shift_nor_repeat(store: Store) -> None:
    runs = [store.create_run(RUN) for _ in range(5)]
    first = store.queries.list_runs(limit=2)
    store.create_run(RUN)
    second = store.queries.list_runs(limit=2, before_id=first[-1]["id"])
    third = store.queries.list_runs(limit=2, before_id=second[-1]["id"])
    assert [row["id"] for row in first + second + third] == runs[::-1]


def test_pages_of_rounds_and_events(store: Store, run: int) -> None:
    other = store.create_run(RUN)
    for number in range(10):
        store.write(run, "rounds", {"round": number})
        store.write(other, "events", {"kind": "n", "level": "info", "text": "not ours"})
        store.write(run, "events", {"kind": "n", "level": "info", "text": str(number)})
    store.flush().result(10)
    queries = store.queries
    assert [row["round"] for row in queries.rounds(run)] == list(range(10))
    assert [row["round"] for row in queries.rounds(run, after=3, limit=2)] == [4, 5]
    assert [row["round"] for row in queries.rounds(run, limit=3, newest=True)] == [7, 8, 9]
    assert [row["text"] for row in queries.events(run, limit=3)] == ["0", "1", "2"]
    third = queries.events(run, limit=3)[-1]["id"]
    assert [row["text"] for row in queries.events(run, after_id=third, limit=2)] == ["3", "4"]
    assert [row["text"] for row in queries.events(run, limit=2, newest=True)] == ["8", "9"]
    assert [row["text"] for row in queries.events(run, after_id=third, newest=True)] == list("3456789")


def test_series_are_told_apart_by_name(store: Store, run: int) -> None:
    for step in range(3):
        store.write(run, "scalars", {"step": step, "name": "loss", "value": step / 2})
        store.write(run, "scalars", {"step": step, "name": "accuracy", "value": 1.0})
    store.flush().result(10)
    assert [(row["step"], row["value"]) for row in store.queries.scalars(run, "loss")] == [(0, 0.0), (1, 0.5), (2, 1.0)]
    assert store.queries.scalar_names(run) == ["accuracy", "loss"]


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_below_one_is_a_bug(store: Store, run: int, limit: int) -> None:
    with pytest.raises(LocalError, match="limit"):
        store.queries.events(run, limit=limit)
    with pytest.raises(LocalError, match="limit"):
        store.queries.list_runs(limit=limit)


def test_readers_do_not_wait_for_a_writer(store: Store, run: int, look: Callable[..., object]) -> None:
    look("begin immediate")
    look("update runs set name = 'unseen'")
    stored = store.queries.get_run(run)
    assert stored is not None
    assert stored["name"] == "first"
    look("rollback")
