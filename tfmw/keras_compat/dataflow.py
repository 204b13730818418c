"""How the tensors of a traced step follow from the examples of a batch.

    flows = Dataflow(batch)
    flows.of(loss).kind            # "reduced": a sum or mean over the examples
    flows.of(x @ tf.transpose(x))  # rows along two axes: pairs of examples

A replica has a part of the global batch. From a value's `Flow` follows whether the values of all
replicas combine into that of one process: sums add up, means have a weighted mean, and one row per
example is as it is. Neither holds of a value for which examples are compared with each other, nor
of a function of their mean, such as its root.

The axis of the examples is followed from operation to operation. Its size is unknown while a step
is traced: a number in the graph is never one of examples.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfmw.keras_compat.graph import ancestors, is_symbolic, static_value

EXAMPLES = "examples"
"""The label of an axis along which a batch's examples stand one after the other."""

ITERATIONS = -1
"""The axis of a value that belongs to another example in each iteration of a loop."""


class Flow(NamedTuple):
    """How a tensor follows from the examples of a batch.

    Attributes:
        kind: "fixed": not at all. "size": from the number of examples only. "rows": for each
            example from itself, along `axes`. "reduced": linear in a sum or mean over examples.
            "compared": from several examples in another way. "nonlinear": from a reduction in
            another way. "unknown".
        axes: (axis, label) of each axis along which examples differ; axes of equal labels have the
            same examples, in the same order.
        degree: the power of the number of examples by which it grows: 1 for a sum, 0 for a mean.
            None: by another function.
        affine: of rows: a reduction has been added to them.
        elements: of a vector of sizes: of each element.
        sized: of a size: the label of the axis that has it, if it is not that of the examples.
        constant: the value of a small constant.
        origin: the operation that made it "compared", "nonlinear" or "unknown"; or that made pairs.
    """

    kind: str = "fixed"
    axes: tuple[tuple[int, Any], ...] = ()
    degree: int | None = 0
    affine: bool = False
    elements: tuple[Flow, ...] | None = None
    sized: Any = None
    constant: Any = None
    origin: Any = None

    @property
    def has_pairs(self) -> bool:
        """Whether two examples differ along two axes."""
        labels = [label for _, label in self.axes]
        return self.kind == "rows" and len(set(labels)) < len(labels)

    def label(self, axis: int) -> Any:
        """Of an axis; None if examples do not differ along it."""
        return dict(self.axes).get(axis)

    def along(self, axes: Iterable[tuple[int, Any]]) -> Flow:
        """The same along other axes."""
        return self._replace(axes=tuple(sorted(axes, key=lambda a: a[0])), elements=None)


FIXED = Flow()
SIZE = Flow("size", degree=1)
BAD = ("compared", "nonlinear", "unknown")


def _words(names: str) -> frozenset[str]:
    return frozenset(names.split())


_SAME = _words(
    "Identity Cast Neg StopGradient EnsureShape PreventGradient CheckNumerics Snapshot "
    "CheckNumericsV2 OptimizationBarrier Real"
)
_SUMS = _words("Add AddV2 AddN Sub AccumulateNV2 BiasAdd")
_QUOTIENTS = _words("RealDiv DivNoNan Div")
_ELEMENTWISE = _words(
    "Abs Acos Acosh Asin Asinh Atan Atanh Atan2 Ceil Cos Cosh Digamma Elu EluGrad Erf Erfc Erfinv "
    "Exp Expm1 Floor FloorDiv FloorMod Mod TruncateDiv TruncateMod Inv InvGrad Reciprocal "
    "ReciprocalGrad IsFinite IsInf IsNan LeakyRelu LeakyReluGrad Lgamma Log Log1p LogicalAnd "
    "LogicalOr LogicalNot Maximum Minimum Pow Relu Relu6 ReluGrad Relu6Grad Rint Round Rsqrt "
    "RsqrtGrad Selu SeluGrad Sigmoid SigmoidGrad Sign Sin Sinh Softplus SoftplusGrad Softsign "
    "SoftsignGrad Sqrt SqrtGrad Square SquaredDifference Tan Tanh TanhGrad Equal NotEqual Less "
    "LessEqual Greater GreaterEqual ApproximateEqual Xlogy Xlog1py Xdivy Ndtri ClipByValue "
    "LogicalXor BitwiseAnd BitwiseOr BitwiseXor Igamma Igammac Zeta Polygamma Betainc"
)
BINARY = _words("Mul MulNoNan Select SelectV2") | _SUMS | _QUOTIENTS | _ELEMENTWISE
REDUCTIONS = _words("Sum Mean Max Min Prod All Any ArgMax ArgMin EuclideanNorm")
_SOURCES = _words("ReadVariableOp VarHandleOp VariableV2 Placeholder")
_RANDOM = _words(
    "RandomUniform RandomUniformInt RandomStandardNormal TruncatedNormal RandomGamma "
    "RandomPoissonV2 StatelessRandomUniform StatelessRandomUniformV2 StatelessRandomUniformInt "
    "StatelessRandomUniformIntV2 StatelessRandomUniformFullInt StatelessRandomUniformFullIntV2 "
    "StatelessRandomNormal StatelessRandomNormalV2 StatelessTruncatedNormal "
    "StatelessTruncatedNormalV2 StatelessRandomBinomial StatelessRandomGammaV2 "
    "StatelessRandomGammaV3 StatelessRandomPoisson"
)
_FILTER_GRADIENTS = ("BackpropFilter", "BiasAddGrad", "BackpropFilterV2")


