"""fit, evaluate and predict, like Keras's methods of the same names, on every replica of a cluster.

`fit` checks its arguments and chooses the strategy. All that a training does then is chosen in
`plan.py`. The loop over epochs is in `loop.py`, steps are in `mirrored/` and `parameter_server/`.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfmw import data
from tfmw.cluster import membership
from tfmw.cluster.cluster import BACKUP_DIR
from tfmw.compat.model_methods import given, given_arguments, is_within_call
from tfmw.errors import UsageError
from tfmw.train import on_workers, strategies
from tfmw.train.arguments import FitArguments
from tfmw.train.callbacks.roles import TemporaryBackup, without_backup
from tfmw.train.fit_context import errors_reported, model_of
from tfmw.train.local_sgd.sync_settings import LocalSGD, settings_of
from tfmw.train.mirrored.one_pass import OnePass
from tfmw.train.mirrored.prediction_parts import PredictionParts
from tfmw.train.own_methods import call_own, is_chief
from tfmw.train.plan import Plan
from tfmw.train.saved_model import check_path, export


@given_arguments
def fit(
    model: Any,
    x: Any = None,
    y: Any = None,
    batch_size: int | None = None,
    epochs: int = 1,
    verbose: Any = "auto",
    callbacks: Any = None,
    validation_split: float = 0.0,
    validation_data: Any = None,
    shuffle: bool = True,
    class_weight: dict[int, float] | None = None,
    sample_weight: Any = None,
    initial_epoch: int = 0,
    steps_per_epoch: int | None = None,
    validation_steps: int | None = None,
    validation_batch_size: int | None = None,
    validation_freq: Any = 1,
    *,
    strategy: Any = "auto",
    workers: Any = None,
    on: Any = "local",
    backup_dir: str | os.PathLike[str] | None = None,
    backup_every: Any = "epoch",
    export_dir: str | os.PathLike[str] | None = None,
    seed: int | None = None,
    gradient_compression: str | None = None,
    precision: str | None = None,
    shard_optimizer: Any = "auto",
    split_batch: bool = True,
    sync: LocalSGD | None = None,
    **unknown: Any,
) -> keras.callbacks.History:
    """Trains `model` on all replicas of the cluster, with the results of one process.

    Args:
        model: a compiled Keras 3 model, built at any time or not yet, or a callable that returns
            one. It is trained in place.
        x, y, batch_size, epochs, verbose, callbacks, validation_split, validation_data, shuffle,
            class_weight, sample_weight, initial_epoch, steps_per_epoch, validation_steps,
            validation_batch_size, validation_freq: see `keras.Model.fit`. A `tf.data.Dataset` is
            batched by the global batch size. A callable gets a `tf.distribute.InputContext` and
            returns the pipeline of that worker, batched by the batch size of one replica.
        strategy: "auto" (the cluster that `tfmw.init` joined; else the GPUs of this machine; else
            one process), a name from `tfmw.strategies`, or a `tf.distribute.Strategy`.
        workers: number of new processes on which to train, or a `tfmw.Workers`; the result is
            copied back. Use it in notebooks, where TensorFlow has already run. An argument that
            cannot be sent to other processes (a dataset that holds Python functions, for example)
            raises before any process starts. Engines also accept (least, most), and start as many
            as have room.
        on: the system that runs these processes: "local", "ray", "slurm", "spark", or an engine
            with its settings, such as `tfmw.engines.Ray(resources={"CPU": 4})`. When a task dies,
            all restart from the newest backup, up to the engine's `max_restarts`.
        backup_dir: directory in which the state of the run is saved, and from which an interrupted
            run resumes: the short form of `tfmw.callbacks.BackupAndRestore(backup_dir)`.
        backup_every: a number of steps, "epoch", "3 epochs", a time such as "10 s", or
            "continuous": the next backup begins when the last is written.
        export_dir: after training the chief exports a SavedModel there.
        seed: makes runs with the same number of workers equal bit for bit. It sets the seeds of
            Python, NumPy, Keras and TensorFlow (`keras.utils.set_random_seed`) and turns
            TensorFlow's deterministic ops on, for the whole process.
        gradient_compression: "fp16" or "bf16": dense gradients are sent between replicas, and
            summed, in 16 bits. This halves the traffic; results differ from those of one process.
        precision: "mixed_bfloat16" or "mixed_float16": float32 layers compute in 16 bits while they
            are trained; weights, optimizer and losses stay float32, and the model is a float32
            model again afterwards. "mixed_float16" needs a `keras.optimizers.LossScaleOptimizer`.
            None or "float32": each layer's own dtype policy.
        shard_optimizer: True, False or "auto": whether replicas shard the update of the weights.
            Each updates 1/N of them and keeps 1/N of the optimizer's slots, with the same result.
            "auto" shards large models over tfmw's own ring, if this saves time. True shards
            whenever the optimizer allows it; otherwise a warning gives the reason.
        split_batch: False for models that need whole batches, such as layers with a fixed batch
            size, or graphs merged into one: each replica then takes a whole batch of the dataset.
            One batch for each replica makes a step, and gradients are averaged by examples. Workers
            of parameter servers take whole batches in any case.
        sync: `tfmw.LocalSGD(every=50)` or `tfmw.DiLoCo(every=100)`, experimental, for slow
            networks: replicas train on their own, and exchange weights every few steps. None:
            gradients are summed in each step.

    Returns:
        A `keras.callbacks.History`, the same on every worker.

    Raises:
        UsageError: an uncompiled model, an empty dataset, an infinite one without
            `steps_per_epoch`; arguments or data that differ between workers; a backup of another
            model, a backup directory in use, and other wrong uses.
        Preempted: a task received SIGTERM or SIGUSR1 and there is a `backup_dir`: the state is
            saved, and the process should end with the status of this exception (75).
    """
    _refuse_unknown(unknown)
    arguments = FitArguments(
        model=model, x=x, y=y, batch_size=batch_size, epochs=epochs, verbose=verbose,
        callbacks=callbacks, validation_split=validation_split, validation_data=validation_data,
        shuffle=shuffle, class_weight=class_weight, sample_weight=sample_weight,
        initial_epoch=initial_epoch, steps_per_epoch=steps_per_epoch,
        validation_steps=validation_steps, validation_batch_size=validation_batch_size,
        validation_freq=validation_freq, strategy=strategy, workers=workers, on=on,
        backup_dir=backup_dir, backup_every=backup_every, export_dir=export_dir, seed=seed,
        gradient_compression=gradient_compression, precision=precision,
        shard_optimizer=shard_optimizer, split_batch=split_batch, sync=sync, given=given(),
    ).within_limits()  # fmt: skip
    settings_of(arguments)
    if os.environ.get(BACKUP_DIR) and arguments.backup is None and not is_within_call():
        raise UsageError(
            "received --backup-dir, which is for model.fit in scripts of plain Keras, and this one "
            "calls tfmw.fit without a backup: pass backup_dir= to it."
        )
    if workers is not None:
        return on_workers.fit_on_workers(fit, arguments)
    _refuse_engine_alone(on)
    if export_dir is not None:
        arguments = dataclasses.replace(arguments, export_dir=check_path(export_dir))
    if seed is not None:
        keras.utils.set_random_seed(seed)
        tf.config.experimental.enable_op_determinism()
    with errors_reported(strategy):
        model, strategy = model_of(model), strategies.choose(strategy)
        arguments = dataclasses.replace(arguments, model=model, strategy=strategy)
        calls = _Trainings(arguments)
        history: keras.callbacks.History = call_own(
            "fit", model, strategy, vars(arguments), arguments.given, calls.train
        )
        calls.end()
    return history


def _refuse_unknown(arguments: dict[str, Any]) -> None:
    for name, value in arguments.items():
        if name not in ("ps", "evaluator"):
            similar = difflib.get_close_matches(name, FitArguments.__dataclass_fields__, 1)
            meant = f". Did you mean {similar[0]!r}?" if similar else ""
            raise TypeError(f"fit() got an unexpected keyword argument {name!r}{meant}")
        raise UsageError(
            f"fit starts workers only, received {name}={value!r}: submit a function that calls "
            f"fit, as in tfmw.submit(train, workers=2, {name}={value!r}, on='ray')."
        )


def _refuse_engine_alone(on: Any) -> None:
    if on != "local":
        raise UsageError(
            f"received on={on!r} without a number of processes: add workers=, such as workers=2."
        )


class _Trainings:
    """The trainings of one call of `tfmw.fit`; a user's own `fit` may start none or several.

    Args:
        arguments: arguments of the call.
    """

    def __init__(self, arguments: FitArguments):
        self._arguments = arguments
        self._count = 0
        self._element_spec: Any = None  # spec of a batch of the last training

    def train(self, **passed: Any) -> keras.callbacks.History:
        """Trains with these arguments of Keras's `fit`, and the other arguments of the call."""
        arguments = dataclasses.replace(self._arguments, **passed)
        self._count += 1
        if self._count > 1 and arguments.backup is not None:
            arguments = self._without_backup(arguments)
        plan = Plan(arguments)
        history = plan.run()
        self._element_spec = plan.element_spec
        return history

    def _without_backup(self, arguments: FitArguments) -> FitArguments:
        callbacks, asked = without_backup(arguments.callbacks)
        if arguments.backup_dir is not None or not isinstance(asked, TemporaryBackup):
            warnings.warn(
                f"tfmw: {type(arguments.model).__name__}.fit trains more than once in this call, "
                "and backups are those of its first training: an interrupted run repeats the "
                "others.",
                stacklevel=2,
            )
        return dataclasses.replace(arguments, callbacks=callbacks, backup_dir=None)

    def end(self) -> None:
        """Exports the model, and warns if the user's `fit` has trained it without tfmw."""
        model, strategy = self._arguments.model, self._arguments.strategy
        if membership.is_evaluator():
            return
        if not self._count and strategy.num_replicas_in_sync > 1:
            warnings.warn(
                f"tfmw: {type(model).__name__}.fit did not call super().fit(...): each process has "
                "run all of it alone, and the model was not trained on all replicas.",
                stacklevel=2,
            )
        export_dir = self._arguments.export_dir
        if export_dir is not None and is_chief(strategy):
            signature = _signature(model, self._element_spec)
            export(model, export_dir, input_signature=signature)


