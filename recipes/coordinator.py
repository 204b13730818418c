"""The coordinator of parameter servers, started by the process of worker 0.

Scripts for TensorFlow 1 name parameter servers and workers in their flags, and no coordinator:

    python recipes/digits.py --ps_hosts=h0:2221 --worker_hosts=h1:2222 --job_name=ps
    python recipes/digits.py --ps_hosts=h0:2221 --worker_hosts=h1:2222 --job_name=worker

So worker 0 starts its own command line again, as the coordinator, which prints to the same
terminal. All tasks derive the same address for it. Worker 0 and the coordinator end together.
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
from tfmw.cluster.servers import AlreadyCoordinated
from tfmw.errors import TaskFailed
from tfmw.launcher.spawn import TASK_COMMAND

_STARTED_BY_WORKER = "TFMW_STARTED_BY_WORKER_0"
_END_S = 30.0  # time for a coordinator that is done to end
_ERROR_S = 5.0  # time for this process to end with the error that the coordinator sends


def address(workers: Sequence[str], servers: Sequence[str]) -> str:
    """The coordinator's "host:port": on worker 0's host, with a port that no task uses.

    It is derived from the port of worker 0, so that clusters on one host have different ones.
    """
    host, _, port = workers[0].rpartition(":")
    taken = {addresses.split(task)[1] for task in (*workers, *servers)}
    free = (p for p in itertools.count(addresses.derived_port(int(port))) if p not in taken)
    return f"{host}:{next(free)}"


@contextlib.contextmanager
def beside(cluster: Cluster) -> Iterator[None]:
    """Runs the coordinator, on worker 0, while the body serves until the coordinator is done."""
    process = subprocess.Popen(
        [
            *(*TASK_COMMAND, "script", *sys.argv, "--job_name=chief", "--task_index=0"),
            f"--chief_host={cluster.chief[0]}",
        ],
        stdin=subprocess.DEVNULL,
        env={
            **os.environ,
            "TFMW_LAUNCHER_PID": str(os.getpid()),  # it is killed with this process
            "TFMW_NO_INIT": "1",
            _STARTED_BY_WORKER: "1",
        },
    )
    threading.Thread(target=_end_with, args=(process,), daemon=True).start()
    try:
        yield
    except SystemExit as served:
        raise SystemExit(served.code or process.wait(_END_S)) from None
    except TaskFailed:  # lets the coordinator print its own error
        process.wait(_END_S)
        raise


def _end_with(process: subprocess.Popen[bytes]) -> None:
    """Ends this process if the coordinator failed; it would wait for the next one otherwise."""
    status = process.wait()
    if status == 0:
        return
    if status > 0:
        time.sleep(_ERROR_S)
    print(f"worker 0 ends: its coordinator ended with status {status}", file=sys.stderr, flush=True)
    os._exit(1)


@contextlib.contextmanager
def unless_coordinated() -> Iterator[None]:
    """Ends the coordinator that worker 0 started with status 0 if another one coordinates."""
    try:
        yield
    except AlreadyCoordinated as error:
        if os.environ.get(_STARTED_BY_WORKER) == "1":
            raise SystemExit(0) from None
        raise AlreadyCoordinated(
            f"{error} Without --chief_host, worker 0's process starts it: leave this process out, "
            "or give every task --chief_host=host:port."
        ) from None
