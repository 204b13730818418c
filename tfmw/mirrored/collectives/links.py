"""How numbers get from one worker of a ring to the next: a stream, or memory that both share.

    with Door(host) as door:                                     # each worker opens one,
        theirs = from_all(door.address)                          # hears of the others'
        out = connect(host_of_next, theirs[following], token)
        into = door.accepted(token)

Workers of one machine hand each other a piece of memory and copy numbers through it, in a few slots
that stay in the caches; the socket between them says which slots are full and which are free again.
That takes a third of the time of TCP, which copies each byte into the kernel and out of it, packet
by packet. Saying it through a socket, rather than by counters in the memory, lets a worker sleep
until there is something to do, notice that the other one has gone, and see the numbers that were
written before (the kernel orders memory on every kind of processor).
"""

from __future__ import annotations

import collections
import contextlib
import hmac
import ipaddress
import mmap
import os
import select
import socket
import time
from typing import Any, TypedDict

import numpy as np
import numpy.typing as npt

CONNECT_S = 5.0
SHARED_MEMORY = "TFMW_SHARED_MEMORY"
"""Set to 0 in the environment, workers of one machine use TCP as those of several do."""

PIECE_BYTES = 1 << 19  # what is added and sent on at once; it stays in the caches meanwhile
_SLOTS = 4  # pieces that wait in shared memory
_DONE = b"\0"  # says: one slot more is full, or free

# A machine that is gone without a word: the kernel finds out by itself; tcp(7), in seconds. Not by
# TCP_USER_TIMEOUT, which takes a worker that is late, and so reads nothing, for a lost one.
_KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3}


class Out:
    """What goes to the next worker: the bytes of several arrays, each once it is released.

    Args:
        peer: a connected stream socket.
    """

    def __init__(self, peer: socket.socket):
        peer.setblocking(False)
        self.peer = peer
        self._parts: collections.deque[memoryview] = collections.deque()
        self._released = 0  # bytes, from the first part on

    def add(self, *arrays: np.ndarray, may_go: bool = False) -> None:
        """Puts arrays behind the others; `release` lets them go, or `may_go` at once."""
        for array in arrays:
            if array.size:
                self._put(_bytes_of(array))
                self._released += array.nbytes if may_go else 0

    def release(self, nbytes: int) -> None:
        """The next `nbytes` bytes may go; of an array, all or a whole piece (PIECE_BYTES)."""
        self._released += nbytes

    @property
    def left(self) -> bool:
        """Whether something has not gone yet."""
        return bool(self._parts)

    @property
    def may_go(self) -> bool:
        """Whether something of it may."""
        return self.left and self._released > 0

    def push(self) -> bool:
        """Sends what may go, as far as there is room; returns whether there was any.

        Raises:
            OSError: the next worker has gone.
        """
        moved = False
        while self.may_go:
            part = self._parts[0]
            try:
                count = self.peer.send(part[: self._released])
            except BlockingIOError:
                return moved
            self._parts[0] = part[count:]
            if not self._parts[0]:
                self._parts.popleft()
            self._released -= count
            moved = True
        return moved

    def watch(self, poll: select.poll) -> None:
        """Lets `poll` return when there is room again."""
        poll.register(self.peer, select.POLLOUT)

    def _put(self, part: memoryview) -> None:
        self._parts.append(part)


class In:
    """What comes from the worker before.

    Args:
        peer: a connected stream socket.
    """

    def __init__(self, peer: socket.socket):
        peer.setblocking(False)
        self.peer = peer
        self._filled = 0  # bytes of the array that is being taken

    def take(self, into: np.ndarray) -> np.ndarray | None:
        """The next numbers: in `into`, or elsewhere until `done`. None: they are not there yet.

        Args:
            into: of the shape and type that are expected, of at most PIECE_BYTES; the same again
                after a None.

        Raises:
            OSError: the worker before has gone.
        """
        view = _bytes_of(into)
        while self._filled < len(view):
            try:
                count = self.peer.recv_into(view[self._filled :])
            except BlockingIOError:
                return None
            if not count:
                raise ConnectionError("it closed the connection")
            self._filled += count
        self._filled = 0
        return into

    def done(self) -> None:
        """What was taken is not needed any more."""


class SharedOut(Out):
    """The same through memory that the next worker sees too.

    Args:
        memory: [_SLOTS, PIECE_BYTES] bytes.
    """

    def __init__(self, peer: socket.socket, memory: npt.NDArray[np.uint8]):
        super().__init__(peer)
        self._memory = memory
        self._free, self._slot = _SLOTS, 0

    @property
    def may_go(self) -> bool:
        return self.left and self._released >= len(self._parts[0])

    def push(self) -> bool:
        moved = False
        while self.may_go and self._has_room():
            part = self._parts.popleft()
            self._memory[self._slot, : len(part)] = part
            self.peer.send(_DONE)  # there is room: at most _SLOTS of them wait
            self._slot = (self._slot + 1) % _SLOTS
            self._free -= 1
            self._released -= len(part)
            moved = True
        return moved

    def watch(self, poll: select.poll) -> None:
        poll.register(self.peer, select.POLLIN)

    def _has_room(self) -> bool:
        if not self._free:
            with contextlib.suppress(BlockingIOError):
                self._free = _count(self.peer)
        return self._free > 0

    def _put(self, part: memoryview) -> None:
        self._parts.extend(part[i : i + PIECE_BYTES] for i in range(0, len(part), PIECE_BYTES))


