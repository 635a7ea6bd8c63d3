"""What a user's training code implements, and how a host loads it from its own disk (design section 9).

A job is a class named ``path/file.py:Name`` or ``package.module:Name``, always below one job directory.
Nothing here imports torch, so that an agent may load this module.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

if TYPE_CHECKING:
    import torch
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

REQUIRED_METHODS = ("build_model", "build_optimizer", "train_dataset", "training_step")
_OWN_DIRECTORIES = (Path(__file__).resolve().parent, Path(__file__).resolve().parent.parent / "wire")
_INSTALLED = {"site-packages", "dist-packages"}


class JobError(Exception):
    """What is wrong with a job on this host: a stable code, and a text that names file, line, thing and cure.

    Codes: job_name_invalid, job_outside_dir, job_missing, job_import_failed, job_class_missing,
    job_not_a_job, job_method_missing, params_unknown, params_invalid, build_failed, dataset_empty,
    dataset_invalid, nothing_to_train, loss_invalid, step_failed, eval_failed, metrics_invalid.
    """

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code
        self.text = text


@dataclass
class NoParams:
    """The parameters of a job that has none."""


class Job:
    """A training job. Four methods are required, the others may be left out.

    No ``.to(device)``, no ``zero_grad``, ``backward`` or ``step``, no sampler, no question which rank runs:
    the framework owns the loop. Builders are called on every rank and seeded alike everywhere; all ranks
    start from rank 0's weights.
    """

    Params: ClassVar[type[Any]] = NoParams
    """A dataclass of int, float, str and bool fields with defaults: the run's parameters, a form in the
    browser."""

    epoch = 0
    """The epoch being trained, from 0; the loop sets it before the epoch's first batch on this rank."""

    def __init__(self, params: Any) -> None:
        self.params = params

    def build_model(self) -> torch.nn.Module:
        """A fresh model on the CPU; the framework moves it to the rank's device."""
        raise NotImplementedError

    def build_optimizer(self, model: torch.nn.Module) -> Optimizer:
        """The optimizer over the model's parameters. Its state stays on the rank and survives every round."""
        raise NotImplementedError

    def train_dataset(self) -> Any:
        """A map-style dataset (``__len__``, ``__getitem__``), the same on every host. For a GPU it is asked from a
        thread of its own.

        Hosts compare its length and some items; a method ``fingerprint() -> str`` replaces the items'
        values there.
        """
        raise NotImplementedError

    def training_step(self, model: torch.nn.Module, batch: Any) -> torch.Tensor | dict[str, Any]:
        """The mean loss of one batch: a scalar tensor, or a dict with it under ``loss``. Runs under autocast of the
        run's ``precision``."""
        raise NotImplementedError

    def eval_dataset(self) -> Any:
        """A map-style dataset to score the averaged model on after each epoch; none means no evaluation."""
        return None

    def eval_step(self, model: torch.nn.Module, batch: Any) -> torch.Tensor | dict[str, Any]:
        """Metrics of one batch, as means over its samples. Without it ``training_step`` gives the loss."""
        return self.training_step(model, batch)

    def build_scheduler(self, optimizer: Optimizer, total_steps: int) -> LRScheduler | None:
        """A learning-rate schedule over the cohort's steps: ``total_steps`` in the run, of all ranks
        together."""
        return None

    def collate(self, samples: list[Any]) -> Any:
        """Make one batch of these samples; by default tensors are stacked, as torch's own loader does."""
        from torch.utils.data import default_collate

        return default_collate(samples)


# ---------------------------------------------------------------------------------------------------- loading


def load_job(name: str, job_dir: Path, params: dict[str, Any]) -> Job:
    """Import the job's file below ``job_dir`` and give it its parameters. Raises ``JobError``.

    The file's own directory and ``job_dir`` go to the front of ``sys.path``: helpers import as beside a
    script.
    """
    root = job_dir.resolve()
    path, attribute = find_job_file(name, root)
    module = _import(name, path, root)
    job_class = _job_class(module, attribute, path.relative_to(root).as_posix())
    return job_class(_build_params(job_class, attribute, params))


def find_job_file(name: str, job_dir: Path) -> tuple[Path, str]:
    """The job's file, resolved and below ``job_dir``, and the class's name. Raises ``JobError``."""
    root = job_dir.resolve()
    place, colon, attribute = name.rpartition(":")
    if not colon or not place or not attribute.isidentifier() or "\0" in place:
        raise JobError(
            "job_name_invalid",
            f"{name!r} does not name a job; write path/file.py:Name or package.module:Name",
        )
    for candidate in _candidates(place):
        path = (root / candidate).resolve()
        if not path.is_relative_to(root):
            raise JobError(
                "job_outside_dir",
                f"{place} leads out of the job directory; jobs are loaded only from below it",
            )
        if path.is_file():
            return path, attribute
    raise JobError(
        "job_missing",
        f"there is no job file {place} below this host's job directory; copy it there or set --job-dir",
    )


