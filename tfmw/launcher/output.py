r"""The output of several tasks on one terminal: labelled lines, and one live progress bar.

    display = Display(sys.stdout, live="worker 0")
    display.feed("worker 1", b"hello\n")          # prints "[worker 1] hello"
    display.feed("worker 0", b"\r 1/9 [=.....]")   # passes through untouched

Every line is labelled with its task. The bytes of the one live task are the exception: they go to
the terminal unchanged, so that its progress bar moves. A labelled line that arrives while the live
task is in the middle of its line is printed above that line.

Uninformative log lines of TensorFlow are hidden: notices at its start, follow-up errors of a lost
peer.

    I0000 00:00:1795264727.917557   12869 cudart_stub.cc:31] Could not find cuda drivers on ...

    E0000 00:00:1795322305.180684    2442 ring_alg.cc:291] Aborting RingReduce with UNAVAILABLE: ...
    Additional GRPC error information from remote target /job:worker/replica:0/task:1 while ...
    :UNKNOWN:Error received from peer  {grpc_status:14, ...}

TF_CPP_MIN_LOG_LEVEL=2 leaves TensorFlow's errors, and these tell nothing. With ten tasks they hide
the tasks' own output. The launcher does not print them; the log files keep them. Only these
messages are hidden: another message of the same source files, such as a driver of the wrong
version, is printed. Notices checked with TensorFlow 2.18.1 to 2.22.0rc0, follow-up errors with
2.21.0.
"""

from __future__ import annotations

import codecs
import contextlib
import os
import re
import selectors
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, AnyStr, TextIO

if TYPE_CHECKING:
    from tfmw.launcher.process import Task

_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_MAX_PENDING = 1 << 16  # most characters of one unfinished line that are kept
_TRACEBACK = "Traceback (most recent call last):"

# "I0000 00:00:1795264727.917557   12869 " before, "2026-01-31 12:00:00.123456: I path/to/" after
# absl's log is initialized.
_HEAD = r"(?:[IWE]\d{4} [\d:.]+ +\d+ |\d{4}-\d\d-\d\d [\d:.]+: [IWE] (?:[\w.]+/)*)"
_ABORT = r"base_collective_executor\.cc:\d+\] BaseCollectiveExecutor::StartAbort"
_REST = r"[^\n]*(?:\n|$)"
# Lines below an error of CUDA, since TensorFlow 2.22.
_TRACE = r"(?:=== Source Location Trace: ===[^\n]*\n(?:[\w./]+:\d+[^\n]*\n)*(?:\r?\n)?)?"

_MESSAGES = (
    # (source file, start of the message)
    (r"cudart_stub\.cc", "Could not find cuda drivers on your machine, GPU will not be used"),
    (r"cpu_feature_guard\.cc", "This TensorFlow binary is optimized to use available CPU instr"),
    (r"(?:port|util)\.cc", "oneDNN custom operations are on"),
    # No driver and no device, as on every machine without a GPU; other failures are shown.
    (
        r"cuda_(?:platform|driver)\.cc",
        r"failed call to cuInit: (?:INTERNAL: CUDA error: Failed call to cuInit: )?"
        r"(?:UNKNOWN ERROR \(303\)|CUDA_ERROR_NO_DEVICE)",
    ),
    (r"cuda_(?:fft|dnn|blas)\.cc", r"Unable to register cu\w+ factory"),
    (r"tf_record_dataset_op\.cc", "The default buffer size is 262144, which is overridden by the"),
    (r"computation_placer\.cc", "computation placer already registered"),
    # from the search for the slowest stage of an input, which may be gone
    (r"local_rendezvous\.cc", r"[^\n]*Cannot find this iterator's analytical model"),
)

