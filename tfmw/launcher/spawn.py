"""Starts the processes of a run, and ensures that none outlives the launcher.

    with Spawner(namespaces) as spawner:
        pid, stream = spawner.spawn(["script", "train.py"], stdin, False, [], env)

Linux kills a task when the launcher dies (see `task`), but not the processes that the task has
started. For these there is the reaper, a separate process, which reads a pipe from the launcher. If
the pipe closes without a "bye", the launcher was killed, and the reaper kills every process group
that the launcher had registered. It removes the folders that the launcher would have removed.

A process that a task starts in another session is in no such group. `end_marked` finds it by a
variable in its environment, which differs between attempts.

The reaper runs this file by its path, without the package (`python -I -S`): import only the
standard library at the top.
"""

from __future__ import annotations

import contextlib
import os
import pty
import shutil
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from tfmw.launcher.fork_server import ForkServer

ATTEMPT_MARK = "TFMW_ATTEMPT_MARK"
"""Variable of all processes of an attempt, whose value differs between attempts."""

_POLL_S = 0.01  # interval between two polls of processes that have been killed

TASK_COMMAND = (sys.executable, str(Path(__file__).with_name("task.py")))
"""Command that starts a task; see `task`."""


class Spawner:
    """Starts the processes of a run.

    Args:
        namespaces: descriptors of the namespaces that the processes enter, in order.
    """

    def __init__(self, namespaces: Sequence[int] = ()) -> None:
        self.namespaces = list(namespaces)
        self._fork_server: ForkServer | None = None
        self._keeps_fork_server = False
        self._reaper = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            bufsize=0,
        )

    def __enter__(self) -> Spawner:
        return self

    def __exit__(self, *_: object) -> None:
        if self._fork_server is not None and not self._keeps_fork_server:
            self._fork_server.close()
        self._send_reaper("bye")
        assert self._reaper.stdin is not None
        self._reaper.stdin.close()
        self._reaper.wait()

    def fork_from_now_on(
        self, command: Sequence[str], env: Mapping[str, str], keep: bool = False
    ) -> None:
        """Starts a fork server, from which later processes are forked.

        Args:
            command: the arguments of `task.py` that most of these processes will have.
            env: environment variables that they share.
            keep: whether the fork server is kept for the next run of this process.
        """
        from tfmw.launcher import fork_server  # not at the top: the reaper runs without the package

        env = {**env, "TFMW_LAUNCHER_PID": str(os.getpid())}
        make = fork_server.kept if keep else fork_server.ForkServer
        self._fork_server = make([*TASK_COMMAND, "fork-server"], command, env)
        self._keeps_fork_server = keep
        if not keep:
            self._send_reaper(f"+{self._fork_server.pid}")

    def wait(self, stop: Sequence[int], timeout_s: float) -> None:
        """Waits until the fork server is ready, a signal arrives, or the time is over."""
        if self._fork_server is not None:
            self._fork_server.wait(stop, timeout_s)

    def is_ready(self, wait_s: float) -> bool:
        """Whether tasks can start without waiting for the fork server, after a short wait."""
        return self._fork_server is None or self._fork_server.is_settled(wait_s)

    def spawn(
        self,
        command: Sequence[str],
        stdin: IO[bytes],
        terminal: bool,
        fds: Sequence[int],
        env: Mapping[str, str],
    ) -> tuple[int, int]:
        """Starts a process in a new session of its own. The caller waits for its end.

        Returns:
            Its process id, and the launcher's end of its standard output and error.
        """
        env = {**env, "TFMW_LAUNCHER_PID": str(os.getpid())}
        if self.namespaces:
            env["TFMW_NAMESPACES"] = ",".join(map(str, self.namespaces))  # for example "5,6"
        local, remote = _pseudo_terminal() if terminal else os.pipe()
        fds = [*fds, *self.namespaces]
        try:
            pid: int | None = None
            if self._fork_server is not None:
                streams = {0: stdin.fileno(), 1: remote, 2: remote}
                pid = self._fork_server.fork(command, env, streams | {fd: fd for fd in fds})
            if pid is None:
                process = subprocess.Popen(
                    [*TASK_COMMAND, *command],
                    stdin=stdin,
                    stdout=remote,
                    stderr=remote,
                    env=env,
                    start_new_session=True,
                    pass_fds=fds,
                )
                process.returncode = 0  # the caller waits for its end
                pid = process.pid
        except BaseException:
            os.close(local)
            raise
        finally:
            os.close(remote)
        self._send_reaper(f"+{pid}")
        return pid, local

    def tell_reaper(self, mark: str = "", folder: str = "") -> None:
        """Registers an attempt or a folder, which the reaper removes after a kill.

        Args:
            mark: value of `ATTEMPT_MARK` in an attempt.
            folder: a folder that the launcher removes at the end.
        """
        for sign, text in (("=", mark), ("/", folder)):
            if text and "\n" not in text:
                self._send_reaper(f"{sign}{text}")

    def forget(self, pid: int) -> None:
        """Unregisters an ended process and its group, whose ids the system may reuse."""
        self._send_reaper(f"-{pid}")

    def _send_reaper(self, line: str) -> None:
        assert self._reaper.stdin is not None
        with contextlib.suppress(OSError, ValueError):  # the reaper was killed
            self._reaper.stdin.write(os.fsencode(f"{line}\n"))


