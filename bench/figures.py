"""Figures of the benchmarks, and the tables of the pages, which come from `bench/results.json`.

    python -m bench.figures     # writes the tables of results.json into the pages

A table of the file has rows of cells, the first one its heading, and the commit that was measured.
In a page it is between `<!-- figures: NAME -->` and `<!-- end of figures -->`. `python -m bench`
measures the tables that fit into an hour anew; others are edited in the file, after the command
beside them in the page.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results.json"
PAGES = [ROOT / name for name in ("docs/explain/benchmarks.md", "README.md", "bench/README.md")]
_BLOCK = re.compile(r"(<!-- figures: (\w+) -->\n).*?(<!-- end of figures -->)", re.DOTALL)


Rows = Sequence[Sequence[str]] | str
"""The rows of a table, or a sentence."""


@dataclasses.dataclass(frozen=True)
class Figure:
    """Ratios of several rounds, or seconds if the name of the row says so; less is better."""

    row: str
    values: Sequence[float]
    goal: float | None = None

    @property
    def cells(self) -> list[str]:
        """Cells of this figure's row in a table."""
        goal = "" if self.goal is None else f"{self.goal:g}"
        return [self.row, f"{statistics.median(self.values):.2f}", span(self.values), goal]


HEADING = ["row", "median", "range", "goal"]


def span(values: Sequence[float]) -> str:
    """The least and the most of the values, as a cell; empty if there are none."""
    return " to ".join(dict.fromkeys(f"{f(values):.2f}" for f in (min, max) if values))


def markdown(figures: Sequence[Figure]) -> str:
    """A table of all figures."""
    return table([HEADING, *(figure.cells for figure in figures)])


def table(rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown; the first row is its heading."""
    lines = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "\n".join("|" + "".join(f" {cell} |" if cell else " |" for cell in row) for row in lines)


def commit() -> str:
    """Short hash of the measured commit, with a plus if files differ from it."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", "bench", "tfmw")
    return git("rev-parse", "--short", "HEAD") + ("+" if changed else "")


def results() -> dict[str, Any]:
    """Name of a table -> its "commit" and "rows"."""
    found: dict[str, Any] = json.loads(RESULTS.read_text())
    return found


def keep(tables: Mapping[str, Rows], name: str) -> None:
    """Replaces tables in the file of results.

    Args:
        name: of the measured commit.
    """
    new = {title: {"commit": name, "rows": rows} for title, rows in tables.items()}
    text = json.dumps({**results(), **new}, indent=1, ensure_ascii=False)
    row = re.compile(r"\[\n\s+([^\[\]]*?)\n\s+\]")  # one line for each row
    text = row.sub(lambda match: "[" + re.sub(r"\n\s+", " ", match[1]) + "]", text)
    RESULTS.write_text(text + "\n")


def written(page: str, tables: Mapping[str, Any]) -> str:
    """A page with its tables as they are in the file of results."""

    def block(match: re.Match[str]) -> str:
        found = tables[match[2]]
        end = f"As of commit {found['commit']}."
        rows = found["rows"]
        if isinstance(rows, str):
            return f"{match[1]}\n{rows} {end}\n\n{match[3]}"
        return f"{match[1]}\n{table(rows)}\n\n{end}\n\n{match[3]}"

    return _BLOCK.sub(block, page)


def main() -> None:
    """Writes the tables into the pages."""
    argparse.ArgumentParser(description=__doc__.split("\n")[0]).parse_args()
    for page in PAGES:
        page.write_text(written(page.read_text(), results()))


if __name__ == "__main__":
    main()
