"""A pipeline from some element on, without the elements before it.

    rest = seek(dataset, 80_000_000)       # the elements of dataset.skip(80_000_000)

A position in a pipeline is turned into positions in its sources: `batch` multiplies it, `map` and
`prefetch` keep it, `repeat` divides it by the length of its input. Sources with an index begin
there; files of records get one, see `record_files`. The order of a shuffle over such a source is
computed, see `compat.shuffles`. What has no index skips, as far down in the pipeline as
possible.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Generator, Iterator, Sequence

import numpy as np
import tensorflow as tf

from tfmw.compat import datasets, rebuilding, shuffles
from tfmw.data.batches import beneath, configured, input_of, steps_in, without_autograph
from tfmw.data.by_index import element_at, has_index, peeled
from tfmw.data.order import ordered
from tfmw.data.record_files import FileRecords
from tfmw.data.reshuffles import PassStart, Reshuffles
from tfmw.data.values import INFINITE, Order

logger = logging.getLogger("tfmw")

_Steps = Generator[tuple[tf.data.Dataset, int], tf.data.Dataset, tf.data.Dataset]

_BLOCK = 1 << 17  # indices that are computed together
_TOGETHER = 256  # records of one call of Python
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
    rest = _Rest(order or Order())
    result = rest.of(dataset, position)
    if reshuffles is not None:  # whole passes, of a `repeat`, before the one that is computed
        reshuffles.starts = rest.starts
    return result


def ordered_from(
    dataset: tf.data.Dataset, order: Order, position: int
) -> tuple[tf.data.Dataset, Reshuffles]:
    """The `ordered` pipeline from some element on, and its shuffles."""
    whole, reshuffles = ordered(dataset, order)
    return seek(whole, position, reshuffles, order), reshuffles


class _Rest:
    """Pipelines from some element on; `starts` are the passes that they do not read."""

    def __init__(self, order: Order):
        self.starts: list[PassStart] = []
        self._records = functools.cache(functools.partial(FileRecords.of, order=order))

    def of(self, dataset: tf.data.Dataset, position: int) -> tf.data.Dataset:
        """The elements from `position` on: runs `_steps` for a node and for what it reads."""
        result = None
        running = [self._steps(dataset, position)]
        while running:
            try:
                below = running[-1].send(result)
            except StopIteration as end:
                running.pop()
                result = end.value
            else:
                running.append(self._steps(*below))
                result = None
        return result

    def _steps(self, node: tf.data.Dataset, position: int) -> _Steps:
        """Yields (input, position in it), receives that input's rest; returns the node's rest."""
        if not position:
            return node
        length = steps_in(node)
        if length not in (None, INFINITE) and position >= length:
            return node.skip(position)  # shuffles in it begin a pass all the same
        if isinstance(node, (*datasets.Same, *datasets.Map)) and datasets.is_pure(node):
            return rebuilding.rebuilt(node, (yield input_of(node), position))
        if isinstance(node, (*datasets.Batch, *datasets.PaddedBatch)):
            size, _ = datasets.batch_arguments(node)
            return rebuilding.rebuilt(node, (yield input_of(node), position * size))
        if isinstance(node, datasets.Take):
            count = datasets.count_of(node)
            below = yield input_of(node), position
            return below.take(max(count - position, 0) if count >= 0 else -1)
        if isinstance(node, datasets.Skip):
            return (yield input_of(node), position + datasets.count_of(node))
        if isinstance(node, datasets.ShardNode):
            shards, index = datasets.shard_arguments(node)
            return (yield input_of(node), position * shards).shard(shards, index)
        if isinstance(node, datasets.Zip):
            parts = []
            for each in datasets.dataset_inputs(node):
                parts.append((yield each, position))
            return datasets.zipped(node, parts)
        if datasets.is_memory_cache(node) and _shuffles_below(node) == []:
            return (yield input_of(node), position)
        if isinstance(node, datasets.Concatenate):
            first, second = datasets.dataset_inputs(node)
            length = self._length(first)
            if length not in (None, INFINITE):
                if position < length:
                    return (yield first, position).concatenate(second)
                if _shuffles_below(first) == []:  # a shuffle in it would have begun a pass
                    return (yield second, position - length)
        if isinstance(node, datasets.Repeat):
            length, shuffles = self._length(input_of(node)), _shuffles_below(input_of(node))
            if length not in (None, INFINITE, 0) and shuffles is not None:
                return (yield from self._repeated(node, shuffles, *divmod(position, length)))
        return self._computed(node, position) or _skipped(node, position)

    def _repeated(
        self, node: tf.data.Dataset, shuffles: list[tf.data.Dataset], passes: int, rest: int
    ) -> _Steps:
        """`_steps` of a `repeat`, `rest` elements after whole passes."""
        below, count = input_of(node), datasets.count_of(node)
        left = count - passes if count >= 0 else -1
        # A repeat begins again to see that it has ended. One of a single pass does not, nor one
        # right above a shuffle: tf.data joins the two (`shuffle_and_repeat_fusion`).
        again = count > 1 and not isinstance(below, datasets.Shuffle)
        after = int(again and left - (rest > 0) < 2)
        self.starts += [PassStart(shuffle, passes, 0, after) for shuffle in shuffles]
        if not rest:
            return below.repeat(left)
        first = yield below, rest
        if left == 1:
            return first
        return first.concatenate(below.repeat(left - 1 if left >= 0 else -1))

    def _computed(self, node: tf.data.Dataset, position: int) -> tf.data.Dataset | None:
        """A source with an index, or a shuffle over moves and maps of one; None for others."""
        if (tensors := datasets.sliced_tensors(node)) is not None:
            rest = [tensor[position:] for tensor in tensors]
            rest = tf.nest.pack_sequence_as(node.element_spec, rest)
            return tf.data.Dataset.from_tensor_slices(rest)
        if isinstance(node, datasets.Range):
            start, stop, step, kind = datasets.range_arguments(node)
            return tf.data.Dataset.range(start + position * step, stop, step, output_type=kind)
        shuffle = node if isinstance(node, datasets.Shuffle) else None
        source, passed = (node, []) if shuffle is None else peeled(input_of(node), _keeps_an_index)
        moves = [
            (move, self._length(input_of(move)))
            for move in passed
            if isinstance(move, (*datasets.Repeat, *datasets.Skip))
        ]
        if any(length in (None, 0) for _, length in moves):
            return None
        records = None if has_index(source) else self._records(source)
        if records is None and not has_index(source):
            return None
        of_files = None if records is None else records.shuffle
        if of_files is not None and any(isinstance(move, datasets.Repeat) for move, _ in moves):
            return None  # each repetition has its own order of files
        if not all(each is None or _order_is_known(each) for each in (of_files, shuffle)):
            return None
        length = self._length(node)
        assert length is not None  # of a source with an index
        seeds, seeds_of_files = self._pass_of(shuffle), self._pass_of(of_files)

        together = _BLOCK if records is None else _TOGETHER

        def indices() -> Iterator[np.ndarray]:
            """Indices in the source, or numbers of records."""
            blocks = _positions(position, length, shuffle, seeds())
            in_files = None if records is None else records.numbers(seeds_of_files())
            for block in blocks:
                for move, count in moves:
                    if isinstance(move, datasets.Skip):
                        block = block + datasets.count_of(move)
                    elif count != INFINITE:
                        block = block % count
                block = block if in_files is None else in_files(block)
                yield from np.split(block, range(together, len(block), together))

        elements = tf.data.Dataset.from_generator(
            indices, output_signature=tf.TensorSpec([None], tf.int64)
        )
        maps = [each for each in reversed(passed) if isinstance(each, datasets.Map)]
        if records is not None:
            read = without_autograph(records.rows.examples)
            elements = elements.map(read, num_parallel_calls=2, deterministic=True)
            maps = [*records.maps, *maps]
        left = tf.data.INFINITE_CARDINALITY if length == INFINITE else max(0, length - position)
        elements = elements.unbatch().apply(tf.data.experimental.assert_cardinality(left))
        if records is None:
            elements = elements.map(without_autograph(lambda index: element_at(source, index)))
        for function in maps:
            elements = rebuilding.rebuilt(function, elements)
        return configured(elements, read_ahead=None)

    def _pass_of(self, shuffle: tf.data.Dataset | None) -> Callable[[], list[int] | None]:
        """A function that returns the seeds of a shuffle's pass, once it has begun."""
        if shuffle is None:
            return lambda: None
        self.starts.append(PassStart(shuffle, 0, 1))
        return self.starts[-1].seeds

    def _length(self, node: tf.data.Dataset) -> int | None:
        """`steps_in`, with the lengths of pipelines over files."""
        chain = []
        while (length := steps_in(node)) is None:
            if (records := self._records(node)) is not None:
                length = records.length
                break
            known = (*rebuilding.REBUILDABLE, *datasets.PaddedBatch)
            if not (isinstance(node, known) or datasets.is_memory_cache(node)):
                return None
            chain.append(node)
            node = datasets.dataset_inputs(node)[0]
        if length == INFINITE:
            return length
        others = tf.data.Dataset.range(length)  # as many elements, whatever they are
        for above in reversed(chain):
            if isinstance(above, (*datasets.Batch, *datasets.PaddedBatch)):
                others = others.batch(*datasets.batch_arguments(above))
            elif isinstance(above, (*datasets.Take, *datasets.Skip, *datasets.Repeat)):
                others = rebuilding.rebuilt(above, others)
        return steps_in(others)


