"""How values travel from one worker of a ring to the next: a stream, or memory that both share.

    to_next.add(array, may_go=True)        # a Sender
    while to_next.left:
        to_next.push()
    values = from_previous.take(into)      # a Receiver
    from_previous.done()

Workers of one machine share a piece of memory and copy values through it, in a few slots that stay
in the caches; the socket between them carries which slots are full and which are free again. That
takes a third of the time of TCP, which copies each byte into the kernel and out of it, packet by
packet. A socket, unlike counters in the memory, lets a worker sleep until there is something to do,
notice that its peer has gone, and see the values that were written before (the kernel orders memory
on every kind of processor). How two workers come to have a link is in listener.py.
"""

from __future__ import annotations

import collections
import contextlib
import mmap
import select
import socket

import numpy as np
import numpy.typing as npt

PIECE_BYTES = 1 << 19  # what is added and sent on at once; it stays in the caches meanwhile
_SLOTS = 4  # pieces that wait in shared memory
MEMORY_BYTES = _SLOTS * PIECE_BYTES
_DONE = b"\0"  # reports one slot more as full, or free


class Sender:
    """Sends to the next worker: the bytes of queued arrays, each once it is released.

    Args:
        peer: a connected stream socket.
    """

    def __init__(self, peer: socket.socket):
        peer.setblocking(False)
        self.peer = peer
        self._parts: collections.deque[memoryview] = collections.deque()
        self._released = 0  # bytes, from the first part on

    def add(self, *arrays: np.ndarray, may_go: bool = False) -> None:
        """Queues arrays; they may go once `release` covers them, or at once with `may_go`."""
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


class Receiver:
    """Receives from the worker before.

    Args:
        peer: a connected stream socket.
    """

    def __init__(self, peer: socket.socket):
        peer.setblocking(False)
        self.peer = peer
        self._filled = 0  # bytes of the array that is being taken

    def take(self, into: np.ndarray) -> np.ndarray | None:
        """The next values: in `into`, or elsewhere until `done`; None while they have not come.

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
        """Releases what was taken last."""


class SharedSender(Sender):
    """Sends through memory that the next worker sees too.

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


class SharedReceiver(Receiver):
    """Receives through memory that the worker before fills.

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
    """How many slots the peer has reported as done."""
    reports = peer.recv(_SLOTS)
    if not reports:
        raise ConnectionError("it closed the connection")
    return len(reports)


def _bytes_of(array: np.ndarray) -> memoryview:
    flat: npt.NDArray[np.uint8] = array.reshape(-1).view(np.uint8)
    return memoryview(flat)


def mapped(memory: int) -> npt.NDArray[np.uint8]:
    """Shared memory as slots [_SLOTS, PIECE_BYTES] of bytes; the file may be closed."""
    flat: npt.NDArray[np.uint8] = np.frombuffer(mmap.mmap(memory, MEMORY_BYTES), np.uint8)
    return flat.reshape(_SLOTS, PIECE_BYTES)
