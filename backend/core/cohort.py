"""One run as one pure machine: ``handle(event, now) -> effects``, ``next_deadline()``, ``check()``, ``snapshot(now)``.

    waiting  -> staging | forming | failed     the join window decides (join_window.py)
    staging  -> waiting | forming | failed
    forming  -> training | failed              every relay attached, every rank ready, rank 0's parameters everywhere
    training -> done | failed                  epochs trained, or the operator, or too few survivors

The cohort hears everything and passes it on: to the membership while the door is open, to the march (march.py) once the
world is frozen. It decides on ``now`` alone, never on a clock; a sender's identity comes with the event, never from
a message.
"""

from __future__ import annotations

from typing import Any

from backend.core.config import RunConfig
from backend.core.deaths import Casualty
from backend.core.forming import announce, plan_of
from backend.core.join_admission import MAX_ERROR_TEXT, clipped
from backend.core.join_window import PROBE_SECONDS, JoinWindow, can_move
from backend.core.liveness import Liveness
from backend.core.march import March
from backend.core.membership import Membership
from backend.core.outlook import outlook_of
from backend.core.preview import Outlook
from backend.core.refusals import acknowledged
from backend.core.resume import Resume, send_saved, take_up
from backend.core.returning import ClosedWindow, Kept, Returning, announced, keep_world, may_return
from backend.core.views import cohort_view
from backend.core.vocabulary import (
    CheckpointWritten,
    CloseLink,
    Effect,
    End,
    Event,
    ExpectRelays,
    HostSaid,
    Lagged,
    LinkLost,
    Operator,
    RankSaid,
    Record,
    Refused,
    RelayAttached,
    RelayHeard,
    RelayLost,
    RoundBroken,
    RoundFinished,
    SendHost,
    StrangerRefused,
    Tick,
)
from backend.core.work import WorkError
from backend.core.world import HostSeat, World
from wire.messages import (
    BatchDone,
    ChunkDone,
    EvalResult,
    Exiting,
    FetchState,
    Hello,
    HostHeartbeat,
    Leaving,
    LocalState,
    Message,
    ProbeReport,
    RankExited,
    RankFailed,
    RankReady,
    RelayExited,
    RunEnded,
    SyncAck,
)

MAX_NOTES = 20
"""sentences of a rank's that are written down, one event each"""


