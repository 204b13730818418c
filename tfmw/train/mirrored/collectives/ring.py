"""Ring all-reduce for gradients of workers without GPUs.

    ring = connect(rank, addresses, key, from_all=group.from_all)
    ring.sum(values)                # and the other methods of all_reduce.py

Each worker sends to the next one and receives from the previous one: 2 (N - 1) messages of 1/N of
the array each (Patarasuk and Yuan, Bandwidth Optimal All-reduce Algorithms for Clusters of
Workstations, 2009). Received values are added and sent in small chunks, so a worker starts to send
a sum before it has received all of it. The links use TCP, or memory that two workers of one machine
share (ring_links.py).

TensorFlow's own ring does the same over gRPC, where each message is allocated, zeroed and copied
several times. It takes a multiple of the time (bench/ring.py measures both). Only arrays are sent
here, between authenticated workers (listener.py). The module uses the standard library and NumPy
only.
"""

from __future__ import annotations

import contextlib
import math
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from tfmw.observe import recorder
from tfmw.train.mirrored.collectives import listener
from tfmw.train.mirrored.collectives.all_reduce import (
    Add,
    AllReduce,
    Cuts,
    RingBroken,
    add_arrays,
    even_cuts,
)
from tfmw.train.mirrored.collectives.ring_links import PIECE_BYTES, Receiver, Sender

# Number of the exchange, number of bytes that follow, kind of exchange.
_HEADER = struct.Struct("!QQ16s")


