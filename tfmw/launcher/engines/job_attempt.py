"""Controller's side of one attempt: its tasks are gathered, checked, started and watched.

    attempt = JobAttempt(spec, tasks, links, display, number=0, count=8)
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
from collections.abc import Callable, Hashable
from typing import Any

from tfmw.cluster import addresses
from tfmw.launcher.engines.engine import Contact, JobSpec, Tasks
from tfmw.launcher.output import Display
from tfmw.launcher.remote import messages
from tfmw.launcher.remote.links import Links
from tfmw.launcher.remote.remote_attempt import RemoteAttempt
from tfmw.observe.goodput import Division

LIVE = "live"
"""Name, for `Display`, of the first task if its output is for a terminal."""

SETTLE_S = 3.0
"""Seconds to wait for the cause if the first failures only report a lost task."""

LOST_S = 2.0
"""Seconds in which a task that the engine has lost may still report the reason."""


@dataclasses.dataclass
class TaskState:
    """One task: the name of its connection, its hello, and its result."""

    name: Hashable
    hello: messages.AgentHello
    step: int = -1
    result: bytes = b""


@dataclasses.dataclass
class JobAttempt:
    """All tasks of one attempt; `ending` collects their ends."""

    spec: JobSpec
    tasks: Tasks
    links: Links
    display: Display  # display of the tasks' output
    number: int
    count: int  # number of tasks
    division: Division | None = None  # division of the run's time until now; None: unknown
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self.phase = "gathering"
        self.members: dict[int, TaskState] = {}
        self._ranks: dict[Hashable, int] = {}
        self._lost_at: dict[int, float] = {}
        self._cut: dict[int, float] = {}  # times at which connections were lost
        self._unseen = set(range(self.count))  # tasks whose directories have not been checked
        self._backup = ""  # name of the newest backup that the job keeps
        now, options = self.clock(), self.spec.setup.options
        self._start_by = now + (options.start_timeout_s or math.inf)
        self.ending = RemoteAttempt(
            self.number, set(range(self.count)), options, self.label, now, SETTLE_S, self.division
        )

    # ---- start -----------------------------------------------------------------------------------

    def start(self, port: int) -> None:
        """Starts the tasks through the engine; they connect to the port."""
        contact = Contact(self.tasks.hosts(), port, self.spec.token, self.number)
        self.tasks.start(self.count, contact)

    def handle(self, event: str, name: Hashable, *what: Any) -> None:
        """Processes an event of a connection."""
        rank = self._ranks.get(name)
        if event == "from_member" and rank is None:
            self._welcome(name, *what)
        elif event == "from_member" and rank is not None:
            self._receive(rank, self.members[rank], *what)
        elif event == "member_lost" and rank is not None:
            self._cut[rank] = self.clock()
            self._look_at_cut()

    def _welcome(self, name: Hashable, hello: messages.Message) -> None:
        if (
            isinstance(hello, messages.AgentHello)
            and hello.attempt == self.number
            and self.phase == "gathering"
            and hello.rank not in self.members
        ):
            self._ranks[name] = hello.rank
            self.members[hello.rank] = TaskState(name, hello)
            if len(self.members) == self.count:
                self._check()
        else:
            self.links.to_member(name, messages.Refused("this attempt has its tasks"))

    def _receive(self, rank: int, member: TaskState, message: messages.Message) -> None:
        match message:
            case messages.Looked() if self.phase == "checking":
                self._looked(rank, message)
            case messages.Output(final=final, body=body):
                live = self.spec.setup.live and rank == 0
                self.display.feed(LIVE if live else self.label(rank), body, final)
            case messages.Line(text=text):
                self.display.line(text)
            case messages.StepReached(step=step, division=division):
                member.step = step
                self.ending.reached(rank, step, division)
            case messages.BackupFiles(name=name, body=body):
                self.tasks.keep(body)
                self._backup = name
            case messages.Ended(report=report, body=body):
                member.result = body
                self.ending.ended(rank, report, self.clock(), task=self.label(rank))
                self._send(rank, messages.End(message.attempt))

    def _in_order(self) -> list[TaskState]:
        return [self.members[rank] for rank in sorted(self.members)]

    def _send(self, rank: int, message: messages.Message) -> None:
        self.links.to_member(self.members[rank].name, message)

    def _check(self) -> None:
        """Compares versions, and makes the tasks check the directories that they share."""
        self.phase = "checking"
        for rank in range(self.count):
            hello = self.members[rank].hello
            for name, expected in self.spec.facts.items():
                found = hello.facts.get(name, "none")
                if found != expected:
                    self._fail(
                        rank,
                        f"{name} is {found} on {hello.host}, and {expected} where "
                        "the job was submitted: install the same version on all machines.",
                    )
                    return
        if self._shared():
            self._send(0, messages.Look(self._shared(), {}, ""))
        else:
            self._run()

    def _shared(self) -> dict[str, str]:
        return {k: v for k, v in self.spec.directories.items() if "://" not in v}

    def _looked(self, rank: int, looked: messages.Looked) -> None:
        if looked.problems:
            self._fail(rank, looked.problems[0] + ".")
            return
        self._unseen.discard(rank)
        if rank == 0:
            for other in self._unseen:
                self._send(other, messages.Look(self._shared(), looked.names, chief=self.label(0)))
        if not self._unseen:
            self._run()

    def _run(self) -> None:
        """Sends the cluster to all tasks, which then start."""
        self.phase = "running"
        spec, hellos = self.spec, [member.hello for member in self._in_order()]
        cluster = {"worker": tuple(addresses.joined(h.address, h.port) for h in hellos)}
        backup = self.tasks.kept()
        if backup:
            self._send(0, messages.BackupFiles("", backup))
        for rank, hello in enumerate(hellos):
            here = [r for r, other in enumerate(hellos) if other.address == hello.address]
            own_env = {
                "TFMW_LOCAL_TASKS": str(len(here)),
                "TFMW_LOCAL_RANK": str(here.index(rank)),
            }
            live = spec.setup.live and rank == 0
            self._send(rank, dataclasses.replace(spec.setup, own_env=own_env, live=live))
            start = messages.Start(
                run="",
                attempt=self.number,
                hosts=tuple(range(self.count)),
                cluster=cluster,
                tasks=(("worker", rank),),
                division=self.ending.before,
            )
            self._send(rank, start)

    # ---- watch -----------------------------------------------------------------------------------

    def label(self, rank: int) -> str:
        """The task's name in the output: "worker 1 on h2"; "worker 1" before it has connected."""
        member = self.members.get(rank)
        return f"worker {rank} on {member.hello.host}" if member else f"worker {rank}"

    def look(self) -> bool:
        """Checks for lost tasks, and the time; returns whether the attempt is over."""
        now, attempt = self.clock(), self.ending
        for rank, why in self._look_at_cut().items():
            # A connected task may still report why it ended.
            patience = LOST_S if rank in self.members else -1.0
            if rank in attempt.running and now - self._lost_at.setdefault(rank, now) > patience:
                attempt.lost(rank, why, now)
        if self.phase == "gathering" and now > self._start_by:
            rank = next(r for r in itertools.count() if r not in self.members)
            limit = self.spec.setup.options.start_timeout_s
            attempt.lost(rank, f"has not connected within {limit:g} s of its start", now)
        return attempt.must_end(now) or not attempt.running

    def _look_at_cut(self) -> dict[int, str]:
        """Ends tasks whose connection was lost; returns the reasons that the engine has."""
        now, told = self.clock(), self.tasks.lost()
        for rank, since in self._cut.items():
            if rank in self.ending.running and (rank in told or now - since >= self.tasks.tells_s):
                self.ending.lost(rank, told.get(rank, "its connection was lost"), now)
        return told

    def _fail(self, rank: int, problem: str) -> None:
        """Ends the attempt and the run, for a problem that no restart can solve."""
        now = self.clock()
        found = self.ending.failure(rank, now, error=problem, usage=True, external=False)
        self.ending.fail(found, now)

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
        for member in self.members.values():
            self.links.drop(member.name)

    def results(self) -> dict[str, bytes]:
        """The pickled result of each task's function, by the task's name."""
        return {self.label(rank): self.members[rank].result for rank in sorted(self.members)}

    def details(self) -> dict[str, Any]:
        """Fields of the job's status that describe this attempt."""
        members = self._in_order()
        return {
            "attempt": self.number,
            "workers": self.count,
            "hosts": [member.hello.host for member in members],
            "step": self.ending.step,
            "steps": [member.step for member in members],
            **({"backup": self._backup} if self._backup else {}),
            **({"goodput": line} if (line := self.ending.goodput()) else {}),
        }
