"""Senders of a hello: tasks of this run that know the token, and few strangers at a time."""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from tests.helpers.by_hand import free_addresses
from tfmw.cluster import addresses, handshake, wire
from tfmw.cluster.handshake import TaskDescription, serve_hellos
from tfmw.cluster.wire import Channel, NotATask

SILENT = 100  # connections that send nothing, more than a server keeps


class Served:
    """A task that greets others, and notes whom."""

    def __init__(self, run: str = ""):
        (self.address,) = free_addresses(1)
        self.greeted: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.server = serve_hellos(self.address, "test", self._greet, run)

    def _greet(self, hello: TaskDescription, channel: Channel) -> None:
        with channel:
            self.greeted.put(hello.task)
            channel.send({"problem": None})


@contextlib.contextmanager
def served(run: str = "") -> Iterator[Served]:
    task = Served(run)
    try:
        yield task
    finally:
        task.server.close()


def hello(run: str = "", task: str = "worker 1") -> TaskDescription:
    return TaskDescription("test", task, {task: "127.0.0.1:1"}, {}, run=run)


def is_greeted(address: str, sent: TaskDescription) -> bool:
    with handshake.connect(address, 30) as channel:
        channel.send(sent.message())
        try:
            return channel.receive(30) == {"problem": None}
        except ConnectionError:
            return False


def until_closed(connection: socket.socket) -> bytes:
    """Bytes received until the other side closes the connection."""
    received = b""
    with contextlib.suppress(ConnectionError):
        while data := connection.recv(4096):
            received += data
    return received


@pytest.fixture
def token(monkeypatch):
    monkeypatch.setenv("TFMW_TOKEN", "secret of this training")


@pytest.fixture
def no_token(monkeypatch):
    monkeypatch.delenv("TFMW_TOKEN", raising=False)


def test_a_task_that_knows_the_token_is_greeted(token):
    with served() as task:
        assert is_greeted(task.address, hello())
        assert task.greeted.get(timeout=120) == "worker 1"


def test_a_forged_hello_is_not(token):
    with served() as task:
        before = set(threading.enumerate())
        with socket.create_connection(addresses.split(task.address), timeout=30) as forged:
            Channel(forged).send(hello().message())
            received = until_closed(forged)
        assert b"problem" not in received  # a nonce and a proof
        for serving in set(threading.enumerate()) - before:
            serving.join(30)  # it counts after it has closed the connection
        assert is_greeted(task.address, hello(task="worker 2"))
        assert task.greeted.get(timeout=120) == "worker 2"
        assert task.server.refused == 1


def test_a_task_with_another_token_is_told_so(token, monkeypatch):
    with served() as task:
        monkeypatch.setattr(handshake, "token", lambda: b"another secret")
        with pytest.raises(wire.NotAMember, match="does not know this training's TFMW_TOKEN"):
            is_greeted(task.address, hello())
        assert task.greeted.empty()


def test_a_task_without_the_token_cannot_join(token, monkeypatch):
    with served() as task:
        monkeypatch.setattr(handshake, "token", lambda: None)
        with contextlib.suppress(NotATask):  # it receives a nonce, or the connection is closed
            assert not is_greeted(task.address, hello())
        assert task.greeted.empty()


def test_a_task_with_a_token_among_tasks_without_one_is_told_so(token):
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        pytest.raises(wire.NotAMember, match="set the same on every task, or on none"),
    ):
        handshake.connect(f"127.0.0.1:{silent.getsockname()[1]}", 0.1)


class Recorder(threading.Thread):
    """Passes one connection on to a server, and keeps what the client sent."""

    def __init__(self, address: str):
        super().__init__(daemon=True)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._address = addresses.split(address)
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.sent = b""

    def run(self) -> None:
        with (
            self._listener,
            self._listener.accept()[0] as client,
            socket.create_connection(self._address) as server,
        ):
            back = threading.Thread(target=self._pass_back, args=[server, client])
            back.start()
            while data := client.recv(4096):
                self.sent += data
                server.sendall(data)
            server.shutdown(socket.SHUT_WR)
            back.join()

    def _pass_back(self, server: socket.socket, client: socket.socket) -> None:
        while data := server.recv(4096):
            client.sendall(data)
        with contextlib.suppress(OSError):
            client.shutdown(socket.SHUT_WR)


def test_a_recorded_conversation_cannot_be_repeated(token):
    with served() as task:
        recorder = Recorder(task.address)
        recorder.start()
        assert is_greeted(recorder.address, hello())
        recorder.join(30)
        assert task.greeted.get(timeout=120) == "worker 1"
        assert b"worker 1" in recorder.sent
        with socket.create_connection(addresses.split(task.address), timeout=30) as replayed:
            replayed.sendall(recorder.sent)
            until_closed(replayed)
        assert task.greeted.empty()


def test_the_time_for_a_proof_is_that_of_all_its_bytes(monkeypatch):
    """A peer that sends single bytes gains no time."""
    clock = iter([0.0, 1.0, *[31.0] * 64])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    own, other = socket.socketpair()
    with own, other:
        other.sendall(bytes(wire.NONCE_BYTES + wire.PROOF_BYTES))
        own.settimeout(30.0)
        with pytest.raises(TimeoutError):  # and not NotAMember, as for a wrong proof in time
            wire.prove(own, b"key")


@pytest.mark.parametrize("kind", ["token", "no_token"])
def test_silent_connections_keep_nobody_out(kind, request):
    request.getfixturevalue(kind)
    with served() as task, contextlib.ExitStack() as stack:
        silent = [
            stack.enter_context(socket.create_connection(addresses.split(task.address), timeout=30))
            for _ in range(SILENT)
        ]
        until_closed(silent[0])  # the oldest ones are
        assert is_greeted(task.address, hello())
        assert len(task.server._strangers) <= wire.MOST_STRANGERS


def test_a_task_of_another_run_cannot_join(no_token, caplog):
    with caplog.at_level(logging.WARNING, logger="tfmw"), served(run="7f, attempt 1") as task:
        assert not is_greeted(task.address, hello(run="7f, attempt 0"))
        assert is_greeted(task.address, hello(run="7f, attempt 1", task="worker 2"))
        assert is_greeted(task.address, hello(run="", task="worker 3"))  # started by hand
        assert [task.greeted.get(timeout=120) for _ in range(2)] == ["worker 2", "worker 3"]
    (record,) = caplog.records
    assert "is of another run (7f, attempt 0), and cannot join" in record.getMessage()


def test_the_run_of_a_task(monkeypatch):
    monkeypatch.setenv("TFMW_RUN_ID", "7f")
    monkeypatch.setenv("TFMW_ATTEMPT", "2")
    assert handshake.own_run() == "7f, attempt 2"
    monkeypatch.delenv("TFMW_RUN_ID")
    assert handshake.own_run() == ""
