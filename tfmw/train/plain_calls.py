"""Keras's methods as tfmw's: `model.fit(...)` in a script without a line of tfmw.

    tfmw run --workers 2 train.py        # model.fit, evaluate, predict, ... run on all workers

    with tfmw.options(backup_dir="/shared/run7"):      # arguments of tfmw.fit that Keras has not
        model.fit(data, epochs=5)

All tasks make the same plain calls. Keras's own methods remain where one task may be alone: in
callbacks, where a training of another model is nevertheless tfmw's unless the chief alone runs the
callback; in wrappers of other libraries; in other threads; in child processes.

A script may call `fit` several times with one directory of backups, and the restarted script may
skip some of these calls. So each has a folder, named after its model, optimizer and data.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import json
import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import tensorflow as tf

from tfmw.cluster import membership
from tfmw.cluster.cluster import BACKUP_DIR
from tfmw.cluster.group import Group
from tfmw.compat import model_methods
from tfmw.data import comparison
from tfmw.errors import UsageError
from tfmw.observe import task_process
from tfmw.storage import directories
from tfmw.storage.bucket import Bucket, is_bucket
from tfmw.train import batch_calls, calls, strategies
from tfmw.train.callbacks.roles import BackupAndRestore, writes
from tfmw.train.checkpoint.compatibility import signature
from tfmw.train.checkpoint.store import BackupStore
from tfmw.train.fit_context import errors_reported

logger = logging.getLogger("tfmw")

_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "fit": calls.fit,
    "evaluate": calls.evaluate,
    "predict": calls.predict,
    "train_on_batch": batch_calls.train_on_batch,
    "test_on_batch": batch_calls.test_on_batch,
}


class _Thread(threading.local):
    settings: Mapping[str, Any] = {}  # of `options`


_thread = _Thread()
_counts: Counter[str] = Counter()  # of the calls of `fit` with backups, by what describes them


@contextlib.contextmanager
def options(**settings: Any) -> Iterator[None]:
    """Replaces Keras's methods by tfmw's within its context, with further arguments.

    In a process of its own, too: `model.fit` then saves backups, or trains on new processes.

    Args:
        **settings: keyword-only arguments of `tfmw.fit`: `backup_dir`, `backup_every`,
            `export_dir`, `sync`, `workers` and others. `strategy`, `workers`, `on` and
            `split_batch` are also those of `evaluate` and `predict`. Each `fit` has a folder of its
            own in `backup_dir`.

    Raises:
        UsageError: an unknown argument.

    Example:
        with tfmw.options(backup_dir="/shared/run7", backup_every=500):
            model.fit(images, labels, epochs=5)
    """
    known = [p.name for p in _signature(calls.fit).parameters.values() if p.kind is p.KEYWORD_ONLY]
    if unknown := sorted(settings.keys() - set(known)):
        raise UsageError(
            f"tfmw.options received {', '.join(unknown)}: expected arguments that tfmw.fit has and "
            f"model.fit has not: {', '.join(known)}."
        )
    before = _thread.settings
    _thread.settings = {**before, **settings}
    try:
        with model_methods.replaced_methods(plain_call):
            yield
    finally:
        _thread.settings = before


def plain_call(
    own: Callable[..., Any], name: str, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The result of a plain call such as `model.fit(*args, **kwargs)`.

    Args:
        own: Keras's method.
    """
    if _is_of_this_task_alone(name):
        return own(model, *args, **kwargs)
    passed = dict(_signature(own).bind(model, *args, **kwargs).arguments)
    del passed["self"]
    passed |= passed.pop("kwargs", {})
    function, settings = _FUNCTIONS[name], {**_of_command_line(), **_thread.settings}
    settings = {k: v for k, v in settings.items() if k in _signature(function).parameters}
    with model_methods.from_plain(model, name):
        if name != "fit" or not model.compiled:
            return function(model, **passed, **settings)
        backup = _backup(passed, settings)
        if backup is None:
            return function(model, **passed, **settings)
        name_of_call = _folder(model, passed, settings, backup.backup_dir)
        backup.backup_dir = os.path.join(backup.backup_dir, name_of_call)
        others = [c for c in tf.nest.flatten(passed.get("callbacks")) if not _is_backup(c)]
        passed["callbacks"] = [*(c for c in others if c is not None), backup]
        try:
            result = function(model, **passed, **{**settings, "backup_dir": None})
        except BaseException:
            if settings.get("backup_dir") is None:  # as Keras's callback, the next call continues
                _counts.subtract([name_of_call.split("-")[1]])  # of fit-<digest>-<number>
            raise
        if membership.current_cluster().is_chief:
            membership.on_success(functools.partial(_remove_empty, backup.backup_dir))
        return result


