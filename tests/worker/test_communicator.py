"""The parts of a sum that need no peer: bounded waits, checksums, and where tensors lie in a padded vector."""

import math
import threading
from pathlib import Path

import psutil
import pytest
import torch
from torch import nn

from worker.arena import Arena
from worker.checksum import as_text, norm_squares
from worker.checksum import checksum as checksum_of
from worker.communicator import JOINING, Aborted, AbortStuck, Guard, SessionError, bounded, hangs
from worker.flat import FlatModel, Stretch, _starts, _stretches
from worker.gloo_communicator import GlooLibrary, address_of
from worker.layout import model_layout
from worker.nccl import load


def test_a_wait_ends_with_what_it_waits_for_its_bound_or_an_interrupt() -> None:
    moments = iter(range(100))
    guard = Guard(lambda: "", clock=lambda: float(next(moments)) / 1e6)
    looks = iter([False, False, True])
    guard.wait(lambda: next(looks), 1.0, "the sum")
    with pytest.raises(SessionError, match="the sum took longer than 1e-05 s; is a rank stopped"):
        guard.wait(lambda: False, 1e-5, "the sum")
    with pytest.raises(Aborted, match="rank 2 died"):
        Guard(lambda: "rank 2 died").wait(lambda: False, 60.0, "the sum")
    Guard(lambda: "rank 2 died").wait(lambda: True, 60.0, "the sum")  # done is done


def checksum(vector: torch.Tensor) -> str:
    return as_text(int(checksum_of(vector)))


def aborting() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "abort session"}


def test_what_hangs_is_left_behind_under_a_name() -> None:
    others = aborting()  # of tests before this one
    bounded(lambda: None, 5.0, "never said")
    assert aborting() <= others
    gate = threading.Event()
    with pytest.raises(AbortStuck, match="this rank's GPU may hang"):
        bounded(lambda: gate.wait(20), 0.01, "this rank's GPU may hang")
    (left,) = aborting() - others
    assert hangs()
    gate.set()
    left.join(30)
    assert aborting() <= others


def test_an_interface_that_is_not_there_is_named_with_those_that_are() -> None:
    assert address_of("lo") == "127.0.0.1"
    with pytest.raises(SessionError, match=r"no network interface 'nope0' .* there are .*lo"):
        address_of("nope0")


def test_a_session_that_nobody_comes_to_leaves_nothing_behind() -> None:
    others = set(threading.enumerate())  # of tests before this one

    def once() -> None:
        library, told = GlooLibrary("lo"), threading.Event()
        guard = Guard(lambda: "nobody came" if told.is_set() else "")
        identity = library.make_id()
        timer = threading.Timer(0.1, told.set)
        timer.start()
        with pytest.raises(Aborted, match="nobody came"):
            library.join(identity, 0, 2, guard)
        for thread in set(threading.enumerate()) - others:
            if thread is timer or thread.name == JOINING:
                thread.join(30)
        assert not [thread for thread in set(threading.enumerate()) - others if thread.name == JOINING]
        library.close()

    def held() -> tuple[int, int]:
        process = psutil.Process()
        return process.num_fds(), process.num_threads()

    once()
    before = held()
    for _ in range(3):
        once()
    looks, pause = 0, threading.Event()
    while (after := held()) > before and looks < 500:  # a thread that was joined may be seen for a moment
        looks += 1
        pause.wait(0.01)
    assert after <= before


