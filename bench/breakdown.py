"""Processor time of a step by part: of one worker alone, with peers, and without some parts.

    python -m bench.breakdown [--work mlp] [--epochs 8] [--only alone two]

Processor time is little changed by what else the machine does, unlike time by the clock. Each
setting is a fresh set of processes of one core each; figures are of the first, in ms per step. With
Linux's `perf` on PATH, a second table has the processor time by kind of code.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from bench.contenders import WARM_UP
from bench.steps import start
from bench.works import WORKS, batches, keras_network

# Setting -> (processes, whether each trains for itself, arguments of fit, without reductions).
SETTINGS: dict[str, tuple[int, bool, dict[str, Any], bool]] = {
    "alone": (1, True, {}, False),
    "both alone": (2, True, {}, False),
    "nothing reduced": (2, False, {}, True),
    "two": (2, False, {}, False),
    "whole update each": (2, False, {"shard_optimizer": False}, False),
}
HZ = 499  # samples of perf per second
SYMBOLS = {
    "copies": "memmove|memcpy",
    "additions of the ring": "^[A-Z]+_add",
    "checksums of the weights": "crc32",
}
FILES = {
    "products and update, compiled": r"JIT|anon|^perf-|memfd",
    "Linux: system calls, switches": "kernel",
    "Python": "python",
    "TensorFlow": "tensorflow",
}


class _Meter:
    """Counters at the ends of epochs, and the processor time of the ring."""

    def __init__(self) -> None:
        self.rows: list[list[float]] = []
        self.ring: dict[str, float] = collections.defaultdict(float)

    def note(self) -> None:
        used = resource.getrusage(resource.RUSAGE_SELF)
        times = [1000 * t for t in (time.perf_counter(), used.ru_utime, used.ru_stime)]
        faults = float(used.ru_minflt)
        self.rows.append([*times, faults, *(self.ring[k] for k in ("calls", "cpu", "waits"))])

    def per_step(self, steps: int) -> dict[str, float]:
        first, last = self.rows[WARM_UP - 1], self.rows[-1]
        made = steps * (len(self.rows) - WARM_UP)
        names = ("wall", "user", "system", "page faults", "exchanges", "ring", "ring waits")
        found = [(end - begin) / made for begin, end in zip(first, last, strict=True)]
        return dict(zip(names, found, strict=True))

    @contextlib.contextmanager
    def of_ring(self) -> Iterator[None]:
        """Counts ring operations, their processor time and how long they wait for neighbours."""
        from tfmw.train.mirrored.collectives.ring import Ring

        turn, wait = Ring._turn, Ring._wait

        def timed(of: Callable[..., Any], clock: Callable[[], float], key: str) -> Any:
            def call(*args: Any, **options: Any) -> Any:
                begin = clock()
                try:
                    return of(*args, **options)
                finally:
                    self.ring[key] += 1000 * (clock() - begin)

            return call

        def counted(*args: Any) -> None:
            self.ring["calls"] += 1
            timed(turn, time.thread_time, "cpu")(*args)

        with (
            mock.patch.object(Ring, "_turn", counted),
            mock.patch.object(Ring, "_wait", timed(wait, time.perf_counter, "waits")),
        ):
            yield


class _Samples:
    """Samples by `perf` of this process between two calls."""

    def __init__(self) -> None:
        self._perf: subprocess.Popen[bytes] | None = None
        self._file = tempfile.NamedTemporaryFile(suffix=".perf")  # noqa: SIM115  (until the end)

    def begin(self) -> None:
        if shutil.which("perf"):
            command = ["perf", "record", "-q", "-e", "cpu-clock", "-F", str(HZ)]
            command += ["-p", str(os.getpid()), "-o", self._file.name]
            self._perf = subprocess.Popen(command, stderr=subprocess.DEVNULL)

    def milliseconds(self) -> dict[str, float]:
        """Milliseconds by kind of code; empty without perf."""
        if self._perf is None:
            return {}
        self._perf.send_signal(signal.SIGINT)
        self._perf.wait()
        command = ["perf", "script", "-i", self._file.name, "-F", "ip,sym,dso"]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return {k: 1000 * n / HZ for k, n in kinds_of(text).items()}


def kinds_of(samples: str) -> dict[str, int]:
    """Number of samples by kind of code.

    Args:
        samples: as `perf script -F ip,sym,dso` prints them: "7f12 memmove (/lib/libc.so.6)".
    """
    found: collections.Counter[str] = collections.Counter()
    for line in samples.splitlines():
        match = re.match(r"\s*[0-9a-f]+\s+(.*)\s+\((.*)\)$", line)
        if match:
            symbol, file = match[1], match[2].rsplit("/", 1)[-1]
            fits = [kind for kind, pattern in SYMBOLS.items() if re.search(pattern, symbol)]
            fits += [kind for kind, pattern in FILES.items() if re.search(pattern, file)]
            found[fits[0] if fits else "other"] += 1
    return dict(found)


def _worker(setting: str, name: str, epochs: int) -> dict[str, dict[str, float]]:
    import keras

    import tfmw
    from tfmw.train.mirrored.collectives import reduction

    workers, alone, options, unreduced = SETTINGS[setting]
    work, rank = WORKS[name], int(os.environ["RANK"])
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    tfmw.init()
    meter, samples = _Meter(), _Samples()

    def on_epoch_end(epoch: int, logs: Any) -> None:
        meter.note()
        if epoch == WARM_UP - 1:
            samples.begin()

    timer = keras.callbacks.LambdaCallback(on_epoch_end=on_epoch_end)
    timer.reads_optimizer = False
    with meter.of_ring(), reduction.without_reduction() if unreduced else contextlib.nullcontext():
        tfmw.fit(
            keras_network(name, keras),
            batches(name, 1 if alone else workers),
            epochs=epochs,
            steps_per_epoch=work.steps,
            callbacks=[timer],
            verbose=0,
            **({"strategy": "default"} if alone else options),
        )
    made = work.steps * (epochs - WARM_UP)
    kinds = {kind: ms / made for kind, ms in samples.milliseconds().items()}
    return {"times": meter.per_step(work.steps), "kinds": kinds}


def measured(setting: str, work: str, epochs: int) -> dict[str, dict[str, float]]:
    """Milliseconds per step of the first process: "times", and "kinds" of code."""
    workers = SETTINGS[setting][0]
    command = ["bench.breakdown", "--worker", setting, work, str(epochs)]
    lines = start(command, workers, through_tfmw=True)[0].splitlines()
    found: dict[str, dict[str, float]] = json.loads(next(x for x in lines if x.startswith("{")))
    return found


def _table(title: str, found: dict[str, dict[str, float]]) -> str:
    """Markdown: a line for each figure, a column for each setting."""
    names = {name: None for figures in found.values() for name in figures}
    lines = [f"| {title} | {' | '.join(found)} |", "| --- " * (1 + len(found)) + "|"]
    for name in names:
        cells = (f"{figures.get(name, 0.0):.1f}" for figures in found.values())
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Measures all settings, prints tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--work", choices=list(WORKS), default="mlp")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--only", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    options = parser.parse_args()
    found = {s: measured(s, options.work, options.epochs) for s in options.only}
    print(_table("ms per step", {setting: of["times"] for setting, of in found.items()}))
    if shutil.which("perf"):
        kinds = {setting: of["kinds"] for setting, of in found.items()}
        print("\n" + _table("of processor, ms per step", kinds))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        print(json.dumps(_worker(sys.argv[2], sys.argv[3], int(sys.argv[4]))), flush=True)
    else:
        main()
