"""Parameter servers and their coordinator: joining, and the connection between them.

    serve(cluster, facts, ...)                  # on a ps or worker: until the coordinator is done
    strategy, control = coordinate(...)         # on the chief: connected to all
    control.finish()                            # all servers end with status 0

TensorFlow's servers never end, and cannot distinguish a coordinator that is done from one that
died. So each server keeps a plain TCP connection to the chief's address, where a `ControlServer`
listens. It sends its hello and receives one response. At the end it receives a message "done". If
the connection closes without one, the coordinator has died: the server keeps its variables and
waits for the next coordinator, for a limited time. No other task needs the coordinator's TensorFlow
port, so tfmw picks a free one.

If the connection of a server is lost, the coordinator also ends TensorFlow's own connections to it,
which would not detect a lost machine. It cannot do so while TensorFlow waits for a server without
letting other threads run: it sends traced functions to all servers in this way. So a thread also
limits the silence of each connection, and the kernel ends it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tfmw.cluster import Cluster, addresses, sockets
from tfmw.cluster.handshake import (
    TaskDescription,
    absence,
    accepted_by_chief,
    connect,
    differences,
    listed,
    notice_of_waiting,
    serve_hellos,
)
from tfmw.cluster.sockets import addresses_of, end_connections, limit_silence
from tfmw.cluster.wire import Channel
from tfmw.errors import ClusterError, TaskFailed, TfmwError, UsageError
from tfmw.observe.recorded_errors import ECHO

if TYPE_CHECKING:
    import tensorflow as tf

logger = logging.getLogger("tfmw")

# A function on a worker blocks a thread while it waits for a server; too few threads deadlock.
_INTER_OP_THREADS = 16

_serving: list[tf.distribute.Server] = []  # referenced for ever: TensorFlow's servers cannot stop

_PROTOCOL = "control"
_CONNECT_S = 5.0
_RESPONSE_S = 30.0  # time for the response of a coordinator that has accepted the connection
_GOODBYE_S = 30.0  # time for the process of a finished coordinator to end
_LIMIT_EVERY_S = 2.0  # interval of the search for new connections

SILENCE_S = 15.0
"""Seconds after which the kernel ends TensorFlow's connection to a silent server.

