"""`on="spark"` in cells of real notebook kernels, whose executors are theirs; see `kernels`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.contract import wait_for
from tests.engines.kernels import KernelContract
from tests.engines.test_kernel import Kernel
from tests.helpers.cluster import PYTHONPATH, marked
from tfmw.engines import Engine, Spark

pytestmark = [pytest.mark.nightly, pytest.mark.process]


class TestSparkKernel(KernelContract):
    on = "'spark'"
    setup = """
from pyspark import SparkConf, SparkContext

conf = SparkConf().setMaster("local-cluster[2,2,1024]").setAppName("tests")
conf.set("spark.ui.enabled", "false").set("spark.executor.memory", "1g")
context = SparkContext(conf=conf)
context.setLogLevel("OFF")
while context._jsc.sc().getExecutorMemoryStatus().size() < 3:
    time.sleep(0.1)
"""

    @pytest.fixture
    def engine(self, tmp_path: Path) -> Iterator[Spark]:
        """An engine for the kernel's environment; its jobs are visible from the kernel only."""
        self.folder = tmp_path
        environ = {"TMPDIR": str(tmp_path), "PYSPARK_PYTHON": sys.executable}
        environ |= {"PYTHONPATH": PYTHONPATH, "SPARK_LOCAL_IP": "127.0.0.1"}
        with pytest.MonkeyPatch.context() as patch:
            for name, value in environ.items():
                patch.setitem(os.environ, name, value)
            yield Spark()

    def has_backup(self, engine: Engine) -> bool:
        found = [json.loads(p.read_text()) for p in self.folder.glob("tfmw-job-*/status.json")]
        return any(status.get("backup") for status in found)

    def wait_until_nothing_is_left(self, kernel: Kernel) -> None:
        assert kernel.run("context.statusTracker().getActiveJobsIds()").value == "[]"
        assert kernel.run("tfmw.jobs('spark')").value == "[]"
        wait_for(lambda: not list(self.folder.glob("tfmw-*")))

    def test_killed_kernel_takes_its_job_with_it(self, kernel: Kernel, tmp_path: Path) -> None:
        kernel.run(
            "def waits():\n"
            "    print('waiting', flush=True)\n"
            "    time.sleep(3600)\n"
            "job = tfmw.submit(waits, workers=2, on='spark', env={'TFMW_NO_INIT': '1'})\n"
            "while job.logs().count('waiting') < 2: time.sleep(0.1)"
        )
        assert len(kernel.tasks()) == 2
        kernel.manager.shutdown_kernel(now=True)
        wait_for(lambda: not marked(kernel.mark))
