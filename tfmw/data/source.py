"""The data arguments of fit, evaluate and predict: datasets, arrays, `PyDataset`, callables."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfmw.compat import datasets, distribution
from tfmw.compat.pipelines import Pipeline, without_devices
from tfmw.compat.shuffles import has_known_states
from tfmw.data.batches import configured, without_autograph
from tfmw.data.comparison import refuse_different
from tfmw.data.grain_datasets import GrainHooks, by_index, is_grain
from tfmw.data.py_dataset import OrderedPyDataset, PyDatasetHooks
from tfmw.data.python_sources import GeneratorHooks, Journal
from tfmw.data.random_state import share_random_state
from tfmw.data.sharding import shard_dataset
from tfmw.data.shuffled_arrays import ShuffledArrays
from tfmw.data.values import Shard, Sharding, SharedOrder
from tfmw.data.whole_batches import shard_function
from tfmw.errors import UsageError

_LOOKED_AT = -1  # index of a source: the batches of a `PyDataset` that show its structure


@dataclasses.dataclass(frozen=True)
class Source:
    """The data arguments of fit, evaluate or predict.

    `shard` may be called once per epoch, where each pass needs a shard of its own.
    """

    x: Any
    y: Any = None
    sample_weight: Any = None
    batch_size: int | None = None
    steps: int | None = None
    shuffle: Any = False
    class_weight: Any = None
    split: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.x, tf.distribute.DistributedDataset):
            raise UsageError(
                "received a DistributedDataset: pass the tf.data.Dataset itself, batched by the "
                "global batch size; tfmw divides it."
            )
        if hasattr(self.x, "to_tf_dataset"):
            raise UsageError(
                "received a dataset of Hugging Face, whose rows have names: expected batches of "
                "(x, y). Pass tfmw.data.from_index(dataset).map(lambda row: (row['x'], row['y']))"
                ".batch(64), with the names of your columns."
            )
        if distribution.is_sharded_by_user() and not self.is_function():
            object.__setattr__(self, "x", _of_this_worker(self.x))
        if datasets.is_dataset(self.x) or self.is_function() or is_grain(self.x):
            for name in ("y", "sample_weight"):
                if getattr(self, name) is not None:
                    raise UsageError(
                        f"{name} was passed beside a dataset: expected the dataset's own elements "
                        "to hold it; remove the argument."
                    )
            # examples of keras.io pass both, and Keras does not warn
            if self.batch_size is not None:
                warnings.warn(
                    f"tfmw: batch_size={self.batch_size} has no effect beside a dataset, whose "
                    "elements are the global batches.",
                    stacklevel=2,
                )
                object.__setattr__(self, "batch_size", None)
        if datasets.is_dataset(self.x):
            object.__setattr__(self, "x", without_devices(self.x))
        if is_grain(self.x) and (batches := by_index(self.x)) is not None:
            object.__setattr__(self, "x", batches)

    def is_function(self) -> bool:
        """Whether `x` is a callable that takes an `InputContext`."""
        return (
            callable(self.x)
            and not datasets.is_dataset(self.x)
            and not isinstance(self.x, keras.utils.PyDataset)
            and not hasattr(self.x, "__array__")
        )

    @property
    def is_generator(self) -> bool:
        """Whether `x` is a Python generator or iterator."""
        return hasattr(self.x, "__next__")

    def refuse_different(self, gather: Callable[[Any], list[Any]]) -> None:
        """Raises UsageError on every worker if workers pass different data; see `comparison`."""
        is_one = datasets.is_dataset(self.x) or self.is_read_once
        given = self.x if is_one else (self.x, self.y, self.sample_weight)
        refuse_different(() if self.is_function() else given, gather)

    def shard(self, sharding: Sharding, order: SharedOrder, skip: int = 0) -> Shard:
        """This worker's shard.

        Args:
            sharding: how global batches are divided.
            order: the source of the seeds of shuffles.
            skip: number of global batches to skip at the beginning, or of batches that are not
                split.

        Raises:
            UsageError: an empty dataset, or one that cannot be divided.
        """
        if self.is_function():
            if self.class_weight is not None:
                raise UsageError(
                    "class_weight goes with a dataset or arrays: a dataset function returns the "
                    "sample weights itself, as (x, y, sample_weight)."
                )
            return shard_function(self.x, sharding, skip, order.index_dir)
        known: dict[str, Any] = {}
        dataset, read_ahead = self.x, True
        if not datasets.is_dataset(dataset):
            shuffled = self._shuffled_arrays(order)
            if shuffled is not None and self.split:
                return shuffled.shard(sharding)
            if shuffled is not None:
                dataset, known = shuffled.one_pass(), {"steps": shuffled.batches_per_pass}
            else:
                dataset, known, read_ahead = self._read_by_keras(sharding, order)
        if (batches := known.pop("rest", None)) is not None:
            known["rest"] = lambda start: (
                shard_dataset(
                    self._watched(batches(start), order), sharding, order, 0, read_ahead, self.split
                ).dataset
            )
        dataset = self._watched(dataset, order)
        if self.journal.sources and datasets.is_dataset(self.x):
            share_random_state(order.group)
        shard = shard_dataset(dataset, sharding, order, skip, read_ahead, self.split)
        if shard.steps == 0:
            raise empty_dataset()
        if datasets.is_dataset(self.x) and self.class_weight is not None:
            shard = _with_class_weight(shard, self.class_weight)
        if "steps" in known and not self.split:
            known["steps"] = -(-(known["steps"] - skip) // sharding.replicas)
        return dataclasses.replace(shard, **known)

    def _watched(self, dataset: tf.data.Dataset, order: SharedOrder) -> tf.data.Dataset:
        """Watches the elements of a pipeline's Python code, to compare them."""
        if order.group.size > 1:
            x = self._ordered if isinstance(self.x, keras.utils.PyDataset) else None
            for batch in [] if x is None else x.looked_at:
                self.journal.note(_LOOKED_AT, 0, keras.tree.flatten(batch))
            if x is None or not x.draws_in_any_order:
                self.journal.watch(dataset)
        return dataset

    def batches_per_step(self, sharding: Sharding) -> int:
        """Number of batches of the data in a step."""
        return 1 if self.split or self.is_function() else sharding.replicas

    def _read_by_keras(
        self, sharding: Sharding, order: SharedOrder
    ) -> tuple[tf.data.Dataset, dict[str, Any], bool]:
        """Converts arrays, PyDataset and generators by Keras's adapters, to global batches.

        Returns:
            (dataset, other attributes of the shard, whether it may be read ahead).
        """
        x, options = self.x, self._options
        if self.is_read_once:  # the adapter reads the first batches
            share_random_state(order.group)
        if self.is_generator:
            generator = self._generator
            batches = self.steps and self.steps * self.batches_per_step(sharding)
            return generator.dataset(order.group, batches), {"hooks": generator}, False
        if isinstance(x, keras.utils.PyDataset):
            x = self._ordered
            x.divide(order.group)
            options["shuffle"] = self.shuffle and not x.shuffled
        adapter = datasets.data_adapter(x, self.y, self.sample_weight, **options)
        slices = datasets.batches_of_slices(adapter)
        if slices is not None:
            return slices, {}, True
        if is_grain(x):
            adapter.get_tf_dataset()
            hooks = GrainHooks(x)
            read = functools.partial(hooks.batches, datasets.signature_of(adapter))
            return read(), {"hooks": hooks, "rest": lambda start: read(start=start)}, True
        with _agreed_global_seed(order):  # the permutation of the array adapter uses it
            dataset = adapter.get_tf_dataset()
        known: dict[str, Any] = {}
        if isinstance(x, OrderedPyDataset):
            # Keras's own threads read a PyDataset, and stop between two epochs. An epoch that ends
            # within a pass must not be read further: hooks may then change the order.
            ahead = not (datasets.has_own_readers(adapter) or self.steps)

            def rest(start: int) -> tf.data.Dataset:
                x.start_at(start)
                dataset = adapter.get_tf_dataset()
                return dataset if ahead else Pipeline.of(dataset).beneath(["prefetch"]).dataset

            known = {"hooks": PyDatasetHooks(x, adapter, order.group), "rest": rest}
            dataset = rest(0)
        else:
            ahead = True
        if adapter.num_batches is not None:  # the pipelines have no known length
            known["steps"] = int(adapter.num_batches)
        return dataset, known, ahead

    def _shuffled_arrays(self, order: SharedOrder) -> ShuffledArrays | None:
        """Arrays in the order of the global seed, or in that of `order` if there is none."""
        if self.is_read_once or not self.shuffle or order.seed < 0:
            return None
        adapter = datasets.data_adapter(self.x, self.y, self.sample_weight, **self._options)
        known = datasets.shuffled_rows(adapter)
        if known is None:
            return None
        with _agreed_global_seed(order) as seed:
            fixed = None if seed is None else datasets.seeded_order(adapter)
        if fixed is None:
            with tf.device("cpu:0"):
                fixed = tf.constant(order.agree(order.seed), tf.int64)
        return ShuffledArrays(**known, order=fixed)

    @functools.cached_property
    def journal(self) -> Journal:
        """Sketches of the elements that Python code has made, to compare them between workers."""
        return Journal()

    @property
    def _options(self) -> dict[str, Any]:
        """The arguments of Keras's adapters."""
        return {
            "batch_size": self.batch_size,
            "steps_per_epoch": self.steps,
            "shuffle": self.shuffle,
            "class_weight": self.class_weight,
        }

    @functools.cached_property
    def _generator(self) -> GeneratorHooks:
        """Hooks of the Python generator, from which all shards continue to read."""
        adapter = datasets.data_adapter(self.x, self.y, self.sample_weight, **self._options)
        return GeneratorHooks(adapter)

    @functools.cached_property
    def _ordered(self) -> OrderedPyDataset:
        """The `PyDataset`; all shards have the same order."""
        return OrderedPyDataset(self.x, self.shuffle)

    @property
    def is_read_once(self) -> bool:
        """Whether Python code produces the batches, so a second pass may produce others."""
        return isinstance(self.x, keras.utils.PyDataset) or self.is_generator or is_grain(self.x)

    @property
    def has_shards_of_passes(self) -> bool:
        """Whether each pass needs a shard of its own, for a new order.

        Shuffled arrays need one if replicas take whole batches. Shuffles of `tf.data` need one if
        another TensorFlow keeps their place in the sequence of orders in an unknown form.
        """
        if datasets.is_dataset(self.x):
            return Pipeline.of(self.x).may_reorder and not has_known_states()
        is_array = not (self.is_function() or self.is_read_once)
        unseeded = bool(self.shuffle) and is_array and datasets.global_seed() is None
        return unseeded and not self.split


