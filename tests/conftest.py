"""Fixtures for all tests; `tests.cluster` has the functions behind them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests import cluster


@pytest.fixture(scope="session")
def run_cluster() -> Callable[..., cluster.ClusterRun]:
    """`tests.cluster.run_cluster`; fixtures of any scope may use it."""
    return cluster.run_cluster
