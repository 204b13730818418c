"""The tests several times, under conditions in which a test that depends on chance may fail.

    python -m tests.flaky [--times 3] [--seed 7] [arguments of pytest]

Each condition runs `--times` times: a quiet machine, six busy processes on the same cores, a single
core, and an order of files and a hash seed that are drawn. The last lines name each failed test and
its conditions; the status is then 1.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator

from tests.helpers.part import ORDER

CONDITIONS = ("quiet", "load", "one core", "drawn order")
_BUSY = 6
_FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)


def environ_of(condition: str, seed: int) -> dict[str, str]:
    """The environment of one run."""
    own = {name: value for name, value in os.environ.items() if name != ORDER}
    if condition != "drawn order":
        return own
    return {**own, ORDER: str(seed), "PYTHONHASHSEED": str(seed)}


@contextlib.contextmanager
def _busy(number: int) -> Iterator[None]:
    processes = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)
    ]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def failed_in(condition: str, seed: int, arguments: list[str]) -> list[str]:
    """Runs pytest once; the tests that failed."""
    command = [sys.executable, "-m", "pytest", "-rfE", *arguments]
    if condition == "one core":
        command = ["taskset", "--cpu-list", str(min(os.sched_getaffinity(0))), *command]
    env = environ_of(condition, seed)
    with _busy(_BUSY if condition == "load" else 0):
        run = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=False)
    print(run.stdout if run.returncode else run.stdout.strip().splitlines()[-1], flush=True)
    found = _FAILED.findall(run.stdout)
    return found or ["the run itself"] * (run.returncode != 0)


def main() -> int:
    """Runs the series; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=3, help="runs under each condition")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 31))
    options, arguments = parser.parse_known_args()
    failed: dict[str, list[str]] = collections.defaultdict(list)
    for condition in CONDITIONS:
        for seed in range(options.seed, options.seed + options.times):
            print(f"{condition}, seed {seed}:", end=" ", flush=True)
            for test in failed_in(condition, seed, arguments):
                failed[test].append(f"{condition}, seed {seed}")
    for test, runs in failed.items():
        print(f"{test}: {'; '.join(runs)}")
    print(f"{len(failed)} tests failed in {options.times * len(CONDITIONS)} runs")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
