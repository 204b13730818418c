"""Arrays and datasets of a call, as they are sent to other processes.

    sent = sent_data(dataset, "x")
    opened_data(sent, {})              # in the other process
    follow_orders(sent, passes)        # in the caller, after the call

A `tf.data.Dataset` is sent as its graph. Its shuffles continue at the caller's position, and the
caller's continue where the other process has ended.
"""

from __future__ import annotations

import dataclasses
import functools
import pickle
import re
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from tfmw.compat import datasets
from tfmw.compat.pipelines import Pipeline, without_devices
from tfmw.compat.shuffles import ShuffleSeeds
from tfmw.data import reshuffles
from tfmw.errors import UsageError, first_line

_LARGEST_GRAPH = 2**31 - 2**20  # most bytes of a protocol buffer, without those of its nodes


@dataclasses.dataclass(frozen=True)
class SentDataset:
    """A dataset as its graph and the spec of its elements.

    Attributes:
        orders: name of a generator of the graph -> (seeds of its shuffle, number of passes so far).
    """

    graph: pickle.PickleBuffer  # an array for pickle
    spec: Any
    orders: Mapping[str, tuple[list[int], int]]

    def open(self, opened: dict[str, tf.data.Dataset]) -> tf.data.Dataset:
        """The dataset, with shuffles at the caller's position.

        Args:
            opened: shuffles by the names of their generators, which datasets share.
        """
        graph = tf.compat.v1.GraphDef.FromString(bytes(self.graph))
        for _, handle, again in list(reshuffles.generators_in(graph.node)):
            name = reshuffles.name_of(handle)
            if name not in opened:
                seeds, passes = self.orders[name]
                opened[name] = datasets.small_shuffle(seeds, again)
                ShuffleSeeds(opened[name]).passes = passes
            reshuffles.share(handle, opened[name])
        return datasets.dataset_from_graph(graph, self.spec)


def sent_data(structure: Any, what: str) -> Any:
    """Arrays and datasets as they can be sent to other processes."""
    return tf.nest.map_structure(functools.partial(_sent_leaf, what), structure)


def _sent_leaf(what: str, x: Any) -> Any:
    if isinstance(x, tf.Tensor):
        return x.numpy()
    if hasattr(x, "__next__"):
        raise UsageError(
            f"{what} is a generator, which cannot be sent to other processes: pass a callable "
            "that takes a tf.distribute.InputContext and returns a tf.data.Dataset."
        )
    if not datasets.is_dataset(x):
        return x
    x = without_devices(x)
    alternative = (
        "pass a callable that builds it in each process: "
        "tfmw.fit(model, lambda context: make_dataset(context), workers=...)."
    )
    if (size := Pipeline.of(x).bytes_of_arrays) > _LARGEST_GRAPH:
        raise UsageError(
            f"{what} is a dataset over arrays of {size / 1e9:.1f} GB, and a graph that is sent to "
            "other processes holds at most 2 GB: pass the arrays themselves, which travel beside "
            f"it, tfmw.fit(model, x, y, batch_size=..., workers=...); or {alternative}"
        )
    if python := sorted(datasets.python_ops(datasets.dataset_graph(x))):
        raise UsageError(
            f"{what} is a dataset that holds Python functions ({', '.join(python)}), which cannot "
            f"be sent to other processes: {alternative}"
        )
    try:
        graph = datasets.dataset_graph(x, for_other_process=True)
    except tf.errors.OpError as e:
        why = re.sub(r"\{\{.*?\}\}\s*| \[Op:.*", "", first_line(e))[:200]
        raise UsageError(
            f"{what} is a dataset that uses state of this process, such as a variable or a table "
            f"({why}): {alternative}"
        ) from e
    orders = {}
    by_name = {node.name: node for node in graph.node}
    for node, handle, again in reshuffles.generators_in(graph.node):
        theirs = ShuffleSeeds(reshuffles.shuffle_of(handle))
        seeds = reshuffles.seeds_of(node, by_name) if again else None
        orders[reshuffles.name_of(handle)] = seeds or theirs.pair, theirs.passes
    # The same bytes in each call, which workers that stay have.
    content = pickle.PickleBuffer(graph.SerializeToString(deterministic=True))
    return SentDataset(content, x.element_spec, orders)


def opened_data(structure: Any, opened: dict[str, tf.data.Dataset]) -> Any:
    """The argument that `sent_data` was called with; see `SentDataset.open`."""
    return tf.nest.map_structure(
        lambda x: x.open(opened) if isinstance(x, SentDataset) else x, structure
    )


def follow_orders(sent: Any, orders: Mapping[str, int]) -> None:
    """Counts the passes that the workers have begun for the caller's datasets."""
    for dataset in tf.nest.flatten(sent):
        if isinstance(dataset, SentDataset):
            graph = tf.compat.v1.GraphDef.FromString(bytes(dataset.graph))
            for _, handle, _ in reshuffles.generators_in(graph.node):
                passes = orders[reshuffles.name_of(handle)]
                ShuffleSeeds(reshuffles.shuffle_of(handle)).passes = passes
