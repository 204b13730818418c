"""Positions in the data: the batches before one and after it, on any number of replicas."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.helpers.cases import cases
from tfmw import data
from tfmw.cluster.group import Group
from tfmw.compat import datasets, shuffles
from tfmw.compat.shuffles import ShuffleSeeds
from tfmw.errors import UsageError
from tfmw.train.epoch_iterator import EpochIterator

EXAMPLES = 22


def shuffled() -> tf.data.Dataset:
    return tf.data.Dataset.range(EXAMPLES).shuffle(EXAMPLES, seed=3)


def iterator(
    dataset: tf.data.Dataset | data.Source,
    sharding: data.Sharding,
    position: data.Cursor | None = None,
    split: bool = True,
    group: Group | None = None,
) -> EpochIterator:
    is_source = isinstance(dataset, data.Source)
    source = dataset if is_source else data.Source(dataset, split=split)
    as_json = None if position is None else dataclasses.asdict(position)
    group = group or Group(0, 1)
    found = EpochIterator(source, group, sharding, None, "steps_per_epoch", as_json)
    if position is not None:
        found.restore_position()
    return found


def read(epoch: EpochIterator, steps: int = 1000) -> list[list[int]]:
    """The examples of each step, until the end of the epoch or for some steps."""
    found: list[list[int]] = []
    while len(found) < steps and (call := epoch.next_call(1)) is not None:
        element = next(call.iterator, None)
        if element is None:  # of unknown length
            epoch.advance(0, 1)
            break
        parts, counts, _ = data.step_of(element, epoch._sharding)
        flat = [tf.nest.flatten(part)[0] for part in parts]
        found.append([int(i) for part, n in zip(flat, counts, strict=True) for i in part[:n]])
        epoch.advance(1, 1)
    return found


@pytest.mark.parametrize("later", cases([1, 3], [2]))
@pytest.mark.parametrize("steps", cases([2], [1]))
def test_whole_batches_go_on_with_other_replicas(steps: int, later: int) -> None:
    """Eleven batches of two: two replicas begin the epoch, others end it."""
    seen: list[int] = []
    for rank in range(2):
        epoch = iterator(shuffled().batch(2), data.Sharding(2, rank), split=False)
        epoch.begin_epoch()
        seen += [i for step in read(epoch, steps) for i in step]
        position = epoch.position(in_epoch=True)
    assert len(seen) == steps * 4
    for rank in range(later):
        rest = iterator(shuffled().batch(2), data.Sharding(later, rank), position, split=False)
        rest.begin_epoch()
        found = read(rest)
        assert len(found) == -(-(11 - 2 * steps) // later)
        assert rest.at_epoch_end
        rest.end_epoch()
        seen += [i for step in found for i in step]
        rest.begin_epoch()
        assert len(read(rest)) == -(-11 // later), "the next epoch is a whole one"
    assert sorted(seen) == list(range(EXAMPLES))


def test_a_position_has_the_orders_before_it() -> None:
    """The position has those of this call and earlier ones."""
    first = shuffled()
    next(iter(first))
    epoch = iterator(first.batch(4), data.Sharding())
    whole: list[list[int]] = []
    for _ in range(2):
        epoch.begin_epoch()
        whole += read(epoch, 6 if not whole else 2)
        if len(whole) == 6:
            epoch.end_epoch()
    position = epoch.position(in_epoch=True)
    assert position.source["orders"] == [3]
    expected = read(epoch)
    again = shuffled()
    rest = iterator(again.batch(4), data.Sharding(), position)
    rest.begin_epoch()
    assert read(rest) == expected
    passes: Any = ShuffleSeeds(again).passes
    assert passes == ShuffleSeeds(first).passes == 4


ROWS: np.ndarray = np.arange(EXAMPLES, dtype=np.float32)

SHORTER: dict[str, Callable[[int], data.Source]] = {
    "slices": lambda n: data.Source(tf.data.Dataset.range(n).batch(2)),
    "shuffled": lambda n: data.Source(tf.data.Dataset.range(n).shuffle(9, seed=1).batch(2)),
    "whole batches": lambda n: data.Source(tf.data.Dataset.range(n).batch(2), split=False),
    "arrays": lambda n: data.Source(ROWS[:n], batch_size=2),
    "shuffled arrays": lambda n: data.Source(ROWS[:n], batch_size=2, shuffle=True),
    "PyDataset": lambda n: data.Source(Rows(n)),
}


class Rows(keras.utils.PyDataset):
    def __init__(self, number: int):
        super().__init__()
        self._number = number

    def __len__(self) -> int:
        return self._number // 2

    def __getitem__(self, index: int) -> Any:
        return (ROWS[2 * index : 2 * index + 2],)


@pytest.mark.parametrize("kind", SHORTER)
@pytest.mark.parametrize("length", [2, 10])
def test_data_that_ends_before_the_position_of_a_backup_is_refused(kind: str, length: int) -> None:
    """Five steps were done, in a pass over eleven batches; then there are one or five."""

    def begun(length: int, position: Any = None) -> EpochIterator:
        source = SHORTER[kind](length)
        return EpochIterator(source, Group(0, 1), data.Sharding(), None, "steps", position)

    epoch = begun(EXAMPLES)
    epoch.begin_epoch()
    for _ in range(5):
        call = epoch.next_call(1)
        assert call is not None
        next(call.iterator)
        epoch.advance(1, 1)
    position = dataclasses.asdict(epoch.position(in_epoch=True))
    with pytest.raises(UsageError, match=f"after 5 steps of a pass .* has {length // 2} steps"):
        begun(length, position).restore_position()
    begun(12, position).restore_position()


LENGTHS = [5, 6, 5, 6, 8, 4, 6, 9, 7, 8]


def varying() -> tf.data.Dataset:
    """Passes of different numbers of batches, which nobody knows before."""
    lengths = iter(LENGTHS)

    def batches() -> Iterator[np.ndarray]:
        for _ in range(next(lengths)):
            yield np.ones([2, 1], np.float32)

    return tf.data.Dataset.from_generator(batches, output_signature=tf.TensorSpec([None, 1]))


class Counts(keras.Model):
    """Counts its steps."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = self.add_weight(initializer="zeros", trainable=False)

    def train_step(self, data: Any) -> dict[str, Any]:
        # An assignment that depends on the data: at their end Keras runs all other ones once more.
        self.steps.assign_add(tf.reduce_mean(data))
        return {"loss": self.steps.value}


