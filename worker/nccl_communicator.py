"""Sessions over NCCL: sums on the GPU, on the training stream, polled from the training thread.

The stream orders a sum behind the optimizer's last step and before whatever reads its result (behaviour M20).
"""

from __future__ import annotations

from ctypes import c_void_p

import torch
from torch import Tensor

from worker import nccl
from worker.communicator import ABORT_SECONDS, Guard, SessionError, bounded
from worker.nccl import FLOAT32, INT64, Nccl

_TYPES = {torch.int64: INT64, torch.float32: FLOAT32}


class NcclLibrary:
    """Makes sessions for one CUDA device. ``interface`` is only for people here: NCCL reads NCCL_SOCKET_IFNAME."""

    def __init__(self, device: torch.device, interface: str = "") -> None:
        self.device = device
        self.interface = interface

    def make_id(self) -> bytes:
        """See ``Library``. The thread that NCCL starts for it ends once all ranks of the session came to it."""
        self._settle()
        return nccl.load().unique_id()

    def join(self, identity: bytes, place: int, size: int, guard: Guard) -> NcclCommunicator:
        """See ``Library``."""
        guard.check()
        self._settle()
        library = nccl.load()
        where = f" on {self.interface}" if self.interface else ""
        handle = library.begin(identity, place, size)
        made = NcclCommunicator(library, handle, self.device, guard, f"NCCL {library.version}{where}")
        try:
            made.settle("joining the session", guard.join_seconds)
            ones = torch.ones(1, dtype=torch.int64, device=self.device)
            made.sum(ones, "the first sum", guard.join_seconds)
            made.wait(guard.join_seconds)
            if ones.tolist() != [size]:
                raise SessionError("the first sum of the session is wrong; do all ranks run the same NCCL?")
        except BaseException:
            made.abort()
            raise
        return made

    def close(self) -> None:
        """See ``Library``."""

    def _settle(self) -> None:
        """NCCL takes the thread's current device."""
        torch.cuda.set_device(self.device)
        torch.cuda.init()  # type: ignore[no-untyped-call]


class NcclCommunicator:
    """See ``Communicator``."""

    def __init__(self, library: Nccl, handle: c_void_p, device: torch.device, guard: Guard, transport: str) -> None:
        self.transport = transport
        self._nccl = library
        self._handle: c_void_p | None = handle
        self._device = device
        self._guard = guard

    def sum(self, vector: Tensor, what: str, seconds: float | None = None) -> None:
        """See ``Communicator``."""
        self._guard.check()
        stream = torch.cuda.current_stream(self._device).cuda_stream
        self._nccl.all_reduce(self._live(), vector.data_ptr(), vector.numel(), _TYPES[vector.dtype], stream)
        self.settle(what, self._guard.collective_seconds if seconds is None else seconds)

    def wait(self, seconds: float | None = None) -> None:
        """See ``Communicator``."""
        handle, done = self._live(), torch.cuda.current_stream(self._device).record_event()

        def complete() -> bool:
            if done.query():
                return True
            self._nccl.in_progress(handle, "the sum")  # a peer that is gone is an error here
            return False

        self._guard.wait(complete, self._guard.collective_seconds if seconds is None else seconds, "the sum")

    def settle(self, what: str, seconds: float) -> None:
        """Wait until a call that did not block is through."""
        handle = self._live()
        self._guard.wait(lambda: not self._nccl.in_progress(handle, what), seconds, what)

    def abort(self) -> None:
        """See ``Communicator``. NCCL ends what runs on the device; then its stream goes on."""
        handle, self._handle = self._handle, None
        if handle is None or not handle.value:
            return
        stuck = f"NCCL did not give its communicator up within {ABORT_SECONDS:g} s; this rank's GPU may hang"
        bounded(lambda: self._nccl.abort(handle), ABORT_SECONDS, stuck)

    def _live(self) -> c_void_p:
        if self._handle is None:
            raise SessionError("the session was given up")
        return self._handle
