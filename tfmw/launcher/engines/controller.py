"""The controller of a job: runs attempts until the restart policy ends the job, and reports.

    state = Controller(spec, tasks, folder).run()          # "done", "failed", "cancelled", ...

It runs where the engine puts it: in Slurm's batch script, in an actor of Ray, beside Spark's
driver. Others see only the files that it writes into its folder (`job.py` has the names). A file
named `cancel` in it ends the job.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pickle
import queue
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tfmw.cluster import sockets
from tfmw.cluster.signals import Signals
from tfmw.errors import PREEMPTED
from tfmw.launcher.engines import job as jobs
from tfmw.launcher.engines import own_files
from tfmw.launcher.engines.engine import TIMING, JobSpec, Tasks
from tfmw.launcher.engines.job_attempt import LIVE, JobAttempt
from tfmw.launcher.engines.standing_job import Calls
from tfmw.launcher.failure import Failure
from tfmw.launcher.orchestrator import Orchestrator, RunOver
from tfmw.launcher.output import Display
from tfmw.launcher.remote.links import Links
from tfmw.launcher.remote.messages import AgentHello, Message
from tfmw.launcher.restart import AttemptOutcome, Decision, RestartPolicy
from tfmw.launcher.result import Result, exit_status
from tfmw.observe import goodput
from tfmw.observe.goodput import Division

INTERRUPTED = "interrupted"
"""State of a controller that its engine ends while tasks fail, as when a node is lost. Only the
engine knows whether the job is queued again, so the controller writes no last state."""

_POLL_S = 0.1
_GROW_EVERY_S = 10.0
_ENDED = {0: "done", 1: "failed", 2: "failed", PREEMPTED: "preempted"}


@dataclasses.dataclass
class Controller:
    """Runs one job: the backend of its `Orchestrator`."""

    spec: JobSpec
    tasks: Tasks
    folder: Path  # directory of the job's files
    stop: Signals = dataclasses.field(default_factory=Signals)

    def __post_init__(self) -> None:
        self._inbox: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        self._policy = RestartPolicy(self.spec.setup.options, self.spec.workers[1])
        self._policy.division = Division(at=goodput.now())
        self._written: dict[str, Any] = {}
        self._growing = False
        self._last: JobAttempt | None = None
        self._calls = Calls(self.folder) if self.spec.setup.stays else None

    def run(self) -> str:
        """Runs the job; returns its last state, which `status.json` has then, or INTERRUPTED."""
        state, problem = "failed", ""
        with own_files.append(self.folder / jobs.OUTPUT) as output:
            self._output, self._display = output, Display(output)
            try:
                token, listener = self.spec.token.encode(), sockets.listen()
                port = listener.getsockname()[1]
                with Links(token, self._inbox.put, TIMING, listener, self._welcome) as links:
                    state, problem = self._run_attempts(links, port)
            except Exception as error:  # processes that wait for the job must learn of it
                traceback.print_exc(file=output)
                problem = f"its controller failed: {type(error).__name__}: {error}"
            finally:
                try:
                    self.tasks.close()
                except Exception:
                    traceback.print_exc(file=output)
        if state != INTERRUPTED:
            self._say(state=state, problem=problem)
        return state

    def _run_attempts(self, links: Links, port: int) -> tuple[str, str]:
        self._links, self._port = links, port
        self._number = self._first_attempt()
        orchestrator = Orchestrator(self._policy, self)
        try:
            while not orchestrator.step(time.monotonic()):
                pass
        except RunOver as ended:
            state, problem = ended.args
            return state, problem
        finally:
            if self._last is not None:
                self._last.end()
        return self._finish(orchestrator.failures)

    def begin(self, due: bool, now: float) -> JobAttempt | None:
        if self.stop.received and not self._cancelled() and self.tasks.requeues:
            raise RunOver("queued", "")
        if self._cancelled() or self.stop.received:
            raise RunOver("cancelled", "it was cancelled before its tasks had a place")
        if not due or not (count := self.tasks.available(*self.spec.tasks)):
            if self.tasks.why != self._written.get("waiting", ""):
                self._say(waiting=self.tasks.why, waiting_since=time.time())
                if self.tasks.why:
                    self.notify(f"the tasks wait: {self.tasks.why}")
            time.sleep(_POLL_S)
            return None
        number = self._number
        self._say(state="starting" if number == 0 else "restarting", attempt=number)
        self._display = Display(self._output, LIVE if self.spec.setup.live else None)
        own = self.spec, self.tasks, self.folder, self._links, self._display
        self._last = JobAttempt(*own, number, count, self._policy)
        self._grow_at, self._asked = now + _GROW_EVERY_S, False
        self._last.start(self._port)
        return self._last

    def outcome(self, attempt: JobAttempt, now: float) -> AttemptOutcome:
        attempt.end()
        if self._cancelled():
            raise RunOver("cancelled", "it was cancelled")
        self._number += 1
        self._policy.division = attempt.ending.division
        self._say(**{jobs.POLICY: self._policy.saved()})
        outcome = attempt.ending.outcome(time.monotonic())
        outcome = dataclasses.replace(outcome, signals=tuple(self.stop.received))
        if self._growing and outcome.preempted and self.tasks.requeues:
            raise RunOver("queued", "")  # the engine starts the job again with more tasks
        self._growing = False
        if self.stop.received and outcome.failures and self.tasks.requeues:
            raise RunOver(INTERRUPTED, "")
        return outcome

    def judged(self, outcome: AttemptOutcome, decision: Decision) -> None:
        if decision.restart:
            self._say(state="restarting", step=outcome.step, **self._counted())
        self._preempted = outcome.preempted

    def notify(self, text: str) -> None:
        self._display.line(f"tfmw: {text}")

    def _welcome(self, hello: Message) -> tuple[int, int]:
        """Name for a new connection."""
        if not isinstance(hello, AgentHello):
            raise ValueError("no task of this job")
        return hello.attempt, hello.rank

    def _first_attempt(self) -> int:
        """Number of the first attempt: 0, or the next one of a job that was queued again."""
        before = json.loads(own_files.read(self.folder, jobs.STATUS) or "{}")
        kept = ("attempt", "restarts", "backup", jobs.POLICY)
        self._written = {name: before[name] for name in kept if name in before}
        if jobs.POLICY in before:
            self._policy.restore(before[jobs.POLICY])
        self._say(state="queued")
        return int(before.get("attempt", -1)) + 1

    def is_over(self, attempt: JobAttempt, now: float) -> bool:
        if attempt.look():
            return True
        with contextlib.suppress(queue.Empty):
            attempt.handle(*self._inbox.get(timeout=_POLL_S))
            while True:
                attempt.handle(*self._inbox.get_nowait())
        if attempt.phase == "running":
            self._say(state="running", **attempt.details(), **self._counted())
            if self._calls is not None:
                self._calls.look(attempt)
        if self._cancelled():
            return True
        if self.stop.received and not self._asked:
            self._asked = True
            attempt.ask_to_leave()
        if not self._asked and attempt.phase == "running":
            self._growing = now > self._grow_at and self._can_grow(attempt)
            notices = {**attempt.notices, **self.tasks.notices()}
            if self._growing or notices:
                reasons = [f"{attempt.label(rank)}: {why}" for rank, why in notices.items()]
                why = "; ".join(reasons) or "there is a place for more tasks"
                self.notify(f"{why}: all save their state")
                self._asked = True
                attempt.ask_to_leave()
        return False

    def _counted(self) -> dict[str, Any]:
        """Fields of the status with the restarts so far; none before the first."""
        counted = {"restarts": self._policy.restarts, jobs.POLICY: self._policy.saved()}
        return counted if self._policy.restarts else {}

    def _can_grow(self, attempt: JobAttempt) -> bool:
        self._grow_at = time.monotonic() + _GROW_EVERY_S
        least, most = self.spec.tasks
        return (
            least < most
            and self.spec.setup.options.max_restarts > 0
            and attempt.count < most
            and attempt.ending.step > 0
            and self.tasks.room(most) > attempt.count
        )

    def _finish(self, failures: Sequence[Failure]) -> tuple[str, str]:
        """Writes the result; returns the job's last state, and its problem."""
        attempt, log = self._last, self.folder / jobs.OUTPUT
        assert attempt is not None
        failed = tuple(dataclasses.replace(f, log=log) for f in failures)
        status = exit_status(failed, preempted=self._preempted)
        result = Result(
            status=status,
            tasks={},
            failures=failed,
            directory=None,
            attempts=attempt.number + 1,
            restarts=self._policy.restarts,
            goodput=attempt.ending.goodput(),
        )
        # These lines are printed to the log itself.
        lines = [x for x in result.summary() if not x.startswith("tfmw: log of ")]
        for line in lines:
            self._display.line(line)
        own_files.write(self.folder / jobs.RESULT, pickle.dumps((result, attempt.results())))
        if status == PREEMPTED and self.tasks.requeues:
            return "queued", ""
        return _ENDED[status], lines[-1] if status else ""

    def _cancelled(self) -> bool:
        gone = self._calls is not None and self._calls.caller_gone
        return gone or (self.folder / jobs.CANCEL).exists()

    def _say(self, **known: Any) -> None:
        """Writes the job's status if it has changed."""
        status = {**self._written, **known}
        if status != self._written:
            self._written = status
            own_files.write(self.folder / jobs.STATUS, json.dumps(status).encode())
