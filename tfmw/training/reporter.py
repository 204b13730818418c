"""Numbers of a training for monitoring by Prometheus.

    TFMW_METRICS_FILE=/shared/run7.prom  # Prometheus's text, for the node exporter
    TFMW_METRICS_PORT=9400               # or served by the chief

Only the chief reports, at most once a second; a report that fails ends nothing.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from tfmw.errors import UsageError
from tfmw.launcher.metrics_server import METRICS_FILE, METRICS_PORT
from tfmw.runtime import goodput
from tfmw.runtime.goodput import Division
from tfmw.runtime.step_times import StepTimes

_INTERVAL_S = 1.0


@dataclasses.dataclass(frozen=True)
class Report:
    """The state of a training.

    Args:
        step: training steps done, over all attempts.
        epoch: complete epochs.
        total_steps: of the training; None if unknown.
        steps_per_s, examples_per_s: since the last report; None if unknown.
        parts: seconds of a step: "input", "communication", "compute".
        logs: Keras's logs.
        restarts: of the run.
        workers: their number.
        saved_at: seconds since the epoch of the last backup; None before the first.
        division: of the run's time, over all attempts.
    """

    step: int
    epoch: int
    total_steps: int | None
    steps_per_s: float | None
    examples_per_s: float | None
    parts: Mapping[str, float]
    logs: Mapping[str, float]
    restarts: int
    workers: int
    saved_at: float | None
    division: Division


class Sink(Protocol):
    """The destinations of reports."""

    def write(self, report: Report, final: bool) -> None:
        """Writes a report; the last one has `final`."""


class Reporter:
    """Reports to all places that the environment names.

    Args:
        sinks: where to.
        workers: their number.
        environ: TFMW_ATTEMPT is the number of restarts.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        sinks: list[Sink],
        workers: int,
        environ: Mapping[str, str] = os.environ,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._sinks = sinks
        self._workers = workers
        self._restarts = int(environ.get("TFMW_ATTEMPT", "0"))
        self._clock = clock
        self._due = 0.0
        self._before: StepTimes | None = None
        self._last: Report | None = None
        self._rates: dict[str, Any] = {"steps_per_s": None, "examples_per_s": None, "parts": {}}

    @classmethod
    def of(cls, is_chief: bool, workers: int, environ: Mapping[str, str] = os.environ) -> Reporter:
        """The reporter that the environment describes; on other tasks than the chief, of nothing.

        Raises:
            UsageError: prometheus_client is not installed, or the port is taken.
        """
        sinks: list[Sink] = []
        if is_chief:
            file, port = environ.get(METRICS_FILE), environ.get(METRICS_PORT)
            if file or port:
                sinks.append(_prometheus(file, port))
        return cls(sinks, workers, environ)

    def steps(
        self,
        step: int,
        epoch: int,
        total_steps: int | None,
        logs: Mapping[str, Any],
        times: StepTimes | None,
        saved_at: float | None,
    ) -> None:
        """Reports, if a second has passed since the last report."""
        if not self._sinks or self._clock() < self._due:
            return
        self._due = self._clock() + _INTERVAL_S
        self._rates = self._rates_of(times) or self._rates
        self._last = Report(
            step=step,
            epoch=epoch,
            total_steps=total_steps,
            logs=_numbers(logs),
            restarts=self._restarts,
            workers=self._workers,
            saved_at=saved_at,
            division=goodput.division(),
            **self._rates,
        )
        self._write(final=False)

    def _rates_of(self, times: StepTimes | None) -> dict[str, Any]:
        """The rates since the last report; {} if there were no steps."""
        before, self._before = self._before, times and times.copy()
        split = None if times is None or before is None else times.since(before)
        if split is None:
            return {}
        parts = {
            "input": split.input_s,
            "communication": split.communication_s,
            "compute": split.compute_s,
        }
        return {
            "steps_per_s": 1 / split.step_s,
            "examples_per_s": split.examples / (split.steps * split.step_s),
            "parts": parts,
        }

    def end(self, step: int, epoch: int, logs: Mapping[str, Any] | None) -> None:
        """Reports the end of the training."""
        if self._last is not None:
            numbers = _numbers(logs or {}) or self._last.logs
            self._last = dataclasses.replace(
                self._last, step=step, epoch=epoch, logs=numbers, division=goodput.division()
            )
            self._write(final=True)

    def _write(self, final: bool) -> None:
        assert self._last is not None
        for sink in self._sinks:
            sink.write(self._last, final)


def _numbers(logs: Mapping[str, Any]) -> dict[str, float]:
    """The logs that are numbers."""
    found = {}
    for name, value in logs.items():
        array = np.asarray(value)
        if array.ndim == 0 and array.dtype.kind in "fiub":
            found[name] = float(array)
    return found


def _prometheus(file: str | None, port: str | None) -> Sink:
    try:
        from tfmw.training.prometheus import Prometheus
    except ImportError:
        raise UsageError(
            f"{METRICS_FILE if file else METRICS_PORT} is set and prometheus_client is not "
            "installed: pip install 'tfmw[metrics]'."
        ) from None
    return Prometheus(file, port)
