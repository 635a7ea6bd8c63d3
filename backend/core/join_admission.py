"""Who may join: every check at the door, each with its code and its cure (behaviour B8; issue 2, bad input).

The checks run in B8's order. Those on a hello need nothing but the hello; those on a probe report compare it with the
*reference*: what the first member reported. A refusal never changes the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from backend.core.join_phases import ranks
from backend.core.model import impossible
from backend.core.resume import Resume
from wire.messages import WIRE_VERSION, Device, Hello, ProbeReport, TensorSpec, Versions

MAX_DEVICES = 256
MAX_NAME = 253
MAX_ERROR_TEXT = 500
MAX_NAMED = 8
"""tensors that a refusal names"""
DEVICE_TYPES = ("cpu", "cuda")


@dataclass(frozen=True, slots=True)
class Refusal:
    """No, and why. ``permanent``: dialling again cannot help, something on the host has to change."""

    code: str
    reason: str
    permanent: bool = False


@dataclass(frozen=True, slots=True)
class Member:
    """An admitted host. ``ranks`` are its own if the window closes now; they shift down when an earlier host leaves."""

    host: int
    link: int
    name: str
    address: str
    devices: tuple[Device, ...]
    versions: Versions
    emulate_ms_per_batch: float | None
    joined_at: float
    ranks: tuple[int, ...]

    @property
    def emulated(self) -> bool:
        """Whether its speed is a pretence."""
        return self.emulate_ms_per_batch is not None

    @property
    def relay_only(self) -> bool:
        """Whether it trains nothing and folds the data streams of others: no quorum or target counts it."""
        return not self.devices


@dataclass(frozen=True, slots=True)
class Door:
    """What a probe report is compared with."""

    mode: str
    job_hash: str
    """sha256 of the controller's job file, empty when it has none"""
    members: Sequence[Member]
    """those with ranks"""
    reference: ProbeReport | None
    """what the first member reported; none before there is one"""
    saved: Resume | None = None
    """the checkpoint that the run goes on from"""
    precision: str = "f32"

    @property
    def joined(self) -> int:
        """Ranks admitted so far."""
        return sum(len(member.devices) for member in self.members)

    @property
    def first(self) -> str:
        """Name of the member that set the reference."""
        return self.members[0].name if self.members else ""


def name_key(host: str) -> str:
    """Two names with the same key are the same host."""
    return host.strip().casefold()


def clipped(text: str, length: int) -> str:
    """A peer's words as they may be logged: printable, and no longer than this."""
    shown = "".join(letter if letter.isprintable() else "?" for letter in text[: length + 1])
    return shown if len(shown) <= length else f"{shown[: length - 1]}…"


# ------------------------------------------------------------------------------------------ on a hello


def refuse_hello(hello: Hello) -> Refusal | None:
    """B8 checks 1 to 4: name and devices."""
    host = hello.host.strip()
    if not host:
        return Refusal("blank_host", "The host gave no name; set one with --name.", True)
    if len(host) > MAX_NAME or not host.isprintable():
        text = f"A host name has at most {MAX_NAME} printable characters; set one with --name."
        return Refusal("bad_host_name", text, True)
    return _refuse_relay(host, hello.devices) if hello.relay_only else _refuse_devices(host, hello.devices)


def refuse_version(hello: Hello) -> Refusal | None:
    """The two sides must speak the same wire version."""
    theirs = hello.versions.wire
    if theirs == WIRE_VERSION:
        return None
    reason = (
        f"{hello.host} speaks wire version {theirs} (Marchline {hello.versions.marchline}), this controller "
        f"{WIRE_VERSION}; install the same Marchline release on both."
    )
    return Refusal("wire_version_mismatch", reason, True)


def refuse_run(hello: Hello, run_id: int) -> Refusal | None:
    """B8 check 8: a host that asks for a run by number gets that one or none."""
    if hello.run is None or hello.run == run_id:
        return None
    reason = (
        f"{hello.host} asked for run {hello.run}, but this window is of run {run_id}; ask for {run_id} or for none."
    )
    return Refusal("run_mismatch", reason)


