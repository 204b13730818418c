"""The connection between a job's controller and each of its tasks: authenticated messages over TCP.

    with LinkServer(token, post=inbox.put) as server:      # beside the controller
        link, message = inbox.get()                        # message is None once a link is lost
        link.send("start", index=1)

    link = connect([("h0", server.port)], token)           # in a task
    link.send("hello", rank=1)
    message = link.receive()                               # Message("start", {"index": 1}, b"")

A connection begins with a nonce of each side; then every frame carries a MAC
(`tfmw.remote.channel`). Both sides send a frame at least every BEAT_S. A side that hears
nothing for SILENCE_S closes the connection. Nothing is encrypted, as gradients are not either.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from tfmw.errors import TfmwError
from tfmw.remote.channel import (
    HEADER,
    LARGEST,
    NONCE_BYTES,
    Forged,
    Sealer,
    Unsealer,
    session_key,
)

BEAT_S = 2.0
SILENCE_S = 20.0
HELLO_S = 10.0
"""Seconds in which a new connection must prove the token."""

_RETRY_S = 0.2
_PIECE = LARGEST - 1  # bytes of a message in one frame, beside the mark whether more follow
_HEAD = struct.Struct("!I")  # length of a message's JSON, before it


class Message(NamedTuple):
    """What one side sends.

    Args:
        kind: its name, such as "output".
        fields: JSON values by name.
        body: bytes of any length.
    """

    kind: str
    fields: dict[str, Any]
    body: bytes


class Link:
    """One authenticated connection; any thread may send, one receives.

    Args:
        connection: the socket, after both nonces.
        key: of this connection.
        side: "server" or "client".
    """

    def __init__(self, connection: socket.socket, key: bytes, side: str) -> None:
        other = "client" if side == "server" else "server"
        self._socket = connection
        self._seal, self._unseal = Sealer(key, side), Unsealer(key, other)
        self._sending = threading.Lock()
        self._closed = threading.Event()
        connection.settimeout(SILENCE_S)

    @property
    def local_host(self) -> str:
        """This side's address, by which the other side, and its peers, may reach this machine."""
        host: str = self._socket.getsockname()[0]
        return host.removeprefix("::ffff:")

    def send(self, kind: str, body: bytes = b"", **fields: Any) -> None:
        """Sends a message. A lost connection is noticed by `receive` only."""
        head = json.dumps({"is": kind, **fields}).encode()
        data = memoryview(b"".join((_HEAD.pack(len(head)), head, body)))
        with self._sending, contextlib.suppress(OSError):
            for start in range(0, len(data), _PIECE):
                piece = data[start : start + _PIECE]
                more = start + _PIECE < len(data)
                self._socket.sendall(self._seal(bytes([more]) + piece))

    def receive(self) -> Message:
        """The next message.

        Raises:
            OSError: the connection is lost, closed or silent.
            Forged: a frame does not come from the other side.
        """
        while True:
            pieces = [self._frame()]
            while pieces[-1][0]:
                pieces.append(self._frame())
            data = b"".join(piece[1:] for piece in pieces)
            (length,) = _HEAD.unpack_from(data)
            fields = json.loads(data[_HEAD.size : _HEAD.size + length])
            kind = fields.pop("is")
            if kind != "alive":
                return Message(kind, fields, data[_HEAD.size + length :])

    def beat(self) -> None:
        """Sends signs of life from now on, in a thread."""

        def run() -> None:
            while not self._closed.wait(BEAT_S):
                self.send("alive")

        threading.Thread(target=run, name="tfmw-alive", daemon=True).start()

    def close(self) -> None:
        """Closes the connection; `receive` then raises."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _frame(self) -> bytes:
        length, mac = HEADER.unpack(_exactly(self._socket, HEADER.size))
        if not 1 <= length <= LARGEST:
            raise Forged(f"a frame of {length} bytes")
        return self._unseal(_exactly(self._socket, length), mac)


Post = Callable[[tuple[Link, Message | None]], None]


class LinkServer:
    """Accepts the tasks of one job, each in a thread of its own.

    Args:
        token: what the job's tasks know.
        post: called with (link, message); with (link, None) once the link is lost.
    """

    def __init__(self, token: str, post: Post) -> None:
        self._token = token.encode()
        self._post = post
        self._links: set[Link] = set()
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        self._socket = socket.create_server(("", 0), family=family, dualstack_ipv6=dual)
        self.port: int = self._socket.getsockname()[1]
        """The port, on all addresses of this machine."""

    def __enter__(self) -> LinkServer:
        threading.Thread(target=self._accept, name="tfmw-accept", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        for link in list(self._links):
            link.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            connection.settimeout(HELLO_S)
            nonce = secrets.token_bytes(NONCE_BYTES)
            connection.sendall(nonce)
            key = session_key(self._token, nonce, _exactly(connection, NONCE_BYTES))
            link = Link(connection, key, "server")
            message = link.receive()
        except (OSError, Forged, ValueError):
            connection.close()
            return
        self._links.add(link)
        link.beat()
        try:
            while True:
                self._post((link, message))
                message = link.receive()
        except (OSError, Forged, ValueError):
            link.close()
            self._post((link, None))
        finally:
            self._links.discard(link)


def connect(
    addresses: Iterable[tuple[str, int]],
    token: str,
    timeout_s: float = 60.0,
    clock: Callable[[], float] = time.monotonic,
) -> Link:
    """Connects to a controller.

    Args:
        addresses: (host, port) pairs; the first that can be reached is used.
        token: of the job.
        timeout_s: seconds in which one must be reached.
        clock: monotonic seconds.

    Raises:
        TfmwError: none was reached.
    """
    addresses = list(addresses)
    deadline = clock() + timeout_s
    while True:
        problems = []
        for host, port in addresses:
            try:
                connection = socket.create_connection((host, port), timeout=HELLO_S)
                theirs = _exactly(connection, NONCE_BYTES)
                nonce = secrets.token_bytes(NONCE_BYTES)
                connection.sendall(nonce)
                link = Link(connection, session_key(token.encode(), theirs, nonce), "client")
                link.beat()
                return link
            except OSError as error:
                problems.append(f"{host}:{port} ({error.strerror or error})")
        if clock() > deadline:
            raise TfmwError(
                f"this task reached its job's controller at none of {', '.join(problems)}: let "
                "the hosts of the job connect to each other on all TCP ports."
            )
        time.sleep(_RETRY_S)


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = bytearray(count)
    view, have = memoryview(data), 0
    while have < count:
        got = connection.recv_into(view[have:])
        if not got:
            raise ConnectionResetError("the other side has closed the connection")
        have += got
    return bytes(data)
