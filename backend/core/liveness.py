"""Who is alive, how many deaths a run survives, and why it ends when it does not (behaviour J1 to J6; design 11).

Hosts are heard, not ranks: any verified frame of a host is life, and a rank's exit is reported by its agent at once.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from enum import IntEnum


class SaveReason(IntEnum):
    """Why a checkpoint is written; the byte is what its manifest carries (J6; those from 6 on are ours)."""

    GRACEFUL_SHUTDOWN = 0
    MAX_FAILURE_EXCEEDED = 1
    SINGLE_SURVIVOR = 2
    ALL_RANKS_LOST = 3
    REDUCE_STALL = 4
    CHECKPOINT = 5
    TRAIN_STALL = 6
    RENDEZVOUS_EXHAUSTED = 7
    REPEATED_FAILURE = 8
    NON_FINITE = 9

    @property
    def label(self) -> str:
        """The reason's name in manifests, tables and pages: ``MaxFailureExceeded``."""
        return "".join(word.capitalize() for word in self.name.split("_"))

    @property
    def ends_run(self) -> bool:
        """Every reason but a periodic or requested checkpoint is the end of the run."""
        return self is not SaveReason.CHECKPOINT


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Whether the run goes on after a death, and why not."""

    stop: bool
    save_reason: SaveReason | None
    reason: str


def tolerance(dead: int, world: int, max_failure: float | None, *, collective: bool = False) -> Tolerance:
    """Judge a death count (J5). The operator's limit comes first, then what the data plane needs: one rank over the
    CPU, two in a ``collective`` (NCCL) mode.

    ``max_failure`` is the death count that ends the run: from 1 up a count, below 1 a share of the world, 0 any death.
    """
    alive = world - dead
    lost = f"{dead} of {world} ranks {'is' if dead == 1 else 'are'} dead"
    limit = failure_limit(world, max_failure)
    if limit is not None and dead >= max(1, limit):
        allowed = f"the run's limit of {max_failure:g} ends it at {limit}" if limit else "the run tolerates no death"
        return Tolerance(True, SaveReason.MAX_FAILURE_EXCEEDED, f"{lost}, and {allowed}.")
    if alive <= 0:
        return Tolerance(True, SaveReason.ALL_RANKS_LOST, f"All {world} ranks are dead; nobody is left to train.")
    if collective and alive < 2:
        reason = f"{lost}; a collective needs at least two ranks, and one is left."
        return Tolerance(True, SaveReason.SINGLE_SURVIVOR, reason)
    if not dead:
        return Tolerance(False, None, f"All {world} ranks are alive.")
    rest = "the last one goes on" if alive == 1 else f"the other {alive} go on"
    return Tolerance(False, None, f"{lost}; {rest}.")


def failure_limit(world: int, max_failure: float | None) -> int | None:
    """The number of deaths that ends a run of ``world`` ranks; none when only the last one does."""
    if max_failure is None:
        return None
    if max_failure >= 1:
        return math.ceil(max_failure)
    # 0.07 * 100 is a hair above 7 in binary, and must not become 8.
    return math.ceil(max(0.0, max_failure) * world - 1e-9)


class Liveness:
    """When each watched host was last heard, by the controller's own clock; ``timeout`` in seconds."""

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self._heard: dict[int, float] = {}
        self._allowance: dict[int, float] = {}
        """extra seconds for each watched host, granted when the controller itself was away"""
        self._filed: dict[int, float] = {}
        """the deadline under which each watched host lies in ``_queue``; the true one may be later, never earlier"""
        self._queue: list[tuple[float, int]] = []
        """filed deadlines, first one first, with some that no longer count"""

    @property
    def hosts(self) -> list[int]:
        """Hosts that are watched."""
        return sorted(self._allowance)

    def add(self, host: int, now: float) -> None:
        """Watch a host from now on."""
        self._heard[host] = now
        self._allowance[host] = 0.0
        self._file(host)

    def remove(self, host: int) -> None:
        """Stop watching a host that left or was declared lost: silence is no second death (M26)."""
        self._allowance.pop(host, None)
        self._filed.pop(host, None)

    def heard(self, host: int, now: float) -> None:
        """A verified frame of the host arrived. A host that is not watched stays so."""
        allowance = self._allowance.get(host)
        if allowance is None:
            return
        self._heard[host] = max(self._heard[host], now)
        if allowance:
            self._allowance[host] = 0.0
            self._file(host)  # without the allowance the deadline may be earlier than the one it is filed under

    def silence(self, host: int, now: float) -> float:
        """Seconds since the host was last heard, watched or not; 0 for a host that never was."""
        return max(0.0, now - self._heard.get(host, now))

    def late(self, now: float) -> list[int]:
        """Watched hosts that have been silent for the timeout."""
        first = self.next_deadline()
        if first is None or first > now:
            return []
        return [host for host in self.hosts if self._deadline(host) <= now]

    def next_deadline(self) -> float | None:
        """When the first watched host will be late if it stays silent. Asked after every event, so hosts that were
        heard are not sorted in again before they are first in line."""
        queue = self._queue
        while queue:
            filed, host = queue[0]
            if self._filed.get(host) != filed:
                heapq.heappop(queue)
                continue
            deadline = self._deadline(host)
            if deadline <= filed:
                return deadline
            self._filed[host] = deadline
            heapq.heapreplace(queue, (deadline, host))
        return None

    def lagged(self, seconds: float) -> str:
        """The controller was late by so much, so that what hosts sent in that time is still unread: every host gets it
        on top. Returns the sentence that says so."""
        extra = max(0.0, seconds)
        for host in self._allowance:
            self._allowance[host] += extra
        return f"The controller was away for {extra:.1f} s; every host gets that time on top before it counts as lost."

    def _file(self, host: int) -> None:
        deadline = self._filed[host] = self._deadline(host)
        heapq.heappush(self._queue, (deadline, host))

    def _deadline(self, host: int) -> float:
        return self._heard[host] + self._allowance[host] + self.timeout
