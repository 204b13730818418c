"""Supervisors in simulated time: any death or cut link, at any time and in any order.

`make nightly` runs many more schedules than `make test`.
"""

from __future__ import annotations

import os
import signal
from typing import Any
from unittest import mock

import hypothesis
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tests.hosts.simulation import World
from tfmw.errors import PREEMPTED
from tfmw.launcher.hosts.leader import DRAIN_S
from tfmw.launcher.hosts.lease import Record
from tfmw.launcher.hosts.settings import GATHER_S, REJOIN_S, SILENCE_S
from tfmw.launcher.hosts.supervisor import Supervisor
from tfmw.launcher.remote.messages import Ended, Join, Over, Ready, Start
from tfmw.launcher.restart import AttemptOutcome
from tfmw.storage.leased_object import Lost

HOSTS = 3
PATIENCE_S = 90.0  # simulated
INDEX = st.integers(0, HOSTS - 1)


class Schedules(RuleBasedStateMachine):
    """Any schedule of crashes, delays and cuts.

    `World` asserts that each attempt starts once, and that no two of them run at the same time.
    """

    world: World

    @initialize(
        min_hosts=st.integers(1, HOSTS),
        expires=st.booleans(),
        seed=st.integers(0, 2**16),
        ps=st.integers(0, 2),
        rejoin_timeout_s=st.sampled_from([0.0, 3.0]),
    )
    def begin(
        self, min_hosts: int, expires: bool, seed: int, ps: int, rejoin_timeout_s: float
    ) -> None:
        self.world = World(HOSTS, min_hosts, expires, seed, ps, rejoin_timeout_s)

    @rule(seconds=st.sampled_from([0.3, 1.0, 4.0, 9.0, 15.0]))
    def wait(self, seconds: float) -> None:
        self.world.run(seconds)

    @rule(host=INDEX)
    def kill_supervisor(self, host: int) -> None:
        self.world.kill(host)

    @rule(host=INDEX)
    def come_back(self, host: int) -> None:
        self.world.start(host)

    @rule(host=INDEX)
    def kill_task(self, host: int) -> None:
        self.world.kill_task(host)

    @rule(host=INDEX)
    def kill_task_alone(self, host: int) -> None:
        self.world.kill_task_alone(host)

    @rule(one=INDEX, other=INDEX)
    def cut(self, one: int, other: int) -> None:
        if one != other:
            self.world.cut(one, other)

    @rule(host=INDEX)
    def cut_off(self, host: int) -> None:
        for other in set(range(HOSTS)) - {host}:
            self.world.cut(host, other)

    @rule()
    def mend_all(self) -> None:
        self.world.cuts.clear()

    @rule(host=INDEX)
    def cut_lock(self, host: int) -> None:
        if self.world.expires:  # a hung directory keeps `flock`, and nobody else can get it
            self.world.no_lock.add(host)

    @rule()
    def mend_lock(self) -> None:
        self.world.no_lock.clear()

    @precondition(lambda self: hasattr(self, "world"))
    @rule(group=st.sets(INDEX, min_size=1), gone=st.booleans())
    def settle(self, group: set[int], gone: bool) -> None:
        """Checks that hosts train, or the run is done, once enough see each other and the lock.

        The others are gone, or alive and cut off.
        """
        world = self.world
        if len(group) < world.settings.least_hosts:
            return
        world.cuts.clear()
        world.no_lock.clear()
        for host in range(HOSTS):
            if host in group:
                world.start(host)
                continue
            if gone:
                world.kill(host)
            for other in set(range(HOSTS)) - {host}:
                world.cut(host, other)
        enough = world.trained + 3.0
        deadline = world.now + PATIENCE_S
        while world.trained < enough and all(status for _, status in world.statuses):
            world.run(1.0)
            holder = world.holder
            assert world.now < deadline, (
                f"nothing trains: {group} of {world.settings.least_hosts}, lock at "
                f"{world.hosts.index(holder) if holder in world.hosts else None}, {world.record}"
            )

    def teardown(self) -> None:
        if hasattr(self, "world"):
            assert all(status == 0 for _, status in self.world.statuses), self.world.statuses


Schedules.TestCase.settings = hypothesis.settings(
    max_examples=int(os.environ.get("TFMW_TEST_SCHEDULES", "300")),
    stateful_step_count=25,
    deadline=None,
    print_blob=True,
    phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink],
    suppress_health_check=list(hypothesis.HealthCheck),
)
TestSchedules = Schedules.TestCase


