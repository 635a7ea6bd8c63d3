"""How the C library keeps memory that Python frees, in processes that move chunks of a megabyte all day.

glibc hands large buffers back to the kernel when they are freed, and trims its heap whenever the top of it is free. The
next chunk then costs some hundred page faults, several times what copying or sealing it costs.
"""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""of ``mallopt``, from malloc.h"""
LARGEST_BYTES = 32 << 20
"""what is larger still goes back to the kernel at once: arenas, checkpoints"""
SPARE_BYTES = 64 << 20
"""free memory at the top of a heap that is kept"""


def keep_freed_memory() -> bool:
    """Have this process keep freed buffers for the next ones; False where the C library is not glibc."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_MMAP_THRESHOLD, LARGEST_BYTES) and mallopt(_TRIM_THRESHOLD, SPARE_BYTES))
