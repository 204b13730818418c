"""The state of a run: copied from a model in training, restored into a new one.

    tensors = Snapshots().take(model, strategy)      # every variable, by name
    restore(model, tensors)                          # before the model is placed

All replicas have the same weights and optimizer slots, so the chief's are saved. Replica-local
state (metrics so far, batch-norm averages since the last synchronization) is saved for each
replica, and combined. So the same number of replicas resumes bit for bit, and another number from
the combined metrics and the means of averages.
"""

from __future__ import annotations

import contextlib
import csv
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfmw.compat import models, placement
from tfmw.compat.kept import kept_with
from tfmw.compat.memory import assign, new_tensor, view_of
from tfmw.compat.metric_variables import metric_variables
from tfmw.data.random_state import random_state
from tfmw.errors import UsageError
from tfmw.storage.disk import replacing
from tfmw.tables.files import TableFiles, TensorSlice, slice_spec
from tfmw.tables.table import Table, is_table, table_of, tables_among
from tfmw.train.callbacks.log import forget_events
from tfmw.train.callbacks.roles import writes
from tfmw.train.checkpoint.tensor_files import SlotParts

# Keras numbers generated names (dense, dense_1, ...) in the whole process, and derives other names
# from them: sequential_1_dense_3_kernel_momentum.
_NUMBER = re.compile(r"_\d+(?![^\W_])")
METRICS, AVERAGES = "replicas/metrics", "replicas/averages"  # names in backups
_CALLBACK = "callbacks/"
_WORTH_KEEPING_BYTES = 1 << 20
_KEPT_TYPES = (tf.float16, tf.float32, tf.float64)
_AT_FIRST = "_tfmw_at_first"  # attribute of callbacks, while they are in a run with backups


def named(model: keras.Model) -> dict[str, Any]:
    """The variables that all replicas share, by names that are stable over runs."""
    metrics = {id(v) for v in metric_variables(model)}
    shared = [v for v in placement.all_variables(model) if id(v) not in metrics]
    return {f"{i:06d}/{plain(v.path)}": v for i, v in enumerate(shared)}


def plain(text: str) -> str:
    """A path or name without the numbers that Keras appends to generated names."""
    return _NUMBER.sub("", text)


# ---------------------------------------------------------------- the model


class Snapshots:
    """Copies of a model's variables, in memory that is allocated once.

    A value that TensorFlow has read from a variable shares the variable's memory until the next
    assignment. The training step must then copy it into memory that the system allocates and
    clears, which takes many times as long as the copy.
    """

    def __init__(self) -> None:
        self._copies: dict[str, tuple[np.ndarray, tf.Tensor]] = {}  # views of the same memory

    def take(
        self,
        model: keras.Model,
        strategy: tf.distribute.Strategy,
        busy: bool = True,
        parts: SlotParts | None = None,
    ) -> dict[str, tf.Tensor]:
        """Copies the current values of all shared variables, except tables.

        Overwrites the values of the previous call.

        Args:
            busy: whether every step assigns to the variables, so that copies are worth their
                memory.
            parts: the variables to skip, as `take_parts` copies them.
        """
        apart = {id(v) for v in parts.variables} if parts is not None else set()
        found = {}
        for name, variable in named(model).items():
            if id(variable) in apart or is_table(variable):
                continue  # the tasks that have shards of it write them
            value = placement.local_copies(strategy, variable)[0].read_value()
            assigned = busy and not kept_with(variable).is_gathered  # whether every step assigns it
            found[name] = self._copied(name, value) if assigned else value
        return found

    def take_parts(self, model: keras.Model, parts: SlotParts) -> list[TensorSlice]:
        """Copies this task's shards, flat, and its rows; overwrites the previous copies."""
        names = {id(variable): name for name, variable in named(model).items()}
        taken = []
        for variable, elements, value in parts.own:
            name = names[id(variable)]
            spec = slice_spec([math.prod(variable.shape)], elements.start, elements.stop)
            taken.append((name, spec, self._copied(f"{name}/{elements.start}", value)))
        for name, replicas, first, values in parts.rows:
            count, row_elements = values.shape
            spec = slice_spec([replicas, row_elements], first, first + count)
            taken.append((name, spec, self._copied(name, values)))
        return taken

    def _copied(self, name: str, value: tf.Tensor) -> tf.Tensor:
        """A copy, or the value itself if a copy is not worth its memory."""
        size = value.shape.num_elements() * value.dtype.size
        is_kept = size >= _WORTH_KEEPING_BYTES and value.dtype in _KEPT_TYPES
        if not is_kept or "CPU" not in value.device:
            return value
        if name not in self._copies:
            self._copies[name] = new_tensor(value.shape, value.dtype)
        copy, tensor = self._copies[name]
        np.copyto(copy, view_of(value))
        return tensor

    def forget(self) -> None:
        """Frees the memory of the copies."""
        self._copies.clear()


