"""Which samples a rank trains on, in which order: the epoch's permutation, cut into the batches of a chunk
(design section 8).

The order of an epoch is a function of the run's seed and the epoch's number alone, so every rank computes
it for itself and the controller deals ranges of it without knowing the data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

_MASK = 0xFFFF_FFFF_FFFF_FFFF
_MAX_NAMED = 32
"""samples that a note of an error lists"""


def epoch_permutation(size: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """The order of ``size`` samples in an epoch: (size,) int64, each index once.

    Built by sorting the raw 64-bit stream of Philox keyed by (seed, epoch): numpy promises bit streams
    across versions, but not what its samplers make of them (NEP 19). Equal draws keep their index order, so
    the result is the same everywhere.
    """
    key = np.array([seed & _MASK, epoch & _MASK], dtype=np.uint64)
    draws = np.random.Philox(key=key).random_raw(size)
    return np.argsort(draws, kind="stable").astype(np.int64, copy=False)


class Ahead(Protocol):
    """Who makes batches before they are asked for."""

    def batches(self, make: Callable[[list[int]], Any], cuts: Iterator[list[int]]) -> Iterator[tuple[Any, int]]: ...

    def close(self) -> None: ...


class SampleFeed:
    """Serves chunks of an epoch's permutation as collated batches: each as it is asked for, unless ``ahead`` has it
    ready."""

    def __init__(
        self,
        dataset: Any,
        collate: Callable[[list[Any]], Any],
        seed: int,
        batch_size: int,
        ahead: Ahead | None = None,
    ) -> None:
        self.dataset = dataset
        self.collate = collate
        self.seed = seed
        self.batch_size = batch_size
        self.size = len(dataset)
        self.ahead = ahead
        self._epoch = -1
        self._order = np.empty(0, dtype=np.int64)

    def batches(self, epoch: int, offset: int, size: int) -> Iterator[tuple[Any, int]]:
        """Every sample of positions ``offset`` to ``offset + size`` once: (batch, number of samples), the
        last may be short.

        Raises ``ValueError`` when the range leaves the dataset: some samples would be lost without a word. What dataset
        and ``collate`` raise comes with a note of the samples that were being loaded.
        """
        if not 0 <= offset < offset + size <= self.size:
            raise ValueError(f"chunk [{offset}, {offset + size}) lies outside the dataset's {self.size} samples")
        order = self._permutation(epoch)[offset : offset + size]
        cuts = (order[start : start + self.batch_size].tolist() for start in range(0, size, self.batch_size))
        if self.ahead is not None:
            return self.ahead.batches(self._make, cuts)
        return ((self._make(cut), len(cut)) for cut in cuts)

    def close(self) -> None:
        """Nothing more is asked for."""
        if self.ahead is not None:
            self.ahead.close()

    def _make(self, indices: list[int]) -> Any:
        try:
            return self.collate(fetch(self.dataset, indices))
        except Exception as error:
            more = f" and {len(indices) - _MAX_NAMED} more" if len(indices) > _MAX_NAMED else ""
            named = ", ".join(map(str, indices[:_MAX_NAMED]))
            error.add_note(f"It was raised while samples {named}{more} of train_dataset were being loaded.")
            raise

    def _permutation(self, epoch: int) -> npt.NDArray[np.int64]:
        if epoch != self._epoch:
            self._order = epoch_permutation(self.size, self.seed, epoch)
            self._epoch = epoch
        return self._order


def fetch(dataset: Any, indices: list[int]) -> list[Any]:
    """The samples at these indices, by torch's batched ``__getitems__`` when the dataset has it."""
    batched = getattr(dataset, "__getitems__", None)
    if callable(batched):
        return list(batched(indices))
    return [dataset[index] for index in indices]
