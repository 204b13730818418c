"""Addresses of tasks: "host:port" as text, and as a socket to listen on.

    split("[::1]:2222")              # ("::1", 2222)
    with listen("h0:2222") as server: ...

Standard library only.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
from collections.abc import Sequence
from typing import Any

from tfmw.cluster import sockets
from tfmw.errors import ClusterError

DEFAULT_PORT = 2222

# Ports that all tasks of a job derive from the job's number. They are below Linux's ephemeral
# ports, which start at 32768.
_DERIVED_PORTS = range(12000, 32000)
PORTS_PER_JOB = 16  # so that jobs with neighbouring numbers on one host get different ports

_ADDRESS = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+(%\w+)?\]|[^\s:/\[\]@]+):(?P<port>[0-9]{1,5})")


def validated(job: str, value: Any, source: str) -> tuple[str, ...]:
    """The addresses of one job as a tuple.

    Args:
        job: task type, for the message.
        value: the addresses as described; a sequence of "host:port".
        source: the source of the description, for the message.

    Raises:
        ClusterError: `value` is not a list, or an entry is not "host:port".
    """
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ClusterError(
            f'{source} has {value!r} as the addresses of "{job}"; '
            'write a list such as ["h0:2222", "h1:2222"].'
        )
    for i, address in enumerate(value):
        match = _ADDRESS.fullmatch(address) if isinstance(address, str) else None
        if match is None or not 1 <= int(match["port"]) <= 65535:
            raise ClusterError(
                f'{source} has {address!r} as address {i} of "{job}"; '
                'write "host:port" with a port from 1 to 65535, such as "h0:2222" or "[::1]:2222".'
            )
    return tuple(value)


def split(address: str) -> tuple[str, int]:
    """(host, port) of an address; IPv6 hosts lose their brackets."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def joined(host: str, port: int) -> str:
    """The address of a port of a host; the inverse of `split`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def with_port(host: str, port: int) -> str:
    """The host with `port`, unless it has one."""
    return host if _ADDRESS.fullmatch(host) else f"{host}:{port}"


def derived_port(number: int) -> int:
    """The first of the `PORTS_PER_JOB` ports of job `number`."""
    slots = len(_DERIVED_PORTS) // PORTS_PER_JOB
    return _DERIVED_PORTS[number % slots * PORTS_PER_JOB]


def is_global(address: str) -> bool:
    """Whether the host is a literal IP address of the public internet."""
    host = address.rpartition(":")[0].strip("[]").partition("%")[0]
    try:
        return ipaddress.ip_address(host).is_global
    except ValueError:
        return False


def is_of_this_machine(address: str) -> bool:
    """Whether the host is an address of this machine."""
    for family, kind, protocol, _, endpoint in _found(address):
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.bind(endpoint)
                return True
        except OSError:
            continue
    return False


def _found(address: str) -> list[Any]:
    """The results of getaddrinfo for the host; none if its name is unknown here."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        return socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return []


def local_index(addresses: Sequence[str], given: int | None = None) -> int:
    """The index of this machine: `given`, or that of the only address that is this machine's.

    Raises:
        ClusterError: no address has the given index, or none or several are this machine's.
    """
    if given is not None:
        if 0 <= given < len(addresses):
            return given
        raise ClusterError(
            f"--host-index is {given}; expected 0 to {len(addresses) - 1}, an index of --hosts."
        )
    local = [i for i, address in enumerate(addresses) if is_of_this_machine(address)]
    if len(local) != 1:
        count = "none of them is" if not local else f"{len(local)} of them are"
        unknown = [split(address)[0] for address in addresses if not _found(address)]
        names = f", and no address is known here for {', '.join(unknown)}" if unknown else ""
        raise ClusterError(
            f"cannot find this machine in --hosts {','.join(addresses)}: "
            f"{count} an address of this machine{names}; pass --host-index, from 0."
        )
    return local[0]


def listen(address: str) -> socket.socket:
    """A socket that listens on the port of this task's own address.

    Raises:
        ClusterError: the port is taken, or reserved for privileged users.
    """
    try:
        # At all addresses, as TensorFlow's server does: the host may be a name that only other
        # hosts resolve.
        return sockets.listen(port=split(address)[1])
    except OSError as error:
        if error.errno not in sockets.TAKEN:
            raise
        raise ClusterError(
            f"port {split(address)[1]} of this task's address {address!r} cannot be used "
            f"({os.strerror(error.errno)}): stop the process that holds it, or give this task "
            "another port in every task's description of the cluster."
        ) from None
