"""One attempt: all tasks of a local cluster are started, watched and ended.

    attempt = Attempt(context, tasks, number=0, policy=policy)
    attempt.start()      # processes, each in a session of its own
    attempt.poll(0.05)   # whether all are done, one has failed or hangs, or a signal arrived
    attempt.end()        # SIGTERM, grace period, SIGKILL; no process remains
    attempt.failures()   # the root cause first

Each attempt has its own ports and folder. Within an attempt a task is restarted only if the other
tasks can continue without it (`restart.restarts_alone`).

The launcher forwards SIGTERM or SIGUSR1 to one task. Tasks that train together agree on the step
after which all of them save their state and exit with status 75.
"""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tfmw.cluster import turns
from tfmw.cluster.cluster import MAX_RESTARTS, REPLACES, STATE_FOLDER
from tfmw.cluster.signals import Signals
from tfmw.cluster.sockets import reserved_ports
from tfmw.errors import PREEMPTED, UsageError
from tfmw.launcher import run_files
from tfmw.launcher.environment import gpu_note, visible_devices, visible_gpus
from tfmw.launcher.failure import Diagnosis, Failure, is_external, why_all_restart
from tfmw.launcher.options import LocalRun
from tfmw.launcher.output import Display, OutputPump
from tfmw.launcher.process import Task, divisions
from tfmw.launcher.restart import AttemptOutcome, Restarts, at_step, backoff_s, restarts_alone, when
from tfmw.launcher.run_status import RunStatus, sentence
from tfmw.launcher.spawn import ATTEMPT_MARK, Spawner, end_marked, reap_orphans
from tfmw.launcher.watchdog import (
    LAG_S,
    STOPPED_TIMEOUT_S,
    HungTask,
    RunningTime,
    TaskStatus,
    Watchdog,
)
from tfmw.observe import goodput
from tfmw.observe.exchanges import missing
from tfmw.observe.goodput import OTHER, Division
from tfmw.observe.progress import AT_THE_END

SETTLE_S = 0.5
"""Seconds to wait for the root cause if the first failure only reports a lost peer."""
_EXIT_S = 5.0  # seconds in which a task that has recorded its error must exit, if it restarts alone
_POLL_S = 0.01  # seconds between two polls while tasks are being ended
_PROGRESS_CHECK_S = 0.2  # seconds between two checks of the tasks' progress
_DUMP_S = 1.0  # seconds in which the tasks of an attempt that hangs write their stacks

_NEVER = float("inf")


@dataclasses.dataclass(frozen=True)
class AttemptContext:
    """Resources that all attempts of a run share."""

    run: LocalRun
    directory: Path  # directory of the run; each attempt creates its folder in it
    status: RunStatus
    env: Mapping[str, str]  # environment of all tasks; a fork server is kept for equal ones
    spawner: Spawner
    display: Display
    live: str | None  # name of the task whose output is a terminal
    stop: Signals
    state_folder: str = ""  # a folder in memory for the state of workers, if there is one


