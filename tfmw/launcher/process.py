"""One task of a local cluster: its process, log, progress and exit status."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import struct
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from tfmw.cluster.signals import STACKS, STACKS_FILE
from tfmw.launcher import call
from tfmw.launcher.output import collapse
from tfmw.launcher.spawn import Spawner
from tfmw.observe import goodput
from tfmw.observe.goodput import Division
from tfmw.observe.progress import PROGRESS_FILE, Progress
from tfmw.observe.recorded_errors import ERROR_FILE
from tfmw.observe.recorder import EXCHANGES_FILE, RecordedExchange, make_file, read_exchanges

_POLL_S = 0.02  # interval between two reads of a file of stacks


_MAX_UNFINISHED = 1 << 16  # bytes of an unfinished line after which its earlier texts are dropped


def task_name(kind: str, index: int) -> str:
    """Label of a task: "worker 1", "ps 0"; there is one chief and one evaluator."""
    return kind if kind in ("chief", "evaluator") else f"{kind} {index}"


@dataclasses.dataclass(eq=False)
class TaskFiles:
    """Files of one task of this machine, and its process in /proc."""

    kind: str  # "worker", "chief", "ps" or "evaluator"
    index: int  # index among the tasks of its kind
    attempt: Path  # directory of the attempt, with the task's own folder
    restart: int = 0  # number of times that it was restarted alone in this attempt
    pid: int = 0  # id of its process; 0 before the start

    def __post_init__(self) -> None:
        self.name = task_name(self.kind, self.index)
        folder = self.name.replace(" ", "_") + (f".{self.restart}" if self.restart else "")
        self.directory = self.attempt / folder
        self.log = self.directory / "output.log"
        self.files = {
            ERROR_FILE: self.directory / "error.json",
            PROGRESS_FILE: self.directory / "progress",
            EXCHANGES_FILE: self.directory / "exchanges",
            STACKS_FILE: self.directory / "stacks",
        }
        self.division = Division(at=goodput.now())  # division of the run's time before this task
        self.status: int | None = None  # status as in subprocess: -9 is SIGKILL
        self._progress = Progress()

    def make(self) -> None:
        """Creates the files that the task writes at every step, at their full size.

        This way a report never needs disk space.
        """
        self.directory.mkdir(parents=True)
        make_file(self.files[EXCHANGES_FILE])
        self.files[PROGRESS_FILE].write_bytes(Progress(division=self.division).packed())

    def progress(self) -> Progress:
        """The task's last report of progress, even after its files have been removed."""
        with contextlib.suppress(OSError, struct.error):
            self._progress = Progress.unpacked(self.files[PROGRESS_FILE].read_bytes())
        return self._progress

    def exchanges(self) -> list[RecordedExchange]:
        """The task's last exchanges with other workers, in order."""
        return read_exchanges(self.files[EXCHANGES_FILE])

    def stacks(self, timeout_s: float) -> str:
        """Stacks of the task's threads; "" if it does not write them in that time."""
        file = self.files[STACKS_FILE]
        if not self.catches(STACKS):
            return ""
        with contextlib.suppress(OSError):
            os.truncate(file, 0)
        self.signal_alone(STACKS)
        deadline, text = time.monotonic() + timeout_s, ""
        while time.monotonic() < deadline:
            time.sleep(_POLL_S)
            before, text = text, file.read_text(errors="replace") if file.exists() else ""
            if text and text == before:
                break
        return text

    def has_ended(self) -> bool:
        """Whether the task's process has ended."""
        return self._state() in ("", "Z", "X")

    def stopped(self) -> bool:
        """Whether a signal such as SIGSTOP, and not a debugger, has stopped the process."""
        return self._state() == "T"

    def catches(self, number: int) -> bool:
        """Whether the process has a handler for the signal."""
        # proc_pid_status(5): "SigCgt:\t0000000180004a02", bit n - 1 for signal n.
        mask = self._proc("status").partition("SigCgt:")[2].partition("\n")[0]
        return bool(int(mask or "0", 16) >> (number - 1) & 1)

    def _state(self) -> str:
        # proc_pid_stat(5): "42 (name with ) and spaces) T 1 ..."
        return self._proc("stat").rpartition(") ")[2][:1]

    def _proc(self, file: str) -> str:
        """A file that describes the process; "" if there is none."""
        try:
            return Path(f"/proc/{self.pid}/{file}").read_text()
        except OSError:
            return ""

    def error(self) -> dict[str, Any]:
        """The error that the task recorded with `record_error`; empty if it recorded none."""
        try:
            record: dict[str, Any] = json.loads(self.files[ERROR_FILE].read_text())
        except (OSError, ValueError):
            return {}
        return record

    def signal_alone(self, number: int) -> None:
        """Sends a signal to the task's own process only, if it is still running."""
        if not self.has_ended():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, number)


def divisions(tasks: Sequence[TaskFiles]) -> dict[str, Division]:
    """Divisions of the run's time by the tasks that train: the workers, or their coordinator."""
    trains = [task for task in tasks if task.kind == "chief"]
    trains = trains or [task for task in tasks if task.kind == "worker"]
    return {task.name: task.progress().division for task in trains}


