"""The graph of operations that symbolic calls make, as a flat value that pickle can write.

Each layer of a functional model refers to the nodes of its calls, and these to the layers before
and after. A pickle that follows them recurses once per layer, and fails for a ResNet50. Here the
operations come first, without nodes, then the nodes; `connect` puts both together again.

Private names, checked on Keras 3.8 to 3.16: `Operation._inbound_nodes`, `_outbound_nodes`,
`KerasTensor._keras_history`, `Function._nodes`, `_nodes_by_depth`, `make_node_key`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras
from keras.src.models.functional import Functional
from keras.src.ops import function

LINKS = ("_inbound_nodes", "_outbound_nodes")
"""Attributes of an operation that hold the nodes of its calls and of those of its results."""


def flat_graph(operation: keras.Operation) -> tuple[list[Any], list[Any], list[Any]]:
    """All that is connected with an operation by symbolic calls.

    Returns:
        The operations, the nodes, and for each operation the places of its nodes in both `LINKS`.
    """
    operations: dict[int, Any] = {}
    nodes: dict[int, Any] = {}
    left = [operation]
    while left:
        each = left.pop()
        if id(each) in operations:
            continue
        operations[id(each)] = each
        for node in _links(each, *LINKS):
            if id(node) not in nodes:
                nodes[id(node)] = node
                left += [node.operation, *_producers(node)]
    place = {known: n for n, known in enumerate(nodes)}
    places = [
        tuple([place[id(node)] for node in _links(each, name)] for name in LINKS)
        for each in operations.values()
    ]
    return list(operations.values()), list(nodes.values()), places


def connect(operations: list[Any], nodes: list[Any], places: list[Any]) -> None:
    """Gives operations their nodes; the arguments are what `flat_graph` returns."""
    for operation, of_operation in zip(operations, places, strict=True):
        for name, some in zip(LINKS, of_operation, strict=True):
            vars(operation)[name] = [nodes[n] for n in some]


def rename_nodes(model: keras.Model) -> None:
    """Updates the names that functional models have for their nodes, which contain addresses."""
    for layer in model._flatten_layers():
        if isinstance(layer, Functional):
            layer._nodes = {
                function.make_node_key(node.operation, node.operation._inbound_nodes.index(node))
                for nodes in layer._nodes_by_depth.values()
                for node in nodes
            }


def _links(operation: Any, *names: str) -> Iterable[Any]:
    return [node for name in names for node in vars(operation).get(name, ())]


def _producers(node: Any) -> Iterable[Any]:
    for tensor in node.arguments.keras_tensors:
        history = getattr(tensor, "_keras_history", None)
        if history is not None and history.operation is not None:
            yield history.operation
