"""The environment variables of the agent's children: torchrun's own, so that existing libraries find what they look
for."""

from __future__ import annotations

from collections.abc import Mapping
from socket import gethostname
from urllib.parse import urlsplit

from wire.messages import RankAssignment, WorldFormed
from worker.devices import SHARED_GPU_VARIABLE, LocalDevice
from worker.interfaces import NCCL_VARIABLE

QUIET_VARIABLE = "TORCH_CPP_LOG_LEVEL"
TOKEN_VARIABLE = "MARCHLINE_JOIN_TOKEN"
_SECRETS = (TOKEN_VARIABLE,)


def child_environment(base: Mapping[str, str]) -> dict[str, str]:
    """What every child gets: the agent's own without its secrets, and output that is not held back."""
    kept = {name: value for name, value in base.items() if name not in _SECRETS}
    return kept | {"PYTHONUNBUFFERED": "1"}


def probe_environment(base: Mapping[str, str]) -> dict[str, str]:
    """A probe looks at the job on the CPU and leaves the GPUs alone."""
    return child_environment(base) | {"CUDA_VISIBLE_DEVICES": ""}


def rank_environment(
    base: Mapping[str, str],
    formed: WorldFormed,
    assignment: RankAssignment,
    device: LocalDevice,
    *,
    host_id: int,
    url: str,
    cores: int,
    interface: str = "",
) -> dict[str, str]:
    """What one rank gets. ``MASTER_ADDR`` and ``MASTER_PORT`` are the controller's, as this host dialled it.

    Ranks of one host share its cores, unless the operator chose a number of threads.
    """
    local = len(formed.assignments)
    parts = urlsplit(url)
    environment = child_environment(base) | {
        "RANK": str(assignment.rank),
        "LOCAL_RANK": str(assignment.local_rank),
        "WORLD_SIZE": str(formed.world_size),
        "LOCAL_WORLD_SIZE": str(local),
        "GROUP_RANK": str(host_id),
        "MASTER_ADDR": parts.hostname or "",
        "MASTER_PORT": str(parts.port or (443 if parts.scheme == "wss" else 80)),
        "TORCHELASTIC_RUN_ID": str(formed.plan.run_id),
        "TORCHELASTIC_RESTART_COUNT": str(formed.generation),
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": device.visible,
        "MARCHLINE_RUN_ID": str(formed.plan.run_id),
        "MARCHLINE_HOST_ID": str(host_id),
        "MARCHLINE_GENERATION": str(formed.generation),
    }
    if device.device.type == "cpu" and "OMP_NUM_THREADS" not in base:
        environment["OMP_NUM_THREADS"] = str(max(1, cores // local))
    if formed.plan.mode.startswith("nccl_") and QUIET_VARIABLE not in base:
        environment[QUIET_VARIABLE] = "ERROR"  # torch warns of every session that is aborted, with a stack of C++
    if device.device.type == "cuda" and formed.plan.mode.startswith("nccl_"):
        environment |= _nccl_environment(base, assignment.rank, interface)
    return environment


def _nccl_environment(base: Mapping[str, str], rank: int, interface: str) -> dict[str, str]:
    """What NCCL reads; the operator's own choices stay."""
    added = {NCCL_VARIABLE: f"={interface}"} if interface and NCCL_VARIABLE not in base else {}
    if (
        base.get(SHARED_GPU_VARIABLE) == "1"
    ):  # NCCL takes each rank for a host of its own, and asks for no GPU of its own
        added |= {"NCCL_HOSTID": f"{gethostname()}-{rank}", "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}
    return added
