"""The progress of a TrainJob of Kubeflow, in its status: `kubectl get trainjob -o yaml`.

    status = trainjob.Status.of(os.environ)        # None outside a TrainJob
    tfmw.fit(model, data, epochs=5, callbacks=[status] if status else [])

Kubeflow's controller sets three variables in the pods of a TrainJob: a URL, and the files of a
certificate and of a token that it renews (KEP-2779; KUBEFLOW_TRAINER_STATUS_... before its release,
KUBEFLOW_TRAINER_SERVER_... since). A request is the JSON {"trainerStatus": {...}}.
"""

from __future__ import annotations

import datetime
import json
import logging
import math
import ssl
import time
import urllib.request
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import keras

logger = logging.getLogger("trainjob")

PREFIXES = ("KUBEFLOW_TRAINER_SERVER", "KUBEFLOW_TRAINER_STATUS")
_TIMEOUT_S = 10.0


class Status(keras.callbacks.Callback):
    """Sends progress, the remaining seconds and Keras's logs after each epoch, in a thread.

    Args:
        url: the controller's URL, https.
        ca_cert: path of the CA certificate that verifies it; None for the system's.
        token: path of the token.
    """

    chief_only = True
    reads_optimizer = False

    def __init__(self, url: str, ca_cert: str | None = None, token: str | None = None):
        super().__init__()
        self._url = url
        self._ca_cert = ca_cert
        self._token = token
        self._begin = 0.0
        self._first: int | None = None  # epoch at which this attempt began

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Status | None:
        """The status of the TrainJob that this process belongs to, or None."""
        for prefix in PREFIXES:
            if url := environ.get(f"{prefix}_URL"):
                return cls(url, environ.get(f"{prefix}_CA_CERT"), environ.get(f"{prefix}_TOKEN"))
        return None

    def on_train_begin(self, logs: Any = None) -> None:
        self._begin = time.monotonic()
        self._thread = ThreadPoolExecutor(1)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._first = epoch if self._first is None else self._first

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        assert self._first is not None
        done, epochs = epoch + 1, self.params["epochs"]
        seconds = (time.monotonic() - self._begin) / (done - self._first)  # seconds per epoch
        self._thread.submit(self._send, status(done, epochs, seconds, logs or {}))

    def on_train_end(self, logs: Any = None) -> None:
        self._thread.shutdown()

    def _send(self, found: Mapping[str, Any]) -> None:
        try:
            headers = {"Content-Type": "application/json"}
            if self._token:
                headers["Authorization"] = f"Bearer {Path(self._token).read_text().strip()}"
            body = json.dumps({"trainerStatus": found}).encode()
            request = urllib.request.Request(self._url, body, headers, method="POST")
            context = ssl.create_default_context(cafile=self._ca_cert)
            urllib.request.urlopen(request, timeout=_TIMEOUT_S, context=context).close()
        except (OSError, ValueError) as error:  # a failed report does not stop the training
            logger.warning("the progress cannot be sent to Kubeflow's controller: %s", error)


def status(done: int, epochs: int, seconds: float, logs: Mapping[str, Any]) -> dict[str, Any]:
    """`status.trainerStatus` of a TrainJob.

    Args:
        done: complete epochs, of `epochs`.
        seconds: duration of an epoch.
        logs: Keras's logs.
    """
    return {
        "progressPercentage": 100 * done // epochs,
        "estimatedRemainingSeconds": round(seconds * (epochs - done)),
        "metrics": [
            {"name": name, "value": f"{value:.7g}"}
            for name, value in {**logs, "epoch": done}.items()
            if math.isfinite(value)
        ],
        "lastUpdatedTime": datetime.datetime.now(datetime.UTC).isoformat(),
    }
