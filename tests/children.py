"""The path of modules that processes get which tests start."""

from __future__ import annotations

import os
from pathlib import Path

LIGHT = Path(__file__).parent / "light"


def module_path(*directories: Path) -> str:
    """``PYTHONPATH`` of these, behind what spares them processor time (light/sitecustomize.py)."""
    light = () if os.environ.get("MARCHLINE_TEST_THOROUGH") else (LIGHT,)
    return os.pathsep.join(dict.fromkeys(map(str, (*light, *directories))))
