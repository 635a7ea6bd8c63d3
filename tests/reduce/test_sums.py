"""The arithmetic of one slice."""

from __future__ import annotations

import numpy as np
import pytest

from backend.reduce.sums import FloatArray, NonFinite, reciprocal, sum_slice


def floats(*values: float) -> FloatArray:
    return np.array(values, dtype=np.float32)


def total(*contributions: list[FloatArray], scale: float = 1.0) -> list[float]:
    out = np.full(sum(piece.size for piece in contributions[0]), 99, dtype=np.float32)
    assert sum_slice(contributions, out, np.float32(scale)) is None
    return out.tolist()


def test_sums_and_divides_once() -> None:
    assert total([floats(9, 3)], [floats(1, 1)], scale=0.25) == [2.5, 1.0]


def test_pieces_may_be_cut_anywhere() -> None:
    whole = total([floats(1, 2, 3, 4)], [floats(5, 6, 7, 8)])
    assert total([floats(1), floats(2, 3), floats(4)], [floats(5, 6, 7), floats(8)]) == whole


def test_order_of_addition_is_the_order_given() -> None:
    big, small = floats(2**24), floats(1)
    assert total([big], [small], [small]) == [2**24], "f32 rounds each single step away here"
    assert total([small], [small], [big]) == [2**24 + 2]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_blames_the_first_contributor_and_its_first_bad_element(bad: float) -> None:
    out = np.empty(4, dtype=np.float32)
    good, culprit = floats(1, 2, 3, 4), [floats(1), floats(2, 3, bad)]
    found = sum_slice([[good], culprit, [floats(bad, 1, 1, 1)]], out, np.float32(1))
    assert found is not None
    assert (found.contributor, found.index) == (1, 3)
    assert np.float32(found.value).tobytes() == np.float32(bad).tobytes()


def test_opposite_infinities_do_not_hide() -> None:
    out = np.empty(2, dtype=np.float32)
    found = sum_slice([[floats(1, np.inf)], [floats(1, -np.inf)]], out, np.float32(1))
    assert found == NonFinite(0, 1, np.inf)


def test_a_sum_that_overflows_blames_nobody() -> None:
    out = np.empty(2, dtype=np.float32)
    found = sum_slice([[floats(1, 3e38)], [floats(1, 3e38)]], out, np.float32(0.5))
    assert found == NonFinite(None, 1, np.inf)


def test_a_short_contribution_is_an_error() -> None:
    with pytest.raises(ValueError, match="contributor 1 has 1 elements of a slice of 2"):
        sum_slice([[floats(1, 2)], [floats(1)]], np.empty(2, dtype=np.float32), np.float32(1))


@pytest.mark.parametrize("mass", [1e-30, 0.1, 1.0, 3.0, 1e30])
def test_reciprocal_is_usable_over_all_legal_masses(mass: float) -> None:
    scale = reciprocal(mass)
    assert scale.dtype == np.float32
    assert np.isfinite(scale)
    assert scale >= np.finfo(np.float32).tiny
