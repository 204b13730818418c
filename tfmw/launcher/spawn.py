"""Starts the processes of a run, and sees to it that none outlives the launcher.

    with Host(namespaces) as host:
        child = host.spawn(["script", "train.py"], subprocess.DEVNULL, False, [], env)

A task asks Linux to be killed when the launcher goes (see `task`), but what the task itself has
started would stay. So a process of its own, the reaper, holds a pipe from the launcher: when that
ends without a farewell, the launcher was killed, and the reaper kills every group it was told of.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import shutil
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from tfmw.launcher.template import Template

TASK_COMMAND = (sys.executable, str(Path(__file__).with_name("task.py")))
"""Starts a task; see `task`."""

NAMESPACES = "TFMW_NAMESPACES"
"""Descriptors of the user and the network namespace that a task enters first: "5,6"."""


class Child:
    """A process that a host has started.

    Attributes:
        pid: its process id, and that of its session and its first group.
        stream: our end of its standard output and error.
    """

    def __init__(self, pid: int, stream: int, process: subprocess.Popen[bytes] | None) -> None:
        self.pid = pid
        self.stream = stream
        self._process = process

    def wait(self) -> None:
        """Until it has ended; then its number may be used again."""
        if self._process is not None:
            self._process.wait()
        else:
            os.waitpid(self.pid, 0)


class Host:
    """What all processes of a run have in common.

    Args:
        namespaces: descriptors of the namespaces that they live in, in the order of entering.
    """

    def __init__(self, namespaces: Sequence[int] = ()) -> None:
        self._namespaces = list(namespaces)
        self._template: Template | None = None
        self._keeps_template = False
        self._reaper = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            bufsize=0,
        )

    def __enter__(self) -> Host:
        return self

    def __exit__(self, *_: object) -> None:
        if self._template is not None and not self._keeps_template:
            self._template.close()
        self._tell("bye")
        assert self._reaper.stdin is not None
        self._reaper.stdin.close()
        self._reaper.wait()

    def copy_from_now_on(
        self, command: Sequence[str], env: Mapping[str, str], keep: bool = False
    ) -> None:
        """Has one process import TensorFlow, and what is spawned after that be copies of it.

        Args:
            command: the arguments of `task.py` that most of them will have.
            env: what all of them have in their environment.
            keep: whether it stays for the next run of this process.
        """
        from tfmw.launcher import template  # the reaper is this file too, and finds no package

        env = {**env, "TFMW_LAUNCHER_PID": str(os.getpid())}
        make = template.kept if keep else template.Template
        self._template = make([*TASK_COMMAND, "template"], command, env)
        self._keeps_template = keep
        if not keep:
            self._tell(f"+{self._template.pid}")

    def wait(self, stop: Sequence[int], timeout_s: float) -> None:
        """Until processes can be spawned at once, a signal to stop has come, or no longer."""
        if self._template is not None:
            self._template.wait(stop, timeout_s)

    def spawn(
        self,
        command: Sequence[str],
        stdin: IO[bytes] | int,
        terminal: bool,
        fds: Sequence[int],
        env: Mapping[str, str],
    ) -> Child:
        """A process in a session of its own."""
        env = {**env, "TFMW_LAUNCHER_PID": str(os.getpid())}
        if self._namespaces:
            env[NAMESPACES] = ",".join(map(str, self._namespaces))
        ours, theirs = _pseudo_terminal() if terminal else os.pipe()
        fds = [*fds, *self._namespaces]
        try:
            pid, process = self._copy(command, stdin, theirs, fds, env), None
            if pid is None:
                process = subprocess.Popen(
                    [*TASK_COMMAND, *command],
                    stdin=stdin,
                    stdout=theirs,
                    stderr=theirs,
                    env=env,
                    start_new_session=True,
                    pass_fds=fds,
                )
                pid = process.pid
        except BaseException:
            os.close(ours)
            raise
        finally:
            os.close(theirs)
        self._tell(f"+{pid}")
        return Child(pid, ours, process)

    def _copy(
        self,
        command: Sequence[str],
        stdin: IO[bytes] | int,
        output: int,
        fds: Sequence[int],
        env: Mapping[str, str],
    ) -> int | None:
        """The process id of a copy of the template; None where there is none to be had."""
        if self._template is None:
            return None
        with open(os.devnull, "rb") as nothing:
            reads = nothing if isinstance(stdin, int) else stdin
            streams = {0: reads.fileno(), 1: output, 2: output}
            return self._template.fork(command, env, {**streams, **{fd: fd for fd in fds}})

    def forget(self, pid: int) -> None:
        """Says that the process has ended and its group is gone: the number may be used again."""
        self._tell(f"-{pid}")

    def _tell(self, line: str) -> None:
        assert self._reaper.stdin is not None
        with contextlib.suppress(OSError, ValueError):  # somebody killed it: nothing to be done
            self._reaper.stdin.write(f"{line}\n".encode())


def terminal_size() -> os.terminal_size:
    """Of our terminal, or of what stands for it: a notebook's cell, about as wide as a page."""
    return shutil.get_terminal_size((120, 24))


def _pseudo_terminal() -> tuple[int, int]:
    """(ours, theirs): a terminal as wide as ours, so that progress bars know what they write to."""
    ours, theirs = pty.openpty()
    attributes = termios.tcgetattr(theirs)
    attributes[1] &= ~termios.OPOST  # "\n" stays "\n"
    termios.tcsetattr(theirs, termios.TCSANOW, attributes)
    size = terminal_size()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", size.lines, size.columns, 0, 0))
    return ours, theirs


def _reap() -> None:
    """The reaper: reads "+<group>", "-<group>" and "bye" until the launcher is gone."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # it outlives whatever ends the launcher
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
