"""The host-shared directory: private, placed where there is room, and never left to rot or taken from a living
owner."""

import os
import shutil
from pathlib import Path

import pytest

from worker.shared_dir import Abandoned, SharedDir, SharedDirError, reap_abandoned

NOW = 1e12
"""seconds since the epoch, long after every file here was made"""


def test_it_is_private_and_goes_with_all_that_is_in_it(tmp_path: Path) -> None:
    shared = SharedDir.create(1, [tmp_path])
    assert shared.path.parent == tmp_path
    assert shared.path.stat().st_mode & 0o777 == 0o700
    (shared.path / "rank0.out").write_bytes(b"x")
    shared.remove()
    shared.remove()
    assert list(tmp_path.iterdir()) == []


def test_it_goes_where_there_is_room(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    assert SharedDir.create(1, [missing, tmp_path]).path.parent == tmp_path
    with pytest.raises(SharedDirError, match=rf"no room for {1 << 42} MiB.*{missing} has 0 MiB.*set TMPDIR"):
        SharedDir.create(1 << 62, [missing, tmp_path])


def test_only_what_nobody_holds_is_reaped(tmp_path: Path) -> None:
    living = SharedDir.create(1, [tmp_path])
    abandoned = SharedDir.create(1, [tmp_path])
    os.close(abandoned._lock)  # what the kernel does when a process is killed
    abandoned._lock = -1
    (tmp_path / "marchline-not-ours").mkdir()
    (tmp_path / "marchline-file").write_text("")
    (tmp_path / "marchline-link").symlink_to(living.path)
    (tmp_path / "somebody-elses").mkdir()
    (abandoned.path / "rank0.out").write_bytes(b"x" * 1500)
    (abandoned.path / "relay.sock").write_bytes(b"")
    (left,) = reap_abandoned(NOW, [tmp_path])
    assert left == Abandoned(abandoned.path, ("rank0.out", "relay.sock"), 1500)
    assert str(left) == f"{abandoned.path} (rank0.out, relay.sock; 0.0 MB)"
    assert living.path.exists()
    assert not abandoned.path.exists()
    assert reap_abandoned(NOW, [tmp_path]) == []
    living.remove()


def test_one_that_is_being_made_is_not_taken_for_abandoned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rename = Path.rename

    def reap_first(self: Path, target: Path) -> Path:
        assert reap_abandoned(NOW, [tmp_path]) == []
        moved = rename(self, target)
        assert reap_abandoned(NOW, [tmp_path]) == []
        return moved

    monkeypatch.setattr(Path, "rename", reap_first)
    shared = SharedDir.create(1, [tmp_path])
    assert shared.path.exists()
    shared.remove()


def test_one_that_another_agent_reaps_first_is_nobodys_business(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("marchline-a", "marchline-b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "owner.lock").write_bytes(b"")
    scan = os.scandir

    def reaped_meanwhile(path: Path) -> object:
        if path == tmp_path / "marchline-a":
            shutil.rmtree(path)
        return scan(path)

    with monkeypatch.context() as patched:
        patched.setattr("worker.shared_dir.os.scandir", reaped_meanwhile)
        assert [left.path.name for left in reap_abandoned(NOW, [tmp_path])] == ["marchline-b"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("locked", [True, False], ids=["before its name", "before its lock"])
def test_one_whose_making_was_cut_short_is_reaped_after_a_minute(tmp_path: Path, locked: bool) -> None:
    begun = tmp_path / ".marchline-abc"
    begun.mkdir()
    if locked:
        (begun / "owner.lock").write_bytes(b"")
    made = begun.stat().st_ctime
    assert reap_abandoned(made + 59, [tmp_path]) == []
    assert [left.path for left in reap_abandoned(made + 61, [tmp_path])] == [begun]
    assert list(tmp_path.iterdir()) == []
