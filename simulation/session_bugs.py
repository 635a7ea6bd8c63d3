"""Bugs in the collective plane: sessions that are none, sums that not everybody has, waits without an end."""

from __future__ import annotations

from functools import partial
from typing import Any

from msgspec.structs import replace

from backend.core import collective, losses
from backend.core.collective import Collectives
from backend.core.cycle import OpenedRound
from backend.core.saving import CheckpointDesk
from backend.core.vocabulary import SendRank
from simulation.mutants import Function
from simulation.mutants import mutant as any_mutant
from wire.messages import NewSession

mutant = partial(any_mutant, collective=True)


@mutant(Collectives, "_synced", "a round is committed with one report missing")
def commits_with_one_report_missing(real: Function) -> Function:
    def synced(self: Collectives, rank: int, message: Any, now: float) -> None:
        opened = self._march.cycle.open
        if opened is not None and opened.finished is None and len(self._reports) == len(opened.ranks) - 2:
            missing = next(iter(opened.ranks - self._reports.keys() - {rank}))
            steps = message.total_steps - message.steps - sum(report.steps for report in self._reports.values())
            self._reports[missing] = replace(message, steps=max(0, steps))
        real(self, rank, message, now)

    return synced


@mutant(Collectives, "_joined", "a session is live with the first that joins")
def lives_with_one_joined(real: Function) -> Function:
    def joined(self: Collectives, rank: int, message: Any, now: float) -> None:
        if message.generation == self.session.generation:
            self.session.joined.update(dict.fromkeys(self.session.ranks, ""))
        real(self, rank, message, now)

    return joined


@mutant(Collectives, "_drop", "survivors are not told that their session is over")
def aborts_nobody(real: Function) -> Function:
    def drop(self: Collectives, reason: str) -> list[Any]:
        real(self, reason)
        return []

    return drop


@mutant(Collectives, "_drop", "whoever has joined already is not told that its session is over")
def aborts_only_the_late(real: Function) -> Function:
    def drop(self: Collectives, reason: str) -> list[Any]:
        joined = set(self.session.joined) if self.session.state == "joining" else set()
        return [effect for effect in real(self, reason) if effect.rank not in joined]

    return drop


@mutant(Collectives, "retract", "an attempt that is given up is not ended where it is in flight")
def leaves_them_in_the_sum(real: Function) -> Function:
    return lambda self, opened, hosts, reason: []


@mutant(Collectives, "_begin", "a session made anew has the generation of the one before")
def names_the_same_generation(real: Function) -> Function:
    def begin(self: Collectives, reason: str, now: float) -> Any:
        if self.session.generation >= 0:
            self.session.generation -= 1
        return real(self, reason, now)

    return begin


@mutant(Collectives, "_named", "the dead have a place in the session that is made without them")
def seats_the_dead(real: Function) -> Function:
    def named(self: Collectives, rank: int, message: Any, now: float) -> None:
        out = self._march.out
        first = len(out)
        real(self, rank, message, now)
        everybody = list(self._march.world.ranks)
        for at, effect in enumerate(out[first:], first):
            if isinstance(effect, SendRank) and isinstance(effect.message, NewSession):
                out[at] = SendRank(effect.rank, replace(effect.message, ranks=everybody))

    return named


@mutant(Collectives, "request", "survivors are asked under the attempt that is over")
def asks_for_the_old_attempt(real: Function) -> Function:
    def request(self: Collectives, opened: OpenedRound, now: float) -> Any:
        opened.attempt = 0
        self._asked = (-1, 0)
        return real(self, opened, now)

    return request


@mutant(losses, "tolerance", "the last rank goes on by itself")
def goes_on_alone(real: Function) -> Function:
    return lambda dead, world, limit, *, collective=False: real(dead, world, limit)


@mutant(Collectives, "deadline", "who names a session, or joins it, may take for ever")
def waits_for_ever(real: Function) -> Function:
    return lambda self: None


@mutant(Collectives, "lagged", "a rendezvous gets no time for the controller's own absence")
def blames_the_rendezvous_for_its_lag(real: Function) -> Function:
    return lambda self, seconds: None


@mutant(Collectives, "_sync", "a rank whose values were refused is asked for them again")
def forgets_who_was_refused(real: Function) -> Function:
    def sync(self: Collectives, opened: OpenedRound) -> Any:
        return [SendRank(effect.rank, replace(effect.message, excluded=False)) for effect in real(self, opened)]

    return sync


@mutant(Collectives, "bereaved", "a session with a dead rank goes on")
def sums_with_the_dead(real: Function) -> Function:
    def bereaved(self: Collectives, dead: set[int], now: float) -> Any:
        left = tuple(rank for rank in self.session.ranks if rank not in dead)
        if self.session.state != "live" or len(left) < 2:
            return real(self, dead, now)
        self.session.ranks = left
        self.session.joined = {rank: self.session.joined[rank] for rank in left}
        return []

    return bereaved


@mutant(Collectives, "_lost", "a collective that failed is nobody's business")
def ignores_what_was_lost(real: Function) -> Function:
    return lambda self, rank, message, now: None


@mutant(collective, "disagreement", "ranks that counted differently have the same sum")
def believes_any_report(real: Function) -> Function:
    return lambda reports, gamma: ""


@mutant(Collectives, "_scoring", "sessions are made while a rank scores")
def waits_for_no_score(real: Function) -> Function:
    return lambda self: False


@mutant(CheckpointDesk, "rank_died", "a checkpoint is written without its consensus when the bearer dies")
def writes_without_the_bearer(real: Function) -> Function:
    def rank_died(self: CheckpointDesk, rank: int, now: float) -> Any:
        if self._open is not None and self._open.bearer == rank:
            self._open.waiting.discard(rank)
            return self._write_if_complete(now)
        return real(self, rank, now)

    return rank_died


@mutant(CheckpointDesk, "_bearer", "whoever runs the errands bears the consensus, whether it ever did or not")
def asks_the_same_bearer(real: Function) -> Function:
    return lambda self, busy: self._errands.rank()
