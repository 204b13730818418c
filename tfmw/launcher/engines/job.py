"""A job on an engine, as its submitter and every process that attaches to it see it.

    job = tfmw.submit(train, args=(10,), workers=8, on="slurm")
    job.id                        # "slurm:4711"
    job.status()                  # "queued", "running", "done", ...
    job.logs(follow=True)         # prints until the job ends
    job.result(timeout_s=600)     # the function's result in each task
    job.cancel()

The controller writes small files, which a `Job` reads from any machine. Each engine has a subclass
of its own, which knows how.
"""

from __future__ import annotations

import abc
import codecs
import json
import pickle
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TextIO

from tfmw.errors import TaskFailed, TfmwError
from tfmw.launcher import call
from tfmw.launcher.run import return_values

if TYPE_CHECKING:
    from tfmw.launcher.engines.engine import Engine

STATUS, OUTPUT, RESULT, BACKUP = "status.json", "output.log", "result.pickle", "backup.tar"
"""Names of the files that a controller writes."""

CANCEL = "cancel"
"""File that asks the controller to end the job."""

POLICY = "policy"
"""Field of the status: counters of the restart policy, for a controller that starts again."""

ENDED = ("done", "failed", "cancelled", "preempted", "lost")
"""Final states; "lost": the engine ended the job's controller."""

POLL_S = 0.2
_ASK_EVERY_S = 2.0  # interval of queries to the engine, such as Slurm's controller
_CANCEL_S = 30.0  # time for a controller to end its tasks
_AWAY_S = 120.0  # time for which a controller may be unreachable: Ray finds a lost node in 70 s
_RETRY_S = 0.5


class Output:
    """Reads the output of a job piece by piece, from its beginning."""

    def __init__(self, job: Job) -> None:
        self._job, self._offset = job, 0
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def copy(self, out: TextIO) -> str:
        """Prints what is new, and returns it."""
        shown = []
        while data := self._job.read(OUTPUT, self._offset):
            self._offset += len(data)
            shown.append(self._decoder.decode(data))
            out.write(shown[-1])
            out.flush()
        return "".join(shown)


