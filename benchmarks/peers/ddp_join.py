"""torch DistributedDataParallel within ``Join``, its way with uneven inputs; shards as a sampler deals them: equal but
for a batch, whatever the speeds. Ranks with fewer batches shadow the others' collectives at the end."""

import torch.distributed as dist
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from benchmarks.jobs import images
from benchmarks.peers.common import Rank


def main() -> None:
    rank = Rank()
    dist.init_process_group("gloo", init_method=rank.rendezvous, rank=rank.rank, world_size=rank.world)
    model = DistributedDataParallel(rank.model)
    optimizer = images.optimizer(model.parameters())
    rank.start_together()
    uneven = rank.steps_of_equal_shards + (rank.rank == 0)
    with Join([model]):
        for batch in rank.shard(uneven):
            with rank.step():
                rank.train(model, optimizer, batch)
    rank.report()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
