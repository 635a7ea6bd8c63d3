"""A rank of ``benchmarks.collective``: a model's vectors on a device, a session of the worker's own classes, and beside
it a process group of torch's. A line on stdin, JSON with ``act``, is answered by a line.

``model`` lays out and says how the ranks talk. ``ours``, ``bare`` and ``torch`` repeat and give the moments (monotonic
clock, seconds) at which each repetition began and ended here; each begins at a barrier, with the device at rest.
``memory`` does rounds and notes what they leave.
"""

import argparse
import gc
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from worker.arena import Arena
from worker.collective import Collective, Spoilt, SyncName
from worker.communicator import Communicator, Guard, Library
from worker.flat import FlatModel
from worker.gloo_communicator import GlooLibrary
from worker.nccl_communicator import NcclLibrary
from worker.sessions import Place

PARTS = 8
"""tensors that parameters and buffers are cut into"""
NOTES = 10
"""of memory, beyond the first"""
INTERFACE = "lo"


class Model(nn.Module):
    """So many parameters and elements of buffers, whatever they are."""

    def __init__(self, params: int, buffers: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.rand(size) for size in _cut(params))
        for index, size in enumerate(_cut(buffers)):
            self.register_buffer(f"statistics{index}", torch.rand(size))


class Rank:
    """This process's part."""

    def __init__(self, options: argparse.Namespace, shm: Path) -> None:
        self.rank, self.world = options.rank, options.world
        self.device = torch.device(options.device)
        self.shm = shm
        self.sizes = 0
        self.rounds = 0
        self.flat: FlatModel | None = None
        self.collective: Collective | None = None
        self.target = self.buffer = torch.empty(0)
        host, _, port = options.meet.rpartition(":")
        store = TCPStore(host, int(port), self.world, is_master=self.rank == 0)
        dist.init_process_group("gloo", store=PrefixStore("torch", store), rank=self.rank, world_size=self.world)
        self.group = dist.group.WORLD
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            self.group = dist.new_group(backend="nccl")
        self.session = self._join(store)

    def _join(self, store: Store) -> Communicator:
        gpu = self.device.type == "cuda"
        self.library: Library = NcclLibrary(self.device, INTERFACE) if gpu else GlooLibrary(INTERFACE)
        if self.rank == 0:
            store.set("session", self.library.make_id().hex())
        identity = bytes.fromhex(store.get("session").decode())
        return self.library.join(identity, self.rank, self.world, Guard(lambda: ""))

    def model(self, params: int, buffers: int) -> dict[str, Any]:
        """Have vectors of this size, and those of the other contenders."""
        self.collective = self.flat = None
        self.target = self.buffer = torch.empty(0)
        for file in self.shm.iterdir():
            file.unlink()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        self.sizes += 1
        model = Model(params, buffers).to(self.device)
        arena = Arena.for_model(model)
        arena.create_out(self.shm / f"{self.sizes}.out")
        first = self.shm / f"{self.sizes}.consensus"
        np.random.default_rng(self.sizes).random(arena.elements, dtype=np.float32).tofile(first)
        arena.adopt(first)
        self.flat = FlatModel(arena, self.device)
        self.collective = Collective(self.flat, gamma=1.0)
        self.collective.begin()
        self.target, self.buffer = self.flat.vector.clone(), self.flat.vector.clone()
        return {"transport": self.session.transport}

    def ours(self) -> dict[str, float]:
        """A round as a rank does it; ms until the sum is whole, and for taking it in."""
        assert self.collective is not None
        self.rounds += 1
        started = time.monotonic()
        steps = self.rank + 1
        self.collective.prepare(steps)
        name = SyncName(self.rounds, 0, 0)
        found = self.collective.sum(self.session, Place(self.rank, self.world), steps, name)
        if isinstance(found, Spoilt):
            raise RuntimeError(f"the model is not finite: {found}")
        summed = time.monotonic()
        self.collective.adopt(restart=False, hashed=True)
        return {"sum": (summed - started) * 1000, "adopt": (time.monotonic() - summed) * 1000}

    def bare(self) -> None:
        """One sum of the whole vector on the session's communicator."""
        assert self.flat is not None
        self.session.sum(self.target, "the sum")
        self.session.wait()

    def theirs(self) -> None:
        """torch's, over its own group."""
        dist.all_reduce(self.buffer, group=self.group)

    def repeat(self, act: Callable[[], dict[str, float] | None], times: int) -> dict[str, Any]:
        """When each repetition began and ended."""
        begun, ended, splits = [], [], []
        assert self.flat is not None
        for _ in range(times):
            self.target.copy_(self.flat.vector)  # a sum in place of a sum grows beyond f32
            self.buffer.copy_(self.flat.vector)
            self._rest()
            dist.barrier()
            begun.append(time.monotonic())
            split = act()
            self._rest()
            ended.append(time.monotonic())
            if split is not None:
                splits.append(split)
        return {"begun": begun, "ended": ended} | ({"splits": splits} if splits else {})

    def memory(self, rounds: int) -> dict[str, Any]:
        """Rounds back to back, and what there is of memory on the way."""
        notes = [self._note()]
        for number in range(1, rounds + 1):
            self.ours()
            if number % max(1, rounds // NOTES) == 0:
                notes.append(self._note())
        return {"notes": notes}

    def close(self) -> None:
        """Leave both."""
        self.session.abort()
        self.library.close()
        dist.destroy_process_group()

    def _rest(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _note(self) -> dict[str, float]:
        process = psutil.Process()
        own = {
            "resident": process.memory_info().rss,
            "threads": process.num_threads(),
            "files": process.num_fds(),
        }
        if self.device.type != "cuda":
            return own
        self._rest()
        allocated, reserved = torch.cuda.memory_allocated(self.device), torch.cuda.memory_reserved(self.device)
        return {"allocated": allocated, "reserved": reserved, "device": _used(self.device)} | own


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--world", type=int, required=True)
    parser.add_argument("--meet", required=True, help="host:port where rank 0 listens")
    parser.add_argument("--device", required=True, help="as torch names it")
    options = parser.parse_args()
    torch.set_num_threads(1)
    place = None if options.device.startswith("cuda") else "/dev/shm"  # where arenas are; on a GPU nobody reads them
    with tempfile.TemporaryDirectory(prefix="bench-", dir=place) as name:
        rank = Rank(options, Path(name))
        print(json.dumps({"ready": options.rank}), flush=True)
        for line in sys.stdin:
            print(json.dumps(_answer(rank, json.loads(line))), flush=True)
        rank.close()


def _answer(rank: Rank, order: dict[str, Any]) -> dict[str, Any]:
    match order.pop("act"):
        case "model":
            return rank.model(**order)
        case "ours":
            return rank.repeat(rank.ours, **order)
        case "bare":
            return rank.repeat(rank.bare, **order)
        case "torch":
            return rank.repeat(rank.theirs, **order)
        case "memory":
            return rank.memory(**order)
    raise ValueError(order)


def _cut(elements: int) -> list[int]:
    """Sizes of at most ``PARTS`` tensors."""
    size = -(-elements // PARTS)
    return [min(size, elements - start) for start in range(0, elements, size)]


def _used(device: torch.device) -> int:
    """Bytes of the whole device in use, as its driver says."""
    free, total = torch.cuda.mem_get_info(device)
    return total - free


if __name__ == "__main__":
    main()
