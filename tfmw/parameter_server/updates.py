"""The computation of a parameter server for a step: updates of its variables.

    updates = ServerUpdates(server_variables)
    with tf.device(server(index)):
        updates.run(index, optimizer, [([gradient], update), ...])

The user's own optimizer computes each update. While it runs, its Keras variables hold the server's
variables and slots (`models.substituted`), or some of their rows (`ServerRows`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfmw.keras_compat import models, optimizers
from tfmw.parameter_server.sharded_gradients import ServerRows
from tfmw.parameter_server.variables import ServerVariables, contains
from tfmw.tables import VariableShard

Update = tuple[list[tf.Tensor], Callable[..., None]]
"""(tensors that a worker sent, what updates a server's variables with them)."""


class ServerUpdates:
    """Updates of the variables of one model, traced into ops that run on their servers.

    Args:
        server_variables: the model's variables on the servers.
    """

    def __init__(self, server_variables: ServerVariables):
        self.server_variables = server_variables

    def run(self, where: int, optimizer: Any, updates: list[Update]) -> None:
        """Makes the updates of one step on server `where`, and counts the step there.

        Each server has its own copies of the optimizer's scalars: the step number and the learning
        rate.
        """
        scalars = [
            (v, ReadOnlyScalar(copies[where])) for v, copies in self.server_variables.scalars
        ]
        stable = optimizers.stable_variable_keys(optimizer, self.server_variables.trainable)
        with stable, models.substituted(scalars):
            for tensors, update in updates:
                update(*tensors)
        for variable, copies in self.server_variables.scalars:
            if variable is optimizer.iterations:
                copies[where].assign_add(1)

    def update_whole(self, optimizer: Any, shard: VariableShard, variable: Any, grad: Any) -> None:
        """Updates a shard with a dense gradient of its shape, as `optimizer.apply` would."""
        slots = self.server_variables.slots_of(variable)
        pairs = [(variable, shard.variable), *((s, shard.slots[id(s)]) for s in slots)]
        with tf.control_dependencies(shard.mark_changed()):
            _apply(optimizer, variable, grad, pairs)
        if variable.constraint is not None:
            shard.variable.assign(variable.constraint(shard.variable.read_value()))

    def update_rows(
        self,
        optimizer: Any,
        shards: Sequence[tuple[Any, VariableShard]],
        sizes: tf.Tensor,
        ids: tf.Tensor,
        rows: tf.Tensor,
    ) -> None:
        """Updates some rows of shards, these only, whatever the optimizer.

        Args:
            optimizer: the optimizer of the variables.
            shards: (Keras variable, shard that has its rows on this server), of one shape and type
                of a row; see `tfmw.tables.MultiTableLookup`.
            sizes: int64 [shards], how many rows of each.
            ids: int64 [n], the rows, counted from the start of their shard, each at most once.
            rows: [n, ...], their gradients, perhaps in a shorter type.
        """
        rows = tf.cast(rows, shards[0][1].variable.dtype)
        each = tf.split(ids, sizes, num=len(shards)) if len(shards) > 1 else [ids]
        slots = [self.server_variables.slots_of(variable) for variable, _ in shards]
        own = [shard for _, shard in shards]
        trues = tf.split(tf.fill(tf.shape(ids), True), sizes, num=len(shards))
        marked = [
            op
            for shard, where, true in zip(own, each, trues, strict=True)
            for op in shard.mark_changed(where, true)
        ]
        with tf.control_dependencies(marked):
            pairs: list[tuple[Any, Any]] = [
                (shards[0][0], ServerRows([shard.variable for shard in own], each, sizes))
            ]
            for number, slot in enumerate(slots[0]):
                held = [shard.slots[id(of[number])] for shard, of in zip(own, slots, strict=True)]
                pairs.append((slot, ServerRows(held, each, sizes)))
            _apply(optimizer, shards[0][0], rows, pairs)

    def update_every_row(
        self, optimizer: Any, shard: VariableShard, variable: Any, rows: tf.Tensor, ids: tf.Tensor
    ) -> None:
        """Updates a whole shard, of which some rows have gradients, as Keras does: all slots decay.

        Args:
            rows, ids: as of `update_rows`.
        """
        shape = shard.variable.shape.as_list()
        dense = tf.math.unsorted_segment_sum(rows, ids, shape[0])
        self.update_whole(optimizer, shard, variable, tf.ensure_shape(dense, shape))

    def by_rows_alone(self, optimizer: Any, variable: Any) -> bool:
        """Whether an update of a variable changes no rows but those with a gradient."""
        is_divided = contains(variable, self.server_variables.divided)
        return is_divided or optimizers.updates_rows_alone(optimizer)


def _apply(optimizer: Any, variable: Any, grad: Any, pairs: list[tuple[Any, Any]]) -> None:
    """Weight decay and the optimizer's own update.

    Args:
        pairs: (Keras variable or slot, what holds its values or rows here); `variable` first.
    """
    with models.substituted(pairs):
        rate = optimizers.current_learning_rate(optimizer)
        if optimizers.uses_weight_decay(optimizer, variable):
            values = pairs[0][1]
            decay = tf.cast(optimizer.weight_decay, values.dtype)
            values.assign_sub(tf.convert_to_tensor(values) * decay * tf.cast(rate, values.dtype))
        optimizer.update_step(grad, variable, rate)


class ReadOnlyScalar:
    """A scalar of the optimizer during a step: updates read it, only `ServerUpdates.run` counts.

    Args:
        copy: that has it, on a server.
        value: of `copy`, if it has been read.
    """

    def __init__(self, copy: tf.Variable, value: tf.Tensor | None = None):
        self._copy = copy
        self._value = value
        self.dtype = copy.dtype
        self.shape = copy.shape
        self._unique_id = copy._unique_id

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> tf.Tensor:
        value = self._copy.read_value() if self._value is None else self._value
        return tf.convert_to_tensor(value, dtype=dtype, name=name)

    def assign(self, value: Any) -> None:
        """Ignores Keras's own count of the step; see `ServerUpdates.run`."""
