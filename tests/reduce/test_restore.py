"""A run that goes on from a checkpoint: the initial broadcast brings the saved consensus, whatever ranks send."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from plane_kit import ELEMENTS, Bench, arenas, chunks, declared, shared

from wire.arithmetic import F32


async def test_everybody_starts_from_the_restored_consensus_to_the_bit() -> None:
    bench, (fresh, saved, second) = Bench(), arenas(3)
    saved[:3] = (-0.0, 1e-42, 3e38)
    bench.plane.restore_consensus(saved)
    await bench.start_from(fresh, 0, 1)
    assert bench.consensus.tobytes() == saved.tobytes()
    for receiver in bench.hosts.values():
        assert receiver.base.tobytes() == saved.tobytes()
    again = Bench()
    await again.start_from(saved, 0, 1)
    for one in (bench, again):  # and from there on as if nothing had happened
        one.open({0: (0,)}, 0)
        one.plane.contribution(0, declared({0: 2}))
        for chunk in chunks(second):
            one.plane.chunk(0, *chunk)
        await one.finished()
    assert bench.consensus.tobytes() == again.consensus.tobytes()


async def test_hosts_whose_memory_is_mapped_start_from_it_too(tmp_path: Path) -> None:
    bench, (fresh, saved) = Bench(), arenas(2)
    bench.plane.restore_consensus(saved)
    bench.plane.share(0, shared(tmp_path / "host", {0: fresh}))
    bench.open({0: (0,)}, -1)
    bench.plane.contribution(0, declared({0: 1}, -1))
    await bench.finished()
    assert bench.consensus.tobytes() == saved.tobytes()


async def test_a_broadcast_that_is_taken_back_brings_it_again() -> None:
    bench, (fresh, saved) = Bench(), arenas(2)
    bench.plane.restore_consensus(saved)
    await bench.start_from(fresh, 0)
    bench.plane.abort(-1, 0, "a rank died before anybody heard")
    assert bench.plane.consensus is None
    await bench.start_from(fresh, 0)
    assert bench.consensus.tobytes() == saved.tobytes()


async def test_what_cannot_be_restored_is_refused_by_name() -> None:
    good = np.zeros(ELEMENTS, F32)
    for bad, says in (
        (good.astype(np.float64), "one f32 vector, not float64"),
        (good.reshape(1, -1), "one f32 vector"),
        (np.full(ELEMENTS, np.nan, F32), "not finite"),
    ):
        with pytest.raises(ValueError, match=says):
            Bench().plane.restore_consensus(bad)
    bench = Bench()
    bench.plane.restore_consensus(np.zeros(3, F32))
    with pytest.raises(ValueError, match=f"3 elements, the model {ELEMENTS}"):
        bench.open({0: (0,)}, -1)
    bench = Bench()
    await bench.start_from(good, 0)
    with pytest.raises(ValueError, match="before the first round only"):
        bench.plane.restore_consensus(good)
