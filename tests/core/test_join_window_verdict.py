"""The verdict on the window and the phase table, row by row (behaviour B5, B6, B14)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.core.join_phases import (
    END_PHASES,
    OPEN_PHASES,
    PHASES,
    Terms,
    can_move,
    judge,
    missing_to_start,
)

# ------------------------------------------------------------------------------------------- B5, as data


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", "waiting"),
        ("waiting", "staging"),
        ("waiting", "forming"),
        ("staging", "forming"),
        ("waiting", "failed"),
        ("staging", "failed"),
        ("forming", "training"),
        ("training", "done"),
        ("training", "failed"),
        # ours beyond B5: a host may leave while staging, forming has a ceiling, a controller may stop
        ("staging", "waiting"),
        ("forming", "failed"),
        ("training", "interrupted"),
    ],
)
def test_the_phase_table_has_every_row(before, after):
    assert can_move(before, after)
    assert PHASES[before, after]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", "staging"),
        ("waiting", "training"),
        ("forming", "waiting"),
        ("forming", "done"),
        ("training", "forming"),
        ("waiting", "done"),
        ("waiting", "waiting"),
    ],
)
def test_the_phase_table_has_no_other_row(before, after):
    assert not can_move(before, after)


def test_an_end_is_an_end_and_every_phase_reaches_one():
    assert not [move for move in PHASES if move[0] in END_PHASES]
    live = {before for before, _ in PHASES if before}
    assert live == {"waiting", "staging", "forming", "training"}
    assert all(can_move(phase, "failed") and can_move(phase, "interrupted") for phase in live)


# ------------------------------------------------------------------------------------------- B6, in order


def verdict(mode, joined, elapsed, armed=False, *, quorum=2, target=None):
    return judge(Terms(mode, quorum, target, 300.0, 600.0), joined, elapsed, armed)


@pytest.mark.parametrize(
    ("rule", "mode", "joined", "elapsed", "armed", "target", "action", "code"),
    [
        (1, "manual", 2, 0, True, None, "form", "operator_start"),
        (1, "hybrid", 2, 0, True, None, "form", "operator_start"),
        (1, "manual", 2, 9999, True, None, "form", "operator_start"),  # before rule 6
        (1, "hybrid", 4, 0, True, 4, "form", "operator_start"),  # before rule 2
        (2, "auto", 4, 0, False, 4, "form", "target_reached"),
        (2, "hybrid", 5, 0, False, 4, "form", "target_reached"),
        (2, "auto", 4, 0, True, 4, "form", "target_reached"),  # an auto window has no start switch
        (3, "auto", 2, 0, False, None, "open", "window_open"),  # an early quorum does not close
        (3, "auto", 3, 299.9, False, 4, "open", "window_open"),
        (3, "auto", 2, 0, True, None, "open", "window_open"),
        (3, "manual", 4, 0, False, 4, "open", "window_open"),  # rule 2 is not for manual
        (3, "manual", 1, 299.9, True, None, "open", "window_open"),  # armed, but no quorum
        (4, "auto", 2, 300, False, None, "form", "window_ended_with_quorum"),
        (4, "hybrid", 3, 300, False, 4, "form", "window_ended_with_quorum"),
        (4, "auto", 2, 9999, False, None, "form", "window_ended_with_quorum"),  # before rule 5 and 7
        (5, "auto", 1, 300, False, None, "open", "grace"),
        (5, "hybrid", 1, 599.9, True, None, "open", "grace"),
        (5, "manual", 2, 300, False, None, "open", "grace"),  # past the window, the operator may still start
        (5, "manual", 0, 599.9, False, None, "open", "grace"),
        (6, "manual", 2, 600, False, None, "fail", "operator_start_missing"),
        (7, "auto", 1, 600, False, None, "fail", "quorum_not_met"),
        (7, "manual", 1, 600, True, None, "fail", "quorum_not_met"),
        (7, "hybrid", 0, 9999, False, 4, "fail", "quorum_not_met"),
    ],
)
def test_the_verdict_by_its_rules(rule, mode, joined, elapsed, armed, target, action, code):
    found = verdict(mode, joined, elapsed, armed, target=target)

    assert (found.action, found.code) == (action, code)


@pytest.mark.parametrize(
    ("mode", "joined", "phase"),
    [
        ("auto", 1, "waiting"),
        ("auto", 2, "waiting"),
        ("manual", 1, "waiting"),
        ("manual", 2, "staging"),
        ("hybrid", 2, "staging"),
    ],
)
@pytest.mark.parametrize("elapsed", [0, 300])
def test_the_open_phase(mode, joined, phase, elapsed):
    assert verdict(mode, joined, elapsed).phase == phase


@pytest.mark.parametrize(
    ("case", "sentence"),
    [
        (("manual", 3, 0, True), "The operator started the run with 3 ranks joined."),
        (("auto", 4, 0, False, 4), "The target of 4 ranks is reached: 4 ranks joined."),
        (("auto", 1, 0), "Waiting for hosts: 1 of 2 needed ranks joined."),
        (
            ("manual", 1, 0, True),
            "Waiting for hosts: 1 of 2 needed ranks joined. The start is armed and takes effect with the quorum.",
        ),
        (("manual", 2, 0), "Ready with 2 ranks: waiting for the operator to start."),
        (("auto", 2, 0), "Enough with 2 ranks: the run starts once the window ends."),
        (("auto", 2, 0, False, 4), "Enough with 2 ranks: the run starts once 4 ranks joined or the window ends."),
        (
            ("hybrid", 2, 0),
            "Ready with 2 ranks: the operator may start, or the run starts once the window ends.",
        ),
        (("auto", 2, 300), "The window of 300 s ended with 2 ranks joined; 2 were needed."),
        (
            ("auto", 1, 300),
            "The window is past with 1 of 2 needed ranks; the rest must join before the hard cap of 600 s.",
        ),
        (
            ("manual", 2, 300),
            "Ready with 2 ranks: the window is past, and the operator must start before the hard cap of 600 s.",
        ),
        (
            ("manual", 2, 600),
            "The quorum was met with 2 ranks joined, but nobody started the run within the hard cap of 600 s.",
        ),
        (("auto", 1, 600), "Only 1 of 2 needed ranks joined within the hard cap of 600 s."),
    ],
)
def test_what_the_operator_reads(case, sentence):
    mode, joined, elapsed, armed, target = (*case, *(False, None)[len(case) - 3 :])

    assert verdict(mode, joined, elapsed, armed, target=target).reason == sentence


@st.composite
def lawful_terms(draw) -> Terms:
    mode = draw(st.sampled_from(["auto", "manual", "hybrid"]))
    quorum = draw(st.integers(2, 20))
    target = None if mode == "manual" else draw(st.one_of(st.none(), st.integers(quorum, 40)))
    window = draw(st.floats(1.0, 1000.0))
    return Terms(mode, quorum, target, window, window + draw(st.floats(0.0, 1000.0)))


@given(terms=lawful_terms(), joined=st.integers(0, 50), elapsed=st.floats(0.0, 5000.0), armed=st.booleans())
def test_there_is_always_a_verdict_and_it_is_lawful(terms, joined, elapsed, armed):
    found = judge(terms, joined, elapsed, armed)

    quorate, pressed = joined >= terms.quorum, armed and terms.start_mode != "auto"
    assert found.reason.endswith(".")
    assert found.phase in OPEN_PHASES
    assert found.phase == ("staging" if quorate and terms.start_mode != "auto" else "waiting")
    if found.action == "form":
        assert quorate  # no rule forms a world without a quorum
        assert pressed or terms.start_mode != "manual"
    if found.action == "fail":
        assert elapsed >= terms.cap_seconds
        assert not (quorate and pressed)
    if elapsed >= terms.cap_seconds:
        assert found.action != "open"  # nothing is open for ever
    if quorate and pressed:
        assert found.action == "form"


@given(terms=lawful_terms(), joined=st.integers(0, 50))
def test_time_alone_never_takes_a_verdict_back(terms, joined):
    order = {"open": 0, "form": 1, "fail": 1}
    moments = [0.0, terms.window_seconds, terms.cap_seconds, 10 * terms.cap_seconds]

    found = [judge(terms, joined, elapsed, False) for elapsed in moments]

    ranks = [order[verdict.action] for verdict in found]
    assert ranks == sorted(ranks)
    assert len({verdict.action for verdict in found} - {"open"}) == 1


# ------------------------------------------------------------------------------------- B14, the checklist


@pytest.mark.parametrize(
    ("mode", "joined", "codes"),
    [
        ("auto", 0, ["start_mode_auto", "quorum_not_met"]),
        ("auto", 2, ["start_mode_auto"]),
        ("manual", 1, ["quorum_not_met"]),
        ("hybrid", 0, ["quorum_not_met"]),
        ("manual", 2, []),
        ("hybrid", 9, []),
    ],
)
def test_what_is_missing_to_start(mode, joined, codes):
    missing = missing_to_start(Terms(mode, 2, None, 300.0, 600.0), joined)

    assert [each.code for each in missing] == codes
    assert all(each.text and each.cure for each in missing)


def test_the_missing_quorum_is_said_with_its_counts():
    (missing,) = missing_to_start(Terms("manual", 4, None, 300.0, 600.0), 1)

    assert missing.text == "1 of 4 needed ranks joined."
    assert missing.cure == "Let 3 ranks more dial in, or lower the quorum."