def steps_of_keras(steps: int | None, per_execution: int, epochs: int) -> list[int]:
    """Steps of each epoch of Keras's `fit`."""
    model = Counts()
    model.compile(steps_per_execution=per_execution)
    done = [0]
    count = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: done.append(int(model.steps.numpy()))
    )
    options: Any = {"shuffle": False, "callbacks": [count], "verbose": 0}
    model.fit(varying(), epochs=epochs, steps_per_epoch=steps, **options)
    return [int(steps) for steps in np.diff(done)]


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize("options", cases([(None, 1), (3, 1)], [(None, 2), (None, 4), (7, 1)]))
def test_epochs_of_unknown_length_have_the_steps_of_keras(options: tuple[Any, int]) -> None:
    (steps, per_execution), epochs = options, 7
    expected = steps_of_keras(steps, per_execution, epochs)
    source = data.Source(varying())
    epoch = EpochIterator(
        *(source, Group(0, 1), data.Sharding(), steps, "steps"), steps_per_execution=per_execution
    )
    found, positions = [], []
    for number in range(epochs):
        epoch.begin_epoch()
        found.append(0)
        while (call := epoch.next_call(per_execution)) is not None:
            taken = [0 for _, _ in zip(range(call.max_steps), call.iterator, strict=False)]
            epoch.advance(len(taken), call.max_steps)
            found[number] += len(taken)
        epoch.end_epoch()
        positions.append(epoch.position(in_epoch=False))
    assert found == expected
    again = EpochIterator(
        source, Group(0, 1), data.Sharding(), steps, "steps", dataclasses.asdict(positions[0])
    )
    again.restore_position()
    assert again.position(in_epoch=False) == positions[0], "a resumed run has the same limit"
    epoch.reset()
    assert epoch.steps_per_epoch == steps, "the next evaluation has none"


