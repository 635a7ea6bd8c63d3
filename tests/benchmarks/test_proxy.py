"""The proxy of the chaos run: what it was told happens to the bytes, and nothing of it is left once it is closed."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from benchmarks.havoc.proxy import Proxy, proxied

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def server() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def address(server: socket.socket) -> str:
    return f"http://127.0.0.1:{server.getsockname()[1]}"


def dial(proxy: Proxy) -> socket.socket:
    return socket.create_connection(("127.0.0.1", urlsplit(proxy.url).port or 0), timeout=10)


def has_ended(client: socket.socket) -> bool:
    """Whether its other end is gone, with a reset or an end; raises ``TimeoutError`` when it is not."""
    with contextlib.suppress(ConnectionResetError):
        return client.recv(1) == b""
    return True


def running() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if "(_accept)" in thread.name or "(_serve)" in thread.name}


def test_bytes_pass_both_ways(server: socket.socket) -> None:
    with proxied(address(server)) as proxy, dial(proxy) as client:
        client.sendall(b"GET /ws/data HTTP/1.1\r\n")
        peer, _ = server.accept()
        with peer:
            assert peer.recv(100) == b"GET /ws/data HTTP/1.1\r\n"
            peer.sendall(b"yes")
            assert client.recv(100) == b"yes"
        assert proxy.passed["data", "down"] == 3


def test_a_channel_is_cut_after_so_many_bytes(server: socket.socket) -> None:
    with proxied(address(server)) as proxy, dial(proxy) as client:
        proxy.cut_after(30)
        client.sendall(b"GET /ws/data HTTP/1.1\r\n")
        peer, _ = server.accept()
        with peer:
            assert peer.recv(100)
            client.sendall(bytes(100))
            assert has_ended(client)
        assert proxy.cut.is_set()


def test_who_dials_a_closed_proxy_is_refused(server: socket.socket) -> None:
    """A thread in ``accept`` keeps a closed listener alive for one more host, which nobody would close."""
    others = running()  # of tests before this one
    proxy = Proxy(address(server))
    proxy.close()
    with pytest.raises(ConnectionRefusedError):
        dial(proxy)
    assert running() <= others


def test_who_dials_while_the_proxy_closes_is_dropped(server: socket.socket) -> None:
    """Hosts dial again as soon as they are cut: each connection ends, and leaves no thread and no open socket."""
    others = running()  # of tests before this one
    ended, started = threading.Event(), threading.Event()
    answers: list[bytes] = []

    def redial(proxy: Proxy) -> None:
        while not ended.is_set():
            try:
                with dial(proxy) as client:
                    started.set()
                    client.sendall(b"x")
                    answers.append(client.recv(1))
            except OSError:
                started.set()

    for _ in range(20):
        ended.clear(), started.clear()
        proxy = Proxy(address(server))
        hosts = [threading.Thread(target=redial, args=(proxy,)) for _ in range(3)]
        for host in hosts:
            host.start()
        started.wait(10)
        proxy.close()
        ended.set()
        for host in hosts:
            host.join(10)
        assert not any(host.is_alive() for host in hosts)
        assert running() <= others
    assert not any(answers)


def test_a_host_is_dropped_where_the_controller_is_gone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        gone = address(listener)
    with proxied(gone) as proxy, contextlib.suppress(ConnectionResetError, BrokenPipeError), dial(proxy) as client:
        assert has_ended(client)
