"""Rows that a step looks up, requested before the step, for all layers at once.

    plan = plan_lookups(trace, batch_spec, shards_of)  # once, before steps are traced
    asked = plan.asked(batch)                          # while a step is traced
    rows = plan.answer(where, asked.sent[where])       # on each server
    fetched = plan.fetched(asked, answers)             # on the worker
    fetched.rows(variable, ids)                        # when the step looks up; None: not fetched

A layer looks up its rows when it is called, one layer after the other. But the ids usually depend
on the batch only: a step is traced once to find the ops between the batch and the ids of each
lookup. If these are plain ops, copies of them run first, for all lookups. A lookup of other ids
(drawn at random, or computed from weights) fetches its rows within the step.

Plain ops have no state, call no function, and depend on the batch and constants only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfmw.compat import models, parameter_servers
from tfmw.compat.graph import ancestors, function_of, is_pure
from tfmw.tables.shards import MultiTableLookup, Route, VariableShard


@dataclasses.dataclass(frozen=True)
class RowTransfer:
    """The transfer of rows and their gradients between workers and servers."""

    prefetch: int = 0  # number of steps for which rows are fetched ahead, 0 or 1
    compression: str | None = None  # "bf16", or None for the rows' own type

    def sent_as(self, dtype: tf.DType) -> tf.DType:
        """The wire dtype of rows of this type."""
        return tf.bfloat16 if self.compression == "bf16" and dtype.is_floating else dtype


class LookupRequest(NamedTuple):
    """Requests to servers for one batch; a structure of tensors for TensorFlow, too."""

    leaves: list[tf.Tensor]  # the tensors of the batch
    ids: list[list[tf.Tensor]]  # ids of each group's lookups
    routes: list[Route]  # route of each group
    # server -> int64 [...], the number of ids of each variable, and the ids
    sent: dict[int, tf.Tensor]


class Fetched:
    """Rows that were fetched before the step with this batch, which looks them up."""

    def __init__(self, batch: list[tf.Tensor]):
        # (rows, ids) by (id of the Keras variable, ops between the batch and the ids)
        self.found: dict[tuple[int, Any], tuple[tf.Tensor, tf.Tensor]] = {}
        # (Keras variables, ids of each, their tables, the route of these ids), fetched together
        self.groups: list[tuple[list[Any], list[tf.Tensor], MultiTableLookup, Route]] = []
        self.batch = batch

    def rows(self, variable: Any, ids: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor] | None:
        """(rows [n, ...], the same ids), or None if these rows were not fetched."""
        if not self.found:
            return None
        return self.found.get((id(variable), ops_between(self.batch, ids)))


class _Lookup(NamedTuple):
    """A lookup whose ids depend on the batch."""

    variable: Any
    ids: tf.Tensor  # int64 [n], in the graph of the plan
    ops: bytes  # ops between the batch and the ids


class _Recorded(Fetched):
    """Records lookups, each once; the rows that it returns are never used."""

    def __init__(self, batch: list[tf.Tensor]):
        super().__init__(batch)
        self.lookups: dict[tuple[int, bytes], _Lookup] = {}

    def rows(self, variable: Any, ids: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Zeros [n, ...]."""
        ops = ops_between(self.batch, ids)
        if ops is not None:
            self.lookups[id(variable), ops] = _Lookup(variable, ids, ops)
        own = models.native(variable)
        return tf.zeros(tf.concat([tf.shape(ids), own.shape[1:]], axis=0), own.dtype), ids


def plan_lookups(
    trace: Callable[[Any, Fetched], Any],
    batch_spec: Any,
    shards_of: Callable[[Any], Sequence[VariableShard]],
    travel: RowTransfer | None = None,
) -> Plan:
    """Finds the lookups of a step.

    Args:
        trace: function that calls the step with a batch and a recorder of its lookups.
        batch_spec: structure of tf.TensorSpec for a batch.
        shards_of: function that returns the shards of a variable.
    """
    recorded = _Recorded([])

    def step(*flat: tf.Tensor) -> None:
        recorded.batch.extend(flat)
        trace(tf.nest.pack_sequence_as(batch_spec, flat, expand_composites=True), recorded)

    specs = tf.nest.flatten(batch_spec, expand_composites=True)
    tf.function(step, autograph=False).get_concrete_function(*specs)
    kinds: dict[Any, list[_Lookup]] = {}  # lookups whose rows can be in one tensor
    for one in recorded.lookups.values():
        own = models.native(one.variable)
        kinds.setdefault((own.dtype, tuple(own.shape[1:])), []).append(one)
    groups = [
        (members, MultiTableLookup([shards_of(member.variable) for member in members]))
        for members in kinds.values()
    ]
    return Plan(recorded.batch, groups, travel)


