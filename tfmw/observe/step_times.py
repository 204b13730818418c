"""Training time of a worker by its parts: input, communication, computing.

times = StepTimes()
with times.measured_call() as call:        # around a call of the driver
    call.steps, call.examples, call.input_s = 20, 640, 0.31
before = times.copy()
split = times.since(before)          # Split(steps=20, step_s=0.051, input_s=..., ...)
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from tfmw.observe import goodput, recorder, tracing


class Split(NamedTuple):
    """The mean time of a step of this worker, in seconds."""

    steps: int
    examples: int  # number of examples in these steps, over all workers
    step_s: float
    input_s: float  # time of a step in which the worker waits for the next batch
    # Time of a step in collectives, including waits for other workers. A collective may overlap
    # with the backward pass.
    communication_s: float
    compute_s: float  # the rest of the time

    @property
    def steps_per_s(self) -> float:
        """Steps per second of the training."""
        return 1 / self.step_s

    @property
    def examples_per_s(self) -> float:
        """Examples per second over all workers."""
        return self.examples / (self.step_s * self.steps)


@dataclasses.dataclass
class TimedCall:
    """One call of the driver, with its training steps; 0 outside of training."""

    steps: int = 0
    examples: int = 0
    input_s: float = 0.0
    measured: bool = True  # whether `input_s` is known


@dataclasses.dataclass
class StepTimes:
    """Sums over the training steps so far, without the first call, which traces functions."""

    steps: int = 0
    examples: int = 0
    seconds: float = 0.0
    input_s: float = 0.0
    communication_s: float = 0.0
    calls: int = 0
    first: tuple[float, int] = (0.0, 0)  # seconds of the first call without input, and its steps
    clock: Callable[[], float] = time.monotonic

    @contextlib.contextmanager
    def measured_call(self) -> Iterator[TimedCall]:
        """Measures a call of the driver."""
        call, begin, exchanged = TimedCall(), self.clock(), recorder.totals().seconds
        spent = goodput.spent()
        yield call
        if not call.steps:
            return
        self._trace(call, begin)
        recorder.waited_for_input(call.input_s)
        self.calls += 1
        self._divide(call, goodput.spent() - spent)
        if self.calls == 1:
            return
        self.steps += call.steps
        self.examples += call.examples
        self.seconds += self.clock() - begin
        self.input_s += call.input_s
        self.communication_s += recorder.totals().seconds - exchanged

    def _trace(self, call: TimedCall, begin: float) -> None:
        first = tracing.tracer.step + 1
        name = f"step {first}" if call.steps == 1 else f"steps {first} to {first + call.steps - 1}"
        tracing.add(tracing.STEPS, name, begin, self.clock(), examples=call.examples)
        tracing.add(tracing.INPUT, "input", begin, begin + call.input_s)

    def _divide(self, call: TimedCall, seconds: float) -> None:
        """Adds a call's time to the run's goodput; the first call's once the second is known."""
        if call.measured:
            seconds -= goodput.moved("data", min(call.input_s, seconds))
        if self.calls == 1:
            self.first = goodput.moved("compile", seconds), call.steps
        elif self.calls == 2:
            compiled_s, steps = self.first
            goodput.moved("compile", -min(compiled_s, steps * seconds / call.steps))

    def copy(self) -> StepTimes:
        """Copy of the sums at this moment."""
        return dataclasses.replace(self)

    def since(self, before: StepTimes) -> Split | None:
        """The split of the steps after `before`; None if there are no such steps."""
        steps = self.steps - before.steps
        if steps <= 0:
            return None
        total = (self.seconds - before.seconds) / steps
        waiting = (self.input_s - before.input_s) / steps
        exchanging = (self.communication_s - before.communication_s) / steps
        rest = max(total - waiting - exchanging, 0.0)
        return Split(steps, self.examples - before.examples, total, waiting, exchanging, rest)
