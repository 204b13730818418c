"""Many runs, each interrupted and resumed, beside the same run undisturbed.

resume_scenarios.py DIRECTORY [NAME...]

An interruption has the effects of SIGTERM: a backup after a step in the middle of an epoch, then
`Preempted`, here caught. The second call has a model, data and callbacks of its own. All tasks of a
cluster run each scenario. In one process, an error may interrupt a run too: then steps are lost and
made again.
"""

from __future__ import annotations

import hashlib
import os
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfmw
from tests.programs import _result
from tests.programs.counting import Counts
from tfmw.errors import Preempted
from tfmw.train.checkpoint.store import BackupStore

N, BATCH = 40, 8  # 5 steps in an epoch
rng = np.random.default_rng(0)
X = rng.normal(size=(N, 6)).astype(np.float32)
Y = (X @ rng.normal(size=(6, 1)) > 0).astype(np.float32)
X[:, 5] = np.arange(N)  # the number of each example, which `Counts` takes out


def layers(inside: list[Any]) -> keras.Model:
    return keras.Sequential([keras.Input((6,)), Counts(N), *inside])


def plain(optimizer: Any = "adam") -> keras.Model:
    model = layers([keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(1)])
    model.compile(optimizer, "mse", metrics=["mae"])
    return model


def slices() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((X, Y))


class Scenario:
    """One run: how it is made, and where it is interrupted.

    Args:
        model, fit: called for each run: a compiled model; the arguments of fit, fresh each time.
        at: global steps after which it is interrupted, each in a call of its own.
        epochs: of the run.
        every: how often it is backed up besides.
        lose: whether an error interrupts it, so that steps since the backup are made again.
        by_callback: whether a callback interrupts it, between steps; otherwise a thread.
    """

    def __init__(
        self,
        fit: Callable[[], dict[str, Any]],
        model: Callable[[], keras.Model] = plain,
        at: tuple[int, ...] = (8,),
        epochs: int = 3,
        every: Any = "epoch",
        lose: bool = False,
        exact: bool = True,
        by_callback: bool = True,
    ):
        self.by_callback = by_callback
        self.fit, self.model, self.at, self.epochs = fit, model, at, epochs
        self.every, self.lose, self.exact = every, lose, exact


class Lost(Exception):
    """Ends a call in the middle, steps after its last backup."""


class Interrupt(keras.callbacks.Callback):
    """Asks to leave, on the last task only, once this run has made `at` steps."""

    def __init__(self, at: int | None, lose: bool):
        super().__init__()
        # A function keeps them, for an attribute would be backed up and restored.
        self._over = lambda steps: at is not None and steps >= at
        self._lose = lose

    def on_train_batch_end(self, batch, logs=None):
        if not self._over(int(self.model.optimizer.iterations)):
            return
        if self._lose:
            raise Lost
        if cluster.index == cluster.num_workers - 1:
            os.kill(os.getpid(), signal.SIGTERM)


class InterruptFromAThread(keras.callbacks.Callback):
    """Asks to leave, as `Interrupt`, without being called between steps."""

    def __init__(self, at: int | None):
        super().__init__()
        self._at = lambda: at  # no attribute, as in `Interrupt`

    def on_train_begin(self, logs=None):
        if self._at() is not None and cluster.index == cluster.num_workers - 1:
            threading.Thread(target=self._watch, args=(self._at(),), daemon=True).start()

    def _watch(self, at: int) -> None:
        while int(self.model.optimizer.iterations) < at:
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGTERM)


