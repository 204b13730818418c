"""Connections between supervisors, in a thread: authenticated, and known to be alive.

    with Links(hosts, host=1, token=b"...", post=inbox.put) as links:
        links.dial(0)                       # ("leader_connected", 0) once it is connected
        links.to_leader(message)
        links.to_member(2, message)         # a host that has connected to this one
        ("from_member", 2, message)         # what `post` gets; and when silent for SILENCE_S:
        ("member_lost", 2, "no sign of life for 3 s")

A connection begins with a nonce of each side; then every frame carries a MAC (`channel.py`). Both
sides send an empty frame every HEARTBEAT_S. Connections that prove nothing are closed after
HELLO_S, and there are at most MAX_STRANGERS of them: the oldest goes.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import json
import secrets
import socket
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from tfmw.cluster import addresses
from tfmw.errors import ClusterError
from tfmw.hosts.actions import HEARTBEAT_S, SILENCE_S
from tfmw.remote import channel, messages
from tfmw.remote.channel import Forged, Sealer, Unsealer, session_key

HELLO_S = 3.0
MAX_STRANGERS = 64
_RETRY_S = 0.1
_LARGEST_BUFFER = 8 << 20  # bytes that a peer may leave unread
_NOTICE_EVERY = 50  # attempts to connect

Post = Callable[[tuple[Any, ...]], None]


class _Link:
    """One authenticated connection, of either direction."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        seal: Sealer,
        unseal: Unsealer,
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._seal = seal
        self._unseal = unseal

    def send(self, data: bytes) -> None:
        """Sends one frame, without waiting."""
        if self._writer.transport.get_write_buffer_size() > _LARGEST_BUFFER:
            self._writer.transport.abort()
        elif not self._writer.is_closing():
            self._writer.write(self._seal(data))

    async def receive(self, timeout_s: float) -> bytes:
        """The next frame. Raises OSError, Forged, or EOFError at the end."""
        async with asyncio.timeout(timeout_s):
            header = await self._reader.readexactly(channel.HEADER.size)
            length, mac = channel.HEADER.unpack(header)
            if length > channel.LARGEST:
                raise Forged(f"a message of {length} bytes")
            return self._unseal(await self._reader.readexactly(length), mac)

    async def beat(self) -> None:
        """Sends signs of life, without end."""
        while True:
            self.send(b"")
            await asyncio.sleep(HEARTBEAT_S)

    def close(self) -> None:
        """Closes it, after what was sent has gone out."""
        self._writer.close()

    async def serve(self, received: Callable[[messages.Message], None]) -> str:
        """Passes on messages until the connection is lost; returns why."""
        beating = asyncio.ensure_future(self.beat())
        try:
            while True:
                data = await self.receive(SILENCE_S)
                if data:
                    received(messages.decode(data))
        except TimeoutError:
            self._writer.transport.abort()
            return f"no sign of life for {SILENCE_S:g} s"
        except EOFError:
            return "its supervisor has closed the connection"
        except (Forged, messages.Malformed) as error:
            return str(error)
        except OSError as error:
            return error.strerror or str(error)
        finally:
            beating.cancel()
            self.close()