@contextlib.contextmanager
def _agreed_global_seed(order: SharedOrder) -> Iterator[int | None]:
    """Sets the chief's global seed within the context, and returns it; None if it has none."""
    local = datasets.global_seed()
    seed = order.agree(local)
    with contextlib.nullcontext() if seed == local else datasets.substituted_global_seed(seed):
        yield seed


def _of_this_worker(x: Any) -> Callable[[tf.distribute.InputContext], tf.data.Dataset]:
    """The dataset function of `DataParallel(auto_shard_dataset=False)`."""

    def read(context: tf.distribute.InputContext) -> tf.data.Dataset:
        local = context.num_replicas_in_sync // context.num_input_pipelines
        if not datasets.is_dataset(x) or local > 1:
            raise UsageError(
                f"received DataParallel(auto_shard_dataset=False) and {type(x).__name__} on "
                f"{local} devices of this worker: expected a tf.data.Dataset with this worker's "
                "batches, and one device. Or leave the argument out, and pass all of the data."
            )
        return x

    return read


def _with_class_weight(shard: Shard, class_weight: Any) -> Shard:
    """Adds sample weights, which depend on the label only, to each worker's own examples."""
    add_weights = datasets.make_class_weight_map(class_weight)
    mapped = shard.dataset.map(
        without_autograph(lambda parts, *sizes: (tuple(add_weights(*p) for p in parts), *sizes))
    )
    spec = Pipeline.of(mapped).spec[0][0]
    return dataclasses.replace(shard, dataset=configured(mapped), element_spec=spec)


def empty_dataset() -> UsageError:
    """The error for a dataset without a batch."""
    return UsageError(
        "the dataset is empty: expected at least one batch; check its source, filters and "
        "take() or skip()."
    )