def run(scenario: Scenario, folder: Path, interrupted: bool) -> dict[str, Any]:
    calls = [*scenario.at, None] if interrupted else [None]
    where = []
    for at in calls:
        keras.utils.set_random_seed(7)
        model = scenario.model()
        arguments = scenario.fit()
        mine = arguments.pop("callbacks", [])
        backup = tfmw.callbacks.BackupAndRestore(
            folder, scenario.every if interrupted else "epoch", delete_checkpoint=False
        )
        interrupt = (
            Interrupt(at, scenario.lose) if scenario.by_callback else InterruptFromAThread(at)
        )
        try:
            history = tfmw.fit(
                model,
                **arguments,
                epochs=scenario.epochs,
                verbose=0,
                seed=7,
                callbacks=[*mine, interrupt, backup],
            )
        except (Preempted, Lost):
            newest = BackupStore(folder).newest() if cluster.is_chief else None
            if newest is not None:
                where.append([newest.step, newest.record["feed"]["begun"]])
            continue
        assert at is None, f"the run was over before step {at}"
    weights = [np.asarray(v.value) for v in state_of(model)]
    return {
        "weights": hashlib.sha256(b"".join(w.tobytes() for w in weights)).hexdigest(),
        "values": [float(np.sum(np.abs(w.astype(np.float64)))) for w in weights],
        "history": {k: [float(v) for v in vs] for k, vs in history.history.items()},
        "epoch": history.epoch,
        "counts": counts_of(model),
        "steps": int(model.optimizer.iterations),
        "random": [random.random(), float(np.random.random())],
        "callbacks": [c.told() for c in mine if hasattr(c, "told")],
        "where": where,
    }


def state_of(model: keras.Model) -> list[Any]:
    from tfmw.compat import placement

    return placement.all_variables(model)


def counts_of(model: keras.Model) -> list[float] | None:
    for layer in model.layers:
        if isinstance(layer, Counts):
            return [round(float(c), 3) for c in np.asarray(layer.counts.value)]
    return None


# ---------------------------------------------------------------- the scenarios


SCENARIOS: dict[str, Scenario] = {}


def data(**options: Any) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Names a function of fit's arguments as a scenario."""

    def add(fit: Callable[[], Any]) -> Callable[[], Any]:
        SCENARIOS[fit.__name__] = Scenario(fit, **options)
        return fit

    return add


@data(at=(3, 8))
def shuffled():
    return {"x": slices().shuffle(N).batch(BATCH)}


@data(at=(5, 6))
def at_the_end_of_an_epoch():
    return {"x": slices().shuffle(N).batch(BATCH)}


@data(at=(7,), every=2)
def mapped_at_random():
    def noisy(x, y):
        return x + tf.pad(tf.random.uniform([5], maxval=0.1), [[0, 1]]), y

    return {"x": slices().shuffle(N).map(noisy, num_parallel_calls=2).batch(BATCH)}


@data(at=(4, 10))
def repeated_with_steps():
    # 3 steps in an epoch, 5 in a pass: epochs begin in the middle of passes.
    return {"x": slices().shuffle(N).repeat().batch(BATCH), "steps_per_epoch": 4}


@data(at=(6,))
def repeated_after_batch():
    return {"x": slices().shuffle(N).batch(BATCH).repeat(), "steps_per_epoch": 4}


@data(at=(3, 9))
def passes_longer_than_epochs():
    return {"x": slices().shuffle(N).batch(4), "steps_per_epoch": 5}


@data(at=(7, 12))
def arrays_shuffled():
    return {"x": X, "y": Y, "batch_size": BATCH}


@data(at=(7,))
def arrays_with_all_arguments():
    return {
        "x": X,
        "y": Y,
        "batch_size": BATCH,
        "validation_split": 0.2,
        "class_weight": {0: 1.0, 1: 3.0},
    }


@data(at=(8,))
def class_weight_of_a_dataset():
    return {"x": slices().shuffle(N).batch(BATCH), "class_weight": {0: 1.0, 1: 3.0}}


class Batches(keras.utils.PyDataset):
    """Shuffles itself after each epoch."""

    def __init__(self, **options):
        super().__init__(**options)
        self._random = np.random.default_rng(3)
        self._order = np.arange(N)

    def __len__(self):
        return N // BATCH

    def __getitem__(self, index):
        rows = self._order[index * BATCH : (index + 1) * BATCH]
        return X[rows], Y[rows]

    def on_epoch_end(self):
        self._random.shuffle(self._order)


@data(at=(3, 8))
def py_dataset():
    return {"x": Batches(), "shuffle": True}


@data(at=(8,))
def py_dataset_of_threads():
    return {"x": Batches(workers=2), "shuffle": False}


def generator():
    draw = np.random.default_rng(5)
    while True:
        rows = draw.permutation(N)
        for start in range(0, N, BATCH):
            yield X[rows[start : start + BATCH]], Y[rows[start : start + BATCH]]


