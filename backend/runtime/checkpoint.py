"""A checkpoint: the last consensus as a model file that plain PyTorch loads strictly, and its manifest.

    data_dir/runs/<run>/checkpoints/<n>/model.safetensors     the module's own state_dict keys and dtypes
                                        outer.safetensors     momentum of the outer optimizer, when the run has one
                                        manifest.json         written last: a directory that has it is complete

Everything is written under a temporary name, fsynced, and renamed, so that a crash or a full disk leaves older
checkpoints as they were and no half of a new one (reliability L5, F86, F88). Runs in a thread; it knows nothing of
scheduling.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import secrets
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from backend.core.vocabulary import CheckpointWritten, WriteCheckpoint
from backend.runtime import tensor_file
from backend.runtime.tensor_file import Entry, TensorFileError
from backend.runtime.view import jsonable, rfc3339
from wire.messages import TensorSpec

MODEL = "model.safetensors"
OUTER = "outer.safetensors"
MOMENTUM = "momentum"
"""the one tensor of the outer file: f32, in the order of the arena's parameters"""
MANIFEST = "manifest.json"
FORMAT = 1

Arena = npt.NDArray[np.float32]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CheckpointPlace:
    """Where a run's checkpoints are. Paths in the database are relative to ``data_dir``, which may move."""

    data_dir: Path
    run_id: int

    @property
    def root(self) -> Path:
        """The directory of all of them."""
        return self.data_dir / "runs" / str(self.run_id) / "checkpoints"

    def model(self, checkpoint: int) -> Path:
        """The model file of one."""
        return self.root / str(checkpoint) / MODEL

    def sweep(self) -> None:
        """Remove what a crash left half-written."""
        if self.root.is_dir():
            for leftover in self.root.glob(".*"):
                shutil.rmtree(leftover, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class Committed:
    """What the reduce plane holds after a round, both of the same one."""

    consensus: Arena | None
    """params then buffers; None before the first round"""
    outer_momentum: Arena | None = None
    """(params_elements,); None without an outer optimizer"""


def write_checkpoint(
    place: CheckpointPlace, effect: WriteCheckpoint, committed: Committed, wall_clock: Callable[[], datetime]
) -> CheckpointWritten:
    """Write one; a failure comes back in ``error``, naming the file or tensor, and leaves nothing behind.

    Blocks on the disk.
    """
    number = effect.checkpoint
    try:
        written = _write(place, effect, committed, rfc3339(wall_clock()))
    except TensorFileError as error:
        return CheckpointWritten(number, "", 0, "", error=str(error))
    except OSError as error:
        where = error.filename or place.root
        return CheckpointWritten(number, "", 0, "", error=f"{error.strerror or error} ({where})")
    except Exception as error:
        log.exception("checkpoint %d of run %d failed inside the controller", number, place.run_id)
        return CheckpointWritten(number, "", 0, "", error=f"internal error: {type(error).__name__}: {error}")
    path = place.model(number).relative_to(place.data_dir)
    return CheckpointWritten(number, path.as_posix(), written.bytes, written.sha256)


def read_outer_momentum(directory: Path) -> Arena | None:
    """The outer momentum of a checkpoint, for ``ReducePlane.restore_outer``: (params_elements,) f32; None when its run
    had no outer optimizer.

    Raises ``TensorFileError`` for a file that is not the one that the manifest lists, ``OSError`` when one is missing.
    """
    listed = json.loads((directory / MANIFEST).read_text(encoding="utf-8")).get("outer")
    if listed is None:
        return None
    body = (directory / OUTER).read_bytes()
    if hashlib.sha256(body).hexdigest() != listed["sha256"]:
        raise TensorFileError(f"{directory / OUTER} is not the file that its manifest lists")
    code, shape, data = tensor_file.read(body).get(MOMENTUM, ("nothing", (), b""))
    if code != tensor_file.code_of("float32") or len(shape) != 1:
        raise TensorFileError(f"{MOMENTUM} in {directory / OUTER} is {code} {list(shape)}, not one f32 vector")
    return np.frombuffer(data, dtype="<f4")


def _write(place: CheckpointPlace, effect: WriteCheckpoint, committed: Committed, at: str) -> tensor_file.Written:
    consensus, momentum = committed.consensus, committed.outer_momentum
    if consensus is None:
        raise TensorFileError("no round has been committed, so there is nothing to save")
    layout = _layout(effect.manifest)
    final = place.root / str(effect.checkpoint)
    place.root.mkdir(mode=0o700, parents=True, exist_ok=True)
    if final.exists():
        raise TensorFileError(f"checkpoint {effect.checkpoint} exists already ({final})")
    temporary = place.root / f".{effect.checkpoint}.{secrets.token_hex(4)}"
    temporary.mkdir(mode=0o700)
    try:
        entries, missing = model_entries(layout, consensus, effect.local_state)
        written = tensor_file.write(temporary / MODEL, entries)
        listed: dict[str, Any] = {"at": at, "missing_local_tensors": missing, "model": _listed(MODEL, written)}
        if momentum is not None:
            entry = Entry(MOMENTUM, "float32", momentum.shape, lambda: momentum)
            listed["outer"] = _listed(OUTER, tensor_file.write(temporary / OUTER, [entry]))
        _write_manifest(temporary / MANIFEST, effect, listed)
        _sync_directory(temporary)
        temporary.rename(final)
        _sync_directory(place.root)
    except BaseException:
        with contextlib.suppress(OSError):
            shutil.rmtree(temporary)
        raise
    return written


def model_entries(layout: list[TensorSpec], consensus: Arena, local_state: bytes) -> tuple[list[Entry], list[str]]:
    """The model's tensors, and the names of local ones that no rank could hand over.

    Averaged tensors are cut from the f32 arena and rounded to their own dtype; a tied tensor is saved under each of its
    names. Raises ``TensorFileError`` for a layout and arena, or local tensors, that don't fit together.
    """
    by_name = {spec.name: spec for spec in layout}
    local, missing = _local_tensors(layout, local_state)
    entries = []
    for spec in layout:
        source = spec if not spec.alias_of else by_name.get(spec.alias_of)
        if source is None or source.alias_of:
            raise TensorFileError(f"{spec.name} is tied to {spec.alias_of}, which is not a tensor of its own")
        if source.section == "local":
            if source.name in local:
                entries.append(Entry(spec.name, spec.dtype, tuple(spec.shape), partial(_same, local[source.name])))
            continue
        entries.append(Entry(spec.name, spec.dtype, tuple(spec.shape), partial(_cut, consensus, spec, source.offset)))
    return entries, missing


def _local_tensors(layout: list[TensorSpec], local_state: bytes) -> tuple[dict[str, bytes], list[str]]:
    specs = [spec for spec in layout if spec.section == "local"]
    wanted = {spec.name: spec for spec in specs if not spec.alias_of}
    if not local_state:
        # Nobody is left to hand them over: the averaged tensors are still worth saving; the manifest says what lacks.
        return {}, sorted(wanted)
    found = tensor_file.read(local_state)
    if unknown := sorted(found.keys() - {spec.name for spec in specs}):
        raise TensorFileError(f"the rank sent local tensors that the model doesn't have: {', '.join(unknown)}")
    if absent := sorted(wanted.keys() - found.keys()):
        raise TensorFileError(f"the rank left out local tensors: {', '.join(absent)}")
    for name, spec in wanted.items():
        code, shape, _ = found[name]
        if (code, shape) != (tensor_file.code_of(spec.dtype), tuple(spec.shape)):
            text = f"local tensor {name} is {code} {list(shape)}, the model has {spec.dtype} {spec.shape}"
            raise TensorFileError(text)
    return {name: data for name, (_, _, data) in found.items()}, []


def _cut(consensus: Arena, spec: TensorSpec, offset: int) -> npt.NDArray[Any]:
    elements = int(np.prod(spec.shape, dtype=np.int64))
    if offset < 0 or offset + elements > consensus.size:
        text = f"{spec.name} lies at {offset} to {offset + elements}, the arena has {consensus.size} elements"
        raise TensorFileError(text)
    piece = consensus[offset : offset + elements]
    wanted = tensor_file.numpy_type(spec.dtype)
    with np.errstate(over="ignore"):  # a value beyond a narrow dtype becomes infinite, as in the framework
        return piece.astype(wanted, copy=False).reshape(spec.shape)


def _same(data: bytes) -> bytes:
    return data


def _layout(manifest: dict[str, Any]) -> list[TensorSpec]:
    try:
        return msgspec.convert(manifest["layout"], list[TensorSpec])
    except (KeyError, msgspec.ValidationError) as error:
        raise TensorFileError(f"the manifest has no usable layout: {error!r}") from error


def _listed(name: str, written: tensor_file.Written) -> dict[str, Any]:
    return {"file": name, "bytes": written.bytes, "sha256": written.sha256}


def _write_manifest(path: Path, effect: WriteCheckpoint, listed: dict[str, Any]) -> None:
    manifest = {
        **effect.manifest,
        "format": FORMAT,
        "checkpoint": effect.checkpoint,
        "reason": effect.reason,
        **listed,
    }
    with path.open("x", encoding="utf-8") as file:
        json.dump(jsonable(manifest), file, indent=1, allow_nan=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())


def _sync_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
