"""Bundles on disk: where they are, which are complete, and reading one back.

    data_dir/runs/<run>/checkpoints/<n>/model.safetensors     the module's own state_dict keys and dtypes
                                        arena.safetensors     the consensus in f32, where the model is narrower
                                        outer.safetensors     momentum of the outer optimizer, when the run has one
                                        rank<r>.safetensors   what only rank r held: optimizer, generators
                                        manifest.json         written last, with size and sha256 of every other file

A directory whose name is a number and that has a manifest is complete; the highest number is the newest (case F07).
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from backend.core.resume import Resume, read_resume
from backend.runtime import tensor_file
from backend.runtime.tensor_file import TensorFile, TensorFileError
from wire.messages import TensorSpec

MODEL = "model.safetensors"
ARENA = "arena.safetensors"
OUTER = "outer.safetensors"
MANIFEST = "manifest.json"
CONSENSUS, MOMENTUM = "consensus", "momentum"
"""the one tensor of the arena's and of the outer file: f32, in the order of the arena"""
FORMAT = 2
CHECKSUM = "manifest_sha256"
FREE_BYTES = 16 << 20
"""room that must be there before anything is begun"""
_READ_BYTES = 1 << 20

Arena = npt.NDArray[np.float32]


class BundleError(Exception):
    """A checkpoint that is not there, not whole, or not what its manifest says; the text names it."""


def state_file(rank: int) -> str:
    """The file of what only this rank held."""
    return f"rank{rank}.safetensors"


@dataclass(frozen=True, slots=True)
class CheckpointPlace:
    """Where a run's checkpoints are. Paths in the database are relative to ``data_dir``, which may move."""

    data_dir: Path
    run_id: int

    @property
    def root(self) -> Path:
        """The directory of all of them."""
        return self.data_dir / "runs" / str(self.run_id) / "checkpoints"

    def bundle(self, checkpoint: int) -> Path:
        """The directory of one."""
        return self.root / str(checkpoint)

    def model(self, checkpoint: int) -> Path:
        """The model file of one."""
        return self.bundle(checkpoint) / MODEL

    def complete(self) -> list[int]:
        """Numbers of the complete ones, ascending. Whatever else lies there is no checkpoint."""
        if not self.root.is_dir():
            return []
        names = [entry.name for entry in self.root.iterdir() if (entry / MANIFEST).is_file()]
        return sorted(int(name) for name in names if name.isascii() and name.isdecimal() and str(int(name)) == name)

    def prune(self, keep: int) -> tuple[int, ...]:
        """Remove all but the ``keep`` newest complete ones (-1: nothing). Answers which are gone."""
        doomed = self.complete()[:-keep] if keep > 0 else []
        for number in doomed:
            hidden = self.root / f".{number}.{secrets.token_hex(4)}"
            self.bundle(number).rename(hidden)  # first out of sight, so that no half of it is ever taken for whole
            shutil.rmtree(hidden, ignore_errors=True)
        return tuple(doomed)

    def sweep(self) -> None:
        """Remove what a crash left half-written or half-removed."""
        if self.root.is_dir():
            for leftover in self.root.glob(".*"):
                shutil.rmtree(leftover, ignore_errors=True)

    def take_over(self, source: Path, checkpoint: int) -> None:
        """Make another run's bundle one of this run's, by links where the disk can: it then outlives the other run's
        pruning. Raises ``OSError``."""
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary = self.root / f".{checkpoint}.{secrets.token_hex(4)}"
        try:
            temporary.mkdir(mode=0o700)
            for entry in sorted(source.iterdir()):
                _link(entry, temporary / entry.name)
            sync_directory(temporary)
            temporary.rename(self.bundle(checkpoint))
            sync_directory(self.root)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise


def check_room(directory: Path, needed: int = 0) -> None:
    """Write and sync a probe, and look for ``needed`` bytes beyond ``FREE_BYTES``. Raises ``OSError``, whose text says
    what is wrong with the disk."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    probe = directory / f".probe.{secrets.token_hex(4)}"
    try:
        with probe.open("xb") as file:
            file.write(bytes(4096))
            file.flush()
            os.fsync(file.fileno())
    finally:
        probe.unlink(missing_ok=True)
    stats = os.statvfs(directory)
    free = stats.f_bavail * stats.f_frsize
    if free < FREE_BYTES + needed:
        text = f"{free >> 20} MiB are free, a checkpoint needs {(FREE_BYTES + needed) >> 20} MiB"
        raise OSError(28, text, str(directory))


# ---------------------------------------------------------------------------------------------------- reading


def read_manifest(directory: Path) -> dict[str, Any]:
    """A bundle's manifest, as it was written. Raises ``BundleError``."""
    try:
        manifest = json.loads((directory / MANIFEST).read_bytes())
        said = manifest.pop(CHECKSUM)
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise BundleError(f"{directory / MANIFEST} cannot be read: {error!r}") from error
    if said != checksum(manifest):
        raise BundleError(f"{directory / MANIFEST} is not what was written: its checksum differs")
    if manifest.get("format") != FORMAT:
        raise BundleError(f"{directory} has format {manifest.get('format')}, this release reads {FORMAT}")
    return dict(manifest)


