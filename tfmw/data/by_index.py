"""Pipelines over arrays or rows with an index, by indices of examples in place of the examples.

    found = Indexed.of(dataset)         # from_tensor_slices, shuffle, repeat, take, skip, cache
    batches = found.indices.batch(32).map(found.examples)

Such transformations do not look at elements. So their order is that of a pipeline of indices, and
only a worker's own examples are ever copied, a batch of them at once.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf

from tfmw.data.batches import input_of
from tfmw.data.rows import Rows, rows_under
from tfmw.data.zips import joined
from tfmw.keras_compat import datasets, rebuilding

_MOVES = (
    *datasets.Shuffle,
    *datasets.Repeat,
    *datasets.Take,
    *datasets.Skip,
    *datasets.Prefetch,
    *datasets.OptionsNode,
)


@dataclasses.dataclass(frozen=True)
class Indexed:
    """A pipeline of single examples over arrays, or over `Rows`.

    Attributes:
        indices: int64 [], the index of each example, in the pipeline's order.
        tensors: [n, ...] each, the components of all examples.
        spec: structure of tf.TensorSpec, of one example.
        rows: read in place of `tensors`.
    """

    indices: tf.data.Dataset
    tensors: list[tf.Tensor]
    spec: Any
    rows: Rows | None = None

    @classmethod
    def of(cls, dataset: tf.data.Dataset) -> Indexed | None:
        """None where the pipeline does anything else, or has sparse or ragged examples."""
        chain = []
        node = dataset
        is_cached = False
        while (cache := datasets.is_memory_cache(node)) or isinstance(node, _MOVES):
            if cache:
                is_cached = True  # of arrays, which are in memory: it changes nothing
            elif is_cached and isinstance(node, datasets.Shuffle):
                return None  # every pass has the order of the first one
            else:
                chain.append(node)
            node = input_of(node)
        node = joined(node) or node
        tensors, rows = datasets.sliced_tensors(node), rows_under(node)
        if rows is not None:
            if is_cached:
                return None  # reading again is what the cache saves
        elif tensors is None:
            return None
        indices = tf.data.Dataset.range(int(node.cardinality()))
        for move in reversed(chain):
            indices = rebuilding.rebuilt(move, indices)
        return cls(indices, tensors or [], node.element_spec, rows)

    def examples(self, indices: tf.Tensor) -> Any:
        """int64 [k] -> the batch of these examples: structure of tensors [k, ...]."""
        if self.rows is not None:
            return self.rows.examples(indices)
        rows = [tf.gather(tensor, indices) for tensor in self.tensors]
        return tf.nest.pack_sequence_as(self.spec, rows)
