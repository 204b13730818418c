"""Shuffles with a new order in each pass, continued over calls as Keras continues them.

A shuffle belongs to the user's dataset object: each pass over it, in `fit`, `evaluate` or a loop of
the user, advances it to another order. A shard has its own shuffles, with the chief's seeds. Before
a pass they are set to the chief's position in the sequence of orders. Afterwards the user's dataset
is set to the position at which Keras would have left it.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import tensorflow as tf

from tfmw.compat import datasets
from tfmw.compat.graph import inputs_first
from tfmw.compat.pipelines import Pipeline
from tfmw.compat.shuffles import ShuffleSeeds, pair_of_pass


@dataclasses.dataclass
class SkippedPasses:
    """Passes over a shuffle that begin before a pipeline's first element."""

    shuffle: Pipeline
    before: int  # passes that have ended
    begun: int  # 1 if another one has begun, whose order is computed; otherwise 0
    after: int = 0  # passes that the whole pipeline would begin at its end, but this one does not
    number: int | None = None

    def begin(self) -> None:
        """Counts these passes, and sets the `number` of the computed one."""
        if self.shuffle.reshuffles:
            seeds = ShuffleSeeds(small_of(self.shuffle.dataset))
            self.number = seeds.passes + self.before
            seeds.passes = self.number + self.begun

    def seeds(self) -> list[int]:
        """The pair of seeds of the computed pass; each call is for another iterator."""
        if self.number is None:
            self.begin()
        number, self.number = self.number, None
        assert self.shuffle.seeds is not None  # `_computed` has checked this
        return pair_of_pass(self.shuffle.seeds, number or 0, self.shuffle.reshuffles)


class _Pair:
    """Seeds of a user's shuffle and the shard's; one object if they are the same."""

    def __init__(self, user: tf.data.Dataset, shard: tf.data.Dataset, cache: str):
        self.dataset = shard
        self.cache = cache
        self.user = ShuffleSeeds(small_of(user))
        self.shard = self.user if user is shard else ShuffleSeeds(small_of(shard))
        # passes of the shard that the user's dataset has counted, too
        self.seen = self.shard.passes
        self.start = 0  # passes of the user's dataset before this one
        self.in_pass = 0  # number of the shuffle's passes that this pass has begun
        self.unread = (0, 0)  # passes before the first element of this pass, and after the last

    def count(self, begun: int) -> None:
        """Counts passes that the shard has begun for the user's dataset, too."""
        self.in_pass += begun
        if begun and self.user is not self.shard:
            self.user.begin(begun)


