"""A model's averaged tensors as one flat f32 arena in a file that the host's relay maps: pack, adopt.

A rank's file holds its plain values (decision 0014). Where nothing trains during a round, f32 tensors on the CPU live
in the file (``homing``), and packing them costs nothing; everything else is copied into its slot when the round asks.
Every float dtype is up-cast to f32 on the way in and cast back on the way out. Buffers are averaged with the mover
mass: all ranks that worked count alike. (Design section 6; behaviour A6, G5, G7, M20 to M25.)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from wire import ranges
from wire.messages import TensorSpec
from wire.ranges import Ranges
from worker.adoption import Adoption, AdoptResult, Run, same_bits, unmoved
from worker.arena_file import ArenaError, ArenaFile, ConsensusFiles, FloatArray
from worker.device_staging import DeviceStaging, Resident
from worker.homing import at_home, move_home
from worker.layout import copy_in_place, elements_of, geometry, layout_hash, model_layout, state_tensors
from worker.write_back import WriteBack

__all__ = ["AdoptResult", "Arena", "ArenaError", "model_layout"]


@dataclass(frozen=True, slots=True)
class _Place:
    """One averaged tensor as the model holds it now, and its slot: a view of the arena in the tensor's shape."""

    spec: TensorSpec
    tensor: Tensor
    slot: Tensor
    needs_grad: bool

    @property
    def start(self) -> int:
        return self.spec.offset

    @property
    def stop(self) -> int:
        return self.spec.offset + self.slot.numel()

    @property
    def is_param(self) -> bool:
        return self.spec.section == "params"

    @property
    def at_home(self) -> bool:
        return at_home(self.tensor, self.slot)

    @property
    def on_device(self) -> bool:
        return self.tensor.device.type != "cpu"

    def flat(self) -> FloatArray | None:
        """The tensor's own memory as (n,) f32, if it is that."""
        tensor = self.tensor
        if self.on_device or tensor.dtype != torch.float32 or not tensor.is_contiguous():
            return None
        array: FloatArray = tensor.view(-1).numpy()
        return array


