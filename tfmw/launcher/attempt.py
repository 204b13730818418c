"""All tasks of a local cluster, once: started, watched, ended.

    attempt = Attempt(context, tasks, number=0, policy=policy)
    attempt.start()      # processes, each in a session of its own
    attempt.watch()      # until all are done, one has failed or hangs, or a signal arrived
    attempt.end()        # SIGTERM, grace period, SIGKILL; no process remains
    attempt.failures()   # the root cause first

Each attempt has its own ports and folder. Within an attempt a task is restarted only if the other
tasks can continue without it (`restart.restarts_alone`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import json
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Protocol

from tfmw.cluster.cluster import MEMBER
from tfmw.errors import UsageError
from tfmw.launcher import call, preemption
from tfmw.launcher.diagnosis import Diagnosis, is_secondary
from tfmw.launcher.exchanges import missing
from tfmw.launcher.failure import Failure
from tfmw.launcher.gpus import shortage, visible_devices
from tfmw.launcher.options import RunOptions
from tfmw.launcher.output import Display, OutputPump
from tfmw.launcher.preemption import Preemption
from tfmw.launcher.process import Task, divisions
from tfmw.launcher.restart import backoff_s, restarts_alone
from tfmw.launcher.run_files import Published
from tfmw.launcher.run_status import sentence
from tfmw.launcher.spawn import Spawner
from tfmw.launcher.watchdog import (
    LAG_S,
    STOPPED_TIMEOUT_S,
    HungTask,
    TaskStatus,
    Watchdog,
)
from tfmw.runtime.goodput import Division
from tfmw.runtime.progress import AT_THE_END
from tfmw.runtime.signals import Signals
from tfmw.runtime.sockets import reserved_ports
from tfmw.trackers import RUN_ID

GRACE_S = 1.0
"""Seconds between SIGTERM and SIGKILL. TensorFlow's strategy replaces SIGTERM's handler."""

SETTLE_S = 0.5
"""Seconds to wait for the root cause if the first failure only reports a lost peer."""

EXIT_S = 5.0
"""Seconds in which a task that has recorded its error exits, where it restarts alone."""

FAREWELL_S = 10.0
"""Seconds in which serving tasks (ps, and workers beside them) exit once the chief is done."""

POLL_S = 0.01
"""Seconds between two polls while tasks are being ended."""

PROGRESS_CHECK_S = 0.2
"""Seconds between two checks of the tasks' progress."""

DUMP_S = 1.0
"""Seconds in which the tasks of an attempt that hangs write their stacks."""


class Event(enum.Enum):
    """Why an attempt is over."""

    DONE = "all tasks have ended, or only serve"
    FAILED = "a task failed"
    HANGS = "a task hangs"
    SIGNALLED = "the launcher received a signal"
    OVERDUE = "tasks have not saved their state in time"
    OUTPUT_CLOSED = "nobody reads the output"


class Restarts(Protocol):
    """Decides whether single tasks restart; `RestartPolicy` does, and over hosts their leader."""

    restarts: int
    """How many the run has used up."""

    def allows_restart_alone(self, failure: Failure) -> bool | None:
        """Whether this task restarts alone, and counts it; None: not known yet, ask again."""


@dataclasses.dataclass(frozen=True)
class AttemptContext:
    """The settings and resources that all attempts of a run share.

    Args:
        command: the arguments of `task.py`: "script", its path, its flags.
        directory: of the run; each attempt creates its folder in it.
        published: what `tfmw status` shows of the run.
        env: environment variables that all tasks share; a fork server is kept for the same ones.
        spawner: starts the processes.
        display: prints the tasks' output.
        live: name of the task whose output is a terminal.
        payload: standard input of each task; with it each task also has a file for its result.
        stop: the signals that the launcher has received.
        options: of the run.
        grace_s: seconds between SIGTERM and SIGKILL.
        farewell_s: seconds in which serving tasks exit once the chief is done.
        run_id: identifies the run over its attempts; "": as the environment says.
    """

    command: Sequence[str]
    directory: Path
    published: Published
    env: Mapping[str, str]
    spawner: Spawner
    display: Display
    live: str | None
    payload: call.Payload | None
    stop: Signals
    options: RunOptions
    grace_s: float = GRACE_S
    farewell_s: float = FAREWELL_S
    run_id: str = ""


