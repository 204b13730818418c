"""Costs that may grow with the number of workers: start, a step, an epoch's end, a lost worker.

    python -m bench.many [--workers 2 8 16 32 48]
    python -m bench.figures      # writes the table into Benchmarks

All workers are on this machine. A model of 700 parameters trains for four epochs of 20 steps, and
the last worker is killed in the third. "start" is from the command to the first step. "an epoch's
end" is the pause between two epochs. "a lost worker" is from the kill to the next step of all.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

from bench.figures import commit, keep, table

ROOT = Path(__file__).resolve().parents[1]
WORKERS = (2, 8, 16, 32, 48)
EPOCHS, STEPS, KILLED_AT, BATCH = 4, 20, 50, 96
HEADING = [
    "workers",
    "start, s",
    "a step, ms",
    "an epoch's end, ms",
    "a lost worker, s",
    "whole, s",
]


def train(killed: str) -> None:
    """Runs the training in each worker; the chief prints the time of each step.

    Args:
        killed: a file to which the last worker writes the time of its end.
    """
    import keras
    import numpy as np

    import tfmw

    class Report(keras.callbacks.Callback):
        chief_only = False

        def on_train_batch_end(self, batch: int, logs: object = None) -> None:
            step, task = int(self.model.optimizer.iterations), os.environ["TFMW_TASK"]
            if task == "worker 0":
                print(f"step {step} at {time.monotonic()}", flush=True)
            last = task == f"worker {int(os.environ['WORKERS']) - 1}"
            if last and step == KILLED_AT and not os.path.exists(killed):
                Path(killed).write_text(str(time.monotonic()))
                os.kill(os.getpid(), signal.SIGKILL)

    random = np.random.default_rng(0)
    x = random.random((STEPS * BATCH, 32), np.float32)
    model = keras.Sequential([keras.Input((32,)), keras.layers.Dense(20), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    tfmw.fit(model, x, x[:, :1], epochs=EPOCHS, batch_size=BATCH, verbose=0, callbacks=[Report()])


def measured(workers: int) -> list[str]:
    """The cells of a row.

    Raises:
        subprocess.CalledProcessError: the training has failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        killed = Path(folder, "killed")
        run = ["tfmw", "run", f"--workers={workers}", "--max-restarts=1"]
        command = [sys.executable, "-m", *run, "-m", "bench.many", "--train", str(killed)]
        environ = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "WORKERS": str(workers)}
        began = time.monotonic()
        done = subprocess.run(
            command, cwd=ROOT, env=environ, check=True, stdout=subprocess.PIPE, text=True
        )
        ended, killed_at = time.monotonic(), float(killed.read_text())
    found = re.findall(r"step (\d+) at ([\d.]+)", done.stdout)
    steps = [(int(step), float(at)) for step, at in found]
    pauses = [(a, b, at_b - at_a) for (a, at_a), (b, at_b) in pairwise(steps) if at_b < killed_at]
    step = statistics.median(pause for a, _, pause in pauses if a % STEPS)
    end = statistics.median(pause for a, _, pause in pauses if a % STEPS == 0)
    after = next(at for _, at in steps if at > killed_at + step)
    lost = after - killed_at
    return [
        str(workers),
        f"{steps[0][1] - began:.1f}",
        f"{1000 * step:.0f}",
        f"{1000 * (end - step):.0f}",
        f"{lost:.1f}",
        f"{ended - began:.0f}",
    ]


def main() -> None:
    """Measures, prints a table, and keeps it for the page."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--workers", type=int, nargs="+", default=WORKERS)
    parser.add_argument("--train", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train(options.train)
        return
    rows = [HEADING]
    for workers in options.workers:
        rows.append(measured(workers))
        print(table([HEADING, rows[-1]]), flush=True)
    if tuple(options.workers) == WORKERS:
        keep({"many": rows}, commit())


if __name__ == "__main__":
    main()
