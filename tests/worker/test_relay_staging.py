"""The relay's way down: which updates are taken in, what becomes of the consensus, when the ranks may adopt it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from wire import arithmetic
from wire.messages import RequestParams, RoundAborted, RoundCommitted, UpdateComing
from wire.ranges import Ranges
from wire.session import ChunkHeader, Encoding, Section
from wire.streams import slices
from worker.fold import Model
from worker.folding import ConsensusPair
from worker.staging import Staging, StagingError

MODEL = Model(params_elements=10, buffers_elements=4)


def header(offset: int, elements: int, round_: int = 0, attempt: int = 0, **changes: int) -> ChunkHeader:
    values = {"section": Section.PARAMS if offset < MODEL.params_elements else Section.BUFFERS} | changes
    return ChunkHeader(round_ & 0xFFFFFFFF, attempt, offset=offset, elements=elements, **values)


def opened(round_: int = 0, attempt: int = 0, encoding: int = Encoding.F32) -> Staging:
    state = Staging()
    state.opened(RequestParams(round_, attempt, initial=round_ < 0, encoding=encoding))
    return state


def coming(round_: int = 0, attempt: int = 0, still: Ranges | None = None, path: str = "") -> UpdateComing:
    return UpdateComing(round_, attempt, absolute=round_ < 0, still=still or [], path=path)


def staging(still: Ranges | None = None, round_: int = 0, attempt: int = 0, encoding: int = Encoding.F32) -> Staging:
    state = opened(round_, attempt, encoding)
    assert state.coming(coming(round_, attempt, still), MODEL)
    return state


def stage(state: Staging, *headers: ChunkHeader) -> list[RoundCommitted | None]:
    return [state.staged(chunk) for chunk in headers if state.accepts(chunk, MODEL)]


ALL = (header(0, 6), header(6, 4), header(10, 4))


def commit(*, realized: bool = True, round_: int = 0, attempt: int = 0) -> RoundCommitted:
    return RoundCommitted(round=round_, attempt=attempt, realized=realized, buffers_realized=realized)


def test_ranks_hear_now_and_then_how_much_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.staging.TELL_ELEMENTS", 4)
    state = staging(still=[(0, 1), (5, 6)])
    told = []
    for chunk in (header(1, 2), header(3, 2), header(6, 4), header(10, 4)):
        stage(state, chunk)
        told.append(state.news())
    assert told == [0, 5, 10, 14]
    assert state.number == (0, 0)
    state.aborted(RoundAborted(0, 0, ""))
    assert state.news() == 0


# ------------------------------------------------------------------------------------------------ when to adopt


def test_commit_after_the_stream() -> None:
    state = staging()
    assert stage(state, *ALL) == [None, None, None]
    assert state.committed(commit()) == commit()
    assert state.committed(commit()) is None, "passed on once"


def test_commit_before_the_end_of_the_stream_waits_for_it() -> None:
    """The two links have no common order."""
    state = staging()
    assert stage(state, ALL[0]) == [None]
    assert state.committed(commit()) is None
    assert stage(state, ALL[1], ALL[2]) == [None, commit()]


def test_commit_before_anything_was_announced_waits_too() -> None:
    state = opened()
    assert state.committed(commit()) is None
    assert state.coming(coming(), MODEL)
    assert state.release() is None
    assert stage(state, *ALL) == [None, None, commit()]


def test_what_is_accepted_and_not_yet_built_is_waited_for() -> None:
    state = staging()
    assert all(state.accepts(chunk, MODEL) for chunk in ALL)
    state.staged(ALL[0])
    state.staged(ALL[1])
    assert state.committed(commit()) is None
    assert state.staged(ALL[2]) == commit()


def test_a_round_without_work_is_passed_on_at_once() -> None:
    assert opened().committed(commit(realized=False)) == commit(realized=False)


def test_shared_memory_is_complete_when_it_is_announced() -> None:
    state = opened()
    assert state.committed(commit()) is None
    assert state.coming(coming(path="/proc/1/fd/9"), MODEL)
    assert state.release() == commit()
    assert state.path == "/proc/1/fd/9"


def test_another_attempt_is_ignored_and_counted() -> None:
    state = staging(round_=4, attempt=1)
    assert stage(state, header(0, 6, 4, 0), header(0, 6, 3, 1), header(0, 6, 5, 1)) == []
    assert state.committed(commit(round_=4, attempt=0)) is None
    assert not state.coming(coming(4, 0), MODEL)
    assert state.ignored == 5
    assert stage(state, header(0, 6, 4, 1)) == [None]


def test_an_aborted_attempt_is_never_released() -> None:
    state = staging()
    assert state.accepts(ALL[0], MODEL)
    state.aborted(RoundAborted(0, 0, "rank 2 died"))
    assert state.staged(ALL[0]) is None, "it was being built meanwhile"
    assert state.committed(commit()) is None
    state.opened(RequestParams(0, 1, initial=False))
    assert state.committed(commit(attempt=1)) is None, "nothing of this attempt is here yet"
    assert state.coming(coming(0, 1), MODEL)
    again = [header(chunk.offset, chunk.elements, attempt=1) for chunk in ALL]
    assert stage(state, *ALL, *again) == [None, None, commit(attempt=1)]


def test_the_initial_broadcast_is_staged() -> None:
    state = staging(round_=-1)
    stage(state, header(0, 10, -1), header(10, 4, -1))
    assert state.committed(commit(round_=-1)) == commit(round_=-1)


# ---------------------------------------------------------------------------------------------- what may come


def test_what_is_still_does_not_come() -> None:
    state = staging(still=[(2, 5), (8, 11)])
    state.committed(commit())
    assert stage(state, header(0, 2), header(5, 1), header(6, 2), header(11, 3)) == [None, None, None, commit()]


def test_nothing_moved() -> None:
    state = staging(still=[(0, 14)])
    assert state.committed(commit()) == commit()


@pytest.mark.parametrize(
    ("headers", "reason"),
    [
        pytest.param([header(6, 4)], "goes on at element 6 where 0 was due", id="gap"),
        pytest.param([header(0, 6), header(0, 6)], "goes on at element 0 where 6 was due", id="repeat"),
        pytest.param([header(0, 10), header(10, 5)], "goes on beyond element 14", id="too long"),
        pytest.param([header(0, 11)], "goes on beyond element 10", id="both sections"),
        pytest.param([*ALL, header(14, 1)], "goes on at element 14 where nothing more was due", id="more"),
        pytest.param([header(0, 6, encoding=1)], "encoding 1", id="encoding"),
        pytest.param([header(0, 6, section=1)], "section 1", id="section"),
    ],
)
def test_a_broken_stream_is_an_error(headers: list[ChunkHeader], reason: str) -> None:
    with pytest.raises(StagingError, match=reason):
        stage(staging(), *headers)


def test_parameters_come_in_the_runs_encoding_and_buffers_in_f32() -> None:
    state = staging(encoding=Encoding.BF16)
    assert stage(state, header(0, 10, encoding=Encoding.BF16), header(10, 4)) == [None, None]
    with pytest.raises(StagingError, match="encoding 0"):
        stage(staging(encoding=Encoding.BF16), header(0, 10))


def test_an_update_is_announced_once_and_first() -> None:
    with pytest.raises(StagingError, match="did not announce"):
        opened().accepts(ALL[0], MODEL)
    with pytest.raises(StagingError, match="announced twice"):
        staging().coming(coming(), MODEL)
    with pytest.raises(StagingError, match="initial broadcast leaves elements out"):
        opened(-1).coming(coming(-1, still=[(3, 4)]), MODEL)
    with pytest.raises(StagingError, match="elements 3 to 20 are out of order or beyond 14"):
        opened().coming(coming(still=[(3, 20)]), MODEL)


# ------------------------------------------------------------------------------------------------- two buffers


class Holder:
    """A pair of files, and the consensus as the controller has it."""

    def __init__(self, directory: Path, elements: int = 14) -> None:
        self.pair = ConsensusPair(directory, elements)
        self.directory = directory
        self.truth = np.zeros(elements, np.float32)
        self.dice = np.random.default_rng(7)

    def send(self, still: Ranges, *, initial: bool = False, encoding: int = Encoding.F32, cut: int = 99) -> np.ndarray:
        """An update comes down, at most ``cut`` chunks of it; what the consensus is afterwards."""
        update = self.dice.normal(size=self.truth.size).astype(np.float32)
        if encoding == Encoding.BF16:
            arithmetic.round_bf16(update[:10])
        for start, stop in still:
            update[start:stop] = 0
        self.pair.begin(UpdateComing(0, 0, absolute=initial, still=still))
        for piece in slices(10, 4, still, 4)[:cut]:
            bf16 = encoding if piece.section == Section.PARAMS else Encoding.F32
            payload: np.ndarray = update[piece.offset : piece.stop].copy()
            if bf16:
                payload = np.empty(piece.elements, np.uint16)
                arithmetic.encode_bf16(update[piece.offset : piece.stop], payload)
            self.pair.take(header(piece.offset, piece.elements, encoding=bf16), memoryview(payload.tobytes()))
        return update if initial else self.truth - update

    def adopt(self, new: np.ndarray) -> str:
        path = self.pair.promote()
        self.truth = new
        assert self.pair.base is not None
        assert self.pair.base.tobytes() == new.tobytes()
        assert np.fromfile(path, np.float32).tobytes() == new.tobytes()
        return path


@pytest.fixture
def holder(tmp_path: Path) -> Holder:
    state = Holder(tmp_path)
    state.adopt(state.send([], initial=True))
    return state


def test_the_two_files_take_turns(holder: Holder) -> None:
    paths = [Path(holder.adopt(holder.send([]))).name for _ in range(3)]
    assert paths == ["consensus.0.1", "consensus.0.0", "consensus.0.1"]
    assert (holder.directory / "consensus.0.0").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("encoding", [Encoding.F32, Encoding.BF16])
def test_whatever_lies_still_both_files_follow(holder: Holder, encoding: int) -> None:
    """Each round moves another part, some are aborted half-way, and the consensus is right to the bit every time."""
    for number in range(60):
        edges = sorted(holder.dice.choice(15, size=4, replace=False).tolist())
        still = [(edges[0], edges[1]), (edges[2], edges[3])]
        if number % 3 == 1:
            before = holder.truth.tobytes()
            holder.send([(0, 14)] if number % 2 else [(2, 3)], cut=int(holder.dice.integers(3)))
            assert holder.pair.base is not None
            assert holder.pair.base.tobytes() == before, "an attempt that is aborted leaves no trace"
        holder.adopt(holder.send(still, encoding=encoding))


def test_what_is_in_force_stays_until_the_next_is_promoted(holder: Holder) -> None:
    before = holder.truth.tobytes()
    new = holder.send([(0, 3)])
    assert holder.pair.base is not None
    assert holder.pair.base.tobytes() == before
    holder.adopt(new)


def test_no_change_keeps_every_bit(holder: Holder) -> None:
    holder.truth[:] = [-0.0, 1e-45, 3e38] + [0.1] * 11
    assert holder.pair.base is not None
    holder.pair.base[:] = holder.truth
    holder.pair.begin(UpdateComing(0, 0, absolute=False))
    for start, elements in ((0, 10), (10, 4)):
        holder.pair.take(header(start, elements), memoryview(bytes(4 * elements)))
    holder.adopt(holder.truth.copy())