def _signature(model: keras.Model, element_spec: Any) -> Any:
    """The training data's signature, for the export of a model without known inputs."""
    if getattr(model, "inputs", None) or element_spec is None:
        return None
    x, _, _ = keras.utils.unpack_x_y_sample_weight(element_spec)
    return data.map_tensors(lambda s: tf.TensorSpec([None, *s.shape[1:]], s.dtype), x)


@given_arguments
def evaluate(
    model: Any,
    x: Any = None,
    y: Any = None,
    batch_size: int | None = None,
    verbose: Any = "auto",
    sample_weight: Any = None,
    steps: int | None = None,
    callbacks: Any = None,
    return_dict: bool = False,
    *,
    strategy: Any = "auto",
    workers: Any = None,
    on: Any = "local",
    split_batch: bool = True,
) -> Any:
    """Computes loss and metrics over all examples, on all replicas.

    Args:
        model, x, y, strategy, workers, on, split_batch: see `fit`.
        batch_size, verbose, sample_weight, steps, callbacks, return_dict: see
            `keras.Model.evaluate`.

    Returns:
        The result of `keras.Model.evaluate`, the same on every worker.

    Raises:
        UsageError: an uncompiled model, an empty dataset, an infinite one without `steps`, or data
            that differs between workers.
    """
    keras_arguments = {
        "x": x, "y": y, "batch_size": batch_size, "verbose": verbose,
        "sample_weight": sample_weight, "steps": steps, "callbacks": callbacks,
        "return_dict": return_dict,
    }  # fmt: skip
    of_tfmw = {"strategy": strategy, "workers": workers, "on": on, "split_batch": split_batch}
    if workers is not None:
        every = {"model": model, **keras_arguments, **of_tfmw}
        return on_workers.pass_on_workers(evaluate, every, given())
    _refuse_engine_alone(on)
    with errors_reported(strategy):
        one_pass = OnePass(model_of(model), strategy, split_batch)
        return call_own(
            "evaluate", one_pass.model, strategy, keras_arguments, given(), one_pass.evaluate
        )


