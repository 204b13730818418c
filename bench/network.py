"""Predicted against measured: the time of a step by workers, rate and delay of the network.

    sudo python -m bench.network [--workers 2 3 4] [--rates 1000 300 100] [--delays 0.1 1 10]

Every worker has a network namespace of its own, and its packets take their time on the way
(bench/wire.py). What tfmw/tools/cost.py predicts comes from a single run: two workers, whose
packets pass through as fast as they can. Rates, in Mbit/s, are those at which each worker may send;
delays, in ms, are of one way. Needs root, and Linux with unshare, nsenter and ip (iproute2).
Workers that outnumber the cores compute in turns, and the prediction knows it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

from bench.wire import Network
from tfmw.launcher.run import compute_with_onednn
from tfmw.tools.cost import Cost

ROOT = Path(__file__).resolve().parents[1]
STEPS = 8  # of an epoch
PORT = 20_000
MARK = "cost: "


def make() -> tuple[object, object]:
    """The CNN of TensorFlow's multi-worker tutorial, and its global batches."""
    import keras

    from bench.works import batches, keras_network
    from tfmw import strategies

    workers = strategies.current_strategy().num_replicas_in_sync
    return keras_network("cnn", keras), batches("cnn", workers).take(STEPS)


def child() -> None:
    """One worker: what `tfmw bench` measures, printed."""
    from tfmw.tools import bench

    cost, *_ = bench._measure("bench.network:make", STEPS)
    print(MARK + json.dumps(dataclasses.asdict(cost)), flush=True)


def measure(workers: int, mbit_per_s: float = math.inf, delay_ms: float = 0.0) -> Cost:
    """What a step costs the chief.

    Raises:
        RuntimeError: a worker failed; the message is its output.
    """
    with Network(workers, 1e6 * mbit_per_s, 1e-3 * delay_ms) as network:
        addresses = [f"{address}:{PORT}" for address in network.addresses]
        processes = []
        for worker in range(workers):
            task = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": worker}}
            environ = {
                **os.environ,
                "TF_CONFIG": json.dumps(task),
                "TF_NUM_INTRAOP_THREADS": "1",
                "TF_CPP_MIN_LOG_LEVEL": "3",
            }
            compute_with_onednn(environ)
            command = [sys.executable, "-m", "bench.network", "--child"]
            processes.append(
                subprocess.Popen(
                    [*network.inside(worker), *command],
                    cwd=ROOT,
                    env=environ,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
        try:
            outputs = [process.communicate(timeout=300)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
    said = [line for line in outputs[0].splitlines() if line.startswith(MARK)]
    if not said:
        raise RuntimeError("\n".join(outputs))
    return Cost(**json.loads(said[0].removeprefix(MARK)))


def main() -> None:
    """Measures, predicts, and prints a table."""
    flags = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    flags.add_argument("--workers", type=int, nargs="+", default=[2, 3, 4])
    flags.add_argument("--rates", type=float, nargs="+", default=[1000, 300, 100])
    flags.add_argument("--delays", type=float, nargs="+", default=[0.1, 1, 10])
    flags.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = flags.parse_args()
    if options.child:
        return child()
    missing = [name for name in ("unshare", "nsenter", "ip") if shutil.which(name) is None]
    if missing:
        flags.error(f"{missing[0]} is not installed: apt-get install iproute2 util-linux")

    free, cores = measure(2), len(os.sched_getaffinity(0))
    print("| workers | Mbit/s | delay, ms | step, predicted, ms | measured, ms | ratio |")
    print("| --- | --- | --- | --- | --- | --- |")
    print(f"| 2 | any | 0 | | {1e3 * free.step:.1f} | |", flush=True)
    settings = [
        *((workers, options.rates[0], 0.0) for workers in options.workers),
        *((2, rate, 0.0) for rate in options.rates[1:]),
        *((2, options.rates[0], delay) for delay in options.delays),
    ]
    for workers, rate, delay in settings:
        latency = free.latency + 1e-3 * delay
        there = free.on(workers, bandwidth=1e6 * rate / 8, latency=latency, processors=cores)
        measured = measure(workers, rate, delay)
        print(
            f"| {workers} | {rate:g} | {delay:g} | {1e3 * there.step:.1f} | "
            f"{1e3 * measured.step:.1f} | {there.step / measured.step:.2f} |",
            flush=True,
        )
    return None


if __name__ == "__main__":
    main()
