"""`tfmw.fit(model, data, workers=2)`: trains a model of this process on a new cluster.

A process that has run TensorFlow ops cannot join a cluster, and a notebook's kernel has usually run
some. So the model and the data are sent to new processes and trained there. Weights, optimizer
state and History are copied back into the caller's objects.

The model is sent with the classes and functions that a notebook defines (`pickling`), a
`tf.data.Dataset` as its graph, arrays and callables unchanged. On this machine nothing is written
to disk, and only children of this process receive it; with `on=` an engine transfers it to the
tasks.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import itertools
import os
import pickle
import re
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfmw import data
from tfmw.cluster import membership
from tfmw.cluster.cluster import MEMBER
from tfmw.compat import datasets, model_methods, models
from tfmw.compat.pipelines import Pipeline, without_devices
from tfmw.compat.shuffles import ShuffleSeeds
from tfmw.data import reshuffles
from tfmw.data.random_state import restore_random_state
from tfmw.errors import Preempted, UsageError, first_line, is_whole
from tfmw.launcher import call
from tfmw.launcher.engines import agent, submit
from tfmw.launcher.engines.engine import Engine
from tfmw.launcher.output import is_watched
from tfmw.launcher.run import launch
from tfmw.observe import trackers
from tfmw.storage import disk
from tfmw.train import pickling
from tfmw.train.arguments import FitArguments
from tfmw.train.callbacks.roles import BackupAndRestore, TemporaryBackup, without_backup
from tfmw.train.checkpoint import state
from tfmw.train.checkpoint.resume import CALL, identity
from tfmw.train.checkpoint.store import BackupStore
from tfmw.train.local_sgd import round_server

_ELASTIC_RESTARTS = 100
_numbers = itertools.count()  # of calls
_BACKUP_EVERY = "2 s"  # an interrupted cell loses at most 2 s of training
_BACKUP_OF_JOB_EVERY = "10 s"  # each backup is sent to the job's controller

_LARGEST_GRAPH = 2**31 - 2**20  # most bytes of a protocol buffer, without those of its nodes

_KEPT_BY_JOB = "(kept by the job)"
"""Value in place of a `backup_dir`: each task's folder, whose newest backup the engine keeps."""


@dataclasses.dataclass(frozen=True)
class _SentDataset:
    """A dataset as its graph and the spec of its elements.

    Attributes:
        orders: name of a generator of the graph -> (seeds of its shuffle, number of passes so far).
    """

    graph: bytes
    spec: Any
    orders: Mapping[str, tuple[list[int], int]]

    def open(self, opened: dict[str, tf.data.Dataset]) -> tf.data.Dataset:
        """The dataset, with shuffles at the caller's position.

        Args:
            opened: shuffles by the names of their generators, which datasets share.
        """
        graph = tf.compat.v1.GraphDef.FromString(self.graph)
        for _, handle, again in list(reshuffles.generators_in(graph.node)):
            name = reshuffles.name_of(handle)
            if name not in opened:
                seeds, passes = self.orders[name]
                opened[name] = datasets.small_shuffle(seeds, again)
                ShuffleSeeds(opened[name]).passes = passes
            reshuffles.share(handle, opened[name])
        return datasets.dataset_from_graph(graph, self.spec)


def fit_on_workers(fit: Callable[..., Any], arguments: FitArguments) -> Any:
    """Trains on new processes and copies the result back.

    Args:
        fit: `tfmw.fit`, which each worker calls.
        arguments: arguments of the call, with a number of workers. Each worker runs the model's own
            `fit`, if its class has one; wrappers of other libraries run here.

    Returns:
        The History of the run, or the result of the model's own `fit`. If `arguments.model` is a
        model, it is trained in place.

    Raises:
        UsageError: an argument cannot be sent to other processes; this process is part of a
            cluster; or another strategy than multi-worker mirroring.
        KeyboardInterrupt, Preempted: the workers were stopped; the model has the weights of their
            last backup.
        SystemExit: they were stopped by SIGTERM and there is no `backup_dir`; the model has the
            weights of their last step.
    """

    def run(**passed: Any) -> Any:
        return _fit_on_workers(fit, dataclasses.replace(arguments, **passed))

    if not isinstance(arguments.model, keras.Model):
        return run()
    asked = vars(arguments), arguments.given
    return model_methods.call_method(arguments.model, "fit", *asked, run, None, overrides=False)


