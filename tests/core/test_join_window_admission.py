"""Every check at the door, in its order, with its code and its words (behaviour B8; issue 2, bad input)."""

from dataclasses import replace

import pytest
from join_hosts import CONFIG, LAYOUT, devices, hello, join, report, seated, versions, with_tensor

from backend.core.join_admission import clipped, first_difference, nccl_release, vendor
from backend.core.join_window import Admission, JoinWindow, Offer, Refusal
from wire.messages import WIRE_VERSION, Device, JobOffer, ProbeReport, TensorSpec

NCCL = replace(CONFIG, mode="nccl_cadence")
AMD = versions(cuda="rocm6.2", nccl="2.27.3")


def answer_to(says, *, window=None):
    window = window or seated()
    answer = window.hello(9, says, "10.0.0.9", 0.0)
    window.check()
    return answer


# ------------------------------------------------------------------------------------------- on the hello


@pytest.mark.parametrize(
    ("says", "code", "permanent", "words"),
    [
        (hello(""), "blank_host", True, "--name"),
        (hello("  \t "), "blank_host", True, "--name"),
        (hello("x" * 254), "bad_host_name", True, "at most 253"),
        (hello("gpu\x1b[2J"), "bad_host_name", True, "printable"),
        (hello(count=0), "no_devices", True, "gpu-a offers no device"),
        (hello(count=257), "too_many_devices", True, "257 devices"),
        (hello(devices=[*devices(2), *devices(1)]), "duplicate_device", True, "cuda:0 twice"),
        (hello(devices=[Device(id="tpu:0", type="tpu")]), "unknown_device_type", True, "'tpu'"),
        (hello("gpu-0"), "duplicate_host", False, "10.0.0.0"),
        (hello(" GPU-0 "), "duplicate_host", False, "another --name"),
        (
            hello(versions=versions(wire=WIRE_VERSION + 1, marchline="9.9")),
            "wire_version_mismatch",
            True,
            f"{WIRE_VERSION + 1} (Marchline 9.9), this controller {WIRE_VERSION}",
        ),
        (hello(run=7), "run_mismatch", False, "asked for run 7, but this window is of run 3"),
    ],
)
def test_refused_at_the_hello(says, code, permanent, words):
    refusal = answer_to(says, window=seated(1))

    assert isinstance(refusal, Refusal)
    assert (refusal.code, refusal.permanent) == (code, permanent)
    assert words in refusal.reason
    assert refusal.reason.endswith(".")


@pytest.mark.parametrize("says", [hello(count=256), hello(run=3), hello("x" * 253), hello(" gpu b ")])
def test_the_largest_that_is_allowed_is_welcome(says):
    assert isinstance(answer_to(says), Offer)


@pytest.mark.parametrize(
    ("text", "length", "shown"),
    [("abc", 3, "abc"), ("abcd", 3, "ab…"), ("", 3, ""), ("a\tb\x1b", 9, "a?b?"), ("x" * 99, 5, "xxxx…")],
)
def test_a_peers_words_are_clipped(text, length, shown):
    assert clipped(text, length) == shown


def test_a_window_without_a_number_gates_no_run():
    assert isinstance(answer_to(hello(run=7), window=JoinWindow(CONFIG, 0.0)), Offer)


@pytest.mark.parametrize("first_wrong", range(7))
def test_the_checks_of_the_hello_come_in_their_order(first_wrong):
    """A hello that is wrong in everything from one check on is refused for exactly that one."""
    codes = [
        "blank_host", "no_devices", "too_many_devices", "duplicate_device", "duplicate_host",
        "wire_version_mismatch", "run_mismatch",
    ]  # fmt: skip
    name = ["", "gpu-0", "gpu-0", "gpu-0", "gpu-0", "gpu-a", "gpu-a"][first_wrong]
    offers = [[], [], devices(257) * 2, devices(2) * 2, devices(1), devices(1), devices(1)][first_wrong]
    says = hello(
        name, devices=offers, run=7, versions=versions(wire=WIRE_VERSION if first_wrong == 6 else WIRE_VERSION + 1)
    )

    assert answer_to(says, window=seated(1)).code == codes[first_wrong]


def test_a_name_is_taken_while_its_host_still_looks_at_the_job():
    window = seated()
    assert isinstance(window.hello(1, hello("gpu-a"), "10.0.0.1", 0.0), Offer)

    assert answer_to(hello("gpu-a"), window=window).code == "duplicate_host"


