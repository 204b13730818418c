"""The destination of the metrics of a run: a file, or a port of one address.

    listens_at("9400")            # ("127.0.0.1", 9400)
    listens_at("0.0.0.0:9400")    # every address of the machine

Metrics have no password, so without an address only this machine can read them.
"""

from __future__ import annotations

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