class Dataflow:
    """The `Flow` of each tensor of a step, computed once.

    Args:
        batch: the batch that the step gets: tensors in any structure.
    """

    def __init__(self, batch: Any):
        self._flows: dict[Any, list[Flow]] = {}
        self._given: dict[Any, Flow] = {}
        self._captures: dict[int, dict[Any, Any]] = {}
        self._graph: Any = None
        for tensor in tf.nest.flatten(batch, expand_composites=True):
            if is_symbolic(tensor):
                self._graph = tensor.graph
                axes = ((0, EXAMPLES),) if tensor.shape.rank != 0 else ()
                self.declare(tensor, Flow("rows", axes))

    def of(self, value: Any) -> Flow:
        """The flow of a tensor; an eager one's is unknown."""
        if isinstance(value, tf.IndexedSlices):
            value = value.values
        if not tf.is_tensor(value) or not hasattr(value, "op"):
            value = getattr(value, "value", value)  # a variable is fixed
            return Flow("unknown") if isinstance(value, tf.Tensor) else FIXED
        if not is_symbolic(value):
            return Flow("unknown")
        for op in ancestors([value], stop=self._is_known):
            inputs = [self._known(tensor) for tensor in op.inputs]
            found = self._apply(op, inputs)
            self._flows[_op_key(op)] = found
        return self._known(value)

    def operations(self, value: Any) -> list[Any]:
        """The operations that compute a value from what is declared, such as the batch."""
        return ancestors([value], stop=lambda tensor: _key(tensor) in self._given)

    def declare(self, tensor: Any, flow: Flow) -> None:
        """Sets the flow of a tensor, in place of the one that its operation suggests."""
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
        if (limit := _only_value(op)) is not None:
            return [Flow(constant=limit)]
        if op.type not in ("Shape", "ShapeN", "Size", "Rank"):
            for kind in BAD:
                bad = next((flow for flow in inputs if flow.kind == kind), None)
                if bad is not None:
                    return [Flow(kind, origin=bad.origin)] * len(op.outputs)
        if all(flow.kind == "fixed" for flow in inputs):
            if op.outputs[0].shape.rank in (0, 1, 2) and inputs:
                if all(flow.constant is not None for flow in inputs):
                    return [Flow(constant=_folded(op, inputs))] * len(op.outputs)
            if op.type not in _RULES:
                return [FIXED] * len(op.outputs)
        found = _RULES.get(op.type, _by_rows)(self, op, inputs)
        found = found if isinstance(found, list) else [found] * len(op.outputs)
        return [flow._replace(constant=None) if flow.axes == () else flow for flow in found]

    def _of_placeholder(self, op: Any) -> Flow:
        """Of a captured tensor, that of the tensor; of an argument of a user's function, a guess.

        A function is traced before the operation that calls it exists.
        """
        tensor, graph = op.outputs[0], op.graph
        if tensor.dtype in (tf.resource, tf.variant):
            return FIXED
        captured = self._captures.setdefault(id(graph), {})
        if _key(tensor) not in captured:
            captured.update({_key(inner): outer for outer, inner in getattr(graph, "captures", ())})
        outer = captured.get(_key(tensor))
        if outer is not None:
            return self.of(outer) if is_symbolic(outer) else FIXED
        while graph is not None and graph is not self._graph:
            graph = getattr(graph, "outer_graph", None)
        inside = graph is not None and op.graph is not self._graph
        if inside and tensor.shape.rank and tensor.shape[0] is None:
            return Flow("rows", ((0, EXAMPLES),))
        return FIXED

    def _of_call(self, op: Any, inputs: list[Flow]) -> list[Flow]:
        """Of an operation that calls functions: a call, a condition, a loop."""
        if op.type in ("While", "StatelessWhile"):
            return self._of_loop(op, inputs)
        if op.type in ("PartitionedCall", "StatefulPartitionedCall"):
            return self._inside(op, "f", inputs)
        condition, arguments = inputs[0], inputs[1:]
        if op.type == "Case" or op.type == "StatelessCase":
            count = len(op.get_attr("branches"))
            outs = [self._inside(op, "branches", arguments, i) for i in range(count)]
        else:
            branches = ("then_branch", "else_branch")
            outs = [self._inside(op, branch, arguments) for branch in branches]
        found = [_joined(op, list(flows)) for flows in zip(*outs, strict=True)]
        if condition.kind in ("fixed", "size"):
            return found
        if condition.kind in BAD:
            return [_joined(op, [condition, flow]) for flow in found]
        return [flow if flow.kind in BAD else _nonlinear(op, [condition, flow]) for flow in found]

    def _of_loop(self, op: Any, inputs: list[Flow]) -> list[Flow]:
        state = inputs
        for _ in range(5):
            after = self._inside(op, "body", state)
            joined = [_joined(op, [a, b]) for a, b in zip(state, after, strict=True)]
            if [_compared_part(f) for f in joined] == [_compared_part(f) for f in state]:
                break
            state = joined
        else:
            return [Flow("unknown", origin=op)] * len(state)
        # A value that another example changes in each iteration depends on all of them.
        return [
            Flow("unknown", origin=op) if ITERATIONS in dict(flow.axes) else flow for flow in state
        ]

    def _inside(
        self, op: Any, attribute: str, arguments: list[Flow], index: int | None = None
    ) -> list[Flow]:
        """The flows of a function's results. Functions are nested as deep as users nest them."""
        name = op.get_attr(attribute)
        name = (name if index is None else name[index]).name
        graph, function = op.graph, None
        while graph is not None and function is None:
            function = graph._get_function(name)
            graph = getattr(graph, "outer_graph", None)
        body = getattr(function, "graph", None)
        if body is None or len(body.inputs) != len(arguments):
            return [Flow("unknown", origin=op)] * len(op.outputs)
        inner = Dataflow(())
        inner._given = {
            **{key: flow for key, flow in self._given.items() if key[0] == id(body)},
            **{_key(t): flow for t, flow in zip(body.inputs, arguments, strict=True)},
        }
        return [inner.of(tensor) for tensor in body.outputs]


def _key(tensor: Any) -> tuple[int, str, int]:
    return id(tensor.graph), tensor.op.name, tensor.value_index


def _op_key(op: Any) -> tuple[int, str]:
    return id(op.graph), op.name


def _compared_part(flow: Flow) -> Any:
    return flow.kind, flow.axes, flow.degree, flow.affine


_CALLS = _words(
    "While StatelessWhile If StatelessIf Case StatelessCase PartitionedCall StatefulPartitionedCall"
)


