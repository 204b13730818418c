"""Progress: Keras's bar with the throughput in terminals and notebooks, lines in log files.

    57/938 ━━━━━━━━━━━━━━━━━━━━ 10s 12ms/step - 5,274 examples/s - loss: 0.3101

    train | epoch  1/12 | step  57/938 |   82.4 steps/s |   5,274 examples/s | 0:10 left | loss: ...
    train | epoch  1/12 | step 938/938 |   82.1 steps/s |   5,251 examples/s | took 0:11 | loss: ...

The bar overwrites itself, so a log file would contain every state of it. Log files get one aligned
line per interval instead.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TextIO

import keras

from tfmw.launcher.output import is_watched

INTERVAL_S = 10.0
_LONG_START_S = 1.0  # the first step of an epoch, with tracing, is shown if it takes longer
"""Seconds between two lines within an epoch."""

_BAR = keras.utils.Progbar(target=None).width
_SHORTEST_BAR = 4  # minimum number of characters, on a narrow terminal


class _Point(NamedTuple):
    time: float
    steps: int = 0
    examples: int = 0


class Throughput:
    """Steps and examples per second of the epoch so far.

    The first call traces functions, so it is excluded as soon as there are other calls.

    Args:
        examples: returns the number of examples so far, over all replicas; None if unknown.
        clock: monotonic seconds.
        overlapping: whether calls overlap, as on parameter servers. Then the first call counts
            too, because calls that ran at the same time are reported directly after it.
    """

    def __init__(
        self,
        examples: Callable[[], int] | None = None,
        clock: Callable[[], float] = time.monotonic,
        overlapping: bool = False,
    ):
        self._examples = examples or (lambda: 0)
        self.clock = clock
        self._calls = 0
        self._overlapping = overlapping
        self.begin()

    def begin(self) -> None:
        """Starts measuring an epoch."""
        self._since = self._last = self._now(0)

    def update(self, steps: int) -> None:
        """Records that `steps` steps of the epoch are done."""
        before, self._last = self._last, self._now(steps)
        self._calls += 1
        if self._calls == 2 and before.steps and not self._overlapping:
            self._since = before

    @property
    def steps(self) -> float:
        """Steps per second; 0 before the first."""
        return self._rate(self._last.steps - self._since.steps)

    @property
    def examples(self) -> float:
        """Examples of all replicas per second; 0 if unknown."""
        return self._rate(self._last.examples - self._since.examples)

    def _rate(self, number: int) -> float:
        seconds = self._last.time - self._since.time
        return number / seconds if seconds > 0 else 0.0

    def _now(self, steps: int) -> _Point:
        return _Point(self.clock(), steps, self._examples())


class _Progress(keras.callbacks.ProgbarLogger):
    """Keras's logger, which calls `update` of its bar, with another `update`.

    Args:
        throughput: throughput of the displayed steps.
    """

    def __init__(self, throughput: Throughput):
        super().__init__()
        self._throughput = throughput

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        super().on_epoch_begin(epoch, logs)
        self._begin("train", epoch + 1)

    def on_test_begin(self, logs: Any = None) -> None:
        before = self.progbar
        super().on_test_begin(logs)
        if self.progbar is not before:  # within fit, validation shows no progress
            self._begin("test")

    def on_predict_begin(self, logs: Any = None) -> None:
        super().on_predict_begin(logs)
        self._begin("predict")

    def _begin(self, what: str, epoch: int = 0) -> None:
        """Starts with the bar that Keras has just created."""
        self._throughput.begin()


class Bar(_Progress):
    """Keras's bar, with the examples per second after the time of a step."""

    def _begin(self, what: str, epoch: int = 0) -> None:
        super()._begin(what)
        draw = self.progbar.update

        def update(steps: int, values: Any = None, finalize: bool = False) -> None:
            if not finalize:
                self._throughput.update(steps)
            self._add_rate(dict(values or ()), finalize)
            draw(steps, values, finalize)

        self.progbar.update = update

    def _add_rate(self, logs: Mapping[str, Any], final: bool) -> None:
        """Adds the rate to the bar's next state, and shortens the bar on a narrow terminal.

        A line that is longer than the terminal cannot be overwritten: each state of it would
        remain. Only the final state, which remains anyway, may be longer.
        """
        rate = ""
        if self._throughput.examples:
            rate = f" - {self._throughput.examples:,.0f} examples/s"
        bar = _BAR - max(len(rate) - self._free_columns(logs), 0)
        if bar < _SHORTEST_BAR:
            rate, bar = rate if final else "", _BAR
        self.progbar.unit_name = f"step{rate}"  # Keras writes "12ms/" before it
        self.progbar.width = bar

    def _free_columns(self, logs: Mapping[str, Any]) -> int:
        """The minimum number of terminal columns that Keras's line leaves free."""
        if not sys.stdout.isatty():
            return 1000  # a notebook's cell overwrites wrapped lines, too
        target, rate = self.progbar.target, self._throughput.steps
        if target:
            line = f"{target}/{target} {'━' * _BAR}"
        else:
            line = f"{0:7d}/Unknown{' ' * (_BAR - _SHORTEST_BAR)}"  # there is no bar to shorten
        line += " 1:00:00" if target and rate and target > 60 * rate else " 59s"
        line += " 999ms/step"
        line += "".join(f" - {name}: {_number(value)}" for name, value in logs.items())
        return shutil.get_terminal_size().columns - 1 - len(line)


