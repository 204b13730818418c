"""Data that Python code of every worker makes: the same on all workers, or refused on all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.helpers.threads import Exchange, in_threads
from tfmw import data
from tfmw.cluster.group import Group
from tfmw.data.python_sources import Journal
from tfmw.errors import UsageError
from tfmw.train.epoch_iterator import EpochIterator

N, BATCH = 24, 8
X: np.ndarray = np.arange(N, dtype=np.float32)[:, None]


class Worker(Group):
    """A worker that is a thread; Python's and NumPy's global generators are those of all."""

    def __init__(self, rank: int, exchange: Exchange):
        super().__init__(rank, 2)
        self._exchange_all = exchange.of(rank)

    def from_all(self, value: Any) -> list[Any]:
        return self._exchange_all(value)

    def from_chief(self, decide: Callable[[], Any]) -> Any:
        return self.from_all(decide())[0]


class Shuffled(keras.utils.PyDataset):
    """Shuffles its rows when it is made, and after each epoch."""

    def __init__(self, generator: np.random.Generator, **options: Any):
        super().__init__(**options)
        self._generator, self._order = generator, np.arange(N)
        generator.shuffle(self._order)

    def __len__(self) -> int:
        return N // BATCH

    def __getitem__(self, index: int) -> Any:
        rows = self._order[BATCH * index :][:BATCH]
        return X[rows], X[rows]

    def on_epoch_end(self) -> None:
        self._generator.shuffle(self._order)


def batches(generator: np.random.Generator) -> Iterator[Any]:
    order = generator.permutation(N)
    for first in range(0, N, BATCH):
        yield X[order[first:][:BATCH]], X[order[first:][:BATCH]]


def examples(generator: np.random.Generator) -> Iterator[Any]:
    for i in generator.permutation(N):
        yield X[i], X[i]


def of_batches(generator: np.random.Generator) -> tf.data.Dataset:
    spec = (tf.TensorSpec([None, 1]),) * 2
    return tf.data.Dataset.from_generator(lambda: batches(generator), output_signature=spec)


def of_examples(generator: np.random.Generator) -> tf.data.Dataset:
    spec = (tf.TensorSpec([1]),) * 2
    rows = tf.data.Dataset.from_generator(lambda: examples(generator), output_signature=spec)
    return rows.map(lambda x, y: (x, y)).batch(BATCH)  # each worker maps its own rows only


def of_ragged(generator: np.random.Generator) -> tf.data.Dataset:
    def ragged() -> Iterator[Any]:
        for x, y in batches(generator):
            yield tf.RaggedTensor.from_tensor(x), y

    spec = (tf.RaggedTensorSpec([None, None]), tf.TensorSpec([None, 1]))
    return tf.data.Dataset.from_generator(ragged, output_signature=spec)


KINDS: dict[str, Callable[[np.random.Generator], Any]] = {
    "generator": batches,
    "from_generator of batches": of_batches,
    "from_generator of examples": of_examples,
    "from_generator of ragged batches": of_ragged,
    "PyDataset": Shuffled,
}


def read(make: Callable[[int], Any], epochs: int = 1, **options: Any) -> list[Any]:
    """Examples that each of two workers reads in each epoch, or its error."""
    exchange = Exchange(2)

    def work(rank: int) -> list[list[int]]:
        sharding = data.Sharding(2, rank)
        source = data.Source(make(rank), **options)
        steps = options.get("steps")
        epoch = EpochIterator(source, Worker(rank, exchange), sharding, steps, "steps")
        epoch.reset()
        found: list[list[int]] = []
        for _ in range(epochs):
            epoch.begin_epoch()
            found.append([])
            while (call := epoch.next_call(1)) is not None:
                element = next(call.iterator, None)
                nothing: Any = ((), [0], 0)
                parts, counts, _ = nothing if element is None else data.step_of(element, sharding)
                if not int(counts[0]):
                    epoch.advance(0, 1)
                    continue
                rows = parts[0][1][: counts[0]]
                found[-1] += rows.numpy().ravel().astype(int).tolist()
                epoch.advance(1, 1)
            epoch.end_epoch()
        epoch.leave()
        return found

    return in_threads(2, work)


@pytest.mark.parametrize("kind", KINDS)
def test_an_order_of_each_worker_is_refused_on_all(kind: str) -> None:
    for error in read(lambda rank: KINDS[kind](np.random.default_rng(rank))):
        assert isinstance(error, UsageError), error
        assert "keras.utils.set_random_seed" in str(error)
        assert "of the first 1 element(s) of a pass, worker 1 has others" in str(error)


@pytest.mark.parametrize("kind", KINDS)
def test_an_order_with_a_seed_is_read_once(kind: str) -> None:
    one, other = read(lambda rank: KINDS[kind](np.random.default_rng(5)))
    assert sorted(one[0] + other[0]) == list(range(N))


def test_orders_that_differ_from_a_later_epoch_on_are_refused() -> None:
    class Later(Shuffled):
        def on_epoch_end(self) -> None:
            pass

        def on_epoch_begin(self) -> None:
            self.epochs = getattr(self, "epochs", 0) + 1
            if self.epochs == 2:
                self._order = np.random.default_rng(self.rank).permutation(N)

    def make(rank: int) -> Later:
        made = Later(np.random.default_rng(5))
        made.rank = rank
        return made

    assert all(isinstance(found, list) for found in read(make, epochs=1))
    for error in read(make, epochs=2):
        assert isinstance(error, UsageError), error


def endless(made: list[int]) -> Iterator[Any]:
    while True:
        made.append(len(made) + 1)
        batch: np.ndarray = np.full([BATCH, 1], made[-1], np.float32)
        yield batch, batch


@pytest.mark.parametrize("split", [True, False])
def test_a_generator_is_read_as_far_as_its_steps_on_all_workers(split: bool) -> None:
    made: list[list[int]] = [[], []]
    generators = [endless(each) for each in made]
    per_step = 1 if split else 2
    for call, steps in enumerate([4, 1, 3]):
        read_before = len(made[0])
        found = read(generators.__getitem__, epochs=2, steps=steps, split=split)
        assert all(isinstance(each, list) for each in found), found
        batches_read = 2 * steps * per_step
        assert [len(each) for each in made] == [read_before + max(2, batches_read)] * 2, call
        first = read_before + 1
        for epochs in found:
            assert all(len(rows) == steps * BATCH * per_step // 2 for rows in epochs)
        rows = sorted(row for epochs in found for epoch in epochs for row in epoch)
        assert rows == sorted(list(range(first, first + batches_read)) * BATCH)


def test_a_generator_that_is_left_in_an_epoch_goes_on_at_one_place() -> None:
    made: list[list[int]] = [[], []]
    generators = [endless(each) for each in made]
    exchange = Exchange(2)

    def leave(rank: int) -> int:
        source = data.Source(generators[rank], steps=6)
        epoch = EpochIterator(source, Worker(rank, exchange), data.Sharding(2, rank), 6, "steps")
        epoch.begin_epoch()
        for _ in range(2 + 3 * rank):  # as if one worker had read further ahead
            next(epoch.iterator)
        epoch.leave()
        return len(made[rank])

    one, other = in_threads(2, leave)
    assert one == other
    assert 5 <= one <= 6


def test_values_that_are_rounded_differently_are_the_same() -> None:
    def make(rank: int) -> Iterator[Any]:
        for _ in range(3):
            x = np.sin(X[:BATCH]) * (1 + rank * 1e-7)
            yield x.astype(np.float32), X[:BATCH]

    assert all(isinstance(found, list) for found in read(make))


def sketches(*elements: Any) -> Any:
    journal = Journal()
    for element in elements:
        journal.note(0, 7, [element])
    return journal


VALUES: dict[str, np.ndarray] = {
    "floats": np.arange(20.0),
    "large integers": np.arange(20) + 10**15,
    "texts": np.array([f"row {i}" for i in range(20)], object),
    "bytes": np.array([b"%d" % i for i in range(20)], object),
    "truth": np.arange(20) % 3 == 0,
    "with infinity": np.append(np.arange(19.0), np.inf),
    "complex": np.arange(20) * 1j,
}


@pytest.mark.parametrize("kind", VALUES)
def test_sketches_show_a_change_of_two_values(kind: str) -> None:
    values = VALUES[kind]
    swapped = values.copy()
    swapped[[2, 3]] = swapped[[3, 2]]
    exchange = Exchange(2)

    def compare(rank: int, other: np.ndarray) -> None:
        journal = sketches(*[other if rank else values] * 3)
        journal.sources = 1
        journal.refuse_other_elements(Worker(rank, exchange))

    assert in_threads(2, lambda rank: compare(rank, values)) == [None, None]
    for error in in_threads(2, lambda rank: compare(rank, swapped)):
        assert isinstance(error, UsageError)


@pytest.mark.parametrize("later", [1, 63, 64, 500])
def test_an_element_in_another_place_is_found(later: int) -> None:
    """Every sixteenth element after the first 64 is compared: a different order stays different."""
    exchange = Exchange(2)

    def compare(rank: int) -> None:
        order = list(range(1024))
        order[later:] = order[later:] if rank == 0 else order[later:][::-1]
        journal = sketches(*order)
        journal.sources = 1
        journal.refuse_other_elements(Worker(rank, exchange))

    for error in in_threads(2, compare):
        assert isinstance(error, UsageError)
