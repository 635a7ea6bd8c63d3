"""The recorded schema and the generated document are those of the code."""

from __future__ import annotations

import copy
import json
import struct
from pathlib import Path

import msgspec
import pytest

from wire import document, schema
from wire.layouts import FRAMES, FrameLayout
from wire.messages import MESSAGES, WIRE_VERSION, Contribution, Message, Record, RelayHello, SnapshotReady

CURE = "run `make wire-schema`"


def test_the_recorded_schema_is_current() -> None:
    assert json.loads(schema.SCHEMA_FILE.read_text(encoding="utf-8")) == schema.schema(), CURE


def test_the_protocol_document_is_current() -> None:
    assert schema.PROTOCOL_FILE.read_text(encoding="utf-8") == document.protocol(), CURE


def test_every_message_value_and_frame_is_in_both() -> None:
    text = document.protocol()
    now = schema.schema()
    assert set(now["messages"]) == {message.__name__ for message in MESSAGES}
    for kind in (*MESSAGES, *Record.__subclasses__()):
        assert f"| `{kind.__name__}` |" in text
        for field in kind.__struct_fields__:
            assert f"`{field}: " in text
    for layout in FRAMES:
        assert f"| {layout.kind.name.lower().replace('_', ' ')} | {layout.kind.value} |" in text


@pytest.mark.parametrize("layout", FRAMES, ids=lambda layout: layout.kind.name)
def test_header_fields_fill_the_header(layout: FrameLayout) -> None:
    codes = [code for _, code in layout.fields()]
    assert struct.calcsize("<" + "".join(codes)) == layout.header.size


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message.__name__)
def test_every_message_says_who_speaks_to_whom(message: type[Message]) -> None:
    way, _ = document.route(message)
    parties = {"agent", "controller", "relay", "relays", "rank", "ranks"}
    sender, receiver = way.split(" -> ")
    assert sender in parties
    assert parties & set(receiver.split())
    assert document.channels(message)
    assert set(document.channels(message)) <= set(document.CHANNELS)


def test_channels_follow_the_docstrings() -> None:
    assert document.channels(RelayHello) == ("control", "data")
    assert document.channels(Contribution) == ("data",)
    assert document.channels(SnapshotReady) == ("host socket",)


def test_a_message_without_a_route_is_refused() -> None:
    class Undocumented(msgspec.Struct):
        """Says nothing of who speaks."""

    with pytest.raises(ValueError, match="must begin with"):
        document.route(Undocumented)  # type: ignore[arg-type]


def test_a_change_needs_a_new_version() -> None:
    now = schema.schema()
    before = copy.deepcopy(now)
    assert not schema.unannounced_change(before, now)
    before["messages"]["Update"]["round"]["default"] = "0"
    assert schema.unannounced_change(before, now)
    before["wire_version"] = WIRE_VERSION - 1
    assert not schema.unannounced_change(before, now)


def test_the_command_writes_both_files_and_guards_the_version(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record, written = tmp_path / "schema.json", tmp_path / "docs" / "protocol.md"
    assert schema.main([], record=record, document=written) == 0
    assert json.loads(record.read_text()) == schema.schema()
    assert written.read_text(encoding="utf-8") == document.protocol()

    stale = schema.schema()
    stale["caps"]["payload_bytes"] = 1
    record.write_text(json.dumps(stale))
    capsys.readouterr()
    assert schema.main([], record=record, document=written) == 1
    assert "Bump it in wire/messages.py" in capsys.readouterr().err
    assert json.loads(record.read_text()) == stale

    assert schema.main(["--unreleased"], record=record, document=written) == 0
    assert json.loads(record.read_text()) == schema.schema()
