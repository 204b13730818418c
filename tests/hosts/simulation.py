"""Several supervisors in simulated time: their network, their lock, their tasks, and what breaks.

    world = World(hosts=3, min_hosts=2, expires=False)
    world.cut(0, 1)
    world.run(12.0)                # seconds; asserts what must never happen, all the way
    world.trains()                 # hosts of the attempt that trains now

Nothing here sleeps, and everything that may vary is drawn from one seeded generator.
"""

from __future__ import annotations

import dataclasses
import random
from collections import deque
from typing import Any

from tfmw.launcher.failure import Failure
from tfmw.launcher.hosts.lease import Record
from tfmw.launcher.hosts.settings import HEARTBEAT_S, SILENCE_S, HostSettings
from tfmw.launcher.hosts.supervisor import Supervisor
from tfmw.launcher.options import RunOptions
from tfmw.launcher.remote.messages import (
    End,
    Ended,
    Leave,
    Over,
    Ready,
    RestartReply,
    RestartRequest,
    Start,
    decode,
    encode,
)
from tfmw.launcher.restart import AttemptOutcome
from tfmw.storage.leased_object import Lost

STEP_S = 0.1
TTL_S, MARGIN_S = 10.0, 2.0
TRAINING_S = 40.0  # of all attempts together, until the run is done
LOST_PEER_S = 8.0  # until tasks notice by themselves that another one is gone


def failure(host: int, secondary: bool) -> Failure:
    return Failure(
        f"task of {host}",
        error="lost a peer" if secondary else "",
        status=0 if secondary else -9,
        seconds=1.0,
        step=1,
        external=True,
        secondary=secondary,
    )


@dataclasses.dataclass
class Tasks:
    """The tasks of one host in one attempt."""

    start: Start
    since: float
    leave_at: float | None = None
    end_at: float | None = None  # ended by the supervisor
    report: AttemptOutcome | None = None


@dataclasses.dataclass
class Link:
    """A connection that one host has made to another."""

    target: int
    up: bool = False
    retry_at: float = 0.0
    alive: list[float] = dataclasses.field(default_factory=lambda: [0.0, 0.0])  # either end
    open: list[bool] = dataclasses.field(default_factory=lambda: [False, False])
    to_leader: deque[tuple[float, Any]] = dataclasses.field(default_factory=deque)
    to_member: deque[tuple[float, Any]] = dataclasses.field(default_factory=deque)


class Host:
    """One supervisor, and what its process holds: its links, its lock and its tasks."""

    def __init__(self, world: World, index: int) -> None:
        self.world = world
        self.index = index
        self.link: Link | None = None
        self.tasks: Tasks | None = None
        self.prepare_at: float | None = None
        self.campaigning = False
        self.poll_at = world.now
        self.leads = False
        self.held_until = 0.0
        self.exit: Over | None = None
        own: Any = self
        self.machine = Supervisor(world.settings, index, world.now, own, own, own, print)

    # ---- what supervisors ask for: of links ----

    def to_leader(self, message: Any) -> None:
        if self.link is not None and self.link.open[0]:
            self.world.send(self.link.to_leader, message)

    def to_member(self, member: int, message: Any) -> None:
        link = self.world.links_to(self.index).get(member)
        if link is not None and link.open[1]:
            self.world.send(link.to_member, message)

    def drop(self, member: int | None) -> None:
        for other, link in self.world.links_to(self.index).items():
            if member in (None, other):
                link.open[1] = False

    def dial_host(self, target: int | None) -> None:
        link, world = self.link, self.world
        self.link = None if target is None else Link(target)
        if link is not None and link.up and link.open[1]:
            peer = world.hosts[link.target]
            if peer is not None and world.reaches(self.index, link.target):
                peer.machine.member_lost(self.index, "closed", world.now)

    # ---- of the lock ----

    def resign(self) -> None:
        self.leads = False
        if self.world.holder is self:
            self.world.holder = None

    def publish(self, record: Record) -> None:
        world = self.world
        if world.holder is not self or self.index in world.no_lock:
            raise Lost("not written")
        assert world.record is None or record.attempt >= world.record.attempt
        world.record = record

    # ---- of tasks ----

    def prepare(self, count: int) -> None:
        self.prepare_at = self.world.now + self.world.random.uniform(0.0, 1.0)

    def do(self, message: Any) -> None:
        world, tasks = self.world, self.tasks
        match message:
            case Start():
                world.start_tasks(self, message)
            case End():
                if tasks is not None and tasks.end_at is None:
                    tasks.end_at = world.now + world.random.uniform(0.0, 0.5)
            case RestartReply() if message.allowed:
                assert message.restarts not in world.restarts, "two restarts are counted as one"
                assert message.restarts <= world.settings.options.max_restarts
                world.restarts.append(message.restarts)
            case RestartReply() if tasks is not None and tasks.report is None:
                report = AttemptOutcome(failures=(failure(self.index, False),), step=world.step())
                tasks.report = report
            case Leave() if tasks is not None:
                tasks.leave_at = world.now + world.random.uniform(0.0, 2.0)


