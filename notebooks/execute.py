"""Runs notebooks in a real kernel, and stores their outputs in them.

    make notebooks                                             # all of them
    python notebooks/execute.py notebooks/first_fit.ipynb      # one

A picture that README.md shows is written to docs/images, as SVG.

The stored outputs have the last state of a progress bar, tfmw's own lines alone of stderr, no paths
of this machine, and no times of execution.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

from tfmw.launcher.output import collapse, without_notices

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted(Path(__file__).parent.glob("*.ipynb"))
PICTURES = {"many_workers": ROOT / "docs" / "images" / "many_workers.svg"}

_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_MACHINE = [  # (path of this machine, its replacement)
    (str(ROOT), "."),
    (os.path.expanduser("~"), "~"),
    (sys.prefix, "python"),
    (tempfile.gettempdir(), "TMP"),
]


def execute(path: Path, timeout_s: float = 240, formats: tuple[str, ...] = ("png",)) -> Any:
    """Runs a notebook in its own folder.

    Args:
        path: the notebook; the file is not changed.
        timeout_s: seconds for one cell.
        formats: matplotlib's formats for figures in the outputs.

    Returns:
        The notebook with its outputs, cleaned by `readable`.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell raised.
    """
    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(path.parent)}}
    NotebookClient(
        notebook,
        timeout=timeout_s,
        kernel_name="python3",
        resources=resources,
        record_timing=False,
        extra_arguments=[f"--InlineBackend.figure_formats={name}" for name in formats],
    ).execute(env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"})  # as tasks have it by default
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = readable(cell.outputs)
    # The kernel stores its own version there.
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python", "pygments_lexer": "ipython3"},
    }
    return notebook


def readable(outputs: list[Any]) -> list[Any]:
    """The final outputs of a cell, without values that depend on this machine."""
    found: list[Any] = []
    for output in outputs:
        stream = output.output_type == "stream"
        if stream and found and found[-1].get("name") == output.name:
            found[-1].text += output.text
        else:
            found.append(output)
    for output in found:
        if output.output_type == "stream":
            output.text = _last_state(output.text)
        if output.get("name") == "stderr":  # notices of other libraries come and go
            lines = output.text.splitlines(keepends=True)
            output.text = "".join(line for line in lines if line.startswith("tfmw:"))
    return [o for o in found if o.output_type != "stream" or o.text]


def take_svgs(cell: Any) -> list[str]:
    """Removes the SVGs from a cell's outputs, which keep their PNGs, to keep notebooks small."""
    found = [o.get("data", {}).pop("image/svg+xml", None) for o in cell.get("outputs", [])]
    # The date and matplotlib's version change without any change of the picture.
    return [re.sub(r"\n *<metadata>.*?</metadata>", "", s, flags=re.DOTALL) for s in found if s]


def _last_state(text: str) -> str:
    lines = [_ANSI.sub("", collapse(line.removesuffix("\r"))).rstrip() for line in text.split("\n")]
    text = without_notices("\n".join(lines))
    for path, name in _MACHINE:
        text = text.replace(path, name)
    return text


def _main(paths: list[str]) -> None:
    for path in [Path(p).resolve() for p in paths] or NOTEBOOKS:
        print(f"{path.name}", flush=True)
        notebook = execute(path, formats=("png", "svg"))
        drawn = [picture for cell in notebook.cells for picture in take_svgs(cell)]
        if path.stem in PICTURES:
            PICTURES[path.stem].write_text(drawn[0])
        nbformat.write(notebook, path)


if __name__ == "__main__":
    _main(sys.argv[1:])