def end_marked(mark: str) -> None:
    """Kills all processes of an attempt, in any session.

    Args:
        mark: their value of `ATTEMPT_MARK`.
    """
    variable, found = f"{ATTEMPT_MARK}={mark}".encode(), True
    while found:  # one may have started another meanwhile
        found = False
        for environ in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):  # it belongs to another user, or it has ended
                if variable in environ.read_bytes().split(b"\0"):
                    os.kill(int(environ.parent.name), signal.SIGKILL)
                    found = True
        time.sleep(_POLL_S if found else 0.0)


def reap_orphans(tasks: Container[int]) -> None:
    """Reaps ended children that are not tasks: process 1 of a container gets all orphans.

    Args:
        tasks: process ids that their own `Task` reaps.
    """
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, IndexError):
            # proc_pid_stat(5): "42 (name with ) and spaces) Z 1 ..."
            state, parent = stat.read_text().rpartition(") ")[2].split()[:2]
            pid = int(stat.parent.name)
            if state == "Z" and int(parent) == os.getpid() and pid not in tasks:
                os.waitpid(pid, os.WNOHANG)


def terminal_size() -> os.terminal_size:
    """The size of this process's terminal, or that of a notebook's cell."""
    return shutil.get_terminal_size((120, 24))


def _pseudo_terminal() -> tuple[int, int]:
    """(local, remote) ends of a terminal as wide as this one, so that progress bars fit."""
    local, remote = pty.openpty()
    attributes = termios.tcgetattr(remote)
    attributes[1] &= ~termios.OPOST  # keeps "\n" unchanged
    termios.tcsetattr(remote, termios.TCSANOW, attributes)
    size = terminal_size()
    termios.tcsetwinsize(remote, (size.lines, size.columns))
    return local, remote


def _reap() -> None:
    """Reads until the launcher has exited, or has sent "bye"; main function of the reaper.

    Lines are "+<group>" and "-<group>", "=<mark>" of an attempt, and a folder's path.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # it must outlive the launcher
    groups: set[int] = set()
    marks: list[str] = []
    folders: list[str] = []
    for line in sys.stdin:
        sign, text = line[:1], line[1:].rstrip("\n")
        if sign == "+":
            groups.add(int(text))
        elif sign == "-":
            groups.discard(int(text))
        elif sign == "=":
            marks.append(text)
        elif sign == "/":
            folders.append(text)
        else:
            return
    for group_id in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group_id, signal.SIGKILL)
    for mark in marks:
        end_marked(mark)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    _reap()
