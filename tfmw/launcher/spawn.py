"""Starts the processes of a run, and ensures that none outlives the launcher.

    with Spawner(namespaces) as spawner:
        pid, stream = spawner.spawn(["script", "train.py"], stdin, False, [], env)

Linux kills a task when the launcher dies (see `task`), but not the processes that the task has
started. For these there is the reaper, a separate process, which reads a pipe from the launcher. If
the pipe closes without a "bye", the launcher was killed, and the reaper kills every process group
that the launcher had registered.

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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from tfmw.launcher.fork_server import ForkServer

TASK_COMMAND = (sys.executable, str(Path(__file__).with_name("task.py")))
"""Starts a task; see `task`."""


class Spawner:
    """Starts the processes of a run.

    Args:
        namespaces: descriptors of the namespaces that the processes enter, in this order.
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
        """Whether tasks can start without waiting for the fork server; waits a moment for it."""
        return self._fork_server is None or self._fork_server.is_settled(wait_s)

    def spawn(
        self,
        command: Sequence[str],
        stdin: IO[bytes],
        terminal: bool,
        fds: Sequence[int],
        env: Mapping[str, str],
    ) -> tuple[int, int]:
        """Starts a process in a new session, whose id is its own. The caller waits for its end.

        Returns:
            Its process id, and this end of its standard output and error.
        """
        env = {**env, "TFMW_LAUNCHER_PID": str(os.getpid())}
        if self.namespaces:
            env["TFMW_NAMESPACES"] = ",".join(map(str, self.namespaces))  # "5,6"
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

    def forget(self, pid: int) -> None:
        """Unregisters an ended process and its group, whose ids the system may reuse."""
        self._send_reaper(f"-{pid}")

    def _send_reaper(self, line: str) -> None:
        assert self._reaper.stdin is not None
        with contextlib.suppress(OSError, ValueError):  # the reaper was killed
            self._reaper.stdin.write(f"{line}\n".encode())


def terminal_size() -> os.terminal_size:
    """The size of this process's terminal, or that of a notebook's cell."""
    return shutil.get_terminal_size((120, 24))


def _pseudo_terminal() -> tuple[int, int]:
    """(local, remote) ends of a terminal as wide as this one, so progress bars fit."""
    local, remote = pty.openpty()
    attributes = termios.tcgetattr(remote)
    attributes[1] &= ~termios.OPOST  # keeps "\n" unchanged
    termios.tcsetattr(remote, termios.TCSANOW, attributes)
    size = terminal_size()
    termios.tcsetwinsize(remote, (size.lines, size.columns))
    return local, remote


def _reap() -> None:
    """The reaper: reads "+<group>", "-<group>" and "bye" until the launcher has exited."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # it must outlive the launcher
    groups: set[int] = set()
    for line in sys.stdin:
        sign, group = line[:1], line[1:].strip()
        if sign == "+":
            groups.add(int(group))
        elif sign == "-":
            groups.discard(int(group))
        else:
            return
    for group_id in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group_id, signal.SIGKILL)


if __name__ == "__main__":
    _reap()
