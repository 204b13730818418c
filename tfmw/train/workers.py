"""Worker processes that stay between calls, and what the caller knows of them.

    with tfmw.Workers(2) as workers:
        workers.fit(model, dataset, epochs=3)
        workers.evaluate(model, validation_data)

`Requests` makes the request of a call (`worker_calls.py`). It leaves out what the workers have.
"""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import os
import signal
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import keras

from tfmw.cluster import membership
from tfmw.compat import datasets
from tfmw.errors import UsageError, is_whole
from tfmw.launcher import call
from tfmw.launcher.engines import submit
from tfmw.launcher.engines.engine import Engine, task_range
from tfmw.launcher.engines.standing_job import JobWorkers
from tfmw.launcher.standing import StandingWorkers
from tfmw.observe import trackers
from tfmw.train import pickling, worker_calls
from tfmw.train.checkpoint import state
from tfmw.train.checkpoint.resume import CALL, identity
from tfmw.train.worker_calls import Parcel, Request, digest_of, digest_of_value

_numbers = itertools.count()  # of calls
_MOST_MODELS = 4  # number of models that workers keep
_MOST_CALLS = 4  # number of last calls whose arrays workers keep

NO_RESTARTS = (
    "workers that stay do not restart within a call, as max_restarts asks: pass "
    "the number of workers, such as workers=2."
)


