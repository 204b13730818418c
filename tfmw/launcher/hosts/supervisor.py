"""The supervisor of one host, which leads while its host has the lock.

    supervisor = Supervisor(settings, 1, now, links=..., keeper=..., tasks=..., notify=print)
    supervisor.lease_gained(None, now=0.3)
    supervisor.from_tasks(Ready((12001,)), now=0.4)
    supervisor.way_out                          # its exit status and lines, once it ends

It is a state machine without a socket, thread, file or clock of its own. Each method is an event,
in which it calls the links, the lock's keeper and the tasks. They do not call it back:
`supervisor_loop.py` passes their reports on, and tests substitute simulated ones.

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
"""Seconds for which a supervisor that has released the lock does not try to get it again."""

FIRST_NOTICE_S = 10.0
NOTICE_S = 30.0
"""Seconds until a host that cannot reach the leader prints a notice, and between two notices."""


@dataclasses.dataclass(eq=False)
class Supervisor:
    """State machine of one host."""

    settings: HostSettings
    host: int  # index of this host
    now: dataclasses.InitVar[float]  # monotonic seconds
    links: HostLinks
    keeper: LeaseKeeper
    tasks: TasksOfOneMachine
    notify: Callable[[str], None]  # prints a line for the user

    def __post_init__(self, now: float) -> None:
        self.leader: Leader | None = None
        """The leader's part, while this host leads; otherwise None."""
        self._dialed: int | None = None  # the leading host, as far as this one knows
        self._linked = False  # whether it is connected to that host
        self._campaign_at: float | None = None
        self._notice_at = now + FIRST_NOTICE_S
        self._run = ""
        self._ports: tuple[int, ...] | None = None
        self._attempt: int | None = None  # number of the attempt whose tasks run here
        # (the last attempt that ran here, its largest step, the run's time until then)
        self._last: tuple[int, int, Division | None] = (-1, -1, None)
        # (the attempt whose tasks started here last, number of earlier starts)
        self._started = (-1, 0)
        self._alone_since = now
        self._leave_by: float | None = None  # time at which a preempted host exits at the latest
        self._exit: messages.Over | None = None
        self.keeper.campaigning = True
        self._prepare()

    @property
    def way_out(self) -> messages.Over | None:
        """End of this supervisor, once no task runs here; None if it does not end."""
        return self._exit if self._attempt is None else None

    def _prepare(self) -> None:
        """Prepares this host for the next attempt; `from_tasks` reports its ports."""
        self.tasks.prepare(self.settings.ports_per_host)

    # ---- the lock ------------------------------------------------------------------------------

    def lease_gained(self, record: Record | None, now: float) -> None:
        """Handles that this host got the lock; `record` is the last one of the previous holder."""
        if self._exit or self._leave_by is not None or self._campaign_at is not None:
            self.keeper.resign()
            return
        if record is not None and record.status is not None and record.run == self._run:
            self._leave(
                messages.Over(record.status, record.lines)
            )  # the run ended while this host was cut off
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
        """Passes an event to the leader, and then executes its messages for its own host."""
        try:
            event(*arguments)
        except Lost as error:
            self.keeper.resign()
            self.lease_lost(str(error), now)
        while self.leader is not None and self.leader.to_own:
            self._execute(self.leader.to_own.popleft(), now)

    def lease_lost(self, why: str, now: float) -> None:
        """Handles that this host has lost the lock, or cannot know whether it has it."""
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
        """Handles that another host has the lock, with this record."""
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
        """Handles a connection that another host has made."""
        if self.leader is None:
            self.links.drop(host)

    def member_lost(self, host: int, why: str, now: float) -> None:
        """Handles the loss of a connection that another host has made."""
        if self.leader is not None:
            self._lead(now, self.leader.lost, host, why, now)

    def from_member(self, host: int, message: messages.Message, now: float) -> None:
        """Processes a message over such a connection."""
        if self.leader is not None and isinstance(message, messages.FromMember):
            self._lead(now, self.leader.receive, host, message, now)

    def leader_connected(self, host: int, now: float) -> None:
        """Handles that this host is connected to the leading one."""
        if host == self._dialed and self.leader is None:
            self._linked = True
            self._join(now)

    def leader_lost(self, host: int, why: str, now: float) -> None:
        """Handles the loss of the connection to the leading host."""
        if host == self._dialed and self.leader is None and self._linked:
            if self._attempt is not None and self._exit is None:
                self.notify(f"{self.settings.name(host)}, which leads, is lost: {why}")
            self._unlink(now)

    def from_leader(self, message: messages.Message, now: float) -> None:
        """Processes a message of the leading host."""
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
        """Passes a message of this host's tasks to the leader."""
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
        """Sends a message to the leader."""
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

    def _end_tasks(self) -> None:
        if self._attempt is not None:
            self.tasks.do(messages.End(self._attempt))

    # ---- the end -------------------------------------------------------------------------------

    def signalled(self, number: int, now: float) -> None:
        """Handles a signal to this process."""
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
        """Handles the passage of time; called several times a second."""
        if self._exit is not None:
            return
        if self._leave_by is not None:
            if now >= self._leave_by:
                self._leave(messages.Over(128 + signal.SIGTERM))
                return
            if self.leader is None and not self._linked and self._attempt is None:
                self._leave(messages.Over(PREEMPTED))  # no host leads that could dismiss it
                return
        if self._campaign_at is not None and now >= self._campaign_at:
            self._campaign_at = None
            self.keeper.campaigning = True
        if self.leader is not None:
            self._lead(now, self.leader.tick, now, self._alone_since)
            if self.leader is not None and self.leader.resigns:
                self.keeper.resign()
                self._step_down(now)
