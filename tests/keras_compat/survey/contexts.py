"""Contexts of an item, drawn by Hypothesis, so that no combination is chosen by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

import keras
import numpy as np
from hypothesis import strategies as st

FEATURES = 5
CLASSES = 3
STEPS = 4
"""Time steps of a sequence."""

FEEDS = ("dataset", "unknown length", "repeated", "arrays")


@dataclasses.dataclass(frozen=True)
class Context:
    """A model around an item, and its data.

    Attributes:
        batch: global batch size.
        examples: of an epoch; the last batch is often shorter.
        weighted: whether the dataset has sample weights.
        reduction: of the loss.
        penalty: weight of an L2 regularizer; 0 for none.
        steps_per_execution: as of `compile`.
        seed: of data and weights.
        feed: how data are passed: of FEEDS.
        masked: whether examples of losses and metrics are masked sequences, of which some may have
            no step at all. Sample weights are of each step then.
        by_class: whether class weights are passed, where there is one output of classes.
    """

    batch: int
    examples: int
    weighted: bool
    reduction: str
    penalty: float
    steps_per_execution: int
    seed: int
    feed: str = "dataset"
    masked: bool = False
    by_class: bool = False

    @property
    def full_steps(self) -> int:
        """Steps of an epoch of repeated data, which Keras rounds up to calls."""
        steps = -(-self.examples // self.batch)
        return steps * self.steps_per_execution

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the labels: [examples], or [examples, STEPS]."""
        return (self.examples, STEPS) if self.masked else (self.examples,)

    def random(self) -> np.random.Generator:
        return np.random.default_rng(self.seed)

    def sample_weights(self) -> np.ndarray:
        return self.random().uniform(0.2, 2.0, self.shape).astype("float32")

    def regularizer(self) -> Any:
        return keras.regularizers.L2(self.penalty) if self.penalty else None


@st.composite
def contexts(draw: st.DrawFn) -> Context:
    """Batches of 3 to 8; up to three steps an epoch, the last one of any size."""
    batch = draw(st.integers(3, 8))
    return Context(
        batch=batch,
        examples=draw(st.integers(2, 3 * batch)),
        weighted=draw(st.booleans()),
        reduction=draw(
            st.sampled_from(["sum_over_batch_size", "sum", "mean", "mean_with_sample_weight"])
        ),
        penalty=draw(st.sampled_from([0.0, 0.01])),
        steps_per_execution=draw(st.sampled_from([1, 2])),
        seed=draw(st.integers(0, 99)),
        feed=draw(st.sampled_from(FEEDS)),
        masked=draw(st.booleans()),
        by_class=draw(st.booleans()),
    )
