"""TCP: listening sockets, reserved ports for tasks, and the end of connections to a lost machine.

    listen("10.0.0.7", 2222)      # at that address; at all of this machine's without one
    with reserved_ports(2) as ports: ...
    end_connections([("10.0.0.7", 2222)])           # calls over them fail now
    limit_silence([("10.0.0.7", 2222)], 15.0)       # they fail once it has been silent for so long

TensorFlow's gRPC sends no keep-alive. A call to a machine that lost its power, or its network,
waits for ever, as no packet ever ends the connection. The process that detects the loss ends the
connection by this module. If a limit was set before, the kernel ends it, without a thread of this
process. On systems without /proc these functions have no effect.

Standard library only.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import itertools
import os
import random
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from tfmw.errors import UsageError

TAKEN = (errno.EADDRINUSE, errno.EACCES)
"""Errors of a port that another process has, or that is reserved for privileged users."""

_BACKLOG = 1024

_OPEN_FILES = Path("/proc/self/fd")

# TCP_USER_TIMEOUT would treat a slow peer, which reads nothing for a while, as lost.
DETECTED_IN_11_S = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3}


def listen(host: str = "", port: int = 0) -> socket.socket:
    """A listening socket at an IP address of this machine, or at all of its addresses.

    A name may resolve here to another address than elsewhere (127.0.1.1 on Debian).

    Args:
        host: an IP address of this machine; with any other value the socket listens at all
            addresses.
        port: 0 for any free port.

    Raises:
        OSError: with an errno in `TAKEN`, the port cannot be used.
    """
    try:
        version = ipaddress.ip_address(host).version
        family = socket.AF_INET6 if version == 6 else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except ValueError:
        pass
    except OSError as error:
        if error.errno in TAKEN:
            raise
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    return socket.create_server(("", port), family=family, dualstack_ipv6=dual, backlog=_BACKLOG)


@contextlib.contextmanager
def reserved_ports(count: int) -> Iterator[list[int]]:
    """Finds `count` free TCP ports; no other process can bind them inside the `with`.

    They lie below the ephemeral ports if possible. So no outgoing connection can use one between
    the end of the `with` and the moment at which a task listens on it.
    """
    with contextlib.ExitStack() as held:
        ports = []
        for port in _candidate_ports():
            listener = _bind(port)
            if listener is not None:
                held.enter_context(listener)
                ports.append(listener.getsockname()[1])
            if len(ports) == count:
                break
        yield ports


def ephemeral_ports(proc: Path = Path("/proc")) -> range:
    """Ports that the system assigns to programs which ask for any, and to outgoing connections."""
    try:
        # ip(7): "32768\t60999", the first and the last
        text = (proc / "sys/net/ipv4/ip_local_port_range").read_text()
        first, last = map(int, text.split())
    except (OSError, ValueError):
        return range(32768, 61000)  # Linux's default
    return range(first, last + 1)


def _candidate_ports() -> Iterator[int]:
    top = ephemeral_ports().start
    chance = random.Random()  # not the user's seeded global generator
    if top > 11000:
        yield from chance.sample(range(10000, top), 1000)
    yield from itertools.repeat(0)  # any port that the system chooses


def _bind(port: int) -> socket.socket | None:
    """A socket bound to the port on all addresses, as TensorFlow's server; None if it is taken."""
    for family, anywhere in ((socket.AF_INET6, "::"), (socket.AF_INET, "")):
        try:
            listener = socket.socket(family, socket.SOCK_STREAM)
        except OSError:
            continue
        try:
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            listener.bind((anywhere, port))
            return listener
        except OSError as error:
            listener.close()
            if error.errno in TAKEN:
                return None
    raise UsageError("no TCP socket can be opened on this machine; tfmw run needs a network stack.")


def end_connections(peers: Iterable[tuple[str, int]]) -> int:
    """Ends every TCP connection to peers (IP address, port there); returns how many there were."""
    return _each_connection(peers, lambda connection: connection.shutdown(socket.SHUT_RDWR))


def limit_silence(peers: Iterable[tuple[str, int]], seconds: float) -> int:
    """Makes the kernel end connections whose peer has acknowledged nothing for so long.

    Args:
        peers: see `end_connections`.
        seconds: seconds without an acknowledgement of sent data, or of the kernel's own probes; see
            tcp(7).
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
        options: options by their names in tcp(7); those that this system lacks are ignored.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in options.items():
        if hasattr(socket, name):  # Linux has all of them
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
    """An IP address in its shortest form, such as 10.0.0.7 for ::ffff:10.0.0.7."""
    address = ipaddress.ip_address(host.partition("%")[0])
    return str(getattr(address, "ipv4_mapped", None) or address)
