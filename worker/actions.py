"""What a rank's loop may have to do (``worker.control`` decides it): values without any behaviour."""

from __future__ import annotations

from dataclasses import dataclass

from wire.messages import NewSession, SnapshotReady, StartChunk


@dataclass(frozen=True, slots=True)
class Train:
    """Train on this chunk, then report it with ``Control.chunk_done``."""

    chunk: StartChunk


@dataclass(frozen=True, slots=True)
class SetClock:
    """The cohort's step count: learning-rate schedules move up to it."""

    global_step: int


@dataclass(frozen=True, slots=True)
class Pack:
    """Have the values in the arena, then send ``ready``."""

    ready: SnapshotReady


@dataclass(frozen=True, slots=True)
class Resend:
    """The arena still holds the contribution; send ``ready`` for the new attempt."""

    ready: SnapshotReady


@dataclass(frozen=True, slots=True)
class Adopt:
    """Load the consensus, or keep what you hold where nothing was realized, and acknowledge the round."""

    round: int
    params: bool
    buffers: bool
    ahead: bool = False
    """batches were done since the arena was packed; what they changed must not be lost, as far as the policy says so"""
    restart: bool = False
    """what this rank holds is spoilt: take all of the last consensus, and forget the optimizer's state"""
    consensus: str = ""
    """the file that holds it; none for what was adopted last"""
    looked: bool = False
    """``LookAhead`` was of this consensus"""


@dataclass(frozen=True, slots=True)
class LookAhead:
    """Hash and measure what is staged of the consensus, up to ``stop``; it may still come to nothing."""

    consensus: str
    stop: int
    fresh: bool
    """another attempt's: what was looked at before does not count"""


@dataclass(frozen=True, slots=True)
class Score:
    """Run the evaluation on the parameters held now."""

    epoch: int


@dataclass(frozen=True, slots=True)
class SendLocal:
    """Send the tensors that are not averaged."""

    checkpoint: int
    consensus: bool = False
    """and the consensus that was adopted last"""


@dataclass(frozen=True, slots=True)
class Back:
    """Take the consensus of ``round`` again, and say that this rank is ready."""

    round: int
    restart: bool
    """what this rank did last was refused as not finite: forget the optimizer's state"""


@dataclass(frozen=True, slots=True)
class Leave:
    """End the loop. ``fenced``: the cohort goes on without this rank, which is no clean end."""

    reason: str
    fenced: bool


# ------------------------------------------------------------------------------------- the collective plane


@dataclass(frozen=True, slots=True)
class MakeSessionId:
    """Make the identity of this session and send it."""

    generation: int


@dataclass(frozen=True, slots=True)
class JoinSession:
    """Leave what session there is for this one, and say whether that worked."""

    session: NewSession


@dataclass(frozen=True, slots=True)
class DropSession:
    """Give this session up, or whatever there is of an older one."""

    generation: int


@dataclass(frozen=True, slots=True)
class Sync:
    """Sum with the others of the session, adopt nothing, and say what came of it."""

    round: int
    attempt: int
    generation: int
    steps: int
    """this rank's realized work; none if it is excluded"""
    first: bool
    """the round begins here; later attempts find the values untouched"""


@dataclass(frozen=True, slots=True)
class AdoptSync:
    """Take what the last ``Sync`` summed, or keep what you hold where nobody worked, and acknowledge the round."""

    round: int
    restart: bool = False
    """as in ``Adopt``"""


Action = (
    Train | SetClock | Pack | Resend | LookAhead | Adopt | Score | SendLocal | Back | Leave
    | MakeSessionId | JoinSession | DropSession | Sync | AdoptSync
)  # fmt: skip
