"""Connections between supervisors: `tfmw.launcher.remote.links`, with hosts by their indexes."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from tfmw.cluster import addresses, sockets
from tfmw.errors import ClusterError
from tfmw.launcher.hosts.settings import HEARTBEAT_S, SILENCE_S
from tfmw.launcher.remote.links import CLOSED, Links, Post, Timing
from tfmw.launcher.remote.messages import HostHello, Message

TIMING = Timing(HEARTBEAT_S, SILENCE_S, hello_s=3.0)


class HostLinks(Links):
    """All connections of one supervisor.

    Args:
        hosts: addresses of all supervisors.
        host: index of this host.
        post: see `tfmw.launcher.remote.links.Links`; the names of hosts are their indexes.

    Raises:
        ClusterError: this host's port is taken.
    """

    def __init__(self, hosts: Sequence[str], host: int, token: bytes, post: Post) -> None:
        self._hosts = tuple(hosts)
        self._host = host
        super().__init__(token, post, TIMING, _listening(hosts[host]), self._host_of)

    def _host_of(self, greeting: Message) -> int:
        if (
            not isinstance(greeting, HostHello)
            or (greeting.to, greeting.hosts) != (self._host, self._hosts)
            or greeting.host not in range(len(self._hosts))
        ):
            raise ValueError("a host of another run")
        return greeting.host

    def dial_host(self, host: int | None) -> None:
        """Connects to a host, and again after each loss; None ends that."""
        if host is None:
            self.dial(None)
            return
        own = addresses.split(self._hosts[self._host])[0]
        self.dial(
            host,
            [addresses.split(self._hosts[host])],
            lambda _: HostHello(self._host, host, self._hosts),
            # From loopback address to loopback address, so that each host keeps its own.
            local=(own, 0) if own.startswith("127.") else None,
        )


def why_not_connected(problems: Sequence[str]) -> str:
    """Reason why a host cannot be reached, and possible remedies."""
    return ", ".join(problems).replace(
        CLOSED, "it closes the connection: is its token (TFMW_TOKEN) the same, and its --hosts?"
    )


def _listening(address: str) -> socket.socket:
    host, port = addresses.split(address)
    try:
        return sockets.listen(host, port)
    except OSError as error:
        raise ClusterError(
            f"port {port} of this host's address {address!r} cannot be used ({error.strerror}): "
            "stop the process that holds it, or give this host another port in every --hosts."
        ) from None
