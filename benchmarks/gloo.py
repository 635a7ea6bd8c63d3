"""What ``benchmarks.reduce`` compares with: gloo's all_reduce in processes that wait for orders, one raw TCP stream."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from typing import Any, Self

from benchmarks.entries import ROOT, free_port
from benchmarks.figures import EntryFailed
from benchmarks.netns import Host
from benchmarks.waiting import Waiting, durations, end

SEND = """
import socket, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2]))) as link:
    block, left = memoryview(bytearray(1 << 20)), int(sys.argv[3])
    while left > 0:
        link.sendall(block[:left])
        left -= len(block)
"""


class Gloo(Waiting):
    """A process a rank, each in its place (none: this namespace). Raises ``EntryFailed`` when one fails."""

    def __init__(self, world: int, places: tuple[Host, ...] = ()) -> None:
        super().__init__("gloo")
        self.world = world
        self._places = places

    def __enter__(self) -> Self:
        address = self._places[0].address if self._places else "127.0.0.1"
        meet = f"{address}:{free_port()}"
        self.start([self._program(rank, meet) for rank in range(self.world)])
        return self

    def go(self, elements: int, times: int, dtype: str = "f32") -> list[float]:
        """Seconds of each repetition; every one begins at a barrier."""
        return durations(self.ask({"elements": elements, "times": times, "dtype": dtype}))

    def _program(self, rank: int, meet: str) -> tuple[list[str], dict[str, Any]]:
        place = self._places[rank] if self._places else None
        program = [sys.executable, "-m", "benchmarks.peers.allreduce", "--rank", str(rank)]
        program += ["--world", str(self.world), "--meet", meet]
        own = {
            "GLOO_SOCKET_IFNAME": place.interface if place else "lo",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
        }
        return place.command(*program) if place else program, own


def raw_stream(host: Host, address: str, megabytes: float) -> float:
    """Mbit/s of one TCP stream from ``host`` to this namespace's ``address``: payload, by the receiver's clock from its
    first byte to its last."""
    size = int(megabytes * 1e6)
    with socket.create_server((address, 0)) as server:
        port = server.getsockname()[1]
        sender = subprocess.Popen(host.command(sys.executable, "-c", SEND, address, str(port), str(size)))
        try:
            link, _ = server.accept()
            with link:
                block = bytearray(1 << 20)
                received = link.recv_into(block)
                started = time.monotonic()
                while received < size and (count := link.recv_into(block)):
                    received += count
                seconds = time.monotonic() - started
        finally:
            end(sender)
    if received < size:
        raise EntryFailed(f"the raw stream ended after {received} of {size} bytes")
    return size * 8 / 1e6 / seconds
