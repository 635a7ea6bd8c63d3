"""Dataset signatures: equal for equal data, different for different data, indifferent to what nobody can help."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset, random_split

from worker.fingerprint import dataset_signature, dataset_size
from worker.job import JobError
from worker.seeding import seed_everything

HERE = Path(__file__).parent


def signature(dataset: Any) -> str:
    return dataset_signature(dataset, HERE)[0]


def test_the_same_data_has_the_same_signature_and_its_size() -> None:
    first, size = dataset_signature(TensorDataset(torch.arange(10.0)), HERE)
    assert size == 10
    assert first == signature(TensorDataset(torch.arange(10.0)))
    assert len(first) == 64


@pytest.mark.parametrize(
    "other",
    [
        pytest.param([0, 1, 2, 3, 4, 5, 6, 7, 8], id="shorter"),
        pytest.param([9, 1, 2, 3, 4, 5, 6, 7, 8, 9], id="first item"),
        pytest.param([0, 1, 2, 3, 4, 9, 6, 7, 8, 9], id="middle item"),
        pytest.param([0, 1, 2, 3, 4, 5, 6, 7, 8, 0], id="last item"),
        pytest.param([float(i) for i in range(10)], id="type"),
        pytest.param([torch.tensor(i) for i in range(10)], id="tensors"),
        pytest.param([(i,) for i in range(10)], id="nesting"),
        pytest.param([{"x": i} for i in range(10)], id="names"),
    ],
)
def test_other_data_has_another_signature(other: list) -> None:
    assert signature(other) != signature(list(range(10)))


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (torch.zeros(2, 3), torch.zeros(3, 2)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64)),
        (torch.zeros(2), torch.ones(2)),
        (torch.tensor(1, dtype=torch.bfloat16), torch.tensor(2, dtype=torch.bfloat16)),
        (np.zeros(2), np.ones(2)),
        (np.float32(1), np.float64(1)),
        ("a", "b"),
        (b"a", b"b"),
    ],
)
def test_dtype_shape_and_values_count(one: Any, two: Any) -> None:
    assert signature([one]) != signature([two])
    assert signature([one]) == signature([one])


def test_dataclass_items_are_read_by_their_fields() -> None:
    @dataclass
    class Item:
        x: torch.Tensor

    assert signature([Item(torch.zeros(1))]) == signature([Item(torch.zeros(1))])
    assert signature([Item(torch.zeros(1))]) != signature([Item(torch.ones(1))])


def test_seeded_augmentation_and_random_splits_agree_between_hosts() -> None:
    class Augmented:
        def __len__(self) -> int:
            return 5

        def __getitem__(self, index: int) -> torch.Tensor:
            return index + torch.rand(3)

    def split() -> Any:
        seed_everything(0)
        return random_split(TensorDataset(torch.arange(20)), [15, 5])[0]

    assert signature(Augmented()) == signature(Augmented())
    assert signature(split()) == signature(split())


def test_what_differs_from_reading_to_reading_counts_by_its_shape_only() -> None:
    generator = np.random.default_rng()

    def noisy(width: int) -> Any:
        class Noisy:
            def __len__(self) -> int:
                return 5

            def __getitem__(self, index: int) -> np.ndarray:
                return generator.random(width)

        return Noisy()

    assert signature(noisy(3)) == signature(noisy(3))
    assert signature(noisy(3)) != signature(noisy(4))


def test_a_fingerprint_of_its_own_stands_in_for_the_values() -> None:
    class Own(list):
        def __init__(self, values: list, mark: str) -> None:
            super().__init__(values)
            self.mark = mark

        def fingerprint(self) -> str:
            return self.mark

    assert signature(Own([1, 2], "v1")) == signature(Own([3, 4], "v1"))
    assert signature(Own([1, 2], "v1")) != signature(Own([1, 2], "v2"))


def test_what_cannot_be_trained_on_is_refused_by_name() -> None:
    class Throws(list):
        def __getitem__(self, index: Any) -> Any:
            raise FileNotFoundError("shard 3")

    with pytest.raises(JobError, match="no sample"):
        dataset_size([], HERE)
    with pytest.raises(JobError, match="without __len__"):
        dataset_size(iter([1]), HERE)
    with pytest.raises(JobError, match=r"item 0 .*test_fingerprint.py:\d+: FileNotFoundError: shard 3"):
        dataset_signature(Throws([1]), HERE)
