"""Reading a job class from its syntax tree: its methods, its ``Params``, its words. Nothing is executed."""

from __future__ import annotations

import ast
import hashlib
import io
import math
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

REQUIRED_METHODS = ("build_model", "build_optimizer", "train_dataset", "training_step")
BASE_NAME = "Job"
"""a class is a job when its bases lead to a class of this name"""

MAX_TEXT = 4096
"""longest text parameter, in characters"""
INT_LIMIT = 1 << 63

_TYPES: dict[str, type] = {"int": int, "float": float, "str": str, "bool": bool}
_ARTICLE = {"int": "an integer", "float": "a number", "str": "a text", "bool": "true or false"}
_NO_BASE = frozenset({"object", "ABC", "Protocol", "Generic"})

Classes = dict[str, ast.ClassDef]


class JobProblem(Exception):
    """Why a job cannot be used, or a parameter not be taken.

    ``code`` is one of job_not_found, job_outside_dir, job_too_large, job_syntax_error, job_class_missing,
    job_method_missing, job_params_unsupported; for values param_unknown, param_missing, param_type,
    param_range.
    ``text`` names the thing and the cure; ``field`` is the parameter at fault, if one is.
    """

    def __init__(self, code: str, text: str, field: str = "") -> None:
        super().__init__(text)
        self.code = code
        self.text = text
        self.field = field


@dataclass(frozen=True, slots=True)
class ParamField:
    """One field of a job's ``Params``: an int, float, str or bool, with a default unless ``required``."""

    name: str
    type: str
    default: Any
    description: str
    required: bool = False


@dataclass(frozen=True, slots=True)
class JobInfo:
    """A job as its file says. ``path`` is relative to the job directory; ``file_hash`` is a sha256."""

    job: str
    path: str
    name: str
    file_hash: str
    doc: str
    fields: tuple[ParamField, ...]
    methods: tuple[str, ...]


def job_classes(tree: ast.Module) -> Classes:
    """The classes at the top of a module, by name; of two of one name the last, as Python has it."""
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def describe(job: str, path: str, name: str, source: bytes, classes: Classes) -> JobInfo:
    """The class ``name`` of a job file. Raises ``JobProblem`` for a missing method or unusable ``Params``."""
    node = classes[name]
    family = list(_family(name, classes))
    methods = list(dict.fromkeys(method for cls in family for method in _methods(cls)))
    missing = [method for method in REQUIRED_METHODS if method not in methods]
    if missing:
        lost = " and ".join(missing)
        raise JobProblem(
            "job_method_missing",
            f"{name} in {path} has no method {lost}; methods are looked for in this file only",
        )
    fields = _fields(name, path, family, classes, source)
    doc = (ast.get_docstring(node) or "").strip().split("\n", 1)[0]
    return JobInfo(job, path, name, hashlib.sha256(source).hexdigest(), doc, fields, tuple(methods))


def _base_names(node: ast.ClassDef) -> list[str]:
    """Last name of each base: ``worker.job.Job`` and ``Job`` and ``Job[...]`` are all ``Job``."""
    names = []
    for base in node.bases:
        inner = base.value if isinstance(base, ast.Subscript) else base
        if isinstance(inner, ast.Attribute):
            names.append(inner.attr)
        elif isinstance(inner, ast.Name):
            names.append(inner.id)
    return names


def _family(name: str, classes: Classes, seen: set[str] | None = None) -> Iterator[ast.ClassDef]:
    """The class and its bases of the same file, nearest first, each once."""
    seen = set() if seen is None else seen
    if name in seen or name not in classes:
        return
    seen.add(name)
    yield classes[name]
    for base in _base_names(classes[name]):
        yield from _family(base, classes, seen)


def is_job(name: str, classes: Classes) -> bool | None:
    """Whether the bases lead to ``Job``; none when they lead out of the file: only a worker can tell."""
    if name == BASE_NAME:
        return False
    outside = {base for node in _family(name, classes) for base in _base_names(node) if base not in classes}
    if BASE_NAME in outside or any(node.name == BASE_NAME for node in _family(name, classes)):
        return True
    return None if outside - _NO_BASE else False


def _methods(node: ast.ClassDef) -> list[str]:
    found = []
    for item in node.body:
        if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef):
            found.append(item.name)
        elif isinstance(item, ast.Assign):
            found.extend(target.id for target in item.targets if isinstance(target, ast.Name) and _callable(item.value))
    return [name for name in found if not name.startswith("_")]


def _callable(value: ast.expr) -> bool:
    return isinstance(value, ast.Lambda | ast.Name | ast.Attribute | ast.Call)


def offer(classes: Classes, place: str) -> str:
    """The file's jobs as half a sentence."""
    names = [name for name in classes if is_job(name, classes)]
    return f"jobs in it: {', '.join(names)}" if names else f"no class of {place} is derived from {BASE_NAME}"


# ------------------------------------------------------------------------------------------ its parameters


def _fields(
    name: str, path: str, family: list[ast.ClassDef], classes: Classes, source: bytes
) -> tuple[ParamField, ...]:
    params = next((found for cls in family if (found := _params_class(cls, classes)) is not None), None)
    if params is None:
        return ()
    comments = _comments(source)
    fields: dict[str, ParamField] = {}
    for cls in reversed(list(_family_of(params, classes))):
        if not _is_dataclass(cls):
            raise JobProblem(
                "job_params_unsupported",
                f"Params of {name} in {path} is not a dataclass; write @dataclass above it",
            )
        for field in _class_fields(cls, f"{name} in {path}", comments):
            fields[field.name] = field
    return tuple(fields.values())


