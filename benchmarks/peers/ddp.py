"""torch DistributedDataParallel over gloo, or NCCL on GPUs: lock-step, equal shards."""

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.jobs import images
from benchmarks.peers.common import Rank


def main() -> None:
    rank = Rank()
    dist.init_process_group(rank.backend, init_method=rank.rendezvous, rank=rank.rank, world_size=rank.world)
    model = DistributedDataParallel(rank.model)
    optimizer = images.optimizer(model.parameters())
    rank.start_together()
    for batch in rank.shard():
        with rank.step():
            rank.train(model, optimizer, batch)
    rank.report()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
