"""The controller's copies of the consensus: memory that processes of the same user on this machine can map, read-only.

A buffer is an anonymous memory file (memfd), so that there is no name that could be left behind, sealed against a
change of its length and, where the kernel can, against being mapped for writing by anybody else.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import weakref

import numpy as np

from wire import ranges
from wire.arithmetic import F32, FloatArray
from wire.ranges import Ranges

_SEAL_FUTURE_WRITE = 0x0010
"""Linux 5.1; Python's ``fcntl`` names it from 3.13 on"""


class Buffer:
    """An arena, the outer momentum behind it, and whether somebody outside holds either: then none is written again.

    The two are one state, committed and taken back together.
    """

    def __init__(self, elements: int, momentum_elements: int | None) -> None:
        """``momentum_elements`` None: without an outer optimizer. Raises ``OSError`` when there is no memory."""
        self.path = ""
        """where another process finds it while this one lives; empty where that can't be"""
        self.values = self._mapped(elements)
        """(elements,): params then buffers"""
        self.momentum: FloatArray | None = None
        """(params_elements,); None without an outer optimizer"""
        if momentum_elements is not None:
            self.momentum = np.zeros(momentum_elements, F32)
        self.momentum_zero: Ranges = ranges.normalized([(0, momentum_elements or 0)])
        """where the momentum is zero and was never written, of this consensus and of those before"""
        self.stale: Ranges = ranges.normalized([(0, elements)])
        """where it may differ from the consensus in force"""
        self.lent = False

    def lend(self, values: FloatArray) -> FloatArray:
        """A view of one of its arrays for somebody outside, who may keep it."""
        self.lent = True
        view = values.view()
        view.flags.writeable = False
        return view

    def _mapped(self, elements: int) -> FloatArray:
        size = elements * F32.itemsize
        if not size or not hasattr(os, "memfd_create"):
            return np.empty(elements, F32)
        try:
            descriptor = os.memfd_create("marchline consensus", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            weakref.finalize(self, os.close, descriptor)
            os.ftruncate(descriptor, size)
            memory = mmap.mmap(descriptor, size)
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            return np.empty(elements, F32)  # no file is left to be had: it is streamed, and the run goes on
        seal(descriptor)
        self.path = path_of(descriptor)
        return np.frombuffer(memory, F32)


class Proof:
    """A secret in memory that only this user's processes on this machine can open: who reads it back is one of them."""

    BYTES = 32

    def __init__(self) -> None:
        self.secret = os.urandom(self.BYTES)
        self.path = ""
        """empty where there is no such memory"""
        if hasattr(os, "memfd_create"):
            descriptor = os.memfd_create("marchline proof", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            weakref.finalize(self, os.close, descriptor)
            os.write(descriptor, self.secret)
            seal(descriptor)
            self.path = path_of(descriptor)


def seal(descriptor: int) -> None:
    """Nobody may change the file's length, or write to it but through a mapping that exists."""
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    try:
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEAL_FUTURE_WRITE)
    except OSError:
        return  # an older kernel: the peers are this user's, and open it for reading


def path_of(descriptor: int) -> str:
    """How another process of this user opens a file that this one holds."""
    return f"/proc/{os.getpid()}/fd/{descriptor}"
