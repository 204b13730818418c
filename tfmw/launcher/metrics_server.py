"""The metrics of a run for Prometheus: in a file, or on a port of one address.

    listens_at("9400")            # ("127.0.0.1", 9400)
    listens_at("0.0.0.0:9400")    # every address of the machine

Metrics have no password, so without an address only this machine can read them.

`tfmw run --metrics-port` serves those that the chief writes to a file: the tasks may be in a
private network, so the launcher does it. A task without a launcher serves its own.
"""

from __future__ import annotations

import atexit
import http.server
import importlib.util
import os
import shutil
import socket
import tempfile
import threading
from collections.abc import MutableMapping
from pathlib import Path

from tfmw.errors import UsageError

METRICS_FILE, METRICS_PORT = "TFMW_METRICS_FILE", "TFMW_METRICS_PORT"

LOOPBACK = "127.0.0.1"

_TYPE = "text/plain; version=0.0.4; charset=utf-8"  # Prometheus's text format


def listens_at(text: str) -> tuple[str, int]:
    """The address and the port of "9400", "0.0.0.0:9400" or "[::]:9400".

    Raises:
        UsageError: it has another form.
    """
    address, _, port = text.strip().rpartition(":")
    address = address.removeprefix("[").removesuffix("]")
    if not port.isdecimal() or int(port) > 65535 or text.strip().startswith(":"):
        raise UsageError(
            f"received --metrics-port {text}: expected a port, such as 9400, or the address to "
            "listen at with it, such as 0.0.0.0:9400 for all of this machine."
        )
    return address or LOOPBACK, int(port)


def serve(
    at: str, *, from_file: bool, environ: MutableMapping[str, str] = os.environ
) -> int | None:
    """Serves metrics of the run until this process ends.

    Args:
        at: the port, of loopback, or "address:port"; port 0: any that is free.
        from_file: whether tasks of this process write them; otherwise the task that this process
            becomes serves them.
        environ: gets the variable for the tasks; a file that is set already is the one.

    Returns:
        The port on which this process serves, or None.

    Raises:
        UsageError: `at` has another form, prometheus_client is not installed, or the port is taken.
    """
    address, port = listens_at(at)
    if importlib.util.find_spec("prometheus_client") is None:
        raise UsageError("--metrics-port needs prometheus_client: pip install 'tfmw[metrics]'.")
    if not from_file:
        environ[METRICS_PORT] = at
        return None
    file = environ.get(METRICS_FILE)
    if file is None:
        folder = tempfile.mkdtemp(prefix="tfmw-metrics-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        file = os.path.join(folder, "metrics.prom")
        environ[METRICS_FILE] = file
    try:
        server = _server(address)((address, port), _handler(Path(file)))
    except OSError as error:
        raise UsageError(f"--metrics-port {at}: {error}; give another port.") from None
    threading.Thread(target=server.serve_forever, name="tfmw-metrics", daemon=True).start()
    return int(server.server_address[1])


def _server(address: str) -> type[http.server.ThreadingHTTPServer]:
    """A server for IPv4 or IPv6, whichever the address is of. Raises OSError."""
    family = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0][0]
    return type("Server", (http.server.ThreadingHTTPServer,), {"address_family": family})


def _handler(file: Path) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            text = file.read_bytes() if file.exists() else b""
            self.send_response(200)
            self.send_header("Content-Type", _TYPE)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None:
            """Requests are no news of the run."""

    return Handler
