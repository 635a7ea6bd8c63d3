"""Every message type there and back, and what is not a message."""

from __future__ import annotations

import math
import typing
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from wire_ends import UNHURRIED

from wire.codec import pack, unpack
from wire.errors import ErrorCode, LocalProtocolError, RemoteProtocolError
from wire.messages import (
    MESSAGES,
    AnyMessage,
    BatchDone,
    Exiting,
    Hello,
    JobOffer,
    Message,
    RankHello,
    RankReady,
    RoundCommitted,
    StateTaken,
    SyncAck,
    Update,
    Versions,
    decode,
    encode,
)

HELLO = Hello("box", [], Versions("0.1.0", 1, "3.11"))
NUMBERS = st.integers(-(2**63), 2**64 - 1)
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
PLAIN: dict[Any, st.SearchStrategy[Any]] = {
    Any: JSON_VALUES,
    bool: st.booleans(),
    int: NUMBERS,
    float: st.floats(allow_nan=False),
    str: st.text(max_size=12),
    bytes: st.binary(max_size=12),
    type(None): st.none(),
}


def within(kind: type, limits: msgspec.Meta) -> st.SearchStrategy[Any]:
    """What a peer may send in such a field."""
    if kind is str:
        return st.text(max_size=limits.max_length)
    if kind is int:
        return st.integers(limits.ge, limits.le)
    least = limits.gt if limits.ge is None else limits.ge
    return st.floats(least, limits.le, exclude_min=limits.ge is None)


def values(kind: Any) -> st.SearchStrategy[Any]:
    """Values of an annotation that occurs in messages."""
    if kind in PLAIN:
        return PLAIN[kind]
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        hints = typing.get_type_hints(kind, include_extras=True)
        return st.builds(kind, **{name: values(hints[name]) for name in kind.__struct_fields__})
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return within(*arguments)
    if origin is list:
        return st.lists(values(arguments[0]), max_size=3)
    if origin is tuple:
        return st.tuples(*map(values, arguments))
    if origin is dict:
        return st.dictionaries(values(arguments[0]), values(arguments[1]), max_size=3)
    return st.one_of([values(argument) for argument in arguments])


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
@given(data=st.data())
@UNHURRIED
def test_every_message_comes_back_equal(kind: type[Message], data: st.DataObject) -> None:
    message = data.draw(values(kind))
    back = decode(encode(message))
    assert type(back) is kind
    assert back == message
    assert unpack(memoryview(pack(message))) == message


def test_the_decoder_knows_exactly_the_messages_there_are() -> None:
    assert set(typing.get_args(AnyMessage)) == set(MESSAGES)
    assert len({kind.__name__ for kind in MESSAGES}) == len(MESSAGES)


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
def test_messages_cannot_be_altered(kind: type[Message]) -> None:
    assert kind.__struct_config__.frozen


@pytest.mark.parametrize(
    ("good", "field", "value"),
    [
        (Exiting(9), "steps", 2**63),
        (Exiting(9), "steps", -1),
        (StateTaken(1, 0), "part", 2**64 - 1),
        (RankReady("layout", 6, 2), "params_elements", -8),
        (RoundCommitted(0, 0, True, True), "round", 2**63),
        (BatchDone(5.0, 1.0, 1, 4, None), "batch_ms", math.nan),
        (BatchDone(5.0, 1.0, 1, 4, None), "data_ms", math.inf),
        (BatchDone(5.0, 1.0, 1, 4, None), "data_ms", 1e300),
        (HELLO, "emulate_ms_per_batch", -1.0),
        (HELLO, "emulate_ms_per_batch", 0.0),
        (HELLO, "emulate_ms_per_batch", math.nan),
    ],
)
def test_a_number_that_nobody_can_reckon_with_is_no_message(good: Message, field: str, value: float) -> None:
    """Databases hold 63 bits, and a view in seconds no infinity: the sender's link pays, nobody else."""
    bad = msgspec.msgpack.decode(encode(good)) | {field: value}
    with pytest.raises(RemoteProtocolError, match=field) as refused:
        unpack(memoryview(msgspec.msgpack.encode(bad)))
    assert refused.value.code == "bad_message"


