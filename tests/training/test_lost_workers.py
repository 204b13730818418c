"""A worker is lost, and the others continue with a new one in its place, from a copy in memory.

With backups on disk, too: `tests/checkpoint/test_restart_fit.py` kills workers while they write.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.cases import each
from tests.helpers.cluster import ClusterRun, run_cluster
from tfmw.train.checkpoint.store import BackupStore
from tfmw.train.mirrored.sharded_update import SHARD_OPTIMIZER

pytestmark = pytest.mark.process

SAME = ("state", "history", "seen", "score")


@functools.cache
def trained(
    data: str,
    *ends: str,
    backup_dir: str = "",
    workers: int = 2,
    sharded: bool = False,
    min_workers: int | None = None,
) -> ClusterRun:
    options = ["--max-restarts", "5"] if ends else []
    options += ["--min-workers", str(min_workers)] if min_workers else []
    options += ["--backup-dir", backup_dir] if backup_dir else []
    env = {SHARD_OPTIMIZER: "on"} if sharded else {}
    return run_cluster("lost_workers.py", data, *ends, options=options, workers=workers, env=env)


def results(run: ClusterRun) -> list[dict[str, Any]]:
    return [{name: worker[name] for name in SAME} for worker in run]


def test_a_worker_and_then_the_chief_are_killed(tmp_path: Path) -> None:
    ends = "kill:1:1:2", "kill:0:2:4"
    undisturbed = trained("arrays")
    # The chief continues while it writes a backup.
    disturbed = trained("arrays", "held", *ends, backup_dir=str(tmp_path))
    assert results(disturbed) == results(undisturbed)
    # The second loss has traced nothing again in worker 1.
    assert [w["traces"] for w in disturbed] == [w["traces"] for w in undisturbed]
    replaced = r"tfmw: (worker \d) is replaced \(not counted as a restart\): it failed in attempt 0"
    assert re.findall(replaced, disturbed.output) == ["worker 1", "worker 0"]
    assert "tfmw: restart " not in disturbed.output
    assert len(re.findall("tfmw: the workers continue after step", disturbed.output)) == 2
    assert len(list(disturbed.log_dir.parent.glob("attempt_*"))) == 1
    # Backups continued; the new chief has the lock, and has read none.
    assert "restored step" not in disturbed.output
    (of_fit,) = tmp_path.iterdir()
    newest = BackupStore(of_fit).newest()
    assert newest is not None
    assert newest.record["done"]


@pytest.mark.parametrize("workers", [2, pytest.param(3, marks=pytest.mark.nightly)])
def test_shards_of_slots_survive_the_loss_of_one_worker_and_then_of_another(
    workers: int, tmp_path: Path
) -> None:
    """The worker after it in the ring has its shards; all workers write theirs to the disk."""
    ends = "kill:1:1:2", f"kill:{workers - 1}:2:4"
    undisturbed = trained("arrays", workers=workers)  # whole updates have the same bits
    disturbed = trained(
        "arrays", *ends, sharded=True, workers=workers, backup_dir=str(tmp_path / "backup")
    )
    assert results(disturbed) == results(undisturbed)
    assert [w["traces"] for w in disturbed] == [w["traces"] for w in undisturbed]
    assert disturbed.output.count("is replaced (not counted as a restart)") == 2
    assert "tfmw: restart " not in disturbed.output
    assert "restored step" not in disturbed.output
    assert all(worker["has_shards"] for worker in each(disturbed))


@pytest.mark.parametrize(
    ("workers", "sharded"),
    [
        pytest.param(1, False, marks=pytest.mark.nightly),
        (2, False),
        pytest.param(2, True, marks=pytest.mark.nightly),
    ],
    ids=["one", "whole", "sharded"],
)
def test_all_workers_are_killed_and_new_ones_continue_from_memory(
    workers: int, sharded: bool
) -> None:
    """Copies are in files in memory, which end with the launcher; there are no backups."""
    ends = [f"kill:{worker}:{epoch}:3" for epoch in (1, 2) for worker in range(workers)]
    undisturbed = trained("arrays", workers=workers, sharded=sharded)
    disturbed = trained("arrays", *ends, workers=workers, sharded=sharded)
    assert results(disturbed) == results(undisturbed)
    assert re.findall(r"tfmw: restart (\d) of 5", disturbed.output) == ["1", "2"]
    first, second = map(int, re.findall(r"continue after step (\d+)", disturbed.output))
    assert 0 < first < second
    assert "saves no backups" not in disturbed.output
    folders = {worker["state_folder"] for worker in each(disturbed)}
    assert len(folders) == 1
    assert not Path(folders.pop()).exists()


@pytest.mark.nightly
def test_fewer_workers_put_the_shards_of_more_together() -> None:
    """The third worker's machine is lost for good, so to speak: it dies whenever it starts."""
    ends = [f"kill:{worker}:1:3" for worker in range(3)]
    undisturbed = trained("plain", workers=3, sharded=True)
    disturbed = trained("plain", *ends, "early:2", workers=3, sharded=True, min_workers=2)
    assert "it did not restart, so 2 continue" in disturbed.output
    assert len(disturbed) == 2
    (step,) = map(int, re.findall(r"continue after step (\d+)", disturbed.output))
    assert 0 < step <= 11
    for worker in disturbed:
        for name, values in undisturbed[0]["history"].items():
            assert worker["history"][name] == pytest.approx(values, rel=1e-4), name
        assert worker["seen"] == pytest.approx(undisturbed[0]["seen"], rel=1e-4)
        assert worker["has_shards"]


@pytest.mark.nightly
@pytest.mark.parametrize(
    "arguments",
    [
        ("arrays", "stop:1:1:2"),
        ("arrays", "stop:0:2:2"),
        ("arrays", "kill:0:0:0", "kill:1:1:6", "kill:1:3:0"),
        ("dataset", "kill:0:1:2", "kill:1:2:3"),
    ],
)
def test_workers_are_lost_in_any_step(arguments: tuple[str, ...]) -> None:
    assert results(trained(*arguments)) == results(trained(arguments[0]))
