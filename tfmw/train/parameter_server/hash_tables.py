"""`HashTableEmbedding` on parameter servers: each server has some of the layer's buckets.

    table = ServedHashTable(layer, server_variables, one_op, travel, workers=2)
    rows = table.look_up(ids, is_step=True)           # in place of the layer's own, in a step

When a layer looks up rows in a step, the worker sends each of the layer's servers one message: the
unique ids of the batch that belong to its buckets, and the number of occurrences of each. The
server runs a `Part` of `tfmw.tables.hash_table` on its buckets, so ids get rows there. It answers
with the row of each id, and its values. Gradients are sent like those of all rows, see `updates`.

Every worker's batch is a step of its own, one after the other on each server, and all servers count
it, even without ids. With one worker the result is that of one process. A worker computes while
others make steps. So ids of the last steps, one for each other worker, cannot lose their rows. If a
worker is slower than that, another id may have taken a row before its gradient arrives. The
gradient then updates the row of that id.
"""

from __future__ import annotations

import functools
import uuid
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfmw.compat import models, parameter_servers, table_variables
from tfmw.tables.hash_table import Part, bucket_of, counted
from tfmw.tables.hash_table_embedding import HashTableEmbedding
from tfmw.tables.shards import server
from tfmw.train.parameter_server.exchange import pack, unpack
from tfmw.train.parameter_server.lookups import RowTransfer
from tfmw.train.parameter_server.variables import ServerVariables

_SENT = [
    tf.TensorSpec([None], tf.int64),
    tf.TensorSpec([None], tf.int64),
    tf.TensorSpec([], tf.int64),
]
"""The message to a server: its ids of a batch, their counts, and whether the batch has any ids."""


class ServedHashTable:
    """A hash table of a model, in the steps of a worker.

    Args:
        one_op: (key, function, whether it waits) -> the function as one op, the same op in each
            step.
        workers: number of workers, each of which may be in a step.
    """

    def __init__(
        self,
        layer: HashTableEmbedding,
        server_variables: ServerVariables,
        one_op: Callable[..., Callable[..., Any]],
        travel: RowTransfer,
        workers: int,
    ):
        self.layer = layer
        self._one_op = one_op
        self._travel = travel
        self._parts = [
            _ServerPart(layer, server_variables, number, kept_steps=workers - 1)
            for number in range(len(server_variables.shards(layer.embeddings)))
        ]

    def look_up(self, ids: tf.Tensor, is_step: bool) -> tf.Tensor:
        """Looks ids up on the servers, while a step is traced; see `HashTableEmbedding.look_up`."""
        rows: parameter_servers.RemoteRows = models.native(self.layer.embeddings)
        found: tf.Tensor = rows.rows_found(functools.partial(self._found, ids, is_step))
        return found

    def _found(self, ids: tf.Tensor, is_step: bool) -> tuple[tf.Tensor, tf.Tensor]:
        """(values [n, output_dim], rows int64 [n]) of ids int64 [n], from the servers."""
        key = "hash table", id(self.layer)
        sent, places, positions = self._one_op((*key, "divide"), self._divided)(ids)
        own_type = models.native(self.layer.embeddings).dtype
        travels_as = self._travel.sent_as(own_type)
        specs = [
            tf.TensorSpec([None], tf.int64),
            tf.TensorSpec([None, self.layer.output_dim], travels_as),
        ]
        answers = []
        for part, message in zip(self._parts, sent, strict=True):
            step = functools.partial(part.answer, is_step, travels_as)
            with tf.device(server(part.server)):
                answer = self._one_op((*key, part.number, is_step), step, waits=True)(message)
            answers.append(unpack(tf.identity(answer), specs))
        rows, values = self._one_op((*key, "joined"), _joined)(answers, places, positions)
        return tf.cast(values, own_type), rows

    def _divided(self, ids: tf.Tensor) -> tuple[list[tf.Tensor], list[tf.Tensor], tf.Tensor]:
        """Divides the ids of a batch among the parts; on a worker.

        Returns:
            (the message to each part; where its ids are among the distinct ids, int32 [n]; where
            each id is among them, int32).
        """
        distinct, counts = counted(ids, tf.ones_like(ids))
        positions = tf.searchsorted(distinct, ids)
        starts = tf.constant([part.first_bucket for part in self._parts[1:]], tf.int64)
        owners = tf.searchsorted(starts, bucket_of(self.layer, distinct), side="right")
        number = len(self._parts)
        own = tf.dynamic_partition(distinct, owners, number)
        own_counts = tf.dynamic_partition(counts, owners, number)
        places = tf.dynamic_partition(tf.range(tf.size(distinct)), owners, number)
        has_ids = tf.cast(tf.size(ids) > 0, tf.int64)
        sent = [pack([*of, has_ids]) for of in zip(own, own_counts, strict=True)]
        return sent, places, positions


