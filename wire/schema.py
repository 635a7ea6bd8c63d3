"""What crosses the wire, as data: recorded in ``wire/schema.json`` so that no change to it goes unnoticed.

``python -m wire.schema`` writes the record and ``docs/protocol.md``. A test compares both with the code. When messages
or frames changed under an unchanged ``WIRE_VERSION`` the command refuses, unless ``--unreleased`` says that no release
speaks this version yet.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from wire import frames
from wire.document import protocol
from wire.frames import Channel, Encoding, Section
from wire.layouts import FRAMES, struct_fields
from wire.messages import MESSAGES, WIRE_VERSION, Record

SCHEMA_FILE = Path(__file__).with_name("schema.json")
PROTOCOL_FILE = Path(__file__).parents[1] / "docs" / "protocol.md"


def schema() -> dict[str, Any]:
    """Every message, value and frame: fields in order with types and defaults, caps, and ``WIRE_VERSION``.

    Explanations are left out: rewording them changes nothing for a peer.
    """
    return {
        "wire_version": WIRE_VERSION,
        "messages": {message.__name__: struct_fields(message) for message in MESSAGES},
        "values": {value.__name__: struct_fields(value) for value in Record.__subclasses__()},
        "frames": {layout.kind.name.lower(): layout.described() for layout in FRAMES},
        "numbers": {
            enum.__name__: {member.name.lower(): member.value for member in enum}
            for enum in (Channel, Section, Encoding)
        },
        "caps": {
            "payload_bytes": frames.MAX_PAYLOAD,
            "first_payload_bytes": frames.MAX_FIRST_PAYLOAD,
            "chunk_elements": frames.MAX_CHUNK_ELEMENTS,
            "refusal_bytes": frames.MAX_REFUSAL_TEXT,
        },
    }


def unannounced_change(before: dict[str, Any], now: dict[str, Any]) -> bool:
    """Whether what peers see changed while the version did not."""
    return before != now and before["wire_version"] == now["wire_version"]


def main(arguments: Sequence[str] | None = None, *, record: Path = SCHEMA_FILE, document: Path = PROTOCOL_FILE) -> int:
    """Write the record and the document; 1 when a change needs a new ``WIRE_VERSION`` first."""
    parser = argparse.ArgumentParser(prog="python -m wire.schema", description="Record the wire's schema.")
    parser.add_argument("--unreleased", action="store_true", help="this WIRE_VERSION was never released: overwrite it")
    options = parser.parse_args(arguments)
    now, text = schema(), protocol()
    before = json.loads(record.read_text(encoding="utf-8")) if record.exists() else now
    if unannounced_change(before, now) and not options.unreleased:
        print(
            f"The wire changed but WIRE_VERSION is still {WIRE_VERSION}. Bump it in wire/messages.py, or pass"
            " --unreleased when no release speaks this version.",
            file=sys.stderr,
        )
        return 1
    record.write_text(json.dumps(now, indent=2) + "\n", encoding="utf-8")
    document.parent.mkdir(exist_ok=True)
    document.write_text(text, encoding="utf-8")
    print(f"wrote {record.name} and {document.name} for wire version {WIRE_VERSION}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
