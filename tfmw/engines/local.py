"""`tfmw.fit(model, data, workers=2)`: trains a model of this process on a new local cluster.

A process that has run TensorFlow ops cannot join a cluster, and a notebook's kernel has usually run
some. So the model and the data are sent to new processes and trained there. Weights, optimizer
state and History are copied back into the caller's objects.

The model is sent with the classes and functions that a notebook defines (`serialization`), a
`tf.data.Dataset` as its graph, arrays and callables as they are. Nothing is written to disk, and
only children of this process receive it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfmw import data, keras_compat
from tfmw.checkpoint import state
from tfmw.checkpoint.store import BackupStore, Damaged
from tfmw.cluster import membership
from tfmw.engines import serialization
from tfmw.engines.process_settings import ProcessSettings
from tfmw.errors import UsageError
from tfmw.launcher.run import launch

_BACKUP_EVERY = "2 s"  # an interrupted cell loses at most 2 s of training


@dataclasses.dataclass(frozen=True)
class _SentDataset:
    """A dataset as its graph and the spec of its elements."""

    graph: bytes
    spec: Any

    def open(self) -> tf.data.Dataset:
        graph = tf.compat.v1.GraphDef.FromString(self.graph)
        return keras_compat.dataset_from_graph(graph, self.spec)


@dataclasses.dataclass(frozen=True)
class _FitCall:
    """The arguments with which each worker calls fit."""

    model: Any
    x: Any
    validation_data: Any
    settings: Mapping[str, Any]
    process: ProcessSettings


def fit_on_workers(
    fit: Callable[..., Any],
    model: Any,
    workers: int,
    x: Any,
    validation_data: Any,
    settings: dict[str, Any],
) -> keras.callbacks.History:
    """Trains on `workers` new local processes and brings the result back.

    Args:
        fit: `tfmw.fit`, which each worker calls.
        model: a compiled Keras model, or a callable that returns one.
        workers: number of processes.
        x: as in `tfmw.fit`.
        validation_data: as in `tfmw.fit`.
        settings: the other arguments of `tfmw.fit`.

    Returns:
        The History of the run; where `model` is a model, it is trained in place.

    Raises:
        UsageError: an argument cannot be sent to other processes.
        KeyboardInterrupt: the workers were stopped; the model has the weights of their last
            backup.
    """
    if not isinstance(workers, int) or isinstance(workers, bool) or workers < 1:
        raise UsageError(
            f"received workers={workers!r}: expected a number of processes, such as 2."
        )
    is_model = isinstance(model, keras.Model)
    sent, sent_validation = _sent(x, "x"), _sent_validation(validation_data)
    if is_model:
        _build(model, x, settings)
    with _with_backups(settings) as settings:
        call = _FitCall(
            model=model,
            x=sent,
            validation_data=sent_validation,
            settings=settings,
            process=ProcessSettings.of_this_process(),
        )
        try:
            chief, *_ = launch(_train, (fit, serialization.pack(call)), workers=workers)
        except KeyboardInterrupt:
            if is_model:
                _restore_newest_backup(model, settings["backup_dir"])
            raise
    history = keras.callbacks.History()
    history.history, history.epoch = chief["history"], chief["epoch"]
    history.params = chief["params"]
    if is_model:
        state.restore(model, chief["tensors"])
        history.set_model(model)
        model.history = history
    return history


@contextlib.contextmanager
def _with_backups(settings: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The settings of fit, with a temporary `backup_dir` if they have none."""
    if settings.get("backup_dir") is not None:
        yield settings
        return
    with tempfile.TemporaryDirectory(prefix="tfmw-fit-") as folder:
        backup_dir = os.path.join(folder, "backups")
        yield {**settings, "backup_dir": backup_dir, "backup_every": _BACKUP_EVERY}


