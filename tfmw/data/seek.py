"""A pipeline from some element on, without the elements before it.

    rest = seek(dataset, 80_000_000)       # the elements of dataset.skip(80_000_000)

A position in a pipeline is converted into positions in its sources: `batch` multiplies it, `map`
and `prefetch` keep it, `repeat` divides it by the length of its input. Sources with an index begin
there; files of records get one, see `record_files`. The order of a shuffle over such a source is
computed, see `compat.shuffles`. Sources without an index skip elements, as far down in the pipeline
as possible.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import tensorflow as tf

from tfmw.compat import shuffles
from tfmw.compat.pipelines import INFINITE, REBUILDABLE, SAME, Pipeline
from tfmw.data.batches import configured, without_autograph
from tfmw.data.by_index import element_at, has_index, peeled
from tfmw.data.order import ordered
from tfmw.data.record_files import FileRecords
from tfmw.data.reshuffles import ShuffleProgress, SkippedPasses
from tfmw.data.values import SharedOrder

logger = logging.getLogger("tfmw")

_BLOCK = 1 << 17  # indices that are computed together
_TOGETHER = 256  # records read by one call of Python
_MANY = 1_000_000  # number of skipped elements that takes seconds


def seek(
    pipeline: Pipeline,
    position: int,
    reshuffles: ShuffleProgress | None = None,
    order: SharedOrder | None = None,
) -> tf.data.Dataset:
    """The elements from `position` on, in the order of an uninterrupted pass.

    Args:
        pipeline: a result of `ordered`, whose shuffles have seeds.
        position: number of elements before the first one.
        reshuffles: the pipeline's shuffles; passes that are not read are counted there.
        order: the one that the pipeline has.
    """
    rest = _Rest(order or SharedOrder())
    result = rest.of(pipeline, position)
    if reshuffles is not None:  # whole passes of a `repeat` before the one that is computed
        reshuffles.starts = rest.starts
    return result


def ordered_from(
    pipeline: Pipeline, order: SharedOrder, position: int
) -> tuple[Pipeline, ShuffleProgress]:
    """The `ordered` pipeline from some element on, and its shuffles."""
    whole, reshuffles = ordered(pipeline, order)
    if not position:
        return whole, reshuffles
    return Pipeline.of(seek(whole, position, reshuffles, order)), reshuffles


_Above = Callable[[tf.data.Dataset], tf.data.Dataset]


class _Rest:
    """Pipelines from some element on; `starts` has the passes that they do not read."""

    def __init__(self, order: SharedOrder):
        self.starts: list[SkippedPasses] = []
        self._records = functools.cache(functools.partial(FileRecords.of, order=order))

    def of(self, node: Pipeline, position: int) -> tf.data.Dataset:
        """The elements from `position` on."""
        above: list[_Above] = []
        while position and (step := self._below(node, position)) is not None:
            node, position, build = step
            above.append(build)
        rest = self._end(node, position) if position else node.dataset
        for build in reversed(above):
            rest = build(rest)
        return rest

    def _below(self, node: Pipeline, position: int) -> tuple[Pipeline, int, _Above] | None:
        """(a pipeline below, the position in it, a function: its rest -> that of the node).

        None if the node does not have the rest of a pipeline below.
        """
        if _is_behind(node, position):
            return None
        if node.kind in (*SAME, "map") and node.is_pure:
            return node.input, position, node.on
        if node.kind in ("batch", "padded_batch"):
            return node.input, position * node.size, node.on
        if node.kind == "take":
            left = max(node.count - position, 0) if node.count >= 0 else -1
            return node.input, position, lambda below: below.take(left)
        if node.kind == "skip":
            return node.input, position + node.count, _as_it_is
        if node.kind == "shard":
            shards, index = node.shards
            return node.input, position * shards, lambda below: below.shard(shards, index)
        if node.is_memory_cache and _shuffles_below(node) == []:
            return node.input, position, _as_it_is
        if node.kind == "concatenate":
            first, second = node.inputs
            length = self._length(first)
            if length not in (None, INFINITE):
                if position < length:
                    return first, position, lambda below: below.concatenate(second.dataset)
                if _shuffles_below(first) == []:  # a shuffle in it would have begun a pass
                    return second, position - length, _as_it_is
        if node.kind == "repeat":
            length, shuffles = self._length(node.input), _shuffles_below(node.input)
            if length not in (None, INFINITE, 0) and shuffles is not None:
                return self._repeated(node, shuffles, *divmod(position, length))
        return None

    def _repeated(
        self, node: Pipeline, shuffles: list[Pipeline], passes: int, rest: int
    ) -> tuple[Pipeline, int, _Above]:
        """`_below` of a `repeat`, `rest` elements after whole passes."""
        below, count = node.input, node.count
        left = count - passes if count >= 0 else -1
        # A repeat starts its input again to notice its end. A repeat of a single pass does not, nor
        # one right above a shuffle: tf.data fuses the two (`shuffle_and_repeat_fusion`).
        again = count > 1 and below.kind != "shuffle"
        after = int(again and left - (rest > 0) < 2)
        self.starts += [SkippedPasses(shuffle, passes, 0, after) for shuffle in shuffles]
        if not rest:
            return below, 0, lambda whole: whole.repeat(left)
        if left == 1:
            return below, rest, _as_it_is
        later = below.dataset.repeat(left - 1 if left >= 0 else -1)
        return below, rest, lambda first: first.concatenate(later)

    def _end(self, node: Pipeline, position: int) -> tf.data.Dataset:
        """The rest of a node that does not have the rest of one pipeline below."""
        if _is_behind(node, position):
            return node.dataset.skip(position)  # shuffles in it begin a pass all the same
        if node.kind == "zip":
            parts = [self.of(each, position) for each in node.inputs]
            return tf.data.Dataset.zip(node.zipped(parts))
        return self._computed(node, position) or _skipped(node, position)

    def _computed(self, node: Pipeline, position: int) -> tf.data.Dataset | None:
        """A source with an index, or a shuffle over selections and maps of one; None for others."""
        if (tensors := node.sliced_tensors) is not None:
            rest = [tensor[position:] for tensor in tensors]
            rest = tf.nest.pack_sequence_as(node.dataset.element_spec, rest)
            return tf.data.Dataset.from_tensor_slices(rest)
        if node.kind == "range":
            start, stop, step, kind = node.range
            return tf.data.Dataset.range(start + position * step, stop, step, output_type=kind)
        shuffle = node if node.kind == "shuffle" else None
        source, passed = (node, []) if shuffle is None else peeled(node.input, _keeps_an_index)
        moves = [
            (move, self._length(move.input)) for move in passed if move.kind in ("repeat", "skip")
        ]
        if any(length in (None, 0) for _, length in moves):
            return None
        records = None if has_index(source) else self._records(source)
        if records is None and not has_index(source):
            return None
        of_files = None if records is None else records.shuffle
        if of_files is not None and any(move.kind == "repeat" for move, _ in moves):
            return None  # each repetition has its own order of files
        if not all(each is None or _order_is_known(each) for each in (of_files, shuffle)):
            return None
        length = self._length(node)
        assert length is not None  # it has an index
        seeds, seeds_of_files = self._pass_of(shuffle), self._pass_of(of_files)

        together = _BLOCK if records is None else _TOGETHER

        def indices() -> Iterator[np.ndarray]:
            """Yields indices in the source, or record numbers."""
            blocks = _positions(position, length, shuffle, seeds())
            in_files = None if records is None else records.numbers(seeds_of_files())
            for block in blocks:
                for move, count in moves:
                    if move.kind == "skip":
                        block = block + move.count
                    elif count != INFINITE:
                        block = block % count
                block = block if in_files is None else in_files(block)
                yield from np.split(block, range(together, len(block), together))

        elements = tf.data.Dataset.from_generator(
            indices, output_signature=tf.TensorSpec([None], tf.int64)
        )
        maps = [each for each in reversed(passed) if each.kind == "map"]
        if records is not None:
            read = without_autograph(records.rows.examples)
            elements = elements.map(read, num_parallel_calls=2, deterministic=True)
            maps = [*records.maps, *maps]
        left = tf.data.INFINITE_CARDINALITY if length == INFINITE else max(0, length - position)
        elements = elements.unbatch().apply(tf.data.experimental.assert_cardinality(left))
        if records is None:
            elements = elements.map(without_autograph(lambda index: element_at(source, index)))
        for function in maps:
            elements = function.on(elements)
        return configured(elements, read_ahead=None)

    def _pass_of(self, shuffle: Pipeline | None) -> Callable[[], list[int] | None]:
        """A function that returns the seeds of a shuffle's pass, once it has begun."""
        if shuffle is None:
            return lambda: None
        self.starts.append(SkippedPasses(shuffle, 0, 1))
        return self.starts[-1].seeds

    def _length(self, node: Pipeline) -> int | None:
        """The pipeline's `length`, with those of pipelines over files."""
        chain = []
        while (length := node.length) is None:
            if (records := self._records(node)) is not None:
                length = records.length
                break
            if not (node.kind in (*REBUILDABLE, "padded_batch") or node.is_memory_cache):
                return None
            chain.append(node)
            node = node.input
        if length == INFINITE:
            return length
        others = tf.data.Dataset.range(length)  # the same number of elements, of any content
        for above in reversed(chain):
            if above.kind in ("batch", "padded_batch"):
                others = others.batch(above.size, above.drop_remainder)
            elif above.kind in ("take", "skip", "repeat"):
                others = above.on(others)
        return Pipeline.of(others).length


