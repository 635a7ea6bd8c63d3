"""Range lists against sets of elements."""

from hypothesis import given
from hypothesis import strategies as st

from wire import ranges

SPAN = 40
pairs = st.lists(st.tuples(st.integers(0, SPAN), st.integers(0, SPAN)), max_size=6)


def members(of: ranges.Ranges) -> set[int]:
    return {element for start, stop in of for element in range(start, stop)}


@given(pairs)
def test_normalized_holds_the_same_elements_in_the_fewest_ranges(given_pairs: ranges.Ranges) -> None:
    made = ranges.normalized(given_pairs)
    assert members(made) == members(given_pairs)
    assert ranges.problem(made, SPAN) == ""
    assert ranges.elements(made) == len(members(made))


@given(pairs, pairs)
def test_intersection_union_and_complement_are_those_of_sets(first: ranges.Ranges, second: ranges.Ranges) -> None:
    a, b = ranges.normalized(first), ranges.normalized(second)
    assert members(ranges.intersection(a, b)) == members(a) & members(b)
    assert members(ranges.union(a, b)) == members(a) | members(b)
    assert members(ranges.complement(a, 3, 30)) == set(range(3, 30)) - members(a)
    for made in (ranges.intersection(a, b), ranges.union(a, b), ranges.complement(a, 3, 30)):
        assert ranges.problem(made, SPAN) == ""


@given(pairs, st.integers(1, 7))
def test_cut_loses_nothing_and_keeps_the_order(given_pairs: ranges.Ranges, longest: int) -> None:
    made = ranges.normalized(given_pairs)
    pieces = list(ranges.cut(made, longest))
    assert [element for start, stop in pieces for element in range(start, stop)] == sorted(members(made))
    assert all(0 < stop - start <= longest for start, stop in pieces)


def test_what_a_peer_sends_is_checked() -> None:
    assert ranges.problem([(0, 2), (3, 5)], 5) == ""
    for bad in ([(0, 6)], [(2, 2)], [(3, 4), (1, 2)], [(0, 2), (2, 4)], [(-1, 2)]):
        assert ranges.problem(bad, 5)
