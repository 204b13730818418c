"""A metric whose variables are combined in several ways, and begin at other values than zero."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

LARGE = 1 << 53  # no float64 has LARGE + 1
FIRST = {"largest": -900.0, "smallest": 900.0, "sum": 5.0, "count": LARGE}


class Extremes(keras.metrics.Metric):
    """The largest and the smallest output, the sum of outputs, and LARGE + number of examples."""

    def __init__(self) -> None:
        super().__init__(name="extremes")
        self.values = {
            name: self.add_variable(
                (),
                keras.initializers.Constant(first),
                dtype="int64" if name == "count" else "float32",
                name=name,
            )
            for name, first in FIRST.items()
        }

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        held = self.values
        held["largest"].assign(tf.maximum(held["largest"], tf.reduce_max(y_pred)))
        held["smallest"].assign(tf.minimum(held["smallest"], tf.reduce_min(y_pred)))
        held["sum"].assign_add(tf.reduce_sum(y_pred))
        held["count"].assign_add(tf.shape(y_pred, tf.int64)[0])

    def result(self) -> Any:
        """The values, without the first ones of the sum and the count."""
        found = {name: variable + 0 for name, variable in self.values.items()}
        examples = found.pop("count") - LARGE
        return {**found, "sum": found["sum"] - FIRST["sum"], "examples": examples}

    def reset_state(self) -> None:
        for name, variable in self.values.items():
            variable.assign(FIRST[name])