class Links:
    """All connections of one supervisor.

    Args:
        hosts: addresses of all supervisors.
        host: index of this one.
        token: what all of them know.
        post: called, in a thread of its own, with (name of the event, its arguments...).

    Raises:
        ClusterError: this host's port is taken.
    """

    def __init__(self, hosts: Sequence[str], host: int, token: bytes, post: Post) -> None:
        self._hosts = hosts
        self._host = host
        self._token = token
        self._post = post
        self._members: dict[int, _Link] = {}
        self._leader: _Link | None = None
        self._dialing: asyncio.Task[None] | None = None
        self._strangers: list[asyncio.StreamWriter] = []  # the oldest first
        self._tasks: set[asyncio.Task[None]] = set()
        self._socket = _listening(hosts[host])
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="tfmw-links", daemon=True)

    def __enter__(self) -> Links:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._socket.close()

    # ---- what the supervisor asks for, in its own thread -----------------------------------------

    def dial(self, host: int | None) -> None:
        """Is connected to this host from now on, again and again; None: to none."""
        self._loop.call_soon_threadsafe(self._dial, host)

    def to_leader(self, message: messages.Message) -> None:
        """Sends to the host that was dialed."""
        data = messages.encode(message)

        def send() -> None:
            if self._leader is not None:
                self._leader.send(data)

        self._loop.call_soon_threadsafe(send)

    def to_member(self, host: int, message: messages.Message) -> None:
        """Sends to a host that has connected to this one."""
        data = messages.encode(message)

        def send() -> None:
            if host in self._members:
                self._members[host].send(data)

        self._loop.call_soon_threadsafe(send)

    def drop(self, host: int | None) -> None:
        """Closes the connection that a host has made; None: those of all."""

        def close() -> None:
            for index, link in self._members.items():
                if host in (None, index):
                    link.close()

        self._loop.call_soon_threadsafe(close)

    # ---- in the thread -------------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._start(self._listen())
        self._loop.run_forever()
        self._loop.close()

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _listen(self) -> None:
        server = await asyncio.start_server(self._accept, sock=self._socket, limit=channel.LARGEST)
        async with server:
            await server.serve_forever()

    async def _close(self) -> None:
        for link in [*self._members.values(), *([self._leader] if self._leader else [])]:
            link.close()
        with contextlib.suppress(TimeoutError):  # the others see the end of the stream
            async with asyncio.timeout(1.0):
                while self._members:
                    await asyncio.sleep(0.01)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._strangers) >= MAX_STRANGERS:
            self._strangers.pop(0).transport.abort()
        self._strangers.append(writer)
        try:
            host, link = await self._welcome(reader, writer)
        except (OSError, EOFError, ValueError, TypeError, LookupError, Forged):
            writer.transport.abort()
            return
        finally:
            if writer in self._strangers:
                self._strangers.remove(writer)
        before = self._members.pop(host, None)
        if before is not None:
            before.close()
            self._post(("member_lost", host, "it has connected again"))
        self._members[host] = link
        self._post(("member_connected", host))
        why = await link.serve(lambda message: self._post(("from_member", host, message)))
        if self._members.get(host) is link:
            del self._members[host]
            self._post(("member_lost", host, why))

    async def _welcome(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> tuple[int, _Link]:
        """Proves, and has proved, the token to a host that has connected; returns which it is."""
        nonce = secrets.token_bytes(channel.NONCE_BYTES)
        writer.write(nonce)
        async with asyncio.timeout(HELLO_S):
            other_nonce = await reader.readexactly(channel.NONCE_BYTES)
        key = session_key(self._token, nonce, other_nonce)
        link = _Link(reader, writer, Sealer(key, "server"), Unsealer(key, "client"))
        hello = json.loads(await link.receive(HELLO_S))
        if hello["to"] != self._host or hello["hosts"] != list(self._hosts):
            raise ValueError("a host of another run")
        link.send(b"")
        return int(range(len(self._hosts))[hello["from"]]), link

    def _dial(self, host: int | None) -> None:
        if self._dialing is not None:
            self._dialing.cancel()
            self._dialing = None
        if self._leader is not None:
            self._leader.close()
            self._leader = None
        if host is not None:
            self._dialing = self._start(self._stay_connected(host))

    async def _stay_connected(self, host: int) -> None:
        failures = 0
        while True:
            try:
                link = await self._connect(host)
            except (OSError, EOFError, Forged) as error:
                failures += 1
                if failures % _NOTICE_EVERY == 0:
                    self._post(("not_connected", host, _why_not(error)))
                await asyncio.sleep(_RETRY_S)
                continue
            failures = 0
            self._leader = link
            self._post(("leader_connected", host))
            why = await link.serve(lambda message: self._post(("from_leader", message)))
            self._leader = None
            self._post(("leader_lost", host, why))
            await asyncio.sleep(_RETRY_S)

    async def _connect(self, host: int) -> _Link:
        """A connection to a host that knows the token."""
        async with asyncio.timeout(HELLO_S):
            name, port = addresses.split(self._hosts[host])
            own = addresses.split(self._hosts[self._host])[0]
            # From loopback address to loopback address, so that each host keeps its own.
            local = (own, 0) if own.startswith("127.") else None
            reader, writer = await asyncio.open_connection(
                name, port, local_addr=local, limit=channel.LARGEST
            )
            try:
                other_nonce = await reader.readexactly(channel.NONCE_BYTES)
                nonce = secrets.token_bytes(channel.NONCE_BYTES)
                key = session_key(self._token, other_nonce, nonce)
                link = _Link(reader, writer, Sealer(key, "client"), Unsealer(key, "server"))
                writer.write(nonce)
                hello = {"from": self._host, "to": host, "hosts": list(self._hosts)}
                link.send(json.dumps(hello).encode())
                await link.receive(HELLO_S)
            except BaseException:
                writer.transport.abort()
                raise
            return link


def _why_not(error: Exception) -> str:
    if isinstance(error, EOFError):
        return "it closes the connection: is its token (TFMW_TOKEN) the same, and its --hosts?"
    if isinstance(error, TimeoutError):
        return f"no response within {HELLO_S:g} s"
    return str(error)


def _listening(address: str) -> socket.socket:
    """Listens at an IP address of this machine, or at all of its addresses.

    A name may mean another address here than for others (127.0.1.1 on Debian).
    """
    host, port = addresses.split(address)
    try:
        version = ipaddress.ip_address(host).version
        family = socket.AF_INET6 if version == 6 else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=128)
    except ValueError:
        return addresses.listen(address)
    except OSError as error:
        if error.errno not in (errno.EADDRINUSE, errno.EACCES):
            return addresses.listen(address)
        raise ClusterError(
            f"port {port} of this host's address {address!r} cannot be used ({error.strerror}): "
            "stop the process that holds it, or give this host another port in every --hosts."
        ) from None
