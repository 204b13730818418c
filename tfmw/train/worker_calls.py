"""A call of `tfmw.fit`, `evaluate` or `predict` that another process has requested.

    answer = run(request)          # in each worker

A request contains what its worker does not have yet. Workers that stay keep the caller's models,
with their traced steps, and large arrays. A model is kept as long as nothing of it changes but the
values of its variables: neither in the caller, which compares pickles of the model, nor here. So a
kept model is equal to the one that the caller would send.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import mmap
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfmw.cluster import membership, shared_directories
from tfmw.cluster.group import Group
from tfmw.compat import datasets, memory, model_methods, models
from tfmw.compat.shuffles import ShuffleSeeds
from tfmw.data.random_state import restore_random_state
from tfmw.errors import Preempted, UsageError
from tfmw.launcher import call
from tfmw.launcher.engines import agent
from tfmw.observe import trackers
from tfmw.storage import disk
from tfmw.train import pickling
from tfmw.train.checkpoint import state
from tfmw.train.sent_data import opened_data

KEPT_BY_JOB = "(kept by the job)"
"""First part of a `backup_dir`: each task's folder, whose newest backup the engine keeps."""

_MARKER_S = 10.0  # time for a file to appear in a directory that several hosts share

SHARED = 1 << 16
"""Size in bytes from which an array is kept for later calls."""


class Parcel(NamedTuple):
    """A pickle, and its large arrays: (digest, content or None if the worker has it)."""

    data: bytes
    arrays: list[tuple[bytes, Any]]


@dataclasses.dataclass(frozen=True)
class Request:
    """A call for a worker."""

    method: Callable[..., Any]  # `tfmw.fit`, `evaluate` or `predict`
    # a pickle of (variables of the model, arguments and the names of the given ones, whether the
    # model's own method has run in the caller)
    arguments: Parcel
    settings: Mapping[str, Any]  # those of the caller's process
    model: Parcel | None = None  # None: the worker keeps it, or a function in `arguments` makes it
    values: Mapping[int, np.ndarray] = dataclasses.field(default_factory=dict)  # that changed
    digests: Mapping[str, bytes] = dataclasses.field(default_factory=dict)  # of all, by name
    number: int = 0  # of the model; 0: it is not kept
    stays: bool = False  # whether the worker stays
    models: frozenset[int] = frozenset()  # models that are kept until this call
    arrays: frozenset[bytes] = frozenset()  # arrays that are kept from this call on


@dataclasses.dataclass
class _Model:
    """A model that is kept, with the objects to which arguments may refer."""

    parts: list[Any]
    model: keras.Model
    fingerprint: bytes


class _Array:
    """The content of an array. Each call has a copy of its own, of the parts that it changes."""

    def __init__(self, content: Any):
        self._file = tempfile.TemporaryFile()  # noqa: SIM115  (closed in __del__)
        self._file.write(content)
        self._file.flush()

    def copy(self) -> mmap.mmap:
        return mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_COPY)

    def __del__(self) -> None:
        self._file.close()


_models: dict[int, _Model] = {}
_arrays: dict[bytes, _Array] = {}


def run(request: Request) -> dict[str, Any]:
    """Makes the call.

    Returns:
        "kept": whether the model is kept. On the chief also the values for the caller's objects.
    """
    for number in _models.keys() - request.models:
        del _models[number]
    kept = _models.pop(request.number, None)  # an error ends the process, or leaves it without
    if request.model is not None:
        kept = _unpacked(request)
        for other in _models.values():  # a class that two models have is the same, unpickled again
            other.fingerprint = fingerprint(other.model)
    parts = () if kept is None else kept.parts
    arrays = _contents(request.arguments, request)
    with call.missing_modules_named():
        unpacker = pickling.Unpacker(request.arguments.data, arrays, parts=parts)
        variables, arguments, prepared = unpacker.load()
    if request.model is None:
        _assign(variables, request.values)
    for digest in _arrays.keys() - request.arrays:
        del _arrays[digest]
    _apply(request.settings)
    try:
        answer = _result(request, arguments, prepared)
    except Preempted:
        if not request.stays:
            raise
        membership.forget_preemption()
        return {"kept": False, "stopped": True}
    if request.stays:
        _end_call()
    answer["kept"] = False
    if kept is not None and request.number:
        with contextlib.suppress(UsageError):  # it has an attribute now that cannot be pickled
            answer["kept"] = fingerprint(kept.model) == kept.fingerprint
        if answer["kept"]:
            _models[request.number] = kept
    return answer


def fingerprint(model: keras.Model) -> bytes:
    """A digest of all of a model but the values of its variables."""
    arrays: list[Any] = []
    data = pickling.Packer(call.apart(arrays, SHARED)).dump(model, apart=True)
    return digest_of(data, *map(digest_of, arrays))


