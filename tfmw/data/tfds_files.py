"""`tfmw.data.tfds`: a TFDS data set whose files are divided between the workers.

    train = tfmw.data.tfds("mnist", "train", 128)     # a function of an InputContext
    tfmw.fit(model, train, epochs=5)

How the examples are distributed, each once per epoch:

* at least as many files as workers: worker f mod N reads file f (`ReadConfig(input_context=...)`);
* fewer files: each worker reads a range of the examples (`tfds.even_splits`), and opens the files
  that contain the range.

All seeds are set, so a run that resumes from a backup continues in the same order.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfmw.errors import UsageError, require_whole


def tfds(
    name: str,
    split: str,
    batch_size: int,
    *,
    shuffle: int = 10_000,
    seed: int = 0,
    map: Callable[..., Any] | None = None,
    as_supervised: bool = True,
    data_dir: str | os.PathLike[str] | None = None,
    read_config: Any = None,
    **kwargs: Any,
) -> Callable[[tf.distribute.InputContext], tf.data.Dataset]:
    """Creates a TFDS data set for `fit` and `evaluate`; each worker opens its own files only.

    If the data set does not exist yet, one process prepares it, while other processes on the same
    file system wait.

    Args:
        name: a TFDS name: "mnist", "my_dataset/config:1.0.0"; "tfmw_digits" ships with tfmw.
        split: a TFDS split: "train", "train[:80%]", "train+test".
        batch_size: number of examples of a global batch, divided between the replicas.
        shuffle: size of the buffer that shuffles a worker's examples; its files are shuffled,
            too. Each epoch has a new order. 0 shuffles neither.
        seed: seed of these shuffles.
        map: called on each example before it is batched, with (features, label) if
            `as_supervised`.
        as_supervised: elements are (features, label), else dicts of all features.
        data_dir: the data directory of TFDS.
        read_config: a `tfds.ReadConfig` with further options; `input_context` and `shuffle_seed`
            are set here.
        **kwargs: to `tfds.load`, such as `decoders`.

    Returns:
        A function of a `tf.distribute.InputContext` that returns that worker's pipeline.

    Raises:
        UsageError: a wrong `batch_size` or `shuffle`; when the function is called: a batch size
            that the replicas do not divide, or an empty split.
    """
    require_whole("batch_size", batch_size, 1)
    require_whole("shuffle", shuffle, 0)

    def dataset_fn(context: tf.distribute.InputContext) -> tf.data.Dataset:
        import tensorflow_datasets

        from tfmw.data import datasets

        per_replica, remainder = divmod(batch_size, context.num_replicas_in_sync)
        if remainder:
            raise UsageError(
                f"batch_size is {batch_size} with {context.num_replicas_in_sync} replicas: each "
                "reads its own files, so the batch size must be a multiple of their number; use "
                f"{max(1, per_replica) * context.num_replicas_in_sync}."
            )
        workers, rank = context.num_input_pipelines, context.input_pipeline_id
        builder = datasets.prepared(name, data_dir=data_dir)
        files = len(builder.info.splits[split].file_instructions)
        if not files:
            raise UsageError(
                f"the split {split!r} of {name!r} is empty: expected examples to read."
            )
        config = dataclasses.replace(
            read_config or tensorflow_datasets.ReadConfig(),
            input_context=context if files >= workers > 1 else None,
            shuffle_seed=seed,
            shuffle_reshuffle_each_iteration=True,
        )
        local_split: Any = split
        empty = False
        if workers > files:
            ranges = tensorflow_datasets.even_splits(split, workers)
            # TFDS cannot read an empty range, so this reads the first worker's, which has the same
            # structure.
            empty = not builder.info.splits[ranges[rank]].num_examples
            local_split = ranges[0 if empty else rank]
        dataset = builder.as_dataset(
            split=local_split,
            shuffle_files=shuffle > 0,
            as_supervised=as_supervised,
            read_config=config,
            **kwargs,
        )
        dataset = dataset.take(0) if empty else dataset
        if shuffle:
            dataset = dataset.shuffle(shuffle, seed=seed, reshuffle_each_iteration=True)
        if map is not None:
            dataset = dataset.map(map, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
        return dataset.batch(per_replica).prefetch(tf.data.AUTOTUNE)

    return dataset_fn
