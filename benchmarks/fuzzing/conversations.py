"""Whole sessions with a real controller: a cohort of which one member goes bad, and strangers who only try.

A member that holds the keys may spoil its own part and nobody else's: no exception, no dead honest host, and a run that
was training goes on to its end without it. A stranger changes nothing at all.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from dataclasses import dataclass, field
from random import Random

from benchmarks.fuzzing import forging, mutation
from benchmarks.fuzzing.answers import Judge
from benchmarks.fuzzing.bodies import Request
from benchmarks.fuzzing.findings import Findings, peak_mib, resident_mib
from benchmarks.fuzzing.players import Crooked, Hand, Player
from benchmarks.fuzzing.stand import Closed, Rows, Stand, call, parsed, stand
from wire import frames
from wire.errors import RemoteProtocolError
from wire.messages import Hello, RelayHello, encode
from wire.session import Channel, Session, join_secret

HONEST = ("anna", "bert")
FRAMES_OF_A_HOST = 32
"""about what an honest host says in one of these runs"""
QUIET_SECONDS = 0.25
"""nothing happened for so long: the crooked host is waited for, and is taken away"""
MOST_SECONDS = 15.0
"""from the crooked host's end to the run's"""
WARM_UP = 20
"""plays, or dozens of strangers, before memory is looked at"""
ROUTES = ("", "/rounds", "/epochs", "/events?limit=1000", "/deaths", "/checkpoints", "/members", "/window", "/preview")
SPOILT = re.compile(
    r"could not form|Replicas differ|before the world formed|initial parameters|were trained, all of it lost|NonFinite"
)
"""ends that a member can bring about by design: a cohort forms with all of its members or not at all, replicas that
differ are not trained on, and a first broadcast comes from rank 0"""


@dataclass
class Reached:
    """How far the plays got."""

    plays: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    phases: Counter[str] = field(default_factory=Counter)
    """of the run when the first frame was tampered with"""
    acts: Counter[str] = field(default_factory=Counter)


# --------------------------------------------------------------------------------------------- members gone bad


async def play(place: Stand, random: Random, reached: Reached, judge: Judge) -> int:
    """One run with two honest hosts and a crooked one. Answers how many frames were tampered with."""
    epochs = random.choice((1, 1, 2))
    run_id = await place.make_run(epochs=epochs, name=f"play {reached.plays}", checkpoint_rounds=2)
    hand = Crooked(random, random.randint(1, FRAMES_OF_A_HOST * epochs), random.choice((0.05, 0.3, 0.8)))
    names = list(HONEST)
    names.insert(random.randrange(3), "crook")
    hosts = {name: Player(place, name, run_id, hand if name == "crook" else Hand()) for name in names}
    tasks = {}
    for name, host in hosts.items():
        tasks[name] = asyncio.create_task(host.play())
        await asyncio.wait({host.joined}, timeout=QUIET_SECONDS * 2)
    watcher = asyncio.create_task(_watch_stream(place, run_id))
    try:
        phase = await _to_the_end(place, run_id, hosts, hand, tasks["crook"])
        reached.phases[phase] += 1
        await _hold_end(place, run_id, hand, phase, reached, judge)
    finally:
        watcher.cancel()
        await asyncio.gather(watcher, return_exceptions=True)
        await asyncio.gather(*(host.leave() for host in hosts.values()))
        await asyncio.gather(*tasks.values())
    reached.plays += 1
    reached.acts += hand.acts
    return hand.tampered


async def _to_the_end(
    place: Stand, run_id: int, hosts: dict[str, Player], hand: Crooked, crook: asyncio.Task[None]
) -> str:
    """Start, and take the crooked host away once nothing moves. The phase in which it first did wrong."""
    controller, loop = place.controller, asyncio.get_running_loop()
    if run_id in controller.live_run_ids():
        await _start(place, run_id)
    phase, seen, moved_at, removed_at = "", -1, loop.time(), 0.0
    while run_id in controller.live_run_ids():
        run = controller._runs[run_id]
        place.watch.about = hand.last
        phase = phase or (run.phase if hand.tampered else "")
        if run.driver.events_handled != seen:
            seen, moved_at = run.driver.events_handled, loop.time()
        quiet = loop.time() - moved_at > QUIET_SECONDS
        if not removed_at and (quiet or crook.done()):
            removed_at, moved_at = loop.time(), loop.time()
            await hosts["crook"].leave()
        elif removed_at and loop.time() - removed_at > MOST_SECONDS:
            waits = controller.live_view(run_id) or {}
            place.findings.add(f"run hangs in {run.phase}: {waits.get('decision')}", hand.last, "play")
            await controller.command(run_id, "abort", by="fuzzer")
            removed_at = loop.time()
        await asyncio.sleep(0.002)
    return phase or "untouched"


async def _start(place: Stand, run_id: int) -> None:
    status, _, body = await _post(place, f"/api/v1/runs/{run_id}/start")
    if status >= 500:
        place.findings.add(f"start answered {status}", body.decode(errors="replace"), "play")
    if status != 200 and run_id in place.controller.live_run_ids():
        await place.controller.command(run_id, "abort", by="fuzzer")


async def _post(place: Stand, path: str) -> tuple[int, object, bytes]:
    return await call(place.app, "POST", path, place.bearer)


async def _hold_end(place: Stand, run_id: int, hand: Crooked, phase: str, reached: Reached, judge: Judge) -> None:
    """The laws, once the run is over."""
    await asyncio.to_thread(place.controller.store.flush().result)
    for route in ROUTES:
        request = Request("GET", f"/api/v1/runs/{run_id}{route}")
        try:
            judge.judge(request, *await call(place.app, request.method, request.path, place.bearer), known=True)
        except Exception as error:
            place.findings.note(error, hand.last)
    view = parsed((await place.get(f"/api/v1/runs/{run_id}"))[1])
    reason = str(view.get("reason"))
    reached.ends[f"{view.get('phase')}: {re.sub(r'[0-9.]+', '…', reason)[:90]}"] += 1
    if "internal error" in reason:
        place.findings.add(f"run ended: {reason}", hand.last, phase)
    elif view.get("phase") != "done" and phase == "training" and not SPOILT.search(reason):
        place.findings.add(f"a member ended the run: {reason}", hand.last, phase)
    deaths = parsed((await place.get(f"/api/v1/runs/{run_id}/deaths"))[1])["items"]
    innocent = [death for death in deaths if death["host_name"] in HONEST]
    if innocent and phase == "training":
        place.findings.add(f"{innocent[0]['host_name']} died: {innocent[0]['reason']}", hand.last, phase)
    status, body = await place.get("/healthz", public=True)
    if (status, body) != (200, b"ok\n"):
        place.findings.add(f"/healthz answered {status}", hand.last, phase)


async def _watch_stream(place: Stand, run_id: int) -> None:
    """A dashboard that looks on: it is never let down while the controller lives."""
    wire = await place.wire(f"/api/v1/stream?run={run_id}", place.bearer)
    try:
        while True:
            parsed(str(await wire.recv()).encode())
    except Closed as closed:
        if closed.code not in (1000, 1001, 1006):
            place.findings.add(f"a dashboard was let down: {closed}", place.watch.about, "stream")
    finally:
        await wire.close()


# ---------------------------------------------------------------------------------------------------- strangers


async def stranger(place: Stand, random: Random, recorded: list[bytes]) -> int:
    """One connection of somebody without the token. Answers how many frames it sent."""
    channel = random.choice(tuple(Channel))
    wire = await place.channel(channel)
    sent = 0
    try:
        for frame in _attempt(channel, random, recorded):
            place.watch.about = f"{channel.name} {frame.hex() if isinstance(frame, bytes) else frame}"
            await wire.send(frame)
            sent += 1
        if random.random() < 0.8:
            async with asyncio.timeout(2):
                while True:
                    await wire.recv()
    except (Closed, TimeoutError):
        pass
    finally:
        await wire.close()
    return sent


def _attempt(channel: Channel, random: Random, recorded: list[bytes]) -> list[bytes | str]:
    run_id = random.choice((0, 1, 1, 1, 2, 99, (1 << 32) - 1))
    session = Session.client(channel, random.randbytes(32), run_id=run_id)
    hello, first = session.opening(), Hello("mallory", [], forging.VERSIONS, 1)
    payload = encode(first if channel is Channel.JOIN else RelayHello(1, [0]))
    forged = frames_without_keys(payload, random)
    match random.randrange(7):
        case 0:
            return [random.choice(("", "text", "{}", "\0"))]
        case 1:
            return [mutation.mutated(random.choice(forging.true_frames()), random)]
        case 2:
            return [mutation.mutated(hello, random), forged]
        case 3:
            return [hello, mutation.mutated(forged, random)]
        case 4:
            return [hello, forged]
        case 5:
            return [random.choice(recorded), random.choice(recorded)] if recorded else [hello, hello]
    return [hello, random.randbytes(random.choice((0, 1, 8, 100, 70_000, 1 << 20)))]


def frames_without_keys(payload: bytes, random: Random) -> bytes:
    """A message frame whose tag is made up."""

    return frames.message_head(random.choice((0, 1, 0xFFFFFFFF)), random.choice((0, 0, 1, 2**64 - 1)), payload) + bytes(
        32
    )


# ---------------------------------------------------------------------------------------------------- campaigns


async def members(inputs: int, seed: int, *, sockets: bool = False) -> Findings:
    """Plays until so many frames were tampered with."""
    findings, reached = Findings(), Reached()
    async with stand(findings, sockets=sockets) as place:
        description = parsed((await place.get("/api/v1/openapi.json"))[1])
        judge = Judge(description, (place.controller.operator_token,))
        while findings.inputs < inputs:
            random = Random(f"members {seed} {reached.plays}")
            findings.inputs += await play(place, random, reached, judge)
            _measure(findings, reached.plays)
    findings.notes = {
        "plays": reached.plays,
        "phases": dict(reached.phases),
        "ends": dict(reached.ends.most_common(40)),
    }
    findings.notes |= {"acts": dict(reached.acts)}
    return findings


async def strangers(inputs: int, seed: int, *, sockets: bool = False) -> Findings:
    """Connections without the token until so many frames were sent, beside two runs whose rows must not change."""
    findings, random = Findings(), Random(f"strangers {seed}")
    async with stand(findings, sockets=sockets) as place:
        for name in ("waits", "waits too"):
            await place.make_run(name=name)
        recorded = await _recorded(place)
        await asyncio.to_thread(place.controller.store.flush().result)
        before = await asyncio.to_thread(place.rows)
        dozens = 0
        while findings.inputs < inputs:
            batch = [stranger(place, random, recorded) for _ in range(12)]
            findings.inputs += sum(await asyncio.gather(*batch))
            dozens += 1
            _measure(findings, dozens)
        await asyncio.to_thread(place.controller.store.flush().result)
        hold_rows(findings, before, await asyncio.to_thread(place.rows))
        for run_id in (1, 2):
            view = place.controller.live_view(run_id) or {}
            if view.get("phase") != "waiting" or view.get("members"):
                findings.add(f"strangers changed run {run_id}: {view.get('phase')}, {view.get('members')}", "")
        status, _ = await place.get("/healthz", public=True)
        if status != 200:
            findings.add(f"/healthz answered {status}", "")
    return findings


def hold_rows(findings: Findings, before: Rows, after: Rows) -> None:
    """Strangers have no effect."""
    for table, rows in before.items():
        if after[table] != rows:
            findings.add(f"strangers changed the table {table}", repr((rows, after[table])))


async def _recorded(place: Stand) -> list[bytes]:
    """The frames with which a host of the token said hello and left again: what somebody on the path can have kept."""
    session = Session.client(Channel.JOIN, join_secret(place.controller.join_token))
    wire = await place.channel(Channel.JOIN)
    kept = [session.opening()]
    await wire.send(kept[0])
    while not session.established:
        session.receive(await wire.recv())
    kept.append(session.seal(Hello("early", [], forging.VERSIONS)))
    await wire.send(kept[1])
    try:
        while True:
            session.receive(await wire.recv())
    except (Closed, RemoteProtocolError):
        await wire.close()
    return kept


def _measure(findings: Findings, done: int) -> None:
    findings.peak_mib = peak_mib()
    if done == WARM_UP:
        findings.notes["warm_mib"] = resident_mib()
    elif done > WARM_UP:
        findings.grown_mib = resident_mib() - findings.notes["warm_mib"]
