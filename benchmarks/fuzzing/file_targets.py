"""Bodies of requests, and files that may be from elsewhere."""

from __future__ import annotations

import contextlib
import json
import struct
import tempfile
from pathlib import Path
from random import Random

import msgspec

from backend.api.problems import ApiProblem
from backend.api.strict import MAX_DEPTH, parse
from backend.core.resume import read_resume
from backend.runtime import tensor_file
from benchmarks.fuzzing import forging, mutation
from benchmarks.fuzzing.laws import Target, hold

_MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None


def _json_body(data: bytes) -> None:
    """A request's body: a value that can be used, or a problem."""
    try:
        value = parse(data)
    except ApiProblem as problem:
        hold(problem.status == 400 and problem.code == "json_invalid", f"{problem.status} {problem.code}")
        return
    text = json.dumps(value, allow_nan=False)
    hold(text.encode().decode() == text, "a value that cannot be written down again")
    hold(_depth(value) <= MAX_DEPTH, "a value that is nested too deep")


def _depth(value: object) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + max(map(_depth, inner)) if inner else int(isinstance(value, dict | list))


def _json_seeds() -> list[bytes]:
    run = {"job": "toy.py:Toy", "epochs": 5, "params": {"hidden": 64, "rate": 0.003, "deep": [[{"a": None}]]}}
    return [json.dumps(run).encode(), b'{"quorum": 2, "target": null}', b'{"seconds": 1.5e2}', "[\u00e9]".encode()]


def _tensors(data: bytes) -> None:
    """A state that a rank hands over, or a file of a checkpoint from elsewhere."""
    with contextlib.suppress(tensor_file.TensorFileError):
        found = tensor_file.read(data)
        hold(sum(len(body) for _, _, body in found.values()) <= len(data), "more tensors than bytes")
    with tempfile.NamedTemporaryFile(prefix="marchline-fuzz-", dir=_MEMORY) as file:
        file.write(data)
        file.flush()
        with contextlib.suppress(tensor_file.TensorFileError):
            opened = tensor_file.TensorFile.open(Path(file.name))
            for name in opened.entries:
                hold(opened.array(name).nbytes <= len(data), "a tensor larger than its file")


def _tensors_seeds() -> list[bytes]:
    places = {"w": ("F32", [2, 1], [0, 8]), "n": ("I64", [], [8, 16])}
    entries = {
        name: {"dtype": dtype, "shape": shape, "data_offsets": at} for name, (dtype, shape, at) in places.items()
    }
    header = json.dumps(entries).encode()
    return [struct.pack("<Q", len(header)) + header + bytes(16)]


def _manifest(data: bytes) -> None:
    """The manifest of a checkpoint from elsewhere: a position, or one error with a reason."""
    try:
        manifest = json.loads(data)
    except (ValueError, RecursionError):
        return
    try:
        resume = read_resume(manifest if isinstance(manifest, dict) else {})
    except ValueError:
        return
    hold(resume.where and resume.trained <= resume.dataset_size, f"{resume} is no position")


def _manifest_seeds() -> list[bytes]:
    progress = {
        "samples_accepted": [64],
        "accepted": [[0, 8]],
        "lost": [{"offset": 8, "size": 4, "rank": 0, "reason": "x"}],
        "evaluated": {"epoch": 0, "metrics": {"accuracy": 0.5}},
        **dict.fromkeys(("samples_lost", "batches", "loss_batches"), 3),
        **dict.fromkeys(("seconds", "loss_sum", "loss"), 1.0),
    }
    manifest = {
        **dict.fromkeys(("run_id", "checkpoint", "round", "global_step"), 3),
        "dataset_size": 64,
        "progress": progress,
        "config": {"job": "toy.py:Toy", "seed": 1, "batch_size": 4},
        "layout": [msgspec.to_builtins(spec) for spec in forging.LAYOUT],
        "seats": [["box", "cpu:0"]],
        "states": [0],
        "scheduler": {},
        "guard": {},
        "meta": None,
    }
    return [json.dumps(manifest).encode()]


def _altered_json(data: bytes, random: Random) -> bytes:
    if random.random() < 0.4:
        return mutation.mutated(data, random)
    try:
        return json.dumps(mutation.altered(json.loads(data), random), default=repr).encode()
    except (ValueError, RecursionError, TypeError):
        return mutation.mutated(data, random)


TARGETS = (
    Target("json", "a request's body", _json_body, _json_seeds, _altered_json),
    Target("tensors", "a state or a checkpoint's file", _tensors, _tensors_seeds),
    Target("manifest", "a checkpoint's manifest", _manifest, _manifest_seeds, _altered_json),
)
