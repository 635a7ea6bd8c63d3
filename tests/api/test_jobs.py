"""Job files are read by their syntax: every refusal by name, and nothing of them is ever executed."""

from __future__ import annotations

import hashlib
import os
import textwrap
from pathlib import Path

import pytest

from backend.runtime import jobs
from backend.runtime.jobs import JobProblem, ParamField

METHODS = """
    def build_model(self): ...
    def build_optimizer(self, model): ...
    def train_dataset(self): ...
    def training_step(self, model, batch): ...
"""
GOOD = f'''
"""A file."""
from dataclasses import dataclass, field
from typing import ClassVar
from worker.job import Job

raise SystemExit("this file must not be executed")

class Digits(Job):
    """Digits by a small network.

    More words.
    """
    @dataclass
    class Params:
        family: ClassVar[str] = "mlp"
        hidden: int = 64
        """units of the
        hidden layer"""
        learning_rate: float = 3e-3  # AdamW's
        decay: float = 0
        name: str = field(default="x", metadata={{"description": "shown in the log"}})
        augment: bool = False
        offset: int = -3
        seed: int
{METHODS}
    def eval_dataset(self): ...
    def _split(self): ...
'''


def write(folder: Path, place: str, text: str) -> Path:
    path = folder / place
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))
    return path


def job(body: str = "", *, base: str = "Job", name: str = "Mine", methods: str = METHODS) -> str:
    return f"from dataclasses import dataclass, field\nclass {name}({base}):\n    x = 1\n{body}\n{methods}\n"


def test_a_job_is_described_without_being_executed(tmp_path: Path) -> None:
    path = write(tmp_path, "examples/digits.py", GOOD)

    info = jobs.inspect(tmp_path, "examples/digits.py:Digits")

    assert info.job == "examples/digits.py:Digits"
    assert (info.path, info.name, info.doc) == ("examples/digits.py", "Digits", "Digits by a small network.")
    assert info.file_hash == hashlib.sha256(path.read_bytes()).hexdigest()
    assert info.fields == (
        ParamField("hidden", "int", 64, "units of the hidden layer"),
        ParamField("learning_rate", "float", 3e-3, "AdamW's"),
        ParamField("decay", "float", 0.0, ""),
        ParamField("name", "str", "x", "shown in the log"),
        ParamField("augment", "bool", False, ""),
        ParamField("offset", "int", -3, ""),
        ParamField("seed", "int", None, "", required=True),
    )
    assert info.methods == (
        "build_model", "build_optimizer", "train_dataset", "training_step", "eval_dataset",
    )  # fmt: skip
    assert jobs.inspect(tmp_path, "examples.digits:Digits").file_hash == info.file_hash


def test_a_package_is_a_module_too(tmp_path: Path) -> None:
    write(tmp_path, "lab/vision/__init__.py", job())

    assert jobs.inspect(tmp_path, "lab.vision:Mine").path == "lab/vision/__init__.py"


def test_methods_and_params_may_be_inherited_within_the_file(tmp_path: Path) -> None:
    text = f"""
from dataclasses import dataclass
import worker.job
@dataclass
class Shared:
    depth: int = 1
@dataclass
class Wide(Shared):
    width: int = 2
class Base(worker.job.Job):
    Params = Wide
{METHODS}
class Child(Base):
    eval_step = Base.training_step
"""
    write(tmp_path, "a.py", text)

    info = jobs.inspect(tmp_path, "a.py:Child")

    assert [field.name for field in info.fields] == ["depth", "width"]
    assert info.methods[0] == "eval_step"
    assert [found.name for found in jobs.find(tmp_path)] == ["Base", "Child"]


