"""Choice of a private network for the tasks of a run, and their connections to the outside.

    network, note = choose_network("auto", starts_grpc(tasks, environ))
    with Gateway(network.listeners, environ) as gateway:
        env |= gateway.environment

No outside process can connect into the private network. From inside, tasks reach an HTTP proxy, and
the ports of this machine's own servers at localhost, such as MLflow at localhost:5000. `proxy`
serves a connection.
"""

from __future__ import annotations

import contextlib
import functools
import re
import socket
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from tfmw.cluster import wire
from tfmw.cluster.sockets import ephemeral_ports
from tfmw.errors import UsageError
from tfmw.launcher import isolation
from tfmw.launcher.environment import visible_gpus
from tfmw.launcher.failure import Failure
from tfmw.launcher.options import AutoOnOff

MAX_CONNECTIONS = 256
"""Maximum number of connections to the outside, of all tasks; more are closed at once."""

_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy")
_NO_PROXIES = ("no_proxy", "no_grpc_proxy")
_LOOPBACK = "localhost,127.0.0.1,::1"
# 0.0.0.0, 127.0.0.1, ::, ::1 and ::ffff:127.0.0.1, in the byte order of most machines.
_AT_LOCALHOST = (
    "0" * 8,
    "0100007F",
    "0" * 32,
    "0" * 24 + "01000000",
    "0" * 16 + "FFFF0000" + "0100007F",
)


def starts_grpc(tasks: Sequence[tuple[str, int]], environ: Mapping[str, str]) -> bool:
    """Whether tasks start TensorFlow's gRPC servers, as far as the launcher can know.

    Parameter servers do, and workers with GPUs. Other workers do only if their script chooses
    collectives="grpc", or TF_CONFIG is read without tfmw.
    """
    training = [kind for kind, _ in tasks if kind != "evaluator"]
    several = len(training) > 1
    apart = environ.get("TFMW_NO_INIT") == "1"
    return several and ("ps" in training or apart or bool(visible_gpus(environ)))


def choose_network(choice: AutoOnOff, grpc: bool) -> tuple[isolation.Network | None, str]:
    """The tasks' private network, or None; and a note for the user, or "".

    Args:
        grpc: see `starts_grpc`.
    """
    if choice == "off" or (choice == "auto" and not grpc):
        return None, ""
    try:
        return isolation.create(local_servers()), ""
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


def local_servers(proc: Path = Path("/proc")) -> list[int]:
    """Ports at which servers of this machine listen at localhost.

    Ephemeral ports are not included, as the system assigns them to tasks.
    """
    with contextlib.suppress(OSError, ValueError):
        ports = set()
        for name in ("tcp", "tcp6"):
            # proc(5): "0: 0100007F:1388 00000000:0000 0A ..."; 0A: listening
            for line in (proc / "net" / name).read_text().splitlines()[1:]:
                _, local, _, state, *_ = line.split()
                address, port = local.split(":")
                if state == "0A" and address in _AT_LOCALHOST:
                    ports.add(int(port, 16))
        return sorted(ports - set(ephemeral_ports(proc)))
    return []


class Gateway:
    """Connects tasks in a private network to servers outside, until it is closed.

    Args:
        listeners: sockets in the private network: that of the proxy, then one for each port of
            localhost.
        environ: the user's environment, which may name a proxy.
    """

    def __init__(self, listeners: Sequence[socket.socket], environ: Mapping[str, str]) -> None:
        self._listeners = listeners
        self._environ = dict(environ)
        self._servers: list[wire.Server] = []
        self._connections: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._closing = False

    @property
    def environment(self) -> dict[str, str]:
        """Variables that send the tasks' HTTP, and gRPC to other machines, to the proxy."""
        _, port = self._listeners[0].getsockname()
        variables = dict.fromkeys(_PROXIES, f"http://127.0.0.1:{port}")
        variables |= dict.fromkeys(_NO_PROXIES, _LOOPBACK)
        return {form: value for k, value in variables.items() for form in (k, k.upper())}

    def __enter__(self) -> Gateway:
        for index, listener in enumerate(self._listeners):
            port = listener.getsockname()[1] if index else None
            serve = functools.partial(self._serve, port)
            self._servers.append(wire.Server(listener, None, serve, "tfmw-gateway"))
        return self

    def __exit__(self, *_: object) -> None:
        for server in self._servers:
            server.close()
        with self._lock:
            self._closing = True
            for client in self._connections:
                with contextlib.suppress(OSError):
                    client.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for it

    def _serve(self, port: int | None, client: socket.socket) -> None:
        from tfmw.launcher import proxy  # takes 0.1 s, for which most runs need not wait

        with client, contextlib.suppress(OSError, ValueError):
            with self._lock:
                if self._closing or len(self._connections) >= MAX_CONNECTIONS:
                    return
                self._connections.add(client)
            try:
                if port is None:
                    proxy.ServedRequest(client, self._environ)
                else:
                    proxy.serve_port(client, port)
            finally:
                with self._lock:
                    self._connections.discard(client)


# Errors of programs without a network: urllib, requests, tf.io.gfile, gRPC.
_NO_NETWORK = re.compile(
    "name resolution|name or service not known|network is unreachable|could(n't| not) resolve host|"
    "failed to resolve",
    re.IGNORECASE,
)


def network_hint(failures: Sequence[Failure]) -> str:
    """A line for the user if a program may have failed for lack of a network; else ""."""
    lines = [line for f in failures[:1] for line in (f.error, *f.detail)]
    # The proxy's own errors mean that this machine cannot reach the server, either.
    if not any(_NO_NETWORK.search(line) and "outside of the private" not in line for line in lines):
        return ""
    return (
        "the tasks ran in a private network, from which programs that heed http_proxy and "
        "https_proxy reach other machines: --isolate off runs them in this machine's network"
    )
