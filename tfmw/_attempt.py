"""All tasks of a local cluster, once: started, watched, ended.

    attempt = Attempt(layout, command, directory, environ, display)
    attempt.start()      # fresh processes, each in a session of its own
    attempt.watch()      # until all are done, one has failed, or a signal came
    attempt.end()        # TERM, grace, KILL; no process is left
    attempt.failures()   # the cause first

A run is one attempt; what restarts a run makes another one, with its own ports and folder.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import itertools
import json
import os
import pty
import random
import selectors
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import IO, Any

from tfmw import _call
from tfmw._output import Display
from tfmw._record import ERROR_FILE
from tfmw.errors import UsageError

GRACE_S = 1.0
"""Seconds between SIGTERM and SIGKILL. TensorFlow's strategy replaces SIGTERM's handler."""

SETTLE_S = 0.5
"""Seconds to wait for the cause where the first failure seen is only a lost peer's echo."""

FAREWELL_S = 10.0
"""Seconds in which serving tasks (ps, and workers beside them) leave once the chief is done."""

POLL_S = 0.05

TASK_COMMAND = (sys.executable, str(Path(__file__).with_name("_task.py")))
"""Starts a task; see `_task`."""

_SIGNAL_HINTS = {
    signal.SIGKILL: "killed by someone, or by the kernel because memory ran out",
    signal.SIGSEGV: "a crash in native code",
    signal.SIGABRT: "native code gave up",
}


# ---- signals -----------------------------------------------------------------------------------


class Signals:
    """Notes SIGINT, SIGTERM and SIGHUP instead of dying of them, inside a `with`.

    Only the main thread can set handlers; elsewhere this notes nothing, and a KeyboardInterrupt
    goes its usual way. A signal that is ignored (nohup) stays ignored.
    """

    def __init__(self) -> None:
        self.received: list[int] = []
        self._before: dict[int, Any] = {}

    @property
    def hurry(self) -> bool:
        """Whether somebody asked again."""
        return len(self.received) > 1

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received.append(number)


# ---- ports -------------------------------------------------------------------------------------


@contextlib.contextmanager
def reserved_ports(count: int) -> Iterator[list[int]]:
    """Finds `count` free TCP ports of this machine; nobody else gets them inside the `with`.

    They are taken from below the ephemeral ports where there is room: an outgoing connection can't
    take one between the end of the `with` and the moment a task listens on it.
    """
    with contextlib.ExitStack() as held:
        ports = []
        for port in _candidate_ports():
            listener = _bind(port)
            if listener is not None:
                held.enter_context(listener)
                ports.append(listener.getsockname()[1])
            if len(ports) == count:
                break
        yield ports


def _candidate_ports() -> Iterator[int]:
    try:
        # ip(7): "32768 60999", the first and the last port for outgoing connections.
        top = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        top = 32768
    chance = random.Random()  # not the user's seeded global generator
    if top > 11000:
        yield from chance.sample(range(10000, top), 1000)
    yield from itertools.repeat(0)  # any port the system likes


def _bind(port: int) -> socket.socket | None:
    """A socket bound to the port on all addresses, as TensorFlow's server will be; None: taken."""
    for family, anywhere in ((socket.AF_INET6, "::"), (socket.AF_INET, "")):
        try:
            listener = socket.socket(family, socket.SOCK_STREAM)
        except OSError:
            continue
        try:
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            listener.bind((anywhere, port))
            return listener
        except OSError as error:
            listener.close()
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                return None
    raise UsageError("no TCP socket can be opened on this machine; tfmw run needs a network stack.")


# ---- one task ----------------------------------------------------------------------------------


def task_name(kind: str, index: int) -> str:
    """The task's label: "worker 1", "ps 0"; there is one chief and one evaluator."""
    return kind if kind in ("chief", "evaluator") else f"{kind} {index}"


