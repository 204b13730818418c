"""`tfmw bench`: the parts of a training step's time, for the user's own model and dataset.

The time of a part is the time that a step saves without it: `tfmw.fit` runs complete, then without
reducing gradients, then also with one batch that stays in memory, and then each worker alone, with
its own part of that batch.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tfmw.errors import UsageError
from tfmw.launcher.exchanges import straggler
from tfmw.runtime.recorder import EXCHANGES_FILE, RecordedExchange, read_exchanges
from tfmw.tools.cost import Cost, report

WARM_UP, ROUNDS = 2, 5  # epochs: the first traces, the second warms up; then those that are timed
UPDATES = 10


def main(target: str, workers: int, steps: int) -> int:
    """Measures and prints; returns the exit status.

    Args:
        target: "file.py:function" or "module:function"; the function returns (model, dataset) or
            (model, dataset, arguments of fit). The dataset is batched by the global batch size.
        workers: number of processes to start.
        steps: number of steps of a timed epoch.

    Raises:
        UsageError: the target can't be read.
    """
    _split(target)  # a wrong name is refused before any process starts
    from tfmw.launcher.run import launch

    measured = launch(measure, (target, steps), workers)
    cost, size, parameters, update, _ = measured[0]
    print(report(cost, size, parameters, update))
    slowest = straggler({f"worker {rank}": made for rank, (*_, made) in enumerate(measured)})
    if slowest is not None:
        print(slowest)
    return 0


def _split(target: str) -> tuple[str, str]:
    """(file or module, function).

    Raises:
        UsageError: it has another form, or there is no such file or module.
    """
    where, _, name = target.rpartition(":")
    if not where or not name.isidentifier():
        raise UsageError(
            f"received {target!r}: expected FILE.py:FUNCTION or MODULE:FUNCTION, a function that "
            "returns (model, dataset)."
        )
    if where.endswith(".py"):
        if not Path(where).is_file():
            raise UsageError(f"there is no file {where!r}: expected FILE.py:FUNCTION.")
    elif importlib.util.find_spec(where.partition(".")[0]) is None:
        raise UsageError(f"there is no module {where!r}: expected MODULE:FUNCTION.")
    return where, name


def load(target: str) -> Callable[[], Any]:
    """Imports the module and returns its function."""
    where, name = _split(target)
    if where.endswith(".py"):
        path = Path(where).resolve()
        sys.path.insert(0, str(path.parent))
        module = importlib.import_module(path.stem)
    else:
        module = importlib.import_module(where)
    function = getattr(module, name, None)
    if not callable(function):
        raise UsageError(f"{where} has no function {name!r}.")
    make: Callable[[], Any] = function
    return make


def measure(target: str, steps: int) -> tuple[Cost, int | None, int, str, list[RecordedExchange]]:
    """On each worker: (cost, global batch, parameters, how weights are updated, exchanges)."""
    import keras
    import numpy as np

    import tfmw
    from tfmw import strategies
    from tfmw.mirrored import sharded_update
    from tfmw.mirrored.collectives import reduction

    tfmw.init()
    make = load(target)
    keras.utils.set_random_seed(0)  # the same dataset on all workers, even if it is drawn at random
    model, dataset, options = parts(make(), target)
    size = _batch_size(dataset)
    strategy = strategies.current_strategy()
    whole = seconds(model, dataset, options, steps)
    exchanges = read_exchanges(Path(os.environ[EXCHANGES_FILE]))
    update = sharded_update.description(model)
    with reduction.left_out():
        local = seconds(model, dataset, options, steps)
        still = dataset.take(1).cache().repeat()
        compute = seconds(model, still, options, steps)
    alone = compute
    replicas = strategy.num_replicas_in_sync
    if replicas > 1:
        own = _own_part(still, strategy)
        alone = min(compute, seconds(model, own, {**options, "strategy": "default"}, steps))
    shared = sharded_update.is_sharded(model)
    whole_update = min(_update_seconds(model.optimizer), alone) if shared else 0.0
    own_update = whole_update / replicas
    parameters = sum(int(np.prod(w.shape)) for w in model.trainable_weights)
    cost = Cost(
        workers=replicas,
        compute=min(alone, whole) - whole_update,
        update=own_update,
        overhead=max(0.0, min(compute, whole) - (alone - whole_update + own_update)),
        communication=max(0.0, whole - max(local, compute)),
        input=max(0.0, local - compute),
    )
    return cost, size, parameters, update, exchanges


def parts(returned: Any, target: str) -> tuple[Any, Any, dict[str, Any]]:
    """(model, dataset without an end, arguments of fit), as the function of `target` returned."""
    if not isinstance(returned, tuple) or len(returned) not in (2, 3):
        raise UsageError(
            f"{target} returned {type(returned).__name__}: expected (model, dataset) or (model, "
            "dataset, arguments of fit)."
        )
    model, dataset, *more = returned
    return model, dataset.repeat(), more[0] if more else {}


def _own_part(dataset: Any, strategy: Any) -> Any:
    """Of each global batch, as many examples as a worker has."""
    import tensorflow as tf

    replicas = strategy.num_replicas_in_sync

    def part(*batch: Any) -> Any:
        return tf.nest.map_structure(lambda tensor: tensor[::replicas], batch)

    return dataset.map(part)


def _batch_size(dataset: Any) -> int | None:
    import tensorflow as tf

    first = tf.nest.flatten(next(iter(dataset.take(1))))[0]
    return int(first.shape[0]) if first.shape.rank else None


def seconds(model: Any, dataset: Any, options: dict[str, Any], steps: int) -> float:
    """Median over epochs of the seconds of a step."""
    import keras

    import tfmw

    ends: list[float] = []
    timer = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: ends.append(time.perf_counter())
    )
    timer.reads_optimizer = False  # which would be gathered for it after each epoch
    tfmw.fit(
        model,
        dataset,
        **{
            **options,
            "epochs": WARM_UP + ROUNDS,
            "steps_per_epoch": steps,
            "callbacks": [timer],
            "verbose": 0,
        },
    )
    spans = [end - begin for begin, end in itertools.pairwise(ends)][WARM_UP - 1 :]
    return statistics.median(spans) / steps


def _update_seconds(optimizer: Any) -> float:
    """Seconds in which one worker updates all weights: others of the same shapes."""
    import keras
    import tensorflow as tf

    from tfmw.keras_compat import local_updates, optimizers

    weights = [
        keras.Variable(tf.zeros(v.shape), dtype=v.dtype) for v in optimizers.variables_of(optimizer)
    ]
    other = type(optimizer).from_config(optimizer.get_config())
    other.build(weights)

    @tf.function(autograph=False)
    def update(grads: list[tf.Tensor]) -> None:
        other.apply(grads, weights)

    grads = [tf.ones(v.shape, v.dtype) for v in weights]
    spans = []
    with local_updates.fused_update(other, weights):
        for _ in range(WARM_UP + UPDATES):
            begin = time.perf_counter()
            update(grads)
            spans.append(time.perf_counter() - begin)
    return statistics.median(spans[WARM_UP:])
