"""Freed buffers are kept by the process instead of going back to the kernel, page fault by page fault."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys
from wire.allocator import keep_freed_memory
if sys.argv[1] == "kept" and not keep_freed_memory():
    sys.exit(3)
for _ in range(3):
    [bytearray(1 << 20) for _ in range(8)]
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(50):
    [bytearray(1 << 20) for _ in range(8)]
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how: str) -> int:
    done = subprocess.run([sys.executable, "-c", PROGRAM, how], capture_output=True, text=True)
    if done.returncode == 3:
        pytest.skip("the C library here is not glibc")
    return int(done.stdout)


def test_chunks_cost_no_page_faults_once_the_heap_has_grown() -> None:
    assert faults("kept") < 2000 < faults("as it comes")
