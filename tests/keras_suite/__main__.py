"""Runs tests of Keras or its libraries with tfmw, failures with plain Keras too, and compares.

    python -m tests.keras_suite [--suite hub|rs] [--sources CHECKOUT] [--sample N] [PATH...]

Ends with 0 where the tests that fail with tfmw only are those of `known_failures.toml`, else 1.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import io
import json
import os
import re
import shutil
import site
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
import urllib.request
import venv
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.helpers.cluster import ONE_THREAD
from tests.helpers.part import commit

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
BUILD = ROOT / "build" / "keras_suite"
KNOWN = HERE / "known_failures.toml"

PACKAGES = [
    f"keras/src/{name}"
    for name in (
        "callbacks",
        "distribution",
        "layers",
        "losses",
        "metrics",
        "models",
        "optimizers",
        "saving",
        "trainers",
    )
]


@dataclasses.dataclass(frozen=True)
class Suite:
    """The tests of a library.

    Attributes:
        distribution: its name in the package index.
        paths: of the tests, below the folder of the tests.
        repository: on GitHub, which has the tests if the source distribution has none.
    """

    distribution: str
    paths: Sequence[str]
    repository: str = ""

    def training(self, folder: Path) -> list[str]:
        """The files of tests that train, evaluate or predict."""
        if not self.repository:
            return list(self.paths)
        files = [file for path in self.paths for file in sorted((folder / path).rglob("*_test.py"))]
        trains = re.compile(r"run_task_test|\.(fit|evaluate|predict)\(")
        return [str(f.relative_to(folder)) for f in files if trains.search(f.read_text())]


SUITES = {
    "keras": Suite("keras", PACKAGES),
    "hub": Suite("keras-hub", ["keras_hub/src"], "keras-team/keras-hub"),
    "rs": Suite("keras-rs", ["keras_rs/src"], "keras-team/keras-rs"),
}

# Libraries that these tests import at their top and tfmw does not use. PyTorch is not among them,
# as its wheels bring CUDA: five files, of adapters that tfmw does not replace, cannot be imported
# without it.
LIBRARIES = ("grain", "jax", "orbax-checkpoint", "pandas", "scipy")

# As Keras's pyproject.toml has it, which its tests rely on.
PYTEST_INI = """\
[pytest]
filterwarnings =
    error
    ignore::DeprecationWarning
    ignore::ImportWarning
    ignore::RuntimeWarning
    ignore::PendingDeprecationWarning
    ignore::FutureWarning
    ignore::UserWarning
