"""Transfer of a function to a child process, and of its result back, for `tfmw.launch`.

Both are pickles in unnamed temporary files that only the launcher and its own child have open. No
data from any other process is ever unpickled.

Large arrays are not copied into the pickle (PEP 574). They follow it in the file, which the child
maps into its memory.
"""

from __future__ import annotations

import importlib
import mmap
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

LARGE = 100 << 20
"""Size in bytes from which an array is not copied into the pickle."""

Payload = Sequence[bytes | memoryview]
"""A packed call: the pickle, then its large arrays; empty for a script."""

_ALIGNED = 64  # alignment in bytes of the file's content, for vector instructions

Outcome = tuple[Any, BaseException | None, str]
"""The outcome in a child: (result, exception or None, its traceback as text)."""


def pickler() -> Any:
    """Returns cloudpickle if it is installed: it pickles functions that a notebook defines."""
    try:
        return importlib.import_module("cloudpickle")
    except ImportError:
        return pickle


def apart(large: list[pickle.PickleBuffer]) -> Callable[[pickle.PickleBuffer], bool]:
    """A pickler's `buffer_callback` that puts large arrays into a list."""

    def take(array: pickle.PickleBuffer) -> bool:
        if array.raw().nbytes < LARGE:
            return True  # into the pickle
        large.append(array)
        return False

    return take


def pack(fn: Callable[..., Any], args: Sequence[Any]) -> Payload:
    """Pickles the call.

    Raises:
        UsageError: the function can't be found by name in another process, and cloudpickle isn't
            installed; or an argument can't be pickled.
    """
    name = f"{getattr(fn, '__module__', None)}.{getattr(fn, '__qualname__', repr(fn))}"
    module = pickler()
    if module is pickle and ("<locals>" in name or "<lambda>" in name or "__main__" in name):
        raise UsageError(
            f"tfmw.launch can't send {name} to other processes, which only import functions by "
            "name; move it to a module of its own or install cloudpickle."
        )
    large: list[pickle.PickleBuffer] = []
    try:
        blob = module.dumps((fn, tuple(args)), protocol=5, buffer_callback=apart(large))
    except Exception as error:
        raise UsageError(
            f"tfmw.launch can't send {name} and its arguments to other processes: {error}."
        ) from error
    arrays = [array.raw() for array in large]
    return [pickle.dumps((list(sys.path), blob, [a.nbytes for a in arrays])), *arrays]


def write(payload: Payload, file: IO[bytes]) -> None:
    """Writes a packed call to a file, as `receive` expects it."""
    for part in payload:
        file.write(part)
        file.write(bytes(-file.tell() % _ALIGNED))


def receive() -> Callable[[], None]:
    """Reads the call from standard input, in the child.

    Returns:
        Calls the function and sends its result; sends and raises an exception. Until then the call
        stays pickled: its modules may need tfmw.init before their import.
    """
    path, blob, sizes = pickle.load(sys.stdin.buffer)
    arrays = []
    if sizes:
        # The child gets a private copy: its changes do not reach the file.
        mapped = memoryview(mmap.mmap(sys.stdin.fileno(), 0, access=mmap.ACCESS_COPY))
        start = sys.stdin.buffer.tell()
        for size in sizes:
            start += -start % _ALIGNED
            arrays.append(mapped[start : start + size])
            start += size
    if ELSEWHERE in os.environ:  # packages may be in other folders there
        path = [*sys.path, *(p for p in path if p not in sys.path and os.path.isdir(p))]
    sys.path[:] = path
    result = open(int(os.environ.pop(RESULT_FD)), "wb")  # noqa: SIM115  (the call closes it)

    def run() -> None:
        with result:  # once it is closed, the launcher may end this process at any moment
            try:
                fn, args = loads(blob, arrays)
                data = pickler().dumps((fn(*args), None, ""))
            except BaseException as error:
                result.write(_dump_error(error))
                raise
            finally:
                sys.stdout.flush()
            result.write(data)

    return run


def loads(data: bytes, arrays: Sequence[Any] = ()) -> Any:
    """Unpickles the data that the caller has sent.

    Args:
        data: the pickle.
        arrays: the arrays that were not copied into it.

    Raises:
        UsageError: the data needs a module that is not installed here.
    """
    try:
        return pickle.loads(data, buffers=arrays)
    except ModuleNotFoundError as error:
        if ELSEWHERE not in os.environ:
            raise
        raise UsageError(
            f"the function or its arguments need the module {error.name!r}, which "
            f"{os.environ.get('TFMW_TASK', 'this task')} on {os.environ[ELSEWHERE]} does not have: "
            "install it there, or define its functions and classes in the notebook or script."
        ) from error


def _dump_error(error: BaseException) -> bytes:
    text = "".join(traceback.format_exception(error))
    try:
        data: bytes = pickler().dumps((None, error, text))
        pickle.loads(data)  # some exceptions can be pickled but not unpickled
    except Exception:
        last = "".join(traceback.format_exception_only(error)).strip()
        data = pickle.dumps((None, TaskFailed(last), text))
    return data


def loaded(data: bytes) -> Outcome | None:
    """The outcome in a child, from the data that it sent; None if it sent nothing."""
    outcome: Outcome | None = pickle.loads(data) if data else None
    return outcome
