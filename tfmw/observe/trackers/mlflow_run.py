"""MLflow: one run of all tasks and attempts.

The chief's client continues the run that an earlier attempt has created, by a tag. The other tasks
write to a store of their own in a temporary directory, and read the real one: MLflow's public
switch, `set_tracking_uri`, would hide the runs and models that a script reads.
"""

from __future__ import annotations

import functools
import itertools
import logging
import os
import tempfile
from collections.abc import Sequence
from types import ModuleType
from typing import Any

logger = logging.getLogger("tfmw")

TAG = "tfmw_run"
"""Tag of the runs that a training creates: TFMW_RUN_ID, and the number of the run from 0."""


def silence(module: ModuleType) -> None:
    """Lets this task log to a temporary store."""
    from mlflow.tracking._tracking_service.registry import TrackingStoreRegistry

    get_store = TrackingStoreRegistry.get_store
    own = functools.cache(_temporary_store)

    @functools.wraps(get_store)
    def silent(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _Silent(own()[0], functools.partial(get_store, self, *args, **kwargs))

    TrackingStoreRegistry.get_store = silent


def _temporary_store() -> tuple[Any, tempfile.TemporaryDirectory[str]]:
    from mlflow.store.tracking.file_store import FileStore

    directory = tempfile.TemporaryDirectory(prefix="tfmw-mlflow-")
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # MLflow would prefer a database
    return FileStore(directory.name, os.path.join(directory.name, "artifacts")), directory


class _Silent:
    """A store of this task alone, which reads missing objects from the real one."""

    def __init__(self, own: Any, real: Any) -> None:
        self._own = own
        self._real = real

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("search_", "list_")):
            return getattr(self._real(), name)
        method = getattr(self._own, name)
        if not callable(method):
            return method

        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            from mlflow.exceptions import MlflowException

            try:
                return method(*args, **kwargs)
            except MlflowException:  # the run exists only in the real store
                if name.startswith("get_"):
                    return getattr(self._real(), name)(*args, **kwargs)
                return None

        return call


def continue_runs(training: str, module: ModuleType) -> None:
    """Makes runs that this task creates continue those of earlier attempts, in the same order.

    A parameter of such a run keeps its value: MLflow refuses another one.

    Args:
        training: TFMW_RUN_ID of the training; "": each attempt creates its own runs.
        module: mlflow.
    """
    if not training:
        return
    client = module.MlflowClient  # all of MLflow's functions log through a client
    create, log_param, log_batch = client.create_run, client.log_param, client.log_batch
    numbers = itertools.count()
    held: dict[str, dict[str, str]] = {}  # id of a continued run -> its parameters

    @functools.wraps(create)
    def create_run(
        self: Any,
        experiment_id: str,
        start_time: int | None = None,
        tags: dict[str, Any] | None = None,
        run_name: str | None = None,
    ) -> Any:
        name = f"{training}.{next(numbers)}"
        found = self.search_runs([experiment_id], f"tags.`{TAG}` = '{name}'", max_results=1)
        if not found:
            return create(self, experiment_id, start_time, {**(tags or {}), TAG: name}, run_name)
        run = found[0]
        self.update_run(run.info.run_id, status="RUNNING")
        held[run.info.run_id] = run.data.params
        logger.info("MLflow: the run %s continues", run.info.run_id)
        return self.get_run(run.info.run_id)

    @functools.wraps(log_param)
    def log_new_param(self: Any, run_id: str, key: str, value: Any, **kwargs: Any) -> Any:
        if key in held.get(run_id, ()):
            return value
        return log_param(self, run_id, key, value, **kwargs)

    @functools.wraps(log_batch)
    def log_new_params(
        self: Any, run_id: str, metrics: Any = (), params: Sequence[Any] = (), *rest: Any, **kw: Any
    ) -> Any:
        new = [param for param in params if param.key not in held.get(run_id, ())]
        return log_batch(self, run_id, metrics, new, *rest, **kw)

    client.create_run = create_run
    client.log_param = log_new_param
    client.log_batch = log_new_params


def active() -> dict[str, str] | None:
    """The id of the active run and the URI of its store."""
    import mlflow

    run = mlflow.active_run()
    return None if run is None else {"id": run.info.run_id, "uri": mlflow.get_tracking_uri()}


def adopt(run: dict[str, str], is_chief: bool) -> None:
    """Makes MLflow's functions log to a run of another process, before or after MLflow's import."""
    if is_chief:
        os.environ["MLFLOW_TRACKING_URI"] = run["uri"]
        os.environ["MLFLOW_RUN_ID"] = run["id"]