class Attempt:
    """One start of all tasks: watched until the outcome is known, then ended.

    Args:
        context: of the run.
        layout: (kind, index) of each task.
        number: which attempt of the run, from 0.
        policy: decides whether single tasks restart.
        cluster: addresses of all tasks by kind, where some are on other hosts; None: they are
            these, on ports of loopback.
        settle_s: seconds to wait for the cause where the first failure only reports a lost peer.
        env: environment variables that these tasks have instead of those of the run.
        before: how tasks have divided the run's time until now, the chief first.
    """

    def __init__(
        self,
        context: AttemptContext,
        layout: Sequence[tuple[str, int]],
        number: int,
        policy: Restarts,
        *,
        cluster: Mapping[str, Sequence[str]] | None = None,
        settle_s: float = SETTLE_S,
        env: Mapping[str, str] | None = None,
        before: Mapping[str, Division] | None = None,
    ) -> None:
        self.number = number
        self._env_of_all = env or {}
        self._cluster = cluster
        self._settle_s = settle_s
        self._context = context
        self._status = context.published.status
        self._stop = context.stop
        self._policy = policy
        self._directory = context.directory / f"attempt_{number}"
        self._env = {
            **context.env,
            **({RUN_ID: context.run_id} if context.run_id else {}),
            "TFMW_ATTEMPT": str(number),
            "TFMW_MAX_RESTARTS": str(context.options.max_restarts),
        }
        self.tasks = [Task(kind, index, self._directory, self._env) for kind, index in layout]
        known = before or {}
        first = next(iter(known.values()), Division(at=self._status.since))
        for task in self.tasks:
            task.division = known.get(task.name, first)
        kinds = {kind for kind, _ in layout} if cluster is None else set(cluster)
        self._has_ps = "ps" in kinds
        self._own: dict[str, dict[str, str]] = {}  # task -> variables that differ between tasks
        self._replaced: list[Task] = []  # ended tasks that were restarted alone
        # Task -> when to restart it alone; infinity: that is not decided yet.
        self._due: dict[str, float] = {}
        self._results: dict[str, IO[bytes]] = {}
        self._output = OutputPump(context.display)
        self._preemption = Preemption(context.options, context.stop)
        self._diagnosis = Diagnosis(number)
        self._began_at = time.monotonic()
        self._watchdog = Watchdog(
            context.options.hang_timeout_s,
            context.options.start_timeout_s,
            STOPPED_TIMEOUT_S if context.options.max_restarts else 0.0,
            lag_s=LAG_S,
        )
        self._next_check = 0.0
        self._hung: HungTask | None = None

    # ---- start ---------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts all tasks. Their ports stay reserved until just before.

        Raises:
            UsageError: their files cannot be written.
        """
        try:
            self._start_all()
        except OSError as error:
            raise UsageError(
                f"the tasks' files in {self._directory} cannot be written ({error.strerror}): make "
                "room there, or name another place with --log-dir (by default $TMPDIR)."
            ) from error

    def _start_all(self) -> None:
        self._began_at = time.monotonic()
        self._status.watch(self.tasks, self.number, self._cluster)
        with contextlib.ExitStack() as inputs:
            prepared = [self._prepare(task, inputs) for task in self.tasks]
            if self._cluster is None:
                with reserved_ports(sum(task.kind != "evaluator" for task in self.tasks)) as ports:
                    self._describe(self._on_loopback(ports))
            else:
                self._describe(self._cluster)
            for task, (stdin, fds) in zip(self.tasks, prepared, strict=True):
                self._start(task, stdin, fds)

    def _start(self, task: Task, stdin: IO[bytes] | int, fds: Sequence[int]) -> None:
        context = self._context
        live = task.name == context.live
        task.start(context.spawner, context.command, stdin, live, fds)
        self._output.add(task)
        context.published.update()

    def _prepare(
        self, task: Task, inputs: contextlib.ExitStack
    ) -> tuple[IO[bytes] | int, list[int]]:
        """Standard input and inherited descriptors of a task."""
        if self._context.payload is None:
            return subprocess.DEVNULL, []
        stdin = inputs.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
        call.write(self._context.payload, stdin)
        stdin.seek(0)
        result = tempfile.TemporaryFile()  # noqa: SIM115  (closed in outcomes)
        self._results[task.name] = result
        task.env[call.RESULT_FD] = str(result.fileno())
        return stdin, [result.fileno()]

    def _on_loopback(self, ports: Sequence[int]) -> dict[str, list[str]]:
        cluster: dict[str, list[str]] = {}
        members = [task for task in self.tasks if task.kind != "evaluator"]
        for task, port in zip(members, ports, strict=True):
            cluster.setdefault(task.kind, []).append(f"127.0.0.1:{port}")
        return cluster

    def _describe(self, cluster: Mapping[str, Sequence[str]]) -> None:
        """Gives each task its TF_CONFIG, its rank on this machine, and its share of the GPUs."""
        workers = [task.name for task in self.tasks if task.kind == "worker"]
        for rank, task in enumerate(self.tasks):
            own = {"type": task.kind, "index": task.index}
            training = workers.index(task.name) if task.kind == "worker" else None
            place = {"TF_CONFIG": json.dumps({"cluster": cluster, "task": own})}
            if self._context.options.elastic:
                first = int(self._env.get(MEMBER) or 0)
                place = {MEMBER: str(first + task.index)}
            self._own[task.name] = {
                **place,
                "TFMW_LOCAL_TASKS": str(len(self.tasks)),
                "TFMW_LOCAL_RANK": str(rank),
                **visible_devices(training, len(workers), self._env),
                **self._env_of_all,
            }
            task.env |= self._own[task.name]
        if self.number == 0 and (note := shortage(len(workers), self._env)):
            self._context.display.line(f"tfmw: {note}")

    # ---- watch ---------------------------------------------------------------------------------

    def watch(self) -> None:
        """Returns once the attempt is over."""
        while self.poll(self._context.options.monitor_interval_s) is None:
            pass

    def poll(self, wait_s: float) -> Event | None:
        """Looks at the tasks once, and starts those that restart alone.

        Args:
            wait_s: seconds to wait for output of the tasks before.

        Returns:
            Why the attempt is over; None: it continues.
        """
        if self._context.display.broken:
            return Event.OUTPUT_CLOSED
        if self._stop.received and not self._preemption.waits(self.tasks):
            return Event.SIGNALLED
        self._output.pump(wait_s)
        ended = {task for task in self.tasks if task.has_ended()}
        if any(self._failed(task) for task in self.tasks):
            self._settle()
            if not self._restart_alone() and not self._only_lost_preempted_peers():
                return Event.FAILED
        self._start_due()
        if ended.issuperset(self.tasks) and not self._due:  # also of those started just now
            return Event.DONE
        if self.preempted():
            self._preemption.begin()
        if self._preemption.overdue:
            return Event.OVERDUE
        if self._served_out():
            return Event.DONE
        if not self._hangs():
            return None
        if self._context.options.elastic:  # it alone: the others wait for it in their round
            self._kill_hung()
            return None
        return Event.HANGS

    def _kill_hung(self) -> None:
        hung, self._hung = self._hung, None
        for task in self.tasks:
            if hung is not None and task.name == hung.task:
                self._context.display.line(f"tfmw: {task.name} is killed: {hung.reason}")
                task.signal(signal.SIGKILL)

    def ask_to_leave(self) -> bool:
        """Has the tasks save their state and leave, once they train; whether they are asked."""
        return self._preemption.ask(self.tasks)

    def _served_out(self) -> bool:
        """Whether only serving tasks remain, and their time to exit is over."""
        if not self._has_ps:
            return False
        not_serving = self._not_serving()
        if not not_serving:  # the chief is on another host
            return False
        if not all(task.has_ended() and task.name not in self._due for task in not_serving):
            return False
        done_at = max((task.ended for task in not_serving), default=self._began_at)
        return time.monotonic() >= done_at + self._context.farewell_s

    def _not_serving(self) -> list[Task]:
        serving = ("ps", "worker") if self._has_ps else ()
        return [task for task in self.tasks if task.kind not in serving]

    def _failed(self, task: Task) -> bool:
        return self._diagnosis.failed(task)

    def _only_lost_preempted_peers(self) -> bool:
        """Whether the failed tasks have only lost a peer that saved its state and exited."""
        failed = [task for task in self.tasks if self._failed(task)]
        return self.preempted() and all(is_secondary(task.error()) for task in failed)

    def _settle(self) -> None:
        """Waits a moment for failed tasks to exit, and for the root cause to appear.

        The first task to die may have failed only because it lost the task that is the cause. Wrong
        usage fails all tasks alike.
        """
        deadline = time.monotonic() + self._settle_s
        while time.monotonic() < deadline and not self._stop.received and not self._all_ended():
            failed = [task for task in self.tasks if self._failed(task)]
            errors = [task.error() for task in failed]
            known = not all(error and (error["secondary"] or error["usage"]) for error in errors)
            if known and all(task.has_ended() for task in failed):
                return
            self._output.pump(POLL_S)

    def _hangs(self) -> bool:
        """Whether the watchdog finds a task that hangs; names stragglers."""
        if time.monotonic() < self._next_check:
            return False
        self._next_check = time.monotonic() + PROGRESS_CHECK_S
        options = self._context.options
        statuses = [
            TaskStatus(
                task.name,
                *task.progress()[:3],
                stopped=options.max_restarts > 0 and task.stopped(),
                must_join=not self._has_ps and not options.elastic,
            )
            for task in self.tasks
            if not task.has_ended() and task.progress().blocked_in != AT_THE_END
        ]
        self._hung = self._watchdog.check(statuses)
        if self._hung is not None:
            self._hung = self._with_who_is_missing(self._hung)
            self._dump_stacks()
            return True
        for line in [*self._watchdog.stragglers(statuses), *self._status.new_straggler()]:
            self._context.display.line(f"tfmw: {line}")
        return False

    def _with_who_is_missing(self, hung: HungTask) -> HungTask:
        """The task that hangs by what the flight recorders say together; prints that.

        Tasks that wait for it are silent for as long, so its silence alone does not show it.
        """
        late = missing(self._status.exchanges())
        if late is None:
            return hung
        self._context.display.line(f"tfmw: {sentence(late, self.tasks, DUMP_S)}")
        return dataclasses.replace(hung, task=late.task, reason=f"{hung.reason}; it {late.what}")

    def _dump_stacks(self) -> None:
        """Makes every task write the stacks of its threads into its log (see `task`)."""
        for task in self.tasks:
            if task.catches(signal.SIGUSR2):
                task.signal_alone(signal.SIGUSR2)
                task.signal_alone(signal.SIGCONT)  # a stopped task then handles it
        deadline = time.monotonic() + DUMP_S
        while time.monotonic() < deadline and self._output.pump(DUMP_S / 3):
            pass

    # ---- restarts of single tasks --------------------------------------------------------------

    def _restart_alone(self) -> bool:
        """Replaces the tasks that failed; whether the attempt continues."""
        failed = [task for task in self.tasks if self._failed(task)]
        if self._stop.received or self._preemption.begun:
            return False
        elastic = self._context.options.elastic
        if not all(restarts_alone(task.kind, self._has_ps, elastic) for task in failed):
            return False
        for task in failed:
            if self._is_exiting(task):
                continue
            failure = self._diagnosis.failure(task, task.error())
            allowed = self._policy.allows_restart_alone(failure)
            if allowed is None:
                self._due[task.name] = float("inf")
                continue
            if not allowed:
                return False
            self._replace(task)
            trained = elastic and failure.external and failure.step >= 0
            delay_s = 0.0 if trained else backoff_s(task.restart)
            self._due[task.name] = time.monotonic() + delay_s
            when = f"in {delay_s:g} s" if delay_s else "at once"
            self._context.display.line(
                f"tfmw: restart {self._policy.restarts} of {self._context.options.max_restarts} "
                f"{when}, of {task.name} alone: it failed in attempt {self.number} after "
                f"{failure.seconds:.1f} s: {failure.description}"
            )
        return True

    def _is_exiting(self, task: Task) -> bool:
        """Whether a failed task still runs; it is killed if it does not exit soon."""
        if task.has_ended():
            return False
        record = task.error()
        if record is not None and time.monotonic() - record["monotonic"] >= EXIT_S:
            task.signal(signal.SIGKILL)
        return True

    def _replace(self, task: Task) -> None:
        """Replaces an ended task by a new one, which is not started yet."""
        task.signal(signal.SIGKILL)  # processes that it has started
        self._output.finish(task)
        task.close()
        new = Task(task.kind, task.index, self._directory, self._env, task.restart + 1)
        new.env |= self._own[task.name]
        self.tasks[self.tasks.index(task)] = new
        self._replaced.append(task)
        self._watchdog.forget(task.name)

    def _start_due(self) -> None:
        for task in self.tasks:
            if self._due.get(task.name, float("inf")) <= time.monotonic():
                del self._due[task.name]
                with contextlib.ExitStack() as inputs:
                    self._start(task, *self._prepare(task, inputs))

    # ---- end -----------------------------------------------------------------------------------

    def end(self, grace_s: float | None = None) -> None:
        """Ends every task and every process they started. Safe to call twice.

        Args:
            grace_s: seconds between SIGTERM and SIGKILL; 0: SIGKILL at once; None: as the run.
        """
        if self._output.closed:
            return
        grace_s = self._context.grace_s if grace_s is None else grace_s
        self._diagnosis.ended_at = min(self._diagnosis.ended_at, time.monotonic())
        self._due.clear()
        if not self._stop.received:
            failed = [task for task in self.tasks if self._failed(task)]
            for line in self._status.killed(failed):
                self._context.display.line(f"tfmw: {line}")
        if grace_s > 0:
            for task in [task for task in self.tasks if not task.has_ended()]:
                task.signal(signal.SIGTERM)
                task.signal(signal.SIGCONT)  # a stopped task then handles the SIGTERM
            deadline = time.monotonic() + grace_s
            while time.monotonic() < deadline and not self._stop.hurry and not self._all_ended():
                self._output.pump(POLL_S)
        for task in self.tasks:
            task.signal(signal.SIGKILL)
        while not self._all_ended():
            self._output.pump(POLL_S)
        self._output.drain()
        if self.failures():
            self._status.dump(self._directory / "exchanges.json")
        for task in self.tasks:
            task.close()
        self._output.close()

    def _all_ended(self) -> bool:
        ended = [
            task.has_ended() for task in self.tasks
        ]  # each is polled, which records when it ended
        return all(ended)

    # ---- outcome -------------------------------------------------------------------------------

    def failures(self) -> tuple[Failure, ...]:
        """The tasks that failed on their own, the root cause first; without restarted ones."""
        if self._only_lost_preempted_peers():
            return ()
        return self._diagnosis.failures(self.tasks, self._hung)

    def restarted_failures(self) -> tuple[Failure, ...]:
        """The failures of the tasks that were restarted alone, in order."""
        return tuple(self._diagnosis.failure(task, task.error()) for task in self._replaced)

    def done(self) -> bool:
        """Whether all tasks have ended with status 0; serving ones may have been ended."""
        return all(task.status == 0 for task in self._not_serving() or self.tasks)

    def preempted(self) -> bool:
        """Whether tasks exited with the status that requests another run."""
        return preemption.was_preempted(self.tasks)

    def step(self) -> int:
        """The largest training step that a task has reported; negative if none has."""
        return max((task.progress().step for task in self.tasks), default=-1)

    def divisions(self) -> dict[str, Division]:
        """How the tasks that train have divided the run's time."""
        return divisions(self.tasks)

    def seconds(self) -> float:
        """Duration of the attempt."""
        return min(self._diagnosis.ended_at, time.monotonic()) - self._began_at

    def results(self) -> dict[str, bytes]:
        """The pickled outcome of the payload's function in each task. Call once, after `end`."""
        found = {}
        for name, file in self._results.items():
            with file:
                found[name] = call.read(file)
        return found
