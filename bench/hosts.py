"""Recovery when hosts fail, beside torchrun's elastic agent, in the same harness.

    python -m bench.recovery --hosts [--repeat 3] [--torch-python ...] [--goodput MINUTES]

Three hosts are network namespaces on this machine (as root). Each runs one worker of the toy model
of `bench/recovery.py`, with a backup every 20 steps, and two hosts are enough to continue. Two
times are measured, in seconds. The first is from `kill -9` of a worker to the first new step of all
three; the second is from a cut link to the first new step of the other two. Goodput is the number
of steps under a seeded schedule of faults, divided by that of the same time without any. The latter
is measured over a fifth of the time.

torchrun gets time-outs of seconds in place of its defaults: half a minute for a missing host, half
an hour for a lost link. An agent that has given up is started again, as a service manager would.
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.helpers.hosts import Namespaces

ROOT = Path(__file__).resolve().parent.parent
HOSTS, MIN_HOSTS = 3, 2
WARM_STEPS = 40
TIMEOUT_S = 300.0
UNDISTURBED = 5  # steps without faults are counted in 1/5 of the time
TOKEN = "0123456789abcdef" * 4  # a key of this benchmark only

TORCHRUN_TIMEOUTS = {
    # Seconds to wait for more hosts, as tfmw does; torchrun's default is 30.
    "last_call_timeout": 1,
    # A host is gone after 5 signs of life, one each second, as for tfmw; the default is 3 of 5 s.
    "keep_alive_interval": 1,
    "keep_alive_max_attempt": 5,
    # Seconds until an agent that does not reach the store gives up, and starts again.
    "read_timeout": 10,
}
"""Time-outs of torchrun's rendezvous; bench/recovery.py sets those of gloo."""

Way = Callable[[int, Sequence[str], str], list[str]]
"""(host, addresses of all, folder for backups) -> the command of that host."""


def ways(recovery: str, torch_python: str | None) -> dict[str, Way]:
    """Contender -> command that starts the training on one host.

    Args:
        recovery: path of `bench/recovery.py`.
        torch_python: Python of an environment with torch; None: without torchrun.
    """

    def tfmw(host: int, addresses: Sequence[str], folder: str) -> list[str]:
        hosts = ["--hosts", ",".join(addresses), "--host-index", str(host)]
        limits = ["--min-hosts", str(MIN_HOSTS), "--max-restarts", "99"]
        train = [recovery, "--train", "tfmw", "--backup_dir", folder]
        return [sys.executable, "-m", "tfmw", "run", *hosts, *limits, *train]

    def torchrun(host: int, addresses: Sequence[str], folder: str) -> list[str]:
        command = [torch_python or "", "-m", "torch.distributed.run"]
        command += ["--nnodes", f"{MIN_HOSTS}:{HOSTS}", "--nproc-per-node", "1"]
        command += ["--max-restarts", "99", "--rdzv-backend", "c10d", "--rdzv-id", "bench"]
        command += ["--rdzv-endpoint", f"{addresses[0]}:29400", "--local-addr", addresses[host]]
        # torchrun cannot infer it in a namespace: all of them have this machine's name.
        conf = {"is_host": "true" if host == 0 else "false", **TORCHRUN_TIMEOUTS}
        command += ["--rdzv-conf", ",".join(f"{name}={value}" for name, value in conf.items())]
        return [*command, recovery, "--train", "torch", "--backup_dir", folder]

    return {"tfmw run --hosts": tfmw, **({"torchrun": torchrun} if torch_python else {})}


