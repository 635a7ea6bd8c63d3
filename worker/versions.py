"""What runs on this host, from package metadata alone: importing torch would cost a second and a gigabyte."""

from __future__ import annotations

import tomllib
from importlib import metadata
from pathlib import Path
from platform import python_version

from wire.messages import WIRE_VERSION, Versions


def host_versions() -> Versions:
    """Versions of everything that must fit together; absent parts are empty."""
    torch = _version("torch")
    _, _, build = torch.partition("+")
    return Versions(
        marchline=_version("marchline") or _checkout_version(),
        wire=WIRE_VERSION,
        python=python_version(),
        torch=torch,
        cuda=build.removeprefix("cu") if build.startswith("cu") else "",
        nccl=next((found for major in (13, 12) if (found := _version(f"nvidia-nccl-cu{major}"))), ""),
    )


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _checkout_version() -> str:
    """The version in the checkout's own project file, when this code runs from one."""
    project = Path(__file__).resolve().parent.parent / "pyproject.toml"
    try:
        return str(tomllib.loads(project.read_text(encoding="utf-8"))["project"]["version"])
    except (OSError, KeyError, tomllib.TOMLDecodeError):
        return ""