def test_what_diverged_may_say_so() -> None:
    ack = SyncAck(1, math.nan, math.inf, math.inf, "", 1.0, 1.0, 1.0, 1.0, None)
    assert encode(unpack(memoryview(encode(ack)))) == encode(ack)


def test_a_field_that_a_newer_peer_added_is_ignored() -> None:
    assert unpack(memoryview(msgspec.msgpack.encode({"kind": "RankHello", "rank": 3, "new": 1}))) == RankHello(3)


PACKED = msgspec.msgpack.encode
DEEP = b"\x82\xa4kind\xa8JobOffer\xa6params\x81\xa1a" + b"\x91" * 500_000
NO_MESSAGES = {
    "empty": (b"", ErrorCode.BAD_MESSAGE, "no message"),
    "garbage": (b"\xc1\xff\x00", ErrorCode.BAD_MESSAGE, "no message"),
    "array": (PACKED([1, 2]), ErrorCode.BAD_MESSAGE, "no message"),
    "no kind": (PACKED({"rank": 3}), ErrorCode.BAD_MESSAGE, "no message"),
    "kind is a number": (PACKED({"kind": 3}), ErrorCode.BAD_MESSAGE, "no message"),
    "unknown kind": (PACKED({"kind": "Sudo", "rank": 3}), ErrorCode.UNKNOWN_KIND, "'Sudo'"),
    "kind is a base class": (PACKED({"kind": "Message"}), ErrorCode.UNKNOWN_KIND, "'Message'"),
    "unprintable kind": (PACKED({"kind": "a\n\x1b[31m" + "x" * 99}), ErrorCode.UNKNOWN_KIND, "'a??[31mxx"),
    "missing field": (PACKED({"kind": "RankHello"}), ErrorCode.BAD_MESSAGE, "RankHello: Object missing"),
    "wrong type": (PACKED({"kind": "RankHello", "rank": "3"}), ErrorCode.BAD_MESSAGE, "`$.rank`"),
    "float for int": (PACKED({"kind": "RankHello", "rank": 3.5}), ErrorCode.BAD_MESSAGE, "`$.rank`"),
    "bool for int": (PACKED({"kind": "RankHello", "rank": True}), ErrorCode.BAD_MESSAGE, "`$.rank`"),
    "trailing bytes": (encode(RankHello(3)) + b"\x00", ErrorCode.BAD_MESSAGE, "no message"),
    "truncated": (encode(Update(1, 2))[:-1], ErrorCode.BAD_MESSAGE, "message"),
    "bad UTF-8": (b"\x82\xa4kind\xa7Leaving\xa6reason\xa2\xff\xfe", ErrorCode.BAD_MESSAGE, ""),
    "list of 4 Gi entries": (b"\x82\xa4kind\xaaRelayHello\xa5ranks\xdd\xff\xff\xff\xff", ErrorCode.BAD_MESSAGE, ""),
    "string of 4 GiB": (b"\x82\xa4kind\xa7Leaving\xa6reason\xdb\xff\xff\xff\xff", ErrorCode.BAD_MESSAGE, ""),
    "half a million levels": (DEEP, ErrorCode.BAD_MESSAGE, ""),
    "unhashable key": (b"\x82\xa4kind\xa8JobOffer\xa6params\x81\xa1a\x81\x90\x01", ErrorCode.BAD_MESSAGE, ""),
    "date out of range": (
        b"\x82\xa4kind\xa8JobOffer\xa6params\x81\xa1a\xd7\xff" + b"\xff" * 8,
        ErrorCode.BAD_MESSAGE,
        "",
    ),
}


@pytest.mark.parametrize(("payload", "code", "text"), NO_MESSAGES.values(), ids=NO_MESSAGES.keys())
def test_what_is_no_message_is_refused_by_name(payload: bytes, code: ErrorCode, text: str) -> None:
    with pytest.raises(RemoteProtocolError) as refused:
        unpack(memoryview(payload))
    assert refused.value.code is code
    assert text in refused.value.text
    assert len(refused.value.text) < 300


@pytest.mark.parametrize("value", [object(), 2**64, {"a": {1j}}], ids=["object", "too large", "complex"])
def test_what_msgpack_cannot_hold_is_this_sides_mistake(value: object) -> None:
    with pytest.raises(LocalProtocolError, match="JobOffer cannot be encoded"):
        pack(JobOffer(1, "a.py:Job", {"value": value}, ""))