class SharedIn(In):
    """The same through memory that the worker before fills.

    Args:
        memory: [_SLOTS, PIECE_BYTES] bytes.
    """

    def __init__(self, peer: socket.socket, memory: npt.NDArray[np.uint8]):
        super().__init__(peer)
        self._memory = memory
        self._full, self._slot = 0, 0

    def take(self, into: np.ndarray) -> np.ndarray | None:
        if not self._full:
            try:
                self._full = _count(self.peer)
            except BlockingIOError:
                return None
        filled = self._memory[self._slot, : into.nbytes]
        return filled.view(into.dtype).reshape(into.shape)

    def done(self) -> None:
        self._full -= 1
        self._slot = (self._slot + 1) % _SLOTS
        with contextlib.suppress(OSError):  # it has gone; what it sent before still counts
            self.peer.send(_DONE)


def _count(peer: socket.socket) -> int:
    """How many slots the other one has said to be done."""
    said = peer.recv(_SLOTS)
    if not said:
        raise ConnectionError("it closed the connection")
    return len(said)


def _bytes_of(array: np.ndarray) -> memoryview:
    flat: npt.NDArray[np.uint8] = array.reshape(-1).view(np.uint8)
    return memoryview(flat)


class Address(TypedDict):
    """Where a worker is reached: by those of its machine, and by all others.

    Attributes:
        port: for TCP.
        machine: equal for workers that reach each other's `name`; None where that can't be.
        name: of a Unix socket.
    """

    port: int
    machine: list[Any] | None
    name: str


class Door:
    """Where the worker before this one comes in.

    Args:
        host: this worker's name or IP address, as the others know it.
    """

    def __init__(self, host: str):
        self._tcp = _listen(host)
        self._unix = socket.socket(socket.AF_UNIX)
        machine, name = _machine(), ""
        if machine is not None:
            self._unix.bind("")  # Linux chooses a name of no file: unix(7), "Autobind feature"
            self._unix.listen()
            name = self._unix.getsockname().decode().removeprefix("\0")
        port: int = self._tcp.getsockname()[1]
        self.address: Address = {"port": port, "machine": machine, "name": name}

    def __enter__(self) -> Door:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Lets nobody in any more."""
        self._tcp.close()
        self._unix.close()

    def accepted(self, before: Address, token: bytes) -> In:
        """The first connection that knows the token, of those that come within CONNECT_S.

        Args:
            before: where the worker before is reached: which way it comes.

        Raises:
            OSError: there is none.
        """
        server = self._unix if _share(before, self.address) else self._tcp
        deadline = time.monotonic() + CONNECT_S
        while (left := deadline - time.monotonic()) > 0:
            server.settimeout(left)
            peer, _address = server.accept()
            said, memory = _first_words(peer, len(token), deadline)
            try:
                if hmac.compare_digest(said, token):
                    shared = server is self._unix
                    return SharedIn(peer, _mapped(*memory)) if shared else In(_tuned(peer))
                peer.close()
            finally:
                for file in memory:
                    os.close(file)
        raise TimeoutError("timed out")


def connect(host: str, after: Address, mine: Address, token: bytes) -> Out:
    """Goes to the next worker.

    Args:
        host: its name or IP address.
        after, mine: where it, and this worker, are reached.
        token: what it expects to hear first.

    Raises:
        OSError: it can't be reached.
    """
    if not _share(after, mine):
        peer = socket.create_connection((host, after["port"]), timeout=CONNECT_S)
        peer.sendall(token)
        return Out(_tuned(peer))
    with contextlib.ExitStack() as undo:
        peer = undo.enter_context(socket.socket(socket.AF_UNIX))
        peer.settimeout(CONNECT_S)
        peer.connect(f"\0{after['name']}")
        with open(os.memfd_create("tfmw"), "r+b") as memory:
            memory.truncate(_SLOTS * PIECE_BYTES)
            socket.send_fds(peer, [token], [memory.fileno()])
            link = SharedOut(peer, _mapped(memory.fileno()))
        undo.pop_all()
        return link


def _machine() -> list[Any] | None:
    """What processes have in common that see each other's nameless Unix sockets; Linux only."""
    if os.environ.get(SHARED_MEMORY) == "0" or not hasattr(os, "memfd_create"):
        return None
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return [file.read().strip(), os.stat("/proc/self/ns/net").st_ino]
    except OSError:
        return None


def _share(one: Address, other: Address) -> bool:
    return one["machine"] is not None and one["machine"] == other["machine"]


def _mapped(memory: int) -> npt.NDArray[np.uint8]:
    """A file of memory as slots. The file may be closed."""
    flat: npt.NDArray[np.uint8] = np.frombuffer(mmap.mmap(memory, _SLOTS * PIECE_BYTES), np.uint8)
    return flat.reshape(_SLOTS, PIECE_BYTES)


def _listen(host: str) -> socket.socket:
    """A listening socket on a free port: of this IP address, or of all behind a name.

    This machine may know its own name as another address than others do (127.0.1.1 on Debian).
    """
    with contextlib.suppress(ValueError, OSError):
        version = ipaddress.ip_address(host).version
        family = socket.AF_INET6 if version == 6 else socket.AF_INET
        return socket.create_server((host, 0), family=family)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def _first_words(peer: socket.socket, count: int, deadline: float) -> tuple[bytes, list[int]]:
    """What a peer says at once, and the files it hands over.

    A worker says its token before it is accepted.
    """
    said, files = b"", []
    with contextlib.suppress(OSError):
        while len(said) < count and (left := deadline - time.monotonic()) > 0:
            peer.settimeout(min(left, 1.0))
            part, more, _flags, _address = socket.recv_fds(peer, count - len(said), 1)
            files += more
            if not part:
                break
            said += part
    return said, files


def _tuned(peer: socket.socket) -> socket.socket:
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):  # all of them on Linux
            peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return peer
