"""Backups of a run: when they are due, and how a run resumes from one.

    with Backups(group, BackupAndRestore("/shared/backups/run7", "10 s")) as backups:
        if backups.record: ...                   # the newest complete backup, the same on all tasks
        if backups.due_after_step(...): backups.save(...)

The chief reads, and broadcasts the state to the other tasks. The chief writes, too, so only tasks
that may become the chief need access to the directory. If workers shard the optimizer's slots and
all can write to the directory, each writes its own shard (`tensor_files.py`). SIGTERM or SIGUSR1 to
one task ends all of them after the same step. They write a backup, and exit with the status that
requests another run.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import numpy as np
import tensorflow as tf

from tfmw.cluster import membership
from tfmw.cluster.group import Group
from tfmw.cluster.signals import LEAVE
from tfmw.cluster.versions import common_versions
from tfmw.compat import models
from tfmw.data.random_state import restore_random_state
from tfmw.errors import Preempted, TfmwError, UsageError, first_line
from tfmw.launcher.output import say
from tfmw.storage import directories, fence
from tfmw.storage.bucket import is_bucket
from tfmw.tables.files import NotFinite
from tfmw.tables.table import is_table
from tfmw.train.callbacks import BackupAndRestore
from tfmw.train.callbacks.log import flush_events
from tfmw.train.checkpoint import state
from tfmw.train.checkpoint.compatibility import refuse_other, signature
from tfmw.train.checkpoint.schedule import BackgroundWriter, Schedule
from tfmw.train.checkpoint.store import Backup, BackupStore
from tfmw.train.checkpoint.tensor_files import SharedWrite, SlotParts, TableBackups

logger = logging.getLogger("tfmw")

_RETRY_S = 10.0  # minimum seconds to the next backup by time after one that could not be written

PythonState = tuple[dict[str, Any], dict[str, Any]]
"""(entries of a record: states of callbacks and random generators; arrays of callbacks by name)."""


CALL = "TFMW_CALL"
"""Variable of the processes of one call with `workers=`: the caller's identity, "/", its number."""


@functools.cache
def identity() -> str:
    """Identity of this process; first called when it trains."""
    return f"{os.getpid()}-{time.time_ns()}"


def _run() -> str:
    """Identity of the backups of this process, or of the call for which it trains."""
    return os.environ.get(CALL) or identity()


def _is_of_earlier_fit(run: str) -> bool:
    """Whether a complete run was another call of the program that calls now, and not a restart."""
    caller, slash, _ = run.partition("/")
    same = caller == _run().partition("/")[0]
    return same and (not slash or run != _run())


