"""Draws README's picture of a terminal, docs/images/terminal.svg: `python docs/terminal.py`.

The lines are those of README's `train.py`, whose worker 1 was killed after its second epoch.
Omitted parts of a line are an ellipsis.
"""

from __future__ import annotations

import html
from pathlib import Path

IMAGE = Path(__file__).resolve().parent / "images" / "terminal.svg"
LOSSES = ("2.0956", "1.4480", "0.8186", "0.4815", "0.3436")
TITLE = (
    "One process and two workers print the same losses. A worker is killed by kill -9; the run "
    "resumes at its step, and ends with the same losses."
)
PROMPT, OUTPUT, EVENT, RESULT = "#7ee787", "#d0d7de", "#ffa657", "#79c0ff"
CUT = "\N{HORIZONTAL ELLIPSIS}"
EDGE, LINE, WIDTH = 18, 21, 830


def transcript() -> list[tuple[str, str]]:
    """(color, text) of each line."""
    losses = f"loss by epoch: {', '.join(LOSSES)}"
    epochs = [
        (
            OUTPUT,
            f"[worker 0] train | epoch {n}/5 | step 23/23 | {CUT} | loss: {loss}",
        )
        for n, loss in enumerate(LOSSES, 1)
    ]
    return [
        (PROMPT, "$ python train.py"),
        (RESULT, losses),
        (PROMPT, "$ tfmw run --workers 2 --max-restarts 3 --backup-dir build/backup train.py"),
        *epochs[:2],
        (EVENT, "                         (kill -9 of worker 1's process, in another terminal)"),
        (
            EVENT,
            f"tfmw: worker 1 is replaced (not counted as a restart): {CUT} at step 46: SIGKILL",
        ),
        (OUTPUT, "[worker 0] tfmw: the workers continue after step 46"),
        *epochs[2:],
        (RESULT, f"[worker 0] {losses}"),
        (RESULT, f"[worker 1] {losses}"),
    ]


def svg() -> str:
    """The picture."""
    lines = transcript()
    height = 2 * EDGE + LINE * len(lines)
    texts = [
        f'<text x="{EDGE}" y="{EDGE + LINE * n - 6}" fill="{color}">{html.escape(text)}</text>'
        for n, (color, text) in enumerate(lines, 1)
    ]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
            f"<title>{html.escape(TITLE)}</title>",
            f'<rect width="{WIDTH}" height="{height}" rx="8" fill="#161b22"/>',
            '<g font-family="DejaVu Sans Mono, Menlo, Consolas, monospace" font-size="14"'
            ' xml:space="preserve">',
            *texts,
            "</g></svg>\n",
        ]
    )


if __name__ == "__main__":
    IMAGE.write_text(svg())
