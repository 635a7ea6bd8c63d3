"""A model's averaged tensors as one flat f32 arena: layout, pack, adopt.

Parameters come first, then float buffers, each in state_dict order and each storage once, so that tied
weights count once. Every float dtype is up-cast to f32 on the way in and cast back on the way out. Buffers
are averaged with the mover mass: all ranks that worked count alike. Integer, bool and complex buffers stay on
their rank (``local``), as do buffers outside the state_dict, which nobody else sees. (Design section 6;
behaviour A6, G5, G7, M20 to M25.)
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite, prod, sqrt
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from wire.messages import TensorSpec
from worker.arena_file import ArenaError, ArenaFile
from worker.write_back import WriteBack

__all__ = ["AdoptResult", "Arena", "ArenaError", "model_layout"]

_CPU_NORM_STEP = 1 << 14
"""elements per step of a norm: in cache, short enough for f32 sums of squares, too short for torch to use threads"""
_DEVICE_NORM_STEP = 1 << 24


@dataclass(frozen=True, slots=True)
class AdoptResult:
    """How far the parameters moved: ``divergence`` is norm(before - after) / norm(after), over f32 values."""

    divergence: float
    pre_norm: float
    post_norm: float


class Arena:
    """One model's layout and a rank's mapped files: its contribution (``out``), the host's ``consensus``.

    Holds the model; call it from the thread that trains it, after the optimizer's step and on its CUDA
    stream, so that no half-written tensor is read (M20).
    """

    def __init__(self, model: nn.Module, layout: list[TensorSpec]) -> None:
        self.layout = layout
        self.layout_hash = layout_hash(layout)
        self.params_elements = _elements(layout, "params")
        self.buffers_elements = _elements(layout, "buffers")
        self._model = model
        self._out: Tensor | None = None
        self._consensus: Tensor | None = None
        self._consensus_path: Path | None = None
        self._snapshot: dict[str, Tensor] = {}

    @classmethod
    def for_model(cls, model: nn.Module) -> Arena:
        """Lay the model out. Raises ``ArenaError``, naming the tensor, for what cannot be averaged."""
        return cls(model, model_layout(model))

    @property
    def elements(self) -> int:
        """Length of both files in f32 elements: params, then buffers."""
        return self.params_elements + self.buffers_elements

    def create_out(self, path: Path) -> ArenaFile:
        """Make and map this rank's contribution file. Raises ``ArenaError``: it exists, or there is no room.

        The same model may be given a new file; the old one is then no longer written.
        """
        file = ArenaFile.create(path, self.elements)
        self._out = torch.from_numpy(file.values)
        return file

    def open_consensus(self, path: Path) -> None:
        """Name the file that the relay streams the consensus into; it is mapped at the first adoption."""
        self._consensus_path = path
        self._consensus = None

    @torch.no_grad()
    def pack(self, mass: float, mover_mass: float, *, keep: bool = False) -> None:
        """Write ``parameter * mass`` and ``buffer * mover_mass`` to ``out`` in f32; a zero mass writes nothing.

        ``keep`` remembers the parameters as they are now, for an ``adopt`` after more batches.

        Zero is declared in ``SnapshotReady``, never encoded: what an idle rank holds, NaN included, stays
        with it. Raises ``ArenaError`` before ``create_out``, and when a tensor has lost the layout's shape or
        dtype.
        """
        if self._out is None:
            raise ArenaError("there is no contribution file yet; call create_out first")
        masses = {"params": mass, "buffers": mover_mass}
        for spec, tensor in self._averaged():
            if masses[spec.section] > 0:
                _scale_into(_view(self._out, spec), tensor, masses[spec.section])
            if keep and spec.section == "params":
                self._remember(spec, tensor)

    @torch.no_grad()
    def adopt(self, *, params: bool = True, buffers: bool = True, ahead: WriteBack | None = None) -> AdoptResult:
        """Take the staged consensus into the model in place, and say how far what was packed lay from it.

        Without ``ahead`` it is copied. A rank that trained on since it packed (with ``keep``) says by ``ahead`` what
        becomes of that. A section that is not adopted keeps what it holds (a round without work). Raises
        ``ArenaError`` before ``open_consensus``, when the file does not fit the model, or when nothing was kept.
        """
        if ahead is not None and self.params_elements and not self._snapshot:
            raise ArenaError("no snapshot was kept; call pack with keep before training on")
        consensus = self._mapped_consensus() if params or buffers else None
        wanted = {"params": params, "buffers": buffers}
        norms = _Norms()
        for spec, tensor in self._averaged():
            after = None
            if consensus is not None and wanted[spec.section]:
                after = _view(consensus, spec).to(tensor.device)
            if spec.section == "params":
                packed = tensor if ahead is None else self._snapshot[spec.name]
                norms.add(packed, after)
                if ahead is not None and after is not None:
                    after = ahead.merge(tensor, packed, after)
            if after is not None:
                _copy_in_place(tensor, after)
        return norms.result()

    def tensors_hash(self) -> str:
        """blake2b-64 (hex) over all averaged tensors as f32, in arena order: equal where the consensus is the same."""
        digest = hashlib.blake2b(digest_size=8)
        for _, tensor in self._averaged():
            flat = tensor.to("cpu", torch.float32).contiguous().reshape(-1)
            digest.update(flat.numpy().data)
        return digest.hexdigest()

    def consensus_hash(self, *, params: bool, buffers: bool) -> str:
        """blake2b-64 (hex) over these sections of the staged consensus, empty without one: equal on all ranks that
        adopted the same, whatever each has done since."""
        if not (params or buffers):
            return ""
        consensus = self._mapped_consensus()
        start = 0 if params else self.params_elements
        stop = self.elements if buffers else self.params_elements
        return hashlib.blake2b(consensus[start:stop].numpy().data, digest_size=8).hexdigest()

    def local_state(self) -> dict[str, Tensor]:
        """CPU copies of the ``local`` tensors by name, aliases too: what a checkpoint adds to the rest."""
        tensors = _state_tensors(self._model)
        names = [spec.name for spec in self.layout if spec.section == "local"]
        return {name: tensors[name].detach().cpu().clone() for name in names}

    def _remember(self, spec: TensorSpec, tensor: Tensor) -> None:
        kept = self._snapshot.get(spec.name)
        if kept is None:
            self._snapshot[spec.name] = tensor.to(torch.float32, copy=True)
        else:
            kept.copy_(tensor)

    def _mapped_consensus(self) -> Tensor:
        if self._consensus_path is None:
            raise ArenaError("there is no consensus file yet; call open_consensus first")
        if self._consensus is None:  # writable only because torch warns about arrays that are not
            file = ArenaFile.open(self._consensus_path, self.elements, writable=True)
            self._consensus = torch.from_numpy(file.values)
        return self._consensus

    def _averaged(self) -> Iterator[tuple[TensorSpec, Tensor]]:
        """Averaged tensors in arena order, as the model holds them now: jobs may replace buffers."""
        tensors = _state_tensors(self._model)
        for spec in self.layout:
            if spec.section == "local":
                continue
            tensor = _still_fits(spec, tensors.get(spec.name))
            if not spec.alias_of:
                yield spec, tensor.detach()
            elif _geometry(tensor) != _geometry(tensors[spec.alias_of]):
                raise ArenaError(
                    f"{spec.name} no longer shares its storage with {spec.alias_of}; "
                    "tie tensors in build_model and change them in place"
                )


# ---------------------------------------------------------------------------------------------------- layout


def model_layout(model: nn.Module) -> list[TensorSpec]:
    """The model's tensors in arena order: params, buffers, local; each section in state_dict order.

    Offsets are in f32 elements from the arena's start. Raises ``ArenaError`` for parameters that are complex,
    sparse, not initialised yet, or on the meta device.
    """
    tensors = _state_tensors(model)
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    sections: dict[str, list[str]] = {"params": [], "buffers": [], "local": []}
    for name, tensor in tensors.items():
        sections[_section(name, tensor, is_parameter=name in parameters)].append(name)
    owners: dict[tuple[object, ...], str] = {}
    layout: list[TensorSpec] = []
    offset = 0
    for section, names in sections.items():
        for name in names:
            owner = owners.setdefault(_geometry(tensors[name]), name)
            spec = _spec(name, tensors[name], section, offset, "" if owner == name else owner)
            layout.append(spec)
            offset += prod(spec.shape) if spec.offset >= 0 else 0
    return layout


def layout_hash(layout: list[TensorSpec]) -> str:
    """sha256 (hex) over names, sections, dtypes, shapes and aliases, in order."""
    digest = hashlib.sha256()
    for spec in layout:
        fields = (spec.name, spec.section, spec.dtype, ",".join(map(str, spec.shape)), spec.alias_of)
        digest.update(("\x1f".join(fields) + "\n").encode())
    return digest.hexdigest()


def _state_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Each parameter and persistent buffer under each of its names; parameters first, both in state_dict order."""
    persistent = model.state_dict(keep_vars=True).keys()
    tensors: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    for name, buffer in model.named_buffers(remove_duplicate=False):
        if name in persistent:
            tensors[name] = buffer
    return tensors


