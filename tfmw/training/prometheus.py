"""Reports as Prometheus's text: in a file, or on a port. Needs prometheus_client."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

import prometheus_client
from prometheus_client import CollectorRegistry, Gauge

from tfmw.errors import UsageError
from tfmw.launcher.metrics_server import listens_at
from tfmw.runtime import recorder

if TYPE_CHECKING:
    from tfmw.training.reporter import Report


class Prometheus:
    """Writes reports to a file, or serves them.

    Args:
        file: path; None for none.
        port: where to serve them, see `listens_at`; None for none.

    Raises:
        UsageError: the port is not one, or it is taken.
    """

    def __init__(self, file: str | None, port: str | None):
        self._file = file
        self._saved_at: float | None = None
        self._registry = CollectorRegistry()
        gauge = self._gauge
        self._gauges = {
            "step": gauge("tfmw_step", "Training steps done"),
            "epoch": gauge("tfmw_epoch", "Complete epochs"),
            "steps_per_s": gauge("tfmw_steps_per_second", "Training steps per second"),
            "examples_per_s": gauge(
                "tfmw_examples_per_second", "Examples per second, over all workers"
            ),
            "restarts": gauge("tfmw_restarts", "Restarts of all tasks"),
            "workers": gauge("tfmw_workers", "Workers that train"),
        }
        self._logs = gauge("tfmw_log", "Keras's logs", "name")
        self._parts = gauge("tfmw_step_seconds", "Seconds of a step of the chief", "part")
        self._goodput = gauge("tfmw_goodput", "Share of the run's time that went into steps")
        self._spent = gauge("tfmw_run_seconds", "The run's time, over all attempts", "part")
        gauge("tfmw_backup_age_seconds", "Seconds since the last backup").set_function(self._age)
        gauge("tfmw_exchanges", "Exchanges of the chief with other workers").set_function(
            lambda: recorder.totals().exchanges
        )
        gauge("tfmw_exchanged_bytes", "Bytes of the chief's values in exchanges").set_function(
            lambda: recorder.totals().nbytes
        )
        if port is not None:
            self._serve(port)

    def _gauge(self, name: str, what: str, *labels: str) -> Gauge:
        return Gauge(name, what, labels, registry=self._registry)

    def _serve(self, text: str) -> None:
        address, port = listens_at(text)
        try:
            prometheus_client.start_http_server(port, addr=address, registry=self._registry)
        except OSError as error:
            raise UsageError(
                f"metrics cannot be served on port {text} ({error}): give --metrics-port, or "
                "TFMW_METRICS_PORT, another one."
            ) from None

    def _age(self) -> float:
        return float("nan") if self._saved_at is None else time.time() - self._saved_at

    def write(self, report: Report, final: bool) -> None:
        """Replaces the numbers of the last report."""
        self._saved_at = report.saved_at
        for name, gauge in self._gauges.items():
            value = getattr(report, name)
            if value is not None:
                gauge.set(value)
        for name, value in report.logs.items():
            self._logs.labels(name).set(value)
        for part, seconds in report.parts.items():
            self._parts.labels(part).set(seconds)
        self._goodput.set(report.division.goodput())
        for part, seconds in report.division.by_part().items():
            self._spent.labels(part).set(seconds)
        if self._file is not None:
            with contextlib.suppress(OSError):  # a full disk must not end the training
                prometheus_client.write_to_textfile(self._file, self._registry)
