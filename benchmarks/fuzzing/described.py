"""The REST interface held against its own description by schemathesis, over HTTP: legal requests and nearly legal ones.

Needs the optional dependencies ``fuzz``.
"""

from __future__ import annotations

import asyncio
import importlib.util
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.fuzzing.findings import Findings, peak_mib
from benchmarks.fuzzing.interface import furnish, tidy
from benchmarks.fuzzing.stand import PATIENCE, Stand, parsed, stand

LEFT_OUT = frozenset({"sign_out", "metrics"})
"""what would end the session that others of these requests use, and what is not JSON"""
TIDY_EVERY = 50


def is_here() -> bool:
    """Whether schemathesis is installed."""
    return importlib.util.find_spec("schemathesis") is not None


def described(inputs: int, seed: int) -> Findings:
    """So many requests, shared among the operations of the description."""
    findings = Findings()
    with _serving(findings) as (place, loop):
        _ask(place, loop, inputs, seed, findings)
    findings.peak_mib = peak_mib()
    return findings


def _ask(place: Stand, loop: asyncio.AbstractEventLoop, inputs: int, seed: int, findings: Findings) -> None:
    import hypothesis
    import schemathesis
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi import checks as agreed

    def on_loop(work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result(PATIENCE)

    description = parsed(on_loop(place.get("/api/v1/openapi.json"))[1])
    wanted = [not_a_server_error, agreed.status_code_conformance, agreed.content_type_conformance]
    wanted += [agreed.response_schema_conformance, agreed.response_headers_conformance]
    schema = schemathesis.openapi.from_dict(description)
    operations = [found.ok() for found in schema.get_all_operations()]
    operations = [one for one in operations if one.definition.raw["operationId"] not in LEFT_OUT]
    statuses, base = Counter[int](), f"http://127.0.0.1:{place.port}"
    with_body = [one for one in operations if one.body]
    weights = {one.label: 4 if one in with_body else 1 for one in operations}
    for operation in operations:
        share = max(1, inputs * weights[operation.label] // sum(weights.values()))

        @hypothesis.seed(seed)
        @hypothesis.settings(
            max_examples=share, deadline=None, database=None, phases=[hypothesis.Phase.generate],
            suppress_health_check=list(hypothesis.HealthCheck), report_multiple_bugs=False,
        )  # fmt: skip
        @hypothesis.given(case=_either(operation))
        def one(case: Any) -> None:
            findings.inputs += 1
            if findings.inputs % TIDY_EVERY == 0:
                on_loop(tidy(place))
            place.watch.about = shown = f"{case.method} {case.formatted_path} {case.query} {case.body!r}"[:3000]
            answer = case.call(base_url=base, headers=place.bearer)
            statuses[answer.status_code] += 1
            try:
                case.validate_response(answer, checks=wanted)
            except Exception as error:
                findings.note(error, shown)
            except BaseExceptionGroup as errors:
                findings.note(errors.exceptions[0], shown)

        try:
            one()
        except Exception as error:
            findings.note(error, f"{operation.label}: generating")
    findings.notes = {"operations": len(operations), "statuses": dict(sorted(statuses.items()))}


def _either(operation: Any) -> Any:
    """Legal requests, and those that break one rule."""
    from schemathesis.generation import GenerationMode

    legal = operation.as_strategy(generation_mode=GenerationMode.POSITIVE)
    try:
        return legal | operation.as_strategy(generation_mode=GenerationMode.NEGATIVE)
    except Exception:
        return legal


@contextmanager
def _serving(findings: Findings) -> Iterator[tuple[Stand, asyncio.AbstractEventLoop]]:
    """A stand with a socket and some runs, on an event loop in a thread of its own."""
    ready, leave = threading.Event(), threading.Event()
    made: list[Any] = []

    async def serve() -> None:
        async with stand(findings, sockets=True) as place:
            await furnish(place)
            made.extend((place, asyncio.get_running_loop()))
            ready.set()
            await asyncio.to_thread(leave.wait)
            for task in place.tasks:
                task.cancel()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), name="stand")
    thread.start()
    try:
        if not ready.wait(PATIENCE):
            raise RuntimeError("the stand did not come up")
        yield made[0], made[1]
    finally:
        leave.set()
        thread.join()
