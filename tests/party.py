"""Processes that sum among themselves with the worker's own classes, on one device; the test plays the controller.

On a GPU, each of them is a host of its own for NCCL, since it gives every rank of one host its own GPU.
"""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

from wire.messages import AbortSession, Message, NewSession
from worker.arena import Arena
from worker.arena_file import ArenaFile
from worker.checksum import checksum
from worker.collective import Collective, Summed, SyncName
from worker.communicator import Library, hangs
from worker.flat import FlatModel
from worker.gloo_communicator import GlooLibrary
from worker.interrupt import Interrupt
from worker.nccl_communicator import NcclLibrary
from worker.sessions import Sessions

PATIENCE = 90.0
ON_ONE_GPU = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_SOCKET_IFNAME": "=lo"}


class Vehicle(nn.Module):
    """One of each kind: a scalar, tied weights, another dtype, a frozen one, averaged and local buffers, and bulk."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(()))
        self.one = nn.Linear(3, 3, bias=False)
        self.two = nn.Linear(3, 3, bias=False)
        self.two.weight = self.one.weight
        self.low = nn.Parameter(torch.zeros(5, dtype=torch.bfloat16))
        self.frozen = nn.Parameter(torch.full((2,), 7.0), requires_grad=False)
        self.wide = nn.Parameter(torch.zeros(wide))
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("number", torch.zeros((), dtype=torch.int64))


class Driver:
    """One process's side: every public method is an order."""

    def __init__(self, rank: int, device: str, wide: int, directory: str, interrupt: Interrupt) -> None:
        self.device = torch.device(device)
        if device != "cpu":
            torch.cuda.set_device(self.device)
        torch.manual_seed(1)
        self.model = Vehicle(wide).to(self.device)
        self.arena = Arena.for_model(self.model)
        self.arena.create_out(Path(directory) / f"rank{rank}.out")
        self.first = ArenaFile.create(Path(directory) / f"first{rank}", self.arena.elements)
        self.flat = FlatModel(self.arena, self.device)
        self.collective = Collective(self.flat, gamma=1.0)
        library: Library = GlooLibrary("lo") if device == "cpu" else NcclLibrary(self.device, "lo")
        self.sessions = Sessions(rank, library, interrupt, join_seconds=30.0, collective_seconds=60.0)

    def begin(self) -> None:
        self.arena.pack()
        self.first.values[:] = self.arena.values
        self.arena.adopt(self.first.path)
        self.collective.begin()

    def name(self, generation: int) -> bytes:
        return self.sessions.make_id(generation)

    def join(self, session: NewSession) -> str:
        return self.sessions.join(session)

    def drop(self) -> None:
        self.sessions.drop()
        self._settle()

    def set(self, value: float) -> None:
        with torch.no_grad():
            for tensor in (self.model.w, self.model.one.weight, self.model.low, self.model.wide, self.model.mean):
                tensor.fill_(value)
            self.model.number.fill_(int(value) if value == value else 0)

    def sync(self, number: int, attempt: int, generation: int, steps: int) -> Any:
        session, place = self.sessions.of(generation)
        self.collective.prepare(steps)
        return self.collective.sum(session, place, steps, SyncName(number, attempt, generation))

    def adopt(self, restart: bool = False) -> Any:
        return self.collective.adopt(restart=restart, hashed=True)

    def rounds(self, count: int, generation: int, steps: int) -> dict[str, int]:
        for number in range(count):
            result = self.sync(number, 0, generation, steps)
            assert isinstance(result, Summed), result
            self.adopt()
        return self.resources()

    def look(self) -> dict[str, Any]:
        model = self.model
        assert model.two.weight is model.one.weight
        found = {name: tensor.detach().float().cpu() for name, tensor in model.state_dict().items()}
        every = {name: sorted(set(tensor.flatten().tolist())) for name, tensor in found.items()}
        homes = [name for name, tensor in model.named_parameters() if self._at_home(tensor)]
        return {name: values[0] if len(values) == 1 else values for name, values in every.items()} | {"homes": homes}

    def bits(self) -> tuple[str, str]:
        """Of what the model holds, and of the consensus before."""
        self.flat.gather()
        base = self.collective.consensus()
        assert base is not None
        return int(checksum(self.flat.vector)), int(checksum(base))

    def resources(self) -> dict[str, int]:
        gc.collect()
        process = psutil.Process()
        found = {"threads": process.num_threads(), "fds": process.num_fds(), "rss": process.memory_info().rss}
        if self.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self.device)
            reserved, allocated = torch.cuda.memory_reserved(self.device), torch.cuda.memory_allocated(self.device)
            found |= {"reserved": reserved, "allocated": allocated, "used": total - free}
        return found

    def open_and_close(self) -> None:
        """Files, one after the other, beside whatever else goes on: a number that was closed is the next one's."""

        def churn() -> None:
            pause, held = threading.Event(), list[int]()
            for number in itertools.count():
                held.append(os.open(os.devnull, os.O_RDONLY))
                if len(held) > 5:
                    os.close(held.pop(number * 3 % len(held)))
                pause.wait(1e-4 * (number % 7))

        threading.Thread(target=churn, daemon=True).start()

    def _settle(self) -> None:
        """The device is fit for more."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _at_home(self, tensor: torch.Tensor) -> bool:
        start, vector = tensor.data_ptr(), self.flat.vector
        return vector.data_ptr() <= start < vector.data_ptr() + vector.nbytes and tensor.dtype == torch.float32


def drive(rank: int, device: str, wide: int, directory: str, orders: Connection, words: Connection) -> None:
    """The process."""
    torch.set_num_threads(1)
    interrupt = Interrupt(rank)

    def listen() -> None:
        while True:
            try:
                interrupt.hear(words.recv())
            except EOFError:
                return

    threading.Thread(target=listen, daemon=True).start()
    driver = Driver(rank, device, wide, directory, interrupt)
    driver.begin()
    orders.send(Answer("", 0.0, None))
    while (order := orders.recv()) is not None:
        began = time.perf_counter()
        try:
            value, error = getattr(driver, order[0])(*order[1:]), ""
        except Exception as failure:
            value, error = None, f"{type(failure).__name__}: {failure}"
        orders.send(Answer(error, time.perf_counter() - began, value))
    driver.sessions.close()
    assert not hangs()


@dataclass(frozen=True)
class Answer:
    """What came of an order; ``error`` begins with the exception's name."""

    error: str
    seconds: float
    value: Any


