"""Trains a recommender with a large hashed embedding on parameter servers, or on one process.

    tfmw run --workers 2 --ps 2 recipes/recommender.py --strategy=parameter_server
    python recipes/recommender.py --max_steps=300

Two towers, one for users and one for items, look up their ids in hashed tables. The score is the
product of the two towers' outputs, plus a wide part with one weight for each user and each item.
The data follows a rule, so the best possible accuracy is known:

    each user and each item has one of 8 tastes, a hash of its id;
    a user likes an item with probability 0.95 if the tastes are the same, else 0.05.

No model can exceed 0.95, and this one reaches about 0.94.

With --min_shard_bytes larger tables are divided over the servers, and no other process has their
rows: a table may be larger than the memory of the coordinator's machine. In the end the script
prints the memory that the coordinator took. Compare:

    tfmw run --workers 1 --ps 2 recipes/recommender.py --strategy=parameter_server --max_steps=50 \
        --buckets=1000000 --width=32 [--min_shard_bytes=1048576]
"""

from __future__ import annotations

import math
from pathlib import Path

import common
import keras
import tensorflow as tf
from absl import flags

import tfmw

FLAGS = flags.FLAGS
flags.DEFINE_integer("ids", 500, "Number of users, and of items.", 2)
flags.DEFINE_integer("buckets", 1 << 14, "Rows of each hashed table.", 2)
flags.DEFINE_integer("width", 16, "Columns of each table.", 1)
# Enough data to reach nearly the best accuracy.
FLAGS.set_default("batch_size", 512)
FLAGS.set_default("epochs", 4)

MB = 1 << 20
TASTES = 8
BEST_ACCURACY = 0.95
STEPS_PER_EPOCH = 200


def main() -> None:
    """Trains, reports and exports by the flags."""
    cluster = common.init()  # before any TensorFlow op
    train = make_data(1, FLAGS.batch_size).take(STEPS_PER_EPOCH)
    test = make_data(2, 1024).take(4)
    before = memory("VmRSS")
    model = make_model(FLAGS.buckets, FLAGS.width)
    train, epochs, steps = common.limits(train, cluster)
    history = tfmw.fit(
        model,
        train,
        epochs=epochs,
        steps_per_epoch=steps,
        validation_data=test,
        strategy=FLAGS.strategy,
        backup_dir=FLAGS.backup_dir,
        export_dir=FLAGS.export_dir,
    )
    common.report(history, cluster)
    if cluster.is_chief:
        size = bytes_of([*model.weights, *model.optimizer.variables])
        grown = memory("VmHWM") - before
        print(f"weights and slots: {size / MB:.0f} MB", flush=True)
        print(f"memory that this process took for them: {grown / MB:.0f} MB", flush=True)


def make_data(seed: int, size: int) -> tf.data.Dataset:
    """Infinite batches: ({"user": string [size], "item": string [size]}, liked int64 [size])."""

    def batch(seeds: tf.Tensor) -> tuple[dict[str, tf.Tensor], tf.Tensor]:
        ids = tf.random.stateless_uniform([size], seeds, 0, FLAGS.ids, tf.int64)
        user = tf.strings.join(["u", tf.strings.as_string(ids)])
        # Half of the items have the user's taste, so that the two labels are equally frequent.
        same = tf.random.stateless_uniform([size, 1], seeds + 1) < 0.5
        tries = tf.random.stateless_uniform([size, 32], seeds + 2, 0, FLAGS.ids, tf.int64)
        items = tf.strings.join(["i", tf.strings.as_string(tries)])
        fits = tf.equal(tf.equal(taste(items), taste(user)[:, None]), same)
        item = tf.gather(items, tf.argmax(tf.cast(fits, tf.int32), axis=1), batch_dims=1)
        chance = tf.where(taste(item) == taste(user), BEST_ACCURACY, 1 - BEST_ACCURACY)
        liked = tf.random.stateless_uniform([size], seeds + 3) < chance
        return {"user": user, "item": item}, tf.cast(liked, tf.int64)

    seeds = tf.data.Dataset.random(seed).batch(2, drop_remainder=True)
    return seeds.map(lambda pair: batch(pair), num_parallel_calls=tf.data.AUTOTUNE)


def taste(ids: tf.Tensor) -> tf.Tensor:
    """The taste of each id: int64, of the shape of `ids`."""
    return tf.strings.to_hash_bucket_strong(ids, TASTES, [7, 11])


def memory(field: str) -> int:
    """Resident memory of this process in bytes: now (VmRSS), or the peak (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(dict(line.split(":", 1) for line in lines)[field].split()[0]) * 1024


def bytes_of(variables: list[keras.Variable]) -> int:
    """Size of the variables' values in bytes, on any device."""
    return sum(math.prod(v.shape) * tf.as_dtype(v.dtype).size for v in variables)


def make_model(buckets: int, width: int) -> keras.Model:
    """Two towers and a wide part. Its inputs are ids as strings, which it hashes."""
    inputs, towers, wide = {}, [], []
    for name in ("user", "item"):
        inputs[name] = keras.Input((), dtype="string", name=name)
        bucket = keras.layers.Hashing(buckets, name=f"{name}_bucket")(inputs[name])
        begin = keras.initializers.RandomNormal(stddev=0.5)
        table = keras.layers.Embedding(buckets, width, begin, name=f"{name}_table")
        towers.append(keras.layers.Dense(width, name=f"{name}_tower")(table(bucket)))
        wide.append(keras.layers.Embedding(buckets, 1, name=f"{name}_wide")(bucket))
    match = keras.layers.Dot(axes=-1, name="match")(towers)
    logit = keras.layers.Add(name="logit")([match, *wide])
    output = keras.layers.Activation("sigmoid", name="liked")(logit)
    model = keras.Model(inputs, output)
    model.compile(keras.optimizers.Adam(0.01), "binary_crossentropy", metrics=["accuracy"])
    return model


if __name__ == "__main__":
    common.run(main)
