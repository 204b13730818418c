"""The leading supervisor: selects the hosts of an attempt, and decides about the next one.

    leader = Leader(settings, host=1, record=record, now=0.0, links=links, keeper=keeper, ...)
    leader.receive(0, Join(...), now); leader.receive(0, Ready(...), now)
    leader.tick(now)                    # every host is ready: a record is published, Start is sent

It is the backend of an `Orchestrator`: it gathers hosts, runs an attempt on them, and collects how
it ended on each. Before an attempt starts, its number is in the record: each event raises `Lost` if
the record cannot be written, and then this host leads no more. With fewer than `min_hosts` it gives
up the lock, as another host may see more. The responses to other events are in
docs/howto/elastic-hosts.md.
"""

from __future__ import annotations

import dataclasses
import math
import secrets
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tfmw.cluster import addresses
from tfmw.errors import PREEMPTED
from tfmw.launcher.hosts.lease import LeaseKeeper, Record
from tfmw.launcher.hosts.settings import (
    GATHER_S,
    HEARTBEAT_S,
    REJOIN_S,
    SILENCE_S,
    HostSettings,
)
from tfmw.launcher.options import FAREWELL_S
from tfmw.launcher.orchestrator import Orchestrator
from tfmw.launcher.remote import messages
from tfmw.launcher.remote.links import Links
from tfmw.launcher.remote.remote_attempt import RemoteAttempt
from tfmw.launcher.restart import AttemptOutcome, Decision, RestartPolicy
from tfmw.launcher.result import exit_status, lines_about

RESIGN_S = 2.0
"""Seconds in which hosts reach a new leader; with too few of them, another host may try to lead."""

DRAIN_S = 0.5
"""Seconds by which a host that was cut off may end its tasks later than the leader: both notice
the silence of the other within a heartbeat, and tasks are killed at once."""

END_S = 20.0
"""Seconds in which a connected host must have ended its tasks; then it counts as lost."""

Layout = tuple[tuple[str, int], ...]
"""(kind, index) of some tasks."""


@dataclasses.dataclass(frozen=True)
class TaskPlacement:
    """The hosts of an attempt's tasks."""

    cluster: dict[str, tuple[str, ...]]  # addresses by kind, as in TF_CONFIG, without evaluators
    tasks: dict[int, Layout]  # host -> its tasks

    def restarts_alone(self, host: int) -> bool:
        """Whether the other hosts continue without this one: workers beside servers."""
        return "ps" in self.cluster and all(kind == "worker" for kind, _ in self.tasks[host])


def placed(
    settings: HostSettings, leader: int, ports: Mapping[int, Sequence[int]]
) -> TaskPlacement:
    """Places the tasks of an attempt.

    The chief of parameter servers and the evaluator are on the leading host, without which an
    attempt ends anyway. Servers are assigned to the hosts in turns, from that host on. With fewer
    servers than hosts, the last hosts have workers only. The loss of such a host affects its
    workers only: they restart, at their old addresses, when the host is back.

    Args:
        leader: index of the leading host; it is one of the hosts.
        ports: host -> `settings.ports_per_host` ports, for each host of the attempt.
    """
    hosts = sorted(ports)
    from_leader = [*hosts[hosts.index(leader) :], *hosts[: hosts.index(leader)]]
    where = [("chief", leader)] if settings.ps else []
    where += [("worker", host) for host in hosts for _ in range(settings.workers_per_host)]
    where += [("ps", from_leader[i % len(hosts)]) for i in range(settings.ps)]
    unused = {host: iter(found) for host, found in ports.items()}
    cluster: dict[str, tuple[str, ...]] = {}
    tasks: dict[int, Layout] = dict.fromkeys(hosts, ())
    for kind, host in where:
        before = cluster.get(kind, ())
        address = addresses.joined(addresses.split(settings.hosts[host])[0], next(unused[host]))
        cluster[kind] = (*before, address)
        tasks[host] += ((kind, len(before)),)
    if settings.evaluator:
        tasks[leader] += (("evaluator", 0),)
    return TaskPlacement(cluster, tasks)


@dataclasses.dataclass
class HostState:
    """A host that has joined."""

    joined: messages.Join
    ports: tuple[int, ...] | None = None  # ports for its tasks, once it is ready


