"""A network in user space, for Linux and root: packets take their time between namespaces.

    with Network(workers=2, bits_per_s=1e9, delay_s=0.001) as network:
        subprocess.Popen([*network.inside(0), "ping", network.addresses[1]])

Each worker has a network namespace with one device, tun(4). A process reads its packets, holds them
for as long as a link of that rate and one-way delay would, and delivers them. The kernel's
tc-netem(8) does this better, but many kernels are built without it.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import fcntl
import math
import multiprocessing
import os
import select
import struct
import subprocess
import time
from typing import Any

_TUNSETIFF, _IFF_TUN_NO_PI = 0x400454CA, 0x0001 | 0x1000  # linux/if_tun.h
_CLONE_NEWNET = 0x40000000
_PR_SET_TIMERSLACK = 29
_MTU = 65000  # few large packets: the process needs time for each of them


class Network:
    """Network namespaces of `workers`, connected to each other.

    Args:
        bits_per_s: rate at which each worker may send.
        delay_s: one-way delay of a packet.

    Attributes:
        addresses: addresses of the workers.
    """

    def __init__(self, workers: int, bits_per_s: float = math.inf, delay_s: float = 0.0):
        self.addresses = [f"10.77.0.{worker + 1}" for worker in range(workers)]
        self._link = bits_per_s, delay_s
        self._stack = contextlib.ExitStack()
        self._holders: list[int] = []  # processes that keep the namespaces

    def __enter__(self) -> Network:
        with contextlib.ExitStack() as undo:
            for _ in self.addresses:
                holder = subprocess.Popen(
                    ["unshare", "--net", "sh", "-c", "ip link set lo up && echo up && exec cat"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
                undo.callback(holder.wait)
                undo.callback(holder.kill)
                assert holder.stdout is not None
                assert holder.stdout.readline() == "up\n"
                self._holders.append(holder.pid)
            ready = multiprocessing.Event()
            relay = multiprocessing.Process(
                target=_relay, args=(self._holders, *self._link, ready), daemon=True
            )
            relay.start()
            undo.callback(relay.join)
            undo.callback(relay.kill)
            if not ready.wait(10):
                raise RuntimeError("the devices could not be made: this needs root and tun(4)")
            for worker, address in enumerate(self.addresses):
                for words in (f"address add {address}/24 dev wire", f"link set wire mtu {_MTU} up"):
                    subprocess.run([*self.inside(worker), "ip", *words.split()], check=True)
            self._stack = undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def inside(self, worker: int) -> list[str]:
        """Prefix of a command that is to run in a worker's namespace."""
        return ["nsenter", "--net", "--target", str(self._holders[worker])]


def _relay(holders: list[int], bits_per_s: float, delay_s: float, ready: Any) -> None:
    """Takes packets and hands them over, until it is killed."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_TIMERSLACK, 1)  # nanoseconds that waking up may be late
    tuns = []
    for pid in holders:
        with open(f"/proc/{pid}/ns/net") as namespace:
            if libc.setns(namespace.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")
        tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH22x", b"wire", _IFF_TUN_NO_PI))
        tuns.append(tun)
    ready.set()

    waiting: list[collections.deque[tuple[float, int, bytes]]] = [collections.deque() for _ in tuns]
    link_is_free = [0.0 for _ in tuns]
    while True:
        next_due = min((packets[0][0] for packets in waiting if packets), default=math.inf)
        left = None if next_due == math.inf else max(0.0, next_due - time.monotonic())
        readable, _, _ = select.select(tuns, [], [], left)
        now = time.monotonic()
        for worker, tun in enumerate(tuns):
            if tun in readable:
                packet = os.read(tun, _MTU)
                begin = max(now, link_is_free[worker])
                link_is_free[worker] = begin + 8 * len(packet) / bits_per_s
                # The last byte of an IPv4 destination says which worker; others are not for us.
                target = packet[19] - 1
                if packet[0] >> 4 == 4 and target < len(tuns):
                    waiting[worker].append((link_is_free[worker] + delay_s, target, packet))
            while waiting[worker] and waiting[worker][0][0] <= now:
                _, target, packet = waiting[worker].popleft()
                with contextlib.suppress(OSError):  # a full queue loses packets, as networks do
                    os.write(tuns[target], packet)
