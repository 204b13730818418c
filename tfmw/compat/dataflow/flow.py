"""The flow of a tensor from the examples of a batch, and combinations of flows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from tfmw.compat.graph import static_value

EXAMPLES = "examples"
"""The label of an axis along which the examples of a batch follow each other."""

SEGMENTS = "segments"

ITERATIONS = -1
"""The axis of a value that belongs to another example in each iteration of a loop."""


class Flow(NamedTuple):
    """Dependence of a tensor on the examples of a batch.

    Attributes:
        kind: "fixed": does not depend on examples. "size": depends on their number only. "rows":
            has a value for each example, along `axes`, which depends on this example only.
            "reduced": is linear in a sum or mean over examples. "compared": depends on several
            examples in another way. "nonlinear": depends on a reduction in another way. "unknown".
        axes: (axis, label) of each axis along which examples differ; axes of equal labels have the
            same examples, in the same order.
        degree: the power of the number of examples with which it grows: 1 for a sum, 0 for a mean.
            None: another function.
        affine: whether a reduction has been added to rows.
        elements: the flow of each element, for a vector of sizes.
        sized: the label of the axis with this size, if it is not that of the examples; `SEGMENTS`
            for the row of each value of a ragged tensor.
        constant: the value of a small constant.
        origin: the operation that made it "compared", "nonlinear" or "unknown", or that made pairs;
            of a "fixed" number: the padding to the longest row of a batch, whose length it is.
        diagonal: whether pairs of different examples are zeros.
    """

    kind: str = "fixed"
    axes: tuple[tuple[int, Any], ...] = ()
    degree: int | None = 0
    affine: bool = False
    elements: tuple[Flow, ...] | None = None
    sized: Any = None
    constant: Any = None
    origin: Any = None
    diagonal: bool = False

    @property
    def has_pairs(self) -> bool:
        """Whether examples vary along two axes, as in a matrix of pairs."""
        labels = [label for _, label in self.axes]
        return self.kind == "rows" and len(set(labels)) < len(labels)

    def label(self, axis: int) -> Any:
        """Label of an axis; None if examples do not vary along it."""
        return dict(self.axes).get(axis)

    def along(self, axes: Iterable[tuple[int, Any]]) -> Flow:
        """The same flow along other axes."""
        return self._replace(axes=tuple(sorted(axes, key=lambda a: a[0])), elements=None)


FIXED = Flow()

SIZE = Flow("size", degree=1)

BAD = ("compared", "nonlinear", "unknown")

SMALL = 16  # most elements of a constant whose value is followed


class UnknownArgument(Exception):
    """A rule needs a rank, or the value of an input, that is unknown while the step is traced."""


def constant_input(op: Any, inputs: list[Flow], i: int) -> Any:
    """The value of a constant input; None if it is not known."""
    known = inputs[i].constant
    return static_value(op.inputs[i]) if known is None else known


def known_input(op: Any, inputs: list[Flow], i: int) -> Any:
    """The value of a constant input. Raises UnknownArgument if it is not known."""
    value = constant_input(op, inputs, i)
    if value is None:
        raise UnknownArgument
    return value


def known_rank(tensor: Any) -> int:
    """The rank of a tensor. Raises UnknownArgument if it is not known."""
    rank: int | None = tensor.shape.rank
    if rank is None:
        raise UnknownArgument
    return rank


def flow_without_argument(op: Any, inputs: list[Flow]) -> Flow:
    """Flow of an operation whose rule has raised UnknownArgument.

    It is that of the first input, if the others are fixed and examples vary along no axis.
    """
    if inputs[0].axes or any(flow.kind != "fixed" for flow in inputs[1:]):
        return bad_flow("unknown", op)
    return inputs[0]._replace(elements=None)


def bad_flow(kind: str, op: Any, flows: Sequence[Flow] = ()) -> Flow:
    """Flow of a value that replicas cannot combine; an earlier operation may be the origin."""
    return Flow(kind, origin=_origin_of(flows) or op)


def _origin_of(flows: Iterable[Flow]) -> Any:
    return next((flow.origin for flow in flows if flow.origin is not None), None)


def worst_flow(flows: Sequence[Flow]) -> Flow | None:
    """The first flow of the first kind in `BAD` that occurs; None if replicas can combine all."""
    return next((flow for kind in BAD for flow in flows if flow.kind == kind), None)


def aligned_flows(op: Any, flows: list[Flow]) -> list[Flow]:
    """Flows of inputs that are broadcast, with axes numbered as in the result."""
    ranks = [tensor.shape.rank for tensor in op.inputs]
    if None in ranks:
        return flows
    return [
        flow.along((a + max(ranks) - rank if a >= 0 else a, label) for a, label in flow.axes)
        for flow, rank in zip(flows, ranks, strict=True)
    ]


def has_total(flows: Iterable[Flow]) -> bool:
    """Whether any of several values contains a reduction over examples."""
    return any(flow.kind == "reduced" or flow.affine for flow in flows)


def _together(op: Any, flows: list[Flow]) -> Flow:
    """Flow of several values together; "compared" if an axis has different examples."""
    axes: dict[int, Any] = {}
    for flow in flows:
        for axis, label in flow.axes:
            if axes.setdefault(axis, label) != label:
                return bad_flow("compared", op, flows)
    pairs = len(set(axes.values())) < len(axes)
    origin = _origin_of(flows) or (op if pairs else None)
    return Flow(highest_kind(flows), origin=origin).along(axes.items())


def highest_kind(flows: Iterable[Flow]) -> str:
    """The kind of several values together, none of which is in `BAD`."""
    order = ("fixed", "size", "reduced", "rows")
    return max((flow.kind for flow in flows), key=order.index, default="fixed")


def vector_flow(elements: Iterable[Flow]) -> Flow:
    """Flow of a vector of numbers with these flows."""
    elements = tuple(elements)
    return Flow(highest_kind(elements), degree=None, elements=elements)


def with_padded_length(op: Any, flows: list[Flow]) -> Flow | None:
    """Flow of a result that depends on the length to which rows were padded; None if it does not.

    Integers that depend on it are usually positions or shapes, so only other numbers count.
    """
    padded = [f for f in flows if f.kind == "fixed" and f.origin is not None]
    if not padded:
        return None
    if len(padded) == len(flows) or all(flow.kind == "fixed" for flow in flows):
        return padded[0]
    return bad_flow("compared", op, padded) if op.outputs[0].dtype.is_floating else None


def joined_flow(op: Any, flows: list[Flow]) -> Flow:
    """Flow of a sum, or of a choice between several values."""
    bad = worst_flow(flows) or with_padded_length(op, flows)
    if bad is not None:
        return bad
    out = _together(op, flows)
    if out.kind == "fixed":
        return FIXED
    if out.kind in BAD:
        return out
    if out.kind == "size":
        same = len({flow.degree for flow in flows}) == 1
        return out._replace(degree=flows[0].degree if same else None)
    degrees = {flow.degree for flow in flows if flow.kind != "size" or flow.axes}
    if any(flow.kind == "size" and not flow.axes and flow.degree for flow in flows):
        return bad_flow("nonlinear", op, flows)
    if len(degrees) > 1:
        if out.kind == "reduced":
            return bad_flow("nonlinear", op, flows)
        return out._replace(degree=None)
    return out._replace(degree=degrees.pop(), affine=out.kind == "rows" and has_total(flows))


def nonlinear_flow(op: Any, flows: list[Flow]) -> Flow:
    """Flow of a nonlinear elementwise function."""
    if (padded := with_padded_length(op, flows)) is not None:
        return padded
    if has_total(flows):
        return bad_flow("nonlinear", op, flows)
    out = _together(op, flows)
    return out._replace(degree=None) if out.kind == "size" and not out.axes else out


def product_flow(op: Any, flows: list[Flow], quotient: bool = False) -> Flow:
    """Flow of a product or quotient of two values."""
    if (padded := with_padded_length(op, flows)) is not None:
        return padded
    a, b = flows
    varying = [flow for flow in flows if has_total([flow])]
    others = [flow for flow in flows if flow.kind in ("rows", "reduced")]
    if varying and (len(others) > 1 or (quotient and varying[-1] is b)):
        return bad_flow("nonlinear", op, flows)
    out = _together(op, flows)
    if out.kind in BAD:
        return out
    degree = None
    if a.degree is not None and b.degree is not None:
        degree = a.degree - b.degree if quotient else a.degree + b.degree
    return out._replace(degree=degree, affine=any(flow.affine for flow in flows))


def total_flow(op: Any, flow: Flow, axes: set[int], how: str, keep: bool = False) -> Flow:
    """Flow of a reduction over some axes."""
    over = {axis: label for axis, label in flow.axes if axis in axes}

    def moved(axis: int) -> int:
        return axis if keep or axis < 0 else axis - sum(1 for other in axes if other < axis)

    left = [(moved(axis), label) for axis, label in flow.axes if axis not in axes]
    linear = how in ("Sum", "Mean")
    if not over:
        out = flow.along(left)
        if linear or flow.kind == "fixed":
            return out
        return nonlinear_flow(op, [out]) if flow.kind != "size" else out
    if flow.kind == "size":
        if not linear:
            return Flow("size", tuple(left), None)
        degree = flow.degree if how == "Mean" or flow.degree is None else flow.degree + len(over)
        kind = "reduced" if any(map(is_uneven, over.values())) else "size"
        return Flow(kind, tuple(left), degree)
    if flow.diagonal and how == "Sum" and len(over) == len(left) == 1:
        return flow.along(left)._replace(diagonal=False, origin=None)
    if flow.has_pairs or left or not linear:
        return bad_flow("compared", op, [flow])
    if how == "Mean" and any(map(is_uneven, over.values())):
        return bad_flow("nonlinear", op)
    degree = flow.degree
    if how == "Sum":
        degree = None if degree is None else degree + 1
    return Flow("reduced", degree=degree)


def is_uneven(label: Any) -> bool:
    """Whether the size of an axis is no multiple of the number of examples."""
    return tag_of(label) in ("selected", "mixed")


def tag_of(label: Any) -> Any:
    """The first element of a label that is a tuple, such as "joined"; None for other labels."""
    return label[0] if isinstance(label, tuple) else None


def joined_parts(label: Any) -> tuple[Any, ...]:
    """The labels of the values concatenated along an axis: one, unless it is a `joined_label`."""
    return label[1] if tag_of(label) == "joined" else (label,)


def joined_label(parts: Sequence[Any]) -> Any:
    """The label of an axis along which the values of several axes are concatenated."""
    return parts[0] if len(parts) == 1 else ("joined", tuple(parts))


def joined_apart(op: Any, inputs: list[Flow]) -> Flow:
    """Flow of stacked values, which later operations may treat separately."""
    kinds = {flow.kind for flow in inputs}
    if "reduced" in kinds:  # beside a sum, the number of examples is a sum of ones
        inputs = [f if f.axes or f.kind != "size" else f._replace(kind="reduced") for f in inputs]
    out = joined_flow(op, inputs)
    if out.kind == "nonlinear" and "nonlinear" not in kinds:
        return bad_flow("unknown", op)
    return out


def by_rows(op: Any, inputs: list[Flow]) -> Any:
    """Flow of other operations, such as a convolution: their first axis has the examples."""
    if has_total(inputs):
        return bad_flow("nonlinear", op, inputs)
    if op.type.endswith(("BackpropFilter", "BiasAddGrad", "BackpropFilterV2")):
        if any(flow.axes for flow in inputs):
            return Flow("reduced", degree=1)
        return joined_flow(op, inputs)
    kind = highest_kind(inputs)
    if kind in ("fixed", "size") and not any(flow.axes for flow in inputs):
        return Flow(kind, degree=None if kind == "size" else 0)
    iterations = [a for flow in inputs for a in flow.axes if a[0] == ITERATIONS]
    labels = {label for flow in inputs for axis, label in flow.axes if axis == 0}
    if len(labels) > 1 or any(axis > 0 for flow in inputs for axis, _ in flow.axes):
        return bad_flow("unknown", op, inputs)
    out = []
    for tensor in op.outputs:
        axes = list(dict.fromkeys(iterations))
        if labels and tensor.shape.rank != 0:
            axes.append((0, next(iter(labels))))
        elif labels:
            out.append(bad_flow("unknown", op))
            continue
        out.append(Flow(kind, tuple(axes), origin=_origin_of(inputs)))
    return out


Rule = Callable[[Any, list[Flow]], Any]
"""(an operation, the flows of its inputs) -> a flow, or one for each output."""


def rules(table: dict[str, Rule]) -> dict[str, Rule]:
    """Rule of each operation; in `table`, names of operations with one rule share a key."""
    return {name: rule for names, rule in table.items() for name in names.split()}
