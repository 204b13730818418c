"""Regressions from Keras's own tests: `as_keras.py devices|workers FOLDER SCENARIO...`.

Each scenario runs with Keras's own methods in one process and with tfmw on two virtual devices, or
with tfmw on this worker. A scenario returns numbers that must be equal.
"""

import random
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfmw
from tests.helpers import prepared as prepared_model
from tests.helpers.prepared import prepared
from tests.matrix.columns import virtual_devices
from tests.programs import _result
from tfmw.compat.shuffles import ShuffleSeeds

where, folder = sys.argv[1], Path(sys.argv[2])

X = np.random.default_rng(1).normal(size=(22, 4)).astype("float32")
Y = X.sum(axis=1, keepdims=True)
BATCH = 3  # eight batches, the last of one example: then a replica has none


class Keras:
    """Keras's own methods."""

    is_tfmw = False
    strategy = "default"

    def fit(self, model: Any, *data: Any, **options: Any) -> Any:
        return model.fit(*data, verbose=0, **options)

    def evaluate(self, model: Any, *data: Any, **options: Any) -> Any:
        return model.evaluate(*data, verbose=0, **options)

    def predict(self, model: Any, *data: Any, **options: Any) -> Any:
        return model.predict(*data, verbose=0, **options)

    def on_batch(self, method: str, model: Any, *data: Any) -> Any:
        return getattr(model, method)(*data)


class Tfmw:
    """tfmw's, on a strategy."""

    is_tfmw = True

    def __init__(self, strategy: Any):
        self.strategy = strategy

    def fit(self, model: Any, *data: Any, **options: Any) -> Any:
        return tfmw.fit(model, *data, strategy=self.strategy, **options | {"verbose": 0})

    def evaluate(self, model: Any, *data: Any, **options: Any) -> Any:
        return tfmw.evaluate(model, *data, strategy=self.strategy, **options | {"verbose": 0})

    def predict(self, model: Any, *data: Any, **options: Any) -> Any:
        return tfmw.predict(model, *data, strategy=self.strategy, **options | {"verbose": 0})

    def on_batch(self, method: str, model: Any, *data: Any) -> Any:
        return getattr(tfmw, method)(model, *data, strategy=self.strategy)


def compiled(*layers: Any, optimizer: Any = "sgd", **options: Any) -> keras.Model:
    model = keras.Sequential([*layers, keras.layers.Dense(1)])
    model.compile(optimizer, "mse", **options)
    return model


def all_numbers(trainer: Any, model: Any, *data: Any) -> dict[str, Any]:
    """Results of a call of each method."""
    history = trainer.fit(model, *data, epochs=2)
    return {
        "loss": history.history["loss"],
        "evaluate": trainer.evaluate(model, *data),
        "predict": as_lists(trainer.predict(model, data[0])),
        "weights": [w.tolist() for w in model.get_weights()],
    }


def as_lists(value: Any) -> Any:
    if isinstance(value, tf.RaggedTensor):
        return value.to_list()
    if isinstance(value, tf.SparseTensor):
        value = tf.sparse.to_dense(value).numpy()
    return np.asarray(value).tolist()


def dataset(*tensors: Any, batch: int = BATCH) -> tf.data.Dataset:
    """Batches that do not come from batch() alone."""
    whole = tf.data.Dataset.from_tensor_slices(tensors).batch(batch)
    return whole.map(lambda *batch: batch)


# ---------------------------------------------------------------- models and data

# Keras's public classes have it as a base, and no name of its own.
Trainer: Any = next(c for c in keras.Model.__mro__ if c.__name__ == "TensorFlowTrainer")


class TrainedLayer(Trainer, keras.layers.Dense):
    """A layer that can be trained, and is no `keras.Model`."""

    def __init__(self, units: int):
        keras.layers.Dense.__init__(self, units)
        Trainer.__init__(self)


def a_trained_layer(trainer: Any) -> Any:
    model = TrainedLayer(1)
    model.compile("sgd", "mse", metrics=["mae"])
    return all_numbers(trainer, model, dataset(X, Y))


def sparse_inputs(trainer: Any) -> Any:
    sparse = tf.sparse.from_dense(np.where(X > 0, X, 0))
    model = compiled(keras.Input((4,), sparse=True), keras.layers.Dense(3))
    return all_numbers(trainer, model, dataset(sparse, Y))


def ragged_inputs(trainer: Any) -> Any:
    words = tf.ragged.range(np.arange(len(X)) % 5 + 1)

    class Lengths(keras.layers.Layer):
        def call(self, inputs: Any) -> Any:
            return tf.cast(tf.reduce_sum(inputs, axis=1), tf.float32)[:, None]

    return all_numbers(trainer, compiled(Lengths()), dataset(words, Y / 10))


