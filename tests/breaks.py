"""Mistakes in the code, each of which a test must notice: `breaks.toml` lists them.

    python -m tests.breaks [words]         # only breaks whose promise has these words

Each break replaces a text in a copy of the tree and runs the tests that it names there, which must
fail. Before, all of them must pass. The last lines name the breaks that no test has seen; the
status is then 1. A text that the code no longer has is an error, so that breaks move with the code.
"""

from __future__ import annotations

import compileall
import dataclasses
import importlib
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from py_compile import PycInvalidationMode

ROOT = Path(__file__).parents[1]


@dataclasses.dataclass(frozen=True)
class Break:
    """A mistake, and the tests that see it."""

    promise: str  # the broken one
    file: str  # relative to the root
    old: str  # occurs once in the file
    new: str
    tests: tuple[str, ...]  # ids, relative to `tests/`

    def of(self, text: str) -> str:
        """The file's text with the mistake."""
        if text.count(self.old) != 1:
            raise ValueError(
                f"{self.promise}: {self.file} has {text.count(self.old)} times the text that "
                f"tests/breaks.toml replaces there; expected it once:\n{self.old}"
            )
        return text.replace(self.old, self.new)


def breaks() -> Iterator[Break]:
    """All breaks of `breaks.toml`."""
    with open(ROOT / "tests/breaks.toml", "rb") as file:
        listed = tomllib.load(file)
    for entry in listed["break"]:
        yield Break(**{**entry, "tests": tuple(entry["tests"])})


def _copy(folder: Path) -> None:
    """Copies the files of the working tree that git does not ignore."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    # valid by the hash of a source, as breaks change a file within a second
    compileall.compile_dir(
        folder / "tfmw", quiet=1, invalidation_mode=PycInvalidationMode.CHECKED_HASH
    )


def _pytest(tree: Path, tests: Iterable[str], log: Path) -> int:
    """Status of pytest in a tree, in a fork of this process, which has imported TensorFlow."""
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(tree)
    sys.path[0] = os.environ["PYTHONPATH"] = str(tree)
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]
    import pytest

    options = ["-x", "-q", "-p", "no:cacheprovider", "--timeout", "600"]
    status = pytest.main([*options, *(f"tests/{test}" for test in tests)])
    sys.stdout.flush()
    os._exit(status)


def main() -> int:
    """Runs all breaks, or those that the command line names; the exit status."""
    chosen = [each for each in breaks() if all(word in each.promise for word in sys.argv[1:])]
    if not chosen:
        print(f"No promise in tests/breaks.toml has the words {' '.join(sys.argv[1:])}.")
        return 2
    for name in ("tensorflow", "keras"):  # once, not for each break
        importlib.import_module(name)
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        tree, log = Path(folder, "tree"), Path(folder, "log")
        _copy(tree)
        tests = sorted({test for each in chosen for test in each.tests})
        # one process for each file, as a file may configure devices
        for _, of_file in itertools.groupby(tests, lambda test: test.partition("::")[0]):
            if _pytest(tree, of_file, log):
                print(log.read_text(), "Tests of breaks fail without a break.", sep="\n")
                return 1
        unseen = []
        for each in chosen:
            began, path = time.monotonic(), tree / each.file
            text = path.read_text()
            path.write_text(each.of(text))
            status = _pytest(tree, each.tests, log)
            path.write_text(text)
            if status != 1:  # that tests have failed
                unseen.append(each)
            said = "seen by" if status == 1 else f"NOT SEEN (pytest's status {status}) by"
            seconds = time.monotonic() - began
            print(f"{each.promise}: {said} {', '.join(each.tests)}, {seconds:.0f} s", flush=True)
    print(
        f"{len(unseen)} of {len(chosen)} breaks were not seen", *(f": {u.promise}" for u in unseen)
    )
    return int(bool(unseen))


if __name__ == "__main__":
    sys.exit(main())
