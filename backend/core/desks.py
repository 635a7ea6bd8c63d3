"""Two errands the cohort sends a single rank on: scoring the consensus, and handing over tensors for a checkpoint.

Each goes to one living rank and is asked again of another when that rank dies; nobody else waits for it (behaviour
F16).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from backend.core.errands import Errands
from backend.core.vocabulary import CheckpointWritten, Effect, Record, SendRank, WriteCheckpoint
from wire.messages import EvalResult, Evaluate, LocalState, RequestLocalState


class EvaluationDesk:
    """Which rank scores which epoch, and the newest result."""

    def __init__(self, errands: Errands) -> None:
        self._errands = errands
        self.pending: dict[int, int] = {}
        """rank by epoch"""
        self.latest: EvalResult | None = None

    def ask(self, epoch: int, rank: int) -> list[Effect]:
        """Have this rank score the parameters it holds now."""
        self.pending[epoch] = rank
        return [SendRank(rank, Evaluate(epoch=epoch))]

    def result(self, rank: int, message: EvalResult) -> list[Effect]:
        """Take a result from the rank that was asked; anybody else's is ignored."""
        if self.pending.get(message.epoch) != rank:
            return []
        del self.pending[message.epoch]
        self._errands.paid("evaluation", message.elapsed_ms)
        if message.error:
            text = f"Evaluation after epoch {message.epoch + 1} failed on rank {rank}: {message.error}"
            return [Record("events", {"kind": "evaluation_failed", "level": "error", "text": text})]
        if self.latest is None or message.epoch >= self.latest.epoch:
            self.latest = message
        return [Record("epochs", {"epoch": message.epoch, "metrics": dict(message.metrics)}, durable=True)]

    def rank_died(self, rank: int, substitute: int | None) -> list[Effect]:
        """Ask the substitute for what the dead rank owed; without one the evaluation is dropped."""
        owed = [epoch for epoch, asked in self.pending.items() if asked == rank]
        effects: list[Effect] = []
        for epoch in owed:
            del self.pending[epoch]
            if substitute is not None:
                effects += self.ask(epoch, substitute)
        return effects


@dataclass(slots=True)
class _Open:
    reason: str
    manifest: dict[str, Any]
    rank: int | None
    asked_at: float
    parts: dict[int, bytes] = field(default_factory=dict)
    tried: set[int] = field(default_factory=set)


class CheckpointDesk:
    """One checkpoint at a time: collect the tensors that are not averaged, then have it written."""

    def __init__(self, errands: Errands, patience: float) -> None:
        """``patience`` in seconds: how long a rank may take to hand over its tensors before another one is asked."""
        self._errands = errands
        self._patience = patience
        self.number = 0
        self.written: list[dict[str, Any]] = []
        self._open: _Open | None = None

    @property
    def busy(self) -> bool:
        return self._open is not None

    def begin(self, reason: str, manifest: dict[str, Any], rank: int | None, now: float) -> list[Effect]:
        """Start one. ``rank`` is asked for its local tensors; none when the model has no such tensor or nobody
        lives."""
        assert self._open is None, "a checkpoint is already being made"
        self.number += 1
        self._open = _Open(reason=reason, manifest=manifest, rank=rank, asked_at=now)
        if rank is None:
            return self._write(b"")
        return [SendRank(rank, RequestLocalState(checkpoint=self.number))]

    def local_state(self, rank: int, message: LocalState, now: float) -> list[Effect]:
        """A part arrived; with the last one the checkpoint is written."""
        current = self._open
        if current is None or current.rank != rank or message.checkpoint != self.number:
            return []
        current.parts[message.part] = message.data
        if len(current.parts) < message.parts:
            return []
        self._errands.paid("checkpoint", (now - current.asked_at) * 1000.0)
        return self._write(b"".join(current.parts[part] for part in range(message.parts)))

    def next_deadline(self) -> float | None:
        """When the rank that was asked has had its time; none while none is waited for."""
        current = self._open
        return None if current is None or current.rank is None else current.asked_at + self._patience

    def overdue(self, now: float, alive: Iterable[int]) -> list[Effect]:
        """A rank that lives and does not answer must not cost the checkpoint: the next one is asked, each once; when
        none is left it is written without the tensors that only ranks have (behaviour F16)."""
        due, current = self.next_deadline(), self._open
        if due is None or now < due or current is None or current.rank is None:
            return []
        silent = current.rank
        current.tried.add(silent)
        substitute = next((rank for rank in alive if rank not in current.tried), None)
        then = "its tensors are left out" if substitute is None else f"rank {substitute} is asked"
        text = f"Rank {silent} did not hand over its tensors for checkpoint {self.number} in time: {then}"
        row = {"kind": "checkpoint_late", "level": "warning", "text": text}
        return [Record("events", row), *self.rank_died(silent, substitute, now)]

    def rank_died(self, rank: int, substitute: int | None, now: float) -> list[Effect]:
        """Ask another rank from the start."""
        current = self._open
        if current is None or current.rank != rank:
            return []
        current.parts.clear()
        current.rank, current.asked_at = substitute, now
        if substitute is None:
            return self._write(b"")
        return [SendRank(substitute, RequestLocalState(checkpoint=self.number))]

    def done(self, event: CheckpointWritten, position: dict[str, Any]) -> list[Effect]:
        """The file is on disk, or it could not be written. ``position`` says where in the run it was taken."""
        current = self._open
        if current is None or event.checkpoint != self.number:
            return []
        self._open = None
        if event.error:
            text = f"Checkpoint {event.checkpoint} could not be written: {event.error}"
            return [Record("events", {"kind": "checkpoint_failed", "level": "error", "text": text}, durable=True)]
        values = position | {
            "reason": current.reason,
            "checkpoint": event.checkpoint,
            "path": event.path,
            "bytes": event.bytes,
            "sha256": event.sha256,
        }
        self.written.append(values)
        text = f"Checkpoint {event.checkpoint} written: {event.bytes} bytes ({current.reason})"
        return [
            Record("checkpoints", values, durable=True),
            Record("events", {"kind": "checkpoint", "level": "info", "text": text}),
        ]

    def _write(self, local_state: bytes) -> list[Effect]:
        current = self._open
        assert current is not None
        current.rank = None
        return [WriteCheckpoint(self.number, current.reason, local_state, current.manifest)]