class Training:
    """One training on all hosts, and the output of its workers.

    Args:
        way: the contender that starts it.
        network: the hosts.
        folder: directory of the backups.
    """

    def __init__(self, way: Way, network: Namespaces, folder: str) -> None:
        self._way = way
        self._network = network
        self._folder = folder
        self._events: queue.SimpleQueue[tuple[float, int, str]] = queue.SimpleQueue()
        self._processes: list[subprocess.Popen[str]] = []
        self._current: dict[int, subprocess.Popen[str]] = {}
        self.workers: dict[int, int] = {}  # host -> process id of its worker
        self.steps: dict[int, float] = {}  # step -> when it was first made

    def __enter__(self) -> Training:
        for host in range(HOSTS):
            self.start(host)
        return self

    def __exit__(self, *_: object) -> None:
        for host in range(HOSTS):
            self.stop(host)

    def start(self, host: int) -> None:
        """Starts a host."""
        environ: Mapping[str, str] = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "PYTHONUNBUFFERED": "1",
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "OMP_NUM_THREADS": "1",
            "TF_NUM_INTRAOP_THREADS": "1",
            "TFMW_TOKEN": TOKEN,
            "GLOO_SOCKET_IFNAME": "eth0",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }
        command = self._way(host, self._network.addresses, self._folder)
        process = subprocess.Popen(
            [*self._network.command(host), *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environ,
            start_new_session=True,
        )
        self._current[host] = process
        threading.Thread(target=self._read, args=(host, process), daemon=True).start()

    def _read(self, host: int, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with contextlib.suppress(ValueError):
            for line in process.stdout:
                self._events.put((time.monotonic(), host, line))

    def has_ended(self, host: int) -> bool:
        """Whether the agent of a host has given up."""
        process = self._current.get(host)
        return process is not None and process.poll() is not None

    def stop(self, host: int) -> None:
        """Ends a host at once: its agent, and its worker."""
        process = self._current.pop(host, None)
        if process is None:
            return
        for pid in (process.pid, self.workers.pop(host, 0)):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if pid:
                    os.killpg(os.getpgid(pid), signal.SIGKILL)
        process.wait()

    def lines(self, timeout_s: float) -> Iterator[tuple[float, int, str]]:
        """Lines that workers print, as (when, host, line), for so many seconds."""
        deadline = time.monotonic() + timeout_s
        while (left_s := deadline - time.monotonic()) > 0:
            with contextlib.suppress(queue.Empty):
                when, host, line = self._events.get(timeout=left_s)
                if found := re.search(r"script (\d+)", line):
                    self.workers[host] = int(found[1])
                if found := re.search(r"made step (\d+)", line):
                    self.steps.setdefault(int(found[1]), when)
                yield when, host, line

    def new_steps(self, hosts: set[int], count: int = 1, again: Collection[int] = ()) -> float:
        """Waits until each of these hosts has made so many steps.

        Returns:
            Monotonic time of the last host's step; infinity: not within TIMEOUT_S.

        Args:
            hosts: the hosts to wait for.
            count: number of steps of each host.
            again: those of which only the steps of a worker count that starts after this call.
        """
        made = dict.fromkeys(hosts, 0)
        started, called = hosts.difference(again), time.monotonic()
        for when, host, line in self.lines(TIMEOUT_S):
            if when < called:
                continue
            if "script " in line:
                started.add(host)
            if host in made and host in started and "made step " in line:
                made[host] += 1
                if min(made.values()) >= count:
                    return when
        return math.inf


def kill_of_a_worker(way: Way, network: Namespaces) -> float:
    """Seconds from `kill -9` of a worker to the first new step of all hosts."""
    with tempfile.TemporaryDirectory() as folder, Training(way, network, folder) as training:
        training.new_steps(set(range(HOSTS)), WARM_STEPS)
        killed = time.monotonic()
        os.kill(training.workers[HOSTS - 1], signal.SIGKILL)
        return training.new_steps(set(range(HOSTS)), again=[HOSTS - 1]) - killed


def cut_of_a_link(way: Way, network: Namespaces) -> float:
    """Seconds from the end of a host's link to the first new step of the others."""
    with tempfile.TemporaryDirectory() as folder, Training(way, network, folder) as training:
        training.new_steps(set(range(HOSTS)), WARM_STEPS)
        cut = time.monotonic()
        network.cut(None, HOSTS - 1)
        try:
            return training.new_steps(set(range(HOSTS - 1)), again=range(HOSTS - 1)) - cut
        finally:
            network.mend(None, HOSTS - 1)


class Useful(NamedTuple):
    """Progress of a training within a given time.

    Attributes:
        steps: number of steps.
        lost: {kind of fault: seconds from each of them until the first new step}.
    """

    steps: int
    lost: dict[str, list[float]]

    def described(self) -> str:
        """Seconds lost by each kind of fault: the median, and the number of faults."""
        return ", ".join(
            f"{kind} {statistics.median(lost):.1f} ({len(lost)})"
            for kind, lost in self.lost.items()
        )


def steps_in(way: Way, network: Namespaces, seconds: float, seed: int | None) -> Useful:
    """Steps made in a time, counted from the first one.

    Args:
        way: the contender that starts the training.
        network: its hosts.
        seconds: the length of the measurement.
        seed: seed of the schedule of faults; None: without faults.
    """
    lost: dict[str, list[float]] = {}
    faults = schedule(seconds, seed) if seed is not None else []
    with tempfile.TemporaryDirectory() as folder, Training(way, network, folder) as training:
        if math.isinf(training.new_steps(set(range(HOSTS)), 1)):
            raise RuntimeError("no first step")
        began = time.monotonic()
        happened: list[tuple[float, str]] = []
        for at, fault in [*faults, (seconds, "end:0")]:
            for _ in training.lines(began + at - time.monotonic()):
                pass
            what, host = fault.split(":")[0], int(fault.split(":")[1])
            happened.append((time.monotonic(), what))
            if what == "kill" and host in training.workers:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(training.workers[host], signal.SIGKILL)
            elif what in ("cut", "mend"):
                getattr(network, what)(None, host)
                if what == "mend" and training.has_ended(host):
                    training.stop(host)
                    training.start(host)
            elif what == "stop":
                training.stop(host)
            elif what == "start":
                training.start(host)
        for when, what in happened[:-1]:
            made = max(step for step, at in training.steps.items() if at <= when)
            again = [at for step, at in training.steps.items() if step > made]
            lost.setdefault(what, []).append(min(again, default=math.inf) - when)
        return Useful(max(training.steps) - min(training.steps), lost)


def schedule(seconds: float, seed: int) -> list[tuple[float, str]]:
    """12 kills, 3 cuts and 2 hosts that leave and come back in ten minutes; fewer in less time."""
    chance = random.Random(seed)
    share = seconds / 600.0
    faults: list[tuple[float, str]] = []
    slots = [(i + 0.5) * seconds / (17 * min(1.0, share) or 1) for i in range(int(17 * share))]
    kinds = chance.sample(["kill"] * 12 + ["cut"] * 3 + ["stop"] * 2, k=min(17, len(slots)))
    for at, kind in zip(slots, kinds, strict=False):
        # Host 0 holds torchrun's store: without it torchrun cannot continue at all.
        host = chance.randrange(HOSTS) if kind == "kill" else chance.randrange(1, HOSTS)
        faults.append((at, f"{kind}:{host}"))
        if kind != "kill":
            back = {"cut": "mend", "stop": "start"}[kind]
            faults.append((at + min(15.0, seconds / 34), f"{back}:{host}"))
    return sorted(faults)


def main(recovery: str, torch_python: str | None, repeat: int, goodput_minutes: float) -> None:
    """Prints a row for each contender; "inf" stands for more than TIMEOUT_S seconds."""
    with Namespaces(HOSTS) as network:
        print(f"{'seconds':20}{'kill -9 of a worker':>22}{'link cut':>12}{'goodput':>10}")
        for name, way in ways(recovery, torch_python).items():
            kills = [kill_of_a_worker(way, network) for _ in range(repeat)]
            cuts = [cut_of_a_link(way, network) for _ in range(repeat)]
            row = f"{name:20}{statistics.median(kills):22.2f}{statistics.median(cuts):12.2f}"
            if goodput_minutes:
                seconds = 60.0 * goodput_minutes
                undisturbed = (
                    steps_in(way, network, seconds / UNDISTURBED, None).steps * UNDISTURBED
                )
                useful = steps_in(way, network, seconds, 7)
                row += f"{useful.steps / undisturbed:10.2f}  seconds lost: {useful.described()}"
            print(row, flush=True)
    if not torch_python:
        print("torchrun: torch is not installed; pip install torch, or --torch-python")
