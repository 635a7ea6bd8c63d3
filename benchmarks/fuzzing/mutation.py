"""Bad versions of good bytes and good values. All randomness is the caller's, so that a seed repeats an input."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from random import Random
from typing import Any

import msgspec

NUMBERS = (
    0, 1, -1, 2, 7, 31, 32, 127, 128, 255, 256, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53, 2**62,
    2**63 - 1, 2**63, 2**64 - 1, -(2**31), -(2**63), 10**6, 10**12,
)  # fmt: skip
FLOATS = (0.0, -0.0, math.nan, math.inf, -math.inf, 1e308, -1e308, 5e-324, 1e-300, 1e30, 1e-31, -1.0, 0.5, 1e18)
TEXTS = (
    "", " ", "\0", "a\0b", "../../etc/passwd", "/etc/passwd", "<img src=x onerror=alert(1)>", "%s%n%x", "{0}",
    "\u202egnp.exe", "\r\nSet-Cookie: a=b", "'; DROP TABLE runs; --", "\U0001f600" * 40, "e\u0301" * 300, "A" * 5000,
    "nan", "-1", "null", "\x1b[2J", "\ufeff", "\uffff", "con",
)  # fmt: skip
BLOBS = (b"", b"\0", b"\xff" * 64, bytes(32), bytes(5000))
_INTERESTING = (0, 1, 0x7F, 0x80, 0xFF)


# ------------------------------------------------------------------------------------------------------ bytes


def mutated(data: bytes, random: Random) -> bytes:
    """These bytes with one to four things done to them."""
    out = bytearray(data)
    for _ in range(random.choice((1, 1, 1, 2, 4))):
        random.choice(_BYTE_ACTS)(out, random)
    return bytes(out)


def _flip(out: bytearray, random: Random) -> None:
    if out:
        out[random.randrange(len(out))] ^= 1 << random.randrange(8)


def _set(out: bytearray, random: Random) -> None:
    if out:
        out[random.randrange(len(out))] = random.choice((*_INTERESTING, random.randrange(256)))


def _insert(out: bytearray, random: Random) -> None:
    at = random.randint(0, len(out))
    out[at:at] = random.randbytes(random.choice((1, 2, 4, 16, 70)))


def _delete(out: bytearray, random: Random) -> None:
    at = random.randint(0, len(out))
    del out[at : at + random.choice((1, 2, 4, 16))]


def _cut(out: bytearray, random: Random) -> None:
    del out[random.randint(0, len(out)) :]


def _double(out: bytearray, random: Random) -> None:
    start = random.randint(0, len(out))
    piece = out[start : start + random.choice((1, 4, 16, 200))]
    at = random.randint(0, len(out))
    out[at:at] = piece


def _number(out: bytearray, random: Random) -> None:
    code = random.choice(["<H", "<I", "<Q", ">H", ">I", ">Q"])
    size = struct.calcsize(code)
    if len(out) >= size:
        number = random.choice(NUMBERS) % (1 << 8 * size)
        struct.pack_into(code, out, random.randint(0, len(out) - size), number)


_BYTE_ACTS: tuple[Callable[[bytearray, Random], None], ...] = (
    _flip, _flip, _set, _set, _insert, _delete, _cut, _double, _number, _number,
)  # fmt: skip


# ----------------------------------------------------------------------------------------------------- values


def hostile(value: Any, random: Random) -> Any:
    """Something else in the place of this value: mostly of its own type, so that it gets past the decoder."""
    if random.random() < 0.15:
        return random.choice((None, True, -1, 0.5, "x", b"x", [], {}, [[]], {"": None}))
    match value:
        case bool():
            return not value
        case int():
            return value + random.choice((-1, 1)) if random.random() < 0.2 else random.choice(NUMBERS)
        case float():
            return random.choice(FLOATS)
        case str():
            return random.choice(TEXTS) if random.random() < 0.8 else value * random.choice((2, 100))
        case bytes():
            return random.choice(BLOBS) if random.random() < 0.5 else mutated(value, random)
        case _:
            return random.choice((*NUMBERS, *FLOATS, *TEXTS))


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place within a value, the containers included, as paths of keys."""
    found = [path]
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inner:
        found += places(item, (*path, key))
    return found


def altered(value: Any, random: Random) -> Any:
    """A value of dicts and lists, with one to three places changed. It is changed in place and returned."""
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        path = random.choice(places(value))
        if not path:
            continue
        holder = value
        for key in path[:-1]:
            holder = holder[key]
        _alter(holder, path[-1], random)
    return value


def _alter(holder: Any, key: Any, random: Random) -> None:
    item, chance = holder[key], random.random()
    if chance < 0.06:
        del holder[key]
    elif chance < 0.10:
        nest: Any = item
        for _ in range(random.choice((1, 40, 300))):
            nest = [nest]
        holder[key] = nest
    elif isinstance(item, list) and chance < 0.7:
        holder[key] = _other_list(item, random)
    elif isinstance(item, dict) and chance < 0.7:
        _other_dict(item, random)
    else:
        holder[key] = hostile(item, random)


def _other_list(items: list[Any], random: Random) -> list[Any]:
    match random.randrange(4):
        case 0:
            return items * random.choice((2, 50))
        case 1:
            return items[::-1]
        case 2:
            return items[: len(items) // 2]
    return [*items, hostile(items[0] if items else 0, random)]


def _other_dict(items: dict[Any, Any], random: Random) -> None:
    if not items or random.random() < 0.3:
        items[random.choice(TEXTS)] = random.choice(NUMBERS)
        return
    key = random.choice(list(items))
    value, other = items.pop(key), hostile(key, random)
    items[other if isinstance(other, str | int | float) else key] = value


def altered_payload(payload: bytes, random: Random) -> bytes:
    """A msgpack payload with some of its values changed; now and then with its bytes damaged."""
    if random.random() < 0.12:
        return mutated(payload, random)
    try:
        value = altered(msgspec.msgpack.decode(payload), random)
        return msgspec.msgpack.encode(value)
    except (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError):
        return mutated(payload, random)
