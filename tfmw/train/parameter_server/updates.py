"""The updates of a step: gradients on their way to servers, and the updates made there.

    with taking_gradients(optimizer, take): ...       # optimizer.apply calls take(optimizer, grads)
    updates = Updates(server_variables, remote, travel)
    by_server = updates.of_gradients(optimizer, grads, fetched)        # on a worker, see `exchange`
    updates.run(index, optimizer, [([gradient], update), ...])         # on a server

The user's own optimizer computes each update, on the server. While it runs, its Keras variables
hold the server's variables and slots (`models.substituted`), or some of their rows (`ServerRows`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfmw.compat import models, objects, optimizers, parameter_servers
from tfmw.compat.objects import contains
from tfmw.tables.shards import MultiTableLookup, Route, VariableShard
from tfmw.train.parameter_server.lookups import Fetched, RowTransfer
from tfmw.train.parameter_server.variables import ServerPack, ServerVariables

Grads = list[tuple[Any, Any]]
"""(gradient, Keras variable), in the form in which an optimizer gets them."""

Update = tuple[list[tf.Tensor], Callable[..., None]]
"""(tensors that a worker sends, function that updates a server's variables with them)."""

StepUpdates = dict[int, list[Update]]
"""Server -> updates of one step, in order."""


@contextlib.contextmanager
def taking_gradients(optimizer: Any, take: Callable[[Any, Grads], None]) -> Iterator[None]:
    """Makes `optimizer.apply` call `take(optimizer, grads)`, in place of its own update."""
    keras_apply = optimizer.apply

    def apply(grads: Any, trainable_variables: Any = None) -> None:
        variables = trainable_variables
        if variables is None:
            variables = optimizers.variables_of(optimizer)
        dense = [_densified(g, v) for g, v in zip(grads, variables, strict=True)]
        keras_apply(dense, trainable_variables)

    def update_step(grads: Any, variables: Any, learning_rate: Any) -> None:
        del learning_rate  # each server computes its own
        take(optimizer, list(zip(grads, variables, strict=True)))

    overrides: list[tuple[Any, str, Any]] = [
        (optimizer, "apply", apply),
        (optimizer, "_backend_update_step", update_step),
        (optimizer, "_apply_weight_decay", lambda variables: None),
    ]
    with objects.overridden(overrides):
        yield


@dataclasses.dataclass(frozen=True, eq=False)
class Updates:
    """Updates of the variables of one model."""

    server_variables: ServerVariables
    remote: list[Any]  # Keras variables whose rows stay on their servers
    travel: RowTransfer

    # ------------------------------------------------------------ on a worker

    def of_gradients(self, optimizer: Any, grads: Grads, fetched: Fetched) -> dict[int, Update]:
        """Server -> update from the gradients of a worker's step.

        All servers count the step, but not before the gradients exist: each gets a tensor that
        depends on them.

        Args:
            fetched: the rows that the step has looked up.
        """
        todo: StepUpdates = {where: [] for where in range(self.server_variables.servers)}
        dense, rows = self._dense(optimizer, grads), self._rows(optimizer, grads, fetched)
        for where, update in itertools.chain(dense, rows):
            todo[where].append(update)
        found: dict[int, Update] = {}
        for where, updates in todo.items():
            sent = [tensor for tensors, _ in updates for tensor in tensors]
            if not sent:
                gradient = grads[0][0]
                is_sparse = isinstance(gradient, tf.IndexedSlices)
                sent = [tf.cast(tf.size(gradient.values if is_sparse else gradient), tf.int64)]
            found[where] = sent, functools.partial(self.run, where, optimizer, updates)
        return found

    def _dense(self, optimizer: Any, grads: Grads) -> Iterator[tuple[int, Update]]:
        """(server, update) of variables that are whole on one server."""
        by_variable = {id(v): g for g, v in grads}
        here = [v for _, v in grads if not contains(v, self.remote)]

        for pack in self.server_variables.packs(here):
            flat = pack.pack(by_variable[id(v)] for v in pack.variables)
            yield pack.server, ([flat], functools.partial(self.update_pack, optimizer, pack))

    def _rows(self, optimizer: Any, grads: Grads, fetched: Fetched) -> Iterator[tuple[int, Update]]:
        """(server, update) of the variables whose rows stay on their servers."""
        by_kind: dict[Any, Grads] = {}
        for grad, variable in grads:
            if not contains(variable, self.remote):
                continue
            if not isinstance(grad, tf.IndexedSlices):
                for shard in self.server_variables.shards(variable):
                    part = grad[shard.start : shard.stop] if shard.stop else grad
                    update = functools.partial(self.update_whole, optimizer, shard, variable)
                    yield shard.server, ([part], update)
                continue
            only_rows = optimizers.updates_rows_alone(optimizer) or contains(
                variable, self.server_variables.divided
            )
            decays = optimizers.uses_weight_decay(optimizer, variable)
            kind = (grad.dtype, *variable.shape[1:], decays) if only_rows else id(variable)
            by_kind.setdefault((only_rows, kind), []).append((grad, variable))
        for (only_rows, _), grads_of_kind in by_kind.items():
            members, group, route = self._route(grads_of_kind, fetched)
            rows = route.send([grad.values for grad, _ in members])
            method = self.update_rows if only_rows else self.update_every_row
            for where, (sizes, ids) in route.asked.items():
                shards = [(members[number][1], shard) for number, shard in group.shards[where]]
                sent = tf.cast(rows[where], self.travel.sent_as(rows[where].dtype))
                yield where, ([sizes, ids, sent], functools.partial(method, optimizer, shards))

    def _route(self, grads: Grads, fetched: Fetched) -> tuple[Grads, MultiTableLookup, Route]:
        """The route of gradients: usually the one of the rows that the step has fetched.

        Returns:
            (the gradients in the order of the group, their tables, their way).
        """
        by_variable = {id(variable): (grad, variable) for grad, variable in grads}
        for variables, ids, group, route in fetched.groups:
            # Layers are called in any order, for example the reverse of their variables' order.
            ordered = [by_variable[id(v)] for v in variables if id(v) in by_variable]
            if len(ordered) == len(variables) == len(grads) and all(
                grad.indices is own for (grad, _), own in zip(ordered, ids, strict=True)
            ):
                return ordered, group, route
        group = MultiTableLookup([self.server_variables.shards(variable) for _, variable in grads])
        return grads, group, group.route([_ids(grad) for grad, _ in grads])

    # ------------------------------------------------------------ on a server

    def run(self, where: int, optimizer: Any, updates: list[Update], *sent: tf.Tensor) -> None:
        """Makes an optimizer's updates of one step on server `where`, and counts the step there.

        Each server has its own copies of the optimizer's scalars: the step number and the learning
        rate.

        Args:
            sent: the tensors of these updates, as received.
        """
        scalars = [
            (v, ReadOnlyScalar(copies[where])) for v, copies in self.server_variables.scalars
        ]
        stable = optimizers.stable_variable_keys([optimizer], self.server_variables.trainable)
        arrived = iter(sent)
        with stable, models.substituted(scalars):
            for tensors, update in updates:
                update(*itertools.islice(arrived, len(tensors)))
        for variable, copies in self.server_variables.scalars:
            if variable is optimizer.iterations:
                copies[where].assign_add(1)

    def update_pack(self, optimizer: Any, pack: ServerPack, flat: tf.Tensor) -> None:
        """Updates the variables of a bucket with their gradients."""
        parts = pack.unpack(flat).values()
        for variable, grad in zip(pack.variables, parts, strict=True):
            self.update_whole(optimizer, self.server_variables.shard(variable), variable, grad)

    def _pairs(self, variable: Any, shard: VariableShard) -> list[tuple[Any, VariableShard]]:
        """(Keras variable or slot, its shard); `variable` first."""
        slots = self.server_variables.slots_of(variable)
        return [(variable, shard), *((s, shard.slots[id(s)]) for s in slots)]

    def update_whole(self, optimizer: Any, shard: VariableShard, variable: Any, grad: Any) -> None:
        """Updates a shard with a dense gradient of its shape, as `optimizer.apply` would."""
        if not shard.is_alone:
            ids = tf.range(shard.stop - shard.start, dtype=tf.int64)
            self.update_rows(optimizer, [(variable, shard)], tf.shape(ids), ids, grad)
            return
        pairs = self._pairs(variable, shard)
        with tf.control_dependencies(shard.mark_changed()):
            _apply(optimizer, variable, grad, [(each, own.variable) for each, own in pairs])
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
        """Updates only some rows of shards, for any optimizer.

        Args:
            shards: (Keras variable, shard that has its rows on this server), with rows of one shape
                and type; see `MultiTableLookup`.
            sizes: int64 [shards], number of rows of each.
            ids: int64 [n], the rows, relative to the start of their shard, distinct.
            rows: [n, ...], their gradients, perhaps in a shorter wire dtype.
        """
        rows = tf.cast(rows, shards[0][1].variable.dtype)
        each = tf.split(ids, sizes, num=len(shards)) if len(shards) > 1 else [ids]
        trues = tf.split(tf.fill(tf.shape(ids), True), sizes, num=len(shards))
        marked = [
            op
            for (_, shard), where, true in zip(shards, each, trues, strict=True)
            for op in shard.mark_changed(where, true)
        ]
        with tf.control_dependencies(marked):
            pairs = [  # the variables of all shards, then their slots of each kind
                (of_kind[0][0], ServerRows([held for _, held in of_kind], each, sizes))
                for of_kind in zip(*itertools.starmap(self._pairs, shards), strict=True)
            ]
            _apply(optimizer, shards[0][0], rows, pairs)

    def update_every_row(
        self,
        optimizer: Any,
        shards: Sequence[tuple[Any, VariableShard]],
        sizes: tf.Tensor,
        ids: tf.Tensor,
        rows: tf.Tensor,
    ) -> None:
        """Updates a whole variable from gradients of some rows, as Keras does: all slots decay.

        Args:
            shards: the only one; see `update_rows` for the others.
        """
        del sizes
        ((variable, shard),) = shards
        shape = shard.variable.shape.as_list()
        dense = tf.math.unsorted_segment_sum(tf.cast(rows, shard.dtype), ids, shape[0])
        self.update_whole(optimizer, shard, variable, tf.ensure_shape(dense, shape))


def _apply(optimizer: Any, variable: Any, grad: Any, pairs: list[tuple[Any, Any]]) -> None:
    """Runs weight decay and the optimizer's own update.

    Args:
        pairs: (Keras variable or slot, holder of its values or rows here); `variable` first.
    """
    with models.substituted(pairs):
        rate = optimizers.current_learning_rate(optimizer)
        if optimizers.uses_weight_decay(optimizer, variable):
            values = pairs[0][1]
            decay = tf.cast(optimizer.weight_decay, values.dtype)
            values.assign_sub(tf.convert_to_tensor(values) * decay * tf.cast(rate, values.dtype))
        optimizer.update_step(grad, variable, rate)


class ServerRows:
    """Some rows of a server's variables, in place of a variable during an optimizer's update.

    Assignments change these rows in place; other rows are neither read nor written. One update of
    all of them is the same arithmetic as an update of each, in fewer ops. If a row occurs several
    times in a batch, the worker adds its gradients. So a server receives each row at most once in a
    step.

    Args:
        shards: shards on the server that runs this; their rows have one shape and type.
        ids: for each shard int64 [n], distinct rows.
        sizes: integers [shards], number of ids of each.
    """

    def __init__(self, shards: Sequence[VariableShard], ids: Sequence[tf.Tensor], sizes: tf.Tensor):
        of_each = list(zip(shards, ids, strict=True))
        self._variables = [shard.variable for shard in shards]
        self._sizes = sizes
        self._places = [shard.places(own) for shard, own in of_each]
        # Read even if an update only adds: a gather prefetches rows into the cache, while a scatter
        # would wait for each.
        self._rows = tf.concat([shard.sparse_read(own) for shard, own in of_each], axis=0)
        self.dtype = shards[0].dtype
        self._unique_id = shards[0].variable._unique_id

    @property
    def shape(self) -> tf.TensorShape:
        """[n, ...], the rows of all variables."""
        return self._rows.shape

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> tf.Tensor:
        return tf.convert_to_tensor(self._rows, dtype=dtype, name=name)

    def assign(self, value: tf.Tensor) -> None:
        self._rows = tf.identity(value)
        self._scatter("scatter_update", value)

    def assign_add(self, value: tf.Tensor) -> None:
        self._rows = self._rows + value
        self._scatter("scatter_add", value)

    def assign_sub(self, value: tf.Tensor) -> None:
        self._rows = self._rows - value
        self._scatter("scatter_sub", value)

    def _scatter(self, method: str, value: tf.Tensor) -> None:
        """Calls a method of each variable with its rows of `value`."""
        each = self._places
        parts = tf.split(value, self._sizes, num=len(each)) if len(each) > 1 else [value]
        for variable, part, own in zip(self._variables, parts, each, strict=True):
            getattr(variable, method)(tf.IndexedSlices(part, own))


class ReadOnlyScalar:
    """A scalar of the optimizer during a step: updates read it, and only `Updates.run` counts.

    `copy` is its variable on a server; `value` is that of `copy`, if it has been read.
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
        """Ignores Keras's own count of the step; see `Updates.run`."""


def _densified(grad: Any, variable: Any) -> Any:
    """Converts sparse gradients of small variables to dense ones."""
    if isinstance(grad, tf.IndexedSlices) and not isinstance(
        models.native(variable), parameter_servers.RemoteRows
    ):
        return tf.convert_to_tensor(grad)
    return grad


def _ids(grad: tf.IndexedSlices) -> tf.Tensor:
    return tf.cast(grad.indices, tf.int64)