def halves(whole: tf.data.Dataset | None = None) -> tuple[tf.data.Dataset, tf.data.Dataset]:
    """One order divided in two, and each cached."""
    whole = shuffled() if whole is None else whole
    return whole.take(14).batch(4).cache(), whole.skip(14).cache().batch(4)


def joined() -> tuple[tf.data.Dataset, tf.data.Dataset]:
    """A cache between two shuffles; a transformation of TensorFlow 1."""
    examples = tf.data.Dataset.range(EXAMPLES)
    both = tf.data.experimental.shuffle_and_repeat(EXAMPLES, count=2, seed=3)
    return shuffled().cache().shuffle(8, seed=2).batch(4), examples.apply(both).batch(4)


def passes(dataset: tf.data.Dataset, sharding: data.Sharding, epochs: int) -> list[list[list[int]]]:
    """The examples of each step of some epochs of one call."""
    epoch, found = iterator(dataset, sharding), []
    epoch.reset()
    for _ in range(epochs):
        epoch.begin_epoch()
        found.append([sorted(step) for step in read(epoch)])
        epoch.end_epoch()
    epoch.leave()
    return found


def passes_of_keras(dataset: tf.data.Dataset, epochs: int) -> list[list[list[int]]]:
    found = []
    for _ in range(epochs):
        found.append([sorted(map(int, batch)) for batch in dataset])
        iter(dataset)  # as Keras at the end of an epoch
    return found


@pytest.mark.filterwarnings("ignore:.*shuffle_and_repeat")
@pytest.mark.parametrize("make", [halves, joined])
@pytest.mark.parametrize("replicas", cases([2], [1]))
def test_a_cache_keeps_the_order_that_filled_it(make: Any, replicas: int) -> None:
    """Several calls read one shuffle in turns."""
    (train, other), (train_of_keras, other_of_keras) = make(), make()
    sharding = data.Sharding(local_replicas=replicas)
    for _ in range(2):
        assert passes(train, sharding, 2) == passes_of_keras(train_of_keras, 2)
        assert passes(other, sharding, 1) == passes_of_keras(other_of_keras, 1)


@pytest.mark.parametrize(("epochs", "steps"), [(0, 2), (1, 0), (1, 2)])
def test_a_resumed_run_fills_a_cache_as_before(epochs: int, steps: int) -> None:
    """An earlier pass over the shuffle comes before the one that fills it."""
    whole = shuffled()
    next(iter(whole))
    (train, test), later = halves(whole), halves()
    epoch = iterator(train, data.Sharding())
    for number in range(epochs + 1):
        if number < epochs or steps:
            epoch.begin_epoch()
            read(epoch, steps if number == epochs else EXAMPLES)
        if number < epochs:
            epoch.end_epoch()
    rest = iterator(later[0], data.Sharding(), epoch.position(in_epoch=bool(steps)))
    for each in (rest,) if steps else (epoch, rest):
        each.begin_epoch()
    for _ in range(2):
        expected = read(epoch)
        assert expected
        assert read(rest) == expected
        for each in (epoch, rest):
            each.end_epoch()
            each.begin_epoch()
    assert passes(later[1], data.Sharding(), 1) == passes(test, data.Sharding(), 1)


class Alike(Group):
    """A task whose group has its values."""

    def from_chief(self, decide: Any) -> Any:
        return decide()

    def from_all(self, value: Any) -> list[Any]:
        return [value] * self.size


