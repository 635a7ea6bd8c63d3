"""Chunks on their way out: a sequence number first, the seal later and perhaps in another thread."""

from __future__ import annotations

from wire import frames
from wire.errors import LocalProtocolError
from wire.frames import ChunkHeader
from wire.sealing import GCM_TAG_BYTES, DirectionKeys


class ReservedChunk:
    """A chunk with its sequence number, taken by ``Session.reserve_chunk``; any thread may seal it, once."""

    __slots__ = ("_keys_once", "header", "sequence")

    def __init__(self, header: ChunkHeader, sequence: int, keys: DirectionKeys) -> None:
        self.header = header
        self.sequence = sequence
        self._keys_once = [keys]

    def seal(self, payload: bytes | bytearray | memoryview, headroom: int = 0) -> bytearray:
        """The frame: header, ciphertext and tag in one buffer, with no copy of ``payload``.

        ``headroom`` bytes before it are left for whoever frames the frame. ``payload`` is contiguous,
        ``header.payload_bytes`` long. Raises ``LocalProtocolError`` otherwise (and can then be called again), and when
        the chunk was sealed before.
        """
        plain = memoryview(payload)
        frames.check_chunk(self.header, plain)
        try:
            # A list's pop is atomic: two seals under one GCM nonce would give both plain texts away.
            keys = self._keys_once.pop()
        except IndexError:
            raise LocalProtocolError(f"chunk {self.sequence} was sealed before; reserve another") from None
        start = frames.CHUNK.size
        frame = bytearray(headroom + start + plain.nbytes + GCM_TAG_BYTES)
        view = memoryview(frame)[headroom:]
        frames.write_chunk_header(self.header, self.sequence, view)
        keys.encrypt_into(self.sequence, view[:start], plain.cast("B"), view[start:])
        return frame
