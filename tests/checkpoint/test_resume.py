"""Runs that are interrupted and resumed, on real processes. Rows: docs/explain/failure-model.md."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from concurrent import futures
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.buckets import s3
from tests.helpers.cases import cases, chosen, each
from tests.helpers.cluster import ONE_THREAD, PROGRAMS, PYTHONPATH, run_cluster
from tfmw.errors import PREEMPTED
from tfmw.storage.bucket import Bucket
from tfmw.train.checkpoint.store import BackupStore, verify

pytestmark = pytest.mark.process

# Every kind of data, model state and callback: a run that was interrupted in the middle of an epoch
# beside the same run undisturbed. On two processes those in which two differ from one.
ALONE = ["mapped_at_random", "py_dataset"]
ALONE_TOO = [
    "arrays_shuffled",
    "shuffled", "grain_by_state", "loss_scale", "steps_made_again", "no_backup_yet",
    "grain_by_index", "grain_loader", "hugging_face", "parquet",
    "py_dataset_of_threads", "python_generator", "tfrecords", "gradient_accumulation",
    "at_the_end_of_an_epoch", "repeated_with_steps", "repeated_after_batch",
    "passes_longer_than_epochs", "arrays_with_all_arguments", "class_weight_of_a_dataset",
    "dataset_of_a_generator", "filtered", "interleaved_with_shuffles_inside", "of_input_context",
    "layers_with_state", "moving_averages_of_weights", "averages_of_schedule_free",
    "several_optimizers", "callbacks", "schedule_that_goes_on_from_its_last_rate",
    "steps_made_again_in_arrays",
]  # fmt: skip
TOGETHER = ["mapped_at_random"]
TOGETHER_TOO = [
    "py_dataset", "arrays_shuffled", "of_input_context", "grain_by_state", "hugging_face",
    "layers_with_state", "averages_of_replicas_between_steps", "callbacks",
    "grain_by_index", "grain_loader", "parquet",
    "repeated_with_steps", "filtered", "averages_of_schedule_free", "several_optimizers",
]  # fmt: skip


@pytest.fixture(scope="module")
def alone(tmp_path_factory, request):
    """Two processes, each alone, have half of them: two cores are as busy as for two workers."""
    folder = str(tmp_path_factory.mktemp("alone"))
    names = sorted({*ALONE, *chosen(request, "test_one_process_resumes_bit_for_bit")})

    def half(names: list[str]) -> dict[str, Any]:
        return run_cluster("resume_scenarios.py", folder, *names, workers=1)[0]

    with futures.ThreadPoolExecutor() as pool:
        first, second = pool.map(half, [names[::2], names[1::2]])
    return [first | second]


@pytest.fixture(scope="module")
def together(tmp_path_factory, request):
    folder = str(tmp_path_factory.mktemp("together"))
    cases_of_two = chosen(request, "test_two_processes_resume_bit_for_bit")
    names = sorted({*TOGETHER, "of_input_context", *cases_of_two})
    return run_cluster("resume_scenarios.py", folder, *names, workers=2)


def assert_equal_to_the_undisturbed_run(result: dict[str, Any]) -> None:
    assert "error" not in result, result["error"]
    plain, resumed = result["plain"], result["resumed"]
    assert plain["where"] == []
    for name in plain.keys() - {"where"}:
        assert resumed[name] == plain[name], f"{name}, interrupted at {resumed['where']}"
    assert resumed["epoch"] == list(range(len(resumed["epoch"])))


@pytest.mark.nightly
@pytest.mark.parametrize("name", [*ALONE, *ALONE_TOO])
def test_one_process_resumes_bit_for_bit(alone, name):
    assert_equal_to_the_undisturbed_run(alone[0][name])


@pytest.mark.parametrize("name", cases(TOGETHER, TOGETHER_TOO))
def test_two_processes_resume_bit_for_bit(together, name):
    for worker in together:
        assert_equal_to_the_undisturbed_run(worker[name])
    first, second = (worker[name]["resumed"] for worker in together)
    assert first["history"] == second["history"]


@pytest.mark.parametrize("name", cases(TOGETHER, ["py_dataset"]))
@pytest.mark.parametrize("run", cases(["together"], ["alone"]))
def test_each_example_is_trained_on_once_in_each_epoch(run, name, request):
    result = request.getfixturevalue(run)[0][name]
    assert result["resumed"]["counts"] == [result["epochs"]] * 40


def test_an_interruption_in_the_middle_of_an_epoch_is_backed_up_there(together):
    """Else the tests above would show less than they say."""
    for name, result in each(together[0].items()):
        assert any(begun for _, begun in result["resumed"]["where"]), name


def test_row_24_workers_with_different_amounts_of_data_neither_hang_nor_give_nan(together):
    result = together[0]["of_input_context"]["resumed"]
    assert np.isfinite(result["history"]["loss"]).all()
    # The first worker has 20 examples, the second 13, in batches of 4; both make the steps of the
    # longer one.
    assert sum(result["counts"]) == pytest.approx(3 * (20 + 13))
    assert result["steps"] == 3 * 5


# ---------------------------------------------------------------- row 35 and other worker counts


def faults(
    backups: Path | str, *places: str, workers: int, restarts: int = 0, status: int = 0
) -> tuple[list[dict[str, Any]], str]:
    """Results of the workers of resume_faults.py, and the output of the launcher."""
    options = ["--max-restarts", str(restarts)]
    options += [] if isinstance(backups, Path) else ["--isolate", "off"]
    run = run_cluster(
        "resume_faults.py", str(backups), *places, workers=workers, status=status, options=options
    )
    return list(run), run.output


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="module")
def undisturbed(folder):
    runs = faults(folder / "undisturbed", "apart@0:1", workers=2)[0]
    assert data_files(folder / "undisturbed") == 1, "only the chief can write there"
    return runs


def data_files(backups: Path) -> int:
    """Number of tasks that have written each of the backups."""
    (number,) = {len(list(step.glob("tensors.data-*"))) for step in backups.glob("step_*")}
    return number


@pytest.mark.parametrize("place", cases(["directory"], ["bucket"]))
def test_row_35_killed_while_a_part_is_written_and_again_during_a_restore(
    folder, undisturbed, monkeypatch, place
):
    with s3(monkeypatch) as server:
        backups = folder / "killed" if place == "directory" else f"{server.url}/killed"
        runs, output = faults(
            backups,
            "part 3@0:1",  # of step 9; the backup of step 6 stays the newest
            "restore@1:0",
            workers=2,
            restarts=4,
        )
        assert verify(backups) == []
        if place == "bucket":
            assert any("/part-00001.data" in request for request in server.requests)
            left = Bucket(str(backups)).names("data")
            assert len({name.split("/")[1] for name in left}) == 2, "a part of a backup was left"
    assert [run["attempt"] for run in runs] == ["2", "2"], output
    assert re.search(r"restored step 6 from", output)
    assert not list((folder / "killed").glob(".*writing*")), "a part of a backup was left"
    assert runs[0]["bits"] == runs[1]["bits"] == undisturbed[0]["bits"]
    assert runs[0]["counts"] == [3.0] * 48
    assert undisturbed[0]["update"] == runs[0]["update"] == "sharded over 2 workers"
    assert runs[0]["history"] == undisturbed[0]["history"]


@pytest.mark.nightly
def test_a_worker_killed_while_it_writes_its_part_is_replaced(folder, undisturbed):
    """Its part of the state is in its neighbour's memory; the backup is not completed."""
    places = "copies", "part 3@0:1"
    runs, output = faults(folder / "replaced", *places, workers=2, restarts=1)
    assert verify(folder / "replaced") == []
    assert [run["attempt"] for run in runs] == ["0", "0"], output
    assert "no backup could be written" in output
    assert "worker 1 is replaced (not counted as a restart)" in output
    assert not list((folder / "replaced").glob(".*writing*")), "a part of a backup was left"
    assert runs[0]["bits"] == runs[1]["bits"] == undisturbed[0]["bits"]
    assert runs[0]["counts"] == [3.0] * 48
    assert runs[0]["history"] == undisturbed[0]["history"]


