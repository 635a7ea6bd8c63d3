"""Memory that two processes share: what is offered, what is refused, and what becomes of it."""

from __future__ import annotations

import gc
import mmap
import os
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from plane_kit import ELEMENTS, Bench, arenas, declared, shared

from backend.reduce.buffers import Buffer, Proof
from backend.reduce.shared import SharedArenas, SharedMemoryRefused
from wire.arithmetic import F32


def test_another_process_reads_the_consensus_and_cannot_change_it() -> None:
    buffer = Buffer(1000, None)
    buffer.values[:] = np.arange(1000, dtype=F32)
    script = f"""
import mmap, os, struct
path = {buffer.path!r}
print(sum(struct.unpack("<1000f", open(path, "rb").read())))
descriptor = os.open(path, os.O_RDWR)
for attempt in (
    lambda: os.ftruncate(descriptor, 10),
    lambda: os.ftruncate(descriptor, 8000),
    lambda: os.pwrite(descriptor, b"x", 0),
    lambda: mmap.mmap(descriptor, 4000),
):
    try:
        attempt()
        print("done")
    except OSError as error:
        print(error.strerror)
"""
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert said.stdout.splitlines() == ["499500.0"] + 4 * ["Operation not permitted"]
    assert buffer.values[1] == 1.0


def test_memory_goes_with_the_last_who_holds_it() -> None:
    buffer = Buffer(1000, None)
    buffer.values[:] = 1
    path, view = buffer.path, buffer.lend(buffer.values)
    assert buffer.lent
    assert os.path.exists(path)
    del buffer
    gc.collect()
    assert not os.path.exists(path), "no name is left behind"
    assert view.sum() == 1000, "whoever holds it may keep it"


def test_a_model_without_elements_needs_no_memory() -> None:
    buffer = Buffer(0, 0)
    assert (buffer.values.size, buffer.path, buffer.stale, buffer.momentum_zero) == (0, "", [], [])


def test_the_proof_is_readable_here_and_cannot_be_forged() -> None:
    proof = Proof()
    assert len(proof.secret) == Proof.BYTES
    assert Path(proof.path).read_bytes() == proof.secret
    descriptor = os.open(proof.path, os.O_RDWR)
    with pytest.raises(PermissionError):
        os.pwrite(descriptor, b"x", 0)
    os.close(descriptor)
    assert Proof().secret != proof.secret


# ------------------------------------------------------------------------------------------------- rank arenas


