"""Several supervisors on this machine: `tfmw run --hosts ... --max-restarts N`, one process each.

    with Hosts(tmp_path, 2, "--max-restarts", "5", program="restart_fit.py", flags=[...]) as hosts:
        hosts.wait_for(1, r"made step 7 (\\d+)")
        hosts.kill(1)                              # the supervisor, and its tasks with it
        hosts.start(1)
        assert hosts.end() == [0, 0]

Hosts are addresses of loopback, which need no rights, or network namespaces (`Namespaces`), whose
cables can be cut.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.helpers.cluster import MARK, ONE_THREAD, PROGRAMS, PYTHONPATH, forked, marked
from tests.helpers.template import Run
from tfmw.cluster.sockets import reserved_ports
from tfmw.storage.bucket import Bucket
from tfmw.storage.leased_object import DirectoryObjects

BRIDGE, NETWORK = "tfmwbr", "10.88.7"


class Loopback:
    """Addresses of loopback as hosts. A host whose cable is cut is stopped instead.

    Args:
        count: how many.
        why: there are no namespaces.
    """

    def __init__(self, count: int, why: str = "") -> None:
        self.addresses = [f"127.0.0.{i + 1}" for i in range(count)]
        self.why = why

    def command(self, host: int) -> list[str]:
        """Prefix of a command that is to run on a host."""
        return []

    def namespace(self, host: int) -> str:
        """Path of the network namespace of a host; "" if it has none."""
        return ""

    def cut(self, hosts: Hosts, host: int) -> None:
        """Stops a host's processes."""
        hosts.signal_all(host, signal.SIGSTOP)

    def mend(self, hosts: Hosts, host: int) -> None:
        """Restores the connection between these hosts and the host."""
        hosts.signal_all(host, signal.SIGCONT)


@contextlib.contextmanager
def network(count: int) -> Iterator[Loopback | Namespaces]:
    """Namespaces where this machine allows them, and loopback otherwise, with the reason.

    TFMW_TEST_NAMESPACES=0 chooses loopback.
    """
    with contextlib.ExitStack() as stack:
        try:
            if os.environ.get("TFMW_TEST_NAMESPACES") == "0":
                raise PermissionError("TFMW_TEST_NAMESPACES is 0")
            found: Loopback | Namespaces = stack.enter_context(Namespaces(count))
        except PermissionError as error:
            print(f"hosts are addresses of loopback: {error}")
            found = Loopback(count, str(error))
        yield found


class Namespaces:
    """Network namespaces on a bridge, as hosts; as root.

    Args:
        count: how many; their addresses are 10.88.7.1, 10.88.7.2, ...

    Raises:
        PermissionError: this machine does not allow it; the message names the right.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self.addresses = [f"{NETWORK}.{i + 1}" for i in range(count)]

    def __enter__(self) -> Namespaces:
        # One at a time on this machine: names and addresses are the same for all runs of the tests,
        # and each process of a run has a temporary folder of its own.
        self._turn = open("/tmp/tfmw-namespaces.lock", "w")
        fcntl.flock(self._turn, fcntl.LOCK_EX)
        self._remove()
        try:
            _ip("link", "add", BRIDGE, "type", "bridge")
            _ip("addr", "add", f"{NETWORK}.254/24", "dev", BRIDGE)
            _ip("link", "set", BRIDGE, "up")
            for i, address in enumerate(self.addresses):
                _ip("netns", "add", f"tfmwh{i}")
                _ip(
                    "link", "add", f"tfmwv{i}", "type", "veth", "peer", "eth0", "netns", f"tfmwh{i}"
                )
                _ip("link", "set", f"tfmwv{i}", "master", BRIDGE, "up")
                _ip("-n", f"tfmwh{i}", "addr", "add", f"{address}/24", "dev", "eth0")
                _ip("-n", f"tfmwh{i}", "link", "set", "eth0", "up")
                _ip("-n", f"tfmwh{i}", "link", "set", "lo", "up")
        except (OSError, subprocess.CalledProcessError) as error:
            self._leave()
            detail = getattr(error, "stderr", None) or error
            raise PermissionError(
                f"no network namespaces: CAP_SYS_ADMIN and CAP_NET_ADMIN are needed ({detail})"
            ) from error
        return self

    def __exit__(self, *_: object) -> None:
        self._leave()

    def _leave(self) -> None:
        self._remove()
        self._turn.close()

    def _remove(self) -> None:
        for i in range(self._count):
            for command in (["netns", "del", f"tfmwh{i}"], ["link", "del", f"tfmwv{i}"]):
                subprocess.run(["ip", *command], capture_output=True, check=False)
        subprocess.run(["ip", "link", "del", BRIDGE], capture_output=True, check=False)

    def command(self, host: int) -> list[str]:
        """Prefix of a command for a host; not `ip netns exec`, which hides /sys/fs/cgroup."""
        return ["nsenter", f"--net={self.namespace(host)}"]

    def namespace(self, host: int) -> str:
        """Path of the network namespace of a host."""
        return f"/var/run/netns/tfmwh{host}"

    def cut(self, hosts: Hosts | None, host: int) -> None:
        """Takes a host's cable out: not a word comes through any more."""
        _ip("link", "set", f"tfmwv{host}", "down")

    def mend(self, hosts: Hosts | None, host: int) -> None:
        """Puts it back."""
        _ip("link", "set", f"tfmwv{host}", "up")


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