def _family_of(node: ast.ClassDef, classes: Classes) -> Iterator[ast.ClassDef]:
    yield node
    for base in _base_names(node):
        yield from _family(base, classes, {node.name} if classes.get(node.name) is node else None)


def _params_class(node: ast.ClassDef, classes: Classes) -> ast.ClassDef | None:
    for item in node.body:
        if isinstance(item, ast.ClassDef) and item.name == "Params":
            return item
        if isinstance(item, ast.Assign) and isinstance(item.value, ast.Name):
            named = any(isinstance(target, ast.Name) and target.id == "Params" for target in item.targets)
            if named and item.value.id in classes:
                return classes[item.value.id]
    return None


def _is_dataclass(node: ast.ClassDef) -> bool:
    for decorator in node.decorator_list:
        inner = decorator.func if isinstance(decorator, ast.Call) else decorator
        last = inner.attr if isinstance(inner, ast.Attribute) else getattr(inner, "id", "")
        if last == "dataclass":
            return True
    return False


def _class_fields(node: ast.ClassDef, owner: str, comments: dict[int, str]) -> Iterator[ParamField]:
    for index, item in enumerate(node.body):
        if not isinstance(item, ast.AnnAssign) or not isinstance(item.target, ast.Name):
            continue
        annotation = ast.unparse(item.annotation).strip("'\"")
        if annotation.split("[")[0].split(".")[-1] == "ClassVar":
            continue
        name = item.target.id
        if annotation not in _TYPES:
            raise JobProblem(
                "job_params_unsupported",
                f"Params.{name} of {owner} is {annotation}; a parameter is an int, float, str or bool",
                name,
            )
        below = node.body[index + 1] if index + 1 < len(node.body) else None
        note = _text_of(below) or comments.get(item.end_lineno or item.lineno, "")
        yield _field(name, annotation, item.value, note, owner)


def _field(name: str, kind: str, value: ast.expr | None, note: str, owner: str) -> ParamField:
    if isinstance(value, ast.Call) and ast.unparse(value.func).split(".")[-1] == "field":
        keywords = {keyword.arg: keyword.value for keyword in value.keywords}
        note = _metadata_note(keywords.get("metadata")) or note
        if "default_factory" in keywords:
            raise _no_literal(name, owner)
        value = keywords.get("default")
    if value is None:
        return ParamField(name, kind, None, note, required=True)
    try:
        default = ast.literal_eval(value)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError) as error:
        raise _no_literal(name, owner) from error
    field = ParamField(name, kind, default, note)
    try:
        return ParamField(name, kind, checked_value(field, default), note)
    except JobProblem as problem:
        raise JobProblem(
            "job_params_unsupported", f"default of Params.{name} of {owner}: {problem.text}", name
        ) from problem


def _no_literal(name: str, owner: str) -> JobProblem:
    return JobProblem(
        "job_params_unsupported",
        f"Params.{name} of {owner} needs a plain value as its default, not an expression",
        name,
    )


def _metadata_note(metadata: ast.expr | None) -> str:
    if not isinstance(metadata, ast.Dict):
        return ""
    for key, value in zip(metadata.keys, metadata.values, strict=True):
        if isinstance(key, ast.Constant) and key.value in ("description", "help") and isinstance(value, ast.Constant):
            return str(value.value)
    return ""


def _text_of(item: ast.stmt | None) -> str:
    """The sentence of a string that stands alone below a field."""
    if isinstance(item, ast.Expr) and isinstance(item.value, ast.Constant) and isinstance(item.value.value, str):
        return " ".join(item.value.value.split())
    return ""


def _comments(source: bytes) -> dict[int, str]:
    """Trailing comments by line; empty when the tokens cannot be read, since a description is a courtesy."""
    found: dict[int, str] = {}
    try:
        for token in tokenize.tokenize(io.BytesIO(source).readline):
            if token.type == tokenize.COMMENT and token.line[: token.start[1]].strip():
                found[token.start[0]] = token.string.lstrip("#").strip()
    except (tokenize.TokenError, SyntaxError, ValueError):
        return {}
    return found


def checked_value(field: ParamField, value: Any) -> Any:
    """``value`` as the field's type. Raises ``JobProblem`` when it is not of it, not finite or too large."""
    if field.type == "float" and isinstance(value, int) and not isinstance(value, bool):
        value = float(value) if abs(value) < INT_LIMIT else value
    if field.type == "int" and isinstance(value, float) and math.isfinite(value) and value.is_integer():
        value = int(value)
    if type(value) is not _TYPES[field.type]:
        raise JobProblem("param_type", f"{field.name} must be {_ARTICLE[field.type]}, not {_shown(value)}", field.name)
    if isinstance(value, float) and not math.isfinite(value):
        raise JobProblem("param_range", f"{field.name} must be a finite number", field.name)
    if type(value) is int and abs(value) >= INT_LIMIT:
        raise JobProblem("param_range", f"{field.name} must fit into 64 bits", field.name)
    if isinstance(value, str) and len(value) > MAX_TEXT:
        raise JobProblem("param_range", f"{field.name} is longer than {MAX_TEXT} characters", field.name)
    return value


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
