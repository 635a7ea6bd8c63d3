"""The first host to be late is found without looking at all of them, and is the same as if all were looked at."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from backend.core.liveness import Liveness

TIMEOUT = 10.0
HOSTS = st.integers(0, 4)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), HOSTS),
        st.tuples(st.just("remove"), HOSTS),
        st.tuples(st.just("heard"), HOSTS),
        st.tuples(st.just("lagged"), st.sampled_from([0, 3, 40])),
        st.tuples(st.just("wait"), st.sampled_from([0, 1, 4])),
    ),
    max_size=60,
)


class EveryHost:
    """The same bookkeeping, looking at every host each time."""

    def __init__(self) -> None:
        self.deadlines: dict[int, tuple[float, float]] = {}

    def first(self) -> float | None:
        return min((heard + extra + TIMEOUT for heard, extra in self.deadlines.values()), default=None)

    def late(self, now: float) -> list[int]:
        return sorted(host for host, (heard, extra) in self.deadlines.items() if heard + extra + TIMEOUT <= now)


@given(STEPS)
def test_the_queue_agrees_with_looking_at_everybody(steps: list[tuple[str, int]]) -> None:
    liveness, plain, now = Liveness(TIMEOUT), EveryHost(), 0.0
    for act, value in steps:
        match act:
            case "add":
                liveness.add(value, now)
                plain.deadlines[value] = (now, 0.0)
            case "remove":
                liveness.remove(value)
                plain.deadlines.pop(value, None)
            case "heard":
                liveness.heard(value, now)
                if value in plain.deadlines:
                    plain.deadlines[value] = (now, 0.0)
            case "lagged":
                liveness.lagged(float(value))
                plain.deadlines = {host: (heard, extra + value) for host, (heard, extra) in plain.deadlines.items()}
            case "wait":
                now += value
        assert liveness.next_deadline() == plain.first()
        assert liveness.late(now) == plain.late(now)


def test_what_is_kept_does_not_grow_with_what_is_heard() -> None:
    liveness = Liveness(TIMEOUT)
    for host in range(4):
        liveness.add(host, 0.0)
    for beat in range(1000):
        for host in range(4):
            liveness.lagged(0.5)
            liveness.heard(host, float(beat))
            liveness.next_deadline()
    assert len(liveness._queue) < 50
