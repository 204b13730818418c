"""The server of the rounds, with members in threads."""

from __future__ import annotations

import contextlib
import errno
import json
import queue
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

import numpy as np
import pytest

from tfmw.cluster import sockets
from tfmw.errors import TfmwError, UsageError
from tfmw.train.local_sgd import round_client
from tfmw.train.local_sgd.round_client import RoundAnswer, RoundClient
from tfmw.train.local_sgd.round_server import RoundServer

KEY = b"key"


@contextlib.contextmanager
def serving(members: int, patience_s: float = 60.0) -> Iterator[Callable[..., RoundClient]]:
    """A function: number of a member -> its client, which has entered."""
    listener = sockets.listen("127.0.0.1")
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    clients: list[RoundClient] = []

    def entered(member: int, key: bytes = KEY, call: int = 0, of: int = members) -> RoundClient:
        client = RoundClient(address, member, of, key, call)
        client.found = client.enter()  # type: ignore[attr-defined]
        clients.append(client)
        return client

    with RoundServer(members, KEY, listener, patience_s):
        try:
            yield entered
        finally:
            for client in clients:
                client.leave()


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def joined(threads: ThreadPoolExecutor, *clients: RoundClient, state: float = 7.0) -> None:
    """Joins all clients; the first sends its state."""
    waiting: list[Future[RoundAnswer]] = [threads.submit(c.join, "same", 0) for c in clients]
    first = waiting[0].result(10)
    assert first.arrays == []
    assert first.wants_state == (len(clients) > 1)
    if first.wants_state:
        clients[0].send_state([np.array(state)])
    for other in waiting[1:]:
        received = other.result(10).arrays
        assert received
        assert received[0].shape == ()
        assert received[0] == state


def rounds(
    threads: ThreadPoolExecutor, *sent: tuple[RoundClient, float, Any], **options: Any
) -> list[RoundAnswer]:
    futures = [
        threads.submit(client.round, examples, [np.asarray(v, "float32")], **options)
        for client, examples, v in sent
    ]
    return [future.result(10) for future in futures]


def test_the_mean_is_weighted_by_examples(threads: ThreadPoolExecutor) -> None:
    with serving(2) as member:
        a, b = member(0), member(1)
        joined(threads, a, b)
        for mean in rounds(threads, (a, 30, [1.0, 2.0]), (b, 10, [5.0, -2.0])):
            np.testing.assert_allclose(mean.arrays[0], [2.0, 1.0])
            assert (mean.examples, mean.members, mean.wants_state) == (40, 2, False)
        for mean in rounds(threads, (a, 0, [9.0, 9.0]), (b, 10, [5.0, 1.0])):
            np.testing.assert_array_equal(mean.arrays[0], [5.0, 1.0])
        assert [m.arrays for m in rounds(threads, (a, 0, [1.0]), (b, 0, [1.0]))] == [[], []]


@pytest.mark.parametrize(("kind", "error"), [("int8", 0.01), ("int4", 0.15)])
def test_rounded_values(threads: ThreadPoolExecutor, kind: str, error: float) -> None:
    from tfmw.train.local_sgd.quantized_sum import QuantizedSum

    values = np.random.default_rng(0).normal(size=[2, 3000]).astype("float32")
    packs = [QuantizedSum(3000, kind) for _ in range(2)]
    total: np.ndarray = np.zeros(3000, "float32")
    with serving(2) as member:
        clients = member(0), member(1)
        joined(threads, *clients)
        for number in range(1, 9):
            futures = [
                threads.submit(c.round, 1.0, [p.rounded(v)], 1, kind, 3000)
                for c, p, v in zip(clients, packs, values, strict=True)
            ]
            one, other = (future.result(10).arrays[0] for future in futures)
            np.testing.assert_array_equal(one, other)
            assert one.nbytes < values[0].nbytes / (3.8 if kind == "int8" else 7.5)
            total += packs[0].values(one, 3000)
            # Rounding errors are added to the next rounds: the mean error falls.
            assert np.abs(total / number - values.mean(axis=0)).max() < 3 * error / number + 1e-6


