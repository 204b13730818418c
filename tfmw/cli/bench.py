"""`tfmw bench`: the parts of a training step's time, for the user's own model and dataset.

The time of a part is the time that a step saves without it. `tfmw.fit` runs complete, then without
reducing gradients, then also with one batch that stays in memory. At last each worker runs alone,
with its own shard of that batch. Keras's own `fit`, in one process with all cores, is the measure.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import inspect
import itertools
import os
import statistics
import symtable
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from tfmw.errors import UsageError
from tfmw.observe.exchanges import straggler
from tfmw.observe.recorder import EXCHANGES_FILE, RecordedExchange, read_exchanges

WARM_UP, ROUNDS = 2, 5  # epochs: the first traces, the second warms up; the others are timed
UPDATES = 10

ROUND_S = 140e-9
"""Seconds of a round's computation per weight: difference, 8 bits and back, outer step.

Measured by `python -m bench.slow_network`, on two workers of two cores.
"""

EVERY = 100  # steps between two rounds, in a prediction
PAYS = 0.67  # fraction of a step's time below which rounds are recommended

PARTS = ("compute", "update", "overhead", "communication", "input")


@dataclasses.dataclass(frozen=True)
class Cost:
    """The parts of one step's time, in seconds, on `workers` workers."""

    workers: int
    compute: float  # forward and backward pass, and an update of the weights that is not sharded
    communication: float  # time that a step waits for the all-reduce of the gradients
    input: float  # time that a step waits for the next batch
    overhead: float = 0.0  # extra time of the same step on several workers, even without reductions
    update: float = 0.0  # this worker's share of an update that the workers shard

    @property
    def step(self) -> float:
        """Seconds of one step."""
        return self.compute + self.update + self.overhead + self.communication + self.input

    @property
    def network(self) -> float:
        """Seconds of network transfer of a step's gradients, as far as known."""
        return self.communication

    def with_rounds(self, every: int, parameters: int) -> Self:
        """The same cost with `sync=tfmw.LocalSGD(every, compression="int8")`.

        A round sends a quarter of the bytes of a step; each worker makes whole updates.
        """
        rounds = (self.network / 4 + ROUND_S * parameters) / every
        compute = self.compute + self.workers * self.update
        return dataclasses.replace(self, compute=compute, update=0.0, communication=rounds)

    @property
    def bound_by(self) -> str:
        """The largest part of a step."""
        return max(PARTS, key=lambda name: getattr(self, name))


ADVICE = {
    "compute": "more workers share the work; compile(jit_compile=True), "
    "precision='mixed_bfloat16' where the processor has it, or GPUs, make it less.",
    "update": "more workers share it, each with a smaller part.",
    "overhead": "larger batches per worker, or steps_per_execution, make it less of a step.",
    "communication": "larger batches per worker need fewer reductions per example; "
    "gradient_compression='bf16' halves the bytes that are sent; more workers make it no better.",
    "input": "end the dataset in .batch(...).prefetch(tf.data.AUTOTUNE), map with "
    "num_parallel_calls=tf.data.AUTOTUNE, cache decoded examples; or pass a callable to fit, so "
    "that each worker reads its own files.",
}


def report(cost: Cost, global_batch: int | None, parameters: int, update: str = "") -> str:
    """Lines to print: parts of a step, its bottleneck, and recommended changes.

    Args:
        update: kind of the weights' update.
    """
    about = f"{cost.workers} worker(s), {parameters:,} parameters"
    if global_batch:
        about += f", global batch {global_batch}: {global_batch / cost.step:,.0f} examples/s"
    lines = [about, f"{'part of a step':<16} {'ms':>9} {'share':>6}"]
    for name in (*PARTS, "step"):
        seconds = getattr(cost, name)
        if name != "update" or seconds:
            lines.append(f"{name:<16} {1000 * seconds:>9.2f} {seconds / cost.step:>6.0%}")
    if update:
        lines.append(f"the weights are updated {update}")
    lines.append(f"bound by {cost.bound_by}: {ADVICE[cost.bound_by]}")
    rounds = cost.with_rounds(EVERY, parameters)
    if cost.workers > 1 and rounds.step < PAYS * cost.step:
        lines.append(
            f"with sync=tfmw.LocalSGD({EVERY}, compression='int8') about "
            f"{1000 * rounds.step:.2f} ms; it is experimental, and results differ from one "
            "process's"
        )
    return "\n".join(lines)


def main(target: str, workers: int, steps: int) -> int:
    """Measures and prints; returns the exit status.

    Args:
        target: "file.py:function" or "module:function"; the function returns (model, dataset) or
            (model, dataset, arguments of fit). The dataset is batched by the global batch size.
        workers: number of processes to start.
        steps: number of steps of a timed epoch.

    Raises:
        UsageError: the target can't be loaded.
    """
    _split(target)  # a wrong name is refused before any process starts
    from tfmw.launcher.run import launch

    measured = launch(measure, (target, steps), workers)
    cost, size, parameters, update, _ = measured[0]
    print(report(cost, size, parameters, update))
    slowest = straggler({f"worker {rank}": made for rank, (*_, made) in enumerate(measured)})
    if slowest is not None:
        print(slowest)
    print(beside_keras(cost, launch(measure_keras, (target, steps), 1)[0]))
    return 0


