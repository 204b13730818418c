"""All workers meet and compare, before TensorFlow's servers start.

    rendezvous.meet(cluster, facts={"tensorflow": "2.21.0"}, timeout_s=120)

TensorFlow waits up to an hour for a task that never starts, and trains with half of the workers if
two tasks describe the cluster differently. So the tasks that train meet first, over plain TCP on
the chief's address, which TensorFlow uses afterwards. Each sends its hello, the chief compares
them, and all receive the same response: to continue, or the problem as one sentence. Standard
library only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Mapping

from tfmw.cluster import Cluster, addresses
from tfmw.cluster.handshake import (
    Channel,
    HelloServer,
    TaskDescription,
    absence,
    accepted_by_chief,
    differences,
    listed,
    notice_of_waiting,
)
from tfmw.errors import ClusterError, TfmwError

_PROTOCOL = "rendezvous"
_STRAGGLER_S = 10.0  # tasks that are started together connect within this time of each other
_POLL_S = 0.5  # a new connection wakes the chief at once; a closed one does not
_CLOSE_S = 5.0  # for a task that has received the response to close its connection


def meet(cluster: Cluster, facts: Mapping[str, str], *, timeout_s: float = 120.0) -> None:
    """Returns once every training task of `cluster` has connected and agrees.

    Args:
        cluster: a cluster of several training tasks, of which this process is one.
        facts: what must be the same on every task, by name (versions, options).
        timeout_s: seconds to wait for all tasks.

    Raises:
        ClusterError: the port of this task is taken, or tasks disagree.
        TfmwError: a task did not connect in time; the message names it.
    """
    hello = TaskDescription(_PROTOCOL, cluster.task_name, cluster.tasks("chief", "worker"), facts)
    if cluster.rank == 0:
        _Meeting(hello, timeout_s).hold()
        return
    assert cluster.address is not None
    addresses.check_port_free(cluster.address)
    chief = next(iter(hello.tasks.values()))

    def describe(problem: str) -> str:
        return f"{hello.task} waits for the chief at {chief}: {problem}"

    try:
        accepted_by_chief(hello, timeout_s, describe).close()
    except TimeoutError as problem:
        raise TfmwError(
            f"{hello.task} could not reach the chief at {chief} within {timeout_s:g} s "
            f"({problem}): is that task started, is its address right, and is its port open to "
            "this machine?"
        ) from None


@dataclasses.dataclass
class _Peer:
    """A task that has sent its hello and waits for the response."""

    hello: TaskDescription
    channel: Channel
    problem: str | None


class _Meeting:
    """The chief's side: collects a hello from every other task, compares, responds to all."""

    def __init__(self, hello: TaskDescription, timeout_s: float):
        self._hello = hello
        self._address = next(iter(hello.tasks.values()))
        self._expected = {name for name in hello.tasks if name != hello.task}
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._peers: list[_Peer] = []

    def hold(self) -> None:
        notice = notice_of_waiting(
            lambda: f"{self._hello.task} waits for {listed(self._missing())}"
        )
        with HelloServer(self._address, _PROTOCOL, self._greet), notice:
            problem = self._wait()
        response = {"problem": None if problem is None else str(problem)}
        response["kind"] = type(problem).__name__
        with self._changed:
            peers = list(self._peers)
        for peer in peers:
            with contextlib.suppress(OSError):
                peer.channel.send(response)
        # The peers close first, so that no connection in TIME_WAIT keeps the port in use.
        for peer in peers:
            peer.channel.wait_closed(_CLOSE_S)
            peer.channel.close()
        if problem is not None:
            raise problem

    def _greet(self, hello: TaskDescription, channel: Channel) -> None:
        with self._changed:
            self._peers = [g for g in self._peers if not g.channel.closed_by_peer()]
            problem = next(differences(self._hello, hello), None)
            if hello.task == self._hello.task or hello.task in self._names():
                problem = problem or (
                    f"two tasks are {hello.task}: give each task its own index "
                    '("task" in TF_CONFIG, --task_index).'
                )
            self._peers.append(_Peer(hello, channel, problem))
            self._changed.notify_all()

    def _names(self) -> set[str]:
        return {peer.hello.task for peer in self._peers}

    def _wait(self) -> TfmwError | None:
        """The problem that keeps the tasks from starting; None once all agree."""
        deadline = time.monotonic() + self._timeout_s
        # After a problem: until when more tasks may connect and receive it.
        last_call: float | None = None
        with self._changed:
            while True:
                self._peers = [g for g in self._peers if not g.channel.closed_by_peer()]
                problem = next((g.problem for g in self._peers if g.problem), None)
                if problem is None and self._expected <= self._names():
                    return None
                now = time.monotonic()
                last_call = None if problem is None else last_call or now + _STRAGGLER_S
                left_s = min(deadline, last_call or deadline) - now
                all_connected = len(self._peers) >= len(self._expected)
                if problem is not None and (all_connected or left_s <= 0):
                    return ClusterError(problem)
                if left_s <= 0:
                    return absence(self._missing(), self._address, self._timeout_s)
                self._changed.wait(min(left_s, _POLL_S))

    def _missing(self) -> dict[str, str]:
        names = self._expected - self._names()
        return {name: a for name, a in self._hello.tasks.items() if name in names}
