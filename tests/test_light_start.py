"""What processes that tests start are spared (light/sitecustomize.py) is there for whoever wants it."""

from __future__ import annotations

import subprocess
import sys

import pytest
from children import LIGHT

STEP = """
import sys, torch
weight = torch.nn.Parameter(torch.ones(2, 2))
optimizer = torch.optim.SGD([weight], lr=1.0, momentum=0.5)
weight.sum().backward()
optimizer.step()
assert weight.tolist() == [[0.0, 0.0], [0.0, 0.0]]
assert torch.Generator().manual_seed(1).initial_seed() == 1  # some of torch is there only with its descriptions
"""
COMPILE = """
assert torch.compile(lambda x: torch.addmm(x, x, x), backend="eager")(torch.ones(2, 2)).tolist() == [[3, 3], [3, 3]]
assert torch.addmm(*[torch.ones(2, 2, device="meta")] * 3).shape == (2, 2)
"""


@pytest.mark.parametrize("compiled", [False, True])
def test_a_step_needs_no_compiler_and_who_compiles_finds_one(compiled: bool) -> None:
    count = "print(sum(name.startswith('torch._dynamo') for name in sys.modules))"
    command = [sys.executable, "-c", STEP + (COMPILE if compiled else "") + count]
    done = subprocess.run(
        command, env={"PYTHONPATH": str(LIGHT)}, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (int(done.stdout) > 1) == compiled