def beside_keras(cost: Cost, keras_s: float) -> str:
    """Line that says whether the workers are faster than Keras in one process with all cores."""
    ratio = keras_s / cost.step
    about = f"one plain Keras process with all cores takes {1000 * keras_s:.2f} ms for such a step"
    if ratio > 1:
        return f"{about}: {cost.workers} workers of this machine are {ratio:.2f} times as fast"
    return (
        f"{about}, and is {1 / ratio:.2f} times as fast: on this machine alone, more processes do "
        "not pay; more machines or GPUs may"
    )


def _split(target: str) -> tuple[str, str]:
    """(file or module, function).

    Raises:
        UsageError: the target has another form, or the file or module does not exist.
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
        with contextlib.suppress(SyntaxError):  # running it will show where
            text = Path(where).read_text(errors="replace")
            names = symtable.symtable(text, where, "exec").get_identifiers()
            if name not in names and "import *" not in text:
                raise _without_function(where, name)  # before its code runs
    elif importlib.util.find_spec(where.partition(".")[0]) is None:
        raise UsageError(f"there is no module {where!r}: expected MODULE:FUNCTION.")
    return where, name


def _without_function(where: str, name: str) -> UsageError:
    return UsageError(
        f"{where} has no function {name!r}: expected one that returns (model, dataset), the "
        "compiled model and batches of the global batch size."
    )


def load(target: str) -> Callable[[], Any]:
    """Imports the module and returns its function."""
    where, name = _split(target)
    if where.endswith(".py"):
        path = Path(where).resolve()
        sys.path.insert(0, str(path.parent))
        try:
            module = importlib.import_module(path.stem)
        except UsageError as error:  # of a call of fit
            raise UsageError(
                f"{where} cannot be imported: {error} A file that trains does so below if "
                f"__name__ == '__main__': as tfmw bench only calls its function {name!r}."
            ) from None
    else:
        module = importlib.import_module(where)
    function = getattr(module, name, None)
    if not callable(function):
        raise _without_function(where, name)
    make: Callable[[], Any] = function
    return make


def measure(target: str, steps: int) -> tuple[Cost, int | None, int, str, list[RecordedExchange]]:
    """Returns (cost, global batch, parameters, how weights are updated, exchanges) of a worker."""
    import keras
    import numpy as np
    import tensorflow as tf

    import tfmw
    from tfmw.train import strategies
    from tfmw.train.mirrored import sharded_update
    from tfmw.train.mirrored.collectives import reduction

    tfmw.init()
    make = load(target)
    keras.utils.set_random_seed(0)  # the same dataset on all workers, even if it is drawn at random
    model, dataset, options = parts(make(), target)
    first = tf.nest.flatten(next(iter(dataset.take(1))))[0]
    size = int(first.shape[0]) if first.shape.rank else None
    replicas = strategies.current_strategy().num_replicas_in_sync
    whole = seconds(model, dataset, options, steps)
    exchanges = read_exchanges(Path(os.environ[EXCHANGES_FILE]))
    update = sharded_update.description(model)
    with reduction.without_reduction():
        local = seconds(model, dataset, options, steps)
        still = dataset.take(1).cache().repeat()
        compute = seconds(model, still, options, steps)
    alone = compute
    if replicas > 1:

        def part(*batch: Any) -> Any:  # selects as many examples as a worker has
            return tf.nest.map_structure(lambda tensor: tensor[::replicas], batch)

        own = still.map(part)
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


def measure_keras(target: str, steps: int) -> float:
    """Seconds of a step of Keras's own `fit`, in this process, with all cores of the machine."""
    import keras

    make = load(target)
    keras.utils.set_random_seed(0)
    model, dataset, options = parts(make(), target)
    known = inspect.signature(keras.Model.fit).parameters
    of_keras = {name: value for name, value in options.items() if name in known}
    of_keras["shuffle"] = False  # Keras warns that a dataset has its own order
    return seconds(model, dataset, of_keras, steps, model.fit)


def parts(returned: Any, target: str) -> tuple[Any, Any, dict[str, Any]]:
    """(model, endless dataset, arguments of fit) from the result of the `target` function."""
    if not isinstance(returned, tuple) or len(returned) not in (2, 3):
        raise UsageError(
            f"{target} returned {type(returned).__name__}: expected (model, dataset) or (model, "
            "dataset, arguments of fit)."
        )
    model, dataset, *more = returned
    return model, dataset.repeat(), more[0] if more else {}


def seconds(
    model: Any,
    dataset: Any,
    options: dict[str, Any],
    steps: int,
    fit: Callable[..., Any] | None = None,
) -> float:
    """Median over epochs of the seconds of a step by `tfmw.fit`, or by another bound `fit`."""
    import keras

    import tfmw

    fit = functools.partial(tfmw.fit, model) if fit is None else fit
    ends: list[float] = []
    timer = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: ends.append(time.perf_counter())
    )
    timer.reads_optimizer = False  # its state would be gathered for it after each epoch
    own = {"epochs": WARM_UP + ROUNDS, "steps_per_epoch": steps, "callbacks": [timer], "verbose": 0}
    fit(dataset, **options | own)
    spans = [end - begin for begin, end in itertools.pairwise(ends)][WARM_UP - 1 :]
    return statistics.median(spans) / steps


def _update_seconds(optimizer: Any) -> float:
    """Seconds in which one worker updates all weights, on variables of the same shapes."""
    import keras
    import tensorflow as tf

    from tfmw.compat import local_updates, optimizers

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