def test_one_link_says_hello_once():
    window = seated(1)

    assert window.hello(0, hello("gpu-b"), "10.0.0.0", 0.0).code == "hello_twice"
    window.hello(5, hello("gpu-c"), "10.0.0.5", 0.0)
    assert window.hello(5, hello("gpu-d"), "10.0.0.5", 0.0).code == "hello_twice"
    window.check()


def test_the_offer_names_the_job():
    window = JoinWindow(replace(CONFIG, params={"depth": 2}), 0.0, run_id=3, job_hash="f" * 64)

    offer = window.hello(1, hello(), "10.0.0.1", 5.0)

    assert offer == Offer(JobOffer(run_id=3, job="digits.py:Digits", params={"depth": 2}, job_hash="f" * 64), 125.0)


# ------------------------------------------------------------------------------------- on the probe report


@pytest.mark.parametrize(
    ("finds", "code", "words"),
    [
        (report(error="ModuleNotFoundError: helper"), "job_broken", "on gpu-a: ModuleNotFoundError: helper"),
        (
            report(job_hash="c" * 64),
            "job_source_mismatch",
            "(cccccccccccc) differs from the one on gpu-0 (aaaaaaaaaaaa)",
        ),
        (
            report(sources_hash="c" * 64),
            "job_source_mismatch",
            "a module that it imports differs between gpu-a and gpu-0",
        ),
        (
            report(dataset_size=1796),
            "dataset_fingerprint_mismatch",
            "on gpu-a has 1796 samples, but on gpu-0 it has 1797",
        ),
        (report(dataset_size=0), "dataset_fingerprint_mismatch", "has 0 samples, but on gpu-0 it has 1797"),
        (
            report(dataset_signature="e" * 64),
            "dataset_fingerprint_mismatch",
            "fingerprint eeeeeeeeeeee, but on gpu-0 it has dddddddddddd",
        ),
        (
            report(layout=with_tensor(1, shape=[4, 64])),
            "model_signature_mismatch",
            "Tensor head.weight is float32 [4, 64] on gpu-a but float32 [3, 64] on gpu-0",
        ),
        (report(layout=[]), "empty_model", "no parameters to train"),
    ],
)
def test_refused_after_the_probe(finds, code, words):
    window = seated(1)

    refusal = join(window, 5, hello("gpu-a"), finds)

    assert isinstance(refusal, Refusal)
    assert (refusal.code, refusal.permanent) == (code, False)
    assert words in refusal.reason
    assert window.candidates() == []
    assert window.joined_ranks == 1


def test_the_first_host_is_checked_without_a_reference():
    assert join(seated(), 1, hello(), report(dataset_size=0)).code == "empty_dataset"
    assert join(seated(), 1, hello(), report(layout=with_tensor(0)[2:])).code == "empty_model"
    assert isinstance(join(seated(), 1, hello(), report()), Admission)


def test_a_dataset_must_have_a_sample_for_every_rank_and_the_numbers_are_said():
    three = report(dataset_size=3)
    window = seated()
    assert isinstance(join(window, 1, hello("gpu-a", 2), three), Admission)

    refusal = join(window, 2, hello("gpu-b", 2), three)

    assert refusal.code == "dataset_too_small"
    assert "The dataset has 3 samples, but with gpu-b the world would have 4 ranks" in refusal.reason
    assert isinstance(join(window, 3, hello("gpu-c", 1), three), Admission)  # 3 samples, 3 ranks


def test_one_sample_trains_one_rank():
    window = seated()
    assert isinstance(join(window, 1, hello("gpu-a"), report(dataset_size=1)), Admission)

    refusal = join(window, 2, hello("gpu-b"), report(dataset_size=1))

    assert (refusal.code, "has 1 sample, but" in refusal.reason) == ("dataset_too_small", True)


def test_the_controllers_own_file_is_the_first_authority():
    window = JoinWindow(CONFIG, 0.0, job_hash="c" * 64)

    refusal = join(window, 1, hello(), report())

    assert refusal.code == "job_source_mismatch"
    assert "differs from the controller's (cccccccccccc)" in refusal.reason
    assert isinstance(join(window, 2, hello(), report(job_hash="c" * 64)), Admission)


def test_a_long_error_is_cut():
    refusal = join(seated(), 1, hello(), report(error="x" * 9000))

    assert len(refusal.reason) < 600


def test_a_report_that_nobody_asked_for():
    refusal = seated().probe(4, report(), 0.0)

    assert refusal.code == "probe_without_offer"


