"""Analysis of the flight recorders of all workers, without processes."""

from __future__ import annotations

import dataclasses
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tfmw.errors import UsageError
from tfmw.launcher import run_files, run_status
from tfmw.launcher.process import Task, TaskFiles
from tfmw.launcher.run_files import published
from tfmw.launcher.run_status import RunStatus, innermost
from tfmw.observe import recorder
from tfmw.observe.exchanges import ended_at, input_seconds, missing, own_seconds, straggler
from tfmw.observe.recorder import NOBODY, RecordedExchange


def exchange(number: int, done: bool = True, waiting_for: int = NOBODY) -> RecordedExchange:
    at = number + 0.5 if done else 0.0
    return RecordedExchange(number, number, 8, number, 0.0, at, 0.1, waiting_for, "g")


def run_of(own_s: float, steps: int = 30, input_s: float = 0.0) -> list[RecordedExchange]:
    """The exchanges of a worker: one a second, `own_s` after the last one."""
    return [
        RecordedExchange(n, n, 8, n + own_s, n * input_s, n + 1.0, 0.0, NOBODY, "gradients")
        for n in range(1, steps + 1)
    ]


@pytest.fixture
def own_recorder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "exchanges"
    recorder.make_file(path)
    monkeypatch.setenv(recorder.EXCHANGES_FILE, str(path))
    return path


def test_records_are_read_back(own_recorder: Path) -> None:
    recording = recorder._Recorder()
    recording.begun("gradients", 4000)
    recording.waits_for(1)
    recording.waited(0.25)
    recording.done()
    recording.waited_for_input(0.75)
    recording.steps_done(1)
    recording.begun("metrics", 80)
    recording.waits_for(2)
    first, second = recorder.read_exchanges(own_recorder)
    assert (first.number, first.step, first.nbytes, first.what) == (1, 1, 4000, "gradients")
    assert first.done >= first.begun
    assert (first.waited, first.waiting_for, first.input_s) == (0.25, NOBODY, 0.0)
    assert (second.number, second.done, second.waiting_for) == (2, 0.0, 2)
    assert second.input_s == 0.75
    assert (str(first), str(second)) == ("exchange 1 (gradients of step 1)", "exchange 2 (metrics)")


def test_the_last_ones_are_kept(own_recorder: Path) -> None:
    recording = recorder._Recorder()
    for _ in range(recorder.KEPT + 100):
        recording.begun("gradients", 8)
        recording.done()
    found = recorder.read_exchanges(own_recorder)
    assert [e.number for e in found] == list(range(101, recorder.KEPT + 101))


def test_steps_within_a_call_are_counted(own_recorder: Path) -> None:
    recording = recorder._Recorder()
    for _ in range(4):  # two steps of two packs
        recording.begun("gradients", 8)
    recording.begun("metrics", 8)
    recording.steps_done(2)
    for _ in range(5):
        recording.begun("gradients", 8)
    steps = [e.step for e in recorder.read_exchanges(own_recorder)]
    assert steps[-5:] == [3, 3, 4, 4, 5]


def test_without_a_file_nothing_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(recorder.EXCHANGES_FILE, raising=False)
    recording = recorder._Recorder()
    recording.begun("gradients", 8)
    recording.waits_for(0)
    recording.done()


def test_who_never_entered() -> None:
    late = missing(
        {
            "worker 0": [exchange(6), exchange(7, done=False, waiting_for=2)],
            "worker 1": [exchange(6), exchange(7, done=False, waiting_for=0)],
            "worker 2": [exchange(5), exchange(6)],
        },
        clock=lambda: 19.0,
    )
    assert str(late) == "worker 2 never entered exchange 7 (g of step 7)"
    assert late is not None
    assert late.seconds == 12.0


def test_the_first_exchange_counts_too() -> None:
    late = missing({"worker 0": [exchange(1, done=False, waiting_for=1)], "worker 1": []})
    assert str(late) == "worker 1 never entered exchange 1 (g of step 1)"


