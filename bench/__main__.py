"""All goals of speed and memory, each with the measured value, from one run: `make bench`.

    python -m bench [--all] [--rounds 1] [--out build/bench]

`--all` takes an hour: it also measures ratios without a goal. It writes the tables of a step and
all figures into `bench/results.json`, with the commit. A diff of that file shows slower rows.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from bench import memory, short, steps, whole
from bench.figures import Figure, commit, keep, markdown


def main() -> None:
    """Measures all, prints the tables and keeps them, each as soon as it is measured."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--all", action="store_true", help="those without a goal, too")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--out", type=Path, default=steps.ROOT / "build" / "bench")
    options = parser.parse_args()
    name = commit()

    def of_steps() -> list[Figure]:
        turns = steps.planned(list(steps.PLAN), []) if options.all else steps.with_goals()
        rows = steps.measure(turns, options.rounds)
        steps.keep(rows, options.out)
        if options.all:
            keep(steps.page_tables(rows), name)
        return steps.figures(rows)

    rounds = max(3, options.rounds)
    contenders = tuple(memory.CONTENDERS) if options.all else memory.BESIDE
    parts: dict[str, Callable[[], list[Figure]]] = {
        "a step": of_steps,
        "short calls and small steps": lambda: short.figures(rounds),
        "a tiny training": lambda: whole.figures(rounds=rounds),
        "peak memory": lambda: memory.figures(contenders),
    }
    options.out.mkdir(parents=True, exist_ok=True)
    tables: list[str] = []
    measured: list[Figure] = []
    for title, measure in parts.items():
        found = measure()
        measured += found
        tables.append(markdown(title, found))
        print(tables[-1], end="\n\n", flush=True)
        (options.out / "all.md").write_text("\n\n".join(tables) + "\n")
    if options.all:
        keep({"figures": [["row", "figure", "goal"], *(f.cells for f in measured)]}, name)


if __name__ == "__main__":
    main()
