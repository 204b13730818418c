"""The flight recorder: the last exchanges of a worker, in a small file that outlives it.

    begun("gradients", nbytes)      # in the worker: around each exchange with the other workers
    waits_for(rank)                 # nothing comes from that worker, or it takes nothing
    done()

    read_exchanges(path)            # in the launcher: [RecordedExchange(number=57, ...), ...]

Each worker of a launcher has a file, named by TFMW_EXCHANGES_FILE, with room for KEPT exchanges. It
is mapped into memory: a record takes a microsecond and no system call, and is
there after SIGKILL too. Workers make the same exchanges in the same order, so their numbers are the
same. Times are monotonic, and so comparable between the tasks of one machine.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import struct
import time
from pathlib import Path
from typing import Any, NamedTuple

from tfmw.observe import task_process, tracing

EXCHANGES_FILE = "TFMW_EXCHANGES_FILE"
"""Variable with the path of a worker's file: <attempt>/<task>/exchanges."""

KEPT = 512
"""Number of exchanges that a file holds."""

NOBODY = -1

# Words of 8 bytes: the fields of `RecordedExchange` in order; the kind has two.
_LAYOUT = struct.Struct("=qqqddddq16s")
_WORDS, _pack, _clock = _LAYOUT.size // 8, _LAYOUT.pack_into, time.monotonic
_DONE, _WAITED, _WAITING_FOR = 5, 6, 7  # words that are written later, each in one access
_BETWEEN_STEPS = frozenset({"metrics", "broadcast", "sum"})  # kinds that are not part of a step


class RecordedExchange(NamedTuple):
    """One exchange of a worker with the others."""

    number: int  # from 1, the same on all workers
    step: int  # the training step that it belongs to, from 1
    nbytes: int  # bytes of this worker's values
    begun: float  # monotonic seconds
    input_s: float  # seconds in which this process has waited for input, in its calls before
    done: float  # monotonic seconds; 0 until it is done
    waited: float  # seconds in which the worker waited for others
    waiting_for: int  # rank of the worker that it waits for; NOBODY for none
    what: str  # kind of the exchange: "gradients", "weights", "metrics", ...

    def __str__(self) -> str:
        of_step = "" if self.what in _BETWEEN_STEPS else f" of step {self.step:,}"
        return f"exchange {self.number:,} ({self.what}{of_step})"


class Totals(NamedTuple):
    """All exchanges of this process: their number, this worker's bytes, seconds in them."""

    exchanges: int = 0
    nbytes: int = 0
    seconds: float = 0.0


@functools.cache
def _kind(what: str) -> tuple[bytes, bool]:
    """(the kind in the file's format, whether it is part of a step)."""
    return what.encode()[:16], what not in _BETWEEN_STEPS


class _Recorder:
    """This process's file, opened at the first exchange."""

    def __init__(self) -> None:
        self._is_open = False
        self._map: mmap.mmap | None = None
        # The same memory as words: writing a word takes a third of the time of a struct.
        self._integers: memoryview[Any] = memoryview(b"")
        self._seconds_of: memoryview[Any] = memoryview(b"")
        self._number = 0
        self._word = 0  # offset of the current record
        self._what, self._of_exchange, self._begun = "", 0, 0.0
        self._bytes = 0
        self._seconds = 0.0  # seconds in exchanges
        self._waited = 0.0
        self._input_s = 0.0
        self._steps = 0  # number of reported training steps
        self._since = 0  # exchanges of steps since the last report
        self._of_a_step = 0  # exchanges per step; 0 while unknown

    def begun(self, what: str, nbytes: int) -> None:
        """Records that an exchange has begun: its kind, and the bytes of this worker's values."""
        self._number = number = self._number + 1
        self._bytes += nbytes
        self._what = what
        self._of_exchange = nbytes
        self._waited = 0.0
        memory = self._map
        self._begun = now = _clock()
        if memory is None:
            memory = None if self._is_open else self._open(task_process.own_path(EXCHANGES_FILE))
            if memory is None:
                return
        kind, is_of_step = _kind(what)
        step = self._steps + 1
        if is_of_step:
            since = self._since
            if self._of_a_step:
                step += since // self._of_a_step
            self._since = since + 1
        self._word = word = number % KEPT * _WORDS
        _pack(memory, 8 * word, number, step, nbytes, now, self._input_s, 0.0, 0.0, NOBODY, kind)

    def waits_for(self, rank: int) -> None:
        """Records the rank of the worker that this exchange waits for."""
        if self._map is not None:
            self._integers[self._word + _WAITING_FOR] = rank

    def waited(self, seconds: float) -> None:
        """Records the end of a wait."""
        self._waited += seconds
        if self._map is not None:
            self._integers[self._word + _WAITING_FOR] = NOBODY

    def done(self) -> None:
        """Records that the exchange is done."""
        now = _clock()
        self._seconds += now - self._begun
        if tracing.tracer.on:
            waited_ms = round(1000 * self._waited, 3)
            details = {"number": self._number, "bytes": self._of_exchange, "waited_ms": waited_ms}
            tracing.add(tracing.EXCHANGES, self._what, self._begun, now, **details)
        if self._map is not None:
            if self._waited:
                self._seconds_of[self._word + _WAITED] = self._waited
            self._seconds_of[self._word + _DONE] = now

    def waited_for_input(self, seconds: float) -> None:
        """Records the time that a call of the driver has waited for batches."""
        self._input_s += seconds

    def totals(self) -> Totals:
        """The sums over all exchanges of this process."""
        return Totals(self._number, self._bytes, self._seconds)

    def steps_done(self, steps: int) -> None:
        """Records the number of training steps so far; `report_progress` calls it."""
        if steps > self._steps and self._since:
            self._of_a_step = max(1, self._since // (steps - self._steps))
        self._steps, self._since = steps, 0

    def _open(self, path: str | None) -> mmap.mmap | None:
        """Maps the file, if there is one."""
        self._is_open = True
        if path:
            with contextlib.suppress(OSError, ValueError), open(path, "r+b") as file:
                self._map = mmap.mmap(file.fileno(), _LAYOUT.size * KEPT)
                self._integers = memoryview(self._map).cast("q")
                self._seconds_of = memoryview(self._map).cast("d")
        return self._map


_recorder = _Recorder()
begun, waits_for, waited = _recorder.begun, _recorder.waits_for, _recorder.waited
done, totals, steps_done = _recorder.done, _recorder.totals, _recorder.steps_done
waited_for_input = _recorder.waited_for_input


def make_file(path: Path) -> None:
    """Creates a worker's file at its full size, so that a record never needs disk space."""
    with open(path, "wb") as file:
        file.write(bytes(_LAYOUT.size * KEPT))


def read_exchanges(path: Path) -> list[RecordedExchange]:
    """The exchanges in a file, in order; [] if there are none."""
    try:
        data = path.read_bytes()
    except OSError:
        return []
    whole = data[: len(data) // _LAYOUT.size * _LAYOUT.size]
    found = []
    for *numbers, what in _LAYOUT.iter_unpack(whole):
        if numbers[0]:
            kind = what.rstrip(b"\0").decode("ascii", "replace")
            found.append(RecordedExchange._make([*numbers, kind]))
    return sorted(found)
