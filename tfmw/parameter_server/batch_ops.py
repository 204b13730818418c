"""The ops of a traced graph between some tensors and one that follows from them.

    ops_between(batch, ids)                           # equal for equal computations; None: another
    (again,) = copied_ops(batch, [ids], other_batch)  # the same computation, of other tensors

Only plain ops count: not those with state, nor calls of functions, nor what depends on anything
else than `batch` and constants.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfmw.keras_compat import parameter_servers
from tfmw.keras_compat.graph import ancestors


def ops_between(sources: Sequence[tf.Tensor], target: tf.Tensor) -> bytes | None:
    """A description of the plain ops from `sources` alone to `target`; None if others take part.

    Two targets with the same description, of the same values, are equal.
    """
    if not sources or sources[0].graph is not target.graph:
        return None
    of_source = {source.name: number for number, source in enumerate(sources)}
    numbers: dict[str, int] = {}  # of an op, where it is in `lines`
    lines: list[bytes] = []

    def told(tensor: tf.Tensor) -> str:
        if tensor.name in of_source:
            return f"source {of_source[tensor.name]}"
        return f"{numbers[tensor.op.name]}:{tensor.value_index}"

    for op in ancestors([target], stop=lambda tensor: tensor.name in of_source):
        if not _is_plain(op):
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


def _is_plain(op: tf.Operation) -> bool:
    needs_more = op.op_def.is_stateful or op.control_inputs or op.type == "Placeholder"
    return not (needs_more or parameter_servers.calls_function(op))


def copied_ops(
    sources: Sequence[tf.Tensor], targets: Sequence[tf.Tensor], values: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
    """`targets` computed from `values` in place of `sources`, in the graph that is being traced.

    Args:
        targets: for each of which `ops_between` is not None.
    """
    wanted = {op.name for op in ancestors(targets)}
    parts = sources[0].graph.as_graph_def()
    nodes = [node for node in parts.node if node.name in wanted]
    del parts.node[:]
    parts.node.extend(nodes)
    found: list[tf.Tensor] = tf.graph_util.import_graph_def(
        parts,
        input_map={
            source.name: value
            for source, value in zip(sources, values, strict=True)
            if source.op.name in wanted
        },
        return_elements=[target.name for target in targets],
        name="ahead",
    )
    return found
