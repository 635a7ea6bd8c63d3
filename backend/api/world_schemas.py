"""A run's hosts and ranks, as the REST interface gives them."""

from __future__ import annotations

from typing import Any

from backend.api.answer import Answer


class Device(Answer):
    """A device that a host offers."""

    id: str
    type: str
    name: str = ""
    memory_bytes: int = 0


class Member(Answer):
    """A host of the run."""

    host: int
    name: str
    address: str
    ranks: list[int]
    devices: list[Device]
    versions: dict[str, Any]
    emulate_ms_per_batch: float | None
    emulated: bool
    relay_only: bool = False
    """it trains nothing; the data of the hosts behind it goes through it"""
    via: int | None = None
    """the relay-only host that its data goes through, as long as the run is live"""
    state: str
    joined_seconds_ago: float | None = None
    last_heard_seconds: float | None = None
    data_path: str = ""
    """how its contributions travel: ``shared memory`` or ``stream``; empty while its relay is not attached"""


class Model(Answer):
    """What a round carries at most, and what of it needs no gradient: that is not sent while it is unchanged."""

    bytes: int
    frozen_bytes: int


class Rank(Answer):
    """A rank: what it was allotted, what it did, and where its time went in the last window."""

    rank: int
    host: int | None
    host_name: str
    device: str
    state: str
    busy: bool = False
    """at one thing, such as a batch, for more than a few seconds"""
    doing: str = ""
    """what its host last saw it do: starting, idle, working, reducing, evaluating, saving; empty when nobody knows"""
    doing_seconds: int | None = None
    """for how long, while it is busy"""
    planned: int | None = None
    realized: int | None = None
    anchor: bool = False
    ms_per_batch: float | None = None
    emulated_ms: float | None = None
    steps: int = 0
    samples: int | None = 0
    exclusions: int = 0
    """rounds that it was left out of, for values that were not finite"""
    loss: float | None = None
    compute_seconds: float | None = None
    data_seconds: float | None = None
    wait_seconds: float | None = None
    reduce_seconds: float | None = None
    rss_bytes: int | None = None
    device_utilisation: int | None = None
    """percent of the last moment in which its GPU was busy, by whomever; none on a CPU, and where nobody can tell"""
    device_bytes: int | None = None
    """memory of that GPU that is in use, by whomever"""
    device_peak_bytes: int | None = None
    """the most that the rank's own tensors took of it at once"""
    device_total_bytes: int | None = None
