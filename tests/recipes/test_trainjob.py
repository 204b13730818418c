"""The controller of a TrainJob gets the progress that recipes/trainjob.py sends."""

from __future__ import annotations

import datetime
import http.server
import json
import math
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import trainjob

import tfmw
from tests.helpers.certificates import certificate


class Controller(http.server.BaseHTTPRequestHandler):
    """Kubeflow's controller, as far as a pod sees it."""

    got: list[tuple[str, dict[str, Any]]]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.got.append((self.headers["Authorization"], json.loads(body)))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[tuple[type[Controller], dict[str, str]]]:
    """A controller over HTTPS, and the variables that it sets in a pod."""
    handler = type("Handler", (Controller,), {"got": []})
    cert, token = certificate(tmp_path, "localhost"), tmp_path / "token"
    token.write_text("a token\n")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert)
    with http.server.ThreadingHTTPServer(("localhost", 0), handler) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        url = f"https://localhost:{server.server_port}/status"
        prefix = "KUBEFLOW_TRAINER_STATUS"
        yield (
            handler,
            {f"{prefix}_URL": url, f"{prefix}_CA_CERT": str(cert), f"{prefix}_TOKEN": str(token)},
        )
        server.shutdown()
        thread.join()


def fit(status: keras.callbacks.Callback) -> None:
    model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    tfmw.fit(model, np.ones([8, 2]), np.ones([8, 1]), epochs=4, verbose=0, callbacks=[status])


def test_the_controller_gets_the_progress_after_each_epoch(
    controller: tuple[type[Controller], dict[str, str]],
) -> None:
    handler, variables = controller
    status = trainjob.Status.of(variables)
    assert status is not None
    fit(status)
    authorizations, bodies = zip(*handler.got, strict=True)
    assert set(authorizations) == {"Bearer a token"}
    found = [body["trainerStatus"] for body in bodies]
    assert [one["progressPercentage"] for one in found] == [25, 50, 75, 100]
    assert found[-1]["estimatedRemainingSeconds"] == 0
    assert {metric["name"] for metric in found[-1]["metrics"]} == {"loss", "epoch"}
    datetime.datetime.fromisoformat(found[-1]["lastUpdatedTime"])


def test_a_status() -> None:
    found = trainjob.status(3, 10, 2.0, {"loss": math.nan, "mae": 0.5})
    assert (found["progressPercentage"], found["estimatedRemainingSeconds"]) == (30, 14)
    assert found["metrics"] == [{"name": "mae", "value": "0.5"}, {"name": "epoch", "value": "3"}]


def test_a_controller_that_is_gone_ends_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fit(trainjob.Status("https://127.0.0.1:9/status", None, str(tmp_path / "none")))
    assert caplog.text.count("cannot be sent to Kubeflow's controller") == 4


def test_outside_a_trainjob_there_is_none() -> None:
    assert trainjob.Status.of({}) is None