class Ring(AllReduce):
    """The ring all-reduce, as one of its workers.

    Args:
        rank: rank of this worker in the ring.
        workers: rank of each worker in the training, by its rank in the ring.
        to_next, from_previous: the links to both neighbours.
        timeout_s: see `AllReduce`.
    """

    def __init__(
        self,
        rank: int,
        workers: Sequence[int],
        to_next: Sender,
        from_previous: Receiver,
        timeout_s: float | None,
    ):
        super().__init__(rank, len(workers))
        self.timeout_s = timeout_s
        self._workers = workers
        self._before, self._after = workers[rank - 1], workers[(rank + 1) % self.size]
        self._next, self._previous = to_next, from_previous

    def part_number(self, rank: int) -> int:
        """The shard of a sum that a worker has first: the one that it receives last."""
        return (rank + 1) % self.size

    def close(self) -> None:
        self._broken = self._broken or RingBroken("this worker has closed the ring")
        for link in (self._next, self._previous):
            with contextlib.suppress(OSError):
                link.peer.shutdown(socket.SHUT_RDWR)  # a running sum fails, and closes the links
        if self._one_at_a_time.acquire(blocking=False):
            self._shut()
            self._one_at_a_time.release()

    def _shut(self) -> None:
        self._next.peer.close()
        self._previous.peer.close()

    def _sum(self, total: np.ndarray, add: Add) -> np.ndarray:
        if self.size == 2 and add is add_arrays and 0 < total.nbytes <= PIECE_BYTES:
            self._swap(total)
        else:
            self._turn(total, even_cuts(len(total), self.size), range(2 * self.size - 2), add)
        return total

    def _reduce_scatter(self, total: np.ndarray, cuts: Cuts, add: Add) -> np.ndarray:
        self._turn(total, cuts, range(self.size - 1), add)
        return total[self.own_part(cuts)]

    def _all_gather(self, own: np.ndarray, cuts: Cuts, total: np.ndarray) -> np.ndarray:
        here = total[self.own_part(cuts)]
        if here.ctypes.data != own.ctypes.data:
            here[...] = own
        self._turn(total, cuts, range(self.size - 1, 2 * (self.size - 1)), add_arrays)
        return total

    def _swap(self, total: np.ndarray) -> None:
        """All-reduces between two workers: each sends all its values, so that both wait only once.

        Both add in the order of their ranks, as the bits of a NaN depend on it.
        """
        self._next.add(self._header(total.nbytes), total.copy(), may_go=True)
        self._require_incoming(total.nbytes)
        with self._received(np.empty_like(total)) as values:
            first, second = (total, values) if self.rank == 0 else (values, total)
            add_arrays(first, second, total)
        self._finish()

    def _turn(self, total: np.ndarray, cuts: Cuts, rounds: range, add: Add) -> None:
        """Passes shards from worker to worker, one in each round.

        In the first N - 1 rounds received values are added to this worker's, and in the others they
        are complete and replace them. A chunk is replaced only after it has been sent: the complete
        chunk has passed the next worker, which has added this worker's values to it.

        Args:
            total: [n], this worker's values; received values are stored there.
            cuts: cuts of `total`.
            rounds: the rounds to run, of 2 (N - 1).
            add: function that writes the sum of its first two arguments to the third.
        """
        adding = self.size - 1
        scratch: np.ndarray = np.empty(_piece_length(total), total.dtype)

        def part(number: int) -> np.ndarray:
            number %= self.size
            return total[cuts[number] : cuts[number + 1]]

        # Message k is the received message k - 1; in the first rounds with local values added.
        first, *others = (part(self.rank - k) for k in rounds)
        self._next.add(self._header(total.nbytes), first, may_go=True)
        self._next.add(*others)
        self._require_incoming(total.nbytes)
        for k in rounds:
            coming = part(self.rank - 1 - k)
            for piece in _pieces(coming):
                here = coming[piece]
                with self._received(scratch[: len(here)] if k < adding else here) as values:
                    if k < adding:
                        add(values, here, here)
                    elif values is not here:
                        here[...] = values
                if k != rounds[-1]:
                    self._next.release(here.nbytes)
        self._finish()

    def _gather(self, local: list[np.ndarray]) -> list[np.ndarray]:
        row = sum(array.itemsize * math.prod(array.shape[1:]) for array in local)
        everyone = [local] * self.size
        self._next.add(self._header(sum(a.nbytes for a in local)), *local, may_go=True)
        for k in range(self.size - 1):
            nbytes = self._incoming_bytes()
            rows, rest = divmod(nbytes, row) if row else (len(local[0]), nbytes)
            if rest:
                raise self._differ(f"{nbytes} bytes", f"rows of {row} bytes")
            block = [np.empty((rows, *array.shape[1:]), array.dtype) for array in local]
            for array in block:
                self._receive(array.reshape(-1).view(np.uint8))
            if k < self.size - 2:
                self._next.add(self._header(nbytes), *block, may_go=True)
            everyone[(self.rank - 1 - k) % self.size] = block
        self._finish()
        return [np.concatenate(arrays) for arrays in zip(*everyone, strict=True)]

    def _broadcast(self, values: np.ndarray, root: int) -> np.ndarray:
        header = self._header(values.nbytes)
        if self.rank == root:
            self._next.add(header, values, may_go=True)
        else:
            self._require_incoming(values.nbytes)
            passes_on = (self.rank + 1) % self.size != root
            if passes_on:
                self._next.add(header, may_go=True)
                self._next.add(values)
            for piece in _pieces(values):
                here = values[piece]
                self._receive(here)
                if passes_on:
                    self._next.release(here.nbytes)
        self._finish()
        return values

    @property
    def previous(self) -> int:
        return self._before

    def _shift(self, local: np.ndarray) -> np.ndarray:
        self._next.add(self._header(local.nbytes), local, may_go=True)
        values: np.ndarray = np.empty(self._incoming_bytes(), np.uint8)
        self._receive(values)
        self._finish()
        return values

    def _header(self, nbytes: int) -> np.ndarray:
        header = _HEADER.pack(self.exchanges, nbytes, self._what.encode())
        return np.frombuffer(header, np.uint8)

    def _incoming_bytes(self) -> int:
        """Number of bytes that follow, after a check that both are in the same exchange."""
        header: np.ndarray = np.empty(_HEADER.size, np.uint8)
        self._receive(header)
        number, nbytes, padded = _HEADER.unpack(header.tobytes())
        what = padded.rstrip(b"\0").decode(errors="replace")
        if (number, what) != (self.exchanges, self._what):
            raise self._differ(
                f"exchange {number} ({what})", f"exchange {self.exchanges} ({self._what})"
            )
        return int(nbytes)

    def _require_incoming(self, nbytes: int) -> None:
        """Raises RuntimeError unless `nbytes` bytes follow, of the same exchange."""
        remote = self._incoming_bytes()
        if remote != nbytes:
            raise self._differ(f"{remote} bytes", f"{nbytes} bytes")

    def _finish(self) -> None:
        """Sends all queued bytes."""
        while self._next.left:
            if not self._push():
                self._wait(reading=False)

    def _receive(self, into: np.ndarray) -> None:
        """Fills an array with values of the previous worker."""
        for piece in _pieces(into):
            here = into[piece]
            with self._received(here) as came:
                if came is not here:
                    here[...] = came

    @contextlib.contextmanager
    def _received(self, into: np.ndarray) -> Iterator[np.ndarray]:
        """Yields the next values of the previous worker; sends released bytes meanwhile."""
        while True:
            moved = self._push()
            try:
                came = self._previous.take(into)
            except OSError as e:
                raise self._lost(self.rank - 1, str(e)) from None
            if came is not None:
                break
            if not moved:
                self._wait(reading=True)
        yield came
        self._previous.done()

    def _push(self) -> bool:
        """Sends released bytes for which the next worker has room; returns whether it sent any."""
        try:
            return self._next.push()
        except OSError as e:
            raise self._lost(self.rank + 1, str(e)) from None

    def _wait(self, reading: bool) -> None:
        """Waits until bytes have arrived, or there is room for released bytes."""
        poll = select.poll()
        if reading:
            poll.register(self._previous.peer, select.POLLIN)
        if self._next.may_go:
            self._next.watch(poll)
        begin = time.monotonic()
        recorder.waits_for(self._before if reading else self._after)
        if not poll.poll(None if self.timeout_s is None else 1000 * self.timeout_s):
            raise RingBroken(f"no value was sent or received for {self.timeout_s:g} s")
        recorder.waited(time.monotonic() - begin)

    def _differ(self, remote: str, local: str) -> RuntimeError:
        (one, at_one), (other, at_other) = sorted(
            [(self._workers[self.rank - 1], remote), (self._workers[self.rank], local)]
        )
        return RuntimeError(
            f"workers exchange different things: worker {one} {at_one}, worker {other} {at_other}"
        )

    def _lost(self, rank: int, why: str) -> RingBroken:
        worker = self._workers[rank % self.size]
        return RingBroken(f"lost worker {worker} while gradients were summed: {why}")


