"""Bytes of TCP: requests, upgrades and websocket frames that are cut, damaged, endless, or lie about their length."""

from __future__ import annotations

import asyncio
import base64
import contextlib
from random import Random

from benchmarks.fuzzing import forging, mutation
from benchmarks.fuzzing.findings import Findings, peak_mib, resident_mib
from benchmarks.fuzzing.stand import Stand, stand
from wire import bulk

AT_ONCE = 24
ANSWER_SECONDS = 0.25
"""an answer that is not begun by then is not waited for: half a request has none"""
FLOOD_BYTES = 3 << 20
WARM_UP = 10
"""rounds of ``AT_ONCE`` before memory is looked at"""
_HOST = b"Host: 127.0.0.1\r\n"


async def raw(inputs: int, seed: int) -> Findings:
    """So many connections."""
    findings, random = Findings(), Random(f"raw {seed}")
    async with stand(findings, sockets=True) as place:
        await place.make_run(name="waits")
        before = await asyncio.to_thread(place.rows)
        rounds = 0
        while findings.inputs < inputs:
            streams = [_stream(random) for _ in range(AT_ONCE)]
            place.watch.about = " | ".join(stream[:200].hex() for stream in streams)
            await asyncio.gather(*(_connect(place, stream, random.random() < 0.5) for stream in streams))
            findings.inputs += len(streams)
            rounds += 1
            _measure(findings, rounds)
        await asyncio.to_thread(place.controller.store.flush().result)
        if (after := await asyncio.to_thread(place.rows)) != before:
            findings.add("strangers changed the database", repr((before, after)))
        status, _ = await place.get("/healthz", public=True)
        if status != 200:
            findings.add(f"/healthz answered {status}", "")
    return findings


async def _connect(place: Stand, stream: bytes, half_close: bool) -> None:
    """Send it all, and read what comes."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", place.port)
    except OSError as error:
        place.findings.note(error, stream[:400].hex())
        return
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(10):
            for at in range(0, len(stream), 1 << 16):
                writer.write(stream[at : at + (1 << 16)])
                await writer.drain()
        if half_close:
            writer.write_eof()
        answer = await asyncio.wait_for(reader.read(1 << 16), ANSWER_SECONDS)
        if answer.startswith(b"HTTP/1.1 5"):
            place.findings.add(f"answered {answer[:60]!r}", stream[:2000].hex(), "raw")
    writer.transport.abort()


def _stream(random: Random) -> bytes:
    good = random.choice(_GOOD)(random)
    match random.randrange(8):
        case 0:
            return good
        case 1:
            return _flooded(good, random)
        case 2:
            return good[: random.randint(0, len(good))]
        case 3:
            return good + good
    return mutation.mutated(good, random)


def _flooded(good: bytes, random: Random) -> bytes:
    """Much of something in the head of a request."""
    much = random.choice((1 << 12, 1 << 16, 1 << 18, FLOOD_BYTES))
    line, _, rest = good.partition(b"\r\n")
    match random.randrange(4):
        case 0:
            return b"GET /" + b"a" * much + b" HTTP/1.1\r\n" + _HOST + b"\r\n"
        case 1:
            return line + b"\r\nX: " + b"a" * much + b"\r\n" + rest
        case 2:
            return line + b"\r\n" + b"X: y\r\n" * (much // 6) + rest
    return line + b"\r\nRange: bytes=" + b",".join([b"0-"] * (much // 3)) + b"\r\n" + rest


def _get(random: Random) -> bytes:
    path = random.choice((b"/", b"/healthz", b"/api/v1/runs", b"/api/v1/runs/1/checkpoints/1/model", b"/app/main.js"))
    return b"GET " + path + b" HTTP/1.1\r\n" + _HOST + b"\r\n"


def _post(random: Random) -> bytes:
    body = random.choice((b'{"job": "toy.py:Toy"}', b"[" * 3000, b"\xff" * 100, b""))
    length = random.choice((len(body), len(body), len(body) + 5, max(0, len(body) - 5), 1 << 40, -1))
    kind = b"Content-Type: application/json\r\n"
    path = random.choice((b"/api/v1/runs", b"/api/v1/session"))
    return b"POST " + path + b" HTTP/1.1\r\n" + _HOST + kind + b"Content-Length: %d\r\n\r\n" % length + body


def _chunked(random: Random) -> bytes:
    sizes = random.choice(
        (b"5\r\nhello\r\n0\r\n\r\n", b"FFFFFFFFFFFFFFFF\r\nx", b"-1\r\n\r\n", b"5;" + b"a" * 5000, b"0")
    )
    head = b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n"
    double = b"Content-Length: 5\r\n" if random.random() < 0.3 else b""
    return b"POST /api/v1/session HTTP/1.1\r\n" + _HOST + head + double + b"\r\n" + sizes


def _upgrade(random: Random) -> bytes:
    path = random.choice((b"/ws/join", b"/ws/control", b"/ws/data", b"/ws/data", b"/api/v1/stream", b"/ws/none"))
    key = base64.b64encode(random.randbytes(16))
    head = b"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: " + key
    return b"GET " + path + b" HTTP/1.1\r\n" + _HOST + head + b"\r\n\r\n" + b"".join(_frames(random))


def _frames(random: Random) -> list[bytes]:
    made = []
    for _ in range(random.choice((1, 2, 6))):
        payload = random.choice((*forging.true_frames(), b"", bytes(200), bytes(bulk.BULK_BYTES + 5)))
        frame = bytes(bulk.framed(bytearray(bulk.HEADROOM) + payload, masked=random.random() < 0.9))
        match random.randrange(5):
            case 0:
                frame = bytes([random.randrange(256)]) + frame[1:]
            case 1:
                frame = bytes([0x82, random.choice((0xFE, 0xFF, 0x7F))]) + random.randbytes(8) + frame
            case 2:
                frame = mutation.mutated(frame, random)
        made.append(frame)
    return made


_GOOD = (_get, _post, _chunked, _upgrade, _upgrade, _upgrade)


def _measure(findings: Findings, rounds: int) -> None:
    findings.peak_mib = peak_mib()
    if rounds <= WARM_UP:
        findings.notes["warm_mib"] = resident_mib()
    else:
        findings.grown_mib = resident_mib() - findings.notes["warm_mib"]
