"""Connects and authenticates two neighbours of a ring.

    with Listener(host) as listener:                             # each worker opens one
        addresses = from_all(listener.address)                   # and publishes its address
        to_next = connect(host_of_next, addresses[next], listener.address, key)
        from_previous = listener.accept(addresses[previous], key)

A listener publishes a random challenge beside its port. It accepts the first connection that sends
the challenge's HMAC under the key. The key itself is never sent. The protection depends on the key:

- `TFMW_TOKEN` in the environment of all tasks (`tfmw run` sets one for the tasks that it starts;
  over several hosts, set the same for all). Without the token nobody can take a worker's place,
  even after reading all messages between the tasks.
- Without a token, the chief draws a key and sends it through TensorFlow's coordination service,
  which has no authentication. It rejects accidental and random connections, such as port scans, but
  not a peer that can connect to that service.

The gradients are neither encrypted nor signed: an attacker who can change packets between hosts can
change gradients. Keep the network of a training private.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hmac
import os
import secrets
import select
import socket
import time
from typing import Any, TypedDict

from tfmw.mirrored.collectives.ring_links import (
    MEMORY_BYTES,
    Receiver,
    Sender,
    SharedReceiver,
    SharedSender,
    mapped,
)
from tfmw.runtime import sockets
from tfmw.runtime.sockets import keep_alive

CONNECT_S = 5.0
HELLO_S = 2.0  # until a connection must have sent its proof; a worker sends it at once
SHARED_MEMORY = "TFMW_SHARED_MEMORY"
"""Variable: with 0, workers of one machine use TCP, as workers of several machines do."""

_MAX_HELLOS = 64  # maximum of connections without a proof; then the oldest is closed
_PROOF_BYTES = 32


class Address(TypedDict):
    """The address of a worker, for workers of its machine and of other machines.

    Attributes:
        port: for TCP.
        machine: equal for workers that can connect to each other's `name`; None if not supported.
        name: of a Unix socket.
        challenge: hexadecimal; a connection must send its HMAC.
    """

    port: int
    machine: list[Any] | None
    name: str
    challenge: str


def _proof(key: bytes, listener: Address) -> bytes:
    return hmac.digest(key, b"tfmw ring " + listener["challenge"].encode(), "sha256")


@dataclasses.dataclass(eq=False)
class _Hello:
    """A connection that has not been authenticated yet."""

    peer: socket.socket
    deadline: float
    received: bytes = b""
    files: list[int] = dataclasses.field(default_factory=list)

    def read(self) -> bool:
        """Reads the bytes that have arrived; returns whether to keep the connection."""
        try:
            part, files, _flags, _address = socket.recv_fds(
                self.peer, _PROOF_BYTES - len(self.received), 1
            )
        except BlockingIOError:
            return True
        except OSError:
            return False
        self.received += part
        self.files += files
        return bool(part)

    def close(self) -> None:
        self.peer.close()
        self.close_files()

    def close_files(self) -> None:
        for file in self.files:
            os.close(file)
        self.files.clear()


class Listener:
    """Accepts the connection of the previous worker.

    Args:
        host: this worker's name or IP address, as other workers know it.
    """

    def __init__(self, host: str):
        self._tcp = sockets.listen(host)
        self._unix = socket.socket(socket.AF_UNIX)
        own_machine, name = machine(), ""
        if own_machine is not None:
            self._unix.bind("")  # Linux chooses an abstract name: unix(7), "Autobind feature"
            self._unix.listen()
            name = self._unix.getsockname().decode().removeprefix("\0")
        port: int = self._tcp.getsockname()[1]
        self.address: Address = {
            "port": port,
            "machine": own_machine,
            "name": name,
            "challenge": secrets.token_hex(32),
        }

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stops listening."""
        self._tcp.close()
        self._unix.close()

    def accept(self, before: Address, key: bytes) -> Receiver:
        """The first connection within CONNECT_S that proves to know the key.

        Connections are read concurrently, so that a slow or silent one does not delay another.

        Args:
            before: the address of the previous worker, which determines the kind of connection.
            key: the key of this training.

        Raises:
            OSError: there is no such connection.
        """
        shared = _same_machine(before, self.address)
        server = self._unix if shared else self._tcp
        server.setblocking(False)
        expected = _proof(key, self.address)
        deadline = time.monotonic() + CONNECT_S
        refused = 0
        hellos: list[_Hello] = []  # the oldest first
        try:
            while (now := time.monotonic()) < deadline:
                poll = select.poll()
                for connection in (server, *(hello.peer for hello in hellos)):
                    poll.register(connection, select.POLLIN)
                until = min([deadline, *(hello.deadline for hello in hellos)])
                ready = {file for file, _events in poll.poll(1000 * max(0.0, until - now))}
                for hello in list(hellos):
                    is_open = hello.peer.fileno() not in ready or hello.read()
                    if is_open and len(hello.received) == _PROOF_BYTES:
                        hellos.remove(hello)
                        proven = hmac.compare_digest(hello.received, expected)
                        if proven and bool(hello.files) == shared:
                            return _receiver(hello, shared)
                        refused += 1
                        hello.close()
                    elif not is_open or hello.deadline <= time.monotonic():
                        hellos.remove(hello)
                        hello.close()
                if server.fileno() in ready:
                    with contextlib.suppress(BlockingIOError, ConnectionError):
                        peer, _address = server.accept()
                        peer.setblocking(False)
                        hellos.append(_Hello(peer, time.monotonic() + HELLO_S))
                if len(hellos) > _MAX_HELLOS:
                    hellos.pop(0).close()
        finally:
            for hello in hellos:
                hello.close()
        why = f"; {refused} connection(s) without this training's TFMW_TOKEN" if refused else ""
        raise TimeoutError(f"timed out{why}")


def _receiver(hello: _Hello, shared: bool) -> Receiver:
    try:
        if shared:
            return SharedReceiver(hello.peer, mapped(hello.files[0]))
        return Receiver(_tuned(hello.peer))
    finally:
        hello.close_files()


def connect(host: str, after: Address, local: Address, key: bytes) -> Sender:
    """Connects to the next worker.

    Args:
        host: its name or IP address.
        after, local: the addresses of the next worker and of this one.
        key: the key of this training.

    Raises:
        OSError: the connection failed.
    """
    proof = _proof(key, after)
    if not _same_machine(after, local):
        peer = socket.create_connection((host, after["port"]), timeout=CONNECT_S)
        peer.sendall(proof)
        return Sender(_tuned(peer))
    with contextlib.ExitStack() as undo:
        peer = undo.enter_context(socket.socket(socket.AF_UNIX))
        peer.settimeout(CONNECT_S)
        peer.connect(f"\0{after['name']}")
        with open(os.memfd_create("tfmw"), "r+b") as memory:
            memory.truncate(MEMORY_BYTES)
            socket.send_fds(peer, [proof], [memory.fileno()])
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
