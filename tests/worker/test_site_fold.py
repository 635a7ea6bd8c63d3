"""What a relay-only host sends up and passes down, and what it does when a child goes wrong."""

from __future__ import annotations

import numpy as np
import pytest
from site_kit import BUFFERS, PARAMS, Running, contribute, contribution, order, running

from wire.messages import (
    ChildAttached,
    ChildLost,
    Contribution,
    FoldOrder,
    NonFinite,
    Reject,
    RelayHello,
    RoundAborted,
    UpdateComing,
)
from wire.session import Channel, ChunkHeader, Encoding

LEFT, RIGHT = {1: [0, 1]}, {2: [2]}


def ramp(scale: float):
    return lambda start, stop: np.arange(start, stop, dtype=np.float32) * np.float32(scale)


async def summed(site: Running, elements: int) -> np.ndarray:
    """What comes up, in order, without a gap."""
    arena = np.full(elements, np.nan, dtype=np.float32)
    at = 0
    while at < elements:
        header, values = await site.up.chunk()
        assert header.offset == at
        arena[at : at + header.elements] = values
        at += header.elements
    return arena


async def test_two_children_leave_as_one_sum_with_all_their_ranks() -> None:
    async with running() as site:
        await site.formed()
        left, right = await site.child(1, [0, 1]), await site.child(2, [2])
        await site.up.say(order(4, 0, LEFT | RIGHT))
        await contribute(right, contribution(4, 0, {2: 2}), ramp(10.0))
        await contribute(left, contribution(4, 0, {0: 3, 1: 0}), ramp(1.0))
        assert await site.up.hear(Contribution) == contribution(4, 0, {0: 3, 1: 0, 2: 2})
        assert np.array_equal(await summed(site, PARAMS + BUFFERS), np.arange(8, dtype=np.float32) * 11)


async def test_the_order_of_the_sum_is_that_of_the_hosts_whoever_is_first() -> None:
    """f32: (1e8 + 1) - 1e8 is not 1e8 - 1e8 + 1, so the order shows."""
    parts = {1: 1e8, 2: 1.0, 3: -1e8}
    async with running() as site:
        await site.formed()
        children = {host: await site.child(host, [host]) for host in (3, 1, 2)}
        await site.up.say(order(0, 0, {host: [host] for host in parts}))
        for host in (2, 3, 1):
            value = parts[host]
            await contribute(
                children[host], contribution(0, 0, {host: 1}), lambda a, b, v=value: np.full(b - a, v, np.float32)
            )
        await site.up.hear(Contribution)
        expected = np.float32(np.float32(np.float32(1e8) + np.float32(1.0)) - np.float32(1e8))
        assert (await summed(site, 8) == expected).all()


async def test_a_model_of_many_chunks() -> None:
    params, buffers = 700_001, 1000
    sizes = {"params": params, "buffers": buffers}
    async with running() as site:
        await site.formed()
        left, right = await site.child(1, [0, 1]), await site.child(2, [2])
        await site.up.say(order(0, 0, LEFT | RIGHT, params_elements=params, buffers_elements=buffers))
        await contribute(left, contribution(0, 0, {0: 1, 1: 1}, **sizes), ramp(1.0))
        await contribute(right, contribution(0, 0, {2: 1}, **sizes), ramp(2.0))
        await site.up.hear(Contribution)
        expected = ramp(1.0)(0, params + buffers) + ramp(2.0)(0, params + buffers)
        assert np.array_equal(await summed(site, params + buffers), expected)
        assert site.up.bytes_in < 4 * (params + buffers) * 1.01


async def test_a_child_that_did_no_work_declares_and_sends_nothing() -> None:
    async with running() as site:
        await site.formed()
        left, right = await site.child(1, [0, 1]), await site.child(2, [2])
        await site.up.say(order(0, 0, LEFT | RIGHT))
        await contribute(left, contribution(0, 0, {0: 0, 1: 0}), ramp(1.0))
        await contribute(right, contribution(0, 0, {2: 1}), ramp(1.0))
        assert (await site.up.hear(Contribution)).masses == {0: 0.0, 1: 0.0, 2: 1.0}
        assert np.array_equal(await summed(site, 8), ramp(1.0)(0, 8))
        await site.up.say(order(1, 0, LEFT | RIGHT))
        await left.say(contribution(1, 0, {0: 0, 1: 0}))
        await right.say(contribution(1, 0, {2: 0}))
        assert await site.up.hear(Contribution) == contribution(1, 0, {0: 0, 1: 0, 2: 0})
        await site.up.say(order(2, 0, RIGHT))
        await contribute(right, contribution(2, 0, {2: 1}), ramp(1.0))
        await site.up.hear(Contribution)


