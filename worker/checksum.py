"""Norms and checksums of a flat f32 vector where it lies, CPU or GPU, in a few passes and without copies of it."""

from __future__ import annotations

import torch
from torch import Tensor

_ROW = 1 << 12
"""elements of a sum in f32; beyond, f64"""
_STRIDE = 0x1E3779B97F4A7C15
_MIXES = ((30, 0x3F58476D1CE4E5B9), (27, 0x14D049BB133111EB), (31, 1))


def norm_squares(vector: Tensor) -> Tensor:
    """Sum of squares of (n,) f32 values, as one f64 on their device; not finite if one of them is not."""
    whole = vector.numel() // _ROW * _ROW
    rows = torch.linalg.vector_norm(vector[:whole].view(-1, _ROW), dim=1)
    rest = torch.linalg.vector_norm(vector[whole:])
    total: Tensor = rows.double().square_().sum() + rest.double().square_()
    return total


def checksum(vector: Tensor) -> Tensor:
    """One int64 over the bits of (n,) f32 values, on their device: equal bits, equal number, and in practice only then.

    The bits are added up as integers by the rows and by the columns of a table; every sum is scrambled by where it
    stands before all are added. It is no defence against somebody who means harm.
    """
    even = vector.numel() // 2 * 2
    pairs = vector[:even].view(torch.int64)
    whole = pairs.numel() // _ROW * _ROW
    table, rest = pairs[:whole].view(-1, _ROW), pairs[whole:]
    total = _scrambled(torch.cat((table.sum(dim=1), table.sum(dim=0), rest)))
    return total + vector[even:].view(torch.int32).sum(dtype=torch.int64)


def as_text(total: int) -> str:
    """A checksum as 16 hex digits."""
    return f"{total % (1 << 64):016x}"


def _scrambled(sums: Tensor) -> Tensor:
    """Their sum after splitmix64 of each and its position (Steele et al. 2014); everything wraps, as integers do."""
    mixed = torch.arange(1, sums.numel() + 1, dtype=torch.int64, device=sums.device) * _STRIDE
    mixed ^= sums
    for shift, factor in _MIXES:
        mixed ^= (mixed >> shift) & ((1 << (64 - shift)) - 1)  # torch would shift the sign in
        mixed *= factor
    return mixed.sum()
