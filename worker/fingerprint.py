"""What a dataset looks like from outside, so that hosts with different data are told apart at the door
(design section 9)."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from worker.job import JobError, blamed
from worker.seeding import seed_everything


class _Digest(Protocol):
    def update(self, data: bytes, /) -> None: ...

    def hexdigest(self) -> str: ...


def dataset_signature(dataset: Any, job_dir: Path) -> tuple[str, int]:
    """(sha256 in hex, number of samples) of a map-style dataset. Raises ``JobError`` for one that cannot be
    trained on.

    Covers the length and the first, middle and last items: types, dtypes, shapes, and values. A dataset's own
    ``fingerprint()`` stands in for the values; so do nothing at all where two readings of an item differ
    under one seed (unseeded augmentation), since honest hosts would disagree.
    """
    size = dataset_size(dataset, job_dir)
    digest = hashlib.sha256(f"{size}\n".encode())
    own = getattr(dataset, "fingerprint", None)
    if callable(own):
        with blamed("dataset_invalid", "the dataset's fingerprint()", job_dir):
            digest.update(f"fingerprint {own()}\n".encode())
    for index in sorted({0, size // 2, size - 1}):
        digest.update(f"item {index} {_item(dataset, index, job_dir, values=own is None)}\n".encode())
    return digest.hexdigest(), size


def dataset_size(dataset: Any, job_dir: Path) -> int:
    """Number of samples. Raises ``JobError`` when the dataset is not map-style, or empty."""
    for method in ("__len__", "__getitem__"):
        if not hasattr(dataset, method):
            raise JobError(
                "dataset_invalid",
                f"train_dataset returned a {type(dataset).__name__} without {method}; "
                "a map-style dataset has __len__ and __getitem__ (an IterableDataset cannot be dealt out)",
            )
    with blamed("dataset_invalid", "the dataset's length", job_dir):
        size = len(dataset)
    if size < 1:
        raise JobError("dataset_empty", "train_dataset has no sample; check the path that it reads")
    return size


def _item(dataset: Any, index: int, job_dir: Path, *, values: bool) -> str:
    first = _read(dataset, index, job_dir, values=values)
    if not values or first == _read(dataset, index, job_dir, values=True):
        return first
    return _read(dataset, index, job_dir, values=False)


def _read(dataset: Any, index: int, job_dir: Path, *, values: bool) -> str:
    seed_everything(0)
    with blamed("dataset_invalid", f"reading item {index} of train_dataset", job_dir):
        item = dataset[index]
    digest = hashlib.sha256()
    _feed(digest, item, values)
    return digest.hexdigest()


def _feed(digest: _Digest, value: Any, values: bool) -> None:
    """Add a value's kind, and its content when ``values``; what is not understood counts by its type only."""
    if isinstance(value, torch.Tensor):
        digest.update(f"tensor {value.dtype} {tuple(value.shape)}\n".encode())
        if values and value.layout is torch.strided:
            digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, Mapping):
        digest.update(f"mapping {len(value)}\n".encode())
        for key in sorted(value, key=str):
            digest.update(f"key {key}\n".encode())
            _feed(digest, value[key], values)
    elif isinstance(value, list | tuple):
        digest.update(f"sequence {len(value)}\n".encode())
        for part in value:
            _feed(digest, part, values)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        _feed(digest, {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}, values)
    else:
        _feed_leaf(digest, value, values)


def _feed_leaf(digest: _Digest, value: Any, values: bool) -> None:
    digest.update(f"{type(value).__qualname__}\n".encode())
    if isinstance(value, str | bytes | bool | int | float | None):
        digest.update(f"{value!r}\n".encode() if values else b"")
    elif isinstance(value, np.ndarray | np.generic) or hasattr(value, "__array__"):
        array = np.asarray(value)
        digest.update(f"array {array.dtype.str} {array.shape}\n".encode())
        if values and array.dtype.kind != "O":
            digest.update(np.ascontiguousarray(array).tobytes())
