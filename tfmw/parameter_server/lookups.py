"""The rows that a step looks up, asked for before it, those of all layers at once.

    plan = plan_lookups(trace, batch_spec, shards_of)  # once, before steps are traced
    asked = plan.asked(batch)                          # while a step is traced
    rows = plan.answer(where, asked.sent[where])       # on each server
    fetched = plan.fetched(asked, answers)             # on the worker
    fetched.rows(variable, ids)                        # when the step looks up; None: not fetched

A layer asks for its rows when it is called, one layer after the other. But which rows it asks for
usually follows from the batch: a step is traced once to see the ops between the batch and the ids
of each lookup. If these are plain ops, copies of them run first, for all lookups. A lookup of other
ids (drawn at random, or computed from weights) fetches its rows when it happens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from tfmw.keras_compat import models, parameter_servers
from tfmw.parameter_server import packed_tensors
from tfmw.parameter_server.batch_ops import copied_ops, ops_between
from tfmw.tables import MultiTableLookup, Route, VariableShard


@dataclasses.dataclass(frozen=True)
class RowTransfer:
    """How rows and their gradients travel between workers and servers.

    Attributes:
        prefetch: for how many steps ahead rows are fetched, 0 or 1.
        compression: "bf16", or None for the rows' own type.
    """

    prefetch: int = 0
    compression: str | None = None

    def sent_as(self, dtype: tf.DType) -> tf.DType:
        """The type in which rows of this type are sent."""
        return tf.bfloat16 if self.compression == "bf16" and dtype.is_floating else dtype


@dataclasses.dataclass(frozen=True)
class Lookup:
    """A lookup whose ids follow from the batch.

    Attributes:
        variable: whose rows it takes.
        ids: int64 [n], in the graph of the plan.
        shards: of the variable.
    """

    variable: Any
    ids: tf.Tensor
    shards: Sequence[VariableShard]


class Plan:
    """The lookups of a step that are known from its batch.

    Args:
        batch: the tensors of the batch, in the graph that was traced.
        lookups: with ids in that graph.
        travel: how rows travel.
    """

    def __init__(
        self, batch: list[tf.Tensor], lookups: list[Lookup], travel: RowTransfer | None = None
    ):
        self._batch = batch
        self._travel = travel or RowTransfer()
        self._groups: list[tuple[list[Lookup], MultiTableLookup]] = []
        for members in _of_one_kind(lookups):
            self._groups.append((members, MultiTableLookup([member.shards for member in members])))
        self._prepared = parameter_servers.one_op(self._prepare, waits=False)
        self._servers = sorted({where for _, group in self._groups for where in group.shards})

    def asked(self, batch: Any) -> LookupRequest:
        """The requests to servers; call it while steps are traced, with a batch of them."""
        leaves = tf.nest.flatten(batch, expand_composites=True)
        if not self._groups:
            return LookupRequest(leaves, [], [], {})
        ids, tensors, sent = self._prepared(leaves)
        return LookupRequest(leaves, ids, tensors, dict(zip(self._servers, sent, strict=True)))

    def _prepare(
        self, leaves: list[tf.Tensor]
    ) -> tuple[list[list[tf.Tensor]], list[Any], list[tf.Tensor]]:
        """(ids of the lookups, tensors of their route) of each group, and what servers are sent."""
        wanted = [member.ids for members, _ in self._groups for member in members]
        copies = iter(copied_ops(self._batch, wanted, leaves))
        ids = [[next(copies) for _ in members] for members, _ in self._groups]
        groups = [group for _, group in self._groups]
        tensors = [group.route_tensors(own) for group, own in zip(groups, ids, strict=True)]
        routes = [group.route_of(each) for group, each in zip(groups, tensors, strict=True)]
        sent = [
            tf.concat([part for route in routes for part in route.asked.get(where, ())], axis=0)
            for where in self._servers
        ]
        return ids, tensors, sent

    def specs(self, where: int) -> list[tf.TensorSpec]:
        """Of what a server answers."""
        first = [group.shards[where][0][1] for _, group in self._groups if where in group.shards]
        specs = [packed_tensors.spec_of(shard.variable) for shard in first]
        return [tf.TensorSpec(spec.shape, self._travel.sent_as(spec.dtype)) for spec in specs]

    def answer(self, where: int, sent: tf.Tensor) -> list[tf.Tensor]:
        """On a server: the rows that were asked for, of each group that has some there."""
        found = []
        for _, group in self._groups:
            shards = [shard for _, shard in group.shards.get(where, [])]
            if not shards:
                continue
            sizes, sent = sent[: len(shards)], sent[len(shards) :]
            count = tf.reduce_sum(sizes)
            ids, sent = tf.split(sent[:count], sizes, num=len(shards)), sent[count:]
            rows = [tf.gather(s.variable, own) for s, own in zip(shards, ids, strict=True)]
            every = tf.concat(rows, axis=0)
            found.append(tf.cast(every, self._travel.sent_as(every.dtype)))
        return found

    def fetched(self, asked: LookupRequest, answers: dict[int, list[tf.Tensor]]) -> Fetched:
        """The rows of a batch.

        Args:
            asked: with tensors of the function that is being traced.
            answers: by server, what it answered.
        """
        answers = {where: list(parts) for where, parts in answers.items()}
        fetched = Fetched(asked.leaves)
        groups = zip(self._groups, asked.ids, asked.routes, strict=True)
        for (members, group), own, tensors in groups:
            route = group.route_of(tensors)
            here = {where: answers[where].pop(0) for where in group.shards}
            own_type = models.native(members[0].variable).dtype
            rows = route.deliver({where: tf.cast(each, own_type) for where, each in here.items()})
            fetched.groups.append(([member.variable for member in members], own, group, route))
            for member, each in zip(members, zip(rows, own, strict=True), strict=True):
                fetched.found[id(member.variable), ops_between(self._batch, member.ids)] = each
        return fetched


@dataclasses.dataclass(frozen=True)
class LookupRequest:
    """The requests to servers for one batch.

    Attributes:
        leaves: the tensors of the batch.
        ids: of each group those of its lookups.
        routes: of each group the tensors of its route, see `MultiTableLookup.route_of`.
        sent: by server int64 [...], how many ids of each of its variables, and these ids.
    """

    leaves: list[tf.Tensor]
    ids: list[list[tf.Tensor]]
    routes: list[Any]
    sent: dict[int, tf.Tensor]


class Fetched:
    """Rows that were fetched before the step that looks them up.

    Args:
        batch: the tensors of the step's batch.

    Attributes:
        found: (rows, ids) by id of the Keras variable and the ops between the batch and the ids.
        groups: (Keras variables, ids of each, their tables, the way of these ids) of those that
            were fetched together.
    """

    def __init__(self, batch: list[tf.Tensor]):
        self.found: dict[tuple[int, Any], tuple[tf.Tensor, tf.Tensor]] = {}
        self.groups: list[tuple[list[Any], list[tf.Tensor], MultiTableLookup, Route]] = []
        self._batch = batch

    def rows(self, variable: Any, ids: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor] | None:
        """(rows [n, ...], the same ids), or None if these rows were not fetched."""
        if not self.found:
            return None
        return self.found.get((id(variable), ops_between(self._batch, ids)))


def plan_lookups(
    trace: Callable[[Any, Fetched], Any],
    batch_spec: Any,
    shards_of: Callable[[Any], Sequence[VariableShard]],
    travel: RowTransfer | None = None,
) -> Plan:
    """Finds the lookups of a step.

    Args:
        trace: calls the step with a batch, and with where its lookups go.
        batch_spec: structure of tf.TensorSpec, of a batch.
        shards_of: the shards of a variable that is looked up.
        travel: how rows travel.
    """
    inputs: list[tf.Tensor] = []
    lookups: list[Lookup] = []

    def step(*flat: tf.Tensor) -> None:
        inputs.extend(flat)
        batch = tf.nest.pack_sequence_as(batch_spec, flat, expand_composites=True)
        trace(batch, _Recorded(inputs, lookups, shards_of))

    specs = tf.nest.flatten(batch_spec, expand_composites=True)
    tf.function(step, autograph=False).get_concrete_function(*specs)
    return Plan(inputs, _once(inputs, lookups), travel)


class _Recorded(Fetched):
    """Records what is looked up; the rows that it gives are never used."""

    def __init__(
        self,
        batch: list[tf.Tensor],
        lookups: list[Lookup],
        shards_of: Callable[[Any], Sequence[VariableShard]],
    ):
        super().__init__(batch)
        self._lookups = lookups
        self._shards_of = shards_of

    def rows(self, variable: Any, ids: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Zeros [n, ...]."""
        if ops_between(self._batch, ids) is not None:
            self._lookups.append(Lookup(variable, ids, self._shards_of(variable)))
        own = models.native(variable)
        return tf.zeros(tf.concat([tf.shape(ids), own.shape[1:]], axis=0), own.dtype), ids


def _once(batch: list[tf.Tensor], lookups: list[Lookup]) -> list[Lookup]:
    """Without those that are there already."""
    return list({(id(one.variable), ops_between(batch, one.ids)): one for one in lookups}.values())


def _of_one_kind(lookups: Iterable[Lookup]) -> list[list[Lookup]]:
    """Those whose rows can be in one tensor, in an order that all processes share."""
    kinds: dict[Any, list[Lookup]] = {}
    for one in lookups:
        own = models.native(one.variable)
        kinds.setdefault((own.dtype, tuple(own.shape[1:])), []).append(one)
    return list(kinds.values())
