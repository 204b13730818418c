"""Connections between a controller and its tasks: proven, of any length, known to be alive."""

from __future__ import annotations

import contextlib
import queue
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from tfmw.engines import link as links
from tfmw.engines.link import LinkServer, Message, connect
from tfmw.errors import TfmwError
from tfmw.remote.channel import Forged

TOKEN = "a secret of the job"


@pytest.fixture
def inbox() -> Any:
    return queue.SimpleQueue()


@pytest.fixture
def server(inbox: Any) -> Iterator[LinkServer]:
    with LinkServer(TOKEN, inbox.put) as server:
        yield server


def test_messages_of_any_length_both_ways(server: LinkServer, inbox: Any) -> None:
    link = connect([("nowhere.invalid", 1), ("127.0.0.1", server.port)], TOKEN)
    body = bytes(range(256)) * 20_000  # five frames
    link.send("hello", body, rank=1)
    theirs, message = inbox.get(timeout=10)
    assert message == Message("hello", {"rank": 1}, body)
    theirs.send("start", b"", index=0)
    assert link.receive() == Message("start", {"index": 0}, b"")
    assert link.local_host == "127.0.0.1"
    link.close()
    assert inbox.get(timeout=10) == (theirs, None)


def test_who_does_not_know_the_token_is_not_heard(server: LinkServer, inbox: Any) -> None:
    link = connect([("127.0.0.1", server.port)], "another secret")
    link.send("hello", rank=1)
    with pytest.raises((OSError, Forged)):
        link.receive()  # closed by the server, which sends nothing before
    link.close()
    with socket.create_connection(("127.0.0.1", server.port)) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" * 10)
        with contextlib.suppress(ConnectionResetError):
            while stranger.recv(1024):
                pass
    with pytest.raises(queue.Empty):
        inbox.get(timeout=0.1)


def test_silent_side_is_lost(
    server: LinkServer, inbox: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "SILENCE_S", 0.3)
    monkeypatch.setattr(links.Link, "beat", lambda self: None)
    link = connect([("127.0.0.1", server.port)], TOKEN)
    link.send("hello")
    theirs, _ = inbox.get(timeout=10)
    assert inbox.get(timeout=10) == (theirs, None)
    link.close()


def test_signs_of_life_keep_it(
    server: LinkServer, inbox: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "SILENCE_S", 2.0)
    monkeypatch.setattr(links, "BEAT_S", 0.1)
    link = connect([("127.0.0.1", server.port)], TOKEN)
    link.send("hello")
    theirs, _ = inbox.get(timeout=10)
    with pytest.raises(queue.Empty):
        inbox.get(timeout=3)
    theirs.send("still here")
    assert link.receive().kind == "still here"
    link.close()


def test_unreachable_controller_is_named() -> None:
    ticks = iter([0.0, 100.0])
    with pytest.raises(TfmwError, match=r"controller at none of 127\.0\.0\.1:1 \(Connection refus"):
        connect([("127.0.0.1", 1)], TOKEN, timeout_s=10, clock=lambda: next(ticks))
