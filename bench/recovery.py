"""Recovery after `kill -9` of a worker until the first new step, beside PyTorch's torchrun.

    python -m bench.recovery [--repeat 3] [--torch-python /path/to/python]

Two workers train a toy model with a backup every 20 steps; one of them is killed. In one row the
model has 25 million weights, whose optimizer the workers shard. For each contender it prints the
range of three times, in seconds since the kill. They are: detected (the launcher says so, or the
first process of the new attempt appears); restarted (the script runs again, in every new worker);
first new step. tfmw replaces one lost worker; if both are killed, both continue from memory.
torchrun restarts the same training in PyTorch, if torch is installed: in this environment, or in
the one of the given Python.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.util
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from bench.figures import span, table

ROOT = Path(__file__).resolve().parent.parent
KILL_AT_STEP = 60
GLOO_TIMEOUT_S = 10
START_TIMEOUT_S = 60
TIMEOUT_S = 300  # of a run that hangs
BOTH = "tfmw run, both killed"
LARGE = "tfmw run, 25 million weights"
EVENTS = ("detected", "restarted", "first new step")


# ---- what is trained ----------------------------------------------------------------------------


def _say(text: str) -> None:
    """Prints a line in one write: workers of torchrun write to the same pipe."""
    print(f"{text}\n", end="", flush=True)


def train_tfmw(folder: str, width: int) -> None:
    """A model on the cluster that `tfmw run` made: a toy, or dense layers of this width."""
    _say(f"script {os.getpid()}")
    import keras
    import numpy as np

    import tfmw

    class Say(keras.callbacks.Callback):
        """Prints each step."""

        reads_optimizer = False  # otherwise the optimizer is put together after each step

        def on_train_batch_end(self, batch: int, logs: object = None) -> None:
            _say(f"made step {int(self.model.optimizer.iterations)}")
            time.sleep(0.02)  # as in train_torch

    dense = keras.layers.Dense
    hidden = [dense(width, activation="relu") for _ in range(3)] if width else [dense(10)]
    model = keras.Sequential([keras.Input((20,)), *hidden, dense(1)])
    model.compile("adam" if width else "sgd", "mse")
    x = np.random.default_rng(0).normal(size=(6400, 20)).astype("float32")
    tfmw.fit(
        model,
        x,
        x[:, :1],
        batch_size=64,
        epochs=1000,
        verbose=0,
        callbacks=[Say()],
        backup_dir=folder,
        backup_every=20,
    )


def train_torch(folder: str) -> None:
    """The same with DistributedDataParallel and gloo, on the cluster that torchrun made."""
    _say(f"script {os.getpid()}")
    import torch
    from torch import nn

    # gloo detects a lost link only by a time-out, by default after 30 minutes. Workers that start
    # may need longer than one step.
    seconds = datetime.timedelta(seconds=1)
    torch.distributed.init_process_group("gloo", timeout=START_TIMEOUT_S * seconds)
    group = torch.distributed.new_group(timeout=GLOO_TIMEOUT_S * seconds)
    network = nn.Sequential(nn.Linear(20, 10), nn.Linear(10, 1))
    model = nn.parallel.DistributedDataParallel(network, process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    path, step = Path(folder, "backup.pt"), 0
    if path.exists():
        state = torch.load(path)
        model.load_state_dict(state["model"])
        step = state["step"]
    while True:
        x = torch.randn(32, 20)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), x[:, :1]).backward()
        optimizer.step()
        step += 1
        _say(f"made step {step}")
        time.sleep(0.02)
        if step % 20 == 0 and torch.distributed.get_rank() == 0:
            torch.save({"model": model.state_dict(), "step": step}, f"{path}.tmp")
            os.replace(f"{path}.tmp", path)


# ---- the measurement ----------------------------------------------------------------------------


def measure(command: list[str], killed: int, new: int) -> dict[str, float]:
    """Seconds from the kill to each event of one run of `command`.

    Args:
        killed: number of workers that are killed.
        new: number of workers that are started then.
    """
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    environ |= {"TF_CPP_MIN_LOG_LEVEL": "3", "OMP_NUM_THREADS": "1"}
    # Otherwise workers of torch 2.13's second attempt may find the addresses of the first in the
    # store that both attempts share, and give up.
    environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    launcher = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environ
    )
    scripts: list[int] = []

    def end() -> None:
        """Ends a run that hangs: torchrun's workers outlive it."""
        for pid in [launcher.pid, *scripts]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    hung = threading.Timer(TIMEOUT_S, end)
    hung.start()
    try:
        lines = _lines(launcher)
        for line in lines:
            if found := re.search(r"script (\d+)", line):
                scripts.append(int(found[1]))
            found = re.search(r"made step (\d+)", line)
            if found and int(found[1]) >= KILL_AT_STEP:
                break
        for pid in scripts[-killed:]:
            os.kill(pid, signal.SIGKILL)
        begin = time.monotonic()
        seen: dict[str, float] = {}
        again = 0
        for line in lines:
            now = time.monotonic() - begin
            if "tfmw: restart" in line or "is replaced" in line:
                seen.setdefault("detected", now)
            if found := re.search(r"script (\d+)", line):
                scripts.append(int(found[1]))
                again += 1
                seen.setdefault("detected", now)
                if again == new:
                    seen["restarted"] = now
            if again >= new and "made step " in line:
                return {**seen, "first new step": now}
        raise RuntimeError(f"the run ended after {seen}")
    finally:
        hung.cancel()
        launcher.send_signal(signal.SIGINT)
        launcher.stdout.close() if launcher.stdout else None
        launcher.wait()


