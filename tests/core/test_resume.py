"""Going on from a checkpoint in the core: every sample once over both runs, whatever world and batch size follow."""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from rehearsal import Rehearsal

from backend.core.config import RunConfig
from backend.core.join_admission import unlike
from backend.core.resume import Resume, read_resume, reseated
from backend.core.vocabulary import Effect, SendRank, WriteCheckpoint
from backend.core.work import EpochPool, Range
from simulation.props import ONE_NUMBER
from wire.messages import FetchState, SavedState, TensorSpec

CONFIG = RunConfig(
    job="j.py:J",
    quorum=2,
    target=2,
    batch_size=4,
    epochs=3,
    initial_anchor=2,
    checkpoint_epochs=None,
    checkpoint_rounds=1,
)


class Saved(Rehearsal):
    """Remembers every manifest, as JSON would."""

    def __init__(self, config: RunConfig, **options: Any) -> None:
        super().__init__(config, **options)
        self.manifests: list[dict[str, Any]] = []
        self.intercept = self._look

    def _look(self, effect: Effect) -> bool:
        if isinstance(effect, WriteCheckpoint):
            ranks = {"states": list(effect.states), "checkpoint": effect.checkpoint}
            self.manifests.append(json.loads(json.dumps(effect.manifest)) | ranks)
        return False


def play(config: RunConfig, *hosts: float, resume: Resume | None = None, samples: int = 64) -> Saved:
    """A run to its end, each host with one device of that pace."""
    stage = Saved(config, samples=samples)
    if resume is not None:
        stage.go_on(resume)
    for number, pace in enumerate(hosts):
        stage.join(f"h{number}", pace)
    stage.run()
    assert stage.end is not None, "the run did not end"
    return stage


def trained(stage: Saved, position: Resume | None = None) -> Counter[tuple[int, int]]:
    """(epoch, sample) of every accepted sample; ``position`` adds those from before."""
    seen: Counter[tuple[int, int]] = Counter()
    for rank in stage.ranks.values():
        for epoch, offset, size in rank.seen:
            seen.update((epoch, sample) for sample in range(offset, offset + size))
    if position is not None:
        for epoch, count in enumerate(position.samples_accepted):
            seen.update((epoch, sample) for sample in range(count))
        for piece in position.accepted:
            seen.update((len(position.samples_accepted), sample) for sample in range(piece.offset, piece.end))
    return seen


def whole(epochs: int, samples: int) -> Counter[tuple[int, int]]:
    return Counter({(epoch, sample): 1 for epoch in range(epochs) for sample in range(samples)})


@pytest.mark.parametrize("mode", ["cpu_sync", "cpu_cadence", "cpu_async"])
def test_every_sample_once_from_each_checkpoint_of_a_run(mode: str):
    config = replace(CONFIG, mode=mode)
    first = play(config, 5.0, 11.0, samples=160)
    assert sum(bool(manifest["progress"]["accepted"]) for manifest in first.manifests) > 2
    for manifest in first.manifests[:-1]:
        position = read_resume(manifest)
        again = play(config, 5.0, 11.0, resume=position, samples=160)
        assert again.end.phase == "done"
        assert trained(again, position) == whole(3, 160)
        assert again.rows("runs")[-1]["summary"]["samples_accepted"] == [160] * 3
        rounds = [row["round"] for row in again.rows("rounds")]
        assert rounds == list(range(position.round + 1, position.round + 1 + len(rounds))), "the count goes on"
        steps = [row["global_step"] for row in again.rows("rounds")]
        assert steps[0] > position.global_step
        assert steps == sorted(steps)


@pytest.mark.parametrize("batch_size", [1, 3, 4, 5, 64])
@pytest.mark.parametrize("hosts", [(5.0, 9.0), (5.0, 9.0, 14.0), (3.0, 4.0, 5.0, 6.0)])
def test_another_world_and_another_batch_size_train_exactly_the_rest(batch_size: int, hosts: tuple[float, ...]):
    first = play(CONFIG, 5.0, 11.0)
    position = read_resume(next(m for m in first.manifests if m["progress"]["accepted"]))
    changed = replace(CONFIG, batch_size=batch_size, target=len(hosts), quorum=len(hosts))
    again = play(changed, *hosts, resume=position)
    assert trained(again, position) == whole(3, 64)
    told = [row["text"] for row in again.rows("events") if row["kind"] == "resumed_changed"]
    assert any("Batches have" in text for text in told) == (batch_size != 4)
    assert any("No state of their own" in text for text in told) == (len(hosts) > 2)


