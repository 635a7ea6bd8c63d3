"""Windows of the asynchronous mode: a rank that did its allotment works ahead instead of waiting (behaviour C22, F11).

A rank may hold as many batches that no round has accepted as its allotment and its *overshoot* together. The round
opens once every living rank did its allotment since its last snapshot, or all that it was dealt; each packs between two
batches and goes on, and the round accepts exactly the batches that the snapshots held. What came after them belongs to
the next window: it is subtracted, never zeroed. Nobody works ahead into the next epoch.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable, Mapping

from backend.core.allotments import Allotment
from backend.core.config import RunConfig
from backend.core.cycle import OpenedRound
from backend.core.scheduling import Scheduler
from backend.core.training import Training, Window
from backend.core.vocabulary import Effect, SendRank
from backend.core.work import Range, WorkError
from backend.core.world import World
from wire.messages import BatchDone, ChunkDone

OVERSHOOT_CEILING = 4
"""allotments that a rank may work ahead at most, however long a round takes"""


class Overshoot:
    """How many batches each rank may work ahead: as many as it does in the time of a round, or as the operator says."""

    def __init__(self, fixed: int | None, ranks: Iterable[int]) -> None:
        self._fixed = fixed
        self._ahead = dict.fromkeys(ranks, 1 if fixed is None else fixed)

    def of(self, rank: int) -> int:
        """The rank's batches ahead of its allotment."""
        return self._ahead[rank]

    def learn(self, round_ms: float, stable: bool, scheduler: Scheduler) -> None:
        """A round closed and took so long (0: nobody can say, and nothing changes). While guard or meta-controller
        object, nobody may work further ahead than before."""
        if self._fixed is not None or round_ms <= 0.0:
            return
        for rank, count in scheduler.counts.items():
            ms = scheduler.smoothed(rank)
            wanted = math.ceil(round_ms / ms) if ms > 0.0 else 1
            fresh = max(1, min(wanted, OVERSHOOT_CEILING * count))
            self._ahead[rank] = fresh if stable else min(fresh, self._ahead[rank])


