"""NCCL's C interface, as far as sessions need it, on the library that torch has loaded; RCCL has the same.

torch's own wrapper is not used: its abort hangs when a peer is dead (decision 0019). Communicators are made without
blocking, so that every wait is ours. (nccl.h of NCCL 2.14 and later.)
"""

from __future__ import annotations

import ctypes
import functools
import re
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_void_p
from pathlib import Path
from typing import Any

from worker.communicator import SessionError

SUCCESS, IN_PROGRESS = 0, 7
INT64, FLOAT32 = 4, 7
ID_BYTES = 128
_SUM = 0
_MAGIC, _CONFIG_VERSION = 0xCAFEBEEF, 21400
_UNSET = -(2**31)
_LOADED = re.compile(r"\s(/\S*lib[nr]ccl\.so\S*)$", re.MULTILINE)


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_uint8 * ID_BYTES),)


class _Config(ctypes.Structure):
    """As of 2.14; the library fills in what came later, by ``size`` and ``version``."""

    _fields_ = (
        ("size", c_size_t),
        ("magic", c_uint),
        ("version", c_uint),
        ("blocking", c_int),
        ("cga_cluster_size", c_int),  # 2.17, where 2.14 has padding
    )


_ARGUMENTS: dict[str, list[Any]] = {
    "ncclGetVersion": [POINTER(c_int)],
    "ncclGetUniqueId": [POINTER(_UniqueId)],
    "ncclCommInitRankConfig": [POINTER(c_void_p), c_int, _UniqueId, c_int, POINTER(_Config)],
    "ncclCommGetAsyncError": [c_void_p, POINTER(c_int)],
    "ncclAllReduce": [c_void_p, c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p],
    "ncclCommAbort": [c_void_p],
}


class Nccl:
    """The library's calls. Results other than success and in progress raise ``SessionError``."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        for name, arguments in _ARGUMENTS.items():
            call = getattr(library, name)
            call.argtypes, call.restype = arguments, c_int
        library.ncclGetErrorString.argtypes, library.ncclGetErrorString.restype = [c_int], c_char_p
        library.ncclGetLastError.argtypes, library.ncclGetLastError.restype = [c_void_p], c_char_p
        code = c_int()
        self._call("ncclGetVersion", byref(code))
        self.version = f"{code.value // 10000}.{code.value % 10000 // 100}.{code.value % 100}"

    def unique_id(self) -> bytes:
        """A new session's identity; a thread of the library waits for its ranks from now on."""
        identity = _UniqueId()
        self._call("ncclGetUniqueId", byref(identity))
        return bytes(identity.internal)

    def begin(self, identity: bytes, place: int, size: int) -> c_void_p:
        """Begin to join; the communicator is to be used, or given up, only once ``in_progress`` ends."""
        if len(identity) != ID_BYTES:
            raise SessionError(f"an identity of {len(identity)} bytes is none of NCCL's; do all ranks use NCCL?")
        config = _Config(ctypes.sizeof(_Config), _MAGIC, _CONFIG_VERSION, 0, _UNSET)
        handle = c_void_p()
        unique = _UniqueId.from_buffer_copy(identity)
        self._call("ncclCommInitRankConfig", byref(handle), size, unique, place, byref(config), handle=handle)
        return handle

    def in_progress(self, handle: c_void_p, what: str) -> bool:
        """Whether the communicator is still busy with a call that did not block."""
        state = c_int()
        self._call("ncclCommGetAsyncError", handle, byref(state), handle=handle)
        self._check(what, state.value, handle)
        return state.value == IN_PROGRESS

    def all_reduce(self, handle: c_void_p, address: int, elements: int, datatype: int, stream: int) -> None:
        """Enqueue a sum in place on a CUDA stream; the enqueueing may go on until ``in_progress`` ends."""
        self._call("ncclAllReduce", address, address, elements, datatype, _SUM, handle, stream, handle=handle)

    def abort(self, handle: c_void_p) -> None:
        """Give a communicator up; it is freed. Its errors do not matter any more."""
        self._library.ncclCommAbort(handle)

    def _call(self, name: str, *arguments: Any, handle: c_void_p | None = None) -> None:
        self._check(name, getattr(self._library, name)(*arguments), handle)

    def _check(self, what: str, result: int, handle: c_void_p | None) -> None:
        if result in (SUCCESS, IN_PROGRESS):
            return
        text = (self._library.ncclGetErrorString(result) or b"").decode(errors="replace")
        last = (self._library.ncclGetLastError(handle) or b"").decode(errors="replace").strip()
        raise SessionError(f"{what}: NCCL says {text!r} ({result}){f': {last}' if last else ''}")


@functools.cache
def load() -> Nccl:
    """The library that torch works with. Raises ``SessionError`` where there is none."""
    found = _LOADED.search(Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace"))
    for name in (found.group(1),) if found else ("libnccl.so.2", "librccl.so.1", "librccl.so"):
        try:
            return Nccl(ctypes.CDLL(name))
        except OSError:
            continue
    raise SessionError("no NCCL library is loaded here; install a torch for CUDA or ROCm, which brings one")
