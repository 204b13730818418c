"""Azure's storage on this machine: Azurite, which `make nightly` installs from npm.

with azurite() as app: ...             # a WSGI application, with the container "bucket"
"""

from __future__ import annotations

import base64
import contextlib
import email.utils
import hashlib
import hmac
import http.client
from collections.abc import Iterable, Iterator
from typing import Any

from tests.helpers.cluster import ROOT
from tests.helpers.gcs import started
from tfmw.cluster.sockets import reserved_ports

ACCOUNT = "devstoreaccount1"
"""The account that every Azurite has."""

KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="

_COMMAND = ROOT / "build/azurite/node_modules/.bin/azurite-blob"
_OF_CONNECTION = ("connection", "transfer-encoding", "keep-alive", "date", "server")


@contextlib.contextmanager
def azurite() -> Iterator[Any]:
    """A WSGI application that passes requests on to an Azurite."""
    with reserved_ports(1) as (port,):
        pass
    command = [str(_COMMAND), "--blobPort", str(port), "--inMemoryPersistence"]
    command += ["--skipApiVersionCheck", "--disableTelemetry"]
    with started(command, "successfully listens"):
        _create_container(port)

        def app(environ: dict[str, Any], start: Any) -> Iterable[bytes]:
            path = environ["RAW_URI"]
            length = int(environ.get("CONTENT_LENGTH") or 0)
            body = environ["wsgi.input"].read(length)
            sent = {
                name[5:].replace("_", "-"): value
                for name, value in environ.items()
                if name.startswith("HTTP_")
            }
            sent["CONTENT-LENGTH"] = str(length)
            if environ.get("CONTENT_TYPE"):
                sent["CONTENT-TYPE"] = environ["CONTENT_TYPE"]
            status, headers, content = _request(port, environ["REQUEST_METHOD"], path, body, sent)
            start(f"{status} -", headers)
            return [content]

        yield app


def _request(
    port: int, method: str, path: str, body: bytes, headers: dict[str, str]
) -> tuple[int, list[tuple[str, str]], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port)
    with contextlib.closing(connection):
        connection.request(method, path, body, headers)
        found = connection.getresponse()
        content = found.read()
        kept = [(k, v) for k, v in found.getheaders() if k.lower() not in _OF_CONNECTION]
        return found.status, kept, content


def _create_container(port: int) -> None:
    """Creates the container, by a request with a shared key.

    See https://learn.microsoft.com/rest/api/storageservices/authorize-with-shared-key.
    """
    sent = {"x-ms-date": email.utils.formatdate(usegmt=True), "x-ms-version": "2021-12-02"}
    lines = [*(f"{name}:{value}" for name, value in sent.items())]
    signed = "PUT" + "\n" * 12 + "\n".join(lines) + f"\n/{ACCOUNT}/{ACCOUNT}/bucket"
    signed += "\nrestype:container"
    digest = hmac.digest(base64.b64decode(KEY), signed.encode(), hashlib.sha256)
    sent["Authorization"] = f"SharedKey {ACCOUNT}:{base64.b64encode(digest).decode()}"
    sent["Content-Length"] = "0"
    status, _, content = _request(port, "PUT", f"/{ACCOUNT}/bucket?restype=container", b"", sent)
    assert status == 201, content
