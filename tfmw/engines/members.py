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
import os
import time
from collections.abc import Callable
from typing import Any

from tfmw.cluster import addresses
from tfmw.engines.engine import Contact, JobSpec, Tasks
from tfmw.engines.link import Link, Message
from tfmw.launcher.output import Display
from tfmw.launcher.preemption import GRACE_S
from tfmw.launcher.restart import AttemptOutcome
from tfmw.remote import messages, outcome
from tfmw.remote.messages import HostFailure, Report

LIVE = "live"
"""The name, for `Display`, of the first task where its output is for a terminal."""

SETTLE_S = 3.0
"""Seconds to wait for the cause where the first failures only report a lost task."""

LOST_S = 2.0
"""Seconds in which a task that the engine has lost may still report why it ended."""


@dataclasses.dataclass
class Member:
    """One task: its hello, its link, and how it ended."""

    link: Link
    host: str
    address: str
    port: int
    facts: dict[str, str]
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
        display: prints the tasks' output.
        number: of the attempt.
        count: of the tasks.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        spec: JobSpec,
        tasks: Tasks,
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
        self._display = display
        self._clock = clock
        self._ranks: dict[Link, int] = {}
        self._failures: list[HostFailure] = []
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

    def handle(self, link: Link, message: Message | None) -> None:
        """Takes an event of a link."""
        rank = self._ranks.get(link)
        if rank is None:
            if message is not None:
                self._welcome(link, message)
            return
        member = self.members[rank]
        if message is None:
            if not member.over:
                self._lost(rank, "its connection was lost")
            return
        getattr(self, f"_on_{message.kind}")(rank, member, message)

    def _welcome(self, link: Link, hello: Message) -> None:
        fields = hello.fields
        ours = hello.kind == "hello" and fields["attempt"] == self.number
        if not ours or self.phase != "gathering" or fields["rank"] in self.members:
            link.send("refused")
            return
        self._ranks[link] = fields["rank"]
        self.members[fields["rank"]] = Member(
            link, fields["host"], fields["address"], fields["port"], fields["facts"]
        )
        if len(self.members) == self.count:
            self._check()

    def _check(self) -> None:
        """Compares versions, and has the tasks look at the directories that they share."""
        self.phase = "checking"
        for rank in range(self.count):
            for name, expected in self._spec.facts.items():
                found = self.members[rank].facts.get(name, "none")
                if found != expected:
                    self._fail(
                        rank,
                        f"{name} is {found} on {self.members[rank].host}, and {expected} where "
                        "the job was submitted: install the same version on all machines.",
                    )
                    return
        shared = {k: v for k, v in self._spec.directories.items() if "://" not in v}
        if not shared:
            self._run()
            return
        self.members[0].link.send("mark", directories=shared)

    def _on_marked(self, rank: int, member: Member, message: Message) -> None:
        if self._found(rank, message) or self.count == 1:
            if self.phase == "checking":
                self._run()
            return
        member.looked = True
        shared = {k: v for k, v in self._spec.directories.items() if "://" not in v}
        for other in range(1, self.count):
            self.members[other].link.send(
                "look", directories=shared, names=message.fields["names"], chief=self.label(0)
            )

    def _on_looked(self, rank: int, member: Member, message: Message) -> None:
        member.looked = True
        if not self._found(rank, message) and all(m.looked for m in self.members.values()):
            self._run()

    def _found(self, rank: int, message: Message) -> bool:
        """Whether a look at the directories found problems, which then end the attempt."""
        problems = message.fields["problems"]
        if problems and self.phase == "checking":
            self._fail(rank, problems[0].removeprefix("failed: ") + ".")
        return bool(problems)

    def _run(self) -> None:
        """Sends the cluster to all tasks; they start."""
        self.phase = "running"
        spec, members = self._spec, [self.members[rank] for rank in range(self.count)]
        cluster = {"worker": [addresses.joined(m.address, m.port) for m in members]}
        backup = self._tasks.kept()
        if backup:
            members[0].link.send("backup", backup)
        for rank, member in enumerate(members):
            here = [r for r, other in enumerate(members) if other.address == member.address]
            own = {"TFMW_LOCAL_TASKS": str(len(here)), "TFMW_LOCAL_RANK": str(here.index(rank))}
            if spec.script:
                member.link.send("script", spec.script, name=os.path.basename(spec.command[1]))
            member.link.send(
                "start",
                command=list(spec.command),
                attempt=self.number,
                index=rank,
                cluster=cluster,
                env=own,
                job_env=dict(spec.env),
                options=dataclasses.asdict(spec.options),
                live=spec.live and rank == 0,
                columns=spec.columns,
                folder=spec.folder,
            )

    # ---- watch -----------------------------------------------------------------------------------

    def label(self, rank: int) -> str:
        """The task's name in the output: "worker 1 on h2"."""
        return f"worker {rank} on {self.members[rank].host}"

    def _on_output(self, rank: int, member: Member, message: Message) -> None:
        name = LIVE if self._spec.live and rank == 0 else self.label(rank)
        self._display.feed(name, message.body, message.fields["final"])

    def _on_line(self, rank: int, member: Member, message: Message) -> None:
        self._display.line(message.fields["text"])

    def _on_progress(self, rank: int, member: Member, message: Message) -> None:
        member.step = message.fields["step"]

    def _on_backup(self, rank: int, member: Member, message: Message) -> None:
        self._tasks.keep(message.body)
        self._backup = message.fields["name"]

    def _on_ended(self, rank: int, member: Member, message: Message) -> None:
        ended = messages.decode(message.fields["report"].encode())
        assert isinstance(ended, messages.Ended)
        member.report, member.result = ended.report, message.body
        if ended.report.preempted:
            grace_s = self._spec.options.preempt_grace_s
            limit = self._clock() + (GRACE_S if grace_s is None else grace_s)
            self._leave_by = min(self._leave_by, limit)
        member.link.send("bye")
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

    def _add(self, failure: HostFailure, task: str = "") -> None:
        known = {found.task for found in self._failures}
        failure = dataclasses.replace(failure, task=task or failure.task)
        if failure.task in known:
            return
        self._failures.append(failure)
        patience = SETTLE_S if all(f.secondary for f in self._failures) else 0.0
        self._settled_at = min(self._settled_at, self._clock() + patience)

    def _failure(
        self, rank: int, how: str, *, usage: bool = False, external: bool = False
    ) -> HostFailure:
        return HostFailure(
            host=rank,
            task=self.label(rank) if rank in self.members else f"worker {rank}",
            error="",
            status=0,
            how=how,
            detail=(),
            log="",
            seconds=self._clock() - self._began,
            usage=usage,
            step=self.step(),
            external=external,
            secondary=False,
        )

    # ---- end -------------------------------------------------------------------------------------

    def ask_to_leave(self) -> None:
        """Has the tasks save their state and leave."""
        if self.members:
            self.members[min(self.members)].link.send("leave")

    def end(self) -> None:
        """Ends all tasks; what they still send is not waited for."""
        self.phase = "ended"
        for member in self.members.values():
            member.link.send("end")
            member.link.send("bye")
        self._tasks.end()
        for member in self.members.values():
            member.link.close()

    def step(self) -> int:
        """The largest training step that a task has reported; negative if none has."""
        return max((member.step for member in self.members.values()), default=-1)

    def outcome(self) -> AttemptOutcome:
        """How the attempt ended."""
        reports = [m.report for m in self.members.values() if m.report is not None]
        found = outcome.outcome_of(self.number, reports, outcome.merged(self._failures))
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
        hosts = [self.members[rank].host for rank in sorted(self.members)]
        return {
            "attempt": self.number,
            "workers": self.count,
            "hosts": hosts,
            "step": self.step(),
            "steps": [self.members[rank].step for rank in sorted(self.members)],
            **({"backup": self._backup} if self._backup else {}),
        }
