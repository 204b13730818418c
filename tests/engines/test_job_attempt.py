"""One attempt from the controller's side, with tasks that only exist here."""

from __future__ import annotations

import collections
import dataclasses
import io
from pathlib import Path
from typing import Any

import pytest

from tfmw.errors import TaskFailed
from tfmw.launcher.engines import own_files
from tfmw.launcher.engines.engine import Contact, JobSpec, Layout, Tasks
from tfmw.launcher.engines.job import BACKUP
from tfmw.launcher.engines.job_attempt import LOST_S, SETTLE_S, JobAttempt
from tfmw.launcher.failure import Failure
from tfmw.launcher.options import FAREWELL_S, PREEMPT_GRACE_S, RunOptions
from tfmw.launcher.output import Display
from tfmw.launcher.remote.messages import (
    AgentHello,
    BackupFiles,
    End,
    Ended,
    Leave,
    Leaving,
    Message,
    Output,
    RestartReply,
    RestartRequest,
    Setup,
    Start,
    StepReached,
    encode,
)
from tfmw.launcher.restart import AttemptOutcome, RestartPolicy
from tfmw.launcher.result import Result
from tfmw.launcher.run import return_values

Name = tuple[int, int]  # the attempt and the rank of a connection
FACTS = {"Python": "3.12", "keras": "3.15.1"}


class FakeLinks:
    """Records the messages sent to each connection, by its name."""

    def __init__(self) -> None:
        self.sent: dict[Name, list[Message]] = collections.defaultdict(list)
        self.dropped: list[Name] = []

    def to_member(self, name: Name, message: Message) -> None:
        encode(message)
        self.sent[name].append(message)

    def drop(self, name: Name) -> None:
        self.dropped.append(name)


class FakeTasks(Tasks):
    def __init__(self) -> None:
        self.gone: dict[int, str] = {}
        self.started: tuple[Layout, Contact] | None = None

    def hosts(self) -> tuple[str, ...]:
        return ("h0",)

    def start(self, layout: Layout, contact: Contact) -> None:
        self.started = (layout, contact)

    def lost(self) -> dict[int, str]:
        return self.gone

    def end(self) -> None:
        self.started = None


class World:
    """Two workers on two hosts, other tasks on further ones, and the time."""

    folder = Path()

    def __init__(
        self, env: dict[str, str] | None = None, max_restarts: int = 0, **spec: Any
    ) -> None:
        self.now = 0.0
        self.tasks = FakeTasks()
        self.out = io.StringIO()
        setup = Setup(("call",), RunOptions(max_restarts=max_restarts), env or {})
        self.spec = JobSpec(setup, (2, 2), facts=FACTS, **spec)
        self.count = self.spec.tasks[0]
        self.links = FakeLinks()
        links: Any = self.links
        self.attempt = JobAttempt(
            self.spec,
            self.tasks,
            self.folder,
            links,
            Display(self.out),
            number=3,
            count=self.count,
            policy=RestartPolicy(setup.options, 2),
            clock=lambda: self.now,
        )
        self.attempt.start(4000)

    def say(self, rank: int, message: Message, attempt: int = 3) -> None:
        self.attempt.handle("from_member", (attempt, rank), message)

    def sent(self, rank: int, attempt: int = 3) -> list[Any]:
        return self.links.sent[attempt, rank]

    def hello(self, rank: int, **other: Any) -> None:
        hello = AgentHello(rank, 3, f"h{rank}", f"10.0.0.{rank}", 5000 + rank, FACTS)
        hello = dataclasses.replace(hello, **other)
        self.say(rank, hello, hello.attempt)

    def begun(self) -> World:
        for rank in reversed(range(self.count)):
            self.hello(rank)
        assert self.attempt.phase == "running"
        return self

    def ended(self, rank: int, body: bytes = b"", **failure: Any) -> None:
        failures: tuple[Failure, ...] = ()
        if failure:
            failures = (Failure(f"worker {rank}", **{"status": 1, "step": 4, **failure}),)
        report = AttemptOutcome(done=not failures, step=5, failures=failures)
        self.say(rank, Ended(3, report, body))

    def outcome(self) -> AttemptOutcome:
        return self.attempt.ending.outcome(self.now)

    @property
    def cause(self) -> Any:
        return self.outcome().failures[0]


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(World, "folder", tmp_path)


