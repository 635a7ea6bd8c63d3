"""Loading a job from disk: found below its directory only, named exactly when it will not do (cases J17, J18)."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from worker.job import JobError, file_hash, find_job_file, load_job, sources_hash

JOBS = Path(__file__).parent.parent / "jobs"


@pytest.fixture(autouse=True)
def clean_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading a job puts its directory on the path, for good: a rank has one job in its life."""
    monkeypatch.setattr(sys, "path", [*sys.path])


GOOD = """
from dataclasses import dataclass
import torch
from worker import Job

class {name}(Job):
    @dataclass
    class Params:
        size: int = 3
        rate: float = 0.5
        label: str = "a"
        on: bool = False

    def build_model(self):
        return torch.nn.Linear(self.params.size, 1)

    def build_optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=self.params.rate)

    def train_dataset(self):
        return range(8)

    def training_step(self, model, batch):
        return model(torch.ones(len(batch), self.params.size)).mean()
"""


def write(path: Path, source: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source, encoding="utf-8")
    return path


def test_a_job_gets_its_parameters_over_their_defaults(tmp_path: Path) -> None:
    write(tmp_path / "one.py", GOOD.format(name="One"))
    job = load_job("one.py:One", tmp_path, {"size": 5, "rate": 1})
    assert (job.params.size, job.params.rate, job.params.label, job.params.on) == (5, 1.0, "a", False)
    assert type(job.params.rate) is float


def test_a_job_is_named_by_path_or_by_module(tmp_path: Path) -> None:
    write(tmp_path / "pkg_a" / "deep.py", GOOD.format(name="Deep"))
    write(tmp_path / "pkg_a" / "__init__.py", GOOD.format(name="Top"))
    for name in ("pkg_a/deep.py:Deep", "pkg_a.deep:Deep", "pkg_a:Top"):
        assert load_job(name, tmp_path, {}).params.size == 3


def test_helpers_beside_the_job_import_and_count_as_sources(tmp_path: Path) -> None:
    write(tmp_path / "sub" / "helper_of_two.py", "SIZE = 7\n")
    path = write(tmp_path / "sub" / "two.py", "import helper_of_two\n" + GOOD.format(name="Two"))
    job = load_job("sub/two.py:Two", tmp_path, {})
    before = sources_hash(job, tmp_path)
    assert before == sources_hash(job, tmp_path)
    write(tmp_path / "sub" / "helper_of_two.py", "SIZE = 8\n")
    assert sources_hash(job, tmp_path) != before
    write(tmp_path / "unrelated.py", "never = 'imported'\n")
    write(tmp_path / "sub" / "helper_of_two.py", "SIZE = 7\n")
    assert sources_hash(job, tmp_path) == before
    assert file_hash(path) != before


def test_installed_packages_below_the_job_directory_are_no_sources(tmp_path: Path) -> None:
    write(tmp_path / "env" / "site-packages" / "installed_thing.py", "")
    write(
        tmp_path / "three.py",
        "import sys, os\nsys.path.append(os.path.join(os.path.dirname(__file__), 'env', 'site-packages'))\n"
        "import installed_thing\n" + GOOD.format(name="Three"),
    )
    job = load_job("three.py:Three", tmp_path, {})
    before = sources_hash(job, tmp_path)
    write(tmp_path / "env" / "site-packages" / "installed_thing.py", "changed = 1\n")
    assert sources_hash(job, tmp_path) == before


def test_lambdas_and_local_classes_are_no_problem(tmp_path: Path) -> None:
    write(
        tmp_path / "four.py",
        GOOD.format(name="Four")
        + "    collate = staticmethod(lambda samples: torch.tensor(samples))\n\n"
        + "    def build_scheduler(self, optimizer, total_steps):\n"
        + "        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)\n",
    )
    assert load_job("four.py:Four", tmp_path, {}).collate([1, 2]).tolist() == [1, 2]


@pytest.mark.parametrize(
    ("name", "code", "says"),
    [
        ("nothing", "job_name_invalid", "path/file.py:Name"),
        (":Name", "job_name_invalid", "path/file.py:Name"),
        ("a.py:not-a-name", "job_name_invalid", "path/file.py:Name"),
        ("a b:Name", "job_name_invalid", "a b"),
        ("a\0b.py:Name", "job_name_invalid", "path/file.py:Name"),
        ("none.py:Name", "job_missing", "none.py"),
        ("no.such.module:Name", "job_missing", "no.such.module"),
        ("../outside.py:Name", "job_outside_dir", "../outside.py"),
        ("link.py:Name", "job_outside_dir", "link.py"),
    ],
)
def test_a_job_is_looked_for_below_its_directory_only(tmp_path: Path, name: str, code: str, says: str) -> None:
    outside = write(tmp_path / "outside.py", GOOD.format(name="Name"))
    inside = tmp_path / "jobs"
    inside.mkdir()
    (inside / "link.py").symlink_to(outside)
    with pytest.raises(JobError) as caught:
        find_job_file(name, inside)
    assert caught.value.code == code
    assert says in caught.value.text


@pytest.mark.parametrize(
    ("source", "code", "says"),
    [
        ("def broken(:\n", "job_import_failed", "bad.py:1: SyntaxError"),
        (
            "x = 1\nimport helper_that_is_not_here\n",
            "job_import_failed",
            "bad.py:2: ModuleNotFoundError: No module named",
        ),
        ("x = 1\ny = 2\nz = 1 / 0\n", "job_import_failed", "bad.py:3: ZeroDivisionError"),
        ("import sys\nsys.exit(0)\n", "job_import_failed", "bad.py:2: SystemExit: 0"),
        ("open('/no/such/data')\n", "job_import_failed", "/no/such/data"),
    ],
)
def test_a_file_that_does_not_load_is_named_with_its_line(tmp_path: Path, source: str, code: str, says: str) -> None:
    write(tmp_path / "bad.py", source)
    with pytest.raises(JobError) as caught:
        load_job("bad.py:Bad", tmp_path, {})
    assert caught.value.code == code
    assert says in caught.value.text


def test_a_module_of_somebody_else_is_not_taken_for_the_job(tmp_path: Path) -> None:
    write(tmp_path / "json.py", GOOD.format(name="Name"))
    with pytest.raises(JobError, match="another one than json"):
        load_job("json:Name", tmp_path, {})
    assert json.loads("1") == 1


@pytest.mark.parametrize(
    ("name", "params", "code", "says"),
    [
        ("Nobody", {}, "job_class_missing", "it has Base, NoStep"),
        ("NotAJob", {}, "job_not_a_job", "worker.Job"),
        ("NoStep", {}, "job_method_missing", "training_step"),
        ("PlainParams", {}, "params_invalid", "@dataclass"),
        ("Typed", {"hiden": 4}, "params_unknown", "'hiden'; it has hidden, rate"),
        ("Typed", {"hidden": "four"}, "params_invalid", "$.hidden"),
        ("Typed", {"hidden": 1.5}, "params_invalid", "$.hidden"),
        ("Typed", {"rate": None}, "params_invalid", "$.rate"),
        ("Empty", {"any": 1}, "params_unknown", "it has none"),
    ],
)
def test_a_class_that_will_not_do_is_named(name: str, params: dict, code: str, says: str) -> None:
    with pytest.raises(JobError) as caught:
        load_job(f"broken.py:{name}", JOBS, params)
    assert caught.value.code == code
    assert says in caught.value.text


def test_the_package_imports_without_torch() -> None:
    """Agents and tools that only name jobs must not pay for it."""
    code = "import sys; from worker import Job; import worker.command_line; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
