"""Sums of gradients over replicas: what travels, in which type and in pieces of which size.

    total = Reduction(strategy, compression="bf16")
    summed = total(grads)                  # on each replica; the same on all

TensorFlow joins small gradients to packs of `bytes_per_pack`, and sends them at the same time. It
leaves large ones whole, and a ring moves a whole one slowly: each of its messages is allocated,
zeroed and copied several times, and beyond the allocator's and the caches' sizes each of these
costs a multiple. So large gradients are cut here. The numbers stay the same: each element is summed
over replicas in the same order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfmw import strategies

SUM = tf.distribute.ReduceOp.SUM
COMPRESSIONS = {"fp16": tf.float16, "bf16": tf.bfloat16}

# A gradient is cut where it is larger than this many packs; into pieces of so many packs.
WHOLE_PACKS, PIECE_PACKS = 6, 2
_ALIGNED = 32  # elements: TensorFlow cuts rows of a multiple of 64 bytes without copying them
_nothing: tf.Variable | None = None  # while reduction is left out: a 0 that TensorFlow can't fold


@contextlib.contextmanager
def left_out() -> Iterator[None]:
    """Gradients are computed and count for nothing: for measuring what reducing them costs.

    Replicas that went on by their own gradients would drift apart.
    """
    global _nothing
    _nothing = tf.Variable(0.0, trainable=False)
    try:
        yield
    finally:
        _nothing = None


class Reduction:
    """Sums lists of gradients over the replicas of a strategy.

    Args:
        strategy: whose replicas.
        compression: "fp16" or "bf16": what dense float32 gradients travel and are summed in; None
            for as they are.
    """

    def __init__(self, strategy: tf.distribute.Strategy, compression: str | None = None):
        self._options = strategies.reduction_options(strategy)
        self._wire = None if compression is None else COMPRESSIONS[compression]
        self._pack = self._options.bytes_per_pack if self._options is not None else 0

    def __call__(self, grads: list[Any]) -> list[Any]:
        """Gradients of this replica -> their sums over all. In a replica context.

        Args:
            grads: dense tensors, `tf.IndexedSlices`, or None for what has no gradient.
        """
        if _nothing is not None:
            return [scaled(g, _nothing) for g in grads]
        sent: list[Any] = []
        cut: list[int] = []  # how many pieces of each
        for grad in grads:
            pieces = [] if grad is None else self._pieces(self._compressed(grad))
            sent += pieces
            cut.append(len(pieces))
        replica = tf.distribute.get_replica_context()
        reduced = iter(replica.all_reduce(SUM, sent, self._options))
        out: list[Any] = []
        for grad, number in zip(grads, cut, strict=True):
            pieces = [next(reduced) for _ in range(number)]
            if number > 1:
                pieces = [tf.reshape(tf.concat(pieces, axis=0), grad.shape)]
            if grad is not None and not isinstance(grad, tf.IndexedSlices):
                pieces = [tf.cast(pieces[0], grad.dtype)]
            out.append(pieces[0] if number else None)
        return out

    def _compressed(self, grad: Any) -> Any:
        if self._wire is None or isinstance(grad, tf.IndexedSlices) or grad.dtype != tf.float32:
            return grad
        return tf.cast(grad, self._wire)

    def _pieces(self, grad: Any) -> list[Any]:
        """The gradient, or what it is cut into, along the first axis of a flat form."""
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


def scaled(grad: Any, factor: Any) -> Any:
    """A gradient, dense or `tf.IndexedSlices`, times a number; None stays None."""
    if grad is None:
        return None
    if isinstance(grad, tf.IndexedSlices):
        values = grad.values * tf.cast(factor, grad.values.dtype)
        return tf.IndexedSlices(values, grad.indices, grad.dense_shape)
    return grad * tf.cast(factor, grad.dtype)
