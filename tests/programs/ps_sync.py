"""Synchronous updates on parameter servers, with all workers or with spare ones.

ps_sync.py [--aggregate=2] [--steps=20] [--late_from=FILE]

With --late_from the last worker's first gradient is of the first step, and comes when the others
are ten steps further: FILE, and FILE.begun, tell. It alone has a feature that is zero everywhere
else.
"""

import argparse

import keras
import numpy as np
import tensorflow as tf

import tfmw
from tests.programs import _of_keras, _result

parser = argparse.ArgumentParser()
parser.add_argument("--aggregate", type=int)
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--late_from", default="")
options = parser.parse_args()

cluster = tfmw.init()
strategy = tfmw.strategies.parameter_server(
    sync_replicas=True, replicas_to_aggregate=options.aggregate
)
rng = np.random.default_rng(0)
x = rng.normal(size=(64, 8)).astype(np.float32)
y = x[:, :3].argmax(axis=1).astype(np.int64)
x = np.pad(x, [(0, 0), (0, 1)])
workers = cluster.num_workers
LATE = 7  # the feature
SIGN = 8  # a column that is for `Signs` alone
BEGINS, AFTER_IT_HAS_BEGUN, TEN_STEPS_LATER = 1.0, 2.0, 3.0
if options.late_from:
    x[:, LATE] = 0.0


class Signs(keras.layers.Layer):
    """Orders the workers' computation by files; their input may be read long before."""

    def call(self, inputs):
        sign = inputs[0, SIGN]
        begun, late = f"{options.late_from}.begun", options.late_from
        waited = tf.switch_case(
            tf.cast(sign, tf.int32),
            {
                0: lambda: False,
                int(BEGINS): lambda: wait_for(late, after=write(begun)),
                int(AFTER_IT_HAS_BEGUN): lambda: wait_for(begun),
                int(TEN_STEPS_LATER): lambda: write(late),
            },
        )
        with tf.control_dependencies([waited]):
            return tf.identity(inputs[:, :SIGN])


def write(path):
    with tf.control_dependencies([tf.io.write_file(path, "")]):
        return tf.constant(False)


def wait_for(path, after=False):
    def now():
        # TensorFlow takes what is in a folder for a constant: a number that is drawn is none.
        return tf.gather([path], tf.random.uniform([], maxval=1, dtype=tf.int32))

    (waited,) = tf.while_loop(
        lambda _: tf.size(tf.io.matching_files(now())) == 0,
        lambda waited: (waited,),
        [tf.convert_to_tensor(after)],
    )
    return waited


def signed(number, batch):
    signs = {0: AFTER_IT_HAS_BEGUN, 10: TEN_STEPS_LATER}
    sign = sum(tf.where(number == at, sign, 0.0) for at, sign in signs.items())
    inputs, labels = batch
    return tf.concat([inputs[:, :SIGN], tf.fill([tf.size(labels), 1], sign)], axis=1), labels


def make():
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.Input((9,)),
            Signs(),
            keras.layers.Dense(16, activation="tanh"),
            keras.layers.Dense(3),
        ]
    )
    model.compile(
        keras.optimizers.Adam(0.01), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    return model


def read(context):
    """Each worker has a batch of its own, always the same; the last one is slow, and first late."""
    mine = slice(context.input_pipeline_id, None, workers)
    data = tf.data.Dataset.from_tensors((x[mine], y[mine])).repeat()
    if options.late_from and context.input_pipeline_id == 0:
        return data.enumerate().map(signed)
    if options.late_from and context.input_pipeline_id == workers - 1:
        marked = x[mine].copy()
        marked[:, LATE], marked[:, SIGN] = 1.0, BEGINS
        late = tf.data.Dataset.from_tensors((marked, y[mine]))
        return late.concatenate(data.map(with_much_to_compute))
    return data


def with_much_to_compute(a, b):
    much = tf.linalg.svd(tf.random.normal([300, 300]), compute_uv=False)
    return a + 0 * tf.reduce_sum(much), b


class CallsWhileLate(keras.callbacks.Callback):
    """Counts the calls between steps, at which signals and due backups are seen."""

    count = 0

    def on_train_batch_end(self, batch, logs=None):
        self.count += not tf.io.gfile.exists(options.late_from)


model, alone = make(), make()
calls = CallsWhileLate()
history = tfmw.fit(
    model, read, epochs=2, steps_per_epoch=options.steps, strategy=strategy, callbacks=[calls]
)
whole = tf.data.Dataset.from_tensors((x, y)).repeat()
_of_keras.fit(alone, whole, epochs=2, steps_per_epoch=options.steps, verbose=0)
scaled, refused = make(), ""
scaled.quantize("float8")
try:
    tfmw.fit(scaled, whole, steps_per_epoch=1, strategy=strategy)
except tfmw.UsageError as e:
    refused = str(e)
_result.write(
    {
        "float8": refused,
        "loss": history.history["loss"],
        "late": float(np.abs(model.weights[0].numpy() - make().weights[0].numpy())[LATE].max()),
        "iterations": int(model.optimizer.iterations.numpy()),
        "calls_while_late": calls.count,
        "dropped": sum(history.history["dropped_gradients"]),
        "off_by": max(
            float(np.abs(v.numpy() - w.numpy()).max())
            for v, w in zip(model.weights, alone.weights, strict=True)
        ),
        "moved": max(
            float(np.abs(v.numpy() - w.numpy()).max())
            for v, w in zip(model.weights, make().weights, strict=True)
        ),
    }
)
