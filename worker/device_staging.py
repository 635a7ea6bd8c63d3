"""Values of a CUDA model on their way to the arena and back: one copy each way and window (behaviour M20 to M22).

The model is gathered into one flat f32 buffer on the device, which crosses to pinned memory in one asynchronous copy.
The way back runs on a stream of its own, fenced by events on both sides, and is over before the next step is timed.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from worker.layout import copy_in_place
from worker.write_back import WriteBack


@dataclass(frozen=True, slots=True)
class Resident:
    """A tensor on the device and its elements in the arena."""

    start: int
    stop: int
    tensor: Tensor
    merged: bool
    """a parameter, which write-back policies are about"""


class DeviceStaging:
    """One device's buffers beside the arena ``host``, (n,) f32. ``overlap`` keeps what was packed as the snapshot."""

    def __init__(self, host: Tensor, device: torch.device, *, overlap: bool) -> None:
        self._arena = host
        self._pinned = host if register(self, host) else torch.empty_like(host, pin_memory=True)
        self._packed = torch.empty(host.numel(), dtype=torch.float32, device=device)
        self._incoming = torch.empty_like(self._packed) if overlap else self._packed
        self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._device = device

    def gather(self, residents: Sequence[Resident]) -> None:
        """Copy these tensors' values into the arena, as the training stream leaves them."""
        for one in residents:
            self._packed[one.start : one.stop].view(one.tensor.shape).copy_(one.tensor)
        spans = _spans(residents)
        for span in spans:
            self._pinned[span].copy_(self._packed[span], non_blocking=True)
        torch.cuda.current_stream(self._device).synchronize()
        if self._pinned is not self._arena:
            for span in spans:
                self._arena[span].copy_(self._pinned[span])

    def scatter(self, residents: Sequence[Resident], ahead: WriteBack | None) -> None:
        """Write the arena's values into these tensors; ``ahead`` merges into the parameters what the rank did since
        ``gather``. On return the device is done."""
        spans = _spans(residents)
        if self._pinned is not self._arena:
            for span in spans:
                self._pinned[span].copy_(self._arena[span])
        training = torch.cuda.current_stream(self._device)
        self._side.wait_stream(training)  # M20: the optimizer's last step is in flight
        with torch.cuda.stream(self._side):
            for span in spans:
                self._incoming[span].copy_(self._pinned[span], non_blocking=True)
            for one in residents:
                self._write(one, ahead if one.merged else None)
            done = self._side.record_event()
        training.wait_event(done)
        done.synchronize()  # M21: the next batch is timed from here

    def _write(self, one: Resident, ahead: WriteBack | None) -> None:
        after = self._incoming[one.start : one.stop].view(one.tensor.shape)
        if ahead is not None:
            now = one.tensor.to(torch.float32, copy=True)
            ahead.merge(now, self._packed[one.start : one.stop].view(one.tensor.shape), after)
            after = now
        copy_in_place(one.tensor, after)


def _spans(residents: Sequence[Resident]) -> list[slice]:
    """Neighbours as one: a model that is on the device as a whole crosses in one copy."""
    spans: list[slice] = []
    for one in residents:
        if spans and spans[-1].stop == one.start:
            spans[-1] = slice(spans[-1].start, one.stop)
        else:
            spans.append(slice(one.start, one.stop))
    return spans


def register(owner: DeviceStaging, host: Tensor) -> bool:
    """Have the driver pin the arena's own memory for as long as ``owner`` lives; false where that does not work."""
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    answer = runtime.cudaHostRegister(host.data_ptr(), host.numel() * host.element_size(), 0)
    if answer != runtime.cudaError.success:
        with contextlib.suppress(RuntimeError):  # the driver keeps the error for the next launch; let it be this one
            torch.zeros(1, device="cuda")
        return False
    weakref.finalize(owner, runtime.cudaHostUnregister, host.data_ptr())
    return host.is_pinned()
