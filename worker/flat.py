"""The averaged tensors of a model as one flat f32 vector where the model lives, for sums that never leave the device.

On the CPU the vector is the arena's file. On a GPU every tensor begins on a cache line, as its own allocation would:
kernels are slower on addresses that are not aligned. What can live in the vector does (``homing``); the rest, other
dtypes above all, is copied in before a sum and out after it is adopted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from wire.messages import TensorSpec
from worker.arena import Arena
from worker.arena_file import FloatArray
from worker.homing import at_home
from worker.layout import copy_in_place

_ALIGNED_ELEMENTS = 32
"""128 bytes"""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Elements that are neighbours both in the arena and in the vector."""

    arena: slice
    vector: slice


class FlatModel:
    """One model's ``vector``, (elements + gaps,) f32: parameters up to ``params``, then buffers; gaps hold 0."""

    def __init__(self, arena: Arena, device: torch.device) -> None:
        self.arena = arena
        self.device = device
        aligned = 1 if device.type == "cpu" else _ALIGNED_ELEMENTS
        owners = [spec for spec in arena.layout if spec.offset >= 0]
        self._starts, self.params, elements = _starts(owners, aligned)
        self._homes: list[Tensor] = []
        self._away: list[tuple[Tensor, Tensor]] = []
        self.stretches = list(_stretches(owners, self._starts))
        if device.type == "cpu":
            self.vector = torch.from_numpy(arena.values)
            self._slots = arena.slots
            return
        self.vector = torch.zeros(elements, dtype=torch.float32, device=device)
        self._slots = {spec.name: _own_storage(self._view(self.vector, spec)) for spec in owners}
        arena.live_on({spec.name: self._slots[spec.name] for spec in owners if prod(spec.shape)})

    @torch.no_grad()
    def gather(self) -> None:
        """Have the model's values in the vector; on a GPU, once its stream has come that far. Raises ``ArenaError``."""
        self._homes, self._away = [], []
        for spec, tensor in self.arena.tensors():
            slot = self._slots[spec.name]
            if at_home(tensor, slot):
                self._homes.append(tensor)
            else:
                self._away.append((tensor, slot))
                slot.copy_(tensor)

    @torch.no_grad()
    def scatter(self) -> None:
        """Have the vector's values in the tensors that were gathered last."""
        torch.autograd.graph.increment_version(self._homes)
        for tensor, slot in self._away:
            copy_in_place(tensor, slot)
        self._homes, self._away = [], []  # the job may drop them

    def fill(self, vector: Tensor, values: FloatArray) -> None:
        """Write values in arena order, (arena elements,), into a vector like this one."""
        for stretch in self.stretches:
            own = values[stretch.arena].copy()  # torch takes none that cannot be written
            vector[stretch.vector].copy_(torch.from_numpy(own))

    def in_arena_order(self, vector: Tensor) -> Tensor:
        """A copy on the CPU, (arena elements,), of a vector like this one."""
        found = torch.empty(self.arena.elements, dtype=torch.float32)
        for stretch in self.stretches:
            found[stretch.arena].copy_(vector[stretch.vector])
        return found

    def arena_element(self, element: int) -> int:
        """Where an element of the vector lies in the arena."""
        for stretch in self.stretches:
            if stretch.vector.start <= element < stretch.vector.stop:
                return int(stretch.arena.start + element - stretch.vector.start)
        raise ValueError(f"element {element} is in a gap")

    def _view(self, vector: Tensor, spec: TensorSpec) -> Tensor:
        start = self._starts[spec.name]
        return vector[start : start + prod(spec.shape)].view(spec.shape)


def _starts(owners: list[TensorSpec], aligned: int) -> tuple[dict[str, int], int, int]:
    """Where each tensor begins, where the parameters end, and where all ends."""
    starts: dict[str, int] = {}
    end = params = 0
    for spec in owners:
        starts[spec.name] = end
        end += -(-prod(spec.shape) // aligned) * aligned
        if spec.section == "params":
            params = end
    return starts, params, end


def _stretches(owners: list[TensorSpec], starts: dict[str, int]) -> Iterator[Stretch]:
    """Neighbours as one."""
    arena = vector = stop = 0
    for spec in owners:
        start, size = starts[spec.name], prod(spec.shape)
        if start - vector != spec.offset - arena:
            if stop > arena:
                yield Stretch(slice(arena, stop), slice(vector, vector + stop - arena))
            arena, vector = spec.offset, start
        stop = spec.offset + size
    if stop > arena:
        yield Stretch(slice(arena, stop), slice(vector, vector + stop - arena))


class _Memory:
    """A tensor's memory as others may map it; keeps the tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": tuple(tensor.shape),
            "typestr": "<f4",
            "data": (tensor.data_ptr(), False),
            "strides": None,
            "version": 3,
        }


def _own_storage(view: Tensor) -> Tensor:
    """The same memory under a storage of its own: whoever copies or saves one tensor must not get the whole vector."""
    if not view.numel():
        return view
    return torch.as_tensor(_Memory(view), device=view.device)
