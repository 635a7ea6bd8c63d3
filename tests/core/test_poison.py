"""A batch that kills whoever trains it must not cost the whole cohort (F24)."""

from __future__ import annotations

import pytest
from rehearsal import Rehearsal

from backend.core.config import RunConfig
from backend.core.poison import Poison
from simulation.played import Batch, PlayedRank
from simulation.script import Script
from simulation.trial import hold


class Cursed(Rehearsal):
    """Whoever trains a certain batch dies of it."""

    cursed: tuple[int, int] = (0, 12)

    def survives(self, played: PlayedRank, batch: Batch) -> bool:
        if batch[:2] != self.cursed:
            return True
        self.at(self.now, lambda: self.kill(played.rank, 1, "", exception="ValueError", message="bad sample"))
        played.alive = False
        return False


@pytest.mark.parametrize("mode", ["cpu_cadence", "cpu_sync", "cpu_async"])
def test_the_third_death_over_a_batch_saves_and_stops_the_run(mode: str) -> None:
    config = RunConfig("odometer.py:Odometer", mode=mode, batch_size=4, initial_anchor=2, quorum=6, target=6)
    play = Cursed(config, samples=400)
    for index in range(6):
        play.join(f"host-{index}", 10.0)
    play.run()
    dead = [row["rank"] for row in play.rows("deaths")]
    assert len(dead) == 3
    assert play.end and play.end.phase == "failed"
    who = ", ".join(map(str, dead))
    assert play.end.reason == (
        f"RepeatedFailure: ranks {who} died one after the other over the same batch, samples 12 to 16 of epoch 1 "
        "as it was shuffled; look at these samples, and at the last lines of the deaths"
    )
    assert len(play.rows("checkpoints")) == 1


def test_a_round_that_is_committed_settles_before_such_an_end() -> None:
    """Found by the simulator: the third death came between the commit and the last acknowledgement."""
    script = Script.parse(
        "run wires=1 samples=55 mode=cpu_async batch_size=1 initial_anchor=1 quorum=4 target=4 dice=24639\n"
        "host host-0 10.0\nhost host-1 20.0 150.0\nhost host-2 150.0 latency_ms=0.1\nat 0.053 curse 0 18\n"
    )
    trial = hold(script)
    assert trial.failure is None
    assert trial.theatre.end is not None and trial.theatre.end.reason.startswith("RepeatedFailure")


def test_deaths_over_different_batches_are_bad_luck() -> None:
    config = RunConfig("odometer.py:Odometer", batch_size=4, quorum=6, target=6)
    play = Rehearsal(config, samples=4000)
    for index in range(6):
        play.join(f"host-{index}", 10.0)
    for rank, at in ((1, 0.5), (2, 0.9), (3, 1.3), (4, 1.7)):
        play.at(at, lambda rank=rank: play.kill(rank))  # type: ignore[misc]
    play.run()
    assert len(play.rows("deaths")) == 4
    assert play.end and play.end.phase == "done"


def test_another_epoch_is_another_batch() -> None:
    poison = Poison(RunConfig("odometer.py:Odometer"))
    assert [poison.died(rank, epoch, 32) for rank, epoch in ((0, 0), (1, 0), (2, 1), (3, 1))] == [""] * 4
    assert "ranks 2, 3, 4 died" in poison.died(4, 1, 32)
