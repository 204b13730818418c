"""A pytest plugin: Keras's tests with `fit`, `evaluate` and `predict` handed to tfmw.

    pytest -p tests.keras_suite.plugin --trainer tfmw --outcomes out.json keras/src/trainers

It says nothing of which failures are whose: see `tests.keras_suite.__main__`.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

# Names of modules are imported late: TensorFlow is no business of the process that hands tests out.
_CALLS = "calls of tfmw"
_METHODS = ("fit", "evaluate", "predict")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("Keras's tests")
    group.addoption("--trainer", choices=("tfmw", "keras"), default="tfmw")
    group.addoption("--outcomes", type=Path, help="gets {test: {outcome, seconds, calls, error}}")
    group.addoption("--training", action="store_true", help="only tests that train or predict")
    group.addoption("--sample", type=int, help="how many tests to run; all unless given")
    group.addoption("--sample-seed", default="", help="which ones: the same seed, the same tests")
    group.addoption("--only", type=Path, help="a file that names the tests to run, one a line")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "requires_trainable_backend: as Keras marks its tests")
    if config.getoption("--outcomes") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Outcomes(config.getoption("--outcomes")))
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        if not (config.rootpath / "conftest.py").exists():
            _stand_in_for_conftest()
        config.pluginmanager.register(_Trainer(config.getoption("--trainer") == "tfmw"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    kept = items
    only = config.getoption("--only")
    if only is not None:
        named = set(only.read_text().splitlines())
        kept = [item for item in items if item.nodeid in named]
    number = config.getoption("--sample")
    if number is not None or config.getoption("--training"):
        kept = [item for item in kept if _trains(item)]
    if number is not None:
        seed = config.getoption("--sample-seed")
        drawn = sorted(
            kept, key=lambda item: hashlib.sha256((seed + item.nodeid).encode()).digest()
        )
        chosen = {item.nodeid for item in drawn[:number]}
        kept = [item for item in kept if item.nodeid in chosen]
    left_out = set(items) - set(kept)
    config.hook.pytest_deselected(items=list(left_out))
    # A second strategy breaks the collectives of the first one (`_Trainer`), so the tests that make
    # one come last.
    items[:] = sorted(kept, key=_makes_a_strategy)


def _makes_a_strategy(item: pytest.Item) -> bool:
    if not isinstance(item, pytest.Function):
        return False
    return "MirroredStrategy(" in inspect.getsource(inspect.unwrap(item.function))


def _trains(item: pytest.Item) -> bool:
    """Whether a test calls a trainer's method, by itself or through a method of its class."""
    if not isinstance(item, pytest.Function):
        return False
    names: set[str] = set()
    todo = [inspect.unwrap(item.function).__code__]
    while todo:
        code = todo.pop()
        todo += [inner for inner in code.co_consts if isinstance(inner, types.CodeType)]
        for name in set(code.co_names) - names:
            names.add(name)
            method = getattr(item.cls, name, None)
            if inspect.isfunction(method):
                todo.append(inspect.unwrap(method).__code__)
    return not names.isdisjoint(_METHODS)


def _stand_in_for_conftest() -> None:
    """Substitutes names that tests import from the `conftest` of Keras's repository."""
    import keras

    def skip_if_backend(backend: str, reason: str) -> pytest.MarkDecorator:
        return pytest.mark.skipif(keras.backend.backend() == backend, reason=reason)

    module = types.ModuleType("conftest")
    vars(module)["skip_if_backend"] = skip_if_backend
    sys.modules["conftest"] = module


class Calls:
    """Hands Keras's methods on to tfmw, and counts the calls of each test."""

    def __init__(self) -> None:
        self.calls = 0

    def hand_over(self, strategy_of: Callable[[Any], Any]) -> None:
        """Replaces Keras's methods in this process.

        Args:
            strategy_of: model -> the strategy of its calls; None leaves them to Keras.
        """
        from keras.src.backend.tensorflow.trainer import TensorFlowTrainer

        for name in _METHODS:
            method = self._handed_over(getattr(TensorFlowTrainer, name), strategy_of)
            setattr(TensorFlowTrainer, name, method)

    def _handed_over(
        self, keras_method: Any, strategy_of: Callable[[Any], Any]
    ) -> Callable[..., Any]:
        import tfmw

        tfmw_function = getattr(tfmw, keras_method.__name__)
        signature = inspect.signature(keras_method)

        @functools.wraps(keras_method)
        def method(model: Any, *args: Any, **kwargs: Any) -> Any:
            strategy = strategy_of(model)
            if strategy is None:
                return keras_method(model, *args, **kwargs)
            given = dict(signature.bind(model, *args, **kwargs).arguments)
            given.update(given.pop("kwargs", {}))
            del given["self"]
            self.calls += 1
            given = {"strategy": strategy, **given}
            return tfmw_function(model, given.pop("x", None), **given)

        return method

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Any:
        before = self.calls
        try:
            return (yield)
        finally:
            item.user_properties.append((_CALLS, self.calls - before))


def two_devices() -> None:
    """Gives TensorFlow two virtual devices."""
    import tensorflow as tf

    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)


class _Trainer(Calls):
    """Replaces Keras's methods in the process that runs the tests, once.

    One strategy serves all tests: TensorFlow keeps keys of collectives, which the second strategy
    of a process meets.
    """

    def __init__(self, with_tfmw: bool):
        super().__init__()
        import keras.src  # noqa: F401  before its tests, which are looked for in its packages

        two_devices()
        if not with_tfmw:
            return
        import tfmw

        strategy = tfmw.strategies.mirrored(["CPU:0", "CPU:1"])
        # A model that was made in the scope of a strategy has that one.
        self.hand_over(lambda model: model._distribute_strategy or strategy)


class Outcomes:
    """Writes what became of each test."""

    def __init__(self, path: Path):
        self._path = path
        self._tests: dict[str, dict[str, Any]] = {}

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:  # a file that cannot be imported stands for its tests
            self._tests[report.nodeid] = {
                "outcome": "failed",
                "seconds": 0.0,
                "calls": 0,
                "error": report.longreprtext,
            }

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test = self._tests.setdefault(
            report.nodeid, {"outcome": "passed", "seconds": 0.0, "calls": 0, "error": ""}
        )
        test["seconds"] = round(test["seconds"] + report.duration, 3)
        test["calls"] = dict(report.user_properties).get(_CALLS, test["calls"])
        if report.outcome != "passed" and test["outcome"] != "failed":
            test["outcome"] = report.outcome
            test["error"] = report.longreprtext if report.failed else ""

    def pytest_sessionfinish(self) -> None:
        self._path.write_text(json.dumps(self._tests, indent=1))
