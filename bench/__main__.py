"""The figures of Benchmarks and of README that take minutes, from one run: `make bench`.

    python -m bench [--rounds 3] [--minutes 50] [--only "a step"]
    python -m bench.figures      # writes them into the pages

Every table is written into `bench/results.json`, with the commit, as soon as it is measured. A
measurement that fails is reported at the end; the others are kept. Rounds of the steps that would
not end within the minutes are not begun; the first round always is.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from bench import memory, recovery, short, steps, whole
from bench.figures import HEADING, Figure, Rows, commit, keep, markdown

Found = tuple[list[Figure], Mapping[str, Rows]]
"""Figures, and the tables of the pages that show them."""


class _Part(NamedTuple):
    """A measurement: its title, and an iterator over all that is found so far."""

    title: str
    measure: Callable[[], Iterator[Found]]


def _parts(rounds: int, ends_at: float) -> list[_Part]:
    def of_short() -> Iterator[Found]:
        ratios = short.measured(rounds)
        yield short.figures(ratios), {"short": short.page_table(ratios)}

    def of_whole() -> Iterator[Found]:
        figures = whole.figures(rounds=rounds)
        yield figures, {"whole": whole.page_table(figures)}

    def of_memory() -> Iterator[Found]:
        multiples = memory.measured()
        yield memory.figures(multiples), {"memory": memory.page_table(multiples)}

    def of_recovery() -> Iterator[Found]:
        seconds = recovery.measured(rounds)
        yield [], {"recovery": recovery.page_table(seconds)}

    def of_steps() -> Iterator[Found]:
        for ms in steps.measured(steps.planned(), rounds, ends_at):
            yield steps.figures(ms), steps.page_tables(ms)

    return [
        _Part("short calls and small steps", of_short),
        _Part("a tiny training", of_whole),
        _Part("peak memory", of_memory),
        _Part("recovery", of_recovery),
        _Part("a step", of_steps),
    ]


def main() -> None:
    """Measures all, prints the figures, and keeps each as soon as it is measured."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=50.0, help="no round ends later")
    parser.add_argument("--only", default="", help="a part of the titles")
    options = parser.parse_args()
    name, failed = commit(), []
    all_figures: dict[str, list[Figure]] = {}
    parts = _parts(options.rounds, time.monotonic() + 60 * options.minutes)
    chosen = [part for part in parts if options.only in part.title]
    if not chosen:
        titles = "; ".join(part.title for part in parts)
        parser.error(f"no title has {options.only!r} in it: the titles are {titles}")
    for title, measure in chosen:
        began = time.monotonic()
        try:
            for figures, tables in measure():
                all_figures[title] = figures
                rows = [figure.cells for part in all_figures.values() for figure in part]
                whole_run = {} if options.only else {"figures": [HEADING, *rows]}
                keep({**tables, **whole_run}, name)
        except Exception:  # the other parts are measured nevertheless
            traceback.print_exc()
            failed.append(title)
        print(f"{title}: {(time.monotonic() - began) / 60:.1f} minutes", flush=True)
        print(markdown(all_figures.get(title, [])), end="\n\n", flush=True)
    failed += steps.FAILED
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
