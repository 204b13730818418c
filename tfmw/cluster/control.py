"""The connection between parameter servers and their coordinator: who is there, when to end.

    control = ControlServer(cluster, facts)    # on the coordinator
    control.wait_for_all(timeout_s=120)        # every ps and worker has connected, and agrees
    control.finish()                           # they end with status 0

    wait_for_end(cluster, facts, patience_s=120)    # on a ps or worker, while its server serves

TensorFlow's servers never end, and cannot distinguish a coordinator that is done from one that
died. So each server keeps a plain TCP connection to the chief's address, which TensorFlow leaves
free (the coordinator's own TensorFlow port is another one). It sends its hello and receives one
response. At the end it receives a message "done". If the connection closes without one, the
coordinator has died: the server keeps its variables and waits for the next coordinator, for a
limited time. Standard library only.

If the connection of a server is lost, so are TensorFlow's own connections to it, which would not
notice that its machine is gone: the coordinator ends them. It cannot while TensorFlow waits for a
server without letting other threads run (it traces a function, which all servers get). So a thread
also sets a limit to the silence of each connection, and the kernel ends it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Mapping
from typing import Any

from tfmw.cluster import Cluster, addresses
from tfmw.cluster.handshake import (
    Channel,
    HelloServer,
    NotATask,
    TaskDescription,
    difference,
    notice_of_waiting,
)
from tfmw.errors import ClusterError, TaskFailed, TfmwError
from tfmw.runtime.connections import addresses_of, end_connections, limit_silence
from tfmw.runtime.recorded_errors import ECHO

logger = logging.getLogger("tfmw")

_PROTOCOL = "control"
_RETRY_S = 0.1
_CONNECT_S = 5.0
_RESPONSE_S = 30.0  # for the response of a coordinator that has accepted the connection
_GOODBYE_S = 30.0  # for the process of a coordinator that is done to end
_LIMIT_EVERY_S = 2.0  # new connections are looked for

SILENCE_S = 15.0
"""Seconds until the kernel ends a connection of TensorFlow's to a server that is silent.

Longer than it takes to notice it by the connection of this module, which also ends them.
"""


def _hello(cluster: Cluster, facts: Mapping[str, str]) -> TaskDescription:
    tasks = cluster.tasks("chief", "worker", "ps")
    return TaskDescription(_PROTOCOL, cluster.task_name, tasks, dict(facts))


class AlreadyCoordinated(ClusterError):
    """Another coordinator of this cluster is running at the chief's address."""


class ControlServer:
    """The coordinator's side: one connection to each server.

    Args:
        cluster: this process is its chief.
        facts: what must be the same on every task, by name (versions).

    Raises:
        AlreadyCoordinated: the chief's port is taken by another coordinator of this cluster.
        ClusterError: the chief's port is taken.
    """

    def __init__(self, cluster: Cluster, facts: Mapping[str, str]):
        self._cluster = cluster
        self._hello = _hello(cluster, facts)
        self._changed = threading.Condition()
        self._servers: dict[str, Channel] = {}
        self._peers: dict[str, set[tuple[str, int]]] = {}  # server -> (IP address, port)
        self._problem: str | None = None
        self._is_over = False
        try:
            self._listener = HelloServer(cluster.chief[0], _PROTOCOL, self._greet)
        except ClusterError:
            if _is_coordinated(self._hello):
                raise AlreadyCoordinated(
                    f"a coordinator of this cluster runs at {cluster.chief[0]} already: wait until "
                    "it is done, or stop it."
                ) from None
            raise
        threading.Thread(target=self._limit_silence, name="tfmw-silence", daemon=True).start()

    @property
    def connected(self) -> set[str]:
        """Names of the servers that are connected."""
        with self._changed:
            return set(self._servers)

    def wait_for_all(self, timeout_s: float) -> None:
        """Returns once every server is connected and describes the same cluster.

        Raises:
            ClusterError: a server describes another cluster, or runs other versions.
            TfmwError: a server did not connect in time; the message names it.
        """
        expected = self._cluster.tasks("worker", "ps")

        def missing() -> list[str]:
            return [f"{n} ({a})" for n, a in expected.items() if n not in self._servers]

        def describe() -> str:
            return f"{self._hello.task} waits for {', '.join(missing())}"

        with notice_of_waiting(describe), self._changed:
            self._changed.wait_for(lambda: self._problem is not None or not missing(), timeout_s)
            problem, absent = self._problem, missing()
        if problem is not None:
            raise ClusterError(problem)
        if absent:
            raise TfmwError(
                f"{', '.join(absent)} did not connect within {timeout_s:g} s: start "
                f"{'it' if len(absent) == 1 else 'them'}, or check that the chief's address "
                f"{self._cluster.chief[0]} can be reached from there."
            )

    def finish(self) -> None:
        """Sends every server the message that the training is done."""
        self._send_all({"done": True})

    def fail(self, message: str) -> None:
        """Sends every server the error that ended the coordinator."""
        self._send_all({"failed": message})

    def close(self) -> None:
        """Closes all connections, as the end of this process would."""
        self._listener.close()
        with self._changed:
            self._is_over = True
            servers = list(self._servers.values())
            self._servers.clear()
            self._changed.notify_all()
        for channel in servers:
            channel.close()

    def _send_all(self, message: dict[str, Any]) -> None:
        with self._changed:
            self._is_over = True
            servers = list(self._servers.values())
        for channel in servers:
            with contextlib.suppress(OSError):
                channel.send(message)  # the connection stays open: servers outlive this process
        self._listener.close()

    def _greet(self, hello: TaskDescription, channel: Channel) -> None:
        problem = difference(self._hello, hello)
        if problem is None and hello.task == self._hello.task:
            with channel, contextlib.suppress(OSError):
                channel.send({"coordinator": True})
            return
        if problem is None:
            host, port = addresses.split(self._hello.tasks[hello.task])
            known = {(name, port) for name in {channel.peer_host(), *addresses_of(host)} if name}
        with self._changed:
            before = self._servers.pop(hello.task, None) if problem is None else None
            if problem is None:
                self._peers[hello.task] = known
        if before is not None:  # a restarted task: its old connections may still be open
            before.close()
            self._end_connections(hello.task)
        with self._changed:
            with contextlib.suppress(OSError):
                channel.send({"problem": problem})  # before what is sent to all
            if problem is None:
                self._servers[hello.task] = channel
            else:
                self._problem = problem
            self._changed.notify_all()
        if problem is None:
            channel.keep_alive()
            channel.wait_closed(None)  # servers send nothing more
        self._forget(hello.task, channel)

    def _forget(self, name: str, channel: Channel) -> None:
        channel.close()
        with self._changed:
            is_lost = self._servers.get(name) is channel
            if is_lost:
                del self._servers[name]
        if is_lost:
            logger.info("%s has left", name)
            self._end_connections(name)

    def _end_connections(self, name: str) -> None:
        """Ends TensorFlow's connections to a server that is gone; its calls fail at once."""
        if not self._is_over:  # else servers end, and TensorFlow frees what this process has there
            end_connections(self._peers[name])

    def _limit_silence(self) -> None:
        """Limits the silence of TensorFlow's connections, until the training is over."""
        while True:
            with self._changed:
                if self._changed.wait_for(lambda: self._is_over, _LIMIT_EVERY_S):
                    return
                peers = set().union(*(self._peers[name] for name in self._servers))
            limit_silence(peers, SILENCE_S)


