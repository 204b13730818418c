"""Connections between the processes of a run, in a thread: authenticated, and known to be alive.

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

import asyncio
import contextlib
import dataclasses
import hmac
import socket
import struct
import threading
from collections.abc import Callable, Coroutine, Hashable, Iterable
from typing import Any, NamedTuple, Self

from tfmw.cluster import wire
from tfmw.errors import TfmwError
from tfmw.launcher.remote import messages
from tfmw.launcher.remote.messages import Message

LARGEST = 1 << 18
"""Bytes of one frame."""

HEADER = struct.Struct("!I32s")
"""The header of each frame: its length and its MAC."""

CLOSED = "it closes the connection"
_RETRY_S = 0.1
_CLOSE_S = 1.0  # time for the other sides to read the end of the stream
_PIECE = LARGEST - 1  # bytes of a message in one frame, after the mark whether more follow

Post = Callable[[tuple[Any, ...]], None]
Address = tuple[str, int]


class Forged(TfmwError):
    """Error for a frame that does not come from a holder of the token, or is out of order."""


def secret_of_tasks(token: bytes) -> str:
    """The TFMW_TOKEN of the tasks of a run whose launchers share `token`."""
    return hmac.digest(token, b"tfmw tasks", "sha256").hex()


@dataclasses.dataclass(eq=False, repr=False)
class Frames:
    """Frames of one direction of a connection; the sender seals, the receiver verifies.

    Args:
        key: key of the connection; see `wire.Proof`.
        sender: "server" or "client".
    """

    key: bytes
    sender: str
    _next: int = 0

    def seal(self, message: bytes) -> bytes:
        """Seals the next frame."""
        return HEADER.pack(len(message), self._mac(message)) + message

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


class Timing(NamedTuple):
    """Time limits of connections, in seconds."""

    beat_s: float  # interval of heartbeats
    silence_s: float  # time of silence after which a connection is lost
    hello_s: float  # time in which a new connection must prove the token


@dataclasses.dataclass(eq=False, repr=False)
class _Link:
    """One authenticated connection, of either direction; used in the thread of its `Links`."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    key: bytes
    side: str
    timing: Timing

    def __post_init__(self) -> None:
        self._sent = Frames(self.key, self.side)
        self._received = Frames(self.key, "client" if self.side == "server" else "server")
        self._unsent: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._writing: asyncio.Future[None] | None = None
        self.backlog = 0
        """Number of bytes that are not sent yet."""

    def send(self, data: bytes) -> None:
        """Sends a message, or b"" as a heartbeat, without waiting, in order."""
        if self._writing is None:
            self._writing = asyncio.ensure_future(self._write())
        self.backlog += len(data)
        self._unsent.put_nowait(data)

    def close(self) -> None:
        """Closes the connection, after pending data is sent."""
        self._unsent.put_nowait(None)

    async def receive(self) -> bytes:
        """The next message, or b"". Raises OSError, Forged, or EOFError at the end."""
        pieces: list[bytes] = []
        more = True
        while more:
            async with asyncio.timeout(self.timing.silence_s):
                header = await self.reader.readexactly(HEADER.size)
                length, mac = HEADER.unpack(header)
                if length > LARGEST:
                    raise Forged(f"a frame of {length} bytes")
                frame = self._received.unseal(await self.reader.readexactly(length), mac)
            if not frame:
                return b""
            more = bool(frame[0])
            pieces.append(frame[1:])
        return b"".join(pieces)

    async def serve(self, received: Callable[[Message], None]) -> str:
        """Passes on messages until the connection is lost; returns the reason."""
        try:
            while True:
                if data := await self.receive():
                    received(messages.decode(data))
        except TimeoutError:
            self.writer.transport.abort()
            return f"no sign of life for {self.timing.silence_s:g} s"
        except EOFError:
            return "the other side has closed the connection"
        except (Forged, messages.Malformed) as error:
            return str(error)
        except OSError as error:
            return error.strerror or str(error)
        finally:
            self.cancel()
            self.writer.close()

    def cancel(self) -> None:
        """Stops sending."""
        if self._writing is not None:
            self._writing.cancel()

    async def _write(self) -> None:
        """Sends pending data, and heartbeats in between, until `close`."""
        try:
            while (data := await self._next()) is not None:
                for at in range(0, max(len(data), 1), _PIECE):
                    mark = bytes([at + _PIECE < len(data)]) if data else b""
                    self.writer.write(self._sent.seal(mark + data[at : at + _PIECE]))
                    async with asyncio.timeout(self.timing.silence_s):
                        await self.writer.drain()
                self.backlog -= len(data)
            # This side still reads: otherwise the other one gets a reset, and loses this data.
            self.writer.write_eof()
        except OSError:  # the other side reads nothing, or is gone: `serve` ends
            self.writer.transport.abort()

    async def _next(self) -> bytes | None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.timing.beat_s):
                return await self._unsent.get()
        return b""


