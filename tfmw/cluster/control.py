"""How the servers of a parameter-server cluster learn that the coordinator is done.

    line = CoordinatorLine(cluster, facts)     # on the coordinator
    line.wait_for_all(timeout_s=120)           # every ps and worker has said hello, and agrees
    line.finish()                              # they may leave

    wait_for_end(cluster, facts, patience_s=120)    # on a ps or worker, while its server serves

TensorFlow's servers serve for ever, and nothing in them tells a coordinator that is done from one
that died. So each server keeps a plain TCP connection to the chief's address, which TensorFlow
leaves free (the coordinator's own TensorFlow port is another one). One JSON line says hello, one
answers; at the end one says "done". A connection that closes without it is a coordinator that
died: the server keeps its variables and waits for the next one, for a limited time. Standard
library only.
"""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from tfmw.cluster import Cluster, addresses
from tfmw.errors import ClusterError, TaskFailed, TfmwError

logger = logging.getLogger("tfmw")

_MAX_LINE = 1 << 20  # bytes
_RETRY_S = 0.1
_HELLO_S = 30.0  # for one line of a peer that has connected
_GOODBYE_S = 30.0  # for a coordinator that is done to end


def members(cluster: Cluster) -> dict[str, str]:
    """Task name -> address of every server of the cluster."""
    named = {f"ps {i}": address for i, address in enumerate(cluster.ps)}
    named.update({f"worker {i}": address for i, address in enumerate(cluster.workers)})
    return named


def _hello(cluster: Cluster, facts: Mapping[str, str]) -> dict[str, Any]:
    return {
        "task": f"{cluster.task} {cluster.index}",
        "cluster": {"chief": list(cluster.chief), **members(cluster)},
        "facts": dict(facts),
    }


class CoordinatorLine:
    """The coordinator's side: one connection to each server.

    Args:
        cluster: this process is its chief.
        facts: what must be the same on every task, by name (versions).

    Raises:
        ClusterError: the chief's port is taken.
    """

    def __init__(self, cluster: Cluster, facts: Mapping[str, str]):
        self._cluster = cluster
        self._mine = _hello(cluster, facts)
        self._listener = addresses.listen(cluster.chief[0])
        self._changed = threading.Condition()
        self._peers: dict[str, socket.socket] = {}
        self._problem: str | None = None
        threading.Thread(target=self._accept, name="tfmw-control", daemon=True).start()

    @property
    def connected(self) -> set[str]:
        """Names of the servers that are there now."""
        with self._changed:
            return set(self._peers)

    def wait_for_all(self, timeout_s: float) -> None:
        """Returns once every server is there and describes the same cluster.

        Raises:
            ClusterError: a server describes another cluster, or runs other versions.
            TfmwError: a server did not come in time; the message names it.
        """
        wanted = members(self._cluster)
        with self._changed:
            self._changed.wait_for(
                lambda: self._problem is not None or set(wanted) <= set(self._peers), timeout_s
            )
            problem, absent = self._problem, [n for n in wanted if n not in self._peers]
        if problem is not None:
            raise ClusterError(problem)
        if absent:
            names = ", ".join(f"{name} ({wanted[name]})" for name in absent)
            raise TfmwError(
                f"{names} did not come within {timeout_s:g} s: start "
                f"{'it' if len(absent) == 1 else 'them'}, or check that the chief's address "
                f"{self._cluster.chief[0]} can be reached from there."
            )

    def finish(self) -> None:
        """Tells every server that the training is done."""
        self._tell({"done": True})

    def fail(self, message: str) -> None:
        """Tells every server that the coordinator gives up, and why."""
        self._tell({"failed": message})

    def close(self) -> None:
        """Ends all connections, as the end of this process would."""
        self._stop_listening()
        with self._changed:
            peers = list(self._peers.values())
            self._peers.clear()
        for peer in peers:
            with contextlib.suppress(OSError):
                peer.shutdown(socket.SHUT_RDWR)

    def _tell(self, message: dict[str, Any]) -> None:
        with self._changed:
            peers = list(self._peers.values())
        for peer in peers:
            with contextlib.suppress(OSError):
                _send(peer, message)  # and stays connected: servers outlive this process
        self._stop_listening()

    def _stop_listening(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._greet, args=(peer,), daemon=True).start()

    def _greet(self, peer: socket.socket) -> None:
        hello = _receive(peer, _HELLO_S)
        if not isinstance(hello.get("task"), str):
            peer.close()
            return
        name = hello["task"]
        problem = _disagreement(self._mine, hello)
        with self._changed:
            if problem is None and name in self._peers:
                # The same task started again: its old connection may not have broken yet.
                self._peers.pop(name).close()
            with contextlib.suppress(OSError):
                _send(peer, {"problem": problem})  # before whatever is told to all peers
            if problem is None:
                self._peers[name] = peer
            else:
                self._problem = problem
                peer.close()
            self._changed.notify_all()
        if problem is None:
            _keep_alive(peer)
            self._watch(name, peer)

    def _watch(self, name: str, peer: socket.socket) -> None:
        with contextlib.suppress(OSError):
            peer.recv(1)  # servers have nothing to say: this is their end
        peer.close()
        with self._changed:
            if self._peers.get(name) is peer:
                del self._peers[name]
                logger.info("%s has gone", name)


