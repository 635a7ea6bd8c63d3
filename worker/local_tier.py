"""Whether this relay and the controller can use each other's memory instead of a stream (decision 0014).

The controller offers 32 random bytes in a file of its own. Whoever reads the same bytes there runs on the same machine,
as the same user, and sees the same processes; an SSH forward or a proxy only looks as if it did.
"""

from __future__ import annotations

import hmac
import os
import stat

from wire.messages import RelayWelcome


def obstacle(welcome: RelayWelcome, *, wanted: bool, within_one_machine: bool) -> str:
    """Why the host has to stream, in words; empty if both can use shared memory."""
    if not wanted:
        return "it was told to stream"
    if not welcome.proof_path or not welcome.proof:
        return "the controller does not offer its memory"
    if not within_one_machine:
        return "the controller is on another machine"
    try:
        found = _read(welcome.proof_path, len(welcome.proof))
    except OSError as error:
        return f"the controller's memory cannot be reached: {error.strerror}"
    if found is None or not hmac.compare_digest(found, welcome.proof):
        return "what looks like the controller's memory is somebody else's"
    return ""


def _read(path: str, length: int) -> bytes | None:
    """The file's content; None for anything but a regular file of this user with that length."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid() or status.st_size != length:
            return None
        return os.pread(descriptor, length, 0)
    finally:
        os.close(descriptor)
