"""Over which interface ranks meet, and what NCCL is told of it."""

import socket
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from rank_rig import plan

from wire.messages import Device, RankAssignment, WorldFormed
from worker import interfaces
from worker.devices import LocalDevice
from worker.environment import rank_environment
from worker.interfaces import chosen, default_interface, interface_of

ADDRESSES = {
    "lo": [("127.0.0.1", socket.AF_INET), ("::1", socket.AF_INET6)],
    "eth0": [("192.0.2.7", socket.AF_INET), ("fe80::1%eth0", socket.AF_INET6)],
    "ib0": [("198.51.100.7", socket.AF_INET), ("2001:db8::7", socket.AF_INET6)],
}
ROUTES = [
    "ib0 00000000 017100C6 0003 0 0 200 00000000 0 0 0",
    "eth0 00000000 010200C0 0003 0 0 100 00000000 0 0 0",
    "eth0 000200C0 00000000 0001 0 0 0 00FFFFFF 0 0 0",
    "tun0 00000000 00000000 0002 0 0 1 00000000 0 0 0",
]


@pytest.fixture
def three_interfaces(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = {
        name: [SimpleNamespace(address=address, family=family) for address, family in addresses]
        for name, addresses in ADDRESSES.items()
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: found)
    table = tmp_path / "route"
    table.write_text("\n".join(["Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT", *ROUTES]))
    monkeypatch.setattr(interfaces, "_ROUTES", table)


@pytest.mark.usefixtures("three_interfaces")
@pytest.mark.parametrize(
    ("address", "alone", "name"),
    [
        ("198.51.100.7", False, "ib0"),
        ("198.51.100.7", True, "ib0"),
        ("2001:db8::7", False, "ib0"),
        ("fe80::1%eth0", False, "eth0"),
        ("203.0.113.9", False, ""),
        ("127.0.0.1", True, "lo"),
        ("127.0.0.2", True, "lo"),
        ("::1", True, "lo"),
        ("127.0.0.1", False, "eth0"),
    ],
)
def test_ranks_meet_where_the_host_reached_the_controller(address: str, alone: bool, name: str) -> None:
    assert interface_of(address, alone=alone) == name


@pytest.mark.usefixtures("three_interfaces")
def test_without_a_way_out_loopback_is_all_there_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(interfaces, "_ROUTES", tmp_path / "none")
    assert interface_of("127.0.0.1", alone=False) == "lo"


def test_the_best_default_route_that_is_up_counts() -> None:
    assert default_interface(ROUTES) == "eth0"
    assert default_interface(["broken line", *ROUTES[2:]]) == ""


@pytest.mark.parametrize(
    ("said", "name"), [("", "eth0"), ("ib0", "ib0"), ("=ib1,ib2", "ib1"), ("ib1, ib2", "ib1"), ("^docker", "^docker")]
)
def test_the_operators_choice_wins(said: str, name: str) -> None:
    assert chosen({"NCCL_SOCKET_IFNAME": said}, "NCCL_SOCKET_IFNAME", "eth0") == name
    assert chosen({}, "NCCL_SOCKET_IFNAME", "eth0") == "eth0"


def environment(base: dict[str, str], *, mode: str = "nccl_sync", kind: str = "cuda") -> dict[str, str]:
    assignment = RankAssignment(rank=3, local_rank=0, device=f"{kind}:0")
    world = WorldFormed(
        plan("x.py:X", total_samples=1, mode=mode), world_size=4, generation=0, assignments=[assignment]
    )
    device = LocalDevice(Device(id=f"{kind}:0", type=kind), visible="GPU-1")
    given = rank_environment(base, world, assignment, device, host_id=0, url="ws://hub", cores=2, interface="eth0")
    return {name: value for name, value in given.items() if name.startswith("NCCL")}


def test_nccl_is_told_the_interface_and_nothing_else() -> None:
    assert environment({}) == {"NCCL_SOCKET_IFNAME": "=eth0"}
    assert environment({}, mode="cpu_sync") == environment({}, kind="cpu") == {}
    said = {"NCCL_SOCKET_IFNAME": "ib0", "NCCL_HOSTID": "seven", "NCCL_DEBUG": "INFO", "NCCL_NVLS_ENABLE": "0"}
    assert environment(said) == said


def test_a_session_that_is_aborted_is_no_reason_for_torch_to_print_stacks() -> None:
    orders = plan("x.py:X", total_samples=1, mode="nccl_sync")
    assignment = RankAssignment(rank=0, local_rank=0, device="cpu:0")
    world = WorldFormed(orders, world_size=1, generation=0, assignments=[assignment])
    device = LocalDevice(Device(id="cpu:0", type="cpu"), visible="")
    for base, level in (({}, "ERROR"), ({"TORCH_CPP_LOG_LEVEL": "INFO"}, "INFO")):
        given = rank_environment(base, world, assignment, device, host_id=0, url="ws://hub", cores=2)
        assert given["TORCH_CPP_LOG_LEVEL"] == level


def test_ranks_that_share_a_gpu_pose_as_hosts() -> None:
    given = environment({"MARCHLINE_NCCL_HOSTID_PER_RANK": "1"})
    assert given.pop("NCCL_HOSTID") == f"{socket.gethostname()}-3"
    assert given == {"NCCL_SOCKET_IFNAME": "=eth0", "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}
