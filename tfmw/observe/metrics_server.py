"""The metrics of a run for Prometheus: in a file, or on a port of one address.

    listens_at("9400")            # ("127.0.0.1", 9400)
    listens_at("0.0.0.0:9400")    # every address of the machine

Metrics have no password, so without an address only this machine can read them.

`tfmw run --metrics-port` serves the metrics that the chief writes to a file. The launcher does this
because the tasks may be in a private network. A task without a launcher serves its own metrics.
"""

from __future__ import annotations

import atexit
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Iterable, MutableMapping
from pathlib import Path
from typing import Any

from tfmw.errors import UsageError

METRICS_FILE, METRICS_PORT = "TFMW_METRICS_FILE", "TFMW_METRICS_PORT"

LOOPBACK = "127.0.0.1"


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
        at: a port on loopback, or "address:port"; port 0 is any free port.
        from_file: whether the tasks of this launcher write the metrics to a file; otherwise this
            process is itself a task.
        environ: gets the variable for the tasks; a file that it already names is used.

    Returns:
        The port on which this process serves, or None.

    Raises:
        UsageError: `at` has another form, prometheus_client is not installed, or the port is taken.
    """
    address, port = listens_at(at)
    if importlib.util.find_spec("prometheus_client") is None:
        raise UsageError(
            "--metrics-port needs prometheus_client: pip install '.[metrics]' in a clone of tfmw."
        )
    if not from_file:
        environ[METRICS_PORT] = at
        return None
    file = environ.get(METRICS_FILE)
    if file is None:
        folder = tempfile.mkdtemp(prefix="tfmw-metrics-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        file = os.path.join(folder, "metrics.prom")
        environ[METRICS_FILE] = file
    from prometheus_client import CollectorRegistry, start_http_server

    registry = CollectorRegistry()
    registry.register(_Written(Path(file)))
    try:
        server, _ = start_http_server(port, address, registry)
    except OSError as error:
        raise UsageError(f"--metrics-port {at}: {error}; give another port.") from None
    return int(server.server_port)


class _Written:
    """Metrics for a registry from a file in Prometheus's text format; it may not exist yet."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def collect(self) -> Iterable[Any]:
        from prometheus_client.parser import text_string_to_metric_families

        text = self._file.read_text(encoding="utf-8") if self._file.exists() else ""
        return text_string_to_metric_families(text)
