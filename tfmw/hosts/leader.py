"""The supervisor that leads: who takes part in an attempt, and what follows when it ends.

    leader = Leader(settings, host=1, record=record, now=0.0, out=actions)
    leader.receive(0, Join(...), now); leader.receive(0, Ready(...), now)
    leader.tick(now)                    # every host is ready: out has Publish and ToMember(Start)

It gathers hosts, runs an attempt on them, collects how it ended on each, and asks
`tfmw.launcher.restart` what follows. Before an attempt starts, its number is in the record.

============================  ====================================================================
a task fails, or a host or    the tasks of all hosts end at once, and the hosts gather again
its connection is lost
with parameter servers, a     its workers start again once it is back; see `placement`
host with workers only is
lost
a host joins                  the tasks save their state and exit; the next attempt has all hosts
a host is preempted           the same, and the next attempt is without it
fewer than `min_hosts`        give up the lock, as another host may see more
============================  ====================================================================
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Sequence
from typing import Any

from tfmw.errors import PREEMPTED
from tfmw.hosts.actions import (
    HEARTBEAT_S,
    SILENCE_S,
    Action,
    Drop,
    Notify,
    Publish,
    Record,
    Resign,
    Settings,
    ToMember,
)
from tfmw.hosts.placement import Plan, placed
from tfmw.launcher.attempt import FAREWELL_S
from tfmw.launcher.failure import Failure
from tfmw.launcher.preemption import GRACE_S
from tfmw.launcher.restart import RestartPolicy
from tfmw.launcher.result import lines_about
from tfmw.remote.messages import (
    End,
    Ended,
    Join,
    Leave,
    Leaving,
    Message,
    Over,
    Ready,
    Refused,
    Report,
    RestartReply,
    RestartRequest,
    Start,
)
from tfmw.remote.outcome import outcome_of

RESIGN_S = 2.0
"""Seconds in which hosts reach a new leader; with too few of them, another host may try to lead."""

DRAIN_S = 2.0
"""Seconds by which a host that was cut off may notice later than the leader, and end its tasks."""

END_S = 20.0
"""Seconds in which a connected host must have ended its tasks; else it is taken for lost."""


@dataclasses.dataclass
class Member:
    """A host that has joined.

    Attributes:
        ports: for its tasks, once it is ready.
        attempt: in which its tasks run.
        last: the last attempt that it took part in, and its largest step.
        leaving: whether it is preempted.
    """

    ports: tuple[int, ...] | None = None
    attempt: int | None = None
    last: tuple[int, int] = (-1, -1)
    leaving: bool = False


class Leader:
    """Leads from the moment that its host has the lock.

    Args:
        settings: of the run.
        host: index of this host.
        record: what the leader before has left; None: nobody has led here.
        now: monotonic seconds.
        out: where actions go.
    """

    def __init__(
        self, settings: Settings, host: int, record: Record | None, now: float, out: list[Action]
    ) -> None:
        self._settings = settings
        self._out = out
        self._members: dict[int, Member] = {}
        self._left: set[int] = set()  # preempted hosts, which are not waited for
        self._policy = RestartPolicy(settings.options, settings.workers_per_host)
        if record is None or record.status is not None:
            attempt = -1 if record is None else record.attempt
            record = Record(run=secrets.token_hex(8), attempt=attempt)
        if record.policy:
            self._policy.restore(record.policy)
        self.record = record
        self._inherited = record.running  # an attempt whose end no leader has judged
        self._former = record.leader
        self._host = host
        self._plan: Plan | None = None  # of the attempt that runs
        self._again: dict[int, int] = {}  # host -> how often its tasks were started again
        self._reports: dict[int, Report] = {}
        self._failures: list[Failure] = []
        self._ending_since: float | None = None
        self._leave_by: float | None = None
        self._short_since: float | None = None  # since when there are too few hosts
        self._has_led = False  # whether it has started an attempt: then hosts have reached it
        self._gathering_since = now
        self._not_before = now
        self.over = False
        self._publish(leader=host, status=None, lines=())

    # ---- what members send ---------------------------------------------------------------------

    def receive(self, host: int, message: Message, now: float) -> None:
        """A message of a member."""
        if isinstance(message, Join):
            self.lost(host, "its supervisor has started again", now)
            self._join(host, message)
        member = self._members.get(host)
        if member is None or self.over:
            return
        if isinstance(message, Ready) and len(message.ports) == self._settings.ports_per_host:
            member.ports = message.ports
            self._ready(host, member)
        elif isinstance(message, Ended) and message.attempt == member.attempt:
            member.attempt = None
            self._reports[host] = message.report
            if not self._chief_is_done():
                name = self._settings.name(host)
                found = message.report.failures
                self._failures += [dataclasses.replace(failure, host=name) for failure in found]
            self._ended(host, message.report, now)
        elif isinstance(message, RestartRequest) and message.attempt == member.attempt:
            allowed = not self._ends() and self._counts_restart()
            restarts = self._policy.restarts
            self._send(host, RestartReply(message.attempt, message.task, allowed, restarts))
        elif isinstance(message, Leaving):
            member.leaving = True
            self._left.add(host)
            if member.attempt is None:
                self._dismiss()
            else:
                self._preempt_all()

    def _ready(self, host: int, member: Member) -> None:
        """A host could take part in the attempt that runs."""
        if self._plan is None or self._ending_since is not None or member.leaving:
            return
        if host not in self._plan.tasks:
            self._notify(f"{self._settings.name(host)} joins after the next backup")
            self._preempt_all()
        elif member.attempt is None and host not in self._reports:  # it was lost, and is back
            self._again[host] = self._again.get(host, 0) + 1
            self._send_start(host, self._plan)

    def _join(self, host: int, join: Join) -> None:
        facts = self._settings.facts
        for name in sorted({*facts, *join.facts}):
            expected, received = facts.get(name, "nothing"), join.facts.get(name, "nothing")
            if received != expected:
                problem = (
                    f"hosts disagree about {name}: the one that leads has {expected}, "
                    f"{self._settings.name(host)} has {received}. Use the same on every host."
                )
                self._send(host, Refused(problem))
                return
        self._members[host] = Member(last=(join.attempt, join.step))
        self._left.discard(host)

    def lost(self, host: int, why: str, now: float) -> None:
        """The connection to a member is lost."""
        member = self._members.pop(host, None)
        if member is None or member.attempt is None or self.over:
            return
        self._notify(f"{self._settings.name(host)} is lost: {why}")
        if self._chief_is_done():
            self._conclude(now)
            return
        if self._continues_without(host):
            return
        self._failures.append(self._lost_host(host, why))
        self._end_all(now)

    def _chief_is_done(self) -> bool:
        """Whether servers, and workers beside them, are not needed any more."""
        report = self._reports.get(self._host)
        return self._settings.ps > 0 and report is not None and report.done

    def _continues_without(self, host: int) -> bool:
        """Whether the attempt continues until the host is back; that is a restart of its tasks."""
        if self._plan is None or self._ends() or not self._plan.restarts_alone(host):
            return False
        if not self._counts_restart():
            return False
        tasks = ", ".join(f"{kind} {index}" for kind, index in self._plan.tasks[host])
        self._notify(
            f"restart {self._policy.restarts} of {self._settings.options.max_restarts}, of {tasks} "
            f"alone, when {self._settings.name(host)} is back"
        )
        return True

    def _ends(self) -> bool:
        """Whether the attempt that runs ends soon."""
        return self._ending_since is not None or self._leave_by is not None

    def _counts_restart(self) -> bool:
        """Counts a restart of single tasks, if one is left for all hosts together."""
        if self._policy.restarts >= self._settings.options.max_restarts:
            return False
        self._policy.restarts += 1
        self._publish(policy=self._policy.saved())
        return True

    def _lost_host(self, host: int, why: str) -> Failure:
        step = max((report.step for report in self._reports.values()), default=-1)
        name = self._settings.name(host)
        attempt = self.record.attempt
        return Failure(
            f"host {name}", how=why, step=step, external=True, attempt=attempt, host=name
        )

    # ---- the attempt that runs -------------------------------------------------------------------

    def _ended(self, host: int, report: Report, now: float) -> None:
        if self._chief_is_done():
            if self._leave_by is None:
                self._leave_by = now + FAREWELL_S  # servers and workers end by themselves
        elif report.failures:
            self._end_all(now)
        elif report.preempted and self._leave_by is None:
            self._leave_by = now + self._grace_s()  # the others leave at the same step
        elif not report.done and not report.preempted and self._ending_since is None:
            how = "was ended before it had saved its state"
            self._failures.append(
                dataclasses.replace(self._lost_host(host, how), task=self._settings.name(host))
            )
            self._end_all(now)
        self._conclude(now)

    def _grace_s(self) -> float:
        grace_s = self._settings.options.preempt_grace_s
        return GRACE_S if grace_s is None else grace_s

    def _end_all(self, now: float) -> None:
        if self._ending_since is None:
            self._ending_since = now
            for host in self._running():
                self._send(host, End(self.record.attempt))
        self._conclude(now)

    def _preempt_all(self) -> None:
        # No deadline here: tasks are asked once they can save their state, which may take a while.
        for host in self._running():
            self._send(host, Leave(self.record.attempt))

    def _running(self) -> list[int]:
        return [h for h, member in sorted(self._members.items()) if member.attempt is not None]

    def _conclude(self, now: float) -> None:
        """Judges the attempt, once it runs nowhere."""
        if self._plan is None or self._running():
            return
        outcome = outcome_of(self.record.attempt, self._reports.values(), self._failures)
        failures = outcome.failures
        self._plan, self._again, self._reports, self._failures = None, {}, {}, []
        self._ending_since = self._leave_by = None
        self._gathering_since = now
        if not failures and not outcome.preempted:
            self._finish(0, ())
            return
        decision = self._policy.decide(outcome)
        self._notify(decision.message)
        if not decision.restart:
            status = 2 if failures and failures[0].usage else 1 if failures else PREEMPTED
            self._finish(status, lines_about(failures))
            return
        self._not_before = now + decision.delay_s
        self._publish(running=False, policy=self._policy.saved())
        self._dismiss()

    def _dismiss(self) -> None:
        """Dismisses preempted hosts whose tasks have ended."""
        leaving = [h for h, m in self._members.items() if m.leaving and m.attempt is None]
        if leaving and len(leaving) == len(self._members):
            self._finish(PREEMPTED, ())
            return
        for host in leaving:
            del self._members[host]
            self._send(host, Over(PREEMPTED, ()))

    # ---- gathering -----------------------------------------------------------------------------

    def tick(self, now: float, alone_since: float) -> None:
        """Whatever time brings.

        Args:
            now: monotonic seconds.
            alone_since: since when this host has taken part in no attempt, and knows of none.
        """
        if self.over:
            return
        if self._plan is not None:
            self._hurry(now)
        else:
            self._gather(now, alone_since)

    def _hurry(self, now: float) -> None:
        if self._ending_since is not None and now - self._ending_since >= END_S:
            for host in self._running():
                self._out.append(Drop(host))
                self.lost(host, f"its tasks did not end within {END_S:g} s", now)
        elif self._ending_since is None and self._leave_by is not None and now >= self._leave_by:
            self._end_all(now)

    def _gather(self, now: float, alone_since: float) -> None:
        settings = self._settings
        present = set(self._members)
        missing = set(range(len(settings.hosts))) - present - self._left
        if len(present) < settings.min_hosts:
            self._lack(now, alone_since)
            return
        self._short_since = None
        if any(member.ports is None or member.attempt for member in self._members.values()):
            return
        if now - self._gathering_since < self._patience_s(missing):
            return
        if self._inherited and not self._judge_inherited(now):
            return
        if now >= self._not_before:
            self._start()

    def _patience_s(self, missing: set[int]) -> float:
        """Seconds to wait for missing hosts, and until none of their tasks can run any more."""
        if not missing:
            return 0.0
        cut_off = missing & set(self.record.hosts)
        drain_s = DRAIN_S if cut_off else 0.0
        # Who led before has released the lock only after its tasks; the others may not know yet.
        if self._inherited and cut_off - {self._former}:
            drain_s += SILENCE_S + HEARTBEAT_S
        return max(self._settings.rejoin_timeout_s, drain_s)

    def _lack(self, now: float, alone_since: float) -> None:
        """There are fewer hosts than the run needs."""
        if self._short_since is None:
            self._short_since = now
        if now - alone_since >= self._settings.give_up_s:
            missing = set(range(len(self._settings.hosts))) - set(self._members)
            waited = self._settings.give_up_s
            self._finish(
                1,
                (
                    f"tfmw: {self._settings.names(missing)} cannot be reached since {waited:g} s, "
                    f"and this run needs {self._settings.min_hosts} of "
                    f"{len(self._settings.hosts)} hosts (--min-hosts); start the same command "
                    "there, or allow fewer",
                ),
            )
        elif self._has_led or now - self._short_since >= RESIGN_S:
            self._out.append(Resign())

    def _judge_inherited(self, now: float) -> bool:
        """Counts the attempt in which the leader before was lost; whether there is another one."""
        self._inherited = False
        attempt = self.record.attempt
        members = self._members.values()
        step = max((m.last[1] for m in members if m.last[0] == attempt), default=-1)
        lost = dataclasses.replace(
            self._lost_host(self._former, "it led, and its supervisor or connection was lost"),
            step=step,
        )
        report = Report(step=step)
        decision = self._policy.decide(outcome_of(attempt, [report], [lost]))
        self._notify(decision.message)
        if not decision.restart:
            self._finish(1, lines_about([lost]))
            return False
        self._not_before = now + decision.delay_s
        self._publish(running=False, policy=self._policy.saved())
        return True

    def _start(self) -> None:
        """Starts an attempt on all members."""
        hosts = tuple(sorted(self._members))
        self._publish(
            attempt=self.record.attempt + 1,
            running=True,
            hosts=hosts,
            policy=self._policy.saved(),
        )
        self._has_led = True
        ports = {host: self._members[host].ports or () for host in hosts}
        self._plan = placed(self._settings, self._host, ports)
        for host in hosts:
            self._send_start(host, self._plan)
        missing = set(range(len(self._settings.hosts))) - set(hosts)
        without = f", without {self._settings.names(missing)}" if missing else ""
        self._notify(f"attempt {self.record.attempt} on {self._settings.names(hosts)}{without}")

    def _send_start(self, host: int, plan: Plan) -> None:
        member = self._members[host]
        member.attempt, member.ports = self.record.attempt, None
        start = Start(
            run=self.record.run,
            attempt=self.record.attempt,
            hosts=tuple(sorted(plan.tasks)),
            cluster=plan.cluster,
            tasks=plan.tasks[host],
            again=self._again.get(host, 0),
        )
        self._send(host, start)

    # ---- common --------------------------------------------------------------------------------

    def _finish(self, status: int, lines: Sequence[str]) -> None:
        lines = tuple(lines)
        self._publish(running=False, status=status, lines=lines)
        self.over = True
        for host in sorted(self._members):
            self._send(host, Over(status, lines))

    def _publish(self, **changes: Any) -> None:
        self.record = dataclasses.replace(self.record, **changes)
        self._out.append(Publish(self.record))

    def _send(self, host: int, message: Message) -> None:
        self._out.append(ToMember(host, message))

    def _notify(self, text: str) -> None:
        if text:
            self._out.append(Notify(text))