def test_arenas_are_read_as_they_are_at_any_moment(tmp_path: Path) -> None:
    values = arenas(2)
    memory = shared(tmp_path / "host", {3: values[0], 5: values[1]})
    read = memory.values(3, ELEMENTS)
    assert read.tobytes() == values[0].tobytes()
    assert not read.flags.writeable
    with open(tmp_path / "host" / "rank3.out", "r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        mapped[:4] = np.float32(7).tobytes()
    assert read[0] == 7
    assert memory.values(3, ELEMENTS) is read, "mapped once"


def test_a_directory_is_refused_by_name(tmp_path: Path) -> None:
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(private)
    (tmp_path / "open").mkdir(mode=0o755)
    (tmp_path / "open").chmod(0o755)
    (tmp_path / "file").write_bytes(b"")
    for name, says in {
        "missing": "No such file",
        "link": "Not a directory",
        "file": "Not a directory",
        "open": "has mode 0755, not 0700",
        "nul\0": "null byte",
    }.items():
        with pytest.raises(SharedMemoryRefused, match=says):
            SharedArenas(str(tmp_path / name))
    with pytest.raises(SharedMemoryRefused, match="'private' is not an absolute path"):
        SharedArenas("private")


def test_another_users_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = shared(tmp_path / "host", {0: arenas(1)[0]})
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(SharedMemoryRefused, match="belongs to user"):
        SharedArenas(str(tmp_path / "host"))
    with pytest.raises(SharedMemoryRefused, match=r"rank0\.out belongs to user"):
        memory.values(0, ELEMENTS)


def test_an_arena_is_refused_by_name(tmp_path: Path) -> None:
    memory = shared(tmp_path / "host", {0: arenas(1)[0]})
    host = tmp_path / "host"
    (host / "rank1.out").symlink_to(host / "rank0.out")
    os.mkfifo(host / "rank2.out")
    (host / "rank3.out").mkdir()
    for rank, says in {
        1: "Too many levels of symbolic links",
        2: "is not a regular file",
        3: "is not a regular file",
        4: "No such file",
    }.items():
        with pytest.raises(SharedMemoryRefused, match=rf"rank{rank}\.out.* {says}"):
            memory.values(rank, ELEMENTS)
    with pytest.raises(SharedMemoryRefused, match=f"has {4 * ELEMENTS} bytes, {ELEMENTS + 1} elements take"):
        memory.values(0, ELEMENTS + 1)


# --------------------------------------------------------------------------------------------------- the plane


async def test_bad_memory_breaks_the_round_and_names_the_host(tmp_path: Path) -> None:
    bench, (base,) = Bench(), arenas(1)
    await bench.start_from(base, 0, 1)
    bench.plane.share(1, shared(tmp_path / "host", {}))
    bench.open({0: (0,), 1: (1,)})
    bench.plane.contribution(1, declared({1: 1}))
    broken = await bench.broken()
    assert broken.host == 1
    assert "rank1.out can't be opened" in broken.reason
    bench.plane.close()


async def test_a_value_that_is_not_finite_names_the_rank(tmp_path: Path) -> None:
    bench, (base, one, two) = Bench(), arenas(3)
    await bench.start_from(base, 0)
    one[5], two[64] = 3e38, np.nan
    bench.plane.share(0, shared(tmp_path / "host", {0: base, 4: one, 6: two}))
    bench.open({0: (0, 4, 6)})
    bench.plane.contribution(0, declared({0: 1, 4: 1, 6: 1}))
    broken = await bench.broken()
    assert broken.reason == "rank 6 of host 0 contributed nan at element 64 (buffers)"
    assert broken.non_finite is not None
    assert (broken.non_finite.rank, broken.non_finite.element) == (6, 64)
    bench.open({0: (0, 4, 6)}, attempt=1)
    bench.plane.contribution(0, declared({0: 1, 4: 2, 6: 0}, attempt=1))
    broken = await bench.broken()
    assert broken.reason == "rank 4 of host 0 contributed -inf at element 5 (params)", "finite, but not twice"
    assert bench.consensus.tobytes() == base.tobytes()
    bench.plane.close()


async def test_without_a_file_for_it_hosts_that_read_the_consensus_are_told_of_no_other(tmp_path: Path) -> None:
    """They would wait for ever; an attempt that breaks is tried again, and the run ends by name when it goes on so."""
    bench, (base, one) = Bench(), arenas(2)
    await bench.start_from(base, 0)
    bench.plane.share(0, shared(tmp_path / "host", {0: one}))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        bench.open({0: (0,)})
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    bench.plane.contribution(0, declared({0: 1}))
    broken = await bench.broken()
    assert (broken.host, broken.reason) == (
        None,
        "no further file can be opened for the consensus that hosts on this machine read",
    )
    assert bench.host(0).coming is None
    assert bench.consensus.tobytes() == base.tobytes()
    bench.plane.close()


async def test_shared_memory_streams_nothing_and_ends_with_the_link(tmp_path: Path) -> None:
    bench, (base, one) = Bench(), arenas(2)
    await bench.start_from(base, 0)
    bench.plane.share(0, shared(tmp_path / "host", {0: one}))
    for round_ in range(3):
        bench.open({0: (0,)}, round_)
        bench.plane.contribution(0, declared({0: 1}, round_))
        assert bench.host(0).coming is None, "said once the sum is complete"
        finished = await bench.finished()
        assert (finished.bytes_up, finished.bytes_down) == (0, 0)
        assert bench.hosts[0].new.tobytes() == bench.consensus.tobytes()
        bench.commit()
    assert bench.consensus == pytest.approx(one)
    bench.plane.unshare(0)
    bench.open({0: (0,)}, 3)
    bench.plane.contribution(0, declared({0: 1}, 3))
    assert bench.plane.waiting_for == {0: f"elements from 0 of {ELEMENTS}"}
    bench.plane.close()
