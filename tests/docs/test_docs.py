"""What the documents quote and name exists: messages, tests, files, public names."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import tfmw
from tests.helpers.cluster import ROOT

DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
GAP = "…"


@functools.cache
def messages() -> list[str]:
    """Every text in tfmw's source, with `…` where something is filled in."""
    found = []
    for path in (ROOT / "tfmw").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
            if isinstance(node, ast.JoinedStr):
                parts = (p.value if isinstance(p, ast.Constant) else GAP for p in node.values)
                found.append("".join(map(str, parts)))
    return found


def quoted() -> list[str]:
    text = (ROOT / "docs/troubleshooting.md").read_text()
    ours = text.partition("## From tfmw")[2].partition("## From TensorFlow")[0]
    return re.findall(r"^### `(.*)`$", ours, re.MULTILINE)


def test_the_quotes_are_found():
    assert len(quoted()) > 20


@pytest.mark.parametrize("message", quoted())
def test_a_quoted_message_is_in_the_source(message):
    pattern = re.compile(".*".join(map(re.escape, message.split(GAP))), re.DOTALL)
    assert any(pattern.search(text) for text in messages()), message


def test_another_message_is_not_found():
    """The test above can fail."""
    pattern = re.compile(".*".join(map(re.escape, "a dataset … that nobody writes".split(GAP))))
    assert not any(pattern.search(text) for text in messages())


# ---- tests that documents name ------------------------------------------------------------------


def named_tests() -> list[tuple[str, str]]:
    """(document, "test_file.py::test_name") of each name in a document."""
    found = []
    for path in DOCUMENTS:
        file = ""
        names = r"`((?:tests/)?(?:\w+/)*test_\w+\.py)?((?:::[\w.]+)*)(?:`|\[)"
        for match in re.finditer(names, path.read_text()):
            file = match[1] or file
            if match[1] or match[2]:
                found.append((path.name, f"{file.removeprefix('tests/')}{match[2]}"))
    return found


@pytest.mark.parametrize(("document", "name"), sorted(set(named_tests())))
def test_a_named_test_exists(document, name):
    file, *parts = name.split("::")
    source = (ROOT / "tests" / file).read_text()
    for part in parts:
        if part.endswith("..."):
            assert re.search(rf"def {part.removesuffix('...')}", source), f"{document}: {name}"
        else:
            assert re.search(rf"(?:def|class) {part}\b", source), f"{document}: {name}"


# ---- links --------------------------------------------------------------------------------------


def anchors(path: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path):
    text = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^)#\s]*(?:#[^)\s]*)?)\)", text):
        file, _, anchor = target.partition("#")
        if "://" in file:
            continue
        goal = (path.parent / file).resolve() if file else path
        assert goal.exists(), f"{path.name} links to {target}"
        if anchor and goal.suffix == ".md":
            assert anchor in anchors(goal), f"{path.name} links to {target}"


# ---- docstrings ---------------------------------------------------------------------------------


def public() -> list[tuple[str, str]]:
    """(module, name) of everything that tfmw offers; not keras_compat, whose names are Keras's."""
    found = [("tfmw", name) for name in tfmw.__all__]
    for path in sorted((ROOT / "tfmw").rglob("*.py")):
        dotted = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        private = any(part.startswith("_") for part in dotted.split("."))
        if private or dotted == "tfmw.keras_compat":
            continue
        module = importlib.import_module(dotted)
        found += [(dotted, name) for name in getattr(module, "__all__", [])]
        found += [
            (dotted, name)
            for name, value in vars(module).items()
            if not name.startswith("_") and getattr(value, "__module__", None) == dotted
        ]
    return sorted(set(found))


@pytest.mark.parametrize(("module", "name"), public())
def test_a_public_name_has_a_docstring(module, name):
    value = getattr(importlib.import_module(module), name)
    if inspect.isroutine(value) or inspect.isclass(value) or inspect.ismodule(value):
        assert (value.__doc__ or "").strip(), f"{module}.{name}"


@pytest.mark.slow
def test_the_reference_is_made_of_them(tmp_path):
    """As `make docs` does it."""
    (command,) = re.findall(r"\$\(BIN\)/pdoc (.*) --output", (ROOT / "Makefile").read_text())
    subprocess.run(
        [sys.executable, "-m", "pdoc", *command.split(), "--output-directory", tmp_path, "tfmw"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        timeout=120,
    )
    page = (tmp_path / "tfmw/fit.html").read_text()
    assert 'id="fit"' in page
    assert "is batched by the global batch size" in page
    top = (tmp_path / "tfmw.html").read_text()
    modules = {path.stem for path in (tmp_path / "tfmw").glob("*.html")}
    documented = modules.union(re.findall(r'id="(\w+)"', top))
    assert set(tfmw.__all__) <= documented
    assert not list((tmp_path / "tfmw").glob("_*.html")), "private modules"
