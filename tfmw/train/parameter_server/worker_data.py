"""Datasets of the workers of a parameter-server cluster.

    makers, spec = for_workers(source, workers=2)   # each maker runs with its worker as the device

Workers read at their own pace and may be lost at any time, so no order would read each example
exactly once. Each worker repeats the whole dataset, in its own order, as in tf.distribute. A
shuffle has different seeds on each worker. Without a shuffle, each worker starts at a different
batch, so that workers do not read the same batches at the same time. A callable gets an
`InputContext` with the worker's number and may shard by it.

The pipeline is sent as a graph. Python code in it (`from_generator`, `py_function`, a PyDataset)
cannot be sent, so such datasets are refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfmw import data
from tfmw.compat import datasets
from tfmw.compat.pipelines import Pipeline
from tfmw.data.reshuffles import renew_all
from tfmw.errors import UsageError

_SEED_APART = 1_000_003  # difference between the seeds of neighbouring workers
_UNSEEDED = -1  # marks shuffles without a seed, for which each worker draws one


def for_workers(
    source: data.Source, workers: int
) -> tuple[list[Callable[[], tf.data.Dataset]], Any]:
    """Creates each worker's infinite pipeline of batches.

    Returns:
        (a function for each worker that creates its dataset, the spec of their elements).

    Raises:
        UsageError: the dataset is empty, or runs Python code.
    """
    own = [_of_worker(source, worker, workers) for worker in range(workers)]
    spec = _common_spec([dataset.element_spec for dataset, _ in own])

    def maker(dataset: tf.data.Dataset, skip: int) -> Callable[[], tf.data.Dataset]:
        graph = datasets.dataset_graph(dataset)
        if datasets.python_ops(graph):
            raise UsageError(
                "the dataset runs Python code (from_generator, py_function, or a PyDataset), which "
                "stays in the coordinator's process when the pipeline goes to the workers: build "
                "it from TensorFlow ops, for example from files, or pass arrays."
            )
        renew_all(graph)

        def make() -> tf.data.Dataset:
            batches = datasets.dataset_from_graph(graph, spec).repeat().skip(skip)
            return batches.prefetch(tf.data.AUTOTUNE)

        return make

    return [maker(*each) for each in own], spec


def number_of_batches(source: data.Source) -> int | None:
    """Number of batches of one pass over the data; None if it is infinite or not known."""
    if source.is_function():
        return None
    steps = source.shard(data.Sharding(), _OrderOfWorker(_UNSEEDED)).steps
    return None if steps == data.INFINITE else steps


@dataclasses.dataclass(frozen=True)
class _OrderOfWorker(data.SharedOrder):
    """Seeds of shuffles that differ between workers."""

    worker: int = 0

    def agree(self, local: Any) -> Any:
        if isinstance(local, list):
            return [
                pair
                if pair is None
                else [0, 0]
                if pair[0] == _UNSEEDED
                else [pair[0], pair[1] + _SEED_APART * self.worker]
                for pair in local
            ]
        return None if local is None else local + _SEED_APART * self.worker


def _of_worker(source: data.Source, worker: int, workers: int) -> tuple[tf.data.Dataset, int]:
    """(one epoch of this worker's dataset, number of batches that it skips at first)."""
    if source.is_function():
        dataset = source.x(tf.distribute.InputContext(workers, worker, workers))
        if not datasets.is_dataset(dataset):
            raise UsageError(
                f"the dataset function returned {type(dataset).__name__}: expected a "
                "tf.data.Dataset, this worker's pipeline of batches."
            )
        _refuse_empty(dataset)
        return dataset, 0
    order = _OrderOfWorker(_UNSEEDED, worker=worker)
    begin = 0
    if datasets.is_dataset(source.x):
        pipeline = Pipeline.of(source.x)
        if pipeline.may_reorder:
            source = dataclasses.replace(source, x=data.ordered(pipeline, order)[0].dataset)
        else:
            begin = max(0, int(source.x.cardinality())) * worker // workers
    shard = source.shard(data.Sharding(), order)
    dataset = shard.dataset.map(lambda parts, *_: parts[0])
    _refuse_empty(dataset)
    return dataset, begin


def _common_spec(specs: list[Any]) -> Any:
    """Common spec of all workers' batches, which one traced function reads."""
    first = specs[0]
    for worker, other in enumerate(specs[1:], start=1):
        try:
            tf.nest.assert_same_structure(first, other, expand_composites=False)
            first = tf.nest.map_structure(_common, first, other)
        except (TypeError, ValueError) as e:
            raise UsageError(
                f"workers have different datasets: worker 0 has batches of {specs[0]}, worker "
                f"{worker} of {other}; return the same structure and types on every worker."
            ) from e
    return first


def _common(a: Any, b: Any) -> Any:
    common = a.most_specific_common_supertype([b])
    if common is None or (isinstance(common, tf.TensorSpec) and common.shape.rank is None):
        raise ValueError(f"{a} and {b} have different ranks")
    return common


def _refuse_empty(dataset: tf.data.Dataset) -> None:
    if int(dataset.cardinality()) == 0:
        raise data.empty_dataset()
