"""The division of a run's time, on a clock of the tests."""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from typing import Any

import pytest

from tfmw.launcher.environment import task_environment
from tfmw.launcher.process import TaskFiles
from tfmw.launcher.run_status import RunStatus
from tfmw.observe import goodput
from tfmw.observe.goodput import OTHER, START, Division, Stopwatch, line
from tfmw.observe.step_times import StepTimes


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def __iadd__(self, seconds: float) -> Clock:
        self.now += seconds
        return self


def kept(clock: Clock, division: Division | None = None) -> Stopwatch:
    """The stopwatch of a task whose launcher began at the clock's time, or with a division."""
    stopwatch = Stopwatch(clock)
    stopwatch.resume(division or Division(at=clock()))
    return stopwatch


def parts(division: Division) -> dict[str, float]:
    """Those that are not 0."""
    return {part: s for part, s in zip(goodput.PARTS, division.seconds, strict=True) if s}


def test_each_instant_counts_once_for_the_innermost_phase() -> None:
    clock = Clock()
    stopwatch = kept(clock)
    clock += 5.0
    stopwatch.trains_from(0)
    clock += 1.0
    with stopwatch.phase("steps"):
        clock += 10.0
        stopwatch.moved("data", 2.0)
        with stopwatch.phase("backups"):
            clock += 3.0
        clock += 1.0
    with stopwatch.phase("validation"), stopwatch.phase("compile"):
        clock += 4.0
    clock += 0.5
    found = stopwatch.division()
    assert parts(found) == {
        "steps": 9.0,
        "data": 2.0,
        "compile": 4.0,
        "backups": 3.0,
        "start": 5.0,
        "other": 1.5,
    }
    assert sum(found.seconds) == clock() - 1000.0
    assert found.goodput() == 9.0 / 24.5


def test_steps_that_are_made_again_are_restarts() -> None:
    clock = Clock()
    stopwatch = kept(clock)
    stopwatch.trains_from(0)
    with stopwatch.phase("steps"):
        for step in (4, 8, 12):
            clock += 4.0
            stopwatch.step_done(step)
        clock += 1.0  # within a step
    found = Division.of(stopwatch.division().values())
    assert parts(found) == {"steps": 13.0}
    assert found.steps == 12

    clock += 7.0  # it was killed, and another one starts
    stopwatch = kept(clock, found.before_a_restart())
    clock += 3.0
    stopwatch.trains_from(6)
    with stopwatch.phase("steps"):
        for step in (10, 14):  # half of the second call is new
            clock += 4.0
            stopwatch.step_done(step)
    assert parts(stopwatch.division()) == {"steps": 15.0, "restarts": 16.0}
    assert stopwatch.division().steps == 14


def test_a_training_that_is_done_is_not_made_again() -> None:
    clock = Clock()
    first = kept(clock)
    for steps in (100, 20):
        first.trains_from(0)
        with first.phase("steps"):
            clock += steps
            first.step_done(steps)
    killed = first.division().before_a_restart()
    without_backup = kept(clock, killed)
    without_backup.trains_from(0)
    with without_backup.phase("steps"):
        clock += 100.0
        without_backup.step_done(100)
    assert parts(without_backup.division()) == {"steps": 120.0, "restarts": 100.0}

    again = kept(clock, dataclasses.replace(killed, at=clock()))
    again.trains_from(100)  # which its backup has
    again.trains_from(10)
    with again.phase("steps"):
        clock += 15.0
        again.step_done(25)
    assert parts(again.division()) == {"steps": 125.0, "restarts": 10.0}


def test_a_loop_of_the_users_own_makes_steps_between_its_reports() -> None:
    clock = Clock()
    stopwatch = kept(clock)
    for step in range(1, 4):
        clock += 2.0
        stopwatch.step_done(step)
    assert parts(stopwatch.division()) == {"start": 2.0, "steps": 4.0}

    stopwatch.trains_from(0)
    stopwatch.step_done(0)  # a callback that only shows that it is alive
    clock += 1.0
    assert parts(stopwatch.division()) == {"start": 2.0, "steps": 4.0, "other": 1.0}


def test_without_a_launcher_each_training_is_for_itself() -> None:
    clock = Clock()
    stopwatch = Stopwatch(clock)
    for _ in range(2):
        clock += 3600.0  # of thinking
        stopwatch.trains_from(0)
        with stopwatch.phase("steps"):
            clock += 2.0
            stopwatch.step_done(2)
        assert parts(stopwatch.division()) == {"steps": 2.0}


def test_phases_of_other_threads_run_beside() -> None:
    clock = Clock()
    stopwatch = kept(clock)
    stopwatch.trains_from(0)
    with stopwatch.phase("steps"):
        inside, leave = threading.Event(), threading.Event()

        def beside() -> None:
            with stopwatch.phase("backups"):
                inside.set()
                leave.wait()

        thread = threading.Thread(target=beside)
        thread.start()
        inside.wait()
        clock += 2.0
        leave.set()
        thread.join()
    assert parts(stopwatch.division()) == {"steps": 2.0}


