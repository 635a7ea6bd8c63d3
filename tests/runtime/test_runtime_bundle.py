"""Bundles: the newest complete one by number, damage found before it is gone on from, kills and full disks survived."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from bundles import JOB, manifest, noon, save, spec
from small_disks import small_disk
from test_runtime_checkpoint import effect, write

from backend.core.config import RunConfig
from backend.core.vocabulary import WriteCheckpoint
from backend.runtime import bundle, resuming
from backend.runtime.bundle import ARENA, MANIFEST, MODEL, OUTER, BundleError, CheckpointPlace, check_room
from backend.runtime.checkpoint import CheckpointWriter, Committed
from backend.runtime.errors import CommandRefused
from backend.store import Store, sqlite_url

ROOT = Path(__file__).parent.parent.parent
THOROUGH = pytest.mark.skipif(
    not os.environ.get("MARCHLINE_TEST_THOROUGH"), reason="more kills of the same kind; MARCHLINE_TEST_THOROUGH=1"
)


@pytest.fixture
def place(tmp_path: Path) -> CheckpointPlace:
    return CheckpointPlace(tmp_path, 3)


def loaded(place: CheckpointPlace, number: int) -> bundle.Loaded:
    directory = place.bundle(number)
    return bundle.load(directory, bundle.verify(directory))


# ------------------------------------------------------------------------------------------- which, and how many


def test_the_highest_number_wins_and_a_stray_directory_does_not_matter(place: CheckpointPlace) -> None:
    """Case F07: 9900 is not newer than 10100, and ``step_backup`` is nothing."""
    for number in (9900, 10000, 10100):
        save(place, number, [float(number)])
    for stray in ("step_backup", "20000", "010200", "-5", "٣"):
        (place.root / stray).mkdir()
    (place.root / "step_backup" / MANIFEST).write_text("{}")
    (place.root / "010200" / MANIFEST).write_text("{}")
    assert place.complete() == [9900, 10000, 10100], "20000 has no manifest, so it is not whole"


@pytest.mark.parametrize(("keep", "left"), [(3, [4, 5, 6]), (-1, [1, 2, 3, 4, 5, 6]), (1, [6])])
def test_keeping_so_many(place: CheckpointPlace, keep: int, left: list[int]) -> None:
    for number in range(1, 7):
        save(place, number, [1.0], keep=keep)
        assert number in place.complete()
    assert place.complete() == left
    assert list(place.root.glob(".*")) == []


def test_nothing_is_pruned_for_one_that_fails(place: CheckpointPlace) -> None:
    save(place, 1, [1.0])
    writer = CheckpointWriter(place, noon)
    writer.open(2, Committed(np.zeros(1, np.float32)))
    written = writer.write(WriteCheckpoint(2, "test", (), {"layout": "nonsense"}, keep=1))
    assert "layout" in written.error
    assert place.complete() == [1]


# ------------------------------------------------------------------------------------------------- reading back


def test_a_model_as_wide_as_the_arena_comes_back_to_the_bit(place: CheckpointPlace) -> None:
    momentum = np.array([0.5, -0.25, 3e-40], dtype=np.float32)
    layout = [*spec(shape=[3]), *spec(name="b", section="buffers", dtype="float64", shape=[1], offset=3)]
    arena = save(place, 1, [0.1, -0.0, 1e-40, 7.3], layout=layout, momentum=momentum)
    back = loaded(place, 1)
    assert back.consensus.tobytes() == arena.tobytes()
    assert back.momentum is not None
    assert back.momentum.tobytes() == momentum.tobytes()
    assert (back.resume.global_step, back.resume.round, back.resume.samples_accepted) == (21, 7, (64,))
    assert back.job_hash == "h"


def test_a_narrow_model_keeps_its_consensus_beside_it(place: CheckpointPlace) -> None:
    layout = [*spec(dtype="bfloat16", shape=[2]), *spec(name="t", alias_of="w", dtype="bfloat16", shape=[2], offset=-1)]
    arena = save(place, 1, [0.1, 1.00390625], layout=layout)
    assert (place.bundle(1) / ARENA).is_file()
    assert loaded(place, 1).consensus.tobytes() == arena.tobytes()


@pytest.mark.parametrize("text", ["[]", "7", "null", "{", "[" * 100_000, '{"checksum": NaN}'])
def test_a_manifest_from_elsewhere_that_is_none_is_one_error(place: CheckpointPlace, text: str) -> None:
    save(place, 1, [1.0])
    (place.bundle(1) / MANIFEST).write_text(text)
    with pytest.raises(BundleError, match=MANIFEST):
        bundle.verify(place.bundle(1))


@pytest.mark.parametrize("name", [MODEL, OUTER, MANIFEST, "rank1.safetensors"])
@pytest.mark.parametrize("harm", ["flip", "cut", "gone"])
def test_damage_is_found_and_named(place: CheckpointPlace, name: str, harm: str) -> None:
    states = {rank: safetensors.torch.save({"rng.torch": torch.zeros(9)}) for rank in (0, 1)}
    save(place, 1, [1.0, 2.0], momentum=np.zeros(2, np.float32), states=states)
    assert bundle.verify(place.bundle(1))["states"] == [0, 1]
    path = place.bundle(1) / name
    body = bytearray(path.read_bytes())
    if harm == "flip":
        body[len(body) // 2] ^= 1
        path.write_bytes(body)
    elif harm == "cut":
        path.write_bytes(body[:-3])
    else:
        path.unlink()
    with pytest.raises(BundleError, match=name):
        bundle.verify(place.bundle(1))


def test_a_foreign_model_is_refused_with_its_missing_and_extra_keys(place: CheckpointPlace) -> None:
    save(place, 1, [1.0, 2.0])
    path = place.bundle(1) / MODEL
    for tensors, named in (
        ({"v": torch.zeros(2)}, "missing w, extra v"),
        ({"w": torch.zeros(3)}, r"w is F32 \[3\], the manifest says float32 \[2\]"),
        ({"w": torch.zeros(2, dtype=torch.float16)}, "w is F16"),
    ):
        path.write_bytes(safetensors.torch.save(tensors))
        with pytest.raises(BundleError, match=named):
            bundle.load(place.bundle(1), bundle.read_manifest(place.bundle(1)))


def test_another_format_is_refused(place: CheckpointPlace) -> None:
    save(place, 1, [1.0])
    path = place.bundle(1) / MANIFEST
    whole = json.loads(path.read_text())
    whole["format"] = 9
    del whole[bundle.CHECKSUM]
    whole[bundle.CHECKSUM] = bundle.checksum(whole)
    path.write_text(json.dumps(whole))
    with pytest.raises(BundleError, match="has format 9"):
        bundle.verify(place.bundle(1))


def test_a_state_that_did_not_come_whole_is_not_in_the_bundle(place: CheckpointPlace) -> None:
    writer = CheckpointWriter(place, noon)
    writer.open(1, Committed(np.zeros(2, np.float32)))
    writer.keep(1, 0, safetensors.torch.save({"rng.torch": torch.zeros(1)}))
    writer.keep(1, 1, b"half")
    writer.keep(9, 0, b"of another one")
    assert writer.write(WriteCheckpoint(1, "test", (0,), manifest(spec()), -1)).error == ""
    assert sorted(entry.name for entry in place.bundle(1).iterdir()) == [MANIFEST, MODEL, "rank0.safetensors"]


def test_a_bundle_outlives_the_pruning_of_the_run_that_made_it(place: CheckpointPlace, tmp_path: Path) -> None:
    save(place, 4, [1.0])
    other = CheckpointPlace(tmp_path, 8)
    other.take_over(place.bundle(4), 4)
    save(place, 5, [2.0], keep=1)
    assert place.complete() == [5]
    assert loaded(other, 4).consensus.tolist() == [1.0]


# -------------------------------------------------------------------------------------------------- last and best


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(sqlite_url(tmp_path / "db.sqlite3")) as opened:
        yield opened


def made(store: Store, tmp_path: Path, numbers: dict[int, float | None], **columns: Any) -> CheckpointPlace:
    """A run with these checkpoints, each after as many epochs as its number, and their losses."""
    config = RunConfig(job=JOB, epochs=9, fixed_counts=(1, 2)).as_dict()
    run = store.create_run({"job": JOB, "mode": "cpu_sync", "phase": "done", "config": config} | columns)
    where = CheckpointPlace(tmp_path, run)
    for number, loss in numbers.items():
        save(where, number, [float(number)])
        row = {"checkpoint": number, "path": "p", "epoch": number, "loss": loss}
        store.write(run, "checkpoints", row, durable=True).result(10)
    return where


def number_of(store: Store, tmp_path: Path, text: str) -> int:
    return int(resuming.find(store.queries, tmp_path, text)[1].directory.name)


def test_last_best_and_by_number(store: Store, tmp_path: Path) -> None:
    run = made(store, tmp_path, {1: 0.5, 2: 0.2, 3: 0.3}).run_id
    made(store, tmp_path, {})
    assert [number_of(store, tmp_path, text) for text in ("last", f"{run}", f"{run}:last", f"{run}:1")] == [3, 3, 3, 1]
    assert number_of(store, tmp_path, f"{run}:best") == 2, "the lowest loss, when nothing is scored"
    for epoch, accuracy in enumerate((0.7, 0.8, 0.9)):
        metrics = {"loss": 1.0, "accuracy": accuracy}
        store.write(run, "epochs", {"epoch": epoch, "metrics": metrics}, durable=True).result(10)
    assert number_of(store, tmp_path, f"{run}:best") == 3, "the highest accuracy"


def test_an_error_is_better_when_it_is_lower(store: Store, tmp_path: Path) -> None:
    run = made(store, tmp_path, {1: 0.5, 2: 0.2}).run_id
    for epoch, rmse in enumerate((0.1, 0.4)):
        store.write(run, "epochs", {"epoch": epoch, "metrics": {"rmse": rmse}}, durable=True).result(10)
    assert number_of(store, tmp_path, f"{run}:best") == 1


def test_a_damaged_newest_one_is_passed_over_by_name(store: Store, tmp_path: Path) -> None:
    where = made(store, tmp_path, {1: None, 2: None})
    (where.bundle(2) / MODEL).write_bytes(b"")
    _, origin = resuming.find(store.queries, tmp_path, f"{where.run_id}:last")
    assert origin.directory.name == "1"
    assert "Checkpoint 2 was passed over" in origin.resume.notes[0]
    with pytest.raises(CommandRefused, match="is not the file") as refused:
        resuming.find(store.queries, tmp_path, f"{where.run_id}:2")
    assert refused.value.code == "checkpoint_damaged"


@pytest.mark.parametrize("text", ["", "first", "3:", ":3", "3:worst", "-1", "../../etc", "3:1:1", "1e3", " "])
def test_what_names_no_checkpoint_is_refused(text: str) -> None:
    with pytest.raises(CommandRefused, match="names no checkpoint"):
        resuming.parse(text)


def test_the_configuration_is_inherited_but_for_what_changes(store: Store, tmp_path: Path) -> None:
    where = made(store, tmp_path, {1: None})
    row = store.queries.get_run(where.run_id)
    assert row is not None
    config = resuming.config_of(row, {"batch_size": 7})
    assert (config.batch_size, config.fixed_counts, config.epochs) == (7, (1, 2), 9)
    assert config == replace(RunConfig(job=JOB, epochs=9, fixed_counts=(1, 2)), batch_size=7)


def test_a_bundle_that_was_never_announced_is_found_after_the_crash(store: Store, tmp_path: Path) -> None:
    where = made(store, tmp_path, {1: None})
    save(where, 2, [5.0])
    (row,) = resuming.lost_rows(store.queries, where)
    assert (row["checkpoint"], row["global_step"]) == (2, 21)
    body = (tmp_path / row["path"]).read_bytes()
    assert hashlib.sha256(body).hexdigest() == row["sha256"]


# ---------------------------------------------------------------------------------------------- kills and full disks

WRITER = """
import json, sys
from datetime import UTC, datetime
from pathlib import Path
import numpy as np
from backend.core.vocabulary import WriteCheckpoint
from backend.runtime.bundle import CheckpointPlace
from backend.runtime.checkpoint import CheckpointWriter, Committed
data, number, manifest = Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
state = (data / "state").read_bytes()
writer = CheckpointWriter(CheckpointPlace(data, 3), lambda: datetime.now(UTC))
print("ready", flush=True)
while True:
    writer.open(number, Committed(np.full(20_000, number, np.float32)))
    for start in range(0, len(state), 100_000):
        writer.keep(number, 0, state[start : start + 100_000])
    assert not writer.write(WriteCheckpoint(number, "test", (0,), manifest, 3)).error
    number += 1
