"""All goals of speed and memory, each with what was measured, from one run: `make bench`.

python -m bench [--rounds 1] [--out build/bench]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from bench import memory, steps, whole

MB = 210.0  # of weights, where memory is measured
MEMORY_GOALS = {(2, False): 5.0, (4, False): 4.3, (2, True): 7.0}
SMALL_WORKERS, MANY_WORKERS = 2, 8
WHOLE_GOAL = 0.92  # `tfmw run --workers 2` / plain Keras
MANY_GOAL_S = 15.0


def memory_table() -> str:
    """Peak memory in multiples of the weights, in Markdown."""
    lines = ["| peak memory / weights | workers | backups | measured | goal |", "| --- " * 5 + "|"]
    for name in memory.CONTENDERS:
        for workers in [1] if name == "stock_fit" else [2, 4]:
            for backups in (False, True):
                found = memory.measured(name, workers, MB, backups)
                goal = MEMORY_GOALS.get((workers, backups), "") if name == "tfmw" else ""
                saved = "yes" if backups else "no"
                lines.append(f"| {name} | {workers} | {saved} | {found:.1f} | {goal} |")
                print(lines[-1], file=sys.stderr, flush=True)
    return "\n".join(lines)


def whole_table(rounds: int) -> str:
    """A tiny training from its command to its end, in Markdown."""
    found = whole.measure([SMALL_WORKERS, MANY_WORKERS], max(3, rounds))
    plain = found.pop(None)
    goals = {
        SMALL_WORKERS: f"{WHOLE_GOAL} of plain Keras",
        MANY_WORKERS: f"{MANY_GOAL_S:.0f} s on two cores",
    }
    lines = ["| a tiny training, whole | s | / plain Keras | goal |", "| --- " * 4 + "|"]
    lines.append(f"| plain Keras, one process | {plain:.1f} | 1 | |")
    for workers, seconds in found.items():
        times = f"{seconds:.1f} | {seconds / plain:.2f}"
        lines.append(f"| `tfmw run --workers {workers}` | {times} | {goals[workers or 0]} |")
    return "\n".join(lines)


def main() -> None:
    """Measures all, prints the tables and keeps them."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--out", type=Path, default=steps.ROOT / "build" / "bench")
    options = parser.parse_args()
    rows = steps.measure(list(steps.PLAN), options.rounds, [])
    steps.keep(rows, options.out)
    tables = [steps.table(rows), memory_table(), whole_table(options.rounds)]
    (options.out / "all.md").write_text("\n\n".join(tables) + "\n")
    print("\n\n".join(tables))


if __name__ == "__main__":
    main()
