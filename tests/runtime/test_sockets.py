"""Connections to a lost machine are ended, of any library, and no others."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Sequence

import pytest

from tests.helpers.open_files import opened
from tfmw.cluster.sockets import addresses_of, end_connections, limit_silence


def descriptors(ends: Sequence[tuple[socket.socket, ...]]) -> int:
    """The number of this process's descriptors of these sockets; other threads have others."""
    own = {os.readlink(f"/proc/self/fd/{each.fileno()}") for pair in ends for each in pair}
    return sum(name in own for name in opened())


@pytest.mark.parametrize(
    ("family", "at"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::ffff:127.0.0.1")]
)
def test_only_those_to_that_port_of_these_hosts_end(family, at):
    """TensorFlow's sockets speak both versions of IP: the peer is ::ffff:10.0.0.7 there."""
    with contextlib.ExitStack() as stack:
        gone, here = (stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2))
        ends = []
        for server in (gone, gone, here):
            client = stack.enter_context(socket.socket(family))
            client.connect((at, server.getsockname()[1]))
            ends.append((client, stack.enter_context(server.accept()[0])))
        port = gone.getsockname()[1]
        before = descriptors(ends)
        assert end_connections([("127.0.0.2", port)]) == 0
        assert end_connections([("127.0.0.1", port)]) == 2
        assert descriptors(ends) == before
        for client, _ in ends[:2]:
            assert client.recv(1) == b""  # at once
        client, peer = ends[2]
        peer.sendall(b"alive")
        assert client.recv(5) == b"alive"


def test_a_name_that_cannot_be_resolved_has_no_addresses():
    assert addresses_of("no-such-host.invalid") == set()
    assert addresses_of("127.0.0.1") == {"127.0.0.1"}


def test_the_kernel_limits_the_silence_of_those_to_a_peer():
    with contextlib.ExitStack() as stack:
        server, other = (
            stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2)
        )
        client, beside = (
            stack.enter_context(socket.create_connection(s.getsockname())) for s in (server, other)
        )
        before = descriptors([(client, beside)])
        for _ in range(2):  # a second time nothing changes
            assert limit_silence([server.getsockname()], 15.0) == 1
        assert descriptors([(client, beside)]) == before
        tcp = socket.IPPROTO_TCP
        assert client.getsockopt(tcp, socket.TCP_USER_TIMEOUT) == 15_000
        assert client.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert client.getsockopt(tcp, socket.TCP_KEEPIDLE) == 5
        assert client.getsockopt(tcp, socket.TCP_KEEPINTVL) == 2
        assert beside.getsockopt(tcp, socket.TCP_USER_TIMEOUT) == 0
        assert beside.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 0
