"""Batches that kill: when rank after rank dies over the same one, dealing it again would cost the whole cohort.

A death counts for a batch only when the rank's own process ended in the middle of it; a host that vanished says nothing
about the data (reliability study, F24).
"""

from __future__ import annotations

from backend.core.config import RunConfig

DEADLY = 3
"""ranks that die over one batch before the run gives up on it"""


class Poison:
    """Where ranks died, in the epoch at hand."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._epoch = -1
        self._deaths: dict[int, list[int]] = {}
        """ranks by the batch's first sample"""

    def died(self, rank: int, epoch: int, offset: int) -> str:
        """A rank's process ended over the batch that starts there. Why the run should give up, or an empty string."""
        if epoch != self._epoch:
            self._epoch, self._deaths = epoch, {}
        ranks = self._deaths.setdefault(offset, [])
        ranks.append(rank)
        if len(ranks) < DEADLY:
            return ""
        who = ", ".join(map(str, ranks))
        end = offset + self._config.batch_size
        return (
            f"ranks {who} died one after the other over the same batch, samples {offset} to {end} of epoch {epoch + 1} "
            "as it was shuffled; look at these samples, and at the last lines of the deaths"
        )
