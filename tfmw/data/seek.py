"""A pipeline from some element on, without the elements before it.

    rest = seek(dataset, 80_000_000)       # the elements of dataset.skip(80_000_000)

A position in a pipeline is turned into positions in its sources: `batch` multiplies it, `map` and
`prefetch` keep it, `repeat` divides it by the length of its input. Sources with an index begin
there; files of records get one, see `record_files`. The order of a shuffle over such a source is
computed, see `keras_compat.shuffles`. What has no index skips, as far down in the pipeline as
possible.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tfmw.data.batches import beneath, deterministic, input_of, steps_in, without_autograph
from tfmw.data.by_index import element_at, has_index, peeled
from tfmw.data.order import ordered
from tfmw.data.record_files import FileRecords, Sources
from tfmw.data.reshuffles import Reshuffles, small_of
from tfmw.data.values import INFINITE, Order
from tfmw.keras_compat import datasets, rebuilding, shuffles
from tfmw.keras_compat.shuffles import ShuffleSeeds

logger = logging.getLogger("tfmw")

_BLOCK = 1 << 17  # indices that are computed together
_MANY = 1_000_000  # skipped elements that take seconds
_PROBED, _PROBE_S = 1000, 0.2  # elements, and seconds that tell how long others take


def seek(
    dataset: tf.data.Dataset,
    position: int,
    reshuffles: Reshuffles | None = None,
    order: Order | None = None,
) -> tf.data.Dataset:
    """The elements from `position` on, in the order of an uninterrupted pass.

    Args:
        dataset: a result of `ordered`, whose shuffles have seeds.
        position: number of elements before the first one.
        reshuffles: of `dataset`; they learn of passes that are not read.
        order: of `dataset`.
    """
    plans: list[_Plan] = []
    todo = [_Plan(dataset, position, Sources(order or Order()))]
    while todo:
        plan = todo.pop()
        plans.append(plan)
        if plan.position:
            plan.choose()
        todo.extend(plan.inputs)
    for plan in reversed(plans):  # inputs come after what reads them
        plan.build()
    if reshuffles is not None:  # whole passes, of a `repeat`, before the one that is computed
        reshuffles.starts = [start for plan in plans for start in plan.starts]
    return plans[0].result


def ordered_from(
    dataset: tf.data.Dataset, order: Order, position: int
) -> tuple[tf.data.Dataset, Reshuffles]:
    """The `ordered` pipeline from some element on, and its shuffles."""
    whole, reshuffles = ordered(dataset, order)
    return seek(whole, position, reshuffles, order), reshuffles


@dataclasses.dataclass
class PassStart:
    """Passes over a shuffle that have begun before a pipeline's first element.

    Args:
        shuffle: its dataset.
        before: passes that have ended.
        begun: 1 if another one has begun, whose order is computed; otherwise 0.
        after: passes that the whole pipeline would begin at its end, and this one does not.
    """

    shuffle: tf.data.Dataset
    before: int
    begun: int
    after: int = 0
    number: int | None = None

    def begin(self) -> None:
        """Counts these passes; sets the `number` of the computed one."""
        if datasets.reshuffles(self.shuffle):
            seeds = ShuffleSeeds(small_of(self.shuffle))
            self.number = seeds.passes + self.before
            seeds.passes = self.number + self.begun

    def seeds(self) -> list[int]:
        """The pair of seeds of the computed pass; the next call is of another iterator."""
        if self.number is None:
            self.begin()
        number, self.number = self.number, None
        seeds = datasets.shuffle_seeds(self.shuffle)
        assert seeds is not None  # as `_computed` has seen
        again = datasets.reshuffles(self.shuffle)
        return shuffles.pair_of_pass(seeds, number or 0, again)


class _Plan:
    """The replacement of a node, without its first `position` elements.

    Attributes:
        inputs: plans of what the result reads.
        starts: passes that are not read.
        result: after `build`.
    """

    def __init__(self, node: tf.data.Dataset, position: int, sources: Sources):
        self.node, self.position, self._sources = node, position, sources
        self.inputs: list[_Plan] = []
        self.starts: list[PassStart] = []
        self.result = node
        self._rebuild: Callable[..., tf.data.Dataset] | None = None

    def build(self) -> None:
        """Sets `result`, after those of the inputs."""
        if self._rebuild is not None:
            self.result = self._rebuild(*(plan.result for plan in self.inputs))

    def _of(self, rebuild: Callable[..., tf.data.Dataset], *inputs: Any) -> None:
        """The result is `rebuild` of the (node, position) of each input."""
        self._rebuild = rebuild
        self.inputs = [_Plan(below, position, self._sources) for below, position in inputs]

    def choose(self) -> None:
        """Decides on the node's inputs."""
        node, position = self.node, self.position
        length = steps_in(node)
        if length not in (None, INFINITE) and position >= length:
            self._of(lambda: node.skip(position))  # shuffles in it begin a pass all the same
        elif isinstance(node, (*datasets.Same, *datasets.Map)) and datasets.is_pure(node):
            self._of(lambda below: rebuilding.rebuilt(node, below), (input_of(node), position))
        elif isinstance(node, (*datasets.Batch, *datasets.PaddedBatch)) and (
            arguments := datasets.batch_arguments(node)
        ):
            below = (input_of(node), position * arguments[0])
            self._of(lambda source: rebuilding.rebuilt(node, source), below)
        elif isinstance(node, datasets.Take):
            count = datasets.count_of(node)
            rest = max(count - position, 0) if count >= 0 else -1
            self._of(lambda below: below.take(rest), (input_of(node), position))
        elif isinstance(node, datasets.Skip):
            self._of(lambda below: below, (input_of(node), position + datasets.count_of(node)))
        elif isinstance(node, datasets.ShardNode):
            shards, index = datasets.shard_arguments(node)
            below = (input_of(node), position * shards)
            self._of(lambda source: source.shard(shards, index), below)
        elif isinstance(node, datasets.Zip):
            inputs = [(each, position) for each in datasets.dataset_inputs(node)]
            self._of(lambda *parts: datasets.zipped(node, parts), *inputs)
        elif datasets.is_memory_cache(node) and _shuffles_below(node) == []:
            self._of(lambda below: below, (input_of(node), position))
        elif not (self._joined() or self._repeated() or self._source() or self._computed()):
            self._skipped()

    def _joined(self) -> bool:
        if not isinstance(self.node, datasets.Concatenate):
            return False
        first, second = datasets.dataset_inputs(self.node)
        length = self._sources.length(first)
        if length is None or length == INFINITE:
            return False
        if self.position < length:
            self._of(lambda rest: rest.concatenate(second), (first, self.position))
            return True
        # A shuffle in the first part would have begun a pass.
        if _shuffles_below(first) != []:
            return False
        self._of(lambda rest: rest, (second, self.position - length))
        return True

    def _repeated(self) -> bool:
        node, position = self.node, self.position
        if not isinstance(node, datasets.Repeat):
            return False
        below = input_of(node)
        length, shuffles = self._sources.length(below), _shuffles_below(below)
        if length in (None, INFINITE, 0) or shuffles is None:
            return False
        passes, rest = divmod(position, length)
        count = datasets.count_of(node)
        left = count - passes if count >= 0 else -1
        # A repeat begins again to see that it has ended. One of a single pass does not, nor one
        # right above a shuffle: tf.data joins the two (`shuffle_and_repeat_fusion`).
        again = count > 1 and not isinstance(below, datasets.Shuffle)
        after = int(again and left - (rest > 0) < 2)
        self.starts.extend(PassStart(shuffle, passes, 0, after) for shuffle in shuffles)
        if not rest:
            self._of(lambda: below.repeat(left))
        elif left == 1:
            self._of(lambda first: first, (below, rest))
        else:
            more = left - 1 if left >= 0 else -1
            self._of(lambda first: first.concatenate(below.repeat(more)), (below, rest))
        return True

    def _source(self) -> bool:
        node, position = self.node, self.position
        tensors = datasets.sliced_tensors(node)
        if tensors is not None:
            rest = [tensor[position:] for tensor in tensors]
            rest = tf.nest.pack_sequence_as(node.element_spec, rest)
            self._of(lambda: tf.data.Dataset.from_tensor_slices(rest))
        elif isinstance(node, datasets.Range):
            start, stop, step, kind = datasets.range_arguments(node)
            begin = start + position * step
            self._of(lambda: tf.data.Dataset.range(begin, stop, step, output_type=kind))
        elif (records := self._sources[node]) is not None and _order_is_known(records.shuffle):
            numbers = self._numbers(records)

            def blocks() -> Iterator[np.ndarray]:
                of_pass = numbers()
                for first in range(position, records.length, _BLOCK):
                    yield of_pass(np.arange(first, min(first + _BLOCK, records.length)))

            self._of(lambda: records.elements(blocks, max(0, records.length - position)))
        else:
            return False
        return True

    def _numbers(self, records: FileRecords) -> Callable[[], Callable[[np.ndarray], np.ndarray]]:
        """The numbers of records in a pass, as `FileRecords.numbers`, once it has begun."""
        if records.shuffle is None:
            return functools.cache(lambda: records.numbers(None))
        start = PassStart(records.shuffle, 0, 1)
        self.starts.append(start)
        return lambda: records.numbers(start.seeds())

    def _computed(self) -> bool:
        """A shuffle over a source with an index."""
        node, position = self.node, self.position
        if not isinstance(node, datasets.Shuffle):
            return False
        source = _IndexedInput.of(input_of(node), self._sources)
        if source is None or not _order_is_known(node):
            return False
        buffer_size, length = datasets.buffer_size_of(node), self._sources.length(input_of(node))
        length = None if length == INFINITE else length
        start = PassStart(node, 0, 1)
        self.starts.append(start)
        numbers = None if source.records is None else self._numbers(source.records)

        def blocks() -> Iterator[np.ndarray]:
            order = shuffles.ShuffleOrder(buffer_size, length, start.seeds())
            of_pass = None if numbers is None else numbers()
            for block in order.blocks(position):
                indices = source.indices(block)
                yield indices if of_pass is None else of_pass(indices)

        count = tf.data.INFINITE_CARDINALITY if length is None else length - position
        self._of(lambda: deterministic(source.elements(blocks, count), read_ahead=False))
        return True

    def _skipped(self) -> None:
        if self.position > _MANY:
            seconds = _seconds_to_skip(self.node, self.position)
            logger.info(
                "the position in the data is %d elements behind the beginning of %s, which cannot "
                "start there: they are read again, and dropped%s",
                self.position,
                type(self.node).__name__.strip("_"),
                "" if seconds is None else f", in about {seconds:.0f} s",
            )
        self._of(lambda: self.node.skip(self.position))


