"""Trains the same model without tfmw's ring, which cannot be joined; over it, through TCP and
through shared memory; in 16 bits; without.

Writes, of each time: how many exchanges were made over the ring, and a checksum of the weights.
And, with the ring and without: the same where workers began with weights of their own, and what
becomes of variables of many types that some workers have other values in.
"""

import hashlib
import logging
import os
import zlib
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfmw
from tests.programs._result import write
from tfmw import strategies
from tfmw.cluster import membership
from tfmw.cluster.group import Group
from tfmw.errors import UsageError
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


def forget() -> None:
    """Joins the ring again, as a new process would."""
    connection._connected_once, connection._ring = False, None


class RecordedWarnings(logging.Handler):
    """Keeps the warnings of tfmw."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


cluster = tfmw.init()
recorded = RecordedWarnings()
logging.getLogger("tfmw").addHandler(recorded)
connect = listener.connect


def refused(*arguments: Any) -> Any:
    raise ConnectionRefusedError("nobody listens here")


called_again_unseeded = called_again(cluster.index)  # before anything sets a global seed
forget()
if cluster.index == 1:
    setattr(listener, "connect", refused)  # noqa: B010
without = trained()
warned = list(recorded.messages)

tfmw.init(collectives="tfmw")  # the ring, or an error
forget()
joined = membership.joined()
assert joined is not None
try:  # not by a call of fit, whose error ends all tasks
    connection.ring_of(joined.strategy)
    required = {"error": ""}
except UsageError as error:
    required = {"error": str(error)}
joined.collectives = "auto"
listener.connect = connect
forget()
token = os.environ["TFMW_TOKEN"]  # which the launcher has set
if cluster.index == 1:
    os.environ["TFMW_TOKEN"] = "another"
recorded.messages.clear()
another_token = trained()
os.environ["TFMW_TOKEN"] = token
forget()
warned_of_token = list(recorded.messages)
os.environ[listener.SHARED_MEMORY] = "0"
over_tcp = trained()
del os.environ[listener.SHARED_MEMORY]
forget()
over = trained()
alone = trained(strategy="default")
compressed = trained(gradient_compression="bf16")
begun_apart = trained(5 + cluster.index)
agreed_over = agreed(cluster.index)
trained_over_ring = [trained_again(first) for first in (False, True)]

tfmw.init(collectives="ring")
chosen = trained()
begun_apart_chosen = trained(5 + cluster.index)
agreed_chosen = agreed(cluster.index)
called_again_seeded = called_again(cluster.index)
trained_over_tensorflow = [trained_again(first) for first in (False, True)]
write(
    {
        "called again": [called_again_unseeded, called_again_seeded],
        "trained again": [*trained_over_ring, *trained_over_tensorflow],
        "begun apart": begun_apart,
        "begun apart, chosen": begun_apart_chosen,
        "agreed": agreed_over,
        "agreed, chosen": agreed_chosen,
        "without": without,
        "required": required,
        "another token": another_token,
        "warned of the token": warned_of_token,
        "over TCP": over_tcp,
        "over": over,
        "alone": alone,
        "16 bits": compressed,
        "chosen": chosen,
        "warned": warned,
    }
)
