"""What of a run is saved: taken out of a model that trains, put back into one that starts.

    shape = signature(model, batch_size)             # refuses another model's backup
    tensors = capture(driver)                        # every variable, by name
    restore(model, tensors)                          # before the model is lifted

All replicas have the same weights and optimizer slots, so the chief's are saved. What replicas keep
to themselves (metrics so far, batch-norm averages since the last time somebody looked) is saved for
each, so that the same number of replicas goes on bit for bit; another number gets the sums and
means.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfmw import callbacks as callbacks_lib
from tfmw import keras_compat, placement
from tfmw.errors import UsageError

# Keras numbers the names it makes up (dense, dense_1, ...) through the whole process.
_NUMBER = re.compile(r"_\d+\b")
_METRICS = "replicas/metrics"
_AVERAGES = "replicas/averages"
_CALLBACK = "callbacks/"


# ---------------------------------------------------------------- whose state is it


def signature(model: keras.Model, batch_size: int | None) -> list[str]:
    """One line for each thing that must be the same where a backup is restored."""
    lines = [f"model: {type(model).__name__}"]
    for number, layer in enumerate(keras_compat.layers_of(model)):
        if layer is not model:
            lines.append(f"layer {number}: {type(layer).__name__} {_config(layer)}")
    for variable in named(model).values():
        native = keras_compat.native(variable)
        lines.append(f"variable {_plain(variable.path)}: {native.dtype.name} {native.shape}")
    for optimizer in keras_compat.optimizers_of(model):
        lines.append(f"optimizer: {type(optimizer).__name__} {_config(optimizer)}")
    lines.append(f"global batch size: {batch_size}")
    return lines


def _config(part: Any) -> str:
    """The settings of a layer or optimizer, less those that differ between equal runs."""
    try:
        config = dict(part.get_config())
    except (NotImplementedError, TypeError, ValueError, AttributeError):
        return ""
    for name in ("name", "learning_rate", "layers", "build_config", "inner_optimizer"):
        config.pop(name, None)
    return _plain(json.dumps(config, sort_keys=True, default=lambda v: type(v).__name__))


def _plain(text: str) -> str:
    return _NUMBER.sub("", text)


def refuse_other(saved: list[str], mine: list[str], path: str) -> None:
    """Raises UsageError naming the first difference between two signatures."""
    for was, now in zip(saved, mine, strict=False):
        if was != now:
            raise UsageError(
                f"the backup in {path!r} belongs to another model: it has [{was}], this run has "
                f"[{now}]. Use another backup_dir, or delete that one to start anew."
            )
    if len(saved) != len(mine):
        longer, what = (saved, "the backup") if len(saved) > len(mine) else (mine, "this run")
        extra = longer[min(len(saved), len(mine))]
        raise UsageError(
            f"the backup in {path!r} belongs to another model: only {what} has [{extra}]. "
            "Use another backup_dir, or delete that one to start anew."
        )


def named(model: keras.Model) -> dict[str, Any]:
    """Every variable whose value all replicas share, by a name that is the same in each run."""
    metrics = {id(v) for v in keras_compat.metric_variables(model)}
    shared = [v for v in placement.all_variables(model) if id(v) not in metrics]
    return {f"{i:06d}/{_plain(v.path)}": v for i, v in enumerate(shared)}


# ---------------------------------------------------------------- the model


def capture(model: keras.Model, strategy: tf.distribute.Strategy) -> dict[str, Any]:
    """Values of all shared variables now: tensors, which later assignments leave as they are."""
    return {
        name: placement.local_copies(strategy, variable)[0].read_value()
        for name, variable in named(model).items()
    }


def restore(model: keras.Model, tensors: Mapping[str, Any]) -> None:
    """Gives a model that is not lifted the values of a backup that has its signature."""
    for name, variable in named(model).items():
        native = keras_compat.native(variable)
        native.assign(tf.reshape(tf.cast(tensors[name], native.dtype), native.shape))


def with_replicas(tensors: dict[str, Any], metrics: Any, averages: Any) -> dict[str, Any]:
    """Adds what replicas keep to themselves: float64 [replicas, values] each."""
    return {**tensors, _METRICS: metrics, _AVERAGES: averages}


def of_replicas(tensors: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    return np.asarray(tensors[_METRICS]), np.asarray(tensors[_AVERAGES])


# ---------------------------------------------------------------- callbacks


def callback_states(callbacks: Iterable[Any]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """What callbacks have counted so far.

    Returns:
        (a JSON object for each callback, arrays by name): attributes that are numbers, texts,
        lists and dicts of them, or (lists of) arrays.
    """
    states: list[dict[str, Any]] = []
    arrays: dict[str, Any] = {}
    for number, callback in enumerate(callbacks):
        if isinstance(callback, keras.callbacks.ProgbarLogger):
            continue
        state: dict[str, Any] = {
            "class": type(callback).__name__,
            "number": number,
            "chief_only": callbacks_lib.writes(callback),
        }
        values: dict[str, Any] = {}
        kept: dict[str, int | None] = {}
        for name, value in _attributes(callback).items():
            if _is_arrays(value):
                members = value if isinstance(value, list) else [value]
                kept[name] = len(members) if isinstance(value, list) else None
                for i, member in enumerate(members):
                    arrays[f"{_CALLBACK}{number}/{name}/{i}"] = np.asarray(member)
            else:
                simple = _jsonable(value)
                if simple is not _NOT_JSON:
                    values[name] = simple
        state["values"] = values
        state["arrays"] = kept
        states.append(state)
    return states, arrays


def restore_callbacks(
    callbacks: Iterable[Any],
    states: list[dict[str, Any]],
    arrays: Mapping[str, Any],
    is_chief: bool,
) -> None:
    """Puts the states back into callbacks of the same classes in the same order.

    Raises:
        UsageError: this run has other callbacks.
    """
    mine = [c for c in callbacks if not isinstance(c, keras.callbacks.ProgbarLogger)]
    if not is_chief:
        states = [s for s in states if not s["chief_only"]]
    names = [type(c).__name__ for c in mine]
    saved = [s["class"] for s in states]
    if names != saved:
        raise UsageError(
            f"the backup was taken with the callbacks {saved}, this run has {names}: pass the same "
            "callbacks in the same order."
        )
    for callback, state in zip(mine, states, strict=True):
        inner = getattr(callback, "callback", None)
        for name, value in _values_of(state, arrays).items():
            holder = callback if hasattr(callback, name) or inner is None else inner
            setattr(holder, name, value)


def _values_of(state: dict[str, Any], arrays: Mapping[str, Any]) -> dict[str, Any]:
    values = dict(state["values"])
    for name, length in state["arrays"].items():
        members = [
            np.asarray(arrays[f"{_CALLBACK}{state['number']}/{name}/{i}"])
            for i in range(1 if length is None else length)
        ]
        values[name] = members[0] if length is None else members
    return values


def callback_arrays(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The arrays of callbacks among the tensors of a backup."""
    return {name: value for name, value in tensors.items() if name.startswith(_CALLBACK)}


