"""Connections between processes of a run: proven, of any length, known to be alive, bounded."""

from __future__ import annotations

import contextlib
import os
import queue
import resource
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tfmw.cluster import sockets
from tfmw.cluster.wire import MOST_STRANGERS
from tfmw.errors import TfmwError
from tfmw.launcher.engines.agent import wait_connected
from tfmw.launcher.failure import Failure
from tfmw.launcher.options import RunOptions
from tfmw.launcher.remote.links import Forged, Frames, Links, Timing
from tfmw.launcher.remote.messages import (
    BackupFiles,
    End,
    Ended,
    HostHello,
    Join,
    Malformed,
    Ready,
    Setup,
    Start,
    decode,
    encode,
)
from tfmw.launcher.restart import AttemptOutcome

TOKEN = b"the token of these tests"
PATIENT = Timing(beat_s=0.1, silence_s=10.0, hello_s=10.0)
HELLO = HostHello(1, 0, ())


class Peer:
    """One process's links, and what they post."""

    def __init__(
        self,
        timing: Timing = PATIENT,
        token: bytes = TOKEN,
        listener: socket.socket | None = None,
    ) -> None:
        self.events: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        self.links = Links(token, self.events.put, timing, listener, lambda hello: "member")
        self.port = listener.getsockname()[1] if listener else 0

    def next(self) -> tuple[Any, ...]:
        return self.events.get(timeout=120)


@contextlib.contextmanager
def leader(timing: Timing = PATIENT) -> Iterator[Peer]:
    peer = Peer(timing, listener=sockets.listen())
    with peer.links:
        yield peer


@contextlib.contextmanager
def member(of: Peer, timing: Timing = PATIENT) -> Iterator[Peer]:
    """One that is connected; the first of its addresses cannot be reached."""
    peer = Peer(timing)
    with peer.links:
        addresses = [("nowhere.invalid", 1), ("127.0.0.1", of.port)]
        peer.links.dial("leader", addresses, lambda address: HostHello(1, 0, (address,)))
        assert peer.next() == ("leader_connected", "leader")
        assert of.next() == ("member_connected", "member")
        assert of.next() == ("from_member", "member", HostHello(1, 0, ("127.0.0.1",)))
        yield peer


def closed(other: socket.socket) -> bool:
    """Whether a stranger's connection is closed within its time."""
    other.settimeout(20)
    with contextlib.suppress(ConnectionResetError):
        while other.recv(1 << 16):
            pass
    return True


def test_messages_of_any_length_both_ways() -> None:
    with leader() as server, member(server) as client:
        backup = BackupFiles("step_1", bytes(range(256)) * 20_000)  # twenty frames
        client.links.to_leader(backup)
        assert server.next() == ("from_member", "member", backup)
        server.links.to_member("member", End(0))
        server.links.to_member("another", End(1))  # no such member exists
        assert client.next() == ("from_leader", End(0))
        client.links.to_leader(backup)
    assert server.next() == ("from_member", "member", backup)  # it has gone out before the end
    assert server.next()[:2] == ("member_lost", "member")


def test_who_does_not_know_the_token_is_not_heard() -> None:
    with leader() as server:
        client = Peer(token=b"another token")
        with client.links:
            client.links.dial("leader", [("127.0.0.1", server.port)], lambda _: HELLO)
            assert client.next()[:3] == ("not_connected", "leader", 1)
        with socket.create_connection(("127.0.0.1", server.port)) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" * 10)
            assert closed(stranger)
        assert server.events.empty()


def test_silent_side_is_lost_and_connects_again() -> None:
    short, mute = Timing(60.0, 0.5, 10.0), Timing(60.0, 10.0, 10.0)
    with leader(mute) as server, member(server, short) as client:
        assert client.next() == ("leader_lost", "leader", "no sign of life for 0.5 s")
        assert client.next() == ("leader_connected", "leader")
        found = {server.next()[0] for _ in range(3)}
        assert found == {"member_lost", "member_connected", "from_member"}


def test_signs_of_life_keep_it() -> None:
    with leader(Timing(0.1, 2.0, 10.0)) as server, member(server, Timing(0.1, 2.0, 10.0)) as client:
        with pytest.raises(queue.Empty):
            client.events.get(timeout=3)
        server.links.to_member("member", End(3))
        assert client.next() == ("from_leader", End(3))
        assert server.events.empty()


