"""All tasks of a local cluster, once: started, watched, ended.

    attempt = Attempt(setting, layout, number=0)
    attempt.start()      # processes, each in a session of its own
    attempt.watch()      # until all are done, one has failed or hangs, or a signal came
    attempt.end()        # TERM, grace, KILL; no process is left
    attempt.failures()   # the cause first

A run is a row of attempts, each with its own ports and folder (see `restart`). Within an attempt
only those tasks are started again that the others can do without meanwhile.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import select
import selectors
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from tfmw.errors import PREEMPTED
from tfmw.launcher import call
from tfmw.launcher.failure import Failure, describe, describe_status, kernel_kills
from tfmw.launcher.output import Display
from tfmw.launcher.process import Task, task_name
from tfmw.launcher.restart import PREEMPT_GRACE_S, Policy, Terms, alone, backoff_s
from tfmw.launcher.spawn import Host
from tfmw.launcher.watchdog import LAG_S, STOPPED_TIMEOUT_S, Sight, Stuck, Watchdog
from tfmw.runtime.ports import reserved_ports
from tfmw.runtime.signals import Signals

GRACE_S = 1.0
"""Seconds between SIGTERM and SIGKILL. TensorFlow's strategy replaces SIGTERM's handler."""

SETTLE_S = 0.5
"""Seconds to wait for the cause where the first failure seen is only a lost peer's echo."""

FAREWELL_S = 10.0
"""Seconds in which serving tasks (ps, and workers beside them) leave once the chief is done."""

POLL_S = 0.01
"""Seconds between two looks while tasks are being ended."""

GUARD_S = 0.2
"""Seconds between two looks at the tasks' progress."""

