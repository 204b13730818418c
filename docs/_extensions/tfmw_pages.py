"""Additions to Sphinx: diagrams, the help of commands, a map of the modules, checks.

    ```mermaid           a diagram: GitHub draws it; the site shows the SVG of `make diagrams`
    ```{program-help} run        the output of `tfmw run --help`
    ```{module-map}              the first sentence of each module of tfmw

Warnings end the build (`sphinx-build -W`). These are added to Sphinx's own: a diagram that is newer
than its SVG, a documented name without a docstring, and a public name of tfmw that no page
documents.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import posixpath
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective

logger = logging.getLogger(__name__)

ROOT = Path(__file__).resolve().parents[2]
DIAGRAMS = ROOT / "docs" / "diagrams"


# ---- diagrams -----------------------------------------------------------------------------------


def diagram_of(source: str) -> tuple[Path, str, str]:
    """(path of the SVG, digest of the source, alternative text) of a mermaid diagram.

    Raises:
        ValueError: the diagram has no `accTitle:` or no `accDescr:`.
    """
    found = dict(re.findall(r"^\s*(accTitle|accDescr): (.+)$", source, re.MULTILINE))
    if len(found) < 2:
        raise ValueError("a diagram needs the lines `accTitle: ...` and `accDescr: ...`")
    name = re.sub(r"\W+", "-", found["accTitle"].lower()).strip("-")
    digest = hashlib.sha256(source.strip().encode()).hexdigest()
    return DIAGRAMS / f"{name}.svg", digest, f"{found['accTitle']}: {found['accDescr']}"


class Mermaid(SphinxDirective):
    """A diagram, as the SVG that `make diagrams` drew from the same source."""

    has_content = True

    def run(self) -> list[nodes.Node]:
        try:
            path, digest, words = diagram_of("\n".join(self.content))
        except ValueError as error:
            raise self.error(str(error)) from None
        if not path.is_file() or f"sha256 {digest}" not in path.read_text():
            raise self.error(f"{path.relative_to(ROOT)} is not of this diagram: make diagrams")
        self.env.note_dependency(str(path))
        image = nodes.image(uri=f"/{path.relative_to(ROOT)}", alt=words)
        self.set_source_info(image)
        return [nodes.container("", image, classes=["diagram"])]


# ---- generated from the code --------------------------------------------------------------------


class ProgramHelp(SphinxDirective):
    """The help of a command."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        command = [sys.executable, "-m", "tfmw", self.arguments[0], "--help"]
        text = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        return [nodes.literal_block(text, text, language="text")]


