"""Spare processes that have imported TensorFlow already, so that a restart needn't wait for it.

    spares = Standbys(host, env, terminal_for="worker 0")
    spares.tend(["worker 0", "worker 1"])       # now and then: starts those that are missing
    spare = spares.take("worker 1")             # None: start a new process
    process, stream = spare.become(env, ["script", "train.py"])

Importing TensorFlow and Keras takes seconds, and joining a cluster must come before the first
TensorFlow op: a spare has imported, has run no op, and waits on a socket for its environment and
its arguments. Its imports run at the lowest priority. A spare costs memory (`tfmw run --help`), so
there is one for each task of a run at most, and never more than `MOST`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from tfmw._spawn import Host

MOST = 8
"""Spares at a time, however many tasks there are."""

ROOM_BYTES = 1 << 30
"""Memory that must be free for each further spare; one takes about 200 MB."""


class Spare:
    """One process that waits to become a task."""

    def __init__(self, host: Host, env: Mapping[str, str], terminal: bool) -> None:
        self._control, theirs = socket.socketpair()
        self._control.setblocking(False)
        self._ready = False
        command = ["standby", str(theirs.fileno())]
        with theirs:
            self._process, self._stream = host.spawn(
                command, subprocess.DEVNULL, terminal, [theirs.fileno()], env
            )
        self._host = host

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it is still there."""
        return self._process.poll() is None

    @property
    def ready(self) -> bool:
        """Whether it has done its imports."""
        if not self._ready:
            with contextlib.suppress(OSError):
                self._ready = self._control.recv(1) == b"r"
        return self._ready

    def become(
        self, env: Mapping[str, str], command: Sequence[str]
    ) -> tuple[subprocess.Popen[bytes], int] | None:
        """Makes it the task; (process, our end of its output), or None where it has died."""
        order = json.dumps({"env": dict(env), "argv": list(command)}) + "\n"
        try:
            self._control.setblocking(True)
            self._control.sendall(order.encode())
        except OSError:
            self.end()
            return None
        self._control.close()
        return self._process, self._stream

    def end(self) -> None:
        """Ends it, unused."""
        self._control.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._stream)
        self._host.forget(self._process.pid)


class Standbys:
    """The spares of a run, by the name of the task each of them waits for.

    Args:
        host: starts them.
        env: what all tasks have in their environment.
        terminal_for: name of the task that writes to a terminal; None: all write to pipes.
    """

    def __init__(self, host: Host, env: Mapping[str, str], terminal_for: str | None) -> None:
        self._host = host
        self._env = env
        self._terminal_for = terminal_for
        self._spares: dict[str, Spare] = {}

    def tend(self, names: Sequence[str]) -> None:
        """Starts the next missing spare, one at a time, so that training keeps its cores."""
        for name in [n for n, spare in self._spares.items() if not spare.alive]:
            self._spares.pop(name).end()
        if len(self._spares) >= MOST or not all(spare.ready for spare in self._spares.values()):
            return
        missing = [name for name in names if name not in self._spares]
        if missing and _free_memory() > ROOM_BYTES:
            name = missing[0]
            self._spares[name] = Spare(self._host, self._env, name == self._terminal_for)

    def ready(self) -> list[str]:
        """Names of the tasks whose spare waits."""
        return [name for name, spare in self._spares.items() if spare.alive and spare.ready]

    def take(self, name: str) -> Spare | None:
        """The spare for a task, ready or still importing; None where there is none."""
        spare = self._spares.pop(name, None)
        if spare is not None and not spare.alive:
            spare.end()
            return None
        return spare

    def close(self) -> None:
        """Ends all."""
        for spare in self._spares.values():
            spare.end()
        self._spares.clear()


def _free_memory(meminfo: Path = Path("/proc/meminfo")) -> int:
    """Bytes that new processes can have; proc_meminfo(5): "MemAvailable:  123456 kB"."""
    try:
        for line in meminfo.read_text().splitlines():
            name, _, value = line.partition(":")
            if name == "MemAvailable":
                return int(value.split()[0]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return 0
