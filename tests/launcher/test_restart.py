"""Restarts: tasks that start again, and when. Rows: docs/explain/failure-model.md."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.cluster import (
    MARK,
    PROGRAMS,
    PYTHONPATH,
    ROOT,
    children,
    marked,
    template_and_copies,
    tfmw_command,
    wait_gone,
)
from tfmw.errors import PREEMPTED, UsageError
from tfmw.launcher import attempt as attempt_module
from tfmw.launcher import restart
from tfmw.launcher.failure import Failure, describe_status, is_external, kernel_kills
from tfmw.launcher.options import RunOptions
from tfmw.launcher.orchestrator import Orchestrator
from tfmw.launcher.restart import AttemptOutcome, RestartPolicy, backoff_s, restarts_alone
from tfmw.launcher.result import Result
from tfmw.launcher.run import launch_tasks
from tfmw.launcher.watchdog import HungTask, RunningTime, TaskStatus, Watchdog

PROGRAM = str(PROGRAMS / "restart_tasks.py")
NO_INIT = {"TFMW_NO_INIT": "1", "PYTHONPATH": str(ROOT)}


@dataclasses.dataclass
class Run:
    """Result of a run of restart_tasks.py."""

    result: Result
    text: str
    seconds: float
    folder: Path

    @property
    def lines(self) -> list[str]:
        """Lines of the launcher."""
        return [line for line in self.text.splitlines() if line.startswith("tfmw:")]

    @property
    def summary(self) -> str:
        """The last line."""
        return self.result.summary()[-1]

    def task(self, name: str, attempt: int, again: str = "") -> dict[str, Any]:
        found: dict[str, Any] = json.loads(
            (self.folder / f"{name}@{attempt}{again}.json").read_text()
        )
        return found

    def log(self, name: str, attempt: int) -> str:
        assert self.result.directory
        task = name.replace(" ", "_")
        return (self.result.directory / f"attempt_{attempt}" / task / "output.log").read_text()

    @property
    def attempts(self) -> list[int]:
        return sorted({int(file.name.split("@")[1][0]) for file in self.folder.glob("*@*.json")})


@pytest.fixture
def run(tmp_path: Path) -> Any:
    """Runs restart_tasks.py: its flags, the layout, and the options."""
    (tmp_path / "result").mkdir()

    def start(
        *flags: str,
        workers: int = 2,
        ps: int = 0,
        evaluator: bool = False,
        grace_s: float = 1.0,
        **options: Any,
    ) -> Run:
        out = io.StringIO()
        begin = time.monotonic()
        result = launch_tasks(
            [PROGRAM, *flags],
            workers=workers,
            ps=ps,
            evaluator=evaluator,
            log_dir=tmp_path / "logs",
            env={**NO_INIT, "TFMW_RESULT": str(tmp_path / "result"), MARK: tmp_path.name},
            stdout=out,
            farewell_s=0.2,
            grace_s=grace_s,
            options=RunOptions(**options),
        )
        seconds = time.monotonic() - begin
        assert marked(tmp_path.name) == {}
        return Run(result, out.getvalue(), seconds, tmp_path / "result")

    return start


# ---- the policy, without a process --------------------------------------------------------------


def failure(task: str = "worker 1", **facts: Any) -> Failure:
    values: dict[str, Any] = {
        "task": task,
        "error": "ValueError: bad",
        "status": 1,
        "how": "exit status 1",
        "detail": (),
        "log": Path("log"),
        "seconds": 2.0,
        "usage": False,
        **facts,
    }
    return Failure(**values)


def end(step: int, task: str = "worker 1", seconds: float = 0.0, **facts: Any) -> AttemptOutcome:
    failed = failure(task, step=step, **facts)
    return AttemptOutcome(failures=(failed,), step=step, seconds=seconds)


def killed(step: int) -> AttemptOutcome:
    return end(step, error="", status=-9, how="SIGKILL", external=True)


class TestPolicy:
    def test_back_off_doubles_up_to_30_s(self):
        assert [backoff_s(n) for n in range(8)] == [0, 1, 2, 4, 8, 16, 30, 30]
        assert backoff_s(10_000) == 30

    def test_run_ends_after_max_restarts(self):
        policy = RestartPolicy(RunOptions(max_restarts=3), workers=2)
        decisions = [policy.decide(end(step)) for step in (10, 20, 30, 40)]
        assert [d.restart for d in decisions] == [True, True, True, False]
        assert [d.delay_s for d in decisions[:3]] == [0, 0, 0]  # each got on: no delay
        assert decisions[0].message == (
            "restart 1 of 3 at once: worker 1 failed in attempt 0 after 2.0 s at step 10: "
            "ValueError: bad (exit status 1)"
        )
        assert "no restart is left of 3" in decisions[3].message

    def test_row_28_the_same_error_at_the_same_step_twice_is_a_crash_loop(self):
        policy = RestartPolicy(RunOptions(max_restarts=100), workers=2)
        decisions = [policy.decide(end(step)) for step in (10, 8, 12, 10)]
        assert [d.restart for d in decisions] == [True, True, True, False]
        assert [d.delay_s for d in decisions[:3]] == [0, 1, 0]
        assert decisions[3].message == "a crash loop: the same error twice at step 10; giving up"

    def test_row_28_numbers_in_an_error_do_not_make_it_another(self):
        policy = RestartPolicy(RunOptions(max_restarts=100), workers=2)
        errors = [
            "ValueError: bad <Layer at 0x7f01>, 3 of 8",
            "ValueError: bad <Layer at 0xff>, 4 of 8",
        ]
        first, second = [policy.decide(end(7, error=error)) for error in errors]
        assert (first.restart, second.restart) == (True, False)

    def test_row_28_a_crash_in_native_code_is_known_by_its_signal(self):
        policy = RestartPolicy(RunOptions(max_restarts=100), workers=2)
        crashes = [("SIGSEGV", -11), ("SIGABRT", -6), ("SIGSEGV", -11)]
        decisions = [
            policy.decide(end(7, error="", how=name, status=status)) for name, status in crashes
        ]
        assert [d.restart for d in decisions] == [True, True, False]

    def test_row_28_three_errors_without_progress_are_a_crash_loop_despite_kills_in_between(self):
        policy = RestartPolicy(RunOptions(max_restarts=100), workers=2)
        ends = [end(10, error="a"), end(9, error="b"), killed(9), end(8, error="c"), killed(10)]
        assert all(policy.decide(outcome).restart for outcome in ends)
        last = policy.decide(end(7, error="d"))
        assert not last.restart
        assert "3 errors in a row without progress at step 10" in last.message

    def test_progress_ends_a_row_of_errors(self):
        policy = RestartPolicy(RunOptions(max_restarts=100), workers=2)
        ends = [end(n, error="abcdefghi"[i]) for i, n in enumerate((9, 8, 7, 10, 9, 8))]
        assert all(policy.decide(outcome).restart for outcome in ends)

    def test_kills_count_against_max_restarts_only(self):
        policy = RestartPolicy(RunOptions(max_restarts=6), workers=2)
        decisions = [policy.decide(killed(step)) for step in (-3, -3, 5, 5, 5, 5, 5)]
        assert [d.restart for d in decisions] == [True] * 6 + [False]
        assert policy.restarts == 6
        assert "no restart is left of 6" in decisions[6].message

    def test_error_beside_a_kill_is_no_crash_loop(self):
        policy = RestartPolicy(RunOptions(max_restarts=9), workers=2)
        both = (failure(step=5), failure("worker 0", step=5, external=True))
        outcome = AttemptOutcome(failures=both, step=5)
        assert all(policy.decide(outcome).restart for _ in range(5))

    def test_worker_of_a_lost_host_is_dropped(self):
        policy = RestartPolicy(RunOptions(max_restarts=9, min_workers=1), workers=2)
        decisions = [policy.decide(killed(step)) for step in (10, -3, -3)]
        assert [d.workers for d in decisions] == [2, 2, 1]

    @pytest.mark.parametrize(
        ("status", "record", "external"),
        [
            (-signal.SIGKILL, None, True),
            (-signal.SIGTERM, None, True),
            (-signal.SIGKILL, {"fatal": False, "secondary": False}, True),
            (-signal.SIGSEGV, None, False),
            (-signal.SIGABRT, None, False),
            (1, None, False),
            (1, {"fatal": True, "secondary": False}, False),
            (1, {"fatal": True, "secondary": True}, True),  # it only lost a peer
            (None, {"fatal": True, "secondary": False}, False),  # it hung as it exited
            (-signal.SIGKILL, {"fatal": True, "secondary": False}, False),
            (None, None, False),
        ],
    )
    def test_external_causes(self, status, record, external):
        assert is_external(status, record) is external

    def test_running_time_counts_as_progress_without_reports(self):
        policy = RestartPolicy(RunOptions(max_restarts=100), workers=2)
        assert all(policy.decide(end(-1, seconds=61)).restart for _ in range(5))
        assert policy.decide(end(-1, seconds=1)).restart
        assert not policy.decide(end(-1, seconds=1)).restart

    def test_wrong_usage_is_not_retried(self):
        policy = RestartPolicy(RunOptions(max_restarts=3), workers=2)
        assert not policy.decide(AttemptOutcome(failures=(failure(usage=True),), step=5)).restart

    def test_worker_that_keeps_failing_is_dropped(self):
        policy = RestartPolicy(RunOptions(max_restarts=9, min_workers=2), workers=3)
        ends = [end(10), end(-2), end(-2), end(12), end(-3), end(-1)]
        decisions = [policy.decide(e) for e in ends]
        assert [d.workers for d in decisions] == [3, 3, 2, 2, 2, 0]
        assert "2 continue" in decisions[2].message
        assert not decisions[5].restart  # two are needed

    def test_only_repeated_failures_of_the_same_worker_drop_it(self):
        policy = RestartPolicy(RunOptions(max_restarts=9, min_workers=1), workers=3)
        policy.decide(end(-1))
        assert not policy.decide(end(-1, task="worker 2")).restart  # a crash loop, then

    def test_row_13_preemption_is_not_counted(self):
        policy = RestartPolicy(RunOptions(max_restarts=1), workers=2)
        decisions = [
            policy.decide(AttemptOutcome(preempted=True, step=step)) for step in (5, 9, 9, 9, 9)
        ]
        assert all(d.restart for d in decisions)
        assert {d.workers for d in decisions} == {2}
        assert [d.delay_s for d in decisions] == [0, 0, 1, 2, 4]  # no hot loop either
        assert policy.restarts == 0
        assert not policy.decide(
            AttemptOutcome(preempted=True, step=20, signals=(signal.SIGTERM,))
        ).restart

    def test_preemption_message_has_the_next_attempts_number(self):
        policy = RestartPolicy(RunOptions(max_restarts=1), workers=2)
        policy.decide(AttemptOutcome(preempted=True, step=5))
        decision = policy.decide(AttemptOutcome(preempted=True, step=9, seconds=2.0))
        assert decision.message == (
            "attempt 2 starts at once: the tasks of attempt 1 saved their state and exited after "
            "2.0 s at step 9 (not counted as a restart)"
        )

    def test_failure_beside_a_preempted_task_counts(self):
        both = AttemptOutcome(failures=(failure(step=5),), preempted=True, step=5)
        policy = RestartPolicy(RunOptions(max_restarts=1), workers=2)
        assert policy.decide(both).restart
        assert policy.restarts == 1

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_a_signal_to_the_launcher_ends_the_run(self, number):
        policy = RestartPolicy(RunOptions(max_restarts=9), workers=2)
        outcome = dataclasses.replace(end(5), signals=(number,))
        assert not policy.decide(outcome).restart
        assert not policy.decide(dataclasses.replace(outcome, preempted=True)).restart

    def test_restarts_of_single_tasks_share_the_budget(self):
        policy = RestartPolicy(RunOptions(max_restarts=2), workers=2)
        assert not policy.allows_restart_alone(failure(usage=True))
        assert policy.allows_restart_alone(failure())
        assert policy.decide(end(5)).restart
        assert not policy.allows_restart_alone(failure())
        assert policy.restarts == 2

    def test_worker_that_has_reported_a_step_is_not_dropped(self):
        policy = RestartPolicy(RunOptions(max_restarts=9, min_workers=1), workers=2)
        assert [policy.decide(killed(0)).workers for _ in range(4)] == [2, 2, 2, 2]

    def test_running_time_is_ignored_if_steps_are_reported(self):
        policy = RestartPolicy(RunOptions(max_restarts=9), workers=2)
        assert [policy.decide(end(-1, seconds=60)).delay_s for _ in range(3)] == [0, 0, 0]
        policy = RestartPolicy(RunOptions(max_restarts=9), workers=2)
        assert policy.decide(end(0, seconds=60)).restart
        assert not policy.decide(end(0, seconds=60)).restart

    def test_preemption_without_restarts_ends_the_run(self):
        assert (
            not RestartPolicy(RunOptions(), workers=2)
            .decide(AttemptOutcome(preempted=True, step=5))
            .restart
        )

    def test_which_tasks_restart_alone(self):
        kinds = ("chief", "worker", "ps", "evaluator")
        assert [kind for kind in kinds if restarts_alone(kind, has_ps=True)] == [
            "worker",
            "evaluator",
        ]
        assert [kind for kind in kinds if restarts_alone(kind, has_ps=False)] == ["evaluator"]

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"max_restarts": -1}, "--max-restarts is -1"),
            ({"max_restarts": 1, "min_workers": 3}, "--min-workers is 3; expected 1 to 2"),
            ({"max_restarts": 1, "min_workers": 0}, "--min-workers is 0"),
            ({"min_workers": 1}, "needs --max-restarts"),
            ({"hang_timeout_s": -1}, "--hang-timeout is -1"),
            ({"start_timeout_s": float("nan")}, "--start-timeout is nan"),
            ({"preempt_grace_s": -2}, "--preempt-grace is -2"),
            ({"monitor_interval_s": 0}, "--monitor-interval is 0"),
            ({"isolate": "maybe"}, "--isolate is 'maybe'"),
            ({"standby": "maybe"}, "--standby is 'maybe'"),
        ],
    )
    def test_wrong_options(self, options, words):
        with pytest.raises(UsageError, match=re.escape(words)):
            RunOptions(**options).check(workers=2)


class Backend:
    """Attempts that end as they are told; each line is what the orchestrator asked for."""

    def __init__(self, *outcomes: AttemptOutcome) -> None:
        self.outcomes = list(outcomes)
        self.seen: list[str] = []

    def begin(self, due: bool, now: float) -> int | None:
        self.seen.append(f"begin {due} at {now:g}")
        return len(self.outcomes) if due else None

    def is_over(self, attempt: int, now: float) -> bool:
        self.seen.append(f"watch {attempt}")
        return now >= 2

    def outcome(self, attempt: int, now: float) -> AttemptOutcome:
        return self.outcomes.pop(0)

    def judged(self, outcome: AttemptOutcome, decision: Any) -> None:
        self.seen.append(f"judged {decision.restart}")

    def notify(self, text: str) -> None:
        self.seen.append(text.partition(":")[0])


class TestOrchestrator:
    def test_it_starts_watches_asks_the_policy_and_starts_the_next(self):
        backend = Backend(end(-1, error="A"), end(-1, error="B"), AttemptOutcome(step=9))
        orchestrator = Orchestrator(RestartPolicy(RunOptions(max_restarts=3), 2), backend)
        over = [orchestrator.step(now) for now in (0, 1, 2, 2.5, 3, 3.5, 4)]
        assert backend.seen == [
            "begin True at 0", "watch 3", "watch 3", "restart 1 of 3 in 1 s", "judged True",
            "begin False at 2.5", "begin True at 3", "watch 2", "restart 2 of 3 in 2 s",
            "judged True", "begin False at 4",
        ]  # fmt: skip
        assert [failure.error for failure in orchestrator.failures] == ["A", "B"]
        assert not any(over)
        assert not orchestrator.step(6)
        assert orchestrator.step(6)
        assert (orchestrator.failures, backend.outcomes) == ((), [])

    def test_failures_of_an_attempt_that_is_not_the_first_one_are_its_cause_only(self):
        both = dataclasses.replace(end(5), failures=(failure("worker 1"), failure("worker 0")))
        again = dataclasses.replace(both, restarted=(failure("worker 2"),))
        orchestrator = Orchestrator(
            RestartPolicy(RunOptions(max_restarts=1), 3), Backend(both, again)
        )
        while not orchestrator.step(2):
            pass
        names = [failure.task for failure in orchestrator.failures]
        assert names == ["worker 1", "worker 0", "worker 2", "worker 1"]


class TestWatchdog:
    @pytest.fixture
    def watchdog(self):
        self.now = 0.0
        return Watchdog(30, 120, 5, lag_s=10, clock=lambda: self.now)

    def test_row_17_silent_task_is_detected(self, watchdog):
        sights = [TaskStatus("worker 0", 7, 8), TaskStatus("worker 1", 7, 9)]
        assert watchdog.check(sights) is None
        self.now = 10  # worker 0 reports once more, then waits for the other
        sights[0] = TaskStatus("worker 0", 7, 9)
        assert watchdog.check(sights) is None
        self.now = 29.9
        assert watchdog.check(sights) is None
        self.now = 41
        assert watchdog.check(sights) == HungTask("worker 1", "no progress for 41 s after step 7")

    def test_a_pause_of_the_launcher_and_its_tasks_is_no_silence(self):
        self.now = 100.0
        clock = RunningTime(lambda: self.now)
        watchdog = Watchdog(30, 120, 5, lag_s=10, clock=clock)
        stopped = TaskStatus("worker 0", 7, 8, stopped=True)
        assert watchdog.check([stopped]) is None
        self.now += 3600
        assert watchdog.check([stopped]) is None
        for _ in range(4):
            self.now += 1
            assert watchdog.check([stopped]) is None
        self.now += 1
        reason = "stopped by a signal for 5 s"
        assert watchdog.check([stopped]) == HungTask("worker 0", reason, external=True)

    def test_a_report_of_the_same_step_is_progress(self, watchdog):
        for reports in range(10):
            self.now += 20
            assert watchdog.check([TaskStatus("worker 0", 7, reports)]) is None

    def test_blocking_call_extends_the_timeout_of_all_tasks(self, watchdog):
        exporting = TaskStatus("worker 0", 7, 9, "export")
        waiting = TaskStatus("worker 1", 7, 8)
        for self.now in (0, 31, 299):
            assert watchdog.check([exporting, waiting]) is None
        assert watchdog.stragglers([exporting, waiting]) == []
        self.now = 300
        assert watchdog.check([exporting, waiting]) == HungTask(
            "worker 0", "no progress for 300 s in export after step 7"
        )

    def test_timeout_of_waiting_tasks_restarts_after_a_blocking_call(self, watchdog):
        waiting = TaskStatus("worker 1", 7, 8)
        for self.now in (0, 100):
            assert watchdog.check([TaskStatus("worker 0", 7, 9, "export"), waiting]) is None
        for self.now in (100.1, 129):
            assert watchdog.check([TaskStatus("worker 0", 7, 10), waiting]) is None
        self.now = 130.2
        assert watchdog.check([TaskStatus("worker 0", 7, 10), waiting]) == HungTask(
            "worker 1", "no progress for 130 s after step 7"
        )

    def test_before_the_first_step_no_hang_is_counted(self, watchdog):
        self.now = 119
        assert watchdog.check([TaskStatus("worker 0", -1, 2)]) is None
        self.now = 500
        assert watchdog.check([TaskStatus("worker 0", -1, 2)]) is None

    def test_row_23_a_task_that_never_starts_is_named(self, watchdog):
        sights = [TaskStatus("worker 0", -2, 1), TaskStatus("worker 1", -3, 0)]
        assert watchdog.check(sights) is None
        self.now = 120
        assert watchdog.check(sights) == HungTask("worker 1", "did not start within 120 s")
        sights[1] = TaskStatus("worker 1", -1, 2)
        assert watchdog.check(sights) == HungTask(
            "worker 0", "did not join the cluster within 120 s"
        )

    def test_a_task_that_is_started_again_alone_has_the_same_time_to_start(self, watchdog):
        others, new = TaskStatus("worker 0", 900, 900), TaskStatus("worker 1", -3, 0)
        self.now = 1000
        watchdog.forget("worker 1")
        self.now = 1119
        assert watchdog.check([others, new]) is None
        self.now = 1120
        assert watchdog.check([others, new]) == HungTask("worker 1", "did not start within 120 s")

    def test_server_only_has_to_start(self, watchdog):
        self.now = 500
        assert watchdog.check([TaskStatus("ps 0", -2, 1, must_join=False)]) is None

    def test_row_16_stopped_task_is_detected_unless_it_continues(self, watchdog):
        sight = TaskStatus("worker 1", 7, 8, stopped=True)
        for self.now, seen in (
            (0, sight),
            (4, sight),
            (5, TaskStatus("worker 1", 7, 8)),
            (9, sight),
        ):
            assert watchdog.check([seen]) is None
        self.now = 14
        assert watchdog.check([sight]) == HungTask("worker 1", "stopped by a signal for 5 s", True)

    def test_row_19_a_straggler_is_named_once_and_again_when_it_has_doubled(self, watchdog):
        said = {}
        for second in range(45):
            self.now = second
            sights = [TaskStatus("worker 0", second, second), TaskStatus("worker 1", 3, 1)]
            watchdog.check(sights)
            for line in watchdog.stragglers(sights):
                said[second] = line
        assert list(said) == [10, 20, 40]
        assert said[10] == ("worker 1 lags: silent for 10 s at step 3, while another is at step 10")


# ---- real processes -----------------------------------------------------------------------------


def test_row_01_all_tasks_restart_after_a_killed_worker(run):
    done = run(
        "worker 0@0=stubborn:up", "worker 1@0=gate:up step:3 kill", max_restarts=3, grace_s=1e4
    )  # the other one is stubborn, and is not waited for
    assert done.result.status == 0
    assert (done.result.attempts, done.result.restarts, done.result.failures) == (2, 1, ())
    first, second = done.task("worker 0", 0), done.task("worker 0", 1)
    assert first["pid"] != second["pid"]
    assert set(first["config"]["cluster"]["worker"]).isdisjoint(
        second["config"]["cluster"]["worker"]
    )
    assert [Path(t["log"]).parts[-3] for t in (first, second)] == ["attempt_0", "attempt_1"]
    assert second["max_restarts"] == "3"
    assert len(done.lines) == 1
    assert re.fullmatch(
        r"tfmw: restart 1 of 3 at once: worker 1 failed in attempt 0 after \d\.\d s at step 3: "
        r"SIGKILL \(.*memory.*\)",
        done.lines[0],
    )


def test_row_02_all_tasks_restart_after_a_killed_chief(run):
    done = run("worker 0@0=gate:up step:3 kill", "worker 1@0=stubborn:up", max_restarts=1)
    assert (done.result.status, done.result.attempts) == (0, 2)


def test_without_max_restarts_nothing_restarts(run):
    done = run("worker 0@0=wait", "worker 1@0=step:3 kill")
    assert (done.result.status, done.attempts) == (1, [0])


def test_row_26_every_task_reports_the_first_error(run):
    done = run(
        "worker 0@0=wait",
        "worker 1@0=step:1 fail",
        "worker 0@1=step:2 kill",
        "worker 1@1=wait",
        "*@2=step:3 fail",
        max_restarts=2,
    )
    assert (done.result.status, done.result.attempts) == (1, 3)
    summary = done.result.summary()
    assert re.fullmatch(
        r"tfmw: worker 1 failed first, in attempt 0 after \d\.\d s: "
        r"ValueError: bad batch in attempt 0 \(exit status 1\)",
        summary[-1],
    )
    assert any("worker 0 failed too in attempt 1: SIGKILL" in line for line in summary)
    assert any("failed too in attempt 2: ValueError: bad batch in att" in line for line in summary)
    assert "no restart is left of 2" in done.lines[-1]


def test_row_27_out_of_memory_is_restarted_and_reported(run, tmp_path):
    done = run("worker 0@0=wait", "worker 1@0=step:1 kill", max_restarts=1)
    assert done.result.status == 0
    assert "memory ran out" in done.lines[0]
    vmstat = tmp_path / "vmstat"
    vmstat.write_text("nr_free_pages 5\noom_kill 3\n")
    assert kernel_kills(vmstat) == 3
    assert "out of memory is likely" in describe_status(-signal.SIGKILL, kernel_kills(vmstat))
    assert "likely" not in describe_status(-signal.SIGTERM, kernel_kills(vmstat))
    assert kernel_kills(tmp_path / "none") == 0


def test_row_28_a_crash_loop_ends(run):
    done = run(
        "worker 0@0=wait", "worker 0@1=wait", "worker 1@0=fail", "worker 1@1=fail", max_restarts=9
    )
    assert (done.result.status, done.attempts) == (1, [0, 1])
    assert "restart 1 of 9 in 1 s" in done.lines[0]
    assert "a crash loop" in done.lines[1]
    assert done.result.summary()[-1].endswith("bad batch in attempt 0 (exit status 1)")


def test_several_quick_kills_are_no_crash_loop(run, monkeypatch):
    monkeypatch.setattr(restart, "LONGEST_DELAY_S", 0.1)
    kills = [
        "worker 1@0=step:3 kill",
        "worker 1@1=kill",
        "worker 0@2=kill",
        "worker 1@3=step:1 kill",
    ]
    waits = ["worker 0@0=wait", "worker 0@1=wait", "worker 1@2=wait", "worker 0@3=wait"]
    done = run(*kills, *waits, max_restarts=5)
    assert (done.result.status, done.attempts, done.result.restarts) == (0, [0, 1, 2, 3, 4], 4)
    assert all("SIGKILL" in line for line in done.lines)


def test_the_same_error_at_the_same_step_ends_a_run_despite_a_kill_in_between(run):
    flags = ["worker 1@0=step:3 fail", "worker 1@1=step:1 kill", "worker 1@2=step:3 fail"]
    done = run(*flags, *(f"worker 0@{n}=wait" for n in range(3)), max_restarts=9)
    assert (done.result.status, done.attempts) == (1, [0, 1, 2])
    assert "a crash loop: the same error twice at step 3" in done.lines[-1]


@pytest.mark.process
def test_fewer_workers_continue(run):
    done = run("worker 2@0=fail", "worker 2@1=fail", "worker 0@0=wait", "worker 0@1=wait",
               workers=3, max_restarts=5, min_workers=2)  # fmt: skip
    assert done.result.status == 0
    assert sorted(done.result.tasks) == ["worker 0", "worker 1"]
    assert len(done.task("worker 0", 2)["config"]["cluster"]["worker"]) == 2
    assert "did not restart, so 2 continue" in done.lines[1]


@pytest.mark.process
def test_row_16_a_stopped_task(run):
    done = run("worker 0@0=stubborn:up", "worker 1@0=gate:up step:2 stop", max_restarts=1)
    assert (done.result.status, done.result.attempts) == (0, 2)
    assert "worker 1 failed in attempt 0" in done.lines[0]
    assert "stopped by a signal" in done.lines[0]


@pytest.mark.process
def test_row_17_a_task_that_hangs(run):
    flags = ["worker 0@0=step:2 stubborn", "worker 1@0=step:2 stuck_in_a_function_of_its_own"]
    done = run(*flags, max_restarts=1, hang_timeout_s=1)
    assert (done.result.status, done.result.attempts) == (0, 2)
    assert re.search(r"no progress for \d+ s after step 2", done.lines[0])
    assert "in stubborn" in done.log("worker 0", 0)
    assert "in stuck_in_a_function_of_its_own" in done.log("worker 1", 0)


def test_hang_without_restarts_fails_the_run(run):
    done = run("worker 1@0=step:2 stuck_in_a_function_of_its_own", hang_timeout_s=1)
    assert done.result.status == 1
    assert "worker 1 failed after" in done.result.summary()[-1]
    assert "no progress for" in done.result.summary()[-1]
    assert any("in stuck_in_a_function" in line for line in done.result.summary())


def test_a_long_blocking_call_is_no_hang(run):
    done = run("worker 0@0=step:2 long_call:3", "worker 1@0=step:2 gate:over", hang_timeout_s=2)
    assert (done.result.status, done.result.failures) == (0, ())


@pytest.mark.process
def test_a_blocking_call_that_never_ends_is_a_hang(run):
    flags = ["worker 0@0=step:2 long_call:1e6", "worker 1@0=step:2 gate:over"]
    done = run(*flags, hang_timeout_s=0.2)
    assert re.search(r"worker 0 .*no progress for \d+ s in export after step 2", done.summary)


def test_row_19_a_straggler_is_named_and_not_restarted(run, monkeypatch):
    monkeypatch.setattr(attempt_module, "LAG_S", 0.3)
    done = run("worker 0@0=steps_until_lag", "worker 1@0=step:1 gate:lag")
    assert done.result.status == 0
    assert re.search(r"worker 1 lags: silent for \d+ s at step 1, while another", done.text)


@pytest.mark.process
def test_row_23_a_task_that_never_starts(run, tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal\nif os.environ.get('TFMW_TASK') == 'worker 1': signal.pause()\n"
    )
    monkeypatch.setitem(NO_INIT, "PYTHONPATH", f"{tmp_path}:{ROOT}")
    done = run("worker 0@0=wait", start_timeout_s=1.5)
    assert done.result.status == 1
    assert "tfmw: worker 1 failed after" in done.result.summary()[-1]
    assert done.result.summary()[-1].endswith("did not start within 1.5 s")


def test_row_13_a_preempted_task(run):
    done = run(
        "worker 0@0=step:4 serve:up",
        "worker 1@0=step:4 gate:up tell:worker_0 serve",
        max_restarts=1,
    )
    assert (done.result.status, done.result.attempts, done.result.restarts) == (0, 2, 0)
    assert "saved their state and exited" in done.lines[0]
    assert "at step 4 (not counted as a restart)" in done.lines[0]


def test_preemption_without_restarts_ends_with_75(run):
    done = run("worker 0@0=leave", "worker 1@0=leave")
    assert (done.result.status, done.result.attempts) == (PREEMPTED, 1)
    assert "same command resumes the run" in done.result.summary()[-1]


# ---- parameter servers --------------------------------------------------------------------------


@pytest.mark.process
def test_row_05_a_worker_of_parameter_servers_restarts_alone(run, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    done = run(
        "chief@0=gate:back",
        "worker 1@0=kill",
        "worker 1@again=open_gate:back",
        "worker 0@0=stubborn",
        "ps 0@0=stubborn",
        ps=1,
        max_restarts=2,
    )
    assert (done.result.status, done.result.attempts, done.result.restarts) == (0, 1, 1)
    assert "of worker 1 alone" in done.lines[0]
    first, again = done.task("worker 1", 0), done.task("worker 1", 0, ".again")
    assert first["environ"]["CUDA_VISIBLE_DEVICES"] == "2,3"
    differ = {k for k, v in first["environ"].items() if again["environ"].get(k) != v}
    assert differ == {f"TFMW_{file}_FILE" for file in ("ERROR", "EXCHANGES", "PROGRESS", "STACKS")}
    assert len(first["environ"]) == len(again["environ"])
    assert done.result.tasks["worker 1"] == 0


def test_row_31_an_evaluator_restarts_alone(run):
    done = run(
        "worker 0@0=gate:back",
        "evaluator@0=fail",
        "evaluator@again=open_gate:back",
        workers=1,
        evaluator=True,
        max_restarts=1,
    )
    assert (done.result.status, done.attempts, done.result.restarts) == (0, [0], 1)


def test_a_run_waits_for_a_delayed_restart_of_its_last_task(run, monkeypatch):
    """Every other task has ended by then, with status 0."""
    monkeypatch.setattr(attempt_module, "backoff_s", lambda nth: 0.2 * nth)
    ends = "evaluator@0=fail", "evaluator@again=fail"
    done = run(*ends, max_restarts=2, workers=1, evaluator=True)
    assert (done.result.status, done.result.restarts) == (1, 2)
    assert [line.partition(", of")[0] for line in done.lines[:2]] == [
        "tfmw: restart 1 of 2 at once", "tfmw: restart 2 of 2 in 0.2 s",
    ]  # fmt: skip
    assert "evaluator failed" in done.summary


@pytest.mark.parametrize("dead", ["ps 0", "chief"])
def test_rows_04_and_06_all_restart_after_a_server_or_the_coordinator(run, dead):
    waits = [f"{task}@0=wait" for task in ("chief", "worker 0", "ps 0") if task != dead]
    done = run(*waits, f"{dead}@0=step:1 kill", workers=1, ps=1, max_restarts=1)
    assert (done.result.status, done.attempts) == (0, [0, 1])


def test_worker_that_keeps_dying_ends_the_run(run):
    done = run(
        "chief@0=wait", "worker 0@0=fail", "worker 0@again=fail", "ps 0@0=wait",
        workers=1, ps=1, max_restarts=2,
    )  # fmt: skip
    assert (done.result.status, done.result.restarts) == (1, 2)
    assert "worker 0 failed" in done.result.summary()[-1]


# ---- signals to the launcher --------------------------------------------------------------------


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Any]:
    """A run by the command line whose tasks serve: start(actions, options) -> launcher, pids."""
    with_end: list[Any] = []

    def start(*flags: str, options: tuple[str, ...] = (), ready: int = 2, **env: str) -> Any:
        command = ["run", "--workers", "2", "--log-dir", str(tmp_path), *options, PROGRAM, *flags]
        manager = tfmw_command(*command, env={**NO_INIT, "TFMW_RESULT": str(tmp_path), **env})
        with_end.append(manager)
        launcher = manager.__enter__()
        assert launcher.stdout
        seen = ""
        while seen.count("ready") < ready:
            line = launcher.stdout.readline()
            assert line, f"the run ended:\n{seen}"
            seen += line
        return launcher, [int(pid) for pid in re.findall(r"ready (\d+)", seen)]

    yield start
    for manager in with_end:
        manager.__exit__(None, None, None)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
@pytest.mark.parametrize("options", [(), ("--max-restarts", "3")])
def test_row_14_a_preempted_launcher_lets_the_tasks_save(serving, number, options):
    launcher, pids = serving("*@0=serve", options=options)
    launcher.send_signal(number)
    output, _ = launcher.communicate(timeout=600)
    assert launcher.returncode == PREEMPTED
    assert "same command resumes the run" in output.splitlines()[-1]
    assert wait_gone(pids, 0) == []


def test_row_14_tasks_that_do_not_save_end_by_the_signal(serving):
    launcher, pids = serving("*@0=wait", options=("--max-restarts", "3"))
    launcher.terminate()
    launcher.communicate(timeout=600)
    assert launcher.returncode == 128 + signal.SIGTERM
    assert wait_gone(pids, 0) == []


@pytest.mark.process
def test_row_14_the_grace_is_bounded(serving):
    launcher, pids = serving("*@0=stubborn", options=("--preempt-grace", "0.5"))
    begin = time.monotonic()
    launcher.terminate()
    launcher.communicate(timeout=600)
    assert launcher.returncode == 128 + signal.SIGTERM
    assert time.monotonic() - begin > 0.5
    assert wait_gone(pids, 0) == []


def test_row_14_a_second_signal_ends_everything_at_once(serving):
    launcher, pids = serving("*@0=stubborn", options=("--preempt-grace", "10000"))
    launcher.terminate()
    launcher.send_signal(signal.SIGUSR1)
    launcher.communicate(timeout=600)
    assert wait_gone(pids, 0) == []


# ---- copies -------------------------------------------------------------------------------------


@pytest.mark.process
def test_tasks_are_forked_at_first_and_after_a_failure(serving, tmp_path):
    options = ("--max-restarts", "2", "--standby", "on")
    flags = ("*@0=step:1 wait", "*@1=step:2 wait")
    path = in_place_of_tensorflow(tmp_path)
    launcher, pids = serving(*flags, options=options, PYTHONPATH=path)
    os.kill(pids[1], signal.SIGKILL)
    seen = ""
    while len(re.findall(r"ready \d+", seen)) < 2:
        line = launcher.stdout.readline()
        assert line, f"the run ended:\n{seen}"
        seen += line
    tasks = [
        json.loads((tmp_path / f"worker {i}@{attempt}.json").read_text())
        for attempt in (0, 1)
        for i in (0, 1)
    ]
    assert all(task["tensorflow"] for task in tasks)  # the program itself imports none
    assert all(task["argv"] == list(flags) for task in tasks)
    assert len({task["pid"] for task in tasks}) == 4
    # Row 15: the launcher is killed beside tasks that are copies, and the process they copy.
    template = template_of(launcher.pid, PROGRAM)
    launcher.kill()
    launcher.wait()
    assert wait_gone([template, *(task["pid"] for task in tasks)], 60) == []


@pytest.mark.process
def test_tasks_start_without_the_fork_server(serving, tmp_path):
    options = ("--max-restarts", "2", "--standby", "on")
    path = in_place_of_tensorflow(tmp_path)
    launcher, pids = serving("*@0=step:1 wait", "*@1=step:2", options=options, PYTHONPATH=path)
    os.kill(template_of(launcher.pid, PROGRAM), signal.SIGKILL)
    os.kill(pids[1], signal.SIGKILL)
    output, _ = launcher.communicate(timeout=600)
    assert launcher.returncode == 0, output
    imported = [
        [
            json.loads((tmp_path / f"worker {i}@{attempt}.json").read_text())["tensorflow"]
            for i in (0, 1)
        ]
        for attempt in (0, 1)
    ]
    assert imported == [[True, True], [False, False]]


@pytest.mark.process
def test_wait_for_the_fork_server_has_a_timeout(tmp_path):
    options = ["--workers", "2", "--standby", "on", "--start-timeout", "2"]
    path = in_place_of_tensorflow(tmp_path, "import time\ntime.sleep(1e6)\n")
    env = {**NO_INIT, "TFMW_RESULT": str(tmp_path), "PYTHONPATH": path}
    with tfmw_command("run", *options, PROGRAM, "*@0=step:1", env=env) as launcher:
        output, _ = launcher.communicate(timeout=600)
    assert launcher.returncode == 0, output
    tasks = [json.loads((tmp_path / f"worker {i}@0.json").read_text()) for i in (0, 1)]
    assert not any(task["tensorflow"] for task in tasks)


def in_place_of_tensorflow(folder: Path, code: str = "") -> str:
    """A PYTHONPATH on which the import of TensorFlow, seconds of a core, runs this code only."""
    (folder / "tensorflow.py").write_text(code)
    return f"{folder}{os.pathsep}{PYTHONPATH}"


def template_of(launcher: int, program: str) -> int:
    """The process that tasks of a launcher are copied from; it shows what they run."""
    ((template,), _) = template_and_copies(children(launcher))
    assert program in Path(f"/proc/{template}/cmdline").read_text().split("\0")
    return template