_NOTICES = re.compile(
    "|".join(
        [
            rf"WARNING: All log messages before absl::InitializeLog\(\) is called are writ{_REST}",
            rf"To enable the following instructions: [\w ]+, in other operations, rebuild T{_REST}",
            *(rf"{_HEAD}{file}:\d+\] {message}{_REST}{_TRACE}" for file, message in _MESSAGES),
            # A peer is lost: the task that lost it names it in its own error, and the ring that
            # was under way is cancelled. Errors with another status may be the only report.
            rf"{_HEAD}(?:ring_alg\.cc:\d+\] Aborting Ring\w+ with|{_ABORT}) "
            rf"(?:UNAVAILABLE|CANCELLED): {_REST}"
            r"(?:(?:Additional GRPC error information from remote target|"
            rf":UNKNOWN:Error received){_REST})*",
            # An error that a task reports to all, and also prints: "worker 1: ValueError: bad".
            rf"{_HEAD}{_ABORT} INTERNAL: (?:Error reported from /job:\w+/task:\d+: )?"
            r"\w+ \d+: \w+: (?:[^\n]|\n(?![IWE]\d{4} |Traceback))*?"
            rf"\[type\.googleapis\.com/tensorflow\.CoordinationServiceError={_REST}",
        ]
    )
)


def without_notices(text: str) -> str:
    """The text without notices and follow-up errors."""
    return _NOTICES.sub("", text)


def collapse(line: AnyStr) -> AnyStr:
    r"""The final text that a terminal shows for a line: "\r 1/9\r 9/9" is " 9/9".

    Keras overwrites its progress bar with backspaces and carriage returns, even if its output is
    not a terminal.
    """
    back, overwrite = ("\b", "\r") if isinstance(line, str) else (b"\b", b"\r")
    pieces = [piece.replace(back, line[:0]) for piece in line.split(overwrite)]
    return next((piece for piece in reversed(pieces) if piece), line[:0])


def is_watched(out: TextIO) -> bool:
    """Whether a user sees `out` at once: a terminal, or the output of a notebook's cell."""
    # A program may import ipykernel without being a notebook: only a kernel has an app instance.
    kernel = sys.modules.get("ipykernel.kernelapp")
    in_notebook = kernel is not None and kernel.IPKernelApp.initialized()
    return out.isatty() or (in_notebook and out is sys.stdout)