class Member:
    """A process, as the test sees it."""

    def __init__(self, rank: int, device: str, wide: int, directory: Path, *, shared: bool = False) -> None:
        """``shared``: other members have the same GPU."""
        self.rank = rank
        self.device = device
        context = multiprocessing.get_context("spawn")
        self._orders, theirs = context.Pipe()
        their_words, self._words = context.Pipe(duplex=False)
        arguments = (rank, device, wide, str(directory), theirs, their_words)
        self.process = context.Process(target=drive, args=arguments, daemon=True)
        with _environment(ON_ONE_GPU | {"NCCL_HOSTID": f"party-{os.getpid()}-{rank}"} if shared else {}):
            self.process.start()
        theirs.close()
        their_words.close()

    def tell(self, *order: Any) -> None:
        self._orders.send(order)

    def hear(self) -> Answer:
        assert self._orders.poll(PATIENCE), f"rank {self.rank} does not answer"
        answer = self._orders.recv()
        assert isinstance(answer, Answer)
        return answer

    def ask(self, *order: Any) -> Any:
        """An order that works."""
        self.tell(*order)
        answer = self.hear()
        assert not answer.error, answer
        return answer.value

    def word(self, message: Message) -> None:
        """What the link's thread would hear."""
        self._words.send(message)

    def busy(self) -> None:
        """Wait until the order that it was told is being worked on."""
        assert not self._orders.poll(0.3), self.hear()

    def signal(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def end(self) -> int | None:
        """Let it go by itself; its exit code."""
        self._orders.send(None)
        self.process.join(PATIENCE)
        return self.process.exitcode

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self._orders.close()
        self._words.close()


class Party:
    """Members of one cohort."""

    def __init__(self, directory: Path, device: str, count: int, *, wide: int = 1000) -> None:
        """``device`` is cpu or cuda: a GPU for each member where there are enough, else one for all."""
        self.generation = -1
        self.members: list[Member] = []
        self._gpus = torch.cuda.device_count() if device == "cuda" else 0
        self._shared = 0 < self._gpus < count
        self._make = lambda rank: Member(rank, self._device(), wide, directory, shared=self._shared)
        for rank in range(count):
            self.members.append(self._make(rank))
        self._next = count
        for member in self.members:
            assert not member.hear().error

    def _device(self) -> str:
        """For the next member."""
        if not self._gpus:
            return "cpu"
        taken = {member.device for member in self.members if member.process.is_alive() and not self._shared}
        return next(f"cuda:{gpu}" for gpu in range(self._gpus) if f"cuda:{gpu}" not in taken)

    def session(self, members: Sequence[Member] | None = None) -> list[str]:
        """A new one of these or all; answers the transports."""
        members = self.members if members is None else members
        self.generation += 1
        identity = members[0].ask("name", self.generation)
        order = NewSession(self.generation, identity, [member.rank for member in members])
        return self.all("join", order, members=members)

    def all(self, *order: Any, members: Sequence[Member] | None = None) -> list[Any]:
        """The same order to these members or all; what came of it, once all worked."""
        members = self.members if members is None else members
        for member in members:
            member.tell(*order)
        answers = [member.hear() for member in members]
        assert not any(answer.error for answer in answers), answers
        return [answer.value for answer in answers]

    def each(self, name: str, arguments: Sequence[Any]) -> list[Any]:
        """An order to every member, each with its own argument."""
        for member, argument in zip(self.members, arguments, strict=True):
            member.tell(name, argument)
        return [member.hear().value for member in self.members]

    def sync(self, number: int, steps: Sequence[int], attempt: int = 0) -> list[Any]:
        """Everybody sums; what each was told."""
        for member, count in zip(self.members, steps, strict=True):
            member.tell("sync", number, attempt, self.generation, count)
        answers = [member.hear() for member in self.members]
        assert not any(answer.error for answer in answers), answers
        return [answer.value for answer in answers]

    def round(self, number: int, steps: Sequence[int], attempt: int = 0) -> list[Any]:
        """Sum and adopt; what each says of its divergence."""
        self.sync(number, steps, attempt)
        return self.all("adopt")

    def abort(self, members: Sequence[Member], reason: str = "a rank died") -> tuple[list[Answer], float]:
        """Have these, which wait in something, leave it and their session; their answers, and the longest time that one
        took."""
        began = time.perf_counter()
        for member in members:
            member.word(AbortSession(self.generation, reason))
        answers = [member.hear() for member in members]
        self.all("drop", members=members)
        return answers, time.perf_counter() - began

    def bury(self, member: Member) -> None:
        member.kill()
        self.members.remove(member)

    def close(self) -> None:
        for member in self.members:
            member.kill()


@contextmanager
def party(directory: Path, device: str, count: int, **options: Any) -> Iterator[Party]:
    """So many processes, which are gone behind it."""
    made = Party(directory, device, count, **options)
    try:
        yield made
    finally:
        made.close()


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
