"""A small fit for every engine: a model class that no module has, and a worker that is killed."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfmw
from tests.engines.contract import assert_equal, wait_for
from tests.helpers.cluster import wait_gone
from tfmw.engines import Engine, Job
from tfmw.launcher.call import ELSEWHERE

EPOCHS = 6
X = np.random.default_rng(0).normal(size=(96, 8)).astype("float32")
Y = (X.sum(axis=1) > 0).astype("int32")


class DiesOnce(keras.callbacks.Callback):
    """Kills worker 1 of a job's first attempt, once there is a file.

    Args:
        order: the file.
    """

    def __init__(self, order: str) -> None:
        super().__init__()
        self.order = order

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        died = Path(f"{self.order}.died")
        if _is_to_die(epoch) and not died.exists():
            wait_for(Path(self.order).exists)
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)


class WaitsForDeath(keras.callbacks.Callback):
    """Stops worker 1 of a job's first attempt, which leaves its pid in a file and waits.

    Args:
        pid: the file.
    """

    def __init__(self, pid: str) -> None:
        super().__init__()
        self.pid = pid

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if _is_to_die(epoch):
            Path(self.pid).with_suffix(".new").write_text(str(os.getpid()))
            Path(self.pid).with_suffix(".new").rename(self.pid)
            wait_for(lambda: False)


def _is_to_die(epoch: int) -> bool:
    here = ELSEWHERE in os.environ and os.environ["TFMW_TASK"] == "worker 1"
    return here and os.environ["TFMW_ATTEMPT"] == "0" and epoch == 2


def make_model() -> Any:
    class Network(keras.Model):  # travels with the call
        def __init__(self) -> None:
            super().__init__()
            self.hidden = keras.layers.Dense(16, activation="relu")
            self.out = keras.layers.Dense(2)

        def call(self, x: Any) -> Any:
            return self.out(self.hidden(x))

    keras.utils.set_random_seed(1)
    model = Network()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
    return model


class LeavesAFile(keras.callbacks.Callback):
    """Leaves a file at the end of the second epoch, then waits for another one.

    Args:
        reached: the file.
        go: the other file.
    """

    def __init__(self, reached: str, go: str) -> None:
        super().__init__()
        self.reached, self.go = reached, go

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if epoch == 1:
            Path(self.reached).touch()
            wait_for(Path(self.go).exists)


def fit(on: Any, *callbacks: keras.callbacks.Callback, workers: Any = 2) -> tuple[Any, Any]:
    """(History, model) of a fit on two workers."""
    model = make_model()
    history = tfmw.fit(
        model, X, Y, epochs=EPOCHS, batch_size=32, workers=workers, on=on, callbacks=list(callbacks)
    )
    return history, model


def fits_in_workers_that_stay(engine: Engine, folder: Path, expected: tuple[Any, Any]) -> None:
    """Several calls of one set of workers; see the contract's `test_workers_that_stay`."""
    with tfmw.Workers(2, on=engine) as workers:
        before = workers.run(os.getpid)
        assert_equal(fit("local", workers=workers), expected)
        history, model = fit("local", workers=workers)  # another model of the same name
        assert_equal((history, model), expected)
        scores = tfmw.evaluate(model, X, Y, batch_size=32, verbose=0, workers=workers)
        np.testing.assert_allclose(scores, model.evaluate(X, Y, verbose=0), rtol=1e-5)

        def interrupt() -> None:
            wait_for((folder / "reached").exists)
            os.kill(os.getpid(), signal.SIGINT)
            (folder / "go").touch()

        thread = threading.Thread(target=interrupt)
        thread.start()
        model = make_model()
        waits = LeavesAFile(str(folder / "reached"), str(folder / "go"))
        with pytest.raises(KeyboardInterrupt):
            workers.fit(model, X, Y, epochs=10_000, batch_size=32, verbose=0, callbacks=[waits])
        thread.join()
        assert 6 <= model.optimizer.iterations < 30_000
        assert workers.run(os.getpid) == before
        with pytest.raises(KeyError, match="no such key"):
            workers.run({}.__getitem__, "no such key")
        after = workers.run(os.getpid)
        assert set(after).isdisjoint(before)
    assert wait_gone(after, timeout_s=60) == []


def fit_of_files(on: Any, folder: Path) -> tuple[Any, Any]:
    """Trains as `fit` does on examples in files; each worker leaves a file named after its own."""
    place = str(folder)
    for number, (x, y) in enumerate(zip(np.split(X, 4), np.split(Y, 4), strict=True)):
        with tf.io.TFRecordWriter(f"{place}/{number}.records") as writer:
            for features, label in zip(x, y, strict=True):
                writer.write(features.tobytes() + label.tobytes())

    def read(context: tf.distribute.InputContext) -> tf.data.Dataset:
        # The caller makes this pipeline, too, for the shapes of its model, and reads nothing of it.
        def seen(record: bytes) -> bytes:
            Path(place, os.environ.get("TFMW_TASK", "the caller")).touch()
            return record

        def decode(record: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            record = tf.ensure_shape(tf.numpy_function(seen, [record], tf.string), [])
            features = tf.io.decode_raw(tf.strings.substr(record, 0, X[0].nbytes), tf.float32)
            label = tf.io.decode_raw(tf.strings.substr(record, X[0].nbytes, 4), tf.int32)
            return tf.ensure_shape(features, [X.shape[1]]), tf.ensure_shape(label, [1])[0]

        records = tf.data.TFRecordDataset([f"{place}/{number}.records" for number in range(4)])
        own = records.shard(context.num_input_pipelines, context.input_pipeline_id)
        return own.map(decode).batch(context.get_per_replica_batch_size(32))

    model = make_model()
    return tfmw.fit(model, read, epochs=EPOCHS, workers=2, on=on), model


def once_backed_up(engine: Engine, then: Callable[[Job], object]) -> threading.Thread:
    """Calls a function, in a thread, once the only new job of the engine keeps a backup."""
    before = {job.id for job in tfmw.jobs(engine)}

    def run() -> None:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            for job in tfmw.jobs(engine):
                if job.id not in before and job.details().get("backup"):
                    then(job)
                    return
            time.sleep(0.1)

    thread = threading.Thread(target=run)
    thread.start()
    return thread
