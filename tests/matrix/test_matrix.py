"""Every cell of the matrix: tfmw on several replicas against Keras in one process.

A test is one cell. One launch runs all rows of a column whose cells were selected (`-k AdamW`).
`make test` runs some of the core of the rows on two virtual devices, and others on two processes.
`make nightly` runs the latter on more processes, and most other rows on two; `make nightly`
has the rest.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from concurrent import futures
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers import cluster
from tests.matrix import columns as columns_module
from tests.matrix import rows  # noqa: F401  registers all rows
from tests.matrix.columns import load
from tests.matrix.row import ROWS, Row, compared, difference

CORE = [name for name, row in ROWS.items() if row.core]
REST = [name for name, row in ROWS.items() if not row.core]


def _runs_on(column: str, names: list[str]) -> list[str]:
    return [name for name in names if column in (ROWS[name].only or [column])]


REST_ON_DEVICES = _runs_on("devices", REST)

# Those in which sharing the update may make a difference.
SHARDED = sorted(
    {
        *CORE,
        *(
            n
            for n, row in ROWS.items()
            if row.build.__module__.endswith((".layers", ".optimizers", ".steps"))
        ),
    }
    & set(_runs_on("two", list(ROWS)))
)

PLAIN = _runs_on("two", list(ROWS))

# Column -> (worker processes, virtual devices of each, its rows).
CLUSTERS = {
    "two": (2, 1, _runs_on("two", list(ROWS))),
    "two_sharded": (2, 1, SHARDED),
    "two_plain": (2, 1, PLAIN),
    "three": (3, 1, CORE),
    "two_by_two": (2, 2, CORE),
}

# Test -> the column that its cells are in.
COLUMN_OF = {
    "test_the_reference_learns": "reference",
    "test_two_devices": "devices",
    "test_two_devices_rest": "devices",
    "test_two_processes": "two",
    "test_two_processes_that_share_the_update": "two_sharded",
    "test_plain_calls_on_two_processes": "two_plain",
    "test_three_processes": "three",
    "test_two_processes_of_two_devices": "two_by_two",
}

pytestmark = pytest.mark.timeout(1800)  # a column is one launch, in the fixture of its first cell


def _cells(names: list[str], mark: Callable[[Row], str]) -> list[Any]:
    """Rows with their marks, which say what runs them beside `make test`."""
    marks = {name: mark(ROWS[name]) for name in names}
    return [pytest.param(n, marks=[getattr(pytest.mark, m)] if m else []) for n, m in marks.items()]


def _two(row: Row) -> str:
    return "nightly" if row.nightly or (row.core and not row.fast) else ""


def _core(row: Row) -> str:
    if row.fast:  # most of them are for two processes
        return "" if row.name == "batches that replicas do not divide" else "nightly"
    return "nightly" if row.nightly else ""


CORE_CELLS = _cells(CORE, _core)
TWO_CELLS = _cells(CLUSTERS["two"][2], _two)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("matrix")


def _single_process(folder: Path, some: list[str], asked: dict[str, set[str]]) -> dict[str, Any]:
    """Runs the reference and the devices' column side by side; returns their reports."""
    anywhere = set[str]().union(*asked.values())
    columns = {
        "reference": [name for name in some if name in anywhere],
        "devices": [name for name in some if name in asked["devices"]],
    }

    def run(column: str) -> list[dict[str, Any]]:
        command = [columns_module.__file__, str(folder), column, *columns[column]]
        status, output = cluster.run_command("python", *command, timeout_s=1500)
        assert status == 0, f"{column}:\n{output}"
        found: list[dict[str, Any]] = json.loads((folder / f"{column}.json").read_text())
        return found

    chosen = [column for column, names in columns.items() if names]
    with futures.ThreadPoolExecutor() as pool:
        return dict(zip(chosen, pool.map(run, chosen), strict=True))


@pytest.fixture(scope="session")
def asked(request: pytest.FixtureRequest) -> dict[str, set[str]]:
    """Column -> the rows that a test to be run is about."""
    found: dict[str, set[str]] = {column: set() for column in ("reference", "devices", *CLUSTERS)}
    items: list[Any] = request.session.items
    for item in items:
        if item.path == Path(__file__) and hasattr(item, "callspec"):
            found[COLUMN_OF[item.originalname]].add(item.callspec.params["name"])
    return found


@pytest.fixture(scope="session")
def core(folder: Path, asked: dict[str, set[str]]) -> dict[str, Any]:
    return _single_process(folder, CORE, asked)


@pytest.fixture(scope="session")
def rest(folder: Path, asked: dict[str, set[str]]) -> dict[str, Any]:
    return _single_process(folder, REST, asked)


def _cluster_column(folder: Path, column: str, asked: dict[str, set[str]]) -> list[dict[str, Any]]:
    workers, devices, names = CLUSTERS[column]
    names = [name for name in names if name in asked[column]]
    run = cluster.run_cluster(
        "matrix.py",
        str(folder),
        column,
        str(devices),
        *names,
        workers=workers,
        timeout_s=1500,
        # Virtual devices are for before init, which `tfmw run` would call first.
        env={"TF_CPP_MIN_LOG_LEVEL": "2", **({"TFMW_NO_INIT": "1"} if devices > 1 else {})},
    )
    assert len(run) == workers
    return list(run)


