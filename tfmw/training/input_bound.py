"""Names the slowest stage of the input pipeline where training mostly waits for its input."""

from __future__ import annotations

import logging
from typing import Any

from tfmw.keras_compat import datasets
from tfmw.runtime.step_times import StepTimes

logger = logging.getLogger("tfmw")

ENOUGH_S, ENOUGH_STEPS, SHARE = 10.0, 20, 0.5
"""It is said after this time and this many steps, if more than this share is waiting."""

_EXPLAINS = 0.3  # of the wait for a batch: a stage that takes less is not the cause

_MENDS = {
    "Map": "dataset.map(fn, num_parallel_calls=tf.data.AUTOTUNE)",
    "MapAndBatch": "dataset.map(fn, num_parallel_calls=tf.data.AUTOTUNE) before batch, and a "
    "function of TensorFlow's ops in place of tf.py_function",
    "ParallelMap": "dataset.cache() after the map, if the data fits into memory",
    "Generator": "a tf.data pipeline in place of the generator, which runs in Python",
    "Interleave": "dataset.interleave(fn, num_parallel_calls=tf.data.AUTOTUNE)",
    "TFRecord": "dataset.interleave over several files, with num_parallel_calls=tf.data.AUTOTUNE",
    "Shuffle": "a smaller shuffle buffer",
    "Batch": "dataset.batch(n, num_parallel_calls=tf.data.AUTOTUNE)",
}
_OTHER = "dataset.cache(), if the data fits into memory, or dataset.prefetch(tf.data.AUTOTUNE)"


class InputBound:
    """Logs once if training is bound by its input."""

    def __init__(self) -> None:
        self._checked = False

    def check(self, times: StepTimes, iterator: Any) -> None:
        """Call it after calls of the driver.

        Args:
            times: of the training so far.
            iterator: over the pipeline of this worker.
        """
        if self._checked or times.seconds < ENOUGH_S or times.steps < ENOUGH_STEPS:
            return
        self._checked = True
        if times.input_s > SHARE * times.seconds:
            logger.warning("%s", described(times, datasets.slowest_stage(iterator)))


def described(times: StepTimes, slowest: tuple[str, float] | None) -> str:
    """The log line.

    Args:
        times: of the training so far.
        slowest: (stage of the pipeline, its seconds per batch); None if unknown.
    """
    share = f"training waits for its input {100 * times.input_s / times.seconds:.0f} % of the time"
    # tf.data forgets a stage that is made anew, as one behind a repeat() is in each epoch.
    if slowest is None or slowest[1] < _EXPLAINS * times.input_s / times.steps:
        return f"{share}; to read ahead: {_OTHER}"
    stage, seconds = slowest
    mend = _MENDS.get(stage, _OTHER)
    return f"{share}; its slowest stage is {stage}, {1000 * seconds:.1f} ms per batch: use {mend}"