@pytest.mark.parametrize(
    ("name", "code", "says"),
    [
        ("", "job_not_found", "path/file.py:Name"),
        ("good.py", "job_not_found", "path/file.py:Name"),
        ("good.py:", "job_not_found", "path/file.py:Name"),
        ("good.py:no name", "job_not_found", "path/file.py:Name"),
        (":Mine", "job_not_found", "path/file.py:Name"),
        ("a" * 600 + ".py:Mine", "job_not_found", "does not name a job"),
        ("a" * 300 + ".py:Mine", "job_not_found", "found: good.py:Mine"),
        ("gone.py:Mine", "job_not_found", "found: good.py:Mine"),
        ("no.such:Mine", "job_not_found", "found: good.py:Mine"),
        ("os.path/x:Mine", "job_not_found", "found: good.py:Mine"),
        ("good\0.py:Mine", "job_not_found", "no job file"),
        ("loop.py:Mine", "job_not_found", "no job file"),
        ("folder.py:Mine", "job_not_found", "no job file"),
        ("../outside.py:Mine", "job_outside_dir", "leads out"),
        ("sub/../good.py:Mine", "job_outside_dir", "leads out"),
        ("/etc/passwd.py:Mine", "job_outside_dir", "leads out"),
        ("link.py:Mine", "job_outside_dir", "leads out"),
        ("linked/outside.py:Mine", "job_outside_dir", "leads out"),
        ("good.py:Other", "job_class_missing", "jobs in it: Mine"),
        ("plain.py:Mine", "job_class_missing", "derive it from Job"),
        ("broken.py:Mine", "job_syntax_error", "broken.py:3"),
        ("null.py:Mine", "job_syntax_error", "null.py:1"),
        ("nested.py:Mine", "job_syntax_error", "nested.py:1"),
        ("coding.py:Mine", "job_syntax_error", "coding.py"),
        ("large.py:Mine", "job_too_large", "1 MiB"),
        ("short.py:Mine", "job_method_missing", "training_step"),
        ("elsewhere.py:Mine", "job_method_missing", "this file only"),
    ],
)
def test_every_refusal_has_its_name(tmp_path: Path, name: str, code: str, says: str) -> None:
    folder = tmp_path / "jobs"
    write(folder, "good.py", job())
    write(folder, "plain.py", job(base="object"))
    write(folder, "broken.py", "x = 1\n\ndef f(:\n    pass  # Job\n")
    (folder / "null.py").write_bytes(b"class Mine(Job):\0")
    (folder / "nested.py").write_text("x = " + "(" * 5000 + "# Job")
    (folder / "coding.py").write_bytes(b"# -*- coding: no-such -*-\n# Job\n")
    (folder / "large.py").write_text(job() + "#" * (1 << 20))
    write(folder, "short.py", job(methods=METHODS.replace("training_step", "train_step")))
    write(folder, "elsewhere.py", job(base="other.Base", methods=""))
    write(tmp_path, "outside.py", job())
    (folder / "folder.py").mkdir()
    (folder / "link.py").symlink_to(tmp_path / "outside.py")
    (folder / "linked").symlink_to(tmp_path)
    (folder / "loop.py").symlink_to(folder / "loop.py")

    with pytest.raises(JobProblem) as caught:
        jobs.inspect(folder, name)

    assert caught.value.code == code
    assert says in caught.value.text
    assert str(tmp_path) not in caught.value.text


@pytest.mark.parametrize(
    ("params", "field", "says"),
    [
        ("@dataclass\n    class Params:\n        sizes: list[int] = None", "sizes", "list[int]"),
        ("@dataclass\n    class Params:\n        rate: float = 1 / 3", "rate", "plain value"),
        ("@dataclass\n    class Params:\n        rate: float = open('x')", "rate", "plain value"),
        ("@dataclass\n    class Params:\n        n: int = field(default_factory=int)", "n", "plain value"),
        ("@dataclass\n    class Params:\n        n: int = 'three'", "n", "must be an integer"),
        ("@dataclass\n    class Params:\n        n: int = True", "n", "must be an integer"),
        ("@dataclass\n    class Params:\n        n: float = 1e999", "n", "finite"),
        ("class Params:\n        n: int = 3", "", "@dataclass"),
    ],
)
def test_unusable_params_name_the_field(tmp_path: Path, params: str, field: str, says: str) -> None:
    write(tmp_path, "a.py", job(f"    {params}"))

    with pytest.raises(JobProblem) as caught:
        jobs.inspect(tmp_path, "a.py:Mine")

    assert (caught.value.code, caught.value.field) == ("job_params_unsupported", field)
    assert says in caught.value.text


