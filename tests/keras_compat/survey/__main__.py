"""Tries all items, or those named, and writes the table: `python -m tests.keras_compat.survey`.

python -m tests.keras_compat.survey                  # all, into docs/explain/examples.md
python -m tests.keras_compat.survey AUC Lamb         # these only, printed
python -m tests.keras_compat.survey --contexts 5     # so many for each item
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import hypothesis
from hypothesis import HealthCheck, Phase, settings

import tfmw
from tests.keras_compat.survey.catalogue import Item, in_groups, items
from tests.keras_compat.survey.contexts import Context, contexts
from tests.keras_compat.survey.report import write
from tests.keras_compat.survey.trial import Outcome, attempt_together
from tests.matrix.columns import virtual_devices

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "explain" / "examples.md"
RECORDS = ROOT / "build" / "survey.json"


def drawn(number: int, seed: int) -> list[Context]:
    """Contexts, the same for the same seed."""
    found: list[Context] = []

    @hypothesis.seed(seed)
    @settings(
        max_examples=number,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @hypothesis.given(contexts())
    def collect(context: Context) -> None:
        found.append(context)

    collect()
    return found


def survey(chosen: list[Item], number: int, seed: int) -> list[Outcome]:
    """Tries each item in `number` contexts; items that share a model share them."""
    virtual_devices(2)
    strategy = tfmw.strategies.mirrored(["CPU:0", "CPU:1"])
    outcomes = []
    groups = in_groups(chosen)
    # The first examples of Hypothesis are the simplest ones, and the same for every item.
    around = drawn(4 + number * len(groups), seed)[4:]
    for i, group in enumerate(groups):
        for context in around[i * number : (i + 1) * number]:
            begin = time.perf_counter()
            for outcome in attempt_together(group, context, strategy):
                outcomes.append(outcome)
                seconds = time.perf_counter() - begin
                line = f"{outcome.verdict:12} {outcome.difference:.0e} {seconds:4.1f}s"
                print(f"{line} {outcome.item.kind} {outcome.item.name} {outcome.why}", flush=True)
                if outcome.verdict == "SILENT":
                    print(f"    {context}", flush=True)
    return outcomes


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.keras_compat.survey")
    parser.add_argument("names", nargs="*", help="of items, or of kinds; all by default")
    parser.add_argument("--contexts", type=int, default=1, help="for each item")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--print-only", action="store_true", help="leave the page as it is")
    arguments = parser.parse_args()
    chosen = [
        item
        for item in items()
        if not arguments.names
        or item.kind in arguments.names
        or item.name in arguments.names
        or item.name.split()[0] in arguments.names
    ]
    outcomes = survey(chosen, arguments.contexts, arguments.seed)
    if not arguments.print_only:
        write(PAGE, RECORDS, outcomes)
    silent = [o for o in outcomes if o.verdict == "SILENT"]
    print(f"{len(outcomes)} tried, {len(silent)} silently different")
    return bool(silent)


if __name__ == "__main__":
    sys.exit(main())