async def test_still_elements_are_those_that_nobody_moved() -> None:
    async with running() as site:
        await site.formed()
        left, right = await site.child(1, [0, 1]), await site.child(2, [2])
        await site.up.say(order(0, 0, LEFT | RIGHT))
        await contribute(left, contribution(0, 0, {0: 1, 1: 1}, [(0, 4)]), ramp(1.0))
        await contribute(right, contribution(0, 0, {2: 1}, [(1, 5)]), ramp(1.0))
        assert (await site.up.hear(Contribution)).still == [(1, 4)]
        pieces = [await site.up.chunk() for _ in range(3)]
        assert [header.offset for header, _ in pieces] == [0, 4, 6]
        assert [values.tolist() for _, values in pieces] == [[0.0], [4.0, 10.0], [12.0, 14.0]]


async def test_bf16_is_decoded_summed_in_f32_and_encoded() -> None:
    async with running() as site:
        await site.formed()
        left, right = await site.child(1, [0, 1]), await site.child(2, [2])
        await site.up.say(order(0, 0, LEFT | RIGHT, encoding=int(Encoding.BF16), buffers_elements=0))
        for far, steps, bits in ((left, {0: 1, 1: 1}, 0x3F80), (right, {2: 1}, 0x3B80)):  # 1.0 and 2**-8
            await far.say(contribution(0, 0, steps, buffers=0))
            header = ChunkHeader(0, 0, 0, 0, PARAMS, Encoding.BF16)
            await far.socket.send(far.session.seal_chunk(header, np.full(PARAMS, bits, "<u2").data))
        await site.up.hear(Contribution)
        event = await site.up.next()
        assert event.header.encoding == Encoding.BF16
        # 1.00390625 is half way between two bf16 values: to even, which is 1.0
        assert np.frombuffer(event.payload, "<u2").tolist() == [0x3F80] * PARAMS


async def test_a_contribution_that_is_quicker_than_its_order_waits_for_it() -> None:
    async with running() as site:
        await site.formed()
        left = await site.child(1, [0, 1])
        for number in range(3):
            await contribute(left, contribution(number, 0, {0: 1, 1: 1}), ramp(1.0))
            await site.child(10 + number, [10 + number])  # a round trip, in which the contribution arrives
            await site.up.say(order(number, 0, LEFT))
            assert (await site.up.hear(Contribution)).round == number
            assert np.array_equal(await summed(site, 8), ramp(1.0)(0, 8))


async def test_an_aborted_attempt_leaves_no_trace_in_the_next() -> None:
    async with running() as site:
        await site.formed()
        left, right = await site.child(1, [0, 1]), await site.child(2, [2])
        await site.up.say(order(0, 0, LEFT | RIGHT))
        await contribute(left, contribution(0, 0, {0: 1, 1: 1}), ramp(100.0))
        await site.up.say(RoundAborted(0, 0, "somebody died"))
        await site.up.say(order(0, 1, LEFT | RIGHT))
        await site.up.say(UpdateComing(0, 1, absolute=False))
        await right.hear(UpdateComing)
        await contribute(right, contribution(0, 0, {2: 1}), ramp(100.0))
        await contribute(right, contribution(0, 1, {2: 1}), ramp(2.0))
        await contribute(left, contribution(0, 1, {0: 1, 1: 1}), ramp(1.0))
        assert (await site.up.hear(Contribution)).attempt == 1
        assert np.array_equal(await summed(site, 8), ramp(3.0)(0, 8))


