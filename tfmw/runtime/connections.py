"""Connections of this process to a machine that is gone, whoever made them.

    end_connections(["10.0.0.7"], 2222)     # calls over them fail now

TensorFlow's gRPC sends no keep-alive. A call to a machine that lost its power, or its network,
waits for ever, as no packet ever ends the connection. Whoever notices the loss ends it here. Where
the system has no /proc, nothing happens.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from collections.abc import Iterable
from pathlib import Path

_OPEN_FILES = Path("/proc/self/fd")


def end_connections(hosts: Iterable[str], port: int) -> int:
    """Ends every TCP connection of this process to a port of these hosts.

    Args:
        hosts: IP addresses.
        port: TCP port there.

    Returns:
        How many there were.
    """
    wanted = {_plain(host) for host in hosts}
    ended = 0
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir(_OPEN_FILES):
            with contextlib.suppress(OSError):  # closed meanwhile, or not connected
                if not os.readlink(_OPEN_FILES / name).startswith("socket:"):
                    continue
                # The same connection: a duplicate of the descriptor, closed again.
                with socket.socket(fileno=os.dup(int(name))) as connection:
                    if connection.family not in (socket.AF_INET, socket.AF_INET6):
                        continue
                    peer = connection.getpeername()
                    if peer[1] == port and _plain(peer[0]) in wanted:
                        connection.shutdown(socket.SHUT_RDWR)
                        ended += 1
    return ended


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
