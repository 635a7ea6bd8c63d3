"""The controller's figures in Prometheus' text format: live runs by run and rank, and the controller itself."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from backend.api.version import VERSION
from backend.runtime.controller import Controller

LIVE_PHASES = ("waiting", "staging", "forming", "training", "done", "failed")
RANK_PARTS = ("compute", "data", "wait", "reduce")

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
    yield from (info, state, hosts, ranks, scores, deaths)
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
