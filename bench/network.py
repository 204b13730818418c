"""Predicted against measured: the time of a step by workers and rate of the network.

    sudo python -m bench.network [--workers 2 3 4] [--rates 1000 300 100]

Every worker has a network namespace of its own, with the links of bench/machines.py. The prediction
of bench/forecast.py comes from a single run: two workers on links of 100 Gbit/s. Rates, in Mbit/s,
are those at which each worker may send. Needs root, and Linux with ip and tc (iproute2). Workers
that outnumber the cores compute in turns, and the prediction takes that into account.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.forecast import Forecast, payload
from bench.forecast import measure as forecast_of
from bench.machines import NAME, machines
from tfmw.launcher.environment import compute_with_onednn
from tfmw.observe.recorder import EXCHANGES_FILE, make_file

ROOT = Path(__file__).resolve().parents[1]
STEPS = 8  # steps per epoch
PORT = 20_000
FREE = 100_000.0  # Mbit/s, more than the workers reach
MARK = "found: "


def make() -> tuple[object, object]:
    """The CNN of TensorFlow's multi-worker tutorial, and its global batches."""
    import keras

    from bench.works import batches, keras_network
    from tfmw import strategies

    workers = strategies.current_strategy().num_replicas_in_sync
    return keras_network("cnn", keras), batches("cnn", workers).take(STEPS)


def child() -> None:
    """Measures in one worker, and prints the result."""
    cost = forecast_of("bench.network:make", STEPS)
    print(MARK + json.dumps(dataclasses.asdict(cost)), flush=True)


def chief_found(
    hosts: list[str],
    command: list[str],
    variables: Callable[[int], dict[str, str]],
    timeout_s: float = 300,
) -> Any:
    """The JSON that the chief of workers prints behind MARK.

    Args:
        hosts: addresses of `machines`, one for each worker.
        command: arguments of Python, the same for each worker.
        variables: variables of a worker, added to the environment of the cluster.

    Raises:
        RuntimeError: a worker failed; the message is its output.
    """
    addresses = [f"{host}:{PORT}" for host in hosts]
    processes = []
    for worker in range(len(hosts)):
        task = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": worker}}
        environ = {
            **os.environ,
            **({"TF_CONFIG": json.dumps(task)} if len(hosts) > 1 else {}),
            "TF_NUM_INTRAOP_THREADS": "1",
            "TF_CPP_MIN_LOG_LEVEL": "3",
            **variables(worker),
        }
        compute_with_onednn(environ)
        processes.append(
            subprocess.Popen(
                ["ip", "netns", "exec", f"{NAME}{worker}", sys.executable, *command],
                cwd=ROOT,
                env=environ,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    try:
        outputs = [process.communicate(timeout=timeout_s)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    said = [line for line in outputs[0].splitlines() if line.startswith(MARK)]
    if not said:
        raise RuntimeError("\n".join(outputs))
    return json.loads(said[0].removeprefix(MARK))


def measure(workers: int, mbit_per_s: float = FREE) -> Forecast:
    """Time of a step on the chief, by its parts.

    Raises:
        RuntimeError: a worker failed; the message is its output.
    """
    with (
        machines(workers, mbit_per_s / 1000) as hosts,
        tempfile.TemporaryDirectory() as directory,
    ):

        def recorded(worker: int) -> dict[str, str]:
            exchanges = Path(directory, f"worker-{worker}")
            make_file(exchanges)
            return {EXCHANGES_FILE: str(exchanges)}

        command = ["-m", "bench.network", "--child"]
        return Forecast(**chief_found(hosts, command, recorded))


def main() -> None:
    """Measures, predicts, and prints a table."""
    flags = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    flags.add_argument("--workers", type=int, nargs="+", default=[2, 3, 4])
    flags.add_argument("--rates", type=float, nargs="+", default=[1000, 300, 100])
    flags.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = flags.parse_args()
    if options.child:
        return child()
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if missing:
        flags.error(f"{missing[0]} is not installed: apt-get install iproute2")

    free, cores = measure(2), len(os.sched_getaffinity(0))
    print("| workers | Mbit/s | step, predicted, ms | measured, ms | ratio |")
    print("| --- " * 5 + "|")
    print(f"| 2 | any | | {1e3 * free.step:.1f} | |", flush=True)
    settings = [
        *((workers, options.rates[0]) for workers in options.workers),
        *((2, rate) for rate in options.rates[1:]),
    ]
    for workers, rate in settings:
        there = free.on(workers, bandwidth=payload(1e6 * rate), processors=cores)
        measured = measure(workers, rate)
        print(
            f"| {workers} | {rate:g} | {1e3 * there.step:.1f} | {1e3 * measured.step:.1f} | "
            f"{there.step / measured.step:.2f} |",
            flush=True,
        )
    return None


if __name__ == "__main__":
    main()
