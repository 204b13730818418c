"""All goals of speed and memory, each with what was measured, from one run: `make bench`.

python -m bench [--rounds 1] [--out build/bench]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from bench import memory, steps, whole


def main() -> None:
    """Measures all, prints the tables and keeps them, each as soon as it is there."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--out", type=Path, default=steps.ROOT / "build" / "bench")
    options = parser.parse_args()

    def of_steps() -> str:
        rows = steps.measure(list(steps.PLAN), options.rounds, [])
        steps.keep(rows, options.out)
        return steps.table(rows)

    tables: list[str] = []
    measures: list[Callable[[], str]] = [
        of_steps,
        lambda: whole.table(rounds=max(3, options.rounds)),
        memory.table,
    ]
    for measure in measures:
        tables.append(measure())
        print(tables[-1], end="\n\n", flush=True)
        (options.out / "all.md").write_text("\n\n".join(tables) + "\n")


if __name__ == "__main__":
    main()
