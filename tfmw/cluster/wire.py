"""Messages between processes of a training that know its key: a JSON object, and arrays.

    serve(listener, key, handle, "name")        # handle(connection), once it has proven the key

    connection = connect("h0:2300", key)        # proves the key, and has it proven
    connection.send({"do": "round", "examples": 64.0}, [gradient])
    message, arrays = connection.receive()

A message is the length of its header (4 bytes), the header as JSON, and the arrays' bytes. The
header lists their dtypes and shapes. Nothing is encrypted or signed, as on the ring: keep the
network of a training private. NumPy only.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tfmw.runtime.sockets import DETECTED_IN_11_S, keep_alive

CONNECT_S = 5.0
HELLO_S = 2.0  # in which a new connection must have proven the key
SILENCE_S = 15.0  # after which the kernel ends a connection; both sides read without delay
_NONCE_BYTES = 32
_LENGTH = struct.Struct("!I")
_LARGEST_HEADER = 1 << 26
_MOST_STRANGERS = 64  # connections at a time that have proven nothing yet

Message = dict[str, Any]


class NotAMember(OSError):
    """The other side does not know the key."""


class Connection:
    """A connection whose other side has proven the key.

    Args:
        peer: a connected stream socket.
    """

    def __init__(self, peer: socket.socket):
        self._peer = peer
        self._sending = threading.Lock()

    def send(self, message: Mapping[str, Any], arrays: Sequence[np.ndarray] = ()) -> None:
        """Sends a message. From any thread.

        Raises:
            OSError: the other side is lost.
        """
        described = [(array.dtype.str, array.shape) for array in arrays]
        header = json.dumps({**message, "arrays": described}).encode()
        with self._sending:
            self._peer.sendall(_LENGTH.pack(len(header)) + header)
            for array in arrays:
                if array.size:
                    flat = np.ascontiguousarray(array).reshape(-1)
                    self._peer.sendall(flat.view(np.uint8).data)

    def receive(self) -> tuple[Message, list[np.ndarray]]:
        """The next message, and its arrays.

        Raises:
            OSError: the other side is lost.
        """
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        if length > _LARGEST_HEADER:
            raise ConnectionError(f"a header of {length} bytes")
        message: Message = json.loads(self._read(length))
        arrays = []
        for dtype, shape in message.pop("arrays"):
            array: np.ndarray = np.empty(shape, dtype)
            if array.size:
                self._fill(array.reshape(-1).view(np.uint8).data)
            arrays.append(array)
        return message, arrays

    def close(self) -> None:
        """Closes it; a `receive` of another thread ends."""
        with contextlib.suppress(OSError):
            self._peer.shutdown(socket.SHUT_RDWR)
        self._peer.close()

    def _read(self, size: int) -> bytes:
        data = bytearray(size)
        self._fill(memoryview(data))
        return bytes(data)

    def _fill(self, view: memoryview) -> None:
        while view:
            count = self._peer.recv_into(view)
            if not count:
                raise ConnectionError("it closed the connection")
            view = view[count:]


def connect(address: str, key: bytes) -> Connection:
    """Connects to a process that serves.

    Raises:
        OSError: nobody listens there.
        NotAMember: the other side does not know the key.
    """
    host, _, port = address.rpartition(":")
    peer = socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S)
    return _proven(peer, key, b"member", b"server")


def serve(
    listener: socket.socket, key: bytes, handle: Callable[[Connection], None], name: str
) -> None:
    """Calls `handle` with each connection that proves the key, in a thread of its own.

    Returns at once. A connection is closed after its call.

    Args:
        listener: a listening socket; `stop` ends the serving.
        key: of the training.
        handle: raises OSError if the other side is lost.
        name: of the thread that accepts.
    """
    strangers = threading.BoundedSemaphore(_MOST_STRANGERS)

    def serve_one(peer: socket.socket) -> None:
        with contextlib.suppress(OSError):
            try:
                peer.settimeout(HELLO_S)
                connection = _proven(peer, key, b"server", b"member")
            finally:
                strangers.release()
            with contextlib.closing(connection):
                handle(connection)

    def accept() -> None:
        while True:
            try:
                peer, _ = listener.accept()
            except OSError:
                if listener.fileno() < 0:
                    return
                time.sleep(0.1)  # such as EMFILE
                continue
            if strangers.acquire(blocking=False):
                threading.Thread(target=serve_one, args=[peer], daemon=True).start()
            else:
                peer.close()

    threading.Thread(target=accept, name=name, daemon=True).start()


def stop(listener: socket.socket) -> None:
    """Accepts no further connection; those that are open stay."""
    with contextlib.suppress(OSError):
        listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
    listener.close()


def _proven(peer: socket.socket, key: bytes, own: bytes, other: bytes) -> Connection:
    """Each side sends a nonce, and proves that it knows the key by its HMAC of both nonces."""
    try:
        connection = Connection(peer)
        nonce = secrets.token_bytes(_NONCE_BYTES)
        peer.sendall(nonce)
        theirs = connection._read(_NONCE_BYTES)
        nonces = b"".join(sorted((nonce, theirs)))
        peer.sendall(_proof(key, own, nonces))
        expected = _proof(key, other, nonces)
        if not hmac.compare_digest(connection._read(len(expected)), expected):
            raise NotAMember("the other side does not know this training's TFMW_TOKEN")
        peer.settimeout(None)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        keep_alive(peer, DETECTED_IN_11_S | {"TCP_USER_TIMEOUT": round(SILENCE_S * 1000)})
    except BaseException:
        peer.close()
        raise
    return connection


def _proof(key: bytes, side: bytes, nonces: bytes) -> bytes:
    return hmac.digest(key, b"tfmw rounds " + side + b" " + nonces, "sha256")
