"""The agent as a real process: it joins, says why not, supervises, and leaves nothing behind (cases F01, F05)."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_rig import PATIENCE, AgentProcess, agent, gone, job_variant, processes, shared_directory
from rank_rig import chunk_of, plan
from tiny_controller import RUN, Guest, TinyController, tiny_controller

from wire.messages import (
    WIRE_VERSION,
    BatchDone,
    ChunkDone,
    ControllerHeartbeat,
    DeclareDead,
    Hello,
    HostHeartbeat,
    JobOffer,
    Leaving,
    ProbeReport,
    RankExited,
    RankFailed,
    RankReady,
    Reject,
    RelayExited,
    RunEnded,
    Shutdown,
)

pytestmark = pytest.mark.slow

ODO = "odometer.py:Odometer"
SAMPLES = {"samples": 64}


async def training(
    controller: TinyController,
    job: str = ODO,
    params: dict | None = None,
    *,
    ranks: int = 1,
    silence: float = 30.0,
    beat: float = 0.2,
    patience: float = 0.0,
) -> tuple[Guest, Guest]:
    """Take a host to the point where its ranks are ready: its join link and its relay's."""
    host = await controller.guest()
    params = {**SAMPLES, **(params or {})}
    await controller.admit(host, job, params, ranks=ranks, silence=silence, beat=beat)
    relay = await controller.form(host, plan(job, total_samples=64, params=params), ranks, patience=patience)
    for _ in range(ranks):
        await relay.expect(RankReady)
    return host, relay


async def test_a_host_joins_trains_and_goes_home() -> None:
    async with tiny_controller() as controller, agent(controller.url, "--emulate-ms-per-batch", "30") as running:
        host = await controller.guest()
        hello = await host.expect(Hello)
        assert (hello.host, [device.id for device in hello.devices]) == ("test-host", ["cpu:0"])
        assert (hello.emulate_ms_per_batch, hello.run, hello.versions.wire) == (30.0, None, WIRE_VERSION)
        host.inbox.put_nowait((0, hello))
        await controller.admit(host, ODO, SAMPLES)
        assert await host.expect(HostHeartbeat) == HostHeartbeat(ranks=[])

        relay = await controller.form(host, plan(ODO, total_samples=64, params=SAMPLES))
        ready = await relay.expect(RankReady, rank=0)
        assert ready.params_elements == 1
        directory = shared_directory(running.child("worker.rank"))
        assert directory.stat().st_mode & 0o777 == 0o700
        await relay.send(chunk_of(2), rank=0)
        batches = [await relay.expect(BatchDone) for _ in range(2)]
        assert all(30.0 <= batch.batch_ms < 3000 for batch in batches)
        progress = (await host.expect(HostHeartbeat)).ranks
        assert [(rank.rank, rank.rss_bytes > 0) for rank in progress] == [(0, True)]

        await relay.send(Shutdown(reason="trained"), rank=0)
        exited = await host.expect(RankExited)
        assert (exited.rank, exited.cause.code, exited.cause.clean, exited.cause.last_step) == (0, 0, True, 2)
        assert exited.cause.peak_rss_bytes > 10_000_000
        await host.send(RunEnded(phase="done", reason="all epochs trained"))
        code, output = await running.ended()
    assert code == 0, output
    assert "the run is done: all epochs trained" in output
    assert not directory.exists()


async def test_the_probe_names_what_is_wrong_with_a_job() -> None:
    async with tiny_controller() as controller, agent(controller.url) as running:
        host = await controller.guest()
        await host.expect(Hello)
        offers = {
            "none.py:Nothing": "no job file none.py",
            "broken.py:MissingData": "/nowhere/samples.bin",
            "faulty.py:Printing": "no class Printing",
        }
        for job, says in offers.items():
            await host.send(JobOffer(run_id=RUN, job=job, params={}, job_hash=""))
            assert says in (await host.expect(ProbeReport)).error
        await host.send(Reject(code="job_broken", reason="it does not load on test-host"))
        code, output = await running.ended()
    assert code == 3
    assert "refused (job_broken): it does not load on test-host" in output


