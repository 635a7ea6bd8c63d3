"""Bugs in how a cohort is taken up again after its controller was killed, and in who is listened to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from backend.core import march as march_module
from backend.core.liveness import Liveness
from backend.core.march import March
from backend.core.resume import Resume
from backend.core.returning import Held, Kept, Returning
from backend.core.training import Training
from simulation.mutants import Function, mutant


@mutant(Held, "by", "it goes on from the newest round on disk, whoever holds it")
def trusts_the_disk_alone(real: Function) -> Function:
    def by(self: Held, world: Any) -> dict[int, list[int]]:
        held: dict[int, list[int]] = real(self, world)
        return held | {max(held) + 1: held[max(held)]} if held else held

    return by


@mutant(Training, "restore", "what was accepted before is dealt again")
def deals_everything_again(real: Function) -> Function:
    def restore(self: Training, resume: Resume, now: float) -> None:
        real(self, replace(resume, accepted=()), now)

    return restore


@mutant(march_module, "keep", "a position is written down before the round's samples are in it")
def keeps_the_round_before(real: Function) -> Function:
    before: dict[Any, Any] = {}

    def keep(march: Any, event: Any, now: float) -> list[Any]:
        records = real(march, event, now)
        states, before[march] = before.get(march, []), [record.row["state"] for record in records]
        stale = [state | {"round": event.round} for state in states]
        return [replace(row, row=row.row | {"state": state}) for row, state in zip(records, stale, strict=False)]

    return keep


@mutant(Kept, "dead", "deaths on record are forgotten")
def forgets_who_died_before(real: Any) -> Any:
    return property(lambda self: [])


@mutant(Returning, "begin", "a round that was dropped leaves its number to another one")
def uses_numbers_twice(real: Function) -> Function:
    def begin(self: Returning, march: Any, now: float) -> bool:
        began = bool(real(self, march, now))
        self.first_round = 0 if self.brings is None else self.brings + 1
        return began

    return begin


@mutant(March, "relay_attached", "a relay that stands still is nobody's concern")
def listens_to_agents_alone(real: Function) -> Function:
    def relay_attached(self: March, host: int, via: int | None, now: float) -> None:
        real(self, host, via, now)
        self.relays.remove(host)

    return relay_attached


@mutant(March, "relay_attached", "a relay is buried that had only nothing to pass on")
def hears_no_heartbeat_of_a_relay(real: Function) -> Function:
    class Deaf(Liveness):
        def heard(self, host: int, now: float) -> None:
            pass

    def relay_attached(self: March, host: int, via: int | None, now: float) -> None:
        if not isinstance(self.relays, Deaf):
            self.relays = Deaf(self.relays.timeout)
        real(self, host, via, now)

    return relay_attached
