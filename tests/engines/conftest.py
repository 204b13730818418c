"""Fixtures of the tests of several engines."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from tests.helpers.cluster import ONE_THREAD
from tests.helpers.fake_slurm import FakeSlurm
from tests.helpers.slurm import OneMachine


@pytest.fixture(scope="session")
def fit_on_two_workers() -> tuple[Any, Any]:
    """(History, model) of `tfmw.fit(..., workers=2)` on this machine: tests/engines/training.py."""
    from tests.engines import training

    with pytest.MonkeyPatch.context() as patch:
        for name, value in ONE_THREAD.items():
            patch.setitem(os.environ, name, value)
        return training.fit("local")


@pytest.fixture(
    scope="module",
    params=["commands", pytest.param("daemons", marks=pytest.mark.nightly)],
)
def slurm(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[OneMachine]:
    """A Slurm of this machine, or its commands alone, which this process finds."""
    made = FakeSlurm if request.param == "commands" else OneMachine
    with made(tmp_path_factory.mktemp("slurm")) as one, pytest.MonkeyPatch.context() as patch:
        for name, value in one.env.items():
            patch.setitem(os.environ, name, value)
        yield one
