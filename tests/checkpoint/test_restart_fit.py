"""Rows 1, 2 and 13 with real training: after any kill the run ends with the same weights."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.buckets import CREDENTIALS, s3
from tests.helpers.cluster import PROGRAMS, forked_command
from tfmw.errors import PREEMPTED
from tfmw.storage.bucket import Bucket
from tfmw.train.checkpoint.store import BackupStore
from tfmw.train.saved_model import verify_export as verify

pytestmark = pytest.mark.process

PROGRAM = str(PROGRAMS / "restart_fit.py")
EPOCHS, STEPS = 3, 12
HOLD_S = 120.0  # longest wait of a worker that a test is to kill
# Words of TensorFlow's own collectives about a lost worker.
OF_THE_GONE = "ring_alg|StartAbort"


@dataclasses.dataclass
class Trained:
    """Result of a run of restart_fit.py, and the final state of each worker."""

    status: int
    output: str
    workers: list[dict[str, Any]]
    seconds: float = 0.0
    seconds_of_steps: float = 0.0  # from the first step to the last one

    @property
    def restarts(self) -> int:
        return self.output.count("tfmw: restart ") + self.replaced

    @property
    def replaced(self) -> int:
        return self.output.count(REPLACED)


REPLACED = "is replaced (not counted as a restart)"


# The action of a test when a worker reports a step: (worker, step, attempt, pid).
Disturb = Callable[[int, int, int, int], None]


def train(
    folder: Path,
    disturb: Disturb,
    *options: str,
    launcher_too: Callable[[int, int], None] | None = None,
    arguments: Sequence[str] = (),
    backup_dir: str = "",
) -> Trained:
    """Trains on two workers, and lets `disturb` know of each step."""
    (folder / "results").mkdir(exist_ok=True)
    backup_dir = backup_dir or str(folder / "backup")
    command = ["run", "--workers", "2", *options, PROGRAM, "--backup_dir", backup_dir]
    command += arguments
    env = {"TFMW_RESULT": str(folder / "results")}
    output, attempt, began = "", 0, time.monotonic()
    made: list[float] = []
    with forked_command(*command, env=env) as run:
        for line in run.lines():
            output += line
            attempt += line.startswith(("tfmw: restart ", "tfmw: attempt ")) or REPLACED in line
            if found := re.search(r"\[worker (\d)\] made step (\d+) (\d+)", line):
                worker, step, pid = map(int, found.groups())
                made.append(time.monotonic())
                disturb(worker, step, attempt, pid)
                if launcher_too:
                    launcher_too(run.pid, step)
        status, left = run.wait()
    assert not left, f"processes survive the run: {left}"
    files = [folder / "results" / f"worker_{i}.json" for i in (0, 1)]
    found_results = [json.loads(file.read_text()) for file in files if file.exists()]
    seconds = time.monotonic() - began
    return Trained(status, output, found_results, seconds, made[-1] - made[0])


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    with_pid_gone = subprocess.run(["kill", f"-{int(number)}", str(pid)], capture_output=True)
    assert with_pid_gone.returncode in (0, 1)  # 1: it was quicker


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    done = train(tmp_path_factory.mktemp("undisturbed"), lambda *_: None)
    assert done.status == 0, done.output
    return done


def assert_same(done: Trained, undisturbed: Trained) -> None:
    assert done.status == 0, done.output
    for worker in done.workers:
        assert worker["seen"] == [EPOCHS] * len(worker["seen"])
        assert worker["iterations"] == EPOCHS * STEPS
        assert worker["weights"] == undisturbed.workers[0]["weights"]
        assert worker["history"] == undisturbed.workers[0]["history"]


def test_uninterrupted_run_has_each_example_once_per_epoch(undisturbed):
    assert_same(undisturbed, undisturbed)
    assert undisturbed.restarts == 0
    assert 16 < undisturbed.workers[0]["known_ids"] <= 32  # of its table, which is in its weights


def test_rows_01_and_02_a_worker_then_the_chief_killed_in_a_step(undisturbed, tmp_path):
    def disturb(worker: int, step: int, attempt: int, pid: int) -> None:
        if (attempt, worker, step) == (0, 1, 8):  # where this worker holds
            deadline = time.monotonic() + HOLD_S / 2
            while not any((tmp_path / "backup").glob("step_" + "?" * 12)):
                assert time.monotonic() < deadline, "no backup was written in eight steps"
                time.sleep(0.02)
            kill(pid)
        if (attempt, worker) == (1, 0) and step >= 15:
            kill(pid)

    options = ["--max-restarts", "2", "--log-dir", str(tmp_path / "logs")]
    arguments = ["--collectives=grpc", "--backup_every=continuous"]
    arguments += ["--die=1:step:8:hold", f"--hold={HOLD_S}"]
    done = train(tmp_path, disturb, *options, arguments=arguments)
    assert_same(done, undisturbed)
    assert done.restarts == 2
    restored = re.findall(r"restored step (\d+) from", done.output)
    assert 0 < int(restored[0]) <= 8
    assert_only_in_logs("failed call to cuInit", done, tmp_path / "logs")
    assert not re.search(OF_THE_GONE, done.output)
    assert [worker["attempt"] for worker in done.workers] == [2, 2]
    assert_divided(done)


@pytest.mark.nightly  # test_bucket_backups.py kills a writer at each request, in `make test`
def test_backups_in_a_bucket(undisturbed, tmp_path, monkeypatch):
    """Three kills: the results are those of an undisturbed run with a local directory."""
    with s3(monkeypatch) as server:

        def disturb(worker: int, step: int, attempt: int, pid: int) -> None:
            written = any(request == "PUT run7/backups.json" for request in server.requests)
            if written and attempt < 3 and worker == attempt % 2 and step >= 7 * (attempt + 1):
                kill(pid)

        options = ["--max-restarts", "3", "--isolate", "off"]
        arguments = ["--collectives=grpc", "--backup_every=3 steps"]
        url = f"{server.url}/run7"
        done = train(tmp_path, disturb, *options, arguments=arguments, backup_dir=url)
        assert_complete(url)
        left = Bucket(url).names("data")
    assert_same(done, undisturbed)
    assert done.restarts == 3
    assert [int(step) for step in re.findall(r"restored step (\d+) from s3://", done.output)] > [0]
    assert len({name.split("/")[1] for name in left}) == 2, "something of a kill is left"
    assert not [secret for secret in CREDENTIALS.values() if secret in done.output]


def assert_divided(done: Trained) -> None:
    """The last line divides the time of all attempts."""
    line = done.output.splitlines()[-1]
    total = float(re.findall(r"^tfmw: (?:goodput \d+ % of|took) ([\d.]+) s: ", line)[0])
    found = re.findall(r"([a-z][a-z -]*) ([\d.]+) s", line.partition(" s: ")[2])
    parts = {name: float(seconds) for name, seconds in found}
    assert done.seconds_of_steps < total < done.seconds
    assert sum(parts.values()) == pytest.approx(total, abs=0.1 * len(parts))
    # TensorFlow has no clock for data where its operations are deterministic.
    assert {"training with its data", "validation", "start-up", "restarts"} <= set(parts)


@pytest.mark.nightly
def test_follow_up_errors_of_a_lost_worker_are_only_in_the_log(tmp_path):
    # Without a restart that waits for it, the survivor has the time to speak before it leaves. It
    # waits in a collective then: work between this step and the next needs no other worker.
    options = ["--log-dir", str(tmp_path / "logs")]
    arguments = ["--collectives=grpc", "--die=1:step:6"]
    done = train(tmp_path, lambda *_: None, *options, arguments=arguments)
    assert "tfmw: worker 1 failed" in done.output.splitlines()[-1]
    assert_only_in_logs(OF_THE_GONE, done, tmp_path / "logs")


def assert_complete(directory: Path | str) -> None:
    """The last backup of the run stays, for the same command and for more epochs."""
    newest = BackupStore(directory).newest()
    assert newest is not None
    assert newest.record["done"]


def assert_only_in_logs(said: str, done: Trained, logs: Path) -> None:
    in_logs = "".join(log.read_text() for log in logs.glob("*/attempt_*/*/output.log"))
    assert re.search(said, in_logs), "TensorFlow says nothing any more"
    assert not re.search(said, done.output)


@pytest.mark.nightly
def test_row_13_one_task_is_preempted_then_the_launcher(undisturbed, tmp_path):
    told: list[int] = []

    def disturb(worker: int, step: int, attempt: int, pid: int) -> None:
        if (attempt, worker) == (0, 1) and step == 5:
            kill(pid, signal.SIGTERM)

    def launcher_too(launcher: int, step: int) -> None:
        if step == 20 and not told:
            told.append(step)
            os.kill(launcher, signal.SIGUSR1)

    done = train(tmp_path, disturb, "--max-restarts", "1", launcher_too=launcher_too)
    assert done.status == PREEMPTED, done.output
    assert "(not counted as a restart)" in done.output
    assert "same command resumes the run" in done.output.splitlines()[-1]
    assert_same(train(tmp_path, lambda *_: None), undisturbed)


@pytest.mark.nightly
def test_row_13_preempted_in_a_validation(undisturbed, tmp_path):
    # In the first epoch, then in the last: each validation begins again, no step is made again.
    arguments = ["--die", "1:validation:1:term,0:validation:2,0:validation:7:term"]
    done = train(tmp_path, lambda *_: None, "--max-restarts", "1", arguments=arguments)
    assert_same(done, undisturbed)
    for worker in done.workers:  # their counts are those from before the validation
        assert worker["validations"] == undisturbed.workers[0]["validations"]
    assert done.output.count("(not counted as a restart)") == 2
    assert len(re.findall(r"\[worker 0\] made step", done.output)) == EPOCHS * STEPS
    assert done.output.count("[worker 0] validation begins") == EPOCHS + 3


@pytest.mark.nightly
def test_run_preempted_after_the_last_epoch_is_complete(undisturbed, tmp_path):
    done = train(tmp_path, lambda *_: None, arguments=[f"--die=1:epoch:{EPOCHS}:term"])
    assert "dies in epoch" in done.output
    assert_same(done, undisturbed)


@pytest.mark.nightly
def test_a_validation_and_an_export_that_are_longer_than_the_hang_timeout(undisturbed, tmp_path):
    export = tmp_path / "export"
    arguments = ["--epochs=1", "--validation_pause=2", "--hold=7", "--die=0:export:1:hold"]
    options = ["--hang-timeout", "5", "--isolate", "off"]
    arguments += ["--export_dir", str(export)]
    done = train(tmp_path, lambda *_: None, *options, arguments=arguments)
    assert done.status == 0, done.output
    assert verify(export) == []


@pytest.mark.nightly
def test_chaos_many_kills_at_random_moments(undisturbed, tmp_path):
    chance = random.Random(20)
    # One kill in each of four attempts, some steps after the last, at either worker.
    moments = [(chance.randrange(2), 3 + 8 * nth + chance.randrange(5)) for nth in range(4)]
    killed: list[int] = []

    def disturb(worker: int, step: int, attempt: int, pid: int) -> None:
        if attempt < len(moments) and len(killed) == attempt:
            victim, moment = moments[attempt]
            if worker == victim and step >= moment:
                killed.append(step)
                kill(pid)

    done = train(tmp_path, disturb, "--max-restarts", "8")
    assert_same(done, undisturbed)
    assert len(killed) == len(moments)
    assert done.replaced == done.restarts == len(moments)
    assert_complete(tmp_path / "backup")


@pytest.mark.nightly
def test_chaos_killed_in_steps_backups_validation_and_export(undisturbed, tmp_path):
    chance = random.Random(4)
    either = [chance.randrange(2) for _ in range(3)]
    # Each attempt comes further than the one before, or `tfmw run` would see a crash loop.
    deaths = [
        "0:backup:2",  # the chief writes: of steps 4 and 8, the second
        f"{either[0]}:step:{chance.randint(5, 7)}",
        f"{either[1]}:validation:{chance.randint(1, 4)}",  # after step 12
        f"{either[2]}:step:{chance.randint(5, 7)}",
        "0:backup:1",
        "0:export:1",
    ]
    export = tmp_path / "export"
    arguments = ["--export_dir", str(export), "--die", ",".join(deaths)]
    done = train(tmp_path, lambda *_: None, "--max-restarts", "20", arguments=arguments)
    assert_same(done, undisturbed)
    points = [death.split(":")[1] for death in deaths]
    assert list(re.findall(r"dies in (\w+)", done.output)) == points
    assert done.restarts == len(points)
    assert done.replaced >= len(points) - 1  # all but the one in the export, after the training
    assert verify(export) == []
    assert [entry.name for entry in tmp_path.iterdir() if "export" in entry.name] == ["export"]
    assert_complete(tmp_path / "backup")


# ---------------------------------------------------------------- local SGD

SYNC = {
    "every": 5,
    "fragments": 2,
    "overlap": 1,
    "compression": "int8",
    "outer_optimizer": {
        "class_name": "SGD",
        "config": {"learning_rate": 0.7, "momentum": 0.9, "nesterov": True},
    },
}
"""Exchanges of epochs of 12 steps begin after steps 1, 4, 6, 9, 11, and end one step later."""


@pytest.mark.nightly
def test_workers_killed_between_and_in_rounds_of_local_sgd(tmp_path):
    sync = [f"--sync={json.dumps(SYNC)}"]
    for folder in ("undisturbed", "killed"):
        (tmp_path / folder).mkdir()
    undisturbed = train(tmp_path / "undisturbed", lambda *_: None, arguments=sync)
    # Backups are made after steps 4 (an exchange has begun), 8 (none has) and at ends of epochs.
    deaths = "1:step:6,0:backup:2,0:epoch:1,1:step:7"
    done = train(
        tmp_path / "killed",
        lambda *_: None,
        "--max-restarts=4",
        arguments=[*sync, f"--die={deaths}"],
    )
    assert_same(done, undisturbed)
    assert done.replaced == done.restarts == 4


@pytest.mark.nightly
def test_local_sgd_goes_on_with_another_number_of_workers(tmp_path):
    sync = [f"--sync={json.dumps(SYNC)}"]
    left = train(tmp_path, lambda *_: None, arguments=[*sync, "--die=1:step:6:term"])
    assert left.status == 75, left.output
    done = train(tmp_path, lambda *_: None, "--workers=1", arguments=sync)
    assert done.status == 0, done.output
    assert "restored step" in done.output
    assert done.workers[0]["seen"] == [EPOCHS] * len(done.workers[0]["seen"])
    assert len(done.workers[0]["history"]["loss"]) == EPOCHS
    losses = done.workers[0]["history"]["val_loss"]
    assert losses[-1] < losses[0]
