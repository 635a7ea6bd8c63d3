"""A rank's place in the cohort's session: one communicator at a time, joined and given up as the controller says."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from wire.messages import NewSession
from worker.communicator import COLLECTIVE_SECONDS, JOIN_SECONDS, Communicator, Guard, Library, SessionError
from worker.interrupt import Interrupt

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Place:
    """Where this rank is in a session."""

    index: int
    size: int


class Sessions:
    """Belongs to the training thread; ``interrupt`` is how another thread ends its waits."""

    def __init__(
        self,
        rank: int,
        library: Library,
        interrupt: Interrupt,
        *,
        join_seconds: float = JOIN_SECONDS,
        collective_seconds: float = COLLECTIVE_SECONDS,
    ) -> None:
        self._rank = rank
        self._library = library
        self._interrupt = interrupt
        self._seconds = (join_seconds, collective_seconds)
        self._current: tuple[int, Communicator, Place] | None = None

    def make_id(self, generation: int) -> bytes:
        """The identity of a session that others can join from now on. Raises ``SessionError``."""
        logger.debug("session %s: making its identity", generation)
        return self._library.make_id()

    def join(self, order: NewSession) -> str:
        """Leave what session there is for this one; answers the transport. Raises ``Aborted``, ``SessionError``,
        ``AbortStuck``."""
        self.drop()
        if self._rank not in order.ranks:
            raise SessionError(f"session {order.generation} has no place for rank {self._rank}")
        place = Place(order.ranks.index(self._rank), len(order.ranks))
        guard = Guard(lambda: self._interrupt.reason(order.generation), *self._seconds)
        logger.debug("session %s: joining as %s of %s", order.generation, place.index, place.size)
        communicator = self._library.join(order.id, place.index, place.size, guard)
        logger.debug("session %s: joined over %s", order.generation, communicator.transport)
        self._current = (order.generation, communicator, place)
        return communicator.transport

    def of(self, generation: int) -> tuple[Communicator, Place]:
        """The session of this generation. Raises ``SessionError`` when this rank is not in it."""
        if self._current is None or self._current[0] != generation:
            raise SessionError(f"this rank is not in session {generation}")
        return self._current[1:]

    def void(self, generation: int) -> bool:
        """Whether the controller ended this session."""
        return bool(self._interrupt.reason(generation))

    def drop(self, generation: int | None = None) -> None:
        """Give up the session of this generation or an older one; without any, whatever there is. Idempotent. Raises
        ``AbortStuck``."""
        if self._current is None or (generation is not None and generation < self._current[0]):
            return
        number, communicator, _ = self._current
        self._current = None
        logger.debug("session %s: given up", number)
        communicator.abort()

    def close(self) -> None:
        """Leave for good. Raises ``AbortStuck``."""
        self.drop()
        self._library.close()
