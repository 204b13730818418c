"""Settings that all hosts of a run share."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from tfmw.cluster import addresses
from tfmw.launcher.options import RunOptions

HEARTBEAT_S = 0.25
"""Seconds between two heartbeats on a connection."""

SILENCE_S = 3.0
"""Seconds of silence after which a connection counts as lost: twelve heartbeats."""

GATHER_S, REJOIN_S = 30.0, 5.0
"""Seconds to wait for missing hosts: schedulers start them one after the other, and after the
leader's loss the others have to reach a new one. Nobody waits for a host that is lost: if it starts
again, it imports TensorFlow first, which takes longer, and then joins without a step lost."""


@dataclasses.dataclass(frozen=True)
class HostSettings:
    """Settings that all hosts of a run share."""

    hosts: tuple[str, ...]  # names or addresses, the same everywhere; "host:port" in a run
    workers_per_host: int = 1  # number of training tasks on each host
    min_hosts: int | None = None  # the least number of hosts that train; None: all of them
    # time to wait for missing hosts; None: `GATHER_S`, `REJOIN_S` or none, as these say
    rejoin_timeout_s: float | None = None
    options: RunOptions = dataclasses.field(default_factory=RunOptions)  # restarts, time limits
    facts: Mapping[str, str] = dataclasses.field(default_factory=dict)  # further settings, by name
    ps: int = 0  # number of parameter servers, on all hosts together
    evaluator: bool = False  # whether the host that leads has an evaluator

    @property
    def least_hosts(self) -> int:
        """Minimum number of hosts."""
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
        return max(self.patience_s(GATHER_S), self.options.start_timeout_s or float("inf"))

    def patience_s(self, default_s: float) -> float:
        """Seconds to wait for missing hosts before an attempt."""
        return default_s if self.rejoin_timeout_s is None else self.rejoin_timeout_s

    def name(self, host: int) -> str:
        """Name of a host in messages, with its port if another host has that name."""
        names = [addresses.split(address)[0] for address in self.hosts]
        return names[host] if names.count(names[host]) == 1 else self.hosts[host]

    def names(self, hosts: Any) -> str:
        """The names of several hosts, in order."""
        return ", ".join(self.name(host) for host in sorted(hosts))