def _joined(
    answers: list[list[tf.Tensor]], places: list[tf.Tensor], positions: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """(rows int64 [n], values [n, output_dim]) from the answers of all parts; on a worker."""
    (first_rows, first_values), *others = answers
    rows = tf.concat([first_rows[1:], *(own for own, _ in others)], axis=0)
    values = tf.concat([first_values[1:], *(own for _, own in others)], axis=0)
    of_id = tf.gather(tf.math.invert_permutation(tf.concat(places, axis=0)), positions)
    rows, values = tf.gather(rows, of_id), tf.gather(values, of_id)
    return rows, tf.where(tf.equal(rows, 0)[:, None], first_values[:1], values)


class _ServerPart:
    """The buckets of a layer that are in shard `number` of its rows, from `first_bucket` on."""

    def __init__(
        self,
        layer: HashTableEmbedding,
        server_variables: ServerVariables,
        number: int,
        kept_steps: int,
    ):
        rows = server_variables.shards(layer.embeddings)[number]
        partitioning = table_variables.partitioning_of(layer.embeddings)
        assert partitioning is not None
        self.number = number
        self.server = rows.server
        self.first_bucket = partitioning.units_of(rows.start, rows.stop)[0] if rows.stop else 0
        self._part = Part(layer, self.first_bucket, kept_steps)
        self._held: list[tuple[Any, Any]] = [
            (variable, server_variables.shards(variable)[number])
            for variable in layer.weights
            if variable is not layer.step
        ]
        steps = next(copies for v, copies in server_variables.scalars if v is layer.step)
        self._held.append((layer.step, steps[rows.server]))
        slots = server_variables.slots_of(layer.embeddings)
        # a row's mark, which its slots share, is that of its values
        self._held += [(slot, rows.slots[id(slot)].variable) for slot in slots]
        with tf.device(server(self.server)):
            self._turn = tf.CriticalSection(shared_name=f"tfmw_hash_table_{uuid.uuid4().hex}")

    def answer(self, is_step: bool, dtype: tf.DType, message: tf.Tensor) -> tf.Tensor:
        """Answers a worker's lookup on the server, while no other one runs.

        Args:
            is_step: whether ids may get rows first.
            dtype: in which the values are sent.
            message: `_SENT`, packed.

        Returns:
            Packed: rows int64 [n], of the whole; values [n, output_dim] of them. Those of the first
            shard begin with row 0, which ids of all shards have that have no row of their own.
        """

        def run(message: tf.Tensor) -> tf.Tensor:
            ids, counts, has_ids = unpack(message, _SENT)
            with models.substituted(self._held):
                if is_step:
                    self._part.step(ids, counts, has_ids > 0)
                rows = self._part.rows(ids)
                if not self.number:
                    rows = tf.concat([tf.zeros([1], tf.int64), rows], axis=0)
                return pack([rows, tf.cast(self._part.values(rows), dtype)])

        # Within a part one thread runs all ops; only the wait for the turn is outside.
        answers = parameter_servers.one_op(run, waits=False)
        answer: tf.Tensor = self._turn.execute(
            lambda: answers(message), exclusive_resource_access=False
        )
        return answer
