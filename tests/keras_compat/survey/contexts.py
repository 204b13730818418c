"""What surrounds an item: drawn by Hypothesis, so that no combination is chosen by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

import keras
import numpy as np
from hypothesis import strategies as st

FEATURES = 5
CLASSES = 3


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
    """

    batch: int
    examples: int
    weighted: bool
    reduction: str
    penalty: float
    steps_per_execution: int
    seed: int

    def random(self) -> np.random.Generator:
        return np.random.default_rng(self.seed)

    def sample_weights(self) -> np.ndarray:
        return self.random().uniform(0.2, 2.0, self.examples).astype("float32")

    def regularizer(self) -> Any:
        return keras.regularizers.L2(self.penalty) if self.penalty else None


@st.composite
def contexts(draw: st.DrawFn) -> Context:
    """Batches of 3 to 8; two or three steps an epoch, the last one of any size."""
    batch = draw(st.integers(3, 8))
    return Context(
        batch=batch,
        examples=batch + draw(st.integers(1, 2 * batch)),
        weighted=draw(st.booleans()),
        reduction=draw(
            st.sampled_from(["sum_over_batch_size", "sum", "mean", "mean_with_sample_weight"])
        ),
        penalty=draw(st.sampled_from([0.0, 0.01])),
        steps_per_execution=draw(st.sampled_from([1, 2])),
        seed=draw(st.integers(0, 99)),
    )
