"""Who lives in a frozen world, and who is waited for in a round: what is asked after every event."""

from __future__ import annotations

import pytest

from backend.core.cycle import Cycle, Streams
from backend.core.vocabulary import RoundFinished
from backend.core.world import HostSeat, World
from wire.messages import Device, SyncAck, Versions

VERSIONS = Versions(marchline="0.1.0", wire=1, python="3.11.7")


def world(*sizes: int) -> World:
    seats, first = [], 0
    for host, size in enumerate(sizes):
        devices = tuple(Device(id=f"cpu:{n}", type="cpu") for n in range(size))
        ranks = tuple(range(first, first + size))
        seats.append(HostSeat(host, f"h{host}", "10.0.0.1", 10 + host, ranks, devices, VERSIONS, None))
        first += size
    return World(seats)


def ack(number: int) -> SyncAck:
    return SyncAck(number, 0.0, 0.0, 0.0, "", pack_ms=0.0, load_ms=0.0, wait_ms=0.0, reduce_ms=0.0)


def finished(number: int, *ranks: int, attempt: int = 0) -> RoundFinished:
    return RoundFinished(number, attempt, True, True, dict.fromkeys(ranks, 1), float(len(ranks)), 0, 0, 0.0)


def test_the_living_are_those_who_neither_died_nor_left() -> None:
    seats = world(2, 2)
    seats.remove(2, "dead")
    seats.remove(0, "left")

    assert seats.alive() == (1, 3)
    assert seats.dead() == [2]
    assert [seats.lives(rank) for rank in range(4)] == [False, True, False, True]
    assert not seats.lives(99)
    assert seats.alive_by_host() == {0: (1,), 1: (3,)}
    seats.check()


def test_who_is_out_stays_out() -> None:
    seats = world(2)
    seats.remove(1, "left")
    seats.remove(1, "dead")

    assert seats.alive() == (0,)
    assert seats.ranks[1].state == "dead"
    seats.check()


def test_work_leaves_a_rank_among_the_living() -> None:
    seats = world(2)
    seats.ranks[0].state = "working"

    assert seats.alive() == (0, 1)
    seats.check()


def test_a_death_past_the_world_is_found_out() -> None:
    seats = world(2)
    seats.ranks[0].state = "dead"

    with pytest.raises(AssertionError, match="rank 0 is dead"):
        seats.check()


def test_a_host_is_found_by_its_link() -> None:
    seats = world(1, 1)
    assert seats.host_of_link(11) is seats.hosts[1]
    assert seats.host_of_link(99) is None


def test_a_round_settles_with_the_last_living_acknowledgement() -> None:
    seats = world(3)
    cycle = Cycle(Streams(1, 0))
    cycle.start(seats.alive_by_host(), 0.0)
    assert not cycle.settled(seats.lives)
    cycle.finished(finished(-1, 0, 1, 2))
    for rank in (2, 0):
        assert not cycle.settled(seats.lives)
        assert cycle.acknowledge(rank, ack(-1))
        cycle.check(seats.alive())
    assert not cycle.settled(seats.lives)

    seats.remove(1, "dead")

    assert cycle.settled(seats.lives)
    cycle.check(seats.alive())


def test_another_attempt_waits_for_the_survivors_only() -> None:
    seats = world(2, 1)
    cycle = Cycle(Streams(1, 0))
    cycle.start(seats.alive_by_host(), 0.0)
    seats.remove(2, "dead")
    cycle.retry(seats.alive_by_host(), "rank 2 died", 0.0)
    assert cycle.open is not None
    assert cycle.open.ranks == cycle.open.waiting == {0, 1}
    cycle.finished(finished(-1, 0, 1, attempt=1))
    cycle.acknowledge(0, ack(-1))

    assert not cycle.settled(seats.lives)
    assert cycle.acknowledge(1, ack(-1))
    assert cycle.settled(seats.lives)
