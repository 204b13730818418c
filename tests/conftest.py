"""Fixtures for all tests; `tests.helpers.cluster` has the functions behind them."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable, Iterator

import pytest

from tests.helpers import cluster, part


def pytest_report_header() -> str | None:
    """Says how to run the same part of the tests again."""
    parts = os.environ.get(part.PART)
    return parts and f"every test in {parts}: {part.PART}={parts} {part.SEED}={part.seed()}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what `part.PART` does."""
    parts = int(os.environ.get(part.PART, 1))
    if parts > 1:
        kept = part.chosen((item.nodeid for item in items), parts, part.seed())
        config.hook.pytest_deselected(items=[i for i in items if i.nodeid not in kept])
        items[:] = [item for item in items if item.nodeid in kept]


@pytest.fixture(scope="session", autouse=True)
def _temporary_files_are_pytest_s(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Temporary folders, of the processes under test too, go and stay with pytest's own."""
    folder = str(tmp_path_factory.mktemp("tmp", numbered=False))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", folder)
        patch.setitem(os.environ, "TMPDIR", folder)
        yield


@pytest.fixture(scope="session")
def run_cluster() -> Callable[..., cluster.ClusterRun]:
    """`tests.helpers.cluster.run_cluster`; fixtures of any scope may use it."""
    return cluster.run_cluster


# A shell starts its background jobs with these ignored, and whoever runs the tests so would hand
# that on to every process whose reaction to them is tested.
for _number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
    if signal.getsignal(_number) is signal.SIG_IGN:
        default = signal.default_int_handler if _number == signal.SIGINT else signal.SIG_DFL
        signal.signal(_number, default)
