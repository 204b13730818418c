"""All-reduce of workers on several machines: in two levels, and over one ring.

    sudo python -m bench.machines [--machines 2] [--workers 2] [--gbits 1 10] [--mb 0.001 11 64]

Each machine is a network namespace; a link to the next one sends no faster than the rate (tc-tbf(8)
of the kernel). Milliseconds of a sum: medians of rounds in which both ways take turns. A further
column has the time that the network alone would take for the bytes that each machine sends. Needs
root, and Linux with ip and tc (iproute2).
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import multiprocessing
import os
import statistics
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from tfmw.train.mirrored.collectives import hierarchy
from tfmw.train.mirrored.collectives.all_reduce import AllReduce
from tfmw.train.mirrored.collectives.ring import connect

ROUNDS, SECONDS = 7, 0.5
NAME, NETWORK = "tfmwmachine", "10.88.9"
_CLONE_NEWNET = 0x40000000
WAYS = ("two levels", "one ring")


@contextlib.contextmanager
def machines(count: int, gbits: float) -> Iterator[list[str]]:
    """Namespaces on a bridge, named NAME0, ...; yields their addresses."""
    addresses = [f"{NETWORK}.{machine + 1}" for machine in range(count)]
    for machine in range(count):  # removes the namespaces of a run that was killed
        _run(f"ip netns del {NAME}{machine}", check=False)
        _run(f"ip link del {NAME}{machine}", check=False)
    _run(f"ip link del {NAME}", check=False)
    with contextlib.ExitStack() as undo:
        _run(f"ip link add {NAME} type bridge")
        undo.callback(_run, f"ip link del {NAME}")
        _run(f"ip link set {NAME} up")
        for machine, address in enumerate(addresses):
            name = f"{NAME}{machine}"
            _run(f"ip netns add {name}")
            undo.callback(_run, f"ip netns del {name}")
            _run(f"ip link add {name} type veth peer eth0 netns {name}")
            undo.callback(_run, f"ip link del {name}")  # the kernel removes namespaces late
            _run(f"ip link set {name} master {NAME} up")
            _run(f"ip -n {name} addr add {address}/24 dev eth0")
            for device in ("eth0", "lo"):
                _run(f"ip -n {name} link set {device} up")
            bucket = f"rate {gbits}gbit burst {max(256, int(256 * gbits))}kb latency 50ms"
            _run(f"tc -n {name} qdisc add dev eth0 root tbf {bucket}")
        yield addresses


def _run(command: str, check: bool = True) -> None:
    subprocess.run(command.split(), check=check, stderr=None if check else subprocess.DEVNULL)


class Meeting:
    """An all-gather of Python values between processes of this machine."""

    def __init__(self, size: int):
        self._barrier = multiprocessing.Barrier(size)
        self._values = multiprocessing.Manager().list([None] * size)

    def from_all(self, rank: int, value: Any) -> list[Any]:
        """Every process's value, by rank."""
        self._values[rank] = value
        self._barrier.wait()
        values = list(self._values)
        self._barrier.wait()
        return values


def worker(
    rank: int, per_machine: int, addresses: list[str], mb: list[float], meeting: Meeting, found: Any
) -> None:
    """One worker: enters its machine's namespace, connects both ways, and measures them."""
    machine = rank // per_machine
    with open(f"/var/run/netns/{NAME}{machine}") as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    hosts = [address for address in addresses for _ in range(per_machine)]
    known = [n // per_machine for n in range(len(hosts))]

    def connected(places: list[Any]) -> AllReduce:
        join = functools.partial(
            connect, rank, hosts, b"bench", lambda value: meeting.from_all(rank, value)
        )
        return hierarchy.connect(rank, places, join)

    rings = dict(zip(WAYS, (connected(known), connected([None] * len(hosts))), strict=True))
    for size in mb:
        array: np.ndarray = np.ones(max(1, int(size * 1e6) // 4), np.float32)
        times: dict[str, list[float]] = {way: [] for way in rings}
        for way, ring in [*rings.items()] * (ROUNDS + 1):
            begin = time.perf_counter()
            once = ring.sum(array.copy())
            # The first worker decides how many fit.
            fit = np.array([SECONDS / max(1e-6, time.perf_counter() - begin)])
            many = max(1, min(200, int(ring.broadcast(fit)[0])))
            begin = time.perf_counter()
            for _ in range(many):
                once = ring.sum(array.copy())
            times[way].append((time.perf_counter() - begin) / many)
            assert once[0] == len(hosts)
        if rank == 0:
            found.put({way: 1e3 * statistics.median(spans[1:]) for way, spans in times.items()})
    meeting.from_all(rank, None)
    for ring in rings.values():
        ring.close()


def main() -> None:
    """Measures each rate and size, and prints a table."""
    flags = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    flags.add_argument("--machines", type=int, default=2)
    flags.add_argument("--workers", type=int, default=2, help="of each machine")
    flags.add_argument("--gbits", type=float, nargs="+", default=[1, 10])
    flags.add_argument("--mb", type=float, nargs="+", default=[0.001, 11, 64])
    options = flags.parse_args()
    size = options.machines * options.workers
    print("| Gbit/s | MB | two levels, ms | network alone | one ring, ms | network alone | ratio |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for gbits in options.gbits:
        with machines(options.machines, gbits) as addresses:
            meeting = Meeting(size)
            found: Any = multiprocessing.Queue()
            arguments = (options.workers, addresses, options.mb, meeting, found)
            processes = [
                multiprocessing.Process(target=worker, args=(rank, *arguments), daemon=True)
                for rank in range(size)
            ]
            for process in processes:
                process.start()
            for mb in options.mb:
                ms = found.get(timeout=300)
                alone = [2 * (n - 1) / n * mb * 8 / gbits for n in (options.machines, size)]
                print(
                    f"| {gbits:g} | {mb:g} | {ms[WAYS[0]]:.2f} | {alone[0]:.2f} | "
                    f"{ms[WAYS[1]]:.2f} | {alone[1]:.2f} | {ms[WAYS[0]] / ms[WAYS[1]]:.2f} |",
                    flush=True,
                )
            for process in processes:
                process.join()


if __name__ == "__main__":
    main()
