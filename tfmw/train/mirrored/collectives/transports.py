"""Transports of values from within a traced step: tfmw's ring, or TensorFlow's collectives.

    transport = transport_of(strategy, options)
    totals = transport(grads)                           # sums over replicas; the same on all
    own = transport.scattered(flat, cuts)               # this worker's shard of a sum; ring only
    weights = transport.gathered(own_weights, cuts)     # the shards of all

Gradients of workers without GPUs are summed by tfmw's own ring (`ring.py`). Small ones are merged
into buckets, in the order in which the backward pass computes them: the last layer's gradients are
sent first, while those of earlier layers are still being computed.

Otherwise TensorFlow sums them. It merges small gradients into packs of `bytes_per_pack` and sends
the packs concurrently, but does not split large gradients. Its ring is slow for these: each message
is allocated, zeroed and copied several times, which is much slower beyond the sizes of allocator
and caches. So large gradients are split here. The results are the same: each element is summed over
replicas in the same order.

The ring has a reduce-scatter, after which each worker has one shard of the sum. tf.distribute has
an all-reduce and an all-gather, but no reduce-scatter. There a replica takes its shard of a whole
sum, which sends 1.5 times the bytes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfmw.cluster.membership import JoinedCluster
from tfmw.compat import placement
from tfmw.compat.connected_strategy import ConnectedStrategy
from tfmw.compat.models import lifted_variable
from tfmw.observe import recorder
from tfmw.train.mirrored.collectives.all_reduce import Add, AllReduce, Cuts, add_arrays
from tfmw.train.mirrored.collectives.connection import joined_ring, ring_of
from tfmw.train.mirrored.replicas import flattened, local_index, split_as

SUM = tf.distribute.ReduceOp.SUM

# A gradient of more than this many packs is split, into pieces of this many packs.
WHOLE_PACKS, PIECE_PACKS = 6, 2
# Bytes of a bucket for tfmw's own ring, if the strategy has no pack size: the minimum, and per
# worker. The messages of a bucket wait for one another, and their number grows with the workers.
RING_PACK, RING_PACK_OF_WORKER = 4 << 20, 1 << 20
GATHERED_PACK = 32 << 20
"""Bytes of weights that TensorFlow gathers at a time."""
_ALIGNED = 32  # elements: TensorFlow splits rows of a multiple of 64 bytes without a copy


def transport_of(strategy: tf.distribute.Strategy, options: Any) -> Transport:
    """The transport between the replicas of a strategy.

    Args:
        options: TensorFlow's options for its collectives; None for its defaults.
    """
    ring = ring_of(strategy)
    if ring is not None:
        return _over(ring, options)
    return OverTensorFlow(strategy, options, 0 if options is None else options.bytes_per_pack)


def connected_strategy(joined: JoinedCluster, resolver: Any) -> tf.distribute.Strategy:
    """The strategy of a cluster of workers over their ring.

    Args:
        resolver: TensorFlow's description of the cluster and this task.
    """

    @functools.cache
    def transport() -> OverRing:
        ring = joined_ring(joined)
        assert ring is not None
        return _over(ring, joined.options)

    return ConnectedStrategy(resolver, joined.options, transport)


def _over(ring: AllReduce, options: Any) -> OverRing:
    pack = options.bytes_per_pack if options is not None else 0
    return OverRing(ring, pack or max(RING_PACK, ring.size * RING_PACK_OF_WORKER))


class OverRing:
    """Sums and gathers over a ring.

    Every exchange is an op that blocks until the neighbours run the same exchange. So exchanges of
    a process must run one at a time, and in the same order in all processes. Each of them reads and
    then writes one variable, because TensorFlow runs such ops in the order of the program, across
    functions too.

    This worker has one replica.
    """

    whole_sums = False  # whether a shard of a sum takes as many bytes as the whole sum
    between_gpus = False  # whether TensorFlow sums between GPUs
    of = "workers"  # "workers" or "replicas", in messages

    def __init__(self, ring: AllReduce, pack_bytes: int):
        self.use(ring)
        self.pack_bytes = pack_bytes  # bytes of gradients in a bucket
        with tf.init_scope(), tf.device("cpu:0"):
            # One for all transports over a ring, as a step may contain exchanges of several.
            if ring.turn is None:
                ring.turn = lifted_variable(0, tf.int64)
            self._turn = ring.turn
            # A variable without a static shape. Otherwise TensorFlow would compute values that do
            # not depend on the step once for all steps, into memory that the ring then overwrites.
            self._no_indices = lifted_variable(tf.zeros([0, 1], tf.int64), tf.int64, [None, 1])

    def use(self, ring: AllReduce) -> None:
        """Sends over a ring, after the exchanges over an earlier one."""
        self.ring, self.size, self.ranks = ring, ring.size, [ring.rank]  # the rank of this process

    def part_number(self, rank: int) -> int:
        """The shard of a sum that a replica has first; see `AllReduce`."""
        return self.ring.part_number(rank)

    def __call__(self, grads: list[Any]) -> list[Any]:
        """Gradients of this replica -> their sums over all replicas; called in a replica context.

        Args:
            grads: dense tensors, or `tf.IndexedSlices`, whose slices are concatenated.
        """
        out: list[Any] = [None] * len(grads)
        for pack in packs_of(grads, self.pack_bytes):
            first = grads[pack[0]]
            if isinstance(first, tf.IndexedSlices):
                out[pack[0]] = self._slices_of_all(first)
                continue
            own = [grads[i] for i in pack]
            total = self.summed(flattened(own), "gradients")
            for i, part in zip(pack, split_as(total, own), strict=True):
                out[i] = part
        return out

    def summed(self, flat: tf.Tensor, what: str = "metrics") -> tf.Tensor:
        """The sum over all replicas, [n] -> [n]; called in a replica context.

        The ring numbers sums of all kinds. So if the data of one worker ends early, the workers
        fail instead of waiting for each other.
        """
        exchange = functools.partial(self.ring.sum, add=_add_of(flat.dtype), what=what)
        total = self._in_memory(exchange, [flat], what)
        total.set_shape(flat.shape)
        return total

    def scattered(self, flat: tf.Tensor, cuts: Cuts) -> tf.Tensor:
        """This worker's shard of a sum, [n] -> [m]; see `AllReduce.reduce_scatter`."""
        exchange = functools.partial(
            self.ring.reduce_scatter, cuts=cuts, add=_add_of(flat.dtype), what="gradients"
        )
        # Without a copy, as shards begin at aligned bytes.
        return self._in_memory(exchange, [flat], "gradients")[self.ring.own_part(cuts)]

    def gathered(self, own: tf.Tensor, cuts: Cuts) -> tf.Tensor:
        """The shards of all replicas, in order, [m] -> [n]; called in a replica context."""

        def exchange(out: np.ndarray, own: np.ndarray) -> None:
            self.ring.all_gather(own, cuts, out, "weights")

        # Waits for its turn: otherwise all buckets would be in memory at once.
        with tf.device("cpu:0"), tf.control_dependencies([self._turn.read_value(), own]):
            new = tf.raw_ops.Empty(shape=[cuts[-1]], dtype=own.dtype)
        return self._in_memory(exchange, [new, own], "weights")

    def gather_between_steps(self, own: Sequence[np.ndarray], cuts: Cuts, out: np.ndarray) -> None:
        """Gathers the shards of a value between steps. All workers must call it.

        Args:
            own: uint8 [m] for each replica of this process.
            cuts: cuts into a shard for each replica.
            out: uint8 [n], to fill.
        """
        self.ring.all_gather(own[0], cuts, out, "values")

    def _slices_of_all(self, grad: tf.IndexedSlices) -> tf.IndexedSlices:
        values, indices = self.rows_of_all([grad.values, grad.indices])
        return tf.IndexedSlices(values, indices, grad.dense_shape)

    def rows_of_all(self, parts: list[tf.Tensor]) -> list[tf.Tensor]:
        """All replicas' tensors, concatenated along the first axis; called in a replica context.

        Args:
            parts: tensors with the same number of rows, which may differ between replicas.
        """
        joined = self._in_turn(lambda *local: self.ring.gather(local), parts, parts, "gradients")
        for part, own in zip(joined, parts, strict=True):
            part.set_shape([None, *own.shape[1:]])
        return joined

    def broadcast(self, value: tf.Tensor) -> tf.Tensor:
        """The first worker's value; it has the same shape and dtype on all workers."""

        def exchange(own: np.ndarray) -> list[np.ndarray]:
            flat = np.array(own).reshape(-1)
            self.ring.broadcast(flat.view(np.uint8), what="values")
            return [flat.reshape(own.shape)]

        (first,) = self._in_turn(exchange, [value], [value], "values")
        first.set_shape(value.shape)
        return first

    def _in_memory(
        self, exchange: Callable[..., object], tensors: list[tf.Tensor], what: str
    ) -> tf.Tensor:
        """Runs `exchange(*arrays)` after the earlier ones; returns the first array as it is then.

        That array is the memory of the first tensor, or of a copy if others still use it. So the
        ring needs no memory except that which TensorFlow keeps for tensors.
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
            owned = self._in_own_memory(first)
            self._in_turn(run, [owned, *others], [], what)
            # No identity: TensorFlow's optimizer moves a cast to fewer bits before one, and so the
            # read of the memory before the exchange.
            with tf.control_dependencies([self._turn.read_value()]):
                return self._in_own_memory(owned)

    def _in_own_memory(self, tensor: tf.Tensor) -> tf.Tensor:
        """The tensor, in its own memory if that has no other use; otherwise a copy."""
        return tf.raw_ops.ScatterNdNonAliasingAdd(
            input=tensor, indices=self._no_indices.read_value(), updates=tf.zeros([0], tensor.dtype)
        )

    def _in_turn(
        self,
        exchange: Callable[..., Sequence[np.ndarray]],
        local: list[tf.Tensor],
        like: list[tf.Tensor],
        what: str,
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


class OverTensorFlow:
    """Transport by TensorFlow's collectives, without `scattered`; see `OverRing`.

    Args:
        strategy, options: see `transport_of`.
        split_bytes: size of a pack; large gradients are split into such pieces, unless it is 0.
    """

    ring, whole_sums, of = None, True, "replicas"

    def __init__(self, strategy: tf.distribute.Strategy, options: Any, split_bytes: int):
        self._strategy, self._options, self._pack = strategy, options, split_bytes
        self.size, self.pack_bytes = strategy.num_replicas_in_sync, GATHERED_PACK
        first = placement.first_local_replica(strategy)
        self.ranks = range(first, first + placement.local_replicas(strategy))
        self.between_gpus = self.size > 1 and any(
            "GPU" in device for device in strategy.extended.worker_devices
        )

    def part_number(self, rank: int) -> int:
        return rank

    def __call__(self, grads: list[Any]) -> list[Any]:
        # error of TensorFlow: "Collective all-reduce does not support datatype DT_BFLOAT16"
        if self.between_gpus:
            grads = [tf.cast(g, tf.float32) if g.dtype == tf.bfloat16 else g for g in grads]
        cut = [self._pieces(grad) for grad in grads]
        replica = tf.distribute.get_replica_context()
        pieces = [p for of_one in cut for p in of_one]
        reduced: list[Any] = [None] * len(pieces)
        for dtype in dict.fromkeys(piece.dtype for piece in pieces):
            # MirroredStrategy concatenates what it is given, and cannot if types differ.
            of_type = [i for i, piece in enumerate(pieces) if piece.dtype == dtype]
            sums = replica.all_reduce(SUM, [pieces[i] for i in of_type], self._options)
            for i, total in zip(of_type, sums, strict=True):
                reduced[i] = total
        left = iter(reduced)
        out: list[Any] = []
        for grad, of_one in zip(grads, cut, strict=True):
            sums = [next(left) for _ in of_one]
            out.append(sums[0] if len(sums) == 1 else tf.reshape(tf.concat(sums, 0), grad.shape))
        return out

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

    def summed(self, flat: tf.Tensor) -> tf.Tensor:
        return tf.distribute.get_replica_context().all_reduce(SUM, flat)

    def gathered(self, own: tf.Tensor, cuts: Cuts) -> tf.Tensor:
        total = self._joined(own)
        total.set_shape([cuts[-1]])
        return total

    def _joined(self, own: tf.Tensor) -> tf.Tensor:
        replica = tf.distribute.get_replica_context()
        return replica.all_gather(own, axis=0, options=self._options)

    def gather_between_steps(self, own: Sequence[np.ndarray], cuts: Cuts, out: np.ndarray) -> None:
        if len(own) == self.size:
            np.concatenate(own, out=out)
            return
        # The shards are padded to one length and sent as float32, which collectives support; no op
        # computes with these values.
        sizes = np.diff(cuts)
        length = -(-max(sizes) // 4) * 4
        padded = [np.pad(part, (0, length - len(part))).view(np.float32) for part in own]
        results = self._joined_between_steps([tf.constant(part) for part in padded])
        first = self._strategy.experimental_local_results(results)[0]
        gathered = first.numpy().view(np.uint8).reshape(self.size, length)
        for part, size, begin in zip(gathered, sizes, cuts, strict=False):
            out[begin : begin + size] = part[:size]

    @functools.cached_property
    def _joined_between_steps(self) -> Any:
        def on_replica(own: list[tf.Tensor]) -> tf.Tensor:
            # on the replica's device
            return self._joined(tf.identity(own[local_index(self._strategy)]))

        return tf.function(
            lambda own: self._strategy.run(on_replica, args=(own,)),
            autograph=False,
            input_signature=[[tf.TensorSpec([None], tf.float32)] * len(self.ranks)],
        )


Transport = OverRing | OverTensorFlow


def packs_of(grads: list[Any], pack_bytes: int) -> Iterator[list[int]]:
    """Positions of the gradients of each bucket: neighbours of one dtype, last ones first.

    Args:
        grads: dense tensors, `tf.IndexedSlices`, or None, which is in no bucket; sparse gradients
            and unknown shapes have buckets of their own.
        pack_bytes: size of a bucket with more than one gradient.
    """
    pack: list[int] = []
    room = 0
    for i in reversed([i for i, grad in enumerate(grads) if grad is not None]):
        is_single = isinstance(grads[i], tf.IndexedSlices) or not grads[i].shape.is_fully_defined()
        nbytes = 0 if is_single else grads[i].shape.num_elements() * grads[i].dtype.size
        if pack and (is_single or nbytes > room or grads[i].dtype != grads[pack[0]].dtype):
            yield pack
            pack = []
        pack.append(i)
        if is_single:
            yield pack
            pack = []
        else:
            room = (room if len(pack) > 1 else pack_bytes) - nbytes
    if pack:
        yield pack


def _add_of(dtype: tf.DType) -> Add:
    return _add_16_bits if dtype.size == 2 else add_arrays


def _add_16_bits(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
    """Adds 16-bit floats by TensorFlow, which vectorizes this, unlike NumPy."""
    np.copyto(out, (tf.constant(a) + tf.constant(b)).numpy())
