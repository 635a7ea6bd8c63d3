"""What a job file says about itself, read from its syntax tree: nothing of it is imported or executed.

The controller needs no torch and runs no user code (design section 9). It reads the source to offer the form
of a run, to hash what the workers must have on their disks, and to name what is wrong before anybody waits.

A job is named ``path/file.py:Name`` or ``package.module:Name``, always below one directory. Only what the
file says counts: a class may inherit from another class of the same file, not from one of another.
"""

from __future__ import annotations

import ast
import os
import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backend.runtime.job_syntax import (
    BASE_NAME,
    REQUIRED_METHODS,
    JobInfo,
    JobProblem,
    ParamField,
    checked_value,
    describe,
    is_job,
    job_classes,
    offer,
)

__all__ = [
    "REQUIRED_METHODS", "BrokenJob", "JobInfo", "JobProblem", "ParamField", "Survey",
    "check_params", "find", "inspect", "survey",
]  # fmt: skip

MAX_NAME = 512
"""longest name of a job, in characters"""
MAX_FILE_BYTES = 1 << 20
MAX_DEPTH = 6
MAX_FILES = 2000

_SKIPPED = frozenset({
    "node_modules", "__pycache__", "site-packages", "venv", "env", "build", "dist", "var", "tests", "test",
})  # fmt: skip
_parsing = threading.Lock()


@dataclass(frozen=True, slots=True)
class BrokenJob:
    """A file or class that looks like a job and cannot be used, and why."""

    job: str
    code: str
    text: str


@dataclass(frozen=True, slots=True)
class Survey:
    """All that a job directory holds; ``truncated`` when it has more Python files than are read."""

    jobs: tuple[JobInfo, ...]
    broken: tuple[BrokenJob, ...]
    truncated: bool


def inspect(job_dir: Path, job: str) -> JobInfo:
    """Describe one job.

    Raises ``JobProblem`` for a name, place, file, class, method or ``Params`` that will not do.
    """
    place, name = _split(job)
    path = _locate(job_dir, place)
    source = _read(path, place)
    tree = _parse(source, place)
    classes = job_classes(tree)
    if name not in classes:
        raise JobProblem("job_class_missing", f"{place} has no class {name}; {offer(classes, place)}")
    if is_job(name, classes) is False:
        raise JobProblem(
            "job_class_missing",
            f"{name} in {place} is not a job: derive it from {BASE_NAME}; {offer(classes, place)}",
        )
    return describe(job, path.relative_to(job_dir.resolve()).as_posix(), name, source, classes)


def find(job_dir: Path) -> list[JobInfo]:
    """Every usable job below ``job_dir``, in path order."""
    return list(survey(job_dir).jobs)


def survey(job_dir: Path) -> Survey:
    """Every job below ``job_dir``, and every file that looks like one but cannot be used, with the reason."""
    jobs: list[JobInfo] = []
    broken: list[BrokenJob] = []
    count = 0
    for path in _python_files(job_dir):
        count += 1
        if count > MAX_FILES:
            break
        _survey_file(job_dir, path, jobs, broken)
    return Survey(tuple(jobs), tuple(broken), count > MAX_FILES)


def check_params(info: JobInfo, params: dict[str, Any]) -> dict[str, Any]:
    """The job's parameters with ``params`` laid over its defaults, in the order of the fields.

    An integer is taken for a float and an integral float for an integer; nothing else is converted. Raises
    ``JobProblem`` with the field for an unknown, missing, ill-typed or out-of-range value.
    """
    known = {field.name: field for field in info.fields}
    for name in params:
        if name not in known:
            offered = ", ".join(known) or "none"
            raise JobProblem("param_unknown", f"{info.name} has no parameter {name!r}; it has: {offered}", name)
    merged: dict[str, Any] = {}
    for field in info.fields:
        if field.name in params:
            merged[field.name] = checked_value(field, params[field.name])
        elif field.required:
            raise JobProblem("param_missing", f"{info.name} needs a value for {field.name} ({field.type})", field.name)
        else:
            merged[field.name] = field.default
    return merged


