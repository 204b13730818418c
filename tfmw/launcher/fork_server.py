"""A process that has imported TensorFlow, and from which the tasks of a run are forked.

    server = ForkServer(start, ["script", "train.py"], env)     # in the launcher
    server.wait(stop, timeout_s=120)                            # until it has imported
    pid = server.fork(["script", "train.py"], env, {0: stdin, 1: stdout, 2: stdout})

A task must join its cluster before the first TensorFlow operation, so the fork server runs none. At
a fork it has only its main thread (NumPy's OpenBLAS ends its threads before a fork), and it has
used no GPU. The gain is in docs/explain/benchmarks.md.

A forked task is a child of the launcher: the fork server forks twice and the intermediate process
exits. Linux makes the orphan a child of the nearest ancestor that is a subreaper (prctl(2),
PR_SET_CHILD_SUBREAPER). On other systems each task imports TensorFlow itself.

A forked task shares the memory of the imports until it writes there. At its end Python would free
all of that, and Linux would first copy it for each task: 140 MB, and a sixth of the processor time
of a short task. So a task ends without freeing it.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import io
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import NoReturn

from tfmw.launcher.isolation import system_call

FORK_TIMEOUT_S = 10.0
"""Seconds that a fork may take; usually 20 ms."""

_MAX_DESCRIPTORS = 64

_imported = {"__main__"}  # names of modules that tasks do not import themselves

_PR_SET_CHILD_SUBREAPER = 36  # prctl(2)
_PR_GET_CHILD_SUBREAPER = 37

# Signals that are sent to all processes of a job; the launcher ends this process itself.
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


# ---- in the launcher ----------------------------------------------------------------------------

# Runs in several threads share a fork server. Its messages have no sender, and the adoption of
# orphans is a property of the process.
_one_thread = threading.RLock()


class ForkServer:
    """The launcher's side of the fork server.

    Variables in `env` that affect imports must be the same for all tasks.
    """

    def __init__(self, start: Sequence[str], shown: Sequence[str], env: Mapping[str, str]) -> None:
        self._control, remote = socket.socketpair()
        with remote:
            self._process = subprocess.Popen(
                # `start` runs `serve`; `ps` shows the last arguments for the server and its tasks.
                [*start, str(remote.fileno()), *shown],
                stdin=subprocess.DEVNULL,
                # A task that imports TensorFlow itself gets and reports the same error.
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=env,
                start_new_session=True,
                pass_fds=[remote.fileno()],
            )
        self._ready: bool | None = None  # None: it is importing; False: it is lost

    @property
    def pid(self) -> int:
        """The process id of the fork server."""
        return self._process.pid

    @property
    def usable(self) -> bool:
        """Whether tasks can be forked from it, now or after its imports."""
        return self._ready is not False and self._process.poll() is None

    def wait(self, stop: Sequence[int], timeout_s: float) -> None:
        """Waits until its imports are complete, it has died, or a signal to stop has arrived.

        After the timeout it is killed, and each task imports TensorFlow itself.
        """
        give_up = time.monotonic() + timeout_s
        while not (stop or self.is_settled(0.05)):
            if time.monotonic() > give_up:
                self._give_up()

    def is_settled(self, wait_s: float) -> bool:
        """Whether it has completed its imports or died, after a short wait."""
        if self._ready is None:
            with contextlib.suppress(OSError, ValueError):  # another thread may close it
                select.select([self._control], [], [], wait_s)
            with _one_thread:
                if self._ready is None and select.select([self._control], [], [], 0)[0]:
                    self._ready = self._control.recv(1) == b"r"
        return self._ready is not None

    def _give_up(self) -> None:
        self._ready = False
        self._process.kill()

    def fork(
        self, command: Sequence[str], env: Mapping[str, str], descriptors: Mapping[int, int]
    ) -> int | None:
        """Forks a process that becomes a task.

        Args:
            command: arguments of `task.py`.
            env: the task's whole environment.
            descriptors: number of each descriptor in the task -> number in this process.

        Returns:
            The process id of a new child of the launcher; None if the fork server is lost.
        """
        if not self._ready:
            return None
        request = {
            "argv": list(command),
            "env": dict(env),
            "cwd": os.getcwd(),
            "descriptors": list(descriptors),
        }
        with open(os.memfd_create("tfmw"), "w+b") as file:  # longer than the largest message
            file.write(json.dumps(request).encode())
            file.seek(0)
            try:
                with _one_thread, _adopting():
                    sent = [file.fileno(), *descriptors.values()]
                    socket.send_fds(self._control, [b"f"], sent)
                    self._control.settimeout(FORK_TIMEOUT_S)
                    pid = int(self._control.recv(32))
                    # Raises unless it is a child of this process.
                    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except (OSError, ValueError):
                file.truncate(0)  # a late fork finds no request, and exits
                self._give_up()
                return None
        return pid

    def close(self) -> None:
        """Ends the server; tasks forked from it keep running."""
        with _one_thread:
            self._ready = False
            self._control.close()
        self._process.kill()
        self._process.wait()


_kept: tuple[dict[str, str], ForkServer] | None = None


def kept(start: Sequence[str], shown: Sequence[str], env: Mapping[str, str]) -> ForkServer:
    """The fork server of all runs of this process, until the environment changes.

    Notebooks use it, as each cell may start workers.
    """
    global _kept
    with _one_thread:
        if _kept is not None and (_kept[0] != env or not _kept[1].usable):
            atexit.unregister(_kept[1].close)
            _kept[1].close()
            _kept = None
        if _kept is None:
            _kept = dict(env), ForkServer(start, shown, env)
            atexit.register(_kept[1].close)
        return _kept[1]


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
    """Imports TensorFlow, and forks tasks until the launcher has exited.

    The function returns in each forked task only, with the task's arguments.
    """
    before = {number: signal.signal(number, signal.SIG_IGN) for number in _IGNORED}
    _import_everything()
    # Garbage collection in tasks must not write to shared pages. The garbage of the imports stays:
    # it is 1 MB, and a search for it takes a quarter of a second.
    gc.freeze()
    _imported.update(sys.modules)
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
    ours, of_task = socket.socketpair()
    intermediate = os.fork()
    if not intermediate:
        ours.close()
        try:
            pid = os.fork()
        except OSError:
            os._exit(1)
        if pid:
            os._exit(0)
        os.setsid()
        with of_task:
            # Sent only now, as the launcher ends tasks by their group.
            of_task.send(str(os.getpid()).encode())
            of_task.recv(1)  # end of file: the intermediate process has exited
        return False
    of_task.close()
    with ours:
        os.waitpid(intermediate, 0)
        launcher.sendall(ours.recv(32) or b"none")
    return True


def _become(received: Sequence[int]) -> list[str]:
    """Sets descriptors, environment and folder of a forked task; returns its arguments."""
    with open(received[0], "rb") as file:
        request = json.loads(file.read() or sys.exit("no request"))
    numbers: list[int] = request["descriptors"]
    # First to unused numbers: the number of one descriptor may be the target of another.
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


def end_task(status: int) -> NoReturn:
    """Ends a forked task as Python ends a process, but keeps the modules of the fork server.

    Threads are joined, functions of `atexit` run, and objects of the task are finalized.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for name in sys.modules.keys() - _imported:
        del sys.modules[name]
    _flush_files()  # a collected cycle closes a file's layers in any order
    gc.collect()
    _flush_files()
    ctypes.CDLL(None).fflush(None)
    os._exit(status & 0xFF)


def _flush_files() -> None:
    """Flushes the buffers of this task's open files, as closing them would."""
    kinds = io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom
    for stream in [sys.stdout, sys.stderr, *gc.get_objects()]:
        if issubclass(type(stream), kinds):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()


def _reseed() -> None:
    """Seeds generators that were seeded at import; otherwise all tasks would draw equal numbers.

    NumPy 1 seeds its generator at import, NumPy 2 at first use. TensorFlow seeds its generator at
    the first operation. Python seeds its own generator again after a fork.
    """
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()


def _import_everything() -> None:
    """Imports all public modules of tfmw, and with them TensorFlow and Keras."""
    with contextlib.suppress(Exception):  # a task gets and reports the same error
        import tfmw
        from tfmw.cluster.imports import without_collection

        with without_collection():
            for name in tfmw.__all__:
                getattr(tfmw, name)
