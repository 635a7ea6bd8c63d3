"""A small, fixed share of the fuzzers (``python -m benchmarks fuzz``), and proof that they notice what they should."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable
from random import Random

import pytest

from benchmarks.__main__ import main
from benchmarks.fuzzing import bodies, conversations, decoding, interface, sockets
from benchmarks.fuzzing.answers import Judge
from benchmarks.fuzzing.bodies import Headers, Request
from benchmarks.fuzzing.findings import Findings
from benchmarks.fuzzing.laws import Broken, Target, hold
from benchmarks.fuzzing.players import Crooked, Hand, Player
from benchmarks.fuzzing.stand import Stand, stand
from benchmarks.fuzzing.targets import TARGETS
from wire.messages import MESSAGES

SMALL = {"cohort": 40, "frame": 150, "chunk": 150}
"""inputs of the slower decoders"""


@pytest.mark.parametrize("name", TARGETS)
def test_a_decoder_takes_its_good_inputs_and_refuses_the_bad_ones(name: str) -> None:
    target = TARGETS[name]
    for data in target.seeds():
        target.run(data)
    assert decoding.at_random(target, SMALL.get(name, 400), seed=1).found == {}


@pytest.mark.parametrize(
    "part",
    [
        lambda: conversations.members(12, 1),
        lambda: conversations.members(3, 1, sockets=True),
        lambda: conversations.strangers(120, 1),
        lambda: conversations.strangers(30, 1, sockets=True),
        lambda: sockets.raw(24, 1),
        lambda: interface.requests(250, 1),
        lambda: interface.requests(120, 1, known=False),
    ],
    ids=["members", "members, sockets", "strangers", "strangers, sockets", "raw", "requests", "strangers' requests"],
)
async def test_a_controller_withstands_a_little_of_everything(part: type[Awaitable[Findings]]) -> None:
    findings = await part()
    assert findings.found == {}
    assert findings.inputs


# ------------------------------------------------------------------------------------------ it would be noticed


def test_the_same_seed_gives_the_same_inputs() -> None:
    seen: list[list[bytes]] = []
    for seed in (1, 1, 2):
        inputs: list[bytes] = []
        decoding.at_random(Target("t", "", inputs.append, lambda: [b"seed" * 9]), 50, seed)
        seen.append(inputs)
    assert seen[0] == seen[1] != seen[2]


def test_an_exception_is_a_finding_with_its_input_and_one_kind_is_kept_once() -> None:
    def decode(data: bytes) -> None:
        if data and data[0] > 100:
            raise KeyError(f"tensor {data[0]}")
        hold(len(data) < 60, f"{len(data)} bytes were taken")

    findings = decoding.at_random(Target("t", "", decode, lambda: [bytes(40)]), 500, 1)
    assert set(findings.found) == {"KeyError: …", "Broken: … bytes were taken"}
    for one in findings.found.values():
        with pytest.raises((KeyError, Broken)):
            decode(bytes.fromhex(one["input"]))


async def test_what_a_controller_logs_as_an_error_is_a_finding() -> None:
    findings = Findings()
    async with stand(findings) as place:
        run_id = await place.make_run()
        run = place.controller._runs[run_id]

        def broken(*_: object) -> None:
            raise ZeroDivisionError("planted")

        run._core.handle = broken  # type: ignore[method-assign]
        await asyncio.wait_for(asyncio.create_task(_hello(place, run_id)), 10)
    assert any("planted" in kind for kind in findings.found)


async def _hello(place: Stand, run_id: int) -> None:
    await Player(place, "anna", run_id, Hand()).play()


async def test_a_stranger_who_gets_something_written_is_a_finding() -> None:
    findings = Findings()
    async with stand(findings) as place:
        before = await asyncio.to_thread(place.rows)
        await place.make_run(name="sneaked in")
        conversations.hold_rows(findings, before, await asyncio.to_thread(place.rows))
    assert any("strangers changed the table runs" in kind for kind in findings.found)


DESCRIPTION = {
    "paths": {"/api/v1/x/{n}": {"get": {"operationId": "x", "responses": {}}}},
    "components": {"schemas": {}},
}
GUARD: Headers = [(b"content-security-policy", b"x"), (b"x-content-type-options", b"nosniff")]
PROBLEM = {
    "type": "about:blank", "title": "Bad Request", "status": 400, "detail": "Send JSON.", "instance": "/", "code": "x",
    "errors": [],
}  # fmt: skip


def answer(status: int = 400, problem: dict[str, object] | None = None, headers: Headers = GUARD) -> None:
    kind = (b"content-type", b"application/problem+json" if status >= 400 else b"application/json")
    body = json.dumps(PROBLEM | (problem or {})).encode()
    Judge(DESCRIPTION, ("secret",)).judge(Request("GET", "/api/v1/x/1"), status, [*headers, kind], body, known=False)


def test_a_good_refusal_passes() -> None:
    answer()


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"status": 500}, "answered 500"),
        ({"status": 200}, "a stranger's GET was answered 200"),
        ({"problem": {"detail": "nope"}}, "no sentence"),
        ({"problem": {"detail": "the secret."}}, "token"),
        ({"problem": {"status": 404}}, "says 404"),
        ({"problem": {"more": 1}}, "a problem of"),
        ({"headers": []}, "headers are missing"),
    ],
)
def test_a_bad_answer_is_a_finding(bad: dict[str, object], words: str) -> None:
    with pytest.raises(Broken, match=words):
        answer(**bad)  # type: ignore[arg-type]


def test_a_crooked_host_says_everything_sooner_or_later() -> None:
    hand = Crooked(Random(1), 1, 1.0)
    session = decoding.TARGETS["frame"] and conversations.forging.established()[0]
    acts = {"altered", "foreign", "damaged", "repeated", "replayed", "text", "huge", "otherwise", "swallowed", "gone"}
    for act in acts:
        frames = hand._frames(session, act, conversations.forging.PAYLOADS[0], 0)
        assert bool(frames) == (act not in ("swallowed", "gone"))
    assert len(conversations.forging.SAMPLES) == len(MESSAGES)


def test_requests_cover_what_the_catalogue_names() -> None:
    random = Random(1)
    made = [bodies.changing(random) for _ in range(3000)] + [bodies.reading(random) for _ in range(1000)]
    assert any(len(request.headers.get("range", "")) > 20_000 for request in made), "F81: ten thousand ranges"
    assert any(b"<img" in request.body for request in made), "F85: script in a name"
    assert any(b"\\ud800" in request.body for request in made), "half of a surrogate pair"
    assert any(request.body.count(b"[") > 400 for request in made), "deep nesting"
    assert any(b"NaN" in request.body for request in made)
    assert any(b"\xff\xfe" in request.body for request in made), "no UTF-8"
    assert any(request.headers.get("content-length") == "99999999999999999999" for request in made)


def test_the_command_writes_a_result(tmp_path: object, capsys: pytest.CaptureFixture[str]) -> None:
    place = f"{tmp_path}/fuzz.json"
    assert main(["fuzz", "frames", "--inputs", "60", "--workers", "1", "--only", "manifest", "--json", place]) == 0
    with open(place) as file:
        result = json.load(file)
    assert (result["inputs"], result["findings"]) == (60, {})
    assert "manifest" in capsys.readouterr().out