def test_a_lost_member_is_left_out_and_joins_again(threads: ThreadPoolExecutor) -> None:
    with serving(2) as member:
        a, b = member(0), member(1)
        joined(threads, a, b)
        rounds(threads, (a, 1, [1.0]), (b, 1, [1.0]))
        waits = threads.submit(a.round, 2.0, [np.array([4.0], "float32")], 5)
        b.keep({"at": 17}, [np.arange(3)])
        b.leave()
        alone = waits.result(10)
        np.testing.assert_array_equal(alone.arrays[0], [4.0])
        assert alone.members == 1
        again = member(1)
        record, arrays, steps = again.found  # type: ignore[attr-defined]
        assert (record, steps) == ({"at": 17}, 0)
        np.testing.assert_array_equal(arrays[0], [0, 1, 2])
        comes = threads.submit(again.join, "same", 0)
        (mean,) = rounds(threads, (a, 1, [1.0]))
        while not mean.wants_state:  # the message of the other may come later
            (mean,) = rounds(threads, (a, 1, [1.0]))
        a.send_state([np.array([0.5], "float32")])
        found = comes.result(10)
        assert found.arrays
        np.testing.assert_array_equal(found.arrays[0], [0.5])
        assert rounds(threads, (a, 1, [1.0]), (again, 1, [1.0]))[0].members == 2


def test_steps_without_a_record_are_counted(threads: ThreadPoolExecutor) -> None:
    with serving(2) as member:
        a, b = member(0), member(1)
        joined(threads, a, b)
        for _ in range(2):
            rounds(threads, (a, 1, [1.0]), (b, 1, [1.0]), steps=3)
        b.leave()
        assert member(1).found[2] == 6  # type: ignore[attr-defined]


def test_the_first_member_that_sends_its_state_is_lost(threads: ThreadPoolExecutor) -> None:
    with serving(3) as member:
        a, b = member(0), member(1)
        c = member(2)
        joined(threads, a, b, c)
        c.leave()
        rounds(threads, (a, 1, [1.0]), (b, 1, [1.0]))
        c = member(2)
        comes = threads.submit(c.join, "same", 0)
        while not rounds(threads, (a, 1, [1.0]), (b, 1, [1.0]))[0].wants_state:
            pass
        a.leave()  # without its state
        (mean,) = rounds(threads, (b, 1, [1.0]))
        assert mean.wants_state
        b.send_state([np.array([3.0], "float32")])
        found = comes.result(10).arrays
        assert found
        np.testing.assert_array_equal(found[0], [3.0])


def test_nobody_has_the_state_any_more(threads: ThreadPoolExecutor) -> None:
    with serving(2) as member:
        a, b = member(0), member(1)
        joined(threads, a, b)
        rounds(threads, (a, 1, [1.0]), (b, 1, [1.0]))
        for client in (a, b):
            client.keep({"at": 3}, [])
        rounds(threads, (a, 1, [1.0]), (b, 1, [1.0]))
        b.leave()
        b = member(1)
        assert b.found[0] == {"at": 3}  # type: ignore[attr-defined]
        waits = threads.submit(b.join, "same", 0)
        a.leave()
        with pytest.raises(TfmwError, match="all members that took part were lost"):
            waits.result(10)
        assert [member(i).found[0] for i in range(2)] == [None, None]  # type: ignore[attr-defined]


def test_the_latest_round_is_the_common_state(threads: ThreadPoolExecutor) -> None:
    with serving(2) as member:
        a, b = member(0), member(1)
        early, late = threads.submit(a.join, "same", 3), threads.submit(b.join, "same", 5)
        assert late.result(10).wants_state
        b.send_state([np.array([1.0], "float32")])
        assert early.result(10).arrays
        assert (a.number, b.number) == (5, 5)


def test_patience_ends(threads: ThreadPoolExecutor) -> None:
    with serving(3, patience_s=0.2) as member:
        a, b = member(0), member(2)
        joined(threads, a, b)
        assert rounds(threads, (a, 1, [1.0]), (b, 1, [1.0]))[0].members == 2


