"""Losses and metrics that depend on the number of replicas, with a description of each.

A value that replicas cannot combine is reported once, with the line of the user's program that
computes it. `Dataflow` finds that line.
"""

from __future__ import annotations

import tensorflow as tf

from tfmw.compat.dataflow.arithmetic import BINARY
from tfmw.compat.dataflow.flow import Flow
from tfmw.observe.stacks import is_installed

_WHOLE_BATCHES = (
    "Train with split_batch=False, which gives each replica whole batches, or on one replica."
)
_REASONS = {
    "compared": (
        "compares the examples of a batch with each other{place}. Each replica compares those of "
        "its own part of the batch only, so results depend on the number of replicas. "
        + _WHOLE_BATCHES
    ),
    "pairs": (
        "has one value for each pair of examples{place}: shapes {shapes}. Each replica pairs the "
        "examples of its own part of the batch only, so results depend on the number of replicas. "
        "If one value per example is meant, give both the same shape."
    ),
    "nonlinear": (
        "is neither a sum nor a mean over the examples of a batch, but a function of one{place}. "
        "It is the mean of what replicas find in their parts of the batch, so results depend on "
        "the number of replicas. " + _WHOLE_BATCHES
    ),
    "padded": (
        "depends on the length of ragged rows that are padded to the longest one{place}. Each "
        "replica pads to the longest row of its own part of the batch, so results depend on the "
        "number of replicas. Pass shape= to to_tensor(), or divide the sum by row_lengths()."
    ),
    "unknown": (
        "may compare the examples of a batch{place}: tfmw cannot tell. It is taken for a mean over "
        "the examples of each replica."
    ),
}


class Differences:
    """Values of a step that replicas cannot combine into the result of one process."""

    def __init__(self) -> None:
        self.messages: list[str] = []  # one or more sentences for each value
        self._origins: set[str] = set()  # lines, or operations of libraries

    def note(self, subject: str, flow: Flow) -> None:
        """Records a value, such as "the loss mse", if replicas' values of it cannot be combined."""
        reason = _reason(flow)
        origin = flow.origin
        if reason is None or (origin is None and reason == "unknown"):
            return
        line = None if origin is None else user_line(origin)
        key = line or (subject if origin is None else origin.name)
        if key not in self._origins:
            self._origins.add(key)
            place = "" if line is None else f" ({origin.type} at {line})"
            shapes = "" if origin is None else " and ".join(str(t.shape) for t in origin.inputs)
            text = _REASONS[reason].format(place=place, shapes=shapes)
            self.messages.append(f"{subject} {text}")


def _reason(flow: Flow) -> str | None:
    if flow.has_pairs or flow.kind == "compared":
        op = flow.origin
        if op is not None and op.type == "RaggedTensorToTensor":
            return "padded"
        # Programs rarely intend the pairs of [n] and [n, 1].
        pairs = op is not None and op.type in BINARY and {t.shape.rank for t in op.inputs} == {1, 2}
        return "pairs" if pairs else "compared"
    if flow.kind in ("nonlinear", "unknown"):
        return flow.kind
    if flow.kind == "reduced" and flow.degree not in (0, 1):
        return "nonlinear"
    return None


def user_line(op: tf.Operation) -> str | None:
    """file:line of the program that made an operation; None if only libraries did."""
    for frame in reversed(op.traceback or ()):
        if not is_installed(frame.filename):
            return f"{frame.filename}:{frame.lineno}, in {frame.name}"
    return None
