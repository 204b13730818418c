"""The variables of a model on parameter servers.

    server_variables = ServerVariables(model, servers=2)
    server_variables.fetch()                  # copies their values into the user's model
    with models.substituted(pairs): ... # while a worker's function is traced, see `steps`

Three copies of a variable exist during training, and each has one purpose:

* the user's own `tf.Variable` on the coordinator: callbacks, validation, backups and exports read
  it. It gets the server variable's value at the end of each epoch (`fetch`);
* the server variable, which receives every update, and on whose server updates are computed;
* a local copy on each worker, which a step reads and differentiates. It gets the server variable's
  value at the beginning of each step.

A table (`tfmw.tables`) and its slots exist only once, on the servers. The variables of a
`HashTableEmbedding` are on the same servers, bucket by bucket.

A server's small variables are sent in one tensor (a `ServerPack`), because the number of messages
affects the time more than their bytes. A variable and its optimizer slots share a server, so an
update needs the gradient only. Every server has its own copy of the optimizer's scalars (the step
number, the learning rate).
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfmw.compat import models, placement, table_variables
from tfmw.compat.objects import contains, unique
from tfmw.compat.optimizers import (
    optimizer_slots,
    optimizers_of,
    variables_of,
    with_inner_optimizers,
)
from tfmw.errors import UsageError
from tfmw.tables.hash_table_embedding import HashTableEmbedding
from tfmw.tables.shards import BLOCK_BYTES, VariableShard, blocks, server
from tfmw.tables.table import is_table, table_of

logger = logging.getLogger("tfmw")

_COORDINATOR = "/job:chief/replica:0/task:0/device:CPU:0"

PACK_BYTES = 1 << 20
"""Largest variable, in bytes, that is sent together with others."""


@dataclasses.dataclass(frozen=True)
class ServerPack:
    """Variables of one server and dtype that are sent in one tensor; `is_single`: a large one."""

    server: int
    dtype: tf.DType
    variables: tuple[Any, ...]
    is_single: bool

    @property
    def sizes(self) -> list[int]:
        """Elements of each variable."""
        return [int(np.prod(v.shape)) for v in self.variables]

    def pack(self, tensors: Iterable[tf.Tensor]) -> tf.Tensor:
        """Concatenates the tensors of all variables: [elements of all variables]."""
        return tf.concat([tf.reshape(tf.cast(t, self.dtype), [-1]) for t in tensors], axis=0)

    def unpack(self, flat: tf.Tensor) -> dict[int, tf.Tensor]:
        """Inverse of `pack`: a tensor for each variable, by the variable's id."""
        parts = tf.split(flat, self.sizes) if len(self.sizes) > 1 else [flat]
        return {id(v): tf.reshape(p, v.shape) for v, p in zip(self.variables, parts, strict=True)}