async def test_a_host_says_how_late_the_controllers_word_came() -> None:
    async with tiny_controller(beats=False) as controller, agent(controller.url) as running:
        host = await controller.guest()
        await controller.admit(host, ODO, SAMPLES)
        await host.send(ControllerHeartbeat())
        for _ in range(4):  # 0.2 s each
            assert (await host.expect(HostHeartbeat)).late == 0
        await host.send(ControllerHeartbeat())
        while (beat := await host.expect(HostHeartbeat)).late == 0:
            pass
        assert (beat.late, beat.worst_late_seconds >= 0.3) == (1, True)
        await running.said("the controller was silent for")


async def test_a_job_that_prints_or_dies_does_not_garble_its_report(tmp_path: Path) -> None:
    job_variant(tmp_path, "noisy", "import os\nos.write(1, b'{noise}\\n')\nprint('more noise')\n")
    (tmp_path / "dying.py").write_text("import os, sys\nprint('last words', file=sys.stderr)\nos._exit(0)\n")
    async with tiny_controller() as controller, agent(controller.url, "--job-dir", str(tmp_path)) as running:
        host = await controller.guest()
        await host.expect(Hello)
        await host.send(JobOffer(run_id=RUN, job="noisy.py:Odometer", params={"samples": 9}, job_hash=""))
        report = await host.expect(ProbeReport)
        assert (report.error, report.dataset_size, [spec.name for spec in report.layout]) == ("", 9, ["w"])
        await host.send(JobOffer(run_id=RUN, job="dying.py:Any", params={}, job_hash=""))
        error = (await host.expect(ProbeReport)).error
        assert "ended the process that looked at it (exit code 0): last words" in error
        await host.send(RunEnded(phase="failed", reason="enough"))
        code, output = await running.ended()
    assert code == 1
    assert "[probe] more noise" in output


@pytest.mark.parametrize(
    ("answer", "code", "says"),
    [
        (Reject(code="turned_away", reason="not today", permanent=True), 3, "refused (turned_away): not today"),
        (Reject(code="no_open_window", reason="no run is open"), 3, "no run is open"),
        (RunEnded(phase="failed", reason="quorum not met"), 1, "the run is failed: quorum not met"),
    ],
)
async def test_a_refusal_is_the_exit_code_and_the_last_line(answer: object, code: int, says: str) -> None:
    async with tiny_controller() as controller, agent(controller.url) as running:
        host = await controller.guest()
        await host.send(answer)  # type: ignore[arg-type]
        assert (await running.ended())[0] == code
        assert says in (await running.ended())[1]


async def test_a_wrong_token_ends_at_once() -> None:
    async with tiny_controller() as controller, agent(controller.url, token="wrong") as running:
        code, output = await running.ended()
    assert code == 4
    assert "another join token" in output
    assert "trying again" not in output


async def test_the_token_does_not_reach_the_users_code(tmp_path: Path) -> None:
    show = (
        "print('tokens', [name for name in os.environ if 'TOKEN' in name], os.environ['CUDA_VISIBLE_DEVICES'] == '')\n"
    )
    job_variant(tmp_path, "curious", f"import os\n{show}")
    async with tiny_controller() as controller, agent(controller.url, "--job-dir", str(tmp_path)) as running:
        host = await controller.guest()
        await controller.admit(host, "curious.py:Odometer", SAMPLES)
        await host.send(RunEnded(phase="done", reason="seen"))
        _, output = await running.ended()
    assert "[probe] tokens [] " in output


async def test_a_controller_that_is_not_there_is_given_up() -> None:
    server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()
    async with agent(f"http://127.0.0.1:{port}", MARCHLINE_TIME_SCALE="0.1") as running:
        code, output = await running.ended()
    assert code == 5
    assert "cannot be reached" in output


async def test_the_agent_dials_again_while_nobody_listens_yet() -> None:
    """An agent may be started before its controller."""
    async with tiny_controller() as first:
        port = int(first.url.rpartition(":")[2])
    async with agent(f"http://127.0.0.1:{port}", MARCHLINE_TIME_SCALE="5") as running:
        await running.said("cannot be reached")
        async with tiny_controller(port=port) as late:
            await (await late.guest()).expect(Hello)