def file_hash(path: Path) -> str:
    """sha256 of a file's bytes, in hex."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def sources_hash(job: Job, job_dir: Path) -> str:
    """sha256 over the job's file and everything imported from below ``job_dir`` so far, with relative paths.

    Installed packages are not sources, even when an environment lies below the directory.
    """
    root = job_dir.resolve()
    files = {Path(inspect.getfile(type(job))).resolve()}
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if file and _is_source(Path(file).resolve(), root):
            files.add(Path(file).resolve())
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(f"{path.relative_to(root).as_posix()}\0{file_hash(path)}\n".encode())
    return digest.hexdigest()


@contextmanager
def blamed(code: str, act: str, job_dir: Path) -> Iterator[None]:
    """Turn what the user's code raises meanwhile into a ``JobError`` that names the act, the file and the
    line."""
    try:
        yield
    except JobError:
        raise
    except (Exception, SystemExit) as error:
        raise JobError(code, f"{act} failed: {describe(error, job_dir)}") from error


def describe(error: BaseException, job_dir: Path) -> str:
    """``file.py:12: ValueError: text``, with the deepest line of the job's own code."""
    if isinstance(error, JobError):
        return error.text
    place = _place(error, job_dir.resolve())
    message = error.msg if isinstance(error, SyntaxError) else str(error)
    said = f"{type(error).__name__}: {' '.join(message.split())}" if message else type(error).__name__
    return f"{place}: {said}" if place else said


def _place(error: BaseException, root: Path) -> str:
    if isinstance(error, SyntaxError) and error.filename:
        return f"{_relative(Path(error.filename), root)}:{error.lineno or 1}"
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if _is_source(Path(frame.filename).resolve(), root):
            return f"{_relative(Path(frame.filename), root)}:{frame.lineno}"
    return ""


def _relative(path: Path, root: Path) -> str:
    resolved = path.resolve()
    return resolved.relative_to(root).as_posix() if resolved.is_relative_to(root) else path.name


def _candidates(place: str) -> list[Path]:
    if place.endswith(".py"):
        return [Path(place)]
    parts = place.split(".")
    if not all(part.isidentifier() for part in parts):
        raise JobError("job_name_invalid", f"{place!r} is neither a .py file nor a module; write path/file.py:Name")
    return [Path(*parts).with_suffix(".py"), Path(*parts, "__init__.py")]


def _is_source(path: Path, root: Path) -> bool:
    """Whether a file is the user's own code: really there (torch has modules that only pretend to a file), below the
    root, not ours, not installed."""
    if not path.is_file():
        return False
    if path.suffix != ".py" or not path.is_relative_to(root) or _INSTALLED & set(path.parts):
        return False
    return not any(path.is_relative_to(directory) for directory in _OWN_DIRECTORIES)


def _import(name: str, path: Path, root: Path) -> ModuleType:
    place = name.rpartition(":")[0]
    for directory in (str(root), str(path.parent)):
        if directory not in sys.path:
            sys.path.insert(0, directory)
    importlib.invalidate_caches()
    with blamed("job_import_failed", f"loading {path.relative_to(root).as_posix()}", root):
        module = _import_file(path) if place.endswith(".py") else importlib.import_module(place)
    if Path(module.__file__ or "").resolve() != path:
        raise JobError(
            "job_import_failed",
            f"module {place} is another one than {path.name}; name the job by its path instead",
        )
    return module


def _import_file(path: Path) -> ModuleType:
    """Run a file as a module of its own name-space; dataclasses need it to be registered."""
    name = f"_job_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise AssertionError("a .py file always has a loader")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _job_class(module: ModuleType, attribute: str, place: str) -> type[Job]:
    found = getattr(module, attribute, None)
    if found is None:
        offered = [name for name, value in vars(module).items() if _is_job(value) and value is not Job]
        there = f"it has {', '.join(offered)}" if offered else "it has no job class"
        raise JobError("job_class_missing", f"{place} has no class {attribute}; {there}")
    if not _is_job(found):
        raise JobError("job_not_a_job", f"{attribute} in {place} is not a job; derive it from worker.Job")
    missing = [method for method in REQUIRED_METHODS if getattr(found, method) is getattr(Job, method)]
    if missing:
        raise JobError("job_method_missing", f"{attribute} in {place} has no method {' and '.join(missing)}")
    job_class: type[Job] = found
    return job_class


def _is_job(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, Job)


def _build_params(job_class: type[Job], attribute: str, params: dict[str, Any]) -> Any:
    kind = job_class.Params
    if not is_dataclass(kind):
        raise JobError("params_invalid", f"{attribute}.Params is not a dataclass; write @dataclass above it")
    known = [field.name for field in fields(kind)]
    unknown = [name for name in params if name not in known]
    if unknown:
        raise JobError(
            "params_unknown",
            f"{attribute} has no parameter {unknown[0]!r}; it has {', '.join(known) or 'none'}",
        )
    try:
        return msgspec.convert(params, kind)
    except msgspec.ValidationError as error:
        raise JobError("params_invalid", f"the parameters of {attribute} will not do: {error}") from error
    except (TypeError, NameError) as error:
        raise JobError("params_invalid", f"{attribute}.Params cannot be read: {error}") from error
