"""A step's gradients on their way to the servers, and what these do with them.

    with taking_gradients(optimizer, take): ...       # optimizer.apply calls take(optimizer, grads)
    updates = to_servers.updates(optimizer, grads, fetched)  # by server, see `exchange`

Dense gradients of small variables are in one tensor. Of a variable whose rows stay on their servers
only the rows travel that a batch has, each once, those of all such variables together.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfmw.keras_compat import models, objects, optimizers, parameter_servers
from tfmw.parameter_server.lookups import Fetched, RowTransfer
from tfmw.parameter_server.updates import ServerUpdates, Update
from tfmw.parameter_server.variables import ServerPack, ServerVariables, contains
from tfmw.tables import MultiTableLookup, Route

Grads = list[tuple[Any, Any]]
"""(gradient, Keras variable), as an optimizer is given them."""


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


class GradientsToServers:
    """The updates that follow from the gradients of a worker's step.

    Args:
        server_variables: of the model.
        remote: the Keras variables whose rows stay on their servers.
        travel: how rows travel.
    """

    def __init__(self, server_variables: ServerVariables, remote: list[Any], travel: RowTransfer):
        self.server_variables = server_variables
        self._updates = ServerUpdates(server_variables)
        self._remote = remote
        self._travel = travel

    def updates(self, optimizer: Any, grads: Grads, fetched: Fetched) -> dict[int, list[Update]]:
        """By server, the updates of its variables.

        Args:
            optimizer: of these variables.
            fetched: the rows that the step has looked up.
        """
        todo: dict[int, list[Update]] = {n: [] for n in range(self.server_variables.servers)}
        for where, update in self._dense(optimizer, grads):
            todo[where].append(update)
        for where, update in self._rows(optimizer, grads, fetched):
            todo[where].append(update)
        return todo

    def _dense(self, optimizer: Any, grads: Grads) -> Iterator[tuple[int, Update]]:
        """(server, update) of variables that are whole on one server."""
        by_variable = {id(v): g for g, v in grads}
        here = [v for _, v in grads if not contains(v, self._remote)]

        def update_pack(pack: ServerPack, flat: tf.Tensor) -> None:
            parts = pack.unpack(flat).values()
            for variable, grad in zip(pack.variables, parts, strict=True):
                shard = self.server_variables.shard(variable)
                self._updates.update_whole(optimizer, shard, variable, grad)

        for pack in self.server_variables.all_packs(here):
            flat = pack.pack(by_variable[id(v)] for v in pack.variables)
            yield pack.server, ([flat], functools.partial(update_pack, pack))

    def _rows(self, optimizer: Any, grads: Grads, fetched: Fetched) -> Iterator[tuple[int, Update]]:
        """(server, update) of the variables whose rows stay on their servers."""
        updates, shards_of = self._updates, self.server_variables.shards
        together: dict[Any, Grads] = {}
        for grad, variable in grads:
            if not contains(variable, self._remote):
                continue
            if not isinstance(grad, tf.IndexedSlices):
                for shard in shards_of(variable):
                    part = grad[shard.start : shard.stop] if shard.stop else grad
                    update = functools.partial(updates.update_whole, optimizer, shard, variable)
                    yield shard.server, ([part], update)
            elif updates.by_rows_alone(optimizer, variable):
                decays = optimizers.uses_weight_decay(optimizer, variable)
                kind = grad.dtype, tuple(variable.shape[1:]), decays
                together.setdefault(kind, []).append((grad, variable))
            else:
                (shard,) = shards_of(variable)
                route = MultiTableLookup([[shard]]).route([_ids(grad)])
                own, ids = route.send([grad.values])[shard.server], route.asked[shard.server][1]
                every = functools.partial(updates.update_every_row, optimizer, shard, variable)
                yield shard.server, ([own, ids], every)
        for grads_together in together.values():
            members, group, route = self._route(grads_together, fetched)
            rows = route.send([grad.values for grad, _ in members])
            for where, (sizes, ids) in route.asked.items():
                shards = [(members[number][1], shard) for number, shard in group.shards[where]]
                of_rows = functools.partial(updates.update_rows, optimizer, shards)
                sent = tf.cast(rows[where], self._travel.sent_as(rows[where].dtype))
                yield where, ([sizes, ids, sent], of_rows)

    def _route(self, grads: Grads, fetched: Fetched) -> tuple[Grads, MultiTableLookup, Route]:
        """The route of gradients: as a rule that of the rows that were fetched for the step.

        Returns:
            (the gradients in the order of the group, their tables, their way).
        """
        by_variable = {id(variable): (grad, variable) for grad, variable in grads}
        for variables, ids, group, route in fetched.groups:
            # Layers are called in any order, also in the reverse of their variables'.
            ordered = [by_variable[id(v)] for v in variables if id(v) in by_variable]
            if len(ordered) == len(variables) == len(grads) and all(
                grad.indices is own for (grad, _), own in zip(ordered, ids, strict=True)
            ):
                return ordered, group, route
        group = MultiTableLookup([self.server_variables.shards(variable) for _, variable in grads])
        return grads, group, group.route([_ids(grad) for grad, _ in grads])


def _densified(grad: Any, variable: Any) -> Any:
    """Makes sparse gradients of small variables dense."""
    if isinstance(grad, tf.IndexedSlices) and not isinstance(
        models.native(variable), parameter_servers.RemoteRows
    ):
        return tf.convert_to_tensor(grad)
    return grad


def _ids(grad: tf.IndexedSlices) -> tf.Tensor:
    return tf.cast(grad.indices, tf.int64)