class Lines(_Progress):
    """Prints lines in place of Keras's bar, for output to a file.

    Args:
        throughput: throughput of the displayed steps; its clock is that of the lines.
        interval_s: seconds between two lines within an epoch; the end of an epoch always has one.
        out: the stream; by default `sys.stdout`.
    """

    def __init__(
        self,
        throughput: Throughput,
        interval_s: float = INTERVAL_S,
        out: TextIO | None = None,
    ):
        super().__init__(throughput)
        self._interval_s = interval_s
        self._out = out

    def set_params(self, params: Any) -> None:
        super().set_params(params)
        self._epochs: int = params["epochs"]
        self.epochs = 1  # Keras prints no "Epoch 1/12"

    def _begin(self, what: str, epoch: int = 0) -> None:
        super()._begin(what)
        self.progbar = self
        self._what, self._epoch, self._steps, self._calls = what, epoch, 0, 0
        self._began = self._first = self._shown = self._throughput.clock()

    def update(self, steps: int, values: Any = None, finalize: bool = False) -> None:
        """Prints a line if it is due; Keras's logger calls it in place of its bar's `update`."""
        now = self._throughput.clock()
        if finalize:
            took = f"took {_clock_face(now - self._began)}"
            start = self._first - self._began
            if start > max(_LONG_START_S, (now - self._began) / 2) and self._calls > 1:
                took += f", {_clock_face(start)} to the first step"
            self._print(took, values)
            return
        if not self._calls:
            self._first = now
        self._steps, self._calls = steps, self._calls + 1
        self._throughput.update(steps)
        if now - self._shown >= self._interval_s and steps != self.target:
            self._shown = now
            rate = self._throughput.steps
            left = ""
            if self.target:
                left = f"{_clock_face((self.target - steps) / rate) if rate else '?'} left"
            self._print(left, values)

    def _print(self, clock: str, values: Any) -> None:
        fields = [self._what]
        if self._what == "train" and self._epochs > 1:
            fields.append(f"epoch {self._epoch:{len(str(self._epochs))}}/{self._epochs}")
        of = f"/{self.target}" if self.target else ""
        fields.append(f"step {self._steps:{max(len(of) - 1, 1)}}{of}")
        fields.append(f"{self._throughput.steps:6.1f} steps/s")
        if self._throughput.examples:
            fields.append(f"{self._throughput.examples:7,.0f} examples/s")
        fields.append(clock)
        fields += [f"{name}: {_number(value)}" for name, value in values]
        print(*filter(None, fields), sep=" | ", file=self._out or sys.stdout, flush=True)


def with_progress(
    callbacks: list[Any],
    shows: bool,
    verbose: Any,
    examples: Callable[[], int] | None = None,
    overlapping: bool = False,
) -> list[Any]:
    """Adds `Bar` or `Lines` if Keras would add its own bar.

    Args:
        callbacks: the user's callbacks; if a ProgbarLogger is among them nothing is added.
        shows: whether this task shows progress at all.
        verbose: as in Keras. 1 selects the bar, and so does "auto" in a terminal or notebook.
        examples, overlapping: see `Throughput`.
    """
    chosen = any(isinstance(c, keras.callbacks.ProgbarLogger) for c in callbacks)
    if not shows or chosen:
        return callbacks
    throughput = Throughput(examples, overlapping=overlapping)
    if verbose == "auto" and not is_watched(sys.stdout):
        return [*callbacks, Lines(throughput)]
    if verbose in ("auto", 1) and examples is not None:
        return [*callbacks, Bar(throughput)]
    return callbacks  # Keras adds its own


def _number(value: Any) -> str:
    try:
        value = float(value)
    except (TypeError, ValueError):
        return str(value)
    return f"{value:.4f}" if value == 0 or abs(value) > 1e-3 else f"{value:.4e}"


def _clock_face(seconds: float) -> str:
    """Duration as 0:09, 12:30 or 1:02:00; below ten seconds as 1.2 s."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
