"""Bugs for the ordeals to find: who tests the simulator.

Each maker takes the real function and gives the wrong one. ``SURVIVORS`` says of those that are never found why that is
right: another fence stands behind the one that was taken away, or the change is no fault.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from backend.core import bounds, deaths, losses, training
from backend.core import march as march_module
from backend.core.bounds import Bounds
from backend.core.cohort import Cohort
from backend.core.cycle import Cycle
from backend.core.desks import EvaluationDesk
from backend.core.elche import ElChe
from backend.core.ending import Ending
from backend.core.liveness import Liveness, SaveReason, Tolerance
from backend.core.lookahead import AsyncTraining
from backend.core.losses import Losses
from backend.core.march import March
from backend.core.saving import CheckpointDesk
from backend.core.stalls import ProgressWatch
from backend.core.training import Training
from backend.core.vocabulary import End, Record, Refused
from backend.core.work import EpochPool
from backend.core.world import World
from simulation import later_bugs, session_bugs
from simulation.mutants import MUTANTS, Function, mutant
from wire.messages import BatchDone, SyncAck

FOREVER = 1e9

# ----------------------------------------------------------------------------------------- samples, sum, divisor


@mutant(EpochPool, "forfeit", "a dead rank's samples are gone")
def forgets_the_dead(real: Function) -> Function:
    def forfeit(pool: EpochPool, rank: int) -> list[Any]:
        pool._in_flight.pop(rank, None)
        pool._delivered.pop(rank, None)
        return []

    return forfeit


@mutant(EpochPool, "forfeit", "only what a dead rank had in flight returns, not what it had done")
def returns_half(real: Function) -> Function:
    def forfeit(pool: EpochPool, rank: int) -> list[Any]:
        pool._delivered.pop(rank, None)
        return list(real(pool, rank))

    return forfeit


@mutant(Training, "rank_died", "what a rank delivered before it died counts, though no sum has it")
def keeps_what_the_dead_did(real: Function) -> Function:
    def rank_died(self: Training, rank: int) -> Any:
        if self.pool is not None:
            self.pool.accept([rank])
        return real(self, rank)

    return rank_died


@mutant(EpochPool, "accept", "accepted samples stay with their rank, and return when it dies")
def accepts_twice(real: Function) -> Function:
    def accept(pool: EpochPool, ranks: Any) -> Any:
        kept = {rank: list(pieces) for rank, pieces in pool._delivered.items()}
        result = real(pool, ranks)
        pool._delivered.update(kept)
        return result

    return accept


@mutant(EpochPool, "_oldest", "a round accepts the newest batches of a rank in place of the oldest")
def accepts_the_newest(real: Function) -> Function:
    def oldest(pool: EpochPool, rank: int, batches: int) -> Any:
        pool._in_flight.get(rank, []).reverse()
        return real(pool, rank, batches)

    return oldest


@mutant(Cycle, "retry", "early requeue: the dead's samples return while the attempt that holds them goes on")
def never_retries(real: Function) -> Function:
    return lambda cycle, hosts, reason, now: []


@mutant(Cycle, "retry", "the survivors' attempt has the number of the one before")
def retries_under_the_old_number(real: Function) -> Function:
    def retry(cycle: Cycle, hosts: Any, reason: str, now: float) -> Any:
        assert cycle.open is not None
        cycle.open.attempt -= 1
        return real(cycle, hosts, reason, now)

    return retry


@mutant(Cycle, "finished", "a sum of an attempt that was dropped is committed")
def commits_a_stale_sum(real: Function) -> Function:
    def finished(cycle: Cycle, event: Any) -> Any:
        if cycle.open is not None:
            event = replace(event, attempt=cycle.open.attempt)
        return real(cycle, event)

    return finished


@mutant(Cycle, "finished", "the divisor has a step that no contribution has")
def divides_by_too_much(real: Function) -> Function:
    def finished(cycle: Cycle, event: Any) -> Any:
        first = min(event.steps)
        return real(cycle, replace(event, steps=event.steps | {first: event.steps[first] + 1}))

    return finished


@mutant(Cycle, "settled", "a round closes with its first acknowledgement")
def closes_too_early(real: Function) -> Function:
    return lambda cycle, lives: bool(cycle.open and cycle.open.finished and cycle.open.acks)


@mutant(World, "alive_by_host", "rounds expect the dead of a host that still lives")
def expects_the_dead(real: Function) -> Function:
    def alive_by_host(world: World) -> dict[int, tuple[int, ...]]:
        return {host: world.hosts[host].ranks for host in real(world)}

    return alive_by_host


@mutant(training, "window_plan", "an epoch's last windows may have no work for anybody")
def plans_nothing(real: Function) -> Function:
    def window_plan(*arguments: Any, **keywords: Any) -> dict[int, int]:
        plan: dict[int, int] = real(*arguments, **keywords)
        return dict.fromkeys(plan, 0) if sum(plan.values()) % 7 == 3 else plan

    return window_plan


@mutant(ElChe, "counts", "a living rank gets no allotment")
def starves_a_rank(real: Any) -> Any:
    return property(lambda self: real.fget(self) | ({0: 0} if 0 in real.fget(self) else {}))


@mutant(Training, "_record", "a batch's time is not a number")
def times_with_nan(real: Function) -> Function:
    def record(self: Training, rank: int, message: BatchDone) -> None:
        self.ledger.record_batch(rank, float("nan"), message.data_ms, message.loss, message.samples)

    return record


@mutant(EpochPool, "is_done", "an epoch is done when its last samples are delivered, not accepted")
def closes_epochs_early(real: Any) -> Any:
    return property(lambda pool: pool.is_dealt and not pool.anything_in_flight)


@mutant(AsyncTraining, "overclaim", "a contribution may hold more batches than the rank was dealt")
def believes_any_claim(real: Function) -> Function:
    return lambda self, steps: None


# ----------------------------------------------------------------------------------------------------- deaths


@mutant(Cohort, "_rank_said", "the fence is gone: frames of the dead count")
def hears_zombies(real: Function) -> Function:
    def rank_said(self: Cohort, march: March, rank: int, message: Any, now: float) -> None:
        if march.world.lives(rank):
            real(self, march, rank, message, now)
        elif isinstance(message, BatchDone):
            march.training.batch_done(rank, message, now)
        elif isinstance(message, SyncAck):
            march.cycle.acknowledge(rank, message)

    return rank_said


@mutant(Losses, "ranks", "whoever is dead can die again")
def dies_twice(real: Function) -> Function:
    def ranks(self: Losses, casualties: list[Any], now: float) -> None:
        march = self._march
        again = [each for each in casualties if not march.world.lives(each.rank)]
        real(self, casualties, now)
        for casualty in again:
            if march.end is None:
                march.out += deaths.bury(march, casualty, now)

    return ranks


@mutant(March, "leaving", "a clean exit after Shutdown is a death")
def buries_who_leaves(real: Any) -> Any:
    return property(lambda self: self.end is not None)


@mutant(Losses, "exited", "an exit with code 0 is no death, whenever it comes")
def trusts_exit_zero(real: Function) -> Function:
    def exited(self: Losses, rank: int, cause: Any, now: float) -> None:
        if cause.code == 0:
            self._march.world.ranks[rank].exit = cause
        else:
            real(self, rank, cause, now)

    return exited


@mutant(Losses, "host", "a lost host is watched on")
def watches_the_lost(real: Function) -> Function:
    def host(self: Losses, seat: Any, reason: str, now: float) -> None:
        first = seat.state != "lost"
        real(self, seat, reason, now)
        if first and self._march.end is None:
            self._march.liveness.add(seat.host, now)

    return host


@mutant(deaths, "death_records", "a death is not durable before it is announced")
def buries_in_passing(real: Function) -> Function:
    def death_records(*arguments: Any, **keywords: Any) -> Any:
        row, records = real(*arguments, **keywords)
        return row, [replace(record, durable=False) for record in records]

    return death_records


@mutant(losses, "tolerance", "no number of deaths ends a run")
def tolerates_everything(real: Function) -> Function:
    return lambda *arguments, **keywords: Tolerance(False, None, "All is well.")


@mutant(bounds, "tolerance", "stalled ranks are declared dead though the run tolerates no more deaths")
def buries_the_stalled_anyway(real: Function) -> Function:
    return lambda *arguments, **keywords: Tolerance(False, None, "All is well.")


# ------------------------------------------------------------------------------------------------------ bounds


@mutant(Liveness, "late", "nobody's silence is noticed")
def hears_no_silence(real: Function) -> Function:
    return lambda self, now: []


@mutant(Liveness, "lagged", "hosts get no time for the controller's own absence")
def blames_hosts_for_its_lag(real: Function) -> Function:
    return lambda self, seconds: "The controller was away."


@mutant(Bounds, "lagged", "rounds and chunks get no time for the controller's own absence")
def blames_ranks_for_its_lag(real: Function) -> Function:
    return lambda self, seconds: None


@mutant(Bounds, "_round_deadline", "a round may take for ever")
def forgets_the_rounds_deadline(real: Function) -> Function:
    return lambda self: None


@mutant(ProgressWatch, "next_deadline", "a rank may take for ever over its chunk")
def forgets_the_chunks_deadline(real: Function) -> Function:
    return lambda self: None


@mutant(Bounds, "_issue_again", "a lost plan is not issued again")
def issues_nothing_again(real: Function) -> Function:
    return lambda self, rank, now: None


@mutant(Ending, "go", "the steps of an end have no deadline")
def forgets_the_ends_deadline(real: Function) -> Function:
    return lambda self, step, deadline: real(self, step, deadline + FOREVER)


@mutant(March, "advance", "a round that is past its ceiling when the run ends is waited for")
def ends_behind_an_open_round(real: Function) -> Function:
    def advance(self: March, now: float) -> None:
        if self.ending is not None and self.cycle.open is not None:
            self.cycle.open.grace = FOREVER
        real(self, now)

    return advance


@mutant(ProgressWatch, "rests", "a rank that is done is watched on, and stalls")
def watches_who_is_done(real: Function) -> Function:
    return lambda self, rank: None


# --------------------------------------------------------------------------------------------- errands and ends


@mutant(CheckpointDesk, "rank_died", "a checkpoint waits for the tensors of a dead rank")
def waits_for_the_deads_tensors(real: Function) -> Function:
    return lambda self, rank, now: []


@mutant(EvaluationDesk, "rank_died", "an evaluation waits for a dead rank")
def waits_for_the_deads_score(real: Function) -> Function:
    return lambda self, rank, substitute: []


@mutant(March, "save_and_stop", "a stall ends the run without a checkpoint")
def stops_without_saving(real: Function) -> Function:
    def save_and_stop(self: March, why: SaveReason, what: str, now: float) -> None:
        self.fail(f"{why.label}: {what}", now)

    return save_and_stop


@mutant(March, "_after_round", "a round that closes after the end began deals another window")
def deals_while_it_ends(real: Function) -> Function:
    def after_round(self: March, number: int, now: float) -> None:
        self.ending, ending = None, self.ending
        try:
            real(self, number, now)
        finally:
            self.ending = self.ending or ending

    return after_round


@mutant(march_module, "farewell", "hosts are not told that the run is over")
def says_no_goodbye(real: Function) -> Function:
    return lambda seat, phase, reason: []


@mutant(March, "finish", "the end is told before it is on record")
def tells_before_it_records(real: Function) -> Function:
    def finish(self: March, phase: str, reason: str, now: float) -> None:
        before = len(self.out)
        real(self, phase, reason, now)
        mine = self.out[before:]
        self.out[before:] = sorted(mine, key=lambda effect: 2 * isinstance(effect, End) + isinstance(effect, Record))

    return finish


@mutant(Cohort, "handle", "what is said after the end is taken up")
def hears_after_the_end(real: Function) -> Function:
    def handle(self: Cohort, event: Any, now: float) -> Any:
        effects = real(self, event, now)
        if self.march is not None and effects and isinstance(effects[0], Refused) and effects[0].code == "run_over":
            return [self.end, *effects]
        return effects

    return handle


@mutant(March, "stop", "the operator's stop is forgotten")
def forgets_the_stop(real: Function) -> Function:
    def stop(self: March, by: str) -> bool:
        taken = bool(real(self, by))
        self.stopping = ""
        return taken

    return stop


SURVIVORS: dict[str, str] = {
    "times_with_nan": "no fault: the ledger leaves out what is not finite, and ElChe again",
    "believes_any_claim": "no played host claims work that it was not dealt; tests/core/test_lookahead.py has one",
    "buries_the_stalled_anyway": "no fault: the limit of deaths ends the run in the same step, and saved as well",
}
"""by name: why no ordeal can find it"""

__all__ = ["MUTANTS", "SURVIVORS", "later_bugs", "session_bugs"]
