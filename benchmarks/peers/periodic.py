"""torch's PeriodicModelAverager over gloo: local steps, and every eighth the models are averaged."""

import torch.distributed as dist
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

from benchmarks.jobs import images
from benchmarks.peers.common import PERIOD, Rank


def main() -> None:
    rank = Rank()
    dist.init_process_group("gloo", init_method=rank.rendezvous, rank=rank.rank, world_size=rank.world)
    optimizer = images.optimizer(rank.model.parameters())
    averager = PeriodicModelAverager(period=PERIOD, warmup_steps=0)
    rank.start_together()
    for batch in rank.shard():
        with rank.step():
            rank.train(rank.model, optimizer, batch)
            averager.average_parameters(rank.model.parameters())
    rank.report()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
