"""A relay's bookkeeping of one round on its way down: what of the update has come, and whether it may be adopted.

Pure: no clock, no I/O, no arrays. The data link says what comes (``UpdateComing``) and streams it in order; the control
link says that the attempt is committed. The two have no common order, so whichever comes last releases the consensus.
"""

from __future__ import annotations

from wire import ranges
from wire.messages import RequestParams, RoundAborted, RoundCommitted, UpdateComing
from wire.session import ChunkHeader, Encoding, Section
from wire.streams import same_round, section_encoding
from worker.fold import Model, travels_as

TELL_ELEMENTS = 1 << 21
"""elements of a consensus that are worth a message: 8 MiB"""


class StagingError(Exception):
    """The controller's stream cannot be staged; the text names the elements."""


class Staging:
    """One attempt at a time, from the request for it to the release of its consensus."""

    def __init__(self) -> None:
        self.path = ""
        """where the whole consensus lies, when nothing is streamed"""
        self.ignored = 0
        """updates, chunks and commits of another attempt"""
        self._number: tuple[int, int] | None = None
        self._encoding = Encoding.F32
        self._moving: ranges.Ranges | None = None
        self._accepted = 0
        self._staged = 0
        self._stop = 0
        """all elements before it are in the consensus"""
        self._told = 0
        self._commit: RoundCommitted | None = None

    @property
    def number(self) -> tuple[int, int]:
        """The open attempt's. Raises ``LookupError`` without one."""
        if self._number is None:
            raise LookupError("no attempt is open")
        return self._number

    def opened(self, request: RequestParams) -> None:
        """Expect the outcome of this attempt."""
        self._number, self._encoding = (request.round, request.attempt), travels_as(request)
        self._moving, self._commit, self.path = None, None, ""

    def aborted(self, message: RoundAborted) -> None:
        """What is staged of this attempt is void."""
        if self._number == (message.round, message.attempt):
            self._number = None

    def coming(self, message: UpdateComing, model: Model) -> bool:
        """Whether this is about the open attempt; its elements are expected from here on.

        Raises ``StagingError`` for ranges that do not fit the model, and for a second announcement.
        """
        if self._number != (message.round, message.attempt):
            self.ignored += 1
            return False
        if self._moving is not None:
            raise StagingError(f"the update of round {message.round} was announced twice")
        if problem := ranges.problem(message.still, model.elements):
            raise StagingError(f"the update leaves out {problem}")
        if message.absolute and message.still:
            raise StagingError("the initial broadcast leaves elements out, though nobody has them yet")
        border = model.params_elements
        outside = ranges.complement(message.still, 0, border), ranges.complement(message.still, border, model.elements)
        self._moving = [] if message.path else [*outside[0], *outside[1]]
        self._accepted = self._staged = self._stop = self._told = 0
        self.path = message.path
        return True

    def accepts(self, header: ChunkHeader, model: Model) -> bool:
        """Whether to take this chunk in; False for one of another attempt.

        Raises ``StagingError`` for one that is not the next one due: the link is in order, so the stream is broken.
        """
        if self._number is None or not same_round(header, *self._number):
            self.ignored += 1
            return False
        if self._moving is None:
            raise StagingError("the controller streams an update that it did not announce")
        start, stop = self._due()
        if header.offset != start:
            due = f"{start} was due" if start >= 0 else "nothing more was due"
            raise StagingError(f"the update goes on at element {header.offset} where {due}")
        if header.offset + header.elements > stop:
            raise StagingError(f"the update goes on beyond element {stop}, where it should pause")
        section = Section.PARAMS if start < model.params_elements else Section.BUFFERS
        if (header.section, header.encoding) != (section, section_encoding(section, self._encoding)):
            text = f"section {header.section}, encoding {header.encoding}"
            raise StagingError(f"the update's elements from {start} came as {text}")
        self._accepted += header.elements
        return True

    def staged(self, header: ChunkHeader) -> RoundCommitted | None:
        """A chunk that was accepted is in the consensus. The commit to pass on, if it waited for this."""
        if self._number is None or not same_round(header, *self._number):
            return None  # aborted meanwhile
        self._staged += header.elements
        self._stop = header.offset + header.elements
        return self.release()

    def news(self) -> int:
        """Elements from the start that are in the consensus, if that is worth telling the ranks; else 0."""
        if self._number is None or self._stop - self._told < TELL_ELEMENTS:
            return 0
        self._told = self._stop
        return self._stop

    def committed(self, message: RoundCommitted) -> RoundCommitted | None:
        """The controller committed the attempt. The commit to pass on, if everything is here already."""
        if self._number != (message.round, message.attempt):
            self.ignored += 1
            return None
        self._commit = message
        return self.release()

    def release(self) -> RoundCommitted | None:
        """The commit to pass on, once the attempt is committed and its consensus complete."""
        commit = self._commit
        if commit is None:
            return None
        if commit.realized and (self._moving is None or self._staged < ranges.elements(self._moving)):
            return None
        self._number = self._commit = None
        return commit

    def _due(self) -> tuple[int, int]:
        """(first, last + 1) of the run of elements that comes next; (-1, -1) after the last."""
        before = 0
        for start, stop in self._moving or []:
            if self._accepted < before + stop - start:
                return start + self._accepted - before, stop
            before += stop - start
        return -1, -1
