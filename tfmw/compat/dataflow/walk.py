"""The `Flow` of each tensor of a traced step: see the package."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from tfmw.compat.dataflow import arithmetic, parts, shapes
from tfmw.compat.dataflow.arithmetic import is_zero
from tfmw.compat.dataflow.flow import (
    BAD,
    EXAMPLES,
    FIXED,
    ITERATIONS,
    SIZE,
    SMALL,
    Flow,
    Rule,
    UnknownArgument,
    by_rows,
    flow_without_argument,
    has_total,
    joined_flow,
    nonlinear_flow,
    total_flow,
    vector_flow,
    worst_flow,
)
from tfmw.compat.graph import ancestors, inputs_first, is_symbolic, static_value

_SOURCES = ("ReadVariableOp", "VarHandleOp", "VariableV2")


class Dataflow:
    """The `Flow` of each tensor of a step, computed once.

    Args:
        batch: the batch of the step: tensors in any structure.
    """

    def __init__(self, batch: Any):
        self._flows: dict[Any, list[Flow]] = {}
        self._given: dict[Any, Flow] = {}
        self._captures: dict[int, dict[Any, Any]] = {}
        self._graph: Any = None
        # conditions that a total is finite, which are assumed to be true
        self.guards: list[Any] = []
        for value in tf.nest.flatten(batch):
            # examples have different numbers of sparse and of ragged values
            uneven = isinstance(value, tf.SparseTensor | tf.RaggedTensor)
            for tensor in tf.nest.flatten(value, expand_composites=True):
                if is_symbolic(tensor):
                    self._graph = tensor.graph
                    label = ("selected", id(value)) if uneven else EXAMPLES
                    axes = ((0, label),) if tensor.shape.rank != 0 else ()
                    self.declare(tensor, Flow("rows", axes))
            if isinstance(value, tf.SparseTensor) and (rank := value.indices.shape[1]):
                value.dense_shape.set_shape([rank])  # datasets lose it
                self.declare(value.dense_shape, vector_flow([SIZE, *[FIXED] * (rank - 1)]))
            for splits in value.nested_row_splits if isinstance(value, tf.RaggedTensor) else ():
                self.declare(splits, Flow("rows", ((0, ("splits", EXAMPLES, id(value))),)))

    def of(self, value: Any) -> Flow:
        """The flow of a tensor; unknown for an eager tensor."""
        if isinstance(value, tf.IndexedSlices):
            value = value.values
        if not tf.is_tensor(value) or not hasattr(value, "op"):
            value = getattr(value, "value", value)  # a variable is fixed
            return Flow("unknown") if isinstance(value, tf.Tensor) else FIXED
        if not is_symbolic(value):
            return Flow("unknown")
        for op in ancestors([value], stop=self._is_known):
            self._flows[_op_key(op)] = self._apply(op, [self._known(t) for t in op.inputs])
        return self._known(value)

    def operations(self, value: Any) -> list[Any]:
        """The operations that compute a value from what is declared, such as the batch."""
        return ancestors([value], stop=lambda tensor: _key(tensor) in self._given)

    def follows(self, value: Any, others: Iterable[Any]) -> bool:
        """Whether a value is computed from one of some tensors, in its graph or an outer one."""

        def inputs(op: Any) -> list[Any]:
            tensors = op.inputs
            if op.type == "Placeholder":
                tensors = [self._captured(op.outputs[0])]
            return [tensor.op for tensor in tensors if is_symbolic(tensor)]

        value = getattr(value, "values", value)
        ends = [value.op] if is_symbolic(value) else []
        wanted = {_op_key(tensor.op) for tensor in others if is_symbolic(tensor)}
        return any(_op_key(op) in wanted for op in inputs_first(ends, inputs))

    def declare(self, tensor: Any, flow: Flow) -> None:
        """Sets the flow of a tensor, in place of the one that its operation implies."""
        if is_symbolic(tensor):
            self._given[_key(tensor)] = flow

    def _is_known(self, tensor: Any) -> bool:
        return _key(tensor) in self._given or _op_key(tensor.op) in self._flows

    def _known(self, tensor: Any) -> Flow:
        given = self._given.get(_key(tensor))
        if given is not None:
            return given
        found = self._flows[_op_key(tensor.op)]
        # A call gets more results when it is differentiated.
        return found[tensor.value_index] if tensor.value_index < len(found) else Flow("unknown")

    # ------------------------------------------------------------ operations

    def _apply(self, op: Any, inputs: list[Flow]) -> list[Flow]:
        """The flows of an operation's outputs."""
        if not op.outputs:
            return []
        if op.type in ("Placeholder", "PlaceholderWithDefault"):
            return [self._of_placeholder(op)]
        if op.type == "Const":
            small = (op.outputs[0].shape.num_elements() or 0) <= SMALL
            return [Flow(constant=static_value(op.outputs[0])) if small else FIXED]
        if op.type in _SOURCES:
            return [FIXED]
        if op.type in _CALLS:
            return self._of_call(op, inputs)
        if _is_its_bound(op):
            return [inputs[0]]
        if op.type not in ("Shape", "ShapeN", "Size", "Rank"):
            bad = worst_flow(inputs)
            if bad is not None:
                return [bad] * len(op.outputs)
        if op.type in ("IsFinite", "IsInf", "IsNan") and has_total(inputs):
            self.guards.append(op.outputs[0])
            rows = inputs[0].kind == "rows"
            return [inputs[0]._replace(affine=False) if rows else FIXED]
        if all(flow.kind == "fixed" for flow in inputs):
            if op.outputs[0].shape.rank in (0, 1, 2) and inputs:
                if all(flow.constant is not None for flow in inputs):
                    return [Flow(constant=_folded(op, inputs))] * len(op.outputs)
            if op.type not in _RULES:
                return [FIXED] * len(op.outputs)
        try:
            found = _RULES.get(op.type, by_rows)(op, inputs)
        except UnknownArgument:
            found = flow_without_argument(op, inputs)
        found = found if isinstance(found, list) else [found] * len(op.outputs)
        return [flow._replace(constant=None) if flow.axes == () else flow for flow in found]

    def _of_placeholder(self, op: Any) -> Flow:
        """Flow of a captured tensor; a guess for an argument of a user's function.

        A function is traced before the operation that calls it exists.
        """
        tensor, graph = op.outputs[0], op.graph
        if tensor.dtype in (tf.resource, tf.variant):
            return FIXED
        outer = self._captured(tensor)
        if outer is not None:
            return self.of(outer) if is_symbolic(outer) else FIXED
        while graph is not None and graph is not self._graph:
            graph = getattr(graph, "outer_graph", None)
        inside = graph is not None and op.graph is not self._graph
        if inside and tensor.shape.rank and tensor.shape[0] is None:
            return Flow("rows", ((0, EXAMPLES),))
        return FIXED

    def _captured(self, tensor: Any) -> Any:
        """The captured tensor of an outer graph for a placeholder; None for an argument."""
        captured = self._captures.setdefault(id(tensor.graph), {})
        if _key(tensor) not in captured:
            captures = getattr(tensor.graph, "captures", ())
            captured.update({_key(inner): outer for outer, inner in captures})
        return captured.get(_key(tensor))

    def _of_call(self, op: Any, inputs: list[Flow]) -> list[Flow]:
        """Flows of an operation that calls functions: a call, a condition, a loop."""
        if op.type in _LOOPS:
            return self._of_loop(op, inputs)
        if op.type in _PLAIN_CALLS:
            return self._inside(op, self._function(op, "f"), inputs)[1]
        condition, arguments = inputs[0], inputs[1:]
        if op.type in _CASES:
            count = len(op.get_attr("branches"))
            functions = [self._function(op, "branches", i) for i in range(count)]
        else:
            functions = [self._function(op, name) for name in ("then_branch", "else_branch")]
        outs = [self._inside(op, function, arguments)[1] for function in functions]
        found = [joined_flow(op, list(flows)) for flows in zip(*outs, strict=True)]
        if condition.kind in ("fixed", "size"):
            return found
        if condition.kind in BAD:
            return [joined_flow(op, [condition, flow]) for flow in found]
        return [
            flow if flow.kind in BAD else nonlinear_flow(op, [condition, flow]) for flow in found
        ]

    def _of_loop(self, op: Any, inputs: list[Flow]) -> list[Flow]:
        body, state = self._function(op, "body"), list(inputs)
        counters, added = self._counters(op, body, inputs)
        for i in counters:
            state[i] = Flow("size", ((ITERATIONS, EXAMPLES),))
        for _ in range(5):
            inner, after = self._inside(op, body, state)
            joined = [joined_flow(op, [a, b]) for a, b in zip(state, after, strict=True)]
            for i in counters:
                joined[i] = state[i]
            for i, tensor in added.items():
                flow = inner.of(tensor)
                if flow.kind == "rows" and {axis for axis, _ in flow.axes} == {ITERATIONS}:
                    joined[i] = total_flow(op, flow, {ITERATIONS}, "Sum")
            if [_compared_part(f) for f in joined] == [_compared_part(f) for f in state]:
                break
            state = joined
        else:
            return [Flow("unknown", origin=op)] * len(state)
        for i in counters:
            state[i] = SIZE
        # A value that another example changes in each iteration depends on all of them.
        return [
            Flow("unknown", origin=op) if ITERATIONS in dict(flow.axes) else flow for flow in state
        ]

    def _counters(
        self, op: Any, body: Any, inputs: list[Flow]
    ) -> tuple[list[int], dict[int, tf.Tensor]]:
        """(counters in a loop's state, tensors that its sums add), for a loop over examples.

        A sum adds, in each iteration, a value that does not depend on the sum.
        """
        counters: list[int] = []
        added: dict[int, tf.Tensor] = {}
        condition = self._function(op, "cond")
        if body is None or condition is None or len(body.inputs) != len(inputs):
            return counters, added
        if self._inside(op, condition, inputs)[1][0].kind != "size":
            return counters, added
        if all(flow != SIZE for flow in inputs):
            return counters, added  # for example half of the examples
        for i, (argument, result) in enumerate(zip(body.inputs, body.outputs, strict=True)):
            update = without_identity(result).op
            if update.type not in ("AddV2", "Add") or not is_zero(inputs[i]):
                continue
            a, b = (without_identity(tensor) for tensor in update.inputs)
            other = b if a is argument else a if b is argument else None
            if other is None:
                continue
            places = [k for k, each in enumerate(body.inputs) if each is other]
            step = inputs[places[0]].constant if places else static_value(other)
            if argument.dtype.is_integer and argument.shape.rank == 0 and step == 1:
                counters.append(i)
            elif len(argument.consumers()) == 1:
                added[i] = other
        return counters, added if counters else {}

    def _function(self, op: Any, attribute: str, index: int | None = None) -> Any:
        """The graph of a function that an operation calls; None if it is not known."""
        name = op.get_attr(attribute)
        name = (name if index is None else name[index]).name
        graph, function = op.graph, None
        while graph is not None and function is None:
            function = graph._get_function(name)
            graph = getattr(graph, "outer_graph", None)
        return getattr(function, "graph", None)

    def _inside(self, op: Any, body: Any, arguments: list[Flow]) -> tuple[Dataflow, list[Flow]]:
        """Flows of a function's results. Functions are nested as deep as users nest them."""
        inner = Dataflow(())
        inner.guards = self.guards
        if body is None or len(body.inputs) != len(arguments):
            return inner, [Flow("unknown", origin=op)] * len(op.outputs)
        inner._given = {
            **{key: flow for key, flow in self._given.items() if key[0] == id(body)},
            **{_key(t): flow for t, flow in zip(body.inputs, arguments, strict=True)},
        }
        return inner, [inner.of(tensor) for tensor in body.outputs]