@dataclasses.dataclass(eq=False)
class Leader:
    """The leader's state machine, from the moment that its host has the lock."""

    settings: HostSettings
    host: int  # index of its host
    links: Links
    keeper: LeaseKeeper
    notify: Callable[[str], None]  # prints a line for the user
    # record of the previous leader; None: there was none
    former: dataclasses.InitVar[Record | None]
    now: dataclasses.InitVar[float]  # monotonic seconds

    def __post_init__(self, former: Record | None, now: float) -> None:
        self.to_own: deque[messages.Message] = deque()
        """Messages for the leader's own host, which executes them after the event."""
        self.resigns = False
        """Whether it releases the lock, as there are too few hosts."""
        self._members: dict[int, HostState] = {}
        self._left: set[int] = set()  # preempted hosts, for which it does not wait
        self._policy = RestartPolicy(self.settings.options, self.settings.workers_per_host)
        record = former or Record(run="")
        if former is None or former.status is not None:
            record = Record(run=secrets.token_hex(8), attempt=record.attempt)
        if record.policy:
            self._policy.restore(record.policy)
        self.record = dataclasses.replace(record, leader=self.host, status=None, lines=())
        self._inherited = record.running  # an attempt that no leader has judged yet
        self._former = record.leader
        self._orchestrator: Orchestrator[RemoteAttempt] = Orchestrator(self._policy, self)
        # These three are about the attempt that runs.
        self._plan = TaskPlacement({}, {})
        self._again: dict[int, int] = {}  # host -> number of restarts of its tasks
        self._ending_since: float | None = None
        self._lines: list[str] = []  # for the user at the end, before those about failures
        self._short_since: float | None = None  # time since which there are too few hosts
        self._has_led = False  # whether it has started an attempt, so that hosts have reached it
        self._gathering_since = now
        self._alone_since = now
        self.over = False

    @property
    def _attempt(self) -> RemoteAttempt | None:
        return self._orchestrator.attempt

    # ---- what members send ---------------------------------------------------------------------

    def receive(self, host: int, message: messages.Message, now: float) -> None:
        """Processes a message of a member."""
        if isinstance(message, messages.Join):
            self.lost(host, "its supervisor has started again", now)
            self._join(host, message)
        member = self._members.get(host)
        if member is None or self.over:
            return
        if (
            isinstance(message, messages.Ready)
            and len(message.ports) == self.settings.ports_per_host
        ):
            member.ports = message.ports
            self._ready(host)
        elif isinstance(message, messages.Ended) and self._runs(host, message.attempt):
            self._ended(host, message.report, now)
        elif isinstance(message, messages.RestartRequest) and self._runs(host, message.attempt):
            allowed = not self._ends() and self._counts_restart()
            restarts = self._policy.restarts
            self._send(
                host, messages.RestartReply(message.attempt, message.task, allowed, restarts)
            )
        elif isinstance(message, messages.Leaving):
            self._left.add(host)
            if self._runs(host):
                self._preempt_all()
            else:
                self._dismiss()

    def _runs(self, host: int, number: int | None = None) -> bool:
        """Whether a host runs tasks, of this attempt."""
        attempt = self._attempt
        return attempt is not None and host in attempt.running and number in (None, attempt.number)

    def _ready(self, host: int) -> None:
        """Records that a host is ready to join the current attempt."""
        attempt = self._attempt
        if attempt is None or self._ending_since is not None or host in self._left:
            return
        if host not in self._plan.tasks:
            self.notify(f"{self.settings.name(host)} joins once the tasks have saved their state")
            self._preempt_all()
        elif host not in attempt.running and host not in attempt.reports:  # the host is back
            self._again[host] = self._again.get(host, 0) + 1
            self._send_start(host, attempt)

    def _join(self, host: int, join: messages.Join) -> None:
        facts = self.settings.facts
        for name in sorted({*facts, *join.facts}):
            expected, received = facts.get(name, "nothing"), join.facts.get(name, "nothing")
            if received != expected:
                problem = (
                    f"hosts disagree about {name}: the one that leads has {expected}, "
                    f"{self.settings.name(host)} has {received}. Use the same on every host."
                )
                self._send(host, messages.Over(2, (f"tfmw: {problem}",)))
                return
        self._members[host] = HostState(join)
        self._left.discard(host)

    def lost(self, host: int, why: str, now: float) -> None:
        """Handles the loss of the connection to a member."""
        self._members.pop(host, None)
        attempt = self._attempt
        if attempt is None or host not in attempt.running or self.over:
            return
        self.notify(f"{self.settings.name(host)} is lost: {why}")
        attempt.running.discard(host)
        if not self._continues_without(host):
            attempt.lost(host, why, now)
        self._orchestrator.step(now)

    def _continues_without(self, host: int) -> bool:
        """Whether the attempt continues until the host is back, which restarts its tasks."""
        if self._ends() or not self._plan.restarts_alone(host) or not self._counts_restart():
            return False
        tasks = ", ".join(f"{kind} {index}" for kind, index in self._plan.tasks[host])
        self.notify(
            f"restart {self._policy.restarts} of {self.settings.options.max_restarts}, of {tasks} "
            f"alone, when {self.settings.name(host)} is back"
        )
        return True

    def _ends(self) -> bool:
        """Whether the current attempt ends soon."""
        return self._attempt is not None and self._attempt.end_at < math.inf

    def _counts_restart(self) -> bool:
        """Counts a restart of single tasks; returns whether the limit for all hosts allows it."""
        if not self._policy.allows_restart_alone():
            return False
        self.publish(policy=self._policy.saved())
        return True

    # ---- the attempt that runs -------------------------------------------------------------------

    def _ended(self, host: int, report: AttemptOutcome, now: float) -> None:
        assert self._attempt is not None
        self._attempt.ended(host, report, now, host=self.settings.name(host))
        if self.settings.ps and host == self.host and report.done:  # the chief is done
            self._attempt.succeeded(now, FAREWELL_S)
        self._orchestrator.step(now)

    def _preempt_all(self) -> None:
        # No deadline here: tasks are asked once they can save their state, which may take a while.
        self._send_running(messages.Leave)

    def _send_running(self, kind: type[messages.Leave | messages.End]) -> None:
        if self._attempt is not None:
            for host in sorted(self._attempt.running):
                self._send(host, kind(self._attempt.number))

    def is_over(self, attempt: RemoteAttempt, now: float) -> bool:
        if attempt.running and attempt.must_end(now) and self._ending_since is None:
            self._ending_since = now
            self._send_running(messages.End)
        return not attempt.running

    def outcome(self, attempt: RemoteAttempt, now: float) -> AttemptOutcome:
        self._again, self._ending_since, self._gathering_since = {}, None, now
        self._policy.division = attempt.division
        self._lines = [f"tfmw: {line}"] if (line := attempt.goodput()) else []
        return attempt.outcome(now)

    def judged(self, outcome: AttemptOutcome, decision: Decision) -> None:
        self._inherited = False
        if decision.restart:
            self.publish(running=False, policy=self._policy.saved())
            self._dismiss()
        else:
            status = exit_status(outcome.failures, preempted=outcome.preempted)
            self._finish(status, [*self._lines, *lines_about(outcome.failures)])

    def _dismiss(self) -> None:
        """Dismisses preempted hosts whose tasks have ended."""
        leaving = [host for host in self._members if host in self._left and not self._runs(host)]
        if leaving and len(leaving) == len(self._members):
            self._finish(PREEMPTED, ())
            return
        for host in leaving:
            del self._members[host]
            self._send(host, messages.Over(PREEMPTED))

    # ---- gathering -----------------------------------------------------------------------------

    def tick(self, now: float, alone_since: float) -> None:
        """Handles the passage of time.

        Args:
            now: monotonic seconds.
            alone_since: time since which this host has been in no attempt, and knows of none.
        """
        if self.over:
            return
        attempt, self._alone_since = self._attempt, alone_since
        if attempt and self._ending_since is not None and now - self._ending_since >= END_S:
            for host in sorted(attempt.running):
                self.links.drop(host)
                self.lost(host, f"its tasks did not end within {END_S:g} s", now)
        else:
            self._orchestrator.step(now)

    def begin(self, due: bool, now: float) -> RemoteAttempt | None:
        settings = self.settings
        present = set(self._members)
        missing = set(range(len(settings.hosts))) - present - self._left
        if len(present) < settings.least_hosts:
            self._lack(now)
            return None
        self._short_since = None
        if any(member.ports is None for member in self._members.values()):
            return None
        if now - self._gathering_since < self._patience_s(missing):
            return None
        if self._inherited:
            self._judge_inherited(now)
            return None
        return self._start(now) if due else None

    def _patience_s(self, missing: set[int]) -> float:
        """Seconds to wait for missing hosts, and until none of their tasks can run any more."""
        if not missing:
            return 0.0
        cut_off = missing & set(self.record.hosts)
        drain_s = DRAIN_S if cut_off else 0.0
        # The leader before released the lock after its tasks ended; other hosts may not know yet.
        if self._inherited and cut_off - {self._former}:
            drain_s += SILENCE_S + HEARTBEAT_S
        default_s = 0.0
        if not self.record.hosts:
            default_s = GATHER_S
        elif not self._has_led and missing - {self._former}:  # they may still reach this leader
            default_s = REJOIN_S
        return max(self.settings.patience_s(default_s), drain_s)

    def _lack(self, now: float) -> None:
        """Handles a lack of hosts."""
        if self._short_since is None:
            self._short_since = now
        if now - self._alone_since >= self.settings.give_up_s:
            missing = set(range(len(self.settings.hosts))) - set(self._members)
            waited = self.settings.give_up_s
            self._finish(
                1,
                (
                    f"tfmw: {self.settings.names(missing)} cannot be reached since {waited:g} s, "
                    f"and this run needs {self.settings.least_hosts} of "
                    f"{len(self.settings.hosts)} hosts (--min-hosts); start the same command "
                    "there, or allow fewer",
                ),
            )
        elif self._has_led or now - self._short_since >= RESIGN_S:
            self.resigns = True

    def _judge_inherited(self, now: float) -> None:
        """Judges the attempt in which the leader before was lost."""
        judged = self._new_attempt(now)
        for host, member in self._members.items():
            if member.joined.attempt == judged.number:
                judged.reached(host, member.joined.step, member.joined.division)
        judged.lost(self._former, "it led, and its supervisor or connection was lost", now)
        self._policy.division = judged.division
        self._orchestrator.judge(judged.outcome(now), now)

    def _start(self, now: float) -> RemoteAttempt:
        """Starts an attempt on all members."""
        hosts = tuple(sorted(self._members))
        self.publish(
            attempt=self.record.attempt + 1,
            running=True,
            hosts=hosts,
            policy=self._policy.saved(),
        )
        self._has_led = True
        ports = {host: self._members[host].ports or () for host in hosts}
        self._plan = placed(self.settings, self.host, ports)
        attempt = self._new_attempt(now)
        for host in hosts:
            self._send_start(host, attempt)
        missing = set(range(len(self.settings.hosts))) - set(hosts)
        without = f", without {self.settings.names(missing)}" if missing else ""
        self.notify(f"attempt {self.record.attempt} on {self.settings.names(hosts)}{without}")
        return attempt

    def _new_attempt(self, now: float) -> RemoteAttempt:
        """The attempt with the number in the record, which runs on no host yet."""
        return RemoteAttempt(
            self.record.attempt,
            set(),
            self.settings.options,
            lambda host: f"host {self.settings.name(host)}",
            now,
            before=self._policy.division,
        )

    def _send_start(self, host: int, attempt: RemoteAttempt) -> None:
        attempt.running.add(host)
        self._members[host].ports = None
        start = messages.Start(
            run=self.record.run,
            attempt=attempt.number,
            hosts=tuple(sorted(self._plan.tasks)),
            cluster=self._plan.cluster,
            tasks=self._plan.tasks[host],
            again=self._again.get(host, 0),
            division=attempt.before,
        )
        self._send(host, start)

    # ---- common --------------------------------------------------------------------------------

    def _finish(self, status: int, lines: Sequence[str]) -> None:
        lines = tuple(lines)
        self.publish(running=False, status=status, lines=lines)
        self.over = True
        for host in sorted(self._members):
            self._send(host, messages.Over(status, lines))

    def publish(self, **changes: Any) -> None:
        """Writes the record, with changes. Later events depend on it."""
        self.record = dataclasses.replace(self.record, **changes)
        self.keeper.publish(self.record)

    def _send(self, host: int, message: messages.Message) -> None:
        if host == self.host:
            self.to_own.append(message)
        else:
            self.links.to_member(host, message)
