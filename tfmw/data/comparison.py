"""Comparison of the workers' datasets before the first step.

tfmw shards one global dataset. If each worker passed its own part (`dataset.shard(n, i)`, a file
per worker, different arrays), most examples would never be read. So workers compare a description
of their data:

* of arrays: shape, dtype and up to 65,536 values, evenly spaced, floats to 3 digits;
* of a pipeline: the numbers that select elements (`shard`, `skip`, `take`, `range`, `batch`), its
  arrays, its strings; in its functions the numbers of `shard` and of filters, strings, and captured
  arrays;
* of strings that name files: their base names, and of up to 8 files the size and first bytes or
  records. So each host may have a copy under another path, or have prepared the data itself.

Not compared: seeds and buffer sizes (all workers use the chief's seeds), files of caches, small
captured values, and Python functions of maps. Workers may get different elements from these without
an error. Generators and `PyDataset` are compared while they are read: see `python_sources`.
"""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from tfmw.compat import datasets
from tfmw.compat.pipelines import Pipeline
from tfmw.data.record_files import refuse_buckets
from tfmw.data.values import Sharding
from tfmw.errors import UsageError

_VALUES = 16  # captured arrays with fewer values are not compared
_COMPARED = 1 << 16  # most values of an array that are compared, evenly spaced
_FILES = 8  # number of files opened
_FIRST_BYTES = 4096  # bytes compared of a file
_FIRST_RECORD = 1 << 24  # or its first record, up to these bytes
_TOLERANCE = 1e-3  # hosts may round differently
TOLERANCE_OF_SKETCHES = 1e-5  # relative to the norm of the sketched values
_WEIGHTS = np.random.default_rng(0).uniform(-1, 1, _COMPARED)


def refuse_different(x: Any, gather: Callable[[Any], list[Any]]) -> None:
    """Compares the data that workers pass to fit, evaluate or predict. All workers must call it.

    Args:
        x: a dataset, or a structure of arrays.
        gather: an all-gather: this worker's JSON value -> those of all workers by rank.

    Raises:
        UsageError: workers have different datasets; on every worker.
    """
    chief, *others = gather([[what, value] for what, value in described(x)])
    for rank, other in enumerate(others, start=1):
        difference = _difference(chief, other)
        if difference is not None:
            raise UsageError(
                f"workers have different datasets: {difference[0]} on worker 0, {difference[1]} on "
                f"worker {rank}. tfmw divides one global dataset, so examples would be lost: pass "
                "the same data on every worker, without .shard(). If it is drawn at random, call "
                "keras.utils.set_random_seed(0) at the top of the script. Or pass a callable of a "
                "tf.distribute.InputContext that returns the pipeline of one worker."
            )


def _difference(a: list[Any], b: list[Any]) -> tuple[str, str] | None:
    """The first item in which two descriptions differ, as (its description, the difference)."""
    for (what, value), (other_what, other) in zip(a, b, strict=False):
        if what != other_what or not _equal(value, other):
            return f"{what} is {_short(value)}", f"{other_what} is {_short(other)}"
    if len(a) != len(b):
        return f"a pipeline of {len(a)} constants", f"one of {len(b)}"
    return None


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_equal, a, b))
    if isinstance(a, float) and isinstance(b, float):
        return bool(np.isclose(a, b, rtol=_TOLERANCE, atol=_TOLERANCE, equal_nan=True))
    return type(a) is type(b) and bool(a == b)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:117]}..."


# ---------------------------------------------------------------- what is compared


def described(x: Any) -> Iterator[tuple[str, Any]]:
    """(description, JSON value) of each item that must be equal on all workers."""
    if datasets.is_dataset(x):
        pipeline = Pipeline.of(x)
        for kind, argument, tensor in pipeline.constants():
            yield f"{argument} of {kind}", _constant(_numpy(tensor))
        for filters, bodies, captured in pipeline.functions():
            yield from _described_function(filters, bodies, captured)
    elif isinstance(x, keras.utils.PyDataset):
        yield "number of batches", x.num_batches
    elif not hasattr(x, "__next__"):
        for leaf in tf.nest.flatten(x, expand_composites=True):
            if isinstance(leaf, np.ndarray | tf.Tensor):
                yield "an array", _array(np.asarray(leaf))
            elif hasattr(leaf, "shape"):
                yield "the shape of an array", [int(size) for size in leaf.shape]


def _described_function(
    filters: bool, bodies: list[Any], captured: list[Any]
) -> Iterator[tuple[str, Any]]:
    for nodes in bodies:
        constants = {
            node.name: tf.make_ndarray(node.attr["value"].tensor)
            for node in nodes
            if node.op == "Const"
        }
        strings = [value for value in constants.values() if value.dtype == object]
        if strings:
            yield "strings of a function", [_strings(value) for value in strings]
        numbers = [v for v in constants.values() if v.dtype.kind in "biuf" and v.ndim == 0]
        if filters and numbers:
            yield "numbers of a filter", [value.item() for value in numbers]
        for node in nodes:
            if node.op == "ShardDataset":
                numbers = [constants.get(name.split(":")[0]) for name in node.input[1:3]]
                yield "shard() in a function", [None if n is None else int(n) for n in numbers]
    for tensor in captured:
        if filters or tensor.dtype == tf.string or tf.size(tensor) > _VALUES:
            yield "what a function uses", _constant(_numpy(tensor))


def _numpy(tensor: tf.Tensor) -> Any:
    """The value of a tensor, without a copy if possible."""
    try:
        return np.asarray(memoryview(tensor))
    except (TypeError, ValueError, BufferError):
        return tensor.numpy()