def test_twelve_samples_are_left_in_every_layout():
    """Case F09: 32 samples, stopped after 20; three, twelve and four batches remain."""
    accepted = [Range(0, 20)]
    for batch_size, batches in ((4, 3), (1, 12), (3, 4)):
        pool = EpochPool(0, 32, batch_size, accepted)
        assert (pool.remaining_batches, pool.accepted_samples) == (batches, 20)
        taken = []
        while (chunk := pool.take(1, 0)) is not None:
            taken.append(chunk)
            pool.check()
        assert len(taken) == batches
        assert sum(chunk.size for chunk in taken) == 12


def test_work_that_comes_back_in_a_resumed_epoch_keeps_its_batches():
    pool = EpochPool(0, 32, 4, [Range(3, 7), Range(15, 6)])
    assert pool.uncovered() == [Range(0, 3), Range(10, 5), Range(21, 11)]
    first, second = pool.take(1, 0), pool.take(2, 1)
    assert (first, second) == (Range(0, 3), Range(10, 5))
    pool.forfeit(1)
    pool.check()
    assert pool.take(1, 2) == Range(10, 4)
    pool.check()
    assert pool.take(9, 2) == Range(14, 1)
    assert pool.take(9, 2) == Range(21, 11)
    pool.check()


def test_what_was_lost_before_is_neither_trained_again_nor_forgotten():
    manifest = next(m for m in play(CONFIG, 5.0, 11.0).manifests if m["progress"]["accepted"])
    left = EpochPool(0, 64, 4, read_resume(manifest).accepted).uncovered()[0]
    row = {"offset": left.offset, "size": 4, "rank": 1, "reason": "rank 1 contributed nan"}
    manifest["progress"] |= {"lost": [row], "samples_lost": 4}
    position = read_resume(manifest)
    again = play(CONFIG, 5.0, 11.0, resume=position)
    epochs = [row for row in again.rows("epochs") if "batches" in row]
    assert epochs[0]["samples_lost"] == [row]
    assert [epoch["samples_accepted"] for epoch in epochs] == [60, 64, 64]
    seen = trained(again, position)
    assert {sample for sample in range(64) if seen[0, sample] == 0} == set(range(left.offset, left.offset + 4))
    assert max(seen.values()) == 1


@pytest.mark.parametrize("accepted", [[Range(0, 33)], [Range(0, 5), Range(4, 2)], [Range(3, 0)], [Range(-1, 2)]])
def test_coverage_that_cannot_be_is_refused(accepted: list[Range]):
    with pytest.raises(ValueError, match="are no part of 32"):
        EpochPool(0, 32, 4, accepted)


def test_an_epoch_that_was_just_closed_is_not_begun_again():
    first = play(replace(CONFIG, checkpoint_rounds=None, checkpoint_epochs=1), 5.0, 11.0)
    position = read_resume(first.manifests[0])
    assert position.samples_accepted == (64,)
    assert position.accepted == ()
    assert first.manifests[0]["reason"] == "after epoch 1"
    assert len(first.manifests) == 3, "after two epochs, and at the end"
    again = play(CONFIG, 5.0, 11.0, resume=position)
    assert trained(again, position) == whole(3, 64)
    assert [row["epoch"] for row in again.rows("epochs") if "batches" in row] == [1, 2]


def test_an_epoch_over_two_runs_is_written_down_whole():
    first = play(CONFIG, 5.0, 11.0)
    position = read_resume(next(m for m in first.manifests if m["progress"]["accepted"]))
    again = play(CONFIG, 5.0, 11.0, resume=position)
    epoch = next(row for row in again.rows("epochs") if "batches" in row)
    assert (epoch["epoch"], epoch["batches"], epoch["samples_accepted"]) == (0, 16, 64)


