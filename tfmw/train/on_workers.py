"""`tfmw.fit(model, data, workers=2)`: a call with a model of this process, on other processes.

A process that has run TensorFlow ops cannot join a cluster, and a notebook's kernel has usually run
some. So the model and the data are sent to worker processes, which make the call. Weights,
optimizer state and History are copied back into the caller's objects.

The model is sent with the classes and functions that a notebook defines (`pickling`), a
`tf.data.Dataset` as its graph, arrays and callables unchanged. On this machine only children of
this process receive them; with `on=` an engine transfers them to the tasks.

On this machine each call is one of `Workers`: those that the caller passes, or some that end after
it. Workers of an engine make one call, too, and restart after a failure.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np

from tfmw import data
from tfmw.compat import model_methods, models
from tfmw.errors import Preempted, UsageError
from tfmw.launcher import call
from tfmw.launcher.engines import agent, submit
from tfmw.launcher.engines.engine import Engine
from tfmw.launcher.engines.standing_job import JobWorkers
from tfmw.launcher.output import is_watched
from tfmw.launcher.run import launch
from tfmw.storage import disk
from tfmw.train.arguments import FitArguments
from tfmw.train.callbacks.roles import BackupAndRestore, TemporaryBackup, without_backup
from tfmw.train.checkpoint import state
from tfmw.train.checkpoint.store import BackupStore
from tfmw.train.sent_data import follow_orders, sent_data
from tfmw.train.worker_calls import KEPT_BY_JOB, run
from tfmw.train.workers import (
    NO_RESTARTS,
    Requests,
    Workers,
    for_one_call,
    refuse_in_cluster,
    require_number,
)

_BACKUP_EVERY = "2 s"  # an interrupted cell loses at most 2 s of training
_BACKUP_OF_JOB_EVERY = "10 s"  # each backup is sent to the job's controller


def fit_on_workers(fit: Callable[..., Any], arguments: FitArguments) -> Any:
    """Trains on other processes and copies the result back.

    Args:
        fit: `tfmw.fit`, which each worker calls.
        arguments: arguments of the call, with a number of workers or a `Workers`. Each worker runs
            the model's own `fit`, if its class has one; wrappers of other libraries run here.

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

    def run_here(**passed: Any) -> Any:
        return _fit_on_workers(fit, dataclasses.replace(arguments, **passed))

    return _with_wrappers("fit", vars(arguments), arguments.given, run_here)


def pass_on_workers(
    method: Callable[..., Any], arguments: Mapping[str, Any], given: Collection[str]
) -> Any:
    """Evaluates or predicts on other processes; see `fit_on_workers`.

    Args:
        method: `tfmw.evaluate` or `tfmw.predict`.
        arguments: its arguments by name.
        given: names of those that the caller has passed.
    """

    def run_here(**passed: Any) -> Any:
        name, all_of = method.__name__, {**arguments, **passed}
        model, workers, on = all_of["model"], all_of["workers"], all_of["on"]
        _refuse(workers, all_of["strategy"])
        sent = {**all_of, "x": sent_data(all_of["x"], "x"), "workers": None, "on": "local"}
        sent["given"] = frozenset(given)
        if isinstance(model, keras.Model):
            _build(name, all_of, given, lambda passed: _source({**all_of, **passed}))
        prepared = model_methods.is_within(model, name)
        if (engine := _engine(workers, on)) is not None:
            launched = functools.partial(_on_engine, engine, workers)
            answer = _call_once(method, sent, prepared, launched)
        else:
            with _local(workers) as local:
                answer = local.call(method, sent, prepared)
            if answer["signal"]:
                signal.raise_signal(answer["signal"])
        follow_orders(sent["x"], answer["orders"])
        return answer["result"]

    return _with_wrappers(method.__name__, arguments, given, run_here)


def _source(arguments: Mapping[str, Any]) -> data.Source:
    names = ("x", "y", "sample_weight", "batch_size", "steps")
    x, y, sample_weight, batch_size, steps = map(arguments.get, names)
    return data.Source(x, y, sample_weight, batch_size, steps)


def _with_wrappers(
    name: str, arguments: Mapping[str, Any], given: Collection[str], run_here: Callable[..., Any]
) -> Any:
    """The result of `run_here`, within wrappers that other libraries have put around `name`."""
    model = arguments["model"]
    if not isinstance(model, keras.Model):
        return run_here()
    return model_methods.call_method(model, name, arguments, given, run_here, None, overrides=False)


