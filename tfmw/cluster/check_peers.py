"""The connections of `tfmw check`: every task connects to every other one, in both directions.

with Peers(cluster, findings.failed) as peers:
    peers.open(hello)                             # responds to other tasks from now on
    problems = peers.connect_all(others, deadline)
    peers.hellos                                  # the hello of each other task
    peers.leave(reached, deadline)
"""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from tfmw.cluster import Cluster
from tfmw.cluster.handshake import Channel, HelloServer, NotATask, TaskDescription
from tfmw.errors import ClusterError

PROTOCOL = "check"
CONNECT_S = 5.0
_RETRY_S = 0.1


class Peers:
    """Listens on this task's port, and connects to the other tasks.

    Attributes:
        hellos: task -> its hello.
        clocks_ahead: task -> seconds by which its clock is ahead of this one's.

    Args:
        cluster: this process is one of its tasks.
        failed: called with each problem, one clause.
    """

    def __init__(self, cluster: Cluster, failed: Callable[[str], None]):
        assert cluster.address is not None
        self.hellos: dict[str, TaskDescription] = {}
        self.clocks_ahead: dict[str, float] = {}
        self._id = secrets.token_hex(8)
        self._task = cluster.task_name
        self._tasks = cluster.tasks()
        self._hello: TaskDescription | None = None
        self._ready = threading.Event()
        self._changed = threading.Condition()
        self._ids: dict[str, str] = {self._task: self._id}
        self._left: set[str] = set()
        self._duplicates: set[str] = set()
        self._failed = failed
        self._server: HelloServer | None = None
        try:
            self._server = HelloServer(cluster.address, PROTOCOL, self._greet)
        except ClusterError as error:
            failed(str(error).rstrip("."))

    @property
    def listens(self) -> bool:
        """Whether this task's port was free."""
        return self._server is not None

    def __enter__(self) -> Peers:
        return self

    def __exit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.close()

    def open(self, hello: TaskDescription) -> None:
        """Responds to other tasks from now on, including those that have already connected."""
        self._hello = hello
        self._ready.set()

    def connect_all(self, others: Mapping[str, str], deadline: float) -> dict[str, str | None]:
        """Connects to tasks until the deadline.

        Args:
            others: task -> address.
            deadline: of `time.monotonic()`.

        Returns:
            Task -> why it was not reached; None if it was.
        """
        problems: dict[str, str | None] = {}

        def connect(name: str) -> None:
            while True:
                problems[name] = self._connect(name, deadline)
                if problems[name] is None or time.monotonic() > deadline:
                    return
                time.sleep(_RETRY_S)

        threads = [threading.Thread(target=connect, args=(name,)) for name in others]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return {name: problems[name] for name in others}

    def leave(self, reached: Sequence[str], deadline: float) -> None:
        """Notifies the other tasks that this one is done, and waits for them until the deadline."""
        for name in reached:
            self._connect(name, deadline, leaving=True)
        with self._changed:
            remaining = set(self.hellos) & set(self._tasks)
            self._changed.wait_for(
                lambda: remaining <= self._left,
                max(0.0, deadline + CONNECT_S - time.monotonic()),
            )

    def _own_hello(self, leaving: bool = False) -> TaskDescription:
        assert self._hello is not None
        details = {"id": self._id, "clock": time.time(), "leaving": leaving}
        return dataclasses.replace(self._hello, details={**self._hello.details, **details})

    def _connect(self, name: str, deadline: float, *, leaving: bool = False) -> str | None:
        """Exchanges hellos with a task once; returns the problem, or None."""
        try:
            with Channel.connect(self._tasks[name], CONNECT_S) as channel:
                channel.send(self._own_hello(leaving).message())
                # A task that has just started responds once it has imported TensorFlow.
                timeout_s = max(CONNECT_S, deadline - time.monotonic())
                remote = TaskDescription.of(channel.receive(timeout_s), PROTOCOL)
            self._record(remote)
        except (NotATask, ConnectionAbortedError):
            return "no tfmw check responds there"
        except TimeoutError:
            return "no response"
        except OSError as error:
            return error.strerror or str(error)
        return None if remote.task == name else f"{remote.task} responds there"

    def _greet(self, remote: TaskDescription, channel: Channel) -> None:
        with channel, contextlib.suppress(OSError):
            self._record(remote)
            self._ready.wait()
            channel.send(self._own_hello().message())
            channel.wait_closed(CONNECT_S)  # the other side closes first: this port is left free

    def _record(self, remote: TaskDescription) -> None:
        """Stores another task's hello. Raises NotATask if details are missing."""
        try:
            process, clock = str(remote.details["id"]), float(remote.details["clock"])
            leaving = bool(remote.details["leaving"])
        except (KeyError, TypeError, ValueError):
            raise NotATask from None
        name = remote.task
        with self._changed:
            if self._ids.setdefault(name, process) != process and name not in self._duplicates:
                self._duplicates.add(name)
                self._failed(f"two processes are {name}: give each task its own index")
            if name != self._task:
                self.hellos.setdefault(name, remote)
                self.clocks_ahead.setdefault(name, clock - time.time())
            if leaving:
                self._left.add(name)
            self._changed.notify_all()