class Hosts:
    """Supervisors, and what they print.

    Args:
        folder: for backups, results and logs.
        cables: the hosts, or how many addresses of loopback.
        *options: of `tfmw run`.
        program: in tests/programs, or any other path.
        flags: of the program.
        env: added to the environment.
        first: starts, and leads, before the others start; None: all start at once.
        bucket: URL of the lock and the record; "" for `lock`.
        forked: supervisors are forked from a process that has imported TensorFlow. The tests then
            end the tasks that outlive a supervisor, so no test may kill one.
    """

    def __init__(
        self,
        folder: Path,
        cables: Loopback | Namespaces | int,
        *options: str,
        program: str = "restart_fit.py",
        flags: Sequence[str] = (),
        env: dict[str, str] | None = None,
        first: int | None = None,
        bucket: str = "",
        forked: bool = False,
    ) -> None:
        self._first = first
        self._forked = forked
        self._bucket = bucket
        self.folder = folder
        self.lock = folder / "backup" / "supervisors"
        """Path of the lock, with the leader's record beside it."""
        self.cables = Loopback(cables) if isinstance(cables, int) else cables
        count = len(self.cables.addresses)
        with reserved_ports(1) as (port,):
            self.addresses = [f"{host}:{port}" for host in self.cables.addresses]
        path = PROGRAMS / program
        options += (f"--rendezvous={bucket}",) if bucket else ()
        self._command = ["--hosts", ",".join(self.addresses), *options]
        self._program = [str(path if path.exists() else program), *flags]
        (folder / "results").mkdir(exist_ok=True)
        self._mark = uuid.uuid4().hex
        environ = {k: v for k, v in os.environ.items() if k not in ("TF_CONFIG", "TFMW_TTY")}
        self._env = {
            **environ,
            **ONE_THREAD,
            "PYTHONPATH": PYTHONPATH,
            "TFMW_RESULT": str(folder / "results"),
            **(env or {}),
            MARK: self._mark,
        }
        self.processes: list[subprocess.Popen[str] | Forked | None] = [None] * count
        self.lines: list[list[str]] = [[] for _ in range(count)]
        self.times: list[list[float]] = [[] for _ in range(count)]
        self._seen = [0] * count
        self._started: list[subprocess.Popen[str] | Forked] = []
        self._news = threading.Condition()
        self._readers: list[threading.Thread] = []

    def __enter__(self) -> Hosts:
        if self._first is not None:
            self.start(self._first)
            self.wait_for_leader(other_than=-1)
        for host in range(len(self.processes)):
            if host != self._first:
                self.start(host)
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            if process is not None:
                process.kill()
        for pid in marked(self._mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self._started:
            process.wait()
        for reader in self._readers:
            reader.join()

    def command(self, host: int) -> list[str]:
        """The command of a host's supervisor."""
        return [sys.executable, "-m", "tfmw", *self._arguments(host)]

    def _arguments(self, host: int) -> list[str]:
        return ["run", "--host-index", str(host), *self._command, *self._program]

    def start(self, host: int, **env: str) -> None:
        """Starts a host's supervisor."""
        environ = {**self._env, **env}
        process: subprocess.Popen[str] | Forked
        if self._forked:
            namespace = self.cables.namespace(host)
            process = Forked(forked(*self._arguments(host), env=environ, network=namespace))
        else:
            process = subprocess.Popen(
                [*self.cables.command(host), *self.command(host)],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env=environ,
            )
        self.processes[host] = process
        self._started.append(process)
        reader = threading.Thread(target=self._read, args=(host, process))
        reader.start()
        self._readers.append(reader)

    def _read(self, host: int, process: subprocess.Popen[str] | Forked) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            with self._news:
                self.lines[host].append(line.rstrip("\n"))
                self.times[host].append(time.monotonic())
                self._news.notify_all()
        if isinstance(process, subprocess.Popen):
            process.stdout.close()
        with self._news:
            self.lines[host].append("")
            self.times[host].append(time.monotonic())
            self._news.notify_all()

    def wait_for(
        self, host: int, pattern: str, timeout_s: float = 60.0, since: int = 0
    ) -> tuple[int, re.Match[str]]:
        """Waits until a host prints a line that matches, from the since-th line on.

        Returns:
            The number of the line after it, and the match.
        """
        deadline = time.monotonic() + timeout_s
        at = since
        with self._news:
            while True:
                for line in self.lines[host][at:]:
                    at += 1
                    if found := re.search(pattern, line):
                        return at, found
                if not self._news.wait(deadline - time.monotonic()):
                    raise AssertionError(f"host {host} prints no {pattern!r}:\n{self.output()}")

    def wait_for_any(
        self, pattern: str, timeout_s: float = 90.0, since: Sequence[int] | None = None
    ) -> tuple[int, re.Match[str]]:
        """Waits until any host prints a line that matches; returns which, and the last match.

        Args:
            since: the first line to look at, of each host; None: after those seen by this method.
        """
        deadline = time.monotonic() + timeout_s
        with self._news:
            seen = self._seen if since is None else list(since)
            while True:
                for host, lines in enumerate(self.lines):
                    while seen[host] < len(lines):
                        seen[host] += 1
                        if found := re.search(pattern, lines[seen[host] - 1]):
                            return host, found
                if not self._news.wait(deadline - time.monotonic()):
                    raise AssertionError(f"no host prints {pattern!r}:\n{self.output()}")

    def restart(self, host: int) -> None:
        """Starts a supervisor that was killed, once it has ended."""
        process = self.processes[host]
        assert process is not None
        process.wait()
        self.start(host)

    def now(self, host: int) -> int:
        """Number of lines that a host has printed, for `since`."""
        with self._news:
            return len(self.lines[host])

    def steps(
        self, host: int, count: int = 1, hosts: int | None = None, timeout_s: float = 90.0
    ) -> tuple[int, float]:
        """Waits for new steps on a host, in an attempt of so many hosts.

        Returns:
            The last of them, and when it was made, in monotonic seconds.
        """
        at, deadline = self.now(host), time.monotonic() + timeout_s
        while True:
            for _ in range(count):
                left_s = max(0.0, deadline - time.monotonic())
                at, found = self.wait_for(host, r"\] step (\d+) at ([\d.]+)", left_s, since=at)
            if hosts is None or len(self.record()["hosts"]) == hosts:
                return int(found[1]), float(found[2])

    def name(self, host: int) -> str:
        """Name of a host in messages."""
        return self.cables.addresses[host]

    def signal_all(self, host: int, number: int) -> None:
        """Sends a signal to all processes of a host."""
        process = self.processes[host]
        assert process is not None
        for pid in [*_descendants(process.pid), process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def wait_for_leader(self, other_than: int, timeout_s: float = 60.0) -> int:
        """Waits until another host leads; returns which."""
        deadline = time.monotonic() + timeout_s
        while (leader := self.leader()) == other_than:
            assert time.monotonic() < deadline, self.output()
            with self._news:
                self._news.wait(0.2)
        return leader

    def kill(self, host: int, number: int = signal.SIGKILL) -> None:
        """Sends a signal to a host's supervisor; its tasks end with it."""
        process = self.processes[host]
        assert process is not None
        process.send_signal(number)

    def leader(self) -> int:
        """Index of the leading host, from the record beside the lock; -1 if none leads yet."""
        try:
            return int(self.record()["leader"])
        except FileNotFoundError:
            return -1

    def record(self) -> dict[str, Any]:
        """The leader's last record."""
        objects = Bucket(self._bucket) if self._bucket else DirectoryObjects(str(self.lock))
        content = objects.read("LEADER")
        data: dict[str, Any] | None = content and json.loads(content[0])["data"]
        if data is None:
            raise FileNotFoundError
        return data

    def end(self, timeout_s: float = 120.0) -> list[int]:
        """Waits for all supervisors; returns their exit statuses. No process is left."""
        deadline = time.monotonic() + timeout_s
        statuses = []
        for process in self.processes:
            assert process is not None
            try:
                statuses.append(process.wait(max(0.1, deadline - time.monotonic())))
            except subprocess.TimeoutExpired:
                raise AssertionError(f"no end:\n{self.output()}") from None
        for reader in self._readers:
            reader.join(timeout=30)
        assert not (left := marked(self._mark)), f"processes survive the run: {left}"
        return statuses

    def results(self) -> list[dict[str, Any]]:
        """Results of the workers of the last attempt, in order."""
        files = sorted((self.folder / "results").glob("worker_*.json"))
        return [json.loads(file.read_text()) for file in files]

    def said(self, host: int) -> list[str]:
        """Output of a host's supervisor itself."""
        return [line for line in self.lines[host] if line.startswith("tfmw: ")]

    def output(self) -> str:
        """Everything, for messages."""
        return "\n".join(
            f"---- host {host}\n" + "\n".join(lines[-60:]) for host, lines in enumerate(self.lines)
        )


class Forked:
    """A forked supervisor, with what is asked of a `Popen` here."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._ended: int | None = None
        self._handle = os.pidfd_open(run.pid)
        self.pid = run.pid
        self.stdout = run.lines()

    def send_signal(self, number: int) -> None:
        if self._ended is None:
            signal.pidfd_send_signal(self._handle, number)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        if self._ended is None:
            if not select.select([self._handle], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("tfmw", timeout or 0.0)
            self._ended, left = self._run.wait()
            os.close(self._handle)
            assert self._ended < 0 or not left, f"processes survive the run: {left}"
        return self._ended


def _descendants(pid: int) -> list[int]:
    """Children of a process, and theirs."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*"):
        with contextlib.suppress(OSError):
            for child in map(int, (task / "children").read_text().split()):
                found += [child, *_descendants(child)]
    return found