def training(min_hosts: int, expires: bool, ps: int = 0) -> World:
    """A world whose three hosts train, and are not done soon."""
    world = World(HOSTS, min_hosts, expires, ps=ps)
    world.run(6.0)
    assert world.trains() == (0, 1, 2)
    return world


def leader_of(world: World) -> int:
    return world.hosts.index(world.holder)


@pytest.mark.parametrize("leads", [True, False])
def test_a_host_that_is_cut_off_ends_its_tasks(leads):
    world = training(min_hosts=2, expires=False)
    victim = (leader_of(world) + (0 if leads else 1)) % HOSTS
    for other in set(range(HOSTS)) - {victim}:
        world.cut(victim, other)
    world.run(SILENCE_S + 2.0)
    host = world.hosts[victim]
    assert host is not None
    assert host.tasks is None  # those of the others may still wait for it
    # Its lock has passed on as soon as no task of it can run any more.
    world.run(DRAIN_S + 2.0)
    assert set(world.trains()) == set(range(HOSTS)) - {victim}
    world.cuts.clear()
    world.run(10.0)
    assert world.trains() == (0, 1, 2)


def test_a_run_waits_for_hosts_that_have_not_come_yet_and_not_for_lost_ones():
    world = World(HOSTS, 2, expires=False, rejoin_timeout_s=None)
    world.kill(2)
    world.run(GATHER_S - 2.0)
    assert world.trains() == ()
    world.run(6.0)
    assert world.trains() == (0, 1)
    world.start(2)
    world.run(10.0)
    assert world.trains() == (0, 1, 2)
    for leads in (False, True):
        victim = (leader_of(world) + (0 if leads else 1)) % HOSTS
        world.kill(victim)
        world.run(DRAIN_S / 2)
        assert world.trains() == ()
        world.run(REJOIN_S - 1.5)
        assert set(world.trains()) == set(range(HOSTS)) - {victim}
        world.start(victim)
        world.run(10.0)
        assert world.trains() == (0, 1, 2)


def test_a_leader_that_cannot_write_is_ready_for_the_next_attempt():
    """The same message as the record has a request of the attempt's end, which is not lost."""
    world = training(min_hosts=1, expires=True)
    leader = leader_of(world)
    for other in set(range(HOSTS)) - {leader}:
        world.kill(other)
    world.run(8.0)
    assert world.trains() == (leader,)
    world.no_lock.add(leader)
    world.kill_task(leader)
    world.run(3.0)
    world.no_lock.clear()
    world.run(20.0)
    assert world.trains() == (leader,)
    assert max(world.starts) == 2


def supervisor_of(process: Any) -> Supervisor:
    """One of several hosts, whose links, lock and tasks only note what they were called for."""
    settings = World(HOSTS, 1, expires=True, rejoin_timeout_s=0.0).settings
    return Supervisor(settings, 0, 0.0, process, process, process, print)


def test_a_host_with_other_settings_ends_with_the_reason():
    leads, other = mock.Mock(), mock.Mock()
    leader, member = supervisor_of(leads), supervisor_of(other)
    leader.lease_gained(None, 0.1)
    leader.from_member(1, Join({"--min-hosts": "2"}, -1, -1), 0.2)
    (host, message), _ = leads.to_member.call_args
    assert host == 1
    member.record_seen(Record("run", leader=1), 0.2)
    member.leader_connected(1, 0.3)
    member.from_leader(message, 0.4)
    (line,) = message.lines
    assert member.way_out == Over(2, (line,))
    assert line.startswith("tfmw: hosts disagree about --min-hosts: the one that leads has nothing")


def test_an_attempt_that_could_not_be_recorded_starts_later_with_the_same_number():
    process = mock.Mock()
    supervisor = supervisor_of(process)
    supervisor.lease_gained(None, 0.1)
    (written,) = process.publish.call_args.args
    supervisor.from_tasks(Ready((1000,)), 0.2)
    process.publish.side_effect = Lost("no answer")
    supervisor.tick(0.3)
    assert process.publish.call_args.args[0].attempt == 0
    assert supervisor.leader is None
    process.resign.assert_called_once()
    process.do.assert_not_called()
    process.publish.side_effect = None
    supervisor.tick(10.0)
    supervisor.lease_gained(written, 10.1)
    supervisor.tick(10.2)
    assert [call.args[0].attempt for call in process.do.call_args_list] == [0]