def _fit_on_workers(fit: Callable[..., Any], arguments: FitArguments) -> Any:
    model, workers = arguments.model, arguments.workers
    if not membership.current_cluster().is_single:
        raise UsageError(
            f"workers={workers} starts new processes, and this process is already part of "
            f"{membership.current_cluster()!r}: leave workers= out."
        )
    if arguments.strategy not in ("auto", "multi_worker_mirrored"):
        raise UsageError(
            f"workers={workers} trains with multi-worker mirroring, received "
            f"strategy={arguments.strategy!r}: leave one of the two out."
        )
    engine = submit.engine_of(arguments.on)
    here = engine.name == "local"
    if here and not is_whole(workers, 1):
        raise UsageError(
            f"received workers={workers!r}: expected a number of processes, such as 2."
        )
    sent = dataclasses.replace(
        arguments,
        x=_sent(arguments.x, "x"),
        validation_data=_sent(arguments.validation_data, "validation_data"),
        workers=None,
        on="local",
    )
    if isinstance(model, keras.Model):
        _build(arguments)
    if here:
        chief = _train_here(fit, sent, workers, engine.max_restarts)
    else:
        chief = _train_on_engine(fit, sent, workers, engine)
    history = keras.callbacks.History()
    vars(history).update(chief["history"])
    _follow_orders([sent.x, sent.validation_data], chief["orders"])
    if isinstance(model, keras.Model):
        state.restore(model, chief["tensors"])
        history.set_model(model)
        model.history = history
    return chief.get("result", history)


def _train_here(
    fit: Callable[..., Any], sent: FitArguments, workers: Any, max_restarts: int
) -> dict[str, Any]:
    """Trains on processes of this machine; returns the chief's result."""
    asked, elastic = sent.backup, sent.sync is not None and sent.sync.elastic
    with contextlib.ExitStack() as stack:
        backup, folder = asked, ""
        if backup is None:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="tfmw-fit-"))
            backup = TemporaryBackup(os.path.join(folder, "backups"), _BACKUP_EVERY)
        try:
            chief, *_ = launch(
                _train,
                _packed(fit, _with(sent, backup)),
                workers,
                rounds=round_server.__name__ if elastic else "",
                max_restarts=_ELASTIC_RESTARTS if elastic else max_restarts,
                scratch=folder,
                env=_call(),
            )
        except (KeyboardInterrupt, Preempted) as stopped:
            _restore_newest_backup(sent.model, backup.backup_dir)
            if asked is not None or isinstance(stopped, KeyboardInterrupt):
                raise
            print("without backup_dir= the same command starts anew", flush=True)
            raise SystemExit(128 + signal.SIGTERM) from None
    return chief


def _call() -> dict[str, str]:
    """The identity of a call, for its processes: a restart of them is no other call."""
    return {CALL: f"{identity()}/{next(_numbers)}"}


def _with(sent: FitArguments, backup: BackupAndRestore) -> FitArguments:
    """The arguments with a backup callback in place of `backup_dir` and `backup_every`."""
    callbacks, _ = without_backup(sent.callbacks)
    return dataclasses.replace(sent, callbacks=[*callbacks, backup], backup_dir=None)


def _train_on_engine(
    fit: Callable[..., Any], sent: FitArguments, workers: Any, engine: Engine
) -> dict[str, Any]:
    """Trains on the machines of an engine; returns the chief's result."""
    backup = copy.copy(sent.backup)
    directories = {}
    if backup is None:
        backup = TemporaryBackup(_KEPT_BY_JOB, _BACKUP_OF_JOB_EVERY)
    else:
        backup.backup_dir = directories["backup_dir"] = disk.absolute(backup.backup_dir)
    if sent.export_dir is not None:
        sent = dataclasses.replace(sent, export_dir=disk.absolute(os.fspath(sent.export_dir)))
    submitted = submit.start(
        engine,
        call.pack(_train, _packed(fit, _with(sent, backup))),
        workers,
        engine.max_restarts,
        live=is_watched(sys.stdout),
        directories=directories,
        env=_call(),
    )
    with submit.held(submitted) as job:
        try:
            job.logs(follow=True)
            return dict(job.result()[0])
        except KeyboardInterrupt:
            job.cancel()
            with tempfile.TemporaryDirectory(prefix="tfmw-fit-") as folder:
                if directories:
                    folder = directories["backup_dir"]
                elif archive := job.backup():
                    agent.unpack(archive, Path(folder))
                _restore_newest_backup(sent.model, folder)
            raise


