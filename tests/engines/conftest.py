"""What several engines are compared with."""

from __future__ import annotations

import os
from typing import Any

import pytest

from tests.helpers.cluster import ONE_THREAD


@pytest.fixture(scope="session")
def fit_on_two_workers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """(History, model) of `tfmw.fit(..., workers=2)` on this machine: tests/engines/training.py."""
    from tests.engines import training

    with pytest.MonkeyPatch.context() as patch:
        for name, value in ONE_THREAD.items():
            patch.setitem(os.environ, name, value)
        return training.fit("local", tmp_path_factory.mktemp("local"))