def _refuse_relay(host: str, devices: Sequence[Device]) -> Refusal | None:
    if not devices:
        return None
    reason = f"{host} is a relay-only host and offers devices; start a second worker for them, without --relay-only."
    return Refusal("relay_with_devices", reason, True)


def _refuse_devices(host: str, devices: Sequence[Device]) -> Refusal | None:
    if not devices:
        return Refusal("no_devices", f"{host} offers no device; check its driver and --devices.", True)
    if len(devices) > MAX_DEVICES:
        reason = f"{host} offers {len(devices)} devices; a host may bring at most {MAX_DEVICES}, choose with --devices."
        return Refusal("too_many_devices", reason, True)
    seen: set[str] = set()
    for device in devices:
        if device.id in seen:
            reason = f"{host} offers device {device.id} twice; name each one once in --devices."
            return Refusal("duplicate_device", reason, True)
        seen.add(device.id)
    unknown = next((device for device in devices if device.type not in DEVICE_TYPES), None)
    if unknown is not None:
        reason = f"{host} offers {unknown.id} of type {unknown.type!r}; only {' and '.join(DEVICE_TYPES)} can train."
        return Refusal("unknown_device_type", reason, True)
    return None


# ----------------------------------------------------------------------------------- on a probe report


def refuse_probe(hello: Hello, report: ProbeReport, door: Door) -> Refusal | None:
    """The checks that need the host's own look at the job: job, dataset, vendor, NCCL, model (B8 6, 7, 9, 10)."""
    checks: tuple[Callable[[Hello, ProbeReport, Door], Refusal | None], ...] = (
        _refuse_job,
        _refuse_sources,
        _refuse_unlike_checkpoint,
        _refuse_fingerprint,
        _refuse_dataset_size,
        _refuse_collective,
        _refuse_precision,
        _refuse_model,
    )
    return next((refusal for check in checks if (refusal := check(hello, report, door)) is not None), None)


def _refuse_job(hello: Hello, report: ProbeReport, door: Door) -> Refusal | None:
    if not report.error:
        return None
    return Refusal("job_broken", f"The job does not load on {hello.host}: {clipped(report.error, MAX_ERROR_TEXT)}")


def _refuse_sources(hello: Hello, report: ProbeReport, door: Door) -> Refusal | None:
    reference = door.reference
    if door.job_hash and report.job_hash != door.job_hash:
        what = f"The job file on {hello.host} ({_short(report.job_hash)}) differs from the controller's"
        what += f" ({_short(door.job_hash)})"
    elif reference is not None and report.job_hash != reference.job_hash:
        what = f"The job file on {hello.host} ({_short(report.job_hash)}) differs from the one on {door.first}"
        what += f" ({_short(reference.job_hash)})"
    elif reference is not None and report.sources_hash != reference.sources_hash:
        what = f"The job file is the same, but a module that it imports differs between {hello.host} and {door.first}"
    else:
        return None
    return Refusal("job_source_mismatch", f"{what}; copy the same files to both and dial again.")


def _refuse_fingerprint(hello: Hello, report: ProbeReport, door: Door) -> Refusal | None:
    reference = door.reference
    if reference is None:
        return None
    if report.dataset_size != reference.dataset_size:
        what = f"has {report.dataset_size} samples, but on {door.first} it has {reference.dataset_size}"
    elif report.dataset_signature != reference.dataset_signature:
        what = (
            f"has the fingerprint {_short(report.dataset_signature)}, but on {door.first} it has "
            f"{_short(reference.dataset_signature)}"
        )
    else:
        return None
    reason = f"The dataset on {hello.host} {what}; give both hosts the same data."
    return Refusal("dataset_fingerprint_mismatch", reason)


