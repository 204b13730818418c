"""The supervisor of one host: takes part, and leads while its host has the lock.

    supervisor = Supervisor(settings, 1, now, links=..., keeper=..., tasks=..., notify=print)
    supervisor.lease_gained(None, now=0.3)
    supervisor.from_tasks(Ready((12001,)), now=0.4)
    supervisor.way_out                          # how it ends, once it does

A state machine without a socket, thread, file or clock of its own. Each method is an event, in
which it calls the links, the lock's keeper and the tasks. None of them calls it back:
`supervisor_loop.py` hands over what they report, and tests put simulated ones there.

The host that has the lock leads (`leader.py`). All others are connected to it. A supervisor that
loses its connection to the leader, or the lock, ends its tasks at once.
"""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Callable
from typing import Any

from tfmw.cluster.signals import LEAVE
from tfmw.errors import PREEMPTED
from tfmw.launcher.hosts.host_links import HostLinks
from tfmw.launcher.hosts.leader import Leader
from tfmw.launcher.hosts.lease import LeaseKeeper, Record
from tfmw.launcher.hosts.settings import HostSettings
from tfmw.launcher.remote import messages
from tfmw.launcher.remote.tasks import TasksOfOneMachine
from tfmw.launcher.restart import AttemptOutcome
from tfmw.observe.goodput import Division
from tfmw.storage.leased_object import Lost

PAUSE_S = 3.0
"""Seconds in which a supervisor that gave the lock up does not try to get it again."""

FIRST_NOTICE_S = 10.0
NOTICE_S = 30.0
"""Seconds until a host that cannot reach the leader gives notice, and then between two notices."""


