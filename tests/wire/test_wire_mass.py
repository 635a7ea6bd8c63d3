"""The mass algebra (behaviour A3 to A6, A12)."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from wire_ends import UNHURRIED

from wire.mass import gamma_mass, is_realized, mover_mass

GAMMAS = st.floats(min_value=-4.0, max_value=4.0, allow_nan=False)


@pytest.mark.parametrize(
    ("counts", "gamma", "masses"),
    [
        ([2, 4, 0], 0.5, [math.sqrt(2), 2.0, 0.0]),
        ([2, 4, 0], 0.0, [1.0, 1.0, 0.0]),
        ([4, 2], -1.0, [0.25, 0.5]),
        ([3, 5, 0], 1.0, [3.0, 5.0, 0.0]),
        ([3, 5], 2.0, [9.0, 25.0]),
    ],
)
def test_a12_worked_examples(counts: list[int], gamma: float, masses: list[float]) -> None:
    assert [gamma_mass(count, gamma) for count in counts] == pytest.approx(masses, rel=1e-15, abs=0)


@given(steps=st.integers(max_value=0), gamma=GAMMAS)
@UNHURRIED
def test_a5_an_idle_rank_has_no_mass_whatever_gamma(steps: int, gamma: float) -> None:
    assert gamma_mass(steps, gamma) == 0.0
    assert mover_mass(steps) == 0.0


@given(steps=st.integers(1, 10**6), gamma=GAMMAS)
@UNHURRIED
def test_a3_a_mover_has_finite_positive_mass(steps: int, gamma: float) -> None:
    mass = gamma_mass(steps, gamma)
    assert 0.0 < mass < math.inf
    assert is_realized(mass)


@given(steps=st.integers(1, 2**53))
@UNHURRIED
def test_a3_gamma_one_counts_exactly(steps: int) -> None:
    assert gamma_mass(steps, 1.0) == steps


@given(steps=st.integers(1, 10**9))
@UNHURRIED
def test_a4_movers_count_alike(steps: int) -> None:
    assert mover_mass(steps) == 1.0


@pytest.mark.parametrize(
    ("mass", "realized"), [(0.0, False), (-0.0, False), (-1.0, False), (math.nan, False), (5e-324, True), (3.0, True)]
)
def test_a4_realized_means_above_zero(mass: float, realized: bool) -> None:
    assert is_realized(mass) is realized


@given(counts=st.lists(st.integers(0, 10**4), min_size=1, max_size=8), gamma=GAMMAS)
@UNHURRIED
def test_a6_both_rounds_are_realized_exactly_when_someone_worked(counts: list[int], gamma: float) -> None:
    worked = any(counts)
    assert is_realized(sum(gamma_mass(count, gamma) for count in counts)) is worked
    assert is_realized(sum(mover_mass(count) for count in counts)) is worked


@given(counts=st.lists(st.integers(1, 10**4), min_size=1, max_size=8))
@UNHURRIED
def test_a6_with_gamma_minus_one_every_step_weighs_the_same(counts: list[int]) -> None:
    """A rank's parameters carry its steps' sum, so mass 1/n makes each step's share alike: n * (1/n) is one."""
    assert all(count * gamma_mass(count, -1.0) == pytest.approx(1.0) for count in counts)
