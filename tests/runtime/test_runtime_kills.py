"""kill -9 of the controller in the middle of saves: each resume loads, and is a saved step to the bit (F14, F88)."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import test_runtime_cuts as cuts
from e2e.stage import Stage
from runtime_remote import remote
from runtime_scripted import moment
from runtime_site import ScriptedHost, Site, eventually
from safetensors.numpy import load_file
from test_runtime_cuts import Hauler, beat

from wire.failpoints import LOG_VARIABLE, POINTS_VARIABLE, injections
from wire.messages import RoundCommitted, UpdateComing

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]
THOROUGH = pytest.mark.skipif(
    not os.environ.get("MARCHLINE_TEST_THOROUGH"), reason="more kills of the same kind; MARCHLINE_TEST_THOROUGH=1"
)
SITES = ("save.manifest", "save.named", "save.kept", "save.model", "save.begun", "save.pruned")
"""failpoints in the order in which they are taken up; every other kill comes at any moment"""
COUNTS = [3, 1]
A_ROUND = 2.5
"""by how much a round of 3 and 1 batches moves every element"""
KEPT = 2
PATIENCE = 300


class Carrier(Hauler):
    """A host of one rank that remembers with what it began."""

    def __init__(self, where: Site, name: str) -> None:
        ScriptedHost.__init__(self, where, name)
        self.steps = self.since_round = 0
        self.held = []
        self.began: float | None = None

    async def _adopt(self, commit: RoundCommitted) -> None:
        await super()._adopt(commit)
        if commit.round < 0:
            self.began = float(self.base[0])

    async def _update_of(self, commit: RoundCommitted, base: np.ndarray) -> np.ndarray:
        coming, filled, new = await self.data.hear(UpdateComing), 0, base.copy()
        while filled < new.size:
            header, values = await self.data.next_chunk()
            cut = slice(header.offset, header.offset + header.elements)
            new[cut] = values if coming.absolute else base[cut] - values
            filled += header.elements
        return new


@asynccontextmanager
async def training(marchline: Stage, where: Site, run: int) -> AsyncIterator[list[Carrier]]:
    """Two scripted hosts that train for as long as the controller lives."""
    hosts = [Carrier(where, name) for name in ("left", "right")]
    for host in hosts:
        await host.admitted(size=1_000_000)
    tasks = [asyncio.create_task(beat(host)) for host in hosts]
    await asyncio.to_thread(marchline.post, f"runs/{run}/start")
    tasks += [asyncio.create_task(host.march()) for host in hosts]
    try:
        yield hosts
    finally:
        for task in tasks:
            task.cancel()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(outcome, AssertionError):
                raise outcome
        await asyncio.gather(*(host.leave() for host in hosts), return_exceptions=True)


def root_of(marchline: Stage, run: int) -> Path:
    return marchline.data_dir / "runs" / str(run) / "checkpoints"


def complete(marchline: Stage, run: int) -> set[int]:
    return {int(path.parent.name) for path in root_of(marchline, run).glob("[0-9]*/manifest.json")}


def saved_rounds(marchline: Stage, run: int) -> int:
    """How many rounds the newest checkpoint holds, once all that is listed is whole and exactly that."""
    assert marchline.view(run)["phase"] == "interrupted"
    root = root_of(marchline, run)
    assert not list(root.glob(".*")), "what was half-written is swept"
    listed = [row for row in marchline.items(run, "checkpoints") if not row["pruned"]]
    assert {row["checkpoint"] for row in listed} == complete(marchline, run)
    assert 1 <= len(listed) <= KEPT + 1
    rounds = {row["round"] for row in marchline.items(run, "rounds")}
    for row in listed:
        manifest = json.loads((root / str(row["checkpoint"]) / "manifest.json").read_text())
        assert (manifest["round"], manifest["states"]) == (row["round"], [0, 1])
        values = load_file(marchline.data_dir / row["path"])["w"]
        assert set(np.unique(values).tolist()) == {A_ROUND * (row["round"] + 1)}
        assert set(range(row["round"] + 1)) <= rounds, "a checkpoint's rounds are on record before it is"
    return int(listed[-1]["round"]) + 1


def plan(kills: int) -> list[tuple[str, float]]:
    """Failpoints, each at a seeded one of its hits, and plain moments after the first save by turns."""
    dice = random.Random(20)
    points = [f"{SITES[n // 2 % len(SITES)]}@{dice.randint(2, 6)}=kill" if n % 2 == 0 else "" for n in range(kills)]
    return [(point, dice.uniform(0.0, 0.4)) for point in points]


async def killed(marchline: Stage, run: int, point: str, seconds: float) -> None:
    """Wait for the failpoint, or kill so many seconds after the run's first save of its own."""
    if not point:
        before = complete(marchline, run)
        await eventually(lambda: complete(marchline, run) - before, "a save", PATIENCE)
        await moment(seconds)
        marchline.process.kill()
    assert await asyncio.to_thread(marchline.process.wait, PATIENCE) == -signal.SIGKILL


@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=THOROUGH)])
async def test_killed_while_it_saves_the_controller_resumes_from_a_saved_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kills: int
) -> None:
    monkeypatch.setattr(cuts, "ELEMENTS", 200_000)
    journal, run, torn, story = tmp_path / "injections", 0, 0, []
    config: dict[str, Any] = {
        "fixed_counts": COUNTS,
        "checkpoint_rounds": 1,
        "checkpoint_epochs": None,
        "reattach_seconds": 0.0,
    }
    for number, (point, seconds) in enumerate([*plan(kills), ("", -1.0)]):
        env = {POINTS_VARIABLE: point, LOG_VARIABLE: str(journal)} if point else None
        async with remote(tmp_path, env=env) as (marchline, where):
            if run:
                rounds = await asyncio.to_thread(saved_rounds, marchline, run)
                body = {"resume_from": f"{run}:last"}
                run = (await asyncio.to_thread(marchline.post, "runs", body, 201))["id"]
            else:
                rounds = 0
                run = await asyncio.to_thread(marchline.create, "odometer.py:Odometer", keep_checkpoints=KEPT, **config)
            async with training(marchline, where, run) as hosts:
                if seconds >= 0:
                    await killed(marchline, run, point, seconds)
                    torn += any(root_of(marchline, run).glob(".*"))
                else:
                    await eventually(lambda: hosts[0].held, "one more round", PATIENCE)
            assert {host.began for host in hosts} == {A_ROUND * rounds}, (
                f"life {number} did not begin where it was saved"
            )
            story.append(f"{point or 'any moment'}: from round {rounds}")
    print(*story, sep="\n")
    points = [point.partition("@")[0] for point, _ in plan(kills) if point]
    assert sorted(line["site"] for line in injections(journal)) == sorted(points)
    assert len(story) == kills + 1
    assert torn >= kills // 4, f"only {torn} kills met a save"
