"""A round's review in a whole cohort: growth, verdicts, errands, and what is recorded of them (behaviour F9)."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from msgspec.structs import replace as changed
from rehearsal import Rehearsal

from backend.core.config import RunConfig
from backend.core.vocabulary import Effect, Event, RankSaid, WriteCheckpoint
from wire.messages import EvalResult, SyncAck

CONFIG = RunConfig(job="odometer.py:Odometer", batch_size=1, quorum=2, target=2, initial_anchor=5, epochs=2)


class Told(Rehearsal):
    """Ranks that say more: the divergence and learning rate of a round, the duration of an evaluation."""

    def __init__(self, config: RunConfig, *, samples: int, reduce_seconds: float = 0.05) -> None:
        super().__init__(config, samples=samples, reduce_seconds=reduce_seconds)
        self.divergence: Callable[[int], float] = lambda number: 0.01
        self.lr: Callable[[int], float | None] = lambda number: None
        self.evaluation_ms = 1.0
        self.manifests: list[dict[str, Any]] = []
        self.intercept = self._look

    def feed(self, event: Event) -> list[Effect]:
        if isinstance(event, RankSaid):
            match event.message:
                case SyncAck(round=number) as ack:
                    said = changed(ack, divergence=self.divergence(number), lr=self.lr(number))
                    event = RankSaid(event.rank, said)
                case EvalResult() as result:
                    event = RankSaid(event.rank, changed(result, elapsed_ms=self.evaluation_ms))
        return super().feed(event)

    def _look(self, effect: Effect) -> bool:
        if isinstance(effect, WriteCheckpoint):
            self.manifests.append(effect.manifest)
        return False


def played(samples: int = 3000, *, prepare: Callable[[Told], None] = lambda play: None, **changes: Any) -> Told:
    """Two ranks of 5 and 10 ms; a round takes about 52 ms, a window of the first anchor 50."""
    play = Told(replace(CONFIG, **changes), samples=samples)
    prepare(play)
    play.join("fast", 5.0)
    play.join("slow", 10.0)
    play.run()
    assert play.end is not None and play.end.phase == "done"
    return play


def anchors(play: Told, rows: int) -> list[int]:
    return [row["anchor"] for row in play.rows("rounds")[:rows]]


# ---------------------------------------------------------------------------------------------- growth


def test_the_anchor_grows_until_the_round_is_a_small_part_of_the_window():
    play = played(overhead_target=0.05)
    rows = play.rows("rounds")

    assert anchors(play, 5) == [5, 10, 20, 40, 80]  # 51, 34, 21 and 11.5 % of the window, twice the anchor at most
    settled = [row for row in rows[8:] if row["planned"] == {0: 196, 1: 98}]
    assert len(settled) > 10
    assert all(row["reduce_seconds"] / row["seconds"] <= 0.0505 for row in settled)
    assert rows[1]["decision"].startswith("The last round cost 51 % of the window (target 5 %), so the anchor grows")
    assert rows[6]["decision"].endswith("keeps 196. So small a change does not move the allotments yet.")


def test_the_report_carries_the_round_before(monkeypatch: pytest.MonkeyPatch):
    """D13: a round's own duration is known only when it has closed."""
    play = Told(CONFIG, samples=400)
    seen: list[float] = []
    play.join("fast", 5.0)
    play.join("slow", 10.0)
    play.run(until=0.01)
    scheduler = play.cohort.march.training.scheduler  # type: ignore[union-attr]
    report_window = scheduler.report_window
    monkeypatch.setattr(
        scheduler, "report_window", lambda report: (seen.append(report.sync_ms), report_window(report))[1]
    )
    play.run()

    took = [row["reduce_seconds"] * 1000 for row in play.rows("rounds")]
    assert seen == pytest.approx([0.0, *took[:-1]])


def test_a_round_in_which_somebody_died_is_no_reason_to_grow():
    """The round lasts 30 s, until the silent host is given up. That says nothing about rounds without it."""
    play = Told(replace(CONFIG, target=3, quorum=3), samples=4000, reduce_seconds=0.0)
    for name in ("fast", "slow", "frozen"):
        play.join(name, 10.0)
    play.at(2.0, lambda: play.freeze("frozen"))
    play.run()

    rows = play.rows("rounds")
    assert play.rows("deaths")
    assert max(row["seconds"] for row in rows) > 25
    assert max(row["anchor"] for row in rows) <= 10


