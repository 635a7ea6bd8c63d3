"""A resumed run's history: one clean line of rounds and epochs, whatever was superseded (case D07)."""

from typing import Any

from backend.store import Store

RUN = {"job": "a.py:A", "mode": "cpu_sync"}


def rounds_of(store: Store, run: int, numbers: range, loss: float) -> None:
    for number in numbers:
        store.write(run, "rounds", {"round": number, "loss": loss}, durable=True).result(10)


def resumed(store: Store, run: int, last: int, epochs: int) -> int:
    columns = {"resumed_run": run, "resumed_checkpoint": 1, "resumed_round": last, "resumed_epochs": epochs}
    return store.create_run(RUN | columns)


def lines(rows: list[dict[str, Any]]) -> list[tuple[int, float]]:
    return [(row["round"], row["loss"]) for row in rows]


def test_a_run_killed_twice_has_each_round_once_and_the_newest_attempt_of_it(store: Store) -> None:
    """Checkpoints at 9 and 14, killed at 12 and at 17: what lies behind a checkpoint is another run's."""
    first = store.create_run(RUN)
    rounds_of(store, first, range(13), 1.0)
    second = resumed(store, first, 9, 0)
    rounds_of(store, second, range(10, 18), 2.0)
    third = resumed(store, second, 14, 0)
    rounds_of(store, third, range(15, 20), 3.0)
    line = lines(store.queries.rounds(third))
    assert [number for number, _ in line] == list(range(20))
    assert [loss for _, loss in line] == [1.0] * 10 + [2.0] * 5 + [3.0] * 5
    assert lines(store.queries.rounds(second))[-1] == (17, 2.0), "superseded points stay with their own run"
    assert lines(store.queries.rounds(third, own=True)) == [(number, 3.0) for number in range(15, 20)]
    assert lines(store.queries.rounds(third, after=8, limit=3)) == [(9, 1.0), (10, 2.0), (11, 2.0)]
    assert lines(store.queries.rounds(third, limit=2, newest=True)) == [(18, 3.0), (19, 3.0)]


def test_a_rewind_behind_the_last_resume_counts_from_there(store: Store) -> None:
    first = store.create_run(RUN)
    rounds_of(store, first, range(13), 1.0)
    second = resumed(store, first, 9, 0)
    rounds_of(store, second, range(10, 13), 2.0)
    third = resumed(store, second, 5, 0)  # of the bundle that the second run began with, or an older one
    rounds_of(store, third, range(6, 8), 3.0)
    assert lines(store.queries.rounds(third)) == [(n, 1.0) for n in range(6)] + [(6, 3.0), (7, 3.0)]


def test_epochs_are_those_that_were_configured(store: Store) -> None:
    first = store.create_run(RUN)
    for epoch in range(3):
        store.write(first, "epochs", {"epoch": epoch, "loss": 1.0}, durable=True)
    second = resumed(store, first, 9, 2)
    for epoch in (2, 3):
        store.write(second, "epochs", {"epoch": epoch, "loss": 2.0}, durable=True).result(10)
    assert [(row["epoch"], row["loss"]) for row in store.queries.epochs(second)] == [
        (0, 1.0),
        (1, 1.0),
        (2, 2.0),
        (3, 2.0),
    ]