def test_those_that_are_done_wait_for_the_others(threads: ThreadPoolExecutor) -> None:
    with serving(2) as member:
        a, b = member(0), member(1)
        joined(threads, a, b)
        b.leave()
        done = threads.submit(a.round, 0.0, [np.array([0.0], "float32")], 0, None, 0, True)
        b = member(1)
        comes = threads.submit(b.join, "same", 0)
        assert done.result(10).wants_state
        assert not done.result().finished
        a.send_state([np.array([1.0], "float32")])
        comes.result(10)
        for mean in rounds(threads, (a, 0, [0.0]), (b, 4, [2.0]), done=True):
            assert mean.finished
            np.testing.assert_array_equal(mean.arrays[0], [2.0])
        a.send_state([np.array([8.0], "float32")])
        b.leave()
        late = member(1).join("same", 0)
        assert late.finished
        assert late.arrays
        np.testing.assert_array_equal(late.arrays[0], [8.0])


def test_each_call_of_fit_has_its_own_rounds(threads: ThreadPoolExecutor) -> None:
    with serving(1) as member:
        first, second = member(0), member(0, call=1)
        joined(threads, first)
        joined(threads, second)
        first.keep({"at": 1}, [])
        assert rounds(threads, (first, 1, [1.0]))[0].members == 1
        assert first.fact("seed", 1) == 1
        assert second.fact("seed", 2) == 2
        assert first.fact("seed", 3) == 1


def test_members_that_differ_are_refused(threads: ThreadPoolExecutor) -> None:
    with serving(2) as member:
        models = ((member(0), "a model"), (member(1), "another model"))
        joins = [threads.submit(client.join, model, 0) for client, model in models]
        refused, _ = wait(joins, timeout=10, return_when=FIRST_COMPLETED)
        (error,) = (future.exception() for future in refused)
        assert isinstance(error, UsageError)
        assert "members of the rounds differ" in str(error)
        for wrong in ({"member": 5}, {"member": 0, "of": 3}):
            with pytest.raises(UsageError, match="members of the rounds differ"):
                member(**wrong)


def test_strangers(threads: ThreadPoolExecutor) -> None:
    with serving(1) as member:
        with pytest.raises(TfmwError, match="no server of rounds"):
            member(0, key=b"another key")
        a = member(0)
        host, port = a._address.rsplit(":", 1)
        with contextlib.ExitStack() as open_ones:
            for data in (b"", b"GET / HTTP/1.0\r\n\r\n" * 10, bytes(64)):
                peer = open_ones.enter_context(socket.create_connection((host, int(port))))
                peer.sendall(data)
            joined(threads, a)
            assert rounds(threads, (a, 1, [1.0]))[0].members == 1


def test_a_message_that_is_none_ends_the_connection(threads: ThreadPoolExecutor) -> None:
    with serving(1) as member:
        a = member(0)
        a._connection._channel.peer.sendall(struct.pack("!I", 1 << 31))
        with pytest.raises(TfmwError, match="was lost"):
            a.fact("seed", 1)
        b = member(0)
        text = json.dumps({"arrays": []}).encode()
        b._connection._channel.peer.sendall(struct.pack("!I", len(text)) + text)
        with pytest.raises(TfmwError, match="was lost"):
            b.fact("seed", 1)
        joined(threads, member(0))


PROGRAM = [
    sys.executable,
    "-m",
    "tfmw.train.local_sgd.round_server",
    "--members=1",
    "--host=127.0.0.1",
]


