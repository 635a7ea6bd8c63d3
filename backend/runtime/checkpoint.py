"""Writing a checkpoint: the last consensus as a model file that plain PyTorch loads strictly, the ranks' own states,
and the manifest (``bundle`` says what lies where).

Everything is written under a temporary name, fsynced, and renamed, so that a crash or a full disk leaves older
checkpoints as they were and no half of a new one (reliability L5, F86, F88). States arrive part by part while the run
goes on. All of it runs in one thread; it knows nothing of scheduling.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
import numpy.typing as npt

from backend.core.model import sizes
from backend.core.vocabulary import CheckpointWritten, WriteCheckpoint
from backend.runtime import tensor_file
from backend.runtime.bundle import (
    ARENA,
    CHECKSUM,
    CONSENSUS,
    FORMAT,
    MANIFEST,
    MODEL,
    MOMENTUM,
    OUTER,
    Arena,
    CheckpointPlace,
    checksum,
    state_file,
    sync_directory,
)
from backend.runtime.tensor_file import Entry, TensorFileError, Written
from backend.runtime.view import jsonable, rfc3339
from wire import failpoints
from wire.messages import TensorSpec

LOCAL = "model."
"""what the model's own tensors are called in a rank's file, before their name"""
WIDE = frozenset({"float32", "float64"})
"""dtypes that hold every value of the arena"""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Committed:
    """What the reduce plane holds after a round, both of the same one."""

    consensus: Arena | None
    """params then buffers; None before the first round"""
    outer_momentum: Arena | None = None
    """(params_elements,); None without an outer optimizer"""


@dataclass(slots=True)
class _State:
    """A rank's file while its parts come in."""

    file: BinaryIO
    digest: Any = field(default_factory=hashlib.sha256)
    bytes: int = 0