def _refuse(workers: Any, strategy: Any) -> None:
    if not isinstance(workers, Workers):
        refuse_in_cluster(workers)
    if strategy not in ("auto", "multi_worker_mirrored"):
        raise UsageError(
            f"workers={workers} trains with multi-worker mirroring, received "
            f"strategy={strategy!r}: leave one of the two out, or submit a function that calls "
            "fit, as in tfmw.submit(train, workers=2, ps=1)."
        )


def _engine(workers: Any, on: Any) -> Engine | None:
    """The engine of a call; None for processes of this machine."""
    engine = submit.engine_of(on)
    if not isinstance(workers, Workers) and engine.name != "local":
        return engine
    if not isinstance(workers, Workers):
        require_number(workers)
    return None


def _local(workers: Any) -> contextlib.AbstractContextManager[Workers]:
    """The workers of a call, which end with it if the caller passed a number."""
    if isinstance(workers, Workers):
        return contextlib.nullcontext(workers)
    return for_one_call(workers)


def _fit_on_workers(fit: Callable[..., Any], arguments: FitArguments) -> Any:
    model, workers = arguments.model, arguments.workers
    _refuse(workers, arguments.strategy)
    engine = _engine(workers, arguments.on)
    restarts = submit.engine_of(arguments.on).max_restarts
    if isinstance(workers, Workers) and restarts:
        raise UsageError(NO_RESTARTS)
    sent = dataclasses.replace(
        arguments,
        x=sent_data(arguments.x, "x"),
        validation_data=sent_data(arguments.validation_data, "validation_data"),
        workers=None,
        on="local",
    )

    def source(passed: Mapping[str, Any]) -> data.Source:
        return dataclasses.replace(arguments, **passed).split().source

    if isinstance(model, keras.Model):
        _build("fit", vars(arguments), arguments.given, source)
    if engine is not None:
        chief = _train_on_engine(fit, sent, workers, engine)
    elif restarts:
        chief = _train_with_restarts(fit, sent, workers, restarts)
    else:
        with _local(workers) as local:
            chief = _train_here(fit, sent, local)
    history = keras.callbacks.History()
    vars(history).update(chief["history"])
    follow_orders([sent.x, sent.validation_data], chief["orders"])
    if isinstance(model, keras.Model):
        history.set_model(model)
        model.history = history
    if chief.get("signal"):  # after the last step
        signal.raise_signal(chief["signal"])
    return chief.get("result", history)


@contextlib.contextmanager
def _backups(
    sent: FitArguments, folder: str, job: JobWorkers | None = None
) -> Iterator[FitArguments]:
    """The arguments with a backup, whose newest state a stopped model gets.

    Args:
        sent: the arguments.
        folder: a folder of this machine for the call alone.
        job: the workers, if they are those of a job: it sends the backup to this machine.
    """
    own = os.path.join(folder, "backups")
    kept, every = own, _BACKUP_EVERY
    if job is not None:
        job.forget_backup()
        sent = _with_absolute_paths(sent)
        # Each call has a folder of its own in the workers.
        kept, every = os.path.join(KEPT_BY_JOB, os.path.basename(folder)), _BACKUP_OF_JOB_EVERY
    backup = sent.backup or TemporaryBackup(kept, every)
    try:
        yield _with(sent, backup)
    except (KeyboardInterrupt, Preempted) as stopped:
        if job is not None and sent.backup is None:
            _unpack_backup(job.job, own)
        _restore_newest_backup(sent.model, own if sent.backup is None else backup.backup_dir)
        if sent.backup is not None or isinstance(stopped, KeyboardInterrupt):
            raise
        print("without backup_dir= the same command starts anew", flush=True)
        raise SystemExit(128 + signal.SIGTERM) from None


def _train_here(fit: Callable[..., Any], sent: FitArguments, workers: Workers) -> dict[str, Any]:
    """Trains on workers that stay; returns the chief's answer."""
    with workers.folder() as folder, _backups(sent, folder, workers.job()) as backed_up:
        answer = {"stopped": True, "signal": 0}
        while "stopped" in answer and not answer["signal"]:  # else a worker alone got the signal
            answer = workers.call(fit, vars(backed_up), _prepared(sent))
        if "stopped" not in answer:
            return answer
        if answer["signal"] == signal.SIGINT:
            raise KeyboardInterrupt
        raise Preempted("the workers saved their state; the same command resumes the run")