def _piece_length(array: np.ndarray) -> int:
    """Number of elements of a chunk."""
    return max(1, PIECE_BYTES // array.itemsize)


def _pieces(array: np.ndarray) -> Iterator[slice]:
    step = _piece_length(array)
    for start in range(0, len(array), step):
        yield slice(start, start + step)


def connect(
    rank: int,
    hosts: Sequence[str],
    key: bytes,
    from_all: Callable[[Any], list[Any]],
    workers: Sequence[int],
    timeout_s: float | None = None,
) -> Ring:
    """Joins the ring, or one of several rings. All workers must call it.

    Args:
        rank: rank of this worker.
        hosts: names or IP addresses of all workers, by rank.
        key: the key of this training; see listener.py.
        from_all: an all-gather, which returns every worker's value, by rank.
        workers: ranks of this worker's ring.
        timeout_s: see `Ring`.

    Raises:
        RingBroken: two neighbours could not connect; raised on all workers, with their names.
    """
    place, size = workers.index(rank), len(workers)
    after, before = workers[(place + 1) % size], workers[place - 1]
    with contextlib.ExitStack() as undo:
        own = undo.enter_context(contextlib.closing(listener.Listener(hosts[rank], key)))
        addresses: list[listener.Address] = from_all(own.address)
        problem = None
        try:
            to_next = listener.connect(hosts[after], addresses[after], own.address, key)
            undo.callback(to_next.peer.close)
        except OSError as e:
            there = f"worker {after} at {hosts[after]}:{addresses[after]['port']}"
            problem = f"worker {rank} could not connect to {there} ({e})"
        try:
            from_previous = own.accept(addresses[before])
            undo.callback(from_previous.peer.close)
        except OSError as e:
            problem = problem or f"worker {before} did not connect to worker {rank} ({e})"
        problems = [p for p in from_all(problem) if p is not None]
        if problems:
            raise RingBroken("; ".join(problems))
        undo.pop_all()
        own.close()
    return Ring(place, workers, to_next, from_previous, timeout_s)
