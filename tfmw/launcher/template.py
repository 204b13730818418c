"""A process that has imported TensorFlow, of which the tasks of a run are copies.

    template = Template(["script", "train.py"], env)     # in the launcher
    template.wait(stop, timeout_s=120)                    # until it has imported
    pid = template.fork(["script", "train.py"], env, {0: stdin, 1: stdout, 2: stdout})

Importing TensorFlow and Keras takes seconds of a core and 200 MB, and a cluster must be joined
before the first TensorFlow operation. So one process imports, runs none, and is copied whenever a
task is to start: at first, and again after a failure. Only its main thread runs then (NumPy's
OpenBLAS ends its threads before a fork), and no GPU has been touched.

A copy is the launcher's own child, as any other process that it starts: the template forks twice
and the process in the middle leaves, whose child Linux then gives to the nearest ancestor that
asked for such orphans (prctl(2), PR_SET_CHILD_SUBREAPER). On other systems each task imports for
itself.
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

ANSWER_S = 10.0
"""How long a copy may take: some 20 ms, with a machine that is busy."""

_MOST_DESCRIPTORS = 64

_PR_SET_CHILD_SUBREAPER = 36  # prctl(2)
_PR_GET_CHILD_SUBREAPER = 37

# What is sent to all processes of a job, to end them: the launcher ends this one.
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


# ---- in the launcher ----------------------------------------------------------------------------


class Template:
    """The launcher's hold on it.

    Args:
        start: the command that runs `serve`, without the descriptor it ends with.
        shown: what follows in its command line and those of its copies, for `ps` to show.
        env: environment; what importing depends on must be the same for all tasks.
    """

    def __init__(self, start: Sequence[str], shown: Sequence[str], env: Mapping[str, str]) -> None:
        self._control, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [*start, str(theirs.fileno()), *shown],
                stdin=subprocess.DEVNULL,
                # A task that can't import what this one can't meets the same error, and tells.
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=env,
                start_new_session=True,
                pass_fds=[theirs.fileno()],
            )
        self._imported = False
        self._lost = False

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def usable(self) -> bool:
        """Whether copies may be had of it, now or once it has imported."""
        return not self._lost and self._process.poll() is None

    def wait(self, stop: Sequence[int], timeout_s: float) -> None:
        """Until it can be copied, or is lost, or a signal to stop has come.

        One that hasn't imported in time is given up: tasks that can't either are named.
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
        """A copy, which becomes a task.

        Args:
            command: arguments of `task.py`.
            env: all of its environment.
            descriptors: its own number of each descriptor -> ours.

        Returns:
            The process id of a child of ours; None where there is no copy to be had.
        """
        if self._lost or not self._imported:
            return None
        order = {
            "argv": list(command),
            "env": dict(env),
            "cwd": os.getcwd(),
            "descriptors": list(descriptors),
        }
        with tempfile.TemporaryFile() as file:  # longer than a message may be
            file.write(json.dumps(order).encode())
            file.seek(0)
            try:
                with _adopting():
                    sent = [file.fileno(), *descriptors.values()]
                    socket.send_fds(self._control, [b"f"], sent)
                    self._control.settimeout(ANSWER_S)
                    pid = int(self._control.recv(32))
                    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)  # ours?
            except (OSError, ValueError):
                file.truncate(0)  # a copy that comes late finds no order, and leaves
                self._lost = True
                self._process.kill()
                return None
        return pid

    def close(self) -> None:
        """Ends it; its copies stay."""
        self._control.close()
        self._process.kill()
        self._process.wait()


_kept: tuple[dict[str, str], Template] | None = None


def kept(start: Sequence[str], shown: Sequence[str], env: Mapping[str, str]) -> Template:
    """One for all runs of this process, until it ends or the environment changes.

    Cells of a notebook start workers again and again.
    """
    global _kept
    if _kept is not None and (_kept[0] != env or not _kept[1].usable):
        _close_kept()
    if _kept is None:
        _kept = dict(env), Template(start, shown, env)
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
    """Descendants whose parent leaves become our children.

    Raises:
        OSError: the system has no such thing.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    before = ctypes.c_int()

    system_call(libc, "prctl", _PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    system_call(libc, "prctl", _PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        system_call(libc, "prctl", _PR_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)


# ---- in the template ----------------------------------------------------------------------------


def serve(control: int) -> list[str]:
    """Imports, and makes copies until the launcher has gone.

    Returns:
        In each copy: the arguments it was ordered with. The template itself never returns.
    """
    before = {number: signal.signal(number, signal.SIG_IGN) for number in _IGNORED}
    _import_everything()
    gc.collect()
    gc.freeze()  # so that the collector of a copy doesn't write to pages that all share
    with socket.socket(fileno=control) as launcher:
        with contextlib.suppress(OSError):
            launcher.sendall(b"r")
        while True:
            message, descriptors, _, _ = socket.recv_fds(launcher, 1, _MOST_DESCRIPTORS)
            if not message:
                sys.exit(0)
            if not _copy(launcher):
                break
            for descriptor in descriptors:
                os.close(descriptor)
    for number, handler in before.items():
        signal.signal(number, handler)
    return _become(descriptors)


def _copy(launcher: socket.socket) -> bool:
    """Forks a child of the launcher; whether this is the template still."""
    waits, adopted = os.pipe()
    reads, tells = os.pipe()
    middle = os.fork()
    if not middle:
        os.close(adopted)
        os.close(reads)
        try:
            pid = os.fork()
        except OSError:
            os._exit(1)
        if pid:
            os.write(tells, str(pid).encode())
            os._exit(0)
        os.close(tells)
        os.read(waits, 1)  # the end: the template has seen the middle one leave
        os.close(waits)
        return False
    os.close(waits)
    os.close(tells)
    os.waitpid(middle, 0)
    launcher.sendall(os.read(reads, 32) or b"none")
    os.close(reads)
    os.close(adopted)
    return True


def _become(received: Sequence[int]) -> list[str]:
    """In a copy: takes its descriptors, environment and folder; returns its arguments."""
    os.setsid()
    with open(received[0], "rb") as file:
        order = json.loads(file.read() or sys.exit("no order"))
    numbers: list[int] = order["descriptors"]
    # First all out of the way, as one's number may be another's goal.
    apart = [fcntl.fcntl(fd, fcntl.F_DUPFD, max(numbers) + 1) for fd in received[1:]]
    for descriptor in received[1:]:
        os.close(descriptor)
    for descriptor, number in zip(apart, numbers, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(order["env"])
    os.chdir(order["cwd"])
    _draw_afresh()
    arguments: list[str] = order["argv"]
    return arguments


def _draw_afresh() -> None:
    """Seeds what was seeded when it was imported; else all copies would draw the same numbers.

    NumPy 1 imports its generator, NumPy 2 when it is first used; TensorFlow's comes with the first
    operation; Python's own seeds itself again after a fork.
    """
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()


def _import_everything() -> None:
    """Imports everything public of tfmw, and with it TensorFlow and Keras."""
    with contextlib.suppress(Exception):  # the task will meet it again, and tell
        import tfmw
        from tfmw.runtime.imports import collector_paused

        with collector_paused():
            for name in tfmw.__all__:
                getattr(tfmw, name)
