"""Connection and authentication of two neighbours in a ring.

    with closing(Listener(host, key)) as listener:               # each worker opens one
        addresses = from_all(listener.address)                   # and publishes its address
        to_next = connect(host_of_next, addresses[next], listener.address, key)
        from_previous = listener.accept(addresses[previous])

Both sides prove that they know the key, which is never sent (cluster/wire.py). The protection
depends on the key:

- `TFMW_TOKEN` in the environment of all tasks (`tfmw run` sets one for the tasks that it starts;
  over several hosts, set the same for all). Without the token no process can take a worker's place,
  even after reading all messages between the tasks.
- Without a token, the chief draws a key and sends it to the tasks that it has met, whom it cannot
  authenticate. It rejects accidental and random connections, such as port scans, but not a process
  that joins the rendezvous.

The gradients are neither encrypted nor signed: an attacker who can change packets between hosts can
change gradients. Keep the network of a training private.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
from typing import Any, TypedDict

from tfmw.cluster import sockets, wire
from tfmw.cluster.sockets import keep_alive
from tfmw.train.mirrored.collectives.ring_links import (
    MEMORY_BYTES,
    Receiver,
    Sender,
    SharedReceiver,
    SharedSender,
    mapped,
)

CONNECT_S = 5.0
SHARED_MEMORY = "TFMW_SHARED_MEMORY"
"""Variable: with 0, workers of one machine use TCP, as workers of several machines do."""


class Address(TypedDict):
    """The address of a worker, for workers of its machine and of other machines."""

    port: int  # port for TCP
    # Equal for workers that can connect to each other's `name`; None if not supported.
    machine: list[Any] | None
    name: str  # name of a Unix socket


class Listener:
    """Accepts the connection of the previous worker.

    Args:
        host: this worker's name or IP address, as other workers know it.
        key: the key of this training.
    """

    def __init__(self, host: str, key: bytes):
        tcp, name = sockets.listen(host), ""
        self._receivers: dict[bool, queue.SimpleQueue[Receiver]] = {
            shared: queue.SimpleQueue() for shared in (False, True)
        }
        self._servers = [wire.Server(tcp, key, self._connected, "tfmw-ring")]
        if (own_machine := machine()) is not None:
            unix = socket.socket(socket.AF_UNIX)
            unix.bind("")  # Linux chooses an abstract name: unix(7), "Autobind feature"
            unix.listen()
            name = unix.getsockname().decode().removeprefix("\0")
            self._servers.append(wire.Server(unix, key, self._shares, "tfmw-ring-memory"))
        port: int = tcp.getsockname()[1]
        self.address: Address = {"port": port, "machine": own_machine, "name": name}

    def close(self) -> None:
        """Stops listening."""
        for server in self._servers:
            server.close()
        for receivers in self._receivers.values():
            while not receivers.empty():
                receivers.get().peer.close()

    def accept(self, before: Address) -> Receiver:
        """The first connection within CONNECT_S that proves knowledge of the key.

        Args:
            before: the address of the previous worker, which determines the kind of connection.

        Raises:
            OSError: no such connection was made.
        """
        shared = _same_machine(before, self.address)
        with contextlib.suppress(queue.Empty):
            return self._receivers[shared].get(timeout=CONNECT_S)
        refused = sum(server.refused for server in self._servers)
        why = f"; {refused} connection(s) without this training's TFMW_TOKEN" if refused else ""
        raise TimeoutError(f"timed out{why}")

    def _connected(self, peer: socket.socket) -> None:
        self._receivers[False].put(Receiver(_tuned(peer)))

    def _shares(self, peer: socket.socket) -> None:
        with peer:
            _, files, *_ = socket.recv_fds(peer, 1, 1)
            for file in files:
                with open(file, "r+b"):  # closes it
                    self._receivers[True].put(SharedReceiver(peer.dup(), mapped(file)))


def connect(host: str, after: Address, local: Address, key: bytes) -> Sender:
    """Connects to the next worker.

    Args:
        host: name or IP address of the next worker.
        after, local: the addresses of the next worker and of this one.
        key: the key of this training.

    Raises:
        OSError: the connection failed.
    """
    with contextlib.ExitStack() as undo:
        if not _same_machine(after, local):
            peer = socket.create_connection((host, after["port"]), timeout=CONNECT_S)
            wire.prove(peer, key)
            return Sender(_tuned(peer))
        peer = undo.enter_context(socket.socket(socket.AF_UNIX))
        peer.settimeout(CONNECT_S)
        peer.connect(f"\0{after['name']}")
        wire.prove(peer, key)
        with open(os.memfd_create("tfmw"), "r+b") as memory:
            memory.truncate(MEMORY_BYTES)
            socket.send_fds(peer, [b"\0"], [memory.fileno()])
            link = SharedSender(peer, mapped(memory.fileno()))
        undo.pop_all()
        return link


def machine() -> list[Any] | None:
    """An id of the machine and network namespace, which share abstract Unix sockets; Linux only."""
    if os.environ.get(SHARED_MEMORY) == "0" or not hasattr(os, "memfd_create"):
        return None
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return [file.read().strip(), os.stat("/proc/self/ns/net").st_ino]
    except OSError:
        return None


def _same_machine(one: Address, other: Address) -> bool:
    return one["machine"] is not None and one["machine"] == other["machine"]


def _tuned(peer: socket.socket) -> socket.socket:
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    keep_alive(peer)
    return peer
