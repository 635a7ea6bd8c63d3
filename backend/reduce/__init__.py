"""The controller's CPU reduce: streaming (``plane``), arithmetic (``pieces``, ``outer``; the rest is in ``wire``), and
memory (``ledger``, ``buffers``, ``shared``)."""

from backend.reduce.buffers import Proof
from backend.reduce.plane import ReducePlane
from backend.reduce.shared import SharedArenas, SharedMemoryRefused

__all__ = ["Proof", "ReducePlane", "SharedArenas", "SharedMemoryRefused"]
