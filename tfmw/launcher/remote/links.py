"""Connections between the processes of a run, with threads: authenticated, and known to be alive.

    links = Links(token, inbox.put, timing, listener=socket, welcome=welcome)  # of the leader
    links = Links(token, inbox.put, timing)                                    # of a member
    with links:
        links.dial("h0", [("10.0.0.1", 2222)], hello)   # ("leader_connected", "h0") once connected
        links.to_leader(message)
        links.to_member(2, message)                     # 2: the result of `welcome` for its hello
        ("from_member", 2, message)                     # argument of `post`; and after silence:
        ("member_lost", 2, "no sign of life for 3 s")

Both sides of a connection first prove the token (`tfmw.cluster.wire`); then every frame carries a
MAC (HMAC-SHA256). The first message of the side that has connected is its hello. Both sides send a
frame from time to time. Connections without a proof are closed after `Timing.hello_s`. A message
may have any length, and is sent in chunks.

The token is never sent. A frame that is altered, repeated, omitted, sent back to its sender or
copied from another connection has the wrong MAC. Nothing is encrypted: the messages of supervisors
are readable on the network, but hold no secret.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hmac
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable, Hashable, Iterable
from typing import Any, NamedTuple, Self

from tfmw.cluster import wire
from tfmw.launcher.remote import messages
from tfmw.launcher.remote.messages import Message

CLOSED = "it closes the connection"

_LARGEST = 1 << 18  # bytes of one frame
_PIECE = _LARGEST - 1  # bytes of a message in one frame, after the mark whether more follow
_HEADER = struct.Struct("!I32s")  # length and MAC of a frame
_RETRY_S = 0.1
_CLOSE_S = 1.0  # time for the other sides to read the end of the stream

Post = Callable[[tuple[Any, ...]], None]
Address = tuple[str, int]


class Forged(OSError):
    """Error for a frame that does not come from a holder of the token, or is out of order."""


def secret_of_tasks(token: bytes) -> str:
    """The TFMW_TOKEN of the tasks of a run whose launchers share `token`."""
    return hmac.digest(token, b"tfmw tasks", "sha256").hex()


@dataclasses.dataclass(eq=False, repr=False)
class Frames:
    """Frames of one direction of a connection; the sender seals, the receiver verifies.

    Args:
        key: key of the connection; see `wire.Proof`.
        sender: the role of the side that sends, such as "server".
    """

    key: bytes
    sender: str
    _next: int = 0

    def seal(self, message: bytes) -> bytes:
        """Seals the next frame."""
        return _HEADER.pack(len(message), self._mac(message)) + message

    def unseal(self, message: bytes, mac: bytes) -> bytes:
        """The message. Raises Forged unless it is the next one of that side."""
        if not hmac.compare_digest(mac, self._mac(message)):
            raise Forged("a message does not have the MAC of this run's token")
        return message

    def _mac(self, message: bytes) -> bytes:
        head = f"{self.sender} {self._next} ".encode()
        mac = hmac.digest(self.key, head + message, "sha256")
        self._next += 1
        return mac


class SealedConnection:
    """Messages of any length, to a process that has proven the token.

    Args:
        peer: a connected socket, which is closed after an error; its timeout is the time for the
            proof.
        token: the secret of both sides.
        own: role of this side, such as "server".
        other: role of the other side.

    Raises:
        OSError: the other side is lost, or does not know the token.
    """

    def __init__(self, peer: socket.socket, token: bytes, own: str, other: str) -> None:
        key = wire.prove(peer, token, own.encode(), other.encode())
        self._sent, self._received = Frames(key, own), Frames(key, other)
        self.peer = peer

    def send(self, data: bytes) -> None:
        """Sends a message, or b"" as a heartbeat. Raises OSError."""
        for at in range(0, max(len(data), 1), _PIECE):
            mark = bytes([at + _PIECE < len(data)]) if data else b""
            self.peer.sendall(self._sent.seal(mark + data[at : at + _PIECE]))

    def receive(self) -> bytes:
        """The next message, or b"". Raises OSError: it is lost, or the bytes are forged."""
        pieces: list[bytes] = []
        more = True
        while more:
            length, mac = _HEADER.unpack(wire.read(self.peer, _HEADER.size))
            if length > _LARGEST:
                raise Forged(f"a frame of {length} bytes")
            frame = self._received.unseal(wire.read(self.peer, length), mac)
            if not frame:
                return b""
            more = bool(frame[0])
            pieces.append(frame[1:])
        return b"".join(pieces)

    def end(self, how: int = socket.SHUT_RDWR) -> None:
        """Ends the connection, also for a thread that waits for its bytes."""
        with contextlib.suppress(OSError):
            self.peer.shutdown(how)


class Timing(NamedTuple):
    """Time limits of connections, in seconds."""

    beat_s: float  # interval of heartbeats
    silence_s: float  # time of silence after which a connection is lost
    hello_s: float  # time in which a new connection must prove the token


class _Link:
    """A connection with heartbeats: `serve` reads, and a thread of its own sends."""

    def __init__(self, connection: SealedConnection, timing: Timing) -> None:
        self._connection, self._timing = connection, timing
        self._unsent: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._given = self._sent = 0  # bytes
        self.ended = threading.Event()
        self.abort = connection.end

    @property
    def backlog(self) -> int:
        """Number of bytes that are not sent yet."""
        return self._given - self._sent

    def send(self, data: bytes) -> None:
        """Sends a message without waiting, in order."""
        self._given += len(data)
        self._unsent.put(data)

    def close(self) -> None:
        """Closes the connection, after pending data is sent."""
        self._unsent.put(None)

    def serve(self, received: Callable[[Message], None]) -> str:
        """Passes on messages until the connection is lost; returns the reason."""
        self._connection.peer.settimeout(self._timing.silence_s)
        writer = threading.Thread(target=self._write, name="tfmw-send", daemon=True)
        writer.start()
        try:
            while True:
                if data := self._connection.receive():
                    received(messages.decode(data))
        except TimeoutError:
            return f"no sign of life for {self._timing.silence_s:g} s"
        except (OSError, messages.Malformed) as error:
            return getattr(error, "strerror", None) or str(error)
        finally:
            self.abort()
            self.close()
            writer.join()
            self._connection.peer.close()
            self.ended.set()

    def _write(self) -> None:
        """Sends pending data, and heartbeats in between, until `close`."""
        try:
            while (data := self._next()) is not None:
                self._connection.send(data)
                self._sent += len(data)
            # This side still reads: otherwise the other one gets a reset, and loses this data.
            self._connection.end(socket.SHUT_WR)
        except OSError:  # the other side reads nothing, or is gone: `serve` ends
            self.abort()

    def _next(self) -> bytes | None:
        try:
            return self._unsent.get(timeout=self._timing.beat_s)
        except queue.Empty:
            return b""


@dataclasses.dataclass(eq=False, repr=False)
class Links:
    """All connections of one process."""

    token: bytes  # the secret of all processes of the run
    post: Post  # called, in any thread, with (name of the event, its arguments...)
    timing: Timing
    listener: socket.socket | None = None  # socket for members; closed at the end
    # Returns the later name of a member from its hello, or raises ValueError. An earlier connection
    # of that name is closed.
    welcome: Callable[[Message], Hashable] = hash

    def __post_init__(self) -> None:
        self._members: dict[Hashable, _Link] = {}
        self._leader: _Link | None = None
        self._dialing: object = None  # of the last call of `dial`; None: no connection is wanted
        self._closing = False
        self._changing = threading.Lock()

    def __enter__(self) -> Self:
        if self.listener is not None:
            prove = functools.partial(self._proven, own="server", other="member")
            self._server = wire.Server(self.listener, None, self._accept, "tfmw-accept", prove)
        return self

    def __exit__(self, *_: object) -> None:
        if self.listener is not None:
            self._server.close()
        with self._changing:
            self._closing, self._dialing = True, None
            links = [*self._members.values(), *([self._leader] if self._leader else [])]
            for link in links:
                link.close()
        deadline = time.monotonic() + _CLOSE_S
        for link in links:
            link.ended.wait(max(0.0, deadline - time.monotonic()))
            link.abort()

    @property
    def backlog(self) -> int:
        """Number of bytes for the leader that are not sent yet."""
        leader = self._leader
        return 0 if leader is None else leader.backlog

    def dial(
        self,
        name: Hashable,
        addresses: Iterable[Address] = (),
        hello: Callable[[str], Message] | None = None,
        local: Address | None = None,
    ) -> None:
        """Connects to the process that leads, and again after each loss.

        Args:
            name: name of that process in events; None: no connection.
            addresses: addresses of that process; the first reachable one is used.
            hello: returns the first message, for this side's address.
            local: this side's address.
        """
        with self._changing:
            if self._leader is not None:
                self._leader.abort()
            self._leader = self._dialing = None
            if name is not None:
                self._dialing = object()
                how = self._dialing, name, list(addresses), hello, local
                threading.Thread(target=self._stay_connected, args=how, daemon=True).start()

    def to_leader(self, message: Message) -> None:
        """Sends a message to the process that was dialed."""
        self._send(self._leader, message)

    def to_member(self, name: Hashable, message: Message) -> None:
        """Sends a message to a process that has connected to this one."""
        self._send(self._members.get(name), message)

    def drop(self, name: Hashable | None) -> None:
        """Closes the connection of a member; None: those of all."""
        with self._changing:
            for member, link in self._members.items():
                if name in (None, member):
                    link.close()

    def _send(self, link: _Link | None, message: Message) -> None:
        if link is not None:
            link.send(messages.encode(message))

    def _proven(self, peer: socket.socket, own: str, other: str) -> SealedConnection:
        peer.settimeout(self.timing.hello_s)
        return SealedConnection(peer, self.token, own, other)

    def _accept(self, connection: SealedConnection) -> None:
        """Serves a member, in a thread of its own."""
        link = _Link(connection, self.timing)
        try:
            hello = messages.decode(connection.receive())
            name = self.welcome(hello)
        except (OSError, ValueError):
            connection.peer.close()
            return
        link.send(b"")  # proves that this side knows the token, too

        def post(event: str, *what: Any) -> None:
            with self._changing:
                if self._members.get(name) is link:
                    self.post((event, name, *what))

        with self._changing:
            if self._closing:
                connection.peer.close()
                return
            if (before := self._members.get(name)) is not None:
                before.close()
                self.post(("member_lost", name, "it has connected again"))
            self._members[name] = link
        post("member_connected")
        post("from_member", hello)
        post("member_lost", link.serve(lambda message: post("from_member", message)))
        with self._changing:
            if self._members.get(name) is link:
                del self._members[name]

    def _stay_connected(
        self,
        dialing: object,
        name: Hashable,
        addresses: list[Address],
        hello: Callable[[str], Message],
        local: Address | None,
    ) -> None:
        """Connects to the leader whenever it is not connected, in a thread of its own."""

        def post(*event: Any, leader: _Link | None) -> None:
            with self._changing:
                if self._dialing is dialing:
                    self._leader = leader
                    self.post(event)

        failures = 0
        while self._dialing is dialing:
            problems = {}
            for address in addresses:
                try:
                    link = self._connect(address, hello, local)
                except OSError as error:
                    problems[address] = self._why_not(error)
                    continue
                failures = 0
                post("leader_connected", name, leader=link)
                if self._dialing is not dialing:
                    link.abort()
                why = link.serve(functools.partial(post, "from_leader", leader=link))
                post("leader_lost", name, why, leader=None)
                break
            else:
                failures += 1
                post("not_connected", name, failures, problems, leader=None)
            time.sleep(_RETRY_S)

    def _connect(
        self, address: Address, hello: Callable[[str], Message], local: Address | None
    ) -> _Link:
        """A connection to a process that knows the token."""
        peer = socket.create_connection(address, self.timing.hello_s, local)
        connection = self._proven(peer, own="member", other="server")
        try:
            own: str = peer.getsockname()[0]
            connection.send(messages.encode(hello(own.removeprefix("::ffff:"))))
            connection.receive()
        except BaseException:
            peer.close()
            raise
        return _Link(connection, self.timing)

    def _why_not(self, error: OSError) -> str:
        if isinstance(error, (ConnectionAbortedError, wire.NotAMember)):
            return CLOSED
        if isinstance(error, TimeoutError):
            return f"no response within {self.timing.hello_s:g} s"
        return error.strerror or str(error)