def _train(fit: Callable[..., Any], packed: bytes) -> dict[str, Any]:
    """In a worker: trains. The chief returns the values for the caller's objects."""
    call: _FitCall = serialization.unpack(packed)
    call.process.apply()
    model = call.model
    model = serialization.settled(model) if isinstance(model, keras.Model) else model()
    history = fit(
        model,
        _opened(call.x),
        validation_data=_opened(call.validation_data),
        **call.settings,
    )
    if not membership.current_cluster().is_chief:
        return {}
    return {
        "tensors": {name: keras_compat.native(v).numpy() for name, v in state.named(model).items()},
        "history": history.history,
        "epoch": history.epoch,
        "params": history.params,
    }


def _build(model: keras.Model, x: Any, settings: Mapping[str, Any]) -> None:
    """Builds the caller's model, so that it has variables for the trained values."""
    if not model.compiled:
        raise UsageError(
            "the model is not compiled: call model.compile(optimizer=..., loss=...) before "
            "tfmw.fit()."
        )
    if not keras_compat.needs_build(model):
        return
    source = data.Source(
        x, settings.get("y"), settings.get("sample_weight"), settings.get("batch_size")
    )
    shard = source.shard(data.Sharding(), data.Order())
    keras_compat.build_all(model, shard.element_spec)


def _sent(x: Any, what: str) -> Any:
    if isinstance(x, dict):
        return {k: _sent(v, what) for k, v in x.items()}
    if isinstance(x, (list, tuple)):
        return type(x)(_sent(v, what) for v in x)
    if isinstance(x, tf.Tensor):
        return x.numpy()
    if hasattr(x, "__next__"):
        raise UsageError(
            f"{what} is a generator, which cannot be sent to other processes: pass a callable "
            "that takes a tf.distribute.InputContext and returns a tf.data.Dataset."
        )
    if not keras_compat.is_dataset(x):
        return x
    alternative = (
        "pass a callable that builds it in each process: "
        "tfmw.fit(model, lambda context: make_dataset(context), workers=...)."
    )
    graph = keras_compat.dataset_graph(x)
    python = sorted({op for op in _operations(graph) if op.endswith(("PyFunc", "PyFuncStateless"))})
    if python:
        raise UsageError(
            f"{what} is a dataset that holds Python functions ({', '.join(python)}), which cannot "
            f"be sent to other processes: {alternative}"
        )
    try:
        graph = keras_compat.dataset_graph(x, for_other_process=True)
    except tf.errors.OpError as e:
        raise UsageError(
            f"{what} is a dataset that uses state of this process, such as a variable or a table "
            f"({_first_line(e)}): {alternative}"
        ) from e
    return _SentDataset(graph.SerializeToString(), x.element_spec)


def _operations(graph: Any) -> list[str]:
    names = [node.op for node in graph.node]
    for function in graph.library.function:
        names.extend(node.op for node in function.node_def)
    return names


def _sent_validation(validation_data: Any) -> Any:
    return None if validation_data is None else _sent(validation_data, "validation_data")


def _opened(x: Any) -> Any:
    if isinstance(x, _SentDataset):
        return x.open()
    if isinstance(x, dict):
        return {k: _opened(v) for k, v in x.items()}
    if isinstance(x, (list, tuple)):
        return type(x)(_opened(v) for v in x)
    return x


def _restore_newest_backup(model: keras.Model, backup_dir: str) -> None:
    """Restores the newest backup of the stopped workers into the caller's model."""
    for backup in BackupStore(backup_dir).candidates():
        try:
            tensors = backup.tensors()
        except Damaged:
            continue
        state.restore(model, {k: np.asarray(v) for k, v in tensors.items()})
        print(f"stopped; the model has the weights of step {backup.step}")
        return
    print("stopped before the first backup; the model is unchanged")


def _first_line(error: BaseException) -> str:
    text = getattr(error, "message", None) or str(error) or type(error).__name__
    return str(re.sub(r"\{\{.*?\}\}\s*| \[Op:.*", "", text.splitlines()[0]))[:200]
