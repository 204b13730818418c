"""One attempt of a job, from the controller's side: its tasks gathered, checked, started, watched.

    members = Members(spec, tasks, display, number=0, count=8)
    members.start(server.port)              # the engine starts the tasks
    for event in inbox: members.handle(*event)
    members.phase                           # "gathering", "checking", "running", "ended"
    members.outcome()                       # for the restart policy

Events come in, messages go out; nothing here waits, so the controller remains responsive.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from tfmw.cluster import addresses
from tfmw.engines.engine import Contact, JobSpec, Tasks
from tfmw.launcher.failure import Failure
from tfmw.launcher.output import Display
from tfmw.launcher.preemption import GRACE_S
from tfmw.launcher.restart import AttemptOutcome
from tfmw.remote.links import Links
from tfmw.remote.messages import (
    Backup,
    End,
    Ended,
    Hello,
    Leave,
    Line,
    Look,
    Looked,
    Mark,
    Marked,
    Message,
    Output,
    Progress,
    Refused,
    Report,
    Setup,
    Start,
    Taken,
)
from tfmw.remote.outcome import outcome_of

LIVE = "live"
"""The name, for `Display`, of the first task where its output is for a terminal."""

SETTLE_S = 3.0
"""Seconds to wait for the cause where the first failures only report a lost task."""

LOST_S = 2.0
"""Seconds in which a task that the engine has lost may still report why it ended."""


@dataclasses.dataclass
class Member:
    """One task: its hello, the name of its connection, and how it ended."""

    name: Hashable
    hello: Hello
    looked: bool = False
    step: int = -1
    report: Report | None = None
    result: bytes = b""
    lost: str = ""

    @property
    def over(self) -> bool:
        """Whether nothing more is to come."""
        return self.report is not None or bool(self.lost)


class Members:
    """All tasks of one attempt.

    Args:
        spec: of the job.
        tasks: the engine's side.
        links: to the tasks.
        display: prints the tasks' output.
        number: of the attempt.
        count: of the tasks.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        spec: JobSpec,
        tasks: Tasks,
        links: Links,
        display: Display,
        number: int,
        count: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.number = number
        self.count = count
        self.phase = "gathering"
        self.members: dict[int, Member] = {}
        self._spec = spec
        self._tasks = tasks
        self._links = links
        self._display = display
        self._clock = clock
        self._ranks: dict[Hashable, int] = {}
        self._failures: list[Failure] = []
        self._lost_at: dict[int, float] = {}
        self._settled_at = float("inf")
        self._leave_by = float("inf")
        self._backup = ""  # the newest that the job keeps
        self._began = clock()

    # ---- start -----------------------------------------------------------------------------------

    def start(self, port: int) -> None:
        """Has the engine start the tasks; they connect to the port."""
        self._tasks.start(
            self.count, Contact(self._tasks.hosts(), port, self._spec.token, self.number)
        )

    def handle(self, event: str, name: Hashable, *what: Any) -> None:
        """Takes an event of a connection."""
        rank = self._ranks.get(name)
        if event == "from_member" and rank is None:
            self._welcome(name, *what)
        elif event == "from_member" and rank is not None:
            self._receive(rank, self.members[rank], *what)
        elif event == "member_lost" and rank is not None and not self.members[rank].over:
            self._lost(rank, "its connection was lost")

    def _welcome(self, name: Hashable, hello: Message) -> None:
        if (
            isinstance(hello, Hello)
            and hello.attempt == self.number
            and self.phase == "gathering"
            and hello.rank not in self.members
        ):
            self._ranks[name] = hello.rank
            self.members[hello.rank] = Member(name, hello)
            if len(self.members) == self.count:
                self._check()
        else:
            self._links.to_member(name, Refused("this attempt has its tasks"))

    def _receive(self, rank: int, member: Member, message: Message) -> None:
        match message:
            case Marked():
                self._marked(rank, member, message)
            case Looked(problems=problems):
                member.looked = True
                if not self._found(rank, problems) and all(m.looked for m in self._in_order()):
                    self._run()
            case Output(final=final, body=body):
                live = self._spec.live and rank == 0
                self._display.feed(LIVE if live else self.label(rank), body, final)
            case Line(text=text):
                self._display.line(text)
            case Progress(step=step):
                member.step = step
            case Backup(name=name, body=body):
                self._tasks.keep(body)
                self._backup = name
            case Ended():
                self._ended(rank, member, message)

    def _in_order(self) -> list[Member]:
        return [self.members[rank] for rank in sorted(self.members)]

    def _send(self, rank: int, message: Message) -> None:
        self._links.to_member(self.members[rank].name, message)

    def _check(self) -> None:
        """Compares versions, and has the tasks look at the directories that they share."""
        self.phase = "checking"
        for rank in range(self.count):
            hello = self.members[rank].hello
            for name, expected in self._spec.facts.items():
                found = hello.facts.get(name, "none")
                if found != expected:
                    self._fail(
                        rank,
                        f"{name} is {found} on {hello.host}, and {expected} where "
                        "the job was submitted: install the same version on all machines.",
                    )
                    return
        shared = {k: v for k, v in self._spec.directories.items() if "://" not in v}
        if not shared:
            self._run()
            return
        self._send(0, Mark(shared))

    def _marked(self, rank: int, member: Member, marked: Marked) -> None:
        if self._found(rank, marked.problems) or self.count == 1:
            if self.phase == "checking":
                self._run()
            return
        member.looked = True
        shared = {k: v for k, v in self._spec.directories.items() if "://" not in v}
        for other in range(1, self.count):
            self._send(other, Look(shared, marked.names, chief=self.label(0)))

    def _found(self, rank: int, problems: Sequence[str]) -> bool:
        """Whether a look at the directories found problems, which then end the attempt."""
        if problems and self.phase == "checking":
            self._fail(rank, problems[0].removeprefix("failed: ") + ".")
        return bool(problems)

    def _run(self) -> None:
        """Sends the cluster to all tasks; they start."""
        self.phase = "running"
        spec, hellos = self._spec, [member.hello for member in self._in_order()]
        cluster = {"worker": tuple(addresses.joined(h.address, h.port) for h in hellos)}
        backup = self._tasks.kept()
        if backup:
            self._send(0, Backup("", backup))
        for rank, hello in enumerate(hellos):
            here = [r for r, other in enumerate(hellos) if other.address == hello.address]
            setup = Setup(
                command=tuple(spec.command),
                env=dict(spec.env),
                own_env={
                    "TFMW_LOCAL_TASKS": str(len(here)),
                    "TFMW_LOCAL_RANK": str(here.index(rank)),
                },
                options=spec.options,
                folder=spec.folder,
                live=spec.live and rank == 0,
                columns=spec.columns,
                body=spec.script,
            )
            self._send(rank, setup)
            ranks = tuple(range(self.count))
            self._send(rank, Start("", self.number, ranks, cluster, (("worker", rank),)))

    # ---- watch -----------------------------------------------------------------------------------

    def label(self, rank: int) -> str:
        """The task's name in the output: "worker 1 on h2"."""
        return f"worker {rank} on {self.members[rank].hello.host}"

    def _ended(self, rank: int, member: Member, ended: Ended) -> None:
        member.report, member.result = ended.report, ended.body
        if ended.report.preempted:
            grace_s = self._spec.options.preempt_grace_s
            limit = self._clock() + (GRACE_S if grace_s is None else grace_s)
            self._leave_by = min(self._leave_by, limit)
        self._send(rank, Taken())
        if self.phase == "running":
            for failure in ended.report.failures:
                self._add(dataclasses.replace(failure, task=self.label(rank)))

    def look(self) -> bool:
        """Looks at what the engine has lost, and at the time; whether the attempt is over."""
        for rank, why in self._tasks.lost().items():
            member = self.members.get(rank)
            if self.phase in ("gathering", "checking") and member is None:
                self._add(self._failure(rank, why, external=True), f"worker {rank}")
            elif member is not None and not member.over:
                if self._clock() - self._lost_at.setdefault(rank, self._clock()) > LOST_S:
                    self._lost(rank, why)
        limit = self._spec.options.start_timeout_s
        if self.phase == "gathering" and limit and self._clock() - self._began > limit:
            rank = next(r for r in itertools.count() if r not in self.members)
            why = f"has not connected within {limit:g} s of its start"
            self._add(self._failure(rank, why, external=True))
        if self._failures and self._clock() >= self._settled_at:
            return True
        if self._clock() >= self._leave_by:
            return True
        return self.phase == "running" and all(member.over for member in self.members.values())

    def _lost(self, rank: int, why: str) -> None:
        self.members[rank].lost = why
        self._add(self._failure(rank, why, external=True))

    def _fail(self, rank: int, problem: str) -> None:
        """Ends the attempt, and the run, for something that no restart mends."""
        self._add(dataclasses.replace(self._failure(rank, "", usage=True), error=problem, how=""))

    def _add(self, failure: Failure, task: str = "") -> None:
        known = {found.task for found in self._failures}
        failure = dataclasses.replace(failure, task=task or failure.task)
        if failure.task in known:
            return
        self._failures.append(failure)
        patience = SETTLE_S if all(f.secondary for f in self._failures) else 0.0
        self._settled_at = min(self._settled_at, self._clock() + patience)

    def _failure(
        self, rank: int, how: str, *, usage: bool = False, external: bool = False
    ) -> Failure:
        return Failure(
            self.label(rank) if rank in self.members else f"worker {rank}",
            how=how,
            seconds=self._clock() - self._began,
            usage=usage,
            step=self.step(),
            external=external,
            attempt=self.number,
        )

    # ---- end -------------------------------------------------------------------------------------

    def ask_to_leave(self) -> None:
        """Has the tasks save their state and leave."""
        if self.members:
            self._send(min(self.members), Leave(self.number))

    def end(self) -> None:
        """Ends all tasks; what they still send is not waited for."""
        self.phase = "ended"
        for rank in self.members:
            self._send(rank, End(self.number))
        self._tasks.end()
        for member in self.members.values():
            self._links.drop(member.name)

    def step(self) -> int:
        """The largest training step that a task has reported; negative if none has."""
        return max((member.step for member in self.members.values()), default=-1)

    def outcome(self) -> AttemptOutcome:
        """How the attempt ended."""
        reports = [m.report for m in self.members.values() if m.report is not None]
        found = outcome_of(self.number, reports, self._failures)
        lost_peers = found.preempted and all(f.secondary for f in found.failures)
        return dataclasses.replace(
            found,
            step=max(found.step, self.step()),
            seconds=max(found.seconds, self._clock() - self._began),
            failures=() if lost_peers else found.failures,
        )

    def results(self) -> dict[str, bytes]:
        """What each task's function sent, pickled, by the task's name."""
        return {self.label(rank): self.members[rank].result for rank in sorted(self.members)}

    def details(self) -> dict[str, Any]:
        """For the job's status."""
        members = self._in_order()
        return {
            "attempt": self.number,
            "workers": self.count,
            "hosts": [member.hello.host for member in members],
            "step": self.step(),
            "steps": [member.step for member in members],
            **({"backup": self._backup} if self._backup else {}),
        }
