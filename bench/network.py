"""Predicted against measured: the time of a step on networks of less bandwidth.

    sudo python -m bench.network [--rates 10gbit 3gbit 1gbit 300mbit 100mbit] [--workers 2]

Each rate is one run of `tfmw bench` in a network namespace of its own, whose loopback tc-tbf(8)
limits. All workers' messages share it, so each gets its part of the rate. The prediction is made by
tfmw/cost.py from the run without a limit. Needs root, `unshare` and `tc` (iproute2).
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BITS = {"gbit": 1e9, "mbit": 1e6}
PARTS = ("compute", "communication", "input", "step")
BURST = "2mb"  # loopback's packets are of 64 KB


def make() -> tuple[object, object]:
    """The CNN of TensorFlow's multi-worker tutorial, and 20 global batches."""
    import keras

    from bench.works import batches, keras_network
    from tfmw import strategies

    workers = strategies.current_strategy().num_replicas_in_sync
    return keras_network("cnn", keras), batches("cnn", workers).take(20)


def run(rate: str | None, workers: int) -> tuple[dict[str, float], int]:
    """({part of a step: ms}, number of parameters) of `tfmw bench` behind a limit.

    Raises:
        RuntimeError: it failed; the message is its output.
    """
    limit = f"tc qdisc add dev lo root tbf rate {rate} burst {BURST} latency 1s" if rate else "true"
    bench = [sys.executable, "-m", "tfmw", "bench", f"--workers={workers}", f"{__file__}:make"]
    behind = ["unshare", "--net", "sh", "-c", f'ip link set lo up && {limit} && exec "$@"', "sh"]
    done = subprocess.run([*behind, *bench], cwd=ROOT, capture_output=True, text=True, check=False)
    found = dict(re.findall(r"^(\w+) +([\d.]+) +\d+%$", done.stdout, re.MULTILINE))
    parameters = re.search(r"([\d,]+) parameters", done.stdout)
    if done.returncode or parameters is None:
        raise RuntimeError(done.stdout + done.stderr)
    return {part: float(found[part]) for part in PARTS}, int(parameters[1].replace(",", ""))


def main() -> None:
    """Measures, predicts, and prints a table."""
    from tfmw.cost import Cost

    flags = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    flags.add_argument(
        "--rates", nargs="+", default=["10gbit", "3gbit", "1gbit", "300mbit", "100mbit"]
    )
    flags.add_argument("--workers", type=int, default=2)
    options = flags.parse_args()
    missing = [name for name in ("unshare", "tc", "ip") if shutil.which(name) is None]
    if missing:
        flags.error(f"{missing[0]} is not installed: apt-get install iproute2 util-linux")

    free, parameters = run(None, options.workers)
    n = options.workers
    cost = Cost(
        workers=n,
        compute=free["compute"] / 1e3,
        communication=free["communication"] / 1e3,
        input=free["input"] / 1e3,
        gradient_bytes=4 * parameters,
    )
    print("| rate of the link | MB/s of each worker | predicted, ms | measured, ms | ratio |")
    print("| --- | --- | --- | --- | --- |")
    print(f"| no limit | {cost.bandwidth / 1e6:.0f} | | {free['step']:.1f} | |")
    for rate in options.rates:
        number, unit = re.fullmatch(r"([\d.]+)(\w+)", rate).groups()
        each = float(number) * BITS[unit] / 8 / n
        there = cost.on(n, bandwidth=each)
        measured, _ = run(rate, n)
        ratio = 1e3 * there.step / measured["step"]
        print(
            f"| {rate} | {each / 1e6:.0f} | {1e3 * there.step:.1f} | {measured['step']:.1f} | "
            f"{ratio:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