@pytest.fixture(scope="session")
def two(folder: Path, asked: dict[str, set[str]], core: Any, rest: Any) -> list[dict[str, Any]]:
    return _cluster_column(folder, "two", asked)


@pytest.fixture(scope="session")
def two_sharded(
    folder: Path, asked: dict[str, set[str]], core: Any, rest: Any
) -> list[dict[str, Any]]:
    return _cluster_column(folder, "two_sharded", asked)


@pytest.fixture(scope="session")
def two_plain(
    folder: Path, asked: dict[str, set[str]], core: Any, rest: Any
) -> list[dict[str, Any]]:
    return _cluster_column(folder, "two_plain", asked)


@pytest.fixture(scope="session")
def three(folder: Path, asked: dict[str, set[str]], core: Any) -> list[dict[str, Any]]:
    return _cluster_column(folder, "three", asked)


@pytest.fixture(scope="session")
def two_by_two(folder: Path, asked: dict[str, set[str]], core: Any) -> list[dict[str, Any]]:
    return _cluster_column(folder, "two_by_two", asked)


def _check(folder: Path, column: str, row: Row, reports: list[dict[str, Any]]) -> None:
    for task, report in enumerate(reports):
        assert report[row.name]["error"] is None, f"task {task}: {report[row.name]['error']}"
    digests = {report[row.name]["digest"] for report in reports}
    assert len(digests) == 1, f"tasks end with different states: {digests}"
    expected = load(folder, "reference", row)
    got = load(folder, column, row)
    expects = f"with {row.warns!r}" if row.warns else "that results differ: none"
    assert got["warned"] == bool(row.warns), f"expected a warning {expects}"
    assert compared(got).keys() == compared(expected).keys()
    for name, value in compared(got).items():
        assert np.isfinite(value.astype(np.float64)).all(), f"{name} is not finite: {value}"
    wanted = {n: v for n, v in compared(expected).items() if n.startswith(row.equal)}
    assert wanted or row.but
    logs_tol = row.tol if row.logs_tol is None else row.logs_tol
    wrong = []
    for name, value in wanted.items():
        off = difference(got[name], value)
        if off > (logs_tol if name.startswith(("log/", "evaluate/")) else row.tol):
            wrong.append(f"{name} is off by {off:.1e}: {got[name]} instead of {value}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", CORE_CELLS)
def test_two_devices(name: str, folder: Path, core: dict[str, Any]) -> None:
    _check(folder, "devices", ROWS[name], core["devices"])


@pytest.mark.nightly
@pytest.mark.process
@pytest.mark.parametrize("name", REST_ON_DEVICES)
def test_two_devices_rest(name: str, folder: Path, rest: dict[str, Any]) -> None:
    _check(folder, "devices", ROWS[name], rest["devices"])


@pytest.mark.process
@pytest.mark.parametrize("name", TWO_CELLS)
def test_two_processes(name: str, folder: Path, two: list[dict[str, Any]]) -> None:
    _check(folder, "two", ROWS[name], two)


@pytest.mark.process
@pytest.mark.nightly
@pytest.mark.parametrize("name", SHARDED)
def test_two_processes_that_share_the_update(
    name: str, folder: Path, two_sharded: list[dict[str, Any]]
) -> None:
    _check(folder, "two_sharded", ROWS[name], two_sharded)


@pytest.mark.process
@pytest.mark.nightly
@pytest.mark.parametrize("name", PLAIN)
def test_plain_calls_on_two_processes(
    name: str, folder: Path, two_plain: list[dict[str, Any]]
) -> None:
    _check(folder, "two_plain", ROWS[name], two_plain)


@pytest.mark.process
@pytest.mark.nightly
@pytest.mark.parametrize("name", CORE)
def test_three_processes(name: str, folder: Path, three: list[dict[str, Any]]) -> None:
    _check(folder, "three", ROWS[name], three)


@pytest.mark.process
@pytest.mark.nightly
@pytest.mark.parametrize("name", CORE)
def test_two_processes_of_two_devices(
    name: str, folder: Path, two_by_two: list[dict[str, Any]]
) -> None:
    _check(folder, "two_by_two", ROWS[name], two_by_two)


@pytest.mark.parametrize("name", CORE_CELLS)
def test_the_reference_learns(name: str, folder: Path, core: dict[str, Any]) -> None:
    """Two runs in which nothing happens would be equal too."""
    assert core["reference"][0][name]["error"] is None
    losses = [v for k, v in load(folder, "reference", ROWS[name]).items() if k.startswith("log/")]
    assert any(len(set(values.ravel().tolist())) > 1 for values in losses)


def test_wrong_weight_is_detected() -> None:
    right = np.array([1.0, -2.0])
    seen = functools.partial(difference, expected=right)
    assert seen(right) == 0
    assert seen(right + 3e-5) > 1e-5
    assert seen(right[:1]) == float("inf")
    assert seen(np.array([1.0, np.nan])) == float("inf")
