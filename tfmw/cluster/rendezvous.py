"""Rendezvous of all workers, who compare before TensorFlow's servers start.

    rendezvous.meet(cluster, facts={"tensorflow": "2.21.0"}, timeout_s=120)

TensorFlow waits up to an hour for a task that never starts. It trains with half of the workers if
two tasks describe the cluster differently. So the training tasks first connect to the chief's
address over plain TCP. Each sends its hello, the chief compares them, and all receive the same
response: to continue, or the problem as one sentence. `coordination.py` keeps the connections.
Standard library only.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Mapping

from tfmw.cluster import Cluster, addresses
from tfmw.cluster.handshake import (
    TaskDescription,
    absence,
    accepted_by_chief,
    differences,
    listed,
    notice_of_waiting,
    serve_hellos,
)
from tfmw.cluster.wire import Channel
from tfmw.errors import ClusterError, TfmwError

_PROTOCOL = "rendezvous"
_STRAGGLER_S = 10.0  # tasks that are started together connect within this time of each other
_POLL_S = 0.5  # a new connection wakes the chief at once; a closed one does not
_CLOSE_S = 5.0  # time for a task that has received the response to close its connection


def meet(
    cluster: Cluster, facts: Mapping[str, str], *, timeout_s: float = 120.0
) -> dict[int, Channel]:
    """Returns once every training task of `cluster` has connected and agrees.

    Args:
        cluster: a cluster of several training tasks; this process is one of them.
        facts: values that must be the same on every task, by name (versions, options).
        timeout_s: seconds to wait for all tasks.

    Returns:
        Rank -> channel, which stays open: the chief's to each other task, or a task's to the chief.

    Raises:
        ClusterError: the port of this task is taken, or tasks disagree.
        TfmwError: a task did not connect in time; the message names it.
    """
    hello = TaskDescription(_PROTOCOL, cluster.task_name, cluster.tasks("chief", "worker"), facts)
    if cluster.rank == 0:
        return _gather(hello, timeout_s)
    assert cluster.address is not None
    addresses.listen(cluster.address).close()  # fails if the port is taken
    chief = next(iter(hello.tasks.values()))

    def describe(problem: str) -> str:
        return f"{hello.task} waits for the chief at {chief}: {problem}"

    try:
        channel = accepted_by_chief(hello, timeout_s, describe)
    except TimeoutError as problem:
        raise TfmwError(
            f"{hello.task} could not reach the chief at {chief} within {timeout_s:g} s "
            f"({problem}): is that task started, with the same TFMW_TOKEN or none, is its address "
            "right, and is its port open to this machine?"
        ) from None
    return {0: channel}


def _gather(hello: TaskDescription, timeout_s: float) -> dict[int, Channel]:
    """Receives a hello from every other task, compares, and responds to all; on the chief."""
    address = hello.tasks[hello.task]
    changed = threading.Condition()
    # each with the problem of its hello
    peers: list[tuple[TaskDescription, Channel, str | None]] = []

    def missing() -> dict[str, str]:
        names = {hello.task, *(remote.task for remote, _, _ in peers)}
        return {name: a for name, a in hello.tasks.items() if name not in names}

    def forget_closed() -> None:
        peers[:] = [peer for peer in peers if not peer[1].closed_by_peer()]

    def greet(remote: TaskDescription, channel: Channel) -> None:
        with changed:
            forget_closed()
            problem = next(differences(hello, remote), None)
            if remote.task in (hello.task, *(other.task for other, _, _ in peers)):
                problem = problem or (
                    f"two tasks are {remote.task}: give each task its own index "
                    '("task" in TF_CONFIG, --task_index).'
                )
            peers.append((remote, channel, problem))
            changed.notify_all()

    def wait() -> TfmwError | None:
        """The problem that keeps the tasks from starting; None if all agree."""
        deadline = time.monotonic() + timeout_s
        # After a problem: the time until which more tasks may connect and receive it.
        last_call: float | None = None
        with changed:
            while True:
                forget_closed()
                problem = next((problem for _, _, problem in peers if problem), None)
                if problem is None and not missing():
                    return None
                now = time.monotonic()
                last_call = None if problem is None else last_call or now + _STRAGGLER_S
                left_s = min(deadline, last_call or deadline) - now
                if problem is not None and (len(peers) >= len(hello.tasks) - 1 or left_s <= 0):
                    return ClusterError(problem)
                if left_s <= 0:
                    return absence(missing(), address, timeout_s, server)
                changed.wait(min(left_s, _POLL_S))

    server = serve_hellos(address, _PROTOCOL, greet, hello.run)
    try:
        with notice_of_waiting(lambda: f"{hello.task} waits for {listed(missing())}"):
            error = wait()
    finally:
        server.close()
    response = {"problem": None if error is None else str(error), "kind": type(error).__name__}
    with changed:
        by_name = {remote.task: channel for remote, channel, _ in peers}
        channels = [channel for _, channel, _ in peers]
    for channel in channels:
        with contextlib.suppress(OSError):
            channel.send(response)
    if error is None:
        return {rank: by_name[name] for rank, name in enumerate(hello.tasks) if rank}
    # The peers close first, so that no connection in TIME_WAIT keeps the port in use.
    for channel in channels:
        channel.wait_closed(_CLOSE_S)
        channel.close()
    raise error