def test_pace_guard_and_clock_are_taken_up():
    config = replace(CONFIG, guard="growth", epochs=2)
    first = play(config, 5.0, 15.0, samples=640)
    manifest = first.manifests[len(first.manifests) // 2]
    position = read_resume(manifest)
    again = Saved(config, samples=640)
    again.go_on(position)
    again.join("h0", 5.0)
    again.join("h1", 15.0)
    again.run(until=0.2)
    training = again.cohort.march.training
    saved = {int(rank): ms for rank, ms in manifest["scheduler"]["smoothed_ms_per_batch"].items()}
    assert {rank: training.scheduler.smoothed(rank) for rank in (0, 1)} == saved
    assert training.scheduler.calibrated
    assert training.scheduler.phase == manifest["scheduler"]["phase"]
    assert training.global_step >= manifest["global_step"]
    assert training.review.state()["meta"]["anchors"][:1] or manifest["meta"]["anchors"] == []


def test_rates_follow_their_devices_to_new_ranks():
    state = {"anchor": 4, "anchor_rank": 1, "smoothed_ms_per_batch": {"0": 5.0, "1": 15.0}, "phase": "stable"}
    before = [("a", "cpu:0"), ("b", "cpu:0")]
    swapped = reseated(state, before, [("b", "cpu:0"), ("a", "cpu:0"), ("c", "cpu:0")])
    assert swapped is not None
    assert swapped["smoothed_ms_per_batch"] == {"0": 15.0, "1": 5.0, "2": 0.0}
    assert swapped["anchor_rank"] == 0
    assert reseated(state, before, [("x", "cpu:0")]) is None


def test_who_gets_whose_state():
    position = replace(read_resume(play(CONFIG, 5.0, 11.0).manifests[0]), states=(0, 2))
    assert [position.source(rank) for rank in range(5)] == [0, 2, 2, 2, 0]
    assert replace(position, states=()).source(3) is None


def test_a_rank_that_is_forming_fetches_its_state_and_gains_time_with_each_part():
    position = replace(read_resume(play(CONFIG, 5.0, 11.0).manifests[0]), states=(1,))
    stage = Saved(CONFIG, samples=64)
    stage.go_on(position)
    stage.spawns = False
    stage.intercept = lambda effect: type(effect).__name__ == "SendState"
    stage.join("h0", 5.0)
    stage.join("h1", 5.0)
    stage.run(until=1.0)
    march = stage.cohort.march
    assert march is not None and march.phase == "forming"
    before = march.forming.deadline
    from backend.core.vocabulary import RankSaid, SendState

    assert stage.feed(RankSaid(0, FetchState(part=3))) == [SendState(0, 1, 3, own=False)]
    assert march.forming.deadline > before - 1e-9
    march.resume = replace(position, states=())
    stage.intercept = lambda effect: True
    assert stage.feed(RankSaid(1, FetchState(part=0))) == [SendRank(1, SavedState(0, 0, b"", own=False))]


# ------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("changes", "code"),
    [({"job": "other.py:J"}, "checkpoint_foreign"), ({"seed": 1}, "seed_differs"), ({"epochs": 0}, "nothing_left")],
)
def test_what_must_not_differ_is_refused(changes: dict[str, Any], code: str):
    position = read_resume(next(m for m in play(CONFIG, 5.0, 11.0).manifests if m["progress"]["accepted"]))
    assert [problem.code for problem in position.problems(replace(CONFIG, **changes))] == [code]
    assert list(position.problems(replace(CONFIG, batch_size=7, mode="cpu_sync", epochs=9))) == []


def drop(name: str) -> Callable[[dict[str, Any]], None]:
    return lambda manifest: manifest.pop(name)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (drop("progress"), "has no progress"),
        (drop("layout"), "has no layout"),
        (lambda m: m["progress"].update(accepted=[[0, 9999]]), "no part of 64"),
        (lambda m: m["progress"].update(accepted="all"), "cannot be read"),
        (lambda m: m.update(global_step=-1), "global_step is -1"),
        (lambda m: m.update(seats=[["a"]]), "cannot be read"),
        (lambda m: m["progress"].update(evaluated={"epoch": float("-inf"), "metrics": {}}), "cannot be read"),
    ],
)
def test_a_spoilt_manifest_is_refused_by_name(spoil: Callable[[dict[str, Any]], None], says: str):
    manifest = play(CONFIG, 5.0, 11.0).manifests[0]
    spoil(manifest)
    with pytest.raises(ValueError, match=says):
        read_resume(manifest)


def test_missing_and_extra_tensors_are_named():
    w, b = TensorSpec("w", "params", "float32", [2], 0), TensorSpec("b", "params", "float32", [1], 2)
    assert unlike([w, b], [w, b]) == ""
    assert unlike([w, replace_frozen(b)], [w, b]) == "", "a parameter may be frozen for the rest"
    other = TensorSpec("c", "params", "float32", [1], 2)
    assert unlike([w, other], [w, b]) == "missing b; extra c"
    wide = TensorSpec("b", "params", "float32", [3], 2)
    assert unlike([w, wide], [w, b]) == "b is float32 [3], saved as float32 [1]"


def replace_frozen(spec: TensorSpec) -> TensorSpec:
    return TensorSpec(spec.name, spec.section, spec.dtype, spec.shape, spec.offset, spec.alias_of, frozen=True)


def test_a_host_with_another_model_or_dataset_is_refused_at_the_door():
    position = read_resume(play(CONFIG, 5.0, 11.0).manifests[0])
    for layout, samples, code in (
        ([TensorSpec("v", "params", "float32", [1], 0)], 64, "model_unlike_checkpoint"),
        (ONE_NUMBER, 60, "dataset_unlike_checkpoint"),
    ):
        stage = Saved(CONFIG, samples=samples, layout=layout)
        stage.go_on(position)
        stage.join("h0", 5.0)
        stage.run(until=1.0)
        assert [entry.code for entry in stage.cohort.window.refusals] == [code]
