"""The synchronization of replicas: `EachStep`, or `tfmw.train.local_sgd.rounds.Rounds`.

    with EachStep(strategy, shard_optimizer="auto").driver(model) as driver:
        driver.run_steps("train", call)

A synchronization is chosen once for a call, and has two sides. While a step is traced it transforms
a replica's gradients for the driver. Between steps it runs due exchanges for the training.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import keras
import tensorflow as tf

from tfmw.compat.gradients import scaled
from tfmw.compat.losses import ReplicaWeight
from tfmw.train.checkpoint.tensor_files import ReplicaRows
from tfmw.train.mirrored.cached_driver import cached_driver
from tfmw.train.mirrored.collectives.reduction import Reduction
from tfmw.train.mirrored.replicas import flattened, split_as
from tfmw.train.mirrored.sharded_update import ShardedUpdate
from tfmw.train.mirrored.sync_driver import SyncDriver

Updates = contextlib.AbstractContextManager[tuple[list[Any], list[Any]]]


class EachStep:
    """Sums the gradients of all replicas in each step, so that all make the same update.

    Args:
        strategy: mirrored, multi-worker mirrored, or TensorFlow's default.
        compression: "fp16" or "bf16": the wire dtype in which gradients are sent and summed; None
            for their own.
        shard_optimizer: whether workers shard the update of the weights; see `ShardedUpdate`.
            None for a call that updates nothing.
    """

    is_local = False  # whether replicas have weights of their own between two exchanges

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        compression: str | None = None,
        shard_optimizer: Any = None,
    ):
        self.strategy = strategy
        self.compression = compression
        self.shard_optimizer = shard_optimizer
        # whether TensorFlow gathers sparse gradients, as of embeddings, or ids
        self.gathers = False

    @functools.cached_property
    def reduction(self) -> Reduction:
        """The sums over replicas."""
        return Reduction(self.strategy, self.compression)

    def driver(self, model: keras.Model) -> contextlib.AbstractContextManager[SyncDriver]:
        """The driver of a call, in which the model is placed."""
        return cached_driver(model, self)

    # ------------------------------------------------------------ while a step is traced

    def count_examples(self, local: int, examples: tf.Tensor, total: tf.Tensor) -> tf.Tensor:
        """Counts a replica's examples; returns those of all replicas that make the same update.

        Args:
            local: index of the replica in this process.
            examples: int32 [], number of examples of this replica.
            total: int32 [], number of examples of the global batch.
        """
        return total

    def reduced(
        self, update: ShardedUpdate, grads: list[Any], variables: list[Any], weight: ReplicaWeight
    ) -> Updates:
        """Gradients of this replica -> gradients to apply, and the variables that they update."""
        for grad, variable in zip(grads, variables, strict=True):
            if grad is not None:
                weight.note(f"the gradient of {variable.path}", grad)
        # Sparse gradients that the step has reduced are complete.
        complete = {
            id(v): g for g, v in zip(grads, variables, strict=True) if weight.is_complete(g)
        }
        complete |= self._new_values(grads, variables, weight)
        grads = [None if id(v) in complete else g for g, v in zip(grads, variables, strict=True)]
        grads = weighted(grads, weight, weight.fraction)
        if any(isinstance(grad, tf.IndexedSlices) for grad in grads):
            self._note_gather()
        return _with_complete(update.reduced(grads, variables), complete)

    def _new_values(
        self, grads: list[Any], variables: list[Any], weight: ReplicaWeight
    ) -> dict[int, tf.Tensor]:
        """New values that a step computes as gradients, such as float8's scales, by variable.

        They follow from maxima over the examples. So the maximum over replicas is the value of one
        process; Keras takes the maximum of accumulated ones, too.
        """
        pairs = [(g, v) for g, v in zip(grads, variables, strict=True) if g is not None]
        own = {id(v): g for g, v in pairs if v.overwrite_with_gradient}
        transport = self.reduction.transport
        if not own or transport.size == 1:
            return {}
        values = list(own.values())
        if weight.uneven:
            values = [_or_zeros(value, weight.examples > 0) for value in values]
        flat = flattened(values)
        size = flat.shape.num_elements()
        of_all = transport.gathered(flat, [size * n for n in range(transport.size + 1)])
        largest = tf.reduce_max(tf.reshape(of_all, [transport.size, size]), axis=0)
        return dict(zip(own, split_as(largest, values), strict=True))

    def gathered(self, slices: tf.IndexedSlices) -> tf.IndexedSlices:
        """The slices of all replicas, which layers gather within a step."""
        self._note_gather()
        (gathered,) = self.reduction.transport([slices])
        return gathered

    def reduced_slices(self, slices: tf.IndexedSlices) -> tf.IndexedSlices:
        """The sum of a sparse gradient over all replicas."""
        self._note_gather()
        (total,) = self.reduction([slices])
        return total

    def _note_gather(self) -> None:
        # TensorFlow's collectives need slices of one shape in all steps of a call; otherwise they
        # raise "Shape mismatch in the collective instance". The ring does not.
        self.gathers |= self.reduction.transport.ring is None

    # ------------------------------------------------------------ between steps

    def steps_to_next(self, step: int) -> int:
        """The most steps of a call after `step` steps of the epoch."""
        return sys.maxsize

    def after_steps(self, step: int) -> None:
        """Runs due exchanges after a step of the epoch, counted from 1. All tasks must call it."""

    def begin_epoch(self) -> None:
        """Starts an epoch, in which all replicas have the same weights."""

    def end_epoch(self) -> None:
        """Gives all replicas the same weights. All tasks must call it."""

    def is_settled(self, step: int, steps_per_epoch: int | None) -> bool:
        """Whether all replicas have the same weights after a step of the epoch."""
        return True

    def state(self, whole: bool) -> dict[str, Any]:
        """The tensors that a backup contains in addition to the model's. All tasks must call it.

        Args:
            whole: whether the chief gets the rows of all replicas, too; see `own_rows`.
        """
        return {}

    def own_rows(self) -> list[ReplicaRows]:
        """Rows of the state in which replicas differ, those of this task."""
        return []

    def restore(self, tensors: Mapping[str, Any]) -> None:
        """Restores a result of `state`. All tasks must call it."""

    def as_json(self) -> dict[str, Any]:
        """The entries of the position in a backup."""
        return {}


@contextlib.contextmanager
def _with_complete(reduced: Updates, complete: dict[int, Any]) -> Iterator[Any]:
    """Gradients and the variables that they update, with complete gradients by variable."""
    with reduced as (grads, variables):
        yield [complete.get(id(v), g) for g, v in zip(grads, variables, strict=True)], variables


def weighted(grads: list[Any], weight: ReplicaWeight, factor: tf.Tensor) -> list[Any]:
    """Gradients weighted for a sum over replicas; zeros on a replica without examples."""
    if not weight.loss_weighted:
        grads = scaled(grads, factor)
    if weight.uneven:
        present = weight.examples > 0
        grads = [_or_zeros(grad, present) for grad in grads]
    return grads


def _or_zeros(grad: Any, present: tf.Tensor) -> Any:
    """A gradient, or zeros if `present` is false; None stays None."""
    if grad is None:
        return None
    if isinstance(grad, tf.IndexedSlices):
        return tf.IndexedSlices(_or_zeros(grad.values, present), grad.indices, grad.dense_shape)
    return tf.cond(present, lambda: grad, lambda: tf.zeros_like(grad))