def digest_of(*parts: Any) -> bytes:
    """A digest of bytes or of contiguous arrays."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.digest()


def digest_of_value(value: Any) -> bytes:
    """A digest of the value of a variable."""
    return digest_of(np.ascontiguousarray(value).reshape(-1).view(np.uint8))


def _unpacked(request: Request) -> _Model:
    assert request.model is not None
    arrays = _contents(request.model, request)
    with call.missing_modules_named():
        unpacker = pickling.Unpacker(request.model.data, arrays, request.values)
        model = pickling.rebuilt(unpacker.load())
    return _Model(unpacker.parts, model, fingerprint(model) if request.number else b"")


def _contents(parcel: Parcel, request: Request) -> Iterator[Any]:
    for digest, content in parcel.arrays:
        if digest not in request.arrays:
            yield content
            continue
        if content is not None:
            _arrays[digest] = _Array(content)
        yield _arrays[digest].copy()


def _assign(variables: Iterable[Any], values: Mapping[int, np.ndarray]) -> None:
    for number, variable in enumerate(variables):
        if number in values:
            native, value = models.native(variable), tf.convert_to_tensor(values[number])
            memory.assign(native, value)


def _result(request: Request, arguments: dict[str, Any], prepared: bool) -> dict[str, Any]:
    """The values for the caller's objects, on the chief; empty on other workers."""
    name, model = request.method.__name__, arguments["model"]
    model = model if isinstance(model, keras.Model) else model()
    opened: dict[str, tf.data.Dataset] = {}
    arguments["model"] = model
    for key in ("x", "validation_data"):
        arguments |= {key: opened_data(arguments[key], opened)} if key in arguments else {}
    for backup in tf.nest.flatten(arguments["callbacks"]):
        _, kept, of_call = getattr(backup, "backup_dir", "").partition(KEPT_BY_JOB)
        if kept:
            backup.backup_dir = os.environ[agent.BACKUPS] + of_call
        elif call.ELSEWHERE in os.environ and hasattr(backup, "backup_dir"):
            joined = membership.joined()
            group = Group(0, 1) if joined is None else Group.of(joined.strategy)
            require_shared(os.fspath(backup.backup_dir), group)
    with model_methods.from_plain(model, name) if prepared else contextlib.nullcontext():
        result = model_methods.call_given(request.method, arguments, arguments.pop("given"))
    if not membership.current_cluster().is_chief:
        return {}
    history = getattr(model, "history", None)
    tensors = {k: models.native(v).numpy() for k, v in state.named(model).items()}
    known = request.digests
    return {
        **({} if isinstance(result, keras.callbacks.History) else {"result": result}),
        "tensors": {k: v for k, v in tensors.items() if digest_of_value(v) != known.get(k)},
        "history": {k: getattr(history, k, None) for k in ("history", "epoch", "params")},
        "orders": {name: ShuffleSeeds(shuffle).passes for name, shuffle in opened.items()},
    }


def require_shared(directory: str, group: Group) -> None:
    """Raises UsageError, on all workers alike, unless each sees the chief's files there."""
    if not disk.is_local(directory):
        return
    directories = {"backup_dir": directory} if group.is_chief else {}
    with shared_directories.markers(directories) as (names, problems):
        host = os.environ.get(call.ELSEWHERE, "this machine")
        (name, problem, chief), *_ = group.from_all(
            (names.get("backup_dir"), "".join(problems), f"worker 0 on {host}")
        )
        if not problem and not group.is_chief:
            found = shared_directories.find_marker("backup_dir", directory, name, chief, _MARKER_S)
            problem = "" if found is None else f"on {host}, {found}"
        if first := next(filter(None, group.from_all(problem)), ""):
            raise UsageError(f"{first}.")


def _end_call() -> None:
    """Waits for all workers, and removes the backups of the call, as the end of a run would."""
    if (joined := membership.joined()) is not None:
        Group.of(joined.strategy).from_all(None)
    membership.succeed()


def settings_of_process() -> dict[str, Any]:
    """Settings of this process that affect its results, in addition to the model and the data.

    The workers start from the settings of the caller's process. Then shuffled arrays have the same
    order as in one process. A function that creates a model or a dataset creates the same one.
    """
    return {
        "random": state.all_random_state(),  # generators of Python and NumPy
        "seeds": datasets.seed_state(),  # generators of TensorFlow and Keras
        "anew": True,  # whether the seeds were set since the last call
        "keras": {
            "floatx": keras.config.floatx(),
            "epsilon": keras.config.epsilon(),
            "image_data_format": keras.config.image_data_format(),
            "dtype_policy": keras.dtype_policies.serialize(keras.config.dtype_policy()),
        },
        "trackers": trackers.active_runs(),
        "directory": None,  # the working directory of local workers
        "environment": {},  # variables that have changed since the start of the workers
    }


def _apply(settings: Mapping[str, Any]) -> None:
    """Applies the settings of another process to this one."""
    if settings["directory"] is not None and os.path.isdir(settings["directory"]):
        os.chdir(settings["directory"])
    for name, value in settings["environment"].items():
        os.environ.pop(name, None) if value is None else os.environ.update({name: value})
    datasets.set_seed_state(settings["seeds"], settings["anew"])
    restore_random_state(settings["random"])
    models.set_unseeded_state(settings["random"]["keras"])
    config = settings["keras"]
    keras.config.set_floatx(config["floatx"])
    keras.config.set_epsilon(config["epsilon"])
    keras.config.set_image_data_format(config["image_data_format"])
    keras.config.set_dtype_policy(keras.dtype_policies.deserialize(config["dtype_policy"]))
    trackers.adopt(settings["trackers"])
