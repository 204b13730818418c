"""Messages between processes of a training that know its key: a JSON object, and arrays.

    server = Server(listener, key, handle, "name")      # handle(peer), once it has proven the key
    connection = Connection(peer)

    connection = connect("h0:2300", key)        # both sides prove the key
    connection.send({"do": "round", "examples": 64.0}, [gradient])
    message, arrays = connection.receive()

A message is the length of its header (4 bytes), the header as JSON, and the arrays' bytes. The
header lists their dtypes and shapes. Nothing is encrypted or signed, as on the ring: keep the
network of a training private. Only arrays need NumPy.
"""

from __future__ import annotations

import collections
import contextlib
import hmac
import json
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from tfmw.cluster import addresses, sockets

if TYPE_CHECKING:
    import numpy as np

CONNECT_S = 5.0
HELLO_S = 2.0  # time in which a new connection must prove the key
# time after which the kernel ends a silent connection; both sides read without delay
SILENCE_S = 15.0
NONCE_BYTES, PROOF_BYTES = 32, 32
_LENGTH = struct.Struct("!I")
_LARGEST_HEADER = 1 << 26
_LARGEST_HELLO = 1 << 20  # that of ten thousand tasks is a quarter of this
MOST_STRANGERS = 64  # number of connections that have not proven the key yet

Message = dict[str, Any]


class NotAMember(OSError):
    """The other side does not know the key."""


class NotATask(OSError):
    """The process at an address is not a task of tfmw."""

    def __init__(self) -> None:
        super().__init__("the process there is not a task of tfmw")


class Channel:
    """JSON objects over a connected stream socket; of `largest` bytes at most."""

    def __init__(self, peer: socket.socket, largest: int = _LARGEST_HELLO):
        self.peer = peer
        self._largest = largest

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(self, message: Mapping[str, Any]) -> None:
        """Sends a message. Raises OSError if the other side is lost."""
        data = json.dumps(message).encode() + b"\n"  # a server of lines, such as HTTP, responds
        self.peer.sendall(_LENGTH.pack(len(data)) + data)

    def receive(self, timeout_s: float | None = None) -> Message:
        """The next message.

        Raises:
            NotATask: the other side sent something else.
            OSError: the other side is lost, or has sent nothing for `timeout_s` seconds.
        """
        self.peer.settimeout(timeout_s)
        (length,) = _LENGTH.unpack(read(self.peer, _LENGTH.size))
        try:
            message = json.loads(read(self.peer, length)) if length <= self._largest else None
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            raise NotATask
        return message

    def wait_closed(self, timeout_s: float | None) -> None:
        """Returns once the other side has closed its end, or after `timeout_s` seconds."""
        with contextlib.suppress(OSError):
            self.peer.settimeout(timeout_s)
            self.peer.recv(1)

    def closed_by_peer(self) -> bool:
        """Whether the other side has closed its end."""
        timeout_s = self.peer.gettimeout()
        self.peer.setblocking(False)
        try:
            return self.peer.recv(1, socket.MSG_PEEK) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True
        finally:
            self.peer.settimeout(timeout_s)

    def peer_host(self) -> str:
        """IP address of the other end; "" once the connection is lost."""
        try:
            return str(self.peer.getpeername()[0])
        except OSError:
            return ""

    def close(self) -> None:
        """Closes the connection; a `receive` of another thread ends."""
        with contextlib.suppress(OSError):
            self.peer.shutdown(socket.SHUT_RDWR)
        self.peer.close()


class Connection:
    """Messages with arrays, to a process that has proven the key.

    Args:
        peer: a connected stream socket.
        largest: the most bytes of a message, without its arrays.
    """

    def __init__(self, peer: socket.socket, largest: int = _LARGEST_HEADER):
        self._channel = Channel(peer, largest)
        self._sending = threading.Lock()
        self.close = self._channel.close
        peer.settimeout(None)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        limit = {"TCP_USER_TIMEOUT": round(SILENCE_S * 1000)}
        sockets.keep_alive(peer, sockets.DETECTED_IN_11_S | limit)

    def send(self, message: Mapping[str, Any], arrays: Sequence[np.ndarray] = ()) -> None:
        """Sends a message, from any thread. Raises OSError if the other side is lost."""
        import numpy as np

        described = [(array.dtype.str, array.shape) for array in arrays]
        with self._sending:
            self._channel.send({**message, "arrays": described})
            for array in arrays:
                if array.size:
                    flat = np.ascontiguousarray(array).reshape(-1)
                    self._channel.peer.sendall(flat.view(np.uint8).data)

    def receive(self) -> tuple[Message, list[np.ndarray]]:
        """The next message, and its arrays. Raises OSError if the other side is lost."""
        import numpy as np

        message = self._channel.receive()
        arrays = []
        for dtype, shape in message.pop("arrays"):
            array: np.ndarray = np.empty(shape, dtype)
            if array.size:
                _fill(self._channel.peer, array.reshape(-1).view(np.uint8).data)
            arrays.append(array)
        return message, arrays


