"""Rounds that stop nobody: a rank packs between two batches, trains on, and adopts between two batches."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rank_rig import PATIENCE, RankRig, chunk_of, plan, start_rank

from wire.messages import (
    BatchDone,
    ChunkDone,
    Exiting,
    Message,
    RequestParams,
    RoundCommitted,
    Shutdown,
    SnapshotReady,
    StartChunk,
    SyncAck,
)
from worker.arena_file import ArenaFile
from worker.control import Adopt, Control, Leave, Pack, Resend, SetClock, State, Train

POLICIES = ("overwrite", "blend", "delta")
ALPHA = 0.25


# --------------------------------------------------------------------------------------- the pure machine


def working(steps: int = 0) -> Control:
    control = Control(rank=0, gamma=1.0, overlap=True)
    control.receive(chunk_of(20))
    for _ in range(steps):
        control.step_done()
    return control


def request(number: int = 0, attempt: int = 0) -> RequestParams:
    return RequestParams(round=number, attempt=attempt, initial=False)


def commit(number: int = 0, attempt: int = 0, realized: bool = True) -> RoundCommitted:
    return RoundCommitted(number, attempt, realized=realized, buffers_realized=realized, consensus="c")


def ready(number: int, attempt: int, steps: int) -> SnapshotReady:
    return SnapshotReady(number, attempt, steps=steps, mass=float(steps), mover_mass=float(steps > 0))


def test_a_round_in_the_middle_of_a_chunk_stops_nobody() -> None:
    control = working(3)
    assert control.receive(request()) == [Pack(ready(0, 0, 3))]
    assert control.state is State.WORKING
    control.step_done()
    control.step_done()
    assert control.receive(commit()) == [Adopt(0, params=True, buffers=True, ahead=True, consensus="c")]
    assert (control.state, control.steps_since_round, control.steps) == (State.WORKING, 2, 5)
    assert control.receive(request(1)) == [Pack(ready(1, 0, 2))], "what came after the snapshot is the next round's"


def test_who_did_nothing_since_the_snapshot_is_not_ahead() -> None:
    control = working(3)
    control.receive(request())
    assert control.receive(commit()) == [Adopt(0, params=True, buffers=True, ahead=False, consensus="c")]
    assert control.state is State.WORKING


def test_a_chunk_that_comes_during_a_round_starts_at_once() -> None:
    control = Control(rank=0, gamma=1.0, overlap=True)
    control.receive(request())
    assert control.state is State.REDUCING
    assert control.receive(chunk_of(2, step=7)) == [SetClock(7), Train(chunk_of(2, step=7))]
    control.step_done()
    assert control.receive(commit(realized=False)) == [Adopt(0, params=False, buffers=False, ahead=True, consensus="c")]
    assert control.state is State.WORKING


def test_who_has_no_more_work_waits_for_the_round() -> None:
    control = working(20)
    control.receive(request())
    control.chunk_done()
    assert control.state is State.REDUCING
    control.receive(commit())
    assert control.state is State.IDLE


def test_a_new_attempt_is_answered_while_training_goes_on() -> None:
    control = working(4)
    control.receive(request())
    control.step_done()
    assert control.receive(request(attempt=1)) == [Resend(ready(0, 1, 4))], "the arena still holds the snapshot"
    assert control.receive(commit(attempt=1)) == [Adopt(0, params=True, buffers=True, ahead=True, consensus="c")]
    assert control.steps_since_round == 1


# ------------------------------------------------------------------------------------------- a real loop


class Gate:
    """Time that passes batch by batch, as the test allows; in 64ths of a second, so that no sum is rounded."""

    def __init__(self) -> None:
        self._now = 0.0
        self._permits = threading.Semaphore(0)
        self._free = False

    def clock(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        assert self._free or self._permits.acquire(timeout=PATIENCE), "the test allows no more batches"
        self._now += seconds

    def open(self) -> None:
        self._permits.release()

    def tear_down(self) -> None:
        self._free = True
        self.open()


class Ahead:
    """One rank whose batches the test lets through, with a consensus of the test's making."""

    def __init__(self, directory: Path, **changes: object) -> None:
        self.gate = Gate()
        self.batches = 0
        plans = plan("odometer.py:Odometer", total_samples=256, params={"samples": 256}, mode="cpu_async", **changes)
        self.rig: RankRig = start_rank(
            directory,
            plans,
            options=lambda given: replace(
                given, emulate_ms_per_batch=15.625, clock=self.gate.clock, sleep=self.gate.sleep
            ),
        )
        self.consensus = ArenaFile.create(directory / "consensus.0", self.rig.elements)
        self.rig.send(RequestParams(round=-1, attempt=0, initial=True))
        self.rig.expect(SnapshotReady)
        self.adopt(-1, 0.0)
        self.rig.expect(SyncAck)

    @property
    def w(self) -> float:
        return float(self.rig.workload.trainer.model.w.detach())

    def adopt(self, number: int, value: float, attempt: int = 0) -> None:
        self.consensus.values[:] = np.float32(value)
        path = str(self.consensus.path)
        self.rig.send(RoundCommitted(number, attempt, realized=True, buffers_realized=True, consensus=path))

    def until(self, kind: type[Message]) -> Message:
        """Let batches through until a message of this kind comes in between."""
        for _ in range(60):
            self.gate.open()
            others = []
            while not isinstance(message := self.rig.relay.receive(), BatchDone):
                assert message is not None, self.rig.end()
                others.append(message)
            found = next((message for message in others if isinstance(message, kind)), None)
            if found is not None:
                self.batches_before, self.batches = self.batches, self.batches + 1
                return found
            self.batches += 1
        raise AssertionError(f"no {kind.__name__}")

    def end(self) -> None:
        self.rig.send(Shutdown(reason="test over"))
        self.gate.tear_down()
        while isinstance(message := self.rig.relay.receive(), BatchDone | ChunkDone):
            pass
        assert isinstance(message, Exiting), self.rig.end()
        assert isinstance(self.rig.end(), Leave), self.rig.outcome