def _packed(fit: Callable[..., Any], sent: FitArguments) -> tuple[Any, ...]:
    """The arguments of `_train`."""
    large: list[pickle.PickleBuffer] = []
    prepared = model_methods.is_within(sent.model, "fit")  # by the model's own method, here
    return fit, pickling.pack((sent, _process_settings(), prepared), large), large


def _train(fit: Callable[..., Any], packed: bytes, large: Sequence[Any]) -> dict[str, Any]:
    """Trains, in a worker. The chief returns the values for the caller's objects."""
    sent, process, prepared = call.loads(packed, large)
    _apply(process)
    model = sent.model
    model = pickling.rebuilt(model) if isinstance(model, keras.Model) else model()
    if sent.backup is not None and os.path.basename(sent.backup.backup_dir) == _KEPT_BY_JOB:
        sent.backup.backup_dir = os.environ[agent.BACKUPS]
    opened: dict[str, tf.data.Dataset] = {}
    arguments = {
        **vars(sent),
        "model": model,
        "x": _opened(sent.x, opened),
        "validation_data": _opened(sent.validation_data, opened),
    }
    with model_methods.from_plain(model, "fit") if prepared else contextlib.nullcontext():
        result = model_methods.call_given(fit, arguments, arguments.pop("given"))
    if not membership.current_cluster().is_chief or os.environ.get(MEMBER, "0") != "0":
        return {}
    of_user = isinstance(result, keras.callbacks.History)
    history = getattr(model, "history", None)
    return {
        **({} if of_user else {"result": result}),
        "tensors": {name: models.native(v).numpy() for name, v in state.named(model).items()},
        "history": {k: getattr(history, k, None) for k in ("history", "epoch", "params")},
        "orders": {name: ShuffleSeeds(shuffle).passes for name, shuffle in opened.items()},
    }


def _process_settings() -> dict[str, Any]:
    """Settings of this process that affect its results, in addition to the model and the data.

    The workers start from the settings of the caller's process. Then shuffled arrays have the same
    order as in one process. A function that creates a model or a dataset creates the same one.
    """
    return {
        "random": state.all_random_state(),  # generators of Python and NumPy
        "seeds": datasets.seed_state(),  # generators of TensorFlow and Keras
        "floatx": keras.config.floatx(),
        "epsilon": keras.config.epsilon(),
        "image_data_format": keras.config.image_data_format(),
        "dtype_policy": keras.dtype_policies.serialize(keras.config.dtype_policy()),
        "trackers": trackers.active_runs(),
    }


def _apply(settings: Mapping[str, Any]) -> None:
    """Applies the settings of another process to this one."""
    datasets.set_seed_state(settings["seeds"])
    restore_random_state(settings["random"])
    models.set_unseeded_state(settings["random"]["keras"])
    keras.config.set_floatx(settings["floatx"])
    keras.config.set_epsilon(settings["epsilon"])
    keras.config.set_image_data_format(settings["image_data_format"])
    policy = keras.dtype_policies.deserialize(settings["dtype_policy"])
    keras.config.set_dtype_policy(policy)
    trackers.adopt(settings["trackers"])


def _build(arguments: FitArguments) -> None:
    """Builds the caller's model, so that it has variables for the trained values."""
    model = arguments.model
    if not model.compiled:
        raise UsageError(
            "the model is not compiled. You must call `compile(optimizer=..., loss=...)` before "
            "tfmw.fit()."
        )

    def build(**passed: Any) -> None:
        source = dataclasses.replace(arguments, **passed).split().source
        shard = source.shard(data.Sharding(), data.SharedOrder())
        models.build_all(model, shard.element_spec)
        raise _Built

    if models.needs_build(model):
        asked = vars(arguments), arguments.given
        with contextlib.suppress(_Built):
            model_methods.call_method(model, "fit", *asked, build, None, is_chief=False)