class AsyncTraining(Training):
    """Training in which rounds and work overlap. The pool counts dealt batches as in flight until they are accepted."""

    overlaps = True

    def __init__(self, config: RunConfig, world: World, dataset_size: int, scheduler: Scheduler) -> None:
        super().__init__(config, world, dataset_size, scheduler)
        self.overshoot = Overshoot(config.max_overshoot, world.ranks)
        self._pending: dict[int, deque[BatchDone]] = {rank: deque() for rank in world.ranks}
        """batches done since the last closed round's snapshot, oldest first"""
        self._chunks: dict[int, deque[Range]] = {rank: deque() for rank in world.ranks}
        """chunks that were not reported as done"""
        self._committed: dict[int, int] = {}
        """batches that the round at hand accepted, until it closes"""
        self._behind: set[int] = set()
        """living ranks that the next round waits for"""

    def deal(self, now: float, *, draining: bool = False) -> list[Effect]:
        """Open a window and fill every living rank's budget, unless ``draining``: then they only finish what they hold.
        May deal nothing, to ranks that are ahead."""
        assert self.pool is not None
        alive = self.world.alive()
        shares = {} if draining else self._shares(alive)
        chunks = [effect for rank in alive for effect in self._give(rank, shares.get(rank, 0), now)]
        counts = self.scheduler.counts
        held = {rank: self.pool.held_batches(rank) for rank in alive}
        assert any(held.values()), f"epoch {self.pool.epoch} is not done, but there is nothing to deal"
        plan = {rank: min(counts.get(rank, 0), batches) for rank, batches in held.items()}
        self.window = Window(opened_at=now, planned=plan)
        self._behind = {rank for rank in alive if self._is_behind(rank)}
        return chunks

    def batch_done(self, rank: int, message: BatchDone, now: float) -> None:
        """As before; a rank that did all that it was dealt rests. Raises ``WorkError``."""
        super().batch_done(rank, message, now)
        if not self.holds_work(rank):
            self.watch.rests(rank)

    def chunk_done(self, rank: int, message: ChunkDone, now: float) -> list[Effect]:
        """The rank is through with its oldest chunk; its batches were counted one by one. Raises ``WorkError``."""
        chunks, done = self._chunks[rank], Range(message.offset, message.size)
        if self.pool is None or message.epoch != self.pool.epoch or not chunks or chunks[0] != done:
            claim = f"rank {rank} reports samples [{done.offset}, {done.end}) of epoch {message.epoch} as trained"
            raise WorkError(f"{claim}, but its oldest chunk is {chunks[0] if chunks else 'none'}")
        chunks.popleft()
        if not chunks:
            self.world.ranks[rank].state = "idle"
        return []

    def window_finished(self) -> bool:
        """Every living rank did its allotment since its last snapshot, or all that it was dealt."""
        return self.pool is not None and self.window is not None and not self._behind

    def steps(self, rank: int) -> int:
        """Batches since the snapshot of the last closed round."""
        return len(self._pending[rank])

    def overclaim(self, steps: Mapping[int, int]) -> tuple[int, str] | None:
        """A rank that contributed more batches than it was dealt, or fewer than it had reported when the round was
        opened, and why that cannot be."""
        planned = self.window.planned if self.window else {}
        for rank, batches in steps.items():
            held = self.pool.held_batches(rank) if self.pool else 0
            if batches > held:
                return rank, f"it holds {batches} batches of rank {rank}, which was dealt {held}"
            if batches < planned.get(rank, 0):
                return rank, f"it holds {batches} batches of rank {rank}, which reported {planned[rank]} before"
        return None

    def may_stop(self) -> bool:
        """Whether no living rank holds a batch that no round accepted."""
        return self.pool is None or not any(self.pool.held_batches(rank) for rank in self.world.alive())

    def accept(self, steps: dict[int, int]) -> None:
        """A round committed: of each rank the batches that its snapshot held are accepted, whether or not the news of
        them is here yet; it comes on another link."""
        assert self.pool is not None
        self._committed = dict(steps)
        self._round_samples = self.pool.accept_batches(steps)
        self.samples_done += self._round_samples

    def void(self, rank: int, reason: str) -> int:
        """What the rank reported since the last snapshot counts no more; what it holds beside that it may still do."""
        assert self.pool is not None
        samples = self.pool.lose(rank, self.steps(rank), reason)
        self._pending[rank].clear()
        if self.window is not None and self._is_behind(rank):
            self._behind.add(rank)
        return samples

    def rank_died(self, rank: int) -> list[Range]:
        """Return to the pool what no committed round holds of the rank's work."""
        self._pending[rank].clear()
        self._chunks[rank].clear()
        self._behind.discard(rank)
        return super().rank_died(rank)

    def close_round(self, opened: OpenedRound, slack_ms: Mapping[int, float], now: float) -> list[Effect]:
        """Account for the batches behind the snapshots. A rank's news is complete when its acknowledgement is here:
        both come on one link."""
        for rank, batches in self._committed.items():
            pending = self._pending[rank]
            silent = not self.world.lives(rank) or rank not in opened.acks
            assert len(pending) >= batches or silent, f"rank {rank} did {len(pending)} of {batches}"
            for _ in range(min(batches, len(pending))):
                super()._record(rank, pending.popleft())
        self._committed = {}
        effects = super().close_round(opened, slack_ms, now)
        stable = self.review.last is None or self.review.last.verdict == "stable"
        self.overshoot.learn(self._last_sync_ms, stable, self.scheduler)
        return effects

    def check(self) -> None:
        """Besides the pool's law: nobody did more than it was dealt or works beyond its budget, and the round waits for
        exactly those who are behind."""
        super().check()
        if self.pool is None:
            return
        alive = set(self.world.alive())
        for rank in alive:
            assert self.steps(rank) <= self._dealt(rank), f"rank {rank} did more than it was dealt"
        if self.window is not None:
            behind = {rank for rank in alive if self._is_behind(rank)}
            assert self._behind & alive == behind, f"{self._behind} are waited for, {behind} are behind"

    def _record(self, rank: int, message: BatchDone) -> None:
        if self.steps(rank) >= self._dealt(rank):
            raise WorkError(f"rank {rank} reports a batch, but did all that it was dealt")
        self._pending[rank].append(message)
        if rank in self._behind and not self._is_behind(rank):
            self._behind.discard(rank)

    def _dealt(self, rank: int) -> int:
        """Batches dealt since the snapshot of the last closed round."""
        held = self.pool.held_batches(rank) if self.pool else 0
        return held + self._committed.get(rank, 0)

    def _is_behind(self, rank: int) -> bool:
        assert self.window is not None
        return self.steps(rank) < self.window.planned.get(rank, 0)

    def holds_work(self, rank: int) -> bool:
        return self.steps(rank) < self._dealt(rank)

    def _outstanding(self, rank: int) -> list[Range]:
        return list(self._chunks[rank])

    def _give(self, rank: int, batches: int, now: float) -> list[Effect]:
        """Deal so many batches, in one chunk where no returned range is shorter."""
        assert self.pool is not None
        effects: list[Effect] = []
        while batches > 0 and (chunk := self.pool.take(batches, rank)) is not None:
            batches -= self._batches(chunk)
            self._chunks[rank].append(chunk)
            self._handed[rank] += self._batches(chunk)
            effects.append(SendRank(rank, self._start(chunk)))
        if effects:
            undone = self._dealt(rank) - self.steps(rank)
            self.watch.begins(rank, now, self._expected_seconds(rank, undone))
        self.world.ranks[rank].state = "working" if self._chunks[rank] else "idle"
        return effects

    def _shares(self, alive: Iterable[int]) -> Allotment:
        """What each rank's budget has room for; where the epoch has less left, so that all finish it together."""
        assert self.pool is not None
        counts = self.scheduler.counts
        room = {}
        for rank in alive:
            budget = counts.get(rank, 0) + self.overshoot.of(rank)
            room[rank] = max(0, budget - self.pool.held_batches(rank))
        if sum(room.values()) <= self.pool.remaining_batches:
            return room
        undone = {rank: self.pool.held_batches(rank) - self.steps(rank) for rank in room}
        return finish_together(self.pool.remaining_batches, room, undone, counts)


def finish_together(
    total: int, room: Mapping[int, int], undone: Mapping[int, int], pace: Mapping[int, int]
) -> Allotment:
    """``total`` batches dealt one by one, each to the rank that would finish it first, the lowest among equals.
    ``undone`` are the batches that a rank has still to do, ``pace`` is in proportion to its speed, ``room`` is the most
    that it may get."""
    shares = dict.fromkeys(room, 0)
    line = [((undone[rank] + 1) / pace[rank], rank) for rank in room if room[rank] > 0]
    heapq.heapify(line)
    for _ in range(min(total, sum(room.values()))):
        _, rank = heapq.heappop(line)
        shares[rank] += 1
        if shares[rank] < room[rank]:
            heapq.heappush(line, ((undone[rank] + shares[rank] + 1) / pace[rank], rank))
    return shares


def training_for(config: RunConfig, world: World, dataset_size: int, scheduler: Scheduler) -> Training:
    """The training of the run's mode."""
    kind = AsyncTraining if config.mode.endswith("_async") else Training
    return kind(config, world, dataset_size, scheduler)