def _is_behind(node: Pipeline, position: int) -> bool:
    """Whether a position is known to be behind the last element."""
    return node.length not in (None, INFINITE) and position >= node.length


def _as_it_is(rest: tf.data.Dataset) -> tf.data.Dataset:
    return rest


def _positions(
    start: int, length: int, shuffle: Pipeline | None, seeds: Sequence[int] | None
) -> Iterator[np.ndarray]:
    """Yields input positions of a shuffle from output `start` on; without a shuffle, its own."""
    if shuffle is None or seeds is None:
        firsts = range(start, length, _BLOCK)
        return (np.arange(first, min(first + _BLOCK, length)) for first in firsts)
    known = None if length == INFINITE else length
    return shuffles.ShuffleOrder(shuffle.buffer_size, known, seeds).blocks(start)


def _skipped(node: Pipeline, position: int) -> tf.data.Dataset:
    if position > _MANY:
        logger.info(
            "the position in the data is %d elements behind the beginning of %s, which cannot "
            "start there: they are read again, and dropped",
            position,
            type(node.dataset).__name__.strip("_"),
        )
    return node.dataset.skip(position)


def _keeps_an_index(node: Pipeline) -> bool:
    known = node.kind in ("map", "repeat", "skip", "take", *SAME) or node.is_memory_cache
    return known and node.is_pure


def _order_is_known(shuffle: Pipeline) -> bool:
    """Whether the order of a shuffle can be computed."""
    seeded = bool(shuffle.seeds) and any(shuffle.seeds or ())
    place_is_known = not shuffle.reshuffles or shuffles.has_known_states()
    return seeded and shuffle.buffer_size >= 1 and place_is_known and shuffles.has_known_order()


def _shuffles_below(pipeline: Pipeline) -> list[Pipeline] | None:
    """The reshuffling shuffles, each of which begins one pass in a pass over the pipeline.

    None if others may be in the pipeline, or if one of them begins more or fewer.
    """
    found = []
    todo = [(pipeline, True)]
    while todo:
        node, once = todo.pop()
        if not node.is_plain or not node.is_pure or (node.kind == "shuffle" and not once):
            return None
        if node.reshuffles:
            if not shuffles.has_known_states():
                return None
            found.append(node)
        # A repeat begins one pass too many of a shuffle that it does not read to the end.
        once &= node.kind not in ("repeat", "concatenate", "take") and not node.is_memory_cache
        todo.extend((each, once) for each in node.inputs)
    return found