def _seconds_to_skip(
    node: tf.data.Dataset, position: int, clock: Callable[[], float] = time.monotonic
) -> float | None:
    """The time to read so many elements, from that of the first ones.

    None if another pass would change something: Python functions and random numbers.
    """
    node = beneath(node, datasets.Shuffle)  # whose generator a pass would advance
    if not rebuilding.may_be_read_twice(node):
        return None
    count, seconds = _PROBED, 0.0
    while seconds < _PROBE_S and count < position:
        begin = clock()
        if next(iter(node.skip(count)), None) is None:  # of several passes
            break
        seconds, count = clock() - begin, count * 4
    return seconds * position / (count / 4)


@dataclasses.dataclass(frozen=True)
class _IndexedInput:
    """A chain of moves and maps over a source with an index.

    Attributes:
        node: the source.
        moves: the last one first.
        maps: the first one first.
        records: of `node`, if it reads files.
        sources: of the pipeline.
    """

    node: tf.data.Dataset
    moves: list[tf.data.Dataset]
    maps: list[tf.data.Dataset]
    records: FileRecords | None
    sources: Sources

    @classmethod
    def of(cls, node: tf.data.Dataset, sources: Sources) -> _IndexedInput | None:
        """None for other pipelines."""
        node, passed = peeled(node, _keeps_an_index)
        maps = [each for each in reversed(passed) if isinstance(each, datasets.Map)]
        moves = [n for n in passed if isinstance(n, (*datasets.Repeat, *datasets.Skip))]
        if any(sources.length(input_of(move)) in (None, 0) for move in moves):
            return None
        if has_index(node):
            return cls(node, moves, maps, None, sources)
        records = sources[node]
        if records is None or not _order_is_known(records.shuffle):
            return None
        if records.shuffle is not None and any(isinstance(m, datasets.Repeat) for m in moves):
            return None  # each repetition has its own order of files
        return cls(node, moves, maps, records, sources)

    def indices(self, positions: np.ndarray) -> np.ndarray:
        """Positions in the chain's output -> those in the source."""
        for move in self.moves:
            if isinstance(move, datasets.Skip):
                positions = positions + datasets.count_of(move)
            elif (length := self.sources.length(input_of(move))) != INFINITE:
                positions = positions % length
        return positions

    def elements(self, blocks: Callable[[], Iterator[np.ndarray]], count: int) -> tf.data.Dataset:
        """The chain's elements at these `count` indices of the source."""
        if self.records is not None:
            elements = self.records.elements(blocks, count)
        else:
            spec = tf.TensorSpec([None], tf.int64)
            indices = tf.data.Dataset.from_generator(blocks, output_signature=spec).unbatch()
            indices = indices.apply(tf.data.experimental.assert_cardinality(count))
            elements = indices.map(without_autograph(lambda index: element_at(self.node, index)))
        for function in self.maps:
            elements = rebuilding.rebuilt(function, elements)
        return elements


