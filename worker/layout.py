"""A model's tensors as a layout: which are averaged, where in the arena each lies, which share a storage.

Parameters come first, then float buffers, each in state_dict order and each storage once, so that tied weights count
once. Integer, bool and complex buffers stay on their rank (``local``), as do buffers outside the state_dict, which
nobody else sees. (Design section 6; behaviour A6, G5.)
"""

from __future__ import annotations

import hashlib
from math import prod

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from wire.messages import TensorSpec
from worker.arena_file import ArenaError


def model_layout(model: nn.Module) -> list[TensorSpec]:
    """The model's tensors in arena order: params, buffers, local; each section in state_dict order.

    Offsets are in f32 elements from the arena's start. Raises ``ArenaError`` for parameters that are complex,
    sparse, not initialised yet, or on the meta device.
    """
    tensors = state_tensors(model)
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    sections: dict[str, list[str]] = {"params": [], "buffers": [], "local": []}
    for name, tensor in tensors.items():
        sections[_section(name, tensor, is_parameter=name in parameters)].append(name)
    owners: dict[tuple[object, ...], str] = {}
    layout: list[TensorSpec] = []
    offset = 0
    for section, names in sections.items():
        for name in names:
            owner = owners.setdefault(geometry(tensors[name]), name)
            spec = _spec(name, tensors[name], section, offset, "" if owner == name else owner)
            layout.append(spec)
            offset += prod(spec.shape) if spec.offset >= 0 else 0
    return layout


def layout_hash(layout: list[TensorSpec]) -> str:
    """sha256 (hex) over names, sections, dtypes, shapes and aliases, in order; what is frozen may differ."""
    digest = hashlib.sha256()
    for spec in layout:
        fields = (spec.name, spec.section, spec.dtype, ",".join(map(str, spec.shape)), spec.alias_of)
        digest.update(("\x1f".join(fields) + "\n").encode())
    return digest.hexdigest()


def state_tensors(model: nn.Module) -> dict[str, Tensor]:
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
        frozen=section == "params" and not tensor.requires_grad,
    )


def geometry(tensor: Tensor) -> tuple[object, ...]:
    """What two names must share to be one tensor. Without elements there is no storage, only the object."""
    if tensor.numel() == 0:
        return (id(tensor),)
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())


def elements_of(layout: list[TensorSpec], section: str) -> int:
    return sum(prod(spec.shape) for spec in layout if spec.section == section and spec.offset >= 0)


def copy_in_place(tensor: Tensor, source: Tensor) -> None:
    """``tensor.copy_(source)``, also where one element of an expanded tensor stands for many."""
    for dimension, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dimension] > 1:
            tensor, source = tensor.narrow(dimension, 0, 1), source.narrow(dimension, 0, 1)
    tensor.copy_(source)