def without_identity(tensor: tf.Tensor) -> tf.Tensor:
    """The tensor that an operation computes, of which others only are identities."""
    while tensor.op.type == "Identity":
        tensor = tensor.op.inputs[0]
    return tensor


def _key(tensor: Any) -> tuple[int, str, int]:
    return id(tensor.graph), tensor.op.name, tensor.value_index


def _op_key(op: Any) -> tuple[int, str]:
    return id(op.graph), op.name


def _compared_part(flow: Flow) -> Any:
    return flow.kind, flow.axes, flow.degree, flow.affine


_LOOPS = ("While", "StatelessWhile")
_PLAIN_CALLS = ("PartitionedCall", "StatefulPartitionedCall")
_CASES = ("Case", "StatelessCase")
_CALLS = (*_LOOPS, *_PLAIN_CALLS, *_CASES, "If", "StatelessIf")

_FOLDED: dict[str, Callable[..., Any]] = {
    "Add": np.add,
    "AddV2": np.add,
    "Sub": np.subtract,
    "Mul": np.multiply,
    "RealDiv": np.true_divide,
    "Neg": np.negative,
    "GreaterEqual": np.greater_equal,
    "SelectV2": np.where,
    **dict.fromkeys(["Cast", "Identity", "StopGradient"], np.asarray),
    "Range": np.arange,
    "Prod": lambda values, axes: np.prod(values, axis=tuple(np.ravel(axes))),
    "Pack": lambda *values: np.stack(values),
    "ConcatV2": lambda *values: np.concatenate(values[:-1]),
    "Reshape": np.reshape,
    "Slice": lambda values, begin, sizes: values[
        tuple(slice(b, None if n < 0 else b + n) for b, n in zip(begin, sizes, strict=True))
    ],
}


def _folded(op: Any, inputs: list[Flow]) -> Any:
    """The value of an operation on small constants; None if it is not known."""
    if op.type in _FOLDED:
        return _FOLDED[op.type](*(flow.constant for flow in inputs))
    return static_value(op.outputs[0]) if len(op.outputs) == 1 else None


def _is_its_bound(op: Any) -> bool:
    """Whether an operation is `minimum(c, maximum(c, x))`, as in a `bincount` of c columns."""
    if op.type != "Minimum" or op.inputs[1].op.type != "Maximum":
        return False
    upper, lower = op.inputs[0], op.inputs[1].op.inputs[0]
    values = static_value(upper), static_value(lower)
    return upper is lower or (values[0] is not None and np.array_equal(*values))


_RULES: dict[str, Rule] = {**arithmetic.RULES, **shapes.RULES, **parts.RULES}
