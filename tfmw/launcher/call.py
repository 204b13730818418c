"""Transfer of a function to a child process, and of its result back, for `tfmw.launch`.

Both are pickles in unnamed temporary files that only the launcher and its own child have open. No
data from any other process is ever unpickled.

Large arrays are not copied into the pickle (PEP 574). They follow it in the file, which the child
maps into its memory.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import mmap
import os
import pickle
import socket
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any

from tfmw.errors import TaskFailed, UsageError

RESULT_FD = "TFMW_RESULT_FD"

CALLS_FD = "TFMW_CALLS_FD"
"""Variable of tasks that run several calls: the socket over which they receive them."""

ANSWER = b"."
"""Message of such a task once the result of a call is complete."""

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


def apart(
    large: list[pickle.PickleBuffer], least: int | None = None
) -> Callable[[pickle.PickleBuffer], bool]:
    """A pickler's `buffer_callback` that puts arrays of at least `least` bytes into a list."""

    def take(array: pickle.PickleBuffer) -> bool:
        if array.raw().nbytes < (LARGE if least is None else least):
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
    """Reads the call from standard input, in the child; or else all calls, from a socket.

    Returns:
        Calls the function and sends its result; sends and raises an exception. Until then the call
        stays pickled: its modules may need tfmw.init before their import.
    """
    if CALLS_FD in os.environ:
        calls = socket.socket(fileno=int(os.environ.pop(CALLS_FD)))
        return functools.partial(_serve, calls)
    result = open(int(os.environ.pop(RESULT_FD)), "wb")  # noqa: SIM115  (the call closes it)
    return _received(sys.stdin.buffer, result)


def _serve(calls: socket.socket) -> None:
    """Runs calls until the launcher closes the socket, or one raises an exception."""
    with calls:
        while True:
            message, files, _, _ = socket.recv_fds(calls, 1, 2)
            if not message:
                return
            with open(files[0], "rb") as file:
                run = _received(file, open(files[1], "wb"))  # noqa: SIM115  (the call closes it)
            run()
            calls.sendall(ANSWER)


def _received(file: IO[bytes], result: IO[bytes]) -> Callable[[], None]:
    """A call that is read from a file, and its result's file."""
    path, blob, sizes = pickle.load(file)
    arrays = []
    if sizes:
        # The child gets a private copy: its changes do not reach the file.
        mapped = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
        start = file.tell()
        for size in sizes:
            start += -start % _ALIGNED
            arrays.append(mapped[start : start + size])
            start += size
    if ELSEWHERE in os.environ:  # packages may be in other folders there
        path = [*sys.path, *(p for p in path if p not in sys.path and os.path.isdir(p))]
    sys.path[:] = path

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
    with missing_modules_named():
        return pickle.loads(data, buffers=arrays)


@contextlib.contextmanager
def missing_modules_named() -> Iterator[None]:
    """Raises UsageError for a module of the caller's that is not installed here."""
    try:
        yield
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
