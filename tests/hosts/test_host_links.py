"""Connections of supervisors on real sockets: strangers, wrong tokens, replays, and silence."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tfmw.cluster import addresses
from tfmw.cluster.sockets import reserved_ports
from tfmw.errors import ClusterError
from tfmw.launcher.hosts.host_links import HostLinks, why_not_connected
from tfmw.launcher.remote.messages import End, HostHello, Ready

TOKEN = b"the token of these tests"
STRANGERS = 100_000 if os.environ.get("TFMW_TEST_HOSTS") == "all" else 1_000


class Peer:
    """One supervisor's links, and what they post."""

    def __init__(self, hosts: list[str], host: int, token: bytes = TOKEN) -> None:
        self.events: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        self.links = HostLinks(hosts, host, token, self.events.put)

    def next(self, timeout_s: float = 20.0) -> tuple[Any, ...]:
        return self.events.get(timeout=timeout_s)


@pytest.fixture
def hosts() -> list[str]:
    with reserved_ports(1) as (port,):
        return [f"127.0.0.{i}:{port}" for i in (1, 2)]


@pytest.fixture
def leader(hosts: list[str]) -> Iterator[Peer]:
    peer = Peer(hosts, 0)
    with peer.links:
        yield peer


@contextlib.contextmanager
def member(hosts: list[str], leader: Peer) -> Iterator[Peer]:
    """Another host, which has connected."""
    peer = Peer(hosts, 1)
    with peer.links:
        peer.links.dial_host(0)
        assert peer.next() == ("leader_connected", 0)
        assert leader.next() == ("member_connected", 1)
        assert leader.next() == ("from_member", 1, HostHello(1, 0, tuple(hosts)))
        yield peer


def stranger(hosts: list[str]) -> socket.socket:
    host, _, port = hosts[0].rpartition(":")
    return socket.create_connection((host, int(port)), timeout=20)


def assert_closed(peer: socket.socket) -> None:
    with contextlib.suppress(ConnectionResetError):
        while peer.recv(1 << 16):
            pass


def test_messages_arrive_in_order_both_ways(hosts, leader):
    with member(hosts, leader) as peer:
        for attempt in range(100):
            peer.links.to_leader(Ready((attempt,)))
            leader.links.to_member(1, End(attempt))
        for attempt in range(100):
            assert leader.next() == ("from_member", 1, Ready((attempt,)))
            assert peer.next() == ("from_leader", End(attempt))
    assert leader.next() == ("member_lost", 1, "the other side has closed the connection")


def test_strangers_change_nothing(hosts, leader):
    """Garbage, silence and very many connections, while two hosts talk."""
    with member(hosts, leader) as peer, contextlib.ExitStack() as stack:
        silent = [stack.enter_context(stranger(hosts)) for _ in range(200)]
        for garbage in (b"GET / HTTP/1.1\r\n\r\n" * 9, b"\0" * 200, b"\xff" * 5000):
            with stranger(hosts) as other:
                with contextlib.suppress(ConnectionError):
                    other.sendall(garbage)
                assert_closed(other)
        knocked, made = threading.Event(), []

        def knock() -> None:
            try:
                for _ in range(STRANGERS):
                    with stranger(hosts) as other:  # closed by a reset: no port stays in TIME_WAIT
                        other.setsockopt(
                            socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
                        )
                    made.append(1)
            finally:
                knocked.set()

        thread = threading.Thread(target=knock)
        thread.start()
        said = 0
        while not knocked.is_set() or said < 10:
            peer.links.to_leader(Ready((said,)))
            assert leader.next() == ("from_member", 1, Ready((said,)))  # nothing else in between
            said += 1
        thread.join()
        assert len(made) == STRANGERS
        for other in silent:
            assert_closed(other)  # they had HELLO_S


def test_a_wrong_token_is_not_let_in_and_learns_why(hosts, leader):
    peer = Peer(hosts, 1, b"another token, as long as it")
    with peer.links:
        peer.links.dial_host(0)
        name, host, failures, problems = peer.next()
        assert (name, host, failures) == ("not_connected", 0, 1)
        assert "is its token (TFMW_TOKEN) the same" in why_not_connected(list(problems.values()))
    assert leader.events.empty()


def test_a_recorded_conversation_cannot_be_replayed(hosts, leader):
    """A replay of a member's frames, byte for byte, is closed after the first frame."""
    recorded: list[bytes] = []
    with socket.create_server(("127.0.0.2", 0)) as proxy:
        port = proxy.getsockname()[1]
        through = [f"127.0.0.2:{port}", hosts[1]]

        def record() -> None:
            client, _ = proxy.accept()
            with client, stranger(hosts) as server:
                server.settimeout(0.2)
                client.settimeout(0.2)
                while not any(b"Ready" in part for part in recorded):
                    with contextlib.suppress(TimeoutError):
                        client.sendall(server.recv(1 << 16))
                    with contextlib.suppress(TimeoutError):
                        recorded.append(client.recv(1 << 16))
                        server.sendall(recorded[-1])

        thread = threading.Thread(target=record)
        thread.start()
        peer = Peer(hosts, 1)
        # the addresses it announces; it connects through the proxy
        peer.links._hosts = tuple(hosts)
        host, own = through[0].rsplit(":", 1)
        split = addresses.split
        with pytest.MonkeyPatch.context() as patch, peer.links:
            patch.setattr(
                addresses,
                "split",
                lambda address: (host, int(own)) if address == hosts[0] else split(address),
            )
            peer.links.dial_host(0)
            assert peer.next() == ("leader_connected", 0)
            peer.links.to_leader(Ready((7,)))
            thread.join(timeout=20)
        assert leader.next() == ("member_connected", 1)
        assert leader.next()[0] == "from_member"
        assert leader.next() == ("from_member", 1, Ready((7,)))
        assert leader.next()[0] == "member_lost"
    with stranger(hosts) as other:
        with contextlib.suppress(ConnectionError):
            for part in recorded:
                other.sendall(part)
        assert_closed(other)
    assert leader.events.empty()


def test_a_port_that_is_taken(hosts, leader):
    with pytest.raises(ClusterError, match=re.escape("stop the process that holds it")):
        Peer(hosts, 0)