@given_arguments
def predict(
    model: Any,
    x: Any,
    batch_size: int | None = None,
    verbose: Any = "auto",
    steps: int | None = None,
    callbacks: Any = None,
    *,
    strategy: Any = "auto",
    workers: Any = None,
    on: Any = "local",
    split_batch: bool = True,
    output_dir: str | os.PathLike[str] | None = None,
    format: str = "npy",
    keys: Sequence[str] = (),
) -> Any:
    """Computes predictions for all examples in the dataset's order, on all replicas.

    Args:
        model, x, strategy, workers, on, split_batch: see `fit`.
        batch_size, verbose, steps, callbacks: see `keras.Model.predict`.
        output_dir: a directory that all workers share. Each worker writes its predictions there,
            in parts of some seconds, and holds only one part in memory. A call that was killed
            continues behind the last part, and each row is written once. Read the files with
            `tfmw.data.read_predictions`. Callbacks get no outputs.
        format: format of these files: "npy", "parquet" (needs pyarrow) or "tfrecord".
        keys: names of features, in a dict that x or y of each batch is, to write beside the
            predictions, such as ["id"].

    Returns:
        NumPy array(s) [examples, ...] in the structure of the model's outputs; all examples on
        every worker. As in Keras, a `tf.RaggedTensor` or `tf.SparseTensor` if an output is one,
        and a `tf.RaggedTensor` if its shape changes from step to step. With `output_dir`, the path
        of the index of the files.

    Raises:
        UsageError: an empty dataset, an infinite one without `steps`, or data that differs between
            workers; an `output_dir` with the predictions of another model or other data.
    """
    if output_dir is None and (keys or format != "npy"):
        raise UsageError("received keys= or format= without output_dir=: name a directory.")
    keys = [keys] if isinstance(keys, str) else keys
    parts = None if output_dir is None else PredictionParts(output_dir, format, keys)
    keras_arguments = {
        "x": x, "batch_size": batch_size, "verbose": verbose, "steps": steps,
        "callbacks": callbacks,
    }  # fmt: skip
    of_tfmw = {
        "strategy": strategy, "workers": workers, "on": on, "split_batch": split_batch,
        "output_dir": parts and parts.path, "format": format, "keys": list(keys),
    }  # fmt: skip
    if workers is not None:
        every = {"model": model, **keras_arguments, **of_tfmw}
        return on_workers.pass_on_workers(predict, every, given())
    _refuse_engine_alone(on)
    with errors_reported(strategy):
        one_pass = OnePass(model_of(model), strategy, split_batch)
        run: Callable[..., Any] = one_pass.predict
        if parts is not None:
            run = functools.partial(one_pass.write_predictions, parts)
        return call_own("predict", one_pass.model, strategy, keras_arguments, given(), run)