# ----------------------------------------------------------------------------------------------- the place


def _split(job: str) -> tuple[str, str]:
    place, colon, name = job.rpartition(":")
    if not colon or not place or not name.isidentifier() or len(job) > MAX_NAME:
        raise JobProblem(
            "job_not_found",
            f"{job[:80]!r} does not name a job; write path/file.py:Name or package.module:Name",
        )
    return place, name


def _locate(job_dir: Path, place: str) -> Path:
    """The job's file, resolved, inside the resolved job directory."""
    root = job_dir.resolve()
    for candidate in _candidates(place):
        try:
            path = (root / candidate).resolve()
            exists = path.is_file()
        except (OSError, ValueError, RuntimeError):  # a name too long, a null byte, a loop of links
            continue
        if not path.is_relative_to(root) or ".." in candidate.parts:
            raise JobProblem(
                "job_outside_dir", f"{place} leads out of the job directory; jobs are read only from below it"
            )
        if exists:
            return path
    raise JobProblem("job_not_found", f"there is no job file {place} below the job directory; {_offer_files(job_dir)}")


def _candidates(place: str) -> list[Path]:
    if place.endswith(".py"):
        return [Path(place)]
    parts = place.split(".")
    if not all(part.isidentifier() for part in parts):
        return []
    return [Path(*parts).with_suffix(".py"), Path(*parts, "__init__.py")]


def _offer_files(job_dir: Path) -> str:
    names = [info.job for info in find(job_dir)]
    if not names:
        return "no file there has a job"
    more = f" and {len(names) - 20} more" if len(names) > 20 else ""
    return f"found: {', '.join(names[:20])}{more}"


def _python_files(job_dir: Path) -> Iterator[Path]:
    """Python files below the directory, sorted; no hidden or foreign directories, no links, no deep nests."""
    root = job_dir.resolve()
    for folder, folders, files in os.walk(root, followlinks=False):
        here = Path(folder)
        depth = len(here.relative_to(root).parts)
        folders[:] = sorted(name for name in folders if depth < MAX_DEPTH and _wanted(here / name))
        for name in sorted(files):
            path = here / name
            if name.endswith(".py") and not name.startswith(".") and not path.is_symlink():
                yield path


def _wanted(folder: Path) -> bool:
    foreign = folder.name in _SKIPPED or folder.name.startswith(".") or folder.name.endswith(".egg-info")
    return not foreign and not folder.is_symlink() and not (folder / "pyvenv.cfg").exists()


def _survey_file(job_dir: Path, path: Path, jobs: list[JobInfo], broken: list[BrokenJob]) -> None:
    place = path.relative_to(job_dir.resolve()).as_posix()
    try:
        source = _read(path, place)
        if BASE_NAME.encode() not in source:
            return
        classes = job_classes(_parse(source, place))
    except JobProblem as problem:
        broken.append(BrokenJob(place, problem.code, problem.text))
        return
    for name in classes:
        if not is_job(name, classes) or name.startswith("_"):
            continue
        try:
            jobs.append(describe(f"{place}:{name}", place, name, source, classes))
        except JobProblem as problem:
            broken.append(BrokenJob(f"{place}:{name}", problem.code, problem.text))


def _read(path: Path, place: str) -> bytes:
    try:
        with path.open("rb") as file:
            source = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise JobProblem("job_not_found", f"{place} cannot be read: {error.strerror or error}") from error
    if len(source) > MAX_FILE_BYTES:
        raise JobProblem("job_too_large", f"{place} is over {MAX_FILE_BYTES >> 20} MiB; a job file is source, not data")
    return source


def _parse(source: bytes, place: str) -> ast.Module:
    try:
        with _parsing, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a stray backslash in a job is no matter for this log
            return ast.parse(source, filename=place)
    except SyntaxError as error:
        raise JobProblem("job_syntax_error", f"{place}:{error.lineno or 1}: {error.msg}") from error
    except (ValueError, RecursionError, MemoryError) as error:
        raise JobProblem("job_syntax_error", f"{place}:1: cannot be parsed: {error or type(error).__name__}") from error
