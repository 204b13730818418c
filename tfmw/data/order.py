"""The same order on all workers: equal seeds, and deterministic parallel transformations.

Every worker selects its shard from its own copy of the pipeline, so all copies must yield the same
elements in the same order. Shuffles use the chief's seeds; the chief draws one for a shuffle
without a seed. A pipeline is rebuilt from its Python objects if they describe it completely.
Otherwise its graph is edited.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfmw.cluster.group import Group
from tfmw.compat import datasets
from tfmw.compat.graph import inputs_first
from tfmw.compat.pipelines import REBUILDABLE, Pipeline
from tfmw.compat.shuffles import ShuffleSeeds, has_known_states
from tfmw.data.reshuffles import (
    SEED_INPUTS,
    Reshuffled,
    ShuffleProgress,
    constant_of,
    generators_in,
    name_of,
    renew,
    seeds_below,
    seeds_of,
    share,
    shuffle_of,
)
from tfmw.data.values import SharedOrder
from tfmw.errors import UsageError


def ordered(pipeline: Pipeline, order: SharedOrder) -> tuple[Pipeline, ShuffleProgress]:
    """The same pipeline with the chief's seeds, in a deterministic order.

    Returns:
        (the pipeline, its shuffles that have a new order in each pass).

    Raises:
        UsageError: workers have different datasets.
    """
    if not pipeline.may_reorder:
        return pipeline, ShuffleProgress()
    chain, below = [], pipeline
    while below.kind in REBUILDABLE or (below.may_reorder and below.reader is not None):
        chain.append(below)
        below = below.input
    pairs: list[Reshuffled] = []
    node = below.dataset
    # Only the graph shows the rest; in-memory arrays are kept out of that graph if possible.
    if below.may_reorder:
        node, pairs = _ordered_by_graph(below, order)
    shuffles = [each for each in reversed(chain) if each.kind == "shuffle"]
    seeds = iter(_agreed([(_seeds(each), each.reshuffles) for each in shuffles], order))
    for each in reversed(chain):
        if each.kind == "shuffle":
            node = each.on(node, next(seeds))
            if each.reshuffles:
                pairs.append((each.original, node, ""))
        elif (reader := each.reader) is not None:
            node = reader.on(node, reader.cycle_length or order.cycle_length(reader.calls))
        else:
            node = each.on(node)
    options = tf.data.Options()
    options.deterministic = True
    known = pairs if pairs and has_known_states() else []
    return Pipeline.of(node.with_options(options)), ShuffleProgress(known)


def reshuffles_of(pipeline: Pipeline) -> ShuffleProgress:
    """The reshuffling shuffles of a pipeline that is read as it is."""
    shuffles = [node.dataset for node in pipeline.nodes if node.reshuffles]
    return ShuffleProgress([(shuffle, shuffle, "") for shuffle in shuffles])


def _seeds(shuffle: Pipeline) -> list[int] | None:
    """The seeds of a shuffle, even those that it has drawn for its only order."""
    pair = shuffle.seeds
    if pair is not None and not any(pair) and not shuffle.reshuffles:
        return ShuffleSeeds(shuffle.original).pair
    return pair


def _agreed(
    local: list[tuple[list[int] | None, bool]], order: SharedOrder
) -> list[list[int] | None]:
    """The chief's pairs of seeds, drawn for shuffles without a seed.

    Args:
        local: (this worker's pair, whether the shuffle has a new order in each pass).
        order: the source of seeds.
    """
    drawn = [
        [order.seed, i + 1] if pair is not None and not any(pair) else pair
        for i, (pair, _) in enumerate(local)
    ]
    seeds: list[list[int] | None] = order.agree(drawn)
    if len(seeds) != len(local):
        raise UsageError(
            f"workers have different datasets: the chief's has {len(seeds)} shuffles, this "
            f"worker's has {len(local)}. Build the same pipeline on every worker; tfmw divides it."
        )
    if any(again for _, again in local) and not has_known_states():
        # Each pass has a shard of its own: see `Source.has_shards_of_passes`.
        apart = [order.seed if again else 0 for _, again in local]
        return [pair and [pair[0], pair[1] + n] for pair, n in zip(seeds, apart, strict=True)]
    return seeds


# ---------------------------------------------------------------- by the graph


def _ordered_by_graph(
    pipeline: Pipeline, order: SharedOrder
) -> tuple[tf.data.Dataset, list[Reshuffled]]:
    """`ordered` for pipelines that shuffle inside of functions: interleaved, zipped, sampled."""
    dataset = pipeline.dataset
    graph = datasets.dataset_graph(dataset)
    changed = order.group.size > 1 and _use_own_caches(graph, pipeline, order)
    # (seeds, whether it reshuffles, nodes of the graph or function, suffix of a constant, node)
    shuffles: list[tuple[list[int], bool, Any, str, Any]] = []
    own = {node.name: (handle, again) for node, handle, again in generators_in(graph.node)}
    bodies = [(graph.node, "")] + [(f.node_def, ":output:0") for f in graph.library.function]
    for nodes, suffix in bodies:
        by_name = {node.name: node for node in nodes}
        for node in list(nodes):
            if "deterministic" in node.attr and node.attr["deterministic"].s == b"false":
                node.attr["deterministic"].s = b"true"
                changed = True
            changed |= _agree_on_turns(nodes, by_name, suffix, node, order)
            known = seeds_of(node, by_name)
            if known is not None:
                handle, again = own.get(node.name, (None, True)) if not suffix else (None, True)
                if not any(known) and not again:
                    known = ShuffleSeeds(shuffle_of(handle)).pair
                shuffles.append((known, again and not suffix, nodes, suffix, node))
    agreed = _agreed([(known, again) for known, again, *_ in shuffles], order)
    chosen_of: dict[str, list[int]] = {}
    for chosen, (local, _, nodes, suffix, node) in zip(agreed, shuffles, strict=True):
        if chosen is not None and not suffix:
            chosen_of[node.name] = chosen
        if chosen is not None and chosen != local:
            for slot, value in zip(SEED_INPUTS[node.op], chosen, strict=True):
                _set_constant(nodes, suffix, node, slot, value)
    pairs = _own_generators(own, chosen_of, _caches_above(graph.node))
    if not changed and not shuffles and not own:
        return dataset, []
    out = datasets.dataset_from_graph(graph, dataset.element_spec)
    return out.with_options(dataset.options()), pairs


def _own_generators(
    own: dict[str, tuple[Any, bool]], seeds: dict[str, list[int]], caches: dict[str, str]
) -> list[Reshuffled]:
    """Gives each shuffle of a graph another generator; returns (user's, new) shuffles with them.

    Args:
        own: name of a node -> (its generator, whether it reshuffles).
        seeds: name of a node -> its seeds.
        caches: name of a node -> the cache above it.
    """
    pairs: dict[str, Reshuffled] = {}
    for name, (handle, again) in own.items():
        if handle.op != "Const":
            continue
        if not again or name not in seeds:
            renew(handle)
            continue
        generator = name_of(handle)
        if generator not in pairs:
            cache = f"{caches[name]} of {generator}" if name in caches else ""
            small = datasets.small_shuffle(seeds_below(cache, seeds[name]))
            pairs[generator] = shuffle_of(handle), small, cache
        share(handle, pairs[generator][1])
    return list(pairs.values())


def _caches_above(nodes: Any) -> dict[str, str]:
    """Name of a node of a graph -> a name for the lowest cache above it."""
    by_name = {node.name: node for node in nodes}

    def inputs(name: str) -> list[str]:
        return [i.lstrip("^").split(":")[0] for i in by_name[name].input]

    found: dict[str, str] = {}
    for node, memory in _caches(nodes):  # a graph lists inputs first
        source, file, _ = inputs(node.name)
        names = by_name[file].attr["value"].tensor.string_val
        cache = (names and names[0].decode()) or name_of(memory)
        below = set(inputs_first([source], inputs)) - found.keys()
        found |= dict.fromkeys(below, cache)
    return found


def _caches(nodes: Any) -> Iterator[tuple[Any, Any]]:
    """Yields (node, Const with the handle of its memory) for the caches of a graph."""
    by_name = {node.name: node for node in nodes}
    for node in nodes:
        if node.op == "CacheDatasetV2" and by_name[node.input[2].split(":")[0]].op == "Const":
            yield node, by_name[node.input[2].split(":")[0]]


def _use_own_caches(graph: Any, pipeline: Pipeline, order: SharedOrder) -> bool:
    """Gives caches their own files, and memory, for the lifetime of the user's dataset.

    A loop of the user may have filled the user's caches on some workers only, or in several orders.
    Returns whether there are caches.
    """
    memories = {}
    for each in pipeline.nodes:
        if each.is_memory_cache:
            node = each.dataset
            if not hasattr(node, "_tfmw_cache"):
                *_, (_, theirs) = _caches(datasets.dataset_graph(node).node)
                node._tfmw_cache = name_of(theirs), tf.data.Dataset.range(1).cache()
            name, own = node._tfmw_cache
            ((_, memories[name]),) = _caches(datasets.dataset_graph(own).node)
    by_name = {node.name: node for node in graph.node}
    found = list(_caches(graph.node))
    for node, memory in found:
        if name_of(memory) in memories:
            memory.attr["value"].CopyFrom(memories[name_of(memory)].attr["value"])
        file = by_name[node.input[1].split(":")[0]].attr["value"].tensor
        file.string_val[:] = [
            name and _own_file(name.decode(), order.group).encode() for name in file.string_val
        ]
    return bool(found)


_begun: set[str] = set()  # files of caches that this process has written or read


def _own_file(file: str, group: Group) -> str:
    """This worker's file of a cache: two writers of one file fail. All workers must call it.

    A user's file that is complete on all workers is read by all. Before the first use in a process,
    the files of killed workers are removed. Files of several workers have the same order only if
    all are complete.
    """
    own = f"{file}.worker-{group.rank}-of-{group.size}"
    index, lock = f"{own}.index", f"{own}_0.lockfile"  # kernels/data/cache_dataset_ops.cc
    complete = group.from_all([tf.io.gfile.exists(path) for path in (f"{file}.index", index)])
    of_user, of_workers = (all(found) for found in zip(*complete, strict=True))
    if of_user:
        return file
    if own not in _begun:
        for left in (lock,) if of_workers else (lock, index):
            if tf.io.gfile.exists(left):
                tf.io.gfile.remove(left)
    _begun.add(own)
    return own


# Positions of the cycle length and of the number of parallel calls in the inputs of an op, from
# the end (tensorflow/core/ops/dataset_ops.cc).
_TURNS: dict[str, tuple[int, int | None]] = {
    "InterleaveDataset": (-2, None),
    "ParallelInterleaveDatasetV2": (-3, -1),
    "ParallelInterleaveDatasetV3": (-3, -1),
    "ParallelInterleaveDatasetV4": (-5, -1),
}


def _agree_on_turns(nodes: Any, by_name: Any, suffix: str, node: Any, order: SharedOrder) -> bool:
    """Gives an `interleave` the chief's cycle length; returns whether the node has changed."""
    if node.op not in _TURNS:
        return False
    slots = _TURNS[node.op]
    inputs = [name for name in node.input if not name.startswith("^")]
    length, calls = (None if slot is None else constant_of(inputs[slot], by_name) for slot in slots)
    if length is None or (slots[1] is not None and calls is None):
        return False
    if length == tf.data.AUTOTUNE:
        agreed = order.cycle_length(calls)
    elif not suffix:  # outside of functions a graph has the length that tf.data has chosen
        agreed = order.cycle_length_of(node.name, lambda: length)
    else:
        return False
    if agreed == length:
        return False
    _set_constant(nodes, suffix, node, len(inputs) + slots[0], agreed)
    return True


def _set_constant(nodes: Any, suffix: str, node: Any, slot: int, value: int) -> None:
    """Makes an int64 constant the input of a node."""
    constant = nodes.add()
    constant.name = f"tfmw_{node.name}_{slot}"
    constant.op = "Const"
    constant.attr["dtype"].type = tf.int64.as_datatype_enum
    constant.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(value, tf.int64, []))
    node.input[slot] = constant.name + suffix
