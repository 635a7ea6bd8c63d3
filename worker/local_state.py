"""What only this rank holds, as one safetensors body: optimizer, random generators, tensors outside the arena.

Tensors are tensors; everything else is a tree of plain values in the header (decision 0016). Nothing is ever unpickled.
"""

from __future__ import annotations

import json
import math
import random
import struct
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wire.errands import PART_BYTES
from worker.trainer import Trainer

FORMAT = 1
MODEL, GENERATOR, CONSENSUS = "model.", "rng.", "consensus"
_CODES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8",
    torch.bool: "BOOL", torch.complex64: "C64",
}  # fmt: skip
_DTYPES = {code: dtype for dtype, code in _CODES.items()}


class StateError(Exception):
    """A state that cannot be saved, or taken up; the text names what of it."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A body, ready to be cut: the header, and tensors on the CPU that nobody else changes."""

    header: bytes
    tensors: list[Tensor]

    @property
    def size(self) -> int:
        """Length of the body in bytes."""
        return len(self.header) + sum(tensor.nbytes for tensor in self.tensors)

    @property
    def parts(self) -> int:
        """How many pieces ``cut`` gives."""
        return -(-self.size // PART_BYTES)

    def cut(self) -> Iterator[bytes]:
        """The body in pieces of ``PART_BYTES``, the last one shorter."""
        waiting = bytearray()
        for source in (memoryview(self.header), *map(_raw, self.tensors)):
            for start in range(0, source.nbytes, PART_BYTES):
                waiting += source[start : start + PART_BYTES]
                if len(waiting) >= PART_BYTES:
                    yield bytes(waiting[:PART_BYTES])
                    del waiting[:PART_BYTES]
        if waiting:
            yield bytes(waiting)


def capture(trainer: Trainer, local: Mapping[str, Tensor], consensus: Tensor | None = None) -> tuple[Snapshot, str]:
    """The state as it is now, copied, and what of it cannot be saved (empty when all can). ``local`` are the model's
    tensors outside the arena; ``consensus`` is added for a controller that holds none. Call it from the thread that
    trains."""
    tensors = {MODEL + name: tensor for name, tensor in local.items()} | _generator_tensors(trainer.device)
    if consensus is not None:
        tensors[CONSENSUS] = consensus
    tree: dict[str, Any] = {
        "format": FORMAT,
        "params": asdict(trainer.job.params),
        "generators": _packed({"python": random.getstate(), "numpy": _numpy_state()}, {}),
        "scaler": trainer.precision.state(),
        "optimizer": None,
    }
    error, optimizer = "", trainer.optimizer
    held: dict[str, Tensor] = {}
    try:
        state = _packed(optimizer.state_dict(), held)
        tree["optimizer"] = {"kind": _kind(optimizer), "shapes": _shapes(optimizer), "state": state}
        tensors |= held
    except StateError as unsaveable:
        error = f"the optimizer's state: {unsaveable}"
    return _snapshot(tree, tensors), error


def restore(body: bytearray, trainer: Trainer, *, own: bool) -> list[str]:
    """Take up a saved state, another rank's unless ``own``: then generators stay as they are. Answers what could not be
    taken up, one sentence each; nothing of that part is changed."""
    try:
        tree, tensors = _read(body)
    except (ValueError, KeyError, TypeError, struct.error) as error:
        return [f"its saved state cannot be read ({error}), so it begins anew"]
    notes = [*_restore_local(tensors, trainer), *_restore_optimizer(tree, tensors, trainer)]
    if note := trainer.precision.restore(tree.get("scaler")):
        notes.append(note)
    if own:
        notes += _restore_generators(tree, tensors, trainer.device)
    return notes


# ------------------------------------------------------------------------------------------------ taking it up


@torch.no_grad()
def _restore_local(tensors: Mapping[str, Tensor], trainer: Trainer) -> Iterator[str]:
    model = trainer.model.state_dict(keep_vars=True)
    for name, saved in tensors.items():
        target = model.get(name.removeprefix(MODEL))
        if not name.startswith(MODEL):
            continue
        if target is None or target.shape != saved.shape or target.dtype != saved.dtype:
            yield f"the model has no tensor {name.removeprefix(MODEL)} like the saved one"
        else:
            target.copy_(saved)


def _restore_optimizer(tree: Mapping[str, Any], tensors: Mapping[str, Tensor], trainer: Trainer) -> Iterator[str]:
    saved, optimizer = tree.get("optimizer"), trainer.optimizer
    if saved is None:
        yield "no optimizer state was saved, so the optimizer begins anew"
        return
    if saved["kind"] != _kind(optimizer) or saved["shapes"] != _shapes(optimizer):
        yield f"the job's optimizer ({_kind(optimizer)}) is not the saved one ({saved['kind']}), so it begins anew"
        return
    built = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    optimizer.load_state_dict(_unpacked(saved["state"], tensors))
    if trainer.scheduler is not None or tree.get("params") != asdict(trainer.job.params):
        # Rates come from the job as it is now: its schedule is wound on to the cohort's step before the first batch.
        for group, fresh in zip(optimizer.param_groups, built, strict=True):
            group.update(fresh)


def _restore_generators(tree: Mapping[str, Any], tensors: Mapping[str, Tensor], device: torch.device) -> Iterator[str]:
    state = _unpacked(tree["generators"], {})
    random.setstate(state["python"])
    kind, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, gauss))
    torch.set_rng_state(tensors[GENERATOR + "torch"])
    if device.type == "cuda":
        if GENERATOR + "cuda" in tensors:
            torch.cuda.set_rng_state(tensors[GENERATOR + "cuda"], device)
        else:
            yield "its state was saved on a CPU, so the GPU's generator begins anew"