def _refuse_unlike_checkpoint(hello: Hello, report: ProbeReport, door: Door) -> Refusal | None:
    """A resumed run: its dataset and every tensor of its model must be those that were saved."""
    saved = door.saved
    if saved is None:
        return None
    if report.dataset_size != saved.dataset_size:
        reason = (
            f"The dataset on {hello.host} has {_samples(report.dataset_size)}, but {saved.where} was taken with "
            f"{saved.dataset_size}; give the host the same data, or start a new run."
        )
        return Refusal("dataset_unlike_checkpoint", reason)
    difference = unlike(report.layout, saved.layout)
    if not difference:
        return None
    reason = f"The model on {hello.host} is not that of {saved.where}: {difference}; resume it with the job's old code."
    return Refusal("model_unlike_checkpoint", reason)


def unlike(layout: Sequence[TensorSpec], saved: Sequence[TensorSpec]) -> str:
    """In what a model's tensors differ from the saved ones: missing keys, extra keys, others; empty when in nothing.
    Whether a parameter is frozen does not matter."""
    ours, theirs = ({spec.name: spec for spec in each} for each in (layout, saved))
    missing, extra = [name for name in theirs if name not in ours], [name for name in ours if name not in theirs]
    changed = [
        f"{name} is {_describe(ours[name], spec)}, saved as {_describe(spec, ours[name])}"
        for name, spec in theirs.items()
        if name in ours and _place(ours[name]) != _place(spec) and not (missing or extra)
    ]
    parts = [f"{what} {_listed(names)}" for what, names in (("missing", missing), ("extra", extra)) if names]
    return "; ".join([*parts, *changed[:MAX_NAMED]])


def _place(tensor: TensorSpec) -> tuple[object, ...]:
    return tensor.section, tensor.dtype, tuple(tensor.shape), tensor.alias_of, tensor.offset


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return ", ".join(names[:MAX_NAMED]) + more


def _refuse_dataset_size(hello: Hello, report: ProbeReport, door: Door) -> Refusal | None:
    if report.dataset_size < 1:
        return Refusal("empty_dataset", f"The dataset on {hello.host} has no samples; check the job's train_dataset.")
    world = door.joined + len(hello.devices)
    if report.dataset_size >= world:
        return None
    reason = (
        f"The dataset has {_samples(report.dataset_size)}, but with {hello.host} the world would have {ranks(world)}; "
        f"use more data or fewer devices."
    )
    return Refusal("dataset_too_small", reason)


def _refuse_collective(hello: Hello, report: ProbeReport, door: Door) -> Refusal | None:
    """Only NCCL needs one kind of device, one vendor and one NCCL release; the CPU modes mix anything. Absent labels
    gate nothing. A cohort of CPUs alone sums over gloo."""
    if not door.mode.startswith("nccl"):
        return None
    kinds = {device.type for device in hello.devices}
    for member in door.members:
        kinds |= {device.type for device in member.devices}
    if len(kinds) > 1:
        reason = (
            f"{hello.host} offers {', '.join(device.id for device in hello.devices)}, and the cohort would mix "
            f"{' and '.join(sorted(kinds))}, which {door.mode} cannot; use a cpu_ mode, or devices of one kind."
        )
        return Refusal("device_mix", reason)
    theirs = vendor(hello.versions.cuda)
    for member in door.members:
        ours = vendor(member.versions.cuda)
        if theirs and ours and theirs != ours:
            reason = (
                f"{hello.host} runs {hello.versions.cuda} ({theirs}) and {member.name} runs {member.versions.cuda} "
                f"({ours}), which {door.mode} cannot mix; use a cpu_ mode or hosts of one vendor."
            )
            return Refusal("vendor_mix", reason)
    return _refuse_nccl(hello, door)


def _refuse_precision(hello: Hello, report: ProbeReport, door: Door) -> Refusal | None:
    """fp16 needs GPUs: on CPUs some layers have no fp16, and the rest is slower with it (decision 0022)."""
    cpu = next((device for device in hello.devices if device.type == "cpu"), None)
    if door.precision != "fp16" or cpu is None:
        return None
    reason = f"{hello.host} offers {cpu.id}, but precision fp16 runs on GPUs only; use bf16 or f32, or leave it out."
    return Refusal("precision_needs_gpu", reason)


