"""Records the training examples and predictions of each task: `coverage.py [seeded]`.

Every example is a number of its own, from 1: see `recording`.
"""

import hashlib
import importlib
import sys
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfmw
from tests.matrix.rows.common import classes, compiled, mlp
from tests.programs import _result
from tests.programs.recording import NewEpoch, Recorder, seen

cluster = tfmw.init()
task = cluster.index

EXAMPLES = 103
mapped: list[int] = []
counters: list[Callable[[], int]] = []  # the bar reads them for its throughput
counts: list[int] = []  # of examples, of each training


def counted(callbacks: Any, shows: bool, verbose: Any, examples: Any, overlapping: bool) -> Any:
    if examples is not None:
        counters.append(examples)
    return callbacks


importlib.import_module("tfmw.train.fit_context").with_progress = counted  # type: ignore[attr-defined]


def pairs(number: int = EXAMPLES) -> tf.data.Dataset:
    return tf.data.Dataset.range(1, number + 1).map(lambda i: (i, i % 7))


def noted(i: Any, y: Any) -> Any:
    tf.py_function(lambda v: mapped.append(int(v)), [i], [])
    return i, y


def interleaved(i: Any) -> tf.data.Dataset:
    part = tf.data.Dataset.range(i * 10 + 1, i * 10 + 11).shuffle(10)
    return part.map(lambda j: (j, j % 7))


DATASETS: dict[str, Callable[[], tf.data.Dataset]] = {
    "plain": lambda: pairs().batch(10),
    "shuffled": lambda: pairs().shuffle(EXAMPLES).batch(10),
    "shuffled before a map": lambda: (
        tf.data.Dataset.range(1, EXAMPLES + 1).shuffle(50).map(lambda i: (i, i % 7)).batch(9)
    ),
    "shuffled batches": lambda: pairs().batch(10).shuffle(5),
    "cached, shuffled": lambda: pairs().cache().shuffle(EXAMPLES).batch(10).prefetch(1),
    "shuffle inside of interleave": lambda: (
        tf.data.Dataset.range(10).shuffle(10).interleave(interleaved, cycle_length=3).batch(8)
    ),
    "parallel interleave in any order": lambda: (
        tf.data.Dataset.range(10)
        .interleave(interleaved, cycle_length=4, num_parallel_calls=4, deterministic=False)
        .batch(8)
    ),
    "skip and take": lambda: pairs().shuffle(EXAMPLES, seed=4).skip(20).take(41).batch(6),
    "repeat inside of the epoch": lambda: pairs(30).shuffle(30).repeat(3).batch(7),
    "filtered": lambda: pairs().shuffle(EXAMPLES).filter(lambda i, y: y != 3).batch(10),
    "fewer than tasks": lambda: pairs(1).batch(4),
    "batches of one": lambda: pairs(5).shuffle(5).batch(1),
    "padded": lambda: pairs().shuffle(50).padded_batch(8),
    "ragged to batch": lambda: pairs().ragged_batch(8),
    "zipped": lambda: tf.data.Dataset.zip(
        (tf.data.Dataset.range(1, 51).shuffle(9), tf.data.Dataset.range(50))
    ).batch(8),
}


recorder = Recorder()  # one for all datasets: it is traced once for each kind of batch
recorder.compile(keras.optimizers.SGD(1e-6), loss="mse")


def train(x: Any, **options: Any) -> list[list[int]]:
    """Examples that this task saw, by epoch."""
    seen[:] = [[]]
    options = {"epochs": 2, "verbose": 0, "callbacks": [NewEpoch()], **options}
    tfmw.fit(recorder, x, **options)
    counts.append(counters.pop()())
    return seen[1:]


def of_function(context: tf.distribute.InputContext) -> tf.data.Dataset:
    """Task 0 has 7 examples, task 1 has 20, task 2 would have 33."""
    worker = context.input_pipeline_id
    part = tf.data.Dataset.range(100 * worker + 1, 100 * worker + 8 + 13 * worker)
    return part.map(lambda i: (i, i % 7)).batch(3)


class Numbers(keras.utils.PyDataset):
    def __len__(self) -> int:
        return 11

    def __getitem__(self, index: int) -> Any:
        part: Any = np.arange(index * 10, min(index * 10 + 10, EXAMPLES)) + 1
        return part, part % 7


class ManyOutputs(keras.Model):
    def call(self, x: Any) -> Any:
        number = tf.cast(x, tf.int64)
        return {"twice": 2 * number, "more": (tf.cast(x, tf.float16), [tf.stack([x, -x], 1)])}


many_outputs = ManyOutputs()


def predictions(number: int, batch: int) -> bool:
    """Whether all predictions came, in order, in the structure of the outputs."""
    data = tf.data.Dataset.range(number).batch(batch)
    out = tfmw.predict(many_outputs, data, verbose=0)
    expected = np.arange(number)
    half, (stacked,) = out["more"]
    return (
        np.array_equal(out["twice"], 2 * expected)
        and out["twice"].dtype == np.int64
        and np.array_equal(half, expected.astype("float16"))
        and half.dtype == np.float16
        and np.array_equal(stacked, np.stack([expected, -expected], 1))
    )


def seeded(seed: int) -> str:
    """One run from `seed=`: initial weights, shuffles and dropout masks come from it."""
    data = classes().unbatch().shuffle(37).batch(8)

    def model() -> keras.Model:
        out = mlp()
        out.add(keras.layers.Dropout(0.3))
        return compiled(out)

    trained: list[Any] = []
    callback: Any = keras.callbacks.LambdaCallback(
        on_train_end=lambda logs: trained.extend(w.tobytes() for w in callback.model.get_weights())
    )
    tfmw.fit(model, data, epochs=2, verbose=0, seed=seed, callbacks=[callback])
    return hashlib.sha256(b"".join(trained)).hexdigest()


def everything() -> dict[str, Any]:
    """All that the tests ask about."""
    tf.random.set_seed(1000 + task)  # with equal ones, all tasks would shuffle alike anyway
    result: dict[str, Any] = {
        name: train(build()) for name, build in DATASETS.items() if name not in sys.argv
    }
    mapped.clear()
    result["counted map"] = train(pairs().map(noted).shuffle(EXAMPLES).batch(10), epochs=1)
    result["map calls"] = list(mapped)
    result["function"] = train(of_function)
    result["PyDataset"] = train(Numbers())
    x: Any = np.arange(EXAMPLES) + 1
    tf.random.set_seed(None)  # under a seed, Keras takes arrays in the same order in each epoch
    result["arrays shuffled"] = train(x, y=x % 7, batch_size=10)
    result["arrays"] = train(x, y=x % 7, batch_size=10, shuffle=False)
    result["steps"] = train(pairs().shuffle(EXAMPLES).repeat().batch(10), steps_per_epoch=4)
    trained = [name for name in result if name != "map calls"]
    result["counts"] = dict(zip(trained, counts, strict=True))
    result["predictions"] = {
        f"{n} by {b}": predictions(n, b) for n, b in ((1, 4), (23, 8), (24, 8), (5, 1), (9, 7))
    }
    result["global seeds"] = 1000 + task
    return result


_result.write(
    {"seeded": seeded(5), "other": seeded(6)} if sys.argv[1:] == ["seeded"] else everything()
)