"""


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("kills", [5, pytest.param(20, marks=THOROUGH)])
def test_so_many_kills_while_it_saves_and_as_many_that_load(tmp_path: Path, kills: int) -> None:
    """kill -9 at seeded random moments: the newest complete one loads each time, whole and of one step."""
    dice, place, torn, last = random.Random(7), CheckpointPlace(tmp_path, 3), 0, 0
    (tmp_path / "state").write_bytes(safetensors.torch.save({"rng.torch": torch.zeros(100_000)}))
    said = json.dumps(manifest(spec(shape=[20_000])))
    save(place, 1, [1.0] * 20_000)
    for kill in range(kills):
        command = [sys.executable, "-c", WRITER, str(tmp_path), str(place.complete()[-1] + 1), said]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as child:
            assert child.stdout is not None
            try:
                assert child.stdout.readline() == b"ready\n"
                child.wait(dice.uniform(0.0, 0.3))
            except subprocess.TimeoutExpired:
                pass
            finally:
                child.send_signal(signal.SIGKILL)
        assert child.returncode == -signal.SIGKILL
        torn += bool(list(place.root.glob(".*")))
        place.sweep()
        newest = place.complete()[-1]
        assert newest >= last, "a complete one is never lost before its successor is complete"
        last = newest
        consensus = loaded(place, newest).consensus
        assert set(consensus.tolist()) == {float(newest)}, f"kill {kill}"
        assert list(place.root.glob(".*")) == []
    assert last > 1
    assert torn > 0, "no kill met a save: the test proves nothing"


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk") as mounted:
        yield mounted


def test_a_full_disk_leaves_the_older_one_and_lets_the_next_one_succeed(disk: Path) -> None:
    place = CheckpointPlace(disk, 1)
    save(place, 1, [1.0] * 50_000)
    writer = CheckpointWriter(place, noon)
    writer.open(2, Committed(np.zeros(300_000, np.float32)))
    writer.keep(2, 0, safetensors.torch.save({"rng.torch": torch.zeros(100_000)}))
    written = writer.write(WriteCheckpoint(2, "test", (0,), manifest(spec(shape=[300_000])), keep=1))
    assert "No space left" in written.error
    assert place.complete() == [1]
    assert list(place.root.glob(".*")) == []
    assert loaded(place, 1).consensus[0] == 1.0
    save(place, 3, [3.0] * 50_000, keep=1)
    assert place.complete() == [3]


def test_room_is_looked_for_before_anything_is_begun(disk: Path, tmp_path: Path) -> None:
    with pytest.raises(OSError, match="MiB are free, a checkpoint needs 16 MiB"):
        check_room(disk / "runs")
    check_room(tmp_path / "runs")
    with pytest.raises(OSError, match="a checkpoint needs"):
        check_room(tmp_path / "runs", 1 << 60)


def test_a_read_only_disk_is_refused_and_a_running_save_survives_it(disk: Path) -> None:
    place = CheckpointPlace(disk, 1)
    save(place, 1, [1.0])
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    try:
        with pytest.raises(OSError, match="Read-only"):
            check_room(disk / "runs")
        written = write(place, effect(spec(), b"", number=2), np.zeros(2, np.float32))
        assert "Read-only file system" in written.error
        assert loaded(place, 1).consensus.tolist() == [1.0]
    finally:
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