def restore(model: keras.Model, tensors: Mapping[str, Any]) -> None:
    """Restores the values of a backup with the same signature into a model that is not placed.

    Args:
        tensors: `SavedTensors`, whose tables the servers read themselves; or arrays.
    """
    layout = getattr(tensors, "layout", {})
    of_servers = {}
    # By number: releases of Keras name the same variables in different ways.
    saved = {name.partition("/")[0]: name for name in tensors}
    for own_name, variable in named(model).items():
        name = saved[own_name.partition("/")[0]]
        native = models.native(variable)
        if isinstance(native, Table) and name in layout:
            of_servers[name] = native
            continue
        value = tf.reshape(tf.cast(tensors[name], native.dtype), native.shape)
        if isinstance(native, Table):
            native.replace(value)
        else:
            assign(native, value)
    if of_servers:
        tensors.restore(TableFiles(of_servers))  # type: ignore[attr-defined]


def table_files(model: keras.Model) -> TableFiles | None:
    """The tables of a model by their names in a backup; None if it has none."""
    found = named(model).items()
    held = {name: table for name, v in found if (table := table_of(v)) is not None}
    return TableFiles(held) if held else None


@contextlib.contextmanager
def keeping_variables(model: keras.Model, strategy: tf.distribute.Strategy) -> Iterator[None]:
    """Restores the shared variables of a placed model to their current values at the end."""
    values = [
        (copy, copy.read_value())
        for variable in named(model).values()
        if not is_table(variable)
        for copy in placement.local_copies(strategy, variable)
    ]
    with contextlib.ExitStack() as stack:
        for variable in tables_among(named(model).values()):
            stack.enter_context(models.native(variable).unchanged())
        yield
    for copy, value in values:
        copy.assign(value)


