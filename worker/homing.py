"""Parameters that live in the arena: where nothing trains during a round, packing then costs nothing.

A tensor is moved into its slot, of the mapped file or of a flat vector on its GPU, if that can change nothing that user
code sees: plain f32 on the slot's device, contiguous, with a storage that nobody but its own tied names shares.
``tensor.data`` is replaced, so the objects that model and optimizer hold stay the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from worker.layout import geometry, state_tensors

_storage_users: Any = getattr(torch._C, "_storage_Use_Count", None)
"""how many tensors hold a storage, our look at it included; not in every torch"""


def move_home(model: nn.Module, homes: dict[str, Tensor]) -> None:
    """Move what can live in its home there; ``homes`` are f32 views of the arena, by owner's name, values included
    from here on."""
    tensors = state_tensors(model)
    everything = [*tensors.values(), *model.buffers()]  # those outside of the state_dict too
    for name, home in homes.items():
        owner = tensors[name]
        if not _movable(owner, home):
            continue
        sharers = _distinct(other for other in everything if _same_storage(other, owner))
        if any(not _movable(other, home) or geometry(other) != geometry(owner) for other in sharers):
            continue
        if _storage_users is not None and _storage_users(owner.untyped_storage()._cdata) > len(sharers) + 1:
            continue  # a view of it lies somewhere in the job
        home.copy_(owner.detach())
        for tensor in sharers:
            tensor.data = home


def at_home(tensor: Tensor, home: Tensor) -> bool:
    """Whether the tensor lives in its slot now: jobs may replace a storage at any time."""
    return (
        tensor.device == home.device
        and tensor.dtype == torch.float32
        and tensor.data_ptr() == home.data_ptr()
        and tensor.is_contiguous()
    )


def _movable(tensor: Tensor, home: Tensor) -> bool:
    return (
        type(tensor) in (Tensor, nn.Parameter)
        and tensor.device == home.device
        and tensor.dtype == torch.float32
        and tensor.layout == torch.strided
        and tensor.numel() > 0
        and tensor.is_contiguous()
        and tensor.is_leaf
        and not tensor.is_inference()
    )


def _same_storage(one: Tensor, other: Tensor) -> bool:
    if one.device != other.device or one.layout != torch.strided or one.numel() == 0:
        return False
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _distinct(tensors: Iterable[Tensor]) -> list[Tensor]:
    return list({id(tensor): tensor for tensor in tensors}.values())
