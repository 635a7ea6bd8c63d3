"""What must hold of a cohort that sums among itself, whatever the library: gloo in every test run, NCCL on a GPU."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
from party import Party, party

from wire.messages import AbortSession, NewSession

LIMIT_SECONDS = 2.0 if "PYTEST_XDIST_WORKER" not in os.environ else 10.0
"""from the controller's word to a rank that is fit for the next session; looser where other tests have the same cores
and GPUs"""


def values(group: Party, name: str) -> list[object]:
    return [look[name] for look in group.all("look")]


def a_window_is_the_work_weighted_mean(directory: Path, device: str, count: int) -> None:
    steps = (3, 1, 5, 7)[:count]
    with party(directory, device, count) as group:
        group.session()
        base = 0.0
        for number in range(3):
            group.each("set", [base + step for step in steps])
            summed = group.sync(number, steps)
            assert values(group, "w") == [base + step for step in steps]  # nothing is adopted yet
            assert {(one.total_steps, one.mass) for one in summed} == {(sum(steps), float(sum(steps)))}
            results = group.all("adopt")
            assert len({one.consensus_hash for one in results}) == 1
            base += sum(step * step for step in steps) / sum(steps)
            for name in ("w", "wide", "one.weight"):
                assert values(group, name) == pytest.approx([base] * count, rel=1e-6)
            assert len(set(values(group, "wide"))) == 1
            assert values(group, "low") == pytest.approx([base] * count, rel=1e-2)
            base = float(values(group, "w")[0])  # type: ignore[arg-type]
        assert values(group, "frozen") == [7.0] * count
        assert group.all("look")[0]["homes"] == ["w", "frozen", "wide", "one.weight"]


def movers_count_alike_for_buffers(directory: Path, device: str) -> None:
    with party(directory, device, 3) as group:
        group.session()
        group.each("set", [1.0, 3.0, float("nan")])
        group.round(0, (3, 1, 0))
        assert values(group, "mean") == [2.0] * 3
        assert values(group, "w") == [1.5] * 3
        assert values(group, "number") == [1.0, 3.0, 0.0]  # whole numbers stay where they are


def an_idle_cohort_keeps_what_it_has(directory: Path, device: str) -> None:
    with party(directory, device, 2) as group:
        group.session()
        group.each("set", [1.0, 2.0])
        summed = group.sync(0, (0, 0))
        assert {(one.total_steps, one.mass, one.moved_bytes) for one in summed} == {(0, 0.0, 0)}
        assert [one.consensus_hash for one in group.all("adopt")] == ["", ""]
        assert values(group, "w") == [1.0, 2.0]


def who_is_not_finite_stops_all(directory: Path, device: str) -> None:
    with party(directory, device, 3) as group:
        group.session()
        group.each("set", [1.0, float("inf"), 5.0])
        found = group.sync(0, (3, 1, 1))
        assert [(one.element, one.value) for one in found] == [(None, ""), (0, "inf"), (None, "")]
        group.sync(0, (3, 0, 1), attempt=1)
        group.members[0].tell("adopt", False)
        group.members[1].tell("adopt", True)
        group.members[2].tell("adopt", False)
        assert not any(member.hear().error for member in group.members)
        assert values(group, "w") == [2.0] * 3


def a_rank_that_dies_in_its_window(directory: Path, device: str) -> None:
    with party(directory, device, 3) as group:
        group.session()
        group.each("set", [4.0, 8.0, 1.0])
        group.bury(group.members[2])
        for member in group.members:
            member.word(AbortSession(group.generation, "rank 2 died"))
        group.all("drop")
        group.session()
        group.round(0, (1, 3))
        assert values(group, "w") == [7.0, 7.0]


def a_rank_that_dies_in_a_sum(directory: Path, device: str, how: signal.Signals) -> None:
    """It is in none of the others' sums, or in one; either way they get out, with everything as it was."""
    with party(directory, device, 3, wide=1_000_000) as group:
        group.session()
        group.each("set", [1.0, 1.0, 1.0])
        group.round(0, (1, 1, 1))
        group.each("set", [4.0, 8.0, 1.0])
        before = group.all("bits")
        *others, victim = group.members
        for member in others:
            member.tell("sync", 1, 0, group.generation, 1)
        for member in others:
            member.busy()
        victim.signal(how)
        answers, seconds = group.abort(others)
        assert seconds < LIMIT_SECONDS
        assert all(answer.error.startswith(("Aborted", "SessionError")) for answer in answers), answers
        group.bury(victim)
        assert group.all("bits") == before[:2]
        group.session()
        group.round(1, (1, 3), attempt=1)
        assert values(group, "w") == [7.0, 7.0]


