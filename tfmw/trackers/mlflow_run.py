"""MLflow: one run of all tasks and attempts.

The tracking store of a process is where each of MLflow's functions ends, its autologging included.
The chief's store continues the run that an earlier attempt has created, and drops what it holds
already. The other tasks write to a store of their own in a temporary directory; they read the real
one.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import functools
import logging
import os
import shutil
import tempfile
from collections.abc import Iterable
from types import ModuleType
from typing import Any

logger = logging.getLogger("tfmw")

TAG = "tfmw_run"
"""Tag of the runs that a training creates: TFMW_RUN_ID, and the number of the run from 0."""


def silence(module: ModuleType) -> None:
    """Lets this task log to a temporary store."""
    from mlflow.tracking._tracking_service.registry import TrackingStoreRegistry

    own = functools.cache(_temporary_store)
    get_store = TrackingStoreRegistry.get_store

    @functools.wraps(get_store)
    def silent(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _Silent(own(), functools.partial(get_store, self, *args, **kwargs))

    TrackingStoreRegistry.get_store = silent


def _temporary_store() -> Any:
    from mlflow.store.tracking.file_store import FileStore

    directory = tempfile.mkdtemp(prefix="tfmw-mlflow-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    allow = "MLFLOW_ALLOW_FILE_STORE"  # MLflow would rather have a database
    before = os.environ.get(allow)
    os.environ[allow] = "true"
    try:
        return FileStore(directory, os.path.join(directory, "artifacts"))
    finally:
        if before is None:
            del os.environ[allow]
        else:
            os.environ[allow] = before


class _Silent:
    """A store of this task alone; what it does not have is read from the real one."""

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
            except MlflowException:  # of a run that only the real store has
                if name.startswith("get_"):
                    return getattr(self._real(), name)(*args, **kwargs)
                return None

        return call


class Chief:
    """Continues runs in the store of the chief.

    Args:
        run: identifies the training over its attempts; "": each attempt creates runs of its own.
    """

    def __init__(self, run: str) -> None:
        self._run = run

    def __call__(self, module: ModuleType) -> None:
        from mlflow.tracking._tracking_service.registry import TrackingStoreRegistry

        get_store = TrackingStoreRegistry.get_store

        @functools.wraps(get_store)
        def continued(registry: Any, *args: Any, **kwargs: Any) -> Any:
            store = get_store(registry, *args, **kwargs)
            if "create_run" not in vars(store):  # MLflow caches its stores
                _continue_runs(store, self._run)
            return store

        TrackingStoreRegistry.get_store = continued


_in_background: collections.deque[Any] = collections.deque()  # what MLflow has not logged yet
_MOST = 1000  # of these
_number = 0  # of runs that this process has created
_logged: dict[str, _Logged] = {}  # by id of a run that is continued


def _continue_runs(store: Any, training: str) -> None:
    """Replaces the methods of a store that create a run and log to it."""
    create, update = store.create_run, store.update_run_info

    def create_run(
        experiment_id: str, user_id: str, start_time: int, tags: Any, run_name: str
    ) -> Any:
        global _number
        if training:
            from mlflow.entities import RunTag

            name = f"{training}.{_number}"
            _number += 1
            found = _run_named(store, experiment_id, name)
            if found is not None:
                return _resumed(store, found.info.run_id, update)
            tags = [*tags, RunTag(TAG, name)]
        return create(experiment_id, user_id, start_time, tags, run_name)

    store.create_run = create_run
    for name in ("log_metric", "log_metric_async", "log_param", "log_param_async"):
        setattr(store, name, _of_one(getattr(store, name)))
    store.log_batch = _of_batch(store.log_batch)
    # MLflow's other functions in the background call this one.
    store.log_batch_async = _of_batch(_noted(store.log_batch_async))


def _run_named(store: Any, experiment_id: str, name: str) -> Any:
    from mlflow.entities import ViewType

    found = store.search_runs(
        [experiment_id], f"tags.`{TAG}` = '{name}'", ViewType.ACTIVE_ONLY, max_results=1
    )
    return next(iter(found), None)


def _resumed(store: Any, run_id: str, update: Any) -> Any:
    from mlflow.entities import RunStatus

    info = store.get_run(run_id).info
    update(run_id, RunStatus.RUNNING, None, info.run_name)
    _logged[run_id] = _Logged(store, run_id)
    logger.info("MLflow: the run %s goes on", run_id)
    return store.get_run(run_id)


class _Logged:
    """What a run holds already.

    A metric at a step is logged once. A metric that is always logged at the same step, as MLflow's
    callback logs validations, is known by its values.
    """

    def __init__(self, store: Any, run_id: str) -> None:
        data = store.get_run(run_id).data
        self.params = set(data.params)
        self._steps: dict[str, set[int]] = {}
        self._values: dict[str, collections.Counter[float]] = {}
        for key in data.metrics:
            history = _history(store, run_id, key)
            self._steps[key] = {metric.step for metric in history}
            if len(self._steps[key]) == 1:
                self._values[key] = collections.Counter(metric.value for metric in history)

    def new(self, metrics: Iterable[Any]) -> list[Any]:
        """Those of the metrics that the run does not hold."""
        return [metric for metric in metrics if not self._holds(metric)]

    def _holds(self, metric: Any) -> bool:
        if metric.step not in self._steps.get(metric.key, ()):
            return False
        if metric.key not in self._values:
            return True
        held = self._values[metric.key][metric.value] > 0
        self._values[metric.key][metric.value] -= held
        return held


def _history(store: Any, run_id: str, key: str) -> list[Any]:
    metrics: list[Any] = []
    token = None
    while True:
        page = store.get_metric_history(run_id=run_id, metric_key=key, page_token=token)
        metrics += page
        token = getattr(page, "token", None)
        if not token:
            return metrics


def _of_one(log: Any) -> Any:
    """`log_metric` or `log_param`, for what the run does not hold."""

    @functools.wraps(log)
    def new_only(run_id: str, entry: Any = None, **named: Any) -> Any:
        logged = _logged.get(run_id)
        entry = entry if entry is not None else next(iter(named.values()))
        if logged is not None:
            if (
                entry.key in logged.params
                if not hasattr(entry, "step")
                else not logged.new([entry])
            ):
                return None
        return log(run_id, entry)

    return new_only


def _of_batch(log: Any) -> Any:
    """`log_batch`, for what the run does not hold."""

    @functools.wraps(log)
    def new_only(run_id: str, metrics: Any = (), params: Any = (), tags: Any = ()) -> Any:
        logged = _logged.get(run_id)
        if logged is not None:
            metrics = logged.new(metrics)
            params = [param for param in params if param.key not in logged.params]
        return log(run_id, metrics, params, tags)

    return new_only


def position() -> str | None:
    """Id of the active run."""
    import mlflow

    run = mlflow.active_run()
    return None if run is None else str(run.info.run_id)


def resume(run_id: str) -> None:
    """Lets the next `mlflow.start_run`, which autologging calls too, continue a run."""
    import mlflow
    from mlflow.tracking._tracking_service.utils import _get_store

    active = mlflow.active_run()
    if active is None:
        store = _get_store()
        _logged.setdefault(run_id, _Logged(store, run_id))
        os.environ["MLFLOW_RUN_ID"] = run_id
    elif active.info.run_id != run_id:
        logger.warning(
            "the backup was taken in the MLflow run %s, and this process logs to the run %s: to go "
            "on with the first, set TFMW_RUN_ID to the same value in each start of the training, "
            "or pass run_id to mlflow.start_run.",
            run_id,
            active.info.run_id,
        )


def flush() -> None:
    """Waits for what MLflow logs in the background, up to now; from any thread.

    MLflow's own function shuts its threads down, and waits for ever where another thread logs
    meanwhile, as a training does while its backup is written.
    """
    for _ in range(len(_in_background)):
        _wait_for_one()


def _wait_for_one() -> None:
    from mlflow.exceptions import MlflowException

    with contextlib.suppress(IndexError, MlflowException):  # MLflow itself reports failures
        _in_background.popleft().wait()


def _noted(log: Any) -> Any:
    """`log_batch_async`, for which `flush` waits."""

    @functools.wraps(log)
    def noted(*args: Any, **kwargs: Any) -> Any:
        operation = log(*args, **kwargs)
        _in_background.append(operation)
        if len(_in_background) > _MOST:
            _wait_for_one()
        return operation

    return noted


def active() -> dict[str, str] | None:
    """Where the active run is: its id and the URI of its store."""
    import mlflow

    run_id = position()
    return None if run_id is None else {"id": run_id, "uri": mlflow.get_tracking_uri()}


def adopt(run: dict[str, str]) -> None:
    """Lets MLflow's functions log to a run of another process; MLflow need not be imported yet."""
    os.environ["MLFLOW_TRACKING_URI"] = run["uri"]
    os.environ["MLFLOW_RUN_ID"] = run["id"]