async def test_what_comes_down_reaches_every_child_of_the_order_and_nobody_else() -> None:
    async with running() as site:
        await site.formed()
        left, right = await site.child(1, [0, 1]), await site.child(2, [2])
        idle = await site.child(3, [3])
        await site.up.say(order(0, 0, LEFT | RIGHT))
        coming = UpdateComing(0, 0, absolute=False, still=[(0, 2)])
        await site.up.say(coming)
        header, values = ChunkHeader(0, 0, 0, 2, 4), np.arange(4, dtype=np.float32)
        await site.up.stream(header, values)
        for far in (left, right):
            assert await far.hear(UpdateComing) == coming
            got, heard = await far.chunk()
            assert (got, heard.tolist()) == (header, values.tolist())
        await site.up.say(RoundAborted(0, 0, "over"))
        await site.up.stream(header, values)
        await site.up.say(order(0, 1, {1: [0, 1], 2: [2], 3: [3]}))
        await site.up.say(UpdateComing(0, 1, absolute=False))
        for far in (left, right, idle):
            assert (await far.hear(UpdateComing)).attempt == 1


async def test_a_value_that_is_not_finite_is_passed_on_behind_the_declaration() -> None:
    bad = NonFinite(0, 0, 2, 5, "nan")
    async with running() as site:
        await site.formed()
        left, right = await site.child(1, [0, 1]), await site.child(2, [2])
        await site.up.say(order(0, 0, LEFT | RIGHT))
        await right.say(contribution(0, 0, {2: 1}))
        await right.say(bad)
        await contribute(left, contribution(0, 0, {0: 1, 1: 1}), ramp(1.0))
        await site.up.hear(Contribution)
        assert await site.up.hear(NonFinite) == bad


@pytest.mark.parametrize("finite", [np.nan, np.inf])
async def test_a_child_that_sends_one_unannounced_is_the_one_that_is_lost(finite: float) -> None:
    async with running() as site:
        await site.formed()
        left, right = await site.child(1, [0, 1]), await site.child(2, [2])
        await site.up.say(order(0, 0, LEFT | RIGHT))
        await contribute(left, contribution(0, 0, {0: 1, 1: 1}), ramp(1.0))
        await contribute(right, contribution(0, 0, {2: 1}), lambda a, b: np.full(b - a, finite, np.float32))
        await site.up.hear(Contribution)
        lost = await site.up.hear(ChildLost)
        assert lost.host == 2
        assert "at element 0" in lost.reason
        assert (await right.ended())[0] == 4403


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(contribution(0, 0, {2: 1, 3: 1}), id="ranks"),
        pytest.param(contribution(0, 0, {2: 1}, params=5), id="model"),
        pytest.param(contribution(0, 0, {2: 1}, [(4, 2)]), id="still"),
        pytest.param(NonFinite(0, 0, 0, 5, "nan"), id="a neighbour's rank"),
        pytest.param(FoldOrder(0, 0, {1: [0]}, 1, 1), id="an order"),
        pytest.param(ChildAttached(5, [5]), id="children of its own"),
    ],
)
async def test_a_child_that_says_what_it_may_not_is_lost_by_name(wrong) -> None:
    async with running() as site:
        await site.formed()
        left, right = await site.child(1, [0, 1]), await site.child(2, [2])
        await site.up.say(order(0, 0, LEFT | RIGHT))
        await right.say(wrong)
        assert (await site.up.hear(ChildLost)).host == 2
        assert (await right.ended())[0] == 4403
        await site.up.say(RoundAborted(0, 0, "host 2 is lost"))
        await site.up.say(order(0, 1, LEFT))
        await contribute(left, contribution(0, 1, {0: 1, 1: 1}), ramp(1.0))
        await site.up.hear(Contribution)
        assert np.array_equal(await summed(site, 8), ramp(1.0)(0, 8))


