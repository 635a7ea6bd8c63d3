"""How the C library keeps memory that Python frees, in processes that move chunks of a megabyte all day.

glibc hands large buffers back to the kernel when they are freed, and trims its heap whenever the top of it is free. The
next chunk then costs some hundred page faults, several times what copying or sealing it costs.
"""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
"""of ``mallopt``, from malloc.h"""
LARGEST_BYTES = 32 << 20
"""what is larger still goes back to the kernel at once: arenas, checkpoints"""
SPARE_BYTES = 64 << 20
"""free memory at the top of a heap that is kept"""
HEAPS = 2
"""for all threads together: buffers that one thread makes and another frees would leave holes in a heap of each"""


def keep_freed_memory() -> bool:
    """Have this process keep freed buffers for the next ones; False where the C library is not glibc."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    wishes = ((_MMAP_THRESHOLD, LARGEST_BYTES), (_TRIM_THRESHOLD, SPARE_BYTES), (_ARENA_MAX, HEAPS))
    return all(mallopt(wish, value) for wish, value in wishes)
