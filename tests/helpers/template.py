"""Commands that are forked from a process which has imported TensorFlow.

    template = Template(env)
    run = template.start(["tfmw", "run", "--workers", "2", "train.py"], env, cwd)
    run = template.start(["python", "-c", "import tfmw"], env, cwd)

An import of TensorFlow is most of what a short run costs. The template imports it once, and forks
a keeper for each run. The keeper adopts the processes that outlive the run, names them and ends
them. It forks the launcher, and the launcher's fork server is forked from it before the launcher
has a thread. From there on everything is as users run it: the command line, the fork server, tasks
in sessions and namespaces of their own. A Python program is run in place of the launcher.

Environment variables that are read at an import are those of the template.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from tfmw.launcher import fork_server

_PR_SET_CHILD_SUBREAPER = 36  # prctl(2)
_CLONE_NEWNET = 0x40000000  # setns(2)


class Template:
    """The process that has imported TensorFlow; it ends with this process, or by `close`."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._control, remote = socket.socketpair()
        with remote:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.helpers.template", str(remote.fileno())],
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # the notices of TensorFlow's import
                start_new_session=True,
                pass_fds=[remote.fileno()],
            )

    def start(
        self, command: Sequence[str], env: Mapping[str, str], cwd: str, network: str = ""
    ) -> Run:
        """Starts `tfmw ...`, `python -c CODE ...` or `python FILE ...`.

        Args:
            network: path of the network namespace that it runs in; "" for that of this process.
        """
        read, write = os.pipe()
        ours, theirs = socket.socketpair()
        request = {"command": list(command), "env": dict(env), "cwd": cwd, "network": network}
        with tempfile.TemporaryFile() as file, theirs:
            file.write(json.dumps(request).encode())
            file.seek(0)
            socket.send_fds(self._control, [b"r"], [file.fileno(), write, theirs.fileno()])
            os.close(write)
            assert self._control.recv(1) == b"f", "the template has ended"
        return Run(read, ours)

    def close(self) -> None:
        """Ends it."""
        self._control.close()
        self._process.wait()


class Run:
    """A run that was forked from the template.

    Attributes:
        pid: of the launcher.
    """

    def __init__(self, output: int, keeper: socket.socket) -> None:
        self._output = output
        self._keeper = keeper.makefile("r")
        keeper.close()
        self.pid = int(self._keeper.readline())

    def communicate(self, timeout_s: float) -> str | None:
        """Output once all processes of the run have ended; None if the time is over before."""
        deadline = time.monotonic() + timeout_s
        parts: list[bytes] = []
        while select.select([self._output], [], [], max(0.0, deadline - time.monotonic()))[0]:
            if not (part := os.read(self._output, 1 << 16)):
                os.close(self._output)
                return b"".join(parts).decode(errors="replace")
            parts.append(part)
        return None

    def lines(self) -> Iterator[str]:
        """Lines of its output, as they come, until all processes of the run have ended."""
        with open(self._output, errors="replace") as printed:
            yield from printed

    def wait(self) -> tuple[int, list[str]]:
        """The exit status, and the command lines of the processes that outlived the run."""
        status, left = json.loads(self._keeper.readline())
        self._keeper.close()
        return status, left


# ---- in the template ----------------------------------------------------------------------------


