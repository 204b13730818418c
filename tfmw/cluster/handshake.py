"""Protocol by which tasks of a cluster compare: each sends a hello, a message over TCP.

    tasks = {"worker 0": "h0:2222", ...}
    local = TaskDescription("rendezvous", "worker 1", tasks, {"keras": "3.15.1"})

    def greet(remote: TaskDescription, channel: Channel) -> None: ...      # in a thread for each
    server = serve_hellos("h0:2222", "rendezvous", greet)

    with connect("h0:2222", timeout_s=5) as channel:
        channel.send(local.message())
        response = channel.receive(timeout_s=30)

    list(differences(local, remote))   # a sentence for each; none if the tasks agree

`rendezvous`, `servers` and `check` use it. With TFMW_TOKEN in the environment both sides of each
connection first prove that they know it (`wire.prove`): no other process can send a hello. Without
it a forged hello is accepted as that of a task. Connections from other programs (port scanners, web
browsers, another service because of a wrong port) are closed and have no effect. A task of another
run or attempt that still runs cannot join. Standard library only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tfmw.cluster import addresses, wire
from tfmw.cluster.cluster import TOKEN
from tfmw.cluster.wire import Channel, NotATask
from tfmw.errors import ClusterError, TfmwError
from tfmw.observe.trackers import RUN_ID
from tfmw.storage.fence import ATTEMPT

logger = logging.getLogger("tfmw")

_HELLO_S = 30.0  # time for the hello of a peer that has connected
_NOTICE_S = 3.0  # a task that waits longer logs the reason
_CONNECT_S = 5.0
_RETRY_S = 0.05
_LATE_S = 5.0  # the chief may have been started later than a task that waits for its response


def token() -> bytes | None:
    """The secret of the training, or None."""
    return os.environ.get(TOKEN, "").encode() or None


def own_run() -> str:
    """Id of the attempt of this process's run; "" if no launcher started it."""
    run = os.environ.get(RUN_ID, "")
    return run and f"{run}, attempt {os.environ.get(ATTEMPT) or 0}"


@dataclasses.dataclass(frozen=True)
class TaskDescription:
    """A task's description of itself and of the cluster."""

    protocol: str  # purpose of the connection; hellos for another one are rejected
    task: str  # name of the task, such as "worker 1"
    tasks: Mapping[str, str]  # name -> address of every task, as this task's description has it
    facts: Mapping[
        str, Any
    ]  # name -> value that must be the same on every task (versions, options)
    # values that may differ between tasks
    details: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    run: str = dataclasses.field(default_factory=own_run)  # "" joins tasks of any run

    def message(self) -> dict[str, Any]:
        """The hello as a JSON object."""
        fields = dataclasses.asdict(self)
        return {"tfmw": fields.pop("protocol"), **fields}

    @classmethod
    def of(cls, message: Mapping[str, Any], protocol: str) -> TaskDescription:
        """The hello in a message.

        Raises:
            NotATask: the message is not a hello of this protocol.
        """
        types = {"task": str, "tasks": dict, "facts": dict, "details": dict, "run": str}
        fields = {name: message.get(name) for name in types}
        valid = all(isinstance(fields[name], kind) for name, kind in types.items())
        if message.get("tfmw") != protocol or not valid:
            raise NotATask
        hello = cls(protocol, **fields)  # type: ignore[arg-type]
        if hello.task not in hello.tasks:  # not a valid `Cluster`
            raise NotATask
        return hello


def differences(local: TaskDescription, remote: TaskDescription) -> Iterator[str]:
    """One sentence for each difference between two tasks, those of the cluster first."""
    yield from _cluster_differences(local, remote)
    for name in sorted({*local.facts, *remote.facts}):
        a, b = local.facts.get(name, "nothing"), remote.facts.get(name, "nothing")
        if a != b:
            yield (
                f"tasks disagree about {name}: {local.task} has {a}, {remote.task} has {b}. "
                "Use the same on every task."
            )


def _cluster_differences(local: TaskDescription, remote: TaskDescription) -> Iterator[str]:
    advice = 'Give every task the same "cluster" in TF_CONFIG.'
    jobs = dict.fromkeys(name.partition(" ")[0] for name in (*local.tasks, *remote.tasks))
    for job in jobs:
        a, b = (
            sum(name.partition(" ")[0] == job for name in hello.tasks) for hello in (local, remote)
        )
        if a != b:
            jobs_of_local = job if job == "ps" or a == 1 else f"{job}s"
            yield (
                f"tasks disagree about the cluster: {local.task} lists {a} {jobs_of_local}, "
                f"{remote.task} lists {b}. {advice}"
            )
    for name, address in local.tasks.items():
        if name in remote.tasks and remote.tasks[name] != address:
            yield (
                f"tasks disagree about the cluster: {name} is at {address!r} for {local.task}, "
                f"at {remote.tasks[name]!r} for {remote.task}. {advice}"
            )


