"""Walks over TensorFlow graphs: iterative, and each operation is visited once.

    ancestors([loss])                      # inputs before the operations that use them
    descendants([variable.handle])         # names of the operations that use it, at any distance

Users' graphs are deep, and many paths lead to shared parts. Recursion would exceed Python's limit.
A walk that does not remember visited nodes would take twice the time with each addition.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

Node = TypeVar("Node", bound=Hashable)


def inputs_first(ends: Iterable[Node], inputs: Callable[[Node], Iterable[Node]]) -> list[Node]:
    """The nodes that `ends` depend on, and `ends`: each once, after its inputs.

    Args:
        ends: nodes of any graph.
        inputs: the nodes that a node uses directly; called once for each node.
    """
    order: list[Node] = []
    opened: dict[Node, bool] = {}  # node -> whether it is in `order`
    left = list(ends)[::-1]
    while left:
        node = left[-1]
        if node not in opened:
            opened[node] = False
            left += [each for each in inputs(node) if each not in opened][::-1]
            continue
        left.pop()
        if opened.get(node) is False:
            opened[node] = True
            order.append(node)
    return order


def ancestors(
    ends: Iterable[tf.Tensor | tf.Operation],
    *,
    stop: Callable[[tf.Tensor], bool] | None = None,
    controls: bool = False,
) -> list[tf.Operation]:
    """The operations that compute some tensors or operations: each once, after its inputs.

    Args:
        ends: symbolic tensors of one graph, or operations, which are included.
        stop: whether a tensor counts as an input; the operation before it is not visited through
            it.
        controls: whether control inputs are followed, too.
    """

    def before(op: tf.Operation) -> list[tf.Operation]:
        found = [t.op for t in op.inputs if stop is None or not stop(t)]
        return [*found, *op.control_inputs] if controls else found

    starts = [
        end if isinstance(end, tf.Operation) else end.op
        for end in ends
        if stop is None or isinstance(end, tf.Operation) or not stop(end)
    ]
    return inputs_first(starts, before)


def descendants(tensors: Iterable[tf.Tensor]) -> set[str]:
    """Names of the operations that use some symbolic tensors, directly or not.

    Args:
        tensors: for example the handle of a variable. It has few users in a large graph, so this is
            cheaper than `ancestors` of an assigned value.
    """

    def users(tensors: Iterable[tf.Tensor]) -> list[tf.Operation]:
        return [op for tensor in tensors for op in tensor.consumers()]

    return {op.name for op in inputs_first(users(tensors), lambda op: users(op.outputs))}


def depends_on(value: tf.Tensor, given: tf.Tensor) -> bool:
    """Whether a symbolic tensor is computed from another one of its graph."""
    return any(tensor is given for op in ancestors([value]) for tensor in op.inputs)


def calls_function(op: tf.Operation) -> bool:
    """Whether an operation runs a function, such as `tf.cond` and `tf.while_loop`."""
    return any(attribute.HasField("func") for attribute in op.node_def.attr.values())


def is_pure(op: tf.Operation) -> bool:
    """Whether an operation depends on its inputs alone: on no state, and calls no function."""
    return not (op.op_def.is_stateful or op.type == "Placeholder" or calls_function(op))


def function_of(
    values: Sequence[tf.Tensor], given: Sequence[tf.Tensor]
) -> Callable[[Sequence[tf.Tensor]], list[tf.Tensor]] | None:
    """The function that computes symbolic tensors from others of their graph.

    Other graphs can call it with values for `given`. None if it depends on anything else: on a
    variable, an input of the graph, a random number.
    """
    numbers = {tensor.name: number for number, tensor in enumerate(given)}
    ops = ancestors(values, stop=lambda tensor: tensor.name in numbers)
    if not all(map(is_pure, ops)):
        return None
    nodes = [tf.compat.v1.NodeDef.FromString(op.node_def.SerializeToString()) for op in ops]
    for node in nodes:
        inputs = [name for name in node.input if not name.startswith("^")]
        del node.input[:]
        node.input.extend(inputs)
        node.attr.pop("_class", None)  # this attribute names an operation to be placed with
        node.device = ""
    graph_def = tf.compat.v1.GraphDef(node=nodes)
    used = {tensor.name for op in ops for tensor in op.inputs} & numbers.keys()
    computed = [value.name for value in values if value.name not in numbers]

    def call(new: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        mapping = {name: new[numbers[name]] for name in used}
        found = iter(tf.graph_util.import_graph_def(graph_def, mapping, computed) or ())
        names = [value.name for value in values]
        return [new[numbers[name]] if name in numbers else next(found) for name in names]

    return call


def is_symbolic(value: Any) -> bool:
    """Whether a value is a tensor of a graph."""
    return isinstance(value, tf.Tensor) and hasattr(value, "graph")


def static_value(tensor: tf.Tensor) -> np.ndarray | None:
    """`tf.get_static_value` without recursion, for a tensor after any number of casts."""
    casts = []
    while tensor.op.type in ("Cast", "Identity", "StopGradient"):
        casts.append(tensor.dtype.as_numpy_dtype)
        tensor = tensor.op.inputs[0]
    value = tf.get_static_value(tensor)
    for dtype in reversed(casts) if value is not None else ():
        value = value.astype(dtype)
    return value