def test_a_host_that_starts_nothing_is_still_ready():
    """A start that came twice; else the leader would wait for its ports for ever."""
    process = mock.Mock()
    supervisor = supervisor_of(process)
    supervisor.record_seen(Record("run", leader=1), 0.1)
    supervisor.leader_connected(1, 0.2)
    supervisor.from_tasks(Ready((1000,)), 0.3)
    start = Start("run", 0, (0, 1), {}, (("worker", 0),))
    supervisor.from_leader(start, 0.4)
    supervisor.from_tasks(Ended(0, AttemptOutcome()), 0.5)
    supervisor.from_tasks(Ready((1001,)), 0.6)
    process.to_leader.reset_mock()
    supervisor.from_leader(start, 0.7)
    sent = [call.args[0] for call in process.to_leader.call_args_list]
    assert sent == [Ended(0, AttemptOutcome()), Ready((1001,))]


def test_the_policys_count_moves_with_the_lead():
    world = training(min_hosts=2, expires=False)
    world.kill_task(leader_of(world))
    world.run(6.0)
    world.kill(leader_of(world))
    world.run(15.0)
    assert world.record is not None
    assert world.record.attempt == 2
    assert world.record.policy["restarts"] == 2


@pytest.mark.parametrize("min_hosts", [2, 3])
def test_a_preempted_host_exits_with_75_and_the_others_continue(min_hosts):
    """The others wait if they are too few."""
    world = training(min_hosts=min_hosts, expires=False)
    victim = (leader_of(world) + 1) % HOSTS
    host = world.hosts[victim]
    assert host is not None
    host.machine.signalled(signal.SIGTERM, world.now)
    world.run(12.0)
    assert world.statuses == [(victim, PREEMPTED)]
    assert set(world.trains()) == (set(range(HOSTS)) - {victim} if min_hosts == 2 else set())
    assert world.record is not None
    assert world.record.policy["restarts"] == 0


def test_a_host_with_workers_only_is_lost_beside_servers():
    """The others train on in the same attempt, and its workers start again when it is back."""
    world = training(min_hosts=2, expires=False, ps=1)
    victim, before = (leader_of(world) + 1) % HOSTS, world.trained
    world.kill(victim)
    world.run(3.0)
    assert world.trained >= before + 2.0
    assert set(world.trains()) == set(range(HOSTS)) - {victim}
    world.start(victim)
    world.run(5.0)
    assert world.trains() == (0, 1, 2)
    assert world.record is not None
    assert world.record.attempt == 0
    assert world.record.policy["restarts"] == 1
    world.cut(victim, leader_of(world))  # the same supervisor, whose tasks have ended
    world.run(SILENCE_S + 2.0)
    world.cuts.clear()
    world.run(5.0)
    assert world.trains() == (0, 1, 2)
    assert world.record.attempt == 0
    world.run(60.0)
    assert sorted(world.statuses) == [(host, 0) for host in range(HOSTS)]


def test_restarts_of_single_tasks_are_counted_for_all_hosts_together():
    """Two hosts ask at the same time for the one that is left: the attempt ends, and the run."""
    world = World(HOSTS, 2, expires=False, ps=1, max_restarts=3)
    world.run(6.0)
    assert world.trains() == (0, 1, 2)
    for host in (0, 1):
        world.kill_task_alone(host)
        world.run(2.0)
    assert world.trains() == (0, 1, 2)
    for host in (1, 2):
        world.kill_task_alone(host)
    world.run(6.0)
    assert sorted(world.restarts) == [1, 2, 3]
    assert world.record is not None
    assert (world.record.attempt, world.record.policy["restarts"]) == (0, 3)
    assert sorted(world.statuses) == [(host, 1) for host in range(HOSTS)]
    assert "task of" in world.record.lines[-1]


@pytest.mark.parametrize("behind_the_leader", [0, 1])
def test_a_host_with_a_server_or_the_chief_is_lost(behind_the_leader):
    world = training(min_hosts=2, expires=False, ps=2)
    world.kill((leader_of(world) + behind_the_leader) % HOSTS)
    world.run(20.0)
    assert len(world.trains()) == 2
    assert world.record is not None
    assert world.record.attempt == 1


def test_a_worker_host_that_is_lost_after_the_chief_is_done_changes_nothing():
    world = training(min_hosts=2, expires=False, ps=1)
    leader = leader_of(world)
    host = world.hosts[leader]
    assert host is not None
    assert host.tasks is not None
    host.tasks.report = AttemptOutcome(done=True, step=world.step())
    world.run(0.5)
    world.kill((leader + 1) % HOSTS)
    world.run(15.0)
    assert world.record is not None
    assert (world.record.attempt, world.record.status) == (0, 0)