@data(at=(3, 8))
def python_generator():
    return {"x": generator(), "steps_per_epoch": 5}


@data(at=(3, 8))
def dataset_of_a_generator():
    spec = tuple(tf.TensorSpec(a.shape[1:], a.dtype) for a in (X, Y))
    made = tf.data.Dataset.from_generator(
        lambda: iter(zip(X, Y, strict=True)), output_signature=spec
    )
    return {"x": made.shuffle(N).batch(BATCH)}


@data(at=(2, 6))
def filtered():
    # 30 of 40 remain, and nobody knows before the first epoch is over: 4 steps.
    return {"x": slices().shuffle(N).filter(lambda x, y: x[5] % 4 > 0).batch(BATCH)}


def records() -> str:
    path = Path(sys.argv[1]) / os.environ.get("TFMW_TASK", "alone").replace(" ", "_")
    path.mkdir(exist_ok=True)
    path /= "rows.tfrecord"  # one name on all workers, as of copies on their hosts
    with tf.io.TFRecordWriter(str(path)) as writer:
        for x, y in zip(X, Y, strict=True):
            writer.write(np.concatenate([x, y]).tobytes())
    return str(path)


@data(at=(3, 8))
def tfrecords():
    def parsed(text):
        row = tf.ensure_shape(tf.io.decode_raw(text, tf.float32), [7])
        return row[:6], row[6:]

    return {"x": tf.data.TFRecordDataset(records()).shuffle(N).map(parsed).batch(BATCH)}


def rows() -> Any:
    import grain  # here, and other libraries below: not every run has their scenarios

    return grain.MapDataset.source(list(zip(X, Y, strict=True))).shuffle(seed=4)


@data(at=(3, 8))
def grain_by_index():
    return {"x": rows().batch(BATCH)}


@data(at=(3, 8))
def grain_by_state():
    import grain

    whole = rows().filter(lambda row: True).to_iter_dataset()
    return {
        "x": grain.experimental.WindowShuffleIterDataset(whole, window_size=9, seed=1).batch(BATCH)
    }


@data(at=(8,))
def grain_loader():
    import grain

    return {
        "x": grain.DataLoader(
            data_source=list(zip(X, Y, strict=True)),
            sampler=grain.samplers.IndexSampler(N, shuffle=True, seed=2, num_epochs=1),
            operations=[grain.transforms.Batch(batch_size=BATCH)],
        )
    }


@data(at=(3, 8))
def hugging_face():
    import datasets

    arrow = datasets.Dataset.from_dict({"x": X.tolist(), "y": Y.tolist()})
    arrow = arrow.cast_column("x", datasets.Sequence(datasets.Value("float32")))
    pairs = tfmw.data.from_index(arrow).map(lambda row: (row["x"], row["y"]))
    return {"x": pairs.shuffle(N).batch(BATCH)}


@data(at=(8,))
def parquet():
    import pyarrow.parquet

    path = f"{records()}.parquet"
    x = pyarrow.array(X.tolist(), pyarrow.list_(pyarrow.float32()))
    pyarrow.parquet.write_table(pyarrow.table({"x": x, "y": Y.tolist()}), path, row_group_size=9)
    pairs = tfmw.data.from_parquet(path).map(lambda row: (row["x"], row["y"]))
    return {"x": pairs.shuffle(12).repeat(2).batch(BATCH)}


@data(at=(3, 8))
def interleaved_with_shuffles_inside():
    def part(number):
        chosen = tf.data.Dataset.from_tensor_slices((X, Y)).shard(4, number)
        return chosen.shuffle(10)

    made = tf.data.Dataset.range(4).shuffle(4).interleave(part, cycle_length=2)
    return {"x": made.shuffle(16).batch(BATCH)}