def _lines(process: subprocess.Popen[str]) -> Iterator[str]:
    assert process.stdout is not None
    last: list[str] = []
    for line in process.stdout:
        last = [*last[-20:], line]
        yield line
    raise RuntimeError("the run ended:\n" + "".join(last))


def measured(repeat: int, torch_python: str | None = None) -> dict[str, list[list[float]]]:
    """Way of restarting -> seconds to each of EVENTS, for each run.

    Args:
        torch_python: Python of an environment with torch; by default this one, if it has torch.
    """
    tfmw = [sys.executable, "-m", "tfmw", "run", "--workers", "2", "--max-restarts", "1"]
    ways = {
        "tfmw run": tfmw,
        BOTH: tfmw,
        LARGE: tfmw,
        "tfmw run, --standby off": [*tfmw, "--standby", "off"],
    }
    if torch_python := torch_python or with_torch():
        torchrun = [torch_python, "-m", "torch.distributed.run", "--standalone"]
        ways["torchrun"] = [*torchrun, "--nproc-per-node", "2", "--max-restarts", "1"]
    found: dict[str, list[list[float]]] = {name: [] for name in ways}
    for _ in range(repeat):
        for name, way in ways.items():
            with tempfile.TemporaryDirectory() as folder:
                library = "torch" if name == "torchrun" else "tfmw"
                train = [__file__, "--train", library, "--backup_dir", folder]
                train += ["--width", str(3500 if name == LARGE else 0)]
                killed = 2 if name == BOTH else 1
                seen = measure([*way, *train], killed, 2 if name == "torchrun" else killed)
                found[name].append([seen[event] for event in EVENTS])
    return found


def with_torch() -> str | None:
    """This Python, if torch is installed."""
    return sys.executable if importlib.util.find_spec("torch") else None


def page_table(found: dict[str, list[list[float]]]) -> list[list[str]]:
    """The table of Benchmarks."""
    rows = [["seconds since `kill -9`", *EVENTS]]
    for name, runs in found.items():
        rows.append([name, *(span(seconds) for seconds in zip(*runs, strict=True))])
    return rows


def main() -> None:
    """Measures each way of restarting."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=3, help="runs of each")
    parser.add_argument("--torch-python", help="of an environment with torch (default: this one)")
    parser.add_argument("--hosts", action="store_true", help="three hosts: see bench/hosts.py")
    parser.add_argument(
        "--goodput", type=float, default=0.0, metavar="MINUTES", help="with --hosts: under faults"
    )
    parser.add_argument("--train", choices=("tfmw", "torch"), help=argparse.SUPPRESS)
    parser.add_argument("--backup_dir", help=argparse.SUPPRESS)
    parser.add_argument("--width", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train == "tfmw":
        train_tfmw(options.backup_dir, options.width)
    elif options.train:
        train_torch(options.backup_dir)
    elif options.hosts:
        from bench import hosts

        python = options.torch_python or with_torch()
        hosts.main(__file__, python, options.repeat, options.goodput)
    else:
        print(table(page_table(measured(options.repeat, options.torch_python))))


if __name__ == "__main__":
    main()
