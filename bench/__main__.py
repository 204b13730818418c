"""All goals of speed and memory, each with the measured value, from one run: `make bench`.

    python -m bench [--all] [--rounds 1] [--out build/bench]

A ratio without a goal is measured by `--all`, which takes an hour, and adds all figures to
`bench/history.csv`, under the commit. The end names each figure that is slower than at the last
commits.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from bench import memory, short, steps, whole
from bench.figures import Figure, commit, markdown, record, slower


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
    news: list[str] = []
    for title, measure in parts.items():
        found = measure()
        news += slower(found)
        if options.all:
            record(found, name)
        tables.append(markdown(title, found))
        print(tables[-1], end="\n\n", flush=True)
        (options.out / "all.md").write_text("\n\n".join(tables) + "\n")
    if news:
        print("slower than at the last commits:", *news, sep="\n  ")


if __name__ == "__main__":
    main()