@pytest.fixture(scope="module")
def left_by_two(folder):
    """The backups of two workers that were told to leave in the middle of the second epoch."""
    faults(folder / "two", "leave 5@0:1", workers=2, status=PREEMPTED)
    assert verify(folder / "two") == []
    assert data_files(folder / "two") == 2
    return folder / "two"


def steps_of(backups: Path) -> int:
    newest = BackupStore(backups).newest()
    assert newest is not None
    assert newest.record["feed"]["begun"]
    return newest.step


@pytest.mark.nightly
@pytest.mark.parametrize("workers", [1, 3])
def test_two_workers_are_preempted_and_another_number_resumes(
    folder, undisturbed, left_by_two, workers
):
    mine = folder / f"two_to_{workers}"
    assert 4 < steps_of(left_by_two) < 8  # in the middle of the second epoch
    shutil.copytree(left_by_two, mine)
    runs, _ = faults(mine, workers=workers)
    assert len(runs) == workers
    for run in each(runs):
        assert run["made"] < 8, "it began anew"
        assert run["update"] == ("sharded over 3 workers" if workers == 3 else "")
        assert run["bits"] == runs[0]["bits"]
        assert run["counts"] == [3.0] * 48
        for mine_, theirs in zip(run["weights"], undisturbed[0]["weights"], strict=True):
            np.testing.assert_allclose(mine_, theirs, rtol=1e-4, atol=1e-6)
        assert run["history"]["examples"] == [48.0] * 3
        for name, values in undisturbed[0]["history"].items():
            np.testing.assert_allclose(run["history"][name], values, rtol=1e-4, err_msg=name)


@pytest.mark.nightly
def test_one_worker_is_preempted_and_two_resume(folder, undisturbed):
    faults(folder / "one", "leave 5@0:0", workers=1, status=PREEMPTED)
    assert 4 < steps_of(folder / "one") < 8
    runs, _ = faults(folder / "one", workers=2)
    for run in each(runs):
        assert run["made"] < 8
        assert run["counts"] == [3.0] * 48
        for mine, theirs in zip(run["weights"], undisturbed[0]["weights"], strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-6)


def test_complete_run_trains_nothing_again(folder, undisturbed):
    runs, _ = faults(folder / "undisturbed", workers=2)
    for run in each(runs):
        assert run["made"] == 0
        assert run["bits"] == undisturbed[0]["bits"]
        assert run["history"] == undisturbed[0]["history"]


# ---------------------------------------------------------------- row 18: the network between tasks


@pytest.mark.nightly
def test_row_18_both_sides_of_a_cut_network_end(tmp_path):
    assert shutil.which("ip"), "this test needs the ip command: install iproute2"
    namespaces = "-n" if os.geteuid() == 0 else "-Urn"
    run = subprocess.run(
        ["unshare", namespaces, sys.executable, PROGRAMS / "network_cut.py", tmp_path],
        env={**os.environ, **ONE_THREAD, "PYTHONPATH": PYTHONPATH, "TF_CPP_MIN_LOG_LEVEL": "2"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout.splitlines()[-1])
    assert all(status not in (0, None) for status in result["statuses"]), result
    assert max(result["seconds"]) < 40, result
    for log in result["logs"]:
        assert "Error" in log
    assert verify(tmp_path / "backups") == []
