"""Messages of what the cohort sends single ranks for: scores, and the state that a checkpoint keeps of each rank.

State travels in parts of one safetensors body, ``PART_BYTES`` each but the last. Whoever receives grants what may be
under way, ``PARTS_AHEAD`` parts, so that a large state fills no queue and delays nobody's news (decision 0016).
"""

from __future__ import annotations

import msgspec

from wire.numbers import Amount, Count

PART_BYTES = 256 * 1024
PARTS_AHEAD = 8
"""parts that may be sent and not yet taken"""


class Message(msgspec.Struct, frozen=True, tag_field="kind"):
    """Base of everything on the wire; the tag is the class name."""


class Evaluate(Message, frozen=True):
    """controller -> one rank: score the parameters you hold on the job's evaluation set."""

    epoch: Count


class EvalResult(Message, frozen=True):
    """rank -> controller."""

    epoch: Count
    metrics: dict[str, float]
    elapsed_ms: Amount
    error: str = ""


class RequestLocalState(Message, frozen=True):
    """controller -> rank: hand over what only you hold, as it is now: optimizer, generators, tensors outside the
    arena."""

    checkpoint: Count
    consensus: bool = False
    """the controller holds no consensus (collective modes): add the one that you adopted last"""


class LocalState(Message, frozen=True):
    """rank -> controller: one part of the safetensors body, in order. Training goes on meanwhile."""

    checkpoint: Count
    part: Count
    parts: Count
    data: bytes
    elapsed_ms: Amount = 0.0
    """how long copying the state kept the rank from its batches"""
    error: str = ""
    """what could not be copied; the rest is complete without it"""


class StateTaken(Message, frozen=True):
    """controller -> rank: this part is on disk, so another one may follow."""

    checkpoint: Count
    part: Count


class FetchState(Message, frozen=True):
    """rank -> controller, before ``RankReady`` of a resumed run: send me this part of my saved state."""

    part: Count


class SavedState(Message, frozen=True):
    """controller -> rank: one part of a saved state; no parts at all when none was saved."""

    part: Count
    parts: Count
    data: bytes
    own: bool = True
    """false: the state is another rank's, since the world has changed; its random generators are not yours"""
