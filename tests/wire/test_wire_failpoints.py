"""Failpoints: what can be asked for, when it happens, and the proof that it did."""

from __future__ import annotations

import ast
import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from wire import failpoints
from wire.failpoints import Cut, FailpointsRefused, Injected, Point, injections, parse

ROOT = Path(__file__).parent.parent.parent
KEYS = {"rank", "host", "name", "run", "round", "attempt", "offset", "checkpoint"}


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    failpoints._identity.clear()  # ranks of tests before this one said who they were
    yield
    failpoints.arm({})
    failpoints._identity.clear()


def armed(text: str, journal: Path | None = None) -> failpoints.Failpoints:
    environment = {failpoints.POINTS_VARIABLE: text}
    if journal is not None:
        environment[failpoints.LOG_VARIABLE] = str(journal)
    found = failpoints.arm(environment)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("text", "point"),
    [
        ("rank.pack=kill", Point("rank.pack", "kill", 70)),
        ("rank.pack@3=stop", Point("rank.pack", "stop", 70, 3)),
        ("relay.chunk.up?host=2=close", Point("relay.chunk.up", "close", 70, 0, {"host": "2"})),
        (
            "relay.chunk.up@2?host=2&offset=262144=delay:250",
            Point("relay.chunk.up", "delay", 250, 2, {"host": "2", "offset": "262144"}),
        ),
        ("agent.beat=exit", Point("agent.beat", "exit", 70)),
        ("agent.beat=exit:3", Point("agent.beat", "exit", 3)),
    ],
)
def test_the_syntax(text: str, point: Point) -> None:
    assert parse(text) == [point]
    assert parse(f" {text} ; {text};") == [point, point]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rank.pack", "says no action"),
        ("rank.pakc=kill", "there is no site 'rank.pakc'; there are agent.beat"),
        ("rank.pack=explode", "there is no action 'explode'; there are kill, exit"),
        ("rank.pack@0=kill", "from 1, not '0'"),
        ("rank.pack@=kill", "from 1, not ''"),
        ("rank.pack=delay", "like delay:250"),
        ("rank.pack=delay:soon", "no whole number"),
        ("rank.pack=kill:9", "kill takes no argument"),
        ("rank.pack?rank=kill", "'rank' is no condition"),
    ],
)
def test_what_does_not_exist_is_refused(text: str, words: str) -> None:
    with pytest.raises(FailpointsRefused, match=words.replace("?", r"\?")):
        armed(text)


def test_nothing_happens_unless_armed() -> None:
    assert failpoints.arm({}) is None
    failpoints.hit("rank.pack", rank=0)
    failpoints.hit("no such site: nobody looks")


def test_only_the_chosen_hit_injects_and_is_counted(tmp_path: Path) -> None:
    journal = tmp_path / "hits"
    points = armed("relay.chunk.up@2?host=1=error", journal)
    failpoints.hit("relay.chunk.up", host=1, offset=0)
    failpoints.hit("relay.chunk.up", host=2, offset=0)
    failpoints.hit("relay.chunk.staged", host=1, offset=0)
    assert injections(journal) == []
    with pytest.raises(Injected, match=r"relay\.chunk\.up"):
        failpoints.hit("relay.chunk.up", host=1, offset=8)
    failpoints.hit("relay.chunk.up", host=1, offset=16)
    assert [(point.hits, point.injected) for point in points.points] == [(3, 1)]
    assert injections(journal) == [
        {
            "site": "relay.chunk.up",
            "action": "error",
            "hit": 2,
            "pid": os.getpid(),
            "where": {"host": 1, "offset": 8},
        }
    ]


def test_without_a_number_every_hit_injects() -> None:
    (point,) = armed("rank.pack=close").points
    for _ in range(3):
        with pytest.raises(Cut):
            failpoints.hit("rank.pack", rank=0)
    assert point.injected == 3


def test_who_a_process_is_goes_with_every_hit(tmp_path: Path) -> None:
    armed("rank.adopt.block?rank=2&round=4=error", tmp_path / "hits")
    failpoints.identify(rank=2, round=3)
    failpoints.hit("rank.adopt.block", offset=0)
    failpoints.identify(round=4)
    with pytest.raises(Injected):
        failpoints.hit("rank.adopt.block", offset=7)
    assert [line["where"] for line in injections(tmp_path / "hits")] == [{"rank": 2, "round": 4, "offset": 7}]


def test_a_site_that_is_not_listed_is_a_bug_once_armed() -> None:
    armed("rank.pack=error")
    with pytest.raises(FailpointsRefused, match="not listed"):
        failpoints.hit("rank.pakc")


@pytest.mark.parametrize(
    ("action", "status"), [("kill", -signal.SIGKILL), ("exit", 70), ("exit:3", 3), ("delay:1", 0), ("error", 1)]
)
def test_what_a_process_ends_with(tmp_path: Path, action: str, status: int) -> None:
    journal = tmp_path / "hits"
    code = "import os; from wire import failpoints as f; f.arm_or_exit(os.environ); f.hit('rank.pack', rank=0)"
    environment = os.environ | {
        failpoints.POINTS_VARIABLE: f"rank.pack={action}",
        failpoints.LOG_VARIABLE: str(journal),
    }
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=environment, stderr=subprocess.DEVNULL)
    assert process.wait(30) == status
    (line,) = injections(journal)
    assert (line["pid"], line["hit"]) == (process.pid, 1)


def test_a_process_that_is_stopped_goes_on_when_it_is_told_to(tmp_path: Path) -> None:
    code = "import os; from wire import failpoints; failpoints.arm(os.environ); failpoints.hit('rank.pack')"
    environment = os.environ | {failpoints.POINTS_VARIABLE: "rank.pack=stop"}
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=environment, stderr=subprocess.DEVNULL)
    _, status = os.waitpid(process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    process.send_signal(signal.SIGCONT)
    assert process.wait(30) == 0


def test_a_full_disk_is_that_of_the_system() -> None:
    armed("checkpoint.sync@2=full")
    failpoints.hit("checkpoint.sync", name="model.safetensors")
    with pytest.raises(OSError, match="No space left on device") as found:
        failpoints.hit("checkpoint.sync", name="model.safetensors")
    assert found.value.errno == errno.ENOSPC


@pytest.mark.parametrize("module", ["backend", "worker", "worker.relay", "worker.rank"])
def test_every_process_refuses_what_does_not_exist(module: str) -> None:
    arguments = {"backend": ["serve", "--port", "0"], "worker": ["--join", "http://127.0.0.1:1"]}.get(module, [])
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        env=os.environ | {failpoints.POINTS_VARIABLE: "rank.pakc=kill"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert "MARCHLINE_FAILPOINTS: there is no site 'rank.pakc'" in done.stderr


def test_every_site_is_placed_and_every_placed_site_is_listed() -> None:
    placed: dict[str, list[str]] = {}
    for package in ("wire", "backend", "worker"):
        for path in sorted((ROOT / package).rglob("*.py")):
            for call in ast.walk(ast.parse(path.read_text())):
                if isinstance(call, ast.Call) and ast.unparse(call.func) in ("failpoints.hit", "hit"):
                    (site,) = call.args
                    assert isinstance(site, ast.Constant), f"{path}: a site is named in full"
                    named = {keyword.arg for keyword in call.keywords} - {None}
                    assert named <= KEYS, f"{path}: {ast.unparse(call)}"
                    placed.setdefault(site.value, []).append(path.name)
    assert placed.keys() == failpoints.SITES.keys()
