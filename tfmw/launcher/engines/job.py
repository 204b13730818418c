"""A job on an engine, as its submitter and every process that attaches to it see it.

    job = tfmw.submit(train, args=(10,), workers=8, on="slurm")
    job.id                        # "slurm:4711"
    job.status()                  # "queued", "running", "done", ...
    job.logs(follow=True)         # prints until the job ends
    job.result(timeout_s=600)     # the function's result in each task
    job.cancel()

The controller writes small files, and a `JobHandle` reads them from any machine.
"""

from __future__ import annotations

import codecs
import json
import pickle
import sys
import time
from typing import Any, TextIO

from tfmw.errors import TaskFailed
from tfmw.launcher import call
from tfmw.launcher.engines.engine import JobHandle
from tfmw.launcher.run import return_values

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


class Output:
    """Reads the output of a job piece by piece."""

    def __init__(self, handle: JobHandle) -> None:
        self._handle, self._offset = handle, 0
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def copy(self, out: TextIO) -> str:
        """Prints what is new, and returns it."""
        shown = []
        while data := self._handle.read(OUTPUT, self._offset):
            self._offset += len(data)
            shown.append(self._decoder.decode(data))
            out.write(shown[-1])
            out.flush()
        return "".join(shown)


class Job:
    """One job.

    Args:
        engine: name of its engine.
        number: number of the job on the engine.
        handle: handle of its controller.
        where: description of its place, for people.
    """

    def __init__(self, engine: str, number: str, handle: JobHandle, where: str) -> None:
        self.id = f"{engine}:{number}"
        """Identifier of the job for `tfmw.attach`, `tfmw logs` and `tfmw cancel`."""
        self.where = where
        """The engine's own number of the job, and its dashboard if it has one."""
        self._handle = handle
        self._last, self._ask_at = "", 0.0

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
        data = self._handle.read(STATUS)
        found: dict[str, Any] = json.loads(data) if data else {"state": "queued"}
        if found["state"] not in ENDED:
            known = self._known()
            if known in ENDED:
                # The controller may have written its last state since then.
                data = self._handle.read(STATUS)
                found = json.loads(data) if data else found
                if found["state"] not in ENDED:
                    found["state"] = known
                    if self._handle.why:
                        found["problem"] = self._handle.why
            elif known == "queued":  # queued again, after a failure of a node
                found["state"] = known
        found.pop(POLICY, None)
        return found

    def _known(self) -> str:
        """The engine's answer, cached for a while, as a query may be expensive."""
        now = time.monotonic()
        if now >= self._ask_at:
            self._last = self._handle.state()
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
            return self._handle.read(OUTPUT).decode("utf-8", "replace")
        output, shown = self.output(), []
        while True:
            over = self.status() in ENDED
            shown.append(output.copy(sys.stdout if out is None else out))
            if over:
                return "".join(shown)
            time.sleep(POLL_S)

    def output(self) -> Output:
        """A reader of the job's output from its beginning."""
        return Output(self._handle)

    def outcomes(self, name: str) -> list[call.Outcome | None] | None:
        """The outcome of a call in each task, from a file of the job; None if there is none."""
        data = self._handle.read(name)
        return [call.loaded(raw) for raw in pickle.loads(data)] if data else None

    def write(self, name: str, data: bytes | memoryview) -> None:
        """Writes a file of the job, for its controller."""
        self._handle.write(name, data)

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
        data = self._handle.read(RESULT)
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
        self._handle.write(CANCEL, b"")
        if self._handle.state() == "queued":  # its controller does not exist yet
            self._handle.kill()
        try:
            self.wait(timeout_s)
        except TimeoutError:
            self._handle.kill()

    def forget(self) -> None:
        """Removes the files of a job that has ended: its output, its result."""
        self._handle.forget()

    def backup(self) -> bytes:
        """The newest backup of a fit without `backup_dir`, as a tar archive; b"" for none."""
        return self._handle.read(BACKUP)
