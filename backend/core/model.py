"""A model's layout as the cohort agreed on it: how large its arena is, and whether there can be such a model."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from wire.messages import TensorSpec

MAX_ELEMENTS = 1 << 40
"""f32 elements of an arena: 4 TiB, more than any host has room for twice"""
SECTIONS = ("params", "buffers", "local")


def sizes(layout: Iterable[TensorSpec]) -> tuple[int, int]:
    """Elements of parameters and of buffers in the arena, tied tensors once."""
    found = dict.fromkeys(SECTIONS, 0)
    for spec in layout:
        if spec.offset >= 0:
            found[spec.section] = found.get(spec.section, 0) + prod(spec.shape)
    return found["params"], found["buffers"]


def impossible(layout: Iterable[TensorSpec]) -> str:
    """Why no model has this layout, naming the tensor; empty when one can have it.

    Tensors with a place in the arena follow each other without a gap, parameters first; a tied one names another.
    """
    names: set[str] = set()
    end, furthest = 0, 0
    for spec in layout:
        if spec.name in names:
            return f"it has two tensors named {spec.name}"
        names.add(spec.name)
        if spec.section not in SECTIONS[furthest:]:
            return f"tensor {spec.name} lies in section {spec.section}, out of order"
        furthest = SECTIONS.index(spec.section)
        if spec.alias_of and spec.alias_of not in names:
            return f"tensor {spec.name} is tied to {spec.alias_of}, which does not come before it"
        placed = spec.section != "local" and not spec.alias_of
        if spec.offset != (end if placed else -1):
            return f"tensor {spec.name} lies at element {spec.offset}, not at {end if placed else -1}"
        end += prod(spec.shape) if placed else 0
        if end > MAX_ELEMENTS:
            return f"with tensor {spec.name} it has {end} elements, more than the {MAX_ELEMENTS} that can be averaged"
    return ""
