"""One worker of one contender: trains a network of `works`, and times its epochs.

    python -m bench.contenders CONTENDER WORK EPOCHS

The worker reads its rank from TF_CONFIG (TensorFlow) or from RANK, WORLD_SIZE, MASTER_ADDR and
MASTER_PORT (PyTorch). Rank 0 prints one JSON line: the seconds of a step, for each epoch but the
first two.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from bench.works import EXAMPLES, WORKS, batches, examples, keras_network, torch_network

RANK = int(os.environ.get("RANK", "0"))
WORLD = int(os.environ.get("WORLD_SIZE", "1"))
CORES = int(os.environ.get("BENCH_CORES", "1"))  # of this process
WARM_UP = 2  # epochs


class _Clock:
    """Ends of epochs -> seconds per step."""

    def __init__(self, steps: int):
        self._steps = steps
        self._ends: list[float] = []

    def epoch_ends(self) -> None:
        self._ends.append(time.perf_counter())

    def seconds_per_step(self) -> list[float]:
        pairs = list(itertools.pairwise(self._ends))[WARM_UP - 1 :]
        return [(end - begin) / self._steps for begin, end in pairs]


def _fit(
    fit: Callable[..., Any], keras: Any, name: str, epochs: int, workers: int = WORLD
) -> list[float]:
    clock = _Clock(WORKS[name].steps)
    timer = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: clock.epoch_ends())
    timer.reads_optimizer = False
    fit(
        batches(name, workers),
        epochs=epochs,
        steps_per_epoch=WORKS[name].steps,
        callbacks=[timer],
        verbose=0,
    )
    return clock.seconds_per_step()


def tfmw(name: str, epochs: int, xla: bool = False, **options: Any) -> list[float]:
    """Trains by tfmw.fit with its defaults."""
    import keras

    import tfmw

    tfmw.init()
    model = keras_network(name, keras)
    model.jit_compile = xla or model.jit_compile
    return _fit(functools.partial(tfmw.fit, model, **options), keras, name, epochs)


def alone(name: str, epochs: int) -> list[float]:
    """Trains by tfmw.fit, each worker for itself with its own share of the batch."""
    import keras

    import tfmw

    tfmw.init()
    fit = functools.partial(tfmw.fit, keras_network(name, keras), strategy="default")
    return _fit(fit, keras, name, epochs, workers=1)


def tfmw_bf16(name: str, epochs: int) -> list[float]:
    """Trains by tfmw.fit with bfloat16 as the wire dtype of gradients."""
    return tfmw(name, epochs, gradient_compression="bf16")


def tfmw_xla(name: str, epochs: int) -> list[float]:
    """Trains by tfmw.fit with a model compiled by XLA."""
    return tfmw(name, epochs, xla=True)


def stock_fit(name: str, epochs: int) -> list[float]:
    """Trains by Keras 3's own fit, in one process."""
    import keras

    return _fit(keras_network(name, keras).fit, keras, name, epochs)


def all_cores(name: str, epochs: int) -> list[float]:
    """Trains by Keras 3's own fit, in one process with the cores of all workers and their batch."""
    import keras

    return _fit(keras_network(name, keras).fit, keras, name, epochs, workers=CORES)


def _multi_worker() -> Any:
    import tensorflow as tf

    # RING, as the others here; TensorFlow's "auto" is RING on CPUs as well.
    ring = tf.distribute.experimental.CommunicationImplementation.RING
    options = tf.distribute.experimental.CommunicationOptions(implementation=ring)
    return tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)


def legacy_fit(name: str, epochs: int) -> list[float]:
    """Trains by fit of tf_keras with MultiWorkerMirroredStrategy: today's official way."""
    import tf_keras

    with _multi_worker().scope():
        model = keras_network(name, tf_keras)
    return _fit(model.fit, tf_keras, name, epochs)


def hand_loop(name: str, epochs: int) -> list[float]:
    """A loop over `strategy.run` in a tf.function, one step per call, as the guides write it."""
    import tensorflow as tf
    import tf_keras

    strategy, work = _multi_worker(), WORKS[name]
    with strategy.scope():
        model = keras_network(name, tf_keras)
    iterator = iter(strategy.experimental_distribute_dataset(batches(name, WORLD)))

    @tf.function
    def step(batch: Any) -> Any:
        return strategy.run(model.train_step, args=(batch,))

    clock = _Clock(work.steps)
    for _ in range(epochs):
        for _ in range(work.steps):
            logs = step(next(iterator))
        float(strategy.reduce("MEAN", logs["loss"], axis=None))
        clock.epoch_ends()
    return clock.seconds_per_step()


def ddp(name: str, epochs: int) -> list[float]:
    """Trains by PyTorch's DistributedDataParallel with gloo."""
    import torch
    from torch import distributed
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    work = WORKS[name]
    model = DistributedDataParallel(torch_network(name))
    kinds = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}
    optimizer = kinds[work.optimizer](model.parameters(), lr=0.001)
    loss_of = torch.nn.CrossEntropyLoss()
    x, y = (torch.from_numpy(a) for a in examples(work, EXAMPLES // WORLD))
    if not work.words and len(work.shape) == 3:
        x = x.permute(0, 3, 1, 2).contiguous()
    clock, begin = _Clock(work.steps), 0
    for _ in range(epochs):
        for _ in range(work.steps):
            batch = slice(begin, begin + work.batch)
            begin = (begin + work.batch) % (len(x) - work.batch + 1)
            optimizer.zero_grad()
            loss = loss_of(model(x[batch]), y[batch])
            loss.backward()
            optimizer.step()
        loss.item()
        clock.epoch_ends()
    distributed.destroy_process_group()
    return clock.seconds_per_step()


CONTENDERS: dict[str, Callable[[str, int], list[float]]] = {
    f.__name__: f
    for f in (
        tfmw, alone, tfmw_bf16, tfmw_xla, stock_fit, all_cores, legacy_fit, hand_loop, ddp,
    )
}  # fmt: skip

if __name__ == "__main__":
    contender, work_name, number = sys.argv[1:]
    # One core per worker, so that each further worker brings a core.
    cores = sorted(os.sched_getaffinity(0))
    first = RANK % len(cores)
    os.sched_setaffinity(0, cores[first : first + CORES])
    seconds = CONTENDERS[contender](work_name, int(number))
    if RANK == 0:
        print(json.dumps(seconds), flush=True)
