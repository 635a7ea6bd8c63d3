"""Which device looks slowest (behaviour C4)."""

from dataclasses import replace

import pytest

from backend.core.config import RunConfig
from backend.core.elche import ElChe
from backend.core.priors import GIB, score, slowest, slowest_device
from backend.core.scheduling import scheduler_for
from backend.core.world import HostSeat, World
from wire.messages import Device, Versions

VERSIONS = Versions(marchline="0.1.0", wire=1, python="3.11.7")


def gpu(name: str, gib: float = 16.0, id_: str = "cuda:0", type_: str = "cuda") -> Device:
    return Device(id=id_, type=type_, name=name, memory_bytes=int(gib * GIB))


@pytest.mark.parametrize(
    ("name", "generation"),
    [
        ("NVIDIA GeForce RTX 5060 Ti", 120),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 120),
        ("NVIDIA B200", 100),
        ("NVIDIA GB300", 103),
        ("NVIDIA H200", 90),
        ("NVIDIA H100 80GB HBM3", 90),
        ("NVIDIA GH200 480GB", 90),
        ("NVIDIA H20", 90),
        ("NVIDIA GeForce RTX 4090", 89),
        ("NVIDIA L40S", 89),
        ("NVIDIA L4", 89),
        ("NVIDIA RTX 6000 Ada Generation", 89),
        ("NVIDIA A100-SXM4-80GB", 80),
        ("NVIDIA A30", 80),
        ("NVIDIA A10G", 86),
        ("NVIDIA A2", 86),
        ("NVIDIA RTX A2000 12GB", 86),
        ("NVIDIA GeForce RTX 3090", 86),
        ("Tesla T4", 75),
        ("NVIDIA GeForce RTX 2080 Ti", 75),
        ("NVIDIA GeForce GTX 1660 SUPER", 75),
        ("Quadro RTX 6000", 75),
        ("NVIDIA TITAN RTX", 75),
        ("Tesla V100-SXM2-16GB", 70),
        ("NVIDIA TITAN V", 70),
        ("Tesla P100-PCIE-16GB", 60),
        ("NVIDIA GeForce GTX 1060 6GB", 61),
        ("NVIDIA TITAN Xp", 61),
        ("Tesla P40", 61),
        ("Tesla M60", 52),
        ("Tesla K80", 37),
    ],
)
def test_the_score_is_generation_and_memory(name, generation):
    assert score(gpu(name, 24.0)) == generation + 24.0


@pytest.mark.parametrize(
    "device",
    [
        gpu("AMD Instinct MI300X"),
        gpu(""),
        gpu("NVIDIA A1000X"),
        gpu("NVIDIA L400"),
        gpu("NVIDIA L4", 0.0),
        gpu("NVIDIA L4", type_="cpu"),
        Device(id="cpu:0", type="cpu"),
    ],
)
def test_what_is_not_known_has_no_score(device):
    assert score(device) is None


FAST, SLOW, OLD = gpu("NVIDIA GeForce RTX 5060 Ti", 16), gpu("NVIDIA GeForce GTX 1060 6GB", 6), gpu("Tesla K80", 12)


@pytest.mark.parametrize(
    ("devices", "rank"),
    [
        ([FAST, SLOW, SLOW], 1),
        ([SLOW, FAST, OLD], 2),
        ([FAST, FAST], 0),
        ([gpu("NVIDIA L4", 24), gpu("NVIDIA L4", 12)], 1),
        ([FAST, gpu("AMD Radeon RX 7900 XTX", 24)], None),
        ([FAST, Device(id="cpu:0", type="cpu")], None),
        ([], None),
    ],
)
def test_the_slowest_of_them(devices, rank):
    assert slowest(dict(enumerate(devices))) == rank


def world(*devices: Device, emulate: float | None = None) -> World:
    first, *others = devices
    rest = tuple(replace_id(device, number) for number, device in enumerate(others))
    return World(
        [
            HostSeat(0, "a", "10.0.0.1", 1, (0,), (first,), VERSIONS, None),
            HostSeat(1, "b", "10.0.0.2", 2, tuple(range(1, len(devices))), rest, VERSIONS, emulate),
        ]
    )


def replace_id(device: Device, number: int) -> Device:
    return Device(id=f"cuda:{number}", type=device.type, name=device.name, memory_bytes=device.memory_bytes)


def test_a_formed_world_has_a_prior_unless_somebody_plays_a_slower_device():
    assert slowest_device(world(FAST, FAST, SLOW)) == 2
    assert slowest_device(world(FAST, FAST, SLOW, emulate=40.0)) is None


CONFIG = RunConfig(job="a.py:A")


def test_the_prior_pins_the_pace_and_leaves_the_shares_equal():
    scheduler = scheduler_for(CONFIG, [0, 1, 2], slowest_device=2)

    assert isinstance(scheduler, ElChe)
    assert (scheduler.anchor_rank, scheduler.counts) == (2, {0: 10, 1: 10, 2: 10})
    assert scheduler.opening.endswith("rank 2 sets the pace: its device looks slowest by name and memory.")


def test_the_operators_hint_goes_before_the_prior():
    scheduler = scheduler_for(replace(CONFIG, speed_hint=(0, 2.0)), [0, 1, 2], slowest_device=2)

    assert (scheduler.anchor_rank, scheduler.counts) == (0, {0: 10, 1: 20, 2: 20})