@pytest.mark.parametrize("changes", [{"mode": "cpu_sync"}, {"fixed_counts": (4, 2)}])
def test_nothing_grows_where_the_counts_are_given(changes: dict[str, Any]):
    play = played(
        samples=240, **changes, prepare=lambda play: setattr(play, "lr", lambda number: 10.0 ** -(number // 2))
    )
    rows = play.rows("rounds")

    assert len({row["anchor"] for row in rows}) == 1
    assert {row["verdict"] for row in rows} == {"stable"}  # the cliffs of the learning rate shorten nothing here
    opening = play.cohort.march.training.scheduler.opening  # type: ignore[union-attr]
    assert {row["decision"] for row in rows} == {opening}


# ---------------------------------------------------------------------------------------------- verdicts


def rising(play: Told) -> None:
    play.divergence = lambda number: 0.06 + 0.01 * number if number < 6 else 0.01


def test_an_objection_is_recorded_and_holds_the_anchor():
    play = played(prepare=rising, meta_controller=False)
    rows = play.rows("rounds")

    assert [row["verdict"] for row in rows[:8]] == ["stable"] * 2 + ["suppress_growth"] * 4 + ["stable"] * 2
    assert anchors(play, 12) == [5, *[10] * 10, 20]
    assert max(row["anchor"] for row in rows) > 40  # five quiet rounds later it goes on
    assert rows[2]["divergence"] == pytest.approx(0.08)
    assert rows[2]["verdict_reason"] == "The replicas were 0.08 apart, above the guard's 0.05 and rising for 3 rounds."
    assert "but the anchor stays at 10 batches: this round's verdict objects to it" in rows[2]["decision"]
    assert "growth waits for 4 more rounds without an objection" in rows[6]["decision"]


def test_objections_in_a_row_shorten_the_window():
    rows = played(prepare=rising).rows("rounds")

    assert [row["verdict"] for row in rows[2:6]] == ["suppress_growth"] * 2 + ["nudge_down"] * 2
    assert [row["anchor"] for row in rows[3:7]] == [10, 4, 3, 3]  # the second nudge sees that it has shrunk already
    assert rows[4]["verdict_reason"] == (
        "The guard objected 3 rounds in a row, so the anchor is to shrink to 38 % of itself. "
        "The replicas were 0.1 apart, above the guard's 0.05 and rising for 3 rounds."
    )
    assert rows[4]["decision"].startswith("The guard objected 3 rounds in a row, so the anchor shrinks from 10 to 4")


def test_without_a_guard_nobody_objects():
    rows = played(prepare=rising, guard="none").rows("rounds")

    assert {row["verdict"] for row in rows} == {"stable"}
    assert {row["verdict_reason"] for row in rows} == {"No guard watches the divergence."}


def test_a_cliff_of_the_learning_rate_shortens_the_window():
    def prepare(play: Told) -> None:
        play.lr = lambda number: 0.1 if number < 6 else 0.01

    rows = played(prepare=prepare).rows("rounds")

    assert [row["verdict"] for row in rows[:9]] == ["stable"] * 6 + ["nudge_down"] + ["stable"] * 2
    assert rows[6]["anchor"] < rows[5]["anchor"]
    assert rows[6]["decision"].startswith("The learning rate fell from 0.1 to 0.01 in one round, so the anchor shrinks")
    assert rows[6]["verdict_reason"].startswith(
        "The learning rate fell from 0.1 to 0.01 in one round, so the anchor is"
    )
    assert rows[6]["verdict_reason"].endswith("within the guard's 0.05.")
    assert not any("nudge" in row["verdict"] for row in played(prepare=prepare, meta_controller=False).rows("rounds"))


def test_the_growth_guard_shortens_the_window_too():
    def prepare(play: Told) -> None:
        play.divergence = lambda number: 1e-4 * 1e3**number if number < 6 else 0.01

    rows = played(prepare=prepare, guard="growth").rows("rounds")

    assert "nudge_down" in {row["verdict"] for row in rows}
    assert any("The divergence changes by" in row["decision"] for row in rows)


# ------------------------------------------------------------------------------------- views and manifest


def test_the_view_shows_the_last_verdict():
    play = Told(CONFIG, samples=3000)
    rising(play)
    assert play.cohort.snapshot(0.0)["guard"] is None
    play.join("fast", 5.0)
    play.join("slow", 10.0)
    play.run(until=0.02)
    view = play.cohort.snapshot(play.now)
    assert view["guard"] is None
    play.run(until=0.12)
    assert play.cohort.snapshot(play.now)["decision"] == (
        "No round has closed yet: every rank gets the same share until it has been timed."
    )
    while len(play.rows("rounds")) < 3:
        play.run(until=play.now + 0.01)
    view = play.cohort.snapshot(play.now)
    assert view["guard"] == {
        "verdict": "suppress_growth",
        "reason": "The replicas were 0.08 apart, above the guard's 0.05 and rising for 3 rounds.",
    }


def test_the_manifest_keeps_the_guards_history():
    play = played(prepare=lambda play: setattr(play, "divergence", lambda number: number / 1000))
    last = play.rows("rounds")[-1]["round"]

    manifest = play.manifests[-1]
    history = [number / 1000 for number in range(last - 4, last + 1)]
    assert manifest["guard"] == {"kind": "level", "history": pytest.approx(history)}
    assert manifest["scheduler"]["anchor"] == play.rows("rounds")[-1]["anchor"]
    assert played(samples=200, guard="none").manifests[-1]["guard"] == {"kind": "none"}


# ---------------------------------------------------------------------------------------------- errands


def test_the_evaluating_rank_gets_less_in_the_window_after_an_epoch():
    """The first evaluation tells what one costs; from the second on the next epoch's first window makes room."""

    def prepare(play: Told) -> None:
        play.evaluation_ms = 200.0

    play = played(samples=600, epochs=4, max_anchor=50, overhead_target=0.5, prepare=prepare)
    rows = play.rows("rounds")
    ends = [next(row for row in reversed(rows) if row["epoch"] == epoch) for epoch in range(4)]

    assert ["an errand will take 200 ms" in row["decision"] for row in ends] == [False, True, True, False]
    assert sum("errand" in row["decision"] for row in rows) == 2
    starts = [next(row for row in rows if row["epoch"] == epoch) for epoch in range(1, 4)]
    full = starts[0]["planned"]
    assert [row["planned"][0] for row in starts] == [full[0], max(1, full[0] - 40), max(1, full[0] - 40)]
    assert [row["planned"][1] for row in starts] == [full[1]] * 3


def test_a_configured_hint_deals_the_first_window():
    rows = played(speed_hint=(1, 2.0)).rows("rounds")

    assert rows[0]["planned"] == {0: 10, 1: 5}


@pytest.mark.parametrize("seed", range(40))
def test_whatever_the_ranks_report_the_run_ends_with_every_sample_accepted(seed: int) -> None:
    """Divergences, learning rates, evaluations and deaths by the dice; the invariants are checked after every event."""
    dice = random.Random(seed)
    ranks = dice.randint(2, 6)
    config = replace(
        CONFIG,
        batch_size=dice.choice([1, 4]),
        epochs=dice.randint(1, 4),
        quorum=ranks,
        target=ranks,
        initial_anchor=dice.choice([1, 3, 10]),
        max_anchor=dice.choice([12, 1000]),
        overhead_target=dice.choice([0.01, 0.05, 0.5]),
        max_batch_diff=dice.choice([None, None, 2]),
        speed_hint=dice.choice([None, (dice.randrange(8), dice.uniform(1.0, 64.0))]),
        guard=dice.choice(["level", "growth", "none"]),
    )
    play = Told(config, samples=dice.randint(ranks * 4, 1500), reduce_seconds=dice.choice([0.0, 0.01, 0.3]))
    play.divergence = lambda number: dice.choice([0.0, 1e-9, dice.uniform(0.0, 0.2), math.nan, 10.0])
    play.lr = lambda number: dice.choice([None, 0.0, 0.1, 0.01, math.nan])
    play.evaluation_ms = dice.choice([0.0, 150.0, 5000.0])
    for number in range(ranks):
        play.join(f"host-{number}", dice.choice([1.0, 3.5, 20.0, 64.0]))
    if ranks > 2:
        play.at(dice.uniform(0.1, 3.0), lambda: strike(play, dice.randrange(ranks)))
    play.run(until=5000)

    assert play.end is not None and play.end.phase == "done"
    assert [row["samples_accepted"] for row in play.rows("epochs") if "seconds" in row] == [
        play.samples
    ] * config.epochs
    for row in play.rows("rounds"):
        assert row["verdict"] in ("stable", "suppress_growth", "nudge_down")
        assert row["verdict_reason"].endswith(".")
        assert row["decision"].endswith(".")


def strike(play: Told, rank: int) -> None:
    if play.end is None and rank in play.ranks and play.ranks[rank].alive and play.cohort.phase == "training":
        play.kill(rank)
