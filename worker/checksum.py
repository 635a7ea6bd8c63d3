"""Norms and checksums of a flat f32 vector where it lies, CPU or GPU, in a few passes and without copies of it."""

from __future__ import annotations

import torch
from torch import Tensor

_ROW = 1 << 12
"""elements of a sum in f32; beyond, f64"""
_STRIDE, _MIX = 0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9


def norm_squares(vector: Tensor) -> Tensor:
    """Sum of squares of (n,) f32 values, as one f64 on their device; not finite if one of them is not."""
    whole = vector.numel() // _ROW * _ROW
    rows = torch.linalg.vector_norm(vector[:whole].view(-1, _ROW), dim=1)
    rest = torch.linalg.vector_norm(vector[whole:])
    return rows.double().square_().sum() + rest.double().square_()


def checksum(vector: Tensor) -> str:
    """16 hex digits over the bits of (n,) f32 values: equal bits, equal text, and in practice only then.

    The bits are added up as integers, each weighted by the row and the column of a table in which it stands. Every
    weight is odd, so that no flipped bit stays unseen. It is no defence against somebody who means harm.
    """
    even = vector.numel() // 2 * 2
    pairs = vector[:even].view(torch.int64)
    whole = pairs.numel() // _ROW * _ROW
    table, rest = pairs[:whole].view(-1, _ROW), pairs[whole:]
    rows, columns = table.sum(dim=1), table.sum(dim=0)
    total = (_weights(rows, 1) | 1).mul_(rows).sum() + (_weights(columns, 2) & -2).mul_(columns).sum()
    total += (_weights(rest, 3) | 1).mul_(rest).sum() + vector[even:].view(torch.int32).sum(dtype=torch.int64)
    return f"{int(total) % (1 << 64):016x}"


def _weights(like: Tensor, salt: int) -> Tensor:
    """Numbers without a pattern, by position (after splitmix64); everything wraps, as integers do."""
    mixed = torch.arange(1, like.numel() + 1, dtype=torch.int64, device=like.device) * _STRIDE + salt
    mixed ^= mixed >> 30
    mixed *= _MIX
    mixed ^= mixed >> 27
    return mixed