def a_session_of_processes_that_open_and_close_files(directory: Path, device: str) -> None:
    """Whatever their descriptors' numbers: nobody is left waiting."""
    with party(directory, device, 3) as group:
        group.all("open_and_close")
        *others, away = group.members
        for number in range(5):
            group.session()
            for member in others:
                member.tell("sync", number, 0, group.generation, 1)
            for member in others:
                member.busy()
            answers, seconds = group.abort(others)
            assert seconds < LIMIT_SECONDS
            assert all(answer.error.startswith(("Aborted", "SessionError")) for answer in answers), answers
            away.ask("drop")


def a_rank_that_dies_while_all_sum(directory: Path, device: str, wide: int) -> None:
    with party(directory, device, 3, wide=wide) as group:
        group.session()
        group.each("set", [1.0, 1.0, 1.0])
        for member in group.members:
            member.tell("rounds", 100_000, group.generation, 1)
        for member in group.members:
            member.busy()
        *others, victim = group.members
        victim.signal(signal.SIGKILL)
        answers, seconds = group.abort(others)
        assert seconds < LIMIT_SECONDS
        assert all(answer.error.startswith(("Aborted", "SessionError")) for answer in answers), answers
        group.bury(victim)
        group.session()
        group.each("set", [4.0, 8.0])
        group.round(1, (1, 3))
        assert values(group, "w") == [7.0, 7.0]


def a_generator_that_dies(directory: Path, device: str) -> None:
    """It made the identity, and nobody can be met there."""
    with party(directory, device, 3) as group:
        generator, *others = group.members
        group.generation += 1
        identity = generator.ask("name", group.generation)
        group.bury(generator)
        for member in others:
            member.tell("join", NewSession(group.generation, identity, [1, 2]))
        answers, seconds = group.abort(others)
        assert seconds < LIMIT_SECONDS
        assert all(answer.error.startswith(("Aborted", "SessionError")) for answer in answers), answers
        group.session()
        group.each("set", [4.0, 8.0])
        group.round(0, (1, 3))
        assert values(group, "w") == [7.0, 7.0]


def many_rounds_grow_nothing(directory: Path, device: str, rounds: int, wide: int) -> None:
    with party(directory, device, 2, wide=wide) as group:
        group.session()
        group.each("set", [1.0, 3.0])
        before = group.all("rounds", 50, group.generation, 1)
        after = group.all("rounds", rounds, group.generation, 1)
        for early, late in zip(before, after, strict=True):
            assert late["rss"] - early["rss"] < 8 << 20
            assert {name: late[name] for name in late if name not in ("rss", "used")} == {
                name: early[name] for name in early if name not in ("rss", "used")
            }
            if "PYTEST_XDIST_WORKER" not in os.environ:  # else others use the GPU, too
                assert late.get("used", 0) - early.get("used", 0) < 32 << 20


def ranks_leave_as_they_like(directory: Path, device: str, sessions: int) -> None:
    """One is out while another still adopts; then again with processes that end."""
    with party(directory, device, 2) as group:
        for number in range(sessions):
            group.session()
            group.each("set", [1.0, 3.0])
            group.sync(number, (1, 1))
            first, second = group.members[:: 1 if number % 2 else -1]
            first.tell("adopt")
            second.tell("drop")
            assert not first.hear().error and not second.hear().error
            group.all("drop")
        group.session()
        group.round(sessions, (1, 1))
        ended: Sequence[int | None] = [member.end() for member in group.members]
        assert ended == [0, 0]
