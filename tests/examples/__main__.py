"""Runs examples with Keras and with tfmw, and compares: `python -m tests.examples [NAME...]`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import urllib.request
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests.helpers.cluster import ONE_THREAD, ROOT

HERE = Path(__file__).parent
BUILD = ROOT / "build" / "examples"
EXAMPLES = HERE / "examples.toml"
PAGE = ROOT / "docs" / "explain" / "examples.md"
BEGIN = "<!-- examples: begin -->\n"
REST = "<...>"  # in an edit: any text in between

# Tolerances of weights and results, relative to the greatest value of each: sums may have another
# order.
TOLERANCES = {"float64": 1e-7, "float32": 1e-4}
FROM_TFMW = "tfmw|replica"  # a word that each of tfmw's warnings has


@dataclasses.dataclass(frozen=True)
class Example:
    """An entry of `examples.toml`.

    Attributes:
        name: as it is called here.
        repository: "owner/name" at GitHub.
        commit: commit of the repository.
        path: path in the repository.
        edits: pairs of texts, the second instead of the first, which must occur once.
        cut: text at which the example ends early; occurs once.
        floatx: "float64", or "float32" where the example writes that into its own step.
        differs: pattern of tfmw's warning or error, if results cannot be equal.
        tolerance: a larger tolerance than that of its type, with the reason beside it.
    """

    name: str
    repository: str
    commit: str
    path: str
    edits: tuple[tuple[str, str], ...] = ()
    cut: str = ""
    floatx: str = "float64"
    differs: str = ""
    tolerance: float = 0.0

    def edited(self, source: str) -> str:
        """The example, made small. Raises ValueError if an edit does not fit."""
        source = re.sub(r"import keras_core as keras\b", "import keras", source)
        source = re.sub(r"\bkeras_core\b", "keras", source)
        source = re.sub(r"\bkeras\.(?:ops\.)?backend\.(shape|cast)\(", r"keras.ops.\1(", source)
        source = source.replace("keras.random.random.", "keras.random.")
        source = source.replace("float32", self.floatx)
        source = re.sub(r"\btf\.(ones|zeros|eye)\(", r"stand_ins.\1(", source)
        for old, new in self.edits:
            begin, end = self._place(old, source)
            source = source[:begin] + new + source[end:]
        if self.cut:
            source = source[: self._place(self.cut, source)[0]]
        return source

    def _place(self, text: str, source: str) -> tuple[int, int]:
        pattern = ".*?".join(re.escape(part) for part in text.split(REST))
        found = list(re.finditer(pattern, source, re.DOTALL))
        if len(found) != 1:
            raise ValueError(f"{self.name}: {len(found)} places, not one, for the edit {text!r}")
        return found[0].span()


def examples(path: Path = EXAMPLES) -> dict[str, Example]:
    """Examples by name, in the order of the file."""
    table = tomllib.loads(path.read_text())
    found = {}
    for group in table["group"]:
        for entry in group["example"]:
            edits = tuple((old, new) for old, new in entry.pop("edits", ()))
            repository = {key: group[key] for key in ("repository", "commit")}
            example = Example(edits=edits, **repository, **entry)
            found[example.name] = example
    return found


def fetched(example: Example, sources: Path | None) -> str:
    """The example's source, from a folder, from a run before, or from GitHub."""
    if sources is not None:
        return (sources / example.path).read_text()
    kept = BUILD / "sources" / example.commit / example.path
    if not kept.exists():
        url = f"https://raw.githubusercontent.com/{example.repository}/{example.commit}/{example.path}"
        with urllib.request.urlopen(url, timeout=60) as answer:
            source = answer.read()
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_bytes(source)
    return kept.read_text()


# ---------------------------------------------------------------- run and compared


@dataclasses.dataclass
class Run:
    """One task's arrays, warnings and error."""

    arrays: Mapping[str, np.ndarray[Any, Any]]
    warnings: list[str]
    error: str

    @classmethod
    def read(cls, result: Path) -> Run:
        """Reads the files that `program.py` has written; they may be missing."""
        if not result.with_suffix(".json").exists():
            return cls({}, [], "ended without a result")
        said = json.loads(result.with_suffix(".json").read_text())
        with np.load(result.with_suffix(".npz")) as arrays:
            return cls(dict(arrays), said["warnings"], said["error"])


def difference(got: Run, expected: Run) -> tuple[float, str]:
    """The greatest, relative to each array's greatest value, and where it is."""
    if missing := sorted(set(expected.arrays) ^ set(got.arrays)):
        return np.inf, f"not in both: {missing[0]}"
    worst = (0.0, "")
    for name, value in expected.arrays.items():
        other = got.arrays[name]
        if value.dtype.kind not in "fiub":
            apart = 0.0 if np.array_equal(value, other) else np.inf
        elif value.shape != other.shape:
            apart = np.inf
        elif not value.size:
            continue
        else:
            value, other = value.astype("float64"), other.astype("float64")
            apart = float(np.abs(value - other).max() / max(np.abs(value).max(), 1e-3))
        if not apart <= worst[0]:
            worst = (apart, name)
    return worst


