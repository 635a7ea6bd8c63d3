"""A rank on a GPU: seen without CUDA, confined to its device, and exact there too."""

import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from agent_rig import agent
from rank_rig import Cohort, chunk_of, plan, start_rank
from tiny_controller import tiny_controller

from wire.messages import BatchDone, EvalResult, Evaluate, Hello, RankExited, RankReady, RunEnded, Shutdown
from worker.devices import find_devices

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]
EXAMPLES = Path(__file__).parents[2] / "examples"


def test_nvml_and_cuda_mean_the_same_devices() -> None:
    found = find_devices("all")
    assert len(found) == torch.cuda.device_count()
    assert found[0].device.name == torch.cuda.get_device_name(0)
    assert found[0].visible == f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    assert find_devices(found[0].visible) == find_devices("0") == found[:1]


@pytest.mark.parametrize(("counts", "moved"), [((3, 1), 2.5), ((6, 2, 1), 41 / 9)])
def test_a_window_on_the_gpu_is_as_exact_as_on_the_cpu(tmp_path: Path, counts: tuple[int, ...], moved: float) -> None:
    plans = plan("odometer.py:Odometer", total_samples=256, params={"samples": 256})
    cohort = Cohort([start_rank(tmp_path, plans, rank, device="cuda:0") for rank in range(len(counts))])
    cohort.reduce(-1, initial=True)
    cohort.window({rank: chunk_of(n, offset=32 * rank) for rank, n in enumerate(counts)}, 0, attempts=2)
    for rig in cohort.ranks:
        weight = rig.workload.trainer.model.w
        assert weight.is_cuda
        assert float(weight.detach()) == pytest.approx(moved, rel=1e-6)
    cohort.leave()


def test_an_example_trains_and_evaluates_beside_a_cpu_rank(tmp_path: Path) -> None:
    plans = plan("digits.py:Digits", total_samples=1437, batch_size=32)
    ranks = [start_rank(tmp_path, plans, rank, job_dir=EXAMPLES, device=("cuda:0", "cpu")[rank]) for rank in (0, 1)]
    cohort = Cohort(ranks)
    cohort.reduce(-1, initial=True)
    for number in range(4):
        chunks = {rank: chunk_of(5, offset=320 * number + 160 * rank, batch_size=32) for rank in (0, 1)}
        acks = cohort.window(chunks, number)
        assert len({ack.params_hash for ack in acks}) == 1
    scores = []
    for rig in ranks:
        rig.send(Evaluate(epoch=0))
        scores.append(rig.expect(EvalResult).metrics)
    assert scores[0]["accuracy"] == pytest.approx(scores[1]["accuracy"], abs=0.01)
    assert scores[0]["loss"] == pytest.approx(scores[1]["loss"], rel=1e-3)
    cohort.leave()


HEAVY = """
import torch
from worker import Job

class Heavy(Job):
    def build_model(self):
        return torch.nn.Linear(4096, 4096)

    def build_optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.0)

    def train_dataset(self):
        return range(64)

    def training_step(self, model, batch):
        x = torch.ones(4096, 4096, device=model.weight.device)
        for _ in range(200):
            x = model(x) * 1e-3
        return x.mean()
"""


def test_a_steps_time_is_the_devices_time_not_the_launch(tmp_path: Path) -> None:
    """Behaviour M21: the queue is worked off before the clock is read."""
    (tmp_path / "heavy.py").write_text(HEAVY)
    plans = plan("heavy.py:Heavy", total_samples=64, verify_consensus=False)
    rig = start_rank(tmp_path, plans, job_dir=tmp_path, device="cuda:0", options=lambda given: replace(given))
    rig.train(chunk_of(2))
    (told,) = rig.train(chunk_of(1, offset=32))
    torch.cuda.synchronize()
    started = time.perf_counter()
    loss = rig.workload.trainer.job.training_step(rig.workload.trainer.model, None)
    loss.backward()
    torch.cuda.synchronize()
    alone = (time.perf_counter() - started) * 1000
    assert told.batch_ms > 0.5 * alone
    rig.send(Shutdown(reason=""))
    rig.end()


@pytest.mark.slow
async def test_an_agent_offers_its_gpu_and_confines_the_rank_to_it() -> None:
    job, samples = "odometer.py:Odometer", {"samples": 64}
    async with tiny_controller() as controller, agent(controller.url, "--devices", "0") as running:
        host = await controller.guest()
        hello = await host.expect(Hello)
        assert [(device.id, device.type) for device in hello.devices] == [("cuda:0", "cuda")]
        assert hello.versions.cuda
        host.inbox.put_nowait((0, hello))
        await controller.admit(host, job, samples)
        relay = await controller.form(host, plan(job, total_samples=64, params=samples), device="cuda")
        await relay.expect(RankReady)
        await relay.send(chunk_of(2), rank=0)
        await relay.expect(BatchDone)
        await relay.send(Shutdown(reason="seen"), rank=0)
        assert (await host.expect(RankExited)).cause.clean
        await host.send(RunEnded(phase="done", reason="seen"))
        code, output = await running.ended()
    assert code == 0, output
