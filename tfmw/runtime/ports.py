"""Free TCP ports of this machine, all different, reserved until the tasks start."""

from __future__ import annotations

import contextlib
import errno
import itertools
import random
import socket
from collections.abc import Iterator
from pathlib import Path

from tfmw.errors import UsageError


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


def _candidate_ports() -> Iterator[int]:
    try:
        # ip(7): "32768 60999", the first and the last port for outgoing connections.
        top = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        top = 32768
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
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                return None
    raise UsageError("no TCP socket can be opened on this machine; tfmw run needs a network stack.")