class Workers:
    """Worker processes that stay between calls, on this machine or on an engine.

    Models, their traced steps, data and weights that have not changed stay in the workers. Only the
    first call of a model waits for tracing. The results are those of `tfmw.fit(workers=n)`.
    Ctrl-C ends a call of `fit` after the current step, and the workers stay. After another error
    the next call starts new processes.

    On an engine the processes are one job. It ends with this object, or a minute after this process
    has ended.

    Args:
        workers: number of processes. Engines also accept (least, most), and start as many as have
            room.
        on: the system that runs them, as in `tfmw.launch`.

    Raises:
        UsageError: a wrong number; this process is part of a cluster; or an engine with
            `max_restarts`, as these workers do not restart within a call.

    Example:
        with tfmw.Workers(2) as workers:
            workers.fit(model, images, labels, epochs=3)
            workers.evaluate(model, test_images, test_labels)
            predictions = workers.predict(model, new_images)
    """

    def __init__(self, workers: int | tuple[int, int] = 2, on: str | Engine = "local"):
        engine = submit.engine_of(on)
        require_number(workers) if engine.name == "local" else task_range(workers)
        refuse_in_cluster(workers)
        if engine.max_restarts:
            raise UsageError(NO_RESTARTS)
        self._count, self._engine = workers, engine
        self._one_call = threading.RLock()  # of several threads
        self._closed = False
        self._start()

    def __repr__(self) -> str:
        on = "" if self._engine.name == "local" else f", on={self._engine.name!r}"
        return f"Workers({self._count}{on})"

    def __copy__(self) -> Workers:
        return self  # tuners copy what holds their workers

    def __deepcopy__(self, memo: Any) -> Workers:
        return self

    def __reduce__(self) -> Any:
        # For callbacks that refer to them, in the workers.
        return _closed, (self._count, self._engine)

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def fit(self, model: Any, *args: Any, **kwargs: Any) -> keras.callbacks.History:
        """Trains a model; arguments and result are those of `tfmw.fit`."""
        history: keras.callbacks.History = _of_tfmw("fit")(model, *args, workers=self, **kwargs)
        return history

    def evaluate(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Computes loss and metrics; arguments and result are those of `tfmw.evaluate`."""
        return _of_tfmw("evaluate")(model, *args, workers=self, **kwargs)

    def predict(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Computes predictions; arguments and result are those of `tfmw.predict`."""
        return _of_tfmw("predict")(model, *args, workers=self, **kwargs)

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Runs `function(*args)` in each worker, as `tfmw.launch` does; returns the results."""
        with self._one_call:
            workers = self._standing_workers()
            results = workers.call(function, args)
            if workers.stopped:  # it came after the function
                self._end()
                signal.raise_signal(workers.stopped)
            return results

    def close(self) -> None:
        """Ends the workers. Later calls raise UsageError."""
        self._closed = True
        self._end()

    def call(
        self, method: Callable[..., Any], arguments: Mapping[str, Any], prepared: bool
    ) -> dict[str, Any]:
        """Makes a call of `tfmw.<method>` in each worker, and updates the caller's model.

        Args:
            method: `tfmw.fit`, `evaluate` or `predict`.
            arguments: its arguments, with data as `sent_data` returns it, and the names of the
                `given` ones.
            prepared: whether the model's own method has run in this process.

        Returns:
            The chief's answer. "stopped" is in it if a signal has ended the call.
        """
        with self._one_call:
            workers = self._standing_workers()
            request, packer = self._requests.make(method, arguments, prepared)
            try:
                answers = workers.call(worker_calls.run, (request,))
            except BaseException:
                self._end()
                raise
            answer = {**answers[0], "signal": workers.stopped}
            if workers.stopped and "stopped" not in answer:
                self._end()  # the signal may have come after the last step
            self._requests.end(request, packer, arguments["model"], answers)
            return answer

    def folder(self) -> tempfile.TemporaryDirectory[str]:
        """A folder for a call, which does not outlive this process."""
        return tempfile.TemporaryDirectory(dir=self._standing_workers().scratch)

    def _start(self) -> None:
        self._requests = Requests()
        self._modules, self._runs = _modules_of_user(), trackers.active_runs()
        self._standing: StandingWorkers | JobWorkers
        if isinstance(self._count, int) and self._engine.name == "local":
            self._standing = StandingWorkers(self._count)
        else:
            self._standing = JobWorkers(self._engine, self._count)
        # The processes end with this object, and with this process.
        self._end = weakref.finalize(self, self._standing.close)

    def job(self) -> JobWorkers | None:
        """The job of the processes; None if they are of this machine."""
        standing = self._standing_workers()
        return standing if isinstance(standing, JobWorkers) else None

    def _standing_workers(self) -> StandingWorkers | JobWorkers:
        """The processes: new ones if one has ended, or has an old module or a tracker's old run."""
        if self._closed:
            raise UsageError("these workers are closed: make others with tfmw.Workers(...).")
        modules = _modules_of_user()
        edited = any(modules.get(name, file) != file for name, file in self._modules.items())
        old = edited or self._runs != trackers.active_runs()
        if old or not (self._end.alive and self._standing.alive):
            self._end()
            self._start()
        self._modules |= modules
        return self._standing


def for_one_call(workers: int) -> Workers:
    """Workers to which all is sent, as they keep nothing."""
    made = Workers(workers)
    made._requests = Requests(keeps=False)
    return made


def _closed(workers: int | tuple[int, int], engine: Engine) -> Workers:
    """Workers whose calls raise an error, as they are in another process."""
    made = Workers.__new__(Workers)
    made._count, made._engine = workers, engine
    made._closed, made._one_call = True, threading.RLock()
    made._end = weakref.finalize(made, int)  # nothing to end
    return made


def require_number(workers: Any) -> None:
    """Raises UsageError for a wrong number of processes."""
    if not is_whole(workers, 1):
        raise UsageError(
            f"received workers={workers!r}: expected a number of processes, such as 2."
        )


def refuse_in_cluster(workers: Any) -> None:
    """Raises UsageError in a process that is part of a cluster."""
    if not membership.current_cluster().is_single:
        raise UsageError(
            f"workers={workers} starts new processes, and this process is already part of "
            f"{membership.current_cluster()!r}: leave workers= out."
        )


def _of_tfmw(name: str) -> Callable[..., Any]:
    method: Callable[..., Any] = getattr(importlib.import_module("tfmw"), name)
    return method


def _modules_of_user() -> dict[str, tuple[str, int]]:
    """Name -> file and time of its last change, of modules that are not installed."""
    installed = sys.prefix, sys.base_prefix
    found = {}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None) or ""
        if file.endswith(".py") and not file.startswith(installed) and os.path.exists(file):
            found[name] = file, os.stat(file).st_mtime_ns
    return found


# ---- what the workers have ---------------------------------------------------------------------


@dataclasses.dataclass
class _Known:
    """A model of the workers."""

    model: weakref.ref[keras.Model]
    fingerprint: bytes
    digests: list[bytes | None]  # of the values of its variables; None if they are not known