def test_silent_strangers_are_bounded_in_number_and_time() -> None:
    """Each keeps sending a byte, too, so that no single read takes long."""
    with leader(Timing(0.1, 10.0, 3.0)) as server, contextlib.ExitStack() as stack:
        before = threading.active_count()
        strangers = [
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            for _ in range(300)
        ]
        with member(server) as client:
            assert all(map(closed, strangers[: -MOST_STRANGERS - 1]))
            assert threading.active_count() < before + MOST_STRANGERS + 9
            with contextlib.suppress(ConnectionError):
                while True:
                    strangers[-1].sendall(b"\0")
                    client.links.to_leader(Ready((1,)))
                    assert server.next() == ("from_member", "member", Ready((1,)))
            assert all(map(closed, strangers))


def test_it_goes_on_after_it_was_out_of_descriptors() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    timing = Timing(0.1, 600.0, 600.0)  # so that no stranger is closed for its silence
    with leader(timing) as server, contextlib.ExitStack() as stack:
        silent, other = (stack.enter_context(socket.socket()) for _ in range(2))
        silent.connect(("127.0.0.1", server.port))
        silent.recv(32)  # it is accepted
        taken = [stack.enter_context(open(os.devnull)) for _ in range(64)]  # no number between
        resource.setrlimit(resource.RLIMIT_NOFILE, (taken[-1].fileno() + 1, hard))
        try:
            other.connect(("127.0.0.1", server.port))
            assert closed(silent)  # it gives its descriptor to the next one
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        stack.enter_context(member(server))


def test_unreachable_controller_is_named() -> None:
    client, ticks = Peer(), iter([0.0, 100.0])
    with client.links:
        client.links.dial("controller", [("127.0.0.1", 1)], lambda _: HELLO)
        with pytest.raises(
            TfmwError, match=r"controller at none of 127\.0\.0\.1:1 \(.*Connection refused"
        ):
            wait_connected(client.events, 10, lambda: next(ticks))


def test_a_frame_is_only_good_once_in_its_place_and_direction():
    key = b"key of this connection"
    seal, unseal = Frames(key, "client").seal, Frames(key, "client").unseal
    first, second = seal(b"first"), seal(b"second")
    mac = slice(4, 36)
    assert unseal(first[36:], first[mac]) == b"first"
    with pytest.raises(Forged):  # again
        unseal(first[36:], first[mac])
    with pytest.raises(Forged):  # after one that was left out
        Frames(key, "client").unseal(second[36:], second[mac])
    with pytest.raises(Forged):  # altered
        Frames(key, "client").unseal(b"First", first[mac])
    with pytest.raises(Forged):
        Frames(key, "server").unseal(first[36:], first[mac])
    other = b"key of another one"
    with pytest.raises(Forged):
        Frames(other, "client").unseal(first[36:], first[mac])


MESSAGES = [
    Setup(
        ("call",),
        RunOptions(preempt_grace_s=1),
        {},
        Start("", 2, (0,), {}, (("ps", 1),)),
        {"A": "b"},
        "/a",
        False,
        80,
        True,
        b"\n\0",
    ),
    Join({"tfmw": "1"}, 3, -1),
    Start("run", 2, (0, 2), {"worker": ("h0:1", "h2:1")}, (("worker", 1),)),
    Ended(2, AttemptOutcome(done=True, step=3)),
    Ended(
        2, AttemptOutcome(failures=(Failure("worker 1", log=Path("/a/log"), host="h1"),)), b"result"
    ),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_messages_keep_their_shape(message):
    data = encode(message)
    assert decode(data) == message
    data, _, _ = data.partition(b"\n")
    for wrong in (
        data.replace(b'"is"', b'"was"'),
        data[:-1],
        data[:-1] + b', "more": 1}',
        b"[" * 100_000,
        b'{"is": "Ready", "ports": ["1"]}',
        b'{"is": "Ready", "ports": [true]}',
        b'{"is": "Ended", "attempt": 1, "report": {}}',
        b'{"is": "Settings"}',
        b"null",
    ):
        with pytest.raises(Malformed):
            decode(wrong)
