"""Requests that nobody honest sends: bodies, paths, queries and headers."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from random import Random
from typing import Any

from backend.api.bodies import RunCreate
from benchmarks.fuzzing import mutation

Headers = list[tuple[bytes, bytes]]


@dataclass
class Request:
    """One request, as ASGI takes it."""

    method: str
    path: str
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)


RUN: dict[str, Any] = {
    "job": "toy.py:Toy",
    "name": "fuzzed",
    "params": {"hidden": 64, "rate": 0.003, "label": "toy", "deep": False},
    "start_mode": "manual",
    "epochs": 2,
    "batch_size": 4,
}
"""a body that makes a run"""
_KNOWN = {name: entry.default for name, entry in RunCreate.model_fields.items() if entry.default is not None}
_CODES = (
    '"\\ud800"', '"\\udfff\\ud800"', "NaN", "Infinity", "-Infinity", "1e999", "-1e999", "1e-999", "9" * 4000,
    "9" * 5000,
    "-" + "9" * 25, "0.1e+", "01", "tru", "'x'", '"\\u0000"', '"\\x00"', "[" * 500, "[" * 33 + "]" * 33,
    "[" * 100_00 + "]" * 100_00, '{"a":' * 40 + "1" + "}" * 40, '{"a":1,"a":2}', '"' + "\U0001f600" * 200 + '"',
    '"' + "x" * 20_000 + '"', "1.0", "1e2", "-0", "-0.0", "null", "true", "[]", "{}", "1" + "0" * 300 + ".5",
)  # fmt: skip
"""JSON, or nearly, to put where a value belongs"""
_PATHS = (
    "/api/v1/runs/{n}", "/api/v1/runs/{n}/window", "/api/v1/runs/{n}/rounds", "/api/v1/runs/{n}/events",
    "/api/v1/runs/{n}/epochs", "/api/v1/runs/{n}/deaths", "/api/v1/runs/{n}/checkpoints", "/api/v1/runs/{n}/members",
    "/api/v1/runs/{n}/preview", "/api/v1/runs/{n}/checkpoints/{m}/model", "/api/v1/runs", "/api/v1/jobs",
    "/api/v1/jobs/schema", "/api/v1/controller", "/api/v1/session", "/version", "/livez", "/readyz", "/metrics", "/",
    "/docs", "/app/{t}", "/vendor/{t}", "/favicon.ico", "/api/v1/{t}", "/{t}", "/api/v1/openapi.json",
)  # fmt: skip
_ACTS = ("start", "stop", "abort", "checkpoints", "window/extend")
_IDS = (
    "1", "1", "1", "2", "2", "3", "0", "-1", "99", "1.0", "1e3", "9223372036854775807", "9223372036854775808",
    "9" * 400, "%00", "..", "%2e%2e", "%252e%252e", "..%2f..", "\\", "1%0a", "%ff", "%ed%a0%80", "\u0661", "", "1;",
    " 1",
    "<script>", "null", "NaN", "+1", "0x1", "1_0", "4611686018427387904",
)  # fmt: skip
_TAILS = (
    "../../etc/passwd", "%2e%2e/%2e%2e/etc/passwd", "..%5c..%5cetc", "main.js", "main.js%00.png", "a" * 5000,
    ".git/config",
    "%c0%ae%c0%ae/", "//etc/passwd", "lib.js/..", "\u202e", "con", ".", "..", "...", "%", "%2", "index.html",
)  # fmt: skip
_QUERIES = (
    "", "", "", "limit={n}", "after={n}", "limit={n}&limit={n}", "cursor={n}", "newest={n}", "own={n}", "job={t}",
    "job=toy.py:Toy", "job=toy.py:{n}", "job={n}:Toy", "verbose={n}", "limit=1&after=0&own=true", "&&&=;=", "{t}={t}",
    "run={n}",
)  # fmt: skip


def body_of(random: Random, base: dict[str, Any]) -> bytes:
    """A bad version of a good body."""
    value: Any = json.loads(json.dumps(base))
    for name in random.sample(sorted(_KNOWN), random.choice((0, 1, 3))) if "job" in base else ():
        value[name] = mutation.hostile(_KNOWN[name], random)
    if random.random() < 0.6:
        value = mutation.altered(value, random)
    text = _dumped(value)
    if random.random() < 0.4:
        text = _spliced(text, random)
    return _encoded(text, random)


def _dumped(value: Any) -> str:
    try:
        return json.dumps(value, default=repr, ensure_ascii=False)
    except (ValueError, RecursionError, TypeError):
        return "{}"


def _spliced(text: str, random: Random) -> str:
    """Something that is hardly JSON in the place of a value, of a key, or of everything."""
    code = random.choice(_CODES)
    match random.randrange(5):
        case 0:
            return code
        case 1:
            return text[:-1] + f', "params": {code}}}'
        case 2:
            return text[:-1] + f", {code if code.startswith(chr(34)) else json.dumps(code[:30])}: 1}}"
        case 3:
            return (
                text[:-1] + f', "params": {{"hidden": {code}, {json.dumps(random.choice(mutation.TEXTS))}: {code}}}}}'
            )
    places = [at for at, letter in enumerate(text) if letter == ":"]
    at = random.choice(places) if places else 0
    end = min((found for found in (text.find(",", at), text.find("}", at)) if found > 0), default=len(text))
    return text[: at + 1] + code + text[end:]


def _encoded(text: str, random: Random) -> bytes:
    data = text.encode("utf-8", "surrogatepass")
    match random.randrange(24):
        case 0:
            return text.encode("utf-16", "surrogatepass")
        case 1:
            return b"\xef\xbb\xbf" + data
        case 2:
            return data + b"\xff\xfe"
        case 3:
            return data + data
        case 4:
            return mutation.mutated(data, random)
        case 5:
            return data + b" " * 70_000
        case 6:
            return data.replace(b'"', b'"\xed\xa0\x80', 1)
    return data


def changing(random: Random) -> Request:
    """A request that would change something."""
    run_id = random.choice(_IDS) if random.random() < 0.3 else random.choice(("1", "2", "3", "4"))
    match random.randrange(12):
        case 0 | 1 | 2 | 3 | 4:
            return _json("POST", "/api/v1/runs", body_of(random, RUN), random)
        case 5:
            base = {
                "resume_from": random.choice(("last", "1", "1:best", "1:1", *_IDS)),
                "epochs": random.choice((3, 9)),
            }
            return _json("POST", "/api/v1/runs", body_of(random, base), random)
        case 6:
            return _json("PATCH", f"/api/v1/runs/{run_id}/window", body_of(random, {"quorum": 2, "target": 3}), random)
        case 7:
            return _json("POST", f"/api/v1/runs/{run_id}/window/extend", body_of(random, {"seconds": 60.5}), random)
        case 8:
            given = random.choice(({"token": "x" * 43}, {"ticket": "y" * 20}, {"token": "a", "ticket": "b"}))
            return _json("POST", "/api/v1/session", body_of(random, dict(given)), random)
        case 9:
            path = f"/api/v1/runs/{run_id}/members/{random.choice(_IDS)}"
            return Request(random.choice(("DELETE", "DELETE", "PUT")), path, b"", _odd_headers(random))
        case 10:
            body = random.choice((b"", b"", b"{}", b"x" * 100, b"\0"))
            return Request("POST", f"/api/v1/runs/{run_id}/{random.choice(_ACTS)}", body, _odd_headers(random))
    method = random.choice(("DELETE", "PUT", "PATCH", "POST", "OPTIONS", "TRACE", "get", "\xc3", "PROPFIND"))
    return Request(method, _path(random), random.choice((b"", b"{}")), _odd_headers(random))


def reading(random: Random) -> Request:
    """A request that changes nothing."""
    query = random.choice(_QUERIES).format(n=random.choice(_IDS), t=random.choice(_TAILS))
    return Request(random.choice(("GET", "GET", "GET", "HEAD")), _path(random) + "?" + query, b"", _odd_headers(random))


def _path(random: Random) -> str:
    number = random.choice(_IDS) if random.random() < 0.5 else "1"
    return random.choice(_PATHS).format(n=number, m=random.choice(_IDS), t=random.choice(_TAILS))


def _json(method: str, path: str, body: bytes, random: Random) -> Request:
    kinds = ("application/json",) * 60 + (
        "application/json; charset=utf-16",
        "text/plain",
        "",
        "application/jsonx",
        "*/*",
    )
    return Request(method, path, body, {"content-type": random.choice(kinds)} | _odd_headers(random))


def _odd_headers(random: Random) -> dict[str, str]:
    if random.random() < 0.75:
        return {}
    name, values = random.choice(_HEADERS)
    return {name: random.choice(values)}


_HEADERS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        "range",
        ("bytes=0-", "bytes=-1", "bytes=5-2", "bytes=" + ",".join(["0-"] * 10_000), "bytes=" + "9" * 4000 + "-", "x"),
    ),
    (
        "host",
        ("evil.example", "", "127.0.0.1", "[::1]:80", "[", "127.0.0.1:99999999", "localhost.", "a" * 5000, "\xff"),
    ),
    ("origin", ("null", "http://evil.example", "http://127.0.0.1:8470", "", "http://127.0.0.1:8470/x", "\xff")),
    ("content-length", ("0", "-1", "99999999999999999999", "1e3", " 5", "", "\xb2", "+3", "0x10", "5, 5")),
    ("cookie", ("marchline_x=" + "a" * 4000, "=", ";;;;", "a=b; a=c", '"', "\xff=\xff", "; ".join(["a=b"] * 3000))),
    (
        "authorization",
        ("Basic YTpi", "Bearer", "Bearer ", "bearer x y", "\xff", "Bearer " + "x" * 8000, "Bearer \u00e9"),
    ),
    ("if-none-match", ("*", '"', ",".join(['"a"'] * 5000), "\xff")),
    ("sec-fetch-site", ("cross-site", "same-site", "none", "\xff", "")),
    ("x-forwarded-proto", ("https", "javascript", "\xff")),
    ("x-marchline", ("1", "", "\xff")),
    ("expect", ("100-continue", "x")),
    ("accept", ("*/*;q=nan", "\xff", "a" * 8000)),
    ("content-encoding", ("gzip", "br", "x")),
    ("transfer-encoding", ("chunked", "gzip", "x")),
)

assert not any(isinstance(value, float) and math.isnan(value) for value in _KNOWN.values())
