"""The errors that tfmw raises.

Each message is one sentence: the received value, the expected one, and the remedy.
"""

from collections.abc import Sequence
from typing import Any


class TfmwError(Exception):
    """Base class of all errors that tfmw raises."""

    status = 1
    """Exit status of a program that ends with this error."""


class UsageError(TfmwError, ValueError):
    """A wrong argument, or a wrong combination of arguments, that the caller can correct."""

    status = 2


class ClusterError(UsageError):
    """A malformed or contradictory description of the cluster."""


class TaskFailed(TfmwError, RuntimeError):
    """A task of a cluster ended with an error; the message carries the task's own traceback."""


PREEMPTED = 75
"""Exit status of a preempted task that has saved its state and must be run again.

EX_TEMPFAIL of sysexits.h: a temporary failure, the user is invited to retry.
"""


class Preempted(TfmwError, SystemExit):
    """The run received SIGTERM or SIGUSR1 and has written a backup; ends the process.

    Both signals are ignored from then on. So this process ends with status 75 even if the
    scheduler ends it after the exit of another task (`srun --kill-on-bad-exit`).
    """

    status = PREEMPTED

    def __init__(self, message: str):
        super().__init__(message)
        self.code = PREEMPTED


def first_line(error: BaseException) -> str:
    """The first line of an error's message; the name of its type if it has none."""
    return (str(error) or type(error).__name__).splitlines()[0]


def printable(text: str) -> str:
    r"""A text that UTF-8 can encode: names of files may have bytes that are not, as "\udce9"."""
    return text.encode("utf-8", "backslashreplace").decode()


def is_whole(value: Any, least: float = float("-inf")) -> bool:
    """Whether an argument is an int of at least `least`, and no bool."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def require_whole(name: str, value: Any, least: int) -> int:
    """An argument that is a whole number; raises UsageError for others and for smaller ones."""
    if not is_whole(value, least):
        raise UsageError(f"received {name}={value!r}: expected a whole number from {least} up.")
    return int(value)


def require_choice(name: str, value: Any, choices: Sequence[Any]) -> None:
    """Raises UsageError for a value that is not one of the choices."""
    if value not in choices:
        raise UsageError(
            f"unknown {name} {value!r}: expected one of {', '.join(map(repr, choices))}."
        )
