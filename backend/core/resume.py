"""Going on from a checkpoint: what a manifest says of a run, and how a new march takes it up (behaviour E12, J11).

Progress is in samples, so that another world or batch size trains exactly what is left. Whatever cannot be taken up
as it was begins anew, and a sentence says so; what must not differ is refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from backend.core.config import Problem, RunConfig
from backend.core.vocabulary import Effect, Record, SendRank, SendState
from backend.core.work import EpochPool, Lost, Range
from wire.messages import ProbeReport, SavedState, TensorSpec

if TYPE_CHECKING:
    from backend.core.march import March

Seat = tuple[str, str]
"""a host's name and a device of it"""


@dataclass(frozen=True, slots=True)
class Resume:
    """Where a run stood when its checkpoint was taken."""

    run_id: int
    checkpoint: int
    job: str
    seed: int
    batch_size: int
    dataset_size: int
    layout: tuple[TensorSpec, ...]
    seats: tuple[Seat, ...]
    """by rank"""
    states: tuple[int, ...]
    """ranks whose own state the checkpoint has"""
    round: int
    """the last closed one"""
    global_step: int
    """batches of the cohort, of ``batch_size``"""
    samples_accepted: tuple[int, ...]
    """of each finished epoch"""
    accepted: tuple[Range, ...]
    """of the epoch that was in progress"""
    lost: tuple[Lost, ...]
    """of that epoch"""
    samples_lost: int
    """of the finished epochs"""
    batches: int
    """of that epoch, with ``seconds`` and the sum of their losses"""
    seconds: float
    loss_sum: float
    loss_batches: int
    loss: float | None
    evaluated: tuple[int, dict[str, float]] | None
    """the newest score: epoch and metrics"""
    scheduler: dict[str, Any]
    guard: dict[str, Any]
    meta: dict[str, Any] | None
    notes: tuple[str, ...] = ()
    """what whoever read the checkpoint found remarkable"""
    place: str = ""
    """what to call it where it is no checkpoint"""

    @property
    def reference(self) -> ProbeReport:
        """What every host must find, as far as the checkpoint knows it."""
        return ProbeReport(layout=list(self.layout), dataset_size=self.dataset_size)

    @property
    def where(self) -> str:
        """The checkpoint in words."""
        return self.place or f"checkpoint {self.checkpoint} of run {self.run_id}"

    @property
    def trained(self) -> int:
        """Samples of the epoch in progress that are accepted or lost: those that nobody trains again."""
        return sum(piece.size for piece in (*self.accepted, *(one.piece for one in self.lost)))

    def step(self, batch_size: int) -> int:
        """The clock of learning-rate schedules in batches of this size: as many as the samples amount to."""
        if batch_size == self.batch_size:
            return self.global_step
        whole = math.ceil(self.dataset_size / batch_size)
        return len(self.samples_accepted) * whole + math.ceil(self.trained / batch_size)

    def source(self, rank: int) -> int | None:
        """Whose saved state this rank takes up: its own, else one of those there are, in turn; none without any."""
        if rank in self.states:
            return rank
        return self.states[rank % len(self.states)] if self.states else None

    def problems(self, config: RunConfig) -> Iterator[Problem]:
        """Why a run of this configuration cannot go on from here."""
        if config.job != self.job:
            text = f"{self.where} is of job {self.job}, not {config.job}; resume it with its own job"
            yield Problem("job", "checkpoint_foreign", text)
        if config.seed != self.seed and self.trained:
            text = f"{self.where} is in the middle of an epoch that seed {self.seed} shuffled; keep that seed"
            yield Problem("seed", "seed_differs", text)
        if len(self.samples_accepted) >= config.epochs:
            done = len(self.samples_accepted)
            text = f"{self.where} has trained {done} of {config.epochs} epochs; ask for more than {done}"
            yield Problem("epochs", "nothing_left", text)


def read_resume(manifest: Mapping[str, Any]) -> Resume:
    """The position that a checkpoint's manifest describes. Raises ``ValueError`` naming what is wrong with it."""
    try:
        return _read(manifest)
    except KeyError as error:
        raise ValueError(f"its manifest has no {error.args[0]}") from error
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        raise ValueError(f"its manifest cannot be read: {error}") from error


def _read(manifest: Mapping[str, Any]) -> Resume:
    progress, config = manifest["progress"], manifest["config"]
    known = {entry.name for entry in fields(Resume)}
    plain = {name: manifest[name] for name in ("run_id", "checkpoint", "round", "global_step", "dataset_size")}
    plain |= {
        name: progress[name] for name in ("batches", "seconds", "loss_sum", "loss_batches", "loss", "samples_lost")
    }
    assert plain.keys() <= known
    evaluated = progress["evaluated"]
    resume = Resume(
        job=str(config["job"]),
        seed=int(config["seed"]),
        batch_size=int(config["batch_size"]),
        layout=tuple(TensorSpec(**spec) for spec in manifest["layout"]),
        seats=tuple((str(host), str(device)) for host, device in manifest["seats"]),
        states=tuple(sorted(int(rank) for rank in manifest["states"])),
        samples_accepted=tuple(int(samples) for samples in progress["samples_accepted"]),
        accepted=tuple(Range(int(offset), int(size)) for offset, size in progress["accepted"]),
        lost=tuple(_lost(row) for row in progress["lost"]),
        evaluated=None if evaluated is None else (int(evaluated["epoch"]), dict(evaluated["metrics"])),
        scheduler=dict(manifest["scheduler"]),
        guard=dict(manifest["guard"]),
        meta=manifest["meta"],
        **plain,
    )
    for name in ("checkpoint", "global_step", "dataset_size", "round"):
        if not isinstance(value := getattr(resume, name), int) or value < 0:
            raise ValueError(f"{name} is {value!r}")
    EpochPool(0, resume.dataset_size, resume.batch_size, resume.accepted, resume.lost)
    return resume


