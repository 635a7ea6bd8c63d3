"""The controller's figures in Prometheus' text format: live runs by run and rank, and the controller itself."""

from __future__ import annotations

import math
import platform
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from backend.api.version import VERSION
from backend.runtime.controller import Controller
from backend.runtime.health import Histogram

LIVE_PHASES = ("waiting", "staging", "forming", "training", "done", "failed")
RANK_PARTS = ("compute", "data", "wait", "reduce")
GPU_FIGURES = (
    ("marchline_gpu_utilization_ratio", "How busy the rank's GPU is, by whomever", "device_utilisation", 100),
    ("marchline_gpu_memory_used_bytes", "Memory in use on the rank's GPU, by whomever", "device_bytes", 1),
    ("marchline_gpu_memory_total_bytes", "Memory of the rank's GPU", "device_total_bytes", 1),
    ("marchline_gpu_memory_peak_bytes", "The most of it that the rank's tensors took", "device_peak_bytes", 1),
)
"""name, text, field of a rank, and what one is in the field's unit"""
QUANTILES = (("0.5", 0.5), ("0.99", 0.99), ("1", 1.0))

View = dict[str, Any]


def exposition(controller: Controller, clients: dict[str, Any]) -> tuple[bytes, str]:
    """All figures as text, and its media type. Reads live runs: for the event loop's thread.

    ``clients`` are the API's own counts: streams, dropped, sessions, failures.
    """
    registry = CollectorRegistry()
    registry.register(_Collector(controller, clients))
    return generate_latest(registry), CONTENT_TYPE_PLAIN_0_0_4


class _Collector(Collector):
    def __init__(self, controller: Controller, clients: dict[str, Any]) -> None:
        self._controller = controller
        self._clients = clients

    def collect(self) -> Iterable[Metric]:
        views = [
            view
            for run_id in self._controller.live_run_ids()
            if (view := self._controller.live_view(run_id)) is not None
        ]
        yield from _controller_figures(self._controller, self._clients)
        yield from _run_figures(views)
        yield from _rank_figures(views)
        yield from _gpu_figures(views)
        yield from _loop_figures(self._controller)


def _controller_figures(controller: Controller, clients: dict[str, Any]) -> Iterator[Metric]:
    build = InfoMetricFamily("marchline_build", "What runs here")
    build.add_metric([], {"version": VERSION, "python": platform.python_version()})
    yield build
    for name, value in sorted(controller.metrics().items()):
        make = _counter if name.endswith("_total") else _gauge
        yield make(f"marchline_{name.removesuffix('_total')}", name.replace("_", " "), value)
    yield _gauge("marchline_sessions", "Signed-in browsers", clients["sessions"])
    yield _counter("marchline_failed_logins", "Wrong operator credentials", clients["failures"])
    yield _gauge("marchline_stream_clients", "Open live views", clients["streams"])
    yield _counter("marchline_stream_dropped", "Live views dropped for being too slow", clients["dropped"])


def _run_figures(views: list[View]) -> Iterator[Metric]:
    info = InfoMetricFamily("marchline_run", "A live run", labels=["run_id"])
    state = GaugeMetricFamily("marchline_run_state", "1 for the run's phase", labels=["run_id", "state"])
    hosts = GaugeMetricFamily("marchline_hosts", "Hosts by state", labels=["run_id", "state"])
    ranks = GaugeMetricFamily("marchline_ranks", "Ranks by state", labels=["run_id", "state"])
    scores = GaugeMetricFamily("marchline_eval_metric", "The last evaluation", labels=["run_id", "metric"])
    stages = GaugeMetricFamily("marchline_round_stage_seconds", "The last round's time", labels=["run_id", "stage"])
    deaths = CounterMetricFamily("marchline_rank_deaths", "Ranks that were lost", labels=["run_id", "reason"])
    for view in views:
        run_id = str(view["id"])
        info.add_metric([run_id], {"name": view["name"], "job": view["job"], "mode": view["mode"]})
        for phase in LIVE_PHASES:
            state.add_metric([run_id, phase], float(view["phase"] == phase))
        _add_counts(hosts, run_id, (member["state"] for member in view["members"]))
        _add_counts(ranks, run_id, (rank["state"] for rank in view["ranks"]))
        _add_counts(deaths, run_id, (death["reason"] or "unknown" for death in view["deaths"]))
        for name, value in ((view["eval"] or {}).get("metrics") or {}).items():
            _add(scores, [run_id, name], value)
        for stage, seconds in view["round_stages"].items():
            _add(stages, [run_id, stage], seconds)
    yield from (info, state, hosts, ranks, scores, stages, deaths)
    yield from _single_figures(views)


