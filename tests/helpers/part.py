"""A part of the tests, another one for each commit."""

from __future__ import annotations

import hashlib
import os
import subprocess
import time
from collections.abc import Iterable

from tests.helpers.cluster import ROOT

PART = "TFMW_TEST_PART"
"""Variable: with 2, every second test runs."""
ORDER = "TFMW_TEST_ORDER"
"""Variable: draws the order of files; see `tests/flaky.py`."""
SEED = "TFMW_TEST_SEED"
"""Variable: of the choice; default: the commit."""


def commit() -> str:
    """Commit of the working tree; the date if there is none."""
    said = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    )
    return said.stdout.strip() or time.strftime("%Y%m%d")


def seed() -> str:
    """Seed of the choice in this run."""
    return os.environ.get(SEED) or commit()


def chosen(tests: Iterable[str], parts: int, seed: str) -> set[str]:
    """The ids of about one of `parts` tests."""

    return {test for test in tests if number(test, seed) % parts == 0}


def number(name: str, seed: str) -> int:
    """A number that is drawn for a test or a file."""
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:8])
