"""`tfmw check`: tests before a run whether a cluster will work.

    TF_CONFIG=... tfmw check --backup-dir /shared/run7     # on every task, at about the same time
    srun tfmw check --backup-dir /shared/run7

Every task listens on its own port and connects to every other task. The two tasks exchange their
names, versions and GPUs. So each pair is tested in both directions, on the ports of the run, and
every task can print all findings. Workers without GPUs also connect to another port of the next
worker, as the ring all-reduce does. The chief writes a marker file into each directory, and the
other tasks look for it.

Standard library only, with two exceptions: TensorFlow in a separate process, which counts the GPUs,
and obstore for directories in a bucket.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from tfmw.cluster import addresses, shared_directories, sockets
from tfmw.cluster import versions as installed
from tfmw.cluster.cluster import Cluster
from tfmw.cluster.handshake import (
    TaskDescription,
    connect,
    differences,
    serve_hellos,
)
from tfmw.cluster.wire import Channel, NotATask
from tfmw.errors import ClusterError
from tfmw.storage import disk

_PROTOCOL = "check"
_CONNECT_S = 5.0
_RETRY_S = 0.1
_SHARED_S = 10.0  # time until a new file is visible on another machine, as NFS caches listings
_CLOCKS_APART_S = 60.0  # a clock without NTP drifts less than this in a month


class Findings:
    """Prints a line for each finding, and counts failures."""

    def __init__(self) -> None:
        self.failures = 0

    def _add(self, kind: str, text: str) -> None:
        self.failures += kind == "failed"
        print(f"{kind}: {text}", flush=True)

    ok = functools.partialmethod(_add, "ok")
    note = functools.partialmethod(_add, "note")
    failed = functools.partialmethod(_add, "failed")


def report(cluster: Cluster, directories: Mapping[str, str], *, timeout_s: float) -> int:
    """Checks a cluster as one of its tasks, and prints the findings.

    Args:
        cluster: the cluster, and which of its tasks this process is.
        directories: option -> directory that all tasks must share, {"--backup_dir": "/shared"}.
        timeout_s: seconds in which the other tasks must connect.

    Returns:
        The exit status: 0, or 1 for problems.
    """
    findings = Findings()
    print(f"checking {cluster!r}", flush=True)
    if cluster.is_public():
        findings.note(
            f"{', '.join(cluster.public_addresses())} is public, and the port of a tf.distribute "
            "server has no authentication: use addresses of a private network"
        )
    tasks = cluster.tasks()
    several = len(tasks) > 1 and cluster.task_name in tasks
    leaves_markers = not several or cluster.task_name == next(iter(tasks))
    with shared_directories.markers(directories if leaves_markers else {}) as (markers, problems):
        for problem in problems:
            findings.failed(problem)

        def own_hello(any_port: int | None = None) -> TaskDescription:
            backend, gpus = installed.ask_tensorflow()  # takes seconds; the port is already open
            if backend != "tensorflow":
                findings.failed(
                    f"the Keras backend is {backend!r} ({gpus}): set KERAS_BACKEND=tensorflow"
                )
            paths = {k: disk.absolute(v) for k, v in directories.items()}
            details = {
                "gpus": gpus if cluster.rank >= 0 else None,
                "markers": markers,
                "any port": any_port,
            }
            facts = {**installed.common_versions(), **paths}
            return TaskDescription(_PROTOCOL, cluster.task_name, tasks, facts, details)

        if several:
            _check_cluster(cluster, own_hello, findings, timeout_s)
        else:
            local = own_hello()
            findings.ok(f"one process; {_listed(local.facts)}; GPUs: {local.details['gpus']}")
            for option, marker in markers.items():
                if marker is not None:
                    findings.ok(f"{option} {local.facts[option]} can be written")
    count = findings.failures
    print("all is well" if not count else f"{count} problem{'s' if count > 1 else ''}", flush=True)
    return 1 if count else 0


def _listed(facts: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {facts[name]}" for name in installed.common_versions())


def _check_cluster(
    cluster: Cluster,
    own_hello: Callable[[int], TaskDescription],
    findings: Findings,
    timeout_s: float,
) -> None:
    others = cluster.tasks()
    address = others.pop(cluster.task_name)
    resolved = _check_names(others, findings)
    if not addresses.is_of_this_machine(address):
        findings.failed(
            f"{address!r}, the address of this task ({cluster.task_name}), is not an "
            "address of this machine: correct the task's index or its address"
        )
    peers = _Peers(cluster, findings)
    with contextlib.ExitStack() as stack, sockets.listen() as any_port:
        try:
            stack.callback(serve_hellos(address, _PROTOCOL, peers.greet).close)
            findings.ok(f"port {addresses.split(address)[1]} of this task is free")
        except ClusterError as error:
            findings.failed(str(error).rstrip("."))
        local = own_hello(any_port.getsockname()[1])
        peers.open(local)
        deadline = time.monotonic() + timeout_s
        problems = peers.connect_all(resolved, deadline)
        for name, problem in problems.items():
            if problem is None:
                findings.ok(f"{name} at {others[name]} is reached")
            else:
                findings.failed(_unreached(name, others[name], problem, timeout_s))
        _compare(local, dict(peers.hellos), findings, min(_SHARED_S, timeout_s))
        _connect_next_in_ring(cluster, local, peers.hellos, findings)
        # A task that exits closes its port, and other tasks may not have connected yet.
        peers.leave([name for name, problem in problems.items() if problem is None], deadline)


def _check_names(others: Mapping[str, str], findings: Findings) -> dict[str, str]:
    """Task -> address, of the tasks whose host names this machine resolves."""
    resolved = {}
    for name, address in others.items():
        host, port = addresses.split(address)
        try:
            socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            resolved[name] = address
        except OSError as error:
            findings.failed(
                f"the name of {name}, {address!r}, is not known here "
                f"({error.strerror or error}): correct it, or add it to DNS or to /etc/hosts on "
                "this machine"
            )
    if len(resolved) == len(others):
        findings.ok("the names of all tasks are known")
    return resolved


def _unreached(name: str, address: str, problem: str, timeout_s: float) -> str:
    start = f"{name} at {address} cannot be reached within {timeout_s:g} s ({problem}): "
    if "refused" in problem:
        return start + (
            "its machine responds and no process listens there; start tfmw check for that task "
            "too, at about the same time, and read its output"
        )
    if "no tfmw check" in problem:
        return start + "stop the process that holds that port, or give the task another one"
    if "TFMW_TOKEN" in problem:
        return start + "set the same value of it for all tasks"
    return start + (
        "is the machine up, is the address right, and does its firewall let this machine through?"
    )


def _compare(
    local: TaskDescription,
    hellos: Mapping[str, TaskDescription],
    findings: Findings,
    patience_s: float,
) -> None:
    """Compares the tasks; both tasks of a pair print its differences."""
    before = findings.failures
    for name, remote in hellos.items():
        for sentence in differences(local, remote):
            findings.failed(sentence.rstrip("."))
        gpus, remote_gpus = local.details["gpus"], remote.details.get("gpus")
        if None not in (gpus, remote_gpus) and gpus != remote_gpus:
            findings.failed(
                f"GPUs differ: {gpus} on {local.task}, {remote_gpus} on {name}; give all workers "
                "the same (CUDA_VISIBLE_DEVICES): synchronous workers train as fast as the "
                "slowest, and with NCCL only if all have GPUs"
            )
        ahead = remote.details["ahead"]
        if abs(ahead) > _CLOCKS_APART_S:
            findings.failed(
                f"the clock of {name} is {ahead:.0f} s from {local.task}'s: set both by NTP, or "
                "logs and backups will be out of order"
            )
        for option, marker in remote.details.get("markers", {}).items():
            path = local.facts.get(option)
            if marker is not None and path is not None and path == remote.facts.get(option):
                problem = shared_directories.find_marker(option, path, marker, name, patience_s)
                if problem is None:
                    findings.ok(f"{option} {path} is shared with {name}, which can write there")
                else:
                    findings.failed(problem)
    if hellos and findings.failures == before:
        gpus = local.details["gpus"] or "not used"
        findings.ok(f"{len(hellos) + 1} tasks agree: {_listed(local.facts)}; GPUs: {gpus}")


def _connect_next_in_ring(
    cluster: Cluster,
    local: TaskDescription,
    hellos: Mapping[str, TaskDescription],
    findings: Findings,
) -> None:
    """Connects to the next worker on a port that its system chose, as the ring all-reduce does."""
    workers = cluster.tasks("chief", "worker")
    if local.details["gpus"] != "none" or local.task not in workers or cluster.has_ps:
        return
    names = list(workers)
    following = names[(names.index(local.task) + 1) % len(names)]
    if following == local.task or following not in hellos:
        return
    host, port = addresses.split(workers[following])[0], hellos[following].details.get("any port")
    try:
        socket.create_connection((host, port), timeout=_CONNECT_S).close()
    except OSError as error:
        findings.note(
            f"{following} is reached on the port of the cluster and on no other (port {port}: "
            f"{error.strerror or error}), so gradients will take TensorFlow's gRPC, which takes "
            "longer: open the ports of /proc/sys/net/ipv4/ip_local_port_range between workers"
        )
    else:
        findings.ok(f"{following} is reached on other ports too, which gradients take")


class _Peers:
    """The other tasks; each connects to this one, and this one to each.

    Attributes:
        hellos: task -> its hello, with "ahead" in its details: seconds by which its clock is.
    """

    def __init__(self, cluster: Cluster, findings: Findings):
        self.hellos: dict[str, TaskDescription] = {}
        self._findings = findings
        self._id = secrets.token_hex(8)
        self._task = cluster.task_name
        self._tasks = cluster.tasks()
        self._hello: Future[TaskDescription] = Future()
        self._changed = threading.Condition()
        # ids of the processes of each task
        self._ids: dict[str, set[str]] = {self._task: {self._id}}
        self._left: set[str] = set()

    def open(self, hello: TaskDescription) -> None:
        """Responds to other tasks from now on, including those that have already connected."""
        self._hello.set_result(hello)

    def connect_all(self, others: Mapping[str, str], deadline: float) -> dict[str, str | None]:
        """Connects to tasks until the deadline: task -> reason of a failure, or None."""

        def connect(name: str) -> str | None:
            while (problem := self._connect(name, deadline)) is not None:
                if time.monotonic() > deadline:
                    break
                time.sleep(_RETRY_S)
            return problem

        with ThreadPoolExecutor(max(1, len(others))) as threads:
            return dict(zip(others, threads.map(connect, others), strict=True))

    def leave(self, reached: Sequence[str], deadline: float) -> None:
        """Notifies the other tasks that this one is done, and waits for them until the deadline."""
        for name in reached:
            self._connect(name, deadline, leaving=True)
        with self._changed:
            remaining = set(self.hellos) & set(self._tasks)
            self._changed.wait_for(
                lambda: remaining <= self._left,
                max(0.0, deadline + _CONNECT_S - time.monotonic()),
            )

    def _own_hello(self, leaving: bool = False) -> TaskDescription:
        hello = self._hello.result()  # known once this task is open
        details = {"id": self._id, "clock": time.time(), "leaving": leaving}
        return dataclasses.replace(hello, details={**hello.details, **details})

    def _connect(self, name: str, deadline: float, *, leaving: bool = False) -> str | None:
        """Exchanges hellos with a task once; returns the problem, or None."""
        try:
            with connect(self._tasks[name], _CONNECT_S) as channel:
                channel.send(self._own_hello(leaving).message())
                # A task that has just started responds once it has imported TensorFlow.
                timeout_s = max(_CONNECT_S, deadline - time.monotonic())
                remote = TaskDescription.of(channel.receive(timeout_s), _PROTOCOL)
            self._record(remote)
        except (NotATask, ConnectionAbortedError):
            return "no tfmw check responds there"
        except TimeoutError:
            return "no response"
        except OSError as error:
            return error.strerror or str(error)
        return None if remote.task == name else f"{remote.task} responds there"

    def greet(self, remote: TaskDescription, channel: Channel) -> None:
        with channel, contextlib.suppress(OSError):
            self._record(remote)
            channel.send(self._own_hello().message())
            # the other side closes first, so that this port is free afterwards
            channel.wait_closed(_CONNECT_S)

    def _record(self, remote: TaskDescription) -> None:
        """Stores another task's hello. Raises NotATask if details are missing."""
        try:
            process, clock = str(remote.details["id"]), float(remote.details["clock"])
            leaving = bool(remote.details["leaving"])
        except (KeyError, TypeError, ValueError):
            raise NotATask from None
        name = remote.task
        with self._changed:
            ids = self._ids.setdefault(name, set())
            if process not in ids and len(ids) == 1:
                self._findings.failed(f"two processes are {name}: give each task its own index")
            ids.add(process)
            if name != self._task:
                details = {**remote.details, "ahead": clock - time.time()}
                self.hellos.setdefault(name, dataclasses.replace(remote, details=details))
            if leaving:
                self._left.add(name)
            self._changed.notify_all()
