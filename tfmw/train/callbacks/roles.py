"""Callbacks on many workers: the tasks that run them or write, and the model that they see.

Every callback runs on every worker, with the same logs, so it makes the same changes to the model
everywhere. Callbacks that write files or send reports run on the chief only. tfmw knows Keras's
own, and recognizes those that log to a tracker (`tfmw.observe.trackers`); other callbacks declare
it:

    class Upload(keras.callbacks.Callback):
        chief_only = True

    tfmw.fit(model, data, callbacks=[tfmw.callbacks.ChiefOnly(third_party_callback)])

After each epoch all workers adopt the chief's learning rate and its decision to stop.

Users' callbacks read and assign weights, save the model, or train another one with it, and so does
Keras's own SwapEMAWeights. Code for a `tf.Variable` may not work with the copies of a strategy, so
callbacks get an ordinary model: see `OnUnplacedModel`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfmw.compat import models
from tfmw.errors import UsageError
from tfmw.observe import recorded_errors
from tfmw.observe.trackers import logs_to_tracker
from tfmw.storage import disk
from tfmw.storage.bucket import refuse_writing
from tfmw.train.callbacks.log import Log

# Keras's callbacks that write files, print or send reports: only one task may run them.
_WRITERS: tuple[type, ...] = (
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.CSVLogger,
    keras.callbacks.TensorBoard,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.ProgbarLogger,
)

# Attributes of callbacks that write: the paths to which they do.
_PATHS = ("filepath", "filename", "log_dir")

# Callbacks of other packages that write or display, by name: they need not be installed.
_THIRD_PARTY_WRITERS = {
    "keras_tuner.src.engine.tuner_utils.SaveBestEpoch",
    "tqdm.keras.TqdmCallback",
}

# Kind of a call -> the hooks that run around its batches.
_BATCH_HOOKS = {
    "train": ("on_batch_begin", "on_batch_end", "on_train_batch_begin", "on_train_batch_end"),
    "test": ("on_test_batch_begin", "on_test_batch_end"),
    "predict": ("on_predict_batch_begin", "on_predict_batch_end"),
}

_SHOWS = keras.callbacks.ProgbarLogger | keras.callbacks.History

# Keras's callbacks that read at most metrics, the learning rate or the model's own weights.
_IGNORE_OPTIMIZER: tuple[type, ...] = (
    keras.callbacks.CSVLogger,
    keras.callbacks.EarlyStopping,
    keras.callbacks.History,
    keras.callbacks.LearningRateScheduler,
    keras.callbacks.ReduceLROnPlateau,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.TensorBoard,
    keras.callbacks.TerminateOnNaN,
)


class ChiefOnly(keras.callbacks.Callback):
    """Runs a callback on the chief only.

    Args:
        callback: a Keras callback that writes files or sends reports.
    """

    chief_only = True

    def __init__(self, callback: keras.callbacks.Callback):
        super().__init__()
        self.callback = callback

    def set_model(self, model: Any) -> None:
        super().set_model(model)
        self.callback.set_model(model)

    def set_params(self, params: Any) -> None:
        super().set_params(params)
        self.callback.set_params(params)


def _forwarded(hook: str) -> Any:
    def call(self: ChiefOnly, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.callback, hook)(*args, **kwargs)

    call.__name__ = hook
    return call


for _hook in [name for name in dir(keras.callbacks.Callback) if name.startswith("on_")]:
    setattr(ChiefOnly, _hook, _forwarded(_hook))


class BackupAndRestore(keras.callbacks.Callback):
    """Backs up the run, and resumes an interrupted run at the exact step.

    It has the arguments of Keras's callback of the same name, and also works on several workers and
    in the middle of an epoch. The backups of a complete run stay: the same command then trains
    nothing and returns the history, and a larger `epochs=` trains on.

    Args:
        backup_dir: a directory of this run alone; local, or in a bucket: "s3://bucket/run7",
            "gs://..." or "az://...".
        save_freq: "epoch", a number of steps, "continuous", or a time such as "10 s" (see
            `tfmw.fit`).
        double_checkpoint: accepted for compatibility with Keras; two backups are always kept.
        delete_checkpoint: whether backups are removed when the process ends without an error, as
            with Keras's callback.
        save_nan: whether weights that are not finite may be saved. Otherwise a loss that is not
            finite ends the run. So do such weights at the next backup, even if the loss is
            finite. The previous backup is kept.

    Example:
        tfmw.fit(model, data, callbacks=[tfmw.callbacks.BackupAndRestore("/shared/run7", 500)])
    """

    def __init__(
        self,
        backup_dir: str | os.PathLike[str],
        save_freq: Any = "epoch",
        double_checkpoint: bool = False,
        delete_checkpoint: bool = False,
        *,
        save_nan: bool = False,
    ):
        super().__init__()
        self.backup_dir = disk.absolute(os.fspath(backup_dir))  # a callback may call os.chdir
        self.save_freq = save_freq
        self.double_checkpoint = double_checkpoint
        self.delete_checkpoint = delete_checkpoint
        self.save_nan = save_nan


class TemporaryBackup(BackupAndRestore):
    """A backup that the user has not requested, for a call with its own processes.

    An interrupted call gets its weights. Training continues after a loss that is not finite.
    """

    def __init__(self, backup_dir: str | os.PathLike[str], save_freq: str):
        super().__init__(backup_dir, save_freq, delete_checkpoint=True, save_nan=True)


def without_backup(callbacks: Any) -> tuple[list[Any], BackupAndRestore | None]:
    """Separates the backup callback, which `fit` implements itself, from the other callbacks.

    Raises:
        UsageError: there are two backup callbacks.
    """
    flat = tf.nest.flatten(callbacks) if callbacks else []
    backups = [c for c in flat if isinstance(c, BackupAndRestore)]
    if len(backups) > 1:
        raise UsageError(
            f"received {len(backups)} BackupAndRestore callbacks: expected at most one; keep one."
        )
    return [c for c in flat if c not in backups], backups[0] if backups else None


def writes(callback: Any) -> bool:
    """Whether a callback runs on the chief only."""
    chosen = getattr(callback, "chief_only", None)
    if chosen is not None:
        return bool(chosen)
    names = {f"{c.__module__}.{c.__qualname__}" for c in type(callback).__mro__}
    known = isinstance(callback, _WRITERS) or not names.isdisjoint(_THIRD_PARTY_WRITERS)
    return known or logs_to_tracker(callback)


def for_task(callbacks: Any, is_chief: bool, workers: int) -> list[Any]:
    """The callbacks that this task runs.

    Raises:
        UsageError: a callback that cannot work on several workers, or writes where it cannot.
    """
    flat = tf.nest.flatten(callbacks) if callbacks else []
    for callback in flat:
        for name in _PATHS:
            what = f"{name} of {type(callback).__name__}"
            # Keras's callbacks write to these through TensorFlow.
            refuse_writing(getattr(callback, name, None), what, ("gs://", "ram://"))
    for callback in flat if workers > 1 else ():
        if type(callback).__name__ == "OrbaxCheckpoint":
            raise UsageError(
                "keras.callbacks.OrbaxCheckpoint takes every worker for the primary one, so all "
                "would write the same files: use keras.callbacks.ModelCheckpoint."
            )
        if isinstance(callback, keras.callbacks.BackupAndRestore):
            raise UsageError(
                "keras.callbacks.BackupAndRestore knows no chief: every worker would write and "
                "delete the same files; use tfmw.callbacks.BackupAndRestore."
            )
    if is_chief:
        return flat
    paths = [getattr(_unwrapped(c), name, None) for c in flat if writes(c) for name in _PATHS]
    recorded_errors.add_files_of_chief(map(str, filter(None, paths)))
    return [c for c in flat if not writes(c)]


def may_read_optimizer(callback: Any) -> bool:
    """Whether a callback may read or change the optimizer's state, or change the weights.

    A callback that does not may declare it: `reads_optimizer = False`.
    """
    callback = _unwrapped(callback)
    declared: bool | None = getattr(callback, "reads_optimizer", None)
    if declared is not None:
        return declared
    if isinstance(callback, keras.callbacks.ProgbarLogger):
        return False
    if type(callback) is keras.callbacks.ModelCheckpoint:
        return not callback.save_weights_only
    return type(callback) not in _IGNORE_OPTIMIZER


def wants_every_batch(callback: Any, kind: str = "train") -> bool:
    """Whether a callback acts between batches; if none does, many steps run in one call.

    Args:
        kind: kind of the batches: "train", "test" or "predict".
    """
    callback = _unwrapped(callback)
    if isinstance(callback, _SHOWS):
        return False
    if type(callback) is keras.callbacks.ModelCheckpoint:
        return callback.save_freq != "epoch"
    if type(callback) is Log:
        return callback.every != "epoch"
    if type(callback) is keras.callbacks.TensorBoard:
        return callback.update_freq != "epoch" or models.profiles_batches(callback)
    return any(_overrides(callback, hook) for hook in _BATCH_HOOKS[kind])


def acts_in(callback: Any, hook: str) -> bool:
    """Whether a callback does more in a hook such as "on_epoch_end" than to show or store logs."""
    for kind, hooks in _BATCH_HOOKS.items():
        if hook in hooks:
            return wants_every_batch(callback, kind)
    callback = _unwrapped(callback)
    return not isinstance(callback, _SHOWS) and _overrides(callback, hook)


def _unwrapped(callback: Any) -> Any:
    return callback.callback if isinstance(callback, ChiefOnly) else callback


def _overrides(callback: Any, hook: str) -> bool:
    base = keras.callbacks.Callback
    return hook in vars(callback) or getattr(type(callback), hook) is not getattr(base, hook)


class OnUnplacedModel:
    """A list of callbacks whose hooks get the model without its placement on a strategy.

    Args:
        callback_list: a `CallbackList` of Keras.
        unplaced_model: creates the context of a hook. It copies the weights, so hooks in which no
            callback acts do not enter it. Its argument is whether moving averages are the same on
            all replicas. They are not before the first step of a run that resumes within an epoch.
    """

    def __init__(
        self,
        callback_list: keras.callbacks.CallbackList,
        unplaced_model: Callable[[bool], contextlib.AbstractContextManager[None]],
    ):
        self.callbacks: list[Any] = callback_list.callbacks
        self.of_keras = callback_list
        self._unplaced_model = unplaced_model

    def __getattr__(self, hook: str) -> Callable[..., None]:
        method: Callable[..., None] = getattr(self.of_keras, hook)
        if not any(acts_in(callback, hook) for callback in self.callbacks):
            return method

        def run(*arguments: Any, **named: Any) -> None:
            with self._unplaced_model(hook != "on_train_batch_begin"):
                method(*arguments, **named)

        return run
