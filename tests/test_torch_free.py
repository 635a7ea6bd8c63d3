"""The controller runs without torch, and so do a host's agent and relay."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BLOCK = """
import importlib.abc, sys
class NoTorch(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torch":
            raise ModuleNotFoundError("torch is not installed here", name="torch")
sys.meta_path.insert(0, NoTorch())
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    """Python that behaves as if torch were not installed."""
    command = [sys.executable, "-c", BLOCK + code]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False)


def test_the_block_works() -> None:
    assert "torch is not installed here" in run("import torch").stderr


@pytest.mark.parametrize(
    "modules",
    [
        "backend.main, backend.cli.app, backend.demo, backend.api.app, backend.reduce",
        "worker, worker.agent, worker.relay, worker.site, worker.devices",
        "wire.session, wire.schema",
    ],
)
def test_imports_without_torch(modules: str) -> None:
    done = run(f"import {modules}\nassert 'torch' not in sys.modules\nprint('fine')")
    assert done.stdout.strip() == "fine", done.stderr


@pytest.mark.slow
def test_a_controller_serves_without_torch(tmp_path: Path) -> None:
    """It starts, takes a run with its form and its checks, and answers, on a machine that has no torch."""
    code = f"""
import asyncio, pathlib
from backend.core.config import RunConfig
from backend.main import build
from backend.runtime.settings import Settings

async def main():
    place = pathlib.Path({str(tmp_path)!r})
    controller, app = build(Settings(port=0, data_dir=place, job_dir=pathlib.Path("tests/jobs")))
    await controller.start()
    run = await controller.create_run(RunConfig(job="odometer.py:Odometer", start_mode="manual"))
    view = controller.live_view(run)
    await controller.close()
    print(view["phase"], view["params"])

asyncio.run(main())
"""
    done = run(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("waiting {'samples': 64"), done.stdout + done.stderr
