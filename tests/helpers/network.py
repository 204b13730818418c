"""Machines on one machine, for engines: each has an address, and a folder that no other one sees.

    with Machines(2, folder) as machines:
        subprocess.Popen([*machines.command(0), "slurmd", ...])
        machines.unplug(1)

Network namespaces on a bridge, and a mount namespace for each command; as root.
"""

from __future__ import annotations

import contextlib
import fcntl
import subprocess
from pathlib import Path

_BRIDGE, _NETWORK = "tfmwenginebr", "10.88.9"


class Machines:
    """See the module.

    Args:
        count: how many.
        folder: its folder `own` is another one on each machine.

    Raises:
        PermissionError: this machine does not allow it; the message names the rights.
    """

    gateway = f"{_NETWORK}.254"
    """The address of the machine on which the tests run."""

    def __init__(self, count: int, folder: Path) -> None:
        self.addresses = [f"{_NETWORK}.{i + 1}" for i in range(count)]
        self.own = folder / "own"
        """A folder whose content is another one on each machine."""
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Machines:
        with contextlib.ExitStack() as stack:
            # One at a time on this machine: names and addresses are the same for all.
            turn = stack.enter_context(open("/tmp/tfmw-machines.lock", "w"))
            fcntl.flock(turn, fcntl.LOCK_EX)
            self._remove()  # those of a test that was killed
            stack.callback(self._remove)
            try:
                self._add()
            except (OSError, subprocess.CalledProcessError) as error:
                detail = getattr(error, "stderr", None) or error
                raise PermissionError(
                    "no network namespaces: root, or CAP_SYS_ADMIN and CAP_NET_ADMIN, and ip of "
                    f"iproute2 are needed ({str(detail).strip()})"
                ) from error
            self.own.mkdir()
            self._stack = stack.pop_all()
        return self

    def _add(self) -> None:
        _ip("link", "add", _BRIDGE, "type", "bridge")
        _ip("addr", "add", f"{self.gateway}/24", "dev", _BRIDGE)
        _ip("link", "set", _BRIDGE, "up")
        for i, address in enumerate(self.addresses):
            name, cable = self._name(i), self._cable(i)
            _ip("netns", "add", name)
            _ip("link", "add", cable, "type", "veth", "peer", "eth0", "netns", name)
            _ip("link", "set", cable, "master", _BRIDGE, "up")
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
            _ip("-n", name, "link", "set", "lo", "up")
            # By it programs find out which address is theirs; nothing is sent there.
            _ip("-n", name, "route", "add", "default", "via", self.gateway)

    def _remove(self) -> None:
        with contextlib.suppress(FileNotFoundError):  # of ip
            for i in range(len(self.addresses)):
                _ip("netns", "del", self._name(i), check=False)
                _ip("link", "del", self._cable(i), check=False)
            _ip("link", "del", _BRIDGE, check=False)

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def command(self, machine: int) -> list[str]:
        """Prefix of a command for a machine; not `ip netns exec`, which hides /sys/fs/cgroup."""
        mounted = f'mount -t tmpfs none {self.own} && exec "$@"'
        enter = ["nsenter", f"--net=/var/run/netns/{self._name(machine)}"]
        return [*enter, "unshare", "--mount", "sh", "-c", mounted, "sh"]

    def unplug(self, machine: int) -> None:
        """Takes a machine's cable out: not a word comes through any more."""
        _ip("link", "set", self._cable(machine), "down")

    def plug(self, machine: int) -> None:
        """Puts it back."""
        _ip("link", "set", self._cable(machine), "up")

    def _name(self, machine: int) -> str:
        return f"tfmwengine{machine}"

    def _cable(self, machine: int) -> str:
        return f"tfmwenginev{machine}"


def _ip(*words: str, check: bool = True) -> None:
    subprocess.run(["ip", *words], check=check, capture_output=True, text=True)
