"""The backup frequency: in steps, epochs or seconds."""

from __future__ import annotations

import datetime
import re
from typing import Any

from tfmw.errors import UsageError

_MINUTE, _HOUR = 60.0, 3600.0
_UNITS = {
    **dict.fromkeys(("s", "sec", "second"), 1.0),
    **dict.fromkeys(("min", "minute"), _MINUTE),
    **dict.fromkeys(("h", "hour"), _HOUR),
}


class Schedule:
    """A backup frequency.

    Args:
        every: a number of steps (int), "epoch", "3 epochs", a time: "10 s", "5 min", "1 h", or a
            `datetime.timedelta`; or "continuous": as soon as the last backup is written.

    Attributes:
        steps, epochs, seconds: one of them is the frequency; the other two are None. No backup
            begins before the last is written, so 0.0 seconds are "continuous".

    Raises:
        UsageError: anything else.
    """

    def __init__(self, every: Any):
        self.steps: int | None = None
        self.epochs: int | None = None
        self.seconds: float | None = None
        if every == "continuous":
            self.seconds = 0.0
            return
        match = None
        if isinstance(every, str):
            match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)?\s*([a-z]*?)s?\s*", every)
        number, unit = match.groups() if match else (None, "")
        whole = number is None or number.isdecimal()
        if isinstance(every, datetime.timedelta):
            self.seconds = every.total_seconds()
        elif isinstance(every, int) and not isinstance(every, bool):
            self.steps = every
        elif unit == "epoch" and whole:
            self.epochs = int(number or 1)
        elif unit == "step" and number and whole:
            self.steps = int(number)
        elif number and (unit in _UNITS or (not unit and every.strip().endswith("s"))):
            self.seconds = float(number) * _UNITS.get(unit, 1.0)
        if not any(v is not None and v > 0 for v in (self.steps, self.epochs, self.seconds)):
            raise UsageError(
                f"unknown backup frequency {every!r}: expected a number of steps, "
                '"epoch", "continuous", or a time such as "10 s" or "5 min".'
            )