def _positions(
    start: int, length: int, shuffle: tf.data.Dataset | None, seeds: Sequence[int] | None
) -> Iterator[np.ndarray]:
    """Positions in the input of a shuffle, from its output `start` on; without one its own."""
    if shuffle is None or seeds is None:
        firsts = range(start, length, _BLOCK)
        return (np.arange(first, min(first + _BLOCK, length)) for first in firsts)
    known = None if length == INFINITE else length
    return shuffles.ShuffleOrder(datasets.buffer_size_of(shuffle), known, seeds).blocks(start)


def _skipped(node: tf.data.Dataset, position: int) -> tf.data.Dataset:
    if position > _MANY:
        seconds = _seconds_to_skip(node, position)
        logger.info(
            "the position in the data is %d elements behind the beginning of %s, which cannot "
            "start there: they are read again, and dropped%s",
            position,
            type(node).__name__.strip("_"),
            "" if seconds is None else f", in about {seconds:.0f} s",
        )
    return node.skip(position)


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


def _keeps_an_index(node: tf.data.Dataset) -> bool:
    kinds = (*datasets.Map, *datasets.Repeat, *datasets.Skip, *datasets.Take, *datasets.Same)
    known = isinstance(node, kinds) or datasets.is_memory_cache(node)
    return known and datasets.is_pure(node)


def _order_is_known(shuffle: tf.data.Dataset) -> bool:
    """Whether the order of a shuffle can be computed."""
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
