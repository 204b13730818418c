"""Controller's side of one attempt: its tasks are gathered, checked, started and watched.

    attempt = JobAttempt(spec, tasks, folder, links, display, number=0, count=8)
    attempt.start(port)                     # the engine starts the tasks, which connect
    for event in inbox: attempt.handle(*event)
    attempt.look()                          # whether it is over
    attempt.ending                          # the result: see `tfmw.launcher.remote.remote_attempt`

Events come in, messages go out; nothing here waits, so the controller remains responsive.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tfmw.cluster import addresses
from tfmw.launcher.engines import own_files
from tfmw.launcher.engines.engine import Contact, JobSpec, Tasks
from tfmw.launcher.engines.job import BACKUP
from tfmw.launcher.options import FAREWELL_S
from tfmw.launcher.output import Display
from tfmw.launcher.process import task_name
from tfmw.launcher.remote import messages
from tfmw.launcher.remote.links import Links
from tfmw.launcher.remote.remote_attempt import RemoteAttempt
from tfmw.launcher.restart import RestartPolicy

LIVE = "live"
"""Name, for `Display`, of the first task if its output is for a terminal."""

SETTLE_S = 3.0
"""Seconds to wait for the cause if the first failures only report a lost task."""

LOST_S = 2.0
"""Seconds in which a task that the engine has lost may still report the reason."""


@dataclasses.dataclass
class TaskState:
    """One task: its hello, its last step, and its result."""

    hello: messages.AgentHello
    step: int = -1
    result: bytes = b""


@dataclasses.dataclass
class JobAttempt:
    """All tasks of one attempt, by their ranks; `ending` collects their ends.

    A connection's name is (number of the attempt, rank).
    """

    spec: JobSpec
    tasks: Tasks
    folder: Path  # directory of the job's files
    links: Links
    display: Display  # display of the tasks' output
    number: int
    count: int  # number of tasks
    policy: RestartPolicy  # counts restarts of single tasks
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self.phase = "gathering"
        self.layout = self.spec.layout(self.count)
        self.members: dict[int, TaskState] = {}
        self.answers: dict[int, bytes] = {}  # outcomes of the last call of tasks that stay
        self._cut: set[int] = set()  # tasks whose connections were lost
        self._gone: dict[int, float] = {}  # times of the first sign that a task is lost
        self.notices: dict[int, str] = {}  # notices that tasks have got themselves; see `Tasks`
        self._backup = ""  # name of the newest backup that the job keeps
        now, options = self.clock(), self.spec.setup.options
        self._start_by = now + (options.start_timeout_s or math.inf)
        self.ending = RemoteAttempt(
            self.number,
            set(range(self.count)),
            options,
            self.label,
            now,
            SETTLE_S,
            self.policy.division,
        )

    # ---- start -----------------------------------------------------------------------------------

    def start(self, port: int) -> None:
        """Starts the tasks through the engine; they connect to the port."""
        contact = Contact(self.tasks.hosts(), port, self.spec.token, self.number)
        self.tasks.start(self.layout, contact)

    def handle(self, event: str, name: tuple[int, int], *what: Any) -> None:
        """Processes an event of a connection."""
        number, rank = name
        known = number == self.number and rank in self.members
        match event, *what:
            case "from_member", messages.AgentHello() as hello:
                if known or number != self.number or self.phase != "gathering":
                    self.links.to_member(name, messages.End(self.number))  # it has its tasks
                    return
                self.members[rank] = TaskState(hello)
                if len(self.members) == self.count:
                    self._check()
            case "from_member", message if known:
                self._receive(rank, self.members[rank], message)
            case "member_lost", _ if known:
                self._cut.add(rank)

    def _receive(self, rank: int, member: TaskState, message: messages.Message) -> None:
        match message:
            case messages.Output(final=final, body=body):
                live = self.spec.setup.live and rank == 0
                self.display.feed(LIVE if live else self.label(rank), body, final)
            case messages.Line(text=text):
                self.display.line(text)
            case messages.StepReached(step=step, division=division):
                member.step = step
                self.ending.reached(rank, step, division)
            case messages.BackupFiles(name=name, body=body):
                own_files.write(self.folder / BACKUP, body)
                self._backup = name
            case messages.Leaving():
                self.notices[rank] = "its machine will end"
            case messages.RestartRequest(attempt=attempt, task=task):
                goes_on = math.isinf(self.ending.end_at)
                allowed = goes_on and self.policy.allows_restart_alone()
                reply = messages.RestartReply(attempt, task, allowed, self.policy.restarts)
                self._send(rank, reply)
            case messages.Answer(body=body):
                self.answers[rank] = body
            case messages.Ended(report=report, body=body):
                member.result = body
                now, reports = self.clock(), self.ending.reports
                self.ending.ended(rank, report, now, task=self.label(rank))
                self._send(rank, messages.End(message.attempt))
                if all(r in reports and reports[r].done for r in self._not_serving()):
                    self.ending.succeeded(now, FAREWELL_S)

    def _in_order(self) -> list[TaskState]:
        return [self.members[rank] for rank in sorted(self.members)]

    def _send(self, rank: int, message: messages.Message) -> None:
        self.links.to_member((self.number, rank), message)

    def _check(self) -> None:
        """Compares versions; starts the tasks if all are the same."""
        for rank in range(self.count):
            hello = self.members[rank].hello
            for name, expected in self.spec.facts.items():
                found = hello.facts.get(name, "none")
                if found != expected:
                    problem = (
                        f"{name} is {found} on {hello.host}, and {expected} where "
                        "the job was submitted: install the same version on all machines."
                    )
                    now = self.clock()
                    fields = {"error": problem, "usage": True, "external": False}
                    self.ending.fail(self.ending.failure(rank, now, **fields), now)
                    return
        self._run()

    def _run(self) -> None:
        """Sends the cluster to all tasks, which then start."""
        self.phase = "running"
        spec, hellos = self.spec, [member.hello for member in self._in_order()]
        cluster: dict[str, tuple[str, ...]] = {}
        for (kind, _), hello in zip(self.layout, hellos, strict=True):
            if kind != "evaluator":
                address = addresses.joined(hello.address, hello.port)
                cluster[kind] = (*cluster.get(kind, ()), address)
        if backup := own_files.read(self.folder, BACKUP):
            self._send(0, messages.BackupFiles("", backup))
        for rank, hello in enumerate(hellos):
            here = [r for r, other in enumerate(hellos) if other.address == hello.address]
            own_env = {
                "TFMW_LOCAL_TASKS": str(len(here)),
                "TFMW_LOCAL_RANK": str(here.index(rank)),
            }
            start = messages.Start(
                run="",
                attempt=self.number,
                hosts=tuple(range(self.count)),
                cluster=cluster,
                tasks=(self.layout[rank],),
                division=self.ending.before,
            )
            live = spec.setup.live and rank == 0
            setup = dataclasses.replace(spec.setup, start=start, own_env=own_env, live=live)
            self._send(rank, setup)

    # ---- watch -----------------------------------------------------------------------------------

    def label(self, rank: int) -> str:
        """The task's name in the output: "worker 1 on h2"; "worker 1" before it has connected."""
        name, member = task_name(*self.layout[rank]), self.members.get(rank)
        return f"{name} on {member.hello.host}" if member else name

    def _not_serving(self) -> list[int]:
        """Ranks of the tasks that run the program to its end."""
        serving = ("ps", "worker") if self.spec.ps else ()
        return [rank for rank, (kind, _) in enumerate(self.layout) if kind not in serving]

    def look(self) -> bool:
        """Checks for lost tasks, and the time; returns whether the attempt is over."""
        now, attempt, told = self.clock(), self.ending, self.tasks.lost()
        for rank in sorted(attempt.running & (told.keys() | self._cut)):
            # The task may still report why it ended, or the engine why the connection was lost.
            known = rank not in self.members or (rank in told and rank in self._cut)
            limit_s = self.tasks.tells_s if rank in self._cut else LOST_S
            if now - self._gone.setdefault(rank, now) >= limit_s or known:
                attempt.lost(rank, told.get(rank, "its connection was lost"), now)
        if self.phase == "gathering" and now > self._start_by:
            rank = next(r for r in itertools.count() if r not in self.members)
            limit = self.spec.setup.options.start_timeout_s
            attempt.lost(rank, f"has not connected within {limit:g} s of its start", now)
        return attempt.must_end(now) or not attempt.running

    def call(self, number: int, body: bytes) -> None:
        """Sends a call to all tasks, which stay; `answers` gets its outcomes."""
        self.answers = {}
        for rank in self.members:
            self._send(rank, messages.Call(number, body))

    # ---- end -------------------------------------------------------------------------------------

    def ask_to_leave(self) -> None:
        """Asks the tasks to save their state and leave."""
        if self.members:
            self._send(min(self.members), messages.Leave(self.number))

    def end(self) -> None:
        """Ends all tasks, once, without waiting for their last messages."""
        if self.phase == "ended":
            return
        self.phase = "ended"
        for rank in self.members:
            self._send(rank, messages.End(self.number))
        self.tasks.end()
        for rank in self.members:
            self.links.drop((self.number, rank))

    def results(self) -> dict[str, bytes]:
        """The pickled result of the function in each task that does not serve, by its name."""
        ranks = self._not_serving() if self.ending.has_succeeded else sorted(self.members)
        return {self.label(rank): self.members[rank].result for rank in ranks}

    def details(self) -> dict[str, Any]:
        """Fields of the job's status that describe this attempt."""
        members = self._in_order()
        return {
            "attempt": self.number,
            "workers": sum(kind == "worker" for kind, _ in self.layout),
            "tasks": [task_name(*task) for task in self.layout],
            "hosts": [member.hello.host for member in members],
            "step": self.ending.step,
            "steps": [member.step for member in members],
            **({"backup": self._backup} if self._backup else {}),
            **({"goodput": line} if (line := self.ending.goodput()) else {}),
        }
