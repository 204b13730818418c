"""Trains on parameter servers, and fails or is told to leave once in each attempt.

ps_restart.py --backup=DIR [--sync]

In the first attempt each worker waits for 8 seconds for its tenth batch.
The chief raises an error at the end of epoch 2, then of epoch 3; it gets SIGTERM after the first
steps of epoch 3, then in the validation of the last epoch.
"""

import argparse
import json
import os
import signal

import keras
import numpy as np
import tensorflow as tf

import tfmw

EPOCHS, STEPS = 5, 60

parser = argparse.ArgumentParser()
parser.add_argument("--backup")
parser.add_argument("--sync", action="store_true")
options = parser.parse_args()
attempt = int(os.environ["TFMW_ATTEMPT"])

tfmw.init()
rng = np.random.default_rng(0)
x = rng.normal(size=(480, 8)).astype(np.float32)
y = x[:, :3].argmax(axis=1).astype(np.int64)


class Disturb(keras.callbacks.Callback):
    epoch = 0

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if attempt == 2:
            print(f"epoch {self.epoch + 1}: batch {batch + 1}, told to leave", flush=True)
            os.kill(os.getpid(), signal.SIGTERM)

    def on_epoch_end(self, epoch, logs=None):
        print(f"epoch {epoch + 1} ends at {int(self.model.optimizer.iterations)}", flush=True)
        if (attempt, epoch + 1) in ((0, 2), (1, 3)):
            raise ValueError(f"at the end of epoch {epoch + 1}")


validated: list[bool] = []


def validating() -> np.int64:
    """Called for each batch of validation data; tells to leave in that of the last epoch."""
    if not validated:
        print("validation begins", flush=True)
    validated.append(True)
    if attempt == 3 and len(validated) == 1 + 2 * 24:  # of the third validation, that of epoch 5
        os.kill(os.getpid(), signal.SIGTERM)
    return np.int64(0)


def noted(features, labels):
    with tf.control_dependencies([tf.numpy_function(validating, [], tf.int64)]):
        return tf.identity(features), labels


def read(context):
    """A worker's pipeline, without Python code: it is sent to the workers."""
    batches = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(480).batch(24).repeat()
    if attempt > 0:
        return batches
    late = tf.data.experimental.to_variant(batches.take(1))
    spec = batches.element_spec
    late = tf.raw_ops.SleepDataset(
        input_dataset=late,
        sleep_microseconds=8_000_000,
        output_types=[s.dtype for s in spec],
        output_shapes=[s.shape for s in spec],
    )
    late = tf.data.experimental.from_variant(late, spec)
    return batches.take(9).concatenate(late).concatenate(batches)


keras.utils.set_random_seed(1)
model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, "relu"), keras.layers.Dense(3)])
model.compile(
    keras.optimizers.Adam(0.01),
    keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)
history = tfmw.fit(
    model,
    read,
    epochs=EPOCHS,
    steps_per_epoch=STEPS,
    validation_data=tf.data.Dataset.from_tensor_slices((x, y)).batch(20).map(noted).prefetch(0),
    strategy=tfmw.strategies.parameter_server(sync_replicas=options.sync),
    callbacks=[Disturb()],
    backup_dir=options.backup,
    verbose=0,
)
found = {
    "iterations": int(model.optimizer.iterations),
    "history": {name: len(values) for name, values in history.history.items()},
    "evaluated": tfmw.evaluate(model, x, y, verbose=0, return_dict=True)["accuracy"],
}
print(f"result {json.dumps(found)}", flush=True)