async def test_a_child_whose_connection_breaks_is_told_and_the_next_attempt_goes_on_without_it() -> None:
    async with running() as site:
        await site.formed()
        left, right = await site.child(1, [0, 1]), await site.child(2, [2])
        await site.up.say(order(0, 0, LEFT | RIGHT))
        await contribute(left, contribution(0, 0, {0: 1, 1: 1}), ramp(1.0))
        await right.say(contribution(0, 0, {2: 1}))
        await site.up.hear(Contribution)
        right.socket.transport.abort()
        assert (await site.up.hear(ChildLost)).host == 2
        await site.up.say(RoundAborted(0, 0, "host 2 is lost"))
        await site.up.say(order(0, 1, LEFT))
        await contribute(left, contribution(0, 1, {0: 1, 1: 1}), ramp(1.0))
        await site.up.hear(Contribution)
        assert np.array_equal(await summed(site, 8), ramp(1.0)(0, 8))


async def test_an_order_for_a_host_that_just_went_is_not_folded_and_does_no_harm() -> None:
    async with running() as site:
        await site.formed()
        left = await site.child(1, [0, 1])
        await site.up.say(order(0, 0, LEFT | RIGHT))
        await left.say(contribution(0, 0, {0: 1, 1: 1}))
        await site.up.say(order(0, 1, LEFT))
        await contribute(left, contribution(0, 1, {0: 1, 1: 1}), ramp(1.0))
        assert (await site.up.hear(Contribution)).attempt == 1


async def test_a_claim_that_the_controller_refuses_ends_that_link_with_its_words() -> None:
    async with running() as site:
        await site.formed()
        far = await site.child(9, [7])
        await site.up.say(ChildLost(9, "host 9 is not part of this run's world"))
        assert await far.ended() == (4403, "host 9 is not part of this run's world")
        assert (await site.up.hear(ChildLost)).host == 9


async def test_one_data_link_for_each_host() -> None:
    async with running() as site:
        await site.formed()
        await site.child(1, [0, 1])
        second = await site.dial(Channel.DATA)
        await second.say(RelayHello(1, [0, 1]))
        assert "attached already" in (await second.hear(Reject)).reason
        assert (await second.ended())[0] == 4403
        assert site.up.silent


async def test_at_the_runs_end_children_hear_that_it_is_over() -> None:
    async with running() as site:
        await site.formed()
        left = await site.child(1, [0, 1])
        await site.up.socket.close(4410, "trained 3 epochs")
        assert await left.ended() == (4410, "trained 3 epochs")


async def test_when_the_uplink_breaks_children_are_let_go_and_the_controller_is_told() -> None:
    async with running() as site:
        await site.formed()
        left = await site.child(1, [0, 1])
        site.up.socket.transport.abort()
        assert (await left.ended())[0] == 4403
        exited = await site.join.next()
        assert type(exited.message).__name__ == "RelayExited"


# ----------------------------------------------------------------------------------- a site under a site


async def test_a_relay_only_host_behind_another_folds_its_own_children() -> None:
    """Scripted: the lower one is played, so what it is told is seen."""
    async with running() as site:
        await site.formed()
        left = await site.child(1, [0, 1])
        lower = await site.child(5, [])
        for host, ranks in ((6, [2]), (7, [3])):
            await lower.say(ChildAttached(host, ranks))
            assert await site.up.hear(ChildAttached) == ChildAttached(host, ranks)
        await site.up.say(order(0, 0, {1: [0, 1], 6: [2], 7: [3]}))
        assert await lower.hear(FoldOrder) == order(0, 0, {6: [2], 7: [3]})
        await contribute(lower, contribution(0, 0, {2: 1, 3: 1}), ramp(10.0))
        await contribute(left, contribution(0, 0, {0: 1, 1: 1}), ramp(1.0))
        assert (await site.up.hear(Contribution)).steps == {0: 1, 1: 1, 2: 1, 3: 1}
        assert np.array_equal(await summed(site, 8), ramp(11.0)(0, 8))
        await site.up.say(RoundAborted(0, 0, "somebody died"))
        assert (await lower.hear(RoundAborted)).attempt == 0
        await lower.say(ChildLost(6, "unplugged"))
        assert await site.up.hear(ChildLost) == ChildLost(6, "unplugged")
        await site.up.say(ChildLost(7, "its control link ended"))
        assert (await lower.hear(ChildLost)).host == 7
        lower.socket.transport.abort()
        assert {(await site.up.hear(ChildLost)).host for _ in range(2)} == {5, 7}
