"""Tasks that do not come or do not agree are told so on all tasks, before TensorFlow starts.

Threads or real processes, without TensorFlow. Rows are those of docs/explain/failure-model.md.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import socketserver
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.helpers.by_hand import free_addresses
from tests.helpers.cases import cases, each
from tests.helpers.cluster import PROGRAMS, ROOT
from tests.helpers.threads import in_threads
from tfmw.cluster import Cluster, rendezvous
from tfmw.cluster import addresses as cluster_addresses

FACTS = {"tensorflow": "2.21.0", "keras": "3.15.1"}


def config(index: int, addresses: list[str]) -> str:
    return json.dumps(
        {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
    )


def meet(*tasks: tuple[str, dict[str, str]], timeout_s: float = 30) -> list[dict[str, Any]]:
    """Result of each task, one for each (TF_CONFIG, facts), in threads that start together."""

    def one(index: int) -> None:
        text, facts = tasks[index]
        met = rendezvous.meet(Cluster.resolve({"TF_CONFIG": text}), facts, timeout_s=timeout_s)
        for channel in met.values():
            channel.close()

    errors = in_threads(len(tasks), one)
    return [
        {"error": "" if e is None else str(e), "type": "" if e is None else type(e).__name__}
        for e in errors
    ]


def free_to_listen(address: str) -> Callable[[str], socket.socket]:
    """`addresses.listen`, for which the port of one address is never taken."""
    listen = cluster_addresses.listen
    return lambda to: socket.socket() if to == address else listen(to)


@pytest.fixture
def addresses():
    return free_addresses(3)


def test_tasks_that_agree_continue(addresses):
    results = meet(*((config(i, addresses), FACTS) for i in range(3)))
    assert [r["error"] for r in results] == ["", "", ""]


@pytest.mark.parametrize("odd", cases([0], [2]))
def test_row_22_all_tasks_raise_if_they_disagree_about_the_cluster(addresses, odd, monkeypatch):
    monkeypatch.setattr(rendezvous, "_STRAGGLER_S", 3.0)  # a chief that expects four waits so long
    lists = [addresses, addresses, addresses]
    lists[odd] = [*addresses, "127.0.0.1:1"]
    results = meet(*((config(i, lists[i]), FACTS) for i in range(3)))
    for result in each(results):
        assert result["type"] == "ClusterError"
        assert "tasks disagree about the cluster" in result["error"]
        assert "lists 4" in result["error"]
        assert 'Give every task the same "cluster" in TF_CONFIG' in result["error"]


def test_row_22_an_address_that_differs_is_named(addresses):
    moved = [*addresses[:2], "127.0.0.1:1"]
    results = meet(
        (config(0, addresses), FACTS), (config(1, moved), FACTS), (config(2, addresses), FACTS)
    )
    for result in each(results):
        assert (
            f"worker 2 is at '{addresses[2]}' for worker 0, at '127.0.0.1:1' for worker 1"
            in (result["error"])
        )


def test_two_tasks_with_one_index_raise(addresses, monkeypatch):
    # They are on two machines: on one, the second may find its port taken.
    monkeypatch.setattr(cluster_addresses, "listen", free_to_listen(addresses[1]))
    results = meet(*((config(i, addresses), FACTS) for i in (0, 1, 1)))
    said = [r["error"] for r in results if "two tasks are" in r["error"]]
    assert said
    assert results[0]["error"] in said


def test_row_30_versions_that_differ_are_refused_on_all_tasks(addresses):
    other = {**FACTS, "keras": "3.8.0"}
    results = meet(*((config(i, addresses), f) for i, f in enumerate((FACTS, FACTS, other))))
    for result in each(results):
        assert result["type"] == "ClusterError"
        assert (
            "tasks disagree about keras: worker 0 has 3.15.1, worker 2 has 3.8.0"
            in (result["error"])
        )


def test_row_23_a_missing_task_is_named_on_all_others(addresses):
    results = meet(*((config(i, addresses), FACTS) for i in (0, 1)), timeout_s=3)
    for result in each(results):
        assert result["type"] == "TfmwError"
        assert f"worker 2 ({addresses[2]}) did not connect within 3 s" in result["error"]


def test_row_23_a_missing_chief_is_named(addresses):
    results = meet(*((config(i, addresses), FACTS) for i in (1, 2)), timeout_s=2)
    for i, result in enumerate(each(results), start=1):
        assert (
            f"worker {i} could not reach the chief at {addresses[0]} within 2 s"
            in (result["error"])
        )


def test_row_20_a_port_in_use_raises(addresses):
    port = int(addresses[1].rpartition(":")[2])
    with socket.create_server(("", port)):
        results = meet(*((config(i, addresses[:2]), FACTS) for i in (0, 1)), timeout_s=3)
    assert results[1]["type"] == "ClusterError"
    assert (
        f"port {port} of this task's address '{addresses[1]}' cannot be used"
        in (results[1]["error"])
    )


@contextlib.contextmanager
def task(index: int, addresses: list[str]) -> Iterator[subprocess.Popen[str]]:
    """A task that runs on while the test acts on it."""
    arguments = [config(index, addresses), json.dumps(FACTS), "30"]
    process = subprocess.Popen(
        [sys.executable, str(PROGRAMS / "meet.py"), *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def result(process: subprocess.Popen[str]) -> dict[str, Any]:
    return json.loads(process.communicate(timeout=600)[0])


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


def hello(task: str, addresses: list[str], **changed: Any) -> bytes:
    """A hello as it is on the wire."""
    tasks = {f"worker {i}": address for i, address in enumerate(addresses)}
    message = {"tfmw": "rendezvous", "task": task, "tasks": tasks, "facts": FACTS}
    message |= {"details": {}, "run": ""}
    return framed({**message, **changed})


def framed(message: Any) -> bytes:
    """A message as `wire.Channel` sends it."""
    data = json.dumps(message).encode()
    return struct.pack("!I", len(data)) + data


def connected(address: str, chief: subprocess.Popen[str]) -> socket.socket:
    """A connection to the chief, as soon as it listens."""
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port_of(address)), timeout=10)
        except ConnectionRefusedError:
            assert chief.poll() is None


def test_other_connections_to_the_chiefs_port_are_ignored(addresses):
    """A connection without the hello of a task is closed, and the start continues."""
    two = addresses[:2]
    lines = [
        b"GET / HTTP/1.1\r\n\r\n\n",
        b"\x80\x04c\n",
        b'{"rank": "0"}\n',
        struct.pack("!I", 5000) + b"[" * 5000,
        struct.pack("!I", 3) + b"{1}",
        framed([1]),
        framed({"rank": 1, "members": ["127.0.0.1:1"], "facts": {}}),
        framed({"rank": 7, "members": two, "facts": FACTS}),
        hello("worker 7", two),
        hello("worker 1", two, tfmw="control"),
        hello("worker 1", two, facts=None),
    ]
    with task(0, two) as chief:
        for line in lines:
            with connected(two[0], chief) as stranger:
                stranger.sendall(line)
                assert stranger.recv(1) == b"", line  # hung up on
        (other,) = meet((config(1, two), FACTS))
        assert other["error"] == ""
        assert result(chief)["error"] == ""


def test_forged_hellos_do_not_end_a_start(addresses, monkeypatch):
    """Hellos with facts that differ would end it for all tasks, if strangers could send them."""
    monkeypatch.setenv("TFMW_TOKEN", "secret of this training")
    two = addresses[:2]
    with task(0, two) as chief:
        for forged in (hello("worker 1", two, facts={"tensorflow": "1.0"}), hello("worker 0", two)):
            with connected(two[0], chief) as stranger:
                stranger.sendall(forged)
                assert b"problem" not in stranger.recv(1 << 16)
        (other,) = meet((config(1, two), FACTS))
        assert other["error"] == ""
        assert result(chief)["error"] == ""


class Foreign(socketserver.ThreadingTCPServer):
    """A server of another protocol, which sends `response` to every client that sends a line."""

    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, address: str, response: bytes):
        self.visited = threading.Event()
        foreign = self

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                self.rfile.readline()
                self.wfile.write(response)
                foreign.visited.set()

        super().__init__(("", port_of(address)), Handler)
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def __exit__(self, *error: Any) -> None:
        self.shutdown()
        super().__exit__(*error)


FOREIGN = [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\x00\x00\x12\x04\n", b"{}\n", b"[1]\n"]


@pytest.mark.parametrize("response", FOREIGN, ids=["http", "binary", "object", "list"])
def test_worker_ignores_another_server_at_the_chiefs_address(addresses, response):
    two = addresses[:2]
    with task(1, two) as worker:
        with Foreign(two[0], response) as foreign:
            assert foreign.visited.wait(30)
        with task(0, two) as chief:
            assert (result(worker)["error"], result(chief)["error"]) == ("", "")


@pytest.mark.process
def test_another_server_at_the_chiefs_address_is_reported(addresses):
    with Foreign(addresses[0], FOREIGN[0]):
        (worker,) = meet((config(1, addresses[:2]), FACTS), timeout_s=1)
    assert worker["type"] == "TfmwError"
    assert f"could not reach the chief at {addresses[0]} within 1 s" in worker["error"]
    assert "the process there is not a task of tfmw" in worker["error"]


@pytest.mark.process
@pytest.mark.parametrize("index", cases([0], [1]))
def test_waiting_task_logs_what_it_waits_for(addresses, index):
    with task(index, addresses[:2]) as waiting:
        assert waiting.stderr is not None
        line = waiting.stderr.readline()
        with task(1 - index, addresses[:2]) as other:
            assert (result(waiting)["error"], result(other)["error"]) == ("", "")
    expected = [
        f"worker 0 waits for worker 1 ({addresses[1]})",
        f"worker 1 waits for the chief at {addresses[0]}: Connection refused",
    ]
    assert line.strip() == expected[index]