class Display:
    """Writes the output of several tasks to one stream.

    Args:
        out: the stream, which may be replaced; `broken` becomes True once its reader has closed it.
            Output that cannot be written for another reason, to a full disk or a closed terminal,
            is dropped.
        live: name of the task whose output is printed without labels; None labels every line.
    """

    def __init__(self, out: TextIO, live: str | None = None) -> None:
        self.broken = False
        self._problem = ""  # reason why output was dropped
        self.out = out
        self._live = live
        self._shown = ""  # the live task's unfinished line on the terminal
        self._pending: dict[str, str] = {}
        self._decoders: dict[str, codecs.IncrementalDecoder] = {}
        self._failed = ""  # the first task with a traceback
        self._error = ""  # its output from there on
        self._held: dict[str, list[str]] = {}  # lines of the others that are the same so far

    def feed(self, task: str, data: bytes, final: bool = False) -> None:
        """Prints the next bytes of a task's output; `final` also prints an unfinished line."""
        if task not in self._decoders:
            self._decoders[task] = codecs.getincrementaldecoder("utf-8")(errors="replace")
        text = self._decoders[task].decode(data, final)
        if task == self._live and not (self._held.get(task) or self._pending.get(task)):
            text = without_notices(text)
            if self._failed in ("", task):
                self._record(task, text)
                before, error = text, ""
            else:  # the error may be that of another task
                before, head, rest = text.partition(_TRACEBACK)
                error = head + rest
            self._pass_through(before, final and not error)
            text = error
        whole, newline, rest = (self._pending.get(task, "") + text).rpartition("\n")
        lines = [collapse(line) for line in without_notices(whole + newline).split("\n")[:-1]]
        if len(rest) > _MAX_PENDING:
            rest = collapse(rest)
        if rest and (final or len(rest) > _MAX_PENDING):
            lines, rest = [*lines, collapse(rest)], ""
        self._pending[task] = rest
        if lines := self._without_repeats(task, lines, final):
            self._print("".join(f"[{task}] {line}\n" for line in lines))

    def line(self, text: str) -> None:
        """Prints a line of the launcher."""
        self._print(f"{text}\n")

    def has_shown(self, error: Sequence[str]) -> bool:
        """Whether these lines are in the output of the first task that printed a traceback."""
        return "\n".join(error) in self._error

    def _record(self, task: str, text: str) -> None:
        if not self._failed and _TRACEBACK in text:
            self._failed, text = task, text[text.index(_TRACEBACK) :]
        if task == self._failed and len(self._error) < _MAX_PENDING:
            self._error += text.replace("\r\n", "\n")

    def _without_repeats(self, task: str, lines: list[str], final: bool) -> list[str]:
        """The lines to print: one line for a task that ends with the error of the first one."""
        self._record(task, "".join(f"{line}\n" for line in lines))
        if task == self._failed:
            return lines
        shown, held = [], self._held.setdefault(task, [])
        for line in lines:
            held.append(line)
            if not self._error.startswith("".join(f"{line}\n" for line in held)):
                shown += held
                held.clear()
        if final and held:
            same = not held[-1].startswith((" ", _TRACEBACK))  # as far as the error itself
            shown += [f"the same error as {self._failed}"] if same else held
            held.clear()
        return shown

    def _pass_through(self, text: str, final: bool) -> None:
        _, newline, rest = text.rpartition("\n")
        line = rest if newline else self._shown + rest
        # After "\r" the terminal still shows the line.
        self._shown = collapse(line) + ("\r" if line.endswith("\r") else "")
        if final and self._shown:
            text, self._shown = text + "\n", ""
        self._write(text)

    def _print(self, text: str) -> None:
        if self._shown:
            width = len(_ANSI.sub("", self._shown))
            text = f"\r{' ' * width}\r{text}{self._shown}"
        self._write(text)

    def _write(self, text: str) -> None:
        if self.broken or not text:
            return
        try:
            self.out.write(text)
            self.out.flush()
        except UnicodeEncodeError:
            encoding = getattr(self.out, "encoding", None) or "ascii"
            self._write(text.encode(encoding, "replace").decode(encoding))
        except BrokenPipeError:
            self.broken = True
        except (OSError, ValueError) as error:  # ValueError: the stream was closed
            self._problem = getattr(error, "strerror", None) or str(error)

    def close(self) -> None:
        """Prints a line if some of the run's output was dropped."""
        if self._problem:
            say(f"tfmw: standard output could not be written ({self._problem}): lines are missing")


def say(line: str) -> None:
    """Prints a line to standard error, which may be a terminal that has closed."""
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr, flush=True)


class OutputPump:
    """Copies the output of several tasks to a display, and to their logs."""

    def __init__(self, display: Display) -> None:
        self._display = display
        self._selector = selectors.DefaultSelector()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._selector.get_map() is None

    def add(self, task: Task) -> None:
        """Starts reading the output of a task that has started."""
        assert task.stream is not None
        # A terminal may be ready and have no bytes: other tasks' output must not wait for them.
        os.set_blocking(task.stream, False)
        self._selector.register(task.stream, selectors.EVENT_READ, task)

    def pump(self, timeout_s: float) -> bool:
        """Copies the tasks' new output; returns whether there was any."""
        if not self._selector.get_map():
            time.sleep(timeout_s)
            return False
        ready = self._selector.select(timeout_s)
        for key, _ in ready:
            task: Task = key.data
            data = task.read()
            if data is None:
                continue
            self._display.feed(task.name, data, final=not data)
            if not data:
                self._selector.unregister(key.fd)
        return bool(ready)

    def finish(self, task: Task) -> None:
        """Copies the remaining output of an ended task, without waiting for the end of file.

        A process outside its process groups may still hold the stream open.
        """
        if task.stream is None or task.stream not in self._selector.get_map():
            return
        while data := task.read():
            self._display.feed(task.name, data)
        self._selector.unregister(task.stream)
        self._display.feed(task.name, b"", final=True)

    def close(self) -> None:
        """Stops reading; the tasks close their own streams."""
        self._selector.close()
