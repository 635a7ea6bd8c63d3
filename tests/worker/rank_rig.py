"""Ranks in this process, each on a thread with its own loop, and the far end of its socket in the test's hands."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from wire import arithmetic
from wire.messages import (
    BatchDone,
    ChunkDone,
    Message,
    RankReady,
    RequestParams,
    RoundCommitted,
    Shutdown,
    SnapshotReady,
    StartChunk,
    SyncAck,
    TrainingPlan,
)
from worker.arena_file import ArenaFile, FloatArray
from worker.control import Control, Leave
from worker.interrupt import Interrupt
from worker.local_link import BlockingLink
from worker.loop import LoopOptions, TrainingLoop, Workload
from worker.progress import ProgressBlock, Reading
from worker.rank import build_workload, library, now_ns, sums_itself
from worker.rank_link import RankLink
from worker.sessions import Sessions
from worker.specs import RankSpec
from worker.write_back import WriteBack

JOBS = Path(__file__).parent.parent / "jobs"
PATIENCE = 20.0

M = TypeVar("M", bound=Message)


def plan(job: str, *, total_samples: int, params: dict[str, Any] | None = None, **changes: Any) -> TrainingPlan:
    """A plan with the defaults of these tests."""
    values = {
        "run_id": 1,
        "job": job,
        "params": params or {},
        "mode": "cpu_cadence",
        "batch_size": 4,
        "epochs": 1,
        "seed": 42,
        "gamma": 1.0,
        "verify_consensus": True,
        "total_samples": total_samples,
    }
    return TrainingPlan(**(values | changes))


@dataclass
class RankRig:
    """One rank. ``relay`` is the other end of its link; ``outcome`` is what the loop returned or raised."""

    spec: RankSpec
    relay: BlockingLink
    workload: Workload
    progress: ProgressBlock
    thread: threading.Thread
    outcome: list[Leave | BaseException] = field(default_factory=list)

    @property
    def out(self) -> np.ndarray:
        return ArenaFile.open(Path(self.spec.shm_dir) / f"rank{self.spec.rank}.out", self.elements).values

    @property
    def elements(self) -> int:
        return self.workload.arena.elements

    def send(self, *messages: Message) -> None:
        for message in messages:
            self.relay.send(message)

    def expect(self, kind: type[M]) -> M:
        """The next message, which must be of this kind."""
        message = self.relay.receive()
        assert isinstance(message, kind), f"expected {kind.__name__}, got {message}"
        return message

    def train(self, chunk: StartChunk) -> list[BatchDone]:
        """Send a chunk and take its batches and its report."""
        self.send(chunk)
        batches = [self.expect(BatchDone) for _ in range(chunk.batches)]
        done = self.expect(ChunkDone)
        assert (done.epoch, done.offset, done.size) == (chunk.epoch, chunk.offset, chunk.size)
        return batches

    def end(self) -> Leave | BaseException:
        self.thread.join(PATIENCE)
        stuck = self.thread.is_alive()
        self.relay.close()
        assert not stuck, "the loop is still running"
        return self.outcome[0]

    def reading(self) -> Reading:
        return self.progress.read(now_ns())


def start_rank(
    shm_dir: Path,
    training_plan: TrainingPlan,
    rank: int = 0,
    *,
    job_dir: Path = JOBS,
    options: Callable[[LoopOptions], LoopOptions] = lambda given: given,
    device: str = "cpu",
    ready: bool = True,
) -> RankRig:
    """Build the job and run its loop; with ``ready``, its RankReady is taken already."""
    spec = RankSpec(
        plan=training_plan, rank=rank, device=device, shm_dir=str(shm_dir), job_dir=str(job_dir), interface="lo"
    )
    workload = build_workload(spec)
    progress = ProgressBlock.create(shm_dir / f"rank{rank}.progress", now_ns())
    ours, theirs = socket.socketpair()
    ours.settimeout(PATIENCE)
    interrupt = Interrupt(rank)
    link = RankLink(BlockingLink(theirs), interrupt)
    write_back = WriteBack(training_plan.write_back, training_plan.blend_alpha)
    given = options(
        LoopOptions(job_dir=job_dir, verify_consensus=training_plan.verify_consensus, write_back=write_back)
    )
    collective, overlap = sums_itself(training_plan), training_plan.mode.endswith("_async")
    control = Control(rank, training_plan.gamma, overlap=overlap, collective=collective)
    sessions = Sessions(rank, library(spec), interrupt) if collective else None
    loop = TrainingLoop(control, link, workload, progress, given, sessions)
    outcome: list[Leave | BaseException] = []

    def run() -> None:
        try:
            outcome.append(loop.run())
        except BaseException as error:
            outcome.append(error)
            if sessions is not None:  # as the end of its process would; a loop that is told to leave does it itself
                sessions.close()
        finally:
            link.close()

    thread = threading.Thread(target=run, name=f"rank {rank}", daemon=True)
    rig = RankRig(spec, BlockingLink(ours), workload, progress, thread, outcome)
    thread.start()
    if ready:
        answer = rig.expect(RankReady)
        assert answer.params_elements + answer.buffers_elements == rig.elements
    return rig


class Cohort:
    """Several ranks of one host, and the fold that relay and controller would do: sum, then one division."""

    def __init__(self, ranks: list[RankRig]) -> None:
        self.ranks = ranks
        self.params = ranks[0].workload.arena.params_elements
        elements = ranks[0].elements
        directory = Path(ranks[0].spec.shm_dir)
        self._files = [ArenaFile.create(directory / f"consensus.{number}", elements) for number in range(2)]
        self.base: FloatArray | None = None

    def reduce(
        self, number: int, *, initial: bool = False, attempts: int = 1, excluded: int | None = None
    ) -> list[SyncAck]:
        """A whole round; with more attempts, the earlier ones are asked for and thrown away. An ``excluded`` rank is
        left out of a second attempt."""
        if excluded is not None:
            for rank in self.ranks:
                self._ask(rank, RequestParams(round=number, attempt=0, initial=initial))
        first = 0 if excluded is None else 1
        for attempt in range(first, first + attempts):
            request = RequestParams(round=number, attempt=attempt, initial=initial)
            without = msgspec.structs.replace(request, excluded=True)
            snapshots = [self._ask(rank, without if n == excluded else request) for n, rank in enumerate(self.ranks)]
        mass = sum(snapshot.mass for snapshot in snapshots)
        movers = sum(snapshot.mover_mass for snapshot in snapshots)
        self.snapshots = snapshots
        path = ""
        if mass > 0:
            self._files.reverse()
            path = str(self._files[0].path)
            self._build(self._files[0].values, snapshots)
        commit = RoundCommitted(number, attempt, realized=mass > 0, buffers_realized=movers > 0, consensus=path)
        for rank in self.ranks:
            rank.send(commit)
        acks = [rank.expect(SyncAck) for rank in self.ranks]
        assert all(ack.round == number for ack in acks)
        assert len({ack.params_hash for ack in acks}) == 1 or mass == 0 or excluded is not None
        assert (acks[0].params_hash != "") == (mass > 0 and self.ranks[0].spec.plan.verify_consensus)
        return acks

    def _build(self, new: FloatArray, snapshots: list[SnapshotReady]) -> None:
        """The consensus from everybody's values, as the reduce would build it."""
        for start, stop, kind in ((0, self.params, "mass"), (self.params, new.size, "mover_mass")):
            masses = {rank: getattr(one, kind) for rank, one in enumerate(snapshots) if getattr(one, kind) > 0}
            values = [self.ranks[rank].out[start:stop] for rank in masses]
            base = None if self.base is None else self.base[start:stop]
            update = np.empty(stop - start, np.float32)
            arithmetic.contribution(base, values, list(masses.values()), update)
            arithmetic.apply(base, update * arithmetic.reciprocal(sum(masses.values())), new[start:stop])
        self.base = new

    def window(self, chunks: dict[int, StartChunk], number: int, **options: Any) -> list[SyncAck]:
        """Train these chunks by rank, then reduce."""
        for rank, chunk in chunks.items():
            self.ranks[rank].train(chunk)
        return self.reduce(number, **options)

    def leave(self) -> None:
        for rank in self.ranks:
            rank.send(Shutdown(reason="test over"))
        for rank in self.ranks:
            assert isinstance(rank.end(), Leave), rank.outcome

    @staticmethod
    def _ask(rank: RankRig, request: RequestParams) -> SnapshotReady:
        rank.send(request)
        snapshot = rank.expect(SnapshotReady)
        assert (snapshot.round, snapshot.attempt) == (request.round, request.attempt)
        return snapshot


def chunk_of(batches: int, *, offset: int = 0, epoch: int = 0, step: int = 0, batch_size: int = 4) -> StartChunk:
    """So many full batches of the epoch."""
    return StartChunk(epoch=epoch, offset=offset, size=batches * batch_size, batches=batches, global_step=step)


def report_of(shm_dir: Path, rank: int) -> Any:
    """The failure report that a rank left, as plain values."""
    return msgspec.json.decode((shm_dir / f"rank{rank}.report.json").read_bytes())
