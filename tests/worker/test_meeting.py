"""Where ranks of a session over gloo meet: words that reach all, guests that may not stay, and no name server."""

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from benchmarks import netns
from worker.meeting import MEETING, Meeting, MeetingPoint, MeetingStore

WHY_NOT = netns.unavailable()


@pytest.fixture
def meeting() -> Iterator[Meeting]:
    with closing(Meeting("127.0.0.1")) as made:
        yield made


def dial(point: MeetingPoint) -> socket.socket:
    connection = socket.create_connection((point.host, point.port), 10)
    connection.settimeout(10)
    return connection


@contextmanager
def guest(point: MeetingPoint) -> Iterator[MeetingStore]:
    with closing(MeetingStore(dial(point), point.key)) as store:
        yield store


def is_hung_up(connection: socket.socket) -> bool:
    with connection:
        return connection.recv(1) == b""


def test_what_one_says_reaches_those_who_were_there_and_those_who_come_later(meeting: Meeting) -> None:
    with guest(meeting.point) as first, guest(meeting.point) as second:
        first.set("one", b"\x00\n\xff")
        assert first.get("one") == second.get("one") == b"\x00\n\xff"
        second.set("two", b"")
        with guest(meeting.point) as third:
            third.wait(["two", "one"])
            assert (third.get("one"), third.get("two")) == (b"\x00\n\xff", b"")
        first.set("one", b"anew")
        first.set("end", b"")
        second.wait(["end"])
        assert second.get("one") == b"anew"


def test_a_long_word_comes_whole(meeting: Meeting) -> None:
    word = bytes(range(256)) * 100
    with guest(meeting.point) as first, guest(meeting.point) as second:
        first.set("long", word)
        assert second.get("long") == word


@pytest.mark.parametrize("line", [b"no key\n", b"\n", b"x" * 200_000], ids=["another key", "no key", "endless"])
def test_a_stranger_is_hung_up_on_and_hears_nothing(meeting: Meeting, line: bytes) -> None:
    with guest(meeting.point) as known:
        known.set("word", b"secret")
        known.wait(["word"])
        stranger = dial(meeting.point)
        try:
            stranger.sendall(line)
            hung_up = is_hung_up(stranger)
        except ConnectionError:  # while it still talked
            hung_up = True
        assert hung_up
        with guest(meeting.point) as late:
            assert late.get("word") == b"secret"


def test_a_guest_who_is_gone_does_not_keep_the_others(meeting: Meeting) -> None:
    with guest(meeting.point) as stays:
        for number in range(20):
            with guest(meeting.point) as leaves:
                leaves.set(str(number), b"")
        stays.wait([str(number) for number in range(20)])


@pytest.mark.parametrize("how", ["the meeting closes", "the connection is shut"])
def test_who_waits_is_woken(how: str) -> None:
    others = set(threading.enumerate())  # of tests before this one
    meeting = Meeting("127.0.0.1")
    connection = dial(meeting.point)
    store = MeetingStore(connection, meeting.point.key)
    ends: dict[str, Callable[[], object]] = {
        "the meeting closes": meeting.close,
        "the connection is shut": lambda: connection.shutdown(socket.SHUT_RDWR),
    }
    with guest(meeting.point) as other:  # it has been heard once its own word is back
        other.set("word", b"")
        store.wait(["word"])
    timer = threading.Timer(0.05, ends[how])
    timer.start()
    with pytest.raises(ConnectionError, match="hung up"):
        store.wait(["never told"])
    timer.join()
    store.close()
    meeting.close()
    meeting.close()
    assert MEETING not in [thread.name for thread in set(threading.enumerate()) - others]


@pytest.mark.parametrize(
    "identity", [b"nonsense", b"[]", b"{}", b"\xff", json.dumps({"host": "h", "port": "p", "key": ""}).encode()]
)
def test_an_identity_of_another_library_is_no_place(identity: bytes) -> None:
    with pytest.raises(ValueError, match="no place to meet at"):
        MeetingPoint.of(identity)
    point = MeetingPoint("10.0.0.1", 7, "key")
    assert MeetingPoint.of(point.as_bytes()) == point


def test_a_rank_that_meets_nobody_needs_no_distributed_torch() -> None:
    """Some builds of torch for small devices have none; the CPU modes train there."""
    without = "import sys, torch; sys.modules['torch._C._distributed_c10d'] = None; import worker.rank"
    done = subprocess.run([sys.executable, "-c", without], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr


RANK = """
import socket, sys
import torch
from worker.communicator import Guard
from worker.gloo_communicator import GlooLibrary
place = int(sys.argv[1])
library = GlooLibrary("eth0")
identity = bytes.fromhex(sys.argv[2]) if place else library.make_id()
print(identity.hex(), flush=True)
session = library.join(identity, place, 2, Guard(lambda: ""))
ones = torch.ones(3)
session.sum(ones, "the sum")
print(ones.tolist(), flush=True)
sys.stdin.readline()
session.abort()
library.close()
"""
ASK = "import socket; socket.getnameinfo(('10.1.2.3', 1), socket.NI_NUMERICSERV)"


@pytest.mark.slow
@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "-")
def test_no_name_server_is_asked(tmp_path: Path) -> None:
    """Two ranks on hosts whose only name server never answers, but counts."""
    resolver = tmp_path / "resolv.conf"
    with netns.Network() as network, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind((network.address, 53))
        server.setblocking(False)
        resolver.write_text(f"nameserver {network.address}\noptions timeout:1 attempts:1\n")
        hosts = [network.add(), network.add()]

        def start(host: netns.Host, *program: str) -> subprocess.Popen[str]:
            inside = ["sh", "-c", 'mount --bind "$0" /etc/resolv.conf && exec "$@"', str(resolver), sys.executable]
            command = host.command(*inside, "-c", *program)
            return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

        def questions() -> int:
            count = 0
            while True:
                try:
                    server.recv(4096)
                except BlockingIOError:
                    return count
                count += 1

        with start(hosts[0], RANK, "0") as first:
            assert first.stdout is not None and first.stdin is not None
            identity = first.stdout.readline().strip()
            with start(hosts[1], RANK, "1", identity) as second:
                assert second.stdout is not None and second.stdin is not None
                assert second.stdout.readline().strip() == identity
                assert first.stdout.readline() == second.stdout.readline() == "[2.0, 2.0, 2.0]\n"
                for each in (first, second):
                    each.stdin.write("\n")
                    each.stdin.close()
                assert [each.wait(60) for each in (first, second)] == [0, 0]
        assert questions() == 0
        with start(hosts[0], ASK) as asks:  # it would have been seen
            asks.wait(60)
        assert questions() > 0
