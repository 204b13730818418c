"""Sums of gradients over replicas: over which transport, in which dtype and pack size.

    total = Reduction(strategy, compression="bf16")
    summed = total(grads)                  # on each replica; the same on all

Gradients of workers without GPUs are summed by tfmw's own ring (`ring.py`). Small ones are joined
into packs, in the order in which the backward pass computes them: the last layer's gradients are
sent first, while those of earlier layers are still being computed.

Otherwise TensorFlow sums them. It joins small gradients into packs of `bytes_per_pack` and sends
the packs concurrently, but does not split large gradients. Its ring is slow for these: each message
is allocated, zeroed and copied several times, which costs a multiple beyond the sizes of allocator
and caches. So large gradients are split here. The results are the same: each element is summed over
replicas in the same order.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfmw.cluster import membership
from tfmw.errors import UsageError
from tfmw.keras_compat.losses import scaled
from tfmw.keras_compat.row_origins import Origin, row_parts
from tfmw.mirrored.collectives.all_reduce import Add, AllReduce, Cuts, add_arrays
from tfmw.mirrored.collectives.connection import ring_of
from tfmw.mirrored.collectives.hierarchy import HierarchicalRing
from tfmw.runtime import recorder
from tfmw.training.arguments import COMPRESSIONS

SUM = tf.distribute.ReduceOp.SUM

# A gradient of more than this many packs is split, into pieces of this many packs.
WHOLE_PACKS, PIECE_PACKS = 6, 2
# Bytes of a pack for tfmw's own ring, if the strategy has no pack size: the minimum, and per
# worker. The messages of a pack wait for one another, and their number grows with the workers.
RING_PACK, RING_PACK_OF_WORKER = 4 << 20, 1 << 20
_ALIGNED = 32  # elements: TensorFlow splits rows of a multiple of 64 bytes without a copy
_nothing: tf.Variable | None = None  # without reduction: a 0 that TensorFlow cannot fold


@contextlib.contextmanager
def left_out() -> Iterator[None]:
    """Multiplies gradients by 0 instead of reducing them, to measure the cost of the reduction.

    With their local gradients, replicas would diverge.
    """
    global _nothing
    _nothing = tf.Variable(0.0, trainable=False)
    try:
        yield
    finally:
        _nothing = None


def nothing() -> tf.Variable | None:
    """The factor 0 within `left_out`; None outside of it."""
    return _nothing


class Reduction:
    """Sums lists of gradients over the replicas of a strategy.

    Args:
        strategy: the strategy of the replicas.
        compression: "fp16" or "bf16": the type in which dense float32 gradients are sent and
            summed; None for their own.

    Attributes:
        strategy: of the replicas.
        options: TensorFlow's, for its collectives; None for its defaults.
        over_ring: the exchanges of gradients over tfmw's ring; None where TensorFlow sums them.
    """

    def __init__(self, strategy: tf.distribute.Strategy, compression: str | None = None):
        self.strategy = strategy
        self.options = membership.reduction_options(strategy)
        self.over_ring: TracedRing | None = None
        self._replicas = strategy.num_replicas_in_sync
        self._wire = None if compression is None else COMPRESSIONS[compression]
        if compression == "bf16" and self._is_between_gpus:
            raise UsageError(
                'received gradient_compression="bf16": TensorFlow sums no bfloat16 between GPUs. '
                'Use "fp16".'
            )
        self._pack = self.options.bytes_per_pack if self.options is not None else 0
        ring = ring_of(strategy)
        if ring is not None:
            pack = self._pack or max(RING_PACK, ring.size * RING_PACK_OF_WORKER)
            self.over_ring = TracedRing(ring, pack)

    def within_machine(self) -> Reduction | None:
        """The sums over this machine's workers only; None where there is one ring of all workers.

        Its exchanges are in turn with those of this reduction.
        """
        if self.over_ring is None or not isinstance(self.over_ring.ring, HierarchicalRing):
            return None
        own, over_ring = copy.copy(self), copy.copy(self.over_ring)
        over_ring.ring = self.over_ring.ring.within
        own.over_ring, own._replicas = over_ring, over_ring.ring.size
        return own

    @property
    def _is_between_gpus(self) -> bool:
        """Whether "Collective all-reduce does not support datatype DT_BFLOAT16 on DEVICE_GPU"."""
        if self.strategy.num_replicas_in_sync == 1:
            return False
        return any("GPU" in device for device in self.strategy.extended.worker_devices)

    @property
    def broken(self) -> Exception | None:
        """The error after which no gradient can be summed; None before it."""
        return None if self.over_ring is None else self.over_ring.ring.broken

    def __call__(self, grads: list[Any]) -> list[Any]:
        """Gradients of this replica -> their sums over all replicas. In a replica context.

        Args:
            grads: dense tensors, `tf.IndexedSlices`, or None.
        """
        if _nothing is not None:
            return scaled(grads, _nothing)
        parts = [_parts_of(grad) for grad in grads]
        sent = [self._compressed(part) for own in parts for _, part in own]
        totals = iter((self.over_ring or self._by_tensorflow)(sent) if sent else ())
        return [
            None
            if grad is None
            else joined_parts(
                [(origin, _as_type(next(totals), grad.dtype)) for origin, _ in own],
                self._replicas,
            )
            for grad, own in zip(grads, parts, strict=True)
        ]

    def sum(self, flat: tf.Tensor) -> tf.Tensor:
        """The sum over all replicas of other values, such as metrics: [n] -> [n].

        In a replica context. The ring numbers these sums with those of gradients. So if the data of
        one worker ends early, the workers fail instead of waiting for each other.
        """
        if self.over_ring is not None:
            return self.over_ring.summed(flat, "metrics")
        replica = tf.distribute.get_replica_context()
        return replica.all_reduce(SUM, flat)

    def gather(self, slices: tf.IndexedSlices) -> tf.IndexedSlices:
        """The slices of all replicas, one after the other. In a replica context.

        TensorFlow requires that they have the same shape in all steps of a call, else it raises
        "Shape mismatch in the collective instance"; the ring does not.
        """
        (gathered,) = (self.over_ring or self._by_tensorflow)([slices])
        return gathered

    def scattered(self, flat: tf.Tensor, cuts: Cuts) -> tf.Tensor:
        """This worker's part of the sum over all workers, as `__call__` sums: [n] -> [m].

        Over the ring only.
        """
        assert self.over_ring is not None
        if _nothing is not None:
            return scaled([flat[self.over_ring.ring.own_part(cuts)]], _nothing)[0]
        return _as_type(self.over_ring.scattered(self._compressed(flat), cuts), flat.dtype)

    def _by_tensorflow(self, grads: list[Any]) -> list[Any]:
        if self._is_between_gpus:
            grads = [tf.cast(g, tf.float32) if g.dtype == tf.bfloat16 else g for g in grads]
        cut = [self._pieces(grad) for grad in grads]
        replica = tf.distribute.get_replica_context()
        reduced = iter(replica.all_reduce(SUM, [p for pieces in cut for p in pieces], self.options))
        out: list[Any] = []
        for grad, pieces in zip(grads, cut, strict=True):
            sums = [next(reduced) for _ in pieces]
            out.append(sums[0] if len(sums) == 1 else tf.reshape(tf.concat(sums, 0), grad.shape))
        return out

    def _compressed(self, grad: Any) -> Any:
        if self._wire is None or isinstance(grad, tf.IndexedSlices) or grad.dtype != tf.float32:
            return grad
        return tf.cast(grad, self._wire)

    def _pieces(self, grad: Any) -> list[Any]:
        """The flat gradient, or its pieces."""
        if isinstance(grad, tf.IndexedSlices) or not grad.shape.is_fully_defined():
            return [grad]
        elements = grad.shape.num_elements()
        if not self._pack or elements * grad.dtype.size <= WHOLE_PACKS * self._pack:
            return [grad]
        row = _ALIGNED if elements % _ALIGNED == 0 else 1
        rows = elements // row
        size = max(1, PIECE_PACKS * self._pack // (row * grad.dtype.size))
        sizes = [min(size, rows - start) for start in range(0, rows, size)]
        return list(tf.split(tf.reshape(grad, [rows, row]), sizes, axis=0))


class TracedRing:
    """Sums gradients over a ring, from within a traced step.

    Every exchange is an op that blocks until the neighbours run the same exchange. So exchanges of
    a process must run one at a time, and in the same order in all processes. Each of them reads and
    then writes one variable, because TensorFlow runs such ops in the order of the program, across
    functions too.
    """

    def __init__(self, ring: AllReduce, pack_bytes: int):
        self.ring: AllReduce = ring
        self.pack_bytes = pack_bytes
        with tf.init_scope(), tf.device("cpu:0"):
            self._turn = tf.Variable(0, dtype=tf.int64, trainable=False)
            # Of no shape that TensorFlow knows in advance: it would compute what does not depend on
            # the step once for all steps, into memory that the ring then overwrites.
            self._nowhere = tf.Variable(tf.zeros([0, 1], tf.int64), False, shape=[None, 1])

    def __call__(self, grads: list[Any]) -> list[Any]:
        """Gradients of this replica -> their sums over all replicas."""
        out: list[Any] = [None] * len(grads)
        row = tf.constant([-1])  # one for all: every op takes time to trace and to compile
        for pack in packs_of(grads, self.pack_bytes):
            first = grads[pack[0]]
            if isinstance(first, tf.IndexedSlices):
                out[pack[0]] = self._gathered(first)
                continue
            flat = [
                grads[i] if grads[i].shape.rank == 1 else tf.reshape(grads[i], row) for i in pack
            ]
            sizes = [part.shape[0] or tf.size(part) for part in flat]
            total = self.summed(flat[0] if len(flat) == 1 else tf.concat(flat, axis=0))
            parts = [total] if len(flat) == 1 else tf.split(total, sizes, num=len(flat))
            for i, part in zip(pack, parts, strict=True):
                shape = grads[i].shape
                if not shape.is_fully_defined():
                    part = tf.ensure_shape(tf.reshape(part, tf.shape(grads[i])), shape)
                elif shape.rank != 1:
                    part = tf.reshape(part, shape)
                out[i] = part
        return out

    def summed(self, flat: tf.Tensor, what: str = "gradients") -> tf.Tensor:
        """The sum over all workers: [n] -> [n]."""
        add = _add_of(flat.dtype)
        exchange = functools.partial(self.ring.sum, add=add, what=what, in_place=True)
        total = self._in_memory(exchange, [flat], what)
        total.set_shape(flat.shape)
        return total

    def scattered(self, flat: tf.Tensor, cuts: Cuts) -> tf.Tensor:
        """See `AllReduce.reduce_scatter`."""
        add = _add_of(flat.dtype)
        exchange = functools.partial(
            self.ring.reduce_scatter, cuts=cuts, add=add, what="gradients", in_place=True
        )
        # Without a copy, as parts begin at aligned bytes.
        return self._in_memory(exchange, [flat])[self.ring.own_part(cuts)]

    def gathered(self, own: tf.Tensor, cuts: Cuts) -> tf.Tensor:
        """See `AllReduce.all_gather`."""

        def exchange(out: np.ndarray, own: np.ndarray) -> None:
            self.ring.all_gather(own, cuts, "weights", out)

        # Not before its turn: all packs would be in memory at once.
        with tf.device("cpu:0"), tf.control_dependencies([self._turn.read_value(), own]):
            new = tf.raw_ops.Empty(shape=[cuts[-1]], dtype=own.dtype)
        return self._in_memory(exchange, [new, own], "weights")

    def _gathered(self, grad: tf.IndexedSlices) -> tf.IndexedSlices:
        parts = [grad.values, grad.indices]
        if tf.executing_eagerly():
            values, indices = map(tf.constant, self.ring.gather([p.numpy() for p in parts]))
        else:
            values, indices = self._in_turn(lambda *local: self.ring.gather(local), parts, parts)
        values.set_shape([None, *grad.values.shape[1:]])
        indices.set_shape([None])
        return tf.IndexedSlices(values, indices, grad.dense_shape)

    def _in_memory(
        self, exchange: Callable[..., object], tensors: list[tf.Tensor], what: str = "gradients"
    ) -> tf.Tensor:
        """Runs `exchange(*arrays)` after the earlier ones; returns what the first array is then.

        That array is the memory of the first tensor, or of a copy where others still use it. So the
        ring needs no memory of its own, beside that which TensorFlow keeps for tensors.
        """
        first, *others = tensors
        if tf.executing_eagerly():
            array = np.array(first)
            exchange(array, *map(np.asarray, others))
            return tf.constant(array)

        def run(*arrays: np.ndarray) -> list[Any]:
            exchange(*arrays)
            return []

        with tf.device("cpu:0"):
            alone = self._unchanged(first)
            self._in_turn(run, [alone, *others], [], what)
            # No identity: TensorFlow's optimizer moves a cast to fewer bits before one, and with it
            # the reading of the memory before the exchange.
            with tf.control_dependencies([self._turn.read_value()]):
                return self._unchanged(alone)

    def _unchanged(self, tensor: tf.Tensor) -> tf.Tensor:
        """The tensor, in its own memory if that has no other use; else in a copy."""
        return tf.raw_ops.ScatterNdNonAliasingAdd(
            input=tensor, indices=self._nowhere.read_value(), updates=tf.zeros([0], tensor.dtype)
        )

    def _in_turn(
        self,
        exchange: Callable[..., Sequence[np.ndarray]],
        local: list[tf.Tensor],
        like: list[tf.Tensor],
        what: str = "gradients",
    ) -> list[tf.Tensor]:
        """Runs an exchange after the earlier ones; its results have the dtypes of `like`."""

        def run(turn: np.int64, *arrays: np.ndarray) -> list[Any]:
            nbytes = 0
            for array in arrays:  # sum() takes twice as long
                nbytes += array.nbytes
            recorder.begun(what, nbytes)
            totals = exchange(*arrays)
            recorder.done()
            return [turn + 1, *totals]

        with tf.device("cpu:0"):
            types = [tf.int64, *(tensor.dtype for tensor in like)]
            turn, *out = tf.numpy_function(run, [self._turn.read_value(), *local], types)
            self._turn.assign(turn)
        return out


def packs_of(grads: list[Any], pack_bytes: int) -> Iterator[list[int]]:
    """Positions of the gradients of each pack: neighbours of one dtype, last ones first.

    Args:
        grads: dense tensors, `tf.IndexedSlices`, or None, which has no place; sparse ones are
            alone, as are unknown shapes.
        pack_bytes: of a pack of more than one.
    """
    pack: list[int] = []
    room = 0
    for i in reversed([i for i, grad in enumerate(grads) if grad is not None]):
        alone = isinstance(grads[i], tf.IndexedSlices) or not grads[i].shape.is_fully_defined()
        nbytes = 0 if alone else grads[i].shape.num_elements() * grads[i].dtype.size
        if pack and (alone or nbytes > room or grads[i].dtype != grads[pack[0]].dtype):
            yield pack
            pack = []
        pack.append(i)
        if alone:
            yield pack
            pack = []
        else:
            room = (room if len(pack) > 1 else pack_bytes) - nbytes
    if pack:
        yield pack


def _add_of(dtype: tf.DType) -> Add:
    return _add_16_bits if dtype.size == 2 else add_arrays


def _add_16_bits(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
    """Adds 16-bit floats by TensorFlow, which vectorizes this; NumPy does not."""
    np.copyto(out, (tf.constant(a) + tf.constant(b)).numpy())


def _as_type(grad: Any, dtype: tf.DType) -> Any:
    return grad if grad.dtype == dtype else tf.cast(grad, dtype)


def _parts_of(grad: Any) -> list[tuple[Origin | None, Any]]:
    """(origin of its rows, part) of a gradient; a dense one is its only part, None has none."""
    if grad is None:
        return []
    return [*row_parts(grad)] if isinstance(grad, tf.IndexedSlices) else [(None, grad)]


def joined_parts(parts: list[tuple[Origin | None, Any]], replicas: int) -> Any:
    """The gradient of the global batch, the same on all replicas.

    Args:
        parts: (origin of its rows, part): dense ones summed over replicas, slices of all replicas
            joined.
        replicas: number of them.
    """
    origin, first = parts[0]
    if origin is None:
        return first
    slices = [_added_up(origin, part, replicas) for origin, part in parts if origin is not None]
    if len(slices) == 1:
        return slices[0]
    return tf.IndexedSlices(
        tf.concat([part.values for part in slices], 0),
        tf.concat([part.indices for part in slices], 0),
        first.dense_shape,
    )


def _added_up(origin: Origin, part: tf.IndexedSlices, replicas: int) -> tf.IndexedSlices:
    """The rows of one lookup on all replicas, as one process has them."""
    if origin is Origin.EXAMPLES:
        return part
    rows, size = part.indices, tf.size(part.indices)
    of_one = size // replicas
    blocks = tf.reshape(rows[: of_one * replicas], [replicas, of_one])
    equal = tf.logical_and(of_one * replicas == size, tf.reduce_all(blocks == blocks[:1]))
    distinct, position = tf.unique(rows)
    number = tf.size(distinct)
    if origin is Origin.SAME:  # each occurrence for itself, if they can be told apart
        position = tf.where(equal, tf.range(size) % tf.maximum(of_one, 1), position)
        number = tf.where(equal, of_one, number)
    elif origin is Origin.UNKNOWN:
        alike = tf.logical_and(equal, number == of_one)
        position = tf.where(alike, position, tf.range(size))
        number = tf.where(alike, number, size)
    return tf.IndexedSlices(
        tf.math.unsorted_segment_sum(part.values, position, number),
        tf.math.unsorted_segment_max(rows, position, number),
        part.dense_shape,
    )
