"""Which device looks slowest before anything was timed: by GPU generation and memory (behaviour C4).

Only a hint, for the first windows: it says which rank sets the pace, not by how much. One device that is not a known
GPU, or a host that plays a slower one, and there is no prior at all.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from backend.core.world import World
from wire.messages import Device

GIB = 1 << 30
GENERATIONS: tuple[tuple[int, str], ...] = (
    (103, r"G?B300"),
    (100, r"G?B[12]00"),
    (120, r"RTX 50[5-9]0|RTX PRO \d{4}"),
    (90, r"G?H100|G?H200|H800|H20"),
    (89, r"L4|L20|L40S?|RTX 40[5-9]0|RTX \d{4} Ada"),
    (80, r"A100|A800|A30"),
    (86, r"A2|A10G?|A16|A40|RTX A\d{4}|RTX 30[5-9]0"),
    (75, r"T4G?|RTX 20[6-8]0|GTX 16[5-6]0|Titan RTX|Quadro RTX \d{4}"),
    (70, r"V100|GV100|Titan V"),
    (60, r"P100|GP100"),
    (61, r"P4|P6|P40|GTX 10[5-8]0|GT 1030|Titan Xp|Quadro P\d{3,4}"),
    (52, r"M4|M6|M40|M60|GTX 9[5-8]0|Titan X"),
    (37, r"K80"),
)
"""compute capability (sm_86 is 86) by product name, the first match"""

_PATTERNS = tuple(
    (generation, re.compile(rf"\b(?:{names})(?![A-Za-z0-9])", re.IGNORECASE)) for generation, names in GENERATIONS
)


def score(device: Device) -> float | None:
    """Ten times the generation's number (8.6 gives 86) plus the memory in GiB; none for a device that is not a known
    GPU."""
    if device.type != "cuda" or device.memory_bytes <= 0:
        return None
    generation = next((number for number, pattern in _PATTERNS if pattern.search(device.name)), None)
    return None if generation is None else generation + device.memory_bytes / GIB


def slowest(devices: Mapping[int, Device]) -> int | None:
    """The rank with the lowest score, the lowest rank among equals; none unless every device has one."""
    scores = {rank: score(device) for rank, device in devices.items()}
    known = {rank: value for rank, value in scores.items() if value is not None}
    if len(known) < len(devices):
        return None
    return min(known, key=lambda rank: (known[rank], rank), default=None)


def slowest_device(world: World) -> int | None:
    """The rank of a formed world whose device looks slowest, if that can be said."""
    if any(host.emulate_ms_per_batch is not None for host in world.hosts.values()):
        return None
    return slowest({rank: world.hosts[seat.host].devices[seat.local_rank] for rank, seat in world.ranks.items()})