class Plan:
    """Lookups of a step that are known from its batch, as tensors of the traced graph.

    The lookups of a group have rows of one shape and type, and belong to its tables.
    """

    def __init__(
        self,
        batch: Sequence[tf.Tensor] = (),
        groups: Sequence[tuple[list[_Lookup], MultiTableLookup]] = (),
        travel: RowTransfer | None = None,
    ):
        self._batch = batch
        self._groups = groups
        self._travel = travel or RowTransfer()
        self._prepared = parameter_servers.one_op(self._prepare, waits=False)
        self._servers = sorted({where for _, group in groups for where in group.shards})

    def asked(self, batch: Any) -> LookupRequest:
        """Requests to servers for a batch; call it while steps are traced."""
        leaves = tf.nest.flatten(batch, expand_composites=True)
        if not self._groups:
            return LookupRequest(leaves, [], [], {})
        return LookupRequest(leaves, *self._prepared(leaves))

    def _prepare(
        self, leaves: list[tf.Tensor]
    ) -> tuple[list[list[tf.Tensor]], list[Route], dict[int, tf.Tensor]]:
        """(ids of the lookups, route) of each group, and the requests to servers."""
        wanted = [member.ids for members, _ in self._groups for member in members]
        compute = function_of(wanted, self._batch)
        assert compute is not None  # as `ops_between` has seen
        copies = iter(compute(leaves))
        ids = [[next(copies) for _ in members] for members, _ in self._groups]
        routes = [
            group.traced_route(own) for (_, group), own in zip(self._groups, ids, strict=True)
        ]
        sent = {
            where: tf.concat([part for route in routes for part in route.asked.get(where, ())], 0)
            for where in self._servers
        }
        return ids, routes, sent

    def specs(self, where: int) -> list[tf.TensorSpec]:
        """The specs of a server's answers."""
        shards = [group.shards[where][0][1] for _, group in self._groups if where in group.shards]
        return [
            tf.TensorSpec([None, *s.variable.shape[1:]], self._travel.sent_as(s.variable.dtype))
            for s in shards
        ]

    def answer(self, where: int, sent: tf.Tensor) -> list[tf.Tensor]:
        """The requested rows of each group that has some on a server; runs there."""
        found = []
        for _, group in self._groups:
            if where not in group.shards:
                continue
            number = len(group.shards[where])
            sizes, sent = sent[:number], sent[number:]
            count = tf.reduce_sum(sizes)
            rows = group.answer(where, sizes, sent[:count])
            found.append(tf.cast(rows, self._travel.sent_as(rows.dtype)))
            sent = sent[count:]
        return found

    def fetched(self, asked: LookupRequest, answers: dict[int, list[tf.Tensor]]) -> Fetched:
        """The rows of a batch.

        Args:
            asked: request with tensors of the function that is being traced.
            answers: server -> its answer.
        """
        answers = {where: list(parts) for where, parts in answers.items()}
        fetched = Fetched(asked.leaves)
        groups = zip(self._groups, asked.ids, asked.routes, strict=True)
        for (members, group), own, route in groups:
            here = {where: answers[where].pop(0) for where in group.shards}
            own_type = models.native(members[0].variable).dtype
            rows = route.deliver({where: tf.cast(each, own_type) for where, each in here.items()})
            fetched.groups.append(([member.variable for member in members], own, group, route))
            for member, each in zip(members, zip(rows, own, strict=True), strict=True):
                fetched.found[id(member.variable), member.ops] = each
        return fetched


def ops_between(sources: Sequence[tf.Tensor], target: tf.Tensor) -> bytes | None:
    """Description of the plain ops from `sources` to `target`; None if it depends on others.

    Two targets with the same description and the same source values are equal.
    """
    if not sources or sources[0].graph is not target.graph:
        return None
    of_source = {source.name: number for number, source in enumerate(sources)}
    numbers: dict[str, int] = {}  # op -> its index in `lines`
    lines: list[bytes] = []

    def told(tensor: tf.Tensor) -> str:
        if tensor.name in of_source:
            return f"source {of_source[tensor.name]}"
        return f"{numbers[tensor.op.name]}:{tensor.value_index}"

    for op in ancestors([target], stop=lambda tensor: tensor.name in of_source):
        if op.control_inputs or not is_pure(op):
            return None
        attributes = {
            name: value.SerializeToString(deterministic=True)
            for name, value in op.node_def.attr.items()
            if not name.startswith("_")
        }
        inputs = [told(tensor) for tensor in op.inputs]
        lines.append(repr((op.type, inputs, sorted(attributes.items()))).encode())
        numbers[op.name] = len(numbers)
    return b"\n".join([*lines, told(target).encode()])
