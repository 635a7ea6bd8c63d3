"""Batches made ahead: the same as one after the other, in order, in number, in what is drawn and in what goes wrong."""

from __future__ import annotations

import random
import threading
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from worker.data import SampleFeed
from worker.read_ahead import AHEAD, ReadAhead

PATIENCE = 20.0


class Drawing:
    """Samples that draw from the generators named, as augmentation does."""

    def __init__(self, *generators: str, size: int = 40) -> None:
        self.generators = generators
        self.size = size
        self.threads: set[int] = set()

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[int, list[float]]:
        self.threads.add(threading.get_ident())
        return index, [DRAWS[name]() for name in self.generators]


DRAWS: dict[str, Callable[[], float]] = {
    "python": random.random,
    "numpy": lambda: float(np.random.rand()),
    "torch": lambda: float(torch.rand(())),
}


def trained(dataset: Drawing, ahead: ReadAhead | None, steps: tuple[str, ...] = ()) -> list[Any]:
    """Two chunks of an epoch, and what steps that draw would see between the batches."""
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(3)
    feed = SampleFeed(dataset, list, seed=1, batch_size=3, ahead=ahead)
    seen = []
    for offset, size in ((0, 20), (20, 17)):
        for batch, samples in feed.batches(0, offset, size):
            seen.append((batch, samples, [DRAWS[name]() for name in steps]))
    return seen


@pytest.mark.parametrize(
    ("data", "steps", "in_line"),
    [
        ((), (), False),
        (("torch", "python", "numpy"), (), False),
        ((), ("torch", "python", "numpy"), False),
        (("torch",), ("python",), False),
        (("torch",), ("torch",), True),
        (("python", "numpy"), ("numpy",), True),
        (("python",), ("torch", "python"), True),
    ],
)
def test_batches_and_draws_are_those_of_one_after_the_other(
    data: tuple[str, ...], steps: tuple[str, ...], in_line: bool
) -> None:
    plain = trained(Drawing(*data), None, steps)
    dataset, ahead = Drawing(*data), ReadAhead(None)
    assert trained(dataset, ahead, steps) == plain
    assert ahead.in_line == in_line
    assert (dataset.threads == {threading.get_ident()}) == in_line
    assert len(dataset.threads) <= 3, "one for each chunk"


def test_no_more_is_made_than_two_batches_ahead() -> None:
    made: list[int] = []
    turn = threading.Condition()

    def make(cut: list[int]) -> list[int]:
        with turn:
            made.append(cut[0])
            turn.notify_all()
        return cut

    def made_so_many(count: int) -> bool:
        with turn:
            return turn.wait_for(lambda: len(made) >= count, PATIENCE)

    ahead = ReadAhead(None)
    ahead.in_line = False
    batches = ahead.batches(make, iter([[n] for n in range(8)]))
    assert made == []
    for n in range(8):
        assert next(batches) == ([n], 1)
        assert made_so_many(min(8, n + 1 + AHEAD))
        assert len(made) == min(8, n + 1 + AHEAD), "and not one more, since nobody ordered it"
    assert list(batches) == []


def test_a_batch_is_made_while_the_one_before_trains() -> None:
    made = threading.Event()

    def make(cut: list[int]) -> list[int]:
        if cut == [2]:
            made.set()
        return cut

    ahead = ReadAhead(None)
    batches = ahead.batches(make, iter([[0], [1], [2]]))
    assert next(batches) == ([0], 1)
    assert not made.is_set()
    assert next(batches) == ([1], 1)
    assert made.wait(PATIENCE), "the training thread is still at batch 1"


class Broken(Drawing):
    def __getitem__(self, index: int) -> Any:
        if index == self.bad:
            raise OSError("the disk is on fire")
        return index

    bad = -1


@pytest.mark.parametrize("ahead", [None, ReadAhead(None)], ids=["in line", "ahead"])
def test_what_a_dataset_raises_is_raised_at_its_batch_and_names_its_samples(ahead: ReadAhead | None) -> None:
    dataset = Broken(size=12)
    feed = SampleFeed(dataset, list, seed=1, batch_size=3, ahead=ahead)
    order = [sample for batch, _ in feed.batches(0, 0, 12) for sample in batch]
    dataset.bad = order[10]
    batches = feed.batches(0, 0, 12)
    for n in range(3):
        assert next(batches) == (order[3 * n : 3 * n + 3], 3), "what comes before it is trained"
    with pytest.raises(OSError, match="the disk is on fire") as caught:
        next(batches)
    text = "".join(traceback.format_exception(caught.value))
    assert "in __getitem__" in text
    assert f"while samples {', '.join(map(str, order[9:]))} of train_dataset were being loaded" in text


def test_a_dataset_that_leaves_the_process_does_so_from_the_thread_that_trains() -> None:
    def leave(cut: list[int]) -> Any:
        raise SystemExit(3)

    ahead = ReadAhead(None)
    ahead.in_line = False
    with pytest.raises(SystemExit):
        next(ahead.batches(leave, iter([[0]])))


def test_what_is_ahead_is_dropped_with_its_chunk_and_the_next_waits_for_it() -> None:
    began, following_made, threads = threading.Event(), threading.Event(), []
    asked: list[int] = []
    together: list[bool] = []

    def make(cut: list[int]) -> list[int]:
        asked.append(cut[0])
        threads.append(threading.current_thread())
        if cut == [1]:
            began.set()
            together.append(following_made.wait(0.2))
        if cut == [10]:
            following_made.set()
        return cut

    ahead = ReadAhead(None)
    ahead.in_line = False
    batches = ahead.batches(make, iter([[n] for n in range(6)]))
    assert next(batches) == ([0], 1)
    assert began.wait(PATIENCE)
    batches.close()  # Rewind, or another plan
    assert [batch for batch, _ in ahead.batches(make, iter([[10], [11]]))] == [[10], [11]]
    assert asked == [0, 1, 10, 11]
    assert together == [False], "a dataset is never asked by two threads at once"
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()


def test_whoever_leaves_in_the_middle_of_a_chunk_waits_for_the_sample_in_hand() -> None:
    began, may_end = threading.Event(), threading.Event()
    done: list[int] = []

    def make(cut: list[int]) -> list[int]:
        if cut == [1]:
            began.set()
            assert may_end.wait(PATIENCE)
        done.append(cut[0])
        return cut

    ahead = ReadAhead(None)
    ahead.in_line = False
    batches = ahead.batches(make, iter([[n] for n in range(6)]))
    assert next(batches) == ([0], 1)
    assert began.wait(PATIENCE)
    batches.close()
    leaving = threading.Timer(0.05, may_end.set)
    leaving.start()
    ahead.close()
    assert done == [0, 1]
    leaving.join()
    ReadAhead(None).close()


def test_chunks_of_one_batch_go_in_line() -> None:
    ahead = ReadAhead(None)
    for n in range(5):
        batches = ahead.batches(lambda cut: threading.get_ident(), iter([[n]]))
        assert next(batches) == (threading.get_ident(), 1)
        batches.close()
    assert ahead.in_line is None