def of_workers(make: Any, epochs: int) -> list[list[list[int]]]:
    """Passes of two workers; see `passes`."""
    workers = [iterator(make(), data.Sharding(2, rank), group=Alike(rank, 2)) for rank in range(2)]
    found = []
    for _ in range(epochs):
        for worker in workers:
            worker.begin_epoch()
        found.append([sorted(a + b) for a, b in zip(*map(read, workers), strict=True)])
        for worker in workers:
            worker.end_epoch()
    return found


def test_each_worker_writes_its_own_file_of_a_cache(tmp_path: Path) -> None:
    """Also after it was killed; a complete file of another run is read."""
    file = tmp_path / "all [users] 100%"

    def cached(name: str = str(file)) -> tf.data.Dataset:
        mapped = tf.data.Dataset.range(EXAMPLES).map(lambda i: i)
        return mapped.shuffle(9, seed=2).cache(name).shuffle(8, seed=1).batch(4)

    (tmp_path / f"{file.name}.worker-1-of-2_0.lockfile").write_text("of a killed process")
    expected = passes(cached(""), data.Sharding(), 2)
    assert of_workers(cached, 2) == expected
    indices = [f"{file.name}.worker-{rank}-of-2.index" for rank in range(2)]
    assert sorted(path.name for path in tmp_path.iterdir() if "data" not in path.name) == indices
    for path in tmp_path.iterdir():
        path.unlink()
    assert passes(cached(), data.Sharding(), 2) == expected
    written = sorted(tmp_path.iterdir())
    assert of_workers(cached, 2) == expected
    assert sorted(tmp_path.iterdir()) == written


def test_a_pipeline_ends_with_its_choices_between_infinite_ones() -> None:
    def chosen(choices: tf.data.Dataset) -> tf.data.Dataset:
        parts = [tf.data.Dataset.range(first, first + 3).repeat() for first in (0, 10)]
        return tf.data.Dataset.choose_from_datasets(parts, choices)

    choices = tf.data.Dataset.range(2)
    few = chosen(choices.repeat(4)).batch(4)
    expected = [[0, 1, 10, 11], [0, 2, 10, 12]]
    for pipeline in (few, few.repeat(1).prefetch(2)):
        assert passes(pipeline, data.Sharding(local_replicas=2), 2) == [expected, expected]
    for pipeline in (chosen(choices.repeat()).batch(4), few.repeat()):
        with pytest.raises(UsageError, match="the dataset is infinite"):
            iterator(pipeline, data.Sharding())


def test_copies_on_a_device_are_left_to_the_step() -> None:
    to_device = tf.data.experimental.prefetch_to_device("/CPU:0")
    copied, plain = (shuffled().batch(4) for _ in range(2))
    found = passes(copied.apply(to_device), data.Sharding(local_replicas=2), 2)
    assert found == passes(plain, data.Sharding(local_replicas=2), 2)