def serve(control: socket.socket) -> None:
    """Forks keepers until the tests have ended."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 1, 8)
        if not message:
            os._exit(0)
        if not os.fork():
            if not os.fork():
                control.close()
                _keep(*descriptors)
            os._exit(0)
        os.wait()
        for descriptor in descriptors:
            os.close(descriptor)
        control.sendall(b"f")


def _keep(request: int, output: int, report: int) -> None:
    """Forks the launcher, waits for it, reports and ends leftover processes; runs in the keeper."""
    os.setsid()
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    with open(request) as file:
        asked = json.load(file)
    launcher = os.fork()
    if not launcher:
        os.close(report)
        _launch(output, **asked)
    os.close(output)
    os.write(report, f"{launcher}\n".encode())
    _, status = os.waitpid(launcher, 0)
    left = []
    for pid in _children():
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
            if line := Path(f"/proc/{pid}/cmdline").read_bytes():  # else it has ended
                left.append(line.replace(b"\0", b" ").decode())
    while _children():  # the children of a killed one are adopted
        for pid in _children():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    ended = json.dumps([os.waitstatus_to_exitcode(status), left])
    os.write(report, f"{ended}\n".encode())
    os._exit(0)


def _children() -> list[int]:
    pid = os.getpid()
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _launch(
    output: int, command: list[str], env: dict[str, str], cwd: str, network: str
) -> NoReturn:
    """Runs the command."""
    os.setsid()
    if network:
        with open(network) as namespace:
            assert not ctypes.CDLL(None).setns(namespace.fileno(), _CLONE_NEWNET), network
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    os.close(output)
    os.environ.clear()
    os.environ.update(env)
    tempfile.tempdir = None
    os.chdir(cwd)
    program, *arguments = command
    if program == "tfmw":
        _tfmw(arguments)
    try:
        _python(arguments)
        status: Any = 0
    except SystemExit as leaving:
        status = leaving.code or 0
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        status = 1
    if not isinstance(status, int):
        print(status, file=sys.stderr)
        status = 1
    # Without freeing the imports, which takes more than half a second.
    fork_server.end_task(status)


def _python(arguments: list[str]) -> None:
    sys.argv = arguments
    if arguments[0] == "-c":
        code = arguments.pop(1)
        sys.path.insert(0, "")
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(code, "<string>", "exec"), main.__dict__)
    else:
        sys.path.insert(0, os.path.dirname(arguments[0]))
        runpy.run_path(arguments[0], run_name="__main__")


def _tfmw(command: list[str]) -> NoReturn:
    from tfmw.cli import main as cli

    prepared: tuple[int, socket.socket] | None = _prepared_fork_server()

    class ForkServer(fork_server.ForkServer):
        """The prepared process in place of a new one."""

        def __init__(self, start: Sequence[str], shown: Sequence[str], env: Any) -> None:
            nonlocal prepared
            if prepared is None:
                super().__init__(start, shown, env)
                return
            (pid, channel), prepared = prepared, None
            self._control, remote = socket.socketpair()
            told = json.dumps([list(start[1:]), list(shown), dict(env)]).encode()
            with remote, channel, tempfile.TemporaryFile() as file:
                file.write(told)
                file.seek(0)
                socket.send_fds(channel, [b"s"], [file.fileno(), remote.fileno()])
            self._process = _Forked(pid)  # type: ignore[assignment]
            self._ready = None

    fork_server.ForkServer = ForkServer  # type: ignore[misc]
    sys.argv = ["tfmw", *command]
    try:
        sys.exit(cli.main(command))
    except SystemExit as leaving:
        code = leaving.code
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    if prepared is not None:  # the run copied no task
        prepared[1].close()
        os.waitpid(prepared[0], 0)
    sys.stdout.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


def _prepared_fork_server() -> tuple[int, socket.socket]:
    """Forks a process that becomes the launcher's fork server, or ends with the launcher."""
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid:
        theirs.close()
        return pid, ours
    ours.close()
    os.setsid()
    message, descriptors, _, _ = socket.recv_fds(theirs, 1, 8)
    if not message:
        os._exit(0)
    theirs.close()
    told, control = descriptors
    with open(told) as file:
        (task, mode), shown, env = json.load(file)
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    os.environ.clear()
    os.environ.update(env)
    sys.argv = [task, mode, str(control), *shown]
    code: Any = 1
    try:
        runpy.run_path(task, run_name="__main__")
    except SystemExit as leaving:
        code = leaving.code
    sys.exit(code)


class _Forked:
    """A forked process, as far as a `Popen` that the launcher asks."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._ended = False

    def poll(self) -> int | None:
        if not self._ended:
            self._ended = os.waitpid(self.pid, os.WNOHANG)[0] != 0
        return 0 if self._ended else None

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> None:
        if not self._ended:
            os.waitpid(self.pid, 0)
            self._ended = True


if __name__ == "__main__":
    import gc

    fork_server._import_everything()
    gc.freeze()
    fork_server._imported.update(sys.modules)
    serve(socket.socket(fileno=int(sys.argv[1])))
