"""``python -m worker``: what a host's operator types, and the one place where the environment is read."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import math
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import asdict

from wire import failpoints
from worker.agent import CONNECT_ATTEMPTS, Agent, Patience
from worker.devices import DeviceError, find_devices
from worker.environment import TOKEN_VARIABLE
from worker.exits import ExitCode
from worker.join_link import Refused, Target, base_url
from worker.membership import Offer, Waits
from worker.output import output_that_never_waits
from worker.probing import PROBE_SECONDS
from worker.site import Site
from worker.site_listen import ListenError, listen_address, listening
from worker.versions import host_versions

DEFAULT_LISTEN = ":8471"
SCALE_VARIABLE = "MARCHLINE_TIME_SCALE"
_LEVELS = ("debug", "info", "warning", "error")


class UsageError(Exception):
    """The command line cannot be followed; the text says what to change."""


def main(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run one command; the process's exit code (``ExitCode``; ``job check`` uses 0, 1 and 2 only)."""
    try:
        if arguments[:1] == ["job"]:
            return _job(_job_parser().parse_args(arguments[1:]))
        return _agent(_agent_parser().parse_args(arguments), environment)
    except (UsageError, DeviceError, ListenError) as error:
        print(f"worker: {error}", file=sys.stderr)
        return ExitCode.USAGE
    except Refused as refused:
        print(f"worker: {refused}", file=sys.stderr)
        return refused.code


# ------------------------------------------------------------------------------------------------- the agent


def _agent(options: argparse.Namespace, environment: Mapping[str, str]) -> int:
    listen = _listen(options)
    offer = _offer(options)
    if options.dry_run:
        print(json.dumps(_announcement(offer), indent=2))
        return ExitCode.OK
    if not options.join:
        raise UsageError("--join URL is missing: the controller's address, like http://10.0.0.5:8470")
    scale = time_scale(environment)
    target = Target(
        base=base_url(options.join),
        token=_token(options, environment),
        run=options.run,
        connect_seconds=10 * scale,
        write_seconds=30 * scale,
    )
    patience = Patience(persist=options.persist, attempts=max(1, math.ceil(CONNECT_ATTEMPTS * scale)))
    waits = Waits(reply=30 * scale, probe=PROBE_SECONDS * scale)
    with output_that_never_waits():
        _log_to_stderr(options.log_level)
        failpoints.arm_or_exit(environment)
        if listen is None:
            return asyncio.run(Agent(target, offer, patience, waits).run())
        return asyncio.run(_relay_only(target, offer, patience, waits, listening(*listen)))


async def _relay_only(
    target: Target, offer: Offer, patience: Patience, waits: Waits, listener: socket.socket
) -> ExitCode:
    return await Site(target, offer, patience, waits, listener).run()


def _listen(options: argparse.Namespace) -> tuple[str, int] | None:
    """Where a relay-only host listens; none for one with devices. Raises ``UsageError`` for flags at odds."""
    if not options.relay_only:
        if options.listen is not None:
            raise UsageError("--listen is for a relay-only host: add --relay-only, or leave it out")
        return None
    for flag in ("devices", "emulate_ms_per_batch"):
        if getattr(options, flag) is not None:
            text = f"--{flag.replace('_', '-')} has no place beside --relay-only: such a host trains nothing"
            raise UsageError(f"{text}; start a second worker for this host's devices")
    return listen_address(options.listen or DEFAULT_LISTEN)