It is longer than the time to detect a loss by the connection of this module, which then ends
TensorFlow's, too.
"""


@dataclasses.dataclass
class ServerSettings:
    """Options of parameter-server training; see `tfmw.strategies.parameter_server`."""

    # (shape, dtype) -> number of shards of a variable, along the first axis
    partition: Callable[[Sequence[int], tf.DType], int] = lambda shape, dtype: 1
    replicas_to_aggregate: int | None = None  # None: each gradient is an update
    prefetch_rows: int = 0
    row_compression: str | None = None


def serve(
    cluster: Cluster,
    facts: Mapping[str, str],
    *,
    patience_s: float,
    serve_again: bool,
    threads: int,
) -> None:
    """Starts TensorFlow's server of this task, and waits: see `wait_for_end`.

    Args:
        threads: number of threads for the ops of this server; 0 lets TensorFlow choose.

    Raises:
        ClusterError: the port of this task is in use.
    """
    import tensorflow as tf

    assert cluster.address is not None
    addresses.listen(cluster.address).close()  # fails if the port is taken
    config = tf.compat.v1.ConfigProto(
        intra_op_parallelism_threads=threads, inter_op_parallelism_threads=_INTER_OP_THREADS
    )
    spec = tf.train.ClusterSpec({"ps": list(cluster.ps), "worker": list(cluster.workers)})
    server = tf.distribute.Server(
        spec, job_name=cluster.task, task_index=cluster.index, protocol="grpc", config=config
    )
    _serving.append(server)
    logger.info("%r: serving", cluster)
    wait_for_end(cluster, facts, patience_s=patience_s, serve_again=serve_again)


def coordinate(
    cluster: Cluster, facts: Mapping[str, str], *, timeout_s: float
) -> tuple[tf.distribute.Strategy, ControlServer]:
    """A ParameterServerStrategy connected to every server, and the control connections to them.

    Raises:
        ClusterError: the chief's port is in use, or tasks disagree.
        TfmwError: a server did not connect; the message names it.
    """
    import tensorflow as tf

    control = ControlServer(cluster, facts)
    control.wait_for_all(timeout_s)
    with sockets.listen() as free:
        port = int(free.getsockname()[1])
    spec = {
        "chief": [addresses.joined(addresses.split(cluster.chief[0])[0], port)],
        "ps": list(cluster.ps),
        "worker": list(cluster.workers),
    }
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(spec), task_type="chief", task_id=0, rpc_layer="grpc"
    )
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    logger.info(
        "%r: in, %d workers, %d parameter servers", cluster, len(cluster.workers), len(cluster.ps)
    )
    return strategy, control


def partition_of(
    partitioner: Any, min_shard_bytes: int | None, servers: int
) -> Callable[[Sequence[int], tf.DType], int]:
    """The partition of variables; see `tfmw.strategies.parameter_server`."""
    import tensorflow as tf

    if partitioner is not None and min_shard_bytes is not None:
        raise UsageError(
            "received both partitioner and min_shard_bytes: expected one of them; min_shard_bytes "
            "is the short form of tf.distribute.experimental.partitioners.MinSizePartitioner."
        )
    if min_shard_bytes is not None and min_shard_bytes < 1:
        raise UsageError(f"min_shard_bytes is {min_shard_bytes}: expected bytes, at least 1.")

    def partition(shape: Sequence[int], dtype: tf.DType) -> int:
        if not shape or shape[0] < 2:
            return 1
        wanted = 1
        if min_shard_bytes is not None:
            wanted = min(servers, dtype.size * math.prod(shape) // min_shard_bytes)
        if partitioner is not None:
            parts = list(partitioner(tf.TensorShape(shape), dtype))
            if any(p != 1 for p in parts[1:]):
                raise UsageError(
                    f"the partitioner divides a variable of shape {list(shape)} into {parts}: "
                    "expected pieces along the first axis only."
                )
            wanted = parts[0]
        return max(1, min(int(wanted), shape[0]))

    return partition


# ---- the connection between servers and their coordinator ---------------------------------------


def _hello(cluster: Cluster, facts: Mapping[str, str]) -> TaskDescription:
    tasks = cluster.tasks("chief", "worker", "ps")
    return TaskDescription(_PROTOCOL, cluster.task_name, tasks, dict(facts))


class AlreadyCoordinated(ClusterError):
    """Another coordinator of this cluster is running at the chief's address."""


class ControlServer:
    """The coordinator's side: one connection to each server.

    Raises:
        AlreadyCoordinated: the chief's port is taken by another coordinator of this cluster.
        ClusterError: the chief's port is taken.
    """

    def __init__(self, cluster: Cluster, facts: Mapping[str, str]):
        self._cluster = cluster
        self._hello = _hello(cluster, facts)
        self._changed = threading.Condition()
        self._servers: dict[str, Channel] = {}
        self._peers: dict[str, set[tuple[str, int]]] = {}  # server -> (IP address, port)
        self._problem: str | None = None
        self._is_over = False
        try:
            self._server = serve_hellos(cluster.chief[0], _PROTOCOL, self._greet, self._hello.run)
        except ClusterError:
            if _is_coordinated(self._hello):
                raise AlreadyCoordinated(
                    f"a coordinator of this cluster runs at {cluster.chief[0]} already: wait until "
                    "it is done, or stop it."
                ) from None
            raise
        threading.Thread(target=self._limit_silence, name="tfmw-silence", daemon=True).start()

    def wait_for_all(self, timeout_s: float) -> None:
        """Waits until every server is connected and describes the same cluster.

        Raises:
            ClusterError: a server describes another cluster, or runs other versions.
            TfmwError: a server did not connect in time; the message names it.
        """
        expected = self._cluster.tasks("worker", "ps")

        def missing() -> dict[str, str]:
            return {n: a for n, a in expected.items() if n not in self._servers}

        def describe() -> str:
            return f"{self._hello.task} waits for {listed(missing())}"

        with notice_of_waiting(describe), self._changed:
            self._changed.wait_for(lambda: self._problem is not None or not missing(), timeout_s)
            problem, absent = self._problem, missing()
        if problem is not None:
            raise ClusterError(problem)
        if absent:
            raise absence(absent, self._cluster.chief[0], timeout_s, self._server)

    def finish(self, error: str | None = None) -> None:
        """Notifies every server of the end of the training, or of the coordinator's error."""
        with self._changed:
            self._is_over = True
            servers = list(self._servers.values())
        for channel in servers:
            with contextlib.suppress(OSError):  # the connection stays open: servers outlive this
                channel.send({"done": True} if error is None else {"failed": error})
        self._server.close()

    def _greet(self, hello: TaskDescription, channel: Channel) -> None:
        name, problem = hello.task, next(differences(self._hello, hello), None)
        if problem is not None or name == self._hello.task:
            with channel, contextlib.suppress(OSError):
                channel.send({"coordinator": True} if problem is None else {"problem": problem})
            if problem is not None:
                with self._changed:
                    self._problem = problem
                    self._changed.notify_all()
            return
        host, port = addresses.split(self._hello.tasks[name])
        known = {(host, port) for host in {channel.peer_host(), *addresses_of(host)} if host}
        with self._changed:
            before = self._servers.pop(name, None)
            self._peers[name] = known
        if before is not None:  # a restarted task, whose old connections may still be open
            before.close()
            self._end_connections(name)
        with self._changed:
            with contextlib.suppress(OSError):
                channel.send({"problem": None})  # before any message to all servers
            self._servers[name] = channel
            self._changed.notify_all()
        sockets.keep_alive(channel.peer)
        channel.wait_closed(None)  # servers send nothing more
        channel.close()
        with self._changed:
            is_lost = self._servers.get(name) is channel
            if is_lost:
                del self._servers[name]
        if is_lost:
            logger.info("%s has left", name)
            self._end_connections(name)

    def _end_connections(self, name: str) -> None:
        """Ends TensorFlow's connections to a lost server; its calls fail at once."""
        # otherwise servers end, and TensorFlow frees the resources of this process there
        if not self._is_over:
            end_connections(self._peers[name])

    def _limit_silence(self) -> None:
        """Limits the silence of TensorFlow's connections, until the training is over."""
        while True:
            with self._changed:
                if self._changed.wait_for(lambda: self._is_over, _LIMIT_EVERY_S):
                    return
                peers = set().union(*(self._peers[name] for name in self._servers))
            limit_silence(peers, SILENCE_S)