def _of_command_line() -> dict[str, Any]:
    directory = os.environ.get(BACKUP_DIR)
    return {"backup_dir": directory} if directory else {}


_signature = functools.cache(inspect.signature)  # a batch may take less than a millisecond


def _is_of_this_task_alone(name: str) -> bool:
    if task_process.is_child() or model_methods.is_of_wrapper(name):
        return True
    if not model_methods.is_within_call():
        return False
    return name != "fit" or model_methods.is_of_callback(writes)


# ---- backups -----------------------------------------------------------------------------------


def _is_backup(callback: Any) -> bool:
    return type(callback) is keras.callbacks.BackupAndRestore


def _backup(passed: Mapping[str, Any], settings: Mapping[str, Any]) -> BackupAndRestore | None:
    """The backup that `options`, the command line, or else Keras's callback asks for."""
    if settings.get("backup_dir") is not None:
        every = settings.get("backup_every", "epoch")
        return BackupAndRestore(settings["backup_dir"], save_freq=every)
    for callback in filter(_is_backup, tf.nest.flatten(passed.get("callbacks"))):
        delete = callback.delete_checkpoint
        return BackupAndRestore(
            callback.backup_dir, save_freq=callback.save_freq, delete_checkpoint=delete
        )
    return None


def _folder(
    model: Any, passed: Mapping[str, Any], settings: Mapping[str, Any], directory: str
) -> str:
    """The name of the folder of this call's backups in `directory`; the same on all tasks."""

    def choose() -> str:
        digest = hashlib.sha256(_description(model, passed).encode()).hexdigest()[:12]
        _counts[digest] += 1
        name = f"fit-{digest}-{_counts[digest]}"
        found = _calls_in(directory)
        if name not in found:
            _warn_of_others(directory, found)
        return name

    if settings.get("workers") is not None:  # of new processes
        return choose()
    strategy = settings.get("strategy", "auto")
    with errors_reported(strategy):
        chosen = strategies.choose(strategy)
        if strategies.servers_of(chosen) is not None:
            return choose()
        name: str = Group.of(chosen).from_chief(choose)
        return name


def _description(model: Any, passed: Mapping[str, Any]) -> str:
    """Text that is equal where a restarted script makes the same call, built or not."""
    lines = signature(model, passed.get("batch_size"))
    rate = model.optimizer.get_config().get("learning_rate") if model.optimizer else None
    data = [list(comparison.described(passed.get(k))) for k in ("x", "y", "sample_weight")]
    parts = [
        [line for line in lines if not line.startswith(("variable ", "metric "))],
        float(f"{rate:.6g}") if isinstance(rate, float) else rate,
        data,
    ]
    return json.dumps(parts, sort_keys=True, default=lambda part: type(part).__name__)


def _calls_in(directory: str) -> set[str]:
    """Names of the folders in a directory, or of those in a bucket that have backups."""
    if is_bucket(directory):
        names = Bucket(directory).names()
        return {name.partition("/")[0] for name in names if "/data/" in name}
    return set(os.listdir(directory)) if os.path.isdir(directory) else set()


def _warn_of_others(directory: str, found: set[str]) -> None:
    """Warns if the directory has backups of calls that this script has not made."""
    made = {f"fit-{digest}-{n + 1}" for digest, count in _counts.items() for n in range(count)}
    if others := sorted(name for name in found - made if name.startswith("fit-")):
        logger.warning(
            "no backup in %s is of this call of model.fit, which begins anew; %s is of a call with "
            "another model, optimizer or data",
            directory,
            others[0],
        )


def _remove_empty(path: str) -> None:
    """Removes the directory of a call whose backups have been removed."""
    store = BackupStore(path)
    with contextlib.suppress(OSError, tf.errors.OpError):
        if not (store.steps() or store.has_evaluator() or membership.expects_evaluator()):
            directories.remove(path)
