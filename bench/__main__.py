"""All goals of speed and memory, each with what was measured, from one run: `make bench`.

    python -m bench [--all] [--rounds 1] [--out build/bench]

A ratio without a goal is measured by `--all`, which takes an hour.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from bench import memory, steps, whole


def main() -> None:
    """Measures all, prints the tables and keeps them, each as soon as it is there."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--all", action="store_true", help="those without a goal, too")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--out", type=Path, default=steps.ROOT / "build" / "bench")
    options = parser.parse_args()

    def of_steps() -> str:
        turns = steps.planned(list(steps.PLAN), []) if options.all else steps.with_goals()
        rows = steps.measure(turns, options.rounds)
        steps.keep(rows, options.out)
        return steps.table(rows)

    tables: list[str] = []
    measures: list[Callable[[], str]] = [
        of_steps,
        lambda: whole.table(rounds=max(3, options.rounds)),
        lambda: memory.table(tuple(memory.CONTENDERS) if options.all else memory.BESIDE),
    ]
    for measure in measures:
        tables.append(measure())
        print(tables[-1], end="\n\n", flush=True)
        (options.out / "all.md").write_text("\n\n".join(tables) + "\n")


if __name__ == "__main__":
    main()