def _constant(value: Any) -> Any:
    array = np.asarray(value)
    if array.dtype == object or array.dtype.kind == "S":
        return _strings(array)
    return array.item() if array.ndim == 0 else _array(array)


def _array(array: np.ndarray) -> list[Any]:
    """Shape, dtype and a sketch of the values."""
    if array.dtype.kind in "OSU":
        return [list(array.shape), _strings(array)]
    if array.dtype.kind in "biu":
        return [list(array.shape), array.dtype.name, zlib.crc32(_some(array).tobytes())]
    projection, squares = sketch(array)
    size = math.sqrt(squares)
    return [list(array.shape), array.dtype.name, [projection / (size or 1), size]]


def sketch(array: Any, most: int = _COMPARED) -> tuple[float, float]:
    """(a random projection of an array's values, the sum of their squares).

    Arrays with other values, or with the same in another order, have different projections. Values
    that are rounded differently have nearly the same projection.
    """
    numbers = _numbers(_some(np.asarray(array), most))
    # By NumPy itself: BLAS would start a thread for each core, which then waits busily.
    projection = np.einsum("i,i->", numbers, _WEIGHTS[: len(numbers)])
    return float(projection), float(np.einsum("i,i->", numbers, numbers))


def _some(array: np.ndarray, most: int = _COMPARED) -> np.ndarray:
    """[n], all values of an array, or `most`, evenly spaced."""
    if array.size <= most:
        return np.ravel(array)
    places = np.linspace(0, array.size - 1, most).astype(np.int64)
    return array[np.unravel_index(places, array.shape)]


def _numbers(values: np.ndarray) -> np.ndarray:
    """float64 [n]: real values on a logarithmic scale; hashes of integers and strings."""
    if values.dtype.kind in "OSU":
        texts = (v if isinstance(v, bytes) else str(v).encode(errors="replace") for v in values)
        values = np.fromiter(map(zlib.crc32, texts), np.int64, len(values))
    if values.dtype.kind in "biu":
        mixed = values.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        return (mixed >> np.uint64(40)).astype(np.float64) / 2**24 - 0.5
    if values.dtype.kind == "c":
        values = values.real + values.imag
    reals: np.ndarray = np.nan_to_num(values.astype(np.float64), nan=0.3, posinf=0.6, neginf=-0.6)
    return np.arcsinh(reals)  # so that large values do not hide others


def _strings(array: np.ndarray) -> list[Any]:
    """Base names, sizes and first bytes of files; a checksum of other strings."""
    texts = [_text(value) for value in array.reshape(-1)[:100_000]]
    some = {texts[i] for i in np.linspace(0, len(texts) - 1, _FILES).astype(int)} if texts else ()
    files = {text: found for text in sorted(some) if (found := _file(text)) is not None}
    if files:
        texts = [os.path.basename(text) for text in texts]
    checksum = zlib.crc32("\0".join(texts).encode(errors="replace"))
    shown = texts[:3]
    return [len(array.reshape(-1)), shown, checksum, sorted(files.values())]


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _file(path: str) -> list[Any] | None:
    """[base name, size in bytes, checksum of the first bytes]; None if the file does not exist."""
    try:
        if not path or "\0" in path or not tf.io.gfile.exists(path) or tf.io.gfile.isdir(path):
            return None
        size = tf.io.gfile.stat(path).length
        with tf.io.gfile.GFile(path, "rb") as file:
            first = file.read(_FIRST_BYTES)
            length = int.from_bytes(first[:8], "little")  # of a TFRecord; data begin at byte 12
            if len(first) < length + 12 < min(size, _FIRST_RECORD):
                first += file.read(length + 12 - len(first))
        return [os.path.basename(path), size, zlib.crc32(_ordered(first))]
    except (tf.errors.OpError, OSError, ValueError):
        return None


def _ordered(first: bytes) -> bytes:
    """The first bytes of a file; of TFRecords with Examples, these in one order of their features.

    Protocol buffers write the same features in different orders in different processes, so hosts
    that have prepared the same data have files that differ.
    """
    found, rest = b"", first
    while 0 < (length := int.from_bytes(rest[:8], "little")) <= len(rest) - 12:
        record, rest = rest[12 : 12 + length], rest[16 + length :]
        try:
            ordered = tf.train.Example.FromString(record).SerializeToString(deterministic=True)
        except DecodeError:
            return first
        if len(ordered) != length:
            return first
        found += ordered
    return found or first


def refuse_own_elements(pipeline: Pipeline, sharding: Sharding) -> None:
    """Raises if the workers' copies of a pipeline would have different elements, or none."""
    refuse_buckets(pipeline)
    if pipeline.reads_a_service:
        raise UsageError(
            "the dataset comes from tf.data's service, which promises each example at most once, "
            "in no order, and cannot go back to a position: a resumed run would differ. Pass the "
            "dataset before distribute(), which tfmw divides; or accept the weaker promise by "
            "tfmw.data.at_most_once(dataset), batched by the batch size of one replica."
        )
    if sharding.workers > 1 and (kind := pipeline.random_selection) is not None:
        raise UsageError(
            f"the {kind} of the dataset chooses elements by random numbers without a seed: each "
            "worker would have others, and lose examples or read them twice. Choose by "
            "tf.random.stateless_uniform of a value of the element; in place of "
            "to_tf_dataset(shuffle=True) pass tfmw.data.from_index(dataset).shuffle(10_000)."
        )
