"""Options and fixtures that all tests share."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from children import module_path
from hypothesis import settings

# How long an example takes says something of the machine, and nothing of the code.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")

# Tests run beside one another: the threads of one torch would only wait for those of the others.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Sessions that are aborted on purpose would each leave a page of C++ frames behind the summary.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
os.environ["PYTHONPATH"] = module_path(*map(Path, filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))))

if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    # Under nohup: what the tests start would ignore it as well, but a handled signal is a child's default again.
    signal.signal(signal.SIGHUP, lambda number, frame: None)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite", action="store_true", help="record the scenario transcripts anew")


class Unheard(logging.Handler):
    """What went wrong in tasks and callbacks that nobody awaits. asyncio tells it to the log alone, and of a task when
    that is collected, which may be in a later test."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.told: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.told.append(self.format(record))


_unheard = Unheard()
logging.getLogger("asyncio").addHandler(_unheard)


@pytest.fixture(autouse=True)
def everything_is_heard() -> Iterator[None]:
    yield
    told, _unheard.told = _unheard.told, []
    assert not told, "\n".join(["of this test or one before it:", *told])
