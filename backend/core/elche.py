"""ElChe: how many batches each rank does per window, so that all of them reach the reduce together (behaviour C).

The slow device is the *anchor*: it does ``anchor`` batches a window, every other rank as many as it can do in the same
time. Once a round, measured costs go in (``report_window``), then what guard and meta-controller say (``apply``);
allotments and a sentence that explains them come out. The anchor grows while the fixed cost of a window is above its
target, and only a verdict shrinks it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from backend.core import elche_words as words
from backend.core.elche_growth import HIGHEST_TARGET, LOWEST_TARGET, REARM_AFTER, GrowthLatch, pressure
from backend.core.elche_round import Round
from backend.core.elche_rules import (
    COUNTS_HISTORY,
    MATURE_AFTER,
    SLACK_FLOOR_MS,
    SLACK_FLOOR_SHARE,
    STABLE_AFTER,
    Decision,
    Phase,
    Rates,
    Saved,
    SpeedHint,
    elect,
    hinted_counts,
    may_relax,
    read_saved,
)
from backend.core.timing import WindowReport
from backend.core.verdicts import NudgeDown, Stable, SuppressGrowth, Verdict


class ElChe:
    """The adaptive scheduler. Not calibrated until the first window with timing is reported; until then all ranks get
    the initial anchor, or what ``speed_hint`` says. ``overhead_target`` is a share of the window."""

    forced = False

    def __init__(
        self,
        ranks: Iterable[int],
        *,
        initial_anchor: int = 10,
        min_anchor: int | None = None,
        max_anchor: int = 1000,
        max_batch_diff: int | None = None,
        overhead_target: float = 0.05,
        speed_hint: SpeedHint | None = None,
    ) -> None:
        members = sorted(set(ranks))
        if len(members) < 2:
            raise ValueError(f"ElChe balances at least two ranks, not {len(members)}")
        self._max_anchor = max(1, max_anchor)
        self._min_anchor = min(max(1, initial_anchor if min_anchor is None else min_anchor), self._max_anchor)
        self._anchor = min(max(self._min_anchor, initial_anchor), self._max_anchor)
        self._max_batch_diff = max_batch_diff
        self._target = min(max(overhead_target, LOWEST_TARGET), HIGHEST_TARGET)
        self._max_total = 0
        self._cap_binding = False
        self._latch = GrowthLatch()
        self._rates = Rates(members)
        known = speed_hint if speed_hint is not None and speed_hint.slow_rank in members else None
        self._anchor_rank: int | None = known.slow_rank if known else None
        self._counts = hinted_counts(members, self._anchor, known)
        self._opening = words.opening(self._counts, speed_hint)
        self._history: deque[dict[int, int]] = deque(maxlen=COUNTS_HISTORY)
        self._calibrated = False
        self._calibrations = 0
        self._phase: Phase = "probe"
        self._staged_slack: dict[int, float] = {}
        self._round = Round(dict(self._counts), free=True)

    # ------------------------------------------------------------------------------------------- readings

    @property
    def counts(self) -> dict[int, int]:
        """Batches of every rank in the next window."""
        return dict(self._counts)

    @property
    def anchor(self) -> int:
        """Batches that the anchor rank does per window, before the epoch's cap."""
        return self._anchor

    @property
    def anchor_rank(self) -> int | None:
        """The rank that sets the pace, once one is elected."""
        return self._anchor_rank

    @property
    def calibrated(self) -> bool:
        """Whether counts rest on a measurement."""
        return self._calibrated

    @property
    def calibrations(self) -> int:
        """Windows that counted as a measurement."""
        return self._calibrations

    @property
    def phase(self) -> Phase:
        """How much is known: ``probe`` nothing, ``warmup`` little, ``stable`` and ``mature`` enough to elect anew."""
        return self._phase

    @property
    def cap_binding(self) -> bool:
        """Whether the epoch has fewer batches than the anchor asks for; growth would then have no effect (M15)."""
        return self._cap_binding

    @property
    def growth_open(self) -> bool:
        """Whether the anchor may grow: no recent verdict objects."""
        return self._latch.open

    @property
    def opening(self) -> str:
        """Why the allotments before the first round are what they are."""
        return self._opening

    def smoothed(self, rank: int) -> float:
        """The rank's ms a batch; 0 when unknown."""
        return self._rates.smoothed(rank)

    def anchor_wall_ms(self) -> float:
        """How long the anchor's window takes; 0 before calibration (C18)."""
        return self._anchor * self.smoothed(self._anchor_rank) if self._anchor_rank is not None else 0.0

    def recent_share(self) -> dict[int, float]:
        """Every rank's share of the batches allotted lately; sums to 1 (C17)."""
        windows = list(self._history) or [self._counts]
        sums = {rank: sum(window[rank] for window in windows) for rank in self._counts}
        whole = sum(sums.values())
        return {rank: batches / whole for rank, batches in sums.items()}

    # ---------------------------------------------------------------------------------------------- moves

    def set_max_total(self, batches: int) -> None:
        """Batches of an epoch: no window may be longer (C15). 0 lifts the cap. Acts from the next report on."""
        self._max_total = max(0, batches)

    def stage_slack(self, ms: Mapping[int, float]) -> None:
        """Errands (evaluation, checkpoint) will take so many ms of these ranks' next window: the next report gives them
        less for it, once. Costs below a floor are dropped, and so is everything before calibration (C21)."""
        floor = max(SLACK_FLOOR_SHARE * self.anchor_wall_ms(), SLACK_FLOOR_MS)
        self._staged_slack = {rank: cost for rank, cost in ms.items() if self._calibrated and floor <= cost < math.inf}

    def report_window(self, report: WindowReport) -> Decision:
        """Learn from a window and set the allotments of the next one (C5, C6); the anchor waits for the verdict."""
        self._round = Round(dict(self._counts), free=not self._calibrated, slack=self._staged_slack)
        self._staged_slack = {}
        if not self._rates.observe(report):
            return self._noted("No rank reported any timing in this window, so the allotments stay as they are.")
        if self._anchor_rank is None or self._phase in ("stable", "mature"):
            self._elect()
        anchor = self._anchor_rank
        if anchor is not None and self._rates.is_silent(anchor):
            self._elect()  # a pinned anchor that never reports must not freeze the allotments (M16)
        if self._pace <= 0.0:
            return self._noted(self._waiting_for_anchor())
        if self._phase != "probe":  # the first report never proposes
            self._weigh_growth(report)
        self._recompute()
        self._history.append(dict(self._counts))
        self._round.learnt = self._calibrated = True
        self._calibrations += 1
        self._advance_phase()
        return self._decision()

    def apply(self, verdict: Verdict) -> Decision:
        """Do what guard or meta-controller says about the reported round (C10). The decision speaks for the whole
        round."""
        now = self._round
        match verdict:
            case Stable(relax_up=relax_up):
                self._latch.quiet()
                if now.proposal is not None and now.pressure is not None:
                    self._move_anchor(now.proposal, words.pressed(now.pressure))
                    now.proposal = None
                if relax_up and may_relax(self._anchor, self._rates.by_rank().values(), self._max_batch_diff):
                    self._move_anchor(min(self._anchor + 1, self._max_anchor), "The replicas stay close together")
            case SuppressGrowth():
                self._object()
            case NudgeDown(factor=factor, cause=cause):
                self._object()
                if math.isfinite(factor):  # NaN must not collapse the anchor (M17)
                    smaller = math.ceil(self._anchor * min(max(factor, 0.1), 1.0))
                    self._move_anchor(min(self._anchor, max(1, smaller)), cause)
        return self._decision()

    def drop(self, rank: int) -> Decision:
        """A rank died or left: its history goes, and another sets the pace if it was the anchor.

        Raises ``ValueError`` for a rank that is not scheduled. The last rank can be dropped; then no counts remain.
        """
        if rank not in self._counts:
            raise ValueError(f"rank {rank} is not scheduled; ranks are {sorted(self._counts)}")
        was_anchor = rank == self._anchor_rank
        del self._counts[rank]
        self._rates.drop(rank)
        self._staged_slack.pop(rank, None)
        for window in self._history:
            window.pop(rank, None)
        if was_anchor:
            self._anchor_rank = None
            self._elect()
        self._round = Round(dict(self._counts), free=was_anchor)
        gone = f"Rank {rank} left the cohort."
        if not self._counts:
            return self._noted(f"{gone} No rank is left.")
        if self._pace <= 0.0:
            return self._noted(f"{gone} The others keep their allotments.")
        self._recompute()
        decision = self._decision()
        return Decision(decision.counts, decision.anchor, decision.anchor_rank, True, f"{gone} {decision.reason}")

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps (C19), JSON-ready: rank keys are strings."""
        saved = Saved(self._anchor, self._anchor_rank, self._rates.by_rank(), self._phase, self._calibrations)
        return saved.as_json()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take up a saved state. Raises ``ValueError``, and changes nothing, unless it is of exactly these ranks."""
        saved = read_saved(state, self._counts)
        self._rates.restore(saved.smoothed)
        self._anchor = min(saved.anchor, self._max_anchor)
        self._anchor_rank = saved.anchor_rank
        self._phase = saved.phase
        self._calibrations = saved.calibrations
        self._calibrated = any(ms > 0.0 for ms in self._rates.by_rank().values())
        self._cap_binding = False
        self._history.clear()
        self._staged_slack = {}
        self._counts = dict.fromkeys(self._counts, self._anchor)
        self._round = Round(dict(self._counts), free=True)
        if self._pace > 0.0:
            self._recompute()

    def check(self) -> None:
        """Assert what must hold between any two calls."""
        assert all(count >= 1 for count in self._counts.values()), f"an allotment is below 1: {self._counts}"
        assert 1 <= self._anchor <= self._max_anchor, f"anchor {self._anchor} is outside 1 to {self._max_anchor}"
        assert self._rates.by_rank().keys() == self._counts.keys(), "rates and allotments name different ranks"
        assert self._anchor_rank is None or self._anchor_rank in self._counts, (
            f"rank {self._anchor_rank} sets the pace but is not in the cohort"
        )
        if self._cap_binding:
            total, floor = sum(self._counts.values()), len(self._counts)
            assert total <= max(self._max_total, floor), f"a window of {total} exceeds the epoch's {self._max_total}"

    # ------------------------------------------------------------------------------------------- inside

    @property
    def _pace(self) -> float:
        """The anchor rank's ms a batch; 0 when there is none, or none known."""
        return self.smoothed(self._anchor_rank) if self._anchor_rank is not None else 0.0

    def _elect(self) -> None:
        self._anchor_rank = elect(self._rates.by_rank(), self._anchor_rank)

    def _weigh_growth(self, report: WindowReport) -> None:
        """Propose a larger anchor when the window's fixed cost is above its target (C9)."""
        rank, now = self._anchor_rank, self._round
        assert rank is not None
        fill_ms = report.fill_ms.get(rank, 0.0)
        cost = pressure(
            self._anchor, self._pace, fill_ms=fill_ms, sync_ms=report.sync_ms, target=self._target, phase=self._phase
        )
        if cost is None or not cost.fires or self._cap_binding:
            return
        now.pressure = cost
        wanted = min(max(cost.wanted(self._anchor), self._min_anchor), self._max_anchor)
        if wanted > self._anchor:
            now.waits = not self._latch.open
            now.proposal = None if now.waits else wanted

    def _object(self) -> None:
        """Close the latch and drop the proposal; kept, a later verdict would commit it and undo a nudge (M14)."""
        self._latch.object()
        self._round.waits = self._round.waits or self._round.proposal is not None
        self._round.proposal = None

    def _move_anchor(self, to: int, cause: str) -> None:
        if to == self._anchor:
            return
        self._round.moves.append(words.moved(cause, self._anchor, to))
        self._anchor = to
        self._recompute()
        if self._round.learnt:
            self._history[-1] = dict(self._counts)

    def _recompute(self) -> None:
        self._counts = self._round.counts(
            self._anchor, self._pace, self._rates.by_rank(), step=self._max_batch_diff, max_total=self._max_total
        )
        self._cap_binding = self._round.cap is not None

    def _decision(self) -> Decision:
        """What holds now, against what held when the round was reported."""
        now, rank = self._round, self._anchor_rank
        if rank is not None and self._pace > 0.0 and (now.moves or not now.note):
            reason = now.reason(self._counts, self._rates.by_rank(), rank, self._max_batch_diff)
            if now.pressure is not None and now.proposal is None and not now.moves:
                reason += f" {words.held(now.pressure, self._anchor, self._obstacle())}"
        else:
            reason = f"{words.joined(now.moves)}." if now.moves else now.note or self._opening
        return Decision(dict(self._counts), self._anchor, rank, self._counts != now.before, reason)

    def _obstacle(self) -> str:
        """What kept the anchor from growing under pressure."""
        if not self._round.waits:
            return "it is at its ceiling"
        if self._latch.open:
            return "growth is free again from the next round on"
        if self._latch.missing == REARM_AFTER:
            return "this round's verdict objects to it"
        return f"growth waits for {words.rounds(self._latch.missing)} without an objection"

    def _noted(self, note: str) -> Decision:
        self._round.note = note
        return self._decision()

    def _advance_phase(self) -> None:
        if self._phase == "probe":
            self._phase = "warmup"
        elif self._phase == "warmup" and self._calibrations >= STABLE_AFTER:
            self._phase = "stable"
        elif self._phase == "stable" and self._calibrations >= MATURE_AFTER:
            self._phase = "mature"

    def _waiting_for_anchor(self) -> str:
        if self._anchor_rank is None:
            return "No rank has a usable timing yet, so the allotments stay as they are."
        return f"Rank {self._anchor_rank} sets the pace but has not reported its timing yet, so the allotments stay."
