"""hivemind.Optimizer with local updates: each peer steps on its own, the swarm averages in the background when it has
done ``TARGET`` samples together."""

import os
import time

import hivemind

from benchmarks.jobs import images
from benchmarks.peers.common import POLL_SECONDS, Rank

TARGET = int(os.environ.get("BENCH_HIVEMIND_TARGET", "8192"))
"""samples of the swarm between two averages"""
MATCHMAKING_SECONDS = float(os.environ.get("BENCH_HIVEMIND_MATCHMAKING", "0.5"))


def main() -> None:
    rank = Rank()
    dht = _join(rank)
    optimizer = hivemind.Optimizer(
        dht=dht,
        run_id="bench",
        target_batch_size=TARGET,
        batch_size_per_step=rank.batch_size,
        params=list(rank.model.parameters()),
        optimizer=images.optimizer,
        use_local_updates=True,
        delay_state_averaging=True,
        matchmaking_time=MATCHMAKING_SECONDS,
        averaging_timeout=10.0,
        load_state_timeout=10.0,
        averager_opts={"request_timeout": MATCHMAKING_SECONDS / 2},  # hivemind warns of deadlocks when it is longer
        tracker_opts={"min_refresh_period": 0.1, "default_refresh_period": 0.2, "max_refresh_period": 0.5},
    )
    rank.start_together()
    for batch in rank.stream():
        with rank.step():
            rank.train(rank.model, optimizer, batch)
    rank.report()
    rank.wait_for_all("through")
    optimizer.shutdown()
    dht.shutdown()


def _join(rank: Rank) -> hivemind.DHT:
    """The first rank opens the swarm, and says where in a file."""
    address = rank.place / "swarm"
    if rank.rank == 0:
        dht = hivemind.DHT(host_maddrs=[f"/ip4/127.0.0.1/tcp/{rank.port}"], start=True)
        draft = address.with_suffix(".draft")
        draft.write_text(str(dht.get_visible_maddrs()[0]))
        draft.rename(address)
        return dht
    while not address.exists():
        time.sleep(POLL_SECONDS)
    return hivemind.DHT(initial_peers=[address.read_text()], host_maddrs=["/ip4/127.0.0.1/tcp/0"], start=True)


if __name__ == "__main__":
    main()