def test_ranks_are_connected_once_they_have_joined_whatever_the_environment_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Connections that gloo made later, nobody would know and shut."""
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "1")
    library, vectors = GlooLibrary("lo"), [torch.ones(2), torch.ones(2)]
    identity = library.make_id()

    def be(place: int) -> None:
        session = library.join(identity, place, 2, Guard(lambda: "", join_seconds=10.0))
        session.sum(vectors[place], "the sum")
        session.abort()

    threads = [threading.Thread(target=be, args=(place,)) for place in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    library.close()
    assert [vector.tolist() for vector in vectors] == [[2.0, 2.0]] * 2


@pytest.mark.skipif(torch.version.cuda is not None or torch.version.hip is not None, reason="this torch brings NCCL")
def test_a_torch_without_nccl_is_named() -> None:
    with pytest.raises(SessionError, match="install a torch for CUDA or ROCm"):
        load()


# ------------------------------------------------------------------------------------------------ checksums


@pytest.mark.parametrize("size", [0, 1, 2, 7, 8191, 8192, 8193, 100_003])
def test_any_other_bit_is_another_checksum(size: int) -> None:
    torch.manual_seed(size)
    vector = torch.randn(size)
    assert len(checksum(vector)) == 16 and checksum(vector) == checksum(vector.clone())
    places = sorted({0, 1, size // 2, size - 2, size - 1} & set(range(size)))
    bits = (0, 1, 22, 23, 30, 31) if size < 10_000 else (0, 31)
    seen = {checksum(vector)}
    for place in places:
        for bit in bits:
            other = vector.clone()
            other.view(torch.int32)[place] ^= (1 << bit) if bit < 31 else -(1 << 31)
            seen.add(checksum(other))
    assert len(seen) == 1 + len(bits) * len(places)


@pytest.mark.parametrize("pair", [(0, 1), (0, 2), (3, 8195), (4, 8196), (17, 90_001), (99_999, 100_002)])
def test_neither_values_in_each_others_place_nor_two_signs_stay_unseen(pair: tuple[int, int]) -> None:
    torch.manual_seed(1)
    vector = torch.randn(100_003)
    swapped, signs = vector.clone(), vector.clone()
    swapped[list(pair)] = vector[list(reversed(pair))]
    signs[list(pair)] *= -1
    assert len({checksum(vector), checksum(swapped), checksum(signs)}) == 3


def test_zeros_of_either_sign_and_any_nan_are_told_apart() -> None:
    assert checksum(torch.zeros(4)) != checksum(-torch.zeros(4))
    nan = torch.full((4,), float("nan"))
    other = nan.clone()
    other.view(torch.int32)[2] |= 1
    assert checksum(nan) != checksum(other)


def test_squares_are_added_up_in_double_and_show_what_is_not_finite() -> None:
    torch.manual_seed(2)
    vector = torch.randn(300_001)
    assert float(norm_squares(vector)) == pytest.approx(float(vector.double().square().sum()), rel=1e-5)
    for bad in (math.nan, math.inf, -math.inf):
        vector[7] = bad
        assert not math.isfinite(float(norm_squares(vector)))
    assert float(norm_squares(torch.empty(0))) == 0.0


# ------------------------------------------------------------------------------------------- the padded vector


def test_every_tensor_begins_on_a_cache_line_and_the_arenas_order_comes_back() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(8, 4), nn.BatchNorm1d(7), nn.Linear(1, 1, bias=False))
    owners = [spec for spec in model_layout(model) if spec.offset >= 0]
    starts, params, elements = _starts(owners, 32)
    assert all(start % 32 == 0 for start in starts.values())
    assert params % 32 == elements % 32 == 0
    stretches = list(_stretches(owners, starts))
    covered = [(spec.offset + n, starts[spec.name] + n) for spec in owners for n in range(math.prod(spec.shape))]
    walked = [
        pair
        for stretch in stretches
        for pair in zip(
            range(stretch.arena.start, stretch.arena.stop),
            range(stretch.vector.start, stretch.vector.stop),
            strict=True,
        )
    ]
    assert walked == covered
    assert Stretch(slice(20, 56), slice(64, 100)) in stretches  # 32 elements leave no gap behind them


def test_on_the_cpu_the_vector_is_the_arenas_file(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5))
    arena = Arena.for_model(model)
    file = arena.create_out(tmp_path / "rank0.out")
    flat = FlatModel(arena, torch.device("cpu"))
    assert flat.vector.data_ptr() == file.values.ctypes.data == model[0].weight.data_ptr()
    assert flat.stretches == [Stretch(slice(0, arena.elements), slice(0, arena.elements))]
    assert flat.params == arena.params_elements
    assert [flat.arena_element(element) for element in (0, arena.elements - 1)] == [0, arena.elements - 1]
    other = torch.zeros_like(flat.vector)
    flat.fill(other, file.values)
    assert torch.equal(flat.in_arena_order(other), flat.vector)


def test_what_is_adopted_is_known_to_autograd(tmp_path: Path) -> None:
    """A graph that was built before an adoption must not be used behind it."""
    model = nn.Linear(3, 2)
    arena = Arena.for_model(model)
    arena.create_out(tmp_path / "rank0.out")
    flat = FlatModel(arena, torch.device("cpu"))
    flat.gather()
    loss = model(torch.ones(1, 3, requires_grad=True)).square().sum()
    flat.scatter()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