def test_all_get_the_cluster_and_their_place_on_their_host() -> None:
    world = World(env={"A": "b"})
    assert world.tasks.started is not None
    assert (world.tasks.started[1].hosts, world.tasks.started[1].port) == (("h0",), 4000)
    world.begun()
    setup, other = (world.sent(rank)[-1] for rank in (0, 1))
    assert isinstance(setup, Setup)
    own = {"TFMW_LOCAL_TASKS": "1", "TFMW_LOCAL_RANK": "0"}
    assert (setup.own_env, setup.env) == (own, {"A": "b"})
    cluster: dict[str, tuple[str, ...]] = {"worker": ("10.0.0.0:5000", "10.0.0.1:5001")}
    assert setup.start == Start("", 3, (0, 1), cluster, (("worker", 0),))
    assert other.start == Start("", 3, (0, 1), cluster, (("worker", 1),))

    together = World()
    together.hello(0)
    together.hello(1, address="10.0.0.0")
    assert together.sent(1)[-1].own_env == {"TFMW_LOCAL_TASKS": "2", "TFMW_LOCAL_RANK": "1"}


def test_every_role_has_its_place_in_the_cluster() -> None:
    world = World(ps=1, evaluator=True).begun()
    assert world.tasks.started is not None
    layout = [("chief", 0), ("worker", 0), ("worker", 1), ("ps", 0), ("evaluator", 0)]
    assert world.tasks.started[0] == layout
    starts = [world.sent(rank)[-1].start for rank in range(5)]
    assert [start.tasks for start in starts] == [(task,) for task in layout]
    assert (
        starts[0].cluster
        == starts[4].cluster
        == {
            "chief": ("10.0.0.0:5000",),
            "worker": ("10.0.0.1:5001", "10.0.0.2:5002"),
            "ps": ("10.0.0.3:5003",),
        }
    )
    details = world.attempt.details()
    assert details["tasks"] == ["chief", "worker 0", "worker 1", "ps 0", "evaluator"]
    assert (details["workers"], len(details["hosts"])) == (2, 5)


def test_job_with_servers_is_done_once_chief_and_evaluator_are() -> None:
    """Servers and their workers end by themselves, or are ended, and have no result."""
    world = World(ps=1, evaluator=True).begun()
    world.ended(0, b"chief")
    world.ended(1)
    world.now += 2 * FAREWELL_S
    assert not world.attempt.look(), "the evaluator evaluates the last backup"
    world.ended(4, b"evaluator")
    assert not world.attempt.look()
    world.now += FAREWELL_S
    assert world.attempt.look()
    world.ended(3, error="UnavailableError: gone")
    assert world.outcome().failures == ()
    results = world.attempt.results()
    assert results == {"chief on h0": b"chief", "evaluator on h4": b"evaluator"}


def test_restarts_of_single_tasks_are_counted_by_the_controller() -> None:
    world = World(ps=1, max_restarts=1).begun()
    for rank, allowed in ((1, True), (2, False)):
        world.say(rank, RestartRequest(3, f"worker {rank - 1}"))
        assert world.sent(rank)[-1] == RestartReply(3, f"worker {rank - 1}", allowed, 1)
    assert not world.attempt.look()
    failing = World(ps=1, max_restarts=1).begun()
    failing.ended(3, error="ValueError: bad")
    failing.say(1, RestartRequest(3, "worker 0"))
    assert not failing.sent(1)[-1].allowed, "all tasks restart"
    assert failing.attempt.look()
    assert failing.cause.task == "ps 0 on h3"


def test_notice_of_any_task_is_for_all() -> None:
    """A server that gets SIGTERM cannot save the state; the chief is asked to."""
    world = World(ps=1).begun()
    world.say(3, Leaving())
    assert world.attempt.notices == {3: "its machine will end"}
    world.attempt.ask_to_leave()
    assert world.sent(0)[-1] == Leave(3)
    assert not [m for rank in (1, 2, 3) for m in world.sent(rank) if isinstance(m, Leave)]


def test_results_output_and_backups() -> None:
    world = World().begun()
    world.say(1, Output(False, b"hello\n"))
    world.say(0, StepReached(9))
    world.say(0, BackupFiles("step_9", b"tar"))
    world.ended(0, b"zero")
    assert not world.attempt.look()
    world.ended(1, b"one")
    assert world.attempt.look()
    assert world.out.getvalue() == "[worker 1 on h1] hello\n"
    assert world.attempt.results() == {"worker 0 on h0": b"zero", "worker 1 on h1": b"one"}
    outcome = world.outcome()
    assert (outcome.failures, outcome.step) == ((), 9)
    assert (world.folder / BACKUP).read_bytes() == b"tar"
    assert world.attempt.details()["backup"] == "step_9"
    world.attempt.end()
    assert set(world.links.dropped) == {(3, 0), (3, 1)}


def test_the_chief_gets_the_backup_that_was_kept() -> None:
    world = World()
    own_files.write(world.folder / BACKUP, b"tar")
    world.begun()
    assert world.sent(0)[0] == BackupFiles("", b"tar")
    assert not [m for m in world.sent(1) if isinstance(m, BackupFiles)]


