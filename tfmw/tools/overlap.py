"""How much of the gradients' way is hidden behind the backward pass, as `tfmw bench` measures it.

    with exchanges_of(ring) as spans:
        ...                                # training
    hidden, window = overlap(spans, steps, exposed=0.012)

Gradients of the last layers travel while those of earlier ones are computed. The time of a step
does not show that; the ring's clock does.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

GRADIENTS = ("gradients", "gather")
WEIGHTS = "weights"


class Span(NamedTuple):
    """One exchange of a ring.

    Attributes:
        what: its kind.
        begin, end: in seconds of one clock.
    """

    what: str
    begin: float
    end: float


@contextlib.contextmanager
def exchanges_of(ring: Any) -> Iterator[list[Span]]:
    """Yields a list that gets a `Span` for each exchange of a ring, or stays empty without one."""
    spans: list[Span] = []
    if ring is None:
        yield spans
        return
    ring.on_exchange = lambda *span: spans.append(Span(*span))
    try:
        yield spans
    finally:
        ring.on_exchange = None


def overlap(spans: Sequence[Span], steps: int, exposed: float) -> tuple[float, float]:
    """How long the gradients of a step travel unnoticed, and how long they could.

    Args:
        spans: of all exchanges of these steps.
        steps: their number.
        exposed: seconds that a step takes longer because of its exchanges.

    Returns:
        (hidden, window), in seconds of a step: the time of its exchanges beyond `exposed`, and that
        time with the gaps in which the ring waits for the next gradients. Medians over the steps.
    """
    found = [span for span in spans if span.what in (*GRADIENTS, WEIGHTS)]
    each, rest = divmod(len(found), steps)
    if not each or rest:
        return 0.0, 0.0
    of_steps = [found[first : first + each] for first in range(0, len(found), each)]
    travel = statistics.median(sum(s.end - s.begin for s in step) for step in of_steps)
    gaps = statistics.median(
        sum(
            after.begin - before.end
            for before, after in itertools.pairwise(step)
            if after.what in GRADIENTS
        )
        for step in of_steps
    )
    hidden = max(0.0, travel - exposed)
    return hidden, hidden + gaps