def _section(name: str, tensor: Tensor, *, is_parameter: bool) -> str:
    if is_lazy(tensor):
        raise ArenaError(f"{name} is not initialised; run a batch through the model at the end of build_model")
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise ArenaError(f"{name} has layout {tensor.layout}; only dense tensors can be averaged")
    if tensor.is_meta:
        raise ArenaError(f"{name} is on the meta device; build the model on a real one")
    if is_parameter and tensor.is_complex():
        raise ArenaError(f"{name} is {tensor.dtype}; keep complex parameters as float pairs (torch.view_as_real)")
    if not tensor.is_floating_point():
        return "local"
    return "params" if is_parameter else "buffers"


def _spec(name: str, tensor: Tensor, section: str, offset: int, alias_of: str) -> TensorSpec:
    return TensorSpec(
        name=name,
        section=section,
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=list(tensor.shape),
        offset=-1 if section == "local" or alias_of else offset,
        alias_of=alias_of,
    )


def _geometry(tensor: Tensor) -> tuple[object, ...]:
    """What two names must share to be one tensor. Without elements there is no storage, only the object."""
    if tensor.numel() == 0:
        return (id(tensor),)
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())


def _elements(layout: list[TensorSpec], section: str) -> int:
    return sum(prod(spec.shape) for spec in layout if spec.section == section and spec.offset >= 0)


