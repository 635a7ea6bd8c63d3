"""What a host offers: GPUs as NVIDIA's library sees them, or as many CPU ranks as asked for."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from wire.messages import WIRE_VERSION, Device
from worker import devices
from worker.devices import DeviceError, LocalDevice, find_devices, list_gpus, visible_gpus
from worker.versions import host_versions

GPUS = [
    LocalDevice(Device(id=f"cuda:{n}", type="cuda", name="H200", memory_bytes=1 << 37), visible=f"GPU-{n}abc-{n}def")
    for n in range(3)
]


@pytest.fixture
def three_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "list_gpus", lambda: GPUS)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.parametrize(("wanted", "count"), [("cpu", 1), ("cpu:1", 1), ("cpu:3", 3)])
def test_cpu_ranks_are_numbered_and_hide_the_gpus(wanted: str, count: int) -> None:
    found = find_devices(wanted)
    assert [device.device.id for device in found] == [f"cpu:{n}" for n in range(count)]
    assert {(device.device.type, device.visible, device.torch_name) for device in found} == {("cpu", "", "cpu")}
    assert all(device.device.memory_bytes > 1 << 28 for device in found)


@pytest.mark.usefixtures("three_gpus")
@pytest.mark.parametrize(
    ("wanted", "ids"),
    [
        ("all", [0, 1, 2]),
        ("0,2", [0, 2]),
        ("2, 1", [2, 1]),
        ("GPU-1abc-1def", [1]),
        ("GPU-2", [2]),
        ("1,GPU-0abc", [1, 0]),
        ("cuda", [0, 1, 2]),
        ("cuda:2,cuda:0", [2, 0]),
    ],
)
def test_gpus_are_chosen_by_number_or_uuid(wanted: str, ids: list[int]) -> None:
    assert find_devices(wanted) == [GPUS[n] for n in ids]
    assert GPUS[0].torch_name == "cuda:0" == GPUS[2].torch_name


@pytest.mark.usefixtures("three_gpus")
@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        ("3", "no GPU '3' on this host; visible GPUs: 0, 1, 2"),
        ("GPU-9", "GPU-9"),
        ("", "no GPU ''"),
        ("cpu:0", "1 to 256"),
        ("1,1", "GPU 1 is named twice, but NCCL gives each rank a GPU of its own"),
    ],
)
def test_what_is_not_there_is_named(wanted: str, says: str) -> None:
    with pytest.raises(DeviceError, match=says):
        find_devices(wanted)


@pytest.mark.usefixtures("three_gpus")
def test_ranks_may_share_a_gpu_where_that_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MARCHLINE_NCCL_HOSTID_PER_RANK", "1")
    found = find_devices("cuda:1,cuda:1,0,1")
    assert [device.device.id for device in found] == ["cuda:1", "cuda:1.1", "cuda:0", "cuda:1.2"]
    assert [device.visible for device in found] == [GPUS[n].visible for n in (1, 1, 0, 1)]


@pytest.mark.parametrize(
    ("visible", "left"),
    [(None, [0, 1, 2]), ("", []), ("1", [1]), ("2,0", [2, 0]), ("GPU-1abc", [1]), ("0,7,1", [0]), ("-1", [])],
)
def test_the_agents_own_cuda_visible_devices_is_honoured(visible: str | None, left: list[int]) -> None:
    assert visible_gpus(GPUS, visible) == [GPUS[n] for n in left]


def test_without_gpus_all_means_one_cpu_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "list_gpus", lambda: [])
    assert [device.device.id for device in find_devices("all")] == ["cpu:0"]
    with pytest.raises(DeviceError, match="is the NVIDIA driver loaded"):
        find_devices("0")


def test_gpus_are_read_from_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library of two devices; the real one is met on a GPU host."""
    shut: list[bool] = []
    nvml = SimpleNamespace(
        NVMLError=RuntimeError,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: shut.append(True),
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetName=lambda handle: b"RTX 3060" if handle else "H200",
        nvmlDeviceGetUUID=lambda handle: f"GPU-{handle}",
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(total=12 << 30),
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert list_gpus() == [
        LocalDevice(Device(id="cuda:0", type="cuda", name="H200", memory_bytes=12 << 30), visible="GPU-0"),
        LocalDevice(Device(id="cuda:1", type="cuda", name="RTX 3060", memory_bytes=12 << 30), visible="GPU-1"),
    ]
    assert shut == [True]


def test_a_host_without_driver_has_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_driver() -> None:
        raise RuntimeError("libnvidia-ml.so.1 not found")

    monkeypatch.setitem(sys.modules, "pynvml", SimpleNamespace(NVMLError=RuntimeError, nvmlInit=no_driver))
    assert list_gpus() == []
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert list_gpus() == []


def test_versions_come_without_importing_torch() -> None:
    versions = host_versions()
    assert versions.wire == WIRE_VERSION
    assert versions.marchline
    assert versions.python.startswith("3.")
    assert versions.torch == str(torch.__version__)
    assert versions.cuda == (torch.version.cuda or "")


@pytest.mark.parametrize(
    ("build", "facts"),
    [
        (
            "__version__ = '2.11.0+cu130'\ncuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n",
            ("2.11.0+cu130", "13.0"),
        ),
        ("__version__ = '2.9.1'\ncuda: Optional[str] = None\nhip: Optional[str] = '6.4'\n", ("2.9.1", "rocm6.4")),
        ("__version__ = '2.13.0+cpu'\ncuda = None\n", ("2.13.0+cpu", "")),
        (None, ("", "")),
    ],
)
def test_torchs_build_is_read_from_its_version_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, build: str | None, facts: tuple[str, str]
) -> None:
    spec = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    if build is not None:
        (tmp_path / "version.py").write_text(build)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: spec)
    versions = host_versions()
    assert (versions.torch, versions.cuda) == facts
