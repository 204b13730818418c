"""`tfmw run --metrics-port`: the metrics that the chief writes to a file, for Prometheus.

The tasks may be in a private network, so the launcher serves them. A task without a launcher
serves its own.
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
from tfmw.runtime.metrics_address import METRICS_FILE, METRICS_PORT, listens_at

_TYPE = "text/plain; version=0.0.4; charset=utf-8"  # Prometheus's text format


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
