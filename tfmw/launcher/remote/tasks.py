"""The tasks of one machine: prepared, started, watched and ended, one attempt after the other.

    tasks = TasksOfOneMachine(context)
    tasks.prepare(count=2)
    tasks.look(0.05)              # Ready((12001, 12002)) once tasks can start at once
    tasks.do(Start(...))
    tasks.look(0.05)              # RestartRequest(...), which a RestartReply answers
    tasks.look(0.05)              # Ended(...) once none of them runs

A supervisor uses this class, and so does an engine's agent, whose machine has one task.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Mapping

from tfmw.cluster.sockets import reserved_ports
from tfmw.launcher.attempt import Attempt, AttemptContext
from tfmw.launcher.failure import Failure
from tfmw.launcher.remote import messages
from tfmw.observe.goodput import Division
from tfmw.observe.trackers import RUN_ID


@dataclasses.dataclass(eq=False)
class TasksOfOneMachine:
    """An attempt's tasks on one machine, driven by the process that leads the attempt."""

    context: AttemptContext  # context of all attempts
    # variables that replace those of the run
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    settle_s: float = 0.0  # see `Attempt`; 0: the cause may be on another machine

    def __post_init__(self) -> None:
        self._attempt: Attempt | None = None
        # tasks that the leader ended, which `look` still has to report
        self._ended: messages.Ended | None = None
        self._ports = contextlib.ExitStack()
        self._wanted = 0  # number of ports, until they are prepared
        self._ready_by = 0.0
        self._preempts = False
        self.restarts = 0
        """Restarts of single tasks that the run has used, as far as this machine knows."""
        self._requests: list[str] = []  # tasks for which the leader must be asked
        self._replies: dict[str, bool | None] = {}  # None: no reply yet
        self._calling = 0  # number of the call that runs in a task that stays

    @property
    def idle(self) -> bool:
        """Whether there is nothing to watch: no task runs, and none is being prepared."""
        return self._attempt is None and not self._wanted

    @property
    def step(self) -> int:
        """The largest training step that a running task has reported; negative: none."""
        return -1 if self._attempt is None else self._attempt.step()

    @property
    def division(self) -> Division | None:
        """A running task's division of the run's time; None if no task trains here."""
        return None if self._attempt is None else self._attempt.division()

    def prepare(self, count: int) -> None:
        """Starts to prepare tasks that need `count` ports."""
        self._wanted = count
        timeout_s = self.context.run.options.start_timeout_s or float("inf")
        self._ready_by = time.monotonic() + timeout_s

    def do(self, message: messages.FromLeader) -> None:
        """Executes a request of the leader at once."""
        match message:
            case messages.Start():
                self._start(message)
            case messages.Call(number=number, body=body):
                if self._attempt is not None:
                    self._calling = number
                    self._attempt.tasks[0].call([body])
            case messages.RestartReply():
                self.restarts = message.restarts
                self._replies[message.task] = message.allowed
            case messages.Leave():  # as soon as they can
                self._preempts = True
            case messages.End():
                self._ended = self.end() or self._ended

    def _start(self, start: messages.Start) -> None:
        self.restarts, self._requests, self._replies = 0, [], {}
        context = self.context
        # The run of a tracker continues if another host has the chief.
        run = {} if context.env.get(RUN_ID) or not start.run else {RUN_ID: start.run}
        if start.again:  # each start has a folder of its own
            folder = context.directory / f"again_{start.again}"
            context = dataclasses.replace(context, directory=folder)
        self._attempt = Attempt(
            context,
            start.tasks,
            start.attempt,
            self,
            cluster=start.cluster,
            settle_s=self.settle_s,
            env={**run, **self.env},
            before={"": start.division} if start.division else {},
        )
        self._preempts = False
        self._ports.close()  # they were held until now
        self._attempt.start()

    def allows_restart_alone(self, failure: Failure) -> bool | None:
        """Whether a dead task restarts alone; None if the leader has not replied yet.

        The leader decides, as it counts the restarts of all machines; it is asked once each time.
        """
        if failure.usage:
            return False
        if failure.task not in self._replies:
            self._replies[failure.task] = None
            self._requests.append(failure.task)
        reply = self._replies[failure.task]
        if reply is not None:
            del self._replies[failure.task]  # it may die again
        return reply

    def end(self) -> messages.Ended | None:
        """Ends the tasks at once; returns their report, if any ran."""
        attempt, self._attempt = self._attempt, None
        if attempt is None:
            return None
        attempt.poll(0.0)  # tasks that have failed until now failed by themselves
        attempt.end(0.0)
        body = b"".join(attempt.results().values())  # at most one task has a result
        outcome = attempt.outcome()
        failures = tuple(
            dataclasses.replace(f, error=f.error[:2000], detail=tuple(x[:500] for x in f.detail))
            for f in outcome.failures
        )
        return messages.Ended(attempt.number, dataclasses.replace(outcome, failures=failures), body)

    def look(
        self, wait_s: float
    ) -> messages.Ready | messages.RestartRequest | messages.Answer | messages.Ended | None:
        """Polls the tasks once; returns a message for the leader. Does not wait if it is `idle`.

        Args:
            wait_s: seconds to wait for output of the tasks.
        """
        if self._ended is not None:
            ended, self._ended = self._ended, None
            return ended
        attempt = self._attempt
        if attempt is not None:
            if self._preempts and attempt.ask_to_leave():
                self._preempts = False
            if attempt.poll(wait_s):
                return self.end()
            if self._calling and attempt.tasks[0].has_answered():
                number, self._calling = self._calling, 0
                attempt.stay()  # its output comes before the answer
                return messages.Answer(number, attempt.tasks[0].result())
            if not self._requests:
                return None
            return messages.RestartRequest(attempt.number, self._requests.pop(0))
        spawner = self.context.spawner
        if not self._wanted or not (spawner.is_ready(wait_s) or time.monotonic() > self._ready_by):
            return None
        spawner.wait([], 0.0)  # a fork server that is late is not used
        count, self._wanted = self._wanted, 0
        self._ports.close()
        return messages.Ready(tuple(self._ports.enter_context(reserved_ports(count))))

    def close(self) -> None:
        """Ends all tasks and frees all resources."""
        self.end()
        self._ports.close()