class Job(abc.ABC):
    """One job, for the process that has submitted it and for others.

    Args:
        engine: its engine.
        number: number of the job on the engine.
    """

    why = ""
    """Reason of the loss as a clause, once the engine has lost the job; "": unknown."""

    def __init__(self, engine: Engine, number: str) -> None:
        self.id = f"{engine.name}:{number}"
        """Identifier of the job for `tfmw.attach`, `tfmw logs` and `tfmw cancel`."""
        self.where = engine.where(number)
        """The engine's own number of the job, and its dashboard if it has one."""
        self._number = number
        self._last, self._ask_at = "", 0.0

    # ---- the engine's part -----------------------------------------------------------------------

    @abc.abstractmethod
    def read(self, name: str, offset: int = 0) -> bytes:
        """A file of the job from `offset` on; b"" if there is none."""

    @abc.abstractmethod
    def write(self, name: str, data: bytes | memoryview) -> None:
        """Replaces a file of the job, atomically."""

    @abc.abstractmethod
    def _state(self) -> str:
        """State of a job according to the engine, if its controller has not written its last one.

        Returns:
            "queued", "running", "cancelled" or "lost"; "" if the engine does not reply now.
        """

    @abc.abstractmethod
    def _kill(self) -> None:
        """Ends the job without its controller."""

    @abc.abstractmethod
    def forget(self) -> None:
        """Removes the files of a job that has ended: its output, its result."""

    # ---- for users -------------------------------------------------------------------------------

    def __repr__(self) -> str:
        return f"Job({self.id}, {self.status()})"

    def status(self) -> str:
        """The job's state.

        Returns:
            "queued", "starting", "running" or "restarting"; in the end "done", "failed",
            "cancelled", "preempted" (saved its state, to be submitted again) or "lost" (the
            engine has ended it).
        """
        return str(self.details()["state"])

    def details(self) -> dict[str, Any]:
        """The job's state, and where its tasks run.

        Returns:
            "state" as in `status`; "attempt", "step", and "tasks", "hosts" and "steps", once they
            have started; "restarts", if there were any; "backup", the newest one that the job
            keeps; "problem", one sentence, where it has failed or was lost.
        """
        data = self.read(STATUS)
        found: dict[str, Any] = json.loads(data) if data else {"state": "queued"}
        if found["state"] not in ENDED:
            known = self._known()
            if known in ENDED:
                # The controller may have written its last state since then.
                data = self.read(STATUS)
                found = json.loads(data) if data else found
                if found["state"] not in ENDED:
                    found["state"] = known
                    if self.why:
                        found["problem"] = self.why
            elif known == "queued":  # queued again, after a failure of a node
                found["state"] = known
        found.pop(POLICY, None)
        return found

    def _known(self) -> str:
        """The engine's answer, cached until a read has found the job lost, or for a while."""
        now = time.monotonic()
        if now >= self._ask_at or self.why:
            self._last = self._state()
            self._ask_at = time.monotonic() + _ASK_EVERY_S
        return self._last

    def logs(self, follow: bool = False, out: TextIO | None = None) -> str:
        """Output of the job's tasks, each line labelled with its task and host.

        Args:
            follow: whether to print it, and further output until the job ends.
            out: the stream to print to; by default `sys.stdout`.

        Returns:
            The text so far.
        """
        if not follow:
            return self.read(OUTPUT).decode("utf-8", "replace")
        output, shown = Output(self), []
        while True:
            over = self.status() in ENDED
            shown.append(output.copy(sys.stdout if out is None else out))
            if over:
                return "".join(shown)
            time.sleep(POLL_S)

    def outcomes(self, name: str) -> list[call.Outcome | None] | None:
        """The outcome of a call in each task, from a file of the job; None if there is none."""
        data = self.read(name)
        return [call.loaded(raw) for raw in pickle.loads(data)] if data else None

    def wait(self, timeout_s: float | None = None) -> str:
        """Waits for the end of the job.

        Args:
            timeout_s: seconds to wait at most; None: without limit.

        Returns:
            Its final state; see `status`.

        Raises:
            TimeoutError: the job has not ended in time.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while (state := self.status()) not in ENDED:
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"{self.id} is {state} after {timeout_s:g} s.")
            time.sleep(POLL_S)
        return state

    def result(self, timeout_s: float | None = None) -> list[Any]:
        """The function's result in each task, in the order of the tasks.

        Args:
            timeout_s: seconds to wait at most; None: without limit.

        Raises:
            TimeoutError: the job has not ended in time.
            TaskFailed: it was cancelled or lost, or a task died without an exception.
            Exception: that of the function in the first task that failed; its cause is a
                `TaskFailed` with the task's traceback.
        """
        state = self.wait(timeout_s)
        data = self.read(RESULT)
        if state in ("cancelled", "lost") or not data:
            problem = self.details().get("problem") or f"{self.where} was {state}"
            raise TaskFailed(f"{self.id} has no result: {problem}.")
        result, outcomes = pickle.loads(data)
        return return_values(result, {task: call.loaded(raw) for task, raw in outcomes.items()})

    def cancel(self, timeout_s: float = _CANCEL_S) -> None:
        """Ends the job and all of its tasks, and releases its resources; may be called twice.

        Args:
            timeout_s: seconds for its controller to end the tasks in order.
        """
        if self.status() in ENDED:
            return
        self.write(CANCEL, b"")
        if self._state() == "queued":  # its controller does not exist yet
            self._kill()
        try:
            self.wait(timeout_s)
        except TimeoutError:
            self._kill()

    def backup(self) -> bytes:
        """The newest backup of a fit without `backup_dir`, as a tar archive; b"" for none."""
        return self.read(BACKUP)


class DistantJob(Job):
    """A job whose controller sends the files. It may be unreachable for a while."""

    def _gone(self) -> bool:
        """Whether no reply will come: the job is lost, as `why` says, or is queued again."""
        return self._state() in ("queued", "lost")

    def _asked(self, ask: Callable[[], Any]) -> Any:
        """The controller's reply; None if none will come.

        Args:
            ask: returns the reply; raises OSError if the controller was not reached.

        Raises:
            TfmwError: the controller may run, and could not be reached for a while.
        """
        deadline = 0.0
        while not self.why:
            try:
                return ask() or b""
            except OSError as error:
                problem = error
            deadline = deadline or time.monotonic() + _AWAY_S
            if self._gone():
                break
            if time.monotonic() > deadline:
                raise TfmwError(
                    f"the controller of {self.id} was not reached for {_AWAY_S:g} s ({problem}), "
                    "and is not known to be lost: call again once it can be reached."
                )
            time.sleep(_RETRY_S)
        return None
