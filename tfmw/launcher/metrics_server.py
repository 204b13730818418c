"""`tfmw run --metrics-port`: the numbers that the chief writes to a file, for Prometheus.

The tasks may be in a private network, so the launcher serves them. A task without a launcher
serves its own.
"""

from __future__ import annotations

import atexit
import http.server
import importlib.util
import os
import shutil
import tempfile
import threading
from collections.abc import MutableMapping
from pathlib import Path

from tfmw.errors import UsageError

METRICS_FILE, METRICS_PORT = "TFMW_METRICS_FILE", "TFMW_METRICS_PORT"
_TYPE = "text/plain; version=0.0.4; charset=utf-8"  # Prometheus's text format


def serve(
    port: int, *, from_file: bool, environ: MutableMapping[str, str] = os.environ
) -> int | None:
    """Serves numbers of the run until this process ends.

    Args:
        port: on all addresses; 0: any that is free.
        from_file: whether tasks of this process write them; otherwise the task that this process
            becomes serves them.
        environ: gets the variable for the tasks; a file that is set already is the one.

    Returns:
        The port on which this process serves, or None.

    Raises:
        UsageError: prometheus_client is not installed, or the port is taken.
    """
    if importlib.util.find_spec("prometheus_client") is None:
        raise UsageError("--metrics-port needs prometheus_client: pip install 'tfmw[metrics]'.")
    if not from_file:
        environ[METRICS_PORT] = str(port)
        return None
    file = environ.get(METRICS_FILE)
    if file is None:
        folder = tempfile.mkdtemp(prefix="tfmw-metrics-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        file = os.path.join(folder, "metrics.prom")
        environ[METRICS_FILE] = file
    try:
        server = http.server.ThreadingHTTPServer(("", port), _handler(Path(file)))
    except (OSError, OverflowError) as error:
        raise UsageError(f"--metrics-port {port}: {error}; give another port.") from None
    threading.Thread(target=server.serve_forever, name="tfmw-metrics", daemon=True).start()
    return int(server.server_address[1])


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
