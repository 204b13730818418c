"""Loops of one's own: `on_batch.py devices|workers|differences`.

Each loop runs with Keras's methods in one process, and with tfmw's on two replicas. With
"differences" workers pass other batches than each other, or change weights on one of them only.
"""

import re
import sys
import types
from pathlib import Path
from typing import Any

import keras
import numpy as np

import tfmw
from tests.matrix.columns import virtual_devices
from tests.programs import _result
from tfmw.compat.kept import kept_with

where = sys.argv[1]
if where == "devices":
    virtual_devices(2)
strategy: Any = tfmw.strategies.mirrored(["CPU:0", "CPU:1"]) if where == "devices" else "auto"

KERAS = types.SimpleNamespace(
    train=lambda model, *a, **k: model.train_on_batch(*a, **k),
    test=lambda model, *a, **k: model.test_on_batch(*a, **k),
    predict=lambda model, x: model.predict_on_batch(x),
)
TFMW = types.SimpleNamespace(
    train=lambda model, *a, **k: tfmw.train_on_batch(model, *a, strategy=strategy, **k),
    test=lambda model, *a, **k: tfmw.test_on_batch(model, *a, strategy=strategy, **k),
    predict=tfmw.predict_on_batch,
)


def data(rows: int, seed: int = 0, width: int = 4) -> Any:
    return np.random.default_rng(seed).normal(size=(rows, width)).astype("float32")


def numbers(*values: Any) -> list[float]:
    return [float(v) for value in values for v in np.ravel(value)]


def weights(*models: Any) -> list[float]:
    return numbers(*(w for model in models for w in model.get_weights()))


