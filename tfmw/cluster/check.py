"""`tfmw check`: tests before a run whether a cluster will work.

    TF_CONFIG=... tfmw check --backup-dir /shared/run7     # on every task, at about the same time
    srun tfmw check --backup-dir /shared/run7

Every task listens on its own port and connects to every other task. The two tasks exchange their
names, versions and GPUs. So each pair is tested in both directions, on the ports of the run, and
every task can print all findings. Workers without GPUs also connect to another port of the next
worker, as the ring all-reduce does. The chief writes a marker file into each directory, and the
other tasks look for it.

Standard library only, with two exceptions: TensorFlow in a separate process, which counts the GPUs,
and `tf.io.gfile` for directories that are URLs.
"""

from __future__ import annotations

import dataclasses
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

from tfmw.cluster import addresses, shared_directories
from tfmw.cluster.check_peers import CONNECT_S, PROTOCOL, Peers
from tfmw.cluster.cluster import Cluster
from tfmw.cluster.handshake import TaskDescription, differences
from tfmw.runtime import sockets
from tfmw.runtime import versions as installed

_SHARED_S = 10.0  # until a new file is visible on another machine: NFS caches listings
_CLOCKS_APART_S = 60.0  # more than a clock without NTP loses in a month


@dataclasses.dataclass
class Findings:
    """The printed lines, one for each finding, and the number of failures.

    Args:
        show: prints a line.
    """

    show: Callable[[str], None]
    failures: int = 0

    def ok(self, text: str) -> None:
        self.show(f"ok: {text}")

    def note(self, text: str) -> None:
        self.show(f"note: {text}")

    def failed(self, text: str) -> None:
        self.failures += 1
        self.show(f"failed: {text}")


def report(
    cluster: Cluster,
    directories: Mapping[str, str],
    *,
    timeout_s: float = 60.0,
    show: Callable[[str], None] = lambda line: print(line, flush=True),
    find_devices: Callable[[], tuple[str, str]] = installed.ask_tensorflow,
) -> int:
    """Checks a cluster as one of its tasks, and prints what it finds.

    Args:
        cluster: the cluster, and which of its tasks this process is.
        directories: option -> directory that all tasks must share, {"--backup_dir": "/shared"}.
        timeout_s: seconds in which the other tasks must connect.
        show: prints a line.
        find_devices: returns the Keras backend, and the GPUs that TensorFlow sees here.

    Returns:
        The exit status: 0, or 1 for problems.
    """
    findings = Findings(show)
    show(f"checking {cluster!r}")
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
            backend, gpus = find_devices()  # takes seconds; the port is already open
            if backend != "tensorflow":
                findings.failed(
                    f"the Keras backend is {backend!r} ({gpus}): set KERAS_BACKEND=tensorflow"
                )
            paths = {k: shared_directories.absolute(v) for k, v in directories.items()}
            details = {
                "gpus": gpus if cluster.rank >= 0 else None,
                "markers": markers,
                "any port": any_port,
            }
            facts = {**installed.common_versions(), **paths}
            return TaskDescription(PROTOCOL, cluster.task_name, tasks, facts, details)

        if several:
            _check_cluster(cluster, own_hello, findings, timeout_s)
        else:
            _check_single(own_hello(), directories, findings)
    count = findings.failures
    show("all is well" if not count else f"{count} problem{'s' if count > 1 else ''}")
    return 1 if count else 0


def _listed(facts: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {facts[name]}" for name in installed.common_versions())


def _check_single(
    local: TaskDescription, directories: Mapping[str, str], findings: Findings
) -> None:
    findings.ok(f"one process; {_listed(local.facts)}; GPUs: {local.details['gpus']}")
    for option, marker in local.details["markers"].items():
        if marker is not None:
            findings.ok(f"{option} {local.facts[option]} can be written")


def _check_cluster(
    cluster: Cluster,
    own_hello: Callable[[int], TaskDescription],
    findings: Findings,
    timeout_s: float,
) -> None:
    """The check of a cluster of several tasks."""
    assert cluster.address is not None
    others = {n: a for n, a in cluster.tasks().items() if n != cluster.task_name}
    resolved = _check_names(others, findings)
    if not addresses.is_local(cluster.address):
        findings.failed(
            f"{cluster.address!r}, the address of this task ({cluster.task_name}), is not an "
            "address of this machine: correct the task's index or its address"
        )
    any_port = sockets.listen()
    with Peers(cluster, findings.failed) as peers, any_port:
        if peers.listens:
            findings.ok(f"port {addresses.split(cluster.address)[1]} of this task is free")
        local = own_hello(any_port.getsockname()[1])
        peers.open(local)
        deadline = time.monotonic() + timeout_s
        problems = peers.connect_all(resolved, deadline)
        for name, problem in problems.items():
            if problem is None:
                findings.ok(f"{name} at {others[name]} is reached")
            else:
                findings.failed(_unreached(name, others[name], problem, timeout_s))
        _compare(local, peers, findings, min(_SHARED_S, timeout_s))
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
    return start + (
        "is the machine up, is the address right, and does its firewall let this machine through?"
    )


def _compare(local: TaskDescription, peers: Peers, findings: Findings, patience_s: float) -> None:
    """Compares the tasks; both tasks of a pair print its differences."""
    before = findings.failures
    hellos = dict(peers.hellos)
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
        ahead = peers.clocks_ahead[name]
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
        socket.create_connection((host, port), timeout=CONNECT_S).close()
    except OSError as error:
        findings.note(
            f"{following} is reached on the port of the cluster and on no other (port {port}: "
            f"{error.strerror or error}), so gradients will take TensorFlow's gRPC, which takes "
            "longer: open the ports of /proc/sys/net/ipv4/ip_local_port_range between workers"
        )
    else:
        findings.ok(f"{following} is reached on other ports too, which gradients take")