EXPECTED: dict[str, Callable[[float, float, float], float]] = {
    "overwrite": lambda now, snapshot, consensus: consensus,
    "blend": lambda now, snapshot, consensus: (1 - ALPHA) * now + ALPHA * consensus,
    "delta": lambda now, snapshot, consensus: consensus + (now - snapshot),
}


@pytest.mark.parametrize("policy", POLICIES)
def test_a_rank_packs_trains_on_and_adopts_as_its_policy_says(tmp_path: Path, policy: str) -> None:
    """Three rounds in the middle of one chunk; the odometer shows each batch, so nothing can go missing unseen."""
    play = Ahead(tmp_path, write_back=policy, blend_alpha=ALPHA if policy == "blend" else 0.5)
    play.rig.send(chunk_of(60))
    w, done, accepted = 0.0, 0, 0
    for number in range(3):
        play.rig.send(RequestParams(round=number, attempt=0, initial=False))
        snapshot = play.until(SnapshotReady)
        assert isinstance(snapshot, SnapshotReady)
        w += play.batches_before - done
        done = play.batches_before
        packed, accepted = w, accepted + snapshot.steps
        assert accepted == done, "the snapshot holds exactly the batches that were done before it"
        assert play.rig.out[0] == np.float32(packed), "the value itself"
        consensus = packed + 1000.0 * (number + 1)
        play.adopt(number, consensus)
        ack = play.until(SyncAck)
        assert isinstance(ack, SyncAck)
        now = packed + (play.batches_before - done)
        assert play.batches_before > done, "the batch that was under way when the round was committed"
        w, done = EXPECTED[policy](now, packed, consensus), play.batches_before
        assert ack.divergence == pytest.approx(abs(consensus - packed) / consensus, rel=1e-6)
        assert (ack.pre_norm, ack.post_norm) == pytest.approx((packed, consensus), rel=1e-6)
        assert ack.wait_ms == 0.0, "it never waited"
    w += play.batches - done
    play.end()
    assert play.w == pytest.approx(w + (play.rig.reading().steps - play.batches), rel=1e-6)


def test_a_rank_that_waited_takes_the_consensus_whole(tmp_path: Path) -> None:
    """Without a batch since the snapshot there is nothing to keep, whatever the policy: replicas are equal again."""
    play = Ahead(tmp_path, write_back="blend", blend_alpha=ALPHA)
    play.rig.send(StartChunk(epoch=0, offset=0, size=4, batches=1, global_step=0))
    play.gate.open()
    play.rig.expect(BatchDone)
    play.rig.expect(ChunkDone)
    play.rig.send(RequestParams(round=0, attempt=0, initial=False))
    assert play.rig.expect(SnapshotReady).steps == 1
    play.adopt(0, 7.5)
    play.rig.expect(SyncAck)
    play.end()
    assert play.w == 7.5


def test_the_hash_is_the_consensus_and_not_the_replica(tmp_path: Path) -> None:
    """Two ranks, one ahead and one not, report the same hash for the same consensus."""
    hashes = []
    for name, batches in (("ahead", 8), ("waiting", 0)):
        directory = tmp_path / name
        directory.mkdir()
        play = Ahead(directory)
        if batches:
            play.rig.send(chunk_of(batches))
        play.rig.send(RequestParams(round=0, attempt=0, initial=False))
        if batches:
            play.until(SnapshotReady)
        else:
            play.rig.expect(SnapshotReady)
        play.adopt(0, 3.25)
        ack = play.until(SyncAck) if batches else play.rig.expect(SyncAck)
        assert isinstance(ack, SyncAck)
        hashes.append(ack.params_hash)
        play.end()
    assert hashes[0] == hashes[1] != ""