class ShuffleProgress:
    """The places of a shard's reshuffling shuffles in their sequences of orders, and of the user's.

    Args:
        pairs: (user's, shard's) datasets that end in a shuffle, the same one twice if the shard
            reads the user's dataset itself; and the name of a cache that keeps its order, or "".

    Attributes:
        ahead: whether reading ahead may begin further passes over them.
        begun_after: steps -> repetitions begun of the `repeat` above them, which begins these
            passes; None if unknown.
        starts: passes before the first element that is read; see `seek`.
    """

    def __init__(self, pairs: Iterable[Reshuffled] = ()):
        self._datasets = list(pairs)
        self.ahead = False
        self.begun_after: Callable[[int], int] | None = None
        self.starts: list[SkippedPasses] = []
        self._by_iterator: list[int] | None = None  # passes that a new iterator begins

    def __len__(self) -> int:
        return len(self._datasets)

    @functools.cached_property
    def _pairs(self) -> list[_Pair]:
        """Pairs of seeds, opened when they are first needed, which takes some milliseconds."""
        return [_Pair(*pair) for pair in self._datasets]

    @property
    def passes(self) -> list[int]:
        """Number of passes over each shuffle of the user's dataset that have begun."""
        return [pair.user.passes for pair in self._pairs]

    @passes.setter
    def passes(self, passes: Sequence[int]) -> None:
        # Functions of the user may return other pipelines on other workers.
        for pair, number in zip(self._pairs, passes, strict=False):
            pair.user.passes = number

    @property
    def kept(self) -> dict[str, int]:
        """Index of a shuffle below a cache -> passes before the one that fills the cache."""
        pairs = enumerate(self._pairs)
        return {str(i): _kept[pair.cache] for i, pair in pairs if pair.cache in _kept}

    @kept.setter
    def kept(self, kept: Mapping[str, int]) -> None:
        for i, pair in enumerate(self._pairs):
            if pair.cache and str(i) in kept:
                _kept[pair.cache] = kept[str(i)]

    def begin(self, passes: Sequence[int], now: Sequence[int] | None = None) -> None:
        """Sets all shuffles to the position at which the next pass continues.

        Args:
            now: the result of `passes`, if it is known.
        """
        if now != passes:
            self.passes = passes
        for pair, number in zip(self._pairs, passes, strict=False):
            pair.start = number = _kept.get(pair.cache, number)
            unread = any(pair.unread)
            if pair.seen != number or unread:
                own = pair.shard is not pair.user
                known = own and self._begun_at_once and not unread
                pair.shard.set(number, pair.seen if known else None)
                pair.seen = number
        for pair in self._pairs:
            pair.unread, pair.in_pass = (0, 0), 0
        for start in self.starts:
            start.begin()
            for pair in self._pairs:
                if pair.dataset is start.shuffle.dataset:
                    before, after = pair.unread
                    pair.unread = before + start.before, after + start.after

    def note_iterator(self) -> None:
        """Counts the passes that a new iterator over the shard has begun for the user's dataset."""
        if self.starts or self.cached:
            self.note()
        elif self._by_iterator is None:
            self.note()
            self._by_iterator = [pair.in_pass for pair in self._pairs]
        else:
            for pair, begun in zip(self._pairs, self._by_iterator, strict=True):
                pair.seen += begun
                pair.count(begun)

    @property
    def cached(self) -> bool:
        """Whether some shuffle begins passes only until a cache above it is full."""
        return any(cache for *_, cache in self._datasets)

    @property
    def _begun_at_once(self) -> bool:
        """Whether a new iterator begins at once all passes that it will begin."""
        known = self._by_iterator is not None and all(self._by_iterator)
        return known and not self.ahead and not self.starts

    def pass_over(self) -> bool:
        """Counts the passes of an iterator that is not read; False if they are unknown yet."""
        if self._by_iterator is None:
            return False
        for pair, begun in zip(self._pairs, self._by_iterator, strict=True):
            pair.user.begin(begun)
        return True

    def note(self, ended: bool = False) -> None:
        """Counts the passes that the shard has begun for the user's dataset.

        Args:
            ended: whether the pass has ended; then passes before its first element count as read.
        """
        if self._begun_at_once:
            return
        for pair in self._pairs:
            before, after = pair.unread
            now = pair.shard.passes - (0 if ended else before)
            begun = now - pair.seen + (after if ended else 0)
            pair.seen = now
            if pair.cache and begun:
                begun = 0 if pair.cache in _kept else begun
                _kept.setdefault(pair.cache, pair.start)
            pair.count(begun)

    def left_after(self, steps: int) -> list[int]:
        """The user's `passes` if this pass ends after some steps.

        It is the same in each run, however far a pipeline has read ahead.
        """
        found = []
        for pair in self._pairs:
            begun = pair.in_pass
            if not self.ahead or pair.cache:
                begun += pair.shard.passes - pair.seen
            elif self.begun_after is not None:
                begun = self.begun_after(steps)
            else:
                begun = steps + 1  # no order occurs twice
            found.append(pair.user.passes + begun - pair.in_pass)
        return found


Reshuffled = tuple[tf.data.Dataset, tf.data.Dataset, str]
"""See `ShuffleProgress`."""

# Reading ahead may fill a cache on some workers before a pass ends. To have the same elements on
# all workers, a cache that is filled again gets its first order.
_kept: dict[str, int] = {}
_seeds: dict[str, list[int]] = {}


def seeds_below(cache: str, seeds: list[int]) -> list[int]:
    """The first `seeds` of a shuffle below a cache, for all later calls."""
    return _seeds.setdefault(cache, seeds) if cache else seeds


# ---------------------------------------------------------------- in graphs

# Positions of the two seeds in the inputs of a dataset op (tensorflow/core/ops/dataset_ops.cc).
SEED_INPUTS = {
    "ShuffleDataset": (2, 3),
    "ShuffleDatasetV3": (2, 3),
    "ShuffleAndRepeatDataset": (2, 3),
    "ShuffleAndRepeatDatasetV2": (2, 3),
    "RandomDataset": (0, 1),
    "RandomDatasetV2": (0, 1),
}

# Position of the generator of reshuffles among the inputs of an op, and the attribute that says
# whether it has one (tensorflow/core/ops/dataset_ops.cc).
_GENERATORS = {
    "ShuffleDatasetV3": (4, "reshuffle_each_iteration"),
    "ShuffleAndRepeatDatasetV2": (5, "reshuffle_each_iteration"),
    "RandomDatasetV2": (2, "rerandomize_each_iteration"),
}


