"""What runs on this host, read from files and package metadata: importing torch would cost a second and a gigabyte."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from importlib import metadata
from pathlib import Path
from platform import python_version

from wire.messages import WIRE_VERSION, Versions

_TORCH_FACT = re.compile(r"""^(__version__|cuda|hip)\b[^=\n]*=\s*['"]([^'"]+)['"]""", re.MULTILINE)


def host_versions() -> Versions:
    """Versions of everything that must fit together; absent parts are empty."""
    torch = torch_facts()
    return Versions(
        marchline=_version("marchline") or _checkout_version(),
        wire=WIRE_VERSION,
        python=python_version(),
        torch=torch.get("__version__", ""),
        cuda=torch.get("cuda", "") or (f"rocm{torch['hip']}" if "hip" in torch else ""),
        nccl=next((found for major in (13, 12) if (found := _version(f"nvidia-nccl-cu{major}"))), ""),
    )


def torch_facts() -> dict[str, str]:
    """What torch's own version file says: ``__version__``, and ``cuda`` or ``hip`` when it was built for one."""
    spec = importlib.util.find_spec("torch")  # finds a package without running it
    if spec is None or spec.origin is None:
        return {}
    try:
        text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    except OSError:
        return {}
    return dict(_TORCH_FACT.findall(text))


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
