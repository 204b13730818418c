"""docs/explain/failure-model.md has every row of the promises; the tests of each row exist."""

from __future__ import annotations

import ast
import re

from tests.helpers.cases import each
from tests.helpers.cluster import ROOT

ROWS = range(1, 46)


def table(page):
    """{number: the last cell} of the table of failures on a page."""
    found = {}
    for line in (ROOT / page).read_text().partition("## Failures that")[0].splitlines():
        if match := re.match(r"\| ([\d, ]+) \|.*\| ([^|]+) \|$", line):
            found.update(dict.fromkeys(map(int, match[1].split(",")), match[2]))
    return found


def names(path):
    """Tests of a file, those in classes as Class::test."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef):
            inside = [n.name for n in node.body if isinstance(n, ast.FunctionDef)]
            found.update(f"{node.name}::{name}" for name in inside)
    return found


def test_every_row_is_there():
    assert sorted(table("docs/explain/failure-model.md")) == list(ROWS)
    assert sorted(table("tests/GUARANTEES.md")) == list(ROWS)
    assert f"[{len(ROWS)} kinds of failure]" in (ROOT / "README.md").read_text()


def test_every_test_that_it_names_is_there():
    for number, cell in each(table("tests/GUARANTEES.md").items()):
        file = None
        for name in each(re.findall(r"`([^`]+)`", cell)):
            if re.match(r"(\w+/)*test_\w+\.py", name):
                file, _, name = name.partition("::")
            assert file is not None, f"row {number}: {name} is in no file"
            path = ROOT / "tests" / file
            assert path.is_file(), f"row {number}: there is no {file}"
            test = name.removeprefix("::")
            assert not test or test in names(path), f"row {number}: {file} has no {test}"