@pytest.mark.parametrize("first_wrong", range(5))
def test_the_checks_of_the_report_come_in_their_order(first_wrong):
    codes = [
        "job_broken",
        "job_source_mismatch",
        "dataset_fingerprint_mismatch",
        "vendor_mix",
        "model_signature_mismatch",
    ]
    window = JoinWindow(NCCL, 0.0)
    join(window, 0, hello("gpu-0"))
    finds = report(
        error="broken" if first_wrong == 0 else "",
        job_hash=("c" if first_wrong <= 1 else "a") * 64,
        dataset_size=5 if first_wrong <= 2 else 1797,
        layout=with_tensor(0, dtype="float64"),
    )
    says = hello("gpu-a", versions=AMD if first_wrong <= 3 else versions())

    assert join(window, 1, says, finds).code == codes[first_wrong]


def test_a_refused_host_sets_no_reference():
    window = seated()
    join(window, 1, hello("bad"), report(dataset_size=0, job_hash="9" * 64))

    assert window.reference == ProbeReport()
    assert isinstance(join(window, 2, hello("good"), report()), Admission)
    assert window.reference == report()


def test_when_everybody_has_left_the_next_host_is_the_first_again():
    window = seated(1)
    window.leave(0, "link lost", 1.0)

    assert isinstance(join(window, 1, hello("gpu-b"), report(dataset_size=500)), Admission)
    assert window.reference.dataset_size == 500


def test_messages_name_a_host_that_is_still_there():
    window = seated(1, 1)
    window.leave(0, "link lost", 1.0)

    refusal = join(window, 5, hello("gpu-b"), report(dataset_size=500))

    assert "on gpu-1 it has 1797" in refusal.reason


# ---------------------------------------------------------------------------------- what only NCCL minds


@pytest.mark.parametrize(
    ("first", "second", "code", "words"),
    [
        pytest.param(versions(), AMD, "vendor_mix", "rocm6.2 (amd) and gpu-0 runs 12.8 (nvidia)", id="two vendors"),
        pytest.param(AMD, versions(), "vendor_mix", "hosts of one vendor", id="the other way round"),
        pytest.param(
            versions(), versions(nccl="2.26.2"), "nccl_version_mismatch", "NCCL 2.26.2 and gpu-0 has 2.27.3", id="minor"
        ),
        pytest.param(versions(), versions(nccl="2.27.9"), None, "", id="the patch does not matter"),
        pytest.param(versions(), versions(nccl="", cuda=""), None, "", id="absent labels gate nothing"),
        pytest.param(versions(nccl="", cuda=""), AMD, None, "", id="nor do they seed anything"),
        pytest.param(versions(), versions(cuda="13.0"), None, "", id="releases of one vendor mix"),
    ],
)
def test_vendor_and_nccl_release(first, second, code, words):
    window = JoinWindow(NCCL, 0.0)
    assert isinstance(join(window, 0, hello("gpu-0", versions=first)), Admission)

    answer = join(window, 1, hello("gpu-a", versions=second))

    if code is None:
        assert isinstance(answer, Admission)
    else:
        assert answer.code == code
        assert words in answer.reason
    cpu_window = seated()  # the CPU modes mix anything
    assert isinstance(join(cpu_window, 0, hello("gpu-0", versions=first)), Admission)
    assert isinstance(join(cpu_window, 1, hello("gpu-a", versions=second)), Admission)


def test_the_first_carrier_counts_even_if_it_came_second():
    window = JoinWindow(NCCL, 0.0)
    for link, label in enumerate(("", "12.8")):
        join(window, link, hello(f"gpu-{link}", versions=versions(cuda=label)))

    refusal = join(window, 5, hello("gpu-b", versions=AMD))

    assert "gpu-1 runs 12.8" in refusal.reason


def test_a_collective_mixes_no_kinds_of_devices():
    window = JoinWindow(NCCL, 0.0)
    assert isinstance(join(window, 0, hello("gpu-0")), Admission)

    refusal = join(window, 1, hello("laptop", devices=devices(2, "cpu")))

    assert refusal.code == "device_mix"
    assert "laptop offers cpu:0, cpu:1" in refusal.reason
    assert "would mix cpu and cuda" in refusal.reason


def test_cpus_alone_sum_over_gloo():
    window = JoinWindow(NCCL, 0.0)
    for link in range(2):
        assert isinstance(join(window, link, hello(f"cpu-{link}", devices=devices(2, "cpu"))), Admission)


