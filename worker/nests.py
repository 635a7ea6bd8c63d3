"""Batches as jobs make them: tensors in lists, tuples and dicts, however deep."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor


def map_tensors(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """The same nest with every tensor changed; what is no list, tuple, dict or tensor stays as it is."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(part, change) for part in value))
    if isinstance(value, list | tuple):
        return type(value)(map_tensors(part, change) for part in value)
    if isinstance(value, dict):
        return {key: map_tensors(part, change) for key, part in value.items()}
    return value
