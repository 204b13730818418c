"""`tfmw.callbacks.Log`: a function that gets the logs of training, and where its time goes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import keras

from tfmw.errors import UsageError
from tfmw.runtime import goodput
from tfmw.runtime.step_times import StepTimes

Write = Callable[[dict[str, Any], int], Any]


@dataclasses.dataclass(frozen=True)
class Training:
    """The progress of a training, for `Log` and `Trace`.

    Args:
        rank: of this worker.
        workers: their number.
        times: returns where the time of this worker's steps went; None on parameter
            servers, whose coordinator makes no steps.
        meet: waits until all workers have called it.
    """

    rank: int
    workers: int
    times: Callable[[], StepTimes | None]
    meet: Callable[[], object] = lambda: None


class Log(keras.callbacks.Callback):
    """Calls a function with the logs, and with the time of a step and its parts.

    It runs on every worker, each with its own times. Calls of MLflow and W&B reach the tracker from
    the chief only.

    Args:
        write: called with a dict and the number of training steps in this call of `fit`. The dict
            has Keras's logs ("loss", ...) and "rank", "workers", "steps_per_s", "examples_per_s"
            (over all workers), and the seconds of a step: "step_s" and its parts "input_s",
            "communication_s" and "compute_s", each as the mean since the last call. "goodput" is
            the share of the run's time, over all attempts, that went into steps; "run_steps_s",
            "run_data_s" and so on are the seconds of its parts. Parts that are not known yet are
            left out.
        every: "epoch", or a number of steps.

    Raises:
        UsageError: another value of `every`.

    Example:
        tfmw.fit(model, data, callbacks=[tfmw.callbacks.Log(lambda logs, step: print(step, logs))])
    """

    reads_optimizer = False

    def __init__(self, write: Write, every: int | str = "epoch"):
        super().__init__()
        if every != "epoch" and (not isinstance(every, int) or every < 1):
            raise UsageError(f'received every={every!r}: expected "epoch" or a number of steps.')
        self.write = write
        self.every = every
        self._training: Training | None = None
        self._before: StepTimes | None = None
        self._steps = 0
        self._epochs_steps = 0  # of the epochs before this one

    def observe(self, training: Training) -> None:
        """Sets what it reports; `tfmw.fit` calls it."""
        self._training = training

    def on_train_begin(self, logs: Any = None) -> None:
        self._note()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epochs_steps = self._steps

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        before, self._steps = self._steps, self._epochs_steps + batch + 1
        if isinstance(self.every, int) and self._steps // self.every > before // self.every:
            self._report(logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self.every == "epoch":
            self._report(logs)

    def _report(self, logs: Mapping[str, Any] | None) -> None:
        self.write({**(logs or {}), **self._own()}, self._steps)
        self._note()

    def _own(self) -> dict[str, Any]:
        training = self._training
        if training is None:  # Keras trains
            return {}
        now = goodput.division()
        own: dict[str, Any] = {"rank": training.rank, "workers": training.workers}
        own |= {"goodput": now.goodput()}
        own |= {f"run_{part}_s": seconds for part, seconds in now.by_part().items()}
        times = training.times()
        split = None if times is None or self._before is None else times.since(self._before)
        if split is None:
            return own
        seconds = split.step_s * split.steps
        return own | {
            "steps_per_s": split.steps / seconds,
            "examples_per_s": split.examples / seconds,
            "step_s": split.step_s,
            "input_s": split.input_s,
            "communication_s": split.communication_s,
            "compute_s": split.compute_s,
        }

    def _note(self) -> None:
        if self._training is not None:
            times = self._training.times()
            self._before = None if times is None else times.copy()
