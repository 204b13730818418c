"""The memory that remote tasks keep of traced functions, by TensorFlow alone: without tfmw.

    python bench/kept_functions.py [--functions 50] [--ops 800] [--same]

Each function is traced anew, reads a variable of the parameter server, runs once on the worker, and
is deleted. The worker's memory grows all the same, with the number of operations. With `--same`,
which runs one function again and again, it does not grow. Each `tfmw.fit` on parameter servers
traces functions of its own.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import tensorflow as tf


def serve(spec: str, job: str) -> None:
    """Serves as the only task of a job."""
    tf.distribute.Server(tf.train.ClusterSpec(json.loads(spec)), job_name=job, task_index=0).join()


def free_addresses(number: int) -> list[str]:
    """Addresses on this machine."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    addresses = [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]
    for each in sockets:
        each.close()
    return addresses


def megabytes(pid: int) -> int:
    """The resident memory of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") >> 20


def main() -> None:
    """Prints the worker's memory after every tenth function."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--functions", type=int, default=50)
    parser.add_argument("--ops", type=int, default=800)
    parser.add_argument("--same", action="store_true", help="run one function again and again")
    options = parser.parse_args()
    worker, ps, chief = free_addresses(3)
    served = {"worker": [worker], "ps": [ps]}
    tasks = [
        subprocess.Popen([sys.executable, __file__, "serve", json.dumps(served), job])
        for job in served
    ]
    try:
        cluster = tf.train.ClusterSpec({**served, "chief": [chief]})
        strategy = tf.distribute.ParameterServerStrategy(
            tf.distribute.cluster_resolver.SimpleClusterResolver(
                cluster, task_type="chief", task_id=0, rpc_layer="grpc"
            )
        )
        with strategy.scope():
            variable = tf.Variable(1.0)
        coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)

        def new_function() -> tf.types.experimental.PolymorphicFunction:
            def chain() -> tf.Tensor:
                value = variable.read_value()
                for _ in range(options.ops // 2):
                    value = value * 1.0001 + 0.5
                return value

            return tf.function(chain, autograph=False)

        first = new_function()
        for number in range(options.functions + 1):
            coordinator.schedule(first if options.same else new_function()).fetch()
            gc.collect()
            if number % 10 == 0:
                print(f"{number:4d} functions: {megabytes(tasks[0].pid)} MB", flush=True)
    finally:
        for task in tasks:
            task.kill()


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        serve(*sys.argv[2:])
    else:
        main()