def test_the_program_ends_with_its_input() -> None:
    with subprocess.Popen(
        [*PROGRAM, "--until-input-ends"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={"TFMW_TOKEN": "key"},
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        client = RoundClient(server.stdout.readline().strip(), 0, 1, b"key")
        client.enter()
        assert client.fact("a", [1, 2]) == [1, 2]
        server.stdin.close()
        assert server.wait(20) == 0
        client.leave()


def test_the_program_serves_without_input() -> None:
    """Standard input is closed as with nohup, or as in the background of a shell."""
    with subprocess.Popen(
        PROGRAM, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True,
        env={"TFMW_TOKEN": "key"},
    ) as server:  # fmt: skip
        assert server.stdout is not None
        client = RoundClient(server.stdout.readline().strip(), 0, 1, b"key")
        client.enter()
        assert client.join("same", 0).arrays == []
        assert client.round(1.0, [np.array([2.0])]).arrays == [np.array([2.0])]
        assert server.poll() is None
        server.terminate()
        client.leave()


@pytest.mark.parametrize(
    ("options", "env", "said"),
    [
        ([], {}, "TFMW_TOKEN is not set: set the same secret"),
        (["--port={port}"], {"TFMW_TOKEN": "key"}, "cannot listen at 127.0.0.1:{port}: Address"),
    ],
)
def test_wrong_use_of_the_program(options: list[str], env: dict[str, str], said: str) -> None:
    with sockets.listen("127.0.0.1") as taken:
        port = taken.getsockname()[1]
        command = [*PROGRAM, *(option.format(port=port) for option in options)]
        done = subprocess.run(command, env=env, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2
    assert said.format(port=port) in done.stderr.splitlines()[-1]


def test_a_member_that_waits_says_so(
    threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(round_client, "_SAID_AFTER_S", 0.0)
    with serving(2) as member:
        a = member(0)
        waits = threads.submit(a.join, "same", 0)
        while "member 0 of 2 has waited" not in caplog.text:
            assert not waits.done()
        assert "it waits for members that have not come, or it has stopped" in caplog.text
        member(1).leave()
        with contextlib.suppress(TfmwError):
            a.leave()
            waits.result(10)


def test_positions_of_the_latest_backup_are_those_of_all(threads: ThreadPoolExecutor) -> None:
    with serving(3) as member:
        a, b, c = member(0), member(1), member(2)
        early = threads.submit(a.join, "same", 3, [5, 5, 4])
        fresh = threads.submit(c.join, "same", 0)
        late = threads.submit(b.join, "same", 5, [9, 8, 4])
        assert late.result(10).wants_state
        b.send_state([np.array([1.0], "float32")])
        assert early.result(10).arrays
        assert fresh.result(10).arrays
        assert a.positions == b.positions == c.positions == [9, 8, 4]
        c.leave()
        rounds(threads, (a, 1, [1.0]), (b, 1, [1.0]), steps=3)
        assert a.positions == b.positions == [12, 11, 4]


def test_no_thread_is_left() -> None:
    before = set(threading.enumerate())
    with serving(1) as member:
        member(0)
    for thread in set(threading.enumerate()) - before:
        thread.join(5)
    assert set(threading.enumerate()) <= before


class _WithoutDescriptors:
    """A listener whose process has no descriptor left, as strangers hold them."""

    def __init__(self, listener: socket.socket):
        self._listener = listener
        self.asked = queue.SimpleQueue[None]()
        self.left = False

    def accept(self) -> Any:
        if not self.left:
            self.asked.put(None)
            raise OSError(errno.EMFILE, "Too many open files")
        return self._listener.accept()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._listener, name)


def test_the_server_waits_for_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server retries after a pause."""
    pauses = queue.SimpleQueue[float]()
    pause = time.sleep

    def noted(seconds: float) -> None:
        pauses.put(seconds)
        pause(seconds)

    monkeypatch.setattr(time, "sleep", noted)
    listener: Any = _WithoutDescriptors(sockets.listen("127.0.0.1"))
    with RoundServer(1, KEY, listener):
        for _ in range(3):
            listener.asked.get(timeout=60)
        assert [pauses.get(timeout=60) for _ in range(2)] == [0.1, 0.1]
        listener.left = True
        client = RoundClient(f"127.0.0.1:{listener.getsockname()[1]}", 0, 1, KEY)
        client.enter()
        client.leave()
