"""The controller's CPU reduce: counting (``accumulator``), arithmetic (``sums``, ``outer``), streaming (``plane``)."""

from backend.reduce.plane import ReducePlane

__all__ = ["ReducePlane"]
