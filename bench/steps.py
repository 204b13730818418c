"""Time of a training step: tfmw beside every other way to do it, in one run, as ratios.

    python -m bench.steps [--works cnn,mlp] [--rounds 2] [--out build/bench]

Contenders take turns, so that what else the machine does hits all alike; each turn is a fresh set
of processes with one core each. A figure is the median over all epochs of all rounds but each
one's first two. `make bench` runs this, and needs the extra `bench` (tf_keras, PyTorch).
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_S = 400

# Work -> workers -> contenders, the first one ours.
PLAN: dict[str, dict[int, list[str]]] = {
    "cnn": {1: ["tfmw", "stock_fit"], 2: ["tfmw", "legacy_fit", "ddp", "hand_loop"]},
    "mlp": {
        1: ["tfmw", "stock_fit"],
        2: ["tfmw", "legacy_fit", "hand_loop", "ddp", "tfmw_bf16", "tfmw_fp16", "ddp_16_bit"],
    },
    "resnet50": {2: ["tfmw", "legacy_fit", "ddp"]},
    "transformer": {1: ["tfmw", "stock_fit"], 2: ["tfmw", "legacy_fit", "ddp"]},
}
EPOCHS = {"cnn": 6, "mlp": 6, "resnet50": 5, "transformer": 6, "tiny": 6}


def run(contender: str, work: str, workers: int) -> list[float]:
    """Seconds of a step, per epoch, of one fresh set of processes.

    Raises:
        RuntimeError: a process failed; the message is the end of its output.
    """
    ports = _free_ports(workers + 1)
    addresses = [f"127.0.0.1:{port}" for port in ports[1:]]
    processes, logs = [], []
    for rank in range(workers):
        task = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": rank}}
        environ = {
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": str(workers),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(ports[0]),
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "TF_NUM_INTRAOP_THREADS": "1",
            "OMP_NUM_THREADS": "1",
        }
        if workers > 1:
            environ["TF_CONFIG"] = json.dumps(task)
        log = tempfile.TemporaryFile("w+")  # noqa: SIM115  (read below)
        command = [sys.executable, "-m", "bench.contenders", contender, work, str(EPOCHS[work])]
        processes.append(
            subprocess.Popen(command, env=environ, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
        )
        logs.append(log)
    try:
        statuses = [process.wait(TIMEOUT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
    outputs = []
    for log in logs:
        log.seek(0)
        outputs.append(log.read())
        log.close()
    for rank, status in enumerate(statuses):
        if status:
            end = "\n".join(outputs[rank].splitlines()[-15:])
            raise RuntimeError(f"{contender}, {work}, worker {rank}: status {status}\n{end}")
    line = next(text for text in outputs[0].splitlines() if text.startswith("["))
    return [float(seconds) for seconds in json.loads(line)]


def _free_ports(number: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def measure(works: list[str], rounds: int, only: list[str]) -> list[dict[str, object]]:
    """Rows {"work", "workers", "contender", "ms", "spread"}: medians of all rounds."""
    seconds: dict[tuple[str, int, str], list[float]] = {}
    for _ in range(rounds):
        for work in works:
            for workers, contenders in PLAN.get(work, {2: ["tfmw"]}).items():
                for contender in contenders:
                    if only and contender not in only:
                        continue
                    times = run(contender, work, workers)
                    seconds.setdefault((work, workers, contender), []).extend(times)
                    print(
                        f"{work}, {workers} worker(s), {contender}: "
                        f"{1000 * statistics.median(times):.2f} ms",
                        file=sys.stderr,
                        flush=True,
                    )
    return [
        {
            "work": work,
            "workers": workers,
            "contender": contender,
            "ms": 1000 * statistics.median(times),
            "spread": (max(times) - min(times)) / statistics.median(times),
        }
        for (work, workers, contender), times in seconds.items()
    ]


def main() -> None:
    """Measures, prints the table and keeps it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--works", default="cnn,mlp,resnet50,transformer")
    parser.add_argument("--contenders", default="", help="only these")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "bench")
    options = parser.parse_args()
    only = [name for name in options.contenders.split(",") if name]
    rows = measure(options.works.split(","), options.rounds, only)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "steps.json").write_text(json.dumps(rows, indent=1))
    for row in rows:
        print(row)


if __name__ == "__main__":
    main()