def test_the_survey_lists_jobs_and_names_broken_ones(tmp_path: Path) -> None:
    for place in ("a.py", "deep/er/b.py", "package/__init__.py"):
        write(tmp_path, place, job())
    hidden = (
        ".venv/x.py", ".hidden.py", "node_modules/x.py", "tests/x.py", "myenv/lib/x.py", "d/d/d/d/d/d/d/x.py",
    )  # fmt: skip
    for place in hidden:
        write(tmp_path, place, job())
    (tmp_path / "myenv/pyvenv.cfg").touch()
    write(tmp_path, "no_job.py", "def f(:")
    write(tmp_path, "broken.py", "class A(Job)\n")
    write(tmp_path, "short.py", job(methods="    pass"))
    write(tmp_path, "private.py", job(name="_Base"))
    (tmp_path / "link.py").symlink_to(tmp_path / "a.py")
    (tmp_path / "pipe.txt").write_text("class A(Job): ...")

    survey = jobs.survey(tmp_path)

    assert [info.job for info in survey.jobs] == [
        "a.py:Mine",
        "deep/er/b.py:Mine",
        "package/__init__.py:Mine",
    ]
    assert [(broken.job, broken.code) for broken in survey.broken] == [
        ("broken.py", "job_syntax_error"),
        ("short.py:Mine", "job_method_missing"),
    ]
    assert not survey.truncated
    assert jobs.find(tmp_path) == list(survey.jobs)


def test_the_survey_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "MAX_FILES", 3)
    for index in range(5):
        write(tmp_path, f"job_{index}.py", job())

    survey = jobs.survey(tmp_path)

    assert survey.truncated
    assert len(survey.jobs) == 3


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    write(tmp_path, "a.py", job()).chmod(0)

    with pytest.raises(JobProblem, match="cannot be read"):
        jobs.inspect(tmp_path, "a.py:Mine")


def test_params_are_merged_over_the_defaults_in_field_order(tmp_path: Path) -> None:
    write(tmp_path, "examples/digits.py", GOOD)
    info = jobs.inspect(tmp_path, "examples/digits.py:Digits")

    merged = jobs.check_params(info, {"seed": 7, "learning_rate": 1, "hidden": 32.0, "augment": True})

    assert list(merged.items()) == [
        ("hidden", 32), ("learning_rate", 1.0), ("decay", 0.0), ("name", "x"), ("augment", True),
        ("offset", -3), ("seed", 7),
    ]  # fmt: skip
    assert [type(value) for value in merged.values()] == [int, float, float, str, bool, int, int]


@pytest.mark.parametrize(
    ("params", "field", "code"),
    [
        ({}, "seed", "param_missing"),
        ({"seed": 1, "hiden": 3}, "hiden", "param_unknown"),
        ({"seed": 1.5}, "seed", "param_type"),
        ({"seed": True}, "seed", "param_type"),
        ({"seed": "1"}, "seed", "param_type"),
        ({"seed": None}, "seed", "param_type"),
        ({"seed": 1 << 63}, "seed", "param_range"),
        ({"seed": 1e300}, "seed", "param_range"),
        ({"seed": 1, "learning_rate": float("nan")}, "learning_rate", "param_range"),
        ({"seed": 1, "learning_rate": 10**400}, "learning_rate", "param_type"),
        ({"seed": 1, "learning_rate": "0.1"}, "learning_rate", "param_type"),
        ({"seed": 1, "augment": 1}, "augment", "param_type"),
        ({"seed": 1, "name": "x" * 5000}, "name", "param_range"),
        ({"seed": 1, "name": ["x" * 5000]}, "name", "param_type"),
    ],
)
def test_bad_params_name_their_field(tmp_path: Path, params: dict[str, object], field: str, code: str) -> None:
    write(tmp_path, "examples/digits.py", GOOD)
    info = jobs.inspect(tmp_path, "examples/digits.py:Digits")

    with pytest.raises(JobProblem) as caught:
        jobs.check_params(info, params)

    assert (caught.value.field, caught.value.code) == (field, code)
    assert len(caught.value.text) < 200
