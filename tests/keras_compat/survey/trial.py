"""One item both ways: Keras's own `fit` in one process, and tfmw's on two replicas."""

from __future__ import annotations

import dataclasses
import gc
import warnings

import numpy as np
import tensorflow as tf

from tests.keras_compat.survey.catalogue import Item, combined
from tests.keras_compat.survey.contexts import Context
from tests.matrix.row import Row, compared, difference, run
from tfmw.errors import UsageError

# Why results of these differ, as in docs/explain/examples.md: (start of item's name, reason).
DOCUMENTED = {
    "layers": {
        "random": "each replica draws its own random numbers",
        "BatchNormalization": "each replica normalizes by its own examples",
        "Equalization": "each replica takes the histogram of its own examples",
    }
}


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Result of a trial.

    Attributes:
        item: the item that was tried.
        context: the context of the trial.
        verdict: "equal", "documented", "warned", "refused", "error", "not trained by Keras" or
            "SILENT".
        difference: the greatest, relative to the largest value of each array.
        why: the warning, the error or the documented reason; otherwise the place of the greatest
            difference.
    """

    item: Item
    context: Context
    verdict: str
    difference: float
    why: str


def attempt(item: Item, context: Context, strategy: tf.distribute.Strategy) -> Outcome:
    """Trains, evaluates and compares."""
    row = Row(item.name, lambda: item.build(context), tol=item.tol)
    gc.collect()

    def outcome(verdict: str, greatest: float = 0.0, why: str = "") -> Outcome:
        return Outcome(item, context, verdict, greatest, " ".join(why.split()))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            expected = compared(run(row, None))
        except Exception as e:
            return outcome("not trained by Keras", why=f"{type(e).__name__}: {_first(e)}")
    if not all(np.isfinite(v).all() for v in expected.values()):
        return outcome("not trained by Keras", why="its results are not finite")
    with _tfmw_warnings() as warned:
        try:
            got = compared(run(row, strategy))
        except UsageError as e:
            return outcome("refused", why=_first(e))
        except Exception as e:
            return outcome("error", why=f"{type(e).__name__}: {_first(e)}")
    if context.feed == "unknown length":
        # Keras counts one step more at the end of such data.
        expected = {k: v for k, v in expected.items() if k != "optimizer/0/0"}
    differences = {k: difference(got[k], v) if k in got else np.inf for k, v in expected.items()}
    worst = max(differences, key=lambda k: differences[k])
    greatest = float(differences[worst])
    if greatest <= item.tol:
        return outcome("equal", greatest)
    reason = _documented(item)
    if reason and np.isfinite(greatest):
        return outcome("documented", greatest, reason)
    if warned:
        return outcome("warned", greatest, warned[0].removeprefix("tfmw: "))
    return outcome("SILENT", greatest, f"in {worst}")


class _tfmw_warnings(list[str]):
    """Collects what tfmw warns of; `run` catches warnings, so they are taken where they arise."""

    def __enter__(self) -> _tfmw_warnings:
        self._warn = warnings.warn

        def warn(message: object, *arguments: object, **options: object) -> None:
            if str(message).startswith("tfmw: "):
                self.append(str(message))

        warnings.warn = warn
        return self

    def __exit__(self, *error: object) -> None:
        warnings.warn = self._warn


def attempt_together(
    group: list[Item], context: Context, strategy: tf.distribute.Strategy
) -> list[Outcome]:
    """Tries items in one model, and each by itself where that differs."""
    if len(group) > 1:
        name = ", ".join(item.name for item in group)
        together = dataclasses.replace(
            group[0], name=name, build=combined([item.branch for item in group])
        )
        outcome = attempt(together, context, strategy)
        if outcome.verdict in ("equal", "documented"):
            return [dataclasses.replace(outcome, item=item) for item in group]
    return [attempt(item, context, strategy) for item in group]


def _documented(item: Item) -> str:
    reasons = DOCUMENTED.get(item.kind, {})
    return reasons.get(item.name, reasons["random"] if item.draws else "")


def _first(error: Exception) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), "")[:200]
