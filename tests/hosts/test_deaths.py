"""Deaths at any point: real supervisors, real training, the weights of an undisturbed run.

Each test is one run in which one kind of victim dies, or is cut off, in every phase. A worker holds
in the phase until that has happened, so nothing depends on time. `make test` has three of the
cells; `make nightly` has all.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.helpers.cluster import run_cluster
from tests.helpers.hosts import Hosts, Loopback, Namespaces, network
from tests.programs._hold import hold_at
from tfmw.train.saved_model import verify_export as verify

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

ALL = os.environ.get("TFMW_TEST_HOSTS") == "all"
EPOCHS = 3

HOLDER = {
    "rendezvous": 1,
    "step": 1,
    "recovery": 1,
    "backup": 0,
    "validation": 1,
    "export": 0,
}
"""The phases in the order of a run, and the worker that holds there: the chief, where it writes."""

IN_MAKE_TEST = {"worker": ("step", "export"), "leader": ("backup",)}

CASES = [
    (victim, tuple(HOLDER) if ALL else phases)
    for victim, phases in (
        dict.fromkeys(("worker", "leader", "host", "link")) if ALL else IN_MAKE_TEST
    ).items()
]

TOKEN = "0123456789abcdef" * 4


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """The result of a worker of two, without hosts and without deaths."""
    folder = tmp_path_factory.mktemp("undisturbed")
    done = run_cluster("restart_fit.py", "--backup_dir", str(folder / "backup"), workers=2)
    return done[0]


class Holder:
    """Holds a worker in a phase, for a victim, and records the phases so far.

    Args:
        hosts: supervisors and their output.
        path: file that names the phase.
        is_replaced: whether a victim is replaced within its attempt.
    """

    def __init__(self, hosts: Hosts, path: Path, is_replaced: bool) -> None:
        self._hosts = hosts
        self._path = path
        self._is_replaced = is_replaced
        self._attempt = -1
        self._held: list[int] = []

    def aim(self, point: str) -> None:
        """Names the point where a worker holds next, in a process, or attempt, that did not yet."""
        after = -1 if self._is_replaced else self._attempt
        hold_at(self._path, point, HOLDER[point], after, self._held)

    def wait(self, point: str) -> tuple[int, int]:
        """Waits until it holds there; returns its host and its process."""
        pattern = rf"holds in {point} of attempt (\d+), process (\d+)"
        while True:
            host, found = self._hosts.wait_for_any(pattern)
            attempt, pid = int(found[1]), int(found[2])
            if pid not in self._held and (self._is_replaced or attempt > self._attempt):
                self._attempt = attempt
                self._held.append(pid)
                return host, pid


def kill_worker(hosts: Hosts, host: int, pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGKILL)
    yield


def kill_supervisor_of_the_leader(hosts: Hosts, host: int, pid: int) -> Iterator[None]:
    leader = hosts.leader()
    hosts.kill(leader)
    yield
    hosts.restart(leader)


def kill_host(hosts: Hosts, host: int, pid: int) -> Iterator[None]:
    hosts.signal_all(host, signal.SIGKILL)
    yield
    hosts.restart(host)


def cut_link(hosts: Hosts, host: int, pid: int) -> Iterator[None]:
    since = [hosts.now(other) for other in range(2)]
    hosts.cables.cut(hosts, host)
    yield
    hosts.wait_for_any("is lost: no sign of life", since=since)
    hosts.cables.mend(hosts, host)


Fault = Callable[[Hosts, int, int], Iterator[None]]
FAULTS: dict[str, Fault] = {
    "worker": kill_worker,
    "leader": kill_supervisor_of_the_leader,
    "host": kill_host,
    "link": cut_link,
}


@pytest.fixture
def cables(request: pytest.FixtureRequest) -> Iterator[Loopback | Namespaces | int]:
    """Hosts; those whose link is cut are namespaces, where this machine allows them."""
    if request.param == "link":
        with network(2) as found:
            yield found
    else:
        yield 2


@pytest.mark.parametrize(
    ("cables", "victim", "phases"),
    [(victim, victim, phases) for victim, phases in CASES],
    indirect=["cables"],
    ids=[victim for victim, _ in CASES],
)
@pytest.mark.nightly
def test_whatever_dies_whenever(cables, victim, phases, undisturbed, tmp_path):
    export, file = tmp_path / "export", tmp_path / "hold"
    flags = ["--backup_dir", str(tmp_path / "backup"), "--export_dir", str(export)]
    flags += ["--hold_file", str(file)]
    # The program joins the cluster, after its first point.
    env = {"TFMW_NO_INIT": "1", "TFMW_TOKEN": TOKEN}
    fault = FAULTS[victim]
    hosts = Hosts(tmp_path, cables, "--max-restarts=20", "--standby=on", flags=flags, env=env)
    holder = Holder(hosts, file, is_replaced=victim == "worker")
    points = ["step" if phase == "recovery" else phase for phase in phases]
    holder.aim(points[0])
    with hosts:
        for phase, following in itertools.zip_longest(phases, points[1:]):
            if phase == "recovery":  # of a worker that has died
                _, pid = holder.wait("step")
                holder.aim("rendezvous")
                os.kill(pid, signal.SIGKILL)
                host, pid = holder.wait("rendezvous")
            else:
                host, pid = holder.wait(phase)
            damage = fault(hosts, host, pid)
            next(damage)
            if following:
                holder.aim(following)
            else:
                file.unlink()  # the held worker continues
            with contextlib.suppress(StopIteration):
                next(damage)
        assert hosts.end() == [0, 0], hosts.output()
    results = hosts.results()
    assert len(results) == 2
    for worker in results:
        assert worker["seen"] == [EPOCHS] * len(worker["seen"])
        assert worker["weights"] == undisturbed["weights"]
        assert worker["history"] == undisturbed["history"]
    assert verify(export) == []
    assert hosts.record()["status"] == 0
    said = "\n".join(line for lines in hosts.lines for line in lines)
    assert "tfmw: restart 1 of 20" in said
    # A worker that dies after the first copies is replaced; all others begin a new attempt.
    replaced = said.count("is replaced (not counted as a restart)")
    assert results[0]["attempt"] + replaced >= len(phases), said
    assert replaced == 0 or victim == "worker"
