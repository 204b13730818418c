"""Divided batches of a `PyDataset`: one worker computes each and sends it to the others.

This is for datasets whose batches Keras's threads compute concurrently, in any order (`workers=2`
or more). A batch then depends on its index alone, so any worker can compute it. A worker computes a
batch itself if it cannot get it from its owner: the owner is lost, or is in another epoch, or the
batch holds more than arrays. If the first batches draw random numbers from Python's or NumPy's
generators, every worker computes all batches, and draws as one process does.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import keras
import numpy as np

from tfmw.cluster import membership, sockets, wire
from tfmw.cluster.group import Group
from tfmw.data.random_state import random_state

logger = logging.getLogger("tfmw")

Key = tuple[int, int]  # (index of the epoch, index of the batch)


class BatchExchange:
    """Sends batches to other workers, and fetches theirs; `key` is the secret of the training."""

    def __init__(self, host: str, key: bytes):
        self._key = key
        listener = sockets.listen(host)
        self.port: int = listener.getsockname()[1]
        self.peers: list[tuple[str, int]] = []  # (host, port) of every worker, in order of rank
        self._idle: dict[int, queue.SimpleQueue[wire.Connection]] = {}
        self._unreachable: set[int] = set()
        self._datasets: weakref.WeakValueDictionary[int, DividedBatches] = (
            weakref.WeakValueDictionary()
        )
        self._newest = 0
        self._changed = threading.Condition()
        self._server = wire.Server(listener, key, self._serve, "tfmw-batches")

    def add(self, dataset: DividedBatches) -> None:
        """Serves the batches of a dataset, as long as the dataset exists."""
        with self._changed:
            self._newest = dataset.number
            self._datasets[dataset.number] = dataset
            self._changed.notify_all()

    def fetch(self, owner: int, number: int, key: Key) -> list[np.ndarray] | None:
        """The arrays of a batch from the worker that computes it; None if not available."""
        if owner in self._unreachable:
            return None
        idle = self._idle.setdefault(owner, queue.SimpleQueue())
        try:
            connection = idle.get_nowait()
        except queue.Empty:
            host, port = self.peers[owner]
            try:
                connection = wire.connect(f"{host}:{port}", self._key)
            except OSError as error:  # each attempt may take seconds
                with self._changed:
                    first = owner not in self._unreachable
                    self._unreachable.add(owner)
                if first:
                    logger.warning(
                        "this worker computes worker %d's batches of a PyDataset itself: it cannot "
                        "connect to %s:%d (%s). Open the ports between the hosts to divide them.",
                        *(owner, host, port, error),
                    )
                return None
        try:
            connection.send({"dataset": number, "batch": key})
            message, arrays = connection.receive()
        except (OSError, ValueError):
            connection.close()
            return None
        idle.put(connection)
        return arrays if message["found"] else None

    def close(self) -> None:
        """Ends all connections."""
        self._server.close()
        for idle in self._idle.values():
            while not idle.empty():
                idle.get().close()

    def _serve(self, peer: socket.socket) -> None:
        # Any error ends the connection: the other worker computes the batch, and gets the same
        # error.
        with (
            contextlib.suppress(Exception),
            contextlib.closing(wire.Connection(peer)) as connection,
        ):
            while True:
                asked, _ = connection.receive()
                epoch, index = asked["batch"]
                arrays = self._batch(asked["dataset"], (epoch, index))
                connection.send({"found": arrays is not None}, arrays or ())

    def _batch(self, number: int, key: Key) -> list[np.ndarray] | None:
        with self._changed:
            self._changed.wait_for(lambda: number <= self._newest)
        dataset = self._datasets.get(number)
        return None if dataset is None else dataset.for_peer(key)


class DividedBatches:
    """The batches of one dataset, of which worker i mod N computes batch i."""

    def __init__(
        self,
        exchange: BatchExchange,
        number: int,
        rank: int,
        compute: Callable[[int], Any],
        most_kept: int,
    ):
        self.number = number  # from 1; the same on all workers, and greater than earlier ones
        self._exchange, self._rank, self._compute = exchange, rank, compute
        # for workers that are behind; they compute older batches themselves
        self._most_kept = most_kept
        self._like: Any = None  # a batch, which has the structure of all batches
        self._draws = False
        self._epoch = 0
        self._batches: dict[Key, Future[Any]] = {}
        self._taken: dict[Key, int] = {}  # batch -> number of workers that have fetched it
        self._changed = threading.Condition()
        exchange.add(self)

    def begin_epoch(self) -> None:
        """Begins an epoch, and stops serving batches of earlier epochs."""
        with self._changed:
            self._epoch += 1
            self._batches.clear()
            self._taken.clear()
            self._changed.notify_all()

    def __getitem__(self, index: int) -> Any:
        if not self._epoch:  # Keras reads the first batches
            before = random_state()
            self._like = self._compute(index)
            self._draws |= random_state() != before
            return self._like
        key = (self._epoch, index)
        owner = index % len(self._exchange.peers)
        # Every worker computes the first batch, which shows whether all have one order.
        if self._draws or index == 0:
            return self._compute(index)
        if owner == self._rank:
            return self._own(key)
        arrays = self._exchange.fetch(owner, self.number, key)
        if arrays is None:
            return self._compute(index)
        return keras.tree.pack_sequence_as(self._like, arrays)

    def for_peer(self, key: Key) -> list[np.ndarray] | None:
        """The arrays of a batch for another worker; None for another epoch or other values."""
        with self._changed:
            self._changed.wait_for(lambda: key[0] <= self._epoch)
            if key[0] != self._epoch or self._draws:
                return None
        batch = self._own(key)
        try:
            keras.tree.assert_same_structure(batch, self._like)
        except (TypeError, ValueError):
            return None
        leaves = [_array(leaf) for leaf in keras.tree.flatten(batch)]
        return None if any(leaf is None for leaf in leaves) else leaves  # type: ignore[return-value]

    def _own(self, key: Key) -> Any:
        """A batch that this worker computes once, and keeps until all workers have it."""
        with self._changed:
            future = self._batches.get(key)
            is_first = future is None
            if future is None:
                future = self._batches[key] = Future()
                if len(self._batches) > self._most_kept:  # some worker computes batches itself
                    oldest = next(iter(self._batches))
                    del self._batches[oldest]
                    self._taken.pop(oldest, None)
            self._taken[key] = self._taken.get(key, 0) + 1
            if self._taken[key] == len(self._exchange.peers):
                del self._batches[key], self._taken[key]
        if is_first:
            try:
                future.set_result(self._compute(key[1]))
            except BaseException as error:
                future.set_exception(error)
        return future.result()


def _array(leaf: Any) -> np.ndarray | None:
    """A leaf as an array; None if the conversion could change it."""
    array = leaf.numpy() if hasattr(leaf, "numpy") else leaf
    plain = isinstance(array, np.ndarray | np.generic) and array.dtype.kind in "biufc"
    return np.asarray(array) if plain and array.dtype.isbuiltin == 1 else None


# ---------------------------------------------------------------- of this process

_exchange: BatchExchange | None = None
_numbers = 0


def divided(compute: Callable[[int], Any], group: Group, most_kept: int) -> DividedBatches:
    """Divides the batches that `compute` returns between all workers, each of which calls this."""
    global _exchange, _numbers
    if _exchange is None:
        joined = membership.joined()
        assert joined is not None  # several workers have a cluster
        key = membership.training_key(group.from_chief)
        _exchange = BatchExchange(joined.hosts[group.rank], key)
        _exchange.peers = list(zip(joined.hosts, group.from_all(_exchange.port), strict=True))
    _numbers += 1
    return DividedBatches(_exchange, _numbers, group.rank, compute, most_kept)
