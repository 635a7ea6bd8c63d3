"""torch DistributedDataParallel over gloo below torchrun, made to survive restarts: a checkpoint every so many steps,
and on from the newest one at each start. For ``benchmarks.recovery``.

Each rank writes down its process and, for each step that it finished: which start it was, the step, and when (Unix
seconds). A step is padded as in ``common``. It goes on until it is ended from outside.
"""

import argparse
import os
import time
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch.distributed.distributed_c10d import PrefixStore, init_process_group
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from benchmarks.jobs import images

CHECKPOINT = "checkpoint.safetensors"
MOMENTUM = "momentum."


def main() -> None:
    options = _options()
    store, rank, world = next(rendezvous("env://"))
    # torchrun keeps one store for all starts (torch 2.13): gloo would find its peers' addresses of the last one in it.
    own = PrefixStore(f"start {os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
    init_process_group("gloo", store=own, rank=rank, world_size=world)
    network = images.network()
    model = DistributedDataParallel(network)
    optimizer = images.optimizer(model.parameters())
    step = _load(options.place / CHECKPOINT, network, optimizer)
    (options.place / f"pid{rank}").write_text(str(os.getpid()))
    pixels, labels = images.pictures("train")
    with (options.place / f"steps{rank}").open("a", buffering=1) as notes:
        while True:
            started = time.perf_counter()
            rows = (torch.arange(options.batch_size) + (step * world + rank) * options.batch_size) % len(labels)
            optimizer.zero_grad()
            images.loss_of(model, pixels[rows], labels[rows]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            while (missing := options.ms / 1000 - (time.perf_counter() - started)) > 0:
                time.sleep(missing)
            step += 1
            notes.write(f"{os.environ['TORCHELASTIC_RESTART_COUNT']} {step} {time.time()}\n")
            if rank == 0 and step % options.save_every == 0:
                _save(options.place / CHECKPOINT, network, optimizer, step)


def _save(path: Path, network: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Model, momentum and step, under a temporary name first."""
    names: dict[torch.Tensor, str] = {parameter: name for name, parameter in network.named_parameters()}
    momentum = {MOMENTUM + names[parameter]: state["momentum_buffer"] for parameter, state in optimizer.state.items()}
    temporary = path.with_suffix(".part")
    save_file(network.state_dict() | momentum | {"step": torch.tensor(step)}, temporary)
    temporary.rename(path)


def _load(path: Path, network: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Take up the newest checkpoint; the step that it is of, 0 without one."""
    if not path.exists():
        return 0
    saved = load_file(path)
    step = int(saved.pop("step"))
    momentum = {name.removeprefix(MOMENTUM): saved.pop(name) for name in list(saved) if name.startswith(MOMENTUM)}
    network.load_state_dict(saved)
    for name, parameter in network.named_parameters():
        optimizer.state[parameter]["momentum_buffer"] = momentum[name]
    return step


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--place", type=Path, required=True, help="directory that the ranks share")
    parser.add_argument("--ms", type=float, required=True, help="that a step lasts at least")
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--save-every", type=int, required=True, help="steps")
    return parser.parse_args()


if __name__ == "__main__":
    main()
