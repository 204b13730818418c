"""Do all tasks come, and do they agree, before TensorFlow's servers start.

    rendezvous.meet(cluster, facts={"tensorflow": "2.21.0"}, timeout_s=120)

TensorFlow's own start waits up to an hour for a task that never comes, and trains with half of the
workers where two tasks describe the cluster differently. So the training tasks meet first, over
plain TCP on the chief's address, which TensorFlow takes over a moment later: each sends one JSON
line with its idea of the cluster and its versions, the chief compares, and all get the same answer:
go, or one sentence on what is wrong. Standard library only.
"""

from __future__ import annotations

import contextlib
import json
import logging
import selectors
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

from tfmw.cluster import Cluster, addresses
from tfmw.errors import ClusterError, TfmwError

logger = logging.getLogger("tfmw")

_MAX_LINE = 1 << 20  # bytes; a cluster of ten thousand tasks is a quarter of this
_RETRY_S = 0.05
_TELL_S = 10.0  # tasks that are started together come within this time of each other
_ANSWER_S = 5.0  # the chief may have been started later than this task


def meet(
    cluster: Cluster,
    facts: Mapping[str, str],
    *,
    timeout_s: float = 120.0,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Returns once every training task of `cluster` is here and agrees.

    Args:
        cluster: a cluster of several training tasks, of which this process is one.
        facts: what must be the same on every task, by name (versions, options).
        timeout_s: seconds to wait for all tasks.

    Raises:
        ClusterError: the port of this task is taken, or tasks disagree.
        TfmwError: a task did not come in time; the message names it.
    """
    members = members_of(cluster)
    hello = {"rank": cluster.rank, "members": list(members), "facts": dict(facts)}
    deadline = clock() + timeout_s
    if cluster.rank == 0:
        _receive(cluster, members, hello, deadline, timeout_s, clock)
    else:
        addresses.check_port_free(members[cluster.rank])
        _report(members, hello, deadline, timeout_s, clock)


def members_of(cluster: Cluster) -> tuple[str, ...]:
    """Addresses of the training tasks, chief first: position r is rank r."""
    return (*cluster.chief, *cluster.workers)


def _receive(
    cluster: Cluster,
    members: tuple[str, ...],
    mine: dict[str, Any],
    deadline: float,
    timeout_s: float,
    clock: Callable[[], float],
) -> None:
    """The chief's side: collect one line of every other task, compare, answer all."""
    came: dict[int, socket.socket] = {}
    callers: list[socket.socket] = []
    problem: TfmwError | None = None
    selector = selectors.DefaultSelector()
    server = addresses.listen(members[0])
    server.setblocking(False)
    selector.register(server, selectors.EVENT_READ, None)
    lines: dict[socket.socket, bytes] = {}
    try:
        while len(came if problem is None else callers) < len(members) - 1:
            left = deadline - clock()
            if left <= 0:
                absent = [r for r in range(1, len(members)) if r not in came]
                problem = problem or _absent(cluster, absent, timeout_s)
                break
            for key, _ in selector.select(min(left, 1.0)):
                if key.fileobj is server:
                    connection, _address = server.accept()
                    connection.setblocking(False)
                    lines[connection] = b""
                    selector.register(connection, selectors.EVENT_READ, None)
                    continue
                peer = key.fileobj
                assert isinstance(peer, socket.socket)
                hello = _read_line(peer, lines)
                if hello is None:
                    continue
                selector.unregister(peer)
                if not hello:
                    peer.close()
                    continue
                wrong = disagreement(mine, hello) or _twice(hello, came)
                if wrong and problem is None:
                    # Those who are still on their way are told too.
                    problem = ClusterError(wrong)
                    deadline = min(deadline, clock() + _TELL_S)
                came[hello["rank"]] = peer
                callers.append(peer)
        answer = {"problem": None if problem is None else str(problem)}
        answer["kind"] = type(problem).__name__
        for peer in callers:
            with contextlib.suppress(OSError):
                peer.setblocking(True)
                peer.sendall(json.dumps(answer).encode() + b"\n")
        # The others close first, so that the port is left without a connection in TIME_WAIT.
        for peer in callers:
            with contextlib.suppress(OSError):
                peer.settimeout(5.0)
                peer.recv(1)
    finally:
        for connection in lines:
            connection.close()
        server.close()
        selector.close()
    if problem is not None:
        raise problem


def _read_line(peer: socket.socket, lines: dict[socket.socket, bytes]) -> dict[str, Any] | None:
    """The JSON line of a peer; None while it is incomplete; {} where it is not one of ours."""
    try:
        part = peer.recv(65536)
    except BlockingIOError:
        return None
    except OSError:
        return {}
    lines[peer] += part
    if not part or len(lines[peer]) > _MAX_LINE:
        return {}
    if not lines[peer].endswith(b"\n"):
        return None
    try:
        hello = json.loads(lines[peer])
    except (ValueError, RecursionError):
        return {}
    wanted = {"rank": int, "members": list, "facts": dict}
    if not isinstance(hello, dict) or any(
        not isinstance(hello.get(k), t) for k, t in wanted.items()
    ):
        return {}
    return hello


def _twice(hello: dict[str, Any], came: Mapping[int, socket.socket]) -> str | None:
    rank = hello["rank"]
    if rank == 0 or (rank in came and not _hung_up(came[rank])):
        return (
            f"two tasks call themselves training task {rank}: give each task its own index "
            '("task" in TF_CONFIG, --task_index).'
        )
    return None


def _hung_up(peer: socket.socket) -> bool:
    """Whether a task that came has gone since: it was started again, and comes again."""
    try:
        return peer.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def disagreement(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> str | None:
    """One sentence on the first difference between two tasks' hellos; None where there is none."""
    a, b = list(mine["members"]), list(theirs["members"])
    ra, rb = mine["rank"], theirs["rank"]
    advice = 'Give every task the same "cluster" in TF_CONFIG.'
    if len(a) != len(b):
        return (
            f"tasks disagree about the cluster: worker {ra} lists {len(a)} workers, "
            f"worker {rb} lists {len(b)}. {advice}"
        )
    for position, (x, y) in enumerate(zip(a, b, strict=True)):
        if x != y:
            return (
                f"tasks disagree about the cluster: worker {position} is at {x!r} for worker {ra}, "
                f"at {y!r} for worker {rb}. {advice}"
            )
    for name in sorted({*mine["facts"], *theirs["facts"]}):
        x, y = mine["facts"].get(name), theirs["facts"].get(name)
        if x != y:
            return (
                f"tasks disagree about {name}: worker {ra} has {x}, worker {rb} has {y}. "
                "Use the same on every task."
            )
    return None


def _report(
    members: tuple[str, ...],
    hello: dict[str, Any],
    deadline: float,
    timeout_s: float,
    clock: Callable[[], float],
) -> None:
    """The others' side: send one line to the chief, wait for its answer."""
    host, port = addresses.split(members[0])
    line = json.dumps(hello).encode() + b"\n"
    last = "no answer"
    while True:
        left = deadline - clock()
        if left <= 0:
            raise TfmwError(
                f"worker {hello['rank']} could not reach the chief at {members[0]} within "
                f"{timeout_s:g} s ({last}): is that task started, is its address right, and is "
                "its port open to this machine?"
            )
        try:
            with socket.create_connection((host, port), timeout=min(left, 5.0)) as peer:
                peer.sendall(line)
                peer.settimeout(max(0.1, deadline + _ANSWER_S - clock()))
                data = b""
                while not data.endswith(b"\n"):
                    part = peer.recv(65536)
                    if not part:
                        break
                    data += part
        except (OSError, TimeoutError) as e:
            last = str(e) or type(e).__name__
            time.sleep(min(_RETRY_S, max(0.0, left)))
            continue
        if not data:
            # The chief left without an answer, because another task did not come, or it is the
            # chief of an earlier attempt.
            last = "the chief closed the connection"
            time.sleep(min(_RETRY_S, max(0.0, left)))
            continue
        answer = json.loads(data)
        if answer.get("problem"):
            kind = TfmwError if answer.get("kind") == "TfmwError" else ClusterError
            raise kind(answer["problem"])
        return


def _absent(cluster: Cluster, ranks: list[int], timeout_s: float) -> TfmwError:
    names = [f"worker {r} ({members_of(cluster)[r]})" for r in ranks]
    return TfmwError(
        f"{', '.join(names)} did not come within {timeout_s:g} s: start "
        f"{'it' if len(ranks) == 1 else 'them'}, or check that the chief's address "
        f"{members_of(cluster)[0]} can be reached from there."
    )
