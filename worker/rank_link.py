"""A rank's link to its relay: one thread receives into a queue, the training thread takes from it and
sends."""

from __future__ import annotations

import queue
import threading
import time
from pathlib import Path

from wire.messages import Message, StateTaken
from worker.interrupt import Interrupt
from worker.local_link import BlockingLink, LocalLinkError

_RETRY_SECONDS = 0.05
_INBOX = 1024
"""messages that wait; beyond it the relay is not read any more, which slows it down instead of filling
memory"""


class LinkLost(Exception):
    """The relay is gone, or spoke nonsense; the rank cannot go on."""


class RankLink:
    """Owns the socket and its receiving thread. ``send``, ``poll`` and ``wait`` belong to the training
    thread."""

    def __init__(self, link: BlockingLink, interrupt: Interrupt | None = None) -> None:
        self._link = link
        self._interrupt = interrupt
        self._inbox: queue.Queue[Message | LinkLost] = queue.Queue(_INBOX)
        self.taken: queue.SimpleQueue[StateTaken | LinkLost] = queue.SimpleQueue()
        """grants for a state that is being handed over, for the thread that does so"""
        self._lost: LinkLost | None = None
        self._thread = threading.Thread(target=self._receive, name="relay link", daemon=True)
        self._thread.start()

    @classmethod
    def connect(cls, path: Path, patience: float, interrupt: Interrupt | None = None) -> RankLink:
        """Connect to the relay's socket, which may take up to ``patience`` seconds to appear. ``interrupt`` hears of
        every message when it arrives. Raises ``LinkLost``."""
        deadline = time.monotonic() + patience
        while True:
            try:
                return cls(BlockingLink.connect(path), interrupt)
            except OSError as error:
                if time.monotonic() >= deadline:
                    text = f"the relay's socket {path.name} did not open within {patience:g} s: {error.strerror}"
                    raise LinkLost(text) from error
            time.sleep(_RETRY_SECONDS)

    def send(self, message: Message) -> None:
        """Write one message; waits while the socket is full. Raises ``LinkLost``."""
        try:
            self._link.send(message)
        except (OSError, LocalLinkError) as error:
            raise LinkLost(f"{type(message).__name__} could not be sent to the relay: {error}") from error

    def poll(self) -> list[Message]:
        """What has arrived, without waiting. Raises ``LinkLost`` once everything before the loss was
        taken."""
        messages: list[Message] = []
        while not self._inbox.empty():
            item = self._inbox.get_nowait()
            if isinstance(item, LinkLost):
                self._inbox.put(item)  # every later call finds it again
                if messages:
                    break
                raise item
            messages.append(item)
        return messages

    def wait(self) -> Message:
        """The next message, however long it takes: the agent ends a rank whose relay hangs. Raises
        ``LinkLost``."""
        item = self._inbox.get()
        if isinstance(item, LinkLost):
            self._inbox.put(item)
            raise item
        return item

    def close(self) -> None:
        """Close the socket and end the thread."""
        self._link.close()
        while self._thread.is_alive():
            self._drop_waiting()
            self._thread.join(0.01)

    def _drop_waiting(self) -> None:
        while not self._inbox.empty():
            self._inbox.get_nowait()

    def _receive(self) -> None:
        try:
            while (message := self._link.receive()) is not None:
                if self._interrupt is not None:
                    self._interrupt.hear(message)
                if isinstance(message, StateTaken):
                    self.taken.put(message)
                else:
                    self._inbox.put(message)
            lost = LinkLost("the relay closed the link")
        except (OSError, LocalLinkError) as error:
            lost = LinkLost(f"the link to the relay broke: {error}")
        if self._interrupt is not None:
            self._interrupt.lose(str(lost))
        self.taken.put(lost)
        self._inbox.put(lost)