def wait_for_end(
    cluster: Cluster,
    facts: Mapping[str, str],
    *,
    patience_s: float = 120.0,
    standing: bool = False,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Returns once the coordinator says that it is done; `standing` servers never return.

    Args:
        cluster: this process is one of its ps or workers, and serves already.
        facts: what must be the same on every task.
        patience_s: seconds to wait for a coordinator that has not come, or has not come back.
        standing: whether to wait for the next coordinator after each one, without limit.

    Raises:
        ClusterError: the coordinator describes another cluster, or runs other versions.
        TaskFailed: the coordinator has given up; the message is its own.
        TfmwError: no coordinator came in time.
    """
    host, port = addresses.split(cluster.chief[0])
    hello = _hello(cluster, facts)
    deadline = clock() + patience_s
    last, seen = "no answer", False
    while True:
        try:
            with socket.create_connection((host, port), timeout=5.0) as chief:
                _send(chief, hello)
                answer = _receive(chief, _HELLO_S)
                if answer.get("problem"):
                    raise ClusterError(answer["problem"])
                if "problem" in answer:
                    seen = True
                    _keep_alive(chief)
                    news = _receive(chief, None)
                    if news.get("done"):
                        # TensorFlow tidies up on the servers while the coordinator's process ends.
                        _receive(chief, _GOODBYE_S)
                        if not standing:
                            return
                    if "failed" in news and not standing:
                        # In TensorFlow's words for it, by which a launcher knows an echo.
                        raise TaskFailed(f"Error reported from /job:chief/task:0: {news['failed']}")
                    deadline = clock() + patience_s
                    if not news:
                        last = "it left without a word"
                        logger.warning(
                            "the coordinator at %s has gone; waiting for it to come back",
                            cluster.chief[0],
                        )
                else:
                    last = "the coordinator closed the connection"
        except OSError as e:
            last = str(e) or type(e).__name__
        if not standing and clock() >= deadline:
            raise TfmwError(
                f"{hello['task']} {'lost' if seen else 'could not reach'} the coordinator at "
                f"{cluster.chief[0]} and waited {patience_s:g} s for it ({last}): start the chief "
                "(again), or check its address."
            )
        time.sleep(_RETRY_S)


def _send(peer: socket.socket, message: Mapping[str, Any]) -> None:
    peer.sendall(json.dumps(message).encode() + b"\n")


def _receive(peer: socket.socket, timeout_s: float | None) -> dict[str, Any]:
    """One JSON line; {} where the connection ends, or brings something else."""
    peer.settimeout(timeout_s)
    data = b""
    try:
        # Byte by byte: the line after it, which may have come too, is for the next call.
        while not data.endswith(b"\n") and len(data) < _MAX_LINE:
            part = peer.recv(1)
            if not part:
                return {}
            data += part
        message = json.loads(data)
    except (OSError, ValueError):
        return {}
    finally:
        with contextlib.suppress(OSError):
            peer.settimeout(None)
    return message if isinstance(message, dict) else {}


def _keep_alive(peer: socket.socket) -> None:
    """A machine that is gone without a word is noticed after half a minute."""
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, option):
            peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def _disagreement(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> str | None:
    """One sentence on the first difference; None where there is none."""
    name = theirs["task"]
    if name not in mine["cluster"]:
        return f"a task calls itself {name}, which the coordinator's cluster does not have."
    for what in ("cluster", "facts"):
        a, b = mine[what], theirs.get(what)
        if not isinstance(b, dict):
            return f"{name} sent no {what}: it runs another version of tfmw."
        for key in sorted({*a, *b}):
            if a.get(key) != b.get(key):
                about = f"the cluster ({key})" if what == "cluster" else key
                return (
                    f"tasks disagree about {about}: the coordinator has {a.get(key)!r}, {name} has "
                    f"{b.get(key)!r}. Give every task the same cluster and the same versions."
                )
    return None
