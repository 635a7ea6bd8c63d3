"""Messages of the collective plane (nccl_sync, nccl_cadence): sessions between ranks, and rounds inside of one.

A session is one communicator over the living ranks, made anew whenever the world changes; its generation counts up, and
a session counts only once every one of its ranks has joined. Ranks sum among themselves; the controller hears from
every one that it has the whole sum before any of them adopts it (design section 7, behaviour H, decision 0019).
"""

from __future__ import annotations

from wire.errands import Message
from wire.numbers import Amount, Count, Number

MAX_ID_BYTES = 4096
"""of a session's identity"""


class RequestSessionId(Message, frozen=True):
    """controller -> one rank: you are the generator; make the identity that the others will find you by."""

    generation: Count


class SessionIdGenerated(Message, frozen=True):
    """rank -> controller, from the generator: NCCL's unique id, or where ranks over gloo meet. Opaque in between."""

    generation: Count
    id: bytes


class NewSession(Message, frozen=True):
    """controller -> rank: drop what session you have and join this one; your place is your rank's in ``ranks``."""

    generation: Count
    id: bytes
    ranks: list[Count]
    """ranks of the cohort, ascending: the index is the rank in the session"""


class SessionJoined(Message, frozen=True):
    """rank -> controller: the communicator works; a first collective went through it."""

    generation: Count
    transport: str
    """for people: library, release and interface, as in ``NCCL 2.28.9 on eth0``"""


class SessionLost(Message, frozen=True):
    """rank -> controller: joining failed, or a collective did. What the rank would have contributed is untouched."""

    generation: Count
    reason: str


class AbortSession(Message, frozen=True):
    """controller -> rank: somebody of this session is dead or late. Whatever is in flight in it ends now, unfinished;
    another session follows, and the same round again, or the run's end."""

    generation: Count
    reason: str


class SyncNow(Message, frozen=True):
    """controller -> rank: average with the others of this session. Nothing is adopted before ``SyncCommitted``."""

    round: Count
    attempt: Count
    generation: Count
    excluded: bool = False
    """what this rank did was refused: it declares no work this time, and starts anew from the consensus"""


class Synced(Message, frozen=True):
    """rank -> controller: the sum is complete here; the rank's own values are as they were."""

    round: Count
    attempt: Count
    steps: Count
    """this rank's optimizer steps since the last committed round: its realized work"""
    total_steps: Count
    """of the session's ranks, as their COUNT gave it"""
    mass: float
    """the divisor: the sum of the ranks' masses"""
    moved_bytes: Count
    """bytes of the vectors that were summed"""
    elapsed_ms: Amount


class SyncRefused(Message, frozen=True):
    """rank -> controller: what this rank would contribute is not finite; all ranks of the session know and stopped."""

    round: Count
    attempt: Count
    element: Number
    """first bad element, counted from the arena's start"""
    value: str
    """nan, inf or -inf"""


class SyncCommitted(Message, frozen=True):
    """controller -> rank: every rank has the same sum; adopt it."""

    round: Count
    attempt: Count
