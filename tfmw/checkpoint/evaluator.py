"""Evaluation beside the training: a task that evaluates each new backup.

    tfmw run --workers 2 --evaluator train.py        # the same script; its fit() calls `watch`

On a task of type `evaluator` the call of `fit` does not train. It waits for backups in
`backup_dir`, and for each new one

* restores it into the model and evaluates `validation_data`;
* writes the logs as TensorBoard scalars, `evaluation_<name>_vs_iterations`, to
  `<backup_dir>/evaluation`;
* exports the model to `<backup_dir>/best` where the monitored log is the best so far.

It ends after the backup that records the end of training. A restarted evaluator skips the backups
that `<backup_dir>/evaluation/done.json` lists as evaluated. With an evaluator, the training does
not remove its backups at its end. The evaluator removes them, after a restart too. It needs the
chief's directory, and no address: no task waits for it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfmw import storage
from tfmw.checkpoint import state
from tfmw.checkpoint.store import EVALUATOR_LOCK, Backup, BackupStore, Damaged
from tfmw.errors import UsageError
from tfmw.export import export
from tfmw.keras_compat import parameter_servers
from tfmw.runtime import file_lock

logger = logging.getLogger("tfmw")

_POLL_S = 0.5
_RELEASE_S = 30.0
_REMINDER_S = 30.0
_FOLDER = "evaluation"
_BEST = "best"
_DONE = "done.json"


def watch(
    model: keras.Model,
    evaluate: Callable[[], dict[str, float]],
    backup_dir: str | os.PathLike[str],
    *,
    monitor: str = "loss",
    mode: str = "auto",
    remove: bool = True,
    sleep: Callable[[float], None] = time.sleep,
) -> keras.callbacks.History:
    """Evaluates every new backup until training is over.

    Args:
        model: compiled and built, as for the training.
        evaluate: evaluates the model with its current weights; returns logs by name.
        backup_dir: the backup directory of the training.
        monitor: the log by which the best backup is chosen.
        mode: "min", "max" or "auto": by the name, as `keras.callbacks.ModelCheckpoint`.
        remove: whether to remove the backups in the end, as a training would.
        sleep: waits for a number of seconds.

    Returns:
        A History whose epochs are the steps of the backups, with logs `val_<name>`.

    Raises:
        UsageError: the backups are of another model, or the model does not log `monitor`.
    """
    evaluation = _Evaluation(model, evaluate, os.fspath(backup_dir), monitor, mode)
    store = BackupStore(evaluation.path)
    reminder = _Reminder(evaluation.path)
    with _watching(evaluation.path), contextlib.closing(evaluation):
        while True:
            backup = _newest(store)
            if backup is None:
                reminder.wait()
            is_new = backup is not None and backup.step not in evaluation.done.logs
            if backup is None or not (is_new or backup.record["done"]):
                sleep(_POLL_S)
                continue
            if is_new and not evaluation.run(backup):
                continue
            if backup.record["done"]:
                break
        store.dismiss_evaluator()
    if remove:
        _remove(store, sleep)
    return evaluation.history


class _Reminder:
    """Reports once that there has been no backup for a while.

    The training may never have begun; or it ended, and removed its backups, before they were
    watched.
    """

    def __init__(self, path: str):
        self._path = path
        self._polls = 0

    def wait(self) -> None:
        """Counts one more poll that has found no backup."""
        self._polls += 1
        if self._polls == int(_REMINDER_S / _POLL_S):
            logger.warning(
                "the evaluator waits for a backup in %s: none in %d s. A training that has already "
                "ended has removed its own; start both together, as tfmw run --evaluator does.",
                self._path,
                _REMINDER_S,
            )


class _Evaluation:
    """Evaluates backups of one directory and keeps the results; arguments as of `watch`."""

    def __init__(
        self,
        model: keras.Model,
        evaluate: Callable[[], dict[str, float]],
        path: str,
        monitor: str,
        mode: str,
    ):
        self.path = path
        self._model = model
        self._evaluate = evaluate
        self._monitor = monitor
        self._mode = mode
        folder = os.path.join(path, _FOLDER)
        tf.io.gfile.makedirs(folder)
        self.done = _Done(os.path.join(folder, _DONE))
        self.history = keras.callbacks.History()
        self.history.set_model(model)
        self.history.on_train_begin()
        for step, logs in self.done.logs.items():
            self.history.on_epoch_end(step, logs)
        self._writer = tf.summary.create_file_writer(folder)

    def run(self, backup: Backup) -> bool:
        """Evaluates one backup. Returns False if the training has replaced it by a newer one."""
        tensors = _tensors(backup)
        if tensors is None:
            return False
        _refuse_other(backup, self._model, self.path)
        state.restore(self._model, tensors)
        logs = {f"val_{name}": float(value) for name, value in self._evaluate().items()}
        _write(self._writer, backup.step, logs)
        best = _is_best(logs, list(self.done.logs.values()), self._monitor, self._mode)
        if best:
            # Before the logs are stored: an evaluator that dies in between exports it again.
            export(self._model, os.path.join(self.path, _BEST))
        self.done.add(backup.step, logs)
        self.history.on_epoch_end(backup.step, logs)
        logger.info("evaluated step %d: %s%s", backup.step, logs, ", the best" * best)
        return True

    def close(self) -> None:
        """Closes the TensorBoard file."""
        self._writer.close()


def _remove(store: BackupStore, sleep: Callable[[float], None]) -> None:
    """Removes the backups as soon as the finished training has released its lock."""
    for _ in range(int(_RELEASE_S / _POLL_S)):
        with contextlib.suppress(UsageError), store.locked():
            newest = _newest(store)
            if newest is None or newest.record["done"]:
                store.clear()
            return
        sleep(_POLL_S)
    logger.warning("the backups in %s were not removed: another run has locked them", store.path)


@contextlib.contextmanager
def _watching(path: str) -> Iterator[None]:
    """Marks the directory as watched; only one evaluator at a time where file locks work."""
    if not storage.is_local(path):
        with tf.io.gfile.GFile(os.path.join(path, EVALUATOR_LOCK), "w") as file:
            file.write("watching\n")
        yield
        return
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(file_lock.file_lock(os.path.join(path, EVALUATOR_LOCK)))
        except BlockingIOError:
            raise UsageError(
                f"another evaluator already watches {path!r}: run one evaluator for a backup_dir."
            ) from None
        yield


class _Done:
    """The logs of all evaluated backups by step, on disk."""

    def __init__(self, path: str):
        self._path = path
        self.logs: dict[int, dict[str, float]] = {}
        if tf.io.gfile.exists(path):
            with tf.io.gfile.GFile(path) as file:
                self.logs = {int(step): logs for step, logs in json.load(file).items()}

    def add(self, step: int, logs: dict[str, float]) -> None:
        self.logs[step] = logs
        temporary = f"{self._path}.tmp"
        with tf.io.gfile.GFile(temporary, "w") as file:
            file.write(json.dumps(self.logs))
        tf.io.gfile.rename(temporary, self._path, overwrite=True)


def _newest(store: BackupStore) -> Backup | None:
    """The newest complete backup; the training may be writing or removing others meanwhile."""
    for step in reversed(store.steps()):
        with contextlib.suppress(Damaged, OSError, tf.errors.OpError):
            return store.read(step)
    return None


def _tensors(backup: Backup) -> Any:
    """The tensors of a backup; None if it has been removed meanwhile."""
    try:
        return dict(backup.tensors())  # tables as well, while they are there
    except (Damaged, OSError, tf.errors.OpError):
        return None


def _refuse_other(backup: Backup, model: keras.Model, path: str) -> None:
    """Raises UsageError if the backup is of another model; the batch size is not compared."""

    def of_model(signature: list[str]) -> list[str]:
        return [line for line in signature if not line.startswith("global batch size")]

    current = of_model(state.signature(model, None))
    state.refuse_other(of_model(backup.record["signature"]), current, path)


def _write(writer: Any, step: int, logs: dict[str, float]) -> None:
    with writer.as_default():
        for name, value in logs.items():
            name = name.removeprefix("val_")
            tf.summary.scalar(f"evaluation_{name}_vs_iterations", value, step=step)
    writer.flush()


def _is_best(
    logs: dict[str, float], before: list[dict[str, float]], monitor: str, mode: str
) -> bool:
    name = f"val_{monitor.removeprefix('val_')}"
    if name not in logs:
        raise UsageError(
            f"the evaluator monitors {monitor!r}, which the model does not log: expected one of "
            f"{', '.join(n.removeprefix('val_') for n in logs)}."
        )
    highest = mode == "max" or (mode == "auto" and parameter_servers.more_is_better(monitor))
    value, others = logs[name], [old[name] for old in before if name in old]
    if value != value:  # NaN
        return False
    return all(value > o if highest else value < o for o in others if o == o)