def inputs_that_are_none(trainer: Any) -> Any:
    class MaybeBoth(keras.layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.dense = keras.layers.Dense(1)

        def build(self, a_shape: Any, b_shape: Any = None) -> None:
            self.dense.build(a_shape)

        def call(self, a: Any, b: Any = None) -> Any:
            return self.dense(a if b is None else a + b)

        def compute_output_shape(self, a_shape: Any, b_shape: Any = None) -> Any:
            return (*a_shape[:-1], 1)

    def batches() -> Iterator[Any]:
        for _ in range(2):
            yield {"a": X[:5], "b": None}, Y[:5]

    out = {}
    for name in ("arrays", "generator"):
        a, b = keras.Input((4,), name="a"), keras.Input((4,), name="b", optional=True)
        model = keras.Model({"a": a, "b": b}, MaybeBoth()(a, b))
        model.compile("sgd", "mse")
        if name == "arrays":
            inputs = {"a": X, "b": None}
            losses = trainer.fit(model, inputs, Y, batch_size=BATCH, shuffle=False).history["loss"]
            out["predict"] = as_lists(trainer.predict(model, inputs, batch_size=BATCH))
        else:
            losses = trainer.fit(model, batches()).history["loss"]
        out[name] = [losses, [w.tolist() for w in model.get_weights()]]
    return out


class Repeated(keras.Model):
    """The numbers below that of each row, as a ragged, sparse or padded tensor, or a text."""

    def __init__(self, kind: str):
        super().__init__()
        self.kind = kind

    def call(self, x: Any) -> Any:
        ragged = tf.ragged.range(tf.cast(x[:, 0], tf.int32))
        if self.kind == "text":
            return tf.strings.reduce_join(tf.strings.as_string(ragged), axis=1)
        if self.kind == "ragged":
            return ragged
        return ragged.to_sparse() if self.kind == "sparse" else ragged.to_tensor()


def predictions_without_one_shape(trainer: Any) -> Any:
    numbers = [i % 6 + 1 for i in range(len(X))]
    inputs = np.asarray(numbers, "float32")[:, None]
    out = {
        kind: as_lists(trainer.predict(Repeated(kind), inputs, batch_size=BATCH))
        for kind in ("ragged", "padded")
    }
    texts = trainer.predict(Repeated("text"), inputs, batch_size=BATCH)
    assert texts.dtype == object
    out["text"] = [text.decode() for text in texts.tolist()]
    # Each replica pads to the longest row of its own.
    out["padded"] = [row[:n] for row, n in zip(out["padded"], numbers, strict=True)]
    if trainer.is_tfmw:  # Keras cannot put together sparse ones of several widths
        sparse = trainer.predict(Repeated("sparse"), inputs, batch_size=BATCH)
        np.testing.assert_array_equal(
            as_lists(sparse), [[c if c < n else 0 for c in range(6)] for n in numbers]
        )
    return out


def batches_of_several_shapes(trainer: Any) -> Any:
    def example(length: int) -> Any:
        return np.arange(length, dtype="float32") / 10, np.ones((length // 2, 1), "float32")

    def of_batches() -> Iterator[Any]:
        for rows, length in ((3, 4), (1, 8), (2, 2)):
            yield tuple(np.stack([t] * rows) for t in example(length))

    def of_examples() -> Iterator[Any]:
        for length in (4, 4, 8, 8, 2, 2):
            yield example(length)

    batch, one = (
        (tf.TensorSpec([*rows, None]), tf.TensorSpec([*rows, None, 1])) for rows in ([None], [])
    )
    batches = tf.data.Dataset.from_generator(of_batches, output_signature=batch)
    examples = tf.data.Dataset.from_generator(of_examples, output_signature=one)
    out = []
    for data in (
        batches.apply(tf.data.experimental.assert_cardinality(3)),
        # Nobody knows its length: at the end, all replicas have an empty batch.
        examples.map(lambda x, y: (x, y)).batch(2),
    ):
        model = compiled(keras.Input((None,)), keras.layers.Reshape((-1, 2)))
        history = trainer.fit(model, data, epochs=2)
        out.append([history.history["loss"], [w.tolist() for w in model.get_weights()]])
    return out


def read_by_threads(trainer: Any) -> Any:
    class Endless(keras.utils.PyDataset):
        def __init__(self) -> None:
            super().__init__(workers=2)

        @property
        def num_batches(self) -> None:
            return None

        def __getitem__(self, index: int) -> Any:
            return X[:5], Y[:5]

    return trainer.fit(compiled(), Endless(), steps_per_epoch=7, epochs=6).history["loss"]


def replicas_without_an_example(trainer: Any) -> Any:
    """A lookup that asserts that it knows each word, in the last batch and in one row."""
    words = np.array(["a", "b", "c"])[np.arange(len(X)) % 3]
    out = []
    slices = tf.data.Dataset.from_tensor_slices((words, Y))
    for data in (
        slices.batch(BATCH),  # 22 examples: the last batch has one
        slices.map(lambda x, y: (x, y)).batch(BATCH),
        slices.filter(lambda x, y: True).batch(BATCH),
        slices.batch(BATCH).map(lambda x, y: (x, y)),
        slices.take(1).batch(BATCH),
        slices.take(1).map(lambda x, y: (x, y)).batch(1),
    ):
        lookup = keras.layers.StringLookup(vocabulary=["a", "b", "c"], num_oov_indices=0)
        model = compiled(keras.Input((), dtype="string"), lookup, keras.layers.Embedding(3, 2))
        out.append(trainer.fit(model, data, epochs=2).history["loss"])
        out.append(trainer.evaluate(model, data))
        out.append(as_lists(trainer.predict(model, data.map(lambda x, y: x))))
    return out


# ---------------------------------------------------------------- steps and epochs


def limits(trainer: Any) -> Any:
    keras.config.set_max_epochs(2)
    keras.config.set_max_steps_per_epoch(3)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = compiled()
            history = trainer.fit(model, dataset(X, Y), epochs=4, validation_data=(X, Y))
            evaluated = trainer.evaluate(model, dataset(X, Y))
            predicted = trainer.predict(model, dataset(X))
    finally:
        keras.config.set_max_epochs(None)
        keras.config.set_max_steps_per_epoch(None)
    assert any("Limiting epochs to 2" in str(w.message) for w in caught)
    assert any("Limiting steps_per_epoch to 3" in str(w.message) for w in caught)
    return [
        history.epoch,
        history.history,
        int(model.optimizer.iterations),
        evaluated,
        predicted.tolist(),
    ]


def validation_begins_anew(trainer: Any) -> Any:
    options = {"validation_steps": 2, "epochs": 3}
    return [
        trainer.fit(compiled(), dataset(X, Y), validation_data=data, **options).history["val_loss"]
        for data in (dataset(X, Y), (X, Y))
    ]


class Numbers(keras.callbacks.Callback):
    """Keeps the numbers of batches, and stops after the batch `stop`."""

    def __init__(self, stop: int | None = None):
        super().__init__()
        self.seen: list[Any] = []
        self.outputs: list[Any] = []
        self.stop = stop

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.seen.append(["train begin", batch])

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen.append(["train end", batch])

    def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.seen.append(["test begin", batch])

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen.append(["test end", batch])
        self.model.stop_evaluating = batch == self.stop

    def on_predict_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.seen.append(["predict begin", batch])

    def on_predict_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen.append(["predict end", batch])
        self.outputs += np.asarray(logs["outputs"]).tolist()
        self.model.stop_predicting = batch == self.stop


def batch_numbers(trainer: Any) -> Any:
    """Seven batches, three in each call of steps: Keras counts nine."""
    numbers, model = Numbers(), compiled(steps_per_execution=3)
    for data in (dataset(X[:14], Y[:14], batch=2), dataset(X[:12], Y[:12], batch=2)):
        trainer.fit(model, data, validation_data=data, callbacks=[numbers], epochs=2)
        trainer.evaluate(model, data, callbacks=[numbers])
    trainer.predict(model, X[:14], batch_size=2, callbacks=[Numbers()])
    return numbers.seen


def stopping(trainer: Any) -> Any:
    endless, numbers, model = dataset(X, Y).repeat(), Numbers(2), compiled()
    loss = trainer.evaluate(model, endless, steps=1000, callbacks=[numbers])
    fitted = trainer.fit(
        model,
        X,
        Y,
        batch_size=11,
        callbacks=[numbers],
        epochs=2,
        shuffle=False,
        validation_data=endless,
        validation_steps=1000,
    )
    predicted = trainer.predict(
        model, dataset(X).repeat(), steps=1000, callbacks=[numbers]
    ).tolist()
    assert np.allclose(predicted, numbers.outputs)
    return [loss, fitted.history["val_loss"], predicted, numbers.seen]


# ---------------------------------------------------------------- shuffles, over several calls


def examples(seed: int | None = 3, **options: Any) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(len(X), seed=seed, **options)


def orders_of_several_calls(trainer: Any) -> Any:
    out = []
    arrays = examples()
    files = tf.data.Dataset.range(22).map(lambda i: (tf.gather(X, i), tf.gather(Y, i)))
    below = files.shuffle(22, seed=3)
    above = below.map(lambda x, y: (x, y)).shuffle(5, seed=4)
    unknown = below.filter(lambda x, y: True)
    only_graph = tf.data.Dataset.zip((files.shuffle(22, seed=6), below)).map(lambda a, b: a)
    for pipeline, shuffles in (
        (arrays, [arrays]),
        (above, [above, below]),
        (unknown, [below]),
        (only_graph, [below]),
    ):
        data = pipeline.batch(BATCH)
        if not trainer.is_tfmw or tfmw.init().is_chief:
            next(iter(data))  # a preview, which one task has
        model = compiled()
        for _ in range(2):
            out.append(trainer.fit(model, data, epochs=1).history["loss"])
        history = trainer.fit(model, data, epochs=2, validation_data=data, validation_steps=2)
        out += [history.history["loss"], history.history["val_loss"]]
        out.append(trainer.evaluate(model, data, steps=3))
        out.append(as_lists(trainer.predict(model, data, steps=3)))
        out.append([ShuffleSeeds(shuffle).passes for shuffle in shuffles])
    return out


def orders_where_epochs_end_within_passes(trainer: Any) -> Any:
    """Runs end in the middle of a pass: near its end, Keras may have begun the next one or not."""
    out = []
    for repeat in (lambda d: d.batch(BATCH).repeat(), lambda d: d.repeat().batch(BATCH)):
        shuffle, model = examples(), compiled()
        data = repeat(shuffle)
        for steps in (5, 2, 6):  # eight are a pass
            out.append(trainer.fit(model, data, epochs=2, steps_per_epoch=steps).history["loss"])
        out.append(ShuffleSeeds(shuffle).passes)
    return out


def orders_of_seeds_that_set_seed_gives(trainer: Any) -> Any:
    tf.random.set_seed(5)
    model, out = compiled(), []
    first = examples(seed=None).batch(BATCH)
    for _ in range(2):
        out.append(trainer.fit(model, first).history["loss"])
    second = examples(seed=None).batch(BATCH)  # its seed comes after those of the calls
    return [*out, trainer.fit(model, second).history["loss"]]


def pipelines_that_keep_something(trainer: Any) -> Any:
    """Caches above shuffles and in files, passes of different lengths, copies on a device."""
    examples = tf.data.Dataset.from_tensor_slices((X, Y))
    order = examples.shuffle(len(X), seed=3)
    kept = order.take(12).cache()
    if where == "workers" and tfmw.init().index:
        list(kept)  # on one worker
    lengths = iter([2, 3, 5, 4, 5] * 2)

    def batches() -> Iterator[Any]:
        for i in range(next(lengths)):
            yield X[i : i + 3], Y[i : i + 3]

    spec = tuple(tf.TensorSpec([None, *a.shape[1:]], a.dtype) for a in (X, Y))
    varying = tf.data.Dataset.from_generator(batches, output_signature=spec)
    file = str(folder / type(trainer).__name__)
    copied = examples.batch(3).apply(tf.data.experimental.prefetch_to_device("/CPU:0"))
    parts = [examples.repeat(), examples.skip(9).repeat()]
    chosen = tf.data.Dataset.choose_from_datasets(parts, tf.data.Dataset.range(2).repeat(4))
    model, out = compiled(keras.Input((4,))), []
    for train, test in (
        (kept.batch(3), order.skip(12).batch(3).cache()),
        (varying, examples.batch(3)),
        (examples.take(12).map(lambda *e: e).batch(3).cache(file).prefetch(2), varying),
        (copied, chosen.batch(3)),
    ):
        history = trainer.fit(model, train, validation_data=test, epochs=3).history
        out += [history["loss"], history["val_loss"], trainer.evaluate(model, train)]
    return out


def halves_of_one_order(trainer: Any) -> Any:
    """The order has no seed, so processes differ; the halves hold each example once."""
    order = examples(seed=None, reshuffle_each_iteration=False)
    model = compiled(keras.layers.Lambda(lambda x: x[:, :1]))
    model.build((None, 4))
    model.set_weights([np.ones((1, 1)), np.zeros(1)])
    halves = [
        trainer.predict(model, half.map(lambda x, y: x).batch(BATCH))
        for half in (order.take(11), order.skip(11))
    ]
    return sorted(np.concatenate(halves)[:, 0].tolist())


# ---------------------------------------------------------------- random numbers, outside of steps


class Shuffles(keras.utils.PyDataset):
    """Draws from Python's and NumPy's generators in each method."""

    def __init__(self, in_batches: bool = False, workers: int = 1):
        super().__init__(workers=workers)
        self.in_batches = in_batches
        self.rows = np.arange(20)

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> Any:
        rows = self.rows[4 * index : 4 * index + 4]
        noise = np.float32(random.random() + np.random.random()) if self.in_batches else 0
        return X[rows] + noise, Y[rows]

    def on_epoch_begin(self) -> None:
        np.random.random()

    def on_epoch_end(self) -> None:
        np.random.shuffle(self.rows)


def random_numbers_after_a_run(trainer: Any) -> Any:
    """Later draws are those of a program that uses Keras, by the chief's generators."""
    out = []

    def drawn(*data: Any, **options: Any) -> None:
        keras.utils.set_random_seed(3)
        model = compiled(keras.Input((4,)))
        if trainer.is_tfmw and not tfmw.init().is_chief:
            random.seed(9)
            np.random.seed(9)
        history = trainer.fit(model, *data, **{"epochs": 2, **options}).history
        out.extend([history["loss"], random.random(), float(np.random.random())])

    drawn(Shuffles())
    drawn(Shuffles(in_batches=True))
    drawn(Shuffles(in_batches=True), shuffle=False)
    drawn(Shuffles(workers=2))
    drawn(Shuffles(), steps_per_epoch=5)
    drawn(Shuffles(), validation_data=Shuffles())
    drawn(Shuffles(), class_weight={0: 1.0, 1: 2.0})
    keras.utils.set_random_seed(3)
    model = compiled(keras.Input((4,)))
    shuffles = Shuffles()
    out.append(trainer.evaluate(model, shuffles))
    out.append(as_lists(trainer.predict(model, shuffles)))
    return [*out, random.random(), float(np.random.random())]


def random_numbers_after_runs_on_other_data(trainer: Any) -> Any:
    out = []
    batches = ((X[:4] + np.float32(np.random.random()), Y[:4]) for _ in range(6))
    cases: list[tuple[Any, dict[str, Any]]] = [
        ((X, Y), {"batch_size": BATCH, "validation_split": 0.25}),
        ((X, Y), {"batch_size": BATCH, "shuffle": False}),
        ((batches,), {}),
    ]
    for data, options in cases:
        out.append(trainer.fit(compiled(), *data, **options).history["loss"])
        out += [random.random(), float(np.random.random())]
    return out


def orders_drawn_without_a_seed(trainer: Any) -> Any:
    """Global generators draw the orders; they differ between workers until the data is read."""
    out = []
    spec = (tf.TensorSpec([None, 4]), tf.TensorSpec([None, 1]))

    def shuffled() -> Iterator[Any]:
        order = list(range(20))
        random.shuffle(order)
        np.random.shuffle(order)
        for first in range(0, 20, 4):
            yield X[order[first:][:4]], Y[order[first:][:4]]

    for data in (
        lambda: shuffled(),
        lambda: tf.data.Dataset.from_generator(shuffled, output_signature=spec),
        lambda: tf.data.Dataset.from_generator(shuffled, output_signature=spec).repeat(),
        lambda: Shuffles(),
    ):
        keras.utils.set_random_seed(3)
        if trainer.is_tfmw and not tfmw.init().is_chief:
            random.seed(9)
            np.random.seed(9)
        model, epochs = compiled(keras.Input((4,)), optimizer=keras.optimizers.SGD(0.01)), 2
        x = data()
        if isinstance(x, Iterator):
            epochs = 1
        options = {} if epochs == 1 else {"steps_per_epoch": 5}
        history = trainer.fit(model, x, epochs=epochs, shuffle=False, **options).history
        out.append([history["loss"], [w.tolist() for w in model.get_weights()]])
    return out


class Grows(keras.utils.PyDataset):
    """A dataset whose length grows after each epoch; records the calls of its methods."""

    def __init__(self, *lengths: int, workers: int = 1):
        super().__init__(workers=workers)
        self.lengths, self.epoch = lengths, 0
        self.calls: list[str] = []

    def __len__(self) -> int:
        return self.lengths[min(self.epoch, len(self.lengths) - 1)]

    def __getitem__(self, index: int) -> Any:
        rows = slice(3 * index, 3 * index + 3)
        return X[rows], Y[rows]

    def on_epoch_begin(self) -> None:
        self.calls.append("begin")

    def on_epoch_end(self) -> None:
        self.calls.append("end")
        self.epoch += 1


def lengths_that_change(trainer: Any) -> Any:
    out: list[Any] = []
    model = compiled(keras.Input((4,)))  # one, so that it is traced once
    for workers, train, validation in (
        (1, (7,), (3, 4, 5, 6)),
        (2, (7, 6, 5), (6, 5, 4)),
        (1, (4, 5, 6), (7,)),
    ):
        data, held_out = (Grows(*lengths, workers=workers) for lengths in (train, validation))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Your input ran out of data")
            history = trainer.fit(
                model, data, epochs=3, shuffle=False, validation_data=held_out
            ).history
        out.append([history, data.calls, held_out.calls])
    return out


def generators_over_several_calls(trainer: Any) -> Any:
    def numbered() -> Iterator[Any]:
        for number in range(1, 1000):
            yield np.full((4, 4), number, "float32"), np.full((4, 1), number, "float32")

    model, generator = compiled(keras.Input((4,)), keras.layers.ReLU()), numbered()
    model.set_weights([np.ones_like(w) for w in model.get_weights()])
    out: list[Any] = [
        trainer.predict(model, ((x,) for x, _ in generator), steps=1).tolist() for _ in range(2)
    ]
    for _ in range(4):
        out.append(trainer.predict(model, ((x,) for x, _ in generator), steps=1).tolist())
        out.append(trainer.evaluate(model, generator, steps=1))
    out.append(trainer.fit(model, numbered(), steps_per_epoch=3, epochs=3).history["loss"])

    def five(first: int = 0) -> Iterator[Any]:
        for i in range(first, first + 5):
            yield X[i : i + 4], Y[i : i + 4]

    # A pass after the last batch has the two that Keras has looked at.
    model = compiled(keras.Input((4,)))
    for data, options in (
        (five(), {}),
        (five(), {"steps_per_epoch": 3}),
        (dataset(X, Y), {"validation_data": five(3)}),
        (dataset(X, Y), {"validation_data": numbered(), "validation_steps": 2}),
    ):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Your input ran out of data")
            out.append(trainer.fit(model, data, epochs=3, shuffle=False, **options).history)
    return out


class BreaksAt(Shuffles):
    """Breaks at the tenth batch that it reads, after two for their form."""

    def __init__(self, breaks: bool):
        super().__init__()
        self.left = 10 if breaks else -1

    def __getitem__(self, index: int) -> Any:
        self.left -= 1
        if self.left == 0:
            raise ValueError("broken on purpose")
        return super().__getitem__(index)


class Losses(keras.callbacks.Callback):
    def __init__(self, note: Callable[[Any], None]):
        super().__init__()
        self.note = note

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.note([float(batch), float(logs["loss"])])


def order_resumed_within_an_epoch(trainer: Any) -> Any:
    """The interrupted run and its successor make one run's order, and leave its generators."""
    if where == "workers":
        return []  # an error of one task ends all of them
    runs = []
    for broken in (False, True) if trainer.is_tfmw else (False,):
        order: list[list[float]] = []
        note = order.append
        options: dict[str, Any] = {"epochs": 3}
        if broken:
            options |= {"backup_dir": folder / "order", "backup_every": 1}
        for breaks in (True, False) if broken else (False,):
            keras.utils.set_random_seed(3)
            model = compiled(keras.Input((4,)))
            try:
                trainer.fit(model, BreaksAt(breaks), **options, callbacks=[Losses(note)])
                assert not breaks, "the first run did not break"
            except (tf.errors.OpError, ValueError):
                assert breaks
                assert len(order) == 7, order
        runs.append([order, model.get_weights(), random.random(), np.random.random()])
    for whole, resumed in zip(*runs, strict=True) if len(runs) == 2 else ():
        for one, other in zip(tf.nest.flatten(whole), tf.nest.flatten(resumed), strict=True):
            np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-6)
    return []


# ---------------------------------------------------------------- models that take whole batches


class InPairs(keras.layers.Layer):
    """A layer with the batch size as a constant, as SPADE has."""

    def call(self, x: Any) -> Any:
        mixed = keras.ops.reshape(x, (BATCH, 2, 2))
        return keras.ops.reshape(mixed - keras.ops.mean(mixed, axis=0), (BATCH, 4))


class JoinedGraphs(keras.Model):
    """(nodes of all graphs of a batch, the graph of each) -> a number for each graph."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(3, activation="tanh")
        self.last = keras.layers.Dense(1)

    def call(self, inputs: Any) -> Any:
        nodes, graphs = inputs
        return self.last(tf.math.segment_sum(self.dense(nodes), graphs))


def graphs() -> tf.data.Dataset:
    def batches() -> Iterator[Any]:
        for first in range(0, 20, 4):
            sizes = [1 + (first + i) % 5 for i in range(4 if first < 16 else 3)]
            nodes = np.sin(np.arange(sum(sizes) * 4, dtype="float32") + first).reshape(-1, 4)
            which: np.ndarray = np.repeat(np.arange(len(sizes)), sizes)
            yield (nodes, which), np.array(sizes, "float32")[:, None] / 3

    spec = (tf.TensorSpec([None, 4]), tf.TensorSpec([None], tf.int64)), tf.TensorSpec([None, 1])
    whole = tf.data.Dataset.from_generator(batches, output_signature=spec)
    return whole.apply(tf.data.experimental.assert_cardinality(5))


def averaged(model: Any, data: tf.data.Dataset, epochs: int) -> list[float]:
    """Trains on two batches in each step, their gradients averaged by examples; the losses."""
    losses = []
    for _ in range(epochs):
        total = seen = 0.0
        batches = iter(data)
        while pair := [batch for _ in range(2) if (batch := next(batches, None)) is not None]:
            examples = float(sum(len(y) for _, y in pair))
            with tf.GradientTape() as tape:
                shares = [model.compute_loss(x, y, model(x)) * len(y) for x, y in pair]
                loss = tf.add_n(shares) / examples
            weights = model.trainable_variables
            model.optimizer.apply(tape.gradient(loss, [w.value for w in weights]), weights)
            for (x, y), share in zip(pair, shares, strict=True):
                rows = len(tf.nest.flatten(x)[0])  # by which Keras weights what it reports
                total, seen = total + float(share) / len(y) * rows, seen + rows
        losses.append(total / seen)
    return losses


def whole_batches(trainer: Any) -> Any:
    out: list[Any] = []
    arrays = tf.data.Dataset.from_tensor_slices((X, Y)).batch(BATCH, drop_remainder=True)
    for data, model in (
        (arrays, compiled(keras.Input(batch_shape=(BATCH, 4)), InPairs(), optimizer="adam")),
        (graphs(), JoinedGraphs()),
    ):
        if isinstance(model, JoinedGraphs):
            model.compile("rmsprop", "mse")
            model(next(iter(data))[0])
        if trainer.is_tfmw:
            whole = {"split_batch": False}
            out.append(trainer.fit(model, data, epochs=3, **whole).history["loss"])
            out.append(trainer.evaluate(model, data, **whole))
            inputs = data.map(lambda x, y: (x,))
            out.append(as_lists(trainer.predict(model, inputs, **whole)))
        else:
            out.append(averaged(model, data, 3))
            out.append(trainer.evaluate(model, data))
            out.append(np.concatenate([model(x) for x, _ in data]).tolist())
        out.append([w.tolist() for w in model.get_weights()])
    return out


def batches_that_replicas_cannot_divide(trainer: Any) -> Any:
    """Errors of tfmw; nothing of Keras."""
    bank: np.ndarray = np.ones([10, 4], "float32")
    stored = tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)
    hidden = tf.data.Dataset.from_generator(
        lambda: (((X[:8], bank), Y[:8]) for _ in range(2)),
        output_signature=((tf.TensorSpec([None, 4]),) * 2, tf.TensorSpec([None, 1])),
    )
    if where == "workers" or not trainer.is_tfmw:
        return []  # an error of one task ends all of them
    errors = []
    for data in (stored.map(lambda x, y: ((x, bank), y)), hidden):
        model = keras.Sequential([keras.layers.Lambda(lambda x: x[0]), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        try:
            trainer.fit(model, data)
        except tfmw.errors.UsageError as e:
            errors.append(str(e))
    try:
        model = compiled(keras.Input((4,)), InPairs())
        trainer.fit(model, tf.data.Dataset.from_tensor_slices((X, Y)).batch(BATCH))
    except Exception as e:
        errors.append("\n".join(getattr(e, "__notes__", [])))
    return errors


# ---------------------------------------------------------------- callbacks and the model


class Looks(keras.callbacks.Callback):
    """Reads the model as one reads variables of TensorFlow, and changes it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        kernel, bias = self.model.layers[-1].weights
        self.seen += [int(self.model.optimizer.iterations), float(kernel.value[0, 0])]
        bias.assign(bias + 0.01)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.seen.append(self.model.layers[-1].kernel.numpy().tolist())
        self.model.set_weights([w * 0.9 for w in self.model.get_weights()])


def callbacks_see_an_ordinary_model(trainer: Any) -> Any:
    looks, model = Looks(), compiled(optimizer=keras.optimizers.Adam(0.01, epsilon=1e-3))
    history = trainer.fit(model, dataset(X, Y), epochs=2, callbacks=[looks])
    return [looks.seen, history.history["loss"], [w.tolist() for w in model.get_weights()]]


class Resets(keras.callbacks.Callback):
    """Counts anew from the third batch on."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == 1:
            self.model.reset_metrics()


def metrics_reset_by_a_callback(trainer: Any) -> Any:
    history = trainer.fit(compiled(metrics=["mae"]), dataset(X, Y), epochs=2, callbacks=[Resets()])
    return history.history


def swapped_moving_averages_of_weights(trainer: Any) -> Any:
    model = compiled(optimizer=keras.optimizers.SGD(0.05, use_ema=True, ema_momentum=0.5))
    swap = keras.callbacks.SwapEMAWeights(swap_on_epoch=True)
    data = dataset(X, Y)
    history = trainer.fit(model, data, epochs=2, callbacks=[swap], validation_data=data)
    return [history.history, [w.tolist() for w in model.get_weights()]]


class Fails(keras.utils.PyDataset):
    """Breaks at a batch, once."""

    def __init__(self, at: int | None):
        super().__init__()
        self.left = at

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        if self.left is not None and index == 5:
            self.left -= 1
            if self.left < 0:
                raise ValueError("broken on purpose")
        return X[index * 3 : index * 3 + 4], Y[index * 3 : index * 3 + 4]


def moving_averages_resumed_within_an_epoch(trainer: Any) -> Any:
    """A callback does not change the replicas' own averages before the first step."""
    if where == "workers":
        return []  # an error of one task ends all of them
    runs = []
    for broken in (False, True) if trainer.is_tfmw else (False,):
        keras.utils.set_random_seed(3)
        model = compiled(keras.Input((4,)), keras.layers.BatchNormalization(momentum=0.5))
        callback = keras.callbacks.LambdaCallback()
        options: dict[str, Any] = {"epochs": 2, "shuffle": False, "callbacks": [callback]}
        if broken:
            options |= {"backup_dir": folder / "backup", "backup_every": 3}
            try:
                trainer.fit(model, Fails(1), **options)
                raise AssertionError("the first run did not break")
            except (tf.errors.OpError, ValueError):
                pass
            callback.on_train_batch_begin = lambda batch, logs=None: None  # now it acts
        trainer.fit(model, Fails(None), **options)
        runs.append(model.get_weights())
    for whole, resumed in zip(*runs, strict=True) if len(runs) == 2 else ():
        np.testing.assert_allclose(resumed, whole, rtol=1e-6)
    return []


class Masks(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = keras.layers.Dropout(0.5)

    def call(self, x: Any) -> Any:
        return self.dropout(x, training=True)


def replicas_keep_seeds_of_their_own(trainer: Any) -> Any:
    masks = trainer.predict(Masks(), np.ones((8, 50)), batch_size=4, callbacks=[Numbers()]) > 0
    if trainer.is_tfmw:
        assert (masks[0::2] != masks[1::2]).any(axis=1).all()
        assert (masks[:4] != masks[4:]).any(axis=1).all()
    return []


class Noisy(keras.Model):
    """Noise of TensorFlow: on the gradient of a weight, and in predictions."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.generator = tf.random.Generator.from_seed(2)

    def call(self, x: Any) -> Any:
        return self.dense(x)

    def train_step(self, batch: Any) -> Any:
        x, y = batch
        kernel = self.dense.kernel
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self.dense(x) - y))
        gradient = tape.gradient(loss, kernel)
        noise = tf.random.normal(tf.shape(kernel)) + self.generator.normal(kernel.shape)
        self.optimizer.apply([gradient + noise], [kernel])
        return {"loss": loss}

    def predict_step(self, x: Any) -> Any:
        seeded = tf.random.uniform([tf.shape(x)[0], 3], seed=5)
        return tf.concat([seeded, self.generator.normal(tf.shape(x))], axis=1)


def noise_of_tensorflow(trainer: Any) -> Any:
    model = Noisy()
    model(X)
    model.compile("sgd")
    trainer.fit(model, X[:20], Y[:20], batch_size=4, shuffle=False)
    weights = [w.numpy().tolist() for w in model.weights]
    drawn = trainer.predict(model, X[:20], batch_size=4)
    assert len({row.tobytes() for row in drawn[:, :3]}) == 20
    assert len({row.tobytes() for row in drawn[:, 3:]}) == 20
    return weights


def states_of_examples(trainer: Any) -> Any:
    """Errors of each method, of tfmw; nothing of Keras."""
    if not trainer.is_tfmw:
        return []
    x: np.ndarray = np.ones([8, 5, 3], "float32")
    y: np.ndarray = np.ones([8, 1], "float32")
    errors = []
    for wrapper in (lambda layer: layer, keras.layers.Bidirectional):
        memory = wrapper(keras.layers.GRU(2, stateful=True))
        model = compiled(keras.Input(batch_shape=(4, 5, 3)), memory)
        for method in (trainer.fit, trainer.evaluate, trainer.predict):
            data = (x,) if method == trainer.predict else (x, y)
            try:
                method(model, *data, batch_size=4)
            except tfmw.errors.UsageError as e:
                errors.append(str(e))
    return errors


# ---------------------------------------------------------------- logs


class WithPsnr(keras.Sequential):
    """A log that is a function of metrics' results."""

    def compute_metrics(self, *args: Any, **kwargs: Any) -> Any:
        logs = super().compute_metrics(*args, **kwargs)
        return {**logs, "psnr": -10 * keras.ops.log10(logs["loss"] * logs["mae"])}


class WithLogs(WithPsnr):
    """Another one in a step."""

    def train_step(self, data: Any) -> Any:
        logs = super().train_step(data)
        both = tf.stack([logs["loss"], 2 * logs["mae"]])
        features = tf.reduce_mean(data[0], axis=0)  # of the last batch
        return {"perplexity": keras.ops.exp(logs["loss"]), "both": both, "x": features, **logs}


def logs_computed_from_logs(trainer: Any) -> Any:
    out: dict[str, Any] = {}
    for kind in (WithLogs, WithPsnr):
        model = kind([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", metrics=["mae"])
        options: dict[str, Any] = {"batch_size": BATCH, "shuffle": False, "epochs": 2}
        history = trainer.fit(model, X, Y / 9, validation_data=(X[:5], Y[:5]), **options).history
        history = {name: [as_lists(v) for v in values] for name, values in history.items()}
        evaluated = trainer.evaluate(model, X, Y / 9, return_dict=True)
        out[kind.__name__] = [list(history), history, list(evaluated), evaluated]
        batch = trainer.on_batch("train_on_batch", model, X[:5], Y[:5])
        out[f"{kind.__name__} on batch"] = [as_lists(value) for value in batch]
    return out


# ---------------------------------------------------------------- methods of the model's class


def methods_of_the_class(trainer: Any) -> Any:
    data = prepared_model.X, prepared_model.Y
    few = data[0][:5], data[1][:5]
    out: dict[str, Any] = {}
    for in_fit in (False, True):
        model = prepared(in_fit)
        out[f"fit {in_fit}"] = trainer.fit(model, *data, validation_data=few).history
        out[f"evaluate {in_fit}"] = trainer.evaluate(model, *data, return_dict=True)
        out[f"predict {in_fit}"] = as_lists(trainer.predict(model, data[0]))
        out[f"weights {in_fit}"] = [w.tolist() for w in model.get_weights()]
    # Keras's default, which is not the class's.
    out["epochs"] = trainer.fit(prepared(), *data, epochs=1).history
    model = prepared()
    for method in ("train_on_batch", "test_on_batch", "train_on_batch"):
        out[f"{method} {len(out)}"] = trainer.on_batch(method, model, *few)
    return out


class Pair(keras.Model):
    """Trains its two parts in turns, the second by a loop of batches."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = compiled(keras.Input((4,))), compiled(keras.Input((4,)))

    def call(self, x: Any) -> Any:
        return self.first(x) + self.second(x)

    def fit(self, x: Any, y: Any, **rest: Any) -> Any:
        before = self.first.fit(x, y, batch_size=BATCH, shuffle=False, **rest).history["loss"]
        loop = [float(self.second.train_on_batch(x[i : i + 5], y[i : i + 5])) for i in (0, 5)]
        losses = super().fit(x, y, batch_size=BATCH, shuffle=False, **rest).history["loss"]
        # Twice: the second training continues from the first.
        losses += super().fit(x, y, batch_size=BATCH, shuffle=False, **rest).history["loss"]
        return [before, loop, losses, self.predict(x[:3], verbose=0).tolist()]


def a_fit_of_several_trainings(trainer: Any) -> Any:
    model = Pair()
    model.compile("sgd", "mse")
    result = trainer.fit(model, X, Y)
    return [result, [w.tolist() for w in model.get_weights()]]


class FitsItself(keras.Sequential):
    """Calls what trains on all replicas by its name, as a class may that knows of it."""

    trainer: Any = None

    def fit(self, x: Any, y: Any, **rest: Any) -> Any:
        return tfmw.fit(self, x / 2, y, strategy=self.trainer.strategy, **rest)


def a_fit_that_calls_tfmw(trainer: Any) -> Any:
    model = FitsItself([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.trainer = trainer
    options: dict[str, Any] = {"batch_size": BATCH, "shuffle": False}
    first = model.fit(X, Y, verbose=0, **options).history
    return [first, trainer.fit(model, X, Y, **options).history]


def tasks_of_keras_hub(trainer: Any) -> Any:
    """Trains on raw data, which the tasks' own methods prepare."""
    from tests.helpers import hub_tasks  # takes seconds to import

    out = {}
    for task in hub_tasks.TASKS:
        model, data = task()
        few = tuple(part[:4] for part in data)
        options: dict[str, Any] = {"batch_size": BATCH, "shuffle": False, "epochs": 2}
        out[task.__name__] = {
            "history": trainer.fit(model, *data, validation_data=few, **options).history,
            "evaluate": trainer.evaluate(model, *data, batch_size=BATCH, return_dict=True),
            "predict": as_lists(trainer.predict(model, data[0], batch_size=BATCH)),
            "weights": [w.tolist() for w in model.get_weights()],
        }
    return out


SCENARIOS: list[Callable[[Any], Any]] = [
    a_trained_layer,
    sparse_inputs,
    ragged_inputs,
    inputs_that_are_none,
    predictions_without_one_shape,
    batches_of_several_shapes,
    read_by_threads,
    limits,
    validation_begins_anew,
    orders_of_several_calls,
    orders_where_epochs_end_within_passes,
    orders_of_seeds_that_set_seed_gives,
    halves_of_one_order,
    pipelines_that_keep_something,
    random_numbers_after_a_run,
    orders_drawn_without_a_seed,
    lengths_that_change,
    generators_over_several_calls,
    random_numbers_after_runs_on_other_data,
    order_resumed_within_an_epoch,
    whole_batches,
    batches_that_replicas_cannot_divide,
    replicas_without_an_example,
    batch_numbers,
    stopping,
    callbacks_see_an_ordinary_model,
    metrics_reset_by_a_callback,
    swapped_moving_averages_of_weights,
    moving_averages_resumed_within_an_epoch,
    replicas_keep_seeds_of_their_own,
    noise_of_tensorflow,
    states_of_examples,
    methods_of_the_class,
    a_fit_of_several_trainings,
    a_fit_that_calls_tfmw,
    logs_computed_from_logs,
    tasks_of_keras_hub,
]


def results(trainer: Any, names: list[str]) -> dict[str, Any]:
    out = {}
    for scenario in SCENARIOS:
        if scenario.__name__ not in names:
            continue
        keras.backend.clear_session()
        keras.utils.set_random_seed(1)
        try:
            out[scenario.__name__] = scenario(trainer)
        except Exception as e:
            if where == "workers":
                raise
            out[scenario.__name__] = f"{type(e).__name__}: {e}"
    return out


names = sys.argv[3:]
if where == "devices":  # after "by Keras alone" those that are compared with workers only
    split = names.index("by Keras alone")
    virtual_devices(2)
    mirrored = tfmw.strategies.mirrored(["CPU:0", "CPU:1"])
    _result.write(
        {"keras": results(Keras(), names), "tfmw": results(Tfmw(mirrored), names[:split])}
    )
else:
    tfmw.init()
    _result.write(results(Tfmw("auto"), names))