class ServerVariables:
    """The variables of a model on the parameter servers.

    Args:
        model: a compiled and built model, with its optimizers built.
        servers: number of parameter servers.
        partition: (shape, dtype) -> number of shards, along the first axis.

    Raises:
        UsageError: an optimizer is not supported; see `refuse_unsupported`.
    """

    def __init__(
        self,
        model: keras.Model,
        servers: int,
        partition: Callable[[Sequence[int], tf.DType], int] = lambda shape, dtype: 1,
    ):
        self.model = model
        self.servers = servers
        self.optimizers = [optimizer for optimizer in optimizers_of(model) if optimizer.built]
        self.seeds = placement.seeds_of(model)
        self.trainable: list[Any] = list(model.trainable_variables)
        self.hash_tables = [
            layer
            for layer in models.layers_of(model)
            if isinstance(layer, HashTableEmbedding) and layer.built
        ]
        self.steps = [layer.step for layer in self.hash_tables]
        without = [*self.seeds, *self.steps]
        weights = unique(model.variables, without)
        updated = unique(models.state_variables_of(model), without)
        self.state = [
            v for v in updated if contains(v, weights) and not contains(v, self.trainable)
        ]
        self.frozen = [
            v for v in weights if not contains(v, self.trainable) and not contains(v, self.state)
        ]
        counts = {id(v): _shard_count(v, partition) for v in self.trainable}
        followers = {id(v): leader for v in weights if (leader := _leader(v)) is not v}
        counts |= {number: counts.get(id(leader), 1) for number, leader in followers.items()}
        self.divided = [v for v in weights if is_table(v) or counts.get(id(v), 1) > 1]
        refuse_unsupported(self.optimizers, self.divided)
        for variable in self.divided:
            if not is_table(variable) and id(variable) not in followers:
                logger.warning(
                    "%s is divided over the servers, and this process has all of its rows, too: "
                    "make the model after tfmw.strategies.parameter_server(...) and outside of "
                    "strategy.scope(), so that only the servers have them",
                    variable.path,
                )
        self._slots: dict[int, list[Any]] = {}
        for optimizer in self.optimizers:
            known = variables_of(optimizer)
            of_each = optimizer_slots(optimizer)
            for variable, slots in zip(known, of_each, strict=True):
                self._slots.setdefault(id(variable), []).extend(slots)
        self._load = [0] * servers
        self._shards: dict[int, list[VariableShard]] = {}
        # Large variables first, so that small ones even out the load. Tables exist already.
        by_size = sorted(weights, key=lambda v: (not is_table(v), -_bytes(v)))
        for variable in sorted(by_size, key=lambda v: id(v) in followers):
            self._shards[id(variable)] = self._place(variable, counts.get(id(variable), 1))
        # Scalars, on every server: each optimizer's step number and learning rate, and the steps of
        # hash tables, which each server counts.
        self.scalars: list[tuple[Any, list[tf.Variable]]] = []
        every = [v for optimizer in self.optimizers for v in optimizer.variables]
        slots = [slot for of_variable in self._slots.values() for slot in of_variable]
        for variable in [*unique(every, slots), *self.steps]:
            copies = [self._create(variable, s).variable for s in range(servers)]
            self.scalars.append((variable, copies))
        # One server counts: one that receives gradients, so that a count follows its update.
        self.home = self.shards(by_size[0])[0].server
        with tf.device(server(self.home)):
            self.tickets = models.own_variable(0, dtype=tf.int64, trainable=False, name="tickets")
            self.applied = models.own_variable(0, dtype=tf.int64, trainable=False, name="applied")
        self._weights = weights
        # Values, by id, that coordinator and servers share; no copy until one changes.
        self._known = {id(v): models.native(v).read_value() for v, _ in self.scalars}
        self._remember()

    # ------------------------------------------------------------ placing

    def _place(self, variable: Any, count: int) -> list[VariableShard]:
        shards = []
        for number, place in enumerate(self._places(variable, count)):
            slots = {id(s): self._held(s, number, place) for s in self.slots_of(variable)}
            shards.append(dataclasses.replace(self._held(variable, number, place), slots=slots))
        return shards

    def _places(self, variable: Any, count: int) -> Iterator[tuple[int, int, int]]:
        """Yields (server, start, stop) of each shard; 0 and 0 if the variable is not divided."""
        table, leader = table_of(variable), _leader(variable)
        if table is not None:
            yield from ((shard.server, shard.start, shard.stop) for shard in table.shards)
        elif leader is not variable:
            beside = functools.partial(_partitioning(variable).rows_beside, _partitioning(leader))
            for shard in self.shards(leader):
                rows = beside(shard.start, shard.stop) if shard.stop else (0, 0)
                yield shard.server, *rows
        else:
            for rows in _partitioning(variable).ranges(count) if count > 1 else [(0, 0)]:
                yield int(np.argmin(self._load)), *rows

    def _held(self, variable: Any, number: int, place: tuple[int, int, int]) -> VariableShard:
        """A shard of a variable or slot, which exists if it is a table."""
        table = table_of(variable)
        if table is None:
            return self._create(variable, *place)
        where, start, stop = place
        self._load[where] += (stop - start) * table.row_bytes
        return table.shards[number]

    def _create(self, variable: Any, where: int, start: int = 0, stop: int = 0) -> VariableShard:
        """Creates a shard on a server with the coordinator's values, sent in blocks."""
        own = models.native(variable)
        shape = own.shape.as_list()
        if stop:
            shape[0] = stop - start
        size = int(np.prod(shape)) * own.dtype.size
        self._load[where] += size
        with tf.device(server(where)):
            value = functools.partial(tf.zeros, shape, own.dtype)
            if size <= BLOCK_BYTES:
                value = own[start:stop] if stop else own.read_value()
            created = models.own_variable(value, trainable=own.trainable, name="server_variable")
        shard = VariableShard(created, where, start, stop)
        if size > BLOCK_BYTES:
            for a, b in blocks(start, start + shape[0], size // shape[0]):
                with tf.device(_COORDINATOR):
                    block = tf.gather(own, tf.range(a, b))
                shard.store(a, block)
        return shard

    def slots_of(self, variable: Any) -> list[Any]:
        """The optimizers' slots (Keras variables) of one trainable variable."""
        return self._slots.get(id(variable), [])

    def shards(self, variable: Any) -> list[VariableShard]:
        """The shards of a variable, in the order of its rows."""
        return self._shards[id(variable)]

    def shard(self, variable: Any) -> VariableShard:
        """The only shard of a variable that is not divided."""
        (shard,) = self._shards[id(variable)]
        return shard

    def packs(self, variables: Iterable[Any]) -> list[ServerPack]:
        """The packs of undivided variables; a large one is alone in its pack."""
        groups: dict[tuple[int, str, int | None], list[Any]] = {}
        for variable in variables:
            dtype = models.native(variable).dtype
            is_single = _bytes(variable) > PACK_BYTES or dtype in (tf.string, tf.bool)
            kind = self.shard(variable).server, dtype.name, id(variable) if is_single else None
            groups.setdefault(kind, []).append(variable)
        return [
            ServerPack(where, tf.as_dtype(name), tuple(members), single is not None)
            for (where, name, single), members in groups.items()
        ]

    # ------------------------------------------------------------ the coordinator's copies

    def fetch(self, weights: bool = True, slots: bool = False) -> None:
        """Copies the servers' values into the user's model, except those of tables.

        Args:
            weights: whether to copy the model's own variables.
            slots: whether to copy the optimizer's slots, which are as large as the model or larger.
        """
        for variable in unique(self.trainable + self.state):
            for shard in self.shards(variable):
                if weights and not is_table(variable):
                    _fetch(shard, variable)
                for slot in self.slots_of(variable) if slots else ():
                    if not is_table(slot):
                        _fetch(shard.slots[id(slot)], slot)
        counts = [*(optimizer.iterations for optimizer in self.optimizers), *self.steps]
        for variable, copies in self.scalars:
            if contains(variable, counts):
                models.native(variable).assign(copies[self.home].read_value())
                self._known[id(variable)] = models.native(variable).read_value()
        if weights:
            self._remember()

    def _remember(self) -> None:
        for variable in self._weights:
            if len(self.shards(variable)) == 1 and _bytes(variable) <= BLOCK_BYTES:
                self._known[id(variable)] = models.native(variable).read_value()

    def push(self) -> None:
        """Sends values that callbacks have changed on the coordinator: weights, the learning rate.

        Weights of more than 64 MB are not sent, as their comparison would cost too much.
        """
        known = [v for v in self._weights if id(v) in self._known]
        self._push([*self.scalars, *((v, [self.shard(v).variable]) for v in known)])

    def push_scalars(self) -> None:
        """Sends scalars that callbacks have changed on the coordinator: the learning rate."""
        self._push(self.scalars)

    def _push(self, held: list[tuple[Any, list[tf.Variable]]]) -> None:
        for variable, copies in held:
            own = models.native(variable).read_value()
            if not bool(tf.reduce_all(tf.equal(own, self._known[id(variable)]))):
                for copy in copies:
                    copy.assign(own)
                self._known[id(variable)] = own


# Optimizers whose update of an element depends on this element's gradient and slots, and on scalars
# that they do not change themselves.
_BY_ROW = (
    keras.optimizers.SGD,
    keras.optimizers.Adagrad,
    keras.optimizers.Adam,
    keras.optimizers.AdamW,
    keras.optimizers.RMSprop,
    keras.optimizers.Ftrl,
    keras.optimizers.Lion,
)


def refuse_unsupported(optimizers: list[Any], divided: list[Any]) -> None:
    """Raises UsageError for optimizers whose updates servers cannot compute separately.

    Args:
        divided: the Keras variables that are divided over servers.
    """
    for variable in divided:
        if variable.constraint is not None:
            raise UsageError(
                f"{variable.path} is divided over servers and has a constraint "
                f"({type(variable.constraint).__name__}), which would need all of its rows after "
                "each step: leave the constraint out, or the partitioner."
            )
    for optimizer in optimizers:
        name = type(optimizer).__name__
        if len(list(with_inner_optimizers(optimizer))) > 1:
            raise UsageError(
                f"received a {name}, which holds other optimizers: expected one optimizer for "
                "parameter servers; compile with it alone, in place of loss scaling with "
                'precision="mixed_bfloat16".'
            )
        if optimizer.gradient_accumulation_steps:
            raise UsageError(
                f"{name} has gradient_accumulation_steps={optimizer.gradient_accumulation_steps}: "
                "each worker of a parameter-server cluster updates by itself; use larger batches."
            )
        if optimizer.use_ema:
            raise UsageError(
                f"{name} has use_ema=True, which parameter servers cannot keep without losing "
                "updates: average the weights in a callback at the end of each epoch."
            )
        if divided and type(optimizer) not in _BY_ROW:
            names = [kind.__name__ for kind in _BY_ROW]
            raise UsageError(
                f"{name} cannot update variables that are divided over servers row by row: "
                f"expected {', '.join(names[:-1])} or {names[-1]}; or leave the partitioner out."
            )


def _partitioning(variable: Any) -> table_variables.Partitioning:
    """The partitioning of a variable among servers."""
    rows = int(variable.shape[0]) if len(variable.shape) else 0
    return table_variables.partitioning_of(variable) or table_variables.Partitioning(rows, 1)


def _leader(variable: Any) -> Any:
    """The Keras variable that determines the cuts of a variable; usually the variable itself."""
    follows = _partitioning(variable).follows
    return variable if follows is None else _leader(follows)


def _shard_count(variable: Any, partition: Callable[[Sequence[int], tf.DType], int]) -> int:
    count = partition(variable.shape.as_list(), models.native(variable).dtype)
    return min(count, max(1, _partitioning(variable).units))


def _fetch(shard: VariableShard, variable: Any) -> None:
    """Copies a shard's rows into the coordinator's variable, block by block."""
    own = models.native(variable)
    shape = shard.variable.shape.as_list()
    size = int(np.prod(shape)) * shard.dtype.size
    if not shard.stop and size <= BLOCK_BYTES:
        own.assign(shard.variable.read_value())
        return
    for a, b in blocks(0, shape[0], size // max(shape[0], 1)):
        with tf.device(server(shard.server)):
            # Reading a variable that had sparse updates copies it whole, while gathering rows does
            # not.
            block = shard.sparse_read(tf.range(a, b))
        with tf.device(_COORDINATOR):
            rows = tf.range(shard.start + a, shard.start + b)
            own.scatter_update(tf.IndexedSlices(tf.identity(block), rows))


def _bytes(variable: Any) -> int:
    own = models.native(variable)
    return int(np.prod(own.shape.as_list())) * max(1, own.dtype.size)