_FOLDED: dict[str, Callable[..., Any]] = {
    "Add": np.add,
    "AddV2": np.add,
    "Sub": np.subtract,
    "Mul": np.multiply,
    "RealDiv": np.true_divide,
    "Neg": np.negative,
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
SMALL = 16  # values


def _folded(op: Any, inputs: list[Flow]) -> Any:
    """The value of an operation on small constants; None if it is not known."""
    if op.type in _FOLDED:
        return _FOLDED[op.type](*(flow.constant for flow in inputs))
    return static_value(op.outputs[0]) if len(op.outputs) == 1 else None


def _only_value(op: Any) -> Any:
    """The value of `minimum(c, maximum(c, x))`, as in a `bincount` of c columns; None of others."""
    if op.type != "Minimum":
        return None
    upper = static_value(op.inputs[0])
    inner = op.inputs[1].op
    if upper is None or inner.type != "Maximum":
        return None
    lower = static_value(inner.inputs[0])
    return upper if lower is not None and np.array_equal(lower, upper) else None


def _constant(op: Any, inputs: list[Flow], i: int) -> Any:
    """The value of an input; None if it is not known."""
    known = inputs[i].constant
    return static_value(op.inputs[i]) if known is None else known


# ---------------------------------------------------------------- values that are combined


def _bad(kind: str, op: Any, flows: Sequence[Flow] = ()) -> Flow:
    origin = next((flow.origin for flow in flows if flow.origin is not None), op)
    return Flow(kind, origin=origin)


def _aligned(op: Any, flows: list[Flow]) -> list[Flow]:
    """Flows of inputs that are broadcast, with the axes of the result."""
    ranks = [tensor.shape.rank for tensor in op.inputs]
    if None in ranks:
        return flows
    return [
        flow.along((a + max(ranks) - rank if a >= 0 else a, label) for a, label in flow.axes)
        for flow, rank in zip(flows, ranks, strict=True)
    ]


def _union(op: Any, flows: list[Flow]) -> tuple[dict[int, Any], Any] | None:
    """(axis -> label, the origin of pairs); None if an axis has different examples in them."""
    axes: dict[int, Any] = {}
    for flow in flows:
        for axis, label in flow.axes:
            if axes.setdefault(axis, label) != label:
                return None
    origin = next((flow.origin for flow in flows if flow.origin is not None), None)
    labels = list(axes.values())
    if len(set(labels)) < len(labels):
        origin = origin or op
    return axes, origin


def _highest(flows: list[Flow]) -> str:
    order = ("fixed", "size", "reduced", "rows")
    return max((flow.kind for flow in flows), key=order.index)


def _joined(op: Any, flows: list[Flow]) -> Flow:
    """Of a sum, and of whatever is one of several values."""
    for kind in BAD:
        bad = next((flow for flow in flows if flow.kind == kind), None)
        if bad is not None:
            return bad
    union = _union(op, flows)
    if union is None:
        return _bad("compared", op, flows)
    axes, origin = union
    kind = _highest(flows)
    out = Flow(kind, tuple(sorted(axes.items(), key=lambda a: a[0])), origin=origin)
    moving = [flow for flow in flows if flow.kind != "fixed"]
    if kind == "fixed":
        return FIXED
    if kind == "size":
        same = len({flow.degree for flow in flows}) == 1
        return out._replace(degree=flows[0].degree if same else None)
    degrees = {flow.degree for flow in flows if flow.kind != "size" or flow.axes}
    if any(flow.kind == "size" and not flow.axes and flow.degree for flow in flows):
        return _bad("nonlinear", op, flows)
    if len(degrees) > 1:
        if kind == "reduced":
            return _bad("nonlinear", op, flows)
        return out._replace(degree=None)
    affine = kind == "rows" and any(flow.affine or flow.kind == "reduced" for flow in moving)
    return out._replace(degree=degrees.pop(), affine=affine)


def _nonlinear(op: Any, flows: list[Flow]) -> Flow:
    """Of a function, element by element, that is not linear."""
    kind = _highest(flows)
    if kind == "reduced" or any(flow.kind == "reduced" or flow.affine for flow in flows):
        return _bad("nonlinear", op, flows)
    union = _union(op, flows)
    if union is None:
        return _bad("compared", op, flows)
    axes, origin = union
    degree = None if kind == "size" and not axes else 0
    return Flow(kind, tuple(sorted(axes.items(), key=lambda a: a[0])), degree, origin=origin)


def _product(op: Any, flows: list[Flow], quotient: bool = False) -> Flow:
    """Of a product or quotient of two."""
    a, b = flows
    varying = [flow for flow in flows if flow.kind == "reduced" or flow.affine]
    others = [flow for flow in flows if flow.kind in ("rows", "reduced")]
    if varying and (len(others) > 1 or (quotient and varying[-1] is b)):
        return _bad("nonlinear", op, flows)
    union = _union(op, flows)
    if union is None:
        return _bad("compared", op, flows)
    axes, origin = union
    degree = None
    if a.degree is not None and b.degree is not None:
        degree = a.degree - b.degree if quotient else a.degree + b.degree
    return Flow(
        _highest(flows),
        tuple(sorted(axes.items(), key=lambda x: x[0])),
        degree,
        affine=any(flow.affine for flow in flows),
        origin=origin,
    )


def _total(op: Any, flow: Flow, axes: set[int], how: str, keep: bool = False) -> Flow:
    """Of a reduction over some axes."""
    over = {axis: label for axis, label in flow.axes if axis in axes}

    def moved(axis: int) -> int:
        return axis if keep or axis < 0 else axis - sum(1 for other in axes if other < axis)

    left = [(moved(axis), label) for axis, label in flow.axes if axis not in axes]
    linear = how in ("Sum", "Mean")
    if not over:
        out = flow.along(left)
        if linear or flow.kind == "fixed":
            return out
        return _nonlinear(op, [out]) if flow.kind != "size" else out
    if flow.kind == "size":
        if not linear:
            return Flow("size", tuple(left), None)
        degree = flow.degree if how == "Mean" or flow.degree is None else flow.degree + len(over)
        return Flow("size", tuple(left), degree)
    if flow.has_pairs or left or not linear:
        return _bad("compared", op, [flow])
    labels = list(over.values())
    if how == "Mean" and any(_is_uneven(label) for label in labels):
        return _bad("nonlinear", op)
    degree = flow.degree
    if how == "Sum":
        degree = None if degree is None else degree + 1
    return Flow("reduced", degree=degree)


def _is_uneven(label: Any) -> bool:
    """Whether the number of values along an axis is no multiple of that of examples."""
    return isinstance(label, tuple) and label[0] in ("selected", "mixed", "ragged")


# ---------------------------------------------------------------- rules


def _same(flows: Dataflow, op: Any, inputs: list[Flow]) -> Any:
    return inputs[0]


def _sum_rule(flows: Dataflow, op: Any, inputs: list[Flow]) -> Flow:
    if op.type == "BiasAdd":
        return _joined(op, [inputs[0], inputs[1]._replace(axes=())])
    aligned = _aligned(op, inputs)
    kinds = {flow.kind for flow in inputs}
    if kinds == {"size", "fixed"} and _small(op, inputs):
        return next(flow for flow in aligned if flow.kind == "size")
    return _joined(op, aligned)


def _small(op: Any, inputs: list[Flow]) -> bool:
    """Whether the fixed inputs are constants near 0, which only prevent a division by 0."""
    constants = [flow.constant for flow in inputs if flow.kind == "fixed"]
    limit = 1.0 if op.type == "Maximum" else 1e-3
    return all(c is not None and np.all(np.abs(c) <= limit) for c in constants)


def _product_rule(flows: Dataflow, op: Any, inputs: list[Flow]) -> Flow:
    aligned = _aligned(op, inputs)
    if inputs[0].elements is not None and inputs[1].kind == "fixed" and not op.inputs[1].shape.rank:
        return _product(op, aligned)._replace(elements=inputs[0].elements)
    return _product(op, aligned, op.type in _QUOTIENTS)


def _elementwise(flows: Dataflow, op: Any, inputs: list[Flow]) -> Flow:
    if op.type == "Maximum" and {flow.kind for flow in inputs} == {"size", "fixed"}:
        if _small(op, inputs):
            return next(flow for flow in _aligned(op, inputs) if flow.kind == "size")
    if all(flow.kind == "fixed" for flow in inputs):
        return FIXED
    return _nonlinear(op, _aligned(op, inputs))


def _select(flows: Dataflow, op: Any, inputs: list[Flow]) -> Flow:
    if inputs[0].kind in ("fixed", "size"):
        chosen = _aligned(op, inputs)
        union = _joined(op, chosen[1:])
        return _product(op, [union, chosen[0]._replace(kind="fixed", degree=0)])
    return _elementwise(flows, op, inputs)


def _reduction(flows: Dataflow, op: Any, inputs: list[Flow]) -> Flow:
    tensor, flow = op.inputs[0], inputs[0]
    rank = tensor.shape.rank
    if flow.kind == "fixed":
        return FIXED
    if flow.elements is not None and op.type == "Prod":
        degrees = [each.degree for each in flow.elements]
        kinds = _highest(list(flow.elements)) if flow.elements else "fixed"
        known = [d for d in degrees if d is not None]
        return Flow(kinds, degree=sum(known) if len(known) == len(degrees) else None)
    if rank is None:
        if op.outputs[0].shape.rank != 0:
            return _bad("unknown", op)
        axes = {axis for axis, _ in flow.axes}
    else:
        found = _axes_of(op, inputs[1], rank)
        if found is None:
            if op.outputs[0].shape.rank != 0:
                return _bad("unknown", op)
            found = set(range(rank))
        axes = found
    keep = op.type not in ("ArgMax", "ArgMin") and bool(op.get_attr("keep_dims"))
    return _total(op, flow, axes, op.type, keep)


def _axes_of(op: Any, flow: Flow, rank: int) -> set[int] | None:
    """The axes that a reduction names; None if they are not known."""
    axes = op.inputs[1]
    value = static_value(axes) if flow.constant is None else flow.constant
    if value is not None:
        return {int(a) % rank for a in np.ravel(value)} if rank else set()
    if axes.op.type == "BroadcastGradientArgs":
        return _broadcast_axes(axes, op.inputs[0].shape)
    return None


def _broadcast_axes(axes: Any, shape: Any) -> set[int] | None:
    """The axes along which an operand was broadcast, of the gradient of a binary operation."""
    vectors = [_static_dims(t) for t in axes.op.inputs]
    own = vectors[axes.value_index]
    if own is None:
        return None
    lead = shape.rank - len(own)
    ones = {lead + i for i, d in enumerate(own) if d == 1 and shape[lead + i] != 1}
    return set(range(lead)) | ones


def _static_dims(vector: Any) -> list[int | None] | None:
    """The known dimensions of a shape that is in a tensor."""
    value = static_value(vector)
    if value is not None:
        return [int(d) for d in value]
    if vector.op.type == "Shape" and vector.op.inputs[0].shape.rank is not None:
        return vector.op.inputs[0].shape.as_list()
    return None


def _l2_loss(flows: Dataflow, op: Any, inputs: list[Flow]) -> Flow:
    flow = _nonlinear(op, inputs)
    return flow if flow.kind in BAD else _total(op, flow, {a for a, _ in flow.axes}, "Sum")


def _last_axis(flows: Dataflow, op: Any, inputs: list[Flow]) -> Any:
    """Softmax, sorting, and whatever else treats the last axis as a whole."""
    flow = _nonlinear(op, _aligned(op, inputs))
    rank = op.inputs[0].shape.rank
    if flow.kind in BAD or rank is None:
        return flow
    if flow.label(rank - 1) is not None and flow.kind == "rows":
        return _bad("compared", op, [flow])
    return flow


def _cross_entropy(flows: Dataflow, op: Any, inputs: list[Flow]) -> Any:
    logits, labels = inputs
    if any(flow.kind == "reduced" or flow.affine for flow in inputs):
        return _bad("nonlinear", op, inputs)
    if all(flow.kind == "fixed" for flow in inputs):
        return FIXED
    if logits.label(1) is not None or (labels.label(1) is not None and labels.kind == "rows"):
        return _bad("compared", op, inputs)
    both = _nonlinear(op, [logits, labels.along([])] if logits.axes else inputs)
    if logits.label(0) is not None and labels.label(0) not in (None, logits.label(0)):
        return _bad("compared", op, inputs)
    rows = [a for a in both.axes if a[0] == 0]
    return [both.along(rows), both.along(rows)]


def _transpose(flows: Dataflow, op: Any, inputs: list[Flow]) -> Flow:
    order = _constant(op, inputs, 1)
    if order is None:
        return inputs[0] if not inputs[0].axes else _bad("unknown", op)
    places = {int(a): i for i, a in enumerate(order)}
    return inputs[0].along((places.get(a, a), label) for a, label in inputs[0].axes)


def _expand(flows: Dataflow, op: Any, inputs: list[Flow]) -> Flow:
    axis = _constant(op, inputs, 1)
    rank = op.inputs[0].shape.rank
    if axis is None or rank is None:
        return inputs[0] if not inputs[0].axes else _bad("unknown", op)
    at = int(np.squeeze(axis)) % (rank + 1)
    return inputs[0].along((a + (a >= at), label) for a, label in inputs[0].axes)


def _squeeze(flows: Dataflow, op: Any, inputs: list[Flow]) -> Flow:
    shape = op.inputs[0].shape
    if shape.rank is None:
        return inputs[0] if not inputs[0].axes else _bad("unknown", op)
    gone = {a % shape.rank for a in op.get_attr("squeeze_dims")}
    gone = gone or {i for i, d in enumerate(shape) if d == 1}
    return inputs[0].along(
        (a - sum(1 for g in gone if 0 <= g < a), label)
        for a, label in inputs[0].axes
        if a not in gone
    )


def _reshape(flows: Dataflow, op: Any, inputs: list[Flow]) -> Flow:
    flow = inputs[0]
    if not any(axis >= 0 for axis, _ in flow.axes):
        if flow.kind in ("fixed", "reduced") or op.outputs[0].shape.rank == 0:
            return flow if op.outputs[0].shape.rank != 1 else flow._replace(elements=flow.elements)
        return flow._replace(elements=None)
    before, after = op.inputs[0].shape, op.outputs[0].shape
    if before.rank is None or after.rank is None:
        return _bad("unknown", op)
    moved = _reshaped_axes(op, flow, before.as_list(), after.as_list())
    if moved is None:
        return _bad("compared" if flow.has_pairs else "unknown", op, [flow])
    return flow.along(moved)


def _reshaped_axes(
    op: Any, flow: Flow, before: list[Any], after: list[Any]
) -> list[tuple[int, Any]] | None:
    """The axes of examples after a reshape; None if they cannot be told."""
    others = [i for i, d in enumerate(before) if d != 1 or flow.label(i) is not None]
    target = [i for i, d in enumerate(after) if d != 1]
    iterations = [(a, label) for a, label in flow.axes if a < 0]
    axes = {a: label for a, label in flow.axes if a >= 0}
    if len(others) == len(target) and all(
        before[i] is None or after[j] is None or before[i] == after[j]
        for i, j in zip(others, target, strict=True)
    ):
        places = dict(zip(others, target, strict=True))
        return [*iterations, *((places[a], label) for a, label in axes.items())]
    if not target:
        return None
    if len(axes) > 1:
        return _merged_parts(axes, others, before, after, target)
    ((axis, label),) = axes.items()
    leading = [before[i] for i in others if i < axis]
    if not leading:
        return [*iterations, *_leading_axis(op, label, before[axis], after, target)]
    if None not in leading:
        product = math.prod(leading)
        for n, j in enumerate(target):
            known = [after[i] for i in target[:n]]
            if None not in known and math.prod(known) == product:
                return [*iterations, (j, label)]
        if after[target[0]] is None or after[target[0]] % product == 0:
            return [*iterations, (target[0], ("behind", product, label))]
    elif len(target) == 1 or before[axis + 1 :] == after[-len(before[axis + 1 :]) :]:
        return [*iterations, (target[0], ("behind", None, label))]
    return None


def _leading_axis(
    op: Any, label: Any, size: Any, after: list[Any], target: list[int]
) -> list[tuple[int, Any]]:
    """The axes of examples after a reshape, if examples stand along the first one."""
    first = target[0]
    number = after[first]
    if isinstance(label, tuple) and len(target) > 1 and number is not None:
        if label[0] == "joined" and number == len(label[1]) and len(set(label[1])) == 1:
            return [(target[1], label[1][0])]  # [2 * examples, n] -> [2, examples, n]
        if label[0] == "behind" and number == label[1]:
            return [(target[1], label[2])]
    if number is None or size == number or (size and number % size == 0):
        return [(first, label)]
    if len(target) > 1:  # groups of examples
        return [(first, ("group", op.name, label)), (target[1], ("in group", op.name, label))]
    return [(first, label)]


def _merged_parts(
    axes: dict[int, Any], others: list[int], before: list[Any], after: list[Any], target: list[int]
) -> list[tuple[int, Any]] | None:
    """Groups of examples that become a batch again."""
    places = sorted(axes)
    labels = [axes[a] for a in places]
    whole = [isinstance(label, tuple) and label[0] in ("group", "in group") for label in labels]
    if len(labels) != 2 or not all(whole) or labels[0][1:] != labels[1][1:]:
        return None
    if (
        labels[0][0] == "group"
        and places[1] == places[0] + 1
        and not any(i < places[0] for i in others)
    ):
        return [(target[0], labels[0][2])]
    return None


def _concat(flows: Dataflow, op: Any, inputs: list[Flow]) -> Flow:
    parts, axis_of = list(op.inputs)[:-1], _constant(op, inputs, -1)
    return _side_by_side(op, inputs[:-1], parts, axis_of)


def _side_by_side(op: Any, inputs: list[Flow], parts: list[Any], axis_of: Any) -> Flow:
    rank = op.outputs[0].shape.rank
    if axis_of is None or not rank:
        return _joined(op, inputs) if not any(f.axes for f in inputs) else _bad("unknown", op)
    axis = int(np.squeeze(axis_of)) % rank
    labels = [flow.label(axis) for flow in inputs]
    if all(label is None for label in labels):
        elements = None
        if rank == 1 and all(
            flow.elements or t.shape == (1,) or flow.kind == "fixed"
            for flow, t in zip(inputs, parts, strict=True)
        ):
            lists = [_elements(flow, t) for flow, t in zip(inputs, parts, strict=True)]
            if None not in lists:
                elements = tuple(itertools.chain.from_iterable(lists))  # type: ignore[arg-type]
        if elements is not None and _highest(inputs) in ("fixed", "size"):
            return Flow(_highest(inputs), degree=None, elements=elements)
        return _joined_apart(op, inputs)
    rest = [flow.along(a for a in flow.axes if a[0] != axis) for flow in inputs]
    out = _joined_apart(op, rest)
    if out.kind in BAD:
        return out
    if None in labels:
        known = [label for label in labels if label is not None]
        label: Any = ("mixed", op.name, known[0])
    else:
        flat: list[Any] = []
        for each in labels:
            joined = isinstance(each, tuple) and each[0] == "joined"
            flat += each[1] if joined else [each]
        label = ("joined", tuple(flat)) if len(flat) > 1 else flat[0]
    return out.along([*out.axes, (axis, label)])


def _joined_apart(op: Any, inputs: list[Flow]) -> Flow:
    """Of values that stand beside each other: each may be treated by itself later."""
    out = _joined(op, inputs)
    kinds = {flow.kind for flow in inputs}
    if out.kind == "nonlinear" and "nonlinear" not in kinds:
        return _bad("unknown", op)
    return out


def _elements(flow: Flow, tensor: Any) -> list[Flow] | None:
    if flow.elements is not None:
        return list(flow.elements)
    if tensor.shape.rank == 1 and tensor.shape[0] is not None and tensor.shape[0] <= 8:
        if flow.kind == "fixed":
            values = [None] * tensor.shape[0] if flow.constant is None else flow.constant
            return [Flow(constant=value) for value in values]
        if tensor.shape[0] == 1:
            return [flow._replace(elements=None)]
    return None


def _pack(flows: Dataflow, op: Any, inputs: list[Flow]) -> Flow:
    rank = op.outputs[0].shape.rank
    if rank == 1 and _highest(inputs) in ("fixed", "size") and not any(f.axes for f in inputs):
        elements = tuple(flow._replace(elements=None) for flow in inputs)
        return Flow(_highest(inputs), degree=None, elements=elements)
    if rank is None:
        return _joined_apart(op, inputs) if not any(f.axes for f in inputs) else _bad("unknown", op)
    axis = op.get_attr("axis") % rank
    shifted = [f.along((a + (a >= axis), label) for a, label in f.axes) for f in inputs]
    return _joined_apart(op, shifted)


def _unpack(flows: Dataflow, op: Any, inputs: list[Flow]) -> Any:
    flow, rank = inputs[0], op.inputs[0].shape.rank
    if flow.elements is not None and len(flow.elements) == len(op.outputs):
        return list(flow.elements)
    axis = op.get_attr("axis") % rank
    if flow.label(axis) is not None:
        return _selected_rows(op, flow)
    return flow.along((a - (a > axis), label) for a, label in flow.axes)


def _selected_rows(op: Any, flow: Flow) -> Flow:
    """Of some rows of a batch, chosen by their place: on each replica they are others."""
    if flow.kind == "size":
        return Flow("size", degree=None)
    return _bad("compared", op, [flow])


def _split(flows: Dataflow, op: Any, inputs: list[Flow]) -> Any:
    at, values = (0, 1) if op.type == "Split" else (2, 0)
    flow, axis_of = inputs[values], _constant(op, inputs, at)
    rank = op.inputs[values].shape.rank
    if not flow.axes:
        return flow._replace(elements=None)
    if axis_of is None or rank is None:
        return _bad("unknown", op)
    axis = int(np.squeeze(axis_of)) % rank
    label = flow.label(axis)
    if label is None:
        return flow.along(flow.axes)
    count = len(op.outputs)
    if count == 1:
        return flow
    if isinstance(label, tuple) and label[0] == "joined" and len(label[1]) % count == 0:
        each = len(label[1]) // count
        groups = [label[1][i * each : (i + 1) * each] for i in range(count)]
        rest = [a for a in flow.axes if a[0] != axis]
        return [flow.along([*rest, (axis, g[0] if len(g) == 1 else ("joined", g))]) for g in groups]
    return _selected_rows(op, flow)


def _slice_bounds(op: Any) -> list[tuple[Any, ...]] | None:
    """Of a StridedSlice, per entry: ("new",), ("all",), ("index", i) or ("range", i)."""
    begins = op.inputs[1].shape.num_elements()
    if begins is None:
        return None
    masks = {
        name: op.get_attr(name)
        for name in ("begin_mask", "end_mask", "ellipsis_mask", "new_axis_mask", "shrink_axis_mask")
    }
    out: list[tuple[Any, ...]] = []
    rank = op.inputs[0].shape.rank
    if rank is None:
        return None
    taken = sum(
        1 for i in range(begins) if not (masks["new_axis_mask"] | masks["ellipsis_mask"]) >> i & 1
    )
    for i in range(begins):
        bit = 1 << i
        if masks["ellipsis_mask"] & bit:
            out += [("all",)] * (rank - taken)
        elif masks["new_axis_mask"] & bit:
            out.append(("new",))
        elif masks["shrink_axis_mask"] & bit:
            out.append(("index", i))
        elif masks["begin_mask"] & bit and masks["end_mask"] & bit:
            out.append(("range", i, True, True))
        else:
            out.append(("range", i, bool(masks["begin_mask"] & bit), bool(masks["end_mask"] & bit)))
    length = sum(1 for entry in out if entry[0] != "new")
    return out + [("all",)] * (rank - length)


def _strided_slice(flows: Dataflow, op: Any, inputs: list[Flow]) -> Flow:
    flow = inputs[0]
    if flow.elements is not None:
        return _slice_of_elements(op, inputs)
    if not any(axis >= 0 for axis, _ in flow.axes):
        return flow
    entries = _slice_bounds(op)
    if entries is None:
        return _bad("unknown", op)
    axes: list[tuple[int, Any]] = [a for a in flow.axes if a[0] < 0]
    source = place = 0
    for entry in entries:
        if entry[0] == "new":
            place += 1
            continue
        label = flow.label(source)
        if label is not None:
            if entry[0] == "index":
                return _selected_rows(op, flow)
            part = label if entry[0] == "all" else _slice_label(flows, op, inputs, entry, label)
            if part is None:
                return _selected_rows(op, flow)
            axes.append((place, part))
        source += 1
        place += entry[0] != "index"
    return flow.along(axes)


def _slice_of_elements(op: Any, inputs: list[Flow]) -> Flow:
    flow = inputs[0]
    bounds = [_constant(op, inputs, i) for i in (1, 2, 3)]
    if flow.elements is None or any(b is None or np.size(b) != 1 for b in bounds):
        return Flow(flow.kind, degree=None)
    begin, end, stride = (int(np.squeeze(b)) for b in bounds)
    if op.get_attr("shrink_axis_mask"):
        if not -len(flow.elements) <= begin < len(flow.elements):
            return FIXED
        return flow.elements[begin]
    first = None if op.get_attr("begin_mask") else begin
    last = None if op.get_attr("end_mask") else end
    elements = flow.elements[slice(first, last, stride)]
    kind = _highest(list(elements)) if elements else "fixed"
    return Flow(kind, degree=None, elements=elements)


def _slice_label(
    flows: Dataflow, op: Any, inputs: list[Flow], entry: tuple[Any, ...], label: Any
) -> Any:
    """The label of a range of an axis; None if it selects some of the examples."""
    _, i, from_begin, to_end = entry
    strides = _constant(op, inputs, 3)
    if strides is None or int(strides[i]) != 1:
        return None
    begin, end = (_bound(flows, op.inputs[k], inputs[k], i) for k in (1, 2))
    from_begin = from_begin or begin == 0
    if from_begin and to_end:
        return label
    if isinstance(label, tuple) and label[0] == "joined":
        parts = label[1]
        first = 0 if from_begin else begin if begin == "size" else None
        if from_begin and end == "size":
            return parts[0]
        if first == "size" and to_end:
            rest = parts[1:]
            return rest[0] if len(rest) == 1 else ("joined", rest)
        return None
    return label if from_begin and end == "size" else None


def _bound(flows: Dataflow, tensor: Any, flow: Flow, i: int) -> Any:
    """A bound of a slice: a number, or "size" for that of the examples."""
    value = static_value(tensor) if flow.constant is None else flow.constant
    if value is not None:
        return int(value[i])
    element = flow.elements[i] if flow.elements is not None and i < len(flow.elements) else None
    if element is not None and element.constant is not None:
        return int(element.constant)
    if element is not None and element.sized is not None:
        return None
    if element is not None and element.kind == "size" and element.degree == 1:
        return "size"
    return None


def _slice(flows: Dataflow, op: Any, inputs: list[Flow]) -> Flow:
    flow = inputs[0]
    if not any(axis >= 0 for axis, _ in flow.axes):
        return flow._replace(elements=None)
    begin, size = _constant(op, inputs, 1), _constant(op, inputs, 2)
    sizes = inputs[2].elements
    for axis, label in flow.axes:
        if begin is None or begin[axis] != 0:
            return _selected_rows(op, flow)
        if size is not None and size[axis] in (-1, op.inputs[0].shape[axis]):
            continue
        if sizes is None or sizes[axis] != _size_of(label):
            return _selected_rows(op, flow)
    return flow


def _shape(flows: Dataflow, op: Any, inputs: list[Flow]) -> Any:
    return [_shape_of(flow, tensor) for flow, tensor in zip(inputs, op.inputs, strict=True)]


def _size_of(label: Any) -> Flow:
    """Of the size of an axis of this label."""
    return SIZE._replace(sized=None if label == EXAMPLES else label)


def _shape_of(flow: Flow, tensor: Any) -> Flow:
    rank = tensor.shape.rank
    if rank is None:
        return Flow("size" if flow.kind != "fixed" else "fixed", degree=None)
    elements = []
    for axis, size in enumerate(tensor.shape):
        label = flow.label(axis)
        if label is not None and _is_uneven(label):
            elements.append(Flow("reduced", degree=1))  # a number of selected values
        elif label is not None:
            elements.append(_size_of(label))
        elif flow.kind in BAD and size is None:
            elements.append(Flow("size", degree=None))
        else:
            elements.append(FIXED)
    kinds = [each.kind for each in elements]
    kind = "reduced" if "reduced" in kinds else "size" if "size" in kinds else "fixed"
    return Flow(kind, degree=None if kind != "reduced" else 1, elements=tuple(elements))


def _number(flows: Dataflow, op: Any, inputs: list[Flow]) -> Flow:
    flow = inputs[0]
    if op.type == "Rank" or (not flow.axes and flow.kind not in BAD):
        return FIXED
    if any(_is_uneven(label) for _, label in flow.axes):
        return Flow("reduced", degree=1)
    return Flow("size", degree=len(flow.axes) or None)


def _of_shape(flows: Dataflow, op: Any, vector: int, inputs: list[Flow], kind: str) -> Flow:
    """Of an operation that makes a tensor of a shape."""
    shape, flow = op.outputs[0].shape, inputs[vector]
    labels: list[tuple[int, Any]] = []
    if flow.kind == "fixed":
        return FIXED
    if flow.elements is not None:
        for axis, element in enumerate(flow.elements):
            if element.kind in ("size", "reduced"):
                plain = element.kind == "size" and element.degree in (1, None)
                label = (element.sized or EXAMPLES) if plain else ("of size", op.name)
                labels.append((axis, label))
    elif shape.rank:
        labels = [(axis, EXAMPLES) for axis, size in enumerate(shape) if size is None]
    return Flow(kind, tuple(labels)) if labels else FIXED


def _fill(flows: Dataflow, op: Any, inputs: list[Flow]) -> Flow:
    out = _of_shape(flows, op, 0, inputs, "size")
    return out if inputs[1].kind == "fixed" else _joined(op, [out, inputs[1]])


def _random(flows: Dataflow, op: Any, inputs: list[Flow]) -> Flow:
    """Each row is drawn for itself."""
    out = _of_shape(flows, op, 0, inputs, "rows")
    if len(op.inputs) > 1 and any(flow.axes for flow in inputs[1:]):
        return _by_rows(flows, op, inputs)
    return out


def _range(flows: Dataflow, op: Any, inputs: list[Flow]) -> Flow:
    if all(flow.kind == "fixed" for flow in inputs):
        return FIXED
    if any(flow.kind == "reduced" for flow in inputs):
        return Flow("size", ((0, ("of size", op.name)),))
    return Flow("size", ((0, EXAMPLES),))


def _broadcast_to(flows: Dataflow, op: Any, inputs: list[Flow]) -> Flow:
    flow = inputs[0]
    rank, before = op.outputs[0].shape.rank, op.inputs[0].shape.rank
    if rank is None or before is None:
        return flow if not flow.axes and inputs[1].kind == "fixed" else _bad("unknown", op)
    moved = flow.along((a + rank - before if a >= 0 else a, label) for a, label in flow.axes)
    added = [
        (axis, element.sized or EXAMPLES)
        for axis, element in enumerate(inputs[1].elements or ())
        if element.kind == "size" and moved.label(axis) is None
    ]
    return _with_sizes(op, moved, added)


def _with_sizes(op: Any, flow: Flow, added: list[tuple[int, Any]]) -> Flow:
    """Of a value that is repeated as often as there are examples."""
    if not added:
        return flow
    kind = "size" if flow.kind == "fixed" else flow.kind
    out = flow._replace(kind=kind).along([*flow.axes, *added])
    if flow.kind == "reduced":
        return out._replace(kind="rows", affine=True)
    return out._replace(origin=flow.origin or op) if out.has_pairs else out


def _tile(flows: Dataflow, op: Any, inputs: list[Flow]) -> Flow:
    flow, often = inputs[0], inputs[1]
    rank = op.inputs[0].shape.rank
    if rank is None:
        return flow if not flow.axes and often.kind == "fixed" else _bad("unknown", op)
    times = _constant(op, inputs, 1)
    shape, out = op.inputs[0].shape, op.outputs[0].shape
    axes: list[tuple[int, Any]] = [a for a in flow.axes if a[0] < 0]
    added: list[tuple[int, Any]] = []
    for axis in range(rank):
        label = flow.label(axis)
        element = often.elements[axis] if often.elements is not None else None
        grows = element is not None and element.kind == "size"
        number = None if times is None else int(times[axis])
        if number is None and element is not None and element.kind == "fixed":
            number = None if element.constant is None else int(element.constant)
            if number is None and shape[axis] and out[axis]:
                number = out[axis] // shape[axis]
        if label is None:
            if grows:
                added.append(
                    (axis, EXAMPLES if shape[axis] == 1 else ("behind", shape[axis], EXAMPLES))
                )
        elif number == 1:
            axes.append((axis, label))
        elif number is not None:
            joined = isinstance(label, tuple) and label[0] == "joined"
            parts = label[1] if joined else (label,)
            axes.append((axis, ("joined", parts * number)))
        else:
            axes.append((axis, ("repeated", label)))
    return _with_sizes(op, flow.along(axes), added)


def _pad(flows: Dataflow, op: Any, inputs: list[Flow]) -> Flow:
    return _joined_apart(op, [inputs[0], *(f._replace(axes=()) for f in inputs[2:])])


def _along_axis(flows: Dataflow, op: Any, inputs: list[Flow]) -> Flow:
    """Cumulated sums, reversed or rolled axes: whatever mixes the elements of some axes."""
    flow, rank = inputs[0], op.inputs[0].shape.rank
    if not flow.axes or flow.kind != "rows":
        return flow if flow.kind != "reduced" or op.type != "Cumprod" else _nonlinear(op, [flow])
    at = 2 if op.type == "Roll" else 1
    axes = _constant(op, inputs, at)
    if axes is None or rank is None:
        return _bad("unknown", op)
    if any(flow.label(int(a) % rank) is not None for a in np.ravel(axes)):
        return _bad("compared", op, [flow])
    return flow


def _gather(flows: Dataflow, op: Any, inputs: list[Flow]) -> Flow:
    params, indices = inputs[0], inputs[1]
    rank, of_indices = op.inputs[0].shape.rank, op.inputs[1].shape.rank
    if op.type == "ResourceGather":
        params, rank = FIXED, 2
        axis, batch_dims = 0, op.get_attr("batch_dims")
    elif op.type == "Gather":
        axis, batch_dims = 0, 0
    else:
        number = _constant(op, inputs, 2)
        if params.elements is not None and number is not None:
            return _gather_elements(op, inputs)
        batch_dims = op.get_attr("batch_dims")
        if rank is None or number is None:
            return _bad("unknown", op)
        axis = int(np.squeeze(number)) % rank
    if params.kind == "fixed" and indices.kind == "fixed":
        return FIXED
    if indices.kind == "reduced" or indices.affine:
        return _bad("nonlinear", op, inputs)
    if of_indices is None:
        return _bad("unknown", op)
    label = params.label(axis)
    if label is not None:
        if not (indices.axes and indices.label(0) is not None):
            return _selected_rows(op, params)
        if _is_uneven(indices.label(0)) or _is_place(op.inputs[1]):
            at = [(axis, indices.label(0))]
            return params.along([a for a in params.axes if a[0] != axis] + at)
        return _selected_rows(op, params)
    width = of_indices - batch_dims
    moved = [(a if a < axis else a + width - 1, lab) for a, lab in params.axes]
    mine = [(a if a < batch_dims else a + axis - batch_dims, lab) for a, lab in indices.axes]
    linear = Flow(params.kind if params.kind == "reduced" else "fixed", degree=params.degree)
    if params.kind == "reduced":
        return (
            _with_sizes(op, linear, mine)
            if indices.kind == "size"
            else linear.along(mine)._replace(kind="rows", affine=True)
        )
    return _nonlinear_rows(op, [params.along(moved), indices.along(mine)], params)


def _nonlinear_rows(op: Any, flows: list[Flow], params: Flow) -> Flow:
    out = _nonlinear(op, [flow._replace(affine=False) for flow in flows])
    if out.kind in BAD:
        return out
    return out._replace(affine=params.affine, degree=params.degree)


def _gather_elements(op: Any, inputs: list[Flow]) -> Flow:
    params, places = inputs[0], _constant(op, inputs, 1)
    if places is None or params.elements is None:
        return Flow(params.kind, degree=None)
    chosen = [params.elements[int(i)] for i in np.ravel(places)]
    if not np.ndim(places):
        return chosen[0]
    kind = _highest(chosen) if chosen else "fixed"
    return Flow(kind, degree=None, elements=tuple(chosen))


def _is_place(indices: Any) -> bool:
    """Whether indices are 0, 1, 2 ... of all examples, so that each is taken for itself."""
    while indices.op.type in (*_SAME, "Reshape", "ExpandDims"):
        indices = indices.op.inputs[0]
    return bool(indices.op.type == "Range")


def _gather_nd(flows: Dataflow, op: Any, inputs: list[Flow]) -> Flow:
    params, indices = (FIXED, inputs[1]) if op.type == "ResourceGatherNd" else inputs
    if params.kind == "reduced" or params.affine or indices.kind == "reduced":
        return _bad("nonlinear", op, inputs)
    rank = op.inputs[1].shape.rank
    rows = [a for a in indices.axes if rank is None or a[0] != rank - 1]
    if params.axes:
        place = _first_index(op.inputs[1])
        if not rows or params.axes[0][0] != 0 or len(params.axes) > 1:
            return _selected_rows(op, params)
        if not (_is_uneven(rows[0][1]) or (place is not None and _is_place(place))):
            return _selected_rows(op, params)
    kind = "rows" if "rows" in (params.kind, indices.kind) else _highest(inputs)
    return Flow(kind, tuple(rows), params.degree, origin=indices.origin)


def _first_index(indices: Any) -> Any:
    """The tensor of the first component of indices [..., n]; None if it cannot be told."""
    while indices.op.type in _SAME:
        indices = indices.op.inputs[0]
    if indices.op.type in ("Pack", "ConcatV2"):
        return indices.op.inputs[0]
    return None


def _where(flows: Dataflow, op: Any, inputs: list[Flow]) -> Flow:
    if not inputs[0].axes:
        return _bad("nonlinear", op, inputs) if inputs[0].kind == "reduced" else inputs[0]
    if inputs[0].kind == "size" or inputs[0].has_pairs:
        return Flow("rows", ((0, ("selected", op.name)),), origin=inputs[0].origin)
    return Flow("rows", ((0, ("selected", op.name)),))


def _dynamic_partition(flows: Dataflow, op: Any, inputs: list[Flow]) -> Any:
    if not any(flow.axes for flow in inputs):
        return _nonlinear(op, inputs)
    if any(flow.kind == "reduced" or flow.affine for flow in inputs):
        return _bad("nonlinear", op, inputs)
    return [Flow("rows", ((0, ("selected", f"{op.name}:{i}")),)) for i in range(len(op.outputs))]


def _one_hot(flows: Dataflow, op: Any, inputs: list[Flow]) -> Flow:
    flow, rank = inputs[0], op.outputs[0].shape.rank
    if flow.kind == "reduced":
        return _bad("nonlinear", op, inputs)
    if rank is None:
        return _bad("unknown", op) if flow.axes else flow
    axis = op.get_attr("axis") % rank
    out = flow.along((a + (a >= axis), label) for a, label in flow.axes)
    if inputs[1].kind == "size":
        out = _with_sizes(op, out, [(axis, EXAMPLES)])
        return out._replace(kind="size") if flow.kind != "rows" else out
    return out


def _diag(flows: Dataflow, op: Any, inputs: list[Flow]) -> Flow:
    flow, rank = inputs[0], op.inputs[0].shape.rank
    if rank is None:
        return flow if not flow.axes else _bad("unknown", op)
    if op.type in ("Diag", "MatrixDiag", "MatrixDiagV2", "MatrixDiagV3"):
        label = flow.label(rank - 1)
        if label is None:
            return flow.along(flow.axes)
        return flow.along([*flow.axes, (rank, label)])._replace(origin=flow.origin or op)
    first, second = flow.label(rank - 2), flow.label(rank - 1)
    if first != second:
        return _bad("compared" if flow.kind == "rows" else "unknown", op, [flow])
    rest = [a for a in flow.axes if a[0] < rank - 1]
    return flow.along(rest)._replace(origin=None)


def _triangle(flows: Dataflow, op: Any, inputs: list[Flow]) -> Flow:
    return inputs[0]


def _matmul(flows: Dataflow, op: Any, inputs: list[Flow]) -> Flow:
    ranks = [t.shape.rank for t in list(op.inputs)[:2]]
    if None in ranks:
        return _bad("unknown", op) if any(f.axes for f in inputs) else _product(op, inputs[:2])
    names = ("transpose_a", "transpose_b") if op.type == "MatMul" else ("adj_x", "adj_y")
    turned = [op.get_attr(name) for name in names]
    batch = [f"b{i}" for i in range(max(ranks) - 2)]
    left = ["i", "k"][:: -1 if turned[0] else 1]
    right = ["k", "j"][:: -1 if turned[1] else 1]
    terms = [
        batch[len(batch) - (ranks[0] - 2) :] + left,
        batch[len(batch) - (ranks[1] - 2) :] + right,
    ]
    return _contraction(op, inputs[:2], terms, [*batch, "i", "j"])


def _contraction(op: Any, inputs: list[Flow], terms: list[list[str]], result: list[str]) -> Flow:
    """Of a product of tensors, with named axes, summed over those that the result lacks."""
    names = list(dict.fromkeys(itertools.chain(*terms)))
    place = {name: i for i, name in enumerate(names)}
    flow = None
    for each, term in zip(inputs, terms, strict=True):
        named = each.along((place[term[a]] if a >= 0 else a, label) for a, label in each.axes)
        flow = named if flow is None else _product(op, [flow, named])
        if flow.kind in BAD:
            return flow
    assert flow is not None
    over = {place[name] for name in names if name not in result}
    for axis, label in flow.axes:
        # A sum over examples of one factor with what is at their place in another.
        if axis in over and label is not None and len(flow.axes) > 1:
            return _bad("compared", op, [flow])
    flow = _total(op, flow, over, "Sum", keep=True)
    if flow.kind in BAD:
        return flow
    out = {i: result.index(name) for name, i in place.items() if name in result}
    return flow.along((out[a] if a >= 0 else a, label) for a, label in flow.axes)


def _einsum(flows: Dataflow, op: Any, inputs: list[Flow]) -> Flow:
    equation = op.get_attr("equation").decode().replace(" ", "")
    sides, result = equation.split("->")
    terms: list[list[str]] = []
    broad = 0
    for term, tensor in zip(sides.split(","), op.inputs, strict=True):
        if tensor.shape.rank is None:
            return _bad("unknown", op)
        number = tensor.shape.rank - len(term.replace("...", "")) if "..." in term else 0
        broad = max(broad, number)
        terms.append(_letters(term, number))
    return _contraction(op, inputs, terms, _letters(result, broad))


def _letters(term: str, broad: int) -> list[str]:
    before, dots, after = term.partition("...")
    return [*before, *(f"...{i}" for i in range(-broad, 0) if dots), *after]


def _segments(flows: Dataflow, op: Any, inputs: list[Flow]) -> Flow:
    data, ids = inputs[0], inputs[1]
    if any(flow.kind == "reduced" or flow.affine for flow in inputs):
        return _bad("nonlinear", op, inputs)
    numbered = inputs[2] if len(inputs) > 2 else FIXED
    joined = op.inputs[1].shape.rank  # the first axes of the data become one
    if joined and ids.kind == numbered.kind == "fixed" and all(a >= joined for a, _ in data.axes):
        return data.along((a + 1 - joined, label) for a, label in data.axes)
    if data.label(0) is None and ids.label(0) is None:
        return _by_rows(flows, op, inputs)
    if not op.type.endswith("Sum") or "Sparse" in op.type:
        return _bad("compared", op, inputs)
    if numbered.kind == "size" or op.type == "SegmentSum":
        return Flow("rows", ((0, EXAMPLES),))
    return Flow("reduced", degree=1)


def _bincount(flows: Dataflow, op: Any, inputs: list[Flow]) -> Flow:
    rank = op.inputs[0].shape.rank
    if rank == 1 or op.type == "Bincount":
        return Flow("reduced", degree=1)
    return _by_rows(flows, op, inputs)


def _scatter(flows: Dataflow, op: Any, inputs: list[Flow]) -> Flow:
    if op.type == "ScatterNd":
        indices, updates, target = inputs[0], inputs[1], FIXED
        if inputs[2].kind == "size":
            return Flow("rows", ((0, EXAMPLES),))
    else:
        target, indices, updates = inputs
        if target.axes:
            return _by_rows(flows, op, inputs)
    if any(flow.kind == "reduced" or flow.affine for flow in (indices, updates)):
        if indices.kind == "fixed" and not indices.axes:
            return _joined_apart(op, [target, updates])
        return _bad("nonlinear", op, inputs)
    if not (indices.axes or updates.axes):
        return _joined_apart(op, [target, updates, indices])
    if op.type in ("ScatterNd", "TensorScatterAdd", "TensorScatterSub"):
        return Flow("reduced", degree=1)
    return Flow("rows", ((0, ("mixed", op.name, EXAMPLES)),))


def _list_item(flows: Dataflow, op: Any, inputs: list[Flow]) -> Flow:
    """An element of a list of tensors, of which `axes` are those of the stacked list."""
    flow = inputs[0]
    axes = [(ITERATIONS if a == 0 else a - 1, label) for a, label in flow.axes]
    return flow.along(axes)


def _list_with_item(flows: Dataflow, op: Any, inputs: list[Flow]) -> Flow:
    at = 2 if op.type == "TensorListSetItem" else 1
    item = inputs[at]
    axes = [(0 if a == ITERATIONS else a + 1, label) for a, label in item.axes]
    if inputs[0].kind == "fixed":
        return item.along(axes)
    return _joined(op, [inputs[0], item.along(axes)])


def _list_pop(flows: Dataflow, op: Any, inputs: list[Flow]) -> Any:
    return [inputs[0], _list_item(flows, op, inputs)]


def _batch_norm(flows: Dataflow, op: Any, inputs: list[Flow]) -> Any:
    if not op.get_attr("is_training"):
        return [inputs[0]] + [FIXED] * (len(op.outputs) - 1)
    return _bad("compared", op, inputs) if inputs[0].axes else inputs[0]


def _filter_gradient(flows: Dataflow, op: Any, inputs: list[Flow]) -> Flow:
    if any(flow.kind == "reduced" or flow.affine for flow in inputs):
        return _bad("nonlinear", op, inputs)
    return Flow("reduced", degree=1) if any(flow.axes for flow in inputs) else _joined(op, inputs)


def _shuffled(flows: Dataflow, op: Any, inputs: list[Flow]) -> Flow:
    return _selected_rows(op, inputs[0]) if inputs[0].kind == "rows" else inputs[0]


def _like(flows: Dataflow, op: Any, inputs: list[Flow]) -> Flow:
    flow = inputs[0]
    return Flow("size", flow.axes) if flow.axes else FIXED


def _unique(flows: Dataflow, op: Any, inputs: list[Flow]) -> Flow:
    return _bad("compared", op, inputs) if inputs[0].axes else inputs[0]


def _identities(flows: Dataflow, op: Any, inputs: list[Flow]) -> Any:
    return inputs


def _by_rows(flows: Dataflow, op: Any, inputs: list[Flow]) -> Any:
    """Of any other operation: its first axis is that of the examples, as of a convolution."""
    if any(flow.kind == "reduced" or flow.affine for flow in inputs):
        return _bad("nonlinear", op, inputs)
    if op.type.endswith(_FILTER_GRADIENTS):
        return _filter_gradient(flows, op, inputs)
    kind = _highest(inputs)
    if kind in ("fixed", "size") and not any(flow.axes for flow in inputs):
        return Flow(kind, degree=None if kind == "size" else 0)
    iterations = [a for flow in inputs for a in flow.axes if a[0] == ITERATIONS]
    if any(axis > 0 for flow in inputs for axis, _ in flow.axes):
        return _bad("unknown", op, inputs)
    labels = {label for flow in inputs for axis, label in flow.axes if axis == 0}
    if len(labels) > 1:
        return _bad("unknown", op, inputs)
    origin = next((flow.origin for flow in inputs if flow.origin is not None), None)
    out = []
    for tensor in op.outputs:
        axes = list(dict.fromkeys(iterations))
        if labels and tensor.shape.rank != 0:
            axes.append((0, next(iter(labels))))
        elif labels:
            out.append(_bad("unknown", op))
            continue
        out.append(Flow(kind, tuple(axes), origin=origin))
    return out


def _rules(rule: Callable[..., Any], names: Iterable[str]) -> dict[str, Callable[..., Any]]:
    return dict.fromkeys(names, rule)


_RULES: dict[str, Callable[[Dataflow, Any, list[Flow]], Any]] = {
    **_rules(_same, _SAME),
    **_rules(_sum_rule, _SUMS),
    **_rules(_product_rule, ["Mul", "MulNoNan", *_QUOTIENTS]),
    **_rules(_elementwise, _ELEMENTWISE),
    **_rules(_select, ["Select", "SelectV2"]),
    **_rules(_reduction, REDUCTIONS),
    **_rules(_last_axis, ["Softmax", "LogSoftmax", "TopKV2", "TopK"]),
    **_rules(
        _cross_entropy,
        ["SoftmaxCrossEntropyWithLogits", "SparseSoftmaxCrossEntropyWithLogits"],
    ),
    **_rules(_matmul, ["MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3"]),
    **_rules(_split, ["Split", "SplitV"]),
    **_rules(_shape, ["Shape", "ShapeN"]),
    **_rules(_number, ["Size", "Rank"]),
    **_rules(_random, _RANDOM),
    **_rules(_pad, ["Pad", "PadV2", "MirrorPad"]),
    **_rules(_along_axis, ["Cumsum", "Cumprod", "CumulativeLogsumexp", "ReverseV2", "Roll"]),
    **_rules(_gather, ["Gather", "GatherV2", "ResourceGather"]),
    **_rules(_gather_nd, ["GatherNd", "ResourceGatherNd"]),
    **_rules(
        _diag,
        [
            *("Diag", "MatrixDiag", "MatrixDiagV2", "MatrixDiagV3"),
            *("DiagPart", "MatrixDiagPart", "MatrixDiagPartV2", "MatrixDiagPartV3"),
        ],
    ),
    **_rules(_triangle, ["MatrixBandPart", "MatrixSetDiag", "MatrixSetDiagV2", "MatrixSetDiagV3"]),
    **_rules(
        _segments,
        [
            f"{ids}Segment{how}"
            for ids in ("", "Unsorted")
            for how in ("Sum", "Mean", "Max", "Min", "Prod")
        ],
    ),
    **_rules(_bincount, ["Bincount", "DenseBincount"]),
    **_rules(
        _scatter,
        [
            *("ScatterNd", "TensorScatterUpdate", "TensorScatterAdd", "TensorScatterSub"),
            *("TensorScatterMax", "TensorScatterMin"),
        ],
    ),
    **_rules(_list_with_item, ["TensorListSetItem", "TensorListPushBack"]),
    **_rules(_same, ["TensorListFromTensor", "TensorListStack"]),
    **_rules(_batch_norm, ["FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3"]),
    **_rules(_like, ["ZerosLike", "OnesLike"]),
    **_rules(_unique, ["Unique", "UniqueV2", "UniqueWithCounts", "UniqueWithCountsV2"]),
    "IdentityN": _identities,
    "TensorListGetItem": _list_item,
    "TensorListPopBack": _list_pop,
    "L2Loss": _l2_loss,
    "Transpose": _transpose,
    "ExpandDims": _expand,
    "Squeeze": _squeeze,
    "Reshape": _reshape,
    "ConcatV2": _concat,
    "Pack": _pack,
    "Unpack": _unpack,
    "StridedSlice": _strided_slice,
    "Slice": _slice,
    "Fill": _fill,
    "Range": _range,
    "BroadcastTo": _broadcast_to,
    "Tile": _tile,
    "Where": _where,
    "DynamicPartition": _dynamic_partition,
    "OneHot": _one_hot,
    "Einsum": _einsum,
    "RandomShuffle": _shuffled,
}


PRIVATE_NAMES: list[tuple[Any, str]] = [(tf.Graph, "_get_function")]
"""(owner, name) of each private name that this module uses; see `keras_compat.missing_names`."""
