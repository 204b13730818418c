"""Links from one worker of a ring to the next: a TCP stream, or shared memory.

    to_next.add(array, may_go=True)        # a Sender
    while to_next.left:
        to_next.push()
    values = from_previous.take(into)      # a Receiver
    from_previous.done()

Workers of one machine copy values through shared memory, in a few slots that stay in the caches. A
socket between them reports full and free slots. This takes a third of the time of TCP, which copies
each byte into the kernel and out of it, packet by packet. Unlike counters in the memory, a socket
lets a worker sleep until there is work, and detects the loss of the peer. It also orders memory:
values written before a message are visible after it, on every processor. listener.py connects two
workers.
"""

from __future__ import annotations

import collections
import contextlib
import mmap
import select
import socket

import numpy as np
import numpy.typing as npt

PIECE_BYTES = 1 << 19  # bytes of a chunk that is added and sent at once; chunks stay in the caches
_SLOTS = 4  # number of chunks in shared memory
MEMORY_BYTES = _SLOTS * PIECE_BYTES
_DONE = b"\0"  # message: one more slot is full, or free
# size in bytes up to which a message need not wake the peer before the next one
_WITH_NEXT = 1 << 10


class Sender:
    """Sends the bytes of queued arrays to the next worker, once they are released.

    Args:
        peer: a connected stream socket.
    """

    def __init__(self, peer: socket.socket):
        peer.setblocking(False)
        self.peer = peer
        self._parts: collections.deque[memoryview] = collections.deque()
        self._released = 0  # number of bytes that may be sent

    def add(self, *arrays: np.ndarray, may_go: bool = False) -> None:
        """Queues arrays. They are sent after `release`, or at once if `may_go` is True."""
        for array in arrays:
            if array.size:
                self._put(_bytes_of(array))
                self._released += array.nbytes if may_go else 0

    def release(self, nbytes: int) -> None:
        """Releases the next `nbytes` bytes: whole arrays, or whole chunks (PIECE_BYTES) of one."""
        self._released += nbytes

    @property
    def left(self) -> bool:
        """Whether queued bytes remain."""
        return bool(self._parts)

    @property
    def may_go(self) -> bool:
        """Whether released bytes remain."""
        return self.left and self._released > 0

    def push(self) -> bool:
        """Sends released bytes while there is room; returns whether it sent any.

        Raises:
            OSError: the next worker is lost.
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
        """Makes `poll` return when there is room again."""
        poll.register(self.peer, select.POLLOUT)

    def _put(self, part: memoryview) -> None:
        self._parts.append(part)


class Receiver:
    """Receives from the previous worker.

    Args:
        peer: a connected stream socket.
    """

    def __init__(self, peer: socket.socket):
        peer.setblocking(False)
        self.peer = peer
        self._filled = 0  # number of received bytes of the current array

    def take(self, into: np.ndarray) -> np.ndarray | None:
        """The next values, in `into` or in memory that is valid until `done`; None if incomplete.

        Args:
            into: an array of the expected shape and dtype, of at most PIECE_BYTES. If the result is
                None, pass the same array again.

        Raises:
            OSError: the previous worker is lost.
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
        """Releases the memory of the last `take`."""


class SharedSender(Sender):
    """Sends through memory that is shared with the next worker.

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
        moved, unreported = False, b""
        while self.may_go and self._has_room():
            part = self._parts.popleft()
            self._memory[self._slot, : len(part)] = part
            self._slot = (self._slot + 1) % _SLOTS
            self._free -= 1
            self._released -= len(part)
            moved, unreported = True, unreported + _DONE
            if len(part) > _WITH_NEXT:
                self.peer.send(unreported)  # there is room for messages about at most _SLOTS slots
                unreported = b""
        if unreported:
            self.peer.send(unreported)
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
    """Receives through memory that is shared with the previous worker.

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
        # If the peer is lost, values that it has sent are still valid.
        with contextlib.suppress(OSError):
            self.peer.send(_DONE)


def _count(peer: socket.socket) -> int:
    """Number of slots that the peer has reported."""
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
