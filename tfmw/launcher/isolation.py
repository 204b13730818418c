"""A private network for the tasks of a local cluster, with a loopback interface only.

    network = create([5000])                 # Network, or Impossible("why")
    with Spawner(network.namespaces) as spawner: ...
    network.listeners[0].accept()            # a task's connection to the launcher

tf.distribute's gRPC server has no authentication and listens on all addresses: anyone who can
connect to the port can run code. In a network namespace of their own the tasks connect to each
other only, and no other process can connect to them. A socket belongs to the namespace in which it
was created, in any process that has its descriptor. So the launcher can accept connections of
tasks, and connect to outside servers for them (see `network`).

A helper process creates the namespaces and the sockets, and sends their descriptors: the launcher
may have threads, and a process with threads cannot enter a user namespace. Each task enters the
namespaces first. They end with the last task. Files keep their owner, because the user namespace
maps the user to itself.

The helper runs this file by its path, without the package (`python -I -S`): import only the
standard library here.
"""

from __future__ import annotations

import ctypes
import dataclasses
import fcntl
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PROXY_PORT = 3128
"""The first listener's port, or the next free one; the system does not assign it to tasks."""

MAX_PORTS = 200  # a message may have 253 descriptors: SCM_MAX_FD, unix(7)

CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000  # sched.h
SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 0x1  # netdevice(7)
PR_SET_DUMPABLE = 4  # prctl(2)
_TIMEOUT_S = 10.0


class Impossible(Exception):
    """This system allows no private network; the message is the reason, as a clause."""


@dataclasses.dataclass(frozen=True)
class Network:
    """A private network.

    Args:
        namespaces: descriptors of the namespaces, in the order in which a process enters them.
        listeners: sockets that listen at 127.0.0.1 in the network: one for a proxy, then one for
            each requested port.
    """

    namespaces: tuple[int, ...]
    listeners: tuple[socket.socket, ...] = ()

    def close(self) -> None:
        """Closes the descriptors; the network exists until its last process ends."""
        for descriptor in self.namespaces:
            os.close(descriptor)
        for listener in self.listeners:
            listener.close()


def create(ports: Sequence[int] = ()) -> Network:
    """Creates a private network with its loopback interface up.

    Args:
        ports: ports of further listeners, in addition to that of a proxy.

    Raises:
        Impossible: the system doesn't allow a private network.
    """
    if not sys.platform.startswith("linux"):
        raise Impossible("only Linux has network namespaces")
    local, remote = socket.socketpair()
    with local, remote:
        local.settimeout(_TIMEOUT_S)
        helper = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, *map(str, [remote.fileno(), *ports])],
            pass_fds=[remote.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        remote.close()
        try:
            message, descriptors, _, _ = socket.recv_fds(local, 4096, 3 + MAX_PORTS)
        except OSError as error:
            raise Impossible(str(error)) from error
        finally:
            helper.kill()
            helper.wait()
    if not descriptors:
        raise Impossible(message.decode() or "the helper process did not respond")
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    namespaces = int(message)
    listeners = tuple(socket.socket(fileno=fd) for fd in descriptors[namespaces:])
    return Network(tuple(descriptors[:namespaces]), listeners)


# ---- in the helper, and in each task -----------------------------------------------------------


def enter(namespaces: Sequence[int]) -> None:
    """Moves this process, which must have one thread, into the namespaces. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    for descriptor in namespaces:
        system_call(libc, "setns", descriptor, 0)
        os.close(descriptor)
    # After a change of user namespace a process cannot be debugged, as if it were setuid.
    system_call(libc, "prctl", PR_SET_DUMPABLE, 1, 0, 0, 0)


def system_call(libc: ctypes.CDLL, name: str, *args: Any) -> None:
    """Calls a function of the C library; raises OSError, with its name, unless it returns 0."""
    if getattr(libc, name)(*args) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def _unshare() -> list[int]:
    """Moves this process into new namespaces; returns their descriptors, in order of entry."""
    libc = ctypes.CDLL(None, use_errno=True)
    uid, gid = os.getuid(), os.getgid()
    names = ["net"]
    try:
        # Privileged users skip the user namespace, which would drop their file permissions.
        system_call(libc, "unshare", CLONE_NEWNET)
    except OSError:
        system_call(libc, "unshare", CLONE_NEWUSER | CLONE_NEWNET)
        names = ["user", "net"]
        # user_namespaces(7): setgroups must be denied before an unprivileged user maps a group.
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sh22x", b"lo", 0)
        response = fcntl.ioctl(any_socket, SIOCGIFFLAGS, request)
        (flags,) = struct.unpack_from("h", response, 16)
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", flags | IFF_UP))
    return [os.open(f"/proc/self/ns/{name}", os.O_RDONLY) for name in names]


def _help(control: int, ports: Sequence[int]) -> None:
    proxy = next(port for port in range(PROXY_PORT, 1 << 16) if port not in ports)
    at = [("127.0.0.1", port) for port in (proxy, *ports[:MAX_PORTS])]
    with socket.socket(fileno=control) as launcher:
        try:
            namespaces, listeners = _unshare(), [*map(socket.create_server, at)]
        except OSError as error:
            # for example "unshare: Operation not..."
            launcher.send((error.strerror or str(error)).encode())
            return
        descriptors = [*namespaces, *(listener.fileno() for listener in listeners)]
        socket.send_fds(launcher, [str(len(namespaces)).encode()], descriptors)


if __name__ == "__main__":
    _help(int(sys.argv[1]), [int(port) for port in sys.argv[2:]])