def _is_coordinated(hello: TaskDescription) -> bool:
    """Whether a coordinator of the same cluster listens at the chief's address."""
    try:
        with Channel.connect(hello.tasks["chief"], _CONNECT_S) as channel:
            channel.send(hello.message())
            return channel.receive(_CONNECT_S).get("coordinator") is True
    except OSError:
        return False


class _Coordinator:
    """The coordinator as a server sees it: its address, and the last problem with it."""

    def __init__(self, hello: TaskDescription):
        self._hello = hello
        self._address = hello.tasks["chief"]
        self.was_there = False
        self.problem = "no response"

    def follow(self, patience_s: float) -> dict[str, Any] | None:
        """The coordinator's last message; None if it ended without one.

        Raises:
            ClusterError: it describes another cluster, or runs other versions.
            TfmwError: no coordinator responded for `patience_s` seconds.
        """
        with contextlib.closing(self._connect(patience_s)) as channel:
            self.was_there = True
            channel.keep_alive()
            try:
                message = channel.receive(None)
            except OSError:
                self.problem = "it ended without a message"
                logger.warning("lost the coordinator at %s; waiting for its restart", self._address)
                return None
            if message.get("done"):
                # TensorFlow frees resources on the servers while the coordinator's process ends.
                channel.wait_closed(_GOODBYE_S)
            return message

    def _connect(self, patience_s: float) -> Channel:
        deadline = time.monotonic() + patience_s
        name = self._hello.task
        with notice_of_waiting(lambda: f"{name} waits for the coordinator at {self._address}"):
            while True:
                try:
                    return self._greet()
                except OSError as error:
                    self.problem = error.strerror or str(error)
                if time.monotonic() >= deadline:
                    raise TfmwError(
                        f"{name} {'lost' if self.was_there else 'could not reach'} the coordinator "
                        f"at {self._address} and waited {patience_s:g} s for it ({self.problem}): "
                        "start the chief (again), or check its address."
                    )
                time.sleep(_RETRY_S)

    def _greet(self) -> Channel:
        channel = Channel.connect(self._address, _CONNECT_S)
        try:
            channel.send(self._hello.message())
            response = channel.receive(_RESPONSE_S)
            if "problem" not in response:
                raise NotATask
            if response["problem"]:
                raise ClusterError(response["problem"])
        except BaseException:
            channel.close()
            raise
        return channel


def wait_for_end(
    cluster: Cluster,
    facts: Mapping[str, str],
    *,
    patience_s: float = 120.0,
    serve_again: bool = False,
) -> None:
    """Returns once the coordinator is done.

    Args:
        cluster: this process is one of its ps or workers, and already serves.
        facts: what must be the same on every task.
        patience_s: seconds to wait for the first coordinator, and for a restarted one.
        serve_again: whether to wait for the next coordinator after each one, without limit; then
            this never returns.

    Raises:
        ClusterError: the coordinator describes another cluster, or runs other versions.
        TaskFailed: the coordinator failed; the message is its error.
        TfmwError: no coordinator responded in time.
    """
    coordinator = _Coordinator(_hello(cluster, facts))
    while True:
        message = coordinator.follow(float("inf") if serve_again else patience_s)
        if serve_again or message is None:
            continue
        if message.get("done"):
            return
        if "failed" in message:
            # In TensorFlow's form, by which a launcher recognises a secondary error.
            raise TaskFailed(f"{ECHO}chief/task:0: {message['failed']}")
