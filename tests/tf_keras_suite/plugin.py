"""A pytest plugin: legacy Keras's tests of tf.distribute, with strategies of tfmw.

    pytest -p tests.tf_keras_suite.plugin --checkout tf-keras --where devices --outcomes out.json

`--where devices` has two virtual devices in one process, `--where processes` is for each of two
workers, `--where keras` has stock Keras without a strategy.
"""

from __future__ import annotations

import functools
import inspect
import unittest
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.keras_suite.plugin import Calls, Outcomes, two_devices

_SAME = {"MirroredCPUAndGPU": "Mirrored2GPUs", "Mirrored1CPU": "OneDeviceCPU"}


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("legacy Keras's tests")
    group.addoption("--checkout", type=Path)
    group.addoption("--where", choices=("devices", "processes", "keras"), default="devices")
    group.addoption("--outcomes", type=Path, help="gets {test: {outcome, seconds, calls, error}}")
    group.addoption("--only", type=Path, help="a file that names the tests to run, one a line")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--outcomes"):
        config.pluginmanager.register(Outcomes(config.getoption("--outcomes")))
    config.pluginmanager.register(
        _Strategies(config.getoption("--where"), config.getoption("--checkout"))
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    only = config.getoption("--only")
    if only is not None:
        named = set(only.read_text().splitlines())
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in named])
        items[:] = [item for item in items if item.nodeid in named]


class _Strategies(Calls):
    """Replaces the strategies of combinations, and Keras's methods."""

    def __init__(self, where: str, checkout: Path):
        super().__init__()
        import keras
        import tensorflow as tf

        import tfmw
        from tests.tf_keras_suite import aliases

        stock = tf.distribute.get_strategy()
        if where == "processes":
            several = tfmw.strategies.multi_worker_mirrored()
            # It refuses to train alone in a cluster, which is what the tests compare with.
            del keras.Model.fit
            # Those of one process are run on devices.
            self._of = {"MultiWorkerMirrored2x1CPU": several}
        else:
            two_devices()
            one = two = stock
            if where == "devices":
                one = tfmw.strategies.mirrored(["CPU:0"])
                two = tfmw.strategies.mirrored(["CPU:0", "CPU:1"])
            self._of = {"OneDeviceCPU": one, "Mirrored2GPUs": two}
            if where == "keras":
                self._of["MultiWorkerMirrored2x1CPU"] = stock
        if where != "keras":
            # Not those of models without a strategy, which the tests compare with.
            self.hand_over(
                lambda model: (
                    None if model._distribute_strategy is stock else model._distribute_strategy
                )
            )
        aliases.install(checkout)
        internal = tf.compat.v2.__internal__  # as the tests import it
        internal.distribute.combinations.generate = self._generate
        internal.test.combinations.generate = self._generate

    def _generate(self, combinations: Iterable[dict[str, Any]], **_: Any) -> Any:
        """A decorator: a test for each combination that there is here, run eagerly."""
        from absl.testing import parameterized

        cases: dict[str, dict[str, Any]] = {}
        for combination in combinations:
            arguments = dict(combination)
            strategies = {
                k: _SAME.get(str(v), str(v))
                for k, v in arguments.items()
                if k.startswith("distribution")
            }
            if all(name in self._of for name in strategies.values()):
                arguments.update((k, self._of[name]) for k, name in strategies.items())
                cases.setdefault(_name({**combination, **strategies}), arguments)

        def decorate(test: Any) -> Any:
            takes = inspect.signature(test).parameters
            if not cases:

                @functools.wraps(test, assigned=("__name__", "__doc__"))
                def none(self: Any) -> None:
                    raise unittest.SkipTest("has no combination for this place")

                del none.__wrapped__
                return none
            named = [
                {
                    "testcase_name": name,
                    **{k: v for k, v in {**arguments, "mode": "eager"}.items() if k in takes},
                }
                for name, arguments in cases.items()
            ]
            return parameterized.named_parameters(*named)(test)

        return decorate


def _name(combination: dict[str, Any]) -> str:
    """The rest of a test's name."""
    named = {k: v for k, v in combination.items() if k != "mode"}
    return "".join(
        f"_{v}" if k.startswith("distribution") else f"_{k}_{getattr(v, '__name__', v)}"
        for k, v in sorted(named.items())
    ).replace(" ", "")
