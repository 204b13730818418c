"""Growth of the cost with the workers and with the model: start-up, memory, backups, coordinator.

    python -m bench.growth [--workers 1 2 3 4] [--mb 10 40 160]
    python -m bench.growth --restart 2 8 16 32 48     # a tiny model, whose last worker is killed

Each point is one run of `tfmw run` on this machine: an MLP with Adam, whose weights have so many
megabytes (the state that is backed up is three times that), backed up after each epoch. Each column
ends with its slope: the cost of one more worker, or of 100 MB more. Workers that outnumber the
cores share them, and start more slowly.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
INPUTS = 1000
EPOCHS, STEPS = 4, 20  # so long that a backup is written before the next one
PS_STEPS = 500
MARK = "growth: "

SYNCHRONOUS = {
    "first step, s": "first_step",
    "chief, MB": "memory",
    "another worker, MB": "other_memory",
    "backup holds up, ms": "held_up",
    "backup is written in, ms": "written",
}
RESTART = {
    "first step, s": "first_step",
    "end of an epoch, ms": "epoch_end",
    "killed until the next step, s": "restart",
    "whole, s": "whole",
}
SERVERS = {"coordinator, µs of processor per step": "coordinator", "coordinator, MB": "memory"}


def child(began_at: float, megabytes: float, backups: str) -> None:
    """Trains as one task, and prints its figures."""
    import keras
    import numpy as np
    import tensorflow as tf

    import tfmw
    from tfmw.train.checkpoint import resume

    cluster = tfmw.init()
    first_step: list[float] = []
    times: dict[str, list[float]] = {"save": [], "_write": []}
    for name, seconds in times.items():
        kind = resume.Backups
        mock.patch.object(kind, name, _timed(kind, name, seconds)).start()

    class FirstStep(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if not first_step:
                first_step.append(time.time() - began_at)

    class Epoch(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.processor = time.process_time()

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.processor = time.process_time() - self.processor

    epoch = Epoch()
    width = max(1, int(megabytes * 1e6 / 4 / INPUTS))
    model = keras.Sequential(
        [keras.Input((INPUTS,)), keras.layers.Dense(width), keras.layers.Dense(1)]
    )
    model.compile("adam", "mse")
    x: np.ndarray = np.ones((4 * cluster.num_workers, INPUTS), np.float32)
    data = tf.data.Dataset.from_tensors((x, x[:, :1])).repeat()
    found: dict[str, float] = {}
    if cluster.has_ps:  # a callback that reads each batch would make the coordinator wait for each
        tfmw.fit(model, data, steps_per_epoch=PS_STEPS, epochs=2, verbose=0, callbacks=[epoch])
        found["coordinator"] = 1e6 * epoch.processor / PS_STEPS
    else:
        tfmw.fit(
            model,
            data,
            steps_per_epoch=STEPS,
            epochs=EPOCHS,
            verbose=0,
            callbacks=[FirstStep()],
            backup_dir=backups,
        )
        found["first_step"] = first_step[0]
    found |= {
        "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        # The first backup allocates the memory that the others reuse.
        "held_up": 1e3 * statistics.median(times["save"][1:] or [0.0]),
        "written": 1e3 * statistics.median(times["_write"][1:] or [0.0]),
    }
    print(f"{MARK}{cluster.index} {json.dumps(found)}", flush=True)


def killed_child(began_at: float, folder: Path) -> None:
    """Trains a tiny model as one task; the last worker is killed once, after the second epoch."""
    import keras
    import numpy as np

    import tfmw

    cluster = tfmw.init()
    attempt = int(os.environ["TFMW_ATTEMPT"])

    # Not in the callback, whose state a backup restores.
    steps: list[float] = []
    ends: list[float] = []

    class Clock(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if steps:
                ends.append(time.time() - steps[-1])
            if attempt == 0 and epoch == 2 and cluster.index == cluster.num_workers - 1:
                (folder / "killed_at").write_text(str(time.time()))
                os.kill(os.getpid(), signal.SIGKILL)

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            steps.append(time.time())
            if len(steps) == 1 and attempt == 0 and cluster.is_chief:
                (folder / "first_step").write_text(str(steps[0]))

    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    x: np.ndarray = np.ones((4 * cluster.num_workers, 8), np.float32)
    tfmw.fit(
        model,
        x,
        x[:, :1],
        batch_size=cluster.num_workers,
        epochs=8,
        verbose=0,
        callbacks=[Clock()],
        backup_dir=folder / "backups",
    )
    if cluster.is_chief:
        begun = float((folder / "first_step").read_text())
        found = {"first_step": begun - began_at}
        found |= {"restart": steps[0] - float((folder / "killed_at").read_text())}
        found["epoch_end"] = 1e3 * statistics.median(ends)
        found["whole"] = time.time() - began_at
        print(f"{MARK}0 {json.dumps(found)}", flush=True)


def _timed(of: type, name: str, seconds: list[float]) -> Any:
    method = getattr(of, name)

    def timed(self: Any, *args: Any, **named: Any) -> None:
        begin = time.perf_counter()
        method(self, *args, **named)
        seconds.append(time.perf_counter() - begin)

    return timed


def run(workers: int, megabytes: float, ps: int = 0, kill: bool = False) -> dict[str, float]:
    """Figures of the chief, and the memory of the last worker.

    Args:
        megabytes: size of the model's weights; 0 for the one of `killed_child`.
        kill: whether the last worker is killed once.

    Raises:
        RuntimeError: the run failed; the message is its output.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = ["run", f"--workers={workers}", f"--ps={ps}", f"--max-restarts={int(kill)}"]
        command += [__file__, "--child", str(time.time()), str(megabytes), folder]
        done = subprocess.run(
            [sys.executable, "-m", "tfmw", *command],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
    said = re.findall(rf"{MARK}(\d+) (.*)$", done.stdout, re.MULTILINE)
    tasks = {int(index): json.loads(found) for index, found in said}
    if done.returncode or 0 not in tasks:
        raise RuntimeError(done.stdout + done.stderr)
    return {**tasks[0], "other_memory": tasks[max(tasks)].get("memory", 0.0)}


def table(
    what: str, points: dict[float, dict[str, float]], columns: dict[str, str], per: float
) -> str:
    """Markdown: one line for each point, and the slopes by least squares."""
    import numpy as np

    lines = [f"| {what} | {' | '.join(columns)} |", "| --- |" + " --- |" * len(columns)]
    for x, found in points.items():
        lines.append(f"| {x:g} | " + " | ".join(f"{found[c]:.1f}" for c in columns.values()) + " |")
    slopes = [
        per * np.polyfit(list(points), [found[c] for found in points.values()], 1)[0]
        for c in columns.values()
    ]
    return "\n".join(
        [*lines, f"| {per:g} more adds | " + " | ".join(f"{s:.1f}" for s in slopes) + " |"]
    )


def main() -> None:
    """Measures each point, and prints the tables."""
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--workers", type=int, nargs="+", default=[1, 2, 3, 4])
    flags.add_argument("--mb", type=float, nargs="+", default=[10, 40, 160])
    flags.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    flags.add_argument("--restart", type=int, nargs="+", help="numbers of workers; only these")
    options = flags.parse_args()
    if options.child:
        began_at, megabytes, folder = options.child
        if float(megabytes) == 0:
            return killed_child(float(began_at), Path(folder))
        return child(float(began_at), float(megabytes), folder)
    if options.restart:
        by_workers = {float(n): run(n, 0.0, kill=True) for n in options.restart}
        print(table("workers", by_workers, RESTART, 1))
        return None
    smallest = options.mb[0]
    by_workers = {float(n): run(n, smallest) for n in options.workers}
    print(table(f"workers, {smallest:g} MB", by_workers, SYNCHRONOUS, 1), end="\n\n", flush=True)
    by_size = {mb: run(2, mb) for mb in options.mb}
    print(table("MB of weights, 2 workers", by_size, SYNCHRONOUS, 100), end="\n\n", flush=True)
    by_servers = {float(n): run(n, 0.1, ps=1) for n in options.workers}
    print(table("workers, 1 parameter server", by_servers, SERVERS, 1))
    return None


if __name__ == "__main__":
    main()
