"""What a rank says when its device has no memory left: whose, how much it held, and what helps."""

from __future__ import annotations

import contextlib
import os
import resource

import torch

NAME = torch.OutOfMemoryError.__name__
_CURE = "use a smaller batch_size, or leave this device out with --devices"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether this is a device's refusal of memory, by torch's allocator or by the driver itself."""
    driver = isinstance(error, RuntimeError) and "CUDA error: out of memory" in str(error)
    return driver or isinstance(error, torch.OutOfMemoryError)


def explain(error: BaseException, device: str) -> str:
    """The death in a sentence, with the first words of torch's own. ``device`` is the rank's, as torch names it."""
    name, held, total = _figures(device)
    said = ". ".join(part.strip() for part in str(error).split(". ")[:2]).rstrip(".")
    return f"{name} ran out of memory: this rank held {held} at its peak, of {total} in all; {_CURE} ({said or NAME})"


def _figures(device: str) -> tuple[str, str, str]:
    """Name, peak and total, in words; the driver may be beyond answering."""
    if torch.device(device).type == "cuda":
        name, held, total = "the GPU", "an unknown amount", "an unknown amount"
        with contextlib.suppress(RuntimeError, AssertionError):
            properties = torch.cuda.get_device_properties(device)
            name, total = properties.name, _gib(properties.total_memory)
            held = _gib(torch.cuda.max_memory_allocated(device))
        return name, held, total
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return "the host", _gib(peak), _gib(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
