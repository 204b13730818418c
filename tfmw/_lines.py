"""Progress for whoever reads it later: one aligned line per interval.

    train | epoch  1/12 | step  460/1200 |   41.2 steps/s | 0:18 left | loss: 0.3101
    train | epoch  1/12 | step 1200/1200 |   41.0 steps/s | took 0:29 | loss: 0.2874

Keras's bar writes over itself, which a log file cannot: it keeps every state of it. So the bar is
for terminals and notebooks, and these lines are for everything else.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, TextIO

import keras

from tfmw._output import is_watched

INTERVAL_S = 10.0
"""Seconds between two lines within an epoch."""


class Lines(keras.callbacks.ProgbarLogger):
    """Stands in for Keras's bar where nobody watches.

    Args:
        interval_s: seconds between two lines within an epoch; its end always gets one.
        out: where they go, `sys.stdout` unless given.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        interval_s: float = INTERVAL_S,
        out: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        super().__init__()
        self._interval_s = interval_s
        self._out = out
        self._clock = clock
        self._epoch = 0
        self._begin("train")

    def set_params(self, params: dict[str, Any]) -> None:
        self.epochs, self.target = params["epochs"], params["steps"]

    def on_train_begin(self, logs: Any = None) -> None:
        self._called_in_fit = True

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch + 1
        self._begin("train")

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._made(batch + 1, logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._finish(logs)

    def on_test_begin(self, logs: Any = None) -> None:
        if not self._called_in_fit:  # within fit validation is silent, as in Keras
            self._begin("test")

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        if not self._called_in_fit:
            self._made(batch + 1, logs)

    def on_test_end(self, logs: Any = None) -> None:
        if not self._called_in_fit:
            self._finish(logs)

    def on_predict_begin(self, logs: Any = None) -> None:
        self._begin("predict")

    def on_predict_batch_end(self, batch: int, logs: Any = None) -> None:
        self._made(batch + 1, None)

    def on_predict_end(self, logs: Any = None) -> None:
        self._finish(None)

    def _begin(self, what: str) -> None:
        self._what = what
        self._steps = 0
        self._began = self._shown = self._clock()
        self._first: tuple[int, float] | None = None  # steps and seconds of the call that traced

    def _made(self, steps: int, logs: Mapping[str, Any] | None) -> None:
        now, self._steps = self._clock(), steps
        if self._first is None:
            self._first = (steps, now)
        if now - self._shown >= self._interval_s and steps != self.target:
            self._shown = now
            rate = self._rate(now)
            left = ""
            if self.target:
                left = f"{_clock_face((self.target - steps) / rate) if rate else '?'} left"
            self._print(rate, left, logs)

    def _finish(self, logs: Mapping[str, Any] | None) -> None:
        now = self._clock()
        self.target = self.target or self._steps  # the first pass has counted them
        self._print(self._rate(now), f"took {_clock_face(now - self._began)}", logs)

    def _rate(self, now: float) -> float:
        """Steps a second, without the first call where there were others."""
        steps, since = self._steps, self._began
        if self._first is not None and self._first[0] < steps:
            steps, since = steps - self._first[0], self._first[1]
        return steps / (now - since) if now > since else 0.0

    def _print(self, rate: float, clock: str, logs: Mapping[str, Any] | None) -> None:
        fields = [self._what]
        if self._what == "train" and self.epochs > 1:
            fields.append(f"epoch {self._epoch:{len(str(self.epochs))}}/{self.epochs}")
        of = f"/{self.target}" if self.target else ""
        fields.append(f"step {self._steps:{max(len(of) - 1, 1)}}{of}")
        fields.append(f"{rate:6.1f} steps/s")
        fields.append(clock)
        fields += [f"{name}: {_number(value)}" for name, value in (logs or {}).items()]
        print(*filter(None, fields), sep=" | ", file=self._out or sys.stdout, flush=True)


def with_lines(callbacks: list[Any], shows: bool, verbose: Any) -> list[Any]:
    """Adds `Lines` where Keras would add its bar and nobody watches.

    Args:
        callbacks: of the user; a ProgbarLogger among them is the user's choice.
        shows: whether this task shows progress at all.
        verbose: as in Keras; only "auto" leaves the choice to us.
    """
    watched = is_watched(sys.stdout)
    chosen = any(isinstance(c, keras.callbacks.ProgbarLogger) for c in callbacks)
    if not shows or verbose != "auto" or watched or chosen:
        return callbacks
    return [*callbacks, Lines()]


def _number(value: Any) -> str:
    try:
        value = float(value)
    except (TypeError, ValueError):
        return str(value)
    return f"{value:.4f}" if value == 0 or abs(value) > 1e-3 else f"{value:.4e}"


def _clock_face(seconds: float) -> str:
    """0:09, 12:30, 1:02:00; below ten seconds 1.2 s."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