class Backups:
    """The backups of one call of fit, in a directory, if there is one.

    Without a directory signals end the process as usual, and a loss that is not finite does not end
    the run.

    Args:
        group: the tasks that train together.
        asked: their directory, frequency and other settings; None saves nothing.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        group: Group,
        asked: BackupAndRestore | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.has_directory = asked is not None
        self.on = self.has_directory  # whether anything is saved
        # The JSON of the newest complete backup, on all tasks, or None. The chief also has its
        # tensors.
        self.record: dict[str, Any] | None = None
        self.tensors: Mapping[str, Any] = {}
        # both, as they were read
        self.on_disk: tuple[dict[str, Any] | None, Mapping[str, Any]] = None, {}
        self.saved_at: float | None = None  # monotonic time of the last backup of this call
        self.schedule = Schedule("epoch" if asked is None else asked.save_freq)
        self.path = "" if asked is None else asked.backup_dir
        self._group = group
        self._delete = asked is not None and asked.delete_checkpoint
        self._save_nan = asked is None or asked.save_nan
        self._clock = clock
        self._store = BackupStore(self.path)
        self._shared: SharedWrite | None = None  # the last one
        self._snapshots = state.Snapshots()
        self._tables: TableBackups | None = None
        write = self._write if group.is_chief else SharedWrite.write_part
        self._writer = BackgroundWriter(write, self._not_written)
        self._signature: list[str] = []
        self._stack = contextlib.ExitStack()
        self._last = clock()
        self._asked_to_leave = threading.Event()
        self._leaving = False
        self._lost: str | None = None  # reason why the last backup could not be written
        # (name of a variable that was not finite, step)
        self._spoiled: tuple[str, int] | None = None

    # ------------------------------------------------------------ begin and end

    def __enter__(self) -> Backups:
        if self.has_directory:
            with contextlib.ExitStack() as on_error:
                on_error.callback(self._stack.close)  # releases the lock
                self.record = self._group.from_chief(self._open)
                self.on_disk = self.record, self.tensors
                self._install_signals()
                on_error.pop_all()
            self._last = self._clock()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        if kind is not None and self._shared is not None:
            self._shared.give_up()
        try:
            self._writer.wait()
        finally:
            self._snapshots.forget()
            self._stack.close()

    def _open(self) -> dict[str, Any] | None:
        """Locks the directory; returns the record of the newest backup. Called on the chief."""
        self._stack.enter_context(self._store.locked())
        record = self._store.newest_intact(self._read)
        self._store.files.forget()
        if record is None:
            self._store.clear()
        return record

    def _read(self, backup: Backup) -> dict[str, Any] | None:
        if backup.record["done"] and _is_of_earlier_fit(backup.record["run"]):
            return None
        self.tensors = backup.tensors(servers=len(membership.current_cluster().ps))
        say(f"tfmw: restored step {backup.step} from {backup.name}")
        return backup.record

    def _install_signals(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return

        def restore(number: int, before: Any) -> None:
            # If it is leaving, everything is saved, and this process exits with status 75. When the
            # first task ends, the scheduler may send SIGTERM to those that are still exiting.
            signal.signal(number, signal.SIG_IGN if self._leaving else before)

        for number in LEAVE:
            before = signal.signal(number, lambda *_: self._asked_to_leave.set())
            self._stack.callback(restore, number, before)

    def is_done(self, epochs: int) -> bool:
        """Whether the run of the restored backup was complete, so that nothing remains to train."""
        found = self.record
        if found is None or not found["done"]:
            return False
        return bool(found["stopped"] or found["epoch"] >= epochs)

    def report_done(self, epochs: int) -> None:
        """Logs, on the chief, that nothing remains to train, and what trains on or anew."""
        if self.record is None or not self._group.is_chief or not self.is_done(epochs):
            return
        stopped, done = self.record["stopped"], self.record["epoch"]
        what = "training stopped early" if stopped else f"{done} epoch{'s' if done > 1 else ''}"
        longer = "" if stopped else ", or raise epochs= to train on"
        say(f"tfmw: complete: {what}; delete {self.path} to train anew{longer}")

    # ------------------------------------------------------------ restore

    def restore(self, model: Any, batch_size: int | None) -> None:
        """Restores the saved values into the chief's model; its placement broadcasts them.

        Raises:
            UsageError: the backup belongs to another model, optimizer or batch size.
        """
        if not self.has_directory:
            return
        found, tensors = self.on_disk

        def check() -> None:
            has_tables = any(map(is_table, state.named(model).values()))
            if has_tables and is_bucket(self.path):
                raise UsageError(
                    f"backup_dir {self.path!r} is in a bucket, and parameter servers write their "
                    "tables into a directory: name one that all of them share."
                )
            if directories.is_pattern(self.path) and has_tables:
                raise UsageError(
                    f"backup_dir {self.path!r} has a backslash or brackets, which TensorFlow on "
                    "parameter servers takes for a pattern: name a directory without them."
                )
            self._signature = signature(model, batch_size)
            if found is not None:
                refuse_other(found, self._signature, self.path)

        self._group.from_chief(check)
        if found is not None and self._group.is_chief:
            state.restore(model, tensors)
            models.set_unseeded_state(found["random"].get("keras"))

    def restore_callbacks(self, callbacks: list[Any], finished: bool = False) -> None:
        """Restores the saved state of callbacks and random generators.

        All tasks must call it.
        """
        assert self.record is not None
        arrays = self._group.arrays_from_chief(state.callback_arrays(self.tensors))
        if finished:  # training is complete: of callbacks only History is needed
            restore_random_state(self.record["random"])
            for callback in callbacks:
                for saved in self.record["callbacks"]:
                    if type(callback).__name__ == saved["class"] == "History":
                        callback.history = saved["values"].get("history", {})
                        callback.epoch = saved["values"].get("epoch", [])
            return
        state.restore_callbacks(callbacks, self.record["callbacks"], arrays, self._group.is_chief)
        restore_random_state(self.record["random"])

    def kept_by_replicas(self) -> tuple[np.ndarray, np.ndarray]:
        """The saved replica-local state, on every task. All tasks must call it."""
        names = (state.METRICS, state.AVERAGES) if self._group.is_chief else ()
        kept = {name: np.asarray(self.tensors[name]) for name in names}
        kept = self._group.arrays_from_chief(kept)
        return kept[state.METRICS], kept[state.AVERAGES]

    # ------------------------------------------------------------ when

    def signals(self) -> tuple[float, ...]:
        """This task's values for the reduction of a step: (exit requested, backup due)."""
        seconds, due = self.schedule.seconds, False
        if self._group.is_chief and seconds is not None and not self._writer.busy:
            seconds = seconds if self._lost is None else max(seconds, _RETRY_S)
            due = self._clock() - self._last >= seconds
        return float(self._asked_to_leave.is_set()), float(due)

    def limit(self, step: int, max_steps: int) -> int:
        """The number of steps, at most `max_steps`, from `step` to the next due backup."""
        if self.schedule.steps is None:
            return max_steps
        return min(max_steps, self.schedule.steps - step % self.schedule.steps)

    def due_after_step(self, step: int, signals: list[float]) -> bool:
        """Whether to write a backup now, within an epoch; the same on every task."""
        return any(signals[:2]) or self._is_due(step)

    def _is_due(self, step: int) -> bool:
        return self.schedule.steps is not None and step % self.schedule.steps == 0

    def due_after_epoch(self, epoch: int, step: int, last: bool) -> tuple[bool, bool]:
        """(whether to save at the end of `epoch`, whether to exit). All tasks must call it."""
        if not self.has_directory:
            return False, False
        signals = self._group.from_all(self.signals())
        leave, due, *_ = (any(of_kind) for of_kind in zip(*signals, strict=True))
        due = leave or due or self._is_due(step)
        if self.schedule.epochs is not None:
            due = due or (epoch + 1) % self.schedule.epochs == 0
        return due and not last, leave and not last

    # ------------------------------------------------------------ save

    def python_state(self, callbacks: list[Any]) -> PythonState:
        """State that is not in variables."""
        states, arrays = state.callback_states(callbacks)
        return {"callbacks": states, "random": state.all_random_state()}, arrays

    @functools.cached_property
    def takes_parts(self) -> bool:
        """Whether each task can write its shard of the state. All tasks must call it."""
        return not self.has_directory or self._store.files.takes_parts(self._group)

    def save(
        self,
        driver: Any,
        kept: tuple[Any, ...],
        callbacks: list[Any],
        record: dict[str, Any],
        python_state: PythonState | None = None,
        parts: SlotParts | None = None,
        write: bool = True,
    ) -> None:
        """Copies the state; the chief writes it in the background. All tasks must call it.

        Args:
            driver: driver of the training loop, whose model is placed on its strategy.
            kept: result of the driver's `replica_state`.
            callbacks: callbacks of this task.
            record: JSON values: the step since the run began, and the position in the data.
            python_state: an earlier result of `python_state`; by default the current state.
            parts: shards of slots that no task has whole; each task writes its own.
            write: whether a backup is due, and not only a copy in memory; see `PeerState`.

        Raises:
            TfmwError: a weight has not been finite since the last call, and no loss has shown it.
        """
        self._last = self._clock()
        self._writer.wait()  # the writer still uses the last snapshot
        step, model = record["step"], driver.model
        shared = None
        if parts is not None:
            try:
                shared = self._shared = SharedWrite.begin(self._group, self._store.files, step)
            except OSError as e:
                self._not_written(e)
                return
            shared.pieces = self._snapshots.take_parts(model, parts)
        if not self._group.is_chief:
            if shared is not None:
                self._writer.submit(shared)
            return
        entries, arrays = python_state or self.python_state(callbacks)
        taken = self._snapshots.take(model, driver.strategy, driver.trains_in_place, parts)
        tensors = state.with_replicas({**taken, **arrays}, *kept)
        self._submit(model, callbacks, {**record, **entries}, tensors, shared)

    def _submit(
        self,
        model: Any,
        callbacks: list[Any],
        record: dict[str, Any],
        tensors: dict[str, Any],
        shared: SharedWrite | None = None,
    ) -> None:
        """Writes copied state in the background; called on the chief."""
        flush_events(callbacks)
        spoiled = tensors.get(self._spoiled[0]) if self._spoiled is not None else None
        if spoiled is not None and not _is_finite(spoiled):
            self._refuse_spoiled()
        trainable = {id(v) for v in model.trainable_variables}
        must_be_finite = [name for name, v in state.named(model).items() if id(v) in trainable]
        full = {
            **record,
            "run": _run(),
            "attempt": fence.attempt(),
            "signature": self._signature,
            "versions": common_versions(),
        }
        if self._tables is None and (files := state.table_files(model)) is not None:
            self._tables = TableBackups(files)
        self._writer.submit(tensors, full, must_be_finite, shared)
        if self._tables is not None:
            self._writer.wait()  # the next step would change the rows that servers write

    def _write(
        self,
        tensors: dict[str, Any],
        record: dict[str, Any],
        finite: list[str],
        shared: SharedWrite | None,
    ) -> None:
        step, finite = record["step"], [] if self._save_nan else finite
        write = functools.partial(self._store.write, step, tensors, record, shared)
        try:
            for name in finite:
                if name in tensors and not _is_finite(tensors[name]):
                    if shared is not None:
                        shared.abandon()
                    raise NotFinite(name)
            if self._tables is None:
                write()
            else:
                self._tables.write(write, finite)
        except NotFinite as e:
            if self._spoiled is not None and self._spoiled[0] == e.name:
                self._refuse_spoiled()
            self._spoiled, self._lost = (e.name, step), str(e)
            logger.warning("no backup at step %d: %s; the previous backup is kept", step, e)
            return
        self.saved_at = time.monotonic()
        self._spoiled = self._lost = None

    def _not_written(self, error: Exception) -> None:
        self._lost = str(error) or type(error).__name__
        logger.warning(
            "no backup could be written to %s (%s); training continues, and the previous backup is "
            "kept",
            self.path,
            first_line(error),
        )

    def wait(self) -> None:
        """Waits, on every task, until the chief's backup is on disk."""
        self._group.from_chief(self._writer.wait)

    def leave(self, step: int) -> NoReturn:
        """Ends the process with the status that requests another run, by raising Preempted."""
        self.wait()
        self._leaving = True
        place = self.path or "memory"
        where = f"in {place}" if self._lost is None else f"lost ({self._lost})"
        preempted = Preempted(
            f"received a signal to exit: stopped after step {step}, which is {where}"
        )
        membership.mark_failed(preempted)
        raise preempted

    def refuse_nan(self, logs: Mapping[str, Any], epoch: int, step: int) -> None:
        """Raises TfmwError if the loss is not finite, as further backups would be useless."""
        loss = logs.get("loss")
        if loss is None or self._save_nan or math.isfinite(float(np.asarray(loss).mean())):
            return
        raise TfmwError(
            f"the loss is {loss} in epoch {epoch + 1} at step {step}: training ends, and the last "
            f"backup in {self.path!r} is from before. Lower the learning rate or check the data."
        )

    def _refuse_spoiled(self) -> NoReturn:
        """Raises TfmwError for weights that are not finite; ops such as ReLU may hide NaN."""
        assert self._spoiled is not None
        name, step = self._spoiled
        raise TfmwError(
            f"{name} has not been finite since step {step} or before, though the loss is: training "
            f"ends, and the last backup in {self.path!r} is from before. Lower the learning rate "
            "or check the data."
        )

    def finished(self) -> None:
        """Records in the last backup that the run is complete; a successful exit may remove it.

        Raises:
            TfmwError: a weight is not finite at the end of the run.
        """
        if not self.has_directory:
            return
        self.wait()
        self._spoiled = self._group.from_chief(lambda: self._spoiled)
        if self._spoiled is not None:
            self._refuse_spoiled()
        if self._delete and self._group.is_chief:
            membership.on_success(self._remove_own)

    def _remove_own(self) -> None:
        """Removes the backups, unless another run has resumed from them or written its own."""
        if self._store.has_evaluator() or membership.expects_evaluator():
            logger.warning("the evaluator will remove the backups in %s", self.path)
            return
        with contextlib.suppress(TfmwError), self._store.locked():
            # A complete run that is started again writes nothing: the restored backup is its own.
            record, _ = self.on_disk
            restored = record["run"] if record is not None else _run()
            if self._store.newest_run() in (_run(), restored):
                self._store.clear()


def _is_finite(value: tf.Tensor) -> bool:
    """Whether a value contains no NaN and no infinity."""
    if not value.dtype.is_floating:
        return True
    return bool(tf.reduce_all(tf.math.is_finite(tf.cast(value, tf.float32))))
