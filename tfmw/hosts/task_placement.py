"""The hosts and addresses of the tasks of an attempt.

    plan = placed(settings, leader=1, ports={0: (7001, 7002), 1: (7001, 7002), 2: (7001, 7002)})
    plan.cluster            # {"chief": ("h1:7001",), "worker": (...), "ps": (...)}
    plan.tasks[2]           # (("worker", 2),)
    plan.restarts_alone(2)  # whether the attempt continues while host 2 is lost

========================  ======================================================================
task                      host
========================  ======================================================================
worker                    every host, `workers_per_host` of them
chief (with servers), and the one that leads: an attempt ends with its leader's connection anyway
evaluator
parameter server i        the i-th host, counted from the one that leads, and around again
========================  ======================================================================

With fewer servers than hosts, the last hosts have workers only. Losing one of those costs its
workers only: they start again, at their old addresses, when the host is back.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from tfmw.cluster import addresses
from tfmw.hosts.actions import HostSettings

Layout = tuple[tuple[str, int], ...]
"""(kind, index) of some tasks."""


@dataclasses.dataclass(frozen=True)
class TaskPlacement:
    """The hosts of an attempt's tasks.

    Attributes:
        cluster: addresses of all tasks by kind, as in TF_CONFIG; an evaluator has none.
        tasks: of each host.
    """

    cluster: dict[str, tuple[str, ...]]
    tasks: dict[int, Layout]

    def restarts_alone(self, host: int) -> bool:
        """Whether the other hosts continue without this one: workers beside servers."""
        return "ps" in self.cluster and all(kind == "worker" for kind, _ in self.tasks[host])


def placed(
    settings: HostSettings, leader: int, ports: Mapping[int, Sequence[int]]
) -> TaskPlacement:
    """Places the tasks of an attempt.

    Args:
        settings: of the run.
        leader: index of the host that leads; it takes part.
        ports: of each host that takes part, `settings.ports_per_host` of them.
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
        name = addresses.split(settings.hosts[host])[0]
        cluster[kind] = (*before, addresses.joined(name, next(unused[host])))
        tasks[host] += ((kind, len(before)),)
    if settings.evaluator:
        tasks[leader] += (("evaluator", 0),)
    return TaskPlacement(cluster, tasks)
