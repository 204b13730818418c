"""Sends a function to a child process and its result back, for `tfmw.launch`.

Both are pickles in unnamed temporary files that only the launcher and its own child have open. No
data from any other process is ever unpickled.
"""

from __future__ import annotations

import dataclasses
import importlib
import io
import os
import pickle
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import IO, Any

from tfmw.errors import TaskFailed, UsageError

RESULT_FD = "TFMW_RESULT_FD"

ELSEWHERE = "TFMW_ELSEWHERE"
"""Variable of tasks that may run on other machines than the caller: the host's name."""

Outcome = tuple[Any, BaseException | None, str]
"""The outcome in a child: (result, exception or None, its traceback as text)."""


def _pickler() -> Any:
    """Returns cloudpickle if it is installed: it pickles functions that a notebook defines."""
    try:
        return importlib.import_module("cloudpickle")
    except ImportError:
        return pickle


def pack(fn: Callable[..., Any], args: Sequence[Any]) -> bytes:
    """Pickles the call.

    Raises:
        UsageError: the function can't be found by name in another process, and cloudpickle isn't
            installed; or an argument can't be pickled.
    """
    name = f"{getattr(fn, '__module__', None)}.{getattr(fn, '__qualname__', repr(fn))}"
    pickler = _pickler()
    if pickler is pickle and ("<locals>" in name or "<lambda>" in name or "__main__" in name):
        raise UsageError(
            f"tfmw.launch can't send {name} to other processes, which only import functions by "
            "name; move it to a module of its own or install cloudpickle."
        )
    try:
        blob = pickler.dumps((fn, tuple(args)))
    except Exception as error:
        raise UsageError(
            f"tfmw.launch can't send {name} and its arguments to other processes: {error}."
        ) from error
    return pickle.dumps((list(sys.path), blob))


@dataclasses.dataclass(frozen=True)
class Call:
    """A received call, still pickled: its modules may need tfmw.init before their import."""

    blob: bytes
    result: IO[bytes]

    def run(self) -> None:
        """Calls the function and sends the result; sends and raises an exception."""
        try:
            fn, args = loads(self.blob)
            value = fn(*args)
            data = _pickler().dumps((value, None, ""))
        except BaseException as error:
            self.result.write(_dump_error(error))
            self.result.close()  # the launcher may end this process at any moment from now on
            raise
        finally:
            sys.stdout.flush()
        self.result.write(data)
        self.result.close()


def receive() -> Call:
    """In the child: reads the call from standard input."""
    path, blob = pickle.load(sys.stdin.buffer)
    if ELSEWHERE in os.environ:  # packages may lie in other folders there
        path = [*sys.path, *(p for p in path if p not in sys.path and os.path.isdir(p))]
    sys.path[:] = path
    result = open(int(os.environ.pop(RESULT_FD)), "wb")  # noqa: SIM115  (the call closes it)
    return Call(blob, result)


def loads(data: bytes) -> Any:
    """Unpickles what the caller has sent.

    Raises:
        UsageError: it needs a module that is not installed here.
    """
    try:
        return pickle.loads(data)
    except ModuleNotFoundError as error:
        if ELSEWHERE not in os.environ:
            raise
        raise UsageError(
            f"the function or its arguments need the module {error.name!r}, which "
            f"{os.environ.get('TFMW_TASK', 'this task')} on {os.environ[ELSEWHERE]} does not have: "
            "install it there, or define in the notebook or script itself what is used of it."
        ) from error


def _dump_error(error: BaseException) -> bytes:
    text = "".join(traceback.format_exception(error))
    try:
        data: bytes = _pickler().dumps((None, error, text))
        pickle.loads(data)  # some exceptions can be pickled but not unpickled
    except Exception:
        last = "".join(traceback.format_exception_only(error)).strip()
        data = pickle.dumps((None, TaskFailed(last), text))
    return data


def read(file: IO[bytes]) -> bytes:
    """In the launcher: what the child sent, still pickled; b"" if it sent nothing."""
    file.seek(0)
    return file.read()


def loaded(data: bytes) -> Outcome | None:
    """The outcome in a child, from what it sent; None if it sent nothing."""
    if not data:
        return None
    value, error, text = pickle.load(io.BytesIO(data))
    return value, error, text
