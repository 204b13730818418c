"""Trains the same model, by over_ring.py WAY: over tfmw's ring ("auto"), through TCP and through
shared memory, and in 16 bits; by TensorFlow ("grpc"); or over a ring that no neighbour listens for
("refused").

Writes, of each time: how many exchanges were made over the ring, and a checksum of the weights.
And, with the ring and without: the same where workers began with weights of their own, and what
becomes of variables of many types that some workers have other values in.
"""

import contextlib
import hashlib
import os
import sys
import zlib
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfmw
from tests.programs._result import write
from tfmw import strategies
from tfmw.cluster import membership
from tfmw.cluster.group import Group
from tfmw.train.mirrored import agreement
from tfmw.train.mirrored.collectives import connection, listener
from tfmw.train.mirrored.collectives.ring import Ring

ALIKE = ("alike", "empty")


def model(seed: int) -> keras.Model:
    keras.utils.set_random_seed(seed)
    layers = keras.layers
    made = keras.Sequential(
        [
            keras.Input((6,), dtype="int32"),
            layers.Embedding(50, 8),
            layers.GlobalAveragePooling1D(),
            layers.Dense(3),
        ]
    )
    made.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return made


def trained(seed: int = 5, **options: Any) -> dict[str, Any]:
    """Result of a training of 2 epochs, whose last batch is a small one."""
    before = exchanges()
    trainee = model(seed)
    random = np.random.default_rng(0)
    words, labels = random.integers(0, 50, (70, 6)), random.integers(0, 3, 70)
    data = tf.data.Dataset.from_tensor_slices((words, labels)).batch(16)
    tfmw.fit(trainee, data, epochs=2, verbose=0, seed=1, **options)
    digest = hashlib.sha256(b"".join(w.tobytes() for w in trainee.get_weights())).hexdigest()
    return {
        "exchanges": exchanges() - before,
        "links": links(),
        "weights": digest,
        "values": [w.tolist() for w in trainee.get_weights()],
    }


def agreed(rank: int) -> dict[str, Any]:
    """The names of variables that differed, and a checksum of each one's value afterwards."""
    strategy = strategies.current_strategy()
    values: dict[str, Any] = {
        "alike": np.arange(5.0),
        "empty": np.zeros([0, 3]),
        "float32": np.array([[-0.0, 1.5], [np.nan, 3.0]]) * (1 + rank),
        "float64": np.full(200_000, 1 / 3 + rank),
        "bfloat16": np.array([1.0, 2.0 + rank]),
        "int64": np.array(2**62 + rank),
        "bool": np.array([True, rank > 0]),
        "uint8": np.array([rank, 7]),
    }
    variables = [
        keras.Variable(value, dtype="float32" if name in ALIKE else name, name=name)
        for name, value in values.items()
    ]
    different = agreement.agree(Group.of(strategy), strategy, variables)
    return {
        "different": [variable.name for variable in different],
        "values": {v.name: zlib.crc32(np.asarray(v.value).tobytes()) for v in variables},
    }


def called_again(rank: int) -> list[list[float]]:
    """[loss, number of calls that were traced] of three evaluations; the last with a change."""
    called: list[Any] = []

    class Noted(keras.layers.Layer):
        scale = 1.0

        def call(self, x: Any) -> Any:
            called.append(self)
            return x * self.scale

    trainee = keras.Sequential([keras.Input((2,)), Noted(), keras.layers.Dense(1)])
    trainee.compile("sgd", "mse")
    found = []
    for change in (False, False, True):
        if change and rank == 1:
            trainee.compile("sgd", "mse")
        called.clear()
        loss = tfmw.evaluate(trainee, np.ones((6, 2)), np.zeros(6), verbose=0)
        found.append([float(loss), len(called)])
    return found


def called_by_users(rank: int) -> dict[str, Any]:
    """Results of calls of tf.distribute in a script of a user, on this replica."""
    strategy = strategies.current_strategy()
    total, mean = tf.distribute.ReduceOp.SUM, tf.distribute.ReduceOp.MEAN
    own = tf.constant([1.0, 2.5]) * (rank + 1)
    slices = tf.IndexedSlices(own[None], tf.constant([rank]), tf.constant([3, 2]))
    with strategy.scope():
        begun = tf.Variable(own)
        seen = tf.Variable(
            0.0,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.SUM,
            trainable=False,
        )

    def on_replica() -> Any:
        replica = tf.distribute.get_replica_context()
        seen.assign_add(own[0])
        sparse = replica.all_reduce(total, slices)
        return {
            "sum": replica.all_reduce(total, own),
            "mean": replica.all_reduce(mean, own),
            "nested": replica.all_reduce(total, {"a": own[0], "b": [2 * own]}),
            "sparse": tf.convert_to_tensor(sparse),
            "gathered": replica.all_gather(tf.ones([rank + 1, 2]) * own[0], axis=0),
            "columns": replica.all_gather(tf.ones([2, rank + 1]) * own[0], axis=1),
            "merged": replica.merge_call(lambda s, v: s.extended.reduce_to(total, v, begun), [own]),
        }

    found = strategy.run(tf.function(on_replica))
    found["eager"] = strategy.run(lambda: tf.distribute.get_replica_context().all_reduce(mean, own))
    found["reduced"] = strategy.reduce(total, strategy.run(lambda: own), axis=None)
    found["begun"], found["seen"] = begun.read_value(), seen.read_value()
    data = tf.data.Dataset.range(8).batch(4)
    batches = strategy.experimental_distribute_dataset(data)
    found["data"] = [strategy.experimental_local_results(batch)[0] for batch in batches]
    found["replicas"] = strategy.num_replicas_in_sync
    return {
        name: tf.nest.map_structure(lambda v: np.asarray(v).tolist(), value)
        for name, value in found.items()
    }


