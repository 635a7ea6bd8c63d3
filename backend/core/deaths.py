"""What is written down when a rank dies: one row and one event each, with all that its host and itself could tell."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from backend.core.recovery import waited_for
from backend.core.vocabulary import Effect, Record, SendHost, SendRelay
from backend.core.work import Range
from backend.core.world import World
from wire.messages import DeclareDead, ExitCause

if TYPE_CHECKING:
    from backend.core.march import March


@dataclass(frozen=True, slots=True)
class Casualty:
    """A rank that is about to be declared dead, why, and how its process ended if that is known."""

    rank: int
    reason: str
    cause: ExitCause | None = None
    detect_seconds: float = 0.0
    """since its end, or since its host was last heard"""

    def how(self) -> str:
        """The exit in a few words: the exception, the signal, or the code."""
        cause = self.cause
        if cause is None:
            return self.reason
        if cause.exception:
            return f"{cause.exception}: {cause.message}" if cause.message else cause.exception
        if cause.memory_kills:
            limit = f" of {cause.memory_limit_bytes / 2**30:.2f} GiB" if cause.memory_limit_bytes else ""
            return f"killed by {cause.signal}: its host reached the memory limit{limit}"
        if cause.signal:
            return f"killed by {cause.signal}"
        if cause.code == 0:
            return "it exited with code 0 before the run was over"
        return f"it exited with code {cause.code}" + (f": {cause.message}" if cause.message else "")

    def sentence(self, world: World) -> str:
        """Who died, where and how."""
        return f"{world.where(self.rank)} died: {self.how()}"


def bury(march: March, casualty: Casualty, now: float) -> list[Effect]:
    """Take a rank that was just removed from the world out of everything: its work returns, its death is written down,
    and the hosts that are left are told."""
    waited = waited_for(march, casualty.rank, casualty.detect_seconds, now)
    returned = march.training.rank_died(casualty.rank) if march.forming.restored else []
    closed = march.cycle.next_round - (1 if march.cycle.open else 0)
    last_round = max(closed, march.forming.first_round) - 1
    row, records = death_records(casualty, march.world, last_round=last_round, returned=returned, waited=waited)
    march.deaths.append(row)
    return [*records, *death_notices(casualty, march.world)]


def death_notices(casualty: Casualty, world: World) -> list[Effect]:
    """Tell every relay that is here and has a living rank; of a rank whose process did not end by itself its own one,
    too, and the agent, which ends what is left of it."""
    hosts = {host for host in world.alive_by_host() if world.hosts[host].relay_up}
    seat = world.hosts[world.ranks[casualty.rank].host]
    notice = DeclareDead(rank=casualty.rank, reason=casualty.sentence(world))
    fence: list[Effect] = []
    if casualty.cause is None and seat.state != "lost":
        hosts |= {seat.host} if seat.relay_up else set()
        fence.append(SendHost(seat.link, notice))
    return [*(SendRelay(host, notice) for host in sorted(hosts)), *fence]


def death_records(
    casualty: Casualty, world: World, *, last_round: int, returned: list[Range], waited: dict[int, float]
) -> tuple[dict[str, Any], list[Record]]:
    """The death's row, and the records that make it durable. ``last_round`` is -1 when none has closed, ``waited`` the
    seconds that others waited for the dead, by rank."""
    seat = world.ranks[casualty.rank]
    host = world.hosts[seat.host]
    cause, failure, progress = casualty.cause, seat.failure, seat.progress
    samples = sum(piece.size for piece in returned)
    row = {
        "rank": casualty.rank,
        "host": seat.host,
        "host_name": host.name,
        "device": seat.device,
        "reason": casualty.how(),
        "exit_code": cause.code if cause else None,
        "signal": cause.signal if cause else "",
        "exception": (cause and cause.exception) or (failure.exception if failure else ""),
        "message": (cause and cause.message) or (failure.message if failure else ""),
        "last_lines": (cause and cause.last_lines) or (failure.last_lines if failure else ""),
        "last_step": max(seat.steps, cause.last_step if cause else 0, progress.steps if progress else 0),
        "last_round": last_round,
        "peak_rss_bytes": max(cause.peak_rss_bytes if cause else 0, progress.rss_bytes if progress else 0),
        "returned_samples": samples,
        "world_size": len(world.ranks),
        "memory_kills": cause.memory_kills if cause else 0,
        "memory_limit_bytes": cause.memory_limit_bytes if cause else 0,
        "waited": waited,
        "recovery": {"detect": round(casualty.detect_seconds, 3)},
    }
    text = casualty.sentence(world)
    if samples:
        text += f"; {samples} samples that no round had accepted return to the pool"
    event = {"kind": "rank_died", "level": "error", "text": text, "data": {"rank": casualty.rank}}
    return row, [
        Record("deaths", row, durable=True),
        Record("events", event, durable=True),
        Record("ranks", {"rank": casualty.rank, "state": "dead"}),
    ]
