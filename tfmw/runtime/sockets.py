"""Listening sockets, and free TCP ports of this machine that are reserved until tasks start.

    listen("10.0.0.7", 2222)      # at that address; at all of this machine's without one
    with reserved_ports(2) as ports: ...

Standard library only.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import itertools
import random
import socket
from collections.abc import Iterator
from pathlib import Path

from tfmw.errors import UsageError

TAKEN = (errno.EADDRINUSE, errno.EACCES)
"""Errors of a port that another process has, or that is reserved for privileged users."""

_BACKLOG = 1024


def listen(host: str = "", port: int = 0) -> socket.socket:
    """A listening socket at an IP address of this machine, or at all of its addresses.

    A name may mean another address here than for others (127.0.1.1 on Debian).

    Args:
        host: an IP address; with anything else, and an address that is not this machine's, all.
        port: 0 for any that is free.

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
    """Ports that the system gives to programs which ask for any, and to outgoing connections."""
    try:
        # ip(7): "32768\t60999", the first and the last.
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
