"""What ``benchmarks.reduce`` compares with: gloo's all_reduce in processes that wait for orders, one raw TCP stream."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from threading import Timer
from typing import Any, Self

from benchmarks.entries import ROOT, free_port
from benchmarks.figures import EntryFailed
from benchmarks.netns import Host

ANSWER_SECONDS = 300.0
SEND = """
import socket, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2]))) as link:
    block, left = memoryview(bytearray(1 << 20)), int(sys.argv[3])
    while left > 0:
        link.sendall(block[:left])
        left -= len(block)
"""


class Gloo:
    """A process a rank, each in its place (none: this namespace). Raises ``EntryFailed`` when one fails."""

    def __init__(self, world: int, places: tuple[Host, ...] = ()) -> None:
        self.world = world
        self._places = places
        self._stack = ExitStack()
        self._ranks: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Self:
        address = self._places[0].address if self._places else "127.0.0.1"
        meet = f"{address}:{free_port()}"
        try:
            for rank in range(self.world):
                self._start(rank, meet)
            for process in self._ranks:
                self._answer(process)
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def go(self, elements: int, times: int, dtype: str = "f32") -> list[float]:
        """Seconds of each repetition, from the moment at which the last rank was in it to that at which the last had
        its result; every repetition begins at a barrier."""
        order = json.dumps({"elements": elements, "times": times, "dtype": dtype})
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.write(order + "\n")
            rank.stdin.flush()
        answers = [self._answer(rank) for rank in self._ranks]
        begun = [max(moments) for moments in zip(*(answer["begun"] for answer in answers), strict=True)]
        ended = [max(moments) for moments in zip(*(answer["ended"] for answer in answers), strict=True)]
        return [end - begin for begin, end in zip(begun, ended, strict=True)]

    def _start(self, rank: int, meet: str) -> None:
        place = self._places[rank] if self._places else None
        program = [sys.executable, "-m", "benchmarks.peers.allreduce", "--rank", str(rank)]
        program += ["--world", str(self.world), "--meet", meet]
        own = {
            "GLOO_SOCKET_IFNAME": place.interface if place else "lo",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
        }
        process = subprocess.Popen(
            place.command(*program) if place else program,
            env={**os.environ, **own},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C reaches us alone; its stdin ends with us
        )
        self._ranks.append(process)
        self._stack.callback(_end, process)

    def _answer(self, rank: subprocess.Popen[str]) -> dict[str, Any]:
        assert rank.stdout is not None
        timer = Timer(ANSWER_SECONDS, rank.kill)
        timer.start()
        try:
            line = rank.stdout.readline()
        finally:
            timer.cancel()
        if not line.startswith("{"):
            raise EntryFailed(f"gloo's process {rank.args!r} ended without an answer")
        answer: dict[str, Any] = json.loads(line)
        return answer


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
            _end(sender)
    if received < size:
        raise EntryFailed(f"the raw stream ended after {received} of {size} bytes")
    return size * 8 / 1e6 / seconds


def _end(process: subprocess.Popen[Any]) -> None:
    if process.stdin is not None:
        process.stdin.close()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()
