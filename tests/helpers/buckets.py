"""A local S3 (moto's), which loses, delays and refuses requests as a test wants.

with s3(monkeypatch) as server:                    # and the variables that name it
    Bucket(f"{server.url}/run7").put("a", b"1")    # server.url: "s3://bucket"
    server.fault = lambda number, method, key: 503 # of the requests from now on
    server.requests                                # ["PUT run7/a", ...]
    server.sent["run7/a"]                          # bytes
"""

from __future__ import annotations

import collections
import contextlib
import logging
import socket
import threading
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

# They belong to no account. Because of them no client asks a cloud's machine for an identity.
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "tests-key-id", "AWS_SECRET_ACCESS_KEY": "tests-secret"}

Fault = Callable[[int, str, str], int | str | threading.Event | None]
"""(number of the request, method, key) -> what happens to it. None: nothing. A number: it is
refused with that status. "lost": it does not arrive. "applied": it does, and its response does not.
"truncated": half of the response is sent. An event: it waits for that."""


class Server:
    """A local S3 with one bucket.

    Attributes:
        environ: the variables that name it.
    """

    url = "s3://bucket"

    def __init__(self) -> None:
        self.fault: Fault = lambda number, method, key: None
        self.requests: list[str] = []
        self.sent: collections.Counter[str] = collections.Counter()
        self._app = DomainDispatcherApplication(create_backend_app)
        self._server = make_server("127.0.0.1", 0, self._answer, threaded=True)
        self._thread = threading.Thread(target=self._server.serve_forever, name="s3", daemon=True)
        endpoint = f"http://127.0.0.1:{self._server.server_port}"
        self.environ = {**CREDENTIALS, "AWS_ENDPOINT_URL": endpoint, "AWS_REGION": "us-east-1"}

    def _answer(self, environ: dict[str, Any], start: Any) -> Iterable[bytes]:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        key = path.encode("latin-1").decode().removeprefix("/bucket").removeprefix("/")
        self.requests.append(f"{method} {key}")
        action = self.fault(len(self.requests), method, key)
        if isinstance(action, threading.Event):
            assert action.wait(60)
        elif isinstance(action, int):
            code = "AccessDenied" if action == 403 else "SlowDown"
            start(f"{action} {code}", [("Content-Type", "text/xml")])
            return [f"<Error><Code>{code}</Code></Error>".encode()]
        connection: socket.socket = environ["werkzeug.socket"]
        if action == "lost":
            return _ends_early(connection)
        body = b"".join(self._app(environ, start))
        if action == "applied":
            return _ends_early(connection)
        if action == "truncated":
            return _ends_early(connection, body[: len(body) // 2])
        self.sent[key] += len(body) if method == "GET" else 0
        return [body]

    def __enter__(self) -> Server:
        import boto3

        endpoint = self.environ["AWS_ENDPOINT_URL"]
        self._thread.start()
        reset = urllib.request.Request(f"{endpoint}/moto-api/reset", b"")
        urllib.request.urlopen(reset).close()  # it is one for the whole process
        named = {"endpoint_url": endpoint, "region_name": "us-east-1"}
        keys = {name.lower(): value for name, value in CREDENTIALS.items()}
        client = boto3.client("s3", **named, **keys)
        client.create_bucket(Bucket="bucket")
        client.close()
        self.requests.clear()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _ends_early(connection: socket.socket, *data: bytes) -> Iterator[bytes]:
    yield from data
    connection.shutdown(socket.SHUT_RDWR)
    raise ConnectionError("the rest of the response does not arrive")


@contextlib.contextmanager
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A local S3 until the end of the `with`."""
    logging.getLogger("werkzeug").setLevel(logging.CRITICAL)
    with Server() as server:
        for name, value in server.environ.items():
            monkeypatch.setenv(name, value)
        yield server