def _refuse_nccl(hello: Hello, door: Door) -> Refusal | None:
    theirs = nccl_release(hello.versions.nccl)
    for member in door.members:
        ours = nccl_release(member.versions.nccl)
        if theirs and ours and theirs != ours:
            reason = (
                f"{hello.host} has NCCL {hello.versions.nccl} and {member.name} has {member.versions.nccl}; "
                f"install the same major and minor release on both."
            )
            return Refusal("nccl_version_mismatch", reason)
    return None


def _refuse_model(hello: Hello, report: ProbeReport, door: Door) -> Refusal | None:
    if not any(tensor.section == "params" for tensor in report.layout):
        return Refusal("empty_model", f"The model on {hello.host} has no parameters to train; check build_model.")
    if door.reference is None:
        why = impossible(report.layout)
        text = f"The model that {hello.host} reports cannot be: {clipped(why, MAX_ERROR_TEXT)}; is its worker damaged?"
        return Refusal("impossible_model", text) if why else None
    difference = first_difference(hello.host, report.layout, door.first, door.reference.layout)
    if difference is None:
        return None
    return Refusal("model_signature_mismatch", f"{difference}; make the job build the same model on both hosts.")


def first_difference(
    host: str, layout: Sequence[TensorSpec], other: str, reference: Sequence[TensorSpec]
) -> str | None:
    """The first tensor, in arena order, in which two layouts differ, in words; None when they are the same."""
    for index, (ours, theirs) in enumerate(zip(layout, reference, strict=False)):
        if ours.name != theirs.name:
            return _difference_of_names(host, layout, other, reference, index)
        if ours != theirs:
            return f"Tensor {ours.name} is {_describe(ours, theirs)} on {host} but {_describe(theirs, ours)} on {other}"
    if len(layout) > len(reference):
        return f"Tensor {_describe_with_name(layout[len(reference)])} exists on {host} but not on {other}"
    if len(reference) > len(layout):
        return f"Tensor {_describe_with_name(reference[len(layout)])} exists on {other} but not on {host}"
    return None


def _difference_of_names(
    host: str, layout: Sequence[TensorSpec], other: str, reference: Sequence[TensorSpec], index: int
) -> str:
    ours, theirs = layout[index], reference[index]
    if ours.name not in _names(reference):
        return f"Tensor {_describe_with_name(ours)} exists on {host} but not on {other}"
    if theirs.name not in _names(layout):
        return f"Tensor {_describe_with_name(theirs)} exists on {other} but not on {host}"
    return (
        f"The order of tensors differs: number {index} is {_describe_with_name(ours)} on {host} but "
        f"{_describe_with_name(theirs)} on {other}"
    )


def _names(layout: Iterable[TensorSpec]) -> set[str]:
    return {tensor.name for tensor in layout}


def _describe(tensor: TensorSpec, other: TensorSpec) -> str:
    text = f"{tensor.dtype} {list(tensor.shape)}"
    if tensor.section != other.section:
        text += f" in {tensor.section}"
    if tensor.alias_of != other.alias_of:
        text += f" tied to {tensor.alias_of}" if tensor.alias_of else " untied"
    elif tensor.offset != other.offset:
        text += f" at {tensor.offset}"
    if tensor.frozen != other.frozen:
        text += ", frozen," if tensor.frozen else ", trainable,"
    return text


def _describe_with_name(tensor: TensorSpec) -> str:
    return f"{tensor.name} ({tensor.dtype} {list(tensor.shape)})"


def vendor(label: str) -> str:
    """``nvidia`` or ``amd`` from a CUDA or ROCm release label; empty when it tells nothing."""
    label = label.strip().lower()
    if label.startswith(("rocm", "hip")):
        return "amd"
    return "nvidia" if label.removeprefix("cuda").strip(" -")[:1].isdigit() else ""


def nccl_release(version: str) -> str:
    """Major and minor of an NCCL version; empty when it tells nothing. The patch does not matter."""
    parts = version.strip().split(".")
    return ".".join(parts[:2]) if len(parts) >= 2 and all(part.isdigit() for part in parts[:2]) else ""


def _short(digest: str) -> str:
    return digest[:12] or "none"


def _samples(count: int) -> str:
    return "1 sample" if count == 1 else f"{count} samples"
