"""Evaluation during the training: a task that evaluates each new backup.

    tfmw run --workers 2 --evaluator train.py        # the same script; its fit() calls `watch`

On a task of type `evaluator` the call of `fit` does not train. It waits for backups in
`backup_dir`, and for each new one

* restores it into the model and evaluates `validation_data`;
* writes the logs as TensorBoard scalars, `evaluation_<name>_vs_iterations`, to
  `<backup_dir>/evaluation`;
* exports the model to `<backup_dir>/best` if the loss is the lowest so far.

It ends after the backup that records the end of training. A restarted evaluator skips the backups
that `<backup_dir>/evaluation/done.json` lists as evaluated. With an evaluator, the training does
not remove its backups at its end. The evaluator removes them, after a restart too. It needs access
to the chief's directory, but no address: no task waits for it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterator

import keras
import tensorflow as tf

from tfmw.errors import UsageError
from tfmw.storage import disk
from tfmw.train.checkpoint import state
from tfmw.train.checkpoint.compatibility import refuse_other, signature
from tfmw.train.checkpoint.store import EVALUATOR_LOCK, Backup, BackupStore, Damaged
from tfmw.train.saved_model import export

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
    remove: bool = True,
    sleep: Callable[[float], None] = time.sleep,
) -> keras.callbacks.History:
    """Evaluates every new backup until training is over.

    Args:
        model: a compiled and built model, as for the training.
        evaluate: evaluates the model with its current weights; returns logs by name.
        backup_dir: the backup directory of the training.
        remove: whether to remove the backups at the end, as a training would.
        sleep: function that waits for a number of seconds.

    Returns:
        A History whose epochs are the steps of the backups, with logs `val_<name>`.

    Raises:
        UsageError: the backups are of another model, or the model does not log a loss.
    """
    path = disk.without_scheme(os.fspath(backup_dir))
    if not disk.is_local(path):
        raise UsageError(
            f"the evaluator writes its logs and the best model beside the backups, and backup_dir "
            f"{path!r} is in a bucket: use a directory that it shares with the chief."
        )
    evaluation = _Evaluation(model, evaluate, path)
    store = BackupStore(path)
    polls = 0  # number of polls that have found no backup
    done = False
    with _watching(path), contextlib.closing(evaluation.writer):
        while not done:
            backup = _newest(store)
            if backup is None:
                polls += 1
                if polls == int(_REMINDER_S / _POLL_S):
                    # The training may never have begun, or it ended before it was watched.
                    logger.warning(
                        "the evaluator waits for a backup in %s: none in %d s. A training that has "
                        "already ended has removed its own; start both together, as tfmw run "
                        "--evaluator does.",
                        path,
                        _REMINDER_S,
                    )
            if backup is None or (backup.step in evaluation.logs and not backup.record["done"]):
                sleep(_POLL_S)
                continue
            evaluated = backup.step in evaluation.logs or evaluation.run(backup)
            done = evaluated and backup.record["done"]
        with contextlib.suppress(tf.errors.NotFoundError):  # all backups are evaluated
            tf.io.gfile.remove(os.path.join(path, EVALUATOR_LOCK))
    if remove:
        _remove(store, sleep)
    return evaluation.history


class _Evaluation:
    """Evaluates backups of one directory and stores the results; see `watch` for the arguments."""

    def __init__(self, model: keras.Model, evaluate: Callable[[], dict[str, float]], path: str):
        self._path = path
        self._model = model
        self._evaluate = evaluate
        folder = os.path.join(path, _FOLDER)
        tf.io.gfile.makedirs(folder)
        self._done = os.path.join(folder, _DONE)
        # logs of evaluated backups by step; also on disk
        self.logs: dict[int, dict[str, float]] = {}
        if tf.io.gfile.exists(self._done):
            with tf.io.gfile.GFile(self._done) as file:
                self.logs = {int(step): logs for step, logs in json.load(file).items()}
        self.history = keras.callbacks.History()  # the same logs, as `watch` returns them
        self.history.set_model(model)
        self.history.on_train_begin()
        for step, logs in self.logs.items():
            self.history.on_epoch_end(step, logs)
        self.writer = tf.summary.create_file_writer(folder)

    def run(self, backup: Backup) -> bool:
        """Evaluates one backup. Returns False if the training has replaced it by a newer one."""
        try:
            tensors = dict(backup.tensors())  # including tables, while they exist
        except (Damaged, OSError, tf.errors.OpError):
            return False
        saved, current = (  # the batch size is not compared
            [line for line in lines if not line.startswith("global batch size")]
            for lines in (backup.record["signature"], signature(self._model, None))
        )
        refuse_other({**backup.record, "signature": saved}, current, self._path)
        state.restore(self._model, tensors)
        logs = {f"val_{name}": float(value) for name, value in self._evaluate().items()}
        with self.writer.as_default():
            for name, value in logs.items():
                name = name.removeprefix("val_")
                tf.summary.scalar(f"evaluation_{name}_vs_iterations", value, step=backup.step)
        self.writer.flush()
        best = self._is_best(logs)
        if best:
            # This comes before the logs are stored: an evaluator that dies in between exports it
            # again.
            export(self._model, os.path.join(self._path, _BEST))
        self.logs[backup.step] = logs
        with disk.replacing(self._done) as temporary, open(temporary, "w") as file:
            json.dump(self.logs, file)
        self.history.on_epoch_end(backup.step, logs)
        logger.info("evaluated step %d: %s%s", backup.step, logs, ", the best" * best)
        return True

    def _is_best(self, logs: dict[str, float]) -> bool:
        if "val_loss" not in logs:
            raise UsageError(
                "the evaluator monitors 'loss', which the model does not log: expected one of "
                f"{', '.join(n.removeprefix('val_') for n in logs)}."
            )
        loss = logs["val_loss"]
        others = (old.get("val_loss", math.nan) for old in self.logs.values())
        return not math.isnan(loss) and not any(other <= loss for other in others)


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
    """Marks the directory as watched; only one evaluator at a time if file locks work."""
    lock = os.path.join(path, EVALUATOR_LOCK)
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(disk.file_lock(lock))
        except BlockingIOError:
            raise UsageError(
                f"another evaluator already watches {path!r}: run one evaluator for a backup_dir."
            ) from None
        yield


def _newest(store: BackupStore) -> Backup | None:
    """The newest complete backup; the training may be writing or removing others meanwhile."""
    for step in reversed(store.steps()):
        with contextlib.suppress(Damaged, OSError, tf.errors.OpError):
            return store.read(step)
    return None
