"""Values of a training for Prometheus, and a log line if it waits for its input.

    TFMW_METRICS_FILE=/shared/run7.prom  # Prometheus's text, for the node exporter
    TFMW_METRICS_PORT=9400               # or served by the chief

Only the chief reports, at most once a second; a failed report does not end the training.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from tfmw.compat import datasets
from tfmw.errors import UsageError
from tfmw.observe import goodput, recorder
from tfmw.observe.metrics_server import METRICS_FILE, METRICS_PORT, listens_at
from tfmw.observe.step_times import StepTimes

logger = logging.getLogger("tfmw")

_INTERVAL_S = 1.0


class Reporter:
    """Reports to the file and the port that the environment names; needs prometheus_client.

    Args:
        is_chief: whether this task reports.
        workers: number of workers.
        environ: environment; TFMW_ATTEMPT is the number of restarts.

    Raises:
        UsageError: prometheus_client is not installed, or the port is invalid or taken.
    """

    def __init__(
        self, is_chief: bool, workers: int, environ: Mapping[str, str] = os.environ
    ) -> None:
        file, port = environ.get(METRICS_FILE), environ.get(METRICS_PORT)
        self._file = file and os.path.abspath(file)
        self._on = is_chief and bool(self._file or port)
        self._due = 0.0
        self._before: StepTimes | None = None
        self._saved_at: float | None = None
        if not self._on:
            return
        try:
            import prometheus_client
        except ImportError:
            raise UsageError(
                f"{METRICS_FILE if self._file else METRICS_PORT} is set and prometheus_client is "
                "not installed: pip install '.[metrics]' in a clone of tfmw."
            ) from None
        self._registry = prometheus_client.CollectorRegistry()
        self._write_file = prometheus_client.write_to_textfile

        def gauge(name: str, what: str, *labels: str) -> prometheus_client.Gauge:
            return prometheus_client.Gauge(name, what, labels, registry=self._registry)

        self._step = gauge("tfmw_step", "Training steps done")
        self._epoch = gauge("tfmw_epoch", "Complete epochs")
        self._steps_per_s = gauge("tfmw_steps_per_second", "Training steps per second")
        self._examples_per_s = gauge(
            "tfmw_examples_per_second", "Examples per second, over all workers"
        )
        restarts = int(environ.get("TFMW_ATTEMPT", "0"))
        gauge("tfmw_restarts", "Restarts of all tasks").set(restarts)
        gauge("tfmw_workers", "Workers that train").set(workers)
        self._logs = gauge("tfmw_log", "Keras's logs", "name")
        self._parts = gauge("tfmw_step_seconds", "Seconds of a step of the chief", "part")
        self._goodput = gauge("tfmw_goodput", "Share of the run's time that went into steps")
        self._spent = gauge("tfmw_run_seconds", "The run's time, over all attempts", "part")
        gauge("tfmw_backup_age_seconds", "Seconds since the last backup").set_function(
            lambda: float("nan") if self._saved_at is None else time.monotonic() - self._saved_at
        )
        gauge("tfmw_exchanges", "Exchanges of the chief with other workers").set_function(
            lambda: recorder.totals().exchanges
        )
        gauge("tfmw_exchanged_bytes", "Bytes of the chief's values in exchanges").set_function(
            lambda: recorder.totals().nbytes
        )
        if port:
            address, number = listens_at(port)
            try:
                prometheus_client.start_http_server(number, address, self._registry)
            except OSError as error:
                raise UsageError(
                    f"metrics cannot be served on port {port} ({error}): give --metrics-port, or "
                    "TFMW_METRICS_PORT, another one."
                ) from None

    def steps(
        self,
        step: int,
        epoch: int,
        logs: Mapping[str, Any],
        times: StepTimes | None,
        saved_at: float | None,
    ) -> None:
        """Reports, if a second has passed since the last report.

        Args:
            step: training steps done, over all attempts.
            epoch: complete epochs.
            logs: logs of Keras.
            times: times of this task's steps so far.
            saved_at: monotonic seconds of the last backup; None if there is none.
        """
        if not self._on or time.monotonic() < self._due:
            return
        self._due = time.monotonic() + _INTERVAL_S
        self._saved_at = saved_at
        before, self._before = self._before, times and times.copy()
        split = None if times is None or before is None else times.since(before)
        if split is not None:
            self._steps_per_s.set(split.steps_per_s)
            self._examples_per_s.set(split.examples_per_s)
            self._parts.labels("input").set(split.input_s)
            self._parts.labels("communication").set(split.communication_s)
            self._parts.labels("compute").set(split.compute_s)
        self._write(step, epoch, logs)

    def end(self, step: int, epoch: int, logs: Mapping[str, Any] | None) -> None:
        """Reports the end of a training that has reported steps."""
        if self._due:
            self._write(step, epoch, logs or {})

    def _write(self, step: int, epoch: int, logs: Mapping[str, Any]) -> None:
        self._step.set(step)
        self._epoch.set(epoch)
        for name, value in logs.items():
            array = np.asarray(value)
            if array.ndim == 0 and array.dtype.kind in "fiub":
                self._logs.labels(name).set(float(array))
        division = goodput.division()
        self._goodput.set(division.goodput())
        for part, seconds in division.by_part().items():
            self._spent.labels(part).set(seconds)
        if self._file:
            with contextlib.suppress(OSError):  # a full disk must not end the training
                self._write_file(self._file, self._registry)


# ---------------------------------------------------------------- waiting for the input

ENOUGH_S, ENOUGH_STEPS, SHARE = 10.0, 20, 0.5
"""Minimum time, number of steps, and fraction of waiting for the log line."""

_EXPLAINS = 0.3  # minimum fraction of the wait that a stage must take to be the cause

_MENDS = {
    "Map": "dataset.map(fn, num_parallel_calls=tf.data.AUTOTUNE)",
    "MapAndBatch": "dataset.map(fn, num_parallel_calls=tf.data.AUTOTUNE) before batch, and a "
    "function of TensorFlow's ops in place of tf.py_function",
    "ParallelMap": "dataset.cache() after the map, if the data fits into memory",
    "Generator": "a tf.data pipeline in place of the generator, which runs in Python",
    "Interleave": "dataset.interleave(fn, num_parallel_calls=tf.data.AUTOTUNE)",
    "TFRecord": "dataset.interleave over several files, with num_parallel_calls=tf.data.AUTOTUNE",
    "Shuffle": "a smaller shuffle buffer",
    "Batch": "dataset.batch(n, num_parallel_calls=tf.data.AUTOTUNE)",
}
_OTHER = "dataset.cache(), if the data fits into memory, or dataset.prefetch(tf.data.AUTOTUNE)"


class InputBound:
    """Logs once if training is bound by its input."""

    _checked = False

    def check(self, times: StepTimes, iterator: Any) -> None:
        """Checks for waits; call it after calls of the driver.

        Args:
            times: times of the training so far.
            iterator: iterator over the pipeline of this worker.
        """
        if self._checked or times.seconds < ENOUGH_S or times.steps < ENOUGH_STEPS:
            return
        self._checked = True
        if times.input_s > SHARE * times.seconds:
            logger.warning("%s", described(times, datasets.slowest_stage(iterator)))


def described(times: StepTimes, slowest: tuple[str, float] | None) -> str:
    """Text of the log line.

    Args:
        times: times of the training so far.
        slowest: (stage of the pipeline, its seconds per batch); None if unknown.
    """
    share = f"training waits for its input {100 * times.input_s / times.seconds:.0f} % of the time"
    # tf.data forgets a stage that is created again, as one behind a repeat() is in each epoch.
    if slowest is None or slowest[1] < _EXPLAINS * times.input_s / times.steps:
        return f"{share}; to read ahead: {_OTHER}"
    stage, seconds = slowest
    mend = _MENDS.get(stage, _OTHER)
    return f"{share}; its slowest stage is {stage}, {1000 * seconds:.1f} ms per batch: use {mend}"
