"""Runs the cases on this machine's GPUs: `python -m tests.on_gpus`.

    python -m tests.on_gpus [NAME ...]

TensorFloat-32 is off: it rounds products of matrices to 10 bits. Two workers may share one GPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 600
ENVIRON = {
    "TF_FORCE_GPU_ALLOW_GROWTH": "true",
    "TF_DETERMINISTIC_OPS": "1",
    "NVIDIA_TF32_OVERRIDE": "0",
    "TF_CPP_MIN_LOG_LEVEL": "2",
}
CASES = "tests.on_gpus.cases"
WAYS = {
    "two logical devices of one process": [sys.executable, "-m", CASES, "devices"],
    "two workers": [
        *(sys.executable, "-m", "tfmw", "run", "--workers", "2", "-m"),
        *(CASES, "workers"),
    ],
}


def main(names: list[str]) -> int:
    """Prints tables; returns the exit status."""
    environ = {**os.environ, **ENVIRON, "PYTHONPATH": str(ROOT)}
    status = 0
    for way, command in WAYS.items():
        print(f"\n{way}\n\n| case | largest difference of a loss | of a weight | |", flush=True)
        run = subprocess.run([*command, *names], cwd=ROOT, env=environ, timeout=TIMEOUT_S)
        status = status or run.returncode
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