DUMP_S = 1.0
"""Seconds in which tasks that hang write their stacks."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """What all attempts of a run have in common.

    Args:
        command: the arguments of `task.py`: "script", its path, its flags.
        directory: of the run; each attempt makes its folder in it.
        env: environment of the tasks, without what is particular to each.
        host: starts the processes.
        display: what the tasks write goes there.
        live: name of the task that gets a terminal.
        payload: standard input of each task; with it each task also gets a file for its result.
        stop: says which signal asks to end, and whether to be quick about it.
        terms: what the user allows.
        grace_s: seconds between SIGTERM and SIGKILL.
        farewell_s: seconds in which serving tasks leave once the chief is done.
    """

    command: Sequence[str]
    directory: Path
    env: Mapping[str, str]
    host: Host
    display: Display
    live: str | None
    payload: bytes | None
    stop: Signals
    terms: Terms
    grace_s: float = GRACE_S
    farewell_s: float = FAREWELL_S


class Attempt:
    """One start of all tasks, watched until it is decided how it went, and ended.

    Args:
        setting: of the run.
        layout: (kind, index) of each task.
        number: which attempt of the run, from 0.
        policy: decides on the restarts of tasks by themselves, and counts all.
    """

    def __init__(
        self, setting: Setting, layout: Sequence[tuple[str, int]], number: int, policy: Policy
    ) -> None:
        self.number = number
        self._setting = setting
        self._stop = setting.stop
        self._policy = policy
        self._directory = setting.directory / f"attempt_{number}"
        self._env = {
            **setting.env,
            "TFMW_ATTEMPT": str(number),
            "TFMW_MAX_RESTARTS": str(setting.terms.max_restarts),
        }
        self.tasks = [Task(kind, index, self._directory, self._env) for kind, index in layout]
        self._has_ps = any(task.kind == "ps" for task in self.tasks)
        self._replaced: list[Task] = []  # ended, and started again by themselves
        self._due: dict[str, float] = {}  # when to start again those that wait for it
        self._results: dict[str, IO[bytes]] = {}
        self._selector = selectors.DefaultSelector()
        self._began_at = time.monotonic()
        self._ended_at = float("inf")  # when we began to end the tasks
        self._leave_by: float | None = None  # until when tasks may save their state and leave
        self._watchdog = Watchdog(
            setting.terms.hang_timeout_s,
            setting.terms.start_timeout_s,
            STOPPED_TIMEOUT_S if setting.terms.max_restarts else 0.0,
            lag_s=LAG_S,
        )
        self._next_guard = 0.0
        self._stuck: Stuck | None = None
        self._kernel_kills = kernel_kills()

    # ---- start ---------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts all tasks. The ports are held until the moment before."""
        self._began_at = time.monotonic()
        with contextlib.ExitStack() as inputs:
            prepared = [self._prepare(task, inputs) for task in self.tasks]
            with reserved_ports(sum(task.kind != "evaluator" for task in self.tasks)) as ports:
                self._describe(ports)
            for task, (stdin, fds) in zip(self.tasks, prepared, strict=True):
                self._start(task, stdin, fds)

    def _start(self, task: Task, stdin: IO[bytes] | int, fds: Sequence[int]) -> None:
        setting = self._setting
        live = task.name == setting.live
        task.start(setting.host, setting.command, stdin, live, fds)
        assert task.stream is not None
        self._selector.register(task.stream, selectors.EVENT_READ, task)

    def _prepare(
        self, task: Task, inputs: contextlib.ExitStack
    ) -> tuple[IO[bytes] | int, list[int]]:
        """Standard input and inherited descriptors of a task."""
        if self._setting.payload is None:
            return subprocess.DEVNULL, []
        stdin = inputs.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
        stdin.write(self._setting.payload)
        stdin.seek(0)
        result = tempfile.TemporaryFile()  # noqa: SIM115  (closed in outcomes)
        self._results[task.name] = result
        task.env[call.RESULT_FD] = str(result.fileno())
        return stdin, [result.fileno()]

    def _describe(self, ports: Sequence[int]) -> None:
        """Gives each task its TF_CONFIG and its place."""
        cluster: dict[str, list[str]] = {}
        members = [task for task in self.tasks if task.kind != "evaluator"]
        for task, port in zip(members, ports, strict=True):
            cluster.setdefault(task.kind, []).append(f"127.0.0.1:{port}")
        for rank, task in enumerate(self.tasks):
            own = {"type": task.kind, "index": task.index}
            task.env |= {
                "TF_CONFIG": json.dumps({"cluster": cluster, "task": own}),
                "TFMW_LOCAL_TASKS": str(len(self.tasks)),
                "TFMW_LOCAL_RANK": str(rank),
            }

    # ---- watch ---------------------------------------------------------------------------------

    def watch(self) -> None:
        """Returns when all tasks are done, one has failed or hangs, or the run is to stop."""
        serving = [t.name for t in self.tasks if self._has_ps and t.kind in ("ps", "worker")]
        patience = float("inf")
        while not self._setting.display.broken:
            if self._stop.received and not self._leaving():
                return
            self._pump(self._setting.terms.monitor_interval_s)
            ended = [task.look() for task in self.tasks]
            if any(self._failed(task) for task in self.tasks):
                self._settle()
                if not self._restart_alone() and not self._only_echoes_of_leaving():
                    return
            self._start_due()
            if all(ended) and not self._due:
                return
            if self._left() and self._leave_by is None:
                self._leave_by = time.monotonic() + self._preempt_grace_s()
            if self._leave_by is not None and time.monotonic() >= self._leave_by:
                return
            others = [task for task in self.tasks if task.name not in serving]
            if serving and all(t.look() and t.name not in self._due for t in others):
                patience = min(patience, time.monotonic() + self._setting.farewell_s)
                if time.monotonic() >= patience:
                    return
            if self._guard():
                return

    def _leaving(self) -> bool:
        """Whether tasks are given the time to save their state and leave, as the signal asks.

        One task is told. Those that train together agree on the step after which all leave.
        """
        if not self._stop.asks_to_leave:
            return False
        if self._leave_by is None:
            running = [task for task in self.tasks if not task.look()]
            if not running or not self._saves_state(running):
                return False
            self._leave_by = time.monotonic() + self._preempt_grace_s()
            running[0].signal_alone(signal.SIGTERM)
        return time.monotonic() < self._leave_by

    def _saves_state(self, running: Sequence[Task]) -> bool:
        """Whether tasks are to be expected to save their state when they are told to leave.

        TensorFlow handles SIGTERM in every task, to no end; so it is SIGUSR1 that tells.
        """
        terms = self._setting.terms
        asked = terms.max_restarts > 0 or terms.preempt_grace_s is not None
        return asked or any(task.catches(signal.SIGUSR1) for task in running)

    def _preempt_grace_s(self) -> float:
        grace_s = self._setting.terms.preempt_grace_s
        return PREEMPT_GRACE_S if grace_s is None else grace_s

    def _left(self) -> bool:
        return any(task.status == PREEMPTED for task in self.tasks)

    def _only_echoes_of_leaving(self) -> bool:
        """Whether those that failed have only lost a peer that saved its state and left."""
        failed = [task for task in self.tasks if self._failed(task)]
        return self._left() and all(_is_secondary(task.error()) for task in failed)

    def _failed(self, task: Task) -> bool:
        """Whether the task failed by itself, not because we ended it."""
        if task.status is not None and task.ended <= self._ended_at:
            return task.status not in (0, PREEMPTED)
        # It told of its end, and may hang in the threads or atexit handlers it leaves by.
        record = task.error()
        return record is not None and record["fatal"] and record["monotonic"] <= self._ended_at

    def _settle(self) -> None:
        """Gives those that failed a moment to leave by themselves, and the cause one to show.

        The first task to die may be one that only lost the task that is to blame.
        """
        deadline = time.monotonic() + SETTLE_S
        while time.monotonic() < deadline and not self._stop.received and not self._all_ended():
            failed = [task for task in self.tasks if self._failed(task)]
            known = not all(_is_secondary(task.error()) for task in failed)
            if known and all(task.look() for task in failed):
                return
            self._pump(POLL_S)

    def _guard(self) -> bool:
        """Looks after hanging and lagging tasks; whether a task hangs."""
        if time.monotonic() < self._next_guard:
            return False
        self._next_guard = time.monotonic() + GUARD_S
        terms = self._setting.terms
        sights = [
            Sight(
                task.name,
                *task.progress(),
                stopped=terms.max_restarts > 0 and task.stopped(),
                must_join=not self._has_ps,
            )
            for task in self.tasks
            if not task.look()
        ]
        self._stuck = self._watchdog.look(sights)
        if self._stuck is not None:
            self._dump_stacks()
            return True
        for line in self._watchdog.stragglers(sights):
            self._setting.display.line(f"tfmw: {line}")
        return False

    def _dump_stacks(self) -> None:
        """Has every task write the stacks of its threads into its log (see `task`)."""
        for task in self.tasks:
            if task.catches(signal.SIGUSR2):
                task.signal_alone(signal.SIGUSR2)
                task.signal_alone(signal.SIGCONT)  # a stopped task sees it then
        deadline = time.monotonic() + DUMP_S
        while time.monotonic() < deadline and self._pump(DUMP_S / 3):
            pass

    # ---- one task by itself --------------------------------------------------------------------

    def _restart_alone(self) -> bool:
        """Replaces the tasks that failed, where each may be started again by itself."""
        failed = [task for task in self.tasks if self._failed(task)]
        if self._stop.received or self._leave_by is not None:
            return False
        if not all(alone(task.kind, self._has_ps) and task.look() for task in failed):
            return False
        for task in failed:
            failure = self._failure(task, task.error())
            if not self._policy.allows(failure):
                return False
            self._retire(task)
            new = Task(task.kind, task.index, self._directory, self._env, task.restart + 1)
            for name in ("TF_CONFIG", "TFMW_LOCAL_TASKS", "TFMW_LOCAL_RANK"):
                new.env[name] = task.env[name]
            self.tasks[self.tasks.index(task)] = new
            self._replaced.append(task)
            self._watchdog.forget(task.name)
            delay_s = backoff_s(task.restart)
            self._due[new.name] = time.monotonic() + delay_s
            when = f"in {delay_s:g} s" if delay_s else "at once"
            self._setting.display.line(
                f"tfmw: restart {self._policy.restarts} of {self._setting.terms.max_restarts} "
                f"{when}, of {task.name} alone: it failed in attempt {self.number} after "
                f"{failure.seconds:.1f} s: {failure.what}"
            )
        return True

    def _start_due(self) -> None:
        for task in self.tasks:
            if self._due.get(task.name, float("inf")) <= time.monotonic():
                del self._due[task.name]
                with contextlib.ExitStack() as inputs:
                    self._start(task, *self._prepare(task, inputs))

    def _retire(self, task: Task) -> None:
        """Ends what an ended task left, and shows the rest of its output."""
        task.signal(signal.SIGKILL)
        if task.stream is not None and task.stream in self._selector.get_map():
            while select.select([task.stream], [], [], 0)[0] and (data := task.read()):
                self._setting.display.feed(task.name, data)
            self._selector.unregister(task.stream)
            self._setting.display.feed(task.name, b"", final=True)
        task.close()

    # ---- end -----------------------------------------------------------------------------------

    def end(self, grace_s: float | None = None) -> None:
        """Ends every task and every process they left: TERM, grace, KILL. Safe to call twice.

        Args:
            grace_s: seconds between SIGTERM and SIGKILL, by default those of the run; 0: no TERM.
        """
        if self._selector.get_map() is None:  # closed
            return
        grace_s = self._setting.grace_s if grace_s is None else grace_s
        self._ended_at = min(self._ended_at, time.monotonic())
        self._due.clear()
        if grace_s > 0:
            for task in [task for task in self.tasks if not task.look()]:
                task.signal(signal.SIGTERM)
                task.signal(signal.SIGCONT)  # a stopped task sees the SIGTERM
            deadline = time.monotonic() + grace_s
            while time.monotonic() < deadline and not self._stop.hurry and not self._all_ended():
                self._pump(POLL_S)
        for task in self.tasks:
            task.signal(signal.SIGKILL)
        while not self._all_ended():
            self._pump(POLL_S)
        self._drain()
        for task in self.tasks:
            task.close()
        self._selector.close()

    def failures(self) -> tuple[Failure, ...]:
        """The tasks that failed on their own, the cause first; not those that came back."""
        if self._only_echoes_of_leaving():
            return ()
        failed = [(task, task.error()) for task in self.tasks if self._failed(task)]
        if failed and all(_is_secondary(record) for _, record in failed):
            # The cause may be in a task that told of its error and hung instead of leaving.
            failed += [
                (task, record)
                for task in self.tasks
                if not self._failed(task)
                and (record := task.error()) is not None
                and record["monotonic"] <= self._ended_at
            ]
        failed.sort(key=lambda pair: (_is_secondary(pair[1]), _failed_at(*pair)))
        found = [self._failure(task, record) for task, record in failed]
        if self._stuck is not None:
            found = [f for f in found if f.task != self._stuck.task]
            found.insert(0, self._stuck_failure(self._stuck))
        return tuple(found)

    def came_back(self) -> tuple[Failure, ...]:
        """The failures of tasks that were started again by themselves, in order."""
        return tuple(self._failure(task, task.error()) for task in self._replaced)

    def step(self) -> int:
        """The largest training step that a task has reported; negative: none."""
        return max((task.progress().step for task in self.tasks), default=-1)

    def left(self) -> bool:
        """Whether tasks left with the status that asks to be run again."""
        return self._left()

    def seconds(self) -> float:
        """How long the attempt took."""
        return min(self._ended_at, time.monotonic()) - self._began_at

    def outcomes(self) -> dict[str, call.Outcome | None]:
        """What the function that was the payload gave in each task. Once, after `end`."""
        found = {}
        for name, file in self._results.items():
            with file:
                found[name] = call.outcome(file)
        return found

    def _failure(self, task: Task, record: Mapping[str, Any] | None) -> Failure:
        # A task that told of its error and then had to be ended shows a status that isn't its own.
        own = task.status is not None and task.ended <= self._ended_at
        kills = kernel_kills() - self._kernel_kills
        how = describe_status(task.status, kills) if own else ""
        error, how, detail = describe(record, how, task.log)
        return Failure(
            task=task.name,
            error=error,
            status=task.status or 0,
            how=how,
            detail=detail,
            log=task.log,
            seconds=_failed_at(task, record) - task.started,
            usage=bool(record and record["usage"]),
            attempt=self.number,
            step=task.progress().step,
        )

    def _stuck_failure(self, stuck: Stuck) -> Failure:
        task = next(task for task in self.tasks if task.name == stuck.task)
        return dataclasses.replace(
            self._failure(task, None),
            error=stuck.why,
            how="",
            seconds=self._ended_at - task.started,
        )

    # ---- output --------------------------------------------------------------------------------

    def _all_ended(self) -> bool:
        looks = [task.look() for task in self.tasks]  # at every one, for the time of its end
        return all(looks)

    def _pump(self, timeout_s: float) -> bool:
        """Passes on what the tasks wrote; returns whether there was anything."""
        ready = self._selector.select(timeout_s) if self._selector.get_map() else []
        if not ready and not self._selector.get_map():
            time.sleep(timeout_s)
        for key, _ in ready:
            task: Task = key.data
            data = task.read()
            self._setting.display.feed(task.name, data, final=not data)
            if not data:
                self._selector.unregister(key.fd)
        return bool(ready)

    def _drain(self) -> None:
        """Passes on the rest. Someone outside the groups may hold a stream open: no waiting."""
        while self._selector.get_map() and self._pump(0):
            pass
        for key in list(self._selector.get_map().values()):
            self._setting.display.feed(key.data.name, b"", final=True)


def wait(
    seconds: float, stop: Signals, sleep: Callable[[float], None] = time.sleep, step_s: float = 0.05
) -> None:
    """Waits before the next attempt, and no longer once a signal came."""
    while seconds > 0 and not stop.received:
        sleep(min(step_s, seconds))
        seconds -= step_s


def _is_secondary(record: Mapping[str, Any] | None) -> bool:
    return bool(record and record["secondary"])


def _failed_at(task: Task, record: Mapping[str, Any] | None) -> float:
    return float(record["monotonic"]) if record else task.ended


__all__ = ["Attempt", "Setting", "task_name", "wait"]