@dataclasses.dataclass(eq=False)
class Task(TaskFiles):
    """One process of the cluster, with its role, its log and its exit status."""

    # the task's own variables are added
    env: dict[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        # Absolute, as a script may change its working directory.
        named = {name: os.path.abspath(path) for name, path in self.files.items()}
        self.env = {**self.env, **named, "TFMW_TASK": self.name}
        self.started = self.ended = 0.0  # monotonic seconds, as observed by the launcher
        self.stream: int | None = None  # the launcher's end of its standard output and error
        self._log: IO[bytes] | None = None
        self._unfinished = b""  # the last line of the output
        self._line_at = 0  # position of that line in the log
        self._call: IO[bytes] | None = None  # standard input of the task
        self._result: IO[bytes] | None = None
        self._calls: socket.socket | None = None  # the launcher's end, for a task that stays
        self._remote: socket.socket | None = None  # the task's end, until the start

    def prepare(self, payload: call.Payload | None, stays: bool = False) -> None:
        """Creates its files, and those of its call and result, if it gets a call.

        Args:
            payload: its only call, or None.
            stays: whether it runs the calls that `call` sends, until the end of `leave`.
        """
        self.make()
        if stays:
            self._calls, self._remote = socket.socketpair()
            self.env[call.CALLS_FD] = str(self._remote.fileno())
        elif payload is not None:
            self._call = self._packed(payload)
            self._result = tempfile.TemporaryFile(dir=self.directory)  # noqa: SIM115  (closed in result)
            self.env[call.RESULT_FD] = str(self._result.fileno())

    def _packed(self, payload: call.Payload) -> IO[bytes]:
        """A temporary file with a call."""
        file = tempfile.TemporaryFile(dir=self.directory)  # noqa: SIM115  (the caller closes it)
        call.write(payload, file)
        file.flush()
        file.seek(0)
        return file

    def call(self, payload: call.Payload) -> None:
        """Sends a call to a task that stays; it is lost with a task that has ended."""
        assert self._calls is not None
        self._result = tempfile.TemporaryFile(dir=self.directory)  # noqa: SIM115  (closed in result)
        with self._packed(payload) as file, contextlib.suppress(OSError):
            files = [file.fileno(), self._result.fileno()]
            socket.send_fds(self._calls, [b"c"], files)

    def has_answered(self) -> bool:
        """Whether the result of the call is complete; True once for each call."""
        assert self._calls is not None
        with contextlib.suppress(OSError):  # not yet, or the task has ended
            return self._calls.recv(1, socket.MSG_DONTWAIT) == call.ANSWER
        return False

    def leave(self) -> None:
        """Lets a task that stays end after its last call."""
        assert self._calls is not None
        self._calls.close()

    def start(self, spawner: Spawner, command: Sequence[str], terminal: bool) -> None:
        """Starts the prepared process, which dies with the calling thread (see `task`).

        Its output is a terminal or a pipe; `command` has the arguments of `task.py`.
        """
        self._log = open(self.log, "wb", buffering=0)  # noqa: SIM115  (closed in close)
        self.started = time.monotonic()
        self._spawner = spawner
        fds = [file.fileno() for file in (self._result, self._remote) if file is not None]
        with self._call or open(os.devnull, "rb") as stdin:
            self.pid, self.stream = spawner.spawn(command, stdin, terminal, fds, self.env)
        if self._remote is not None:
            self._remote.close()

    def result(self) -> bytes:
        """The pickled outcome of the call; b"" without a call. Call it once for each call."""
        if self._result is None or self._result.closed:
            return b""
        with self._result as file:
            file.seek(0)
            return file.read()

    def read(self) -> bytes | None:
        """The next bytes that the task wrote; b"" at the end, None if there are none yet."""
        assert self.stream is not None
        try:
            data = os.read(self.stream, 1 << 16)
        except BlockingIOError:
            return None
        except OSError:  # Linux: EIO at the end of a pseudo-terminal
            data = b""
        if data and self._log is not None:
            with contextlib.suppress(OSError):  # a full disk must not end the run
                self._write_log(data)
        return data

    def _write_log(self, data: bytes) -> None:
        """Appends to the log; of an overwritten line, as of a progress bar, the last text."""
        assert self._log is not None
        lines = (self._unfinished + data).split(b"\n")
        texts = [collapse(line) for line in lines]
        self._log.seek(self._line_at)
        self._log.write(b"\n".join(texts))
        self._log.truncate()
        self._unfinished = lines[-1] if len(lines[-1]) <= _MAX_UNFINISHED else texts[-1]
        # a line without an end that is never overwritten
        if len(self._unfinished) > _MAX_UNFINISHED:
            self._unfinished = texts[-1] = b""
        self._line_at = max(0, self._log.tell() - len(texts[-1]))

    def has_ended(self) -> bool:
        """Whether the task has ended. It is a zombie until `close`, so its group keeps its id."""
        if not self.pid or self.status is not None:
            return True
        found = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if found is not None:
            exited = found.si_code == os.CLD_EXITED
            self.status = found.si_status if exited else -found.si_status
            self.ended = time.monotonic()
        return self.status is not None

    def signal(self, number: int) -> None:
        """Sends a signal to the task and to all processes of its session's first group."""
        if self.pid:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)

    def close(self) -> None:
        """Frees the resources of the ended process."""
        if self.pid:
            os.waitpid(self.pid, 0)
            self._spawner.forget(self.pid)
        if self._calls is not None:
            self._calls.close()
        if self.stream is not None:
            os.close(self.stream)
            self.stream = None
        if self._log is not None:
            error = self.error()
            if error.get("usage"):  # the task leaves this message to the launcher
                with contextlib.suppress(OSError):
                    self._log.write(f"tfmw: {error['message']}\n".encode())
            self._log.close()
