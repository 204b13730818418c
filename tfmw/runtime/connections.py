"""Connections of this process to a machine that is gone, whoever made them.

    end_connections([("10.0.0.7", 2222)])           # calls over them fail now
    limit_silence([("10.0.0.7", 2222)], 15.0)       # they fail once it has been silent for so long

TensorFlow's gRPC sends no keep-alive. A call to a machine that lost its power, or its network,
waits for ever, as no packet ever ends the connection. Whoever notices the loss ends it here. The
kernel notices by itself where a limit was set before: no thread of this process has to run for it.
Where the system has no /proc, nothing happens.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

_OPEN_FILES = Path("/proc/self/fd")

# TCP_USER_TIMEOUT would treat a slow peer, which reads nothing for a while, as lost.
DETECTED_IN_11_S = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3}


def end_connections(peers: Iterable[tuple[str, int]]) -> int:
    """Ends every TCP connection of this process to these peers.

    Args:
        peers: (IP address, TCP port there).

    Returns:
        How many there were.
    """
    return _each_connection(peers, lambda connection: connection.shutdown(socket.SHUT_RDWR))


def limit_silence(peers: Iterable[tuple[str, int]], seconds: float) -> int:
    """Has the kernel end each of these connections once the peer has acknowledged nothing so long.

    Args:
        peers: (IP address, TCP port there).
        seconds: of silence to what was sent, or to the kernel's own probes; see tcp(7).

    Returns:
        How many there are.
    """
    options = {
        "TCP_USER_TIMEOUT": round(seconds * 1000),
        "TCP_KEEPIDLE": max(1, int(seconds / 3)),
        "TCP_KEEPINTVL": max(1, int(seconds / 6)),
    }
    return _each_connection(peers, lambda connection: keep_alive(connection, options))


def keep_alive(connection: socket.socket, options: Mapping[str, int] = DETECTED_IN_11_S) -> None:
    """Enables TCP keep-alive, by which the kernel detects a lost machine.

    Args:
        connection: a TCP connection.
        options: by their names in tcp(7); those that this system lacks are left out.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in options.items():
        if hasattr(socket, name):  # all of them on Linux
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _each_connection(
    peers: Iterable[tuple[str, int]], function: Callable[[socket.socket], None]
) -> int:
    """Calls a function with a duplicate of the descriptor of each connection to these peers."""
    wanted = {(_plain(host), port) for host, port in peers}
    count = 0
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir(_OPEN_FILES):
            with contextlib.suppress(OSError):  # closed meanwhile, or not connected
                if not os.readlink(_OPEN_FILES / name).startswith("socket:"):
                    continue
                with socket.socket(fileno=os.dup(int(name))) as connection:
                    if connection.family not in (socket.AF_INET, socket.AF_INET6):
                        continue
                    host, port = connection.getpeername()[:2]
                    if (_plain(host), port) in wanted:
                        function(connection)
                        count += 1
    return count


def addresses_of(host: str) -> set[str]:
    """IP addresses of a host; none if its name cannot be resolved."""
    try:
        return {str(found[4][0]) for found in socket.getaddrinfo(host, None)}
    except OSError:
        return set()


def _plain(host: str) -> str:
    """An IP address in its shortest form: 10.0.0.7 for ::ffff:10.0.0.7 too."""
    address = ipaddress.ip_address(host.partition("%")[0])
    return str(getattr(address, "ipv4_mapped", None) or address)