class CheckpointWriter:
    """Makes one bundle after the other. Blocks on the disk; call it from one thread only.

    A failure in ``open`` or ``keep`` is remembered and comes back from ``write``, so that nobody who hands over a state
    is left waiting.
    """

    def __init__(
        self, place: CheckpointPlace, wall_clock: Callable[[], datetime], facts: dict[str, Any] | None = None
    ) -> None:
        """``facts`` go into every manifest."""
        self.place = self._place = place
        self._wall_clock = wall_clock
        self._facts = facts or {}
        self._number = 0
        self._directory: Path | None = None
        self._committed = Committed(None)
        self._states: dict[int, _State] = {}
        self._error = ""

    def open(self, checkpoint: int, committed: Committed) -> None:
        """Begin one; what was begun before and never written is dropped."""
        self.drop()
        self._number, self._committed, self._error = checkpoint, committed, ""
        root = self._place.root
        with self._blamed():
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self._place.bundle(checkpoint).exists():
                raise TensorFileError(f"checkpoint {checkpoint} exists already ({self._place.bundle(checkpoint)})")
            directory = root / f".{checkpoint}.{secrets.token_hex(4)}"
            directory.mkdir(mode=0o700)
            self._directory = directory
            failpoints.hit("save.begun", **self._where)

    def keep(self, checkpoint: int, rank: int, data: bytes) -> None:
        """The next bytes of a rank's own state."""
        if checkpoint != self._number or self._error or self._directory is None:
            return
        with self._blamed():
            state = self._states.get(rank)
            if state is None:
                state = self._states[rank] = _State((self._directory / state_file(rank)).open("xb"))
            state.file.write(data)
            state.digest.update(data)
            state.bytes += len(data)
            failpoints.hit("save.kept", rank=rank, **self._where)

    def write(self, effect: WriteCheckpoint) -> CheckpointWritten:
        """Complete it and remove what is too old; a failure comes back in ``error``, naming the file or tensor, and
        leaves nothing behind."""
        number, written = effect.checkpoint, Written(0, "")
        if not self._error:
            with self._blamed():
                written = self._write(effect)
        self.drop()
        if self._error:
            return CheckpointWritten(number, "", 0, "", error=self._error)
        pruned: tuple[int, ...] = ()
        try:
            pruned = self._place.prune(effect.keep)
        except OSError as failure:  # too many is no reason to call the new one failed
            log.warning("an old checkpoint of run %d could not be removed: %s", self._place.run_id, failure)
        failpoints.hit("save.pruned", **self._where)
        path = self._place.model(number).relative_to(self._place.data_dir)
        return CheckpointWritten(number, path.as_posix(), written.bytes, written.sha256, pruned=pruned)

    def drop(self) -> None:
        """Forget what was begun."""
        for state in self._states.values():
            state.file.close()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
        self._states, self._directory, self._committed = {}, None, Committed(None)

    @property
    def _where(self) -> dict[str, int]:
        return {"run": self._place.run_id, "checkpoint": self._number}

    def _write(self, effect: WriteCheckpoint) -> Written:
        directory, bearer = self._directory, effect.consensus_of
        if directory is None or (bearer is None and self._committed.consensus is None):
            raise TensorFileError("no round has been committed, so there is nothing to save")
        layout = _layout(effect.manifest)
        files = self._close_states(effect.states, directory)
        consensus = self._committed.consensus
        if bearer is not None:
            consensus = _handed_over(directory / state_file(bearer), layout)
        assert consensus is not None
        entries, missing = self._entries(layout, consensus, [directory / state_file(rank) for rank in effect.states])
        written = files[MODEL] = tensor_file.write(directory / MODEL, entries)
        if any(spec.dtype not in WIDE for spec in layout if spec.section != "local"):
            files[ARENA] = _vector(directory / ARENA, CONSENSUS, consensus)
        if self._committed.outer_momentum is not None:
            files[OUTER] = _vector(directory / OUTER, MOMENTUM, self._committed.outer_momentum)
        failpoints.hit("save.model", **self._where)
        listed = {name: {"bytes": each.bytes, "sha256": each.sha256} for name, each in sorted(files.items())}
        facts = {"files": listed, "missing_local_tensors": missing, "at": rfc3339(self._wall_clock())}
        _write_manifest(directory / MANIFEST, effect, self._facts | facts)
        sync_directory(directory)
        failpoints.hit("save.manifest", **self._where)
        directory.rename(self._place.bundle(effect.checkpoint))
        self._directory = None
        failpoints.hit("save.named", **self._where)
        sync_directory(self._place.root)
        return written

    def _entries(self, layout: list[TensorSpec], consensus: Arena, states: list[Path]) -> tuple[list[Entry], list[str]]:
        """The model's entries with the local tensors of the first rank whose state has them: one that hands over
        nonsense spoils nobody's checkpoint. Raises ``TensorFileError`` for the first state when none will do."""
        faults: list[TensorFileError] = []
        for state in states:
            try:
                return model_entries(layout, consensus, state)
            except TensorFileError as fault:
                faults.append(fault)
                log.warning("checkpoint %d of run %d passes over a state: %s", self._number, self._place.run_id, fault)
        if faults:
            raise faults[0]
        return model_entries(layout, consensus, None)

    def _close_states(self, whole: tuple[int, ...], directory: Path) -> dict[str, Written]:
        """Sync the states that came whole, remove the others."""
        files = {}
        for rank, state in self._states.items():
            with state.file as file:
                file.flush()
                if rank in whole:
                    failpoints.hit("checkpoint.sync", name=state_file(rank))
                    os.fsync(file.fileno())
                    files[state_file(rank)] = Written(state.bytes, state.digest.hexdigest())
                else:
                    (directory / state_file(rank)).unlink()
        self._states = {}
        return files

    @contextmanager
    def _blamed(self) -> Iterator[None]:
        """Remember a failure instead of raising it."""
        try:
            yield
        except TensorFileError as error:
            self._error = str(error)
        except OSError as error:
            self._error = f"{error.strerror or error} ({error.filename or self._place.root})"
        except Exception as error:
            log.exception("checkpoint %d of run %d failed inside the controller", self._number, self._place.run_id)
            self._error = f"internal error: {type(error).__name__}: {error}"


def _handed_over(state: Path, layout: list[TensorSpec]) -> Arena:
    """The consensus in a rank's own file, where no round came by here. Raises ``TensorFileError``: it isn't there, or
    not this model's."""
    file = tensor_file.TensorFile.open(state)
    elements = sum(sizes(layout))
    if CONSENSUS not in file.entries or (file.code(CONSENSUS), file.shape(CONSENSUS)) != ("F32", (elements,)):
        raise TensorFileError(f"{state.name} holds no consensus of {elements} elements in f32")
    return file.array(CONSENSUS)


