"""Results of the benchmarks, row by row, also at earlier commits: `bench/history.csv`."""

from __future__ import annotations

import csv
import dataclasses
import statistics
import subprocess
from collections.abc import Sequence
from pathlib import Path

HISTORY = Path(__file__).with_name("history.csv")
COLUMNS = ("commit", "row", "figure")
SLOWER = 1.15  # two runs of the same code differ by up to a tenth
EARLIER = 5  # number of commits whose median a figure is compared with


@dataclasses.dataclass(frozen=True)
class Figure:
    """A ratio, or seconds if the name of the row says so; less is better."""

    row: str
    value: float
    goal: float | None = None

    @property
    def cells(self) -> list[str]:
        """Cells of this figure's row in a table."""
        return [self.row, f"{self.value:.2f}", "" if self.goal is None else f"{self.goal:g}"]


def markdown(title: str, figures: Sequence[Figure]) -> str:
    """A table of rows, figures and goals."""
    lines = [[title, "measured", "goal"], ["---"] * 3, *(figure.cells for figure in figures)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def commit() -> str:
    """Short hash of the measured commit, with a plus if files differ from it."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(HISTORY.parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", "../tfmw")
    return git("rev-parse", "--short", "HEAD") + ("+" if changed else "")


def history(path: Path = HISTORY) -> list[tuple[str, str, float]]:
    """(commit, row, figure), oldest first; empty without a file."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [(r["commit"], r["row"], float(r["figure"])) for r in csv.DictReader(file)]


def slower(figures: Sequence[Figure], path: Path = HISTORY) -> list[str]:
    """A sentence on each figure that exceeds the median of its last commits."""
    found, past = [], history(path)
    for figure in figures:
        before = [value for _, row, value in past if row == figure.row][-EARLIER:]
        usual = statistics.median(before) if before else figure.value
        if figure.value > SLOWER * usual:
            found.append(f"{figure.row}: {figure.value:.2f}, before {usual:.2f}")
    return found


def record(figures: Sequence[Figure], name: str, path: Path = HISTORY) -> None:
    """Adds the figures of a commit to the history, in place of those that it has of the commit."""
    new = [(name, figure.row, figure.value) for figure in figures]
    again = {row for _, row, _ in new}
    kept = [each for each in history(path) if each[0] != name or each[1] not in again]
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows((c, row, f"{value:.4g}") for c, row, value in [*kept, *new])