def _keeps_an_index(node: tf.data.Dataset) -> bool:
    kinds = (*datasets.Map, *datasets.Repeat, *datasets.Skip, *datasets.Take, *datasets.Same)
    known = isinstance(node, kinds) or datasets.is_memory_cache(node)
    return known and datasets.is_pure(node)


def _order_is_known(shuffle: tf.data.Dataset | None) -> bool:
    """Whether the order of a shuffle can be computed."""
    if shuffle is None:
        return True
    seeds = datasets.shuffle_seeds(shuffle)
    if not seeds or not any(seeds) or datasets.buffer_size_of(shuffle) < 1:
        return False
    return shuffles.has_known_order()


def _shuffles_below(dataset: tf.data.Dataset) -> list[tf.data.Dataset] | None:
    """The reshuffling shuffles, each of which begins one pass in a pass over `dataset`.

    None if others may be in the pipeline, or if one of them begins more or fewer.
    """
    found = []
    todo = [(dataset, True)]
    while todo:
        node, once = todo.pop()
        if not rebuilding.is_plain(node) or not datasets.is_pure(node):
            return None
        if isinstance(node, datasets.Shuffle):
            if not once:
                return None
            if datasets.reshuffles(node):
                found.append(node)
        # A repeat of a shuffle that it does not read to the end begins a pass too many.
        more_or_fewer = (*datasets.Repeat, *datasets.Concatenate, *datasets.Take)
        once &= not isinstance(node, more_or_fewer)
        once &= not datasets.is_memory_cache(node)
        todo.extend((each, once) for each in datasets.dataset_inputs(node))
    return found
