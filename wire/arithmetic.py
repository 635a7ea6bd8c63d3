"""The arithmetic of a round: f32, element by element, in one fixed order, each operation rounded once.

Every fold tier and every holder of the consensus uses these functions, so equal inputs give equal bits wherever they
are folded, however they are cut (behaviour A1, A2; decision 0014; pseudo-gradients: Reddi et al. 2020,
arXiv:2003.00295). With ``base`` the last consensus (none: the initial broadcast):

    contribution of a host   H = sum over its ranks, ascending, of f32(mass) * (base - value)     [mass * value]
    in bf16                  H is rounded to bf16 where it is folded, before anybody adds it
    sum at the root          S = sum over the hosts, ascending, of H
    update                   u = S * f32(1 / total mass), rounded to bf16 if the run says so
    new consensus            base - u                                                              [u]

Where nothing changed, ``base - value`` is +0.0, so is every product and sum, and ``base - 0.0`` has ``base``'s bits,
-0.0 included. Elements that a stream leaves out count as +0.0.

All arrays are one-dimensional and contiguous. Any thread may call anything; work goes on in blocks that stay in the
cache, and numpy releases the GIL within each.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

F32 = np.dtype("<f4")
BF16 = np.dtype("<u2")
"""bf16 as its bits: the upper half of an f32"""
FloatArray = npt.NDArray[np.float32]
BitsArray = npt.NDArray[np.uint16]

BLOCK_ELEMENTS = 1 << 19
"""elements of one block: 2 MiB, within a cache, and long enough that threads seldom wait for Python between blocks"""
_ROW = 1 << 13
"""elements of one BLAS dot product: below the length at which BLAS would start threads of its own"""

_LINE_BYTES = 64

_HALF, _ODD, _SHIFT, _UPPER = np.uint32(0x7FFF), np.uint32(1), np.uint32(16), np.uint32(0xFFFF0000)
_QUIET = np.uint32(0x00400000)


def aligned(elements: int) -> FloatArray:
    """An array, (elements,) f32, not set, that begins where a cache line does: the allocator's begin in the middle of
    one, and every wide load then touches two, which costs a fifth or more of the time."""
    memory = np.empty(elements * F32.itemsize + _LINE_BYTES, np.uint8)
    start = -memory.ctypes.data % _LINE_BYTES
    return memory[start : start + elements * F32.itemsize].view(F32)


class Scratch(threading.local):
    """A thread's blocks to work in, made when the thread first needs them."""

    def __init__(self) -> None:
        self.product: FloatArray = aligned(BLOCK_ELEMENTS)
        """overwritten by every function here"""
        self.bits: npt.NDArray[np.uint32] = aligned(BLOCK_ELEMENTS).view(np.uint32)
        """overwritten by the bf16 functions"""
        self.free: tuple[FloatArray, FloatArray] = (aligned(BLOCK_ELEMENTS), aligned(BLOCK_ELEMENTS))
        """two blocks that no function here touches, for the caller"""


scratch = Scratch()
"""this thread's own"""


def blocks(elements: int) -> Iterator[slice]:
    """0 to ``elements`` in slices of at most ``BLOCK_ELEMENTS``."""
    for start in range(0, elements, BLOCK_ELEMENTS):
        yield slice(start, min(start + BLOCK_ELEMENTS, elements))


def reciprocal(mass: float) -> np.float32:
    """The one division of a round: 1 / total mass, as f32. ``mass`` is above zero."""
    return np.float32(1.0 / mass)


def contribution(
    base: FloatArray | None, values: Sequence[FloatArray], masses: Sequence[float], out: FloatArray
) -> None:
    """Write the sum of ``mass * (base - value)`` to ``out``; of ``mass * value`` without a base.

    ``values`` are the ranks' (n,) in ascending rank order, ``masses`` their weights, all above zero (leave the idle
    out: they are not read). ``out`` is (n,) and none of the others. Raises ``ValueError`` without ranks.
    """
    if not values or len(values) != len(masses):
        raise ValueError(f"{len(values)} ranks' values and {len(masses)} masses make no contribution")
    weights = [np.float32(mass) for mass in masses]
    with np.errstate(all="ignore"):  # whoever owns the values looks for what is not finite
        for cut in blocks(out.size):
            start = None if base is None else base[cut]
            _weigh(start, values[0][cut], weights[0], out[cut])
            for value, weight in zip(values[1:], weights[1:], strict=True):
                product = scratch.product[: cut.stop - cut.start]
                _weigh(start, value[cut], weight, product)
                np.add(out[cut], product, out=out[cut])


