"""Whether the tasks of a run get a private network, and the note for the user about it."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from tfmw.errors import UsageError
from tfmw.launcher import isolation
from tfmw.launcher.failure import Failure
from tfmw.launcher.options import AutoOnOff
from tfmw.runtime import secrets

# Network locations in a program's flags: "--data_dir=gs://bucket/x".
_URL = re.compile(r"\b[a-z][a-z0-9+.]*://(?!/)", re.IGNORECASE)
# Variables that are set for programs which use the network.
CLIENT_VARIABLES = (
    "AIP_MODEL_DIR",
    "AWS_ACCESS_KEY_ID",
    "AWS_ENDPOINT_URL",
    "GOOGLE_APPLICATION_CREDENTIALS",
    "MLFLOW_TRACKING_URI",
    "TFDS_DATA_DIR",
    "WANDB_API_KEY",
)


def choose_network(
    choice: AutoOnOff,
    command: Sequence[str],
    tasks: Sequence[tuple[str, int]],
    environ: Mapping[str, str],
) -> tuple[isolation.Network | None, str]:
    """The tasks' private network, or None; and a note for the user, or ""."""
    opens_ports = sum(kind != "evaluator" for kind, _ in tasks) > 1
    if choice == "off" or (choice == "auto" and not opens_ports):
        return None, ""
    if choice == "auto" and (found := objection(command[1:], environ)):
        why, reachable = found
        return None, (
            f"the tasks run in this machine's network, because {why}; their ports have no "
            "authentication: --isolate on closes them"
        ) * reachable
    try:
        network = isolation.create()
    except isolation.Impossible as error:
        if choice == "on":
            raise UsageError(
                f"--isolate on: this system allows no private network ({error}); drop it, or allow "
                "user namespaces."
            ) from error
        return None, (
            f"this system allows no private network for the tasks ({error}); their ports are open "
            "to this machine's network, without authentication"
        )
    if choice == "on":
        return network, ""
    return network, (
        "the tasks run in a private network, which connects them to each other only; for "
        "downloads, gs:// and the like use --isolate off"
    )


def objection(
    argv: Sequence[str],
    environ: Mapping[str, str],
    *,
    routes: Path = Path("/proc/net/route"),
    addresses: Path = Path("/proc/net/if_inet6"),
) -> tuple[str, bool] | None:
    """Why `--isolate auto` keeps the tasks in this machine's network.

    Args:
        argv: the program and its flags.
        environ: the tasks' environment.
        routes: this machine's IPv4 routes.
        addresses: this machine's IPv6 addresses.

    Returns:
        (the reason as a clause, whether other machines can reach the tasks' ports), or None.
    """
    if not _reachable(routes, addresses):
        return "this machine is in no network", False
    for word in argv:
        if _URL.search(word):
            return f"{secrets.without_secrets(word)!r} names a place in the network", True
    for name, value in sorted(environ.items()):
        if value and (name.lower() in ("http_proxy", "https_proxy", "all_proxy")):
            return f"{name} is set", True
        if value and name in CLIENT_VARIABLES and (name != "TFDS_DATA_DIR" or _URL.search(value)):
            return f"{name} is set", True
    return None


def _reachable(routes: Path, addresses: Path) -> bool:
    """Whether this machine has another interface than loopback; True if unknown."""
    try:
        # proc_net(5): a line of titles, then "eth0 000011AC 00000000 ..."
        if any(line.split()[0] != "lo" for line in routes.read_text().splitlines()[1:]):
            return True
    except OSError:
        return True
    with contextlib.suppress(OSError):  # no such file: no IPv6
        # "fe80...0001 02 40 20 80 eth0"
        return any(line.split()[-1] != "lo" for line in addresses.read_text().splitlines())
    return False


# Errors of programs without a network: urllib, requests, tf.io.gfile, gRPC.
_NO_NETWORK = re.compile(
    "name resolution|name or service not known|network is unreachable|could(n't| not) resolve host|"
    "max retries exceeded|failed to resolve",
    re.IGNORECASE,
)


def network_hint(failures: Sequence[Failure]) -> str:
    """A line for the user if a program may have failed for lack of a network; else ""."""
    text = "\n".join(line for f in failures[:1] for line in (f.error, *f.detail))
    if not _NO_NETWORK.search(text):
        return ""
    return "the tasks ran in a private network: --isolate off runs them in this machine's network"
