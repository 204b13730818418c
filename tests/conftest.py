"""Fixtures for all tests; `tests.helpers.cluster` has the functions behind them."""

from __future__ import annotations

import gc
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator

import pytest

from tests.helpers import cluster, part

# As `helpers.cluster` bounds the processes that it starts: two files at a time share two cores.
os.environ.setdefault("TF_NUM_INTRAOP_THREADS", "1")
os.environ.setdefault("TF_NUM_INTEROP_THREADS", "2")
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_report_header() -> str | None:
    """Command that runs the same part of the tests again."""
    parts = os.environ.get(part.PART)
    return parts and f"every test in {parts}: {part.PART}={parts} {part.SEED}={part.seed()}"


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keeps the collector from walking, again and again, through what imports have made.

    That was a fifth of the time of the imports, and a twelfth of that of tests in this process.
    """
    gc.disable()
    result = yield
    gc.freeze()
    gc.enable()
    return result


# Files that take more than half a minute, the longest first: with several files at a time, none of
# them is left for the end, when the other cores have nothing to do.
LONG = (
    "training/test_lost_workers.py",
    "training/test_workers.py",
    "training/test_plain_calls.py",
    "launcher/test_restart.py",
    "mirrored/test_ring.py",
    "checkpoint/test_resume.py",
    "engines/test_local.py",
    "matrix/test_matrix.py",
    "parameter_server/test_hash_tables.py",
    "checkpoint/test_restart_fit.py",
    "local_sgd/test_lost_workers.py",
    "local_sgd/test_training.py",
    "mirrored/test_differences.py",
    "recipes/test_recipes.py",
    "hosts/test_hosts.py",
    "training/test_epoch_iterator.py",
    "mirrored/test_prediction_parts.py",
    "engines/test_kubernetes.py",
    "checkpoint/test_store.py",
    "training/test_as_keras.py",
)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Puts long files first, or draws their order; leaves out what `part.PART` does."""
    if order := os.environ.get(part.ORDER):
        items.sort(key=lambda item: part.number(str(item.path), order))
    else:
        items.sort(key=_place)
    parts = int(os.environ.get(part.PART, 1))
    if parts > 1:
        kept = part.chosen((item.nodeid for item in items), parts, part.seed())
        config.hook.pytest_deselected(items=[i for i in items if i.nodeid not in kept])
        items[:] = [item for item in items if item.nodeid in kept]


def _place(item: pytest.Item) -> int:
    file = "/".join(item.path.parts[-2:])  # of another project, too
    return LONG.index(file) if file in LONG else len(LONG)


@pytest.fixture(scope="session", autouse=True)
def _temporary_files_are_pytest_s(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Temporary folders, of the processes under test too, go and stay with pytest's own."""
    folder = str(tmp_path_factory.mktemp("tmp", numbered=False))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", folder)
        patch.setitem(os.environ, "TMPDIR", folder)
        yield


@pytest.fixture(autouse=True)
def _no_seed_of_another_test() -> Iterator[None]:
    """Each test starts without a global seed and without determinism, as a process does.

    Which tests share a process depends on when their files are done: a seed that one of them leaves
    would change others by chance.
    """
    yield
    if "tensorflow" not in sys.modules:
        return
    import tensorflow as tf
    from tensorflow.python.framework import config

    tf.random.set_seed(None)
    config.disable_op_determinism()


@pytest.fixture(scope="session")
def run_cluster() -> Callable[..., cluster.ClusterRun]:
    """`tests.helpers.cluster.run_cluster`; fixtures of any scope may use it."""
    return cluster.run_cluster


# A shell starts its background jobs with these signals ignored. The tests would hand that on to
# every process whose reaction to a signal is tested.
for _number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
    if signal.getsignal(_number) is signal.SIG_IGN:
        default = signal.default_int_handler if _number == signal.SIGINT else signal.SIG_DFL
        signal.signal(_number, default)