def _train_with_restarts(
    fit: Callable[..., Any], sent: FitArguments, workers: Any, restarts: int
) -> dict[str, Any]:
    """Trains on processes of this machine that restart after a failure."""

    def launched(*request: Any) -> list[Any]:
        return launch(run, request, workers, max_restarts=restarts, scratch=folder)

    with (
        tempfile.TemporaryDirectory(prefix="tfmw-fit-") as folder,
        _backups(sent, folder) as backed_up,
    ):
        return _call_once(fit, vars(backed_up), _prepared(sent), launched)


def _prepared(sent: FitArguments) -> bool:
    return model_methods.is_within(sent.model, "fit")


def _call_once(
    method: Callable[..., Any],
    arguments: Mapping[str, Any],
    prepared: bool,
    launched: Callable[..., list[Any]],
) -> dict[str, Any]:
    """The chief's answer to a request, for which `launched` starts processes."""
    requests = Requests(keeps=False, stays=False)
    request, packer = requests.make(method, arguments, prepared)
    answers = launched(request)
    requests.end(request, packer, arguments["model"], answers)
    answer: dict[str, Any] = answers[0]
    return answer


def _with(sent: FitArguments, backup: BackupAndRestore) -> FitArguments:
    """The arguments with a backup callback in place of `backup_dir` and `backup_every`."""
    callbacks, _ = without_backup(sent.callbacks)
    return dataclasses.replace(sent, callbacks=[*callbacks, backup], backup_dir=None)


def _train_on_engine(
    fit: Callable[..., Any], sent: FitArguments, workers: Any, engine: Engine
) -> dict[str, Any]:
    """Trains on the machines of an engine; returns the chief's answer."""
    sent = _with_absolute_paths(sent)
    backup = sent.backup or TemporaryBackup(KEPT_BY_JOB, _BACKUP_OF_JOB_EVERY)

    def stopped(job: Any) -> None:
        with tempfile.TemporaryDirectory(prefix="tfmw-fit-") as folder:
            if sent.backup is None:
                _unpack_backup(job, folder)
            _restore_newest_backup(sent.model, backup.backup_dir if sent.backup else folder)

    def launched(request: Any) -> list[Any]:
        return _on_engine(engine, workers, request, stopped)

    return _call_once(fit, vars(_with(sent, backup)), _prepared(sent), launched)


def _with_absolute_paths(sent: FitArguments) -> FitArguments:
    """The arguments for processes with other working directories."""
    if sent.backup is not None:
        backup = copy.copy(sent.backup)
        backup.backup_dir = disk.absolute(backup.backup_dir)
        sent = _with(sent, backup)
    if sent.export_dir is not None:
        sent = dataclasses.replace(sent, export_dir=disk.absolute(os.fspath(sent.export_dir)))
    return sent


def _unpack_backup(job: Any, folder: str) -> None:
    """Writes the backup that a job has kept, if there is one, into a folder of this machine."""
    if archive := job.backup():
        agent.unpack(archive, Path(folder))


def _on_engine(
    engine: Engine, workers: Any, request: Any, stopped: Callable[[Any], None] = lambda job: None
) -> list[Any]:
    """The answers of the tasks of a job; `stopped` is called with a job that Ctrl-C has ended."""
    packed, live = call.pack(run, (request,)), is_watched(sys.stdout)
    job = submit.start(engine, packed, workers, engine.max_restarts, live=live)
    return submit.finish(job, stopped=stopped)


def _build(
    name: str,
    arguments: Mapping[str, Any],
    given: Collection[str],
    source: Callable[[Mapping[str, Any]], data.Source],
) -> None:
    """Builds the caller's model, so that it has variables for the workers' values.

    Args:
        source: the data, for the arguments that reach Keras's method.
    """
    model = arguments["model"]
    if name != "predict" and not model.compiled:
        raise UsageError(
            "the model is not compiled. You must call `compile(optimizer=..., loss=...)` before "
            f"tfmw.{name}()."
        )

    def build(**passed: Any) -> None:
        spec = source(passed).shard(data.Sharding(), data.SharedOrder()).element_spec
        if name == "predict":
            models.build_for_inputs(model, keras.utils.unpack_x_y_sample_weight(spec)[0])
        else:
            models.build_all(model, spec)
        raise _Built

    if not model.built if name == "predict" else models.needs_build(model):
        with contextlib.suppress(_Built):
            model_methods.call_method(model, name, arguments, given, build, None, is_chief=False)


class _Built(BaseException):
    """Ends a user's `fit`, which has prepared the data, when it calls Keras's method."""


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
