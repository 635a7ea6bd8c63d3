"""The arithmetic of a round: exact where it must be, equal to the bit however it is cut."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from wire import arithmetic
from wire.arithmetic import BF16, BLOCK_ELEMENTS, F32, FloatArray

BITS = arrays(np.uint32, st.integers(1, 40), elements=st.integers(0, 0xFFFFFFFF))
MASS = st.floats(2**-20, 2**20, width=32)


def floats(*values: float) -> FloatArray:
    return np.array(values, dtype=F32)


def bits(values: FloatArray) -> list[int]:
    return values.view(np.uint32).tolist()


def contribution(base: FloatArray | None, values: list[FloatArray], masses: list[float]) -> FloatArray:
    out = np.full_like(values[0], 99)
    arithmetic.contribution(base, values, masses, out)
    return out


def round_of(base: FloatArray, hosts: list[tuple[list[FloatArray], list[float]]], bf16: bool) -> FloatArray:
    """One round as every tier together computes it."""
    total = np.zeros_like(base)
    for values, masses in hosts:
        share = contribution(base, values, masses)
        if bf16:
            arithmetic.round_bf16(share)
        arithmetic.add(total, share)
    update = total * arithmetic.reciprocal(sum(mass for _, masses in hosts for mass in masses))
    if bf16:
        arithmetic.round_bf16(update)
    new = np.empty_like(base)
    arithmetic.apply(base, update, new)
    return new


@pytest.mark.parametrize(
    ("steps", "value"),
    [([3, 1], 2.5), ([4, 1], 3.4), ([6, 2, 1], 41 / 9), ([4, 4], 4.0), ([5], 5.0)],
)
def test_odometers(steps: list[int], value: float) -> None:
    """A model whose one weight counts steps: the average over steps, weighted by steps."""
    hosts = [([floats(n)], [float(n)]) for n in steps]
    assert round_of(floats(0), hosts, bf16=False).tolist() == [pytest.approx(value, rel=1.2e-7)]


@settings(max_examples=200, deadline=None)
@given(bits=BITS, masses=st.lists(st.lists(MASS, min_size=1, max_size=3), min_size=1, max_size=4), bf16=st.booleans())
def test_what_nobody_moved_keeps_every_bit(bits: np.ndarray, masses: list[list[float]], bf16: bool) -> None:
    base = bits.view(F32)
    base = np.where(np.isfinite(base), base, np.float32(-0.0))
    new = round_of(base, [([base] * len(each), each) for each in masses], bf16)
    assert new.tobytes() == base.tobytes()


def test_negative_zero_survives_at_any_mass() -> None:
    base = floats(-0.0, 0.0, 1e-45)
    new = round_of(base, [([base, base], [3, 0.3]), ([base], [1.7])], bf16=False)
    assert bits(new) == [0x80000000, 0, 1]


def test_first_broadcast_is_the_values_to_the_bit() -> None:
    values = floats(-0.0, 1.1, 3e38, -1e-45)
    assert contribution(None, [values], [1.0]).tobytes() == values.tobytes()


def test_each_operation_rounds_once_in_rank_order() -> None:
    rng = np.random.default_rng(1)
    base, first, second, third = (rng.standard_normal(1000).astype(F32) for _ in range(4))
    a, b, c = np.float32(3), np.float32(0.7), np.float32(1)
    expected = ((base - first) * a + (base - second) * b) + (base - third) * c
    assert contribution(base, [first, second, third], [3, 0.7, 1]).tobytes() == expected.tobytes()


@pytest.mark.parametrize("size", [BLOCK_ELEMENTS - 1, BLOCK_ELEMENTS, BLOCK_ELEMENTS + 1, 2 * BLOCK_ELEMENTS + 77])
def test_blocks_change_no_bit(size: int) -> None:
    rng = np.random.default_rng(size)
    base, value, other = (rng.standard_normal(size).astype(F32) for _ in range(3))
    whole = contribution(base, [value, other], [3, 5])
    cut = size // 3
    pieces = [contribution(base[at], [value[at], other[at]], [3, 5]) for at in (slice(cut), slice(cut, None))]
    assert whole.tobytes() == b"".join(piece.tobytes() for piece in pieces)
    encoded, decoded = np.empty(size, BF16), np.empty(size, F32)
    arithmetic.encode_bf16(whole, encoded)
    arithmetic.decode_bf16(encoded, decoded)
    arithmetic.round_bf16(whole)
    assert whole.tobytes() == decoded.tobytes()


def test_left_out_counts_as_positive_zero() -> None:
    total = floats(-0.0, 0.0, 2)
    arithmetic.add(total, None)
    assert bits(total) == bits(floats(0.0, 0.0, 2))


def test_a_contribution_needs_a_mass_for_each_rank() -> None:
    with pytest.raises(ValueError, match="1 ranks' values and 2 masses"):
        contribution(None, [floats(1)], [1, 2])
    with pytest.raises(ValueError, match="0 ranks' values"):
        arithmetic.contribution(None, [], [], floats(1))


# --------------------------------------------------------------------------------------------------------- bf16


def by_definition(value: np.float32) -> int:
    """bf16 by arithmetic on Python integers: nearest, ties to even."""
    pattern = int(np.asarray(value).view(np.uint32))
    if value != value:
        return (pattern >> 16) | 0x40
    lower, upper = pattern & 0xFFFF, pattern >> 16
    return upper + (lower > 0x8000 or (lower == 0x8000 and upper & 1))


@settings(max_examples=300, deadline=None)
@given(pattern=BITS)
def test_bf16_rounds_to_nearest_even(pattern: np.ndarray) -> None:
    values = pattern.view(F32)
    encoded = np.empty(values.size, BF16)
    arithmetic.encode_bf16(values, encoded)
    assert encoded.tolist() == [by_definition(value) for value in values]
    decoded, rounded = np.empty_like(values), values.copy()
    arithmetic.decode_bf16(encoded, decoded)
    arithmetic.round_bf16(rounded)
    assert decoded.tobytes() == rounded.tobytes()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (0x7F800001, 0x7FC0),  # a signalling NaN whose payload lies below
        (0xFFFFFFFF, 0xFFFF),  # would carry into the sign
        (0x7F800000, 0x7F80),  # infinity
        (0xFF800000, 0xFF80),
        (0x7F7FFFFF, 0x7F80),  # the largest f32 is nearer to infinity's place
        (0x80000000, 0x8000),  # -0.0
        (0x3F808000, 0x3F80),  # ties to even
        (0x3F818000, 0x3F82),
    ],
)
def test_bf16_at_the_edges(before: int, after: int) -> None:
    encoded = np.empty(1, BF16)
    arithmetic.encode_bf16(np.array([before], np.uint32).view(F32), encoded)
    assert encoded[0] == after


def test_bf16_is_exact_for_bf16() -> None:
    every = np.arange(1 << 16, dtype=BF16)
    decoded, again = np.empty(every.size, F32), np.empty_like(every)
    arithmetic.decode_bf16(every, decoded)
    arithmetic.encode_bf16(decoded, again)
    nan = np.isnan(decoded)
    assert (again[~nan] == every[~nan]).all()
    assert (again[nan] == every[nan] | 0x40).all()


# ------------------------------------------------------------------------------------------------- not finite


@pytest.mark.parametrize("at", [0, 1, 8191, 8192, 20_000, BLOCK_ELEMENTS, BLOCK_ELEMENTS + 5])
@pytest.mark.parametrize(("bad", "called"), [(np.nan, "nan"), (np.inf, "inf"), (-np.inf, "-inf")])
def test_finds_the_first_that_is_not_finite(at: int, bad: float, called: str) -> None:
    values = np.ones(BLOCK_ELEMENTS + 6, F32)
    assert arithmetic.first_non_finite(values) is None
    values[at] = bad
    values[-1] = np.nan if at < values.size - 1 else bad
    assert not arithmetic.all_finite(values)
    assert arithmetic.first_non_finite(values) == (at, called)


def test_large_values_are_finite() -> None:
    values = np.full(20_000, 3e38, F32)
    assert arithmetic.all_finite(values)
    assert arithmetic.first_non_finite(values) is None
