"""Existence of all that the documents quote and name: messages, tests, files, public names."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import json
import pkgutil
import re
import runpy
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import tfmw
from tests.helpers.cases import each
from tests.helpers.cluster import ROOT

DOCUMENTS = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "tests" / "GUARANTEES.md"]
)
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
    """The headings of the pages on errors that quote a message of tfmw."""
    pages = set((ROOT / "docs/howto/troubleshoot").glob("*.md"))
    pages -= {path for path in pages if path.stem == "overview"}
    text = "\n".join(path.read_text() for path in sorted(pages))
    return re.findall(r"^###? `(.*)`$", text, re.MULTILINE)


def test_quotes_are_collected():
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


def test_tests_are_named_in_one_file():
    """CONTRIBUTING.md may name tests, too; the pages of the site are for users."""
    pages = {document for document, _ in named_tests()}
    assert pages == {"CONTRIBUTING.md", "GUARANTEES.md"}


def test_measurements_are_on_one_page():
    """Figures and their commands are in Benchmarks; README has one figure."""
    commands = r"`(?:sudo )?(?:python|tfmw run)[^`\n]* (?:-m )?bench[./ ]"
    pages = {p.name for p in DOCUMENTS if re.search(commands, p.read_text())}
    assert pages == {"README.md", "benchmarks.md"}


VERBS = (
    "Adapt|Answer|Back|Choose|Debug|Export|Fix|Handle|Install|Keep|Learn|Load|Migrate|Monitor|Read|"
    "Restart|Run|Shard|Start|Submit|Track|Train|Troubleshoot|Tune|Use|Write"
)


def test_the_title_of_a_task_begins_with_a_verb():
    pages = [p for folder in ("start", "howto") for p in (ROOT / "docs" / folder).rglob("*.md")]
    titles = [p.read_text().partition("\n")[0].removeprefix("# ") for p in pages]
    assert len(titles) > 30
    assert not [title for title in titles if not re.match(rf"({VERBS}) ", title)]


# ---- files and objects that documents name, layers ----------------------------------------------


def named(pattern: str) -> list[tuple[str, str]]:
    """(document, name) of each name in backticks of this form."""
    names = {(p.name, name) for p in DOCUMENTS for name in re.findall(pattern, p.read_text())}
    assert len(names) > 10, pattern
    return sorted(names)


@pytest.mark.parametrize(
    ("document", "name"), named(r"`((?:tfmw|tests|bench|recipes|notebooks)/[\w./-]+)`")
)
def test_a_named_file_exists(document, name):
    assert (ROOT / name).exists() or (ROOT / "tests" / name).exists(), f"{document}: {name}"


@pytest.mark.parametrize(("document", "name"), named(r"`((?!train\.py)[a-z_]+\.py)`"))
def test_a_file_named_beside_another_exists(document, name):
    folders = ("tfmw", "tests", "bench", "recipes", "notebooks")
    assert any(list((ROOT / folder).rglob(name)) for folder in folders), f"{document}: {name}"


@pytest.mark.parametrize(("document", "name"), named(r"`(tfmw(?:\.\w+)+)(?=[(`])"))
def test_a_named_object_exists(document, name):
    module, _, attribute = name.rpartition(".")
    try:
        found = importlib.import_module(module)
    except ImportError:
        found = pkgutil.resolve_name(module)
    assert hasattr(found, attribute), f"{document}: {name}"


def test_the_rooms_are_those_that_lint_checks():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (rooms,) = [
        contract["layers"]
        for contract in settings["tool"]["importlinter"]["contracts"]
        if contract["type"] == "layers" and contract["containers"] == ["tfmw"]
    ]
    (picture,) = re.findall(r"```text\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
    lines = [line for line in picture.splitlines() if not line.startswith(" ")]
    assert [re.split(r"  +", line)[0] for line in lines] == rooms[1:]  # without __main__
    folders = {
        name.rstrip("/") for line in picture.splitlines() for name in re.findall(r"\w+/", line)
    }
    assert {"mirrored", "hosts", "trackers"} <= folders
    found = {path.parent.name for path in (ROOT / "tfmw").rglob("__init__.py")}
    assert folders <= found


def contributing_names():
    """(file, function) of the rows of CONTRIBUTING.md that name both."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    row = r"^\|(?: [^|`]+ \|)? `(tfmw/[\w/]+\.py)` \| (`[^|]+`) \|"
    for file, names in re.findall(row, text, re.MULTILINE):
        for name in re.findall(r"`([\w.]+)`", names):
            yield file, name


def test_a_newcomer_finds_the_named_files_and_functions():
    found = list(contributing_names())
    assert len(found) == 6 + 3 + 1, found
    for file, name in found:
        owner = pkgutil.resolve_name(file.removesuffix(".py").replace("/", "."))
        for part in name.split("."):
            assert hasattr(owner, part), f"{file}: {name}"
            owner = getattr(owner, part)


def test_files_that_contributing_names_exist():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    for file in each(re.findall(r"`(tfmw/[\w/]+\.py)`", text)):
        assert (ROOT / file).is_file(), file


# ---- links --------------------------------------------------------------------------------------


def anchors(path: Path) -> set[str]:
    """Anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


def links() -> Iterator[tuple[Path, str]]:
    for path in DOCUMENTS:
        text = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
        for target in re.findall(r"\]\(([^)#\s]*(?:#[^)\s]*)?)\)", text):
            yield path, target


def test_links_resolve():
    for path, target in each(links()):
        file, _, anchor = target.partition("#")
        if "://" in file:
            continue
        goal = (path.parent / file).resolve() if file else path
        assert goal.exists(), f"{path.name} links to {target}"
        if anchor and goal.suffix == ".md":
            assert anchor in anchors(goal), f"{path.name} links to {target}"


def test_old_addresses_open_headings_of_pages():
    moved = runpy.run_path(str(ROOT / "docs/conf.py"))["moved"]
    for old, new in each(moved.items()):
        name, _, anchor = new.partition("#")
        headings = re.findall(r"^#+ (.*)$", (ROOT / f"{name}.md").read_text(), re.MULTILINE)
        made = {
            re.sub(r"[^a-z0-9]+", "-", h.lower()).strip("-") for h in headings
        }  # as docutils does
        assert not anchor or anchor in made, new
        assert not (ROOT / f"{old}.md").exists(), old


# ---- docstrings ---------------------------------------------------------------------------------


def public() -> list[tuple[str, str]]:
    """(module, name) of everything that tfmw offers; not keras_compat, whose names are Keras's."""
    found = [("tfmw", name) for name in tfmw.__all__]
    for path in sorted((ROOT / "tfmw").rglob("*.py")):
        dotted = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        private = any(part.startswith("_") for part in dotted.split("."))
        if private or dotted == "tfmw.compat":
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


def test_the_image_copies_and_installs_existing_things():
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    copied = [name for line in lines if line.startswith("COPY ") for name in line.split()[1:-1]]
    assert {"pyproject.toml", "tfmw"} <= set(copied)
    assert all((ROOT / name).exists() for name in copied)
    sent = (ROOT / ".dockerignore").read_text().splitlines()
    assert {f"!{name}" for name in copied} <= set(sent)
    (extras,) = [line.partition("=")[2] for line in lines if line.startswith("ARG EXTRAS=")]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(extras.split(",")) <= project["optional-dependencies"].keys()


# ---- the site -----------------------------------------------------------------------------------


def build(source: Path, settings: Path, out: Path) -> subprocess.CompletedProcess[str]:
    """Builds the site as `make docs` does, with other pages."""
    (options,) = re.findall(
        r"-m sphinx -c docs (.*) \. build/docs ", (ROOT / "Makefile").read_text()
    )
    command = [sys.executable, "-m", "sphinx", "-c", settings, *options.split(), source, out]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False
    )


SEARCHES = {  # words of a search: the page that must come first
    "callbacks": "docs/howto/callbacks",
    "checkpoint": "docs/howto/backups",
    "docker": "docs/howto/containers",
    "hang": "docs/howto/debug",
    "horovod": "docs/howto/migrate/horovod",
    "keras.distribution": "docs/howto/keras-scripts",
    "kubernetes": "docs/howto/kubernetes",
    "mixed precision": "docs/howto/gpus",
    "mlflow": "docs/howto/callbacks",
    "parameter servers": "docs/howto/parameter-servers",
    "preemption": "docs/howto/restarts",
    "ray": "docs/howto/jobs",
    "serve": "docs/howto/export",
    "slurm": "docs/howto/schedulers",
    "two machines": "docs/start/two-machines",
}


@pytest.mark.process
@pytest.mark.nightly  # make test begins with make docs
def test_site_is_built(tmp_path):
    done = build(ROOT, ROOT / "docs", tmp_path)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "docs/reference/training.html").read_text()
    assert 'id="tfmw.fit"' in page
    assert "is batched by the global batch size" in " ".join(page.split())
    reference = "".join(p.read_text() for p in (tmp_path / "docs/reference").glob("*.html"))
    assert "on_epoch_end" not in reference, "methods of Keras"
    for name in tfmw.__all__:
        assert re.search(rf'id="(module-)?tfmw\.{name}"', reference), name
    assert not re.search(r'id="tfmw\.(\w+\.)?_', reference), "private names"
    assert "--max-restarts N" in (tmp_path / "docs/reference/command-line.html").read_text()
    notebook = (tmp_path / "notebooks/first_fit.html").read_text()
    assert notebook.count('src="../_images/') == 2, "its plots"
    assert "updates by the optimizer  184 in 8 epochs" in notebook
    start = (tmp_path / "index.html").read_text()
    workings = (tmp_path / "docs/explain/how-it-works.html").read_text()
    assert workings.count('src="../../_images/') == 2, "its diagrams"
    assert 'href="docs/howto/load-data.html"' in start
    assert "url=howto/load-data.html" in (tmp_path / "docs/training.html").read_text()
    loaded = re.findall(
        r'<(?:script|link|img)[^>]* (?:src|href)="(https?:[^"]*)"', start + workings
    )
    assert not loaded, "pages load nothing from other servers"
    search = ["node", ROOT / "tests/docs/search.js", tmp_path, *SEARCHES]
    found = json.loads(subprocess.run(search, capture_output=True, check=True).stdout)
    assert {words: pages[0] for words, pages in found.items()} == SEARCHES


@pytest.mark.process
def test_site_build_fails_on_wrong_pages(tmp_path):
    (tmp_path / "README.md").write_text(
        "# Wrong\n\n[a page](nowhere.md) [a heading](#nowhere)\n\n"
        "```mermaid\nflowchart LR\n  accTitle: One training step\n  accDescr: Another.\n```\n\n"
        "```{eval-rst}\n.. autofunction:: undocumented.function\n```\n"
    )
    (tmp_path / "undocumented.py").write_text("def function(): ...\n")
    (tmp_path / "conf.py").write_text(
        f"import runpy, sys\n"
        f"globals().update(runpy.run_path({str(ROOT / 'docs/conf.py')!r}))\n"
        f"sys.path.append({str(tmp_path)!r})\n"
        "navigation, moved, html_static_path = {}, {}, []\n"
    )
    done = build(tmp_path, tmp_path, tmp_path / "out")
    assert done.returncode != 0
    for wrong in (
        "'nowhere.md'",
        "'nowhere'",
        "one-training-step.svg is not of this diagram: make diagrams",
        "undocumented.function has no docstring",
        "tfmw.fit is public, but no page in docs/reference documents it",
    ):
        assert wrong in done.stderr, done.stderr
