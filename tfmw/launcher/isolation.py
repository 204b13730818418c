"""A private network for the tasks of a local cluster: loopback, and nothing else.

    network = create()                       # Network, or Impossible("why")
    with Host(network.namespaces) as host: ...

tf.distribute's gRPC server has no authentication and listens on all addresses: whoever reaches the
port can run code. In a network namespace of their own the tasks reach each other and nobody else,
and nobody else reaches them. That is also the price: no downloads, no gs:// or s3://.

A helper makes the namespaces and sends descriptors of them (a running Python, which may have
threads, could not enter a user namespace itself); each task enters them before it does anything
else, and so does whoever comes later. They vanish with the last task. Files keep their owner: the
user namespace maps the user to himself.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import dataclasses
import fcntl
import os
import re
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000  # sched.h
SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 0x1  # netdevice(7)
PR_SET_DUMPABLE = 4  # prctl(2)
_TIMEOUT_S = 10.0

# Places in the network that a program is told of by its flags: "--data_dir=gs://bucket/x".
_URL = re.compile(r"\b[a-z][a-z0-9+.]*://(?!/)", re.IGNORECASE)
# Variables that are set for programs which go into the network.
_CLIENTS = (
    "AIP_MODEL_DIR",
    "AWS_ACCESS_KEY_ID",
    "AWS_ENDPOINT_URL",
    "GOOGLE_APPLICATION_CREDENTIALS",
    "MLFLOW_TRACKING_URI",
    "TFDS_DATA_DIR",
    "WANDB_API_KEY",
)


class Impossible(Exception):
    """This system allows no private network; the message is a clause that says why."""


@dataclasses.dataclass(frozen=True)
class Network:
    """A private network.

    Args:
        namespaces: descriptors, in the order in which a process enters them.
    """

    namespaces: tuple[int, ...]

    def close(self) -> None:
        """Lets go of it; it lives as long as a process is in it."""
        for descriptor in self.namespaces:
            os.close(descriptor)


def create() -> Network:
    """A new private network with its loopback up.

    Raises:
        Impossible: the system doesn't allow it.
    """
    if not sys.platform.startswith("linux"):
        raise Impossible("only Linux has network namespaces")
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(_TIMEOUT_S)
        helper = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        theirs.close()
        try:
            message, descriptors, _, _ = socket.recv_fds(ours, 4096, 2)
        except OSError as error:
            raise Impossible(str(error)) from error
        finally:
            helper.kill()
            helper.wait()
    if not descriptors:
        raise Impossible(message.decode() or "the helper gave no answer")
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    return Network(tuple(descriptors))


def objection(
    argv: Sequence[str],
    environ: Mapping[str, str],
    *,
    routes: Path = Path("/proc/net/route"),
    addresses: Path = Path("/proc/net/if_inet6"),
) -> tuple[str, bool] | None:
    """What speaks against a private network where nobody asked for one.

    Args:
        argv: the program and its flags.
        environ: the tasks' environment.
        routes: this machine's IPv4 routes.
        addresses: this machine's IPv6 addresses.

    Returns:
        (a clause that says what, whether the tasks' ports can be reached by others), or None.
    """
    if not _reachable(routes, addresses):
        return "this machine is in no network", False
    for word in argv:
        if _URL.search(word):
            # Here, as the helper process runs this file without the package.
            from tfmw.runtime import secrets

            return f"{secrets.without_secrets(word)!r} names a place in the network", True
    for name, value in sorted(environ.items()):
        if value and (name.lower() in ("http_proxy", "https_proxy", "all_proxy")):
            return f"{name} is set", True
        if value and name in _CLIENTS and (name != "TFDS_DATA_DIR" or _URL.search(value)):
            return f"{name} is set", True
    return None


def _reachable(routes: Path, addresses: Path) -> bool:
    """Whether this machine has another interface than loopback; True where that is unknown."""
    try:
        # proc_net(5): a line of titles, then "eth0 000011AC 00000000 ..."
        if any(line.split()[0] != "lo" for line in routes.read_text().splitlines()[1:]):
            return True
    except OSError:
        return True
    with contextlib.suppress(OSError):  # no such file: no IPv6
        # "fe80...0001 02 40 20 80 eth0"
        return any(line.split()[-1] != "lo" for line in addresses.read_text().splitlines())
    return False


# ---- in the helper, and in each task -----------------------------------------------------------


def enter(namespaces: Sequence[int]) -> None:
    """Puts the calling process, which has one thread, into the namespaces. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    for descriptor in namespaces:
        system_call(libc, "setns", descriptor, 0)
        os.close(descriptor)
    # A change of user namespace makes a process untouchable for debuggers, as if it were setuid.
    system_call(libc, "prctl", PR_SET_DUMPABLE, 1, 0, 0, 0)


def system_call(libc: ctypes.CDLL, name: str, *args: Any) -> None:
    """Calls a function of the C library; raises OSError, with its name, unless it returns 0."""
    if getattr(libc, name)(*args) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def _unshare() -> list[int]:
    """New namespaces for the calling process; descriptors of them, in the order of entering."""
    libc = ctypes.CDLL(None, use_errno=True)
    uid, gid = os.getuid(), os.getgid()
    names = ["net"]
    try:
        # Who may, needs no user namespace, in which he would lose his rights to others' files.
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
        answer = fcntl.ioctl(any_socket, SIOCGIFFLAGS, request)
        (flags,) = struct.unpack_from("h", answer, 16)
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", flags | IFF_UP))
    return [os.open(f"/proc/self/ns/{name}", os.O_RDONLY) for name in names]


def _help(control: int) -> None:
    with socket.socket(fileno=control) as launcher:
        try:
            descriptors = _unshare()
        except OSError as error:
            launcher.send((error.strerror or str(error)).encode())  # "unshare: Operation not..."
            return
        packed = array.array("i", descriptors)
        launcher.sendmsg([b"."], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, packed)])


if __name__ == "__main__":
    _help(int(sys.argv[1]))