def modules() -> dict[str, list[tuple[str, str]]]:
    """{package: [(module, the first paragraph of its docstring)]}, without importing any."""
    found: dict[str, list[tuple[str, str]]] = {}
    for path in sorted((ROOT / "tfmw").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        package = ".".join(parts[:-1])
        doc = ast.get_docstring(ast.parse(path.read_text())) or ""
        first = " ".join(doc.split("\n\n")[0].split())
        entry = (path.relative_to(ROOT).as_posix(), first)
        entries = found.setdefault(package, [])
        entries.insert(0, entry) if parts[-1] == "__init__" else entries.append(entry)
    return found


class ModuleMap(SphinxDirective):
    """All modules by package, each with the first sentence of its docstring."""

    def run(self) -> list[nodes.Node]:
        lines = []
        for package, entries in modules().items():
            lines += [f"### `{package}`", "", "| file | |", "| --- | --- |"]
            for path, first in entries:
                if not first:
                    logger.warning("%s has no docstring", path, location=self.get_location())
                lines.append(f"| `{path}` | {first.replace('|', chr(92) + '|')} |")
            lines.append("")
        return self.parse_text_to_nodes("\n".join(lines), allow_section_headings=True)


# ---- what must be documented ---------------------------------------------------------------------


def note_missing_docstring(
    app: Sphinx, what: str, name: str, value: Any, options: Any, lines: list[str]
) -> None:
    """Warns of a documented name without a docstring; methods may lack one."""
    if what in {"module", "class", "function", "exception"} and not any(lines):
        logger.warning("%s has no docstring", name)


def join_names(
    app: Sphinx, what: str, name: str, value: Any, options: Any, lines: list[str]
) -> None:
    """Puts names of arguments that share a description on one line, which napoleon expects."""
    i = 0
    while i < len(lines):
        while re.fullmatch(r"    \w+(, \w+)*,", lines[i]) and i + 1 < len(lines):
            lines[i] += " " + lines.pop(i + 1).strip()
        i += 1


def keep_sentence(
    app: Sphinx, what: str, name: str, value: Any, options: Any, lines: list[str]
) -> None:
    """Keeps the first sentence of a property's docstring; napoleon takes a colon for a type."""
    if what == "property":
        lines[:] = inspect.cleandoc(value.__doc__ or "").splitlines()


def indent_code(
    app: Sphinx, what: str, name: str, value: Any, options: Any, lines: list[str]
) -> None:
    """Makes indented blocks of a docstring code blocks, as in Markdown."""
    for i in range(len(lines) - 1, 1, -1):
        before, blank, here = lines[i - 2 : i + 1]
        starts = here.startswith("    ") and not blank.strip() and before.strip()
        if starts and not before.startswith((" ", ":", "..")) and not before.endswith("::"):
            lines[i - 1 : i] = ["", "::", ""]


def note_undocumented(app: Sphinx, env: Any) -> None:
    """Warns of names in `tfmw.__all__` that are missing in the reference."""
    import tfmw

    documented = set(env.domains["py"].objects)
    for name in tfmw.__all__:
        if f"tfmw.{name}" not in documented:
            logger.warning("tfmw.%s is public, but no page in docs/reference documents it", name)


def add_navigation(app: Sphinx, docname: str, source: list[str]) -> None:
    """Adds the navigation to the first page, without its badges: the site loads nothing."""
    if docname != app.config.root_doc:
        return
    source[0] = re.sub(r"^!\[.*\]\(https://img\.shields\.io/.*\)\n", "", source[0], flags=re.M)
    for caption, pages in app.config.navigation.items():
        tree = ["```{toctree}", ":hidden:", f":caption: {caption}", "", *pages, "```"]
        source[0] += "\n\n" + "\n".join(tree) + "\n"


def write_index(app: Sphinx, error: Exception | None) -> None:
    """Writes the first page as index.html too."""
    if error is None and app.builder.name == "html":
        page = Path(app.outdir, f"{app.config.root_doc}.html")
        Path(app.outdir, "index.html").write_bytes(page.read_bytes())


def write_moved(app: Sphinx, error: Exception | None) -> None:
    """Writes a page for each old address, which opens the new one."""
    if error is not None or app.builder.name != "html":
        return
    for old, new in app.config.moved.items():
        page = Path(app.outdir, f"{old}.html")
        name, mark, anchor = new.partition("#")
        goal = posixpath.relpath(f"{name}.html", posixpath.dirname(old)) + mark + anchor
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(
            f'<!doctype html><meta charset="utf-8"><title>Moved</title>'
            f'<meta http-equiv="refresh" content="0; url={goal}"><a href="{goal}">{goal}</a>\n'
        )


def setup(app: Sphinx) -> dict[str, Any]:
    """Registers all of it with Sphinx."""
    app.add_config_value("navigation", {}, "env", dict)
    app.add_config_value("moved", {}, "env", dict)
    app.add_directive("mermaid", Mermaid)
    app.add_directive("program-help", ProgramHelp)
    app.add_directive("module-map", ModuleMap)
    app.connect("autodoc-process-docstring", note_missing_docstring, priority=400)
    app.connect("autodoc-process-docstring", join_names, priority=400)
    app.connect("autodoc-process-docstring", keep_sentence, priority=600)
    app.connect("autodoc-process-docstring", indent_code, priority=700)
    app.connect("source-read", add_navigation)
    app.connect("env-check-consistency", note_undocumented)
    app.connect("build-finished", write_index)
    app.connect("build-finished", write_moved)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
