"""Strangers at the port of the supervisor that leads a run: nothing changes. `make nightly`."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from tests.helpers.hosts import Hosts, Loopback, Namespaces, network

pytestmark = [pytest.mark.process, pytest.mark.nightly, pytest.mark.timeout(1200)]

TOKEN, ANOTHER = "0123456789abcdef" * 4, "fedcba9876543210" * 4
CONNECTIONS = 100_000
_ALL = 3  # ETH_P_ALL of packet(7): with another one, what a bridge forwards is not seen
_IPV4 = b"\x08\x00"
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close resets, so that no port stays in TIME_WAIT


class Wiretap:
    """Bytes that hosts send each other, as their cables carry them.

    Args:
        cables: of the hosts; addresses of loopback have none, and nothing is recorded.
    """

    def __init__(self, cables: Loopback | Namespaces) -> None:
        self._cables = cables
        # By sender, its port, and receiver: by sequence number. Each is seen on two cables.
        self._parts: dict[tuple[str, int, str], dict[int, bytes]] = {}
        self._done = threading.Event()

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Records until the end of the `with`."""
        if not isinstance(self._cables, Namespaces):
            yield
            return
        with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL)) as tap:
            tap.settimeout(0.2)
            thread = threading.Thread(target=self._record, args=(tap,))
            thread.start()
            try:
                yield
            finally:
                self._done.set()
                thread.join()

    def _record(self, tap: socket.socket) -> None:
        while not self._done.is_set():
            with contextlib.suppress(TimeoutError):
                frame = tap.recv(1 << 17)
                if frame[12:14] == _IPV4 and frame[14 + 9] == socket.IPPROTO_TCP:
                    self._take(frame[14:])

    def _take(self, packet: bytes) -> None:
        header = (packet[0] & 15) * 4
        source, target = map(socket.inet_ntoa, (packet[12:16], packet[16:20]))
        port, _, sequence = struct.unpack_from("!HHI", packet, header)
        begin = header + (packet[header + 12] >> 4) * 4
        data = packet[begin : struct.unpack_from("!H", packet, 2)[0]]
        if {source, target} <= set(self._cables.addresses) and data:
            self._parts.setdefault((source, port, target), {})[sequence] = data

    def conversations(self, sender: int, to: int) -> list[bytes]:
        """Bytes that a host has sent to another host's supervisor, by connection."""
        ends = self._cables.addresses[sender], self._cables.addresses[to]
        sent = [
            b"".join(data for _, data in sorted(parts.items()))
            for (source, _, target), parts in self._parts.items()
            if (source, target) == ends
        ]
        return [conversation for conversation in sent if b'"is": "Ready"' in conversation]


def stranger(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=60)


def send_until_closed(address: str, data: bytes) -> None:
    with stranger(address) as other, contextlib.suppress(ConnectionError):
        other.sendall(data)
        while other.recv(1 << 16):
            pass


def knock(address: str, count: int) -> None:
    """Very many connections, one after the other."""
    for _ in range(count):
        with stranger(address) as other:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)


def test_strangers_change_nothing_in_a_run(tmp_path):
    epochs, go = 6, tmp_path / "go"
    flags = [f"--backup_dir={tmp_path}/backup", f"--epochs={epochs}", "--pause=0.3", f"--go={go}"]
    options = ["--max-restarts=9", "--min-hosts=2", "--rejoin-timeout=1"]
    with network(3) as cables, contextlib.ExitStack() as stack:
        tap = Wiretap(cables)
        with tap.recording():
            hosts = stack.enter_context(
                Hosts(
                    *(tmp_path, cables, *options),
                    program="hosts_fit.py",
                    flags=flags,
                    env={"TFMW_TOKEN": TOKEN},
                )
            )
            hosts.steps(0, hosts=3)
        leads = hosts.leader()
        member, outsider = (leads + 1) % 3, (leads + 2) % 3
        # A host with another token is none of the run.
        hosts.kill(outsider)
        hosts.wait_for(leads, f"attempt 1 on .*, without {hosts.name(outsider)}")
        killed = hosts.processes[outsider]
        assert killed is not None
        killed.wait()
        began = hosts.now(outsider)
        hosts.start(outsider, TFMW_TOKEN=ANOTHER)
        hosts.wait_for(outsider, r"is its token \(TFMW_TOKEN\) the same", since=began)

        leader = hosts.addresses[leads]
        silent = [stack.enter_context(stranger(leader)) for _ in range(200)]
        for garbage in (b"GET / HTTP/1.1\r\n\r\n" * 9, b"\0" * 200, b"\xff" * (3 << 20)):
            send_until_closed(leader, garbage)
        conversations = tap.conversations(member, leads)
        assert len(conversations) >= isinstance(cables, Namespaces), "nothing to replay"
        for conversation in conversations:
            send_until_closed(leader, conversation)
        knock(leader, CONNECTIONS)
        for other in silent:
            with contextlib.suppress(ConnectionResetError):
                while other.recv(1 << 16):  # a nonce, and then nothing more
                    pass
        assert not [line for line in hosts.lines[outsider][began:] if "] step " in line]
        hosts.kill(outsider)
        go.touch()  # the last epoch begins
        statuses = hosts.end()
        assert statuses.pop(outsider) == -9
        assert statuses == [0, 0], hosts.output()
    record = hosts.record()
    assert (record["attempt"], record["policy"]["restarts"]) == (1, 1)  # for a host's death
    results = hosts.results()
    assert [worker["attempt"] for worker in results[:2]] == [1, 1]
    assert results[0]["weights"] == results[1]["weights"]
    np.testing.assert_allclose(results[0]["history"]["ids"], [47.5] * epochs, rtol=1e-6)