"""

Outcomes = dict[str, dict[str, Any]]


@dataclasses.dataclass
class Verdict:
    """Outcomes as lists of tests.

    Attributes:
        new: fail with tfmw only, and are not listed.
        known: fail with tfmw only, and are listed.
        stale: listed, and do not fail with tfmw only: test -> outcome.
        shared: fail with plain Keras, too.
    """

    new: list[str]
    known: list[str]
    stale: dict[str, str]
    shared: list[str]

    @classmethod
    def of(cls, tfmw: Outcomes, keras: Outcomes, known: Iterable[str], everything: bool) -> Verdict:
        """Compares the outcomes with tfmw and with plain Keras.

        Args:
            tfmw: outcome of each test with tfmw.
            keras: outcome of the failed ones with plain Keras.
            known: tests that are listed.
            everything: whether all tests ran, so that a listed one that did not is none.
        """
        failed = {test for test, it in tfmw.items() if it["outcome"] == "failed"}
        shared = {test for test in failed if keras[test]["outcome"] == "failed"}
        stale = {}
        for test in known:
            if test in shared:
                stale[test] = "fails with plain Keras, too"
            elif test not in tfmw:
                if everything:
                    stale[test] = "is no test of this version"
            elif test not in failed:
                stale[test] = tfmw[test]["outcome"]
        mine = failed - shared
        return cls(sorted(mine - set(known)), sorted(mine & set(known)), stale, sorted(shared))

    @property
    def holds(self) -> bool:
        return not self.new and not self.stale


def known_failures(path: Path = KNOWN, suite: Suite | None = None) -> dict[str, str]:
    """Test -> why it may fail with tfmw only; `suite`: its tests alone."""
    causes = tomllib.loads(path.read_text())["cause"]
    known = {test: cause["reason"] for cause in causes for test in cause["tests"]}
    places = ("",) if suite is None else tuple(f"{path}/" for path in suite.paths)
    return {test: reason for test, reason in known.items() if test.startswith(places)}


# ---------------------------------------------------------------- what is run, and where


def fetched(suite: Suite, version: str) -> Path:
    """The tests of this version of a library, below the folder that is returned."""
    folder = BUILD / f"{suite.distribution}-{version}"
    if folder.exists():
        return folder
    BUILD.mkdir(parents=True, exist_ok=True)
    if suite.repository:
        url = f"https://codeload.github.com/{suite.repository}/tar.gz/refs/tags/v{version}"
        with urllib.request.urlopen(url, timeout=60) as answer:
            checkout = io.BytesIO(answer.read())
        with tempfile.TemporaryDirectory(dir=BUILD) as temporary:
            with tarfile.open(fileobj=checkout) as tar:
                tar.extractall(temporary, filter="data")
            next(Path(temporary).iterdir()).rename(folder)
        return folder
    with tempfile.TemporaryDirectory(dir=BUILD) as temporary:
        # pip asks the index that it is configured for, and builds a little to learn its metadata:
        # some versions import themselves for that.
        _pip(
            sys.executable,
            *("download", "--no-deps", "--no-binary", "keras", f"keras=={version}"),
            *("--dest", temporary),
            environ={**os.environ, "PYTHONPATH": "."},
        )
        (archive,) = Path(temporary).glob("keras-*.tar.gz")
        unpacked = Path(temporary) / "unpacked"
        with tarfile.open(archive) as tar:
            tests = [m for m in tar.getmembers() if re.search(r"/keras/src/.*_test\.py$", m.name)]
            tar.extractall(unpacked, tests, filter="data")
        (top,) = unpacked.iterdir()
        top.rename(folder)
    return folder


def interpreter() -> Path:
    """A Python with everything that this one has, and the libraries that the tests import."""
    folder = BUILD / "env"
    python = folder / "bin" / "python"
    complete = folder / "complete"
    meant = repr((sys.version, site.getsitepackages(), LIBRARIES))
    if complete.exists() and complete.read_text() == meant:
        return python
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=True)
    (own,) = folder.glob("lib/python*/site-packages")
    # pip takes what is found there for installed, and adds what is missing.
    below = [f"import site; site.addsitedir({path!r})\n" for path in site.getsitepackages()]
    (own / "below.pth").write_text("".join(below))
    _pip(str(python), "install", *LIBRARIES)
    complete.write_text(meant)
    return python


def _pip(python: str, *arguments: str, environ: Mapping[str, str] = os.environ) -> None:
    quiet = ("--quiet", "--disable-pip-version-check")
    subprocess.run(
        [python, "-m", "pip", *arguments, *quiet], env=dict(environ), cwd=BUILD, check=True
    )


def environment() -> dict[str, str]:
    """Environment of the process that runs tests."""
    return {
        **os.environ,
        **ONE_THREAD,
        "CUDA_VISIBLE_DEVICES": "",
        "KERAS_BACKEND": "tensorflow",
        "PYTHONPATH": str(ROOT),
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }


def run(
    python: Path,
    folder: Path,
    trainer: str,
    paths: Iterable[str],
    options: Iterable[str],
    jobs: int,
) -> Outcomes:
    """Outcomes of tests, handed to "tfmw" or left to "keras"."""
    outcomes = BUILD / f"{trainer}.json"
    outcomes.unlink(missing_ok=True)
    (BUILD / "pytest.ini").write_text(PYTEST_INI)
    command = [
        *(str(python), "-m", "pytest", *paths),
        *("-c", str(BUILD / "pytest.ini"), "--rootdir", ".", "--import-mode", "importlib"),
        *("-p", "tests.keras_suite.plugin", "--trainer", trainer, "--outcomes", str(outcomes)),
        *("-p", "no:cacheprovider", "--timeout", "300", "--continue-on-collection-errors"),
        *("-q", "--no-header", "--no-summary", "--tb", "short"),
        *(("-n", str(jobs)) if jobs > 1 else ()),
        *options,
    ]
    log = BUILD / f"{trainer}.log"
    with log.open("w") as notices:
        # A checkout has helpers of its tests, and its own library around them.
        path = os.pathsep.join([str(folder), str(ROOT)])
        env = (
            {**environment(), "PYTHONPATH": path}
            if (folder / "conftest.py").exists()
            else environment()
        )
        status = subprocess.run(command, env=env, cwd=folder, stderr=notices).returncode
    if status not in (0, 1, 2) or not outcomes.exists():
        raise SystemExit(f"pytest ended with {status}: see {log}")
    found: Outcomes = json.loads(outcomes.read_text())
    return found


def with_plain_keras(
    python: Path, folder: Path, tests: list[str], cache: Path, jobs: int
) -> Outcomes:
    """Outcomes of `tests` with plain Keras; known outcomes of earlier runs are reused."""
    known: Outcomes = json.loads(cache.read_text()) if cache.exists() else {}
    asked = [test for test in tests if test not in known]
    if asked:
        only = BUILD / "asked"
        only.write_text("\n".join(asked))
        files = sorted({test.split("::")[0] for test in asked})
        known |= run(python, folder, "keras", files, ["--only", str(only)], jobs)
        cache.write_text(json.dumps(known, indent=1))
    return known


# ---------------------------------------------------------------- what is said


def _first_lines(error: str) -> str:
    said = [line for line in error.splitlines() if line.startswith("E ")]
    return "\n".join(f"    {line}" for line in said[:4] or error.splitlines()[-4:])


def print_tests(verdict: Verdict, tfmw: Outcomes, listed: Path) -> None:
    """Prints why known failures are, and each test that changes the verdict.

    Args:
        tfmw: outcome of each test with tfmw.
        listed: the file of known failures.
    """
    known = known_failures(listed)
    for reason, number in Counter(known[test] for test in verdict.known).items():
        print(f"known: {number} of: {reason}")
    for test, what in verdict.stale.items():
        print(f"STALE: {test}\n    {what}: take it out of {listed.relative_to(ROOT)}.")
    for test in verdict.new:
        print(f"FAILS WITH TFMW ONLY: {test}\n{_first_lines(tfmw[test]['error'])}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.keras_suite", description=__doc__)
    parser.add_argument("paths", nargs="*", help="below the folder of the tests; default: all")
    parser.add_argument("--suite", choices=SUITES, default="keras", help="whose tests")
    parser.add_argument("--sources", type=Path, help="a checkout with the tests of KerasHub or -RS")
    parser.add_argument("--sample", type=int, help="run that many tests only")
    parser.add_argument("--seed", help="of the sample; default: the commit")
    parser.add_argument("--jobs", type=int, default=2, help="processes that run tests")
    arguments = parser.parse_args()

    suite = SUITES[arguments.suite]
    version, tensorflow = map(importlib.metadata.version, (suite.distribution, "tensorflow"))
    folder = (arguments.sources or fetched(suite, version)).resolve()
    python = Path(sys.executable) if suite.repository else interpreter()
    BUILD.mkdir(parents=True, exist_ok=True)
    paths = arguments.paths or suite.training(folder)
    options = ["--training"] if suite.repository else []
    if arguments.sample is not None:
        seed = arguments.seed or commit()
        drawn = f"SAMPLE={arguments.sample} SEED={seed}"
        print(f"{arguments.sample} tests of {suite.distribution} {version}: {drawn}")
        options += ["--sample", str(arguments.sample), "--sample-seed", seed]
    begin = time.monotonic()
    tfmw = run(python, folder, "tfmw", paths, options, arguments.jobs)
    failed = sorted(test for test, it in tfmw.items() if it["outcome"] == "failed")
    cache = BUILD / f"{suite.distribution}-{version}-tensorflow-{tensorflow}.json"
    keras = with_plain_keras(python, folder, failed, cache, arguments.jobs)
    everything = arguments.sample is None and not arguments.paths
    verdict = Verdict.of(tfmw, keras, known_failures(suite=suite), everything)

    calls = sum(it["calls"] for it in tfmw.values())
    print(
        f"{len(tfmw)} tests of {suite.distribution} {version} on TensorFlow {tensorflow}, {calls} "
        f"calls of tfmw, {time.monotonic() - begin:.0f} s; {len(verdict.shared)} fail with plain "
        "Keras, too."
    )
    print_tests(verdict, tfmw, KNOWN)
    ours = len(verdict.new) + len(verdict.known)
    print(f"{ours} fail with tfmw only. What became of each test: {BUILD / 'tfmw.json'}")
    return 0 if verdict.holds else 1


if __name__ == "__main__":
    sys.exit(main())