@dataclasses.dataclass(eq=False)
class Attempt:
    """One start of all tasks: watched until the outcome is known, then ended."""

    context: AttemptContext
    layout: Sequence[tuple[str, int]]  # (kind, index) of each task
    number: int  # number of the attempt in the run, from 0
    policy: Restarts
    _: dataclasses.KW_ONLY
    # Addresses of all tasks by kind, if some are on other hosts; None: ports of loopback.
    cluster: Mapping[str, Sequence[str]] | None = None
    settle_s: float = SETTLE_S
    # Environment variables of these tasks that replace those of the run.
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    # The tasks' divisions of the run's time until now, the chief first.
    before: Mapping[str, Division] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self._options = self.context.run.options
        self._status = self.context.status
        self._stop = self.context.stop
        self._directory = self.context.directory / f"attempt_{self.number}"
        self._env = {
            **self.context.env,
            "TFMW_ATTEMPT": str(self.number),
            MAX_RESTARTS: str(self._options.max_restarts),
            ATTEMPT_MARK: secrets.token_hex(8),
        }
        self.context.spawner.tell_reaper(mark=self._env[ATTEMPT_MARK])
        self.tasks = [Task(*task, self._directory, env=self._env) for task in self.layout]
        first = next(iter(self.before.values()), Division(at=self._status.since))
        for task in self.tasks:
            task.division = self.before.get(task.name, first)
        kinds = [kind for kind, _ in self.layout]
        here = kinds.count("worker")
        workers = here if self.cluster is None else len(self.cluster.get("worker", ()))
        self._has_ps = "ps" in (kinds if self.cluster is None else self.cluster)
        self._elsewhere = workers > here  # whether other machines have workers
        # Whether a lost worker is replaced while the others wait for it.
        may_restart = self._options.max_restarts > 0
        self._replaces = not self._has_ps and workers > 1 and may_restart
        # A worker alone has copies of its state in memory on processors only.
        copies = not self._has_ps and (workers > 1 or not visible_gpus(self._env))
        self._state_folder = self.context.state_folder if copies else ""
        self._replaced: list[Task] = []  # ended tasks that were restarted alone
        self._replaced_at = -1  # the largest step at which a worker was replaced
        # Task -> time to restart it alone; infinity: not decided yet.
        self._due: dict[str, float] = {}
        self._output = OutputPump(self.context.display)
        self._leave_by = _NEVER  # time by which tasks that were asked to leave must have done so
        self._diagnosis = Diagnosis(self.number)
        self._began_at = time.monotonic()
        self._watchdog = Watchdog(
            self._options.hang_timeout_s,
            self._options.start_timeout_s,
            STOPPED_TIMEOUT_S if self._options.max_restarts else 0.0,
            LAG_S,
            RunningTime(),
        )
        self._next_check = 0.0
        self._hung: HungTask | None = None

    # ---- start ---------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts all tasks; their ports stay reserved until just before.

        Raises:
            UsageError: their files cannot be written.
        """
        self._began_at = time.monotonic()
        status = self._status
        status.tasks, status.attempt, status.cluster = self.tasks, self.number, self.cluster or {}
        try:
            for task in self.tasks:
                task.prepare(self.context.run.payload, self.context.run.stays)
            if self.cluster is None:
                members = [task for task in self.tasks if task.kind != "evaluator"]
                cluster: dict[str, list[str]] = {}
                with reserved_ports(len(members)) as ports:
                    for task, port in zip(members, ports, strict=True):
                        cluster.setdefault(task.kind, []).append(f"127.0.0.1:{port}")
                    self._describe(cluster)
            else:
                self._describe(self.cluster)
            for task in self.tasks:
                self._start(task)
        except OSError as error:
            raise UsageError(
                f"the tasks' files in {self._directory} cannot be written ({error.strerror}): make "
                "room there, or name another place with --log-dir (by default $TMPDIR)."
            ) from error

    def _start(self, task: Task) -> None:
        context = self.context
        task.start(context.spawner, context.run.command, task.name == context.live)
        self._output.add(task)
        run_files.update(self._status)

    def _describe(self, cluster: Mapping[str, Sequence[str]]) -> None:
        """Gives each task its TF_CONFIG, its rank on this machine, and its share of the GPUs."""
        workers = [task.name for task in self.tasks if task.kind == "worker"]
        for rank, task in enumerate(self.tasks):
            own = {"type": task.kind, "index": task.index}
            training = workers.index(task.name) if task.kind == "worker" else None
            task.env |= {
                "TF_CONFIG": json.dumps({"cluster": cluster, "task": own}),
                "TFMW_LOCAL_TASKS": str(len(self.tasks)),
                "TFMW_LOCAL_RANK": str(rank),
                **({REPLACES: "1"} if self._replaces else {}),
                **({STATE_FOLDER: self._state_folder} if self._state_folder else {}),
                turns.FILE: str(self.context.directory / "script-files"),
                **visible_devices(training, len(workers), self._env),
                **self.env,
            }
        if self.number == 0 and (note := gpu_note(len(workers), self._env)):
            self.context.display.line(f"tfmw: {note}")

    # ---- watch ---------------------------------------------------------------------------------

    def poll(self, wait_s: float) -> bool:
        """Checks the tasks once, and starts those that restart alone.

        Args:
            wait_s: seconds to wait for output of the tasks first.

        Returns:
            Whether the attempt is over: all tasks have ended, or only serve; one has failed or
            hangs; a signal arrived; tasks have not saved their state in time; or the reader of the
            output has gone.
        """
        if self.context.display.broken:
            return True
        if self._stop.received and not self._waits_for_state():
            return True
        self._output.pump(wait_s)
        if os.getpid() == 1:
            reap_orphans([task.pid for task in self.tasks])
        ended = {task for task in self.tasks if task.pid and task.has_ended()}
        if self._failed():
            self._settle()
            if not self._restart_alone() and not self._only_lost_preempted_peers():
                return True
        self._start_due()
        # false if a task was replaced or started just now, or it is not known whether it restarts
        if not self._due and ended.issuperset(self.tasks):
            return True
        if self.preempted():
            self._begin_to_leave()
        if time.monotonic() >= self._leave_by or self._served_out():
            return True
        hung = self._find_hung()
        if hung is not None and self._killed_alone(hung):
            return False
        self._hung = hung
        return hung is not None

    def _killed_alone(self, hung: HungTask) -> bool:
        """Kills a task that is stopped, if the others wait for a new one in its place."""
        task = next(task for task in self.tasks if task.name == hung.task)
        if not (self._replaces and hung.external and task.progress().replaceable):
            return False
        self.context.display.line(f"tfmw: {hung.task} is killed: {hung.reason}")
        task.signal(signal.SIGKILL)
        return True

    def _waits_for_state(self) -> bool:
        """Whether a signal to the launcher makes tasks save their state."""
        options = self._options
        expected = options.max_restarts > 0 or options.preempt_grace_s is not None
        asked = self._stop.asks_to_leave and self.ask_to_leave(at_once=expected)
        return asked and time.monotonic() < self._leave_by

    def ask_to_leave(self, at_once: bool = False) -> bool:
        """Asks the tasks to save their state and leave; returns whether they have been.

        One task is told, as soon as one has a handler of SIGUSR1, or at once. TensorFlow installs a
        handler of SIGTERM, which saves nothing, in every task.
        """
        if self._leave_by == _NEVER:
            running = [task for task in self.tasks if not task.has_ended()]
            saving = (task for task in running if at_once or task.catches(signal.SIGUSR1))
            if (told := next(saving, None)) is not None:
                self._begin_to_leave()
                told.signal_alone(signal.SIGTERM)
        return self._leave_by < _NEVER

    def _begin_to_leave(self) -> None:
        """Starts the time limit for tasks to save their state and exit, once."""
        self._leave_by = min(self._leave_by, time.monotonic() + self._options.leave_s)

    def stay(self) -> None:
        """Copies the output of tasks that stay after a call, and takes a request to leave back."""
        while self._output.pump(0.0):
            pass
        self._leave_by = _NEVER

    def _served_out(self) -> bool:
        """Whether only serving tasks remain, and their time to exit is over."""
        not_serving = self._not_serving()
        if not self._has_ps or not not_serving:  # the chief is on another host
            return False
        if not all(task.has_ended() and task.name not in self._due for task in not_serving):
            return False
        done_at = max(task.ended for task in not_serving)
        return time.monotonic() >= done_at + self.context.run.farewell_s

    def _not_serving(self) -> list[Task]:
        serving = ("ps", "worker") if self._has_ps else ()
        return [task for task in self.tasks if task.kind not in serving]

    def _failed(self) -> list[Task]:
        return [task for task in self.tasks if self._diagnosis.failed(task)]

    def _only_lost_preempted_peers(self) -> bool:
        """Whether the failed tasks have only lost a peer that saved its state and exited."""
        return self.preempted() and all(task.error().get("secondary") for task in self._failed())

    def _settle(self) -> None:
        """Waits a moment for failed tasks to exit, and for the root cause to appear.

        The first task to die may have failed only because it lost the task that is the cause. Wrong
        usage makes all tasks fail in the same way.
        """
        deadline = time.monotonic() + self.settle_s
        while time.monotonic() < deadline and not self._stop.received and not self._all_ended():
            failed = self._failed()
            errors = [task.error() for task in failed]
            known = not all(error and (error["secondary"] or error["usage"]) for error in errors)
            if known and all(task.has_ended() for task in failed):
                return
            self._output.pump(_POLL_S)

    def _find_hung(self) -> HungTask | None:
        """The task that hangs, according to the watchdog and all flight recorders.

        Prints the task for which the others wait: all are silent for as long, so silence alone does
        not identify it. Reports stragglers, if no task hangs.
        """
        if time.monotonic() < self._next_check:
            return None
        self._next_check = time.monotonic() + _PROGRESS_CHECK_S
        statuses = [
            TaskStatus(
                task.name,
                *task.progress()[:3],
                stopped=self._options.max_restarts > 0 and task.stopped(),
                must_join=not self._has_ps,
            )
            for task in self.tasks
            if not task.has_ended() and task.progress().blocked_in != AT_THE_END
        ]
        hung = self._watchdog.check(statuses)
        if hung is None:
            for line in [*self._watchdog.stragglers(statuses), *self._status.new_straggler()]:
                self.context.display.line(f"tfmw: {line}")
            return None
        late = missing(self._status.exchanges())
        if late is not None:
            self.context.display.line(f"tfmw: {sentence(late, self.tasks, _DUMP_S)}")
            hung = dataclasses.replace(
                hung, task=late.task, reason=f"{hung.reason}; it {late.what}"
            )
        self._dump_stacks()
        return hung

    def _dump_stacks(self) -> None:
        """Makes every task write the stacks of its threads into its log (see `task`)."""
        for task in self.tasks:
            if task.catches(signal.SIGUSR2):
                task.signal_alone(signal.SIGUSR2)
                task.signal_alone(signal.SIGCONT)  # a stopped task then handles the request
        deadline = time.monotonic() + _DUMP_S
        while time.monotonic() < deadline and self._output.pump(_DUMP_S / 3):
            pass

    # ---- restarts of single tasks --------------------------------------------------------------

    def _restart_alone(self) -> bool:
        """Replaces the tasks that failed; returns whether the attempt continues."""
        failed = self._failed()
        if self._stop.received or self._leave_by < _NEVER:
            return False
        if not all(restarts_alone(task.kind, self._has_ps) for task in failed):
            killed = all(not task.error() and is_external(task.status, None) for task in failed)
            if not (self._replaces and killed):
                return False
            reason = why_all_restart(failed, self.tasks, self._elsewhere)
            if reason is not None:
                if any(task.progress().replaceable for task in self.tasks):
                    line = f"tfmw: {failed[0].name} is not replaced alone: {reason}"
                    self.context.display.line(line)
                return False
        for task in failed:
            if not task.has_ended():  # it is exiting, and is killed if that takes too long
                record = task.error()
                if record and time.monotonic() - record["monotonic"] >= _EXIT_S:
                    task.signal(signal.SIGKILL)
                continue
            failure = self._diagnosis.failure(task, task.error())
            replaced = self._replaces and task.kind == "worker"
            if replaced and failure.step > self._replaced_at:
                self._replaced_at, delay_s = failure.step, 0.0
                how = f"{task.name} is replaced (not counted as a restart)"
            else:
                allowed = self.policy.allows_restart_alone(failure)
                if allowed is None:
                    self._due[task.name] = _NEVER
                    continue
                if not allowed:
                    return False
                delay_s = backoff_s(task.restart)
                how = (
                    f"restart {self.policy.restarts} of {self._options.max_restarts} "
                    f"{when(delay_s)}, of {task.name} alone"
                )
            self._replace(task)
            self._due[task.name] = time.monotonic() + delay_s
            self.context.display.line(
                f"tfmw: {how}: it failed in attempt {self.number} after {failure.seconds:.1f} s"
                f"{at_step(failure.step)}: {failure.description}"
            )
        return True

    def _replace(self, task: Task) -> None:
        """Replaces an ended task by a new one, which is not started yet."""
        task.signal(signal.SIGKILL)  # ends processes that the task has started
        self._output.finish(task)
        task.close()
        task.result()  # reads its result, of which the call has none
        new = dataclasses.replace(task, restart=task.restart + 1, pid=0)
        self.tasks[self.tasks.index(task)] = new
        self._replaced.append(task)
        self._watchdog.forget(task.name)

    def _start_due(self) -> None:
        for task in self.tasks:
            if self._due.get(task.name, _NEVER) <= time.monotonic():
                del self._due[task.name]
                task.prepare(self.context.run.payload)
                self._start(task)

    # ---- end -----------------------------------------------------------------------------------

    def end(self, grace_s: float | None = None) -> None:
        """Ends every task and every process that it started. May be called twice.

        Args:
            grace_s: seconds between SIGTERM and SIGKILL; 0: SIGKILL at once; None: the run's grace
                period.
        """
        if self._output.closed:
            return
        grace_s = self.context.run.grace_s if grace_s is None else grace_s
        self._diagnosis.ended_at = min(self._diagnosis.ended_at, time.monotonic())
        self._due.clear()
        if not self._stop.received:
            for line in self._status.killed(self._failed()):
                self.context.display.line(f"tfmw: {line}")
        if grace_s > 0:
            for task in [task for task in self.tasks if not task.has_ended()]:
                task.signal(signal.SIGTERM)
                task.signal(signal.SIGCONT)  # a stopped task then handles the SIGTERM
            deadline = time.monotonic() + grace_s
            while time.monotonic() < deadline and not self._stop.hurry and not self._all_ended():
                self._output.pump(_POLL_S)
        for task in self.tasks:
            task.signal(signal.SIGKILL)
        while not self._all_ended():
            self._output.pump(_POLL_S)
        end_marked(self._env[ATTEMPT_MARK])
        for task in self.tasks:
            self._output.finish(task)
        if self.failures():
            self._status.dump(self._directory / "exchanges.json")
        for task in self.tasks:
            task.close()
        self._output.close()

    def _all_ended(self) -> bool:
        ended = [task.has_ended() for task in self.tasks]  # polls each task, which records the time
        return all(ended)

    # ---- outcome -------------------------------------------------------------------------------

    def failures(self) -> tuple[Failure, ...]:
        """The tasks that failed on their own, the root cause first, without restarted ones."""
        if self._only_lost_preempted_peers():
            return ()
        return self._diagnosis.failures(self.tasks, self._hung)

    def done(self) -> bool:
        """Whether all tasks have ended with status 0; serving ones may have been ended."""
        return all(task.status == 0 for task in self._not_serving() or self.tasks)

    def preempted(self) -> bool:
        """Whether tasks exited with the status that requests another run."""
        return any(task.status == PREEMPTED for task in self.tasks)

    def step(self) -> int:
        """The largest training step that a task has reported; negative if none has."""
        return max((task.progress().step for task in self.tasks), default=-1)

    def division(self) -> Division | None:
        """The first training task's division of the run's time; None if no task trains here."""
        first = next(iter(divisions(self.tasks).values()), None)
        return first and (first.until(goodput.now(), OTHER) if self.done() else first)

    def outcome(self) -> AttemptOutcome:
        """Outcome of the attempt; call it after `end`."""
        return AttemptOutcome(
            failures=self.failures(),
            step=self.step(),
            seconds=min(self._diagnosis.ended_at, time.monotonic()) - self._began_at,
            preempted=self.preempted(),
            signals=tuple(self._stop.received),
            restarted=tuple(self._diagnosis.failure(t, t.error()) for t in self._replaced),
            done=self.done(),
            division=self.division(),
        )

    def results(self) -> dict[str, bytes]:
        """The pickled outcome of the payload's function in each task. Call it once, after `end`."""
        return {task.name: task.result() for task in self.tasks}
