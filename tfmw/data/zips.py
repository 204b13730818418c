"""Zipped pipelines as one source with an index, or as maps over a zip.

    joined(zip((images.map(decode), labels)))     # range(n).map(both)

`zip` and `map` do not move elements. So a pipeline of them over arrays is a function of an index:
workers select indices in place of elements, and a shuffle above is a shuffle of indices. Over other
sources it is a zip of the sources, below all maps.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfmw.data.batches import input_of, steps_in, without_autograph
from tfmw.data.values import INFINITE
from tfmw.keras_compat import datasets

_SAME = (*datasets.Map, *datasets.Prefetch, *datasets.OptionsNode)


def joined(node: tf.data.Dataset) -> tf.data.Dataset | None:
    """A zip with its maps above it; None for others, and if that changes nothing."""
    if not isinstance(node, datasets.Zip):
        return None
    nodes, inputs = [node], []  # of each node the numbers of its inputs
    for each in nodes:
        below: list[tf.data.Dataset] = []
        if isinstance(each, datasets.Zip):
            below = datasets.dataset_inputs(each)
        elif isinstance(each, _SAME) and datasets.is_pure(each):
            below = [input_of(each)]
        inputs.append(range(len(nodes), len(nodes) + len(below)))
        nodes.extend(below)
    specs = [spec for each in nodes for spec in tf.nest.flatten(each.element_spec)]
    if not all(type(spec) is tf.TensorSpec for spec in specs):
        return None
    leaves = [number for number, below in enumerate(inputs) if not below]
    maps = [
        nodes[k] for k, below in enumerate(inputs) if below and isinstance(nodes[k], datasets.Map)
    ]

    def element(elements: dict[int, Any]) -> Any:
        """The zip's, of those of the leaves."""
        values = dict(elements)
        for number in reversed(range(len(nodes))):
            each, below = nodes[number], [values[i] for i in inputs[number]]
            if isinstance(each, datasets.Zip):
                values[number] = datasets.as_zipped(each, below)
            elif below:
                (values[number],) = below
                if isinstance(each, datasets.Map):
                    values[number] = datasets.mapped(each, below[0])
        return values[0]

    slices = [datasets.sliced_tensors(nodes[number]) for number in leaves]
    length = steps_in(node)
    by_index = length not in (None, INFINITE) and all(has_index(nodes[k]) for k in leaves)
    if by_index and not maps and None not in slices:
        tensors = [tensor[:length] for of_leaf in slices for tensor in of_leaf or ()]
        structure = tf.nest.pack_sequence_as(node.element_spec, tensors)
        return tf.data.Dataset.from_tensor_slices(structure)
    if not by_index and not maps:
        return None

    def function(*parts: Any) -> Any:
        if by_index:
            return element({number: element_at(nodes[number], parts[0]) for number in leaves})
        return element(dict(zip(leaves, parts, strict=True)))

    source: tf.data.Dataset = tf.data.Dataset.zip(tuple(nodes[number] for number in leaves))
    source = tf.data.Dataset.range(length) if by_index else source
    parallel = any(getattr(each, "_num_parallel_calls", None) is not None for each in maps)
    calls: dict[str, Any] = {"num_parallel_calls": tf.data.AUTOTUNE, "deterministic": True}
    return source.map(without_autograph(function), **(calls if parallel else {}))


def has_index(leaf: tf.data.Dataset) -> bool:
    """Whether `element_at` has the elements of a source."""
    known = datasets.sliced_tensors(leaf), datasets.repeated_tensors(leaf)
    return isinstance(leaf, datasets.Range) or any(tensors is not None for tensors in known)


def element_at(leaf: tf.data.Dataset, index: tf.Tensor) -> Any:
    """The element of a source at an index, int64 []."""
    if isinstance(leaf, datasets.Range):
        start, _, step, kind = datasets.range_arguments(leaf)
        return tf.cast(start + index * step, kind)
    tensors = datasets.repeated_tensors(leaf)
    if tensors is None:
        tensors = [tf.gather(tensor, index) for tensor in datasets.sliced_tensors(leaf) or ()]
    return tf.nest.pack_sequence_as(leaf.element_spec, tensors)