# ------------------------------------------------------------------------------------------------ parts of it


def _generator_tensors(device: torch.device) -> dict[str, Tensor]:
    found = {GENERATOR + "torch": torch.get_rng_state()}
    if device.type == "cuda":
        found[GENERATOR + "cuda"] = torch.cuda.get_rng_state(device)
    return found


def _numpy_state() -> tuple[Any, ...]:
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    return kind, [int(key) for key in keys], position, has_gauss, gauss


def _kind(optimizer: torch.optim.Optimizer) -> str:
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


def _shapes(optimizer: torch.optim.Optimizer) -> list[list[list[int]]]:
    return [[list(parameter.shape) for parameter in group["params"]] for group in optimizer.param_groups]


def _packed(value: Any, tensors: dict[str, Tensor]) -> Any:
    """A value in JSON's terms; its tensors go to ``tensors``, as copies on the CPU. Raises ``StateError``."""
    match value:
        case Tensor():
            if value.layout is not torch.strided or value.is_quantized or value.dtype not in _CODES:
                raise StateError(f"a tensor of {value.dtype} and {value.layout} cannot be saved")
            name = f"optimizer.{len(tensors)}"
            tensors[name] = value.detach().to("cpu", copy=True)
            return {"tensor": name}
        case Mapping():
            return {"dict": [[_packed(key, tensors), _packed(item, tensors)] for key, item in value.items()]}
        case tuple():
            return {"tuple": [_packed(item, tensors) for item in value]}
        case list():
            return {"list": [_packed(item, tensors) for item in value]}
        case None | bool() | int() | float() | str():
            return value
    raise StateError(f"it holds a {type(value).__name__}")


def _unpacked(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    match value:
        case {"tensor": name}:
            return tensors[name].clone()
        case {"dict": items}:
            return {_unpacked(key, tensors): _unpacked(item, tensors) for key, item in items}
        case {"tuple": items}:
            return tuple(_unpacked(item, tensors) for item in items)
        case {"list": items}:
            return [_unpacked(item, tensors) for item in items]
    return value


def _snapshot(tree: dict[str, Any], tensors: Mapping[str, Tensor]) -> Snapshot:
    # Wide types first, so that every tensor starts at a multiple of its own size.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    header: dict[str, Any] = {"__metadata__": {"format": "pt", "state": json.dumps(tree)}}
    start, flat = 0, []
    for name, tensor in ordered:
        end = start + tensor.nbytes
        header[name] = {"dtype": _CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
        flat.append(tensor.contiguous())
        start = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return Snapshot(struct.pack("<Q", len(text)) + text, flat)


def _raw(tensor: Tensor) -> memoryview:
    if not tensor.nbytes:
        return memoryview(b"")
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy().data)


def _read(body: bytearray) -> tuple[dict[str, Any], dict[str, Tensor]]:
    (length,) = struct.unpack_from("<Q", body)
    header = json.loads(bytes(body[8 : 8 + length]))
    tree = json.loads(header.pop("__metadata__")["state"])
    if tree["format"] != FORMAT:
        raise ValueError(f"its format is {tree['format']}, this release reads {FORMAT}")
    tensors = {}
    for name, spec in header.items():
        dtype, shape, start = _DTYPES[spec["dtype"]], spec["shape"], 8 + length + spec["data_offsets"][0]
        count = math.prod(shape)
        flat = torch.frombuffer(body, dtype=dtype, count=count, offset=start) if count else torch.empty(0, dtype=dtype)
        tensors[name] = flat.reshape(shape)
    return tree, tensors