class _Built(BaseException):
    """Ends a user's `fit`, which has prepared the data, when it calls Keras's method."""


def _sent(structure: Any, what: str) -> Any:
    """Arrays and datasets as they can be sent to other processes."""
    return tf.nest.map_structure(functools.partial(_sent_leaf, what), structure)


def _sent_leaf(what: str, x: Any) -> Any:
    if isinstance(x, tf.Tensor):
        return x.numpy()
    if hasattr(x, "__next__"):
        raise UsageError(
            f"{what} is a generator, which cannot be sent to other processes: pass a callable "
            "that takes a tf.distribute.InputContext and returns a tf.data.Dataset."
        )
    if not datasets.is_dataset(x):
        return x
    x = without_devices(x)
    alternative = (
        "pass a callable that builds it in each process: "
        "tfmw.fit(model, lambda context: make_dataset(context), workers=...)."
    )
    if (size := Pipeline.of(x).bytes_of_arrays) > _LARGEST_GRAPH:
        raise UsageError(
            f"{what} is a dataset over arrays of {size / 1e9:.1f} GB, and a graph that is sent to "
            "other processes holds at most 2 GB: pass the arrays themselves, which travel beside "
            f"it, tfmw.fit(model, x, y, batch_size=..., workers=...); or {alternative}"
        )
    if python := sorted(datasets.python_ops(datasets.dataset_graph(x))):
        raise UsageError(
            f"{what} is a dataset that holds Python functions ({', '.join(python)}), which cannot "
            f"be sent to other processes: {alternative}"
        )
    try:
        graph = datasets.dataset_graph(x, for_other_process=True)
    except tf.errors.OpError as e:
        why = re.sub(r"\{\{.*?\}\}\s*| \[Op:.*", "", first_line(e))[:200]
        raise UsageError(
            f"{what} is a dataset that uses state of this process, such as a variable or a table "
            f"({why}): {alternative}"
        ) from e
    orders = {}
    by_name = {node.name: node for node in graph.node}
    for node, handle, again in reshuffles.generators_in(graph.node):
        theirs = ShuffleSeeds(reshuffles.shuffle_of(handle))
        seeds = reshuffles.seeds_of(node, by_name) if again else None
        orders[reshuffles.name_of(handle)] = seeds or theirs.pair, theirs.passes
    return _SentDataset(graph.SerializeToString(), x.element_spec, orders)


def _opened(structure: Any, opened: dict[str, tf.data.Dataset]) -> Any:
    """The argument that `_sent` was called with; see `_SentDataset.open`."""
    return tf.nest.map_structure(
        lambda x: x.open(opened) if isinstance(x, _SentDataset) else x, structure
    )


def _follow_orders(sent: Any, orders: Mapping[str, int]) -> None:
    """Counts the passes that the workers have begun for the caller's datasets."""
    for dataset in tf.nest.flatten(sent):
        if isinstance(dataset, _SentDataset):
            graph = tf.compat.v1.GraphDef.FromString(dataset.graph)
            for _, handle, _ in reshuffles.generators_in(graph.node):
                passes = orders[reshuffles.name_of(handle)]
                ShuffleSeeds(reshuffles.shuffle_of(handle)).passes = passes


def _restore_newest_backup(model: Any, backup_dir: str | os.PathLike[str]) -> None:
    """Restores the newest backup of the stopped workers into the caller's model, if it has one."""
    if not isinstance(model, keras.Model):
        return
    found = BackupStore(backup_dir).newest_intact(lambda backup: (backup.step, backup.tensors()))
    if found is None:
        print("stopped before the first backup; the model is unchanged")
        return
    step, tensors = found
    state.restore(model, {k: np.asarray(v) for k, v in tensors.items()})
    print(f"stopped; the model has the weights of step {step}")
