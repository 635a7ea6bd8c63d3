"""Checkpoints: when one is due, and what each rank has to hand over for it (behaviour F16, J12; decision 0016).

A save begins at a closed round, when every replica equals the consensus, and before the next window is dealt: so what
ranks hand over is of that moment, whenever it arrives. They train on meanwhile.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from backend.core.config import RunConfig
from backend.core.errands import Errands
from backend.core.vocabulary import (
    CheckpointWritten,
    Effect,
    KeepState,
    OpenCheckpoint,
    Record,
    SendRank,
    WriteCheckpoint,
)
from backend.core.world import World
from wire.messages import LocalState, RequestLocalState


@dataclass(slots=True)
class _Open:
    reason: str
    manifest: dict[str, Any]
    waiting: set[int]
    """ranks whose state has not come whole"""
    progress_at: float
    bearer: int | None = None
    """the rank that hands over the consensus, where the controller holds none"""
    parts: dict[int, int] = field(default_factory=dict)
    """parts taken, by rank"""
    whole: list[int] = field(default_factory=list)
    errors: dict[int, str] = field(default_factory=dict)
    writing: bool = False
    overdue: bool = False
    """the disk took longer than anybody waits for"""


class CheckpointDesk:
    """One checkpoint at a time. ``number`` is the newest one's; a resumed run goes on from the one that it took up."""

    def __init__(self, config: RunConfig, world: World, errands: Errands) -> None:
        self._config = config
        self._world = world
        self._errands = errands
        self.number = 0
        self.asked = ""
        """who asked for one that has not begun"""
        self.trouble = ""
        """why the last one could not be written; empty once one was"""
        self.orphaned = False
        """the last one failed by its bearer alone: the next one has another"""
        self.unsaved = ""
        """why nobody handed the last one's consensus over"""
        self._failed: set[int] = set()
        """bearers that handed nothing over since one did"""
        self._missed = ""
        self._open: _Open | None = None

    @property
    def busy(self) -> bool:
        """One is being made."""
        return self._open is not None

    @property
    def awaited(self) -> bool:
        """One is being made, and there is still hope for it."""
        return self._open is not None and not self._open.overdue

    def deadline(self) -> float | None:
        """When the rank that was waited for, or the disk, is late."""
        return self._open.progress_at + self._config.stall_seconds if self._open and not self._open.overdue else None

    def check(self) -> None:
        """Only the living are waited for."""
        waiting = self._open.waiting if self._open else set()
        assert waiting <= set(self._world.alive()), f"checkpoint {self.number} waits for the dead {waiting}"

    def lagged(self, seconds: float) -> None:
        """The controller was away for so long: what came meanwhile is still unread."""
        if self._open is not None:
            self._open.progress_at += seconds

    def ask(self, by: str) -> list[Effect]:
        """Somebody wants one: it is taken at the next round's close."""
        again, self.asked = bool(self.asked), by
        text = f"{by} asked for a checkpoint: it is taken when the round at hand is closed"
        return [] if again else [Record("events", {"kind": "save_requested", "level": "info", "text": text})]

    def due(self, round_number: int, epochs_done: int, epoch_closed: bool) -> str:
        """Why a checkpoint is due now that this round is closed; empty when none is."""
        config = self._config
        if self.asked:
            return f"asked for by {self.asked}"
        if config.checkpoint_epochs and epoch_closed and epochs_done % config.checkpoint_epochs == 0:
            return f"after epoch {epochs_done}"
        if config.checkpoint_rounds and (round_number + 1) % config.checkpoint_rounds == 0:
            return f"after round {round_number}"
        return self._missed

    def begin(self, reason: str, manifest: dict[str, Any], now: float, *, busy: Collection[int] = ()) -> list[Effect]:
        """Start one, or while one is under way remember that another is due. Who is ``busy`` bears no consensus, if
        somebody else can."""
        if self._open is not None:
            self._missed = f"due {reason}"
            return []
        self.asked, self._missed, self.orphaned, self.unsaved = "", "", False, ""
        self.number += 1
        alive = self._world.alive()
        bearer = self._bearer(busy) if self._config.collective else None
        if self._config.collective and bearer is None:
            self._failed.clear()
            return self._without_consensus("nobody is left who could hand over the consensus")
        self._open = _Open(reason=reason, manifest=manifest, waiting=set(alive), progress_at=now, bearer=bearer)
        asked = [SendRank(rank, RequestLocalState(self.number, consensus=rank == bearer)) for rank in alive]
        return [OpenCheckpoint(self.number), *asked, *self._write_if_complete(now)]

    def local_state(self, rank: int, message: LocalState, now: float) -> list[Effect]:
        """A part of a rank's state arrived. Parts that are out of turn, or of another checkpoint, are ignored."""
        current = self._open
        if current is None or rank not in current.waiting or message.checkpoint != self.number:
            return []
        if message.part != current.parts.get(rank, 0) or message.part >= message.parts:
            return []
        current.progress_at = now
        current.parts[rank] = message.part + 1
        if message.part == 0:
            self._errands.paid("checkpoint", message.elapsed_ms)
        if message.error:
            current.errors[rank] = message.error
        if message.part + 1 == message.parts:
            if rank == current.bearer:
                self._failed.clear()
            current.waiting.discard(rank)
            current.whole.append(rank)
        keep = KeepState(self.number, rank, message.part, message.data)
        return [keep, *self._write_if_complete(now)]

    def rank_died(self, rank: int, now: float) -> list[Effect]:
        """Nobody waits for the dead: what came of its state in part is left out, and the manifest says so."""
        current = self._open
        if current is None:
            return []
        if rank == current.bearer and rank in current.waiting:
            self.orphaned = True
            return self._without_consensus(f"{self._world.where(rank)} died before it had handed over the consensus")
        current.waiting.discard(rank)
        return self._write_if_complete(now)

    def expire(self, now: float) -> list[Effect]:
        """Go on without what is late."""
        current, deadline = self._open, self.deadline()
        if current is None or deadline is None or now < deadline:
            return []
        seconds = f"{self._config.stall_seconds:g} s"
        if current.writing:
            current.overdue = True
            return [_failed(f"Checkpoint {self.number} is not on disk after {seconds}; the run goes on without it")]
        late = ", ".join(self._world.where(rank) for rank in sorted(current.waiting))
        if current.bearer is not None and current.bearer in current.waiting:
            self.orphaned = True
            self._failed.add(current.bearer)
            return self._without_consensus(f"nothing more came from {late} for {seconds}")
        text = f"Checkpoint {self.number} is written without the state of {late}: nothing more came for {seconds}"
        current.waiting.clear()
        warning = Record("events", {"kind": "state_missing", "level": "warning", "text": text}, durable=True)
        return [warning, *self._write_if_complete(now)]

    def done(self, event: CheckpointWritten) -> list[Effect]:
        """The bundle is on disk, or it could not be written."""
        current = self._open
        if current is None or event.checkpoint != self.number:
            return []
        self._open = None
        if event.error:
            self.trouble = f"Checkpoint {event.checkpoint} could not be written: {event.error}"
            return [_failed(self.trouble)]
        self.trouble = ""
        values = {name: current.manifest[name] for name in ("round", "epoch", "global_step", "loss")} | {
            "reason": current.reason,
            "checkpoint": event.checkpoint,
            "path": event.path,
            "bytes": event.bytes,
            "sha256": event.sha256,
        }
        text = f"Checkpoint {event.checkpoint} written: {event.bytes} bytes ({current.reason})"
        effects: list[Effect] = [
            Record("checkpoints", values, durable=True),
            Record("events", {"kind": "checkpoint", "level": "info", "text": text}),
        ]
        effects += [Record("checkpoints", {"checkpoint": number, "pruned": True}) for number in event.pruned]
        for rank, error in sorted(current.errors.items()):
            text = f"Checkpoint {event.checkpoint} lacks a part of {self._world.where(rank)}: {error}"
            effects.append(Record("events", {"kind": "state_missing", "level": "warning", "text": text}))
        return effects

    def _bearer(self, busy: Collection[int]) -> int | None:
        """Whoever runs the errands or, if it cannot or did not, another one that lives."""
        first = self._errands.rank()
        able = [rank for rank in self._world.alive() if rank not in self._failed]
        return min(able, key=lambda rank: (rank in busy, rank != first, rank), default=None)

    def _write_if_complete(self, now: float) -> list[Effect]:
        current = self._open
        if current is None or current.waiting or current.writing:
            return []
        current.writing, current.progress_at = True, now
        return [
            WriteCheckpoint(
                checkpoint=self.number,
                reason=current.reason,
                states=tuple(sorted(current.whole)),
                manifest=current.manifest,
                keep=self._config.keep_checkpoints,
                consensus_of=current.bearer,
            )
        ]

    def _without_consensus(self, because: str) -> list[Effect]:
        """The others' consensus may be another round's by now, so there is nothing to write. Another one is due."""
        self._open, self.unsaved = None, because
        self._missed = f"again, because {because}"
        self.trouble = f"Checkpoint {self.number} could not be written: {because}"
        return [_failed(self.trouble)]


def _failed(text: str) -> Record:
    return Record("events", {"kind": "checkpoint_failed", "level": "error", "text": text}, durable=True)