def _lost(row: Mapping[str, Any]) -> Lost:
    return Lost(Range(int(row["offset"]), int(row["size"])), int(row["rank"]), str(row["reason"]))


# ------------------------------------------------------------------------------------------------- taking it up


def send_saved(march: March, rank: int, part: int, now: float) -> Effect:
    """A rank that is forming asks for a part of its saved state; each one shows that it goes on."""
    march.forming.deadline = max(march.forming.deadline, now + march.config.forming_seconds)
    source = march.resume.source(rank) if march.resume else None
    if source is None:
        return SendRank(rank, SavedState(part=0, parts=0, data=b"", own=False))
    return SendState(rank, source, part, own=source == rank)


def take_up(march: March, resume: Resume, now: float) -> list[Effect]:
    """Put a march that is forming where the checkpoint was. Answers with the events that say so."""
    training, config = march.training, march.config
    march.resume = resume
    march.checkpoints.number = resume.checkpoint
    training.restore(resume, now)
    march.evaluations.restore(resume.evaluated)
    notes = [*resume.notes, *restore_pace(march, resume), *_states(march, resume)]
    if config.batch_size != resume.batch_size:
        step = training.global_step
        notes.append(f"Batches have {config.batch_size} samples, {resume.batch_size} before: the clock shows {step}")
    left = resume.dataset_size - resume.trained
    text = (
        f"Going on from {resume.where}: epoch {len(resume.samples_accepted) + 1} with {left} of {resume.dataset_size} "
        f"samples left, after round {resume.round} and step {resume.global_step}"
    )
    data = {"run": resume.run_id, "checkpoint": resume.checkpoint, "round": resume.round}
    effects: list[Effect] = [Record("events", _event("resumed", "info", text, data), durable=True)]
    return effects + [Record("events", _event("resumed_changed", "warning", note, {})) for note in notes]


def restore_pace(march: March, resume: Resume) -> Iterable[str]:
    """Restore the scheduler, guard and meta-controller; yields what begins anew instead, and why."""
    training = march.training
    seats = [(march.world.hosts[seat.host].name, seat.device) for seat in march.world.ranks.values()]
    state = reseated(resume.scheduler, resume.seats, seats)
    try:
        if state is None:
            yield "No device of the saved cohort is here, so paces are measured anew"
        else:
            training.scheduler.restore(state)
    except ValueError as error:
        yield f"Paces are measured anew: {error}"
    try:
        if not training.review.guard.restore(resume.guard):
            yield f"The guard begins anew: the saved history is of another kind ({resume.guard.get('kind')})"
        if training.review.meta is not None and resume.meta is not None:
            training.review.meta.restore(resume.meta)
    except ValueError as error:
        yield f"Guard and meta-controller begin anew: {error}"


def _states(march: March, resume: Resume) -> Iterable[str]:
    """Which ranks take up a state that is not their own."""
    if not resume.states:
        yield "The checkpoint has no rank's own state: every optimizer begins anew"
        return
    ranks = march.world.ranks
    borrowed = {rank: resume.source(rank) for rank in ranks if rank not in resume.states}
    if borrowed:
        pairs = ", ".join(f"rank {rank} rank {source}'s" for rank, source in borrowed.items())
        yield f"No state of their own was saved, so these take another rank's optimizer and fresh generators: {pairs}"
    unused = [rank for rank in resume.states if rank not in ranks]
    if unused:
        yield f"The world is smaller: the saved state of rank {', '.join(map(str, unused))} is not used"


def reseated(state: Mapping[str, Any], before: Sequence[Seat], after: Sequence[Seat]) -> dict[str, Any] | None:
    """A saved schedule with its rates where the devices sit now; 0 for a device that has none. None when no device of
    it is here."""
    rates = state.get("smoothed_ms_per_batch")
    if not isinstance(rates, Mapping):
        return dict(state)  # its reader says what is wrong with it
    old = {seat: rank for rank, seat in enumerate(before)}
    found = {rank: old[seat] for rank, seat in enumerate(after) if seat in old}
    if not found:
        return None
    smoothed = {str(rank): rates.get(str(found.get(rank, -1)), 0.0) for rank in range(len(after))}
    anchors = [rank for rank, saved in found.items() if saved == state.get("anchor_rank") and smoothed[str(rank)] > 0.0]
    return dict(state) | {"smoothed_ms_per_batch": smoothed, "anchor_rank": anchors[0] if anchors else None}


def _event(kind: str, level: str, text: str, data: dict[str, Any]) -> dict[str, Any]:
    return {"kind": kind, "level": level, "text": text, "data": data}