def test_who_is_behind_the_others_that_wait() -> None:
    # Worker 1 waits for worker 2 in exchange 6, and worker 0 for worker 1 in exchange 7.
    late = missing(
        {
            "worker 0": [exchange(7, done=False, waiting_for=1)],
            "worker 1": [exchange(6, done=False, waiting_for=2)],
            "worker 2": [exchange(5)],
        }
    )
    assert late is not None
    assert late.task == "worker 2"


def test_who_does_not_go_on_in_an_exchange() -> None:
    late = missing(
        {
            "worker 0": [exchange(7, done=False, waiting_for=1)],
            "worker 1": [exchange(7, done=False)],
        }
    )
    assert str(late) == "worker 1 entered exchange 7 (g of step 7), and does not go on"


def test_where_a_killed_task_was() -> None:
    before = {"worker 0": [exchange(7, done=False, waiting_for=1)], "worker 1": [exchange(6)]}
    assert ended_at("worker 1", before) == "worker 1 never entered exchange 7 (g of step 7)"
    within = {
        "worker 0": [exchange(7, done=False, waiting_for=1)],
        "worker 1": [exchange(7, done=False, waiting_for=0)],
    }
    assert ended_at("worker 1", within) == "worker 1 ended in exchange 7 (g of step 7)"
    nobody_waits = {"worker 0": [exchange(6)], "worker 1": [exchange(6)]}
    assert ended_at("worker 1", nobody_waits) is None
    assert ended_at("worker 1", {}) is None


def test_exchanges_without_neighbours_say_nothing_of_a_step() -> None:
    every_other = run_of(0.1)[::2]
    assert own_seconds(every_other) is None
    assert straggler({"worker 0": every_other, "worker 1": run_of(0.4)}) is None


@pytest.mark.parametrize("found", [[], [exchange(7)]])
def test_nobody_is_missing(found: list[RecordedExchange]) -> None:
    assert missing({"worker 0": found, "worker 1": found}) is None


def test_the_slowest_is_named() -> None:
    by_task = {"worker 0": run_of(0.1), "worker 1": run_of(0.4), "worker 2": run_of(0.12)}
    assert own_seconds(by_task["worker 1"]) == pytest.approx(0.4, rel=0.1)
    clause = straggler(by_task)
    assert clause is not None
    assert clause.startswith("worker 1 is the slowest: 3")


def test_whether_the_slowest_waits_for_its_input() -> None:
    slow_map = run_of(0.4, input_s=0.25)
    assert input_seconds(slow_map) == pytest.approx(0.25)
    clause = straggler({"worker 0": run_of(0.1), "worker 1": slow_map})
    assert clause is not None
    assert clause.endswith("the others 96 ms; it waits 250 ms for its input")
    clause = straggler({"worker 0": run_of(0.1), "worker 1": run_of(0.4, input_s=0.1)})
    assert clause is not None
    assert clause.endswith("the others 96 ms")
    assert input_seconds(run_of(0.1, steps=5)) is None


@dataclasses.dataclass
class MadeTask:
    """A task, as far as its exchanges go."""

    name: str
    made: list[RecordedExchange]
    kind: str = "worker"
    status: int | None = None

    def exchanges(self) -> list[RecordedExchange]:
        return self.made


def watched(*tasks: Any) -> RunStatus:
    return RunStatus(Path("run7"), ["script"], tasks=[*tasks])


def test_a_task_that_has_not_started(tmp_path: Path) -> None:
    board = watched(Task("worker", 0, tmp_path))
    assert board.status()["tasks"][0]["stage"] == "starting"
    assert board.stacks() == {"worker 0": "it has not started yet"}


def test_the_run_names_a_straggler_once_when_two_looks_have_found_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run_status, "STRAGGLER_S", 0.0)
    board = watched(MadeTask("worker 0", run_of(0.1)), MadeTask("worker 1", run_of(0.4)))
    assert board.new_straggler() == []
    (line,) = board.new_straggler()
    assert line.startswith("worker 1 is the slowest")
    assert board.new_straggler() == []