def _single_figures(views: list[View]) -> Iterator[Metric]:
    gauges: dict[str, tuple[str, Callable[[View], float | None]]] = {
        "marchline_join_window_open": ("Whether hosts may join", lambda view: view["window"]["open"]),
        "marchline_world_size": ("Ranks of the world", lambda view: view["world_size"]),
        "marchline_train_loss": ("Mean loss of the last round", lambda view: view["loss"]),
        "marchline_batches_per_second": (
            "Rate of the last window",
            lambda view: view["throughput"]["batches_per_second"],
        ),
        "marchline_efficiency_ratio": (
            "Achieved against the ranks' own rates",
            lambda view: view["throughput"]["efficiency"],
        ),
    }
    for name, (text, read) in gauges.items():
        family = GaugeMetricFamily(name, text, labels=["run_id"])
        for view in views:
            _add(family, [str(view["id"])], read(view))
        yield family
    for name, text, key in (
        ("marchline_run_rounds", "Closed rounds", "round"),
        ("marchline_global_steps", "Optimizer steps of the cohort", "global_step"),
    ):
        counter = CounterMetricFamily(name, text, labels=["run_id"])
        for view in views:
            _add(counter, [str(view["id"])], view[key])
        yield counter


def _rank_figures(views: list[View]) -> Iterator[Metric]:
    labels = ["run_id", "rank"]
    allotted = GaugeMetricFamily("marchline_rank_allotted_batches", "Batches of the current window", labels=labels)
    steps = CounterMetricFamily("marchline_local_steps", "Optimizer steps of a rank", labels=labels)
    samples = CounterMetricFamily("marchline_samples", "Samples of a rank", labels=labels)
    pace = GaugeMetricFamily("marchline_rank_seconds_per_batch", "Smoothed time of a batch", labels=labels)
    memory = GaugeMetricFamily("marchline_rank_resident_memory_bytes", "Memory of a rank", labels=labels)
    parts = GaugeMetricFamily(
        "marchline_rank_window_seconds", "Where the last window's time went", labels=[*labels, "part"]
    )
    for view in views:
        for rank in view["ranks"]:
            key = [str(view["id"]), str(rank["rank"])]
            _add(allotted, key, rank["planned"])
            _add(steps, key, rank["steps"])
            _add(samples, key, rank["samples"])
            _add(pace, key, rank["ms_per_batch"] and rank["ms_per_batch"] / 1000)
            _add(memory, key, rank["rss_bytes"])
            for part in RANK_PARTS:
                _add(parts, [*key, part], rank[f"{part}_seconds"])
    yield from (allotted, steps, samples, pace, memory, parts)


def _gpu_figures(views: list[View]) -> Iterator[Metric]:
    """Left out for ranks on CPUs, and where a host cannot tell."""
    for name, text, field, unit in GPU_FIGURES:
        family = GaugeMetricFamily(name, text, labels=["run_id", "rank"])
        for view in views:
            for rank in view["ranks"]:
                value = rank[field]
                _add(family, [str(view["id"]), str(rank["rank"])], None if value is None else value / unit)
        yield family


def _loop_figures(controller: Controller) -> Iterator[Metric]:
    """How promptly cores are served: all since the start, as histograms; each live run, by quantiles."""
    health = controller.loop_health()
    yield _histogram("marchline_tick_latency_seconds", "From an event or deadline until it was handled", health.latency)
    yield _histogram("marchline_event_handling_seconds", "Handling one event in a run's core", health.handling)
    yield _histogram("marchline_event_effects_seconds", "Performing an event's effects", health.effects)
    labels = ["run_id", "quantile"]
    latency = GaugeMetricFamily("marchline_run_tick_latency_seconds", "Tick latency of a live run", labels=labels)
    handling = GaugeMetricFamily("marchline_run_event_handling_seconds", "Handling an event of a run", labels=labels)
    labels = ["run_id", "host"]
    worst = GaugeMetricFamily("marchline_host_heartbeat_worst_late_seconds", "A host's latest heartbeat", labels=labels)
    late = CounterMetricFamily("marchline_host_heartbeats_late", "A host's, over a period late", labels=labels)
    ours = GaugeMetricFamily("marchline_host_hears_worst_late_seconds", "Ours, as a host hears them", labels=labels)
    for run_id in controller.live_run_ids():
        found = controller.run_health(run_id)
        if found is None:
            continue
        run, hosts = found
        for family, durations in ((latency, run.latency), (handling, run.handling)):
            for name, share in QUANTILES:
                family.add_metric([str(run_id), name], durations.quantile(share))
        for host, beats in sorted(hosts.items()):
            key = [str(run_id), host]
            worst.add_metric(key, beats.here.worst_late_seconds)
            late.add_metric(key, beats.here.late_count)
            ours.add_metric(key, beats.there_worst_late_seconds)
    yield from (latency, handling, worst, late, ours)


def _histogram(name: str, text: str, durations: Histogram) -> HistogramMetricFamily:
    buckets = [("+Inf" if bound == math.inf else f"{bound:.6g}", count) for bound, count in durations.cumulative()]
    return HistogramMetricFamily(name, text, buckets=buckets, sum_value=durations.total)


Family = GaugeMetricFamily | CounterMetricFamily


def _add(family: Family, labels: list[str], value: float | None) -> None:
    if value is not None:
        family.add_metric(labels, float(value))


def _add_counts(family: Family, run_id: str, states: Iterable[str]) -> None:
    for name, count in sorted(Counter(states).items()):
        family.add_metric([run_id, name], float(count))


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, value=float(value))


def _counter(name: str, text: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(name, text, value=float(value))