# ------------------------------------------------------------------------------------------------- one tensor


def _still_fits(spec: TensorSpec, tensor: Tensor | None) -> Tensor:
    if tensor is None:
        raise ArenaError(f"{spec.name} is gone from the model; its tensors must stay those of build_model")
    dtype = str(tensor.dtype).removeprefix("torch.")
    if list(tensor.shape) != spec.shape or dtype != spec.dtype:
        raise ArenaError(
            f"{spec.name} was {spec.dtype} {spec.shape} when training began and is {dtype} "
            f"{list(tensor.shape)} now; keep shape and dtype"
        )
    return tensor


def _view(arena: Tensor, spec: TensorSpec) -> Tensor:
    return arena[spec.offset : spec.offset + prod(spec.shape)].view(spec.shape)


def _scale_into(out: Tensor, tensor: Tensor, mass: float) -> None:
    if tensor.device.type == "cpu" and tensor.dtype == torch.float32:
        torch.mul(tensor, mass, out=out)
        return
    out.copy_(tensor)  # up-cast first: multiplying in half precision would round the work away
    out.mul_(mass)


def _copy_in_place(tensor: Tensor, source: Tensor) -> None:
    for dimension, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dimension] > 1:  # expanded: one element stands for all
            tensor, source = tensor.narrow(dimension, 0, 1), source.narrow(dimension, 0, 1)
    tensor.copy_(source)


class _Norms:
    """Sums of squares before, after and of the move; CUDA sums stay there, so that the host waits once, at the end."""

    def __init__(self) -> None:
        self._sums: dict[torch.device, list[float | Tensor]] = {}

    def add(self, before: Tensor, after: Tensor | None) -> None:
        """Count one tensor; without ``after`` it does not move."""
        sums = self._sums.setdefault(before.device, [0.0, 0.0, 0.0])
        old = before.to(torch.float32).reshape(-1)
        new = old if after is None else after.reshape(-1)
        step = _CPU_NORM_STEP if before.device.type == "cpu" else _DEVICE_NORM_STEP
        for start in range(0, old.numel(), step):
            a, b = old[start : start + step], new[start : start + step]
            pre = _square_sum(a)
            sums[0] += pre
            sums[1] += pre if after is None else _square_sum(b)
            sums[2] += 0.0 if after is None else _square_sum(a - b)

    def result(self) -> AdoptResult:
        """Norms over all that was added. From a consensus of zeros, the move is relative to what was before."""
        pre, post, moved = (sqrt(sum(float(sums[i]) for sums in self._sums.values())) for i in range(3))
        return AdoptResult(divergence=moved / (post or pre or 1.0), pre_norm=pre, post_norm=post)


def _square_sum(values: Tensor) -> float | Tensor:
    if values.device.type != "cpu":
        norm: Tensor = torch.linalg.vector_norm(values, dtype=torch.float64)
        return norm.square()
    length = float(torch.linalg.vector_norm(values))  # in f32: a hundred times faster than f64 on a CPU
    return length * length if isfinite(length) else float(values.double().square().sum())