@data(at=(3, 8))
def of_input_context():
    def made(context):
        mine = slices().shard(context.num_input_pipelines, context.input_pipeline_id)
        mine = mine.shuffle(N, seed=4)
        if context.input_pipeline_id:
            mine = mine.take(13)  # row 24: this worker has fewer examples than the other
        return mine.batch(BATCH // context.num_replicas_in_sync)

    return {"x": made}


def normed() -> keras.Model:
    frozen = keras.layers.BatchNormalization()
    model = layers(
        [
            keras.layers.Dense(4),
            keras.layers.BatchNormalization(),
            frozen,
            keras.layers.Dropout(0.3),
            keras.layers.Dense(1),
        ]
    )
    frozen.moving_mean.assign([0.1, 0.2, 0.3, 0.4])
    frozen.trainable = False
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse", metrics=["mae"])
    return model


@data(model=normed, at=(3, 4, 11))
def layers_with_state():
    # 39 examples: the last batch has seven, which two replicas cannot share evenly.
    return {"x": slices().take(39).shuffle(N).batch(BATCH), "validation_data": (X, Y)}


@data(model=normed, at=(6,), every=2, by_callback=False)
def averages_of_replicas_between_steps():
    """No callback is called between steps, for which averages would be put together."""

    def late(x):
        time.sleep(0.02)  # so that the thread comes in time
        return x

    def slowly(x, y):
        return tf.ensure_shape(tf.py_function(late, [x], x.dtype), [None, 6]), y

    return {"x": slices().take(39).shuffle(N).batch(BATCH).map(slowly)}


def accumulating() -> keras.Model:
    return plain(keras.optimizers.Adam(gradient_accumulation_steps=3))


@data(model=accumulating, at=(2, 4))
def gradient_accumulation():
    return {"x": slices().shuffle(N).batch(BATCH)}


def averaging() -> keras.Model:
    return plain(
        keras.optimizers.Adam(0.01, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=3)
    )


@data(model=averaging, at=(4, 8))
def moving_averages_of_weights():
    return {"x": slices().shuffle(N).batch(BATCH)}


def schedule_free() -> keras.Model:
    """Its slots begin as the weights, and its step depends on the number of steps."""
    return plain(keras.optimizers.ScheduleFreeAdamW(0.01, warmup_steps=6))


@data(model=schedule_free, at=(4, 8))
def averages_of_schedule_free():
    return {"x": slices().shuffle(N).batch(BATCH), "validation_data": (X, Y)}


def scaled() -> keras.Model:
    # So large a scale overflows float16 at first: it is halved until it does not.
    inner = keras.optimizers.Adam(0.01)
    model = layers([keras.layers.Dense(4, dtype="mixed_float16"), keras.layers.Dense(1)])
    model.compile(
        keras.optimizers.LossScaleOptimizer(inner, initial_scale=2.0**20, dynamic_growth_steps=3),
        "mse",
    )
    return model


@data(model=scaled, at=(2, 6))
def loss_scale():
    return {"x": slices().shuffle(N).batch(BATCH)}


class Gan(keras.Model):
    """Two optimizers, a step of its own."""

    def __init__(self):
        super().__init__()
        self.counter = Counts(N)
        self.make = keras.layers.Dense(5)
        self.judge = keras.layers.Dense(1)
        self.noise = keras.random.SeedGenerator(11)

    def build(self, shape):
        self.counter.build(shape)
        self.make.build((None, 3))
        self.judge.build((None, 5))
        self.built = True

    def call(self, x, training=False):
        return self.judge(self.counter(x, training=training))

    def compile(self, maker, judger):
        super().compile(optimizer=judger, loss="mse")
        self.maker = maker
        self.maker.build(self.make.trainable_variables)
        self.optimizer.build(self.judge.trainable_variables)

    def train_step(self, batch):
        x, _ = batch
        noise = keras.random.normal((tf.shape(x)[0], 3), seed=self.noise)
        with tf.GradientTape(persistent=True) as tape:
            fake = self.judge(self.make(noise))
            real = self(x, training=True)
            judged = self.compute_loss(y=tf.ones_like(real), y_pred=real - fake)
            made = self.compute_loss(y=tf.ones_like(fake), y_pred=fake)
        self.optimizer.apply(
            tape.gradient(judged, self.judge.trainable_variables), self.judge.trainable_variables
        )
        self.maker.apply(
            tape.gradient(made, self.make.trainable_variables), self.make.trainable_variables
        )
        self._loss_tracker.update_state(judged)
        return {"loss": self._loss_tracker.result()}


def gan() -> keras.Model:
    model = Gan()
    model.build((None, 6))
    model.compile(keras.optimizers.Adam(0.01), keras.optimizers.SGD(0.01, momentum=0.5))
    return model


@data(model=gan, at=(4, 8))
def several_optimizers():
    return {"x": slices().shuffle(N).batch(BATCH)}


class Tally(keras.callbacks.Callback):
    """A user's own: a counter, a list, an array, and a learning rate that it sets."""

    def __init__(self):
        super().__init__()
        self.batches = 0
        self.losses: list[float] = []
        self.sums = np.zeros(3)
        self.best: dict[str, float] = {}
        self.begun = 0

    def on_train_begin(self, logs=None):
        self.begun += 1  # once in each call: a resumed run has begun once

    def on_epoch_begin(self, epoch, logs=None):
        self.model.optimizer.learning_rate = 0.9 * float(self.model.optimizer.learning_rate)

    def on_train_batch_end(self, batch, logs=None):
        self.batches += 1
        self.sums[batch % 3] += 1
        self.best["loss"] = min(self.best.get("loss", 1e9), logs["loss"])

    def on_epoch_end(self, epoch, logs=None):
        self.losses.append(logs["loss"])

    def told(self):
        return [self.batches, self.losses, self.sums.tolist(), self.best, self.begun]


class Told:
    """A Keras callback that can say what it holds."""

    names: tuple[str, ...] = ()

    def told(self):
        return [np.asarray(getattr(self, n), float).tolist() for n in self.names]


class Stopping(Told, keras.callbacks.EarlyStopping):
    names = ("wait", "stopped_epoch", "best", "best_epoch")


class Plateau(Told, keras.callbacks.ReduceLROnPlateau):
    names = ("wait", "cooldown_counter", "best")


class Checkpoint(Told, keras.callbacks.ModelCheckpoint):
    names = ("best",)
    chief_only = False  # to be told of on every task; each has a file of its own


def checkpoint() -> Checkpoint:
    task = os.environ.get("TFMW_TASK", "alone").replace(" ", "_")
    path = Path(sys.argv[1]) / f"{task}_{time.monotonic_ns()}.weights.h5"
    return Checkpoint(path, monitor="val_loss", save_best_only=True, save_weights_only=True)


@data(at=(7, 18, 23), epochs=10, model=lambda: plain(keras.optimizers.SGD(0.1)))
def callbacks():
    return {
        "x": slices().shuffle(N).batch(BATCH),
        "validation_data": (X, Y),
        "callbacks": [
            Stopping("val_loss", patience=2, restore_best_weights=True, min_delta=0.02),
            Plateau("val_loss", factor=0.5, patience=1, cooldown=1, min_delta=0.05),
            checkpoint(),
            Tally(),
        ],
    }


@data(at=(7, 18, 23), epochs=5)
def schedule_that_goes_on_from_its_last_rate():
    return {
        "x": slices().shuffle(N).batch(BATCH),
        "callbacks": [keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.7)],
    }


