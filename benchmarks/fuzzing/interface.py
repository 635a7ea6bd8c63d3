"""The REST interface under requests that nobody honest sends, by the operator's token and without one."""

from __future__ import annotations

import asyncio
from collections import Counter
from random import Random

from benchmarks.fuzzing import bodies
from benchmarks.fuzzing.answers import Judge
from benchmarks.fuzzing.bodies import Headers, Request
from benchmarks.fuzzing.findings import Findings, peak_mib, resident_mib
from benchmarks.fuzzing.players import Hand, Player
from benchmarks.fuzzing.stand import PATIENCE, Stand, call, parsed, stand

MOST_LIVE = 40
WARM_UP = 300
"""requests before memory is looked at"""
LOOK_EVERY = 100
FIXTURES = (1, 2, 3)
"""a run that is over, with all that is recorded of one; one that waits, with two hosts; one that never began"""


async def requests(inputs: int, seed: int, *, known: bool = True) -> Findings:
    """So many requests, three in four of which would change something. ``known``: by the operator's token."""
    findings, random, statuses = Findings(), Random(f"requests {seed} {known}"), Counter[int]()
    async with stand(findings) as place:
        guests = await furnish(place)
        description = parsed((await place.get("/api/v1/openapi.json"))[1])
        judge = Judge(description, (place.controller.operator_token,))
        await asyncio.to_thread(place.controller.store.flush().result)
        before = await asyncio.to_thread(place.rows)
        for number in range(inputs):
            request = bodies.changing(random) if random.random() < 0.75 else bodies.reading(random)
            statuses[await _send(place, request, judge, known=known)] += 1
            findings.inputs += 1
            if number % LOOK_EVERY == 0:
                await tidy(place)
                _measure(findings, number)
        await asyncio.to_thread(place.controller.store.flush().result)
        if not known:
            after = await asyncio.to_thread(place.rows)
            for table, rows in before.items():
                if after[table] != rows:
                    findings.add(f"strangers changed the table {table}", repr((rows, after[table])))
        for guest in guests:
            await guest.leave()
    findings.notes |= {"statuses": dict(sorted(statuses.items())), "validated": judge.validated}
    return findings


async def _send(place: Stand, request: Request, judge: Judge, *, known: bool) -> int:
    shown = f"{request.method} {request.path} {request.headers} {request.body[:3000]!r}"
    place.watch.about = shown
    own = request.headers if not known else place.bearer | request.headers
    try:
        headers = _encoded({"host": "127.0.0.1:8470", "content-length": str(len(request.body))} | own)
        async with asyncio.timeout(PATIENCE):
            status, answered, body = await call(place.app, request.method, request.path, headers, request.body)
        judge.judge(request, status, answered, body, known=known and "authorization" not in request.headers)
    except Exception as error:
        place.findings.note(error, shown)
        return 0
    return status


def _encoded(headers: dict[str, str]) -> Headers:
    return [(name.encode(), value.encode("latin-1", "replace")) for name, value in headers.items()]


async def furnish(place: Stand) -> list[Player]:
    """The runs of ``FIXTURES``. Answers the hosts of the second, which stay."""
    first = await place.make_run(name="<img src=x onerror=alert(1)>", checkpoint_rounds=1, epochs=2)
    hosts = [Player(place, name, first, Hand()) for name in ("<script>alert(1)</script>", "anna", "bert")]
    tasks = [asyncio.create_task(host.play()) for host in hosts]
    await asyncio.wait([host.joined for host in hosts], timeout=10)
    await place.controller.command(first, "start")
    await asyncio.wait(tasks, timeout=20)
    if first in place.controller.live_run_ids():
        await asyncio.wait([place.controller._serving[first]], timeout=20)
    second, third = await place.make_run(name="waits"), await place.make_run(name="is over")
    guests = [Player(place, name, second, Hand()) for name in ("carl", "dora")]
    place.keep(*(guest.play() for guest in guests))
    await asyncio.wait([guest.joined for guest in guests], timeout=10)
    await place.controller.command(third, "abort", by="fuzzer")
    assert (first, second, third) == FIXTURES
    return guests


async def tidy(place: Stand) -> None:
    """End runs that were made, so that there is room for more."""
    live = [run_id for run_id in place.controller.live_run_ids() if run_id not in FIXTURES]
    for run_id in live[: max(0, len(live) - MOST_LIVE // 2)] if len(live) > MOST_LIVE else ():
        await place.controller.command(run_id, "abort", by="fuzzer")


def _measure(findings: Findings, number: int) -> None:
    findings.peak_mib = peak_mib()
    if number <= WARM_UP:
        findings.notes["warm_mib"] = resident_mib()
    else:
        findings.grown_mib = resident_mib() - findings.notes["warm_mib"]
