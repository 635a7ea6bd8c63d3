"""Batches of a GPU rank, made ready while the one before trains (decision 0021).

A thread fetches, collates, pins and starts the copy, at most ``AHEAD`` batches before they are asked for. It goes
through the same batches in the same order as the training thread would, and only while no generator is drawn from by
both: the numbers drawn are then those of a rank that does one after the other.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from itertools import islice
from queue import SimpleQueue
from threading import Thread
from typing import Any

import numpy as np
import torch
from torch import Tensor

from worker.nests import map_tensors

AHEAD = 2
"""batches beyond the one that trains: one that is ready, and one in the making"""

LEAVE_SECONDS = 2.0
"""for a dataset that is in the middle of a sample"""

Make = Callable[[list[int]], Any]
Orders = SimpleQueue[tuple["Future[Any]", list[int]] | None]


class Upload:
    """Copies of batches to a CUDA device, beside the training, on a stream of their own."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def begin(self, batch: Any) -> tuple[Any, torch.cuda.Event]:
        """The batch as it will be on the device, and when. For any thread."""
        pinned = map_tensors(batch, _pinned)
        with torch.cuda.stream(self._stream):
            moved = map_tensors(pinned, lambda tensor: tensor.to(self.device, non_blocking=True))
            return moved, self._stream.record_event()

    def finish(self, begun: tuple[Any, torch.cuda.Event]) -> Any:
        """The batch, on the device; for the thread that trains. Waiting here is data's time, not the step's (M21)."""
        batch, copied = begun
        copied.synchronize()
        training = torch.cuda.current_stream(self.device)

        def used(tensor: Tensor) -> Tensor:
            if tensor.is_cuda:  # else its memory would be the copies' again while the step still reads it
                tensor.record_stream(training)
            return tensor

        return map_tensors(batch, used)


class ReadAhead:
    """Serves one chunk after the other. ``upload`` is none where batches stay on the CPU."""

    def __init__(self, upload: Upload | None) -> None:
        self.in_line: bool | None = None
        """whether making batches and training on them draw from one generator, which takes turns; not known at first"""
        self._upload = upload
        self._orders: Orders = SimpleQueue()
        self._thread: Thread | None = None

    def batches(self, make: Make, cuts: Iterator[list[int]]) -> Iterator[tuple[Any, int]]:
        """(batch, number of samples) of each cut. What ``make`` raises is raised where its batch is asked for."""
        if self.in_line is None:
            yield from self._watched(make, cuts)
        if self.in_line:
            for cut in cuts:
                yield self._finish(self._begin(make, cut)), len(cut)
        else:
            yield from self._ahead(make, cuts)

    def close(self) -> None:
        """Nothing more is asked for: returns when the thread is out of the dataset and the driver, which must not be
        taken down under it, or after ``LEAVE_SECONDS``."""
        self._orders.put(None)
        if self._thread is not None:
            self._thread.join(LEAVE_SECONDS)

    def _watched(self, make: Make, cuts: Iterator[list[int]]) -> Iterator[tuple[Any, int]]:
        """The first batch in line, to see who draws from what. A chunk of one batch does not tell: the next is watched
        again."""
        for cut in islice(cuts, 1):
            before = self._generators()
            batch = self._finish(self._begin(make, cut))
            made = self._generators()
            yield batch, len(cut)
            trained = self._generators()
            self.in_line = any(before[name] != made[name] != trained[name] for name in before)

    def _ahead(self, make: Make, cuts: Iterator[list[int]]) -> Iterator[tuple[Any, int]]:
        orders = self._orders = SimpleQueue()
        waiting: deque[tuple[Future[Any], int]] = deque()

        def order(count: int) -> None:
            for cut in islice(cuts, count):
                future: Future[Any] = Future()
                orders.put((future, cut))
                waiting.append((future, len(cut)))

        order(AHEAD)
        if not waiting:
            return
        work = (orders, partial(self._begin, make), self._thread)
        self._thread = Thread(target=_work, args=work, name="read ahead", daemon=True)
        self._thread.start()
        try:
            while waiting:
                future, samples = waiting.popleft()
                order(1)
                yield self._finish(future.result()), samples
        finally:  # the chunk is over, or nobody wants the rest of it
            for future, _ in waiting:
                future.cancel()
            orders.put(None)

    def _begin(self, make: Make, cut: list[int]) -> Any:
        batch = make(cut)
        return batch if self._upload is None else self._upload.begin(batch)

    def _finish(self, begun: Any) -> Any:
        return begun if self._upload is None else self._upload.finish(begun)

    def _generators(self) -> dict[str, Any]:
        """The states of all generators that user code may draw from without having made them."""
        kind, keys, *rest = np.random.get_state(legacy=True)
        states = {
            "python": random.getstate(),
            "numpy": (kind, np.asarray(keys).tobytes(), rest),
            "torch": torch.get_rng_state().numpy().tobytes(),
        }
        if self._upload is not None:
            states["cuda"] = torch.cuda.get_rng_state(self._upload.device).numpy().tobytes()
        return states


def _work(orders: Orders, begin: Callable[[list[int]], Any], previous: Thread | None) -> None:
    """Make what is ordered, until told that it is over. Datasets are never asked by two threads at once."""
    if previous is not None:
        previous.join()
    while (order := orders.get()) is not None:
        future, cut = order
        if not future.set_running_or_notify_cancel():
            continue
        try:
            future.set_result(begin(cut))
        except BaseException as error:
            future.set_exception(error)


def _pinned(tensor: Tensor) -> Tensor:
    return tensor.pin_memory() if tensor.device.type == "cpu" and not tensor.is_pinned() else tensor
