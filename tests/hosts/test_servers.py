"""Parameter servers and an evaluator over hosts: the effect of a lost host on the others."""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.hosts import Hosts, Loopback, Namespaces, network
from tfmw.launcher.hosts.leader import placed
from tfmw.launcher.hosts.settings import HostSettings
from tfmw.launcher.options import RunOptions

TOKEN = "0123456789abcdef" * 4
Test = Callable[..., None]

SETTINGS = HostSettings(
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


class Training:
    """ps_faulty.py on two hosts: its phases, and the lines for which its chief waits."""

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        self._hosts = hosts
        self._folder = folder

    def over(self, phase: str) -> int:
        """The host whose chief ends the phase; it waits for a line."""
        return self._hosts.wait_for_any(f"phase over: {phase}, epoch")[0]

    def go_on(self) -> None:
        with open(self._folder / f"say.{self._hosts.record()['attempt']}", "a") as file:
            file.write("go on\n")

    def until_a_backup(self) -> int:
        """Waits for the first of these epochs' backups. Returns the host that leads."""
        for phase in ("both", "any"):
            self.over(phase)
            self.go_on()
        leader = self.over("any")
        assert leader == self._hosts.leader()  # it has the chief, and so a server
        return leader

    def lose_the_other(self, leader: int) -> int:
        """The host that does not lead is lost while the chief has calls under way to it."""
        now = self._hosts.now(leader)
        self.go_on()
        self._hosts.wait_for(leader, "batch ", since=now)
        if isinstance(self._hosts.cables, Namespaces):
            self._hosts.cables.cut(self._hosts, 1 - leader)  # without a word
        else:
            self._hosts.kill(1 - leader)
        return 1 - leader


@pytest.fixture
def training(
    cables: Loopback | Namespaces | int, phases: str, options: Sequence[str], tmp_path: Path
) -> Iterator[tuple[Hosts, Training]]:
    flags = [f"--phases={phases}", "--epochs=100000", f"--say={tmp_path}/say", "--validate"]
    flags.append(f"--backup={tmp_path}/backup")
    rendezvous = f"--rendezvous=dir:{tmp_path}/backup/supervisors"
    options = ["--max-restarts=9", "--standby=on", rendezvous, *options]
    # The program joins the cluster, after it has said which process it is.
    env = {"TFMW_NO_INIT": "1", "TFMW_TOKEN": TOKEN}
    with Hosts(tmp_path, cables, *options, program="ps_faulty.py", flags=flags, env=env) as hosts:
        yield hosts, Training(hosts, tmp_path)


@pytest.fixture
def cables(request: pytest.FixtureRequest) -> Iterator[Loopback | Namespaces | int]:
    """Hosts; namespaces, where a cable is cut and this machine allows them."""
    if request.param == "cut":
        with network(2) as found:
            yield found
    else:
        yield 2


def bring_back(hosts: Hosts, host: int) -> None:
    if isinstance(hosts.cables, Namespaces):
        hosts.cables.mend(hosts, host)
    else:
        hosts.restart(host)


def assert_resumed(hosts: Hosts, attempt: int, restarts: int) -> None:
    """Each attempt began where the one before had a backup; so many restarts count."""
    record = hosts.record()
    assert (record["attempt"], record["policy"]["restarts"]) == (attempt, restarts)
    said = [line for lines in hosts.lines for line in lines]
    begun = sorted(int(line.split()[-1]) for line in said if "training begins at " in line)
    assert len(set(begun)) == len(begun) == attempt + 1
    assert begun[0] == 0


CUT = pytest.param("cut", marks=pytest.mark.nightly)


def trains(*cables: Any, phases: str, options: list[str]) -> Callable[[Test], Test]:
    """A test on two hosts: how one is lost, phases of ps_faulty.py, options of `tfmw run`."""

    def marked(test: Test) -> Test:
        test = pytest.mark.parametrize("cables", cables, indirect=True)(test)
        test = pytest.mark.parametrize(("phases", "options"), [(phases, options)])(test)
        return pytest.mark.process(pytest.mark.timeout(400)(test))

    return marked


@trains("killed", CUT, phases="both,any,any,one,both", options=["--ps=1"])
@pytest.mark.nightly
def test_a_host_with_a_worker_only_is_lost_alone(training):
    hosts, program = training
    leader = program.until_a_backup()
    worker = program.lose_the_other(leader)
    hosts.wait_for(leader, f"of worker {worker} alone, when {hosts.name(worker)} is back")
    program.over("one")
    bring_back(hosts, worker)
    program.go_on()
    program.over("both")
    program.go_on()
    assert hosts.end() == [0, 0], hosts.output()
    assert_resumed(hosts, attempt=0, restarts=1)


@pytest.mark.nightly
@trains("killed", phases="both,any,any,free", options=["--ps=1", "--evaluator"])
def test_a_host_with_the_server_the_chief_and_the_evaluator_is_lost_with_its_attempt(training):
    hosts, program = training
    leader = program.until_a_backup()
    hosts.wait_for(leader, r"evaluated step \d+")
    hosts.kill(leader)
    hosts.restart(leader)
    leader = program.until_a_backup()
    assert hosts.record()["attempt"] == 1
    started, _ = hosts.wait_for(leader, "training begins at [1-9]")
    hosts.wait_for(leader, r"evaluated step \d+", since=started)
    program.go_on()
    program.go_on()
    assert hosts.end() == [0, 0], hosts.output()
    assert_resumed(hosts, attempt=1, restarts=1)


@pytest.mark.nightly
@trains("cut", phases="both,any,any,free", options=["--ps=2"])
def test_a_servers_host_behind_a_cut_link_is_lost_with_its_attempt(training):
    """The workers and the chief wait for the server no longer than the supervisors do."""
    hosts, program = training
    leader = program.until_a_backup()
    other = program.lose_the_other(leader)
    hosts.wait_for(leader, f"{hosts.name(other)} is lost: ")
    bring_back(hosts, other)
    program.until_a_backup()
    program.go_on()
    program.go_on()
    assert hosts.end() == [0, 0], hosts.output()
    assert_resumed(hosts, attempt=1, restarts=1)


@pytest.mark.nightly
@trains("killed", phases="both,free", options=["--ps=1", "--max-restarts=1"])
def test_restarts_of_single_workers_are_counted_for_all_hosts_together(training):
    hosts, program = training
    program.over("both")
    program.go_on()
    for worker in range(2):  # each on the host of its number
        _, found = hosts.wait_for(worker, rf"worker {worker} is process (\d+)")
        # The first records its error before it exits.
        os.kill(int(found[1]), signal.SIGINT if worker == 0 else signal.SIGKILL)
        if worker == 0:
            hosts.wait_for(0, "restart 1 of 1 at once, of worker 0 alone")
    assert hosts.end() == [1, 1], hosts.output()
    record = hosts.record()
    assert (record["attempt"], record["policy"]["restarts"]) == (0, 1)
    assert hosts.said(0)[-1] == hosts.said(1)[-1]
    assert "worker 1 failed" in hosts.said(0)[-1]
