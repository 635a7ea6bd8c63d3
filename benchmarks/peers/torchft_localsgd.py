"""torchft LocalSGD over gloo: local steps, and every eighth a quorum and an average. Each rank is a replica group of
its own."""

from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torchft import Manager, ProcessGroupGloo
from torchft.coordination import LighthouseServer
from torchft.local_sgd import LocalSGD

from benchmarks.jobs import images
from benchmarks.peers.common import PERIOD, Rank

TIMEOUT = timedelta(seconds=30)


def main() -> None:
    rank = Rank()
    lighthouse = _lighthouse(rank)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    optimizer = images.optimizer(rank.model.parameters())

    def load(state: dict[str, Any]) -> None:
        rank.model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict=load,
        state_dict=lambda: {"model": rank.model.state_dict(), "optimizer": optimizer.state_dict()},
        min_replica_size=rank.world,
        use_async_quorum=False,
        timeout=TIMEOUT,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=f"http://127.0.0.1:{rank.port}",
        replica_id=f"rank{rank.rank}",
        hostname="127.0.0.1",
        init_sync=False,  # the same weights everywhere
    )
    rank.start_together()
    with LocalSGD(manager, rank.model, optimizer, sync_every=PERIOD):
        for batch in rank.shard():
            with rank.step():
                rank.train(rank.model, optimizer, batch)
    rank.report()
    rank.wait_for_all("through")
    manager.shutdown(wait=False)
    if lighthouse is not None:
        lighthouse.shutdown()


def _lighthouse(rank: Rank) -> LighthouseServer | None:
    """The first rank runs it."""
    server = None
    if rank.rank == 0:
        server = LighthouseServer(bind=f"127.0.0.1:{rank.port}", min_replicas=rank.world, join_timeout_ms=10_000)
    rank.wait_for_all("lit")
    return server


if __name__ == "__main__":
    main()