class World:
    """All of it.

    Args:
        hosts: how many.
        min_hosts: how few may train.
        expires: whether the lock ends some seconds after its holder cannot reach it (a bucket),
            or with its holder's process only (a shared directory).
        seed: of everything that varies.
        ps: how many parameter servers.
        rejoin_timeout_s: to wait for hosts that are not there; None: the default.
        max_restarts: of the run.
    """

    def __init__(
        self,
        hosts: int,
        min_hosts: int,
        expires: bool,
        seed: int = 0,
        ps: int = 0,
        rejoin_timeout_s: float | None = 3.0,
        max_restarts: int = 10**6,
    ) -> None:
        self.settings = HostSettings(
            hosts=tuple(f"h{i}:1" for i in range(hosts)),
            workers_per_host=1,
            min_hosts=min_hosts,
            rejoin_timeout_s=rejoin_timeout_s,
            options=RunOptions(max_restarts=max_restarts, start_timeout_s=0.0),
            ps=ps,
        )
        self.now = 0.0
        self.random = random.Random(seed)
        self.hosts: list[Host | None] = [None] * hosts
        self.cuts: set[frozenset[int]] = set()
        self.no_lock: set[int] = set()  # hosts that cannot reach the lock
        self.expires = expires
        self.holder: Host | None = None
        self.expiry = 0.0
        self.record: Record | None = None
        self.starts: dict[int, Start] = {}  # of each attempt, as first seen
        self.started: set[tuple[int, int, int]] = set()  # (attempt, host, how often before)
        self.restarts: list[int] = []  # the number of each restart of a single task
        self.writes: list[tuple[int, int]] = []  # (attempt, host) of each backup
        self.trained = 0.0
        self.vanished: list[tuple[int, Link]] = []  # connections that dead hosts had made
        self.statuses: list[tuple[int, int]] = []  # (host, exit status) of all supervisors
        for index in range(hosts):
            self.start(index)

    # ---- what breaks ---------------------------------------------------------------------------

    def start(self, index: int) -> None:
        if self.hosts[index] is None:
            self.hosts[index] = Host(self, index)

    def kill(self, index: int) -> None:
        host = self.hosts[index]
        if host is not None:
            if self.holder is host and not self.expires:
                self.holder = None
            self._vanish(index, host)

    def _vanish(self, index: int, host: Host) -> None:
        """A process is gone: its connections close, where the other end can be reached."""
        self.hosts[index] = None
        for made in self.links_to(index).values():  # no other process uses them
            made.open[1] = False
            made.to_leader.clear()
            made.to_member.clear()
        link = host.link
        if link is not None and link.up and link.open[1]:
            self.vanished.append((index, link))

    def kill_task(self, index: int) -> None:
        host = self.hosts[index]
        if host is not None and host.tasks is not None and host.tasks.report is None:
            host.tasks.report = AttemptOutcome(failures=(failure(index, False),), step=self.step())

    def kill_task_alone(self, index: int) -> None:
        """A task that could restart alone, beside servers."""
        host = self.hosts[index]
        if host is not None and host.tasks is not None and self.settings.ps:
            wanted = RestartRequest(host.tasks.start.attempt, f"task of {index}")
            host.machine.from_tasks(wanted, self.now)

    def cut(self, one: int, other: int) -> None:
        self.cuts.add(frozenset({one, other}))

    def mend(self, one: int, other: int) -> None:
        self.cuts.discard(frozenset({one, other}))

    def reaches(self, one: int, other: int) -> bool:
        return frozenset({one, other}) not in self.cuts

    # ---- time ----------------------------------------------------------------------------------

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now += STEP_S
            self._expire_lock()
            self._ends_of_vanished()
            for index, host in enumerate(self.hosts):
                if host is not None:
                    self._links(index, host)
            for index, host in enumerate(self.hosts):
                if host is not None:
                    self._lock(index, host)
                    self._look_at_end(index, host)
                    self._work(index, host)
                    self._look_at_end(index, host)
                    host.machine.tick(self.now)
                    self._look_at_end(index, host)
            self._train()

    def step(self) -> int:
        return int(self.trained)

    def trains(self) -> tuple[int, ...]:
        """The hosts of the attempt that trains, if all that it needs do."""
        for host in self.hosts:
            if host is not None and host.tasks is not None:
                start = host.tasks.start
                if self._all_train(start):
                    return tuple(i for i in start.hosts if self._trains(i, start.attempt))
        return ()

    def _all_train(self, start: Start) -> bool:
        """Whether the hosts train that an attempt needs: with servers, those and the chief's."""
        needed = [*start.cluster.get("chief", ()), *start.cluster.get("ps", ())]
        names = {address.split(":")[0] for address in needed}
        return all(
            self._trains(index, start.attempt)
            for index in start.hosts
            if not names or f"h{index}" in names
        )

    def _trains(self, index: int, attempt: int) -> bool:
        host = self.hosts[index]
        return (
            host is not None
            and host.tasks is not None
            and host.tasks.start.attempt == attempt
            and host.tasks.report is None
            and host.tasks.end_at is None
        )

    # ---- the lock ------------------------------------------------------------------------------

    def _expire_lock(self) -> None:
        if self.expires and self.holder is not None and self.now >= self.expiry:
            self.holder = None

    def _lock(self, index: int, host: Host) -> None:
        if host.leads and self.expires and self.now >= host.held_until:
            host.leads = False
            host.machine.lease_lost("not renewed", self.now)
        if self.now < host.poll_at or index in self.no_lock:
            return
        host.poll_at = self.now + self.random.uniform(0.2, 0.6)
        if host.leads and self.holder is host:
            self._renew(host)
        elif host.leads:
            host.leads = False
            host.machine.lease_lost("another has it", self.now)
        elif host.campaigning and self.holder is None:
            self.holder, host.leads = host, True
            self._renew(host)
            host.machine.lease_gained(self.record, self.now)
        else:
            host.machine.record_seen(self.record, self.now)

    def _renew(self, host: Host) -> None:
        self.expiry = self.now + TTL_S
        host.held_until = self.now + TTL_S - MARGIN_S

    # ---- the network ---------------------------------------------------------------------------

    def _links(self, index: int, host: Host) -> None:
        link = host.link
        if link is None:
            return
        peer = self.hosts[link.target]
        reaches = self.reaches(index, link.target)
        if link.up:
            self._keep_up(index, host, link, peer, reaches)
        elif reaches and peer is not None and peer.exit is None and self.now >= link.retry_at:
            link.up, link.open = True, [True, True]
            link.alive = [self.now, self.now]
            link.to_leader.clear()
            link.to_member.clear()
            peer.machine.member_connected(index, self.now)
            host.machine.leader_connected(link.target, self.now)

    def _keep_up(
        self, index: int, host: Host, link: Link, peer: Host | None, reaches: bool
    ) -> None:
        if reaches and peer is not None:
            link.alive = [self.now, self.now]
            self._deliver(link.to_leader, lambda m: peer.machine.from_member(index, m, self.now))
            self._look_at_end(link.target, peer)
            self._deliver(link.to_member, lambda m: host.machine.from_leader(m, self.now))
            self._look_at_end(index, host)
        gone = reaches and (peer is None or not all(link.open))
        for end in (0, 1):
            silent = self.now - link.alive[end] >= SILENCE_S + self.random.uniform(0.0, HEARTBEAT_S)
            if link.open[end] and (gone or silent):
                link.open[end] = False
                if end == 0:
                    host.machine.leader_lost(link.target, "silent", self.now)
                elif peer is not None:
                    peer.machine.member_lost(index, "silent", self.now)
        if not any(link.open):
            link.up, link.retry_at = False, self.now + self.random.uniform(0.1, 0.5)

    def _ends_of_vanished(self) -> None:
        for index, link in list(self.vanished):
            peer = self.hosts[link.target]
            if self.reaches(index, link.target) or self.now - link.alive[1] >= SILENCE_S:
                self.vanished.remove((index, link))
                later = self.links_to(link.target).get(index)  # of that host's next supervisor
                replaced = later is not None and later.up
                if peer is not None and link.open[1] and not replaced:
                    peer.machine.member_lost(index, "gone", self.now)
                    self._look_at_end(link.target, peer)

    def _deliver(self, queue: deque[tuple[float, Any]], give: Any) -> None:
        while queue and queue[0][0] <= self.now:
            give(decode(queue.popleft()[1]))

    def send(self, queue: deque[tuple[float, Any]], message: Any) -> None:
        at = self.now + self.random.uniform(0.0, 0.4)
        queue.append((max(at, queue[-1][0]) if queue else at, encode(message)))

    def links_to(self, target: int) -> dict[int, Link]:
        return {
            index: host.link
            for index, host in enumerate(self.hosts)
            if host is not None and host.link is not None and host.link.target == target
        }

    # ---- tasks ---------------------------------------------------------------------------------

    def _work(self, index: int, host: Host) -> None:
        if host.prepare_at is not None and self.now >= host.prepare_at:
            host.prepare_at = None
            ports = range(1000, 1000 + self.settings.ports_per_host)
            host.machine.from_tasks(Ready(tuple(ports)), self.now)
        tasks = host.tasks
        if tasks is None:
            return
        if tasks.end_at is not None and self.now >= tasks.end_at:
            host.tasks = None
            report = tasks.report or AttemptOutcome(step=self.step())
            host.machine.from_tasks(Ended(tasks.start.attempt, report), self.now)
            return
        if tasks.report is not None and tasks.end_at is None:
            host.tasks = None
            host.machine.from_tasks(Ended(tasks.start.attempt, tasks.report), self.now)
            return
        if tasks.report is not None:
            return
        train = self._all_train(tasks.start)
        if tasks.leave_at is not None and self.now >= tasks.leave_at and train:
            for peer in self.trains():  # at the same step
                other = self.hosts[peer]
                assert other is not None
                assert other.tasks is not None
                other.tasks.report = AttemptOutcome(preempted=True, step=self.step())
        elif train:
            tasks.since = self.now
        elif self.now - tasks.since >= LOST_PEER_S:
            tasks.report = AttemptOutcome(failures=(failure(index, True),), step=self.step())

    def _train(self) -> None:
        """The attempt that trains makes steps, and its chief writes a backup of each."""
        hosts = self.trains()
        if not hosts:
            return
        self.trained += STEP_S
        chief = self.hosts[hosts[0]]
        assert chief is not None
        assert chief.tasks is not None
        attempt = chief.tasks.start.attempt
        assert self.record is not None
        if attempt == self.record.attempt:  # the check of `tfmw.storage.fence`
            self.writes.append((attempt, hosts[0]))
        if self.trained >= TRAINING_S:
            for index in hosts:
                host = self.hosts[index]
                assert host is not None
                assert host.tasks is not None
                host.tasks.report = AttemptOutcome(done=True, step=self.step())

    # ---- the ends of supervisors -----------------------------------------------------------------

    def _look_at_end(self, index: int, host: Host) -> None:
        way = host.machine.way_out
        if host.exit is None and self.hosts[index] is host and way is not None:
            host.exit = way
            self.statuses.append((index, way.status))
            host.resign()
            self._flush(index)
            self._vanish(index, host)

    def _flush(self, index: int) -> None:
        """Sends pending messages when a supervisor exits."""
        for member, link in self.links_to(index).items():
            other = self.hosts[member]
            if link.up and self.reaches(index, member) and other is not None:
                while link.to_member:
                    other.machine.from_leader(decode(link.to_member.popleft()[1]), self.now)

    def start_tasks(self, host: Host, start: Start) -> None:
        index = host.index
        assert host.tasks is None, "two attempts on one host"
        part = start.attempt, index, start.again
        assert part not in self.started, "tasks of an attempt that start twice"
        assert not start.again or self.settings.ps, "only workers beside servers start again alone"
        self.started.add(part)
        first = self.starts.setdefault(start.attempt, start)
        assert (first.hosts, first.cluster) == (start.hosts, start.cluster), "two of one number"
        assert index in start.hosts
        assert len(start.hosts) >= self.settings.least_hosts
        for other in self.hosts:  # they write files that no fence protects
            earlier = other.tasks if other is not None else None
            assert earlier is None or earlier.start.attempt == start.attempt, "two attempts at once"
        host.tasks = Tasks(start, self.now)
