"""A cluster as one starts it in several terminals, each task its own process.

with ByHand(program, workers=2, ps=1, arguments=[...]) as cluster:
    cluster.chief.wait_for("epoch 2")           # a line that it prints
    cluster.kill("worker 0")                    # kill -9
    cluster.start("worker 0")                   # again, on the same address
    assert cluster.chief.end() == 0
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path
from typing import Any

from tests.helpers.cluster import MARK, ONE_THREAD, PROGRAMS, PYTHONPATH, marked
from tfmw.cluster.sockets import reserved_ports


def free_ports(count: int) -> list[int]:
    """Ports that no outgoing connection of another test takes before they are listened on."""
    with reserved_ports(count) as ports:
        return ports


def free_addresses(count: int) -> list[str]:
    """Addresses on this machine, all different."""
    return [f"127.0.0.1:{port}" for port in free_ports(count)]


class Process:
    """One task: its lines as they come, and its end."""

    def __init__(self, name: str, command: list[str], environ: dict[str, str]):
        self.name = name
        self.lines: list[str] = []
        self._new: queue.Queue[str | None] = queue.Queue()
        self._popen = subprocess.Popen(
            command,
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._popen.stdout is not None
        for line in self._popen.stdout:
            self.lines.append(line)
            self._new.put(line)
        self._new.put(None)

    def wait_for(self, text: str, timeout_s: float = 240) -> str:
        """The next line that holds `text`."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                line = self._new.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                line = None
            assert line is not None, f"{self.name} never said {text!r}:\n{self.output}"
            if text in line:
                return line

    def say(self, line: str) -> None:
        """Writes a line to its standard input."""
        assert self._popen.stdin is not None
        print(line, file=self._popen.stdin, flush=True)

    def end(self, timeout_s: float = 240) -> int:
        """Its exit status."""
        try:
            status = self._popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"{self.name} has not ended after {timeout_s} s:\n{self.output}"
            ) from None
        self._reader.join(10)
        return status

    @property
    def running(self) -> bool:
        return self._popen.poll() is None

    @property
    def output_ended(self) -> bool:
        """Whether nobody can print to its terminal any more, it and what it has started."""
        return not self._reader.is_alive()

    def children(self) -> list[int]:
        """The ids of the processes that its main thread has started."""
        pid = self._popen.pid
        return [
            int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        ]

    def freeze(self) -> None:
        """Stops it without ending it: its connections stay open."""
        self._popen.send_signal(signal.SIGSTOP)

    def kill(self) -> None:
        """Kills it as the kernel would, if it still runs."""
        self._popen.send_signal(signal.SIGKILL)
        self._popen.wait()
        self._reader.join(10)
        for stream in (self._popen.stdin, self._popen.stdout):
            assert stream is not None
            stream.close()

    @property
    def output(self) -> str:
        return "".join(self.lines)


class ByHand:
    """The processes of one cluster; none is left when the `with` ends."""

    def __init__(
        self,
        program: str,
        *,
        workers: int = 2,
        ps: int = 1,
        arguments: Any = (),
        env: dict[str, str] | None = None,
        without: Any = (),
    ):
        self._command = [sys.executable, str(PROGRAMS / program), *map(str, arguments)]
        self._mark = uuid.uuid4().hex
        self._env = env or {}
        names = ["chief", *(f"worker {i}" for i in range(workers)), *(f"ps {i}" for i in range(ps))]
        addresses = free_addresses(len(names))
        self._cluster: dict[str, list[str]] = {}
        for name, address in zip(names, addresses, strict=True):
            self._cluster.setdefault(name.split()[0], []).append(address)
        self.tasks: dict[str, Process] = {}
        self._names = [n for n in names if n not in without]

    def __enter__(self) -> ByHand:
        for name in self._names:
            self.start(name)
        return self

    def __exit__(self, *error: Any) -> None:
        for task in self.tasks.values():
            task.kill()
        assert not (left := marked(self._mark)), f"processes survive the cluster: {left}"

    @property
    def chief(self) -> Process:
        return self.tasks["chief"]

    def start(self, name: str) -> Process:
        """Starts a task, or starts it again."""
        kind, _, index = name.partition(" ")
        config = {"cluster": self._cluster, "task": {"type": kind, "index": int(index or 0)}}
        environ = {
            **{k: v for k, v in os.environ.items() if not k.startswith("TFMW_")},
            **ONE_THREAD,
            "TF_CPP_MIN_LOG_LEVEL": "2",
            "PYTHONPATH": f"{PYTHONPATH}{os.pathsep}{PROGRAMS}",
            "PYTHONUNBUFFERED": "1",
            "TF_CONFIG": json.dumps(config),
            MARK: self._mark,
            **self._env,
        }
        if name in self.tasks:
            self.tasks[name].kill()
        self.tasks[name] = Process(name, self._command, environ)
        return self.tasks[name]

    def kill(self, name: str) -> None:
        """kill -9."""
        self.tasks[name].kill()

    def end(self, name: str, timeout_s: float = 240) -> int:
        """The exit status of a task."""
        return self.tasks[name].end(timeout_s)
