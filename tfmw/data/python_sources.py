"""Data from Python code on every worker: generators, `from_generator`, a `PyDataset`.

Each worker runs the code itself, and keeps its rows of each batch. So all workers must create the
same elements. They begin with the chief's states of Python's and NumPy's global generators, and
compare sketches of the elements that they have read. These differ if the code draws its order, or
values, from a generator of its own without a seed.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfmw.cluster.group import Group
from tfmw.compat.generators import watch_generators
from tfmw.data.comparison import TOLERANCE_OF_SKETCHES, sketch
from tfmw.data.values import EpochHooks
from tfmw.errors import UsageError

_ALL = 64  # Every one of the first elements of a pass is sketched; later, each `_SOME`th.
_SOME = 16
_PASSES = 2  # number of passes that are compared
_VALUES = 1 << 12  # number of values compared per array of an element

Marks = dict[int, tuple[float, float]]  # number of elements -> the sketch of all of them


class Journal:
    """Sketches of the elements that this worker has read, while it reads them."""

    def __init__(self) -> None:
        self.sources = 0
        self._lock = threading.Lock()
        self._passes: dict[tuple[int, int], _Pass] = {}
        self._numbers: dict[int, dict[int, int]] = {}  # source -> {iterator: index of the pass}

    def watch(self, dataset: tf.data.Dataset) -> None:
        """Records the elements of each `from_generator` of a pipeline."""
        self.sources += watch_generators(dataset, self.note, self.sources)

    def note(self, source: int, iterator: int, arrays: Sequence[Any]) -> None:
        """Adds an element, in the thread that has read it."""
        with self._lock:
            numbers = self._numbers.setdefault(source, {})
            if iterator not in numbers:
                number = numbers[iterator] = len(numbers) + 1
                self._passes[source, number] = _Pass()
                self._passes.pop((source, number - _PASSES), None)
            noted = self._passes.get((source, numbers[iterator]))
            if noted is not None:
                noted.add(arrays)

    def refuse_other_elements(self, group: Group) -> None:
        """Raises UsageError on every worker if workers have read other elements; all must call it.

        The comparison covers only elements that all workers have read, as some have read further.
        """
        if group.size == 1 or not self.sources:
            return
        with self._lock:
            own = [[*key, list(each.marks.items())] for key, each in self._passes.items()]
        chief, *others = (
            {(source, number): dict(marks) for source, number, marks in one}
            for one in group.from_all(own)
        )
        for rank, other in enumerate(others, start=1):
            for key, marks in chief.items():
                read = other.get(key, {})
                place = next((n for n in marks if n in read and _differ(marks[n], read[n])), None)
                if place is not None:
                    raise UsageError(
                        f"Python code gave workers different data: of the first {place} element(s) "
                        f"of a pass, worker {rank} has others than worker 0. Each worker runs the "
                        "generator or PyDataset itself and keeps its rows of each batch, so "
                        "examples would be lost or read twice. Call keras.utils.set_random_seed(1) "
                        "on every worker before the data is made, and give each generator of your "
                        "own a seed: np.random.default_rng(1), random.Random(1)."
                    )


class _Pass:
    """The sketch of the elements of one pass, stored at some element counts."""

    def __init__(self) -> None:
        self.marks: Marks = {}
        self._count, self._sum, self._squares = 0, 0.0, 0.0

    def add(self, arrays: Sequence[Any]) -> None:
        self._count = count = self._count + 1
        if count <= _ALL or count % _SOME == 0:
            factor = 1 + count * 0.618034 % 1  # the order of elements affects the sketch
            for place, array in enumerate(arrays, start=1):
                own, squares = sketch(array, _VALUES)
                self._sum += factor * place * own
                self._squares += (factor * place) ** 2 * squares
        if count < 8 or count & (count - 1) == 0:
            self.marks[count] = self._sum, self._squares


def _differ(one: tuple[float, float], other: tuple[float, float]) -> bool:
    size = math.sqrt(max(one[1], other[1]))
    return abs(one[0] - other[0]) > TOLERANCE_OF_SKETCHES * size


class GeneratorHooks(EpochHooks):
    """Hooks for a Python generator, read once, which stops at the same place on all workers.

    Args:
        adapter: Keras's adapter, which has read the first batches, and calls its `generator` for
            all.
    """

    def __init__(self, adapter: Any):
        self._adapter, self._restored = adapter, adapter.generator
        self._batches = self._restored()
        self._lock = threading.Lock()
        self._call = self._count = 0
        adapter.generator = self._read

    def dataset(self, group: Group, batches: int | None) -> tf.data.Dataset:
        """The remaining batches.

        Args:
            group: the tasks that read them.
            batches: number of batches of an epoch, beyond which none is read ahead; None reads to
                the end.
        """
        self._group = group
        self._of_epoch = itertools.count() if batches is None else range(batches)
        dataset: tf.data.Dataset = self._adapter.get_tf_dataset()
        return dataset if batches is None else dataset.repeat()

    def begin(self, new_pass: bool, continued: bool) -> None:
        if new_pass:  # as in Keras, with the batches that the adapter has read
            self._batches = self._restored()

    def _read(self) -> Iterator[Any]:
        call = self._call
        for _ in self._of_epoch:
            with self._lock:
                if call != self._call:
                    return  # a prefetching thread of a call that has ended
                try:
                    batch = next(self._batches)
                except StopIteration:
                    return
                self._count += 1
            yield batch

    def leave(self) -> None:
        with self._lock:
            self._call += 1
        most = max(self._group.from_all(self._count))
        for _ in itertools.islice(self._batches, most - self._count):
            pass
        self._count = most