DEATHS = {
    "raise": ("", 1, "ValueError", "grün ist kaputt ☃"),
    "memory": ("", 1, "OutOfMemoryError", "use a smaller batch_size, or leave this device out with --devices"),
    "exit0": ("", 1, "SystemExit", "sys.exit(0) before the run was over"),
    "exit3": ("", 3, "SystemExit", "sys.exit(3)"),
    "hard_exit": ("", 1, "", "exited with code 1"),
    "kill": ("SIGKILL", -9, "", "ended by SIGKILL"),
    "segfault": ("SIGSEGV", -11, "", "ended by SIGSEGV"),
}


async def test_every_rank_that_dies_is_told_with_its_true_cause() -> None:
    params = {"kind": " ".join(DEATHS), "rank": -1, "at": 2}
    async with tiny_controller() as controller, agent(controller.url, "--devices", f"cpu:{len(DEATHS)}") as running:
        host, relay = await training(controller, "faulty.py:Faulty", params, ranks=len(DEATHS))
        for rank, (kind, (signal_name, code, exception, says)) in enumerate(DEATHS.items()):
            await relay.send(chunk_of(8), rank=rank)
            if exception:
                failed = await relay.expect(RankFailed, rank=rank)
                assert (failed.exception, says in failed.message, failed.last_step) == (exception, True, 2)
            exited = await host.expect(RankExited)
            cause = exited.cause
            assert exited.rank == rank
            assert (cause.signal, cause.code, cause.exception, cause.clean) == (signal_name, code, exception, False)
            assert says in cause.message
            assert cause.last_step == 2
            assert cause.peak_rss_bytes > 10_000_000
            if kind in ("raise", "segfault"):  # for the latter by faulthandler
                assert "faulty.py" in cause.last_lines
        await host.send(RunEnded(phase="failed", reason="the ranks died"))
        code, output = await running.ended()
    assert code == 1
    assert "[rank 6] Fatal Python error: Segmentation fault" in output


NVML = """
from types import SimpleNamespace

class NVMLError(Exception): ...

nvmlInit = nvmlShutdown = lambda: None
nvmlDeviceGetCount = lambda: 1
nvmlDeviceGetHandleByIndex = nvmlDeviceGetHandleByUUID = lambda handle: handle
nvmlDeviceGetName = lambda handle: "H200"
nvmlDeviceGetUUID = lambda handle: "GPU-0"
nvmlDeviceGetMemoryInfo = lambda handle: SimpleNamespace(total=141 << 30, used=41 << 30)
nvmlDeviceGetUtilizationRates = lambda handle: SimpleNamespace(gpu=87)
"""


async def test_an_agent_tells_how_busy_its_gpus_are_whatever_its_ranks_do(tmp_path: Path) -> None:
    """NVIDIA's library is a stand-in here, so the rank finds no GPU and dies; a real one is in tests/gpu."""
    (tmp_path / "pynvml.py").write_text(NVML)
    gpus = {"PYTHONPATH": str(tmp_path)}
    async with tiny_controller() as controller, agent(controller.url, "--devices", "all", **gpus) as running:
        host = await controller.guest()
        await controller.admit(host, ODO, SAMPLES, beat=0.1)
        await controller.form(host, plan(ODO, total_samples=64, params=SAMPLES), device="cuda")
        while not (ranks := (await host.expect(HostHeartbeat)).ranks) or ranks[0].device_bytes is None:
            pass
        assert (ranks[0].device_utilisation, ranks[0].device_bytes) == (87, 41 << 30)
        assert ranks[0].device_peak_bytes is None, "the rank told nothing yet"
        os.kill(running.pid, signal.SIGTERM)
        await running.ended()