def _is_coordinated(hello: TaskDescription) -> bool:
    """Whether a coordinator of the same cluster listens at the chief's address."""
    try:
        with connect(hello.tasks["chief"], _CONNECT_S) as channel:
            channel.send(hello.message())
            return channel.receive(_CONNECT_S).get("coordinator") is True
    except OSError:
        return False


def wait_for_end(
    cluster: Cluster,
    facts: Mapping[str, str],
    *,
    patience_s: float = 120.0,
    serve_again: bool = False,
) -> None:
    """Waits until the coordinator is done.

    Args:
        cluster: this process is one of its ps or workers, and already serves.
        facts: values that must be the same on every task.
        patience_s: seconds to wait for the first coordinator, and for a restarted one.
        serve_again: whether to wait for the next coordinator after each one, without limit; then
            this never returns.

    Raises:
        ClusterError: the coordinator describes another cluster, or runs other versions.
        TaskFailed: the coordinator failed; the message is its error.
        TfmwError: no coordinator responded in time.
    """
    hello, was_there = _hello(cluster, facts), False
    if serve_again:
        hello = dataclasses.replace(hello, run="")  # each training is a run of its own
    name, address = hello.task, hello.tasks["chief"]
    waiting = f"{name} waits for the coordinator at {address}"
    if serve_again:
        patience_s = float("inf")
    while True:
        try:
            channel = accepted_by_chief(hello, patience_s, lambda _: waiting, _RESPONSE_S)
        except TimeoutError as problem:
            how = "lost" if was_there else "could not reach"
            raise TfmwError(
                f"{name} {how} the coordinator at {address} and waited {patience_s:g} s for it "
                f"({problem}): start the chief (again), or check its address."
            ) from None
        was_there = True
        with channel:
            sockets.keep_alive(channel.peer)
            try:
                message = channel.receive(None)
            except OSError:
                logger.warning("lost the coordinator at %s; waiting for its restart", address)
                continue
            if message.get("done"):
                # TensorFlow frees resources on the servers while the coordinator's process ends.
                channel.wait_closed(_GOODBYE_S)
        if serve_again:
            continue
        if message.get("done"):
            return
        if "failed" in message:
            # TensorFlow's form, by which a launcher recognizes a secondary error
            raise TaskFailed(f"{ECHO}chief/task:0: {message['failed']}")
