"""torch.distributed's all_reduce over gloo and a division, again and again: the peer of ``benchmarks.reduce``.

A line on stdin, JSON with ``elements``, ``dtype`` and ``times``, is answered by a line: the moments (monotonic clock,
seconds) at which each repetition began and ended on this rank. The buffer is reduced in place and stays where it is:
nothing is packed, copied out or hashed, which favours gloo. In bf16 the f32 values are rounded before and widened
after, and summed in bf16 in between.
"""

import argparse
import json
import sys
import time
from typing import Any

import torch
import torch.distributed as dist


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--world", type=int, required=True)
    parser.add_argument("--meet", required=True, help="host:port where rank 0 listens")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://{options.meet}", rank=options.rank, world_size=options.world)
    print(json.dumps({"ready": options.rank}), flush=True)
    buffer = torch.empty(0)
    for line in sys.stdin:
        order = json.loads(line)
        if buffer.numel() != order["elements"]:
            buffer = torch.rand(order["elements"])
        print(json.dumps(_repeat(buffer, order, options.world)), flush=True)
    dist.destroy_process_group()


def _repeat(buffer: torch.Tensor, order: dict[str, Any], world: int) -> dict[str, list[float]]:
    begun, ended = [], []
    small = torch.empty_like(buffer, dtype=torch.bfloat16) if order["dtype"] == "bf16" else None
    for _ in range(order["times"]):
        dist.barrier()
        begun.append(time.monotonic())
        if small is None:
            dist.all_reduce(buffer)
            buffer.div_(world)
        else:
            small.copy_(buffer)
            dist.all_reduce(small)
            buffer.copy_(small)
            buffer.div_(world)
        ended.append(time.monotonic())
    return {"begun": begun, "ended": ended}


if __name__ == "__main__":
    main()