@pytest.mark.parametrize(("precision", "kind", "let_in"), [
    ("fp16", "cuda", True), ("fp16", "cpu", False), ("bf16", "cpu", True), ("f32", "cpu", True),
])  # fmt: skip
def test_fp16_needs_gpus(precision, kind, let_in):
    window = JoinWindow(replace(CONFIG, precision=precision), 0.0)
    answer = join(window, 1, hello(devices=devices(2, kind)))

    assert isinstance(answer, Admission) == let_in
    if not let_in:
        assert (answer.code, answer.permanent) == ("precision_needs_gpu", False)
        assert "offers cpu:0, but precision fp16 runs on GPUs only; use bf16 or f32" in answer.reason


@pytest.mark.parametrize(
    ("label", "name"),
    [
        ("12.8", "nvidia"),
        ("cuda 13", "nvidia"),
        ("ROCm6.2", "amd"),
        ("hip-6", "amd"),
        ("", ""),
        ("cpu", ""),
        ("xpu", ""),
    ],
)
def test_vendors(label, name):
    assert vendor(label) == name


@pytest.mark.parametrize(
    ("version", "release"), [("2.27.3", "2.27"), ("2.27", "2.27"), ("2", ""), ("", ""), ("v2.x", "")]
)
def test_nccl_releases(version, release):
    assert nccl_release(version) == release


# --------------------------------------------------------------------------------- the model's signature


EXTRA = TensorSpec(name="extra", section="buffers", dtype="float32", shape=[2], offset=2304)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"shape": [1 << 40, 1 << 40]}, "more than the"),
        ({"shape": [3, 65]}, "tensor norm.mean lies at element 2240, not at 2243"),
        ({"offset": 0}, "lies at element 0, not at 2048"),
        ({"section": "elsewhere"}, "section elsewhere, out of order"),
        ({"name": "body.weight"}, "two tensors named body.weight"),
        ({"alias_of": "nobody", "offset": -1}, "tied to nobody"),
    ],
)
def test_a_model_that_cannot_be_never_becomes_the_reference(changes, words):
    """Whatever a damaged first host reports, the honest hosts behind it are not measured by it."""
    window = seated()
    refused = join(window, 1, hello("a"), report(layout=with_tensor(1, **changes)))
    assert (refused.code, words in refused.reason) == ("impossible_model", True), refused.reason
    assert join(window, 2, hello("b"), report()) == Admission(0, (0,))


SWAPPED = [LAYOUT[1], LAYOUT[0], LAYOUT[2]]


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        pytest.param(with_tensor(0), None, id="the same"),
        pytest.param(
            with_tensor(1, shape=[4, 64]),
            "Tensor head.weight is float32 [4, 64] on B but float32 [3, 64] on A",
            id="shape",
        ),
        pytest.param(
            with_tensor(0, dtype="bfloat16"),
            "Tensor body.weight is bfloat16 [64, 32] on B but float32 [64, 32] on A",
            id="dtype",
        ),
        pytest.param(
            with_tensor(2, section="params"),
            "Tensor norm.mean is float32 [64] in params on B but float32 [64] in buffers on A",
            id="section",
        ),
        pytest.param(
            with_tensor(1, alias_of="body.weight", offset=-1),
            "Tensor head.weight is float32 [3, 64] tied to body.weight on B but float32 [3, 64] untied on A",
            id="tied on one host only",
        ),
        pytest.param(
            with_tensor(1, offset=9),
            "Tensor head.weight is float32 [3, 64] at 9 on B but float32 [3, 64] at 2048 on A",
            id="place in the arena",
        ),
        pytest.param(
            [*LAYOUT, EXTRA], "Tensor extra (float32 [2]) exists on B but not on A", id="an extra buffer last"
        ),
        pytest.param(
            [EXTRA, *LAYOUT], "Tensor extra (float32 [2]) exists on B but not on A", id="an extra buffer first"
        ),
        pytest.param(LAYOUT[:2], "Tensor norm.mean (float32 [64]) exists on A but not on B", id="one less at the end"),
        pytest.param(
            LAYOUT[1:], "Tensor body.weight (float32 [64, 32]) exists on A but not on B", id="one less in front"
        ),
        pytest.param(
            SWAPPED,
            "The order of tensors differs: number 0 is head.weight (float32 [3, 64]) on B but "
            "body.weight (float32 [64, 32]) on A",
            id="another order",
        ),
    ],
)
def test_the_first_difference_between_two_models(layout, words):
    assert first_difference("B", layout, "A", LAYOUT) == words
