"""One order on all workers: the same seeds everywhere, and parallel transformations in order.

Every worker selects its shard from its own copy of the pipeline, so all copies must yield the same
elements in the same order. Shuffles use the chief's seeds; the chief draws one for a shuffle
without a seed. A pipeline is rebuilt from its Python objects if they describe it completely.
Otherwise its graph is edited.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfmw.data.batches import input_of
from tfmw.data.values import Order
from tfmw.errors import UsageError
from tfmw.keras_compat import datasets
from tfmw.keras_compat.graph import inputs_first


def ordered(dataset: tf.data.Dataset, order: Order) -> tf.data.Dataset:
    """The same pipeline with the chief's seeds, in a deterministic order.

    If it shuffles, the result is a new dataset, whose sequence of reshuffles starts again.

    Raises:
        UsageError: workers have different datasets.
    """
    if not datasets.may_shuffle_inside(dataset):
        return dataset
    chain = []
    node = dataset
    while isinstance(node, datasets.REBUILDABLE):
        chain.append(node)
        node = input_of(node)
    # Only the graph shows the rest; in-memory arrays are kept out of that graph if possible.
    if datasets.may_shuffle_inside(node):
        node = _ordered_by_graph(node, order)
    shuffles = [n for n in reversed(chain) if isinstance(n, datasets.Shuffle)]
    seeds = iter(_agreed([datasets.shuffle_seeds(n) for n in shuffles], order))
    for transformation in reversed(chain):
        is_shuffle = isinstance(transformation, datasets.Shuffle)
        node = datasets.rebuilt(transformation, node, next(seeds) if is_shuffle else None)
    options = tf.data.Options()
    options.deterministic = True
    return node.with_options(options)


def draws_late(dataset: tf.data.Dataset) -> bool:
    """Whether an iterator may draw reshuffles only at its first element.

    A shuffle then creates the iterator of its input, which may shuffle too.
    (Source: tensorflow/core/kernels/data/shuffle_dataset_op.cc.)
    """
    return datasets.shuffles_in(dataset) > 1


def _agreed(local: list[list[int] | None], order: Order) -> list[list[int] | None]:
    """The chief's pairs of seeds, drawn for shuffles without a seed."""
    drawn = [
        [order.seed, i + 1] if pair is not None and not any(pair) else pair
        for i, pair in enumerate(local)
    ]
    seeds: list[list[int] | None] = order.agree(drawn)
    if len(seeds) != len(local):
        raise UsageError(
            f"workers have different datasets: the chief's has {len(seeds)} shuffles, this "
            f"worker's has {len(local)}. Build the same pipeline on every worker; tfmw divides it."
        )
    return seeds


# ---------------------------------------------------------------- by the graph

# Positions of the two seeds in the inputs of a dataset op (tensorflow/core/ops/dataset_ops.cc).
_SEED_INPUTS = {
    "ShuffleDataset": (2, 3),
    "ShuffleDatasetV3": (2, 3),
    "ShuffleAndRepeatDataset": (2, 3),
    "ShuffleAndRepeatDatasetV2": (2, 3),
    "RandomDataset": (0, 1),
    "RandomDatasetV2": (0, 1),
}

# Position of the generator of reshuffles.
_GENERATOR_INPUT = {"ShuffleDatasetV3": 4, "ShuffleAndRepeatDatasetV2": 5}


def _ordered_by_graph(dataset: tf.data.Dataset, order: Order) -> tf.data.Dataset:
    """`ordered` for pipelines that shuffle inside of functions: interleaved, zipped, sampled."""
    graph = datasets.dataset_graph(dataset)
    changed = False
    seeds: list[list[int]] = []
    shuffles = []  # (nodes of the graph or function, suffix of a constant's name, node)
    bodies = [(graph.node, "")] + [(f.node_def, ":output:0") for f in graph.library.function]
    for nodes, suffix in bodies:
        by_name = {node.name: node for node in nodes}
        for node in nodes:
            changed |= _make_deterministic(node)
            changed |= _renew_generator(node, by_name)
            pair = [_folded(node.input[i], by_name) for i in _SEED_INPUTS.get(node.op, ())]
            known = [seed for seed in pair if seed is not None]
            if len(known) == 2:
                seeds.append(known)
                shuffles.append((nodes, suffix, node))
    agreed = _agreed(list(seeds), order)
    for number, (chosen, local) in enumerate(zip(agreed, seeds, strict=True)):
        if chosen is not None and chosen != local:
            _set_seeds(*shuffles[number], chosen, number)
    if not changed and not seeds:
        return dataset
    out = datasets.dataset_from_graph(graph, dataset.element_spec)
    return out.with_options(dataset.options())


def _make_deterministic(node: Any) -> bool:
    """Makes a parallel transformation keep its order; returns whether the node has changed."""
    if "deterministic" in node.attr and node.attr["deterministic"].s == b"false":
        node.attr["deterministic"].s = b"true"
        return True
    return False


def _renew_generator(node: Any, by_name: dict[str, Any]) -> bool:
    """Replaces the generator of reshuffles of a shuffle; returns whether the node has changed.

    The graph refers to a generator of this process, shared with the user's dataset. TensorFlow
    creates a missing one.
    """
    if node.op not in _GENERATOR_INPUT:
        return False
    name = node.input[_GENERATOR_INPUT[node.op]].split(":")[0]
    generator = by_name.get(name)
    if generator is None or generator.op != "Const":
        return False
    generator.Clear()
    generator.name = name
    generator.op = "DummySeedGenerator"
    return True


def _set_seeds(nodes: Any, suffix: str, node: Any, pair: list[int], number: int) -> None:
    """Replaces the seeds of a shuffle by two new constants."""
    for slot, value in zip(_SEED_INPUTS[node.op], pair, strict=True):
        constant = nodes.add()
        constant.name = f"tfmw_seed_{number}_{slot}"
        constant.op = "Const"
        constant.attr["dtype"].type = tf.int64.as_datatype_enum
        constant.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(value, tf.int64, []))
        node.input[slot] = constant.name + suffix


def _folded(name: str, by_name: dict[str, Any]) -> int | None:
    """The value of a node's input; None if it cannot be computed from constants.

    Inside of a function, a seed under a global one is an expression: `where(seed == 0 and
    seed2 == 0, 2**31 - 1, seed2)` (tensorflow/python/data/util/random_seed.py).
    """

    def inputs(name: str) -> list[str]:
        node = by_name.get(name)
        if node is None or node.op not in _FOLDS:
            return []
        return [i.split(":")[0] for i in node.input if not i.startswith("^")]

    name = name.split(":")[0]
    values: dict[str, int | None] = {}
    for each in inputs_first([name], inputs):
        node, given = by_name.get(each), [values.get(i) for i in inputs(each)]
        values[each] = None
        if node is not None and node.op == "Const":
            values[each] = int(tf.make_ndarray(node.attr["value"].tensor))
        elif node is not None and node.op in _FOLDS and None not in given:
            values[each] = int(_FOLDS[node.op](*given))
    return values[name]


_FOLDS: dict[str, Callable[..., Any]] = {
    "Cast": lambda a: a,
    "Equal": lambda a, b: a == b,
    "Identity": lambda a: a,
    "LogicalAnd": lambda a, b: a and b,
    "Select": lambda c, a, b: a if c else b,
    "SelectV2": lambda c, a, b: a if c else b,
}