def model_entries(layout: list[TensorSpec], consensus: Arena, state: Path | None) -> tuple[list[Entry], list[str]]:
    """The model's tensors, and the names of local ones that no rank could hand over. ``state`` is a rank's own file.

    Averaged tensors are cut from the f32 arena and rounded to their own dtype; a tied tensor is saved under each of its
    names. Raises ``TensorFileError`` for a layout and arena, or local tensors, that don't fit together.
    """
    by_name = {spec.name: spec for spec in layout}
    local, missing = _local_tensors(layout, state)
    entries = []
    for spec in layout:
        source = spec if not spec.alias_of else by_name.get(spec.alias_of)
        if source is None or source.alias_of:
            raise TensorFileError(f"{spec.name} is tied to {spec.alias_of}, which is not a tensor of its own")
        if source.section == "local":
            if source.name in local:
                entries.append(Entry(spec.name, spec.dtype, tuple(spec.shape), local[source.name]))
            continue
        entries.append(Entry(spec.name, spec.dtype, tuple(spec.shape), partial(_cut, consensus, spec, source.offset)))
    return entries, missing


def _local_tensors(
    layout: list[TensorSpec], state: Path | None
) -> tuple[dict[str, Callable[[], npt.NDArray[Any]]], list[str]]:
    specs = [spec for spec in layout if spec.section == "local"]
    wanted = {spec.name: spec for spec in specs if not spec.alias_of}
    if state is None:
        # Nobody is left to hand them over: the averaged tensors are still worth saving; the manifest says what lacks.
        return {}, sorted(wanted)
    file = tensor_file.TensorFile.open(state)
    found = {name.removeprefix(LOCAL): name for name in file.entries if name.startswith(LOCAL)}
    if unknown := sorted(found.keys() - {spec.name for spec in specs}):
        raise TensorFileError(f"the rank sent local tensors that the model doesn't have: {', '.join(unknown)}")
    if absent := sorted(wanted.keys() - found.keys()):
        raise TensorFileError(f"the rank left out local tensors: {', '.join(absent)}")
    for name, spec in wanted.items():
        code, shape = file.code(found[name]), file.shape(found[name])
        if (code, shape) != (tensor_file.code_of(spec.dtype), tuple(spec.shape)):
            text = f"local tensor {name} is {code} {list(shape)}, the model has {spec.dtype} {spec.shape}"
            raise TensorFileError(text)
    return {name: partial(file.array, found[name]) for name in wanted}, []


def _cut(consensus: Arena, spec: TensorSpec, offset: int) -> npt.NDArray[Any]:
    elements = int(np.prod(spec.shape, dtype=np.int64))
    if offset < 0 or offset + elements > consensus.size:
        text = f"{spec.name} lies at {offset} to {offset + elements}, the arena has {consensus.size} elements"
        raise TensorFileError(text)
    piece = consensus[offset : offset + elements]
    wanted = tensor_file.numpy_type(spec.dtype)
    with np.errstate(over="ignore"):  # a value beyond a narrow dtype becomes infinite, as in the framework
        return piece.astype(wanted, copy=False).reshape(spec.shape)


def _layout(manifest: dict[str, Any]) -> list[TensorSpec]:
    try:
        return msgspec.convert(manifest["layout"], list[TensorSpec])
    except (KeyError, msgspec.ValidationError) as error:
        raise TensorFileError(f"the manifest has no usable layout: {error!r}") from error


def _vector(path: Path, name: str, values: Arena) -> Written:
    return tensor_file.write(path, [Entry(name, "float32", values.shape, lambda: values)])


def _write_manifest(path: Path, effect: WriteCheckpoint, facts: dict[str, Any]) -> None:
    manifest = {
        **effect.manifest,
        "format": FORMAT,
        "checkpoint": effect.checkpoint,
        "reason": effect.reason,
        "states": list(effect.states),
        **facts,
    }
    whole = json.loads(json.dumps(jsonable(manifest), allow_nan=False))
    whole[CHECKSUM] = checksum(whole)
    with path.open("x", encoding="utf-8") as file:
        json.dump(whole, file, indent=1, allow_nan=False)
        file.write("\n")
        file.flush()
        failpoints.hit("checkpoint.sync", name=path.name)
        os.fsync(file.fileno())
