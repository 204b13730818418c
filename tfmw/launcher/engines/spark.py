"""Jobs on a Spark cluster: `tfmw.fit(..., workers=8, on="spark")`.

The controller is a thread of the driver, and each attempt is one barrier stage, whose tasks Spark
starts together or not at all. The call is a broadcast variable. A job of Spark ends with its
driver, so no other process can attach to it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import secrets
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tfmw.errors import UsageError
from tfmw.launcher.call import Payload
from tfmw.launcher.engines.agent import run_task
from tfmw.launcher.engines.controller import Controller
from tfmw.launcher.engines.engine import Contact, Engine, JobSpec, Layout, Tasks, library
from tfmw.launcher.engines.folder import FolderJob

_END_S = 20.0  # time for a stage to end by itself

_jobs: dict[str, SparkJob] = {}
"""The jobs of this process by number."""


@dataclasses.dataclass(frozen=True)
class Spark(Engine):
    """The Spark application of this process.

    The active SparkContext is used, or one with Spark's own defaults is started. Its settings
    determine the resources of a task: `spark.task.cpus`, `spark.task.resource.gpu.amount`.

    Args:
        max_restarts: how often `tfmw.fit` restarts all tasks from the newest backup.
    """

    name = "spark"

    def submit(self, spec: JobSpec, payload: Payload) -> SparkJob:
        context = _context()
        number = secrets.token_hex(4)
        folder = Path(tempfile.mkdtemp(prefix="tfmw-job-"))
        job = SparkJob(self, number, folder)
        controller = Controller(spec, SparkTasks(context, payload, number), folder)
        job.thread = threading.Thread(target=controller.run, name=f"tfmw-{number}", daemon=True)
        job.thread.start()
        _jobs[number] = job  # now that it has a state
        return job

    def attach(self, number: str) -> SparkJob:
        if number not in self.numbers():
            raise UsageError(
                f"there is no job spark:{number} in this process: on Spark a job ends with the "
                "process that has submitted it, and only that can attach to it."
            )
        return _jobs[number]

    def numbers(self) -> list[str]:
        return [number for number, job in _jobs.items() if job.folder.exists()]

    def where(self, number: str) -> str:
        context = _context()
        at = f", its pages at {context.uiWebUrl}" if context.uiWebUrl else ""
        return f"job spark:{number} in the Spark application {context.applicationId}{at}"


class SparkJob(FolderJob):
    """A job whose controller is a thread of this process."""

    thread: threading.Thread

    def _state(self) -> str:
        return "running" if self.thread.is_alive() else "lost"

    def _kill(self) -> None:
        _context().cancelJobGroup(self._number)


class SparkTasks(Tasks):
    """Tasks of one barrier stage for each attempt.

    Args:
        context: the SparkContext.
        payload: the packed call.
        group: name of the group of Spark's jobs.
    """

    def __init__(self, context: Any, payload: Payload, group: str) -> None:
        self.context, self.group = context, group
        self._payload = context.broadcast([bytes(part) for part in payload])
        self._stage: threading.Thread | None = None
        self._count = 0
        self._why = ""

    def hosts(self) -> tuple[str, ...]:
        return (self.context.getConf().get("spark.driver.host"),)

    def start(self, layout: Layout, contact: Contact) -> None:
        self._count, self._why = len(layout), "its barrier stage has ended"
        self._stage = threading.Thread(target=self._run, args=(contact,), daemon=True)
        self._stage.start()

    def _run(self, contact: Contact) -> None:
        context, count = self.context, self._count
        context.setJobGroup(self.group, f"tfmw, attempt {contact.attempt}", interruptOnCancel=True)
        rows = context.parallelize(range(count), count).barrier()
        try:
            rows.mapPartitions(functools.partial(_run_partition, contact, self._payload)).collect()
        except Exception as error:
            # Format: "An error occurred while calling ...\n: org.apache.spark.SparkException:
            # ...\n\tat".
            lines = (str(error) or type(error).__name__).splitlines()
            cause = next((line for line in lines if line.startswith(": ")), lines[0])
            self._why = f"its barrier stage failed: {cause.removeprefix(': ').strip()}"

    def lost(self) -> dict[int, str]:
        if self._stage is None or self._stage.is_alive():
            return {}
        return dict.fromkeys(range(self._count), self._why)

    def end(self) -> None:
        if self._stage is None:
            return
        self._stage.join(2.0)
        if self._stage.is_alive():
            self.context.cancelJobGroup(self.group)
            self._stage.join(_END_S)
        self._stage = None

    def close(self) -> None:
        with contextlib.suppress(Exception):  # the context may have been stopped
            self._payload.destroy()


def _run_partition(contact: Contact, payload: Any, rows: Iterator[int]) -> Iterator[int]:
    """Runs one task in an executor."""
    from pyspark import BarrierTaskContext

    context = BarrierTaskContext.get()
    rank = context.partitionId()
    gpus = context.resources().get("gpu")
    if gpus is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus.addresses)
    host = context.getTaskInfos()[rank].address.partition(":")[0]
    run_task(contact, rank, lambda: payload.value, host=host)
    return iter(())


def _context() -> Any:
    library("pyspark", extra="spark")
    from pyspark import SparkContext

    return SparkContext.getOrCreate()