@pytest.fixture
def bystander() -> Iterator[None]:
    """A process of somebody else's in the agent's own process group; it must outlive whatever the test does (F26)."""
    with subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"]) as process:
        assert os.getpgid(process.pid) == os.getpgid(0), "in one group with this process, and so with its agents"
        yield
        assert process.poll() is None, f"it was ended by {process.returncode}"
        process.kill()


@pytest.mark.usefixtures("bystander")
async def test_a_rank_that_is_killed_from_outside_takes_its_helpers_along(tmp_path: Path) -> None:
    helper = "    subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()'])\n"
    job_variant(tmp_path, "helped", f"import os, subprocess, sys\nif 'RANK' in os.environ:\n{helper}")
    async with tiny_controller() as controller, agent(controller.url, "--job-dir", str(tmp_path)) as running:
        host, _ = await training(controller, "helped.py:Odometer")
        rank = running.child("worker.rank")
        helpers = [pid for pid, (parent, _) in processes().items() if parent == rank]
        assert len(helpers) == 1
        os.kill(rank, signal.SIGKILL)
        cause = (await host.expect(RankExited)).cause
        assert (cause.signal, cause.clean) == ("SIGKILL", False)
        await gone([rank, *helpers])
        assert running.children(), "the relay lives on: other ranks of the host would train on"
        await host.send(RunEnded(phase="done", reason="survivors finished"))
        code, output = await running.ended()
    assert code == 1
    assert "but rank 0 failed here" in output


async def test_a_batch_that_holds_the_interpreter_shows_as_working() -> None:
    """The agent answers for a rank that cannot; the rank is stopped all the same."""
    async with tiny_controller() as controller, agent(controller.url) as running:
        host, relay = await training(controller, "faulty.py:Faulty", {"kind": "hold", "rank": 0, "at": 1})
        await relay.send(chunk_of(8), rank=0)
        progress = None
        while progress is None or progress.state != "working" or progress.state_seconds < 1.0:
            progress = next(iter((await host.expect(HostHeartbeat)).ranks), None)
        assert progress.steps == 1
        children = running.children()
        await host.send(RunEnded(phase="failed", reason="stalled"))
        assert (await running.ended())[0] == 1
        await gone(children)


async def test_what_is_left_of_a_rank_that_was_declared_dead_ends() -> None:
    """Its batch holds the interpreter, so it can hear nothing: the agent ends it, and its device is free again."""
    async with tiny_controller() as controller, agent(controller.url, "--devices", "cpu:2") as running:
        params = {"kind": "hold", "rank": 1, "at": 0}
        host, relay = await training(controller, "faulty.py:Faulty", params, ranks=2)
        await relay.send(chunk_of(8), rank=1)
        progress = None
        while progress is None or progress.state != "working":
            progress = next((rank for rank in (await host.expect(HostHeartbeat)).ranks if rank.rank == 1), None)
        notice = DeclareDead(rank=1, reason="TrainStall")
        await relay.send(notice)
        await host.send(notice)
        exited = await host.expect(RankExited)
        assert (exited.rank, exited.cause.clean, exited.cause.signal) == (1, False, "SIGTERM")
        await relay.send(chunk_of(2), rank=0)
        await relay.expect(ChunkDone, rank=0)
        await host.send(RunEnded(phase="done", reason="the other one finished"))
        assert (await running.ended())[0] == 1


async def test_a_host_that_lost_its_controller_tells_the_next_one_of_every_end() -> None:
    """The first one may have died before it wrote the death down."""
    async with tiny_controller() as controller, agent(controller.url, "--devices", "cpu:2") as running:
        host, relay = await training(controller, ranks=2, patience=PATIENCE)
        os.kill(running.child("worker.rank"), signal.SIGKILL)
        gone_rank = (await host.expect(RankExited)).rank
        for _ in range(2):
            host.socket.transport.abort()
            host = await controller.guest()
            hello = await host.expect(Hello)
            assert (hello.returning, hello.run) == (3, RUN)
            await controller.accept(host, ranks=2)
            assert (await host.expect(RankExited)).rank == gone_rank
        await relay.send(chunk_of(2), rank=1 - gone_rank)
        await relay.expect(ChunkDone, rank=1 - gone_rank)
        host.socket.transport.abort()
        host = await controller.guest()
        await host.expect(Hello)
        await host.send(Reject(code="cannot_return", reason="it goes on without you"))
        code, output = await running.ended()
    assert code == 5
    assert "goes on without this host (cannot_return): it goes on without you" in output


