"""How often one run of a traced function assigns to the variables that it captures.

assignments(loop.get_concrete_function(...))[id(variable.handle)]
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container
from typing import Any

from tfmw.keras_compat.graph import inputs_first

_WRITES = (
    "AssignVariableOp",
    "AssignAddVariableOp",
    "AssignSubVariableOp",
    "ResourceApply",
    "ResourceScatter",
    "ResourceSparseApply",
    "ResourceStridedSliceAssign",
)
"""Prefixes of the names of TensorFlow's operations that change a variable."""


def assignments(function: Any) -> Counter[int]:
    """Operations that change each variable, in the function and in those that it calls.

    A loop's body counts once, and all branches of a condition count.

    Args:
        function: a `tf.types.experimental.ConcreteFunction`.

    Returns:
        The id of a captured handle -> number of operations.
    """
    definition = function.graph.as_graph_def()
    bodies = {body.signature.name: body for body in definition.library.function}
    counts: dict[str, list[int]] = {}  # of the arguments of a function
    for name in inputs_first(
        _called(definition.node, bodies), lambda name: _called(bodies[name].node_def, bodies)
    ):
        inside = _changed(bodies[name].node_def, counts)
        counts[name] = [inside[arg.name] for arg in bodies[name].signature.input_arg]
    found = _changed(definition.node, counts)
    handles = function.captured_inputs
    names = [tensor.op.name for tensor in function.inputs[len(function.inputs) - len(handles) :]]
    return Counter({id(h): found[name] for h, name in zip(handles, names, strict=True)})


def _changed(nodes: Any, counts: dict[str, list[int]]) -> Counter[str]:
    """Name of a node, or of a function's argument -> number of operations that change it."""
    found: Counter[str] = Counter()
    for node in nodes:
        inputs = [name.partition(":")[0] for name in node.input if not name.startswith("^")]
        if node.op.startswith(_WRITES):
            found.update(inputs)
        for called in _called([node], counts):
            # A condition has its index before the arguments.
            found.update(dict(zip(reversed(inputs), reversed(counts[called]), strict=False)))
    return found


def _called(nodes: Any, known: Container[str]) -> list[str]:
    """Names of the known functions that nodes call."""
    attributes = [a for node in nodes for a in node.attr.values()]
    return [f.name for a in attributes for f in [a.func, *a.list.func] if f.name in known]
