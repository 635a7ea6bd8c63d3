"""A host whose controller is gone looks for it again, while its relay and ranks wait (decision 0018)."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import random

from wire.codes import CloseCode
from wire.messages import Accept, Hello, Reject, RunEnded
from worker.exits import ExitCode
from worker.join_link import JoinLink, LinkEnded, Refused, Target, Unreachable

PAUSE_SECONDS = 0.5
"""on average: hosts that lost one controller at one moment do not dial at one"""
FINAL = frozenset({CloseCode.AUTH, CloseCode.SUPERSEDED, CloseCode.REFUSED, CloseCode.GONE, CloseCode.PROTOCOL})
"""close codes with which the controller itself ended the link"""

log = logging.getLogger("agent")


class Away(Exception):
    """The controller stays away, or goes on without this host; ``code`` is the agent's exit code."""

    def __init__(self, text: str, code: ExitCode = ExitCode.LOST) -> None:
        super().__init__(text)
        self.code = code


async def find_again(target: Target, hello: Hello, patience: float, reply_seconds: float) -> tuple[JoinLink, Accept]:
    """Dial for ``patience`` seconds, until the controller takes this host back. Raises ``Away``."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(patience):
            while True:
                try:
                    return await _dial(dataclasses.replace(target, run=hello.run), hello, reply_seconds)
                except Refused as refused:
                    raise Away(str(refused), refused.code) from refused
                except (Unreachable, LinkEnded) as error:
                    if isinstance(error, LinkEnded) and error.close_code in FINAL:
                        raise Away(f"the controller is back, and does not take this host: {error}") from error
                    log.debug("not yet: %s", error)
                await asyncio.sleep(PAUSE_SECONDS * random.uniform(0.5, 1.5))
    raise Away(f"the controller was lost and did not come back within {patience:g} s; its run can be resumed there")


async def _dial(target: Target, hello: Hello, reply_seconds: float) -> tuple[JoinLink, Accept]:
    """One try. Raises ``Away``, ``Refused``, ``Unreachable``, ``LinkEnded``."""
    link = await JoinLink.dial(target)
    accepted = False
    try:
        await link.send(hello)
        while True:
            try:
                async with asyncio.timeout(reply_seconds):
                    answer = await link.receive()
            except TimeoutError as error:
                raise LinkEnded(CloseCode.SILENT, f"no answer for {reply_seconds:g} s") from error
            match answer:
                case Accept():
                    accepted = True
                    return link, answer
                case Reject(code=code, reason=reason):
                    raise Away(f"the controller is back, and goes on without this host ({code}): {reason}")
                case RunEnded(phase=phase, reason=reason):
                    raise Away(f"the controller is back, and the run is {phase}: {reason}")
    finally:
        if not accepted:
            await link.close()
