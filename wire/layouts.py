"""What messages and frames are made of, described for ``wire/schema.json`` and ``docs/protocol.md``."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass

import msgspec

from wire import frames
from wire.frames import Kind
from wire.sealing import GCM_TAG_BYTES, MAC_BYTES, NONCE_BYTES


@dataclass(frozen=True, slots=True)
class FrameLayout:
    """One kind of frame: its fixed header, the names of the header's fields, and what follows it."""

    kind: Kind
    header: struct.Struct
    names: tuple[str, ...]
    rest: str

    def fields(self) -> list[tuple[str, str]]:
        """(name, struct code) of each header field, in order. Raises ``ValueError`` when names and header disagree."""
        codes = re.findall(r"\d*[a-zA-Z]", self.header.format)
        return list(zip(self.names, codes, strict=True))

    def described(self) -> dict[str, int | str | list[str]]:
        """This layout as JSON values."""
        header = [f"{name} {code}" for name, code in self.fields()]
        return {"number": self.kind.value, "header": header, "then": self.rest}


_PREFIX = ("magic", "version", "kind")
FRAMES = (
    FrameLayout(
        Kind.CLIENT_HELLO, frames.CLIENT_HELLO, (*_PREFIX, "channel", "run"), f"client nonce ({NONCE_BYTES} bytes)"
    ),
    FrameLayout(
        Kind.SERVER_HELLO, frames.SERVER_HELLO, (*_PREFIX, "server nonce"), f"HMAC-SHA256 tag ({MAC_BYTES} bytes)"
    ),
    FrameLayout(
        Kind.MESSAGE,
        frames.MESSAGE,
        (*_PREFIX, "rank", "length", "sequence"),
        f"msgpack payload, HMAC-SHA256 tag ({MAC_BYTES} bytes)",
    ),
    FrameLayout(
        Kind.CHUNK,
        frames.CHUNK,
        (*_PREFIX, "sequence", "offset", "round", "attempt", "elements", "section", "encoding"),
        f"AES-256-GCM ciphertext, GCM tag ({GCM_TAG_BYTES} bytes)",
    ),
    FrameLayout(Kind.REFUSAL, frames.PREFIX, _PREFIX, "UTF-8: code, line feed, text"),
)


def struct_fields(kind: type[msgspec.Struct]) -> dict[str, dict[str, str]]:
    """Type and default (as Python source; absent when the field is required) of each field, in wire order."""
    described: dict[str, dict[str, str]] = {}
    for field in msgspec.structs.fields(kind):
        entry = {"type": str(kind.__annotations__[field.name])}
        if field.default is not msgspec.NODEFAULT:
            entry["default"] = repr(field.default)
        elif field.default_factory is not msgspec.NODEFAULT:
            entry["default"] = repr(field.default_factory())
        described[field.name] = entry
    return described
