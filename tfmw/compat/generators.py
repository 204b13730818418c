"""Python functions of `tf.data.Dataset.from_generator`, and the elements that they yield."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.data.ops import flat_map_op
from tensorflow.python.data.util import structure
from tensorflow.python.ops import script_ops

from tfmw.compat.pipelines import Pipeline


def watch_generators(
    dataset: tf.data.Dataset, note: Callable[[int, int, Any], None], first: int
) -> int:
    """Calls `note` for each element of each `from_generator` of a pipeline, when it is read.

    Args:
        note: called with (index of the `from_generator`, index of its iterator, tensors of the
            element), as long as the object exists whose method it is.
        first: index of the first `from_generator`.

    Returns:
        The number of watched generators. Generators within functions, and those that the pipeline
        reads more than once, are not watched, as their order of reading is not fixed.
    """
    named = [
        (name, node.dataset.element_spec)
        for node in Pipeline.of(dataset).nodes
        if (name := _next_function(node.dataset)) is not None
    ]
    names = [name for name, _ in named]
    once = [(name, spec) for name, spec in named if names.count(name) == 1]
    for number, (name, spec) in enumerate(once, first):
        _watch(name, spec, number, weakref.WeakMethod(note))
    return len(once)


def _next_function(node: tf.data.Dataset) -> str | None:
    """Registered name of the Python function that yields the elements of a `from_generator`."""
    if not isinstance(node, flat_map_op._FlatMapDataset):
        return None
    graph = node._map_func.function.graph
    operations = [op for op in graph.get_operations() if op.type == "GeneratorDataset"]
    if not operations:
        return None
    name = operations[0].get_attr("next_func").name
    bodies = {f.signature.name: f.node_def for f in graph.as_graph_def().library.function}
    found: bytes = next(op.attr["token"].s for op in bodies[name] if "PyFunc" in op.op)
    return found.decode()


def _watch(name: str, spec: Any, number: int, note: Callable[[], Any]) -> None:
    functions = script_ops._py_funcs
    function = functions.get(name)
    holder = function if isinstance(function, script_ops.EagerFunc) else None
    read = function if holder is None else holder._func
    watchers = getattr(read, "_tfmw_watchers", None)
    if watchers is None:
        watchers = []

        def watched(iterator: Any) -> Any:
            element = read(iterator)
            tensors = element
            if holder is not None:  # ragged and sparse tensors are encoded
                decoded = structure.from_tensor_list(spec, element)
                flat = tf.nest.flatten(decoded, expand_composites=True)
                tensors = [t for t in flat if t.dtype != tf.variant]  # an optional's
            for number, note in watchers:
                if (noted := note()) is not None:
                    noted(number, int(iterator), tensors)
            return element

        watched._tfmw_watchers = watchers  # type: ignore[attr-defined]
        if holder is None:
            read._tfmw_watched = watched  # the registry has weak references only
            functions._funcs[name] = watched
        else:
            holder._func = watched
    watchers[:] = [each for each in watchers if each[1]() is not None] + [(number, note)]
