"""Why a child ended: told from evidence, and never "success" without it (case F05)."""

from pathlib import Path

import msgspec
import pytest
from rank_rig import plan

from wire.messages import RankAssignment, RankFailed, WorldFormed
from worker.child import Exit, Tail
from worker.devices import find_devices
from worker.environment import child_environment, probe_environment, rank_environment
from worker.exit_cause import Kernel, rank_exit_cause, read_report, relay_exit_cause
from worker.progress import Reading

EXITED, WORKING = Reading("exited", 9, 0.1), Reading("working", 9, 0.1)


@pytest.mark.parametrize(
    ("code", "reading", "stopping", "kills", "clean", "signal_name", "says"),
    [
        pytest.param(0, EXITED, False, 0, True, "", "", id="told to leave and left"),
        pytest.param(0, WORKING, False, 0, False, "", "exited with code 0 before the run was over", id="os._exit(0)"),
        pytest.param(0, None, False, 0, False, "", "exited with code 0 before", id="gone before it began"),
        pytest.param(3, WORKING, False, 0, False, "", "exited with code 3", id="code 3"),
        pytest.param(-9, WORKING, False, 0, False, "SIGKILL", "ended by SIGKILL", id="killed, nobody says by whom"),
        pytest.param(-9, WORKING, False, 2, False, "SIGKILL", "memory limit of 0.50 GiB", id="killed for memory"),
        pytest.param(-11, WORKING, False, 2, False, "SIGSEGV", "ended by SIGSEGV", id="a crash beside a memory kill"),
        pytest.param(-15, WORKING, True, 0, True, "SIGTERM", "", id="stopped by its agent"),
        pytest.param(-15, WORKING, False, 0, False, "SIGTERM", "ended by SIGTERM", id="stopped by somebody else"),
        pytest.param(-9, WORKING, True, 0, False, "SIGKILL", "ended by SIGKILL", id="would not stop"),
        pytest.param(-63, WORKING, False, 0, False, "signal 63", "ended by signal 63", id="a signal without a name"),
    ],
)
def test_a_rank_ends_for_the_reason_that_the_evidence_gives(
    code: int, reading: Reading | None, stopping: bool, kills: int, clean: bool, signal_name: str, says: str
) -> None:
    kernel = Kernel(kills, 1 << 29)
    cause = rank_exit_cause(Exit(code, 123), reading, None, "the end\n", stopping=stopping, kernel=kernel)
    assert (cause.code, cause.clean, cause.signal, cause.peak_rss_bytes) == (code, clean, signal_name, 123)
    assert says in cause.message
    assert bool(cause.message) is not clean
    blamed = "memory limit" in says
    assert (cause.memory_kills, cause.memory_limit_bytes) == ((kills, 1 << 29) if blamed else (0, 0))
    assert cause.last_lines == "the end\n"
    assert cause.last_step == (reading.steps if reading else 0)


def test_a_ranks_own_words_go_before_what_others_guess() -> None:
    report = RankFailed(exception="ValueError", message="why", last_lines="Traceback", last_step=11)
    cause = rank_exit_cause(Exit(1, 0), WORKING, report, "noise", stopping=False, kernel=Kernel())
    assert (cause.exception, cause.message, cause.last_lines, cause.last_step) == ("ValueError", "why", "Traceback", 11)


@pytest.mark.parametrize(
    ("code", "stopping", "clean", "says"),
    [
        (0, False, True, ""),
        (1, False, False, "code 1"),
        (-15, True, True, ""),
        (-9, False, False, "SIGKILL"),
        (-1, False, False, "ended by SIGHUP"),
    ],
)
def test_a_relay_may_find_its_own_way_out(code: int, stopping: bool, clean: bool, says: str) -> None:
    cause = relay_exit_cause(Exit(code, 0), "", stopping=stopping)
    assert cause.clean is clean
    assert says in cause.message


def test_a_report_that_is_missing_or_torn_is_none(tmp_path: Path) -> None:
    path = tmp_path / "rank0.report.json"
    assert read_report(path) is None
    path.write_bytes(b'{"kind": "RankFa')
    assert read_report(path) is None
    report = RankFailed(exception="E", message="grün", last_lines="", last_step=1)
    path.write_bytes(msgspec.json.encode(report))
    assert read_report(path) == report


def test_the_tail_is_bounded_and_begins_with_a_whole_line() -> None:
    tail = Tail()
    for number in range(5000):
        tail.add(f"line {number}\n".encode())
    text = tail.text()
    assert len(text) <= 4096
    assert text.startswith("line ")
    assert text.endswith("line 4999\n")
    tail.add(b"\xff\xfe")
    assert tail.text().endswith("�")


def formed(local: int, device: str) -> WorldFormed:
    assignments = [RankAssignment(rank=4 + n, local_rank=n, device=device) for n in range(local)]
    return WorldFormed(plan=plan("x.py:X", total_samples=1), world_size=8, generation=2, assignments=assignments)


def environment(base: dict[str, str], local: int = 2, url: str = "ws://hub:8470/p") -> dict[str, str]:
    world = formed(local, "cpu:0")
    (device,) = find_devices("cpu")
    return rank_environment(base, world, world.assignments[1], device, host_id=5, url=url, cores=6)


def test_ranks_get_torchruns_variables_and_no_secret() -> None:
    given = environment({"MARCHLINE_JOIN_TOKEN": "secret", "PATH": "/bin", "RANK": "77"})
    assert "MARCHLINE_JOIN_TOKEN" not in given
    assert given["PATH"] == "/bin"
    assert {name: given[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK")} == {
        "RANK": "5",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "8",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "5",
    }
    assert (given["MASTER_ADDR"], given["MASTER_PORT"]) == ("hub", "8470")
    assert (given["TORCHELASTIC_RUN_ID"], given["TORCHELASTIC_RESTART_COUNT"]) == ("1", "2")
    assert (given["MARCHLINE_RUN_ID"], given["MARCHLINE_GENERATION"], given["MARCHLINE_HOST_ID"]) == ("1", "2", "5")
    assert given["CUDA_VISIBLE_DEVICES"] == ""
    assert environment({}, url="wss://hub")["MASTER_PORT"] == "443"


@pytest.mark.parametrize(("base", "local", "threads"), [({}, 2, "3"), ({}, 8, "1"), ({"OMP_NUM_THREADS": "5"}, 2, "5")])
def test_cpu_ranks_share_the_cores(base: dict[str, str], local: int, threads: str) -> None:
    assert environment(base, local)["OMP_NUM_THREADS"] == threads


def test_relay_and_probe_get_no_secret_either() -> None:
    base = {"MARCHLINE_JOIN_TOKEN": "secret", "CUDA_VISIBLE_DEVICES": "0"}
    assert "MARCHLINE_JOIN_TOKEN" not in child_environment(base)
    assert probe_environment(base)["CUDA_VISIBLE_DEVICES"] == ""
