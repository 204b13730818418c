"""Trackers: a run of two workers, killed twice, beside one process that Keras trains.

MLflow's store is read by its client, W&B's files by their records, events by TensorBoard's reader.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from mlflow.tracking import MlflowClient
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.helpers.cluster import ONE_THREAD, PROGRAMS, PYTHONPATH, tfmw_command
from tests.helpers.wandb_rows import wandb_rows

pytestmark = [
    pytest.mark.process,
    pytest.mark.nightly,
    pytest.mark.timeout(900),  # three starts of two workers, which import a lot
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of MLflow and TensorBoard
]

PROGRAM = str(PROGRAMS / "trackers.py")
SINCE_BACKUP = 5
"""Steps that the program trains twice at most: a backup each 4, killed after 9."""

QUIET = {"WANDB_SILENT": "true", "GIT_PYTHON_REFRESH": "quiet"}


@dataclasses.dataclass
class Tracked:
    """A folder that the program has logged to, and what each of its tasks wrote."""

    folder: Path
    output: str
    workers: dict[str, Any]

    def run(self, name: str) -> Any:
        """The run of MLflow whose metrics `name` has."""
        (found,) = [
            r for r in self.runs() if (r.info.run_name == "callbacks") == (name == "callbacks")
        ]
        return found

    @property
    def client(self) -> MlflowClient:
        return MlflowClient(f"sqlite:///{self.folder}/mlflow.db")

    def runs(self) -> list[Any]:
        experiments = [e.experiment_id for e in self.client.search_experiments()]
        return list(self.client.search_runs(experiments))

    def history(self, name: str) -> dict[str, list[tuple[int, float]]]:
        """Metric -> (step, value) in order."""
        run = self.run(name)
        return {
            key: sorted(
                (m.step, m.value) for m in self.client.get_metric_history(run.info.run_id, key)
            )
            for key in run.data.metrics
        }

    def artifacts(self, name: str, path: str | None = None) -> set[str]:
        run_id = self.run(name).info.run_id
        found: set[str] = set()
        for file in self.client.list_artifacts(run_id, path):
            found |= self.artifacts(name, file.path) if file.is_dir else {file.path}
        return {f.split(".tfevents.")[0] for f in found}

    def wandb_files(self) -> list[Path]:
        return sorted(self.folder.glob("wandb/offline-run-*/run-*.wandb"))

    def rows(self) -> list[dict[str, Any]]:
        return [row for path in self.wandb_files() for row in wandb_rows(path)]

    def scalars(self, board: str) -> dict[str, list[tuple[int, float]]]:
        """Tag -> (step, value), as TensorBoard reads them."""
        import tensorflow as tf

        events = EventAccumulator(str(self.folder / "board" / board), size_guidance={"tensors": 0})
        events.Reload()
        return {
            tag: [(e.step, float(tf.make_ndarray(e.tensor_proto))) for e in events.Tensors(tag)]
            for tag in events.Tags()["tensors"]
            if tag != "keras" and tag.startswith(("epoch_", "batch_", "evaluation_"))
        }


@pytest.fixture(scope="module")
def keras_alone(tmp_path_factory: pytest.TempPathFactory) -> Tracked:
    folder = tmp_path_factory.mktemp("keras")
    done = subprocess.run(
        [sys.executable, PROGRAM, str(folder), "keras"],
        env={**ONE_THREAD, **QUIET, "PYTHONPATH": PYTHONPATH, "HOME": str(folder)},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return Tracked(folder, done.stdout + done.stderr, {})


@pytest.fixture(scope="module")
def killed_twice(tmp_path_factory: pytest.TempPathFactory) -> Tracked:
    folder = tmp_path_factory.mktemp("tfmw")
    (folder / "results").mkdir()
    command = ["run", "--workers", "2", "--max-restarts", "2", PROGRAM, str(folder)]
    env = {**QUIET, "TFMW_RESULT": str(folder / "results")}
    with tfmw_command(*command, env=env, cwd=folder) as run:
        output, _ = run.communicate(timeout=600)
    assert run.returncode == 0, output
    workers = {f.stem: json.loads(f.read_text()) for f in (folder / "results").glob("*.json")}
    return Tracked(folder, output, workers)


def same(found: list[tuple[int, float]], expected: list[tuple[int, float]]) -> bool:
    return [s for s, _ in found] == [s for s, _ in expected] and [v for _, v in found] == (
        pytest.approx([v for _, v in expected], rel=1e-4)
    )


def test_it_was_killed_in_each_training(killed_twice: Tracked) -> None:
    assert killed_twice.output.count("at step 9: SIGKILL") == 2


def test_mlflow_has_one_run_for_each_training(killed_twice: Tracked, keras_alone: Tracked) -> None:
    assert len(keras_alone.runs()) == 2
    assert len(killed_twice.runs()) == 2
    assert {r.info.status for r in killed_twice.runs()} == {"FINISHED"}


def each_once_or_again(found: list[Any], expected: list[Any], again: int) -> bool:
    """Whether `found` has everything that is expected, at most `again` of it twice, and no more."""
    return (
        all(any(f == e for e in expected) for f in found)
        and all(any(f == e for f in found) for e in expected)
        and len(expected) <= len(found) <= len(expected) + again
    )


@pytest.mark.parametrize("name", ["callbacks", "autolog"])
def test_mlflow_lacks_no_step(killed_twice: Tracked, keras_alone: Tracked, name: str) -> None:
    """Steps between the backup and the kill are there twice, with the same values."""
    found, expected = killed_twice.history(name), keras_alone.history(name)
    assert found.keys() == expected.keys()
    for key in found:
        near = [(step, pytest.approx(value, rel=1e-4)) for step, value in expected[key]]
        assert each_once_or_again(found[key], near, SINCE_BACKUP), (key, found[key], near)


@pytest.mark.parametrize("name", ["callbacks", "autolog"])
def test_mlflow_has_the_parameters_and_artifacts_of_one_process(
    killed_twice: Tracked, keras_alone: Tracked, name: str
) -> None:
    assert killed_twice.run(name).data.params == keras_alone.run(name).data.params
    assert killed_twice.artifacts(name) == keras_alone.artifacts(name)


def test_wandb_has_one_run_which_lacks_no_row(killed_twice: Tracked, keras_alone: Tracked) -> None:
    """W&B numbers the rows of each attempt anew when it is offline."""
    assert len({path.name for path in killed_twice.wandb_files()}) == 1
    found, expected = (
        [{k: v for k, v in row.items() if not k.startswith("_")} for row in of.rows()]
        for of in (killed_twice, keras_alone)
    )
    near = [pytest.approx(row, rel=1e-4) for row in expected]
    again = SINCE_BACKUP + 1  # an epoch ends among those steps, and has a row, too
    assert each_once_or_again(found, near, again), (found, expected)


@pytest.mark.parametrize("board", ["train", "validation"])
def test_tensorboard_has_every_step_once(
    killed_twice: Tracked, keras_alone: Tracked, board: str
) -> None:
    found, expected = killed_twice.scalars(board), keras_alone.scalars(board)
    assert found.keys() == expected.keys()
    for tag in found:
        if tag != "epoch_steps_per_second":
            assert same(found[tag], expected[tag]), (tag, found[tag], expected[tag])


def test_the_other_worker_logs_to_itself(killed_twice: Tracked) -> None:
    assert killed_twice.workers["worker_1"]["silent"]
    assert not killed_twice.workers["worker_0"]["silent"]
    # It shows its script the tracker that the script has chosen.
    tracker = killed_twice.workers["worker_0"]["mlflow"]
    assert killed_twice.workers["worker_1"]["mlflow"] == tracker