class Task:
    """One process of the cluster: its place, its log, its end."""

    def __init__(self, kind: str, index: int, directory: Path, env: Mapping[str, str]) -> None:
        self.kind = kind
        self.index = index
        self.name = task_name(kind, index)
        self.directory = directory / self.name.replace(" ", "_")
        self.log = self.directory / "output.log"
        self.env = {
            **env,
            ERROR_FILE: str(self.directory / "error.json"),
            "TFMW_TASK": self.name,
        }
        self.status: int | None = None  # as in subprocess: -9 is SIGKILL
        self.started = 0.0
        self.ended = 0.0  # monotonic seconds, as seen by the launcher
        self.stream: int | None = None  # our end of its standard output and error
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None

    def start(
        self, command: Sequence[str], stdin: IO[bytes] | int, terminal: bool, fds: Sequence[int]
    ) -> None:
        """Starts the process; it dies with the calling thread (see `_task`)."""
        self.directory.mkdir(parents=True)
        self._log = open(self.log, "wb", buffering=0)  # noqa: SIM115  (closed in close)
        self.stream, theirs = _pseudo_terminal() if terminal else os.pipe()
        self.started = time.monotonic()
        try:
            self._process = subprocess.Popen(
                command,
                stdin=stdin,
                stdout=theirs,
                stderr=theirs,
                env=self.env,
                start_new_session=True,
                pass_fds=fds,
            )
        finally:
            os.close(theirs)

    def read(self) -> bytes:
        """What the task wrote since; b"" at the end."""
        assert self.stream is not None
        try:
            data = os.read(self.stream, 1 << 16)
        except OSError:  # Linux says EIO where a pseudo-terminal ends
            data = b""
        if data and self._log is not None:
            with contextlib.suppress(OSError):  # a full disk must not end the run
                self._log.write(data)
        return data

    def look(self) -> bool:
        """Whether the task has ended. It stays a zombie until `close`: its group keeps its id."""
        if self._process is None or self.status is not None:
            return True
        found = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if found is not None:
            exited = found.si_code == os.CLD_EXITED
            self.status = found.si_status if exited else -found.si_status
            self.ended = time.monotonic()
        return self.status is not None

    def error(self) -> dict[str, Any] | None:
        """What the task recorded with `record_error`."""
        try:
            record: dict[str, Any] = json.loads(Path(self.env[ERROR_FILE]).read_text())
        except (OSError, ValueError):
            return None
        return record

    def signal(self, number: int) -> None:
        """Sends a signal to the task and to all processes of its session's first group."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)

    def close(self) -> None:
        """Frees what belongs to the ended process."""
        if self._process is not None:
            self._process.wait()
        if self.stream is not None:
            os.close(self.stream)
            self.stream = None
        if self._log is not None:
            self._log.close()


def _pseudo_terminal() -> tuple[int, int]:
    """(ours, theirs): a terminal as wide as ours, so that progress bars know what they write to."""
    ours, theirs = pty.openpty()
    attributes = termios.tcgetattr(theirs)
    attributes[1] &= ~termios.OPOST  # "\n" stays "\n"
    termios.tcsetattr(theirs, termios.TCSANOW, attributes)
    size = shutil.get_terminal_size()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", size.lines, size.columns, 0, 0))
    return ours, theirs


# ---- all tasks, once ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Failure:
    """The first task that failed, and why.

    Args:
        task: its name, "worker 1".
        error: its own error in one line, "ValueError: bad batch"; "" where it left none.
        status: its exit status, -9 for SIGKILL.
        how: the status in words: "exit status 1", "SIGKILL (...)"; "" where it isn't its own.
        detail: the last lines of its traceback, or of its log.
        log: where its output is.
        seconds: from the start of the task to its failure.
        usage: whether it told of a wrong usage or cluster description.
    """

    task: str
    error: str
    status: int
    how: str
    detail: tuple[str, ...]
    log: Path
    seconds: float
    usage: bool


class Attempt:
    """One start of all tasks, watched until it is decided how it went, and ended.

    Args:
        layout: (kind, index) of each task.
        command: the arguments of `_task.py`: "script", its path, its flags.
        directory: where the tasks' folders go; made by `start`.
        env: environment of the tasks, without what is particular to each.
        display: what the tasks write goes there.
        live: name of the task that gets a terminal.
        payload: standard input of each task; with it each task also gets a file for its result.
        stop: says which signal asks to end, and whether to be quick about it.
    """

    def __init__(
        self,
        layout: Sequence[tuple[str, int]],
        command: Sequence[str],
        directory: Path,
        env: Mapping[str, str],
        display: Display,
        *,
        live: str | None = None,
        payload: bytes | None = None,
        grace_s: float = GRACE_S,
        settle_s: float = SETTLE_S,
        farewell_s: float = FAREWELL_S,
        stop: Signals | None = None,
    ) -> None:
        self.tasks = [Task(kind, index, directory, env) for kind, index in layout]
        self._results: dict[str, IO[bytes]] = {}
        self._command = [*TASK_COMMAND, *command]
        self._directory = directory
        self._display = display
        self._live = live
        self._payload = payload
        self._grace_s, self._settle_s, self._farewell_s = grace_s, settle_s, farewell_s
        self._stop = stop or Signals()
        self._selector = selectors.DefaultSelector()
        self._ended_at = float("inf")  # when we began to end the tasks

    def start(self) -> None:
        """Starts all tasks. The ports are held until the moment before."""
        with contextlib.ExitStack() as inputs:
            payloads = [self._prepare(task, inputs) for task in self.tasks]
            with reserved_ports(sum(task.kind != "evaluator" for task in self.tasks)) as ports:
                self._describe(ports)
            for rank, (task, (stdin, fds)) in enumerate(zip(self.tasks, payloads, strict=True)):
                task.env |= {
                    "TFMW_LAUNCHER_PID": str(os.getpid()),
                    "TFMW_LOCAL_TASKS": str(len(self.tasks)),
                    "TFMW_LOCAL_RANK": str(rank),
                }
                task.start(self._command, stdin, task.name == self._live, fds)
                assert task.stream is not None
                self._selector.register(task.stream, selectors.EVENT_READ, task)

    def _prepare(
        self, task: Task, inputs: contextlib.ExitStack
    ) -> tuple[IO[bytes] | int, list[int]]:
        """Standard input and inherited descriptors of a task."""
        if self._payload is None:
            return subprocess.DEVNULL, []
        stdin = inputs.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
        stdin.write(self._payload)
        stdin.seek(0)
        result = tempfile.TemporaryFile()  # noqa: SIM115  (closed in close)
        self._results[task.name] = result
        task.env[_call.RESULT_FD] = str(result.fileno())
        return stdin, [result.fileno()]

    def _describe(self, ports: Sequence[int]) -> None:
        """Gives each task its TF_CONFIG."""
        cluster: dict[str, list[str]] = {}
        members = [task for task in self.tasks if task.kind != "evaluator"]
        for task, port in zip(members, ports, strict=True):
            cluster.setdefault(task.kind, []).append(f"127.0.0.1:{port}")
        for task in self.tasks:
            own = {"type": task.kind, "index": task.index}
            task.env["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": own})

    def watch(self) -> None:
        """Returns when all tasks are done, one has failed, or the run is to stop."""
        serving = self._serving()
        patience = float("inf")
        while not self._stop.received and not self._display.broken:
            self._pump(POLL_S)
            ended = [task.look() for task in self.tasks]
            if any(self._failed(task) for task in self.tasks):
                self._settle()
                return
            if all(ended):
                return
            if serving and all(task.look() for task in self.tasks if task not in serving):
                patience = min(patience, time.monotonic() + self._farewell_s)
                if time.monotonic() >= patience:
                    return

    def end(self) -> None:
        """Ends every task and every process they left: TERM, grace, KILL. Safe to call twice."""
        self._ended_at = min(self._ended_at, time.monotonic())
        running = [task for task in self.tasks if not task.look()]
        for task in running:
            task.signal(signal.SIGTERM)
            task.signal(signal.SIGCONT)  # a stopped task sees the SIGTERM
        deadline = time.monotonic() + self._grace_s
        while time.monotonic() < deadline and not self._stop.hurry and not self._all_ended():
            self._pump(POLL_S / 5)
        for task in self.tasks:
            task.signal(signal.SIGKILL)
        while not self._all_ended():
            self._pump(POLL_S / 5)
        self._drain()
        for task in self.tasks:
            task.close()
        self._selector.close()

    def failures(self) -> list[Failure]:
        """The tasks that failed on their own, the cause first."""
        failed = [(task, task.error()) for task in self.tasks if self._failed(task)]
        if all(_is_secondary(record) for _, record in failed):
            # The cause may be in a task that told of its error and hung instead of leaving.
            failed += [
                (task, record)
                for task in self.tasks
                if not self._failed(task)
                and (record := task.error()) is not None
                and record["monotonic"] <= self._ended_at
            ]
        failed.sort(key=lambda pair: (_is_secondary(pair[1]), _failed_at(*pair)))
        return [_failure(task, record, self._ended_at) for task, record in failed]

    def outcomes(self) -> dict[str, _call.Outcome | None]:
        """What the function that was the payload gave in each task. Once, after `end`."""
        found = {}
        for name, file in self._results.items():
            with file:
                found[name] = _call.outcome(file)
        return found

    def _failed(self, task: Task) -> bool:
        """Whether the task failed by itself, not because we ended it."""
        if task.status is not None and task.ended <= self._ended_at:
            return task.status != 0
        # It told of its end, and may hang in the threads or atexit handlers it leaves by.
        record = task.error()
        return record is not None and record["fatal"] and record["monotonic"] <= self._ended_at

    def _serving(self) -> list[Task]:
        """The tasks that serve the chief of a cluster with parameter servers."""
        if not any(task.kind == "ps" for task in self.tasks):
            return []
        return [task for task in self.tasks if task.kind in ("ps", "worker")]

    def _settle(self) -> None:
        """Gives those that failed a moment to leave by themselves, and the cause one to show.

        The first task to die may be one that only lost the task that is to blame.
        """
        deadline = time.monotonic() + self._settle_s
        while time.monotonic() < deadline and not self._stop.received and not self._all_ended():
            failed = [task for task in self.tasks if self._failed(task)]
            known = not all(_is_secondary(task.error()) for task in failed)
            if known and all(task.look() for task in failed):
                return
            self._pump(POLL_S / 5)

    def _all_ended(self) -> bool:
        looks = [task.look() for task in self.tasks]  # at every one, for the time of its end
        return all(looks)

    def _pump(self, timeout_s: float) -> bool:
        """Passes on what the tasks wrote; returns whether there was anything."""
        ready = self._selector.select(timeout_s) if self._selector.get_map() else []
        if not ready and not self._selector.get_map():
            time.sleep(timeout_s)
        for key, _ in ready:
            task: Task = key.data
            data = task.read()
            self._display.feed(task.name, data, final=not data)
            if not data:
                self._selector.unregister(key.fd)
        return bool(ready)

    def _drain(self) -> None:
        """Passes on the rest. Someone outside the groups may hold a stream open: no waiting."""
        while self._selector.get_map() and self._pump(0):
            pass
        for key in list(self._selector.get_map().values()):
            self._display.feed(key.data.name, b"", final=True)


def _is_secondary(record: Mapping[str, Any] | None) -> bool:
    return bool(record and record["secondary"])


def _failed_at(task: Task, record: Mapping[str, Any] | None) -> float:
    return float(record["monotonic"]) if record else task.ended


def _failure(task: Task, record: Mapping[str, Any] | None, ended_at: float) -> Failure:
    error, detail = "", _tail(task.log)
    # A task that told of its error and then had to be ended shows a status that isn't its own.
    how = describe_status(task.status) if task.ended <= ended_at else ""
    if record is not None:
        message = record["message"].strip() or "(no message)"
        first = message.splitlines()[0][:500]
        if record["type"] != "SystemExit":
            error = message if record["usage"] else f"{record['type']}: {first}"
            detail = () if record["usage"] else tuple(record["traceback"].splitlines()[-12:])
        elif message.isdecimal():  # sys.exit(3)
            how = f"exit status {message}"
        else:  # sys.exit("no data")
            error = first
    return Failure(
        task=task.name,
        error=error,
        status=task.status or 0,
        how=how,
        detail=detail,
        log=task.log,
        seconds=_failed_at(task, record) - task.started,
        usage=bool(record and record["usage"]),
    )


def _tail(log: Path, lines: int = 12) -> tuple[str, ...]:
    try:
        with open(log, "rb") as file:
            file.seek(max(0, log.stat().st_size - 8192))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return ()
    return tuple(text.rstrip().splitlines()[-lines:])


def describe_status(status: int | None) -> str:
    """An exit status in words: "exit status 3", "SIGKILL (killed by someone, ...)"."""
    if status is None:
        return "still running"
    if status >= 0:
        return f"exit status {status}"
    try:
        number = signal.Signals(-status)
    except ValueError:
        return f"signal {-status}"
    hint = _SIGNAL_HINTS.get(number)
    return f"{number.name} ({hint})" if hint else number.name
