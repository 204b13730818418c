"""Draws the mermaid diagrams of the pages as SVGs, in docs/diagrams: `make diagrams`.

GitHub draws mermaid blocks itself. The site shows these files, so building it needs neither npm nor
a browser, and reading it needs no script from another server. To change a diagram you need npm, for
mermaid, and chromium, which computes the layout.
"""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS / "_extensions"))

from tfmw_pages import diagram_of  # noqa: E402

MERMAID = "mermaid@11.17.2"
CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
CONFIG = {
    "startOnLoad": False,
    "theme": "neutral",
    "htmlLabels": False,  # labels as SVG text, which every browser shows in an <img>
    "fontFamily": "DejaVu Sans, Verdana, sans-serif",
    "themeVariables": {
        "noteBkgColor": "#fff8dc",
        "noteTextColor": "#333",
        "noteBorderColor": "#bbb",
    },
    "flowchart": {
        "htmlLabels": False,
        "wrappingWidth": 320,
        "subGraphTitleMargin": {"top": 4, "bottom": 14},
    },
    "sequence": {"actorMargin": 40, "boxMargin": 6, "messageMargin": 28, "mirrorActors": False},
}
PAGE = """<!doctype html><meta charset="utf-8"><body><script>{script}</script><script>
mermaid.initialize({config});
mermaid.render("{name}", {source}).then(
  ({{svg}}) => {{ document.body.innerHTML = "<pre id=out></pre>";
                 document.getElementById("out").textContent = svg; }},
  error => {{ document.body.innerHTML = "<pre id=failed></pre>";
              document.getElementById("failed").textContent = error; }});
</script>"""


def diagrams() -> list[str]:
    """The sources of all mermaid blocks of all pages."""
    pages = [*DOCS.rglob("*.md"), *DOCS.parent.glob("*.md")]
    block = re.compile(r"^```mermaid\n(.*?)^```$", re.DOTALL | re.MULTILINE)
    return [source for page in sorted(pages) for source in block.findall(page.read_text())]


def mermaid_script(folder: Path) -> str:
    """The code of mermaid, from npm."""
    subprocess.run(
        ["npm", "pack", "--silent", MERMAID], cwd=folder, check=True, stdout=subprocess.DEVNULL
    )
    with tarfile.open(next(folder.glob("mermaid-*.tgz"))) as package:
        file = package.extractfile("package/dist/mermaid.min.js")
        assert file is not None
        return file.read().decode()


def draw(source: str, script: str, folder: Path) -> None:
    """Writes the SVG of one diagram.

    Raises:
        SystemExit: mermaid refused it; the message is its own.
    """
    path, digest, _ = diagram_of(source)
    page = folder / "page.html"
    page.write_text(
        PAGE.format(
            script=script.replace("</script", "<\\/script"),
            config=json.dumps(CONFIG),
            name=path.stem,
            source=json.dumps(source),
        )
    )
    browser = next(filter(None, map(shutil.which, CHROMIUM)), None) or sys.exit("no chromium")
    shown = subprocess.run(
        [
            browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic",
            "--no-first-run", "--disable-background-networking", "--disable-component-update",
            "--disable-sync", f"--user-data-dir={folder / 'profile'}",
            "--virtual-time-budget=20000", "--dump-dom", page.as_uri(),
        ],
        capture_output=True, text=True, check=True, timeout=120,
    ).stdout  # fmt: skip
    found = re.search(r"<pre id=\"(out|failed)\">(.*?)</pre>", shown, re.DOTALL)
    if found is None or found[1] == "failed":
        sys.exit(f"{path.name}: {html.unescape(found[2]) if found else 'mermaid drew nothing'}")
    svg = html.unescape(found[2])
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"<!-- sha256 {digest} of the diagram, by {MERMAID} -->\n{svg}\n")
    print(path.relative_to(DOCS.parent))


def main() -> None:
    """Draws all of them."""
    with tempfile.TemporaryDirectory() as folder:
        script = mermaid_script(Path(folder))
        for source in diagrams():
            draw(source, script, Path(folder))


if __name__ == "__main__":
    main()
