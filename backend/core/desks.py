"""The errand that the cohort sends a single rank on: scoring the consensus.

It goes to one living rank and is asked again of another when that rank dies; nobody else waits for it (behaviour F16).
"""

from __future__ import annotations

from backend.core.errands import Errands
from backend.core.vocabulary import Effect, Record, SendRank
from wire.messages import EvalResult, Evaluate


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

    def restore(self, evaluated: tuple[int, dict[str, float]] | None) -> None:
        """The newest result of the run that this one resumes."""
        if evaluated is not None:
            epoch, metrics = evaluated
            self.latest = EvalResult(epoch=epoch, metrics=metrics, elapsed_ms=0.0)

    def rank_died(self, rank: int, substitute: int | None) -> list[Effect]:
        """Ask the substitute for what the dead rank owed; without one the evaluation is dropped."""
        owed = [epoch for epoch, asked in self.pending.items() if asked == rank]
        effects: list[Effect] = []
        for epoch in owed:
            del self.pending[epoch]
            if substitute is not None:
                effects += self.ask(epoch, substitute)
        return effects