def test_what_the_run_reports_of_killed_tasks() -> None:
    first: Any = MadeTask("worker 0", [exchange(7, done=False, waiting_for=1)])
    second: Any = MadeTask("worker 1", [exchange(6)], status=-9)
    other = MadeTask("worker 2", [])  # the others wait for it, too
    assert watched(first, second, other).killed([second]) == []
    never = "worker 1 never entered exchange 7 (g of step 7); SIGKILL ended it"
    assert watched(first, second).killed([first, second]) == [never]
    second.status = 1  # it has an error of its own
    assert watched(first, second).killed([first, second]) == []


@pytest.mark.parametrize("own_s", [(0.1, 0.12), (0.0001, 0.0002)])
def test_small_differences_are_none(own_s: tuple[float, float]) -> None:
    assert straggler({f"worker {i}": run_of(s) for i, s in enumerate(own_s)}) is None


def test_few_steps_say_nothing() -> None:
    assert straggler({"worker 0": run_of(0.1, steps=5), "worker 1": run_of(0.4, steps=5)}) is None


def test_a_pause_between_two_calls_is_no_slowness() -> None:
    pause = [e._replace(begun=e.begun + 60, done=e.done + 60) for e in run_of(0.1)[15:]]
    found = own_seconds([*run_of(0.1)[:15], *pause])
    assert found is not None
    assert found < 0.3


STACKS = """\
Thread 0x00007f01 (most recent call first):
  File "/home/me/train.py", line 31 in slow_map
  File "/home/me/train.py", line 40 in main
  File "/venv/lib/python3.11/site-packages/tensorflow/script_ops.py", line 269 in __call__

Current thread 0x00007f02 (most recent call first):
  File "/venv/lib/python3.11/site-packages/tensorflow/execute.py", line 53 in quick_execute
  File "/home/me/train.py", line 60 in <module>
  File "<frozen runpy>", line 88 in _run_code
"""


def test_the_users_frames_are_shown() -> None:
    assert innermost(STACKS) == "train.py:31 in slow_map < train.py:40 in main"
    assert innermost("") == ""


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "runtime"
    monkeypatch.setenv(run_files.RUNTIME_DIRECTORY, str(path))
    return path


def test_the_files_of_a_run_are_the_owners_alone(runtime: Path, tmp_path: Path) -> None:
    board = RunStatus(tmp_path / "run7", ["script", "train.py"])
    with published(board):
        (path,) = runtime.iterdir()
        assert stat.S_IMODE(runtime.stat().st_mode) == stat.S_IMODE(path.stat().st_mode) == 0o700
        task = TaskFiles("worker", 1, tmp_path / "attempt_3", pid=os.getpid())
        board.tasks, board.attempt, board.cluster = [task], 3, {"worker": ["h0:1", "h1:1"]}
        run_files.update(board)
        (run,) = run_files.runs()
        assert (run.pid, run.name) == (os.getpid(), "run7")
        state = run.status()
        assert (state["command"], state["attempt"]) == (["train.py"], 3)
        assert state["elsewhere"] == {"worker 0": "h0"}
        assert [(task["task"], task["stage"]) for task in state["tasks"]] == [
            ("worker 1", "starting")
        ]
    assert run_files.runs() == []
    assert list(runtime.iterdir()) == []


def test_a_directory_that_others_may_use_is_refused(runtime: Path, tmp_path: Path) -> None:
    runtime.mkdir(parents=True)
    runtime.chmod(0o770)
    with pytest.raises(UsageError, match="not a directory of this user alone"):
        run_files.runs()
    # the run continues without the status file
    with published(RunStatus(tmp_path / "run7", ["script"])):
        assert list(runtime.iterdir()) == []


def test_files_without_a_launcher_are_removed(runtime: Path, tmp_path: Path) -> None:
    launcher = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with published(RunStatus(tmp_path / "run7", ["script"], launcher.pid)):
        assert [run.pid for run in run_files.runs()] == [launcher.pid]
        launcher.kill()
        launcher.communicate()
        assert run_files.runs() == []
        assert list(runtime.iterdir()) == []