def listening() -> int:
    """Number of TCP ports on which this process listens."""
    own = set()
    for file in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            own.add(os.readlink(file))
    # proc(5): the state is the fourth field, 0A: listening; the inode is the tenth
    lines = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path("/proc/net", name).read_text().splitlines()[1:]
    ]
    return sum(line[3] == "0A" and f"socket:[{line[9]}]" in own for line in lines)


class EvaluateToo(keras.callbacks.Callback):
    """Evaluates within a call, and keeps the random states from before and afterwards."""

    def __init__(self, data: Any) -> None:
        super().__init__()
        self.data = data
        self.states: list[list[int]] = []

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        state = self.model.layers[0].seed_generator.state
        for evaluate in (False, True):
            if evaluate:
                tfmw.evaluate(self.model, self.data, verbose=0)
            self.states.append(np.asarray(state.value).tolist())


def trained_again(evaluated_first: bool) -> dict[str, Any]:
    """Weights of a model with moving averages after two calls of fit on shares that differ."""
    keras.utils.set_random_seed(3)
    random = np.random.default_rng(1)
    x = random.normal(size=(22, 4)).astype("float32")
    data = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(7)  # 4 and 3, then 1 and 0
    norm = keras.layers.BatchNormalization(momentum=0.95)
    trainee = keras.Sequential([keras.Input((4,)), keras.layers.Dropout(0.2), norm])
    trainee.add(keras.layers.Dense(1))
    trainee.compile(keras.optimizers.SGD(0.1), "mse")
    if evaluated_first:
        tfmw.evaluate(trainee, data, verbose=0)
    within = EvaluateToo(data)
    for callbacks in ([], [within]):
        tfmw.fit(trainee, data, epochs=2, verbose=0, callbacks=callbacks)
    return {"weights": [w.tolist() for w in trainee.get_weights()], "states": within.states}


def exchanges() -> int:
    """Number of operations on gradients and weights over the ring so far."""
    counts = {} if connection._ring is None else connection._ring.counts
    return sum(number for what, number in counts.items() if what not in ("metrics", "decisions"))


def links() -> str:
    """The kind of the link to the next worker."""
    ring = connection._ring
    return type(ring._next).__name__ if isinstance(ring, Ring) else type(ring).__name__


def rejoin() -> None:
    """Joins the ring again."""
    joined = membership.joined()
    assert joined is not None
    if connection._ring is not None:
        connection._ring.close()
    connection._ring, connection._connected = None, False
    joined.strategy.extended._transport.cache_clear()  # of the strategy's own reductions


def refused(*arguments: Any) -> Any:
    raise ConnectionRefusedError("nobody listens here")


def over() -> dict[str, Any]:
    found: dict[str, Any] = {
        "called again": called_again(cluster.index)
    }  # before anything sets a global seed
    os.environ[listener.SHARED_MEMORY] = "0"
    rejoin()
    found["over TCP"] = trained()
    del os.environ[listener.SHARED_MEMORY]
    rejoin()
    return found | {
        "over": trained(),
        "alone": trained(strategy="default") if cluster.is_chief else {},
        "16 bits": trained(gradient_compression="bf16"),
        "begun apart": trained(5 + cluster.index),
        "agreed": agreed(cluster.index),
        "trained again": trained_again(evaluated_first=False),
        "called by users": called_by_users(cluster.index),
        "listening": listening(),
    }


def not_over() -> dict[str, Any]:
    return {
        "over": trained(),
        "begun apart": trained(5 + cluster.index),
        "agreed": agreed(cluster.index),
        "called again": called_again(cluster.index),
        "trained again": trained_again(evaluated_first=True),
        "called by users": called_by_users(cluster.index),
    }


way, index = sys.argv[1], int(os.environ["TFMW_TASK"].split()[1])
if index == 1 and way == "refused":
    setattr(listener, "connect", refused)  # noqa: B010
cluster = tfmw.init(collectives="grpc" if way == "grpc" else "auto")
write(not_over() if way == "grpc" else over())