def prepare_for_resume(callbacks: Iterable[Any]) -> None:
    """Before on_train_begin of a resumed run: files are gone on with, not begun anew."""
    for callback in callbacks:
        if isinstance(callback, keras.callbacks.CSVLogger):
            callback.append = True


def _attributes(callback: Any) -> dict[str, Any]:
    skipped = {"params", "_model", "model", "validation_data", "callback"}
    inner = getattr(callback, "callback", None)
    found = {k: v for k, v in vars(callback).items() if k not in skipped}
    if isinstance(inner, keras.callbacks.Callback):
        found.update({k: v for k, v in vars(inner).items() if k not in skipped})
    return found


def _is_arrays(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return value.dtype != object
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(v, np.ndarray) and v.dtype != object for v in value)
    )


_NOT_JSON = object()


def _jsonable(value: Any) -> Any:
    """A JSON value equal to `value`, or _NOT_JSON."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, list):
        members = [_jsonable(v) for v in value]
        return _NOT_JSON if any(m is _NOT_JSON for m in members) else members
    if isinstance(value, dict) and all(isinstance(k, str) for k in value):
        members = {k: _jsonable(v) for k, v in value.items()}
        return _NOT_JSON if any(m is _NOT_JSON for m in members.values()) else members
    return _NOT_JSON


# ---------------------------------------------------------------- random numbers


def random_state() -> dict[str, Any]:
    """States of Python's and NumPy's global generators, as JSON."""
    version, numbers, gauss = random.getstate()
    numpy_state = dict(np.random.get_state(legacy=False))
    inner = {
        k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in numpy_state["state"].items()
    }
    return {
        "python": [version, list(numbers), gauss],
        "numpy": {**numpy_state, "state": inner},
    }


def restore_random_state(saved: Mapping[str, Any]) -> None:
    version, numbers, gauss = saved["python"]
    random.setstate((version, tuple(numbers), gauss))
    numpy_state = dict(saved["numpy"])
    inner = dict(numpy_state["state"])
    if "key" in inner:
        inner["key"] = np.asarray(inner["key"], dtype=np.uint32)
    np.random.set_state({**numpy_state, "state": inner})
