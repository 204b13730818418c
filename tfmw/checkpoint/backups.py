"""The backups of a run, for the training loop; without a directory they save nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import numpy as np
import tensorflow as tf

from tfmw.checkpoint import state
from tfmw.checkpoint.sharded_backups import SlotParts
from tfmw.cluster.group import Group
from tfmw.errors import Preempted

PythonState = tuple[tuple[list[dict[str, Any]], dict[str, Any]], dict[str, Any]]
"""(states of callbacks, their arrays by name, states of random generators)."""


class Backups:
    """The backups of a run. This base class saves nothing; see `resume.DirectoryBackups`.

    Without backups signals end the process as usual, and a loss that is not finite does not end
    the run.

    Args:
        group: the tasks that train together.

    Attributes:
        record: the JSON of the newest complete backup, on all tasks; None if there is none.
        tensors: its tensors; on the chief only.
        saved_at: seconds since the epoch of the last backup of this call; None before the first.
    """

    on = False
    """Whether anything is saved."""

    def __init__(self, group: Group):
        self.record: dict[str, Any] | None = None
        self.tensors: Mapping[str, Any] = {}
        self.saved_at: float | None = None
        self._group = group

    def __enter__(self) -> Backups:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        pass

    def is_done(self, epochs: int) -> bool:
        """Whether the run of the restored backup was complete: nothing is left to train."""
        found = self.record
        if found is None or not found["done"]:
            return False
        return bool(found["stopped"] or found["epoch"] >= epochs)

    def restore(self, model: Any, batch_size: int | None) -> None:
        """Restores the saved values into the model, if there are any."""

    def note_callbacks(self, callbacks: list[Any]) -> None:
        """Records the attributes of callbacks before and after on_train_begin; see `state`."""

    def restore_callbacks(self, callbacks: list[Any], finished: bool = False) -> None:
        """Restores the saved state of callbacks, if there is a `record`."""

    def kept_by_replicas(self) -> tuple[np.ndarray, np.ndarray]:
        """The replica-local state of the `record`."""
        raise NotImplementedError("nothing was saved")

    def signals(self) -> tuple[float, float]:
        """This task's values for the reduction of a step: (exit requested, a backup is due)."""
        return 0.0, 0.0

    def limit(self, step: int, max_steps: int) -> int:
        """The number of steps, at most `max_steps`, from `step` to the next due backup."""
        return max_steps

    def due_after_step(self, step: int, signals: list[float]) -> bool:
        """Whether to save now, inside an epoch; the same on every task."""
        return False

    def due_after_epoch(self, epoch: int, step: int, last: bool) -> tuple[bool, bool]:
        """(whether to save at the end of `epoch`, whether to exit). All tasks must call it."""
        return False, False

    def python_state(self, callbacks: list[Any]) -> PythonState:
        """State outside of variables: of callbacks and random generators."""
        return state.callback_states(callbacks), state.all_random_state()

    def takes_parts(self) -> bool:
        """Whether each task can write its part of the state. All tasks must call it."""
        return True

    def save(
        self,
        step: int,
        model: Any,
        strategy: tf.distribute.Strategy,
        kept: tuple[Any, ...],
        callbacks: list[Any],
        record: dict[str, Any],
        busy: bool = True,
        python_state: PythonState | None = None,
        parts: SlotParts | None = None,
    ) -> None:
        """Saves the state; call it if `due_after_step` or `due_after_epoch` returned True."""

    def wait(self) -> None:
        """Waits, on every task, until the last backup is on disk."""

    def leave(self, step: int) -> NoReturn:
        """Ends the process with the status that requests another run. Raises Preempted."""
        raise Preempted(f"received a signal to exit: stopped after step {step}, which is not saved")

    def refuse_nan(self, logs: Mapping[str, Any], epoch: int, step: int) -> None:
        """Raises TfmwError if the loss is not finite: further backups would be useless."""

    def finished(self) -> None:
        """Records that the run is complete."""
