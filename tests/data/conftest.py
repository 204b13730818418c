"""Pipelines of these tests draw the seeds that they would draw in a process of their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tfmw.compat import datasets


@pytest.fixture(autouse=True)
def without_a_global_seed() -> Iterator[None]:
    """Other tests of this process may have set one."""
    with datasets.substituted_global_seed(None):
        yield