def classifier(*layers: Any, optimizer: str = "adam") -> Any:
    model = keras.Sequential([keras.Input((4,)), *layers, keras.layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"])
    return model


def batches_of_many_sizes(api: Any) -> list[float]:
    """Whole batches, an uneven one, one with an example for a single replica."""
    model = classifier(keras.layers.Dense(8, "relu"))
    out = []
    for step, rows in enumerate([8, 7, 1, 8, 6, 2]):
        x: Any = data(rows, step)
        y: Any = np.arange(rows) % 3
        out += numbers(api.train(model, x, y))
        out += numbers(api.test(model, x, y))
        out += numbers(model.metrics[0].result(), model.optimizer.iterations)
        out += weights(model)
    return out


def weighted_examples(api: Any) -> list[float]:
    model = classifier(keras.layers.Dense(8, "relu"))
    x: Any = data(8)
    y: Any = np.arange(8) % 3
    logs = api.train(model, x, y, class_weight={0: 1.0, 1: 3.0, 2: 0.5}, return_dict=True)
    again = api.train(model, x, y, sample_weight=np.arange(8, dtype="float32"), return_dict=True)
    return numbers(
        *(each[name] for each in (logs, again) for name in ("loss", "accuracy")), weights(model)
    )


def clipped_weights(api: Any) -> list[float]:
    """Trains as a Wasserstein GAN does: the loop clips weights between the steps."""
    model = classifier()
    for step in range(3):
        api.train(model, data(6, step), np.arange(6) % 3)
        for weight in model.weights:
            weight.assign(keras.ops.clip(weight, -0.1, 0.1))
    return weights(model)


def of_docs(number: int, *models: str) -> Any:
    """A program of the docs, as it stands there or with Keras's methods in place of tfmw's."""

    def loop(api: Any) -> list[float]:
        page = (Path(__file__).parents[2] / "docs/howto/custom-loops.md").read_text()
        program = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[number]
        if api is KERAS:
            program = re.sub(r"tfmw\.(\w+_on_batch)\((\w+), ", r"\2.\1(", program)
            assert "tfmw." not in program
        elif where == "devices":
            program = re.sub(
                r"(tfmw\.train_on_batch\(.*)\)\n", r"\1, strategy=strategy)\n", program
            )
        variables: dict[str, Any] = {"strategy": strategy}
        exec(program, variables)
        return weights(*(variables[model] for model in models))

    return loop


def own_step(api: Any) -> list[float]:
    class Own(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.dense = keras.layers.Dense(4)
            self.seen = keras.metrics.Mean(name="seen")

        def call(self, x: Any) -> Any:
            return self.dense(x)

        def train_step(self, batch: Any) -> Any:
            import tensorflow as tf

            x, _, _ = batch
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, x, self(x))
            grads = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply(grads, self.trainable_variables)
            self.seen.update_state(loss)
            return {"seen": self.seen.result(), "raw": loss}

    model = Own()
    model.compile("rmsprop", "mse")
    out = []
    for step in range(3):
        out += numbers(*api.train(model, data(5, step), None, return_dict=True).values())
    return out + weights(model)


LOOPS = {
    "batches_of_many_sizes": batches_of_many_sizes,
    "weighted_examples": weighted_examples,
    "clipped_weights": clipped_weights,
    "own_step": own_step,
    "gan": of_docs(0, "generator", "discriminator"),
    "reinforce": of_docs(1, "policy"),
}


def error_of(call: Any) -> str:
    try:
        call()
    except tfmw.UsageError as e:
        return str(e)
    return ""


def ordinary_between_calls() -> dict[str, Any]:
    """Dropout and BatchNormalization: results of two replicas, the same on all tasks."""
    dropout = keras.layers.Dropout(0.5, seed=1)
    model = classifier(keras.layers.Dense(64), keras.layers.BatchNormalization(), dropout)
    states = []
    for step in range(3):
        TFMW.train(model, data(8, step), np.arange(8) % 3)
        seeds = numbers(dropout.seed_generator.state)
        states.append(weights(model) + seeds + numbers(TFMW.predict(model, data(5))))
    history = tfmw.fit(model, data(8), np.arange(8) % 3, verbose=0, strategy=strategy).history
    TFMW.train(model, data(8, 5), np.arange(8) % 3)
    return {"states": states, "fit": history, "after": weights(model)}


def recompiled() -> list[float]:
    model = classifier()
    TFMW.train(model, data(8), np.arange(8) % 3)
    model.compile(keras.optimizers.SGD(0.0), model.loss)
    before = weights(model)
    TFMW.train(model, data(8), np.arange(8) % 3)
    return numbers(np.subtract(weights(model), before))


def seeded_again() -> list[Any]:
    """Losses of draws without a seed, after the same seed twice."""

    class Noisy(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            return x + keras.random.normal(keras.ops.shape(x))

    model = classifier(Noisy())
    model.optimizer.learning_rate = 0.0
    out = []
    for _ in range(2):
        keras.utils.set_random_seed(3)
        out.append(numbers(TFMW.train(model, data(8), np.arange(8) % 3)[0]))
    return out


def within_fit() -> str:
    model = classifier()
    call = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda *_: TFMW.train(model, data(8), np.arange(8) % 3)
    )
    x: Any = data(8)
    y: Any = np.arange(8) % 3
    return error_of(lambda: tfmw.fit(model, x, y, callbacks=[call], verbose=0, strategy=strategy))


def differences() -> None:
    """Writes the errors of steps in which tasks differ, and ends by one in a call."""
    rank = tfmw.Cluster.resolve().index
    model = classifier()
    TFMW.train(model, data(8), np.arange(8) % 3)
    driver = kept_with(model).batch_driver[0]  # a call that fails ends all tasks

    def steps(number: int, rows: int = 8, seed: int = 0, kind: str = "train") -> None:
        for step in range(1, number):
            driver.step(kind, (data(rows, seed + step), np.arange(rows) % 3, None))

    out = {
        "batches": error_of(lambda: steps(2, seed=rank)),
        "lengths": error_of(lambda: steps(2, rows=8 + rank)),
        "calls": error_of(lambda: steps(2, kind=("train", "test")[rank])),
        "lists": error_of(lambda: driver.step("train", ([[1.0] * 4], [0], None))),
    }
    model.layers[0].bias.assign_add([1.0 * rank] * 3)
    out["weights"] = error_of(lambda: steps(20))
    model.layers[0].bias.assign_sub([1.0 * rank] * 3)
    steps(20)
    _result.write(out)
    TFMW.train(model, data(8 + rank), np.arange(8 + rank) % 3)


if where == "differences":
    differences()

result: dict[str, Any] = {}
for name in sys.argv[2:]:
    loop = LOOPS[name]
    keras.utils.set_random_seed(7)
    expected = loop(KERAS)
    keras.utils.set_random_seed(7)
    result[name] = [expected, loop(TFMW)]
keras.utils.set_random_seed(7)
result["ordinary"] = ordinary_between_calls()
result["recompiled"] = recompiled()
result["seeded"] = seeded_again()
if where == "devices":
    result["within fit"] = within_fit()
    model = classifier()
    result["lengths"] = error_of(lambda: TFMW.train(model, data(8), np.arange(7)))
_result.write(result)
