"""Parameter servers and an evaluator over hosts: what the loss of which host costs."""

from __future__ import annotations

import dataclasses

import pytest

from tests.helpers.hosts import Hosts
from tfmw.launcher.hosts.actions import Settings
from tfmw.launcher.hosts.placement import placed
from tfmw.launcher.options import RunOptions

SETTINGS = Settings(
    hosts=("h0:2222", "h1:2222", "h2:2222"),
    workers_per_host=1,
    min_hosts=2,
    rejoin_timeout_s=30.0,
    options=RunOptions(),
)


def test_placement_of_servers_chief_and_evaluator():
    many = dataclasses.replace(SETTINGS, ps=4, evaluator=True, workers_per_host=2)
    assert many.ports_per_host == 2 + 1 + 2  # both of two hosts have two of the four servers
    plan = placed(many, 2, {host: range(1, 6) for host in (0, 2)})
    assert plan.cluster == {
        "chief": ("h2:1",),
        "worker": ("h0:1", "h0:2", "h2:2", "h2:3"),
        "ps": ("h2:4", "h0:3", "h2:5", "h0:4"),
    }
    assert plan.tasks == {
        0: (("worker", 0), ("worker", 1), ("ps", 1), ("ps", 3)),
        2: (("chief", 0), ("worker", 2), ("worker", 3), ("ps", 0), ("ps", 2), ("evaluator", 0)),
    }
    assert not any(map(plan.restarts_alone, plan.tasks))


def test_hosts_without_a_server_have_workers_only():
    plan = placed(dataclasses.replace(SETTINGS, ps=1), 1, {host: range(1, 4) for host in range(3)})
    assert [plan.restarts_alone(host) for host in range(3)] == [True, False, True]
    plan = placed(SETTINGS, 1, dict.fromkeys(range(3), (1,)))
    assert plan.cluster == {"worker": ("h0:1", "h1:1", "h2:1")}
    assert not any(map(plan.restarts_alone, range(3)))  # collectives cannot be rebuilt


@pytest.mark.multiprocess
@pytest.mark.timeout(400)
def test_a_workers_host_is_lost_alone_and_a_servers_host_with_its_attempt(tmp_path):
    flags = ["--phases=both,any,any,one,both", "--epochs=100000", f"--say={tmp_path}/say"]
    flags.append(f"--backup={tmp_path}/backup")
    options = ["--ps=1", "--max-restarts=9", f"--rendezvous=dir:{tmp_path}/backup/supervisors"]
    with Hosts(tmp_path, 2, *options, program="ps_faulty.py", flags=flags) as hosts:

        def over(phase: str) -> int:
            """The host whose chief ends the phase; it waits for a line."""
            return hosts.wait_for_any(f"phase over: {phase}, epoch")[0]

        def go_on() -> None:
            with open(tmp_path / f"say.{hosts.record()['attempt']}", "a") as file:
                file.write("go on\n")

        def until_a_backup() -> int:
            """That of the first of these epochs is there."""
            for phase in ("both", "any"):
                over(phase)
                go_on()
            return over("any")

        # The leader's host has the chief and the server.
        leader = until_a_backup()
        assert leader == hosts.leader()
        hosts.kill(leader)
        hosts.restart(leader)
        leader = until_a_backup()
        assert leader == hosts.leader()
        assert hosts.record()["attempt"] == 1

        # The other host has a worker only.
        worker = 1 - leader
        hosts.kill(worker)
        hosts.wait_for(leader, f"of worker {worker} alone, when {hosts.name(worker)} is back")
        go_on()
        over("one")
        hosts.restart(worker)
        go_on()
        over("both")
        go_on()
        assert hosts.end() == [0, 0], hosts.output()
    record = hosts.record()
    assert (record["attempt"], record["policy"]["restarts"]) == (1, 2)
    said = [line for lines in hosts.lines for line in lines]
    begun = [int(line.split()[-1]) for line in said if "training begins at " in line]
    assert len(begun) == 2
    assert max(begun) > min(begun) == 0  # from the backup