class Cohort:
    """See the module's table. ``phase`` is its left column or an end; ``ended`` once ``End`` was emitted."""

    def __init__(
        self,
        run_id: int,
        config: RunConfig,
        *,
        run_salt: bytes,
        run_secret: bytes | None,
        job_hash: str,
        now: float,
        resume: Resume | None = None,
    ) -> None:
        self.run_id = run_id
        self.config = config
        self.resume = resume
        probe_seconds = max(PROBE_SECONDS, 4 * config.heartbeat_timeout_seconds)  # the scale of waits reaches it too
        self.window = JoinWindow(config, now, run_id=run_id, job_hash=job_hash, probe_seconds=probe_seconds)
        self.window.saved = resume
        self.liveness = Liveness(config.heartbeat_timeout_seconds)
        self.membership = Membership(run_id, config, self.window, self.liveness, run_salt, run_secret or b"")
        self.march: March | None = None
        self.created_at = now
        self._door_phase = "waiting"
        self._door_end: End | None = None
        self._out: list[Effect] = []
        self.opening: list[Effect] = []
        """what is to be done before the first event"""

    def take_back(self, kept: Kept, now: float) -> None:
        """This run was trained under a controller that was killed: wait for its hosts instead of opening the door."""
        world, config = kept.world(), self.config
        size, layout = kept.dataset_size, list(kept.layout)
        march = March(self.run_id, config, world, self.liveness, dataset_size=size, layout=layout, now=now)
        march.forming = Returning(world, now + config.return_seconds, self.membership, kept)
        march.deaths, march.stopping = list(kept.deaths), kept.stopping
        self.march = march
        self.window = self.membership.window = ClosedWindow(config, now, self.run_id, kept)
        hosts = {host: seat.ranks for host, seat in world.hosts.items() if seat.state == "away"}
        self.opening = [*announced(kept, world, config.return_seconds), ExpectRelays(hosts)]

    # ------------------------------------------------------------------------------------------- the verbs

    @property
    def phase(self) -> str:
        return self.march.phase if self.march is not None else self._door_phase

    @property
    def end(self) -> End | None:
        """How the run ended, once it did."""
        return self.march.end if self.march is not None else self._door_end

    @property
    def ended(self) -> bool:
        return self.end is not None

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take one event at monotonic ``now``; answer with the effects, in the order they must be performed."""
        if self.end is not None:
            refused = Refused("run_over", f"the run is {self.phase}: {self.end.reason}")
            return [refused] if isinstance(event, Operator) else []
        self._out, self.opening = self.opening, []
        before = self.phase
        if self.march is None:
            self._at_the_door(event, now)
        else:
            self._on_the_march(self.march, event, now)
        assert before == self.phase or can_move(before, self.phase), f"{before} may not become {self.phase}"
        return self._out

    def next_deadline(self) -> float | None:
        """The earliest moment at which a ``Tick`` may change something; none once the run is over."""
        if self.ended:
            return None
        if self.opening:
            return self.created_at
        rest = self.march.deadlines() if self.march is not None else [self.window.next_deadline()]
        return min((at for at in (self.liveness.next_deadline(), *rest) if at is not None), default=None)

    def check(self) -> None:
        """Assert every invariant; tests and the simulator call it after each event."""
        if self.march is None:
            self.window.check()
        else:
            self.march.check()

    def snapshot(self, now: float) -> dict[str, Any]:
        """The core's part of the run's view, JSON-ready; times relative to ``now``, in seconds."""
        return cohort_view(self, now)

    def outlook(self) -> Outlook:
        """What a preview of the run rests on now; a value of its own, to be reckoned with elsewhere."""
        return outlook_of(self)

    # ------------------------------------------------------------------------------------ while the door is open

    def _at_the_door(self, event: Event, now: float) -> None:
        match event:
            case HostSaid(link=link, message=message, address=address):
                self._out += self._candidate_said(link, message, address, now)
            case LinkLost(link=link, reason=reason):
                self._out += self.membership.link_lost(link, reason, now)
            case StrangerRefused():
                self._out += self.membership.stranger(event)
            case Lagged(seconds=seconds):
                self._out += self.membership.lagged(seconds)
            case Operator(act="abort" | "stop" as act, arguments=arguments):
                by = str(arguments.get("by", "operator"))
                self._close_the_door(
                    f"{'Aborted' if act == 'abort' else 'Stopped'} by {by} before the world formed", by
                )
                return
            case Operator(act=act, arguments=arguments):
                self._out += self.membership.operate(act, arguments, now)
            case Tick():
                pass
            case _:
                raise AssertionError(f"{event} cannot happen before the world has formed")
        self._out += self.membership.expire(now)
        self._judge(now)

    def _candidate_said(self, link: int, message: Message, address: str, now: float) -> list[Effect]:
        member = self.window.member_of_link(link)
        if member is not None:
            self.liveness.heard(member.host, now)
        match message:
            case Hello() if member is None:
                return self.membership.hello(link, message, address, now)
            case ProbeReport() if member is None:
                return self.membership.probed(link, message, now)
            case HostHeartbeat():
                return []
            case Leaving(reason=reason):
                return [*self.membership.link_lost(link, f"it left: {reason}", now), CloseLink(link, "left")]
            case _:
                again = " again" if isinstance(message, Hello | ProbeReport) else ""
                reason = f"it sent {type(message).__name__}{again} before the world formed"
                return [*self.membership.link_lost(link, reason, now), CloseLink(link, reason)]

    def _judge(self, now: float) -> None:
        verdict = self.window.verdict(now)
        if verdict.action == "fail":
            self._close_the_door(verdict.reason)
        elif verdict.action == "form":
            self._form(verdict.reason, now)
        elif verdict.phase != self._door_phase:
            self._move(verdict.phase, verdict.reason)

    def _form(self, reason: str, now: float) -> None:
        """Freeze the world: number the ranks, tell every host its part, and send away who is still looking at the
        job."""
        members = self.window.close(now)
        self._out += self.membership.send_away_candidates()
        world = World(
            HostSeat(
                host=member.host,
                name=member.name,
                address=member.address,
                link=member.link,
                ranks=member.ranks,
                devices=member.devices,
                versions=member.versions,
                emulate_ms_per_batch=member.emulate_ms_per_batch,
            )
            for member in members
        )
        self._move("forming", reason)
        reference = self.window.reference
        self.march = March(
            self.run_id,
            self.config,
            world,
            self.liveness,
            dataset_size=reference.dataset_size,
            layout=reference.layout,
            now=now,
        )
        if self.resume is not None:
            self._out += take_up(self.march, self.resume, now)
        patience = self.config.return_seconds if may_return(self.config, world) else 0.0
        if patience:
            salt, secret = self.membership.run_salt, self.membership.open_secret
            self._out.append(keep_world(world, reference.layout, reference.dataset_size, salt, secret))
        self._out.append(ExpectRelays({host: seat.ranks for host, seat in world.hosts.items()}))
        plan = plan_of(self.run_id, self.config, reference.dataset_size, resumed=self.resume is not None)
        for seat in world.hosts.values():
            self._out += announce(world, seat, plan, patience)

    def _move(self, phase: str, reason: str) -> None:
        self._door_phase = phase
        self._out.append(Record("runs", {"phase": phase, "reason": ""}, durable=True))
        text = f"The run is now {phase}: {reason}"
        self._out.append(Record("events", {"kind": f"phase_{phase}", "level": "info", "text": text}, durable=True))

    def _close_the_door(self, reason: str, by: str = "") -> None:
        """No world comes of this window: every host that came is told why."""
        self._door_phase = "failed"
        self._door_end = End("failed", reason)
        row = {"phase": "failed", "reason": reason, "stopped_by": by}
        event = {"kind": "run_failed", "level": "warning" if by else "error", "text": reason}
        self._out += [Record("events", event, durable=True), Record("runs", row, durable=True)]
        for link in self.window.links():
            self._out += [SendHost(link, RunEnded(phase="failed", reason=reason)), CloseLink(link, reason)]
        self._out.append(self._door_end)

    # ------------------------------------------------------------------------------------ once the world is frozen

    def _on_the_march(self, march: March, event: Event, now: float) -> None:  # noqa: C901 one match, a line a case
        march.out = self._out
        match event:
            case HostSaid(link=link, message=message, address=address):
                self._host_said(march, link, message, address, now)
            case RankSaid(rank=rank, message=message):
                self._rank_said(march, rank, message, now)
            case RoundFinished():
                march.round_finished(event, now)
            case RoundBroken():
                march.round_broken(event, now)
            case CheckpointWritten():
                march.checkpoint_written(event)
            case RelayAttached(host=host, via=via):
                march.relay_attached(host, via, now)
            case RelayHeard(host=host):
                march.relays.heard(host, now)
            case RelayLost(host=host, reason=reason):
                march.losses.host(march.world.hosts[host], f"the relay link was lost: {reason}", now)
            case LinkLost(link=link, reason=reason):
                seat = march.world.host_of_link(link)
                if seat is not None:
                    march.losses.host(seat, f"the host's link was lost: {reason}", now)
            case StrangerRefused():
                self._out += self.membership.stranger(event)
            case Lagged(seconds=seconds):
                self._out += self.membership.lagged(seconds)
                march.bounds.lagged(seconds)
            case Operator(act=act, arguments=arguments):
                self._operate(march, act, arguments, now)
            case Tick():
                pass
        march.advance(now)

    def _host_said(self, march: March, link: int, message: Message, address: str, now: float) -> None:
        seat = march.world.host_of_link(link)
        if seat is None:
            back = march.forming.returned(link, message, address, now) if march.phase == "forming" else []
            self._out += back or self.membership.late_comer(link, message, address)
            return
        if seat.state in ("left", "lost"):
            return
        self.liveness.heard(seat.host, now)
        match message:
            case HostHeartbeat(ranks=ranks):
                for progress in ranks:
                    if progress.rank in seat.ranks:
                        march.world.ranks[progress.rank].progress = progress
            case RankExited(rank=rank, cause=cause) if rank in seat.ranks:
                march.losses.exited(rank, cause, now)
            case RelayExited(cause=cause):
                how = cause.message or cause.signal or f"exit code {cause.code}"
                march.losses.host(seat, f"its relay ended: {how}", now)
            case Leaving(reason=reason):
                march.losses.host(seat, f"the host left: {reason}", now)
            case _:
                march.losses.host(seat, f"it sent {type(message).__name__}, which has no place there", now)

    def _rank_said(self, march: March, rank: int, message: Message, now: float) -> None:  # noqa: C901 one match
        seat = march.world.ranks[rank]
        if not seat.alive:
            return  # a zombie: its frames are void from the moment of its death
        self.liveness.heard(seat.host, now)
        march.relays.heard(seat.host, now)
        training = march.phase == "training"
        match message:
            case BatchDone() | ChunkDone() if training:
                try:
                    if isinstance(message, ChunkDone):
                        self._out += march.training.chunk_done(rank, message, now)
                        seat.idle_since = now
                    else:
                        march.training.batch_done(rank, message, now)
                except WorkError as error:
                    march.losses.ranks([Casualty(rank, f"it reported work that it was not given: {error}")], now)
            case SyncAck():
                acknowledged(march, rank, message)
            case FetchState(part=part) if self.resume is not None and not training:
                self._out.append(send_saved(march, rank, part, now))
            case RankReady() if not training:
                for note in message.notes[:MAX_NOTES]:
                    text = f"{march.world.where(rank)}: {clipped(note, MAX_ERROR_TEXT)}"
                    march.event("state_not_restored", text, "warning")
                disagreement = march.forming.rank_ready(rank, message)
                if disagreement:
                    march.forming.over(march, disagreement, now)
            case EvalResult():
                march.evaluated(rank, message, now)
            case LocalState():
                self._out += march.checkpoints.local_state(rank, message, now)
            case RankFailed():
                seat.failure = message
            case Exiting():
                pass  # what its exit means, its process' end will say
            case _ if march.plane.heard(rank, message, now):
                pass
            case _:
                what = f"it sent {type(message).__name__}, which has no place in phase {march.phase}"
                march.losses.ranks([Casualty(rank, what)], now)

    def _operate(self, march: March, act: str, arguments: dict[str, Any], now: float) -> None:
        by = str(arguments.get("by", "operator"))
        nothing_yet = march.phase == "forming" and not march.forming.holds_work
        if act == "abort" or (act == "stop" and nothing_yet):
            march.stopping = by
            march.fail(f"{'Aborted' if act == 'abort' else 'Stopped'} by {by}", now, level="warning")
        elif act == "stop":
            if not march.stop(by):
                self._out.append(Refused("already_ending", "the run is ending already"))
        elif act == "save":
            self._out += march.save_soon(by)
        else:
            self._out.append(Refused("window_closed", f"the join window is closed; the run is {march.phase}"))
