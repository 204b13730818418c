"""The errors tfmw raises on purpose.

Each message is one sentence: what was received, what was expected, what to do.
"""


class TfmwError(Exception):
    """Base class of every error that tfmw raises on purpose."""

    status = 1
    """Exit status of a program that ends with this error."""


class UsageError(TfmwError, ValueError):
    """A wrong argument, or a wrong combination of arguments: the caller can mend it."""

    status = 2


class ClusterError(UsageError):
    """A malformed or contradictory description of the cluster."""


class TaskFailed(TfmwError, RuntimeError):
    """A task of a cluster ended with an error; the message carries the task's own traceback."""


PREEMPTED = 75
"""Exit status of a task that was told to leave, has saved its state, and asks to be run again.

EX_TEMPFAIL of sysexits.h: a temporary failure, the user is invited to retry.
"""


class Preempted(TfmwError, SystemExit):
    """The run received SIGTERM or SIGUSR1 and has written a backup; ends the process.

    Both signals are ignored from then on, so that this process ends with the status 75 also where
    the end of another task has the scheduler end this one (`srun --kill-on-bad-exit`).
    """

    status = PREEMPTED

    def __init__(self, message: str):
        super().__init__(message)
        self.code = PREEMPTED
        self.message = message

    def __str__(self) -> str:
        return self.message