@dataclasses.dataclass
class Verdict:
    """Result of an example.

    Attributes:
        holds: whether that is what its entry says.
        text: the result in words.
    """

    holds: bool
    text: str

    @classmethod
    def of(cls, example: Example, keras: Run, workers: list[Run]) -> Verdict:
        if keras.error:
            return cls(False, f"FAILS WITH KERAS: {keras.error.strip().splitlines()[-1]}")
        said = [w for run in workers for w in run.warnings if re.search(FROM_TFMW, w)]
        named = example.differs and re.search(example.differs, " ".join(said), re.DOTALL)
        errors = [run.error for run in workers if run.error]
        if errors:
            last = errors[0].strip().splitlines()[-1]
            refused = bool(example.differs and re.search(example.differs, last))
            return cls(refused, f"{'refused' if refused else 'FAILS'}: {last}")
        apart, where = max(difference(run, keras) for run in workers)
        if apart <= (example.tolerance or TOLERANCES[example.floatx]):
            calls = len({name.split("/")[0] for name in keras.arrays})
            if example.differs:
                return cls(False, f"equal, {apart:.0e}, though its entry says that it differs")
            if said:
                return cls(False, f"equal, {apart:.0e}, AND A WARNING: {said[0]}")
            return cls(calls > 0, f"equal, {apart:.0e}, {calls} calls")
        if named:
            warned = next(w for w in said if re.search(example.differs, w, re.DOTALL))
            return cls(True, f"differs by {apart:.0e}, warned: {warned.splitlines()[0]}")
        what = f"AND SAYS: {said[0]}" if said else "SILENTLY"
        return cls(False, f"DIFFERS by {apart:.0e} in {where}, {what}")


def run(example: Example, sources: Path | None) -> Verdict:
    """Runs an example both ways."""
    folder = BUILD / example.name
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "keras").mkdir(parents=True)
    (folder / "tfmw").mkdir()
    source = folder / f"{example.name}.py"
    source.write_text(example.edited(fetched(example, sources)))
    program = [str(HERE / "program.py"), str(source), str(folder / "result")]
    program += ["--floatx", example.floatx]
    run = ["-m", "tfmw", "run", "--workers", "2", "--log-dir", str(folder / "logs")]
    run += ["--max-restarts", "0"]
    for name, command in (("keras", program), ("tfmw", [*run, *program])):
        with (folder / f"{name}.log").open("w") as log:
            subprocess.run(
                [sys.executable, *command],
                cwd=folder / name,
                env={
                    **os.environ,
                    **ONE_THREAD,
                    "PYTHONPATH": str(ROOT),
                    "CUDA_VISIBLE_DEVICES": "",
                },
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=900,
                check=False,
            )
        if name == "keras" and (first := Run.read(folder / "result-keras")).error:
            return Verdict.of(example, first, [])
    workers = [Run.read(folder / f"result-worker_{i}") for i in range(2)]
    return Verdict.of(example, first, workers)


def table(known: Mapping[str, Example], verdicts: Mapping[str, Verdict]) -> str:
    """The verdicts as a table in Markdown."""
    rows = ["| example | result |", "| --- | --- |"]
    for name, verdict in verdicts.items():
        example = known[name]
        url = f"https://github.com/{example.repository}/blob/{example.commit}/{example.path}"
        text = re.sub(r"/\S*/(\w+\.py:)", r"\1", verdict.text).replace("|", "\\|")
        rows.append(f"| [{name}]({url}) | {text} |")
    return "\n".join(rows) + "\n"


def main(arguments: Iterable[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.examples", description=__doc__)
    known = examples()
    parser.add_argument("names", nargs="*", default=list(known), help="default: all")
    parser.add_argument("--sources", type=Path, help="a folder with the repository's files")
    parser.add_argument("--write", action="store_true", help="the table of docs/explain, of all")
    given = parser.parse_args(None if arguments is None else list(arguments))
    verdicts = {}
    for name in given.names:
        verdicts[name] = run(known[name], given.sources)
        print(
            f"{'ok ' if verdicts[name].holds else 'NOT'} {name}: {verdicts[name].text}", flush=True
        )
    if given.write:
        head = PAGE.read_text().split(BEGIN)[0]
        PAGE.write_text(head + BEGIN + "\n" + table(known, verdicts))
    wrong = [name for name, verdict in verdicts.items() if not verdict.holds]
    print(f"{len(verdicts)} examples; {len(wrong)} not as they should be: {' '.join(wrong)}")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