@pytest.fixture
def unknown_states(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A TensorFlow that keeps the place of a shuffle under another name."""
    monkeypatch.setattr(shuffles, "_DRAWN", b"number_of_samples")
    shuffles.has_known_states.cache_clear()
    yield
    shuffles.has_known_states.cache_clear()


def _reordered(name: str) -> tf.data.Dataset:
    if name == "repeated":
        return shuffled().repeat(2).batch(4)
    if name == "inside":
        return tf.data.Dataset.zip((shuffled(), shuffled())).map(lambda a, _: a).batch(4)
    return tf.data.Dataset.range(EXAMPLES).shuffle(EXAMPLES).map(lambda i: i).batch(4)


def test_a_resumed_run_creates_one_shard_of_shuffled_arrays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def of_arrays(position: data.Cursor | None = None) -> EpochIterator:
        source = data.Source(np.arange(EXAMPLES), batch_size=4, shuffle=True)
        return iterator(source, data.Sharding(2, 1), position)

    whole, steps, positions = of_arrays(), [], []
    for number in range(3):
        whole.begin_epoch()
        steps.append(read(whole, number + 1))
        positions.append(whole.position(in_epoch=True))
        steps[-1] += read(whole)
        whole.end_epoch()
        positions.append(whole.position(in_epoch=False))
    assert len({str(each) for each in steps}) == 3
    shard = data.Source.shard
    made: list[Any] = []

    def noted(*arguments: Any) -> data.Shard:
        made.append(arguments)
        return shard(*arguments)

    monkeypatch.setattr(data.Source, "shard", noted)
    for number, position in enumerate(positions[:-1]):
        made.clear()
        resumed = of_arrays(position)
        resumed.begin_epoch()
        assert len(made) == 1
        first, done = -(-number // 2), position.done
        assert read(resumed) == steps[first][done:]
        for later in steps[first + 1 :]:
            resumed.end_epoch()
            resumed.begin_epoch()
            assert read(resumed) == later


def test_passes_over_shuffled_arrays_are_read_by_one_iterator() -> None:
    epoch = iterator(data.Source(np.arange(EXAMPLES), batch_size=4, shuffle=True), data.Sharding())
    used, orders = [], []
    for stop in [None, 2, None, None]:  # the second epoch is left before its end
        epoch.begin_epoch()
        used.append(epoch.iterator)
        orders.append(read(epoch, stop or 1000))
        epoch.end_epoch()
    assert used[0] is used[1]
    assert used[2] is used[3]
    whole = [sorted(i for step in each for i in step) for each in orders]
    assert whole[0] == whole[2] == whole[3] == list(range(EXAMPLES))
    assert len({str(each[:2]) for each in orders}) == 4


@pytest.mark.usefixtures("unknown_states")
@pytest.mark.parametrize("name", ["unseeded", "repeated", "inside"])
def test_an_unknown_form_of_states_is_noticed_and_passes_are_read_again(name: str) -> None:
    assert not shuffles.has_known_states()
    positions, workers = [], []
    for rank in range(2):
        dataset = _reordered(name)
        with datasets.substituted_global_seed(7):  # which both workers draw
            epoch = iterator(dataset, data.Sharding(2, rank))
        steps: list[list[list[int]]] = []
        for _ in range(3):
            epoch.begin_epoch()
            steps.append(read(epoch, 2))
            positions.append(epoch.position(in_epoch=True))
            steps[-1] += read(epoch)
            epoch.end_epoch()
        workers.append(steps)
    passes = [[a + b for a, b in zip(*both, strict=True)] for both in zip(*workers, strict=True)]
    times = 2 if name == "repeated" else 1
    for together in passes:
        assert sorted(i for step in together for i in step) == sorted([*range(EXAMPLES)] * times)
    assert len({str(together) for together in passes}) == 3, "each pass has an order of its own"
    for rank in range(2):
        resumed = iterator(_reordered(name), data.Sharding(2, rank), positions[3 * rank + 1])
        for number in (1, 2):
            resumed.begin_epoch()
            assert read(resumed) == workers[rank][number][2 if number == 1 else 0 :]
            resumed.end_epoch()


@pytest.mark.usefixtures("unknown_states")
def test_the_place_of_a_shuffle_in_an_unknown_state_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match="keeps the place of a shuffle in a form that this"):
        ShuffleSeeds(shuffled())
    of_function = EpochIterator(
        data.Source(lambda _: shuffled().batch(4)), Group(0, 1), data.Sharding(), None, "steps"
    )
    with pytest.raises(UsageError, match="keeps the place of a shuffle in a form that this"):
        of_function.begin_epoch()
    once = tf.data.Dataset.range(9).shuffle(9, reshuffle_each_iteration=False).batch(3)
    with pytest.raises(UsageError, match="with a seed, or install a version"):
        iterator(once, data.Sharding(2, 0))
