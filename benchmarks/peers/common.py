"""What the peers' programs share: options, data, the padded step, the report.

A step is padded the way ``worker.loop`` pads one: from the moment its batch is loaded it lasts at least the rank's
emulated milliseconds. All that a peer does in its step counts into that time, communication included, so that theirs
hides under the padding as far as it fits; Marchline's round comes on top of its steps.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Subset

from benchmarks.jobs import images

PERIOD = 8
"""local steps between two averages, for the peers that have such a number"""
POLL_SECONDS = 0.01


class Rank:
    """This process's part in a peer's run, from the command line."""

    def __init__(self) -> None:
        options = _parser().parse_args()
        self.rank: int = options.rank
        self.world: int = options.world
        self.port: int = options.port
        self.batch_size: int = options.batch_size
        self.samples: int = options.samples
        self.place: Path = options.place
        self.milliseconds: float = options.ms
        torch.manual_seed(images.SEED + self.rank)
        self.device = torch.device(options.device)
        self.model = images.network().to(self.device)
        self._notebook = images.Notebook()
        self._ends: list[float] = []
        self._done = np.memmap(self.place / "done", dtype=np.int64, mode="r+", shape=(self.world,))
        os.environ |= {"GLOO_SOCKET_IFNAME": "lo"}
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    @property
    def backend(self) -> str:
        """What torch's ranks talk by."""
        return "nccl" if self.device.type == "cuda" else "gloo"

    @property
    def rendezvous(self) -> str:
        """Where torch's ranks meet."""
        return f"tcp://127.0.0.1:{self.port}"

    @property
    def steps_of_equal_shards(self) -> int:
        """Steps of each rank when all do as many, a whole number of periods."""
        return max(1, self.samples // (self.world * self.batch_size) // PERIOD) * PERIOD

    def shard(self, steps: int | None = None) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Batches of this rank's share of the data, equal shares, shuffled anew each time through."""
        data = images.dataset()
        share = Subset(data, range(self.rank, len(data) // self.world * self.world, self.world))
        yield from self._batches(share, self.steps_of_equal_shards if steps is None else steps)

    def stream(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Batches of all the data in an order of this rank's own, until the ranks together have had ``samples``."""
        for batch in self._batches(images.dataset(), self.samples):
            if int(self._done.sum()) * self.batch_size >= self.samples:
                return
            yield batch

    def _batches(
        self, data: torch.utils.data.Dataset[tuple[torch.Tensor, ...]], steps: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        loader = DataLoader(data, batch_size=self.batch_size, shuffle=True, drop_last=True)
        while True:
            for pixels, labels in loader:
                if steps <= 0:
                    return
                steps -= 1
                yield pixels, labels

    def start_together(self) -> None:
        """Wait until every rank is here."""
        self._done[self.rank] = 0
        while (self._done < 0).any():
            time.sleep(POLL_SECONDS)
        self.started = time.time()

    @contextmanager
    def step(self) -> Iterator[None]:
        """One step on a batch that is loaded: noted if it is time, padded, counted."""
        loaded = time.perf_counter()
        self._notebook.note(self.model)
        yield
        if self.device.type == "cuda":
            torch.cuda.synchronize()  # as the loss that our own loop reads has it
        while (missing := self.milliseconds / 1000 - (time.perf_counter() - loaded)) > 0:
            time.sleep(missing)
        self._ends.append(time.time())
        self._done[self.rank] += 1

    def train(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[torch.Tensor, torch.Tensor]
    ) -> None:
        """Forward, backward, update."""
        optimizer.zero_grad()
        loss = images.loss_of(model, *(part.to(self.device) for part in batch))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    def wait_for_all(self, name: str) -> None:
        """Wait until every rank has called this; for peers that stay in touch until the last one is through."""
        (self.place / f"{name}-{self.rank}").touch()
        while any(not (self.place / f"{name}-{rank}").exists() for rank in range(self.world)):
            time.sleep(POLL_SECONDS)

    def report(self) -> None:
        """The last line: what this rank did, as JSON."""
        self._notebook.note(self.model, now=True)
        print(json.dumps({"rank": self.rank, "started": self.started, "ends": self._ends}), flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--world", type=int, required=True)
    parser.add_argument("--ms", type=float, required=True, help="that a step lasts at least")
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--samples", type=int, required=True, help="of all ranks together")
    parser.add_argument(
        "--port", type=int, required=True, help="a free one on loopback, for whatever the ranks meet at"
    )
    parser.add_argument("--place", type=Path, required=True, help="directory that the ranks share")
    parser.add_argument("--device", default="cpu", help="as torch names it (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="as the last line: what the rank did (always)")
    return parser
