"""The join window spoken to over links: hellos, probes, members that come and go, and the operator's hand on the
door."""

from __future__ import annotations

from typing import Any

from msgspec.structs import asdict

from backend.core.config import RunConfig
from backend.core.join_admission import MAX_NAME
from backend.core.join_window import Admission, JoinWindow, Refusal
from backend.core.liveness import Liveness
from backend.core.vocabulary import CloseLink, Effect, Record, Refused, SendHost, StrangerRefused
from wire.messages import Accept, Hello, Message, ProbeReport, Reject


class Membership:
    """Turns the window's answers into effects; the window itself only judges."""

    def __init__(
        self,
        run_id: int,
        config: RunConfig,
        window: JoinWindow,
        liveness: Liveness,
        run_salt: bytes,
        run_secret: bytes,
    ) -> None:
        self.run_id = run_id
        self.config = config
        self.window = window
        self.liveness = liveness
        self.run_salt = run_salt
        self.run_secret = run_secret

    def hello(self, link: int, message: Hello, address: str, now: float) -> list[Effect]:
        """A host offers itself: hand it the job to look at, or refuse it by name."""
        answer = self.window.hello(link, message, address, now)
        if isinstance(answer, Refusal):
            return self._reject(link, answer, message.host.strip()[:MAX_NAME], address)
        if isinstance(answer, Admission):
            return self._accept(link, answer, now)
        text = f"{message.host} ({address}) dialled in with {len(message.devices)} device(s) and looks at the job"
        return [SendHost(link, answer.job), _event("host_dialled", text, host=message.host, address=address)]

    def probed(self, link: int, report: ProbeReport, now: float) -> list[Effect]:
        """A host reports what it found: admit it, or refuse it by name."""
        candidate = self.window.candidate(link)
        answer = self.window.probe(link, report, now)
        name, address = (candidate.name, candidate.address) if candidate else ("", "")
        if isinstance(answer, Refusal):
            return self._reject(link, answer, name, address)
        return self._accept(link, answer, now)

    def link_lost(self, link: int, reason: str, now: float) -> list[Effect]:
        """A link ended while the door is open: its member leaves (an Accept that could not be written counts as
        that), a candidate is forgotten."""
        member = self.window.leave(link, reason, now)
        if member is None:
            return []
        self.liveness.remove(member.host)
        freed = "; its ranks are free again" if member.ranks else ""
        text = f"{member.name} left before the window closed: {reason}{freed}"
        return [
            Record("hosts", {"host": member.host, "state": "left", "reason": reason}),
            _event("host_left", text, "warning", host=member.name),
        ]

    def turn_away(self, host: int, now: float) -> list[Effect]:
        """The operator turns a member away while the door is open."""
        member = self.window.turn_away(host, now)
        if isinstance(member, Refusal):
            return [Refused(member.code, member.reason)]
        self.liveness.remove(host)
        reason = "turned away by the operator"
        return [
            SendHost(member.link, Reject(code="turned_away", reason=reason, permanent=True)),
            CloseLink(member.link, reason),
            Record("hosts", {"host": host, "state": "turned_away", "reason": reason}),
            _event("host_turned_away", f"{member.name} was turned away by the operator", "warning", host=member.name),
        ]

    def operate(self, act: str, arguments: dict[str, Any], now: float) -> list[Effect]:
        """start, extend, change: answered by ``Refused`` when the window says no."""
        if act == "save":
            return [Refused("nothing_to_save", "The world has not formed, so nothing has been trained yet.")]
        if act == "turn_away":
            return self.turn_away(int(arguments["host"]), now)
        if act == "start":
            refusal = self.window.start(now)
            text = "The operator pressed Start"
        elif act == "extend":
            refusal = self.window.extend(float(arguments["seconds"]), now)
            text = f"The operator extended the window by {float(arguments['seconds']):g} s"
        else:
            quorum, target = arguments.get("quorum"), arguments.get("target")
            refusal = self.window.change(quorum=quorum, target=target)
            text = f"The operator set quorum {self.window.quorum} and target {self.window.target or 'none'}"
        if refusal is not None:
            return [Refused(refusal.code, refusal.reason)]
        return [_event(f"window_{act}", text)]

    def stranger(self, event: StrangerRefused) -> list[Effect]:
        """Count a stranger; the window does not care. Only the first of each kind and source is written down."""
        first = self.window.stranger(event.address, event.code)
        if not first:
            return []
        text = f"Somebody at {event.address} was refused: {event.reason}"
        return [_event("stranger_refused", text, "warning", address=event.address, code=event.code)]

    def lagged(self, seconds: float) -> list[Effect]:
        """The controller was away: nobody's silence in that time counts against him, and the operator can read it."""
        self.window.lagged(seconds)
        text = self.liveness.lagged(seconds)
        return [_event("controller_lagged", text, "warning", seconds=seconds)]

    def late_comer(self, link: int, message: Message, address: str) -> list[Effect]:
        """Somebody without a seat spoke after the door was closed."""
        name = message.host.strip()[:MAX_NAME] if isinstance(message, Hello) else ""
        reason = "the join window is closed; wait for the next run"
        return self._reject(link, Refusal("window_closed", reason, permanent=False), name, address)

    def send_away_candidates(self) -> list[Effect]:
        """The window closed while these hosts were still looking at the job."""
        refusal = Refusal(
            "window_closed", "the join window closed before this host had looked at the job", permanent=False
        )
        effects: list[Effect] = []
        for candidate in self.window.candidates():
            effects += self._reject(candidate.link, refusal, candidate.name, candidate.address)
        return effects

    def expire(self, now: float) -> list[Effect]:
        """Members whose host has not been heard of leave; candidates that never report are refused."""
        effects: list[Effect] = []
        for host in self.liveness.late(now):
            member = self.window.members.get(host)
            if member is not None:
                reason = f"no heartbeat for {self.config.heartbeat_timeout_seconds:g} s"
                effects += [*self.link_lost(member.link, reason, now), CloseLink(member.link, reason)]
        for candidate, refusal in self.window.expire(now):
            effects += self._reject(candidate.link, refusal, candidate.name, candidate.address)
        return effects

    @property
    def open_secret(self) -> bytes:
        """The run's secret where hosts cannot derive it from a token; empty elsewhere."""
        return self.run_secret if self.config.open_admission else b""

    def admission(self, host: int, ranks: tuple[int, ...], now: float) -> Accept:
        """What a host hears that is in, for the first time or again."""
        return Accept(
            run_id=self.run_id,
            host_id=host,
            ranks=list(ranks),
            run_salt=self.run_salt,
            formation_wait_seconds=self.window.cap_remaining(now) + self.config.forming_seconds,
            heartbeat_seconds=self.config.heartbeat_seconds,
            heartbeat_timeout_seconds=self.config.heartbeat_timeout_seconds,
            run_secret=self.open_secret,
        )

    def _accept(self, link: int, admission: Admission, now: float) -> list[Effect]:
        member = self.window.members[admission.host]
        self.liveness.add(member.host, now)
        accept = self.admission(member.host, member.ranks, now)
        row = {
            "host": member.host,
            "name": member.name,
            "address": member.address,
            "devices": [
                {"id": d.id, "type": d.type, "name": d.name, "memory_bytes": d.memory_bytes} for d in member.devices
            ],
            "versions": asdict(member.versions),
            "emulate_ms_per_batch": member.emulate_ms_per_batch,
            "state": "admitted",
        }
        brings = f"with rank(s) {', '.join(map(str, member.ranks))}" if member.ranks else "as a relay, without ranks"
        text = f"{member.name} joined {brings}"
        return [
            Record("hosts", row, durable=True),
            SendHost(link, accept),
            _event("host_joined", text, host=member.name, ranks=list(member.ranks)),
        ]

    def _reject(self, link: int, refusal: Refusal, name: str, address: str) -> list[Effect]:
        text = f"{name or 'A host'} ({address}) was refused: {refusal.reason}"
        return [
            SendHost(link, Reject(code=refusal.code, reason=refusal.reason, permanent=refusal.permanent)),
            CloseLink(link, refusal.code),
            _event("host_refused", text, "warning", host=name, address=address, code=refusal.code),
        ]


def _event(kind: str, text: str, level: str = "info", **data: Any) -> Record:
    return Record("events", {"kind": kind, "level": level, "text": text, "data": data})
