"""Goodput when a worker is killed every 20 s and replaced: synchronous training, and local SGD.

    python -m bench.goodput [--workers 4] [--steps 1200] [--every 20]

Every worker makes the same steps. A step sleeps 50 ms, as if an accelerator computed, so that
workers do not wait for the two cores of this machine. Goodput is the time of a run without faults
divided by the time of one with faults. Both are from the first step to the end of the last worker.
There are no backups: all continue from copies in memory.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

STEP_S = 0.05
WAYS: dict[str, int | None] = {"synchronous": None, "every=25": 25}


def train(way: str, steps: int, folder: Path) -> None:
    """Trains, in a worker."""
    import keras
    import numpy as np
    import tensorflow as tf

    import tfmw

    name = os.environ["TFMW_TASK"].replace(" ", "_")
    (folder / f"{name}.pid").write_text(str(os.getpid()))

    class Step(keras.callbacks.Callback):
        """Takes the time of an accelerator's step, and records the first one."""

        chief_only = False

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            time.sleep(STEP_S)
            with contextlib.suppress(FileExistsError):
                (folder / "first").touch(exist_ok=False)

    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input([64]), keras.layers.Dense(64), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    x = np.random.default_rng(0).normal(size=[100 * 64, 64]).astype("float32")
    data = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(64)
    every = WAYS[way]
    sync = None if every is None else tfmw.LocalSGD(every)
    tfmw.fit(model, data, epochs=steps // 100, verbose=0, callbacks=[Step()], sync=sync)


def seconds(way: str, workers: int, steps: int, every_s: float | None) -> tuple[float, int]:
    """Seconds from the first step to the end, and the number of kills.

    Args:
        every_s: seconds between two kills; None: no worker is killed.

    Raises:
        RuntimeError: the run failed; the message is its output.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [sys.executable, "-m", "tfmw", "run", "--workers", str(workers)]
        command += ["--max-restarts", "99", "-m", "bench.goodput"]
        command += ["--child", way, "--steps", str(steps), "--folder", name]
        with open(folder / "output", "wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output)
        kills, began = 0, 0.0
        while process.poll() is None:
            time.sleep(0.02)
            if not began:
                if (folder / "first").exists():
                    began = time.monotonic()
                continue
            if every_s is not None and time.monotonic() - began >= every_s * (kills + 1):
                victim = folder / f"worker_{(kills + 1) % workers}.pid"
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(victim.read_text()), signal.SIGKILL)
                kills += 1
        if process.returncode:
            raise RuntimeError((folder / "output").read_text())
        return time.monotonic() - began, kills


def main() -> None:
    """Prints a table, or trains in this process."""
    flags = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    flags.add_argument("--workers", type=int, default=4)
    flags.add_argument("--steps", type=int, default=1200)
    flags.add_argument("--every", type=float, default=20.0, help="seconds between two kills")
    flags.add_argument("--child", help=argparse.SUPPRESS)
    flags.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = flags.parse_args()
    if options.child:
        train(options.child, options.steps, options.folder)
        return
    print("| way | s without faults | s with them | kills | goodput |")
    print("| --- " * 5 + "|")
    for way in WAYS:
        calm, _ = seconds(way, options.workers, options.steps, None)
        storm, kills = seconds(way, options.workers, options.steps, options.every)
        print(f"| {way} | {calm:.1f} | {storm:.1f} | {kills} | {calm / storm:.2f} |", flush=True)


if __name__ == "__main__":
    main()
