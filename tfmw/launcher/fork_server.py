"""A process that has imported TensorFlow, and from which the tasks of a run are forked.

    server = ForkServer(start, ["script", "train.py"], env)     # in the launcher
    server.wait(stop, timeout_s=120)                            # until it has imported
    pid = server.fork(["script", "train.py"], env, {0: stdin, 1: stdout, 2: stdout})

Importing TensorFlow and Keras takes seconds of a core and 200 MB, and a cluster must be joined
before the first TensorFlow operation. So one process imports, runs none, and is forked whenever a
task starts: at first, and again after a failure. Only its main thread runs then (NumPy's OpenBLAS
ends its threads before a fork), and it has touched no GPU.

A forked task is the launcher's own child: the fork server forks twice and the process in the middle
exits. Linux gives the orphan to the nearest ancestor that asked for orphans (prctl(2),
PR_SET_CHILD_SUBREAPER). On other systems each task imports for itself.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence

from tfmw.launcher.isolation import system_call

FORK_TIMEOUT_S = 10.0
"""Seconds that a fork may take; usual are 20 ms."""

_MAX_DESCRIPTORS = 64

_PR_SET_CHILD_SUBREAPER = 36  # prctl(2)
_PR_GET_CHILD_SUBREAPER = 37

# Signals that end all processes of a job: the launcher ends this one.
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


# ---- in the launcher ----------------------------------------------------------------------------


class ForkServer:
    """The launcher's side of it.

    Args:
        start: the command that runs `serve`, without the descriptor at its end.
        shown: what follows in its command line and that of its tasks, for `ps` to show.
        env: environment; variables that change imports must be the same for all tasks.
    """

    def __init__(self, start: Sequence[str], shown: Sequence[str], env: Mapping[str, str]) -> None:
        self._control, remote = socket.socketpair()
        with remote:
            self._process = subprocess.Popen(
                [*start, str(remote.fileno()), *shown],
                stdin=subprocess.DEVNULL,
                # A task meets the same error when it imports, and reports it.
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=env,
                start_new_session=True,
                pass_fds=[remote.fileno()],
            )
        self._imported = False
        self._lost = False

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def usable(self) -> bool:
        """Whether tasks can be forked from it, now or once it has imported."""
        return not self._lost and self._process.poll() is None

    def wait(self, stop: Sequence[int], timeout_s: float) -> None:
        """Waits until it has imported or died, or a signal to stop has come.

        After the timeout it is killed: each task imports for itself then.
        """
        give_up = time.monotonic() + timeout_s
        while not (self._imported or self._lost or stop):
            if select.select([self._control], [], [], 0.05)[0]:
                self._imported = self._control.recv(1) == b"r"
                self._lost = not self._imported
            elif time.monotonic() > give_up:
                self._lost = True
                self._process.kill()

    def fork(
        self, command: Sequence[str], env: Mapping[str, str], descriptors: Mapping[int, int]
    ) -> int | None:
        """Forks a process that becomes a task.

        Args:
            command: arguments of `task.py`.
            env: all of its environment.
            descriptors: number of each descriptor in the task -> number here.

        Returns:
            The process id of a new child of the launcher; None where the fork server is lost.
        """
        if self._lost or not self._imported:
            return None
        request = {
            "argv": list(command),
            "env": dict(env),
            "cwd": os.getcwd(),
            "descriptors": list(descriptors),
        }
        with tempfile.TemporaryFile() as file:  # longer than a message may be
            file.write(json.dumps(request).encode())
            file.seek(0)
            try:
                with _adopting():
                    sent = [file.fileno(), *descriptors.values()]
                    socket.send_fds(self._control, [b"f"], sent)
                    self._control.settimeout(FORK_TIMEOUT_S)
                    pid = int(self._control.recv(32))
                    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)  # our child?
            except (OSError, ValueError):
                file.truncate(0)  # a fork that comes late finds no request, and exits
                self._lost = True
                self._process.kill()
                return None
        return pid

    def close(self) -> None:
        """Ends it; the tasks forked from it stay."""
        self._control.close()
        self._process.kill()
        self._process.wait()


_kept: tuple[dict[str, str], ForkServer] | None = None


def kept(start: Sequence[str], shown: Sequence[str], env: Mapping[str, str]) -> ForkServer:
    """The fork server of all runs of this process, until the environment changes.

    Cells of a notebook start workers again and again.
    """
    global _kept
    if _kept is not None and (_kept[0] != env or not _kept[1].usable):
        _close_kept()
    if _kept is None:
        _kept = dict(env), ForkServer(start, shown, env)
        atexit.register(_close_kept)
    return _kept[1]


def _close_kept() -> None:
    global _kept
    atexit.unregister(_close_kept)
    if _kept is not None:
        _kept[1].close()
    _kept = None


@contextlib.contextmanager
def _adopting() -> Iterator[None]:
    """Makes orphaned descendants children of this process.

    Raises:
        OSError: the system does not support it.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    before = ctypes.c_int()

    system_call(libc, "prctl", _PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    system_call(libc, "prctl", _PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        system_call(libc, "prctl", _PR_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)


# ---- in the fork server ------------------------------------------------------------------------


def serve(control: int) -> list[str]:
    """Imports, and forks tasks until the launcher has gone.

    Returns:
        In each forked task: its arguments. The fork server itself never returns.
    """
    before = {number: signal.signal(number, signal.SIG_IGN) for number in _IGNORED}
    _import_everything()
    gc.collect()
    gc.freeze()  # so that the collectors of tasks don't write to shared pages
    with socket.socket(fileno=control) as launcher:
        with contextlib.suppress(OSError):
            launcher.sendall(b"r")
        while True:
            message, descriptors, _, _ = socket.recv_fds(launcher, 1, _MAX_DESCRIPTORS)
            if not message:
                sys.exit(0)
            if not _fork_task(launcher):
                break
            for descriptor in descriptors:
                os.close(descriptor)
    for number, handler in before.items():
        signal.signal(number, handler)
    return _become(descriptors)


def _fork_task(launcher: socket.socket) -> bool:
    """Forks a child of the launcher; returns whether this is still the fork server."""
    gate_read, gate_write = os.pipe()
    pid_read, pid_write = os.pipe()
    middle = os.fork()
    if not middle:
        os.close(gate_write)
        os.close(pid_read)
        try:
            pid = os.fork()
        except OSError:
            os._exit(1)
        if pid:
            os.write(pid_write, str(pid).encode())
            os._exit(0)
        os.close(pid_write)
        os.read(gate_read, 1)  # its end: the middle process has exited
        os.close(gate_read)
        return False
    os.close(gate_read)
    os.close(pid_write)
    os.waitpid(middle, 0)
    launcher.sendall(os.read(pid_read, 32) or b"none")
    os.close(pid_read)
    os.close(gate_write)
    return True


def _become(received: Sequence[int]) -> list[str]:
    """In a forked task: takes its descriptors, environment and folder; returns its arguments."""
    os.setsid()
    with open(received[0], "rb") as file:
        request = json.loads(file.read() or sys.exit("no request"))
    numbers: list[int] = request["descriptors"]
    # First all to unused numbers, as the number of one may be the target of another.
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD, max(numbers) + 1) for fd in received[1:]]
    for descriptor in received[1:]:
        os.close(descriptor)
    for descriptor, number in zip(moved, numbers, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    _reseed()
    arguments: list[str] = request["argv"]
    return arguments


def _reseed() -> None:
    """Seeds generators that were seeded at import; else all tasks would draw the same numbers.

    NumPy 1 seeds its generator at import, NumPy 2 at first use; TensorFlow's comes with the first
    operation; Python's own is seeded again after a fork.
    """
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()


def _import_everything() -> None:
    """Imports everything public of tfmw, and with it TensorFlow and Keras."""
    with contextlib.suppress(Exception):  # the task meets the error again, and reports it
        import tfmw
        from tfmw.runtime.imports import collector_paused

        with collector_paused():
            for name in tfmw.__all__:
                getattr(tfmw, name)