async def test_an_exit_waits_for_no_heartbeat() -> None:
    """The next heartbeat of this host is an hour away; its rank's end is told all the same."""
    async with tiny_controller() as controller, agent(controller.url) as running:
        host, _ = await training(controller, beat=3600.0, silence=7200.0)
        os.kill(running.child("worker.rank"), signal.SIGKILL)
        exited = await host.expect(RankExited)
        assert (exited.rank, exited.cause.signal) == (0, "SIGKILL")
        assert exited.cause.seen_seconds_ago > 0.0
        print(f"told {exited.cause.seen_seconds_ago * 1000:.0f} ms after the end was seen")
        await host.send(RunEnded(phase="failed", reason="nobody is left"))
        assert (await running.ended())[0] == 1


async def test_a_terminal_that_stands_still_stops_no_heartbeat(tmp_path: Path) -> None:
    """Ctrl-S, or a pager: the operator's screen must not cost the cohort a host."""
    flood = "import os\nif 'RANK' in os.environ:\n    print(*['x' * 1000] * 3000, sep='\\n')\n"
    name = job_variant(tmp_path, "flooding", flood)
    arguments = ("--job-dir", str(tmp_path))
    async with tiny_controller() as controller, agent(controller.url, *arguments, heard=False) as running:
        host, relay = await training(controller, name)
        await relay.send(chunk_of(2), rank=0)
        steps = 0
        while steps < 2:
            steps = max((rank.steps for rank in (await host.expect(HostHeartbeat)).ranks), default=0)
        await host.send(RunEnded(phase="done", reason="seen"))
        assert (await running.ended())[0] == 0


async def ranks_running(controller: TinyController, running: AgentProcess) -> tuple[Guest, set[int]]:
    host, _ = await training(controller, ranks=2)
    children = set(running.children())
    assert len(children) == 3, "a relay and two ranks"
    return host, children


@pytest.mark.usefixtures("bystander")
async def test_killing_the_agent_leaves_no_process_and_the_next_agent_tidies_up() -> None:
    """Not even a rank whose user code holds the interpreter, so that no thread of it can notice."""
    async with tiny_controller() as controller:
        async with agent(controller.url, "--devices", "cpu:2") as running:
            _, relay = await training(controller, "faulty.py:Faulty", {"kind": "hold", "rank": 0, "at": 1}, ranks=2)
            await relay.send(chunk_of(8), rank=0)
            await relay.expect(BatchDone)
            children = running.children()
            directory = shared_directory(running.child("worker.rank"))
            os.kill(running.pid, signal.SIGKILL)
            await gone(children)
        async with agent(controller.url):
            host = await controller.guest()
            await host.expect(Hello)
            assert not directory.exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_ctrl_c_says_goodbye_and_stops_everything(number: signal.Signals) -> None:
    async with tiny_controller() as controller, agent(controller.url, "--devices", "cpu:2") as running:
        host, children = await ranks_running(controller, running)
        directory = shared_directory(running.child("worker.rank"))
        os.kill(running.pid, number)
        assert "the operator of test-host ended its agent" in (await host.expect(Leaving)).reason
        code, output = await running.ended()
        assert code == 0, output
        await gone(children)
    assert not directory.exists()


@pytest.mark.usefixtures("bystander")
async def test_a_second_ctrl_c_kills_at_once() -> None:
    async with tiny_controller() as controller, agent(controller.url, "--devices", "cpu:2") as running:
        host, children = await ranks_running(controller, running)
        directory = shared_directory(running.child("worker.rank"))
        for child in children:
            os.kill(child, signal.SIGSTOP)  # SIGTERM will not end them in time
        os.kill(running.pid, signal.SIGINT)
        await host.expect(Leaving)
        os.kill(running.pid, signal.SIGINT)
        assert (await running.ended())[0] == 1
        await gone(children)
    assert not directory.exists()


