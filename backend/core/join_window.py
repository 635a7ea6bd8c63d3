"""The join window of a run: who is in, who was refused, and when the world forms (behaviour B; design sections 4, 5).

A host says hello and is offered the job; it probes the job in a process of its own and reports; then it is admitted or
refused by name. A relay-only host has nothing to probe and is admitted at once; it holds no rank, and nothing waits for
it. Ranks are numbered in admission order and stay contiguous: while the window is open, the ranks behind a
host that leaves move down, and ``WorldFormed`` carries the final ones. An ``Accept`` that could not be written is such
a leaving. Strangers are counted and never end a window.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import replace

from backend.core.config import RunConfig
from backend.core.join_admission import (
    MAX_NAME,
    Door,
    Member,
    Refusal,
    clipped,
    name_key,
    refuse_hello,
    refuse_probe,
    refuse_run,
    refuse_version,
)
from backend.core.join_phases import (
    MAX_EXTENSION_SECONDS,
    PHASES,
    Missing,
    Terms,
    Verdict,
    can_move,
    judge,
    missing_to_start,
    ranks,
)
from backend.core.join_records import Admission, Candidate, Offer, Refused, Strangers
from backend.core.resume import Resume
from wire.messages import Hello, JobOffer, ProbeReport

__all__ = ["PHASES", "Admission", "Candidate", "JoinWindow", "Member", "Missing", "Offer", "Refusal", "can_move"]

PROBE_SECONDS = 120.0
WORLD_CAPACITY = 4096
KEPT_REFUSALS = 50
KEPT_REASON = 1000


class JoinWindow:
    """Open from its construction until ``close``. Nothing here ends it by itself: ask ``verdict`` and act."""

    def __init__(
        self,
        config: RunConfig,
        now: float,
        *,
        run_id: int | None = None,
        job_hash: str = "",
        world_capacity: int = WORLD_CAPACITY,
        probe_seconds: float = PROBE_SECONDS,
    ) -> None:
        """``run_id`` is what a host may ask for, none gates nothing; ``job_hash`` is the controller's own job file's,
        empty when it has none; ``world_capacity`` in ranks. Forced counts fix the size of the world."""
        self.config = config
        self.run_id = run_id
        self.job_hash = job_hash
        self.opened_at = now
        self.closed = False
        self.armed = False
        self.members: dict[int, Member] = {}
        self.refusals: deque[Refused] = deque(maxlen=KEPT_REFUSALS)
        self.strangers = Strangers()
        self.saved: Resume | None = None
        """the checkpoint that this run goes on from: its model and dataset are what hosts must find"""
        self._forced_world = len(config.fixed_counts) if config.fixed_counts else None
        self._world_capacity = self._forced_world or world_capacity
        self._probe_seconds = probe_seconds
        self._terms = Terms.of(config, self._forced_world or 0)
        self._candidates: dict[int, Candidate] = {}
        self._reference: ProbeReport | None = None
        self._turned_away: set[str] = set()
        self._next_host = 0
        self._seen = now

    # ------------------------------------------------------------------------------------------- readings

    @property
    def quorum(self) -> int:
        """Ranks that must have joined before the world may form."""
        return self._terms.quorum

    @property
    def target(self) -> int | None:
        """Ranks at which the window closes early."""
        return self._terms.target

    @property
    def window_seconds(self) -> float:
        """Length of the window since its opening, extensions included."""
        return self._terms.window_seconds

    @property
    def cap_seconds(self) -> float:
        """The hard cap since the opening, extensions included."""
        return self._terms.cap_seconds

    @property
    def joined_ranks(self) -> int:
        """Ranks admitted so far; the world size once the window is closed."""
        return sum(len(member.ranks) for member in self.members.values())

    @property
    def reference(self) -> ProbeReport:
        """What the first member reported, and so what all members agree on; empty while nobody is in."""
        return self._reference or ProbeReport()

    def window_remaining(self, now: float) -> float | None:
        """Seconds until the window ends; none once it is past (B13)."""
        left = self.opened_at + self.window_seconds - now
        return left if left > 0 else None

    def cap_remaining(self, now: float) -> float:
        """Seconds until the hard cap, 0 once it is past."""
        return max(0.0, self.opened_at + self.cap_seconds - now)

    def candidate(self, link: int) -> Candidate | None:
        """The host that is still looking at the job on this link."""
        return self._candidates.get(link)

    def candidates(self) -> list[Candidate]:
        """Hosts that are still looking at the job; after ``close`` those that it left behind."""
        return list(self._candidates.values())

    def member_of_link(self, link: int) -> Member | None:
        """The admitted host on this link."""
        return next((member for member in self.members.values() if member.link == link), None)

    def links(self) -> list[int]:
        """Every link that has a host on it, members first."""
        return [*(member.link for member in self.members.values()), *self._candidates]

    def verdict(self, now: float) -> Verdict:
        """Whether the window stays open, forms the world or fails, and why (B6). A reading: it changes nothing."""
        return judge(self._terms, self.joined_ranks, now - self.opened_at, self.armed)

    def next_deadline(self) -> float | None:
        """When time alone may next change the verdict or expire a candidate; none once closed.

        A deadline stays due until ``expire`` has been called with a later time. Call it, then ``verdict``, at every
        event: a mere look at the window (the page's) must not make anybody oversleep.
        """
        if self.closed:
            return None
        clocks = [self.opened_at + seconds for seconds in (self.window_seconds, self.cap_seconds)]
        pending = [at for at in clocks if at > self._seen]
        pending += [candidate.deadline for candidate in self._candidates.values()]
        return min(pending, default=None)

    def missing(self, now: float) -> list[Missing]:
        """Everything that start would be refused for now; empty when it would be accepted (B14). A reading."""
        if self.closed:
            return [Missing("window_closed", "The join window is closed.", "Create another run.")]
        return missing_to_start(self._terms, self.joined_ranks)

    # ---------------------------------------------------------------------------------------------- hosts

    def hello(self, link: int, hello: Hello, address: str, now: float) -> Offer | Admission | Refusal:
        """A host offers its devices: it is offered the job to look at, or refused. A relay-only host is in at once."""
        refusal = self._refuse_at_the_door(link, hello, address)
        if refusal is not None:
            return self._refused(hello.host.strip(), address, refusal, now)
        deadline = now + self._probe_seconds
        candidate = Candidate(link, hello, address, now, deadline)
        if hello.relay_only:
            return self._admit(candidate, now)
        self._candidates[link] = candidate
        offer = JobOffer(
            run_id=self.run_id or 0, job=self.config.job, params=dict(self.config.params), job_hash=self.job_hash
        )
        return Offer(offer, deadline)

    def probe(self, link: int, report: ProbeReport, now: float) -> Admission | Refusal:
        """A host tells what it found. Refused, it is no candidate any more; the first member sets the reference."""
        candidate = self._candidates.pop(link, None)
        if candidate is None:
            return Refusal("probe_without_offer", "It reported on a job that it was not offered on this link.")
        refusal = self._refuse_after_probe(candidate, report)
        if refusal is not None:
            return self._refused(candidate.name, candidate.address, refusal, now)
        self._reference = self._reference or report
        return self._admit(candidate, now)

    def leave(self, link: int, reason: str, now: float) -> Member | None:
        """A link ended. While the window is open its member leaves and the ranks behind move down; a candidate is
        forgotten. Returns the member that left. After ``close`` nothing changes: the world is frozen."""
        self._candidates.pop(link, None)
        member = self.member_of_link(link)
        if member is None or self.closed:
            return None
        self._remove(member)
        return member

    def rollback(self, link: int, now: float) -> Member | None:
        """The admission's reply could not be written, so the host never learned of it: undo it (B7).

        It is the newest admission almost always; if another host came in behind it, that one's ranks move down.
        """
        member = self.leave(link, "its admission could not be sent", now)
        if member is not None:
            reason = f"The admission of {member.name} could not be sent and was rolled back."
            self._refused(member.name, member.address, Refusal("admission_rolled_back", reason), now)
        return member

    def turn_away(self, host: int, now: float) -> Member | Refusal:
        """The operator turns a member away; a host of that name is not admitted again. Returns the member that left."""
        member = self.members.get(host)
        if self.closed:
            return self._closed_refusal()
        if member is None:
            return Refusal("unknown_member", f"No host {host} is in this window.")
        self._remove(member)
        self._turned_away.add(name_key(member.name))
        self._refused(member.name, member.address, _turned_away(member.name), now)
        return member

    def expire(self, now: float) -> list[tuple[Candidate, Refusal]]:
        """Candidates that did not report in time, now refused and forgotten."""
        self._seen = max(self._seen, now)
        if self.closed:
            return []
        refused = []
        for candidate in [each for each in self._candidates.values() if each.deadline <= now]:
            del self._candidates[candidate.link]
            reason = (
                f"{candidate.name} did not report on the job within {self._probe_seconds:g} s; "
                f"check whether its model and dataset can be built there."
            )
            refusal = Refusal("probe_timeout", reason)
            refused.append((candidate, self._refused(candidate.name, candidate.address, refusal, now)))
        return refused

    def stranger(self, address: str, code: str) -> bool:
        """Somebody failed before authentication. Counted; whether it is the first of its kind from its source."""
        return self.strangers.add(address, code)

    def close(self, now: float) -> tuple[Member, ...]:
        """Close the window for good and return its members in rank order. Who is still looking at the job is left
        behind; ask ``candidates``. Raises ``ValueError`` when it is closed already."""
        if self.closed:
            raise ValueError("the join window is closed already")
        self.closed = True
        return tuple(self.members.values())

    # ------------------------------------------------------------------------------------------- operator

    def start(self, now: float) -> Refusal | None:
        """Arm the start: the world forms at the next verdict with a quorum. None when armed."""
        missing = self.missing(now)
        if missing:
            return Refusal(missing[0].code, f"{missing[0].text} {missing[0].cure}")
        self.armed = True
        return None

    def extend(self, seconds: float, now: float) -> Refusal | None:
        """Give the window, and its hard cap, so many seconds more; a window that is past opens again from now."""
        if self.closed:
            return self._closed_refusal()
        if not (math.isfinite(seconds) and 0 < seconds <= MAX_EXTENSION_SECONDS):
            reason = f"Extend by more than 0 and at most {MAX_EXTENSION_SECONDS:g} seconds, not {seconds:g}."
            return Refusal("extension_out_of_range", reason)
        self._terms = self._terms.extended(seconds, now - self.opened_at)
        return None

    def change(self, quorum: int | None = None, target: int | None = None) -> Refusal | None:
        """Set the quorum or the target; none keeps it, a target of 0 removes it. Refused as in a configuration (B2)."""
        if self.closed:
            return self._closed_refusal()
        if self._forced_world is not None:
            reason = (
                f"The forced counts fix the world at {ranks(self._forced_world)}; quorum and target follow from them."
            )
            return Refusal("fixed_counts_set_the_world", reason)
        wanted_quorum = self.quorum if quorum is None else quorum
        wanted_target = self.target if target is None else target or None
        problems = replace(self.config, quorum=wanted_quorum, target=wanted_target).problems()
        problem = next((p for p in problems if p.field in ("quorum", "target")), None)
        if problem is not None:
            return Refusal(problem.code, f"{problem.text[0].upper()}{problem.text[1:]}.")
        if wanted_quorum > self._world_capacity:
            reason = f"A quorum of {wanted_quorum} exceeds the {ranks(self._world_capacity)} that fit in a world."
            return Refusal("quorum_above_capacity", reason)
        self._terms = replace(self._terms, quorum=wanted_quorum, target=wanted_target)
        return None

    def lagged(self, seconds: float) -> None:
        """The controller itself was away so long: candidates get that time on top (design section 11)."""
        self._candidates = {
            link: replace(candidate, deadline=candidate.deadline + max(0.0, seconds))
            for link, candidate in self._candidates.items()
        }

    def check(self) -> None:
        """Assert what must hold between any two calls."""
        numbered = [rank for member in self.members.values() for rank in member.ranks]
        assert numbered == list(range(len(numbered))), f"ranks are not contiguous in admission order: {numbered}"
        assert list(self.members) == sorted(self.members), "members are not in admission order"
        for host, member in self.members.items():
            assert host == member.host < self._next_host, f"member {member.host} is filed as {host}"
            assert len(member.ranks) == len(member.devices), f"{member.name}: a rank per device"
        links = self.links()
        assert len(links) == len(set(links)), "a link has two hosts"
        names = self._names()
        assert len(names) == len(self.members) + len(self._candidates), "two hosts share a name"
        assert (self._reference is not None) == (self.joined_ranks > 0), "the reference is the first member's"
        assert not self.armed or self.config.start_mode != "auto", "an automatic window was armed"

    # --------------------------------------------------------------------------------------------- inside

    def _refuse_at_the_door(self, link: int, hello: Hello, address: str) -> Refusal | None:
        if self.closed:
            return self._closed_refusal()
        if link in self._candidates or self.member_of_link(link) is not None:
            return Refusal("hello_twice", f"{hello.host} said hello twice on one link.")
        name = hello.host.strip()
        refusal = refuse_hello(hello)
        if refusal is not None:
            return refusal
        if name_key(name) in self._turned_away:
            return _turned_away(name)
        taken_by = self._names().get(name_key(name))
        if taken_by is not None:
            reason = f"A host named {name} is here already, from {taken_by}; start this one with another --name."
            return Refusal("duplicate_host", reason)
        return refuse_version(hello) or self._refuse_run(hello) or self._refuse_size(name, len(hello.devices))

    def _refuse_run(self, hello: Hello) -> Refusal | None:
        return None if self.run_id is None else refuse_run(hello, self.run_id)

    def _refuse_size(self, name: str, devices: int) -> Refusal | None:
        world = self.joined_ranks + devices
        if world <= self._world_capacity:
            return None
        why = "the run's forced counts name" if self._forced_world is not None else "a world holds"
        full = f"With {name} the world would have {ranks(world)}, but {why} {self._world_capacity}"
        return Refusal("world_full", f"{full}; offer fewer devices.")

    def _refuse_after_probe(self, candidate: Candidate, report: ProbeReport) -> Refusal | None:
        if self.closed:
            return self._closed_refusal()
        training = [member for member in self.members.values() if not member.relay_only]
        door = Door(self.config.mode, self.job_hash, training, self._reference, self.saved, self.config.precision)
        size = self._refuse_size(candidate.name, len(candidate.hello.devices))
        return size or refuse_probe(candidate.hello, report, door)

    def _admit(self, candidate: Candidate, now: float) -> Admission:
        hello, first = candidate.hello, self.joined_ranks
        member = Member(
            host=self._next_host,
            link=candidate.link,
            name=candidate.name,
            address=candidate.address,
            devices=tuple(hello.devices),
            versions=hello.versions,
            emulate_ms_per_batch=hello.emulate_ms_per_batch,
            joined_at=now,
            ranks=tuple(range(first, first + len(hello.devices))),
        )
        self._next_host += 1
        self.members[member.host] = member
        return Admission(member.host, member.ranks)

    def _closed_refusal(self) -> Refusal:
        run = "" if self.run_id is None else f" of run {self.run_id}"
        return Refusal("window_closed", f"The join window{run} is closed; wait for the next run.")

    def _refused(self, host: str, address: str, refusal: Refusal, now: float) -> Refusal:
        refusal = replace(refusal, reason=clipped(refusal.reason, KEPT_REASON))
        self.refusals.append(Refused(clipped(host, MAX_NAME), address, refusal.code, refusal.reason, now))
        return refusal

    def _names(self) -> dict[str, str]:
        found: Mapping[str, str] = {name_key(m.name): m.address for m in self.members.values()}
        return {**found, **{name_key(c.name): c.address for c in self._candidates.values()}}

    def _remove(self, member: Member) -> None:
        del self.members[member.host]
        first = 0
        for host, other in self.members.items():
            self.members[host] = replace(other, ranks=tuple(range(first, first + len(other.devices))))
            first += len(other.devices)
        if not first:
            self._reference = None  # whoever comes next is the first again


def _turned_away(name: str) -> Refusal:
    return Refusal("turned_away", f"The operator turned {name} away from this run.", True)
