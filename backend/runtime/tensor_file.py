"""The safetensors format, written tensor by tensor: memory for one of them, its hash on the way, no framework needed.

A file is an 8-byte little-endian length, a JSON header with each tensor's dtype, shape and place, and the raw bytes.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import safetensors

from wire import failpoints

ALIGNMENT = 8
METADATA = {"format": "pt"}
"""what loaders of PyTorch expect to find"""

Array = npt.NDArray[Any]

_NUMPY: dict[str, tuple[str, Any]] = {
    "float64": ("F64", np.float64),
    "float32": ("F32", np.float32),
    "float16": ("F16", np.float16),
    "bfloat16": ("BF16", ml_dtypes.bfloat16),
    "float8_e4m3fn": ("F8_E4M3", ml_dtypes.float8_e4m3fn),
    "float8_e5m2": ("F8_E5M2", ml_dtypes.float8_e5m2),
    "int64": ("I64", np.int64),
    "int32": ("I32", np.int32),
    "int16": ("I16", np.int16),
    "int8": ("I8", np.int8),
    "uint64": ("U64", np.uint64),
    "uint32": ("U32", np.uint32),
    "uint16": ("U16", np.uint16),
    "uint8": ("U8", np.uint8),
    "bool": ("BOOL", np.bool_),
    "complex64": ("C64", np.complex64),
}


class TensorFileError(ValueError):
    """A tensor, or a body of tensors, that can't be; the text names it."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor to write: its bytes are asked for when their turn comes."""

    name: str
    dtype: str
    """the framework's name, with or without ``torch.``"""
    shape: tuple[int, ...]
    load: Callable[[], Array | bytes]


@dataclass(frozen=True, slots=True)
class Written:
    """What a finished file amounts to."""

    bytes: int
    sha256: str


def code_of(dtype: str) -> str:
    """The format's name of a dtype. Raises ``TensorFileError`` for one that it can't hold."""
    return _known(dtype)[0]


def numpy_type(dtype: str) -> Any:
    """The numpy type of a dtype. Raises ``TensorFileError``."""
    return _known(dtype)[1]


def write(path: Path, entries: Iterable[Entry]) -> Written:
    """Write and fsync a new file. Raises ``OSError``, and ``TensorFileError`` for a tensor unlike its entry."""
    # Wide types first, so that every tensor starts at a multiple of its own size.
    ordered = sorted(entries, key=lambda entry: (-_width(entry.dtype), entry.name))
    digest, total = hashlib.sha256(), 0
    with path.open("xb") as file:
        for data in itertools.chain([memoryview(_header(ordered))], map(_bytes_of, ordered)):
            file.write(data)
            digest.update(data)
            total += data.nbytes
        file.flush()
        failpoints.hit("checkpoint.sync", name=path.name)
        os.fsync(file.fileno())
    return Written(total, digest.hexdigest())


def read(body: bytes) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Tensors by name as (dtype code, shape, raw bytes). Raises ``TensorFileError`` for a malformed body."""
    try:
        found: list[tuple[str, dict[str, Any]]] = safetensors.deserialize(body)  # type: ignore[no-untyped-call]
    except safetensors.SafetensorError as error:
        raise TensorFileError(f"not a safetensors body: {error}") from error
    tensors = {name: (spec["dtype"], tuple(spec["shape"]), bytes(spec["data"])) for name, spec in found}
    if len(tensors) != len(found):
        raise TensorFileError("a tensor is named twice")
    return tensors


@dataclass(frozen=True, slots=True)
class TensorFile:
    """A file on disk whose tensors are mapped, not read. ``entries`` are (dtype code, shape, first byte) by name."""

    path: Path
    entries: dict[str, tuple[str, tuple[int, ...], int]]

    @classmethod
    def open(cls, path: Path) -> TensorFile:
        """Read the header. Raises ``OSError``, and ``TensorFileError`` for one that promises what the file has not."""
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            (length,) = struct.unpack("<Q", file.read(8)) if size >= 8 else (0,)
            if not 2 <= length <= size - 8:
                raise TensorFileError(f"{path} is no safetensors file")
            text = file.read(length)
        try:
            header = json.loads(text, object_pairs_hook=_unique)
            header.pop("__metadata__", None)
            entries = {name: _placed(spec, 8 + length, size) for name, spec in header.items()}
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise TensorFileError(f"the header of {path} cannot be read: {error}") from error
        return cls(path, entries)

    def code(self, name: str) -> str:
        """The format's name of a tensor's dtype."""
        return self.entries[name][0]

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape."""
        return self.entries[name][1]

    def array(self, name: str) -> Array:
        """A tensor, mapped read-only. Raises ``TensorFileError`` for a dtype that is not known here."""
        code, shape, start = self.entries[name]
        if not math.prod(shape):
            return np.empty(shape, dtype=_NUMPY_OF[code])
        mapped: Array = np.memmap(self.path, dtype=_NUMPY_OF[code], mode="r", offset=start, shape=shape or (1,))
        return mapped.reshape(shape)


_NUMPY_OF = dict(_NUMPY.values())


def _placed(spec: dict[str, Any], start: int, size: int) -> tuple[str, tuple[int, ...], int]:
    code, shape, (first, last) = spec["dtype"], tuple(map(int, spec["shape"])), spec["data_offsets"]
    if code not in _NUMPY_OF or any(length < 0 for length in shape):
        raise TensorFileError(f"a tensor is {code} {list(shape)}")
    wanted = math.prod(shape) * np.dtype(_NUMPY_OF[code]).itemsize
    if not 0 <= first <= last or last - first != wanted or start + last > size:
        raise TensorFileError(f"a tensor of {wanted} bytes lies at {first} to {last} of {size - start}")
    return code, shape, start + first


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({name for name, _ in pairs}) != len(pairs):
        raise TensorFileError("a tensor is named twice")
    return dict(pairs)


def _bytes_of(entry: Entry) -> memoryview:
    """One tensor's bytes, checked against what the header promised."""
    value = entry.load()
    # A view, not a copy: one parameter can be most of the model.
    data = (
        memoryview(value) if isinstance(value, bytes) else np.ascontiguousarray(value).reshape(-1).view(np.uint8).data
    )
    if data.nbytes != _nbytes(entry):
        raise TensorFileError(f"{entry.name} has {data.nbytes} bytes, its dtype and shape say {_nbytes(entry)}")
    return data


def _header(entries: list[Entry]) -> bytes:
    header: dict[str, Any] = {"__metadata__": METADATA}
    start = 0
    for entry in entries:
        if entry.name in header:
            raise TensorFileError(f"{entry.name} is there twice")
        end = start + _nbytes(entry)
        header[entry.name] = {"dtype": code_of(entry.dtype), "shape": list(entry.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return struct.pack("<Q", len(text)) + text


def _nbytes(entry: Entry) -> int:
    return math.prod(entry.shape) * _width(entry.dtype)


def _width(dtype: str) -> int:
    return int(np.dtype(numpy_type(dtype)).itemsize)


def _known(dtype: str) -> tuple[str, Any]:
    name = dtype.removeprefix("torch.")
    if name not in _NUMPY:
        raise TensorFileError(f"a tensor of dtype {dtype!r} can't be saved; known are {', '.join(_NUMPY)}")
    return _NUMPY[name]