def generators_in(nodes: Any) -> Iterator[tuple[Any, Any, bool]]:
    """Yields (node, Const with the handle of its generator, whether it reshuffles).

    A graph refers to a generator of this process, which the dataset of the graph owns. Functions
    refer to none: their shuffles restart with each call.
    """
    by_name = {node.name: node for node in nodes}
    for node in nodes:
        if node.op in _GENERATORS:
            position, attribute = _GENERATORS[node.op]
            handle = by_name.get(node.input[position].split(":")[0])
            if handle is not None and handle.op == "Const":
                yield node, handle, bool(node.attr[attribute].b)


def name_of(handle: Any) -> str:
    """The name of a generator; equal for all shuffles that share it."""
    resource = handle.attr["value"].tensor.resource_handle_val[0]
    return f"{resource.container}/{resource.name}"


def renew(handle: Any) -> None:
    """Replaces a generator by a new one, as TensorFlow creates a missing one."""
    name = handle.name
    handle.Clear()
    handle.name = name
    handle.op = "DummySeedGenerator"


def renew_all(graph: Any) -> None:
    """Replaces all generators of a graph, as another process may have others of these names."""
    for _, handle, _ in list(generators_in(graph.node)):
        renew(handle)


def share(handle: Any, shuffle: tf.data.Dataset) -> None:
    """Replaces a generator by that of a `small_shuffle`."""
    ((_, own, _),) = generators_in(datasets.dataset_graph(shuffle).node)
    handle.attr["value"].CopyFrom(own.attr["value"])


def shuffle_of(handle: Any) -> tf.data.Dataset:
    """A shuffle of one element that shares a generator of this process."""
    small = datasets.small_shuffle([1, 1])
    graph = datasets.dataset_graph(small)
    ((_, own, _),) = generators_in(graph.node)
    own.attr["value"].CopyFrom(handle.attr["value"])
    return datasets.dataset_from_graph(graph, small.element_spec)


_LARGEST = 2**30  # most bytes of arrays in a graph, whose limit is 2 GB

_SMALL: MutableMapping[tf.data.Dataset, tf.data.Dataset] = weakref.WeakKeyDictionary()


def small_of(shuffle: tf.data.Dataset) -> tf.data.Dataset:
    """A shuffle of one element that shares the generator of `shuffle`.

    The state of an iterator over a shuffle has an entry for each element of its buffer; with 60,000
    of them, reading it takes a second. If no graph can contain the arrays below, `shuffle` itself
    is returned.
    """
    small: tf.data.Dataset | None = getattr(shuffle, "_tfmw_small", None)  # as `on` has built it
    if small is not None:
        return small
    if shuffle not in _SMALL:
        if Pipeline.of(shuffle).bytes_of_arrays > _LARGEST:
            return shuffle
        graph = datasets.dataset_graph(shuffle)
        # A graph lists inputs first, so the shuffle itself comes last.
        found = [handle for _, handle, _ in generators_in(graph.node)]
        _SMALL[shuffle] = shuffle_of(found[-1])
    return _SMALL[shuffle]


def seeds_of(node: Any, by_name: Mapping[str, Any]) -> list[int] | None:
    """The two seeds of a dataset op; None if they are not constants, or if it has none."""
    pair = [constant_of(node.input[i], by_name) for i in SEED_INPUTS.get(node.op, ())]
    known = [seed for seed in pair if seed is not None]
    return known if len(known) == 2 else None


def constant_of(name: str, by_name: Mapping[str, Any]) -> int | None:
    """The value of a node's input; None if it cannot be computed from constants.

    Inside of a function, a seed under a global one is an expression: `where(seed == 0 and
    seed2 == 0, 2**31 - 1, seed2)` (tensorflow/python/data/util/random_seed.py).
    """

    def inputs(name: str) -> list[str]:
        node = by_name.get(name)
        if node is None or node.op not in _FOLDS:
            return []
        return [i.split(":")[0] for i in node.input if not i.startswith("^")]

    name = name.split(":")[0]
    values: dict[str, int | None] = {}
    for each in inputs_first([name], inputs):
        node, given = by_name.get(each), [values.get(i) for i in inputs(each)]
        values[each] = None
        if node is not None and node.op == "Const":
            values[each] = int(tf.make_ndarray(node.attr["value"].tensor))
        elif node is not None and node.op in _FOLDS and None not in given:
            values[each] = int(_FOLDS[node.op](*given))
    return values[name]


_FOLDS: dict[str, Callable[..., Any]] = {
    "Cast": lambda a: a,
    "Equal": lambda a, b: a == b,
    "Identity": lambda a: a,
    "LogicalAnd": lambda a, b: a and b,
    "Select": lambda c, a, b: a if c else b,
    "SelectV2": lambda c, a, b: a if c else b,
}