@contextlib.contextmanager
def notice_of_waiting(describe: Callable[[], str]) -> Iterator[None]:
    """Logs one line if the body takes longer than a few seconds.

    Args:
        describe: returns the line, with the waiting task and the reason.
    """
    timer = threading.Timer(_NOTICE_S, lambda: logger.warning("%s", describe()))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def absence(
    missing: Mapping[str, str], chief: str, timeout_s: float, server: wire.Server
) -> TfmwError:
    """The error of a chief to which some tasks, name -> address, have not connected."""
    refused = server.refused
    return TfmwError(
        f"{listed(missing)} did not connect within {timeout_s:g} s: start "
        f"{'it' if len(missing) == 1 else 'them'}, or check that the chief's address {chief} can "
        "be reached from there."
        + (f" {refused} connection(s) did not know this training's TFMW_TOKEN." if refused else "")
    )


def listed(tasks: Mapping[str, str]) -> str:
    """The tasks, name -> address, in messages: "worker 1 (h1:2222), worker 2 (h2:2222)"."""
    return ", ".join(f"{name} ({address})" for name, address in tasks.items())


def accepted_by_chief(
    hello: TaskDescription,
    patience_s: float,
    describe: Callable[[str], str],
    response_s: float | None = None,
) -> Channel:
    """The channel to the chief, which has responded that it agrees with this task's hello.

    Args:
        hello: the hello of this task; the first of its tasks is the chief.
        patience_s: seconds in which the chief must respond.
        describe: (the last problem) -> the line that is logged if this takes longer.
        response_s: seconds for the response of a chief that has accepted the connection; by default
            the rest of `patience_s`, and a little longer.

    Raises:
        ClusterError or TfmwError: the problem that the chief has found.
        TimeoutError: it did not respond; with the last problem.
    """
    chief = next(iter(hello.tasks.values()))
    deadline = time.monotonic() + patience_s
    problem = "no response"
    with notice_of_waiting(lambda: describe(problem)):
        while True:
            left_s = max(_RETRY_S, deadline - time.monotonic())
            try:
                with contextlib.ExitStack() as undo:
                    channel = undo.enter_context(connect(chief, min(left_s, _CONNECT_S)))
                    channel.send(hello.message())
                    response = channel.receive(response_s or left_s + _LATE_S)
                    if "problem" not in response:
                        raise NotATask
                    if response["problem"]:
                        kind = TfmwError if response.get("kind") == "TfmwError" else ClusterError
                        raise kind(response["problem"])
                    undo.pop_all()
                    return channel
            except OSError as error:
                # Alternatively the chief closed without a response: another task is missing, or it
                # is the chief of an earlier attempt.
                problem = error.strerror or str(error)
            if time.monotonic() >= deadline:
                raise TimeoutError(problem)
            time.sleep(_RETRY_S)


def connect(address: str, timeout_s: float) -> Channel:
    """A channel to the process at "host:port"; both know the token, if there is one.

    Raises:
        OSError: no process listens there, or it does not know the token.
    """
    peer = socket.create_connection(addresses.split(address), timeout=timeout_s)
    if (key := token()) is not None:
        try:
            wire.prove(peer, key)
        except TimeoutError:
            raise wire.NotAMember(
                "the process there does not prove that it knows TFMW_TOKEN: set the same on "
                "every task, or on none"
            ) from None
    return Channel(peer)


def serve_hellos(
    address: str, protocol: str, greet: Callable[[TaskDescription, Channel], None], run: str = ""
) -> wire.Server:
    """Listens on this task's address and calls a function for each peer that sends a hello.

    Args:
        address: address of this task.
        protocol: purpose of the hellos; other connections are closed.
        greet: called with (a peer's hello, the channel to it) in a thread of its own; closes the
            channel.
        run: run of this task. Connections of another run are closed, unless one of both has none.

    Raises:
        ClusterError: the port is taken.
    """

    def receive_hello(peer: socket.socket) -> tuple[TaskDescription, Channel]:
        channel = Channel(peer)
        try:
            hello = TaskDescription.of(channel.receive(_HELLO_S), protocol)
            if run and hello.run and hello.run != run:
                logger.warning(
                    "%s at %s is of another run (%s), and cannot join this one (%s): end it",
                    hello.task,
                    channel.peer_host(),
                    hello.run,
                    run,
                )
                raise NotATask
        except OSError as error:
            logger.debug("a connection to the port of this task was closed: %s", error)
            channel.close()
            raise
        return hello, channel

    return wire.Server(
        addresses.listen(address),
        token(),
        lambda peer: greet(*peer),
        f"tfmw-{protocol}",
        receive_hello,
    )
