"""What may happen in a script, by name: each act finds whom it strikes and leaves alone who is not there any more.

Besides those that ``script`` explains, these need ``run wires=1``:

    at T hang RANK [SECONDS]          its process stands still (for good), while its agent beats on
    at T freeze NAME [SECONDS]        the whole machine does, and goes on afterwards as if nothing had been
    at T stop_relay NAME [SECONDS]    its relay does, while its agent beats on
    at T cut NAME up|down|both SECONDS
                                      nothing passes; what was sent arrives afterwards, in order
    at T reset NAME                   its join link is reset; ``relay`` resets its relay's, ``unplug`` all
    at T slow NAME join|control|data|down SECONDS
                                      what is sent that way arrives so much later: links overtake each other
    at T lose RANK | double RANK      its next chunk gets lost, or comes twice
    at T curse EPOCH SAMPLE           whoever trains the batch that starts there dies
    at T spoil COUNT                  so many sums fail, and no host is to blame
    at T leave NAME | stranger        somebody ends an agent; somebody without the token dials in
    at T disk ok|full|silent          what becomes of checkpoints from now on
    at T away SECONDS                 the controller's process stands still
    at T crash EFFECTS                it dies once it has performed so many more effects; -1: behind the first goodbye

In the collective modes, wires or not:

    at T mute RANK                    it makes no session's identity when it is asked next
    at T outcast RANK [COUNT]         it cannot join the next sessions
    at T broken RANK [COUNT]          its next sums fail, though nobody is dead
    at T crooked RANK [COUNT]         its next reports have another total than the others'
    at T echo RANK                    from now on it says twice what it says of sessions
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from backend.core.vocabulary import Lagged
from simulation.ordeal import Ordeal
from simulation.theatre import Theatre

if TYPE_CHECKING:
    from simulation.script import Script

Perform = Callable[["Script", Theatre, list[str]], object]

OPERATOR = ("start", "stop", "abort", "extend", "turn_away", "change", "save")
SYNC_ACTS = ("mute", "outcast", "broken", "crooked", "echo")
RANK_ACTS = ("kill", "quit", "deaf", "nan", "speed", "pause", "hang", "lose", "double", *SYNC_ACTS)
HOST_ACTS = ("unplug", "freeze", "relay", "stop_relay", "poison", "cut", "reset", "slow", "leave")


def _operate(act: str, **kinds: type) -> Perform:
    def perform(script: Script, play: Theatre, arguments: list[str]) -> object:
        values = {name: kind(value) for (name, kind), value in zip(kinds.items(), arguments, strict=True)}
        return play.operate(act, **(values or {"by": "operator"}))

    return perform


def _join(script: Script, play: Theatre, arguments: list[str]) -> None:
    script.dial_in(play, arguments)


def _kill(script: Script, play: Theatre, arguments: list[str]) -> None:
    rank, *signal = arguments
    if _lives(play, int(rank)):
        play.kill(int(rank), signal=signal[0] if signal else "SIGKILL")


def _to_host(strike: Callable[..., object], *kinds: type) -> Perform:
    def perform(script: Script, play: Theatre, arguments: list[str]) -> object:
        name, *values = arguments
        if name not in play.hosts or not play.hosts[name].alive:
            return None
        return strike(play, name, *(kind(value) for kind, value in zip(kinds, values, strict=False)))

    return perform


def _to_rank(strike: Callable[..., object], *kinds: type) -> Perform:
    def perform(script: Script, play: Theatre, arguments: list[str]) -> object:
        rank, *values = arguments
        if not _lives(play, int(rank)):
            return None
        return strike(play, int(rank), *(kind(value) for kind, value in zip(kinds, values, strict=False)))

    return perform


def _set_lr(script: Script, play: Theatre, arguments: list[str]) -> None:
    (value,) = arguments
    play.lr = float(value)


def _lag(script: Script, play: Theatre, arguments: list[str]) -> None:
    (seconds,) = arguments
    play.feed(Lagged(float(seconds)))


def _on_wires(strike: Callable[..., object], *kinds: type) -> Perform:
    def perform(script: Script, play: Theatre, arguments: list[str]) -> object:
        assert isinstance(play, Ordeal), "this act needs run wires=1"
        return strike(play, *(kind(value) for kind, value in zip(kinds, arguments, strict=True)))

    return perform


def _disk(play: Ordeal, state: str) -> None:
    play.checkpoint_error = "disk_full" if state == "full" else ""
    play.silent_disk = state == "silent"
    play.disk_trouble |= state != "ok"


def _spoil(play: Ordeal, sums: int) -> None:
    play.plane.broken_sums = sums


def _in_sessions(what: str) -> Callable[..., object]:
    """Whatever a rank does wrong in sessions: so many times."""

    def strike(play: Theatre, rank: int, times: int = 1) -> None:
        syncing = play.ranks[rank].syncing
        setattr(syncing, what, getattr(syncing, what) + times)

    return strike


def _lives(play: Theatre, rank: int) -> bool:
    return rank in play.ranks and play.ranks[rank].alive


ACTS: dict[str, Perform] = {
    "join": _join,
    "start": _operate("start"),
    "stop": _operate("stop"),
    "abort": _operate("abort"),
    "extend": _operate("extend", seconds=float),
    "turn_away": _operate("turn_away", host=int),
    "kill": _kill,
    "save": _operate("save"),
    "change": _operate("change", quorum=int),
    "unplug": _to_host(lambda play, name: play.unplug(name)),
    "freeze": _to_host(lambda play, name, *seconds: play.freeze(name, *seconds), float),
    "relay": _to_host(lambda play, name: play.lose_relay(name)),
    "stop_relay": _to_host(lambda play, name, *seconds: play.stop_relay(name, *seconds), float),
    "poison": _to_host(Theatre.poison),
    "cut": _to_host(Ordeal.partition, str, float),
    "reset": _to_host(Ordeal.lose_join),
    "slow": _to_host(Ordeal.slow, str, float),
    "leave": _to_host(Ordeal.leave),
    "hang": _to_rank(Ordeal.hang, float),
    "lose": _to_rank(lambda play, rank: play.lost_plans.add(rank)),
    "double": _to_rank(lambda play, rank: play.double_plans.add(rank)),
    "curse": _on_wires(lambda play, epoch, offset: play.poison_batches.add((epoch, offset)), int, int),
    "spoil": _on_wires(_spoil, int),
    "disk": _on_wires(_disk, str),
    "stranger": _on_wires(Ordeal.stranger),
    "away": _on_wires(Ordeal.away, float),
    "crash": _on_wires(Ordeal.crash, int),
    "nan": _to_rank(Theatre.spoil, int),
    "deaf": _to_rank(Theatre.deafen),
    "quit": _to_rank(lambda play, rank: play.quit(rank)),
    "speed": _to_rank(Theatre.set_speed, float),
    "pause": _to_rank(Theatre.pause, float),
    **{act: _to_rank(_in_sessions(act), int) for act in SYNC_ACTS},
    "lr": _set_lr,
    "lag": _lag,
}
