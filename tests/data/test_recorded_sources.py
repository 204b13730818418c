"""Each source over kills, on real processes: the examples of each step, with other workers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.helpers.cases import chosen
from tests.helpers.cluster import run_cluster
from tests.programs.recorded_sources import (
    BACKED_UP,
    EPOCHS,
    LEFT_AT,
    SOURCES,
    STEPS,
    N,
    write_files,
)

pytestmark = pytest.mark.process

# Some sources on 2 workers and then 3, and all of them by `make nightly`. `make nightly`
# has the other numbers of workers.
SOME = ["py_dataset", "tfrecords"]
PAIRS = [(2, 3), (3, 1), (1, 2), (1, 3), (2, 1), (3, 2)]
CASES = [
    pytest.param(
        *(name, before, after),
        marks=pytest.mark.nightly
        if (before, after) in PAIRS[1:]
        else [pytest.mark.nightly] * (name not in SOME),
    )
    for before, after in PAIRS
    for name in SOURCES
]

Steps = dict[tuple[int, int], list[int]]  # (step, worker) -> its examples


class Runs:
    """Launches of the program, each made once.

    Args:
        folder: of the files.
        names: of the sources; in a run of two workers or more one is killed in the last source.
    """

    def __init__(self, folder: Path, names: list[str]) -> None:
        self._folder, self._names = folder, names
        self._made: set[str] = set()

    def first(self, name: str, workers: int) -> Steps:
        return self._examples(str(workers), name, workers, workers > 1)

    def continued(self, name: str, before: int, after: int) -> Steps:
        run = f"{before} to {after}"
        if run not in self._made:
            self.first(name, before)
            for each in self._names:
                killed = before > 1 and each == self._names[-1]
                backups = self._folder / str(before) / each / ("backups" if killed else "left")
                shutil.copytree(backups, self._folder / run / each / "backups")
        return self._examples(run, name, after, False)

    def _examples(self, run: str, name: str, workers: int, kills: bool) -> Steps:
        if run not in self._made:
            self._made.add(run)
            run_cluster(
                *("recorded_sources.py", str(self._folder), run),
                *(self._names[-1] if kills else "none", *self._names),
                workers=workers,
                status=int(kills),
            )
        found: Steps = {}
        for worker in range(workers):
            file = self._folder / run / name / f"worker {worker} of {workers}"
            for step, ids in map(json.loads, file.read_text().splitlines()):
                assert (step, worker) not in found
                found[step, worker] = ids
        return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Runs:
    folder = tmp_path_factory.mktemp("sources")
    write_files(folder)
    names = chosen(request, "test_a_source_is_read_once_over_a_kill_with_other_workers")
    return Runs(folder, [name for name in SOURCES if name in names])


@pytest.mark.parametrize(("name", "before", "after"), CASES)
def test_a_source_is_read_once_over_a_kill_with_other_workers(
    runs: Runs, name: str, before: int, after: int
) -> None:
    alone = [ids for _, ids in sorted(runs.first(name, 1).items())]
    rows = [row for step in alone for row in step]
    assert sorted(rows[:N]) == sorted(rows[N : 2 * N]) == list(range(N))

    left, continued = runs.first(name, before), runs.continued(name, before, after)
    assert left.keys() >= {(s, w) for s in range(LEFT_AT) for w in range(before)}
    later = range(BACKED_UP, EPOCHS * STEPS)
    assert continued.keys() == {(s, w) for s in later for w in range(after)}
    for found, workers in ((left, before), (continued, after)):
        for (step, worker), ids in found.items():
            assert ids == alone[step][worker::workers], (step, worker)
