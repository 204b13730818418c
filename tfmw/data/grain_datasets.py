"""Grain's datasets, read by index if Grain has one, otherwise from a state of their iterator.

    dataset = by_index(grain.MapDataset.source(rows).shuffle(seed=1).batch(64))   # tf.data.Dataset
    batches = GrainHooks(loader)                                                  # by its states

Grain is never imported here: a dataset of Grain's exists only if the user has imported Grain. All
workers iterate in the same order, as Grain's shuffles are functions of an index and a seed.
"""

from __future__ import annotations

import itertools
import json
import logging
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfmw.data.by_index import from_index
from tfmw.data.values import EpochHooks
from tfmw.errors import UsageError

logger = logging.getLogger("tfmw")

_STATES = 1024  # most batches that a pipeline may have read ahead


def is_grain(x: Any) -> bool:
    """Whether `x` is a dataset or loader of Grain."""
    grain = sys.modules.get("grain")
    kinds = (getattr(grain, name, None) for name in ("MapDataset", "IterDataset", "DataLoader"))
    return isinstance(x, tuple(kind for kind in kinds if kind is not None))


def by_index(x: Any) -> tf.data.Dataset | None:
    """The batches of a Grain dataset by their index, or by the index of their rows.

    Returns None if Grain has no index for them: after a filter, in other processes, in most
    iterators.
    """
    try:
        found = _rows_of(x)
        if found is not None:
            source, batch = found
            return from_index(source, in_threads=True).batch(batch[0], batch[1])
        source = _map_dataset(x)
        return None if source is None else from_index(source, in_threads=True)
    # another version of Grain, or rows that are no arrays
    except (AttributeError, KeyError, UsageError):
        return None


def _rows_of(x: Any) -> tuple[Any, tuple[int, bool]] | None:
    """(source of single rows, (batch size, drop_remainder)); None if Grain makes whole batches."""
    if not hasattr(x, "_parents"):
        return _rows_of_loader(x)
    batches = type(x).__name__ in ("BatchMapDataset", "BatchIterDataset")
    if not batches or not _stacks(x._batch_fn):
        return None
    source = _map_dataset(x._parents[0])
    batch = vars(x)  # Grain has no public names for these two
    return None if source is None else (source, (batch["_batch_size"], batch["_drop_remainder"]))


def _map_dataset(x: Any) -> Any:
    """The dataset with an index that has the elements of `x`, in the same order; or None."""
    if type(x).__name__ == "PrefetchIterDataset":
        x = x._parents[0]
    todo = [x] if hasattr(x, "_parents") and hasattr(x, "__getitem__") else []
    if not todo:
        return None
    while todo:
        node = todo.pop()
        if "Filter" in type(node).__name__ or "FlatMap" in type(node).__name__:
            return None
        todo.extend(node._parents)
    return x


def _stacks(batch_fn: Any) -> bool:
    """Whether a function makes a batch as `Dataset.batch` does."""
    name = getattr(batch_fn, "__name__", type(batch_fn).__name__)
    module = getattr(batch_fn, "__module__", None) or ""
    own = module.startswith(("grain.", "keras."))
    return own and name in ("make_batch", "make_string_batch", "_MakeBatchParallel")


def _rows_of_loader(loader: Any) -> tuple[Any, tuple[int, bool]] | None:
    transforms = sys.modules["grain"].transforms
    if loader.multiprocessing_options.num_workers:  # worker processes interleave their batches
        return None
    *maps, last = loader._operations or [None]
    if not isinstance(last, transforms.Batch) or last.batch_fn is not None:
        return None
    if not all(isinstance(m, transforms.Map | transforms.RandomMap) for m in maps):
        return None
    node = loader._dataset
    while not hasattr(node, "_sampler") or not hasattr(node, "__getitem__"):
        node = node._parents[0]
    return _LoaderRows(node, maps), (last.batch_size, last.drop_remainder)


class _LoaderRows:
    """The elements of a loader before batching: the sampler's records, mapped one by one."""

    def __init__(self, records: Any, maps: Sequence[Any]):
        self._records, self._maps = records, maps

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> Any:
        record = self._records[index]
        row = record.data
        for each in self._maps:
            is_random = hasattr(each, "random_map")
            row = each.random_map(row, record.metadata.rng) if is_random else each.map(row)
        return row


class GrainHooks(EpochHooks):
    """Hooks for an IterDataset or DataLoader, which each worker reads, with its states."""

    def __init__(self, dataset: Any):
        self._dataset = dataset
        self._states: dict[int, str] = {}
        self._restored: str | None = None

    def batches(self, signature: Any, start: int = 0) -> tf.data.Dataset:
        """The batches from `start` on; `signature` is the structure of tf.TypeSpec for a batch."""
        return tf.data.Dataset.from_generator(
            lambda: self._read(start), output_signature=signature
        ).prefetch(tf.data.AUTOTUNE)

    def _read(self, start: int) -> Iterator[Any]:
        batches = iter(self._dataset)
        is_text = not hasattr(self._dataset, "_parents")  # the state of a loader
        if start and self._restored is not None:
            batches.set_state(self._restored.encode() if is_text else json.loads(self._restored))
        elif start:
            logger.info("the backup has no state of Grain's iterator: %d batches are read", start)
            batches = itertools.islice(batches, start, None)
        for number, batch in enumerate(batches, start + 1):
            self._note(number, batches, is_text)
            yield keras.tree.lists_to_tuples(keras.tree.map_structure(_optional, batch))

    def _note(self, number: int, batches: Any, is_text: bool) -> None:
        self._states.pop(number - _STATES, None)
        self._states.pop(number, None)
        try:
            state = batches.get_state()
            self._states[number] = state.decode() if is_text else json.dumps(state)
        except (AttributeError, NotImplementedError, TypeError, ValueError):
            pass  # a resumed run reads the earlier batches again, and logs that

    def state(self, batches: int) -> Any:
        return self._states.get(batches)

    def restore(self, state: Any) -> None:
        self._restored = state


def _optional(leaf: Any) -> Any:
    return tf.experimental.Optional.empty(None) if leaf is None else leaf