def _log_to_stderr(level: str) -> None:
    logging.basicConfig(
        level=getattr(logging, level.upper()),
        format="%(asctime)s %(name)s: %(message)s",
        datefmt="%H:%M:%S",
        force=True,
    )
    for noisy in ("websockets", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def _offer(options: argparse.Namespace) -> Offer:
    job_dir = options.job_dir.resolve()
    if not job_dir.is_dir():
        raise UsageError(f"--job-dir {options.job_dir} is not a directory")
    if options.run is not None and not 0 < options.run < 2**32:
        raise UsageError(f"--run {options.run} is no number of a run")
    emulate = options.emulate_ms_per_batch
    if emulate is not None and not (math.isfinite(emulate) and emulate > 0):
        raise UsageError(f"--emulate-ms-per-batch must be above 0, not {emulate}")
    alone = options.relay_only
    return Offer(
        name=options.name or socket.gethostname() + ("-relay" if alone else ""),
        devices=() if alone else tuple(find_devices(options.devices or "all")),
        job_dir=job_dir,
        run=options.run,
        emulate_ms_per_batch=emulate,
        relay_only=alone,
        stream_data=options.stream_data,
    )


def _announcement(offer: Offer) -> dict[str, Any]:
    versions = host_versions()
    return {
        "name": offer.name,
        "devices": [
            {"id": d.device.id, "name": d.device.name, "memory_bytes": d.device.memory_bytes} for d in offer.devices
        ],
        "versions": asdict(versions),
        "job_dir": str(offer.job_dir),
        "run": offer.run,
        "emulate_ms_per_batch": offer.emulate_ms_per_batch,
        "relay_only": offer.relay_only,
        "stream_data": offer.stream_data,
    }


def _token(options: argparse.Namespace, environment: Mapping[str, str]) -> str:
    """From the command line, a file, or the environment, in this order; empty under open admission."""
    if options.token is not None:
        return str(options.token).strip()
    if options.token_file is not None:
        try:
            token: str = options.token_file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--token-file {options.token_file} cannot be read: {error}") from error
        if not token:
            raise UsageError(f"--token-file {options.token_file} is empty")
        return token
    return environment.get(TOKEN_VARIABLE, "").strip()


def time_scale(environment: Mapping[str, str]) -> float:
    """The factor on every wait, 1 unless ``MARCHLINE_TIME_SCALE`` is set. Raises ``UsageError`` under 0.1
    (behaviour B3)."""
    text = environment.get(SCALE_VARIABLE)
    if text is None:
        return 1.0
    try:
        scale = float(text)
    except ValueError:
        scale = math.nan
    if not math.isfinite(scale) or scale < 0.1:
        raise UsageError(f"{SCALE_VARIABLE} must be a number of at least 0.1, not {text!r}")
    return scale


def _agent_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m worker",
        description="Offer this host's devices to a Marchline controller, and train when the world forms.",
        epilog="Exit codes: 0 run done or left, 1 failed, 2 usage, 3 rejected, 4 authentication, 5 controller lost. "
        "`python -m worker job check FILE:Name` tries a job on this machine.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--join", metavar="URL", help="the controller's address, as this host reaches it (http, https, ws, wss)")
    secret = parser.add_mutually_exclusive_group()
    secret.add_argument("--token", help=f"the join token; better kept in a file or in {TOKEN_VARIABLE}")
    secret.add_argument("--token-file", type=Path, metavar="FILE", help="file that holds the join token")
    add("--name", default="", help="this host's name in the cohort (default: its host name)")
    add("--devices", help="all, cuda, cpu, cpu:N, or GPU numbers or UUIDs like 0,2 (default: all)")
    add("--job-dir", type=Path, default=Path(), metavar="DIR", help="jobs are loaded from below it (default: here)")
    add("--run", type=int, metavar="ID", help="join this run (default: the earliest open window)")
    add(
        "--emulate-ms-per-batch",
        type=float,
        metavar="MS",
        help="pad each step to play a slower device; shown everywhere",
    )
    add("--relay-only", action="store_true", help="train nothing: fold the data of hosts that join through this one")
    add("--listen", metavar="HOST:PORT", help=f"where a relay-only host listens (default: {DEFAULT_LISTEN})")
    add(
        "--stream-data",
        action="store_true",
        help="stream to a controller on this machine too, instead of sharing memory with it",
    )
    add("--persist", action="store_true", help="dial again after the run, and after refusals that may pass")
    add("--dry-run", action="store_true", help="print what would be announced, and exit")
    add("--log-level", choices=_LEVELS, default="info")
    return parser


# ---------------------------------------------------------------------------------------------------- a job


def _job(options: argparse.Namespace) -> int:
    from worker import probe  # torch, which no agent needs

    if options.act == "probe":
        return probe.probe_main()
    try:
        params = json.loads(options.params)
    except ValueError as error:
        raise UsageError(f"--params is no JSON: {error}") from error
    if not isinstance(params, dict):
        raise UsageError('--params must be a JSON object, like {"hidden": 128}')
    return 0 if probe.check(options.job, options.job_dir, params, probe.print_line) else 1


def _job_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m worker job", description="Look at a job on this machine.")
    acts = parser.add_subparsers(dest="act", required=True)
    check = acts.add_parser("check", help="build the job and train it on two samples")
    check.add_argument("job", metavar="FILE:Name", help="path/file.py:Name or package.module:Name")
    check.add_argument(
        "--job-dir", type=Path, default=Path(), metavar="DIR", help="the job is below it (default: here)"
    )
    check.add_argument("--params", default="{}", metavar="JSON", help="parameters of the job")
    acts.add_parser("probe", help="for the agent: orders on stdin, a report on stdout")
    return parser
