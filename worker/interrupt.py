"""What must reach a rank while it waits inside of a collective: the link's thread hears it first (behaviour H8).

Messages come in order, so a word about one session ends all older ones too.
"""

from __future__ import annotations

from wire.messages import AbortSession, DeclareDead, Message, NewSession, RequestSessionId, Shutdown

_FOREVER = 1 << 63


class Interrupt:
    """Written by the link's thread, read by the one that trains."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._reason = ""
        self._void = -1
        """this session and all older ones are over"""

    def hear(self, message: Message) -> None:
        """Look at a message before it waits for its turn."""
        match message:
            case AbortSession():
                self._end(message.generation, message.reason or "the controller ended it")
            case NewSession() | RequestSessionId():
                self._end(message.generation - 1, f"session {message.generation} takes its place")
            case Shutdown():
                self._end(_FOREVER, message.reason)
            case DeclareDead() if message.rank == self._rank:
                self._end(_FOREVER, message.reason)

    def lose(self, reason: str) -> None:
        """The link is gone: nobody could tell any more."""
        self._end(_FOREVER, reason)

    def reason(self, generation: int) -> str:
        """Why this session is void; empty while it is not."""
        return self._reason if generation <= self._void else ""

    def _end(self, generation: int, reason: str) -> None:
        if generation > self._void:
            self._reason = reason or "the run is over"
            self._void = generation