@pytest.mark.usefixtures("bystander")
async def test_a_child_that_ignores_sigterm_is_killed() -> None:
    async with tiny_controller() as controller, agent(controller.url, "--devices", "cpu:2") as running:
        host, children = await ranks_running(controller, running)
        os.kill(running.child("worker.rank"), signal.SIGSTOP)
        await host.send(RunEnded(phase="failed", reason="over"))
        assert (await running.ended())[0] == 1
        await gone(children)


async def test_a_controller_that_vanishes_ends_the_host() -> None:
    async with tiny_controller() as controller, agent(controller.url, "--devices", "cpu:2") as running:
        host, children = await ranks_running(controller, running)
        host.socket.transport.abort()
        code, output = await running.ended()
        assert code == 5
        assert "the controller was lost" in output
        await gone(children)


async def test_a_controller_that_falls_silent_ends_the_host() -> None:
    async with tiny_controller(beats=False) as controller, agent(controller.url) as running:
        host = await controller.guest()
        await controller.admit(host, ODO, SAMPLES, silence=1.0)
        code, output = await running.ended()
    assert code == 5
    assert "the controller was not heard" in output


@pytest.mark.usefixtures("bystander")
async def test_a_relay_that_dies_takes_its_ranks_along() -> None:
    async with tiny_controller() as controller, agent(controller.url, "--devices", "cpu:2") as running:
        host, _ = await ranks_running(controller, running)
        os.kill(running.child("worker.relay"), signal.SIGKILL)
        causes = {}
        for _ in range(3):
            async with asyncio.timeout(30):
                while not isinstance(message := (await host.inbox.get())[1], RankExited | RelayExited):
                    assert isinstance(message, HostHeartbeat)
            causes[getattr(message, "rank", "relay")] = message.cause
        assert causes["relay"].signal == "SIGKILL"
        assert {causes[rank].exception for rank in (0, 1)} == {"LinkLost"}
        await host.send(RunEnded(phase="failed", reason="the host is lost"))
        assert (await running.ended())[0] == 1


async def test_a_probe_is_dropped_when_the_run_ends_under_it(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import signal\nprint('importing', flush=True)\nsignal.pause()\n")
    async with tiny_controller() as controller, agent(controller.url, "--job-dir", str(tmp_path)) as running:
        host = await controller.guest()
        await host.expect(Hello)
        await host.send(JobOffer(run_id=RUN, job="slow.py:Any", params={}, job_hash=""))
        await running.said("importing")
        probe = running.child("worker job probe")
        await host.send(RunEnded(phase="failed", reason="window closed"))
        assert (await running.ended())[0] == 1
        await gone([probe])


async def test_a_host_that_persists_dials_again_after_the_run() -> None:
    async with tiny_controller() as controller, agent(controller.url, "--persist") as running:
        host = await controller.guest()
        await host.send(RunEnded(phase="done", reason="first run"))
        again = await controller.guest()
        await again.expect(Hello)
        await again.send(Reject(code="turned_away", reason="go home", permanent=True))
        assert (await running.ended())[0] == 3


async def test_ranks_find_what_torchrun_would_give_them(tmp_path: Path) -> None:
    names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK TORCHELASTIC_RUN_ID OMP_NUM_THREADS"
    show = f"    print('env', *[os.environ.get(name) for name in {names.split()}])\n"
    job_variant(tmp_path, "shown", f"import os\nif 'RANK' in os.environ:\n{show}")
    devices = ("--devices", "cpu:2", "--job-dir", str(tmp_path))
    async with tiny_controller() as controller, agent(controller.url, *devices, OMP_NUM_THREADS="3") as running:
        host, _ = await training(controller, "shown.py:Odometer", ranks=2)
        await host.send(RunEnded(phase="done", reason="seen"))
        _, output = await running.ended()
    assert "[rank 0] env 0 0 2 2 3 1 3" in output
    assert "[rank 1] env 1 1 2 2 3 1 3" in output
