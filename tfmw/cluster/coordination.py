"""Values, errors and health of synchronous workers, over the connections with which they met.

    coordination = Coordination(cluster.rank, names, channels)    # channels of `rendezvous.meet`
    coordination.gather("call 7", value)         # the values of all workers, in order of rank
    coordination.set("key", value)               # JSON, which any worker reads by get("key")

The chief keeps the values, and each other worker has one connection to it, which has proven the
training's token. A closed connection, or one that is silent for `SILENT_TICKS` seconds, ends the
cluster: every pending and later call raises the same error on all workers, an error of TensorFlow.
A worker on this machine is silent only if its process is stopped, because Python code that holds
the interpreter's lock delays a response.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import json
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import tensorflow as tf

from tfmw.cluster import turns
from tfmw.cluster.wire import Channel, Connection
from tfmw.errors import printable
from tfmw.observe.recorded_errors import ECHO

SILENT_TICKS, SILENT_TICKS_ELSEWHERE = 10, 30  # a worker on another machine may hold the lock
_TICK_S = 1.0
_LARGEST = (1 << 32) - 1  # bytes of a message
_CLOSE_S = 5.0  # time for the other workers to close their connections, at the end

Reply = Callable[[Any], None]


class Coordination:
    """The connections of this worker; on the chief, the values of all.

    Args:
        rank: rank of this worker.
        names: names of all workers in order of rank, such as "worker 1".
        channels: rank -> channel. The chief has one to each other worker, these have one to it.

    Attributes:
        ended: rank -> number of calls that this worker has completed, if it is at its end.
        at_failure: called once the cluster has ended with an error, with that error.
    """

    def __init__(self, rank: int, names: Sequence[str], channels: Mapping[int, Channel]):
        self.rank, self._names = rank, names
        self.ended: dict[int, int] = {}
        self.at_failure: list[Callable[[tf.errors.OpError], None]] = []
        self._peers = {
            other: Connection(channel.peer, _LARGEST) for other, channel in channels.items()
        }
        self._lock = threading.RLock()
        self._failure: tuple[str, str] | None = None  # type and message of the error
        self._failed = threading.Event()
        self._left: set[int] = set()  # workers that have left at the end
        self._numbers = itertools.count()
        self._pending: dict[int, Future[Any]] = {}  # number of a call -> its reply
        self._values: dict[str, Any] = {}  # on the chief
        self._readers: dict[str, int] = {}  # on the chief: number of reads that delete the key
        self._waiting: dict[str, list[Reply]] = {}  # on the chief: key -> replies that wait for it
        # on the chief: key -> value and reply of each worker that has called `gather`
        self._gathered: dict[str, dict[int, tuple[Any, Reply]]] = {}
        self._leaving: list[Reply] = []  # on the chief
        self._silent = dict.fromkeys(self._peers, 0)  # ticks since the last message
        self._processes: dict[int, list[Any]] = {}  # rank -> `_process()` of that worker
        for other in self._peers:
            threading.Thread(
                target=self._read, args=[other], name=f"tfmw-peer-{other}", daemon=True
            ).start()
        threading.Thread(target=self._tick, name="tfmw-silence", daemon=True).start()

    # ---- calls; each raises tf.errors.OpError if the cluster has ended --------------------------

    def set(self, key: str, value: Any, readers: int = 0) -> Any:
        """Sets a key to JSON, unless it is set; returns its value.

        Args:
            readers: number of calls of `get` after which the key is deleted; 0: never.
        """
        return self._call("set", key=key, value=value, readers=readers).result()

    def get(self, key: str, timeout_s: float | None = None) -> Any:
        """Waits for a key. Raises tf.errors.DeadlineExceededError if it is not set in time."""
        limit_s = None if timeout_s is None else max(0.0, timeout_s)
        try:
            return self._call("get", key=key).result(limit_s)
        except concurrent.futures.TimeoutError:
            raise tf.errors.DeadlineExceededError(None, None, f"{key} is not set") from None

    def delete(self, key: str) -> None:
        """Removes a key, and all keys below it."""
        self._call("delete", key=key).result()

    def gather(self, key: str, value: Any) -> list[Any]:
        """The values of all workers, in order of rank, once all have made this call."""
        values: list[Any] = self._call("gather", key=key, value=value).result()
        return values

    def leave(self, completed: int) -> None:
        """Waits until all workers have called it, and closes the connections.

        Args:
            completed: see `ended`.
        """
        self._call("end", completed=completed).result()
        deadline = time.monotonic() + _CLOSE_S
        while self.rank == 0 and len(self._left) < len(self._peers):
            if time.monotonic() > deadline:
                break
            time.sleep(0.001)
        with self._lock:
            self._left.update(self._peers)
        for peer in self._peers.values():
            peer.close()

    def close(self) -> None:
        """Closes the connections; the other workers notice it."""
        with self._lock:
            self._left.update(self._peers)
        self._failed.set()
        for peer in self._peers.values():
            peer.close()

    def fail(self, message: str) -> None:
        """Makes pending and later calls of all workers fail with a message."""
        job, _, index = self._names[self.rank].partition(" ")
        text = f"{ECHO}{job}/task:{index or 0}: {message}"
        if self.rank == 0:
            self._fail("InternalError", text)
            return
        with contextlib.suppress(OSError):
            self._peers[0].send({"do": "fail", "text": text})

    def error(self, wait_s: float) -> tf.errors.OpError | None:
        """The error with which the cluster has ended, or ends within `wait_s` seconds."""
        return self._error() if self._failed.wait(wait_s) else None

    def _call(self, what: str, **arguments: Any) -> Future[Any]:
        """Asks the chief; returns its reply."""
        turns.give()  # another task may wait for its turn before it makes the same call
        future: Future[Any] = Future()
        with self._lock:
            if self._failure is not None:
                raise self._error()
            number = next(self._numbers)
            self._pending[number] = future
        if self.rank == 0:
            arguments = json.loads(json.dumps(arguments))  # as other workers receive them
            self._serve(0, {"do": what, **arguments}, lambda answer: self._answer(number, answer))
        else:
            try:
                self._peers[0].send({"do": what, "number": number, **arguments})
            except OSError as e:
                self._lost(0, str(e))
        return future

    def _answer(self, number: int, answer: Any) -> None:
        with self._lock:
            future = self._pending.pop(number, None)
        if future is not None:
            future.set_result(answer)

    def _serve(self, rank: int, message: Mapping[str, Any], reply: Reply) -> None:
        """Handles the call of a worker; on the chief."""
        replies: list[tuple[Reply, Any]] = []
        with self._lock:
            what, key = message["do"], message.get("key", "")
            if what == "get":
                self._waiting.setdefault(key, []).append(reply)
            elif what == "gather":
                gathered = self._gathered.setdefault(key, {})
                gathered[rank] = message["value"], reply
                if len(gathered) == len(self._names):
                    del self._gathered[key]
                    values = [gathered[other][0] for other in sorted(gathered)]
                    replies = [(each, values) for _, each in gathered.values()]
            elif what == "set":
                if message["readers"] and key not in self._values:
                    self._readers[key] = message["readers"]
                replies = [(reply, self._values.setdefault(key, message["value"]))]
            elif what == "delete":
                for k in [k for k in self._values if k == key or k.startswith(f"{key}/")]:
                    del self._values[k]
                replies = [(reply, None)]
            elif what == "end":
                self._end(rank, message["completed"])
                self._leaving.append(reply)
                if len(self._leaving) == len(self._names):
                    replies = [(each, None) for each in self._leaving]
            replies += self._reads(key)
        for send, answer in replies:
            send(answer)

    def _reads(self, key: str) -> list[tuple[Reply, Any]]:
        """The replies that have waited for a key which is set, with its value."""
        if key not in self._values:
            return []
        replies = [(reply, self._values[key]) for reply in self._waiting.pop(key, ())]
        if key in self._readers:
            self._readers[key] -= len(replies)
            if self._readers[key] <= 0:
                del self._readers[key], self._values[key]
        return replies

    def _end(self, rank: int, completed: int) -> None:
        """Notes that a worker is at its end; the chief tells the others."""
        self.ended[rank] = completed
        for other, peer in self._peers.items():
            if self.rank == 0 and other != rank:
                with contextlib.suppress(OSError):
                    peer.send({"do": "ended", "rank": rank, "completed": completed})

    # ---- connections ---------------------------------------------------------------------------

    def _read(self, rank: int) -> None:
        """Receives the messages of a worker; runs in a thread."""
        peer = self._peers[rank]
        with contextlib.suppress(OSError):
            peer.send({"do": "process", "process": _process()})
        try:
            while True:
                message, _ = peer.receive()
                self._silent[rank] = 0
                self._handle(rank, message)
        except (OSError, KeyError) as e:
            with self._lock:
                at_the_end = rank in self._left or len(self._leaving) == len(self._names)
                self._left.add(rank)
            if not at_the_end:
                self._lost(rank, str(e))

    def _handle(self, rank: int, message: Mapping[str, Any]) -> None:
        what = message["do"]
        if what == "process":
            self._processes[rank] = message["process"]
        elif what == "fail":
            self._fail(message.get("kind", "InternalError"), message["text"])
        elif what == "reply":
            self._answer(message["number"], message["answer"])
        elif what == "ended":
            self._end(message["rank"], message["completed"])
        elif what != "alive":

            def reply(answer: Any) -> None:
                with contextlib.suppress(OSError):  # the thread that reads notices it
                    number = message["number"]
                    self._peers[rank].send({"do": "reply", "number": number, "answer": answer})

            self._serve(rank, message, reply)

    def _tick(self) -> None:
        """Sends signs of life, and ends the cluster if a worker sends none; runs in a thread.

        It counts its own ticks instead of seconds: after a pause of all processes none is lost.
        """
        while not self._failed.wait(_TICK_S):
            for rank, peer in self._peers.items():
                if rank in self._left:
                    continue
                self._silent[rank] += 1
                if self._silent[rank] > SILENT_TICKS and self._silent[rank] > self._limit(rank):
                    self._lost(rank, "it does not respond")
                    return
                with contextlib.suppress(OSError):
                    peer.send({"do": "alive"})

    def _limit(self, rank: int) -> float:
        """The ticks without a message after which a worker is lost."""
        own, other = _process(), self._processes.get(rank)
        if other is None or other[:-1] != own[:-1]:
            return SILENT_TICKS_ELSEWHERE
        with contextlib.suppress(OSError), open(f"/proc/{other[-1]}/stat") as file:
            # proc_pid_stat(5): "7 (python) S ..."; T: stopped, Z: a zombie
            if file.read().rpartition(") ")[2][0] not in "TtZX":
                return float("inf")
        return SILENT_TICKS

    def _lost(self, rank: int, why: str) -> None:
        self._fail("UnavailableError", f"{self._names[rank]} was lost: {why}")

    def _fail(self, kind: str, text: str) -> None:
        """Ends the cluster with an error; on the chief, of all workers."""
        with self._lock:
            if self._failure is not None:
                return
            self._failure = kind, printable(text)
            pending, self._pending = self._pending, {}
        self._failed.set()
        for future in pending.values():
            future.set_exception(self._error())
        if self.rank == 0:
            for peer in self._peers.values():
                with contextlib.suppress(OSError):
                    peer.send({"do": "fail", "kind": kind, "text": text})
        for end in self.at_failure:
            end(self._error())

    def _error(self) -> tf.errors.OpError:
        assert self._failure is not None
        kind, text = self._failure
        error: tf.errors.OpError = getattr(tf.errors, kind)(None, None, text)
        return error


_current: Coordination | None = None


def use(coordination: Coordination) -> None:
    """Makes these the connections of this process, which joins one cluster."""
    global _current
    _current = coordination


def current() -> Coordination:
    """The connections of this process to the other workers of its cluster."""
    assert _current is not None
    return _current


def _process() -> list[Any]:
    """This process: id of the machine, of the namespace of its process ids, and its id there."""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        return [file.read().strip(), os.stat("/proc/self/ns/pid").st_ino, os.getpid()]
    return [os.urandom(16).hex(), 0, os.getpid()]
