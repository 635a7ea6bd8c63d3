"""Processes of one measurement that wait for orders: a line of JSON in, a line of JSON out."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from threading import Timer
from typing import Any, Self

from benchmarks.figures import EntryFailed

ANSWER_SECONDS = 300.0


class Waiting:
    """A process a rank. All are told the same at the same time. Raises ``EntryFailed`` when one fails; whatever was
    started has ended when the block is left."""

    def __init__(self, what: str, answer_seconds: float = ANSWER_SECONDS) -> None:
        self._what = what
        self._answer_seconds = answer_seconds
        self._stack = ExitStack()
        self._ranks: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def start(self, programs: Sequence[tuple[Sequence[str], Mapping[str, str]]]) -> list[dict[str, Any]]:
        """Start them, each with its own environment beside ours; what each says once it is ready."""
        try:
            for command, own in programs:
                self._start(command, own)
            return [self._answer(process) for process in self._ranks]
        except BaseException:
            self._stack.close()
            raise

    def ask(self, order: dict[str, Any]) -> list[dict[str, Any]]:
        """Their answers, by rank."""
        line = json.dumps(order) + "\n"
        for process in self._ranks:
            assert process.stdin is not None
            try:
                process.stdin.write(line)
                process.stdin.flush()
            except BrokenPipeError as error:
                raise EntryFailed(f"{self._what}'s process {process.args!r} has ended") from error
        return [self._answer(process) for process in self._ranks]

    def _start(self, command: Sequence[str], own: Mapping[str, str]) -> None:
        process = subprocess.Popen(
            command,
            env={**os.environ, **own},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C reaches us alone; its stdin ends with us
        )
        self._ranks.append(process)
        self._stack.callback(end, process)

    def _answer(self, process: subprocess.Popen[str]) -> dict[str, Any]:
        assert process.stdout is not None
        timer = Timer(self._answer_seconds, process.kill)
        timer.start()
        try:
            line = process.stdout.readline()
        finally:
            timer.cancel()
        if not line.startswith("{"):
            raise EntryFailed(f"{self._what}'s process {process.args!r} ended without an answer")
        answer: dict[str, Any] = json.loads(line)
        if "failed" in answer:
            raise EntryFailed(str(answer["failed"]))
        return answer


def durations(answers: Sequence[dict[str, Any]]) -> list[float]:
    """Seconds of each repetition, from the moment at which the last rank was in it to that at which the last had its
    result; ``begun`` and ``ended`` are of one machine's clock."""
    begun = [max(moments) for moments in zip(*(answer["begun"] for answer in answers), strict=True)]
    ended = [max(moments) for moments in zip(*(answer["ended"] for answer in answers), strict=True)]
    return [stop - start for start, stop in zip(begun, ended, strict=True)]


def end(process: subprocess.Popen[Any]) -> None:
    """Close its stdin, and kill it if it does not end."""
    if process.stdin is not None:
        with suppress(BrokenPipeError):  # it ended first
            process.stdin.close()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()
