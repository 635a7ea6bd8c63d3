"""Hosts for the join window's tests: hellos and probe reports that are good unless told otherwise."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec

from backend.core.config import RunConfig
from backend.core.join_window import Admission, JoinWindow, Refusal
from wire.messages import WIRE_VERSION, Device, Hello, ProbeReport, TensorSpec, Versions

CONFIG = RunConfig(job="digits.py:Digits", start_mode="manual")
VERSIONS = Versions(marchline="0.1.0", wire=WIRE_VERSION, python="3.11", torch="2.13.0", cuda="12.8", nccl="2.27.3")
LAYOUT = [
    TensorSpec(name="body.weight", section="params", dtype="float32", shape=[64, 32], offset=0),
    TensorSpec(name="head.weight", section="params", dtype="float32", shape=[3, 64], offset=2048),
    TensorSpec(name="norm.mean", section="buffers", dtype="float32", shape=[64], offset=2240),
]
REPORT = ProbeReport(
    job_hash="a" * 64, sources_hash="b" * 64, layout=LAYOUT, dataset_signature="d" * 64, dataset_size=1797
)


def devices(count: int, kind: str = "cuda") -> list[Device]:
    return [Device(id=f"{kind}:{index}", type=kind) for index in range(count)]


def hello(host: str = "gpu-a", count: int = 1, **changes: Any) -> Hello:
    return msgspec.structs.replace(Hello(host=host, devices=devices(count), versions=VERSIONS), **changes)


def report(**changes: Any) -> ProbeReport:
    return msgspec.structs.replace(REPORT, **changes)


def with_tensor(index: int, **changes: Any) -> list[TensorSpec]:
    """The layout with one tensor changed."""
    layout = list(LAYOUT)
    layout[index] = msgspec.structs.replace(layout[index], **changes)
    return layout


def versions(**changes: Any) -> Versions:
    return msgspec.structs.replace(VERSIONS, **changes)


def join(
    window: JoinWindow, link: int, says: Hello, finds: ProbeReport = REPORT, now: float = 0.0
) -> Admission | Refusal:
    """Both steps of a host's joining; the answer to the last one that was reached."""
    offer = window.hello(link, says, f"10.0.0.{link}", now)
    if isinstance(offer, Refusal):
        return offer
    answer = window.probe(link, finds, now)
    window.check()
    return answer


def seated(*counts: int, **changes: Any) -> JoinWindow:
    """A window with hosts gpu-0, gpu-1 ... of so many ranks each, on links 0, 1 ..."""
    window = JoinWindow(replace(CONFIG, **changes), 0.0, run_id=3)
    for link, count in enumerate(counts):
        assert isinstance(join(window, link, hello(f"gpu-{link}", count)), Admission)
    return window