def connect(address: str, key: bytes) -> Connection:
    """Connects to a process that serves.

    Raises:
        OSError: nobody listens there.
        NotAMember: the other side does not know the key.
    """
    peer = socket.create_connection(addresses.split(address), timeout=CONNECT_S)
    prove(peer, key)
    return Connection(peer)


class Server:
    """Calls `handle` with each connection that proves the key, in a thread of its own.

    Args:
        listener: a listening socket, of any family.
        key: key of the training; None accepts every connection.
        handle: closes the socket; raises OSError if the other side is lost.
        name: name of the thread that accepts.
        introduce: returns the argument of `handle`; until it returns, the connection counts as
            unproven. It raises OSError for a connection that is to be closed.

    Attributes:
        refused: number of connections that did not know the key.
    """

    def __init__(
        self,
        listener: socket.socket,
        key: bytes | None,
        handle: Callable[[Any], None],
        name: str,
        introduce: Callable[[socket.socket], Any] = lambda peer: peer,
    ):
        self.refused = 0
        self._listener, self._key, self._handle = listener, key, handle
        self._introduce = introduce
        self._strangers: collections.deque[socket.socket] = collections.deque()  # the oldest first
        threading.Thread(target=self._accept, name=name, daemon=True).start()

    def close(self) -> None:
        """Stops accepting connections; open ones stay."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError:
                if self._listener.fileno() < 0:
                    return
                self._drop_strangers(keep=0)  # no descriptor may be left
                time.sleep(0.1)
                continue
            threading.Thread(target=self._serve, args=[peer], daemon=True).start()

    def _drop_strangers(self, keep: int) -> None:
        while len(self._strangers) > keep:
            with contextlib.suppress(OSError, IndexError):  # its thread then ends
                self._strangers.popleft().shutdown(socket.SHUT_RDWR)

    def _serve(self, peer: socket.socket) -> None:
        self._strangers.append(peer)
        with contextlib.suppress(OSError):
            try:
                self._drop_strangers(keep=MOST_STRANGERS)
                if self._key is not None:
                    peer.settimeout(HELLO_S)
                    prove(peer, self._key, b"server", b"member")
                introduced = self._introduce(peer)
            except NotAMember:
                self.refused += 1
                raise
            finally:
                with contextlib.suppress(ValueError):
                    self._strangers.remove(peer)
            self._handle(introduced)


class Proof:
    """One side's proof that it knows the key: an HMAC of the nonces of both sides.

    Attributes:
        nonce: sent first.
        session: the key of this connection alone, once `of` has returned.
    """

    def __init__(self, key: bytes, own: bytes, other: bytes) -> None:
        self.nonce = secrets.token_bytes(NONCE_BYTES)
        self._key, self._own, self._other = key, own, other

    def of(self, nonce: bytes) -> bytes:
        """The proof to send to the side that has sent this nonce."""
        nonces = b"".join(sorted((self.nonce, nonce)))
        own, self._expected, self.session = (
            hmac.digest(self._key, b"tfmw " + label + b" " + nonces, "sha256")
            for label in (self._own, self._other, b"session")
        )
        return own

    def check(self, received: bytes) -> bytes:
        """Returns the key of the connection. Raises NotAMember for a wrong proof."""
        if not hmac.compare_digest(received, self._expected):
            raise NotAMember("the other side does not know this training's TFMW_TOKEN")
        return self.session


def prove(
    peer: socket.socket, key: bytes, own: bytes = b"member", other: bytes = b"server"
) -> bytes:
    """Proves the key to the other side, within the socket's timeout, and has it proven.

    Returns:
        The key of this connection alone.

    Raises:
        OSError: the other side is lost; the socket is closed.
        NotAMember: it does not know the key.
    """
    limit_s = peer.gettimeout()
    deadline = None if limit_s is None else time.monotonic() + limit_s
    try:
        proof = Proof(key, own, other)
        peer.sendall(proof.nonce)
        peer.sendall(proof.of(read(peer, NONCE_BYTES, deadline)))
        session = proof.check(read(peer, PROOF_BYTES, deadline))
        peer.settimeout(limit_s)
        return session
    except BaseException:
        peer.close()
        raise


def read(peer: socket.socket, size: int, deadline: float | None = None) -> bytes:
    """The next bytes of a socket. Raises OSError, also if the deadline is over."""
    data = bytearray(size)
    _fill(peer, memoryview(data), deadline)
    return bytes(data)


def _fill(peer: socket.socket, view: memoryview, deadline: float | None = None) -> None:
    while view:
        if deadline is not None:  # a peer that sends a byte at a time does not gain time
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise TimeoutError("timed out")
            peer.settimeout(left_s)
        count = peer.recv_into(view)
        if not count:
            raise ConnectionAbortedError("the other side has closed the connection")
        view = view[count:]
