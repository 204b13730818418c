"""The progress of a TrainJob: what Kubeflow's controller shows in its status.

The controller sets three variables in the pods of a TrainJob: a URL, and the files of a certificate
and of a token that it renews (Kubeflow's KEP-2779; KUBEFLOW_TRAINER_STATUS_... before its release,
KUBEFLOW_TRAINER_SERVER_... since). A request is the JSON {"trainerStatus": {...}}.
"""

from __future__ import annotations

import datetime
import json
import logging
import math
import ssl
import threading
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tfmw.training.reporter import Report

logger = logging.getLogger("tfmw")

PREFIXES = ("KUBEFLOW_TRAINER_SERVER", "KUBEFLOW_TRAINER_STATUS")
INTERVAL_S = 5.0
"""Seconds between two requests; the controller asks for no more."""

_TIMEOUT_S = 10.0


class Kubeflow:
    """Sends reports to Kubeflow's controller, in a thread.

    Args:
        url: of the controller, https.
        ca_cert: path of the certificate that it is verified by; None for the system's.
        token: path of the token.
        interval_s: seconds between two requests.
    """

    def __init__(
        self, url: str, ca_cert: str | None, token: str | None, interval_s: float = INTERVAL_S
    ):
        self._url = url
        self._ca_cert = ca_cert
        self._token = token
        self._interval_s = interval_s
        self._next: dict[str, Any] | None = None
        self._changed = threading.Condition()
        self._ends = False
        self._failed = False
        self._thread = threading.Thread(target=self._run, name="tfmw-kubeflow", daemon=True)
        self._thread.start()

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Kubeflow | None:
        """The controller that the environment names, or None."""
        for prefix in PREFIXES:
            if url := environ.get(f"{prefix}_URL"):
                return cls(url, environ.get(f"{prefix}_CA_CERT"), environ.get(f"{prefix}_TOKEN"))
        return None

    def write(self, report: Report, final: bool) -> None:
        """Sends a report, or the newest one if there are several within the interval."""
        with self._changed:
            self._next = status_of(report, final)
            self._ends = self._ends or final
            self._changed.notify()
        if final:
            self._thread.join(timeout=2 * _TIMEOUT_S)

    def _run(self) -> None:
        last = -math.inf
        while True:
            with self._changed:
                while self._next is None and not self._ends:
                    self._changed.wait()
                while not self._ends and (left := last + self._interval_s - time.monotonic()) > 0:
                    self._changed.wait(left)
                status, self._next, ends = self._next, None, self._ends
            if status is not None:
                self._send(status)
                last = time.monotonic()
            if ends:
                return

    def _send(self, status: dict[str, Any]) -> None:
        try:
            headers = {"Content-Type": "application/json"}
            if self._token:
                token = Path(self._token).read_text().strip()  # it is renewed
                headers["Authorization"] = f"Bearer {token}"
            request = urllib.request.Request(
                self._url, json.dumps({"trainerStatus": status}).encode(), headers, method="POST"
            )
            context = ssl.create_default_context(cafile=self._ca_cert)
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S, context=context):
                self._failed = False
        except (OSError, ValueError) as error:
            if not self._failed:
                logger.warning(
                    "the progress cannot be sent to Kubeflow's controller (%s); training goes on",
                    error,
                )
            self._failed = True


def status_of(report: Report, final: bool) -> dict[str, Any]:
    """A report as `status.trainerStatus` of a TrainJob."""
    from tfmw.training.reporter import progress, remaining_s

    done, left = progress(report), remaining_s(report)
    logs = {**report.logs, "step": report.step}
    status: dict[str, Any] = {
        "metrics": [
            {"name": name, "value": f"{value:.7g}"}
            for name, value in logs.items()
            if math.isfinite(value)
        ],
        "lastUpdatedTime": datetime.datetime.now(datetime.UTC).isoformat(),
    }
    if final or done is not None:
        status["progressPercentage"] = 100 if final else int(100 * (done or 0.0))
    if final or left is not None:
        status["estimatedRemainingSeconds"] = 0 if final else round(left or 0.0)
    return status
