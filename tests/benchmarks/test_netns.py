"""Namespaces with limited links, where root may make them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import netns

WHY_NOT = netns.unavailable()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "-")]

LISTEN = "import socket; s = socket.create_server((%r, 0)); print(s.getsockname()[1], flush=True); s.accept()"
DIAL = "import socket, sys; socket.create_connection((%r, %d), timeout=5)"
LINKS, ADDRESSES, ROUTES = 0x1, 0x10 | 0x100, 0x40 | 0x400
"""groups of rtnetlink, IPv4's and IPv6's"""


def links() -> str:
    """Those that this thread sees."""
    return subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout


def test_hosts_reach_each_other_and_this_namespace_until_their_link_is_cut() -> None:
    with netns.Network() as network:
        first, second = network.add(mbit=1000), network.add()
        for place, address in ((first.command(), first.address), ([], network.address)):
            with subprocess.Popen(
                [*place, sys.executable, "-c", LISTEN % address], stdout=subprocess.PIPE, text=True
            ) as server:
                assert server.stdout is not None
                port = int(server.stdout.readline())
                dial = second.command(sys.executable, "-c", DIAL % (address, port))
                second.cut()
                assert subprocess.run(dial, capture_output=True).returncode != 0
                second.mend()
                assert subprocess.run(dial, capture_output=True).returncode == 0
                assert server.wait(10) == 0


def test_a_limit_holds_in_both_directions() -> None:
    with netns.Network() as network:
        host = network.add(mbit=1000)
        inside = subprocess.run(["tc", "-n", host.namespace, "qdisc"], capture_output=True, text=True).stdout
        outside = subprocess.run(["tc", "qdisc", "show", "dev", host.outside], capture_output=True, text=True).stdout
        assert "tbf" in inside and "1Gbit" in inside
        assert "tbf" in outside and "1Gbit" in outside
        host.limit(None)
        after = subprocess.run(["tc", "qdisc", "show", "dev", host.outside], capture_output=True, text=True).stdout
        assert "tbf" not in after


def test_nothing_is_left_behind() -> None:
    home = os.readlink("/proc/thread-self/ns/net")
    with netns.Network() as network:
        host = network.add()
        assert host.outside in links()
    assert os.readlink("/proc/thread-self/ns/net") == home
    assert host.outside not in links()
    assert not (netns.NAMESPACES / host.namespace).exists()
    assert not (netns.NAMESPACES / host.hub).exists()


def test_the_network_outside_does_not_change_meanwhile() -> None:
    """Browsers drop what they load when it does. Heard in a namespace that stands for the machine."""
    with (
        netns.Network() as machine,
        socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as changes,
    ):
        changes.bind((0, LINKS | ADDRESSES | ROUTES))
        changes.setblocking(False)
        with netns.Network() as network:
            host = network.add(mbit=1000)
            host.cut()
            host.mend()
        with pytest.raises(BlockingIOError):
            changes.recv(65536)
        outside = machine.add().outside
        assert outside.encode() in changes.recv(65536)


def test_what_a_killed_process_left_is_reaped(tmp_path: Path) -> None:
    program = (
        "from benchmarks.netns import Network; n = Network().__enter__(); n.add(); "
        "print(n.hosts[0].namespace, flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        namespace = child.stdout.readline().strip()
        assert namespace not in netns.reap_abandoned()  # its maker lives
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
    assert (netns.NAMESPACES / namespace).exists()
    assert namespace in netns.reap_abandoned()
    assert not (netns.NAMESPACES / namespace).exists()
