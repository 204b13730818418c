"""Settings of the supervisors' state machines, and their requests to the process around them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from tfmw.cluster import addresses
from tfmw.launcher.options import RunOptions
from tfmw.remote.messages import End, Leave, Message, RestartReply, Start

HEARTBEAT_S = 0.5
"""Seconds between two signs of life on a connection."""

SILENCE_S = 3.0
"""Seconds of silence after which a connection is taken for lost: six signs of life."""


@dataclasses.dataclass(frozen=True)
class HostSettings:
    """Settings that all hosts of a run share.

    Args:
        hosts: names or addresses of all supervisors, the same everywhere; "host:port" in a run.
        workers_per_host: tasks that train, on each host.
        min_hosts: how few hosts may train; None: all of them.
        rejoin_timeout_s: seconds to wait for hosts that are not there.
        options: restarts and time limits.
        facts: further settings that all hosts must share, by name.
        ps: number of parameter servers, on all hosts together.
        evaluator: whether the host that leads has an evaluator.
    """

    hosts: tuple[str, ...]
    workers_per_host: int = 1
    min_hosts: int | None = None
    rejoin_timeout_s: float = 30.0
    options: RunOptions = dataclasses.field(default_factory=RunOptions)
    facts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    ps: int = 0
    evaluator: bool = False

    @property
    def least_hosts(self) -> int:
        """How few hosts may train."""
        return len(self.hosts) if self.min_hosts is None else self.min_hosts

    @property
    def ports_per_host(self) -> int:
        """The most ports that the tasks of one host need; see `leader.placed`."""
        if not self.ps:
            return self.workers_per_host
        return self.workers_per_host + 1 + math.ceil(self.ps / self.least_hosts)

    @property
    def give_up_s(self) -> float:
        """Seconds without enough hosts after which a run ends."""
        return max(self.rejoin_timeout_s, self.options.start_timeout_s or float("inf"))

    def name(self, host: int) -> str:
        """How a host is called in messages."""
        return addresses.split(self.hosts[host])[0]

    def names(self, hosts: Any) -> str:
        """The names of several hosts, in order."""
        return ", ".join(self.name(host) for host in sorted(hosts))


@dataclasses.dataclass(frozen=True)
class Record:
    """The leader's notes beside the lock.

    Attributes:
        run: identifies the run.
        attempt: number of the last attempt; it only grows, from one run to the next too.
        leader: index of the host that leads.
        hosts: indexes of the hosts of the last attempt.
        running: whether that attempt has not ended, as far as its leader knew.
        policy: the counts of `RestartPolicy`.
        status: how the run ended; None: it has not.
        lines: about that, for the user.
    """

    run: str
    attempt: int = -1
    leader: int = 0
    hosts: tuple[int, ...] = ()
    running: bool = False
    policy: dict[str, Any] = dataclasses.field(default_factory=dict)
    status: int | None = None
    lines: tuple[str, ...] = ()


class Action:
    """A request of a supervisor to the process around it."""


@dataclasses.dataclass(frozen=True)
class ToMember(Action):
    """Send a message to a host that is connected to this one, which leads."""

    host: int
    message: Message


@dataclasses.dataclass(frozen=True)
class ToLeader(Action):
    """Send a message to the host that leads."""

    message: Message


@dataclasses.dataclass(frozen=True)
class Drop(Action):
    """Close the connection of one member, or of all."""

    host: int | None = None


@dataclasses.dataclass(frozen=True)
class Dial(Action):
    """Be connected to this host, which leads; None: to none."""

    host: int | None


@dataclasses.dataclass(frozen=True)
class Campaign(Action):
    """Whether to try to get the lock."""

    on: bool


@dataclasses.dataclass(frozen=True)
class Resign(Action):
    """Give the lock back."""


@dataclasses.dataclass(frozen=True)
class Publish(Action):
    """Write the record durably, as the holder of the lock. What follows depends on it."""

    record: Record


@dataclasses.dataclass(frozen=True)
class Prepare(Action):
    """Get this host ready for the next attempt; `from_tasks` reports its ports."""


@dataclasses.dataclass(frozen=True)
class ToTasks(Action):
    """Start or end this host's tasks, restart one, or have them leave; `from_tasks` reports."""

    message: Start | RestartReply | Leave | End


@dataclasses.dataclass(frozen=True)
class Notify(Action):
    """Print a line for the user."""

    text: str


@dataclasses.dataclass(frozen=True)
class Exit(Action):
    """End this supervisor, after what was sent has gone out."""

    status: int
    lines: tuple[str, ...] = ()
