"""A device without memory left: told by name, with figures and the cure."""

import pytest
import torch

from worker.out_of_memory import explain, is_out_of_memory

TORCHS = "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 139.81 GiB of which 1 is free."


def test_it_names_device_figures_and_cure() -> None:
    text = explain(torch.OutOfMemoryError(TORCHS), "cpu")
    assert text.startswith("the host ran out of memory: this rank held ")
    assert "GiB at its peak, of " in text
    assert "use a smaller batch_size, or leave this device out with --devices" in text
    assert text.endswith("(CUDA out of memory. Tried to allocate 20.00 GiB)")


def test_a_gpu_that_answers_nothing_is_still_named() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here, and it answers")
    assert "the GPU ran out of memory: this rank held an unknown amount" in explain(
        torch.OutOfMemoryError(""), "cuda:0"
    )


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (torch.OutOfMemoryError(TORCHS), True),
        (torch.cuda.OutOfMemoryError(TORCHS), True),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be ..."), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (MemoryError(), False),
        (ValueError("CUDA error: out of memory"), False),
    ],
)
def test_what_counts_as_that(error: Exception, told: bool) -> None:
    assert is_out_of_memory(error) == told