class Arena:
    """One model's layout, its rank's mapped file, and the consensus that was adopted last.

    ``overlap``: the rank trains on while a round is open, so its values are copied, and the copy is the snapshot that
    write-back policies refer to. Holds the model; call it from the thread that trains it, after the optimizer's step
    and on its CUDA stream, so that no half-written tensor is read (M20).
    """

    def __init__(self, model: nn.Module, layout: list[TensorSpec], *, overlap: bool = False) -> None:
        self.layout = layout
        self.layout_hash = layout_hash(layout)
        self.params_elements = elements_of(layout, "params")
        self.buffers_elements = elements_of(layout, "buffers")
        self._model = model
        self._overlap = overlap
        self._packed = False
        self._values: FloatArray | None = None
        self._slots: dict[str, Tensor] = {}
        self._staging: DeviceStaging | None = None
        self._files = ConsensusFiles(self.elements)
        self._base: FloatArray | None = None
        self._looking: Adoption | None = None

    @classmethod
    def for_model(cls, model: nn.Module, *, overlap: bool = False) -> Arena:
        """Lay the model out. Raises ``ArenaError``, naming the tensor, for what cannot be averaged."""
        return cls(model, model_layout(model), overlap=overlap)

    @property
    def elements(self) -> int:
        """Length of every arena of the cohort in f32 elements: params, then buffers."""
        return self.params_elements + self.buffers_elements

    @torch.no_grad()
    def create_out(self, path: Path) -> ArenaFile:
        """Make and map this rank's file, and move in what can live there. Raises ``ArenaError``: it exists, or there
        is no room.

        The same model may be given a new file; the old one is then no longer written.
        """
        file = ArenaFile.create(path, self.elements)
        self._values = file.values
        # A storage for each slot: whoever copies or saves one tensor must not get the whole arena.
        owners = [spec for spec in self.layout if spec.offset >= 0]
        self._slots = {spec.name: torch.from_numpy(_part(file.values, spec)).view(spec.shape) for spec in owners}
        self._staging = None
        self._base, self._packed = None, False
        if not self._overlap:
            move_home(self._model, self._slots)
        return file

    @torch.no_grad()
    def pack(self) -> Ranges:
        """Have the values in the file, and leave them until the round is over.

        Returns the elements that are known to equal the last consensus to the bit: parameters that need no gradient
        and were compared. Raises ``ArenaError`` before ``create_out``, and when a tensor has lost the layout's shape
        or dtype.
        """
        places = list(self._places())
        away = [place for place in places if not place.at_home]
        for place in away:
            if (flat := place.flat()) is not None:  # numpy copies in this thread; torch's would wait for each other
                np.copyto(self._mapped()[place.start : place.stop], flat)
            elif not place.on_device:
                place.slot.copy_(place.tensor)
        if residents := _residents(away):
            self._device(residents).gather(residents)
        self._packed = True
        return self._still(places)

    def look_ahead(self, consensus: str | Path, stop: int, *, fresh: bool, hashed: bool = True) -> None:
        """Hash and measure the parameters of a consensus that is in this file up to ``stop``, before it is committed.

        ``adopt`` goes on from there when it is told so. ``fresh`` begins anew. Raises ``ArenaError`` before
        ``create_out``, and when the file does not fit the model.
        """
        if fresh or self._looking is None:
            self._looking = Adoption(self._mapped(), self._files.read(str(consensus)), hashed=hashed)
        self._looking.look(min(stop, self.params_elements))

    @torch.no_grad()
    def adopt(
        self,
        consensus: str | Path = "",
        *,
        params: bool = True,
        buffers: bool = True,
        ahead: WriteBack | None = None,
        hashed: bool = True,
        looked: bool = False,
    ) -> AdoptResult:
        """Take the consensus in this file into the model in place, and say how far what was packed lay from it.

        A rank that trained on since it packed says by ``ahead`` what becomes of that. A section that is not adopted
        keeps what it holds; without any (a round without work) no file is read. Without a file, it is the one that was
        adopted last. ``looked``: it is the one that ``look_ahead`` saw. Raises ``ArenaError`` before ``create_out``,
        when the file does not fit the model, when there is none, or for ``ahead`` without a snapshot.
        """
        if ahead is not None and not (self._overlap and self._packed):
            raise ArenaError("there is no snapshot; pack in a mode that overlaps before training on")
        values = self._mapped()
        if not (params or buffers):
            return unmoved(values[: self.params_elements])
        agreed = self._files.read(str(consensus)) if consensus else self._base
        if agreed is None:
            raise ArenaError("there is no consensus that could be taken again; none was adopted yet")
        places = [place for place in self._places() if (params if place.is_param else buffers)]
        if not params:
            before = unmoved(values[: self.params_elements])
        looking, self._looking = self._looking, None
        adoption = looking if looked and params and looking is not None else Adoption(values, agreed, hashed=hashed)
        of_params, of_buffers = _split(places)
        adoption.take(self._runs(of_params, ahead), measured=True, ahead=ahead)
        adoption.take(self._runs(of_buffers, None), measured=False, ahead=None)
        self._write(places, agreed, ahead)
        self._base = agreed
        result = adoption.result()
        if params:
            return result
        return AdoptResult(0.0, before.pre_norm, before.post_norm, result.consensus_hash)

    @torch.no_grad()
    def rewind(self) -> str:
        """Take the consensus that was adopted last again, whatever was trained since. Returns its XXH3-64 (hex).

        Raises ``ArenaError`` when none was adopted yet.
        """
        agreed = self._base
        if agreed is None:
            raise ArenaError("no consensus was adopted yet, so there is none to go back to")
        places = list(self._places())
        adoption = Adoption(self._mapped(), agreed, hashed=True)
        for section in _split(places):
            adoption.take(self._runs(section, None), measured=False, ahead=None)
        self._write(places, agreed, None)
        self._packed, self._looking = False, None
        return adoption.result().consensus_hash

    @property
    def values(self) -> FloatArray:
        """This rank's mapped file, (elements,). Raises ``ArenaError`` before ``create_out``."""
        return self._mapped()

    @property
    def consensus(self) -> FloatArray:
        """What was adopted last, (elements,), not writable. Raises ``ArenaError`` when nothing was."""
        if self._base is None:
            raise ArenaError("no consensus was adopted yet")
        return self._base

    @property
    def slots(self) -> dict[str, Tensor]:
        """Views of the file, in their tensors' shapes, by owner's name."""
        return self._slots

    def tensors(self) -> Iterator[tuple[TensorSpec, Tensor]]:
        """The averaged tensors in arena order as the model holds them now, each storage once. Raises ``ArenaError``."""
        return ((place.spec, place.tensor) for place in self._places())

    def live_on(self, homes: dict[str, Tensor]) -> None:
        """Move what can live in these homes there, by owner's name; the file is a copy from here on."""
        self._staging = None
        move_home(self._model, homes)

    def unstage(self) -> None:
        """Free the buffers on the device: no round takes its way over the file any more."""
        self._staging = None

    def local_state(self) -> dict[str, Tensor]:
        """CPU copies of the ``local`` tensors by name, aliases too: what a checkpoint adds to the rest."""
        tensors = state_tensors(self._model)
        names = [spec.name for spec in self.layout if spec.section == "local"]
        return {name: tensors[name].detach().cpu().clone() for name in names}

    # -------------------------------------------------------------------------------------------- the consensus

    def _runs(self, places: Sequence[_Place], ahead: WriteBack | None) -> Iterator[Run]:
        """Where the pass writes each stretch; neighbours that live in the arena are one."""
        values = self._mapped()
        start = stop = -1
        for place in places:
            if place.at_home or place.on_device:  # a device's values go by way of the arena
                if place.start != stop:
                    if start < stop:
                        yield Run(start, stop, values[start:stop])
                    start = place.start
                stop = place.stop
                continue
            if start < stop:
                yield Run(start, stop, values[start:stop])
            start = stop = -1
            yield Run(place.start, place.stop, place.flat(), own=True)
        if start < stop:
            yield Run(start, stop, values[start:stop])

    def _write(self, places: Sequence[_Place], agreed: FloatArray, ahead: WriteBack | None) -> None:
        """Write what the pass could not, and tell autograd of what it did."""
        for place in places:
            if place.on_device:
                continue
            if place.at_home or place.flat() is not None:
                torch.autograd.graph.increment_version(place.tensor)
                continue
            after = torch.from_numpy(agreed[place.start : place.stop].copy()).view(place.slot.shape)
            if ahead is not None and place.is_param:
                now = place.tensor.to(torch.float32, copy=True)
                ahead.merge(now, place.slot, after)
                after = now
            copy_in_place(place.tensor, after)
        if residents := _residents(places):
            self._device(residents).scatter(residents, ahead)

    def _still(self, places: Iterable[_Place]) -> Ranges:
        if self._base is None:
            return []
        base, values = self._base, self._mapped()
        frozen = [(place.start, place.stop) for place in places if place.is_param and not place.needs_grad]
        return ranges.normalized(
            (start, stop) for start, stop in frozen if same_bits(values[start:stop], base[start:stop])
        )

    # ------------------------------------------------------------------------------------------------ the model

    def _mapped(self) -> FloatArray:
        if self._values is None:
            raise ArenaError("there is no contribution file yet; call create_out first")
        return self._values

    def _places(self) -> Iterator[_Place]:
        """Averaged tensors in arena order, as the model holds them now: jobs may replace buffers."""
        self._mapped()
        tensors = state_tensors(self._model)
        learning = {spec.alias_of or spec.name for spec in self.layout if _learns(tensors.get(spec.name))}
        for spec in self.layout:
            if spec.section == "local":
                continue
            tensor = _fitting(spec, tensors.get(spec.name))
            if not spec.alias_of:
                yield _Place(spec, tensor.detach(), self._slots[spec.name], spec.name in learning)
            elif geometry(tensor) != geometry(tensors[spec.alias_of]):
                raise ArenaError(
                    f"{spec.name} no longer shares its storage with {spec.alias_of}; "
                    "tie tensors in build_model and change them in place"
                )

    def _device(self, residents: Sequence[Resident]) -> DeviceStaging:
        if self._staging is None:
            device, host = residents[0].tensor.device, torch.from_numpy(self._mapped())
            self._staging = DeviceStaging(host, device, overlap=self._overlap)
        return self._staging


def _residents(places: Iterable[_Place]) -> list[Resident]:
    return [
        Resident(place.start, place.stop, place.tensor, place.is_param)
        for place in places
        if place.on_device and place.start < place.stop
    ]


def _split(places: Iterable[_Place]) -> tuple[list[_Place], list[_Place]]:
    sections: tuple[list[_Place], list[_Place]] = ([], [])
    for place in places:
        sections[0 if place.is_param else 1].append(place)
    return sections


def _part(values: FloatArray, spec: TensorSpec) -> FloatArray:
    return values[spec.offset : spec.offset + prod(spec.shape)]


def _learns(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.requires_grad


def _fitting(spec: TensorSpec, tensor: Tensor | None) -> Tensor:
    if tensor is None:
        raise ArenaError(f"{spec.name} is gone from the model; its tensors must stay those of build_model")
    dtype = str(tensor.dtype).removeprefix("torch.")
    if list(tensor.shape) != spec.shape or dtype != spec.dtype:
        raise ArenaError(
            f"{spec.name} was {spec.dtype} {spec.shape} when training began and is {dtype} "
            f"{list(tensor.shape)} now; keep shape and dtype"
        )
    return tensor
