"""Number of steps of one Python call: few are slow, and with many the progress bar rarely moves.

pace = CallPace(group, model.steps_per_execution, every_batch=False)
max_steps = pace.next_steps()
with pace.timed(max_steps): ...           # a call of the synchronous driver

pace = FunctionPace(model.steps_per_execution, unrolled=10)
max_steps = pace.next_steps(left, workers)
pace.took(seconds, steps)                 # after a function on a parameter-server worker
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from tfmw.cluster.group import Group

# Rare enough to be cheap, frequent enough for a live progress bar.
_SECONDS_PER_CALL = 0.2
_SECONDS_PER_FUNCTION = 2.0  # between two functions a worker waits for some hundredths of a second
_LEAST_PART = 32  # minimum fraction of these seconds, in any function
_MAX_STEPS = 1000


class CallPace:
    """Number of steps of each call of the synchronous driver: the chief measures and decides.

    Args:
        group: the tasks that make the same calls.
        steps_per_execution: argument of `model.compile`; a value above 1 is used unchanged.
        every_batch: whether callbacks run between batches; then every call runs
            `steps_per_execution` steps.
    """

    def __init__(self, group: Group, steps_per_execution: int, every_batch: bool):
        self._group = group
        self._fixed = steps_per_execution if steps_per_execution > 1 or every_batch else None
        self._calls = 0
        self._steps = 1
        self._seconds_per_step = 0.0

    def next_steps(self) -> int:
        """The number of steps of the next call, the same on every task. All tasks must call it."""
        if self._fixed is not None:
            return self._fixed
        # The first call traces, the second and third are measured; later the chief rarely decides
        # again.
        if self._calls in (1, 2, 3, 8, 64):
            self._steps = self._group.from_chief(self._decide)
        return self._steps

    def _decide(self) -> int:
        if self._calls == 1:
            return 2
        enough = int(_SECONDS_PER_CALL / max(self._seconds_per_step, 1e-6))
        return max(1, min(enough, self._steps * 32, _MAX_STEPS))

    @contextlib.contextmanager
    def timed(self, steps: int) -> Iterator[None]:
        """Measures one call of `steps` steps."""
        start = time.perf_counter()
        yield
        self._calls += 1
        if self._calls > 1:
            self._seconds_per_step = (time.perf_counter() - start) / steps


def last_batch_number(steps_done: int, steps_per_execution: int, at_end: bool) -> int:
    """The number of a call's last batch, from 0, as callbacks get it from Keras.

    Keras counts whole executions, even if the data ends within one.
    """
    if at_end:
        steps_done = -(-steps_done // steps_per_execution) * steps_per_execution
    return steps_done - 1


class FunctionPace:
    """Number of steps of each function that a parameter-server worker runs.

    Args:
        steps_per_execution: argument of `model.compile`; a value above 1 is used unchanged.
        unrolled: number of steps that are faster together than alone; a function has a multiple of
            it.
    """

    def __init__(self, steps_per_execution: int, unrolled: int = 1):
        self._unrolled = unrolled
        self._fixed = steps_per_execution if steps_per_execution > 1 else None
        self._steps = 1

    def next_steps(self, left: int, workers: int) -> int:
        """Number of steps of the next function, if `left` remain in the epoch."""
        if self._fixed is not None:
            return min(self._fixed, left)
        # Fewer steps towards the end of an epoch, so that workers end it at the same time. Each
        # worker gets a share, as long as that costs much more than the overhead of a function.
        share = min(self._steps // 4, -(-left // workers))
        most = min(self._steps, left // (2 * workers))
        steps = min(left, max(1, self._steps // _LEAST_PART, share, most))
        return steps if steps < self._unrolled else steps // self._unrolled * self._unrolled

    def took(self, seconds: float, steps: int) -> None:
        """Records the `seconds` of a function on a worker, without its time in the queue."""
        if not steps:
            return
        enough = int(_SECONDS_PER_FUNCTION / max(seconds / steps, 1e-6))
        self._steps = max(1, min(enough, self._steps * 8, _MAX_STEPS))
