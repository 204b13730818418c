"""Steps per second on parameter servers by tfmw, a coordinator loop, and legacy Keras's fit.

    tfmw run --workers 2 --ps 1 bench/ps.py [--rounds=3] [--seconds=4]

All train the same network (784-100-10, batches of 100, Adam) on the same servers in the same run.
They take turns, so that other load on the machine affects all alike; the last lines are ratios of
medians. If tf_keras is installed, the legacy fit is measured too.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfmw
from tfmw import strategies

BATCH = 100
PER_FUNCTION = 50  # steps that the plain loop schedules at a time


def main() -> None:
    """Measures in turns, prints medians and ratios."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each measurement")
    options = parser.parse_args()
    tfmw.init()
    servers = strategies.servers_of(strategies.current_strategy())
    assert servers is not None, "start it with --ps"
    contenders: dict[str, Callable[[float], float]] = {
        "tfmw": ours(),
        "plain loop": plain_loop(servers.strategy, servers.coordinator),
    }
    if importlib.util.find_spec("tf_keras"):
        contenders["legacy fit"] = legacy(servers.strategy, 1)
        contenders["legacy fit, steps_per_execution=10"] = legacy(servers.strategy, 10)
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(options.rounds):
        for name, measure in contenders.items():
            rates[name].append(measure(options.seconds))
            print(f"{name}: {rates[name][-1]:.0f} steps/s", flush=True)
    medians = {name: statistics.median(r) for name, r in rates.items()}
    for name, rate in medians.items():
        print(f"median | {name}: {rate:.0f} steps/s | tfmw is {medians['tfmw'] / rate:.2f} x that")


def examples() -> tuple[np.ndarray, np.ndarray]:
    """Features float32 [1000, 784], labels int64 [1000]."""
    x = np.random.default_rng(0).random((1000, 784), np.float32)
    return x, x[:, :10].argmax(axis=1)


def dataset(context: Any = None) -> tf.data.Dataset:
    """Endless batches, cut in advance, so that reading them costs next to nothing."""
    del context
    x, y = examples()
    batches = (x.reshape(-1, BATCH, 784), y.reshape(-1, BATCH))
    return tf.data.Dataset.from_tensor_slices(batches).repeat().prefetch(4)


def network(library: Any) -> Any:
    """The network, compiled, of Keras 3 or of tf_keras."""
    model = library.Sequential(
        [
            library.layers.InputLayer(input_shape=(784,))
            if library is not keras
            else keras.Input((784,)),
            library.layers.Dense(100, activation="relu"),
            library.layers.Dense(10),
        ]
    )
    model.compile(
        library.optimizers.Adam(),
        library.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def ours() -> Callable[[float], float]:
    """Trains by tfmw.fit's driver, as fit calls it, with metrics, logs and exact counts."""
    from tfmw import data
    from tfmw.compat import models
    from tfmw.train.parameter_server.coordinator import PsDriver

    model = network(keras)
    servers = strategies.servers_of(strategies.current_strategy())
    assert servers is not None
    models.build_all(model, dataset().element_spec)
    driver = PsDriver(model, servers, data.Source(dataset))

    def epoch(steps: int) -> float:
        begin = time.perf_counter()
        driver.train(steps, lambda done: bool(model.get_metrics_result()))
        return time.perf_counter() - begin

    return _measured(epoch)


def plain_loop(strategy: Any, coordinator: Any) -> Callable[[float], float]:
    """A loop written by hand, after the tutorial: variables in the scope, no metrics."""
    model = network(keras)
    model.optimizer.build(model.trainable_variables)
    with strategy.scope():
        for variable in [*model.variables, *model.optimizer.variables]:
            variable._value = tf.Variable(variable.numpy(), trainable=variable.trainable)
    model.optimizer._distribution_strategy = strategy
    model.optimizer._trainable_variables_indices = {
        model.optimizer._var_key(v): i for i, v in enumerate(model.trainable_variables)
    }
    iterator = iter(coordinator.create_per_worker_dataset(dataset))

    def step(batch: Any) -> None:
        x, y = batch
        with tf.GradientTape() as tape:
            loss = model.compute_loss(x=x, y=y, y_pred=model(x, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        model.optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    @tf.function
    def many(iterator: Any) -> None:
        for _ in tf.range(PER_FUNCTION):
            strategy.run(step, args=(next(iterator),))

    def epoch(steps: int) -> float:
        begin = time.perf_counter()
        for _ in range(-(-steps // PER_FUNCTION)):
            coordinator.schedule(many, args=(iterator,))
        coordinator.join()
        return (time.perf_counter() - begin) * steps / (-(-steps // PER_FUNCTION) * PER_FUNCTION)

    return _measured(epoch)


def legacy(strategy: Any, steps_per_execution: int) -> Callable[[float], float]:
    """Trains by Keras 2's fit, one call for each measurement, timed from its second epoch on."""
    import tf_keras

    with strategy.scope():
        model = network(tf_keras)
        model.compile(
            tf_keras.optimizers.Adam(),
            tf_keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
            steps_per_execution=steps_per_execution,
        )

    def epoch(steps: int) -> float:
        times: list[float] = []

        class Clock(tf_keras.callbacks.Callback):
            def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
                times.append(time.perf_counter())

        steps = -(-steps // steps_per_execution) * steps_per_execution
        model.fit(
            tf_keras.utils.experimental.DatasetCreator(dataset),
            epochs=2,
            steps_per_epoch=steps,
            verbose=0,
            callbacks=[Clock()],
        )
        return times[1] - times[0]

    return _measured(epoch)


def _measured(epoch: Callable[[int], float]) -> Callable[[float], float]:
    """(seconds) -> steps per second, after an epoch that traces and one that estimates.

    Each measurement begins with an epoch that does not count: the contender before may still be
    tidying up on the workers.
    """
    epoch(100)
    estimate = [400 / epoch(400)]

    def measure(seconds: float) -> float:
        steps = max(100, int(estimate[0] * seconds))
        epoch(steps // 4)
        estimate[0] = steps / epoch(steps)
        return estimate[0]

    return measure


if __name__ == "__main__":
    main()