def checksum(manifest: Mapping[str, Any]) -> str:
    """sha256 over a manifest less its checksum."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True, allow_nan=False).encode()).hexdigest()


def verify(directory: Path) -> dict[str, Any]:
    """The manifest, once every file is as long and as written as it says. Reads everything. Raises ``BundleError``."""
    manifest = read_manifest(directory)
    for name, listed in manifest["files"].items():
        path = directory / name
        try:
            if path.parent != directory or path.stat().st_size != listed["bytes"] or _sha256(path) != listed["sha256"]:
                raise BundleError(f"{path} is not the file that its manifest lists")
        except OSError as error:
            raise BundleError(f"{path} cannot be read: {error.strerror or error}") from error
    return manifest


@dataclass(frozen=True, slots=True)
class Loaded:
    """A bundle, ready to be gone on from."""

    directory: Path
    resume: Resume
    consensus: Arena
    """params then buffers"""
    momentum: Arena | None
    """of the outer optimizer; none when the run had none"""
    job_hash: str
    params: dict[str, Any]

    def noted(self, *notes: str) -> Loaded:
        """The same, with more to tell."""
        return replace(self, resume=replace(self.resume, notes=(*self.resume.notes, *notes)))


def load(directory: Path, manifest: dict[str, Any], notes: tuple[str, ...] = ()) -> Loaded:
    """A verified bundle's position and tensors. Raises ``BundleError`` with the missing and extra keys of a model that
    is not the one its manifest describes."""
    try:
        position = read_resume(manifest)
        files = manifest["files"]
        consensus = _consensus(directory, list(position.layout), narrow=ARENA in files)
        momentum = _vector(directory / OUTER, MOMENTUM) if OUTER in files else None
    except (ValueError, TensorFileError, KeyError) as error:
        raise BundleError(f"{directory}: {error}") from error
    except OSError as error:
        raise BundleError(f"{error.filename or directory} cannot be read: {error.strerror or error}") from error
    job_hash, params = str(manifest.get("job_hash") or ""), dict(manifest["config"].get("params") or {})
    return Loaded(directory, position, consensus, momentum, job_hash, params).noted(*notes)


def _consensus(directory: Path, layout: list[TensorSpec], *, narrow: bool) -> Arena:
    """The arena from the model's tensors, or from its own file when they are narrower than it."""
    model = TensorFile.open(directory / MODEL)
    averaged = [spec for spec in layout if spec.section != "local" and not spec.alias_of]
    wanted = {spec.name for spec in layout}
    local = {spec.name for spec in layout if spec.section == "local"}
    problems = [
        *(f"missing {name}" for name in sorted(wanted - local - model.entries.keys())),
        *(f"extra {name}" for name in sorted(model.entries.keys() - wanted)),
    ]
    if problems:
        raise TensorFileError(f"the model's keys are not those of the manifest: {', '.join(problems[:16])}")
    for spec in averaged:
        if model.shape(spec.name) != tuple(spec.shape) or model.code(spec.name) != tensor_file.code_of(spec.dtype):
            found = f"{model.code(spec.name)} {list(model.shape(spec.name))}"
            raise TensorFileError(f"{spec.name} is {found}, the manifest says {spec.dtype} {spec.shape}")
    sizes = [int(np.prod(spec.shape, dtype=np.int64)) for spec in averaged]
    if narrow:
        arena = _vector(directory / ARENA, CONSENSUS)
        if arena.size != sum(sizes):
            raise TensorFileError(f"{ARENA} has {arena.size} elements, the model {sum(sizes)}")
        return arena
    arena = np.empty(sum(sizes), dtype=np.float32)
    for spec, size in zip(averaged, sizes, strict=True):
        arena[spec.offset : spec.offset + size] = model.array(spec.name).reshape(-1)
    return arena


def _vector(path: Path, name: str) -> Arena:
    file = TensorFile.open(path)
    code, shape = (file.code(name), file.shape(name)) if name in file.entries else ("nothing", ())
    if code != "F32" or len(shape) != 1:
        raise TensorFileError(f"{name} in {path} is {code} {list(shape)}, not one f32 vector")
    return np.array(file.array(name), dtype="<f4")


def read_part(path: Path, part: int, part_bytes: int) -> tuple[int, bytes]:
    """(number of parts, the bytes of one) of a file. Raises ``OSError``."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        return max(1, -(-size // part_bytes)), os.pread(file.fileno(), part_bytes, part * part_bytes)


def sync_directory(path: Path) -> None:
    """Make names in a directory durable."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        shutil.copyfile(source, target, follow_symlinks=False)
        with target.open("rb") as file:
            os.fsync(file.fileno())


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    for piece in _pieces(path):
        digest.update(piece)
    return digest.hexdigest()


def _pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(_READ_BYTES):
            yield piece
