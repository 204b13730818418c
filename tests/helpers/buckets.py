"""Local stores, which lose, delay and refuse requests as a test wants.

with s3(monkeypatch) as server:                    # moto's S3, and the variables that name it
    put(Bucket(f"{server.url}/run7"), "a", b"1")   # server.url: "s3://bucket"
    server.fault = lambda number, method, key: 503 # of the requests from now on
    server.requests                                # ["PUT run7/a", ...]
    server.sent["run7/a"]                          # bytes
    server.sent_to["tests-key-id"]                 # bytes of all objects, by the id of the client

moto also answers requests for GCS: their conditions become those of S3. `NIGHTLY` has servers of
the other stores: fake-gcs-server for GCS, and Azurite for Azure.
"""

from __future__ import annotations

import collections
import contextlib
import hashlib
import json
import logging
import socket
import threading
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

from tests.helpers import azurite
from tests.helpers.gcs import fake_gcs
from tfmw.storage import bucket

# They belong to no account. Because of them no client asks a cloud's machine for an identity.
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "tests-key-id", "AWS_SECRET_ACCESS_KEY": "tests-secret"}

NIGHTLY = [pytest.param(n, marks=pytest.mark.nightly) for n in ("fake-gcs-server", "azurite")]
"""Stores that `make nightly` tests; `opened` starts them, as it does "s3" and "gs"."""

# Codes of S3 for a status with which the store refuses.
_CODES = {400: "AuthorizationHeaderMalformed", 401: "RequestTimeTooSkewed", 403: "AccessDenied"}

_SIGNED = "AWS4-HMAC-SHA256 Credential=a/20260101/us-east-1/s3/aws4_request, Signature=0"

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

    def __init__(self, address: str = "127.0.0.1", app: Any = None) -> None:
        self.fault: Fault = lambda number, method, key: None
        self.requests: list[str] = []
        self.sent: collections.Counter[str] = collections.Counter()
        self.sent_to: collections.Counter[str] = collections.Counter()
        self._generations: dict[str, str] = {}  # -> ETag
        self._app = app
        self._moto = DomainDispatcherApplication(create_backend_app)
        self._server = make_server(address, 0, self._answer, threaded=True)
        self._thread = threading.Thread(target=self._server.serve_forever, name="s3", daemon=True)
        endpoint = f"http://{address}:{self._server.server_port}"
        self.environ = {**CREDENTIALS, "AWS_ENDPOINT_URL": endpoint, "AWS_REGION": "us-east-1"}
        # So that no cloud's machine is asked for a token.
        account = {
            "disable_oauth": True,
            "client_email": "",
            "private_key": "",
            "private_key_id": "",
        }
        self.environ["GOOGLE_SERVICE_ACCOUNT_KEY"] = json.dumps(account)
        self.environ["GOOGLE_BASE_URL"] = endpoint
        self.environ["AZURE_STORAGE_ENDPOINT"] = f"{endpoint}/{azurite.ACCOUNT}"
        self.environ["AZURE_STORAGE_ACCOUNT_NAME"] = azurite.ACCOUNT
        self.environ["AZURE_STORAGE_ACCOUNT_KEY"] = azurite.KEY

    def _answer(self, environ: dict[str, Any], start: Any) -> Iterable[bytes]:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        key = path.encode("latin-1").decode().removeprefix(f"/{azurite.ACCOUNT}")
        key = key.removeprefix("/bucket").removeprefix("/")
        self.requests.append(f"{method} {key}")
        action = self.fault(len(self.requests), method, key)
        if isinstance(action, threading.Event):
            assert action.wait(60)
        elif isinstance(action, int):
            code = _CODES.get(action, "SlowDown")
            start(f"{action} {code}", [("Content-Type", "text/xml")])
            return [f"<Error><Code>{code}</Code></Error>".encode()]
        connection: socket.socket = environ["werkzeug.socket"]
        if action == "lost":
            return _ends_early(connection)
        if self._app is not None:
            body = b"".join(self._app(environ, start))
        else:
            body = b"".join(self._moto(self._of_gcs(environ), self._for_gcs(start)))
        if action == "applied":
            return _ends_early(connection)
        if action == "truncated":
            return _ends_early(connection, body[: len(body) // 2])
        if method == "GET" and key:
            client = environ.get("HTTP_AUTHORIZATION", "").partition("Credential=")[2]
            self.sent[key] += len(body)
            self.sent_to[client.partition("/")[0]] += len(body)
        return [body]

    def _of_gcs(self, environ: dict[str, Any]) -> dict[str, Any]:
        """The conditions of GCS's XML API, which is S3's otherwise, as those of S3."""
        if not environ.get("HTTP_AUTHORIZATION", "").startswith("AWS4"):
            environ["HTTP_AUTHORIZATION"] = _SIGNED
        if (generation := environ.pop("HTTP_X_GOOG_IF_GENERATION_MATCH", None)) is not None:
            etag = self._generations.get(generation, '"none"')
            found = {"HTTP_IF_NONE_MATCH": "*"} if generation == "0" else {"HTTP_IF_MATCH": etag}
            environ.update(found)
        return environ

    def _for_gcs(self, start: Any) -> Any:
        """Responses get the number of the generation, which here is that of the ETag."""

        def started(status: str, headers: list[tuple[str, str]], *error: Any) -> Any:
            etag = next((value for name, value in headers if name.lower() == "etag"), None)
            if etag is not None:
                generation = str(int(hashlib.md5(etag.encode()).hexdigest()[:12], 16))
                self._generations[generation] = etag
                headers = [*headers, ("x-goog-generation", generation)]
            return start(status, headers, *error)

        return started

    def __enter__(self) -> Server:
        import boto3

        endpoint = self.environ["AWS_ENDPOINT_URL"]
        self._thread.start()
        if self._app is not None:
            return self
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
def s3(
    monkeypatch: pytest.MonkeyPatch, address: str = "127.0.0.1", app: Any = None
) -> Iterator[Server]:
    """A local S3 until the end of the `with`, at an address of this machine.

    Args:
        app: the WSGI application of another store.
    """
    logging.getLogger("werkzeug").setLevel(logging.CRITICAL)
    with Server(address, app) as server:
        for name, value in server.environ.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(bucket, "_QUICK_ANSWER_S", 60.0)  # machines of tests are slow
        yield server


@contextlib.contextmanager
def opened(store: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A store by its name: "s3", "gs", or one of `NIGHTLY`; `server.url` is its bucket."""
    with contextlib.ExitStack() as stack:
        start = {"fake-gcs-server": fake_gcs, "azurite": azurite.azurite}.get(store)
        app = None if start is None else stack.enter_context(start())
        server = stack.enter_context(s3(monkeypatch, app=app))
        server.url = {"s3": "s3", "azurite": "az"}.get(store, "gs") + "://bucket"
        yield server


def put(place: bucket.Bucket, name: str, data: bytes) -> None:
    """Writes an object, new or existing."""
    place.remove([name])
    place.replace(name, data, None)
