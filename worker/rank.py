"""``python -m worker.rank``: the process of one rank, started by its host's agent.

It connects to the relay, builds the job, trains, and leaves when told to. Whatever else ends it is written to
``rank{r}.report.json`` and said on the link before it exits with code 1, so that nobody has to guess.
"""

from __future__ import annotations

import faulthandler
import logging
import math
import os
import sys
import time
import traceback
from pathlib import Path

import msgspec
import torch

from wire import failpoints
from wire.messages import RankFailed, RankHello, TrainingPlan
from worker.arena import Arena
from worker.communicator import Library, hangs
from worker.control import Control
from worker.data import SampleFeed
from worker.fingerprint import dataset_size
from worker.flat import FlatModel
from worker.interrupt import Interrupt
from worker.job import Job, JobError, blamed, load_job
from worker.lifeline import receive_orders
from worker.loop import LoopOptions, TrainingLoop, Workload
from worker.nccl_communicator import NcclLibrary
from worker.out_of_memory import NAME as OUT_OF_MEMORY
from worker.out_of_memory import explain, is_out_of_memory
from worker.progress import ProgressBlock
from worker.rank_link import LinkLost, RankLink
from worker.read_ahead import ReadAhead, Upload
from worker.seeding import seed_everything
from worker.sessions import Sessions
from worker.specs import RankSpec
from worker.trainer import Trainer
from worker.write_back import WriteBack

LOG_VARIABLE = "MARCHLINE_RANK_LOG"
"""a level of ``logging``: at debug, a rank tells each collective that it enters and leaves"""
_MAX_MESSAGE = 2000
_MAX_LINES = 4096


class Fenced(Exception):
    """The cohort declared this rank dead while it lived; its work does not count any more."""


def main() -> int:
    """Run one rank; the process's exit code."""
    faulthandler.enable()
    show_log(os.environ.get(LOG_VARIABLE, ""))
    failpoints.arm_or_exit(os.environ)
    spec = msgspec.json.decode(receive_orders(), type=RankSpec)
    failpoints.identify(rank=spec.rank)
    shm_dir = Path(spec.shm_dir)
    progress = ProgressBlock.create(shm_dir / f"rank{spec.rank}.progress", now_ns())
    link: RankLink | None = None
    interrupt = Interrupt(spec.rank)
    try:
        link = RankLink.connect(shm_dir / "relay.sock", spec.connect_seconds, interrupt)
        link.send(RankHello(rank=spec.rank))
        train(spec, link, interrupt, progress)
        return 0
    except (Exception, SystemExit) as error:
        return report_failure(error, spec, progress, link)
    finally:
        if link is not None:
            link.close()


def show_log(level: str) -> None:
    """Have this package's log on stderr, and leave the job's own logging alone. A level that there is not is none."""
    if level.upper() in logging.getLevelNamesMapping():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s.%(msecs)03d %(message)s", "%H:%M:%S"))
        log = logging.getLogger("worker")
        log.addHandler(handler)
        log.setLevel(level.upper())
        log.propagate = False


def train(spec: RankSpec, link: RankLink, interrupt: Interrupt, progress: ProgressBlock) -> None:
    """Build the job and serve until told to leave. Raises whatever goes wrong."""
    workload = build_workload(spec)
    plan = spec.plan
    control = Control(spec.rank, plan.gamma, overlap=overlaps(plan), collective=sums_itself(plan))
    sessions = Sessions(spec.rank, library(spec), interrupt) if sums_itself(plan) else None
    options = LoopOptions(
        job_dir=Path(spec.job_dir),
        verify_consensus=plan.verify_consensus,
        write_back=WriteBack(plan.write_back, plan.blend_alpha),
        emulate_ms_per_batch=spec.emulate_ms_per_batch,
        resumed=plan.resumed,
    )
    seed_everything(plan.seed + spec.rank)  # dropout and augmentation differ by rank; what was built does not
    order = TrainingLoop(control, link, workload, progress, options, sessions).run()
    workload.feed.close()
    if order.fenced:
        raise Fenced(f"the cohort goes on without this rank: {order.reason}")