def with_replicas(
    tensors: dict[str, Any], metrics: Any, averages: Any, others: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Adds replica-local state, see `ReplicaState.rows`, and other tensors by name."""
    return {**tensors, METRICS: metrics, AVERAGES: averages, **(others or {})}


# ---------------------------------------------------------------- callbacks


def note_callbacks(callbacks: Iterable[Any]) -> None:
    """Records the attributes of callbacks before and after on_train_begin.

    An attribute that never changes is a setting; a resumed run keeps its own settings.
    """
    for callback in callbacks:
        now = {name: _jsonable(value) for name, value in _attributes(callback).items()}
        vars(callback).setdefault(_AT_FIRST, []).append(now)


def forget_callbacks(callbacks: Iterable[Any]) -> None:
    """Discards the records of `note_callbacks`: the next run starts from the current attributes."""
    for callback in callbacks:
        vars(callback).pop(_AT_FIRST, None)


def callback_states(callbacks: Iterable[Any]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The state of callbacks.

    Returns:
        (a JSON object for each callback, arrays by name): attributes that are numbers,
        strings, lists and dicts of them, or (lists of) arrays.
    """
    states: list[dict[str, Any]] = []
    arrays: dict[str, Any] = {}
    for number, callback in enumerate(callbacks):
        if isinstance(callback, keras.callbacks.ProgbarLogger):
            continue
        at_first = vars(callback).get(_AT_FIRST, [])
        values: dict[str, Any] = {}
        lengths: dict[str, int | None] = {}  # lengths of lists of arrays; None for an array
        for name, value in _attributes(callback).items():
            members = value if isinstance(value, list) else [value]
            if members and all(isinstance(m, np.ndarray) and m.dtype != object for m in members):
                lengths[name] = len(members) if isinstance(value, list) else None
                for i, member in enumerate(members):
                    # A copy: the callback may change it during the write.
                    arrays[f"{_CALLBACK}{number}/{name}/{i}"] = np.array(member)
                continue
            simple = _jsonable(value)
            is_setting = bool(at_first) and all(
                name in then and _equal(then[name], simple) for then in at_first
            )
            if simple is not _NOT_JSON and not is_setting:
                values[name] = simple
        states.append(
            {
                "class": type(callback).__name__,
                "number": number,
                "chief_only": writes(callback),
                "values": values,
                "arrays": lengths,
            }
        )
    return states, arrays


def _equal(a: Any, b: Any) -> bool:
    return type(a) is type(b) and bool(a == b)


def restore_callbacks(
    callbacks: Iterable[Any],
    states: list[dict[str, Any]],
    arrays: Mapping[str, Any],
    is_chief: bool,
) -> None:
    """Restores the states of callbacks of the same classes in the same order.

    Raises:
        UsageError: this run has other callbacks.
    """
    local = [c for c in callbacks if not isinstance(c, keras.callbacks.ProgbarLogger)]
    if not is_chief:
        states = [s for s in states if not s["chief_only"]]
    names = [type(c).__name__ for c in local]
    saved = [s["class"] for s in states]
    if names != saved:
        raise UsageError(
            f"the backup was taken with the callbacks {saved}, this run has {names}: pass the same "
            "callbacks in the same order."
        )
    for callback, state in zip(local, states, strict=True):
        inner = getattr(callback, "callback", None)
        values = {**_changed_since(callback), **_values_of(state, arrays)}
        for name, value in values.items():
            holder = callback if hasattr(callback, name) or inner is None else inner
            if _may_restore(holder, name, value):
                setattr(holder, name, value)
        if _AT_FIRST in vars(callback):  # an attribute that was saved once is not a setting
            for then in vars(callback)[_AT_FIRST]:
                for name in state["values"]:
                    then.pop(name, None)


def _changed_since(callback: Any) -> dict[str, Any]:
    """First values of the attributes that an interrupted call in this process changed."""
    noted: list[dict[str, Any]] = vars(callback).get(_AT_FIRST, [])
    if len(noted) < 4:
        return {}
    first, before, now = noted[0], noted[-2], noted[-1]
    return {
        name: first[name]
        for name in first.keys() & before.keys() & now.keys()
        if first[name] is not _NOT_JSON
        and not _equal(first[name], now[name])
        and _equal(before[name], now[name])  # on_train_begin has not reset it
    }


def _may_restore(callback: Any, name: str, value: Any) -> bool:
    """Whether a backup may set an attribute: neither code, nor the path of a file."""
    if name.startswith("__") or callable(getattr(callback, name, None)):
        return False
    if isinstance(getattr(type(callback), name, None), property):
        return False
    return not (isinstance(value, str) and writes(callback))


def _values_of(state: dict[str, Any], arrays: Mapping[str, Any]) -> dict[str, Any]:
    values = dict(state["values"])
    for name, length in state["arrays"].items():
        members = [
            np.array(arrays[f"{_CALLBACK}{state['number']}/{name}/{i}"])  # a writable copy
            for i in range(1 if length is None else length)
        ]
        values[name] = members[0] if length is None else members
    return values


def callback_arrays(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The arrays of callbacks among the tensors of a backup."""
    return {name: tensors[name] for name in tensors if name.startswith(_CALLBACK)}


def prepare_for_resume(callbacks: Iterable[Any], epoch: int, step: int) -> None:
    """Makes callbacks append to their files; call it before on_train_begin of a resumed run.

    Args:
        epoch: the first epoch of the resumed run, from 0.
        step: number of training steps in the backup.
    """
    for callback in callbacks:
        callback = getattr(callback, "callback", callback)
        if isinstance(callback, keras.callbacks.CSVLogger):
            callback.append = True
            _forget_rows(callback, epoch)
        if isinstance(callback, keras.callbacks.TensorBoard):
            forget_events(callback, epoch, step)


def forget_attempt(callbacks: Iterable[Any], epoch: int, began: float) -> None:
    """Removes rows that earlier attempts of this run have appended, before it starts over.

    Args:
        epoch: the first epoch of the run, from 0.
        began: start of the run, by `time.time`.
    """
    for callback in callbacks:
        log = getattr(callback, "callback", callback)
        with contextlib.suppress(OSError):
            if isinstance(log, keras.callbacks.CSVLogger) and log.append:
                if os.path.getmtime(log.filename) >= began:
                    _forget_rows(log, epoch)


def _forget_rows(log: keras.callbacks.CSVLogger, epoch: int) -> None:
    """Removes from a CSV log the epochs that will be repeated; rows of earlier runs stay."""
    try:
        with open(log.filename, newline="") as file:
            lines = list(file)
        rows = list(csv.reader(lines, delimiter=log.sep))
        column = rows[0].index("epoch")
        epochs = [-1, *(int(row[column]) for row in rows[1:])]
        own = len(lines) - 1  # the first row of this run, from which epochs ascend
        while own > 1 and epochs[own] > epochs[own - 1]:
            own -= 1
        pairs = list(zip(lines, epochs, strict=True))
        kept = lines[:own] + [line for line, number in pairs[own:] if number < epoch]
    except (OSError, ValueError, IndexError):
        return  # there is no log, or CSVLogger did not write it
    if len(kept) < len(lines):
        with replacing(log.filename) as temporary, open(temporary, "w", newline="") as file:
            file.writelines(kept)


def _attributes(callback: Any) -> dict[str, Any]:
    skipped = {"params", "_model", "model", "validation_data", "callback", _AT_FIRST}
    inner = getattr(callback, "callback", None)
    if hasattr(callback, "monitor_op") or hasattr(inner, "monitor_op"):
        # Keras changes the sign of this setting when it first determines the direction of a metric.
        skipped.add("min_delta")
    found = {k: v for k, v in vars(callback).items() if k not in skipped}
    if isinstance(inner, keras.callbacks.Callback):
        found.update({k: v for k, v in vars(inner).items() if k not in skipped})
    return found


_NOT_JSON = object()


def _jsonable(value: Any) -> Any:
    """A JSON value equal to `value`, or _NOT_JSON."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, list):
        items = [_jsonable(v) for v in value]
        return _NOT_JSON if any(i is _NOT_JSON for i in items) else items
    if isinstance(value, dict) and all(isinstance(k, str) for k in value):
        members = {k: _jsonable(v) for k, v in value.items()}
        return _NOT_JSON if any(m is _NOT_JSON for m in members.values()) else members
    return _NOT_JSON


# ---------------------------------------------------------------- random numbers


def all_random_state() -> dict[str, Any]:
    """States of Python's, NumPy's and Keras's global generators, as JSON."""
    unseeded = models.unseeded_state()
    return {
        **random_state(),
        "keras": None if unseeded is None else unseeded.numpy().tolist(),
    }