def test_versions_that_differ_end_the_job() -> None:
    world = World()
    world.hello(0)
    world.hello(1, facts={**FACTS, "keras": "3.10.0"})
    assert world.attempt.look()
    assert world.cause.usage
    assert world.cause.error.startswith("keras is 3.10.0 on h1, and 3.15.1 where the job was subm")
    assert not world.sent(0) + world.sent(1)


def test_the_cause_is_waited_for_where_a_task_only_lost_another() -> None:
    world = World().begun()
    world.ended(0, error="UnavailableError: gone", secondary=True)
    assert not world.attempt.look()
    world.now += SETTLE_S / 2
    assert not world.attempt.look()
    world.ended(1, error="KeyError: 'x'")
    assert world.attempt.look()
    assert (world.cause.task, world.cause.error) == ("worker 1 on h1", "KeyError: 'x'")
    other = World().begun()
    other.ended(0, error="UnavailableError: gone", secondary=True)
    other.now += SETTLE_S
    assert other.attempt.look()


def test_lost_connection_is_a_failure_from_outside() -> None:
    world = World().begun()
    world.attempt.handle("member_lost", (3, 1), "silent")
    assert world.attempt.look()
    assert world.cause.external
    assert (world.cause.task, world.cause.how) == ("worker 1 on h1", "its connection was lost")


def test_engine_may_tell_why_a_connection_was_lost() -> None:
    """Kubernetes has the reason of a pod's end a moment after the end."""
    told, silent = World().begun(), World().begun()
    for world in (told, silent):
        world.tasks.tells_s = 5.0
        world.attempt.handle("member_lost", (3, 1), "silent")
        assert not world.attempt.look()
        world.now += 4.0
        assert not world.attempt.look()
    told.tasks.gone = {1: "OOMKilled"}
    assert told.attempt.look()
    assert (told.cause.task, told.cause.how) == ("worker 1 on h1", "OOMKilled")
    silent.now += 1.0
    assert silent.attempt.look()
    assert silent.cause.how == "its connection was lost"
    ends = World().begun()  # a connection that ends after the task's result is no failure
    ends.tasks.tells_s = 5.0
    ends.ended(1)
    ends.attempt.handle("member_lost", (3, 1), "silent")
    ends.now += 6.0
    assert not ends.attempt.look()


def test_task_that_the_engine_lost_may_still_report() -> None:
    world = World().begun()
    world.tasks.gone = {1: "SIGKILL"}
    assert not world.attempt.look()
    world.now += LOST_S + 0.1
    assert world.attempt.look()
    assert world.cause.how == "SIGKILL"
    early = World()
    early.tasks.gone = {0: "no such command"}
    assert early.attempt.look()
    assert (early.cause.task, early.cause.how) == ("worker 0", "no such command")


def test_result_of_a_job_whose_first_task_never_connected() -> None:
    world = World()
    world.tasks.gone = {0: "no such command"}
    assert world.attempt.look()
    failures = tuple(world.outcome().failures)
    result = Result(1, {}, failures, None)
    with pytest.raises(TaskFailed, match=r"worker 0 failed after 0\.0 s: no such command"):
        return_values(result, {})


def test_task_that_does_not_connect_is_named() -> None:
    world = World()
    world.hello(0)
    world.now += 121
    assert world.attempt.look()
    assert world.cause.task == "worker 1"
    assert world.cause.how == "has not connected within 120 s of its start"


def test_tasks_of_another_attempt_are_refused() -> None:
    world = World()
    world.hello(0, attempt=2)
    assert isinstance(world.sent(0, attempt=2)[0], End)
    world.begun()
    world.hello(0, host="h2")
    assert isinstance(world.sent(0)[-1], End)
    assert world.attempt.label(0) == "worker 0 on h0"


def test_peers_of_tasks_that_saved_their_state_have_not_failed() -> None:
    world = World().begun()
    report = AttemptOutcome(preempted=True, step=5)
    world.say(0, Ended(3, report))
    world.ended(1, error="UnavailableError: gone", secondary=True)
    outcome = world.outcome()
    assert outcome.preempted
    assert outcome.failures == ()


def test_task_that_stays_when_another_saved_its_state_is_not_waited_for_for_ever() -> None:
    world = World().begun()
    report = AttemptOutcome(preempted=True, step=5)
    world.say(0, Ended(3, report))
    world.now += PREEMPT_GRACE_S - 1
    assert not world.attempt.look()
    world.now += 1
    assert world.attempt.look()
    assert world.outcome().preempted
