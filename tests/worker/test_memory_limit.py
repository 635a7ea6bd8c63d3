"""A memory kill is named on the kernel's word only, and explains one end (case F05)."""

from pathlib import Path

import pytest

from worker.memory_limit import RECENT_SECONDS, ControlGroup, MemoryKills

V2 = "0::/pods/one\n"
V1 = "5:cpu,cpuacct:/x\n4:memory:/pods/one\n0::/\n"


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize("folder", ["pods/one", "."], ids=["the host's path", "the container's own root"])
def test_version_two(tmp_path: Path, folder: str) -> None:
    write(tmp_path / folder / "memory.events", "low 0\nhigh 0\nmax 12\noom 3\noom_kill 2\noom_group_kill 0\n")
    write(tmp_path / folder / "memory.max", "max\n" if folder == "pods/one" else "1024\n")
    write(tmp_path / "memory.max", "1024\n")
    group = ControlGroup(tmp_path, V2)
    assert group.kills() == 2
    assert group.limit_bytes() == 1024, "the group around it has one"


def test_version_one(tmp_path: Path) -> None:
    write(tmp_path / "memory/pods/one/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 5\n")
    write(tmp_path / "memory/pods/one/memory.limit_in_bytes", "9223372036854771712\n")
    group = ControlGroup(tmp_path, V1)
    assert group.kills() == 5
    assert group.limit_bytes() == 0, "no limit at all"


@pytest.mark.parametrize("membership", ["", V2, V1, "nonsense"])
def test_a_kernel_that_says_nothing(tmp_path: Path, membership: str) -> None:
    group = ControlGroup(tmp_path, membership)
    assert (group.kills(), group.limit_bytes()) == (0, 0)


def test_the_real_group_can_be_read() -> None:
    group = ControlGroup()
    assert group.kills() >= 0
    assert group.limit_bytes() >= 0


class Killed:
    """Kills that are counted when and how often a test says so."""

    def __init__(self, tmp_path: Path) -> None:
        self.path = tmp_path / "memory.events"
        self.count(0)
        self.kills = MemoryKills(ControlGroup(tmp_path, "0::/\n"), now=0.0)

    def count(self, number: int) -> None:
        self.path.write_text(f"oom_kill {number}\n")


def test_a_kill_explains_one_end_and_no_later_one(tmp_path: Path) -> None:
    it = Killed(tmp_path)
    assert it.kills.claim(1.0) == 0, "a SIGKILL of somebody else"
    it.count(1)
    assert it.kills.claim(2.0) == 1
    assert it.kills.claim(2.1) == 0, "the second rank was killed by hand"
    it.count(3)
    assert [it.kills.claim(3.0), it.kills.claim(3.0), it.kills.claim(3.0)] == [2, 1, 0]


def test_a_kill_of_long_ago_explains_nothing(tmp_path: Path) -> None:
    """A helper that was killed for memory costs no rank its good name an hour later."""
    it = Killed(tmp_path)
    it.count(1)
    for second in range(1, 10):
        it.kills.look(float(second))
    assert it.kills.claim(9.5) == 0


def test_a_heartbeat_between_the_kill_and_the_end_changes_nothing(tmp_path: Path) -> None:
    it = Killed(tmp_path)
    for second in range(1, 10):
        it.kills.look(float(second))
    it.count(1)
    it.kills.look(10.0)
    assert it.kills.claim(10.0 + RECENT_SECONDS / 2) == 1
