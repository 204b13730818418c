"""`tfmw check`: is this cluster going to work, asked before a run.

    TF_CONFIG=... tfmw check --backup-dir /shared/run7     # on every task, at about the same time
    srun tfmw check --backup-dir /shared/run7

Every task listens on its own port, calls on every other task, and both tell each other who they
are and what they have; so each pair is tried in both directions, on the ports that the run will
use, and every task can say by itself what is wrong. Workers without GPUs try the next one's other
ports too, as tfmw's ring will. Versions are compared with the chief's. The chief leaves a word in
each directory, and the others look for it.

Standard library only, but for TensorFlow in a process of its own, which counts the GPUs, and
`tf.io.gfile` where a directory is a URL.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from typing import Any

from tfmw.cluster import addresses
from tfmw.cluster.cluster import Cluster
from tfmw.errors import ClusterError
from tfmw.runtime import versions as installed

_MAX_LINE = 1 << 20  # bytes
_CALL_S = 5.0  # for one call
_RETRY_S = 0.1
_SHARED_S = 10.0  # until a new file is seen on another machine: NFS looks again after a while
_CLOCKS_APART_S = 60.0  # more than what an unattended clock loses in a month

Say = Callable[[str], None]


@dataclasses.dataclass
class Verdict:
    """What is said of a cluster, line by line, and how much of it is bad."""

    say: Say
    problems: int = 0

    def ok(self, text: str) -> None:
        self.say(f"ok: {text}")

    def failed(self, text: str) -> None:
        self.problems += 1
        self.say(f"failed: {text}")


def report(
    cluster: Cluster,
    directories: Mapping[str, str],
    *,
    timeout_s: float = 60.0,
    say: Say = lambda line: print(line, flush=True),
    ask: Callable[[], tuple[str, str]] = installed.ask_tensorflow,
) -> int:
    """Checks a cluster as one of its tasks, and says what it finds. Returns 0, or 1 for problems.

    Args:
        cluster: the cluster, and which of its tasks this process is.
        directories: option -> directory that all tasks are to share, {"--backup_dir": "/shared"}.
        timeout_s: seconds in which the other tasks must come.
        say: gets each line.
        ask: the Keras backend, and the GPUs that TensorFlow sees here.
    """
    verdict = Verdict(say)
    say(f"checking {cluster!r}")
    if cluster.is_public():
        public = ", ".join(cluster.public_addresses())
        say(
            f"note: {public} is public, and the port of a tf.distribute server asks for no "
            "password: keep it in a private network"
        )
    tasks = tasks_of(cluster)
    mine = next((n for n, a in tasks.items() if a == cluster.address), "this process")
    chief = next(iter(tasks), mine)
    with _words(directories if mine in (chief, "this process") else {}, verdict) as words:

        def facts() -> dict[str, Any]:
            backend, gpus = ask()  # takes seconds: the port is open meanwhile
            if backend != "tensorflow":
                verdict.failed(
                    f"the Keras backend is {backend!r} ({gpus}): set KERAS_BACKEND=tensorflow"
                )
            where = {k: os.path.abspath(v) if _local(v) else v for k, v in directories.items()}
            return {
                "tasks": tasks,
                "versions": versions(),
                "gpus": gpus if cluster.rank >= 0 else None,
                "directories": where,
                "words": words,
            }

        if len(tasks) <= 1 or mine not in tasks:
            _alone(facts(), verdict)
        else:
            _among(tasks, mine, facts, verdict, timeout_s)
    count = verdict.problems
    say("all is well" if not count else f"{count} problem{'s' if count > 1 else ''}")
    return 1 if count else 0


def tasks_of(cluster: Cluster) -> dict[str, str]:
    """Name -> address of each task, the one that decides first."""
    jobs = {"chief": cluster.chief, "worker": cluster.workers, "ps": cluster.ps}
    jobs["evaluator"] = cluster.evaluators
    return {
        job if job == "chief" else f"{job} {i}": address
        for job, addresses in jobs.items()
        for i, address in enumerate(addresses)
    }


def versions() -> dict[str, str]:
    """What every task must have alike."""
    found = {"Python": ".".join(map(str, sys.version_info[:2]))}
    for package in ("tensorflow", "keras", "numpy", "tfmw"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def _alone(facts: dict[str, Any], verdict: Verdict) -> None:
    said = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    verdict.ok(f"one process; {said}; GPUs: {facts['gpus']}")
    for option, word in facts["words"].items():
        if word is not None:
            verdict.ok(f"{option} {facts['directories'][option]} can be written")


def _among(
    tasks: dict[str, str],
    mine: str,
    find_facts: Callable[[], dict[str, Any]],
    verdict: Verdict,
    timeout_s: float,
) -> None:
    """The check of a cluster of several tasks."""
    others = {name: address for name, address in tasks.items() if name != mine}
    unknown = _unresolved(others)
    for name, why in unknown.items():
        verdict.failed(
            f"the name of {name}, {others[name]!r}, is not known here ({why}): correct it, or add "
            "it to DNS or to /etc/hosts on this machine"
        )
    if not unknown:
        verdict.ok("the names of all tasks are known")
    if not addresses.is_local(tasks[mine]):
        verdict.failed(
            f"{tasks[mine]!r}, the address of this task ({mine}), is not this machine's: is this "
            "another task, or another machine? Correct the task's index or its address"
        )
    any_port = addresses.listen(f"{addresses.split(tasks[mine])[0]}:0")
    with _Desk(mine, tasks[mine], verdict) as desk, any_port:
        facts = {**find_facts(), "any port": any_port.getsockname()[1]}
        desk.open(facts)
        deadline = time.monotonic() + timeout_s
        reached = desk.call_all({n: a for n, a in others.items() if n not in unknown}, deadline)
        for name, in_vain in reached.items():
            if in_vain is None:
                verdict.ok(f"{name} at {others[name]} is reached")
            else:
                verdict.failed(_unreached(name, others[name], in_vain, timeout_s))
        _compare(mine, dict(desk.heard), facts, verdict, min(_SHARED_S, timeout_s))
        _call_next_in_ring(mine, tasks, dict(desk.heard), facts["gpus"], verdict)
        # A task that goes closes its port, and the others may not have called yet.
        desk.part([n for n, in_vain in reached.items() if in_vain is None], others, deadline)


def _unresolved(others: Mapping[str, str]) -> dict[str, str]:
    """{task: why} for those whose names are not known."""
    found = {}
    for name, address in others.items():
        host, port = addresses.split(address)
        try:
            socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            found[name] = error.strerror or str(error)
    return found


def _unreached(name: str, address: str, why: str, timeout_s: float) -> str:
    start = f"{name} at {address} cannot be reached within {timeout_s:g} s ({why}): "
    if "refused" in why:
        return start + (
            "its machine answers and nobody listens there; start tfmw check for that task too, at "
            "about the same time, and see what it says"
        )
    if "no tfmw check" in why:
        return start + "stop the process that holds that port, or give the task another one"
    return start + (
        "is the machine up, is the address right, and does its firewall let this machine through?"
    )


def _compare(
    mine: str,
    heard: Mapping[str, dict[str, Any]],
    facts: dict[str, Any],
    verdict: Verdict,
    patience_s: float,
) -> None:
    """Compares what the tasks have; each difference is told by both tasks that have it."""
    before = verdict.problems
    for name, theirs in heard.items():
        for what, advice in (
            ("tasks", "give every task the same description of the cluster"),
            ("directories", "give every task the same directories"),
        ):
            for key in sorted({*facts[what], *theirs[what]}):
                a, b = facts[what].get(key), theirs[what].get(key)
                if a != b:
                    verdict.failed(
                        f"{key} is {_or_nothing(a)} for {mine}, {_or_nothing(b)} for {name}: "
                        f"{advice}"
                    )
        for key in sorted({*facts["versions"], *theirs["versions"]}):
            a, b = facts["versions"].get(key), theirs["versions"].get(key)
            if a != b:
                verdict.failed(
                    f"{key} is {_or_nothing(a)} on {mine}, {_or_nothing(b)} on {name}: install the "
                    "same version on every task"
                )
        if None not in (facts["gpus"], theirs["gpus"]) and facts["gpus"] != theirs["gpus"]:
            verdict.failed(
                f"GPUs differ: {facts['gpus']} on {mine}, {theirs['gpus']} on {name}; give all "
                "workers the same (CUDA_VISIBLE_DEVICES): they make each step together, as fast as "
                "the slowest, and with NCCL only where all have some"
            )
        if abs(theirs["clock ahead"]) > _CLOCKS_APART_S:
            verdict.failed(
                f"the clock of {name} is {theirs['clock ahead']:.0f} s from {mine}'s: set both by "
                "NTP, or logs and backups will be out of order"
            )
        for option, word in theirs["words"].items():
            where = facts["directories"].get(option)
            if word is not None and where is not None and where == theirs["directories"][option]:
                _look(option, where, word, name, verdict, patience_s)
    if heard and verdict.problems == before:
        said = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
        verdict.ok(f"{len(heard) + 1} tasks agree: {said}; GPUs: {facts['gpus'] or 'not used'}")


def _call_next_in_ring(
    mine: str,
    tasks: Mapping[str, str],
    heard: Mapping[str, dict[str, Any]],
    gpus: str | None,
    verdict: Verdict,
) -> None:
    """Calls on the next worker on a port that its system chose, as gradients will (tfmw.ring)."""
    workers = [name for name in tasks if name == "chief" or name.startswith("worker")]
    in_ring = gpus == "none" and mine in workers and not any(n.startswith("ps") for n in tasks)
    after = workers[(workers.index(mine) + 1) % len(workers)] if in_ring else mine
    host, port = addresses.split(tasks[after])[0], heard.get(after, {}).get("any port")
    if after == mine or port is None:
        return
    try:
        socket.create_connection((host, port), timeout=_CALL_S).close()
    except OSError as error:
        verdict.say(
            f"note: {after} is reached on the port of the cluster and on no other (port {port}: "
            f"{error.strerror or error}), so gradients will take TensorFlow's gRPC, which takes "
            "longer: open the ports of /proc/sys/net/ipv4/ip_local_port_range between workers"
        )
    else:
        verdict.ok(f"{after} is reached on other ports too, which sums of gradients take")


def _or_nothing(value: Any) -> str:
    return "nothing" if value is None else repr(value)


# ---- the tasks call on each other -----------------------------------------------------------


class _Desk:
    """Listens on this task's port, and calls on the others."""

    def __init__(self, mine: str, address: str, verdict: Verdict):
        self.heard: dict[str, dict[str, Any]] = {}
        self._id = secrets.token_hex(8)
        self._mine = mine
        self._facts: dict[str, Any] = {}
        self._ready = threading.Event()
        self._parted: set[str] = set()
        self._changed = threading.Condition()
        self._twice: set[str] = set()
        self._verdict = verdict
        self._server: socketserver.ThreadingTCPServer | None = None
        try:
            listener = addresses.listen(address)
        except ClusterError as error:
            verdict.failed(str(error).rstrip("."))
            return
        verdict.ok(f"port {addresses.split(address)[1]} of this task is free")
        desk = self

        class Caller(socketserver.StreamRequestHandler):
            timeout = _CALL_S

            def handle(self) -> None:
                with contextlib.suppress(OSError):
                    if desk._hear(self.rfile.readline(_MAX_LINE)) is not None:
                        desk._ready.wait()
                        self.wfile.write(desk._line())
                        self.rfile.read(1)  # the caller hangs up first: the port is left free

        self._server = socketserver.ThreadingTCPServer(("", 0), Caller, bind_and_activate=False)
        self._server.daemon_threads = True
        self._server.socket.close()
        self._server.socket = listener
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def open(self, facts: dict[str, Any]) -> None:
        """From now on callers, who may be waiting, are answered."""
        self._facts = facts
        self._ready.set()

    def __enter__(self) -> _Desk:
        return self

    def __exit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()

    def _line(self, parting: bool = False) -> bytes:
        said = {"from": self._mine, "id": self._id, "clock": time.time(), "parting": parting}
        return json.dumps({"tfmw check": said, "facts": self._facts}).encode() + b"\n"

    def _hear(self, line: bytes) -> str | None:
        """Notes what another task says; returns its name, None where it is not one of ours."""
        try:
            hello = json.loads(line)
            said, facts = hello["tfmw check"], hello["facts"]
            name = str(said["from"])
            facts["clock ahead"] = float(said["clock"]) - time.time()
            who, parting = said["id"], said["parting"]
            for part in ("tasks", "versions", "directories", "words"):
                facts[part].get("")
            facts["gpus"]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None
        with self._changed:
            known = self.heard.get(name, {}).get("id", who)
            if (name == self._mine or known != who) and name not in self._twice:
                self._twice.add(name)
                self._verdict.failed(
                    f"two processes call themselves {name}: give each task an index of its own"
                )
            facts["id"] = who
            if name != self._mine:
                self.heard.setdefault(name, facts)
            if parting:
                self._parted.add(name)
            self._changed.notify_all()
        return name

    def call_all(self, others: Mapping[str, str], deadline: float) -> dict[str, str | None]:
        """{task: why it was not reached by the deadline; None for those that were}."""
        reached: dict[str, str | None] = {}

        def call(name: str, address: str) -> None:
            while True:
                why = self._call(address, deadline, expected=name)
                if why is None or time.monotonic() > deadline:
                    reached[name] = why
                    return
                time.sleep(_RETRY_S)

        threads = [threading.Thread(target=call, args=each) for each in others.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return {name: reached[name] for name in others}

    def _call(
        self, address: str, deadline: float, *, expected: str, parting: bool = False
    ) -> str | None:
        """Calls on a task once; returns why that was in vain, or None."""
        host, port = addresses.split(address)
        try:
            with socket.create_connection((host, port), timeout=_CALL_S) as peer:
                peer.sendall(self._line(parting))
                # Who has just begun answers once TensorFlow is imported there.
                peer.settimeout(max(_CALL_S, deadline - time.monotonic()))
                line = peer.makefile("rb").readline(_MAX_LINE)
        except TimeoutError:
            return "no answer"
        except OSError as error:
            return error.strerror or str(error)
        name = self._hear(line)
        if name is None:
            return "no tfmw check answers there"
        return None if name == expected else f"{name} answers there"

    def part(self, reached: list[str], others: Mapping[str, str], deadline: float) -> None:
        """Tells the others that this task is done; waits until they are, or the deadline passes."""
        for name in reached:
            self._call(others[name], deadline, expected=name, parting=True)
        with self._changed:
            waits = set(self.heard) & set(others)
            self._changed.wait_for(
                lambda: waits <= self._parted, max(0.0, deadline + _CALL_S - time.monotonic())
            )


# ---- directories ----------------------------------------------------------------------------


def _local(path: str) -> bool:
    return "://" not in path


@contextlib.contextmanager
def _words(directories: Mapping[str, str], verdict: Verdict) -> Iterator[dict[str, str | None]]:
    """A new file in each directory: option -> its name; None where it could not be written.

    A directory that is missing is made, as the run would make it, and removed at the end.
    """
    with contextlib.ExitStack() as held:
        words: dict[str, str | None] = {}
        for option, path in directories.items():
            try:
                words[option] = held.enter_context(_word(path))
            except _gfile_errors() as error:
                words[option] = None
                why = getattr(error, "strerror", None) or getattr(error, "message", str(error))
                verdict.failed(
                    f"{option} {path} cannot be written ({why}): make it, give this user the right "
                    "to write there, or name another one"
                )
        yield words


@contextlib.contextmanager
def _word(path: str) -> Iterator[str]:
    word = f".tfmw-check-{secrets.token_hex(8)}"
    if not _local(path):
        import tensorflow as tf

        tf.io.gfile.makedirs(path)
        with tf.io.gfile.GFile(os.path.join(path, word), "w") as file:
            file.write(word)
        try:
            yield word
        finally:
            tf.io.gfile.remove(os.path.join(path, word))
        return
    missing = []
    parent = os.path.abspath(path)
    while not os.path.exists(parent):
        missing.append(parent)
        parent = os.path.dirname(parent)
    os.makedirs(path, exist_ok=True)
    file_path = os.path.join(path, word)
    try:
        with open(file_path, "x") as file:
            file.write(word)
            file.flush()
            os.fsync(file.fileno())
        yield word
    finally:
        with contextlib.suppress(OSError):
            os.remove(file_path)
        for directory in missing:
            with contextlib.suppress(OSError):
                os.rmdir(directory)


def _gfile_errors() -> tuple[type[BaseException], ...]:
    if "tensorflow" not in sys.modules:
        return (OSError,)
    return (OSError, sys.modules["tensorflow"].errors.OpError)


def _look(
    option: str, path: str, word: str, chief: str, verdict: Verdict, patience_s: float
) -> None:
    """Looks for the file that the chief has left."""
    deadline = time.monotonic() + patience_s
    while True:
        if _read(os.path.join(path, word)) == word:
            verdict.ok(f"{option} {path} is shared with {chief}, which can write there")
            return
        if time.monotonic() > deadline:
            verdict.failed(
                f"{option} {path} is not the same here as on {chief}: mount one file system there "
                "on all machines (NFS, Lustre), or name a gs:// or s3:// path"
            )
            return
        time.sleep(_RETRY_S)


def _read(path: str) -> str | None:
    try:
        if _local(path):
            with open(path) as file:
                return file.read()
        import tensorflow as tf

        with tf.io.gfile.GFile(path) as remote:
            text: str = remote.read()
            return text
    except _gfile_errors():
        return None