def of(at: float = 0.0, part: int = OTHER, **seconds: float) -> Division:
    each = tuple(seconds.get(part, 0.0) for part in goodput.PARTS)
    return Division(each, at, part, steps=7.0, measured=1.0)


@pytest.mark.parametrize(
    ("by_task", "expected"),
    [
        ({}, None),
        ({"worker 0": Division((1.0,) * len(goodput.PARTS))}, None),  # no step
        (
            {"worker 0": of(steps=8.0, data=0.01, start=2.0)},
            "took 10.0 s: training 8.0 s, start-up 2.0 s",
        ),
        (
            {"worker 0": of(steps=80.0, data=0.01, start=20.0)},
            "goodput 80 % of 100.0 s: training 80.0 s, start-up 20.0 s",
        ),
        (
            {"worker 0": of(steps=8.0, data=1.0), "worker 1": of(steps=5.0, data=4.0)},
            "took 9.0 s: training 8.0 s, data 1.0 s; worker 1 waited 4.0 s for data",
        ),
        (
            {"chief": dataclasses.replace(of(steps=8.0, export=2.0), measured=0.0)},
            "took 10.0 s: training with its data 8.0 s, export 2.0 s",
        ),
    ],
)
def test_the_line(by_task: dict[str, Division], expected: Any) -> None:
    assert line(by_task) == expected


def test_time_after_the_last_report() -> None:
    found = of(at=1000.0, part=START, steps=1.0)
    assert parts(found.until(1002.5)) == {"steps": 1.0, "start": 2.5}
    assert parts(found.until(1002.5, OTHER)) == {"steps": 1.0, "other": 2.5}
    assert parts(found.until(900.0)) == {"steps": 1.0}  # a clock that was set back
    assert parts(Division().until(1000.0)) == {}


def test_a_call_of_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    stopwatch = kept(clock)
    monkeypatch.setattr(goodput, "spent", stopwatch.spent)
    monkeypatch.setattr(goodput, "moved", stopwatch.moved)
    times = StepTimes(clock=clock)

    def run(seconds: float, steps: int, input_s: float = 0.0, measured: bool = True) -> None:
        with times.measured_call() as call:
            clock.now += seconds
            call.steps, call.input_s, call.measured = steps, input_s, measured

    stopwatch.trains_from(0)
    with stopwatch.phase("steps"):
        run(9.0, steps=0)  # of a validation
        run(5.0, steps=2, measured=False)
        assert parts(stopwatch.division()) == {"steps": 9.0, "compile": 5.0}
        assert "data" not in stopwatch.division().by_part()
        run(4.0, steps=4, input_s=2.0)  # half a second a step, of the first call's two as well
        assert parts(stopwatch.division()) == {"steps": 12.0, "data": 2.0, "compile": 4.0}
        run(1.0, steps=4, input_s=1.5)  # by another clock
    assert parts(stopwatch.division()) == {"steps": 12.0, "data": 3.0, "compile": 4.0}


class TestAClockThatJumps:
    """The clock jumps by an hour during the run: NTP, or a suspended virtual machine."""

    @pytest.fixture(params=[3600.0, -3600.0])
    def jump(self, request, monkeypatch):
        real = time.time

        def happens() -> None:
            monkeypatch.setattr(time, "time", lambda: real() + request.param)

        return happens

    def test_is_no_time_of_the_run(self, jump):
        stopwatch = Stopwatch()
        before = stopwatch.division()
        jump()
        after = stopwatch.division()
        assert 0 <= sum(after.seconds) < 1800
        assert 0 <= after.at - before.at < 1800
        assert sum(before.until(goodput.now()).seconds) < 1800

    def test_a_task_has_the_clock_of_its_launcher(self, jump, monkeypatch):
        began = Division(at=goodput.now())
        environment = task_environment({}, terminal=False)
        jump()
        monkeypatch.setattr(goodput, "_zero", time.time() - time.monotonic())  # a task starts now
        monkeypatch.setenv(goodput.CLOCK_ZERO, environment[goodput.CLOCK_ZERO])
        stopwatch = Stopwatch()
        stopwatch.resume(began)
        seconds = stopwatch.division().seconds
        assert 0 <= sum(seconds) < 1800

    def test_tfmw_status_has_the_clock_of_the_run(self, jump, monkeypatch, tmp_path):
        task = TaskFiles("worker", 0, tmp_path)
        task.make()
        described = RunStatus(tmp_path, ["script"], tasks=[task]).described()
        jump()
        monkeypatch.setattr(goodput, "_zero", time.time() - time.monotonic())  # of `tfmw status`
        found = RunStatus.of(json.loads(json.dumps(described)))._goodput()["seconds"]
        assert 0 <= sum(found.values()) < 1800
