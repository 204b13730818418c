"""The coordinator of parameter servers, started by the process of worker 0.

Scripts for TensorFlow 1 name parameter servers and workers in their flags, and no coordinator:

    python recipes/digits.py --ps_hosts=h0:2221 --worker_hosts=h1:2222 --job_name=ps
    python recipes/digits.py --ps_hosts=h0:2221 --worker_hosts=h1:2222 --job_name=worker

So worker 0 runs its own command line once more, as the coordinator, which prints to the same
terminal. All tasks derive its address alike. It ends with worker 0, and worker 0 with it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence

from tfmw.cluster import Cluster, addresses
from tfmw.cluster.control import AlreadyCoordinated
from tfmw.errors import TaskFailed
from tfmw.launcher.spawn import TASK_COMMAND

_STARTED_BY_WORKER = "TFMW_STARTED_BY_WORKER_0"
_END_S = 30.0  # for the coordinator to end once it is done
_ERROR_S = 5.0  # for the coordinator's error, which it sends, to end this process


def address(workers: Sequence[str], servers: Sequence[str]) -> str:
    """The coordinator's "host:port": on worker 0's host, a port that no task has.

    It depends on the port of worker 0, so that clusters on one host get different ones.
    """
    host, _, port = workers[0].rpartition(":")
    taken = {addresses.split(task)[1] for task in (*workers, *servers)}
    free = (p for p in itertools.count(addresses.derived_port(int(port))) if p not in taken)
    return f"{host}:{next(free)}"


@contextlib.contextmanager
def beside(cluster: Cluster) -> Iterator[None]:
    """On worker 0: the coordinator runs beside the body, which serves until it is done."""
    process = subprocess.Popen(
        [
            *(*TASK_COMMAND, "script", *sys.argv, "--job_name=chief", "--task_index=0"),
            f"--chief_host={cluster.chief[0]}",
        ],
        stdin=subprocess.DEVNULL,
        env={
            **os.environ,
            "TFMW_LAUNCHER_PID": str(os.getpid()),  # it is killed where this process is
            "TFMW_NO_INIT": "1",
            _STARTED_BY_WORKER: "1",
        },
    )
    threading.Thread(target=_end_with, args=(process,), daemon=True).start()
    try:
        yield
    except SystemExit as served:
        raise SystemExit(served.code or process.wait(_END_S)) from None
    except TaskFailed:  # the coordinator's own error, which it is about to print
        process.wait(_END_S)
        raise


def _end_with(process: subprocess.Popen[bytes]) -> None:
    """Ends this process where the coordinator failed: it would wait for the next one."""
    status = process.wait()
    if status == 0:
        return
    if status > 0:
        time.sleep(_ERROR_S)
    print(f"worker 0 ends: its coordinator ended with status {status}", file=sys.stderr, flush=True)
    os._exit(1)


@contextlib.contextmanager
def unless_coordinated() -> Iterator[None]:
    """On the coordinator: where another one coordinates, one that worker 0 started ends well."""
    try:
        yield
    except AlreadyCoordinated as error:
        if os.environ.get(_STARTED_BY_WORKER) == "1":
            raise SystemExit(0) from None
        raise AlreadyCoordinated(
            f"{error} Without --chief_host, worker 0's process starts it: leave this process out, "
            "or give every task --chief_host=host:port."
        ) from None