@dataclasses.dataclass(eq=False, repr=False)
class Links:
    """All connections of one process."""

    token: bytes  # the secret of all processes of the run
    post: Post  # called, in a thread of its own, with (name of the event, its arguments...)
    timing: Timing
    listener: socket.socket | None = None  # socket for members; closed at the end
    # Returns the later name of a member from its hello, or raises ValueError. An earlier connection
    # of that name is closed.
    welcome: Callable[[Message], Hashable] = hash

    def __post_init__(self) -> None:
        self._members: dict[Hashable, _Link] = {}
        self._leader: _Link | None = None
        self._dialing: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="tfmw-links", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        if self.listener is not None:
            own = self._accepted, "tfmw-accept", self._introduce
            self._server = wire.Server(self.listener, None, *own)
        return self

    def __exit__(self, *_: object) -> None:
        if self.listener is not None:
            self._server.close()
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    # ---- for other threads -----------------------------------------------------------------------

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
        self._loop.call_soon_threadsafe(self._dial, name, list(addresses), hello, local)

    def to_leader(self, message: Message) -> None:
        """Sends a message to the process that was dialed."""
        self._loop.call_soon_threadsafe(self._send, lambda: self._leader, messages.encode(message))

    def to_member(self, name: Hashable, message: Message) -> None:
        """Sends a message to a process that has connected to this one."""
        data = messages.encode(message)
        self._loop.call_soon_threadsafe(self._send, lambda: self._members.get(name), data)

    def drop(self, name: Hashable | None) -> None:
        """Closes the connection of a member; None: those of all."""

        def close() -> None:
            for member, link in self._members.items():
                if name in (None, member):
                    link.close()

        self._loop.call_soon_threadsafe(close)

    # ---- in the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()

    def _send(self, find: Callable[[], _Link | None], data: bytes) -> None:
        if (link := find()) is not None:
            link.send(data)

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _close(self) -> None:
        self._closing = True
        for link in [*self._members.values(), *([self._leader] if self._leader else [])]:
            link.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_S):
                while self._members or self._leader:
                    await asyncio.sleep(0.01)
        for task in (tasks := list(self._tasks)):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _introduce(self, peer: socket.socket) -> tuple[socket.socket, bytes]:
        """Returns the peer, which has proven the token, and the connection's key; in a thread."""
        peer.settimeout(self.timing.hello_s)
        return peer, wire.prove(peer, self.token, b"server", b"member")

    def _accepted(self, proven: tuple[socket.socket, bytes]) -> None:
        try:
            self._loop.call_soon_threadsafe(lambda: self._start(self._accept(*proven)))
        except RuntimeError:  # it has ended meanwhile
            proven[0].close()

    async def _accept(self, connection: socket.socket, key: bytes) -> None:
        reader, writer = await asyncio.open_connection(sock=connection, limit=LARGEST)
        link = _Link(reader, writer, key, "server", self.timing)
        try:
            async with asyncio.timeout(self.timing.hello_s):
                hello = messages.decode(await link.receive())
                name = self.welcome(hello)
        except (OSError, EOFError, ValueError, Forged):
            writer.transport.abort()
            return
        link.send(b"")  # proves that this side knows the token, too
        before = self._members.pop(name, None)
        if before is not None:
            before.close()
            self.post(("member_lost", name, "it has connected again"))
        self._members[name] = link
        self.post(("member_connected", name))
        self.post(("from_member", name, hello))
        why = await link.serve(lambda message: self.post(("from_member", name, message)))
        if self._members.get(name) is link:
            del self._members[name]
            self.post(("member_lost", name, why))

    def _dial(self, name: Hashable, *how: Any) -> None:
        if self._dialing is not None:
            self._dialing.cancel()
            self._dialing = self._leader = None
        if name is not None:
            self._dialing = self._start(self._stay_connected(name, *how))

    async def _stay_connected(
        self,
        name: Hashable,
        addresses: list[Address],
        hello: Callable[[str], Message],
        local: Address | None,
    ) -> None:
        failures = 0
        while not self._closing:
            problems = {}
            for address in addresses:
                try:
                    link = await self._connect(address, hello, local)
                except (OSError, EOFError, Forged) as error:
                    problems[address] = self._why_not(error)
                    continue
                failures, self._leader = 0, link
                self.post(("leader_connected", name))
                why = await link.serve(lambda message: self.post(("from_leader", message)))
                self._leader = None
                self.post(("leader_lost", name, why))
                break
            else:
                failures += 1
                self.post(("not_connected", name, failures, problems))
            await asyncio.sleep(_RETRY_S)

    async def _connect(
        self, address: Address, hello: Callable[[str], Message], local: Address | None
    ) -> _Link:
        """A connection to a process that knows the token."""
        async with asyncio.timeout(self.timing.hello_s):
            reader, writer = await asyncio.open_connection(
                *address, local_addr=local, limit=LARGEST
            )
            link = None
            try:
                proof = wire.Proof(self.token, b"member", b"server")
                writer.write(proof.nonce)
                writer.write(proof.of(await reader.readexactly(wire.NONCE_BYTES)))
                key = proof.check(await reader.readexactly(wire.PROOF_BYTES))
                link = _Link(reader, writer, key, "client", self.timing)
                own: str = writer.get_extra_info("sockname")[0]
                link.send(messages.encode(hello(own.removeprefix("::ffff:"))))
                await link.receive()
            except BaseException:
                if link is not None:
                    link.cancel()
                writer.transport.abort()
                raise
            return link

    def _why_not(self, error: Exception) -> str:
        if isinstance(error, (EOFError, wire.NotAMember)):
            return CLOSED
        if isinstance(error, TimeoutError):
            return f"no response within {self.timing.hello_s:g} s"
        return str(error)