def build_workload(spec: RankSpec) -> Workload:
    """Load and build the job, and create this rank's arena. Raises ``JobError``, ``ArenaError``.

    Every builder starts from the run's seed, so that a random split, say, is the same on all ranks.
    """
    plan, job_dir, shm_dir = spec.plan, Path(spec.job_dir), Path(spec.shm_dir)
    seed_everything(plan.seed)
    job = load_job(plan.job, job_dir, plan.params)
    dataset = _train_dataset(job, job_dir, plan.seed)
    size = dataset_size(dataset, job_dir)
    if size != plan.total_samples:
        raise JobError(
            "dataset_invalid",
            f"train_dataset has {size} samples here, the run was formed with {plan.total_samples}; "
            "did a file change since this host joined?",
        )
    seed_everything(plan.seed)
    with blamed("build_failed", "eval_dataset", job_dir):
        eval_dataset = job.eval_dataset()
    total_steps = plan.epochs * math.ceil(size / plan.batch_size)
    device = torch.device(spec.device)
    trainer = Trainer(job, job_dir, device, seed=plan.seed, total_steps=total_steps, precision=plan.precision)
    arena = Arena.for_model(trainer.model, overlap=overlaps(plan))
    arena.create_out(shm_dir / f"rank{spec.rank}.out")
    flat = FlatModel(arena, device) if sums_itself(plan) else None
    ahead = ReadAhead(Upload(device)) if device.type == "cuda" else None
    feed = SampleFeed(dataset, job.collate, plan.seed, plan.batch_size, ahead)
    return Workload(trainer, feed, arena, eval_dataset, flat)


def overlaps(plan: TrainingPlan) -> bool:
    """Whether ranks train on while a round is open."""
    return plan.mode.endswith("_async")


def sums_itself(plan: TrainingPlan) -> bool:
    """Whether ranks sum among themselves (design section 7)."""
    return plan.mode.startswith("nccl_")


def library(spec: RankSpec) -> Library:
    """What this rank's sessions are made with: NCCL between GPUs, gloo between CPUs."""
    device = torch.device(spec.device)
    if device.type != "cpu":
        return NcclLibrary(device, spec.interface)
    from worker.gloo_communicator import GlooLibrary  # torch.distributed, which not every torch has

    return GlooLibrary(spec.interface or "lo")


def report_failure(error: BaseException, spec: RankSpec, progress: ProgressBlock, link: RankLink | None) -> int:
    """Write down and tell why this rank ends. Returns the exit code, which is never 0: nobody told it to
    leave."""
    text = "".join(traceback.format_exception(error))
    print(text, file=sys.stderr, end="", flush=True)
    cause = error.__cause__ if isinstance(error, JobError) and error.__cause__ is not None else error
    memory = is_out_of_memory(cause)
    failed = RankFailed(
        exception=OUT_OF_MEMORY if memory else type(cause).__name__,
        message=(explain(cause, spec.device) if memory else _sentence(error))[:_MAX_MESSAGE],
        last_lines=text[-_MAX_LINES:],
        last_step=progress.read(now_ns()).steps,
    )
    report = Path(spec.shm_dir) / f"rank{spec.rank}.report.json"
    fresh = report.with_suffix(".new")
    fresh.write_bytes(msgspec.json.encode(failed))
    os.replace(fresh, report)
    _tell(failed, link)
    code = error.code if isinstance(error, SystemExit) else 1
    return code if isinstance(code, int) and 0 < code < 256 else 1


def _tell(failed: RankFailed, link: RankLink | None) -> None:
    if link is None:
        return
    try:
        link.send(failed)
    except LinkLost as error:
        print(f"the relay could not be told: {error}", file=sys.stderr)  # the report file says it all the same


def _sentence(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return f"the job called sys.exit({error.code!r}) before the run was over"
    return str(error)


def _train_dataset(job: Job, job_dir: Path, seed: int) -> object:
    seed_everything(seed)
    with blamed("build_failed", "train_dataset", job_dir):
        return job.train_dataset()


def now_ns() -> int:
    """The host's monotonic nanoseconds, which agent and ranks share."""
    return time.monotonic_ns()


def leave(code: int) -> None:
    """End the process, also where a library still hangs in a thread that the interpreter would wait for."""
    if hangs():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    leave(main())