def add(total: FloatArray, more: FloatArray | None) -> None:
    """``total += more``; none stands for a contribution that left these elements out, which counts as +0.0."""
    with np.errstate(all="ignore"):
        np.add(total, np.float32(0.0) if more is None else more, out=total)


def apply(base: FloatArray | None, update: FloatArray, out: FloatArray) -> None:
    """The new consensus ``base - update``, or ``update`` itself without a base. All (n,); ``out`` may be ``update``."""
    if base is None:
        np.copyto(out, update)
        return
    with np.errstate(all="ignore"):
        np.subtract(base, update, out=out)


def encode_bf16(values: FloatArray, out: BitsArray) -> None:
    """Round to bf16, to nearest, ties to even; infinities stay, NaN stays a quiet NaN. Both (n,)."""
    for cut in blocks(values.size):
        np.right_shift(_rounded(values[cut]), _SHIFT, out=out[cut], casting="unsafe")


def decode_bf16(encoded: BitsArray, out: FloatArray) -> None:
    """The f32 values of bf16 bits, exactly. Both (n,)."""
    bits = out.view(np.uint32)
    for cut in blocks(encoded.size):
        np.copyto(bits[cut], encoded[cut])
        np.left_shift(bits[cut], _SHIFT, out=bits[cut])


def round_bf16(values: FloatArray) -> None:
    """In place, what encoding and decoding make of ``values``."""
    bits = values.view(np.uint32)
    for cut in blocks(values.size):
        np.bitwise_and(_rounded(values[cut]), _UPPER, out=bits[cut])


def all_finite(values: FloatArray) -> bool:
    """Whether no element is NaN or infinite: squares are summed, and only a sum that is not finite is looked into."""
    rows = values.size // _ROW * _ROW
    with np.errstate(all="ignore"):
        whole, rest = values[:rows], values[rows:]
        squares = float(np.dot(rest, rest))
        if rows:
            squares += float(np.matmul(whole.reshape(-1, 1, _ROW), whole.reshape(-1, _ROW, 1)).sum())
    return bool(np.isfinite(squares)) or bool(np.isfinite(values).all())


def first_non_finite(values: FloatArray) -> tuple[int, str] | None:
    """Index and name (``nan``, ``inf``, ``-inf``) of the first element that is not finite; None if all are."""
    for cut in blocks(values.size):
        block = values[cut]
        if not all_finite(block):
            index = int(np.flatnonzero(~np.isfinite(block))[0])
            return cut.start + index, name(float(block[index]))
    return None


def name(value: float) -> str:
    """How a value that is not finite is called: nan, inf or -inf."""
    return "nan" if value != value else ("inf" if value > 0 else "-inf")


def _weigh(base: FloatArray | None, value: FloatArray, weight: np.float32, out: FloatArray) -> None:
    """``weight * (base - value)`` of one block. Times one changes no bit, so it is left out."""
    if base is None:
        np.multiply(value, weight, out=out)
        return
    np.subtract(base, value, out=out)
    if weight != 1:
        np.multiply(out, weight, out=out)


def _rounded(block: FloatArray) -> npt.NDArray[np.uint32]:
    """The block's bits in this thread's scratch, rounded so that their upper halves are the bf16 bits."""
    bits, rounded = block.view(np.uint32), scratch.bits[: block.size]
    np.right_shift(bits, _SHIFT, out=rounded)
    np.bitwise_and(rounded, _ODD, out=rounded)
    np.add(rounded, bits, out=rounded)
    np.add(rounded, _HALF, out=rounded)
    if not all_finite(block):  # a NaN's payload may round away, or carry into the sign
        bad = np.isnan(block)
        rounded[bad] = bits[bad] | _QUIET
    return rounded