@data(at=(9,), every=2, lose=True)
def steps_made_again():
    return {"x": slices().shuffle(N).batch(BATCH), "callbacks": [Tally()]}


@data(at=(13,), every=4, lose=True, model=normed)
def steps_made_again_in_arrays():
    return {"x": X, "y": Y, "batch_size": BATCH, "callbacks": [Tally()]}


@data(at=(4,), every=100, lose=True)
def no_backup_yet():
    return {"x": slices().shuffle(N).batch(BATCH)}


cluster = tfmw.init()
if __name__ == "__main__":
    chosen = sys.argv[2:] or list(SCENARIOS)
    results: dict[str, Any] = {}
    for name in chosen:
        scenario = SCENARIOS[name]
        if scenario.lose and cluster.num_workers > 1:
            continue
        folder = Path(sys.argv[1])
        begin = time.monotonic()
        try:
            results[name] = {
                "plain": run(scenario, folder / f"{name}_plain", interrupted=False),
                "resumed": run(scenario, folder / name, interrupted=True),
                "epochs": scenario.epochs,
            }
        except Exception:
            if cluster.num_workers > 1:
                raise
            results[name] = {"error": traceback.format_exc()}
        print(f"{name}: {time.monotonic() - begin:.1f} s", flush=True)
    _result.write(results)
