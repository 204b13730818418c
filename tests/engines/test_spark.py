"""Jobs on Spark with two executors of their own (`local-cluster`), on this machine.

Marked `spark`: `make test` leaves these out, and says so, where Java is not installed.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tfmw
from tests.engines.contract import Contract, marked_copy, wait_for
from tests.helpers.cluster import ONE_THREAD, PYTHONPATH
from tfmw.engines import Engine, Spark
from tfmw.errors import UsageError

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.process,
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


def executors(context: Any) -> int:
    """Current number of executors."""
    count: int = context._jsc.sc().getExecutorMemoryStatus().size() - 1  # the driver is one of them
    return count


@pytest.fixture(scope="module")
def context() -> Iterator[Any]:
    from pyspark import SparkConf, SparkContext

    environ = {**ONE_THREAD, "PYTHONPATH": PYTHONPATH, "SPARK_LOCAL_IP": "127.0.0.1"}
    environ["PYSPARK_PYTHON"] = sys.executable
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environ.items():
            patch.setitem(os.environ, name, value)
        conf = SparkConf().setMaster("local-cluster[2,2,1024]").setAppName("tests")
        conf.set("spark.ui.enabled", "false").set("spark.executor.memory", "1g")
        context = SparkContext(conf=conf)
        context.setLogLevel("OFF")
        try:
            # Until both executors are there a barrier stage has no place, and is tried again late.
            wait_for(lambda: executors(context) == 2)
            yield context
        finally:
            context.stop()


@pytest.fixture(scope="module")
def engine(context: Any) -> Spark:
    return Spark()


class TestSpark(Contract):
    attaches = False
    host = "CoarseGrainedExecutorBackend"
    pytestmark = pytest.mark.nightly  # `make test` has Slurm's

    @pytest.fixture(autouse=True)
    def _has_both_executors(self, context: Any) -> None:
        wait_for(lambda: executors(context) == 2)

    test_lost_host_of_a_task_costs_nothing = marked_copy(
        Contract.test_lost_host_of_a_task_costs_nothing, pytest.mark.nightly
    )
    test_other_versions_are_refused = marked_copy(
        Contract.test_other_versions_are_refused, pytest.mark.nightly
    )

    @contextlib.contextmanager
    def tasks_that_find(self, engine: Engine, path: Path) -> Iterator[Engine]:
        from pyspark import SparkContext

        context = SparkContext.getOrCreate()
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(context.environment, "PYTHONPATH", f"{path}{os.pathsep}{PYTHONPATH}")
            yield engine

    @pytest.fixture(autouse=True)
    def _leaves_nothing(self, context: Any) -> Iterator[None]:
        yield
        assert not context.statusTracker().getActiveJobsIds()


def test_without_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyspark", None)
    with pytest.raises(UsageError, match=r"on='spark' needs the package pyspark.*'\.\[spark\]'"):
        tfmw.submit(print, on="spark")