@dataclasses.dataclass(eq=False)
class Supervisor:
    """One host."""

    settings: HostSettings
    host: int  # index of this host
    now: dataclasses.InitVar[float]  # monotonic seconds
    links: HostLinks
    keeper: LeaseKeeper
    tasks: TasksOfOneMachine
    notify: Callable[[str], None]  # prints a line for the user

    def __post_init__(self, now: float) -> None:
        self.leader: Leader | None = None
        """The leader's part, while this host leads; else None."""
        self._dialed: int | None = None  # the host that leads, as far as this one knows
        self._linked = False  # whether it is connected to that host
        self._campaign_at: float | None = None
        self._notice_at = now + FIRST_NOTICE_S
        self._run = ""
        self._ports: tuple[int, ...] | None = None
        self._attempt: int | None = None  # whose tasks run here
        # The last attempt that ran here, its largest step, and the run's time until then.
        self._last: tuple[int, int, Division | None] = (-1, -1, None)
        self._started = (-1, 0)  # the attempt whose tasks started here last, and how often before
        self._alone_since = now
        self._leave_by: float | None = None  # when a preempted host exits at the latest
        self._exit: messages.Over | None = None
        self.keeper.campaigning = True
        self._prepare()

    @property
    def way_out(self) -> messages.Over | None:
        """How this supervisor ends, once no task runs here; None: it does not."""
        return self._exit if self._attempt is None else None

    def _prepare(self) -> None:
        """Gets this host ready for the next attempt; `from_tasks` reports its ports."""
        self.tasks.prepare(self.settings.ports_per_host)

    # ---- the lock ------------------------------------------------------------------------------

    def lease_gained(self, record: Record | None, now: float) -> None:
        """This host has the lock; `record` is what the holder before wrote last."""
        if self._exit or self._leave_by is not None or self._campaign_at is not None:
            self.keeper.resign()
            return
        if record is not None and record.status is not None and record.run == self._run:
            self._leave(
                messages.Over(record.status, record.lines)
            )  # it ended while this host was cut off
            return
        self._unlink(now)
        self.links.dial_host(None)
        self._dialed = None
        own = self.settings, self.host, self.links, self.keeper, self.notify
        self.leader = Leader(*own, record, now)
        self._run = self._run or self.leader.record.run
        self._lead(now, self.leader.publish)
        self._join(now)

    def _lead(self, now: float, event: Callable[..., None], *arguments: Any) -> None:
        """Hands an event to the leader, and then does what it wants of its own host."""
        try:
            event(*arguments)
        except Lost as error:
            self.keeper.resign()
            self.lease_lost(str(error), now)
        while self.leader is not None and self.leader.to_own:
            self._execute(self.leader.to_own.popleft(), now)

    def lease_lost(self, why: str, now: float) -> None:
        """This host has no lock any more, or cannot know."""
        if self.leader is None:
            return
        self.notify(f"this host does not lead any more: {why}")
        self._step_down(now)

    def _step_down(self, now: float) -> None:
        self.leader = None
        self.links.drop(None)
        self._end_tasks()
        self._campaign_at = now + PAUSE_S
        self.keeper.campaigning = False

    def record_seen(self, record: Record | None, now: float) -> None:
        """Another host has the lock, and this is its record."""
        if self.leader is not None or record is None or self._exit is not None:
            return
        if record.status is not None:
            if record.run == self._run and not self._linked:
                self._leave(messages.Over(record.status, record.lines))
            return
        if record.running and self.host not in record.hosts:
            self._alone_since = now
        if record.leader == self.host:  # another host has the lock, and has not written yet
            return
        if record.leader != self._dialed:
            self._unlink(now)
            self._dialed = record.leader
            self.links.dial_host(record.leader)
        if not self._linked and now >= self._notice_at:
            self._notice_at = now + NOTICE_S
            running = f"; attempt {record.attempt} runs on {self.settings.names(record.hosts)}"
            self.notify(
                f"{self.settings.name(record.leader)} has the lock and cannot be reached from "
                f"this host{running if record.running else ''}; trying again"
            )

    # ---- connections ---------------------------------------------------------------------------

    def member_connected(self, host: int, now: float) -> None:
        """Another host has connected to this one."""
        if self.leader is None:
            self.links.drop(host)

    def member_lost(self, host: int, why: str, now: float) -> None:
        """The connection that another host has made is lost."""
        if self.leader is not None:
            self._lead(now, self.leader.lost, host, why, now)

    def from_member(self, host: int, message: messages.Message, now: float) -> None:
        """A message over such a connection."""
        if self.leader is not None and isinstance(message, messages.FromMember):
            self._lead(now, self.leader.receive, host, message, now)

    def leader_connected(self, host: int, now: float) -> None:
        """This host is connected to the one that leads."""
        if host == self._dialed and self.leader is None:
            self._linked = True
            self._join(now)

    def leader_lost(self, host: int, why: str, now: float) -> None:
        """The connection to the host that leads is lost."""
        if host == self._dialed and self.leader is None and self._linked:
            if self._attempt is not None and self._exit is None:
                self.notify(f"{self.settings.name(host)}, which leads, is lost: {why}")
            self._unlink(now)

    def from_leader(self, message: messages.Message, now: float) -> None:
        """A message of the host that leads."""
        if self.leader is None and self._linked:
            self._execute(message, now)

    def _unlink(self, now: float) -> None:
        if self._linked:
            self._linked = False
            self._notice_at = now + FIRST_NOTICE_S
            self._end_tasks()

    # ---- this host's tasks ---------------------------------------------------------------------

    def from_tasks(
        self, message: messages.Ready | messages.RestartRequest | messages.Ended, now: float
    ) -> None:
        """A message of this host's tasks for the leader."""
        match message:
            case messages.Ready(ports=ports):
                self._ports = ports
            case messages.Ended(attempt=attempt, report=report):
                self._attempt = None
                self._last = attempt, report.step, report.division
                self._alone_since = now
        self._tell(message, now)
        if isinstance(message, messages.Ended) and self._exit is None:
            self._prepare()

    def _join(self, now: float) -> None:
        self._tell(messages.Join(dict(self.settings.facts), *self._last), now)
        if self._ports is not None:
            self._tell(messages.Ready(self._ports), now)
        if self._leave_by is not None:
            self._tell(messages.Leaving(), now)

    def _tell(self, message: messages.FromMember, now: float) -> None:
        """Sends a message to whoever leads."""
        if self.leader is not None:
            self._lead(now, self.leader.receive, self.host, message, now)
        elif self._linked:
            self.links.to_leader(message)

    def _execute(self, message: messages.Message, now: float) -> None:
        """Executes a message of the leader."""
        match message:
            case messages.Start() if (
                self._attempt is None
                and self._exit is None
                and self._ports
                and (message.attempt, message.again) > self._started
            ):
                self._run, self._attempt, self._ports = message.run, message.attempt, None
                self._started = message.attempt, message.again
                self._alone_since = now
                self.tasks.do(message)
            case messages.Start():
                self._tell(messages.Ended(message.attempt, AttemptOutcome()), now)
                if self._ports is not None:
                    self._tell(messages.Ready(self._ports), now)
            case (
                messages.RestartReply(attempt=attempt)
                | messages.End(attempt=attempt)
                | messages.Leave(attempt=attempt)
            ):
                if attempt == self._attempt:
                    self.tasks.do(message)
            case messages.Over():
                self._leave(message)
            case messages.Refused(problem=problem):
                self._leave(messages.Over(2, (f"tfmw: {problem}",)))

    def _end_tasks(self) -> None:
        if self._attempt is not None:
            self.tasks.do(messages.End(self._attempt))

    # ---- the end -------------------------------------------------------------------------------

    def signalled(self, number: int, now: float) -> None:
        """This process got a signal."""
        if number in LEAVE and self._leave_by is None:
            self._leave_by = now + self.settings.options.leave_s
            self._tell(messages.Leaving(), now)
        else:
            self._leave(messages.Over(128 + number))

    def _leave(self, way: messages.Over) -> None:
        """Ends this supervisor, once no task runs here."""
        if self._exit is not None:
            return
        self._exit = way
        self.keeper.campaigning = False
        self._end_tasks()

    def tick(self, now: float) -> None:
        """Acts on the time; called several times a second."""
        if self._exit is not None:
            return
        if self._leave_by is not None:
            if now >= self._leave_by:
                self._leave(messages.Over(128 + signal.SIGTERM))
                return
            if self.leader is None and not self._linked and self._attempt is None:
                self._leave(messages.Over(PREEMPTED))  # nobody leads who could dismiss it
                return
        if self._campaign_at is not None and now >= self._campaign_at:
            self._campaign_at = None
            self.keeper.campaigning = True
        if self.leader is not None:
            self._lead(now, self.leader.tick, now, self._alone_since)
            if self.leader is not None and self.leader.resigns:
                self.keeper.resign()
                self._step_down(now)
