"""How often one run of a traced function assigns to the variables that it captures.

assignments(loop.get_concrete_function(...))[id(variable.handle)]
"""

from __future__ import annotations

from collections import Counter
from typing import Any

_WRITES = (
    "AssignVariableOp",
    "AssignAddVariableOp",
    "AssignSubVariableOp",
    "ResourceApply",
    "ResourceScatter",
    "ResourceSparseApply",
    "ResourceStridedSliceAssign",
)
"""What the names of TensorFlow's operations that change a variable begin with."""


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
    counts = _Counts(bodies)
    handles = function.captured_inputs
    names = [tensor.op.name for tensor in function.inputs[len(function.inputs) - len(handles) :]]
    found = counts.of_nodes(definition.node)
    return Counter({id(h): found[name] for h, name in zip(handles, names, strict=True)})


class _Counts:
    """The counts of a graph's functions, each computed once.

    Args:
        bodies: name of a function -> its `FunctionDef`.
    """

    def __init__(self, bodies: dict[str, Any]) -> None:
        self._bodies = bodies
        self._of_function: dict[str, list[int]] = {}

    def of_nodes(self, nodes: Any) -> Counter[str]:
        """Name of a node, or of a function's argument -> number of operations that change it."""
        found: Counter[str] = Counter()
        for node in nodes:
            inputs = [name.partition(":")[0] for name in node.input if not name.startswith("^")]
            if node.op.startswith(_WRITES):
                found.update(inputs)
            for called in self._called_by(node):
                counts = self.of_function(called)
                # A condition has its index before the arguments.
                found.update(dict(zip(reversed(inputs), reversed(counts), strict=False)))
        return found

    def of_function(self, name: str) -> list[int]:
        """Of each argument."""
        if name not in self._of_function:
            self._of_function[name] = []  # of a recursion
            body = self._bodies[name]
            found = self.of_nodes(body.node_def)
            self._of_function[name] = [found[arg.name] for arg in body.signature.input_arg]
        return self._of_function[name]

    def _called_by(self, node: Any) -> list[str]:
        names = [f.name for a in node.attr.values() for f in [a.func, *a.list.func]]
        return [name for name in names if name in self._bodies]
