"""What `tfmw check` prints: a line for each finding, and how many of them are failures."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable


@dataclasses.dataclass
class Findings:
    """Prints findings and counts failures.

    Attributes:
        show: prints a line.
        failures: number of calls of `failed`.
    """

    show: Callable[[str], None]
    failures: int = 0

    def ok(self, text: str) -> None:
        self.show(f"ok: {text}")

    def note(self, text: str) -> None:
        self.show(f"note: {text}")

    def failed(self, text: str) -> None:
        self.failures += 1
        self.show(f"failed: {text}")