class Requests:
    """Makes the requests of one set of workers, without what they have.

    Args:
        keeps: whether the workers keep models and arrays.
        stays: whether the workers stay after a call.
    """

    def __init__(self, keeps: bool = True, stays: bool = True):
        self._keeps, self._stays = keeps, stays
        self._models: dict[int, _Known] = {}  # by number; the last used last
        self._numbers = itertools.count(1)
        self._arrays: dict[bytes, int] = {}  # digest -> number of the last call with it
        self._calls = 0
        self._seeds: Any = None
        self._environ = dict(os.environ)  # the last environment that the workers have

    def make(
        self, method: Callable[..., Any], arguments: Mapping[str, Any], prepared: bool
    ) -> tuple[Request, pickling.Packer]:
        """The request of a call, and the packer with the values of the model's variables."""
        model, arrays = arguments["model"], []  # type: ignore[var-annotated]
        packer = pickling.Packer(call.apart(arrays, worker_calls.SHARED if self._keeps else None))
        of_keras = isinstance(model, keras.Model)
        structure = packer.dump(model, apart=True) if of_keras else b""
        of_model = len(arrays)
        data = packer.dump((packer.variables, dict(arguments), prepared))
        settings = self._settings()
        self._calls += 1
        parcels = [
            Parcel(pickled, [self._sent(array) for array in some])
            for pickled, some in ((structure, arrays[:of_model]), (data, arrays[of_model:]))
        ]
        self._arrays = {d: c for d, c in self._arrays.items() if c > self._calls - _MOST_CALLS}
        digests = [digest_of_value(value) for value in packer.values]
        request = Request(
            method,
            parcels[1],
            settings,
            parcels[0] if of_keras else None,
            dict(enumerate(packer.values)),
            _by_name(model, packer, digests) if of_keras else {},
            stays=self._stays,
            models=frozenset(self._models),
            arrays=frozenset(self._arrays),
        )
        if not (of_keras and self._keeps):
            return request, packer
        config = repr(settings["keras"]).encode()
        fingerprint = digest_of(structure, *(d for d, _ in parcels[0].arrays), config)
        return self._without_kept(request, model, fingerprint, digests), packer

    def _without_kept(
        self, request: Request, model: keras.Model, fingerprint: bytes, digests: list[bytes]
    ) -> Request:
        number, known = 0, None
        for number, known in list(self._models.items()):
            if known.model() is None:
                del self._models[number]
        number = next((n for n, k in self._models.items() if k.model() is model), 0)
        known = self._models.pop(number, None)
        if known is not None and known.fingerprint == fingerprint:
            pairs = zip(digests, known.digests, strict=True)
            changed = {i for i, (now, then) in enumerate(pairs) if now != then}
            values = {i: v for i, v in request.values.items() if i in changed}
            request = dataclasses.replace(request, model=None, values=values)
            known.digests = list(digests)
        else:
            number = next(self._numbers)
            known = _Known(weakref.ref(model), fingerprint, list(digests))
        while len(self._models) >= _MOST_MODELS:
            del self._models[next(iter(self._models))]
        self._models[number] = known
        return dataclasses.replace(request, number=number, models=frozenset(self._models))

    def end(
        self, request: Request, packer: pickling.Packer, model: Any, answers: list[dict[str, Any]]
    ) -> None:
        """Restores the values that the workers have changed into the caller's model."""
        tensors = answers[0].get("tensors")
        if not all(answer["kept"] for answer in answers):
            self._models.pop(request.number, None)
        if not isinstance(model, keras.Model) or tensors is None:
            return
        if tensors:
            state.restore(model, {**_by_name(model, packer, packer.values), **tensors})
        if (known := self._models.get(request.number)) is not None:
            changed = {name: digest_of_value(value) for name, value in tensors.items()}
            now = {**_by_name(model, packer, known.digests), **changed}
            by_id = {id(v): now[name] for name, v in state.named(model).items() if name in now}
            known.digests = [by_id.get(id(variable)) for variable in packer.variables]

    def _sent(self, array: Any) -> tuple[bytes, Any]:
        """The digest of an array, and its content if the workers do not have it."""
        digest = digest_of(array)
        content = None if self._arrays.get(digest) else array
        if self._keeps:
            self._arrays[digest] = self._calls
        return digest, content

    def _settings(self) -> dict[str, Any]:
        """Settings of this process for the workers."""
        seeds, environ = datasets.source_of_seeds(), dict(os.environ)
        anew = not self._calls or seeds is not self._seeds
        names = self._environ.keys() | environ.keys()
        changed = {n: environ.get(n) for n in names if environ.get(n) != self._environ.get(n)}
        self._seeds, self._environ = seeds, environ
        return {
            **worker_calls.settings_of_process(),
            "anew": anew,
            "directory": os.getcwd() if self._stays else None,
            # A restart of the workers is no other call.
            "environment": {**changed, CALL: f"{identity()}/{next(_numbers)}"},
        }


def _by_name(model: keras.Model, packer: pickling.Packer, items: list[Any]) -> dict[str, Any]:
    """Items of the model's variables by the names of those that all replicas share."""
    of_variable = {id(v): item for v, item in zip(packer.variables, items, strict=True)}
    named = state.named(model).items()
    return {name: of_variable[id(v)] for name, v in named if id(v) in of_variable}
