"""The table of a survey, in docs/explain/examples.md between two marks."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from tests.keras_compat.survey.catalogue import items, left_out
from tests.keras_compat.survey.trial import Outcome

BEGIN, END = "<!-- survey: begin -->", "<!-- survey: end -->"

Record = dict[str, Any]  # "kind", "verdict", "difference", "why" of an item's worst trial


def records(outcomes: list[Outcome]) -> dict[str, Record]:
    """Kind and name of item -> its worst trial."""
    found: dict[str, Record] = {}
    for o in outcomes:
        new = {
            "kind": o.item.kind,
            "verdict": o.verdict,
            "difference": o.difference,
            "why": o.why,
        }
        key = f"{o.item.kind}/{o.item.name}"
        before = found.get(key)
        if before is None or (before["verdict"] == "equal") >= (o.verdict == "equal"):
            if before is None or before["difference"] <= o.difference:
                found[key] = new
    return found


def table(found: dict[str, Record]) -> str:
    """Markdown: equal items by kind; then each other item, and why it differs."""
    lines = [
        f"{len(found)} items, TensorFlow {tf.__version__}, Keras {keras.__version__}.",
        "",
        "| kind | equal to one process, with the greatest difference |",
        "| --- | --- |",
    ]
    for kind in ("losses", "metrics", "optimizers", "layers"):
        equal = {n: r for n, r in found.items() if r["kind"] == kind and r["verdict"] == "equal"}
        names = ", ".join(
            f"{name.split('/')[1]} {r['difference']:.0e}" for name, r in equal.items()
        )
        lines.append(f"| {kind} ({len(equal)}) | {names} |")
    lines += [
        "",
        "| not equal | difference | what holds, or what tfmw says |",
        "| --- | --- | --- |",
    ]
    by_reason: dict[tuple[str, str], list[str]] = {}  # items of one reason share a line
    for name, r in found.items():
        if r["verdict"] != "equal":
            by_reason.setdefault((r["verdict"], r["why"]), []).append(name)
    for (verdict, why), names_of in by_reason.items():
        worst = max(found[name]["difference"] for name in names_of)
        text = f"{verdict}: {why}".replace("|", "\\|")
        names = ", ".join(key.split("/")[1] for key in names_of)
        lines.append(f"| {names} | {f'{worst:.0e}' if worst else '-'} | {text} |")
    skipped = "; ".join(f"{name} ({why})" for name, why in left_out().items())
    later = [i.name for i in items() if f"{i.kind}/{i.name}" not in found]
    lines += ["", f"Not part of it: {skipped}."]
    if later:
        lines += ["", f"Not yet tried: {', '.join(later)}."]
    return "\n".join(lines)


def write(page: Path, kept: Path, outcomes: list[Outcome]) -> None:
    """Puts outcomes into the table between the marks of a page.

    Args:
        kept: a file with what surveys before have found, for items that were not tried now.
    """
    before = json.loads(kept.read_text()) if kept.exists() else {}
    merged = {**before, **records(outcomes)}
    keys = [f"{item.kind}/{item.name}" for item in items()]
    found = {key: merged[key] for key in keys if key in merged}
    kept.parent.mkdir(exist_ok=True)
    kept.write_text(json.dumps(found, indent=1))
    new = f"{BEGIN}\n\n{table(found)}\n\n{END}"
    page.write_text(re.sub(f"{BEGIN}.*?{END}", lambda _: new, page.read_text(), flags=re.DOTALL))
