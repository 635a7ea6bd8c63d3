"""The agent's look at a job, in a process of its own: torch, and whatever the job does, stay out of the agent."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import msgspec

from wire.messages import JobOffer, ProbeReport, encode
from worker.child import Child
from worker.environment import probe_environment
from worker.specs import ProbeSpec, line

PROBE_SECONDS = 110.0
"""a little less than the controller waits, so that it hears the reason"""
_MAX_REPORT = 1 << 20


async def probe_job(offer: JobOffer, job_dir: Path, seconds: float = PROBE_SECONDS) -> ProbeReport:
    """Load and build the job elsewhere; the report says what is wrong, also when the probe itself dies or takes too
    long."""
    spec = ProbeSpec(job=offer.job, params=offer.params, job_dir=str(job_dir))
    child = await Child.spawn(
        "probe", "worker job probe", line(spec), probe_environment(os.environ), collect=4 * _MAX_REPORT
    )
    try:
        async with asyncio.timeout(seconds):
            end = await asyncio.shield(child.exited)
    except TimeoutError:
        return ProbeReport(
            error=f"looking at the job took longer than {seconds:g} s; is an import or a dataset that slow?"
        )
    finally:
        child.send_signal(signal.SIGKILL)
        await asyncio.shield(child.exited)
    if end.code != 0 or not child.collected:
        how = end.signal_name or f"exit code {end.code}"
        return ProbeReport(
            error=f"the job ended the process that looked at it ({how}): {_last_line(child.tail.text())}"
        )
    return _small_enough(msgspec.json.decode(child.collected, type=ProbeReport))


def _small_enough(report: ProbeReport) -> ProbeReport:
    if len(encode(report)) < _MAX_REPORT:
        return report
    return ProbeReport(
        error=f"the model has {len(report.layout)} tensors, too many to describe in one message of 1 MiB"
    )


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"
