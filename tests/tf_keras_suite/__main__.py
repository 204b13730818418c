"""Runs legacy Keras's tests of tf.distribute with tfmw, and what fails with stock Keras, too.

    python -m tests.tf_keras_suite [--sources CHECKOUT] [FILE...]

Ends with 0 where the tests that fail with tfmw only are those of `known_failures.toml`, else 1.
"""

from __future__ import annotations

import argparse
import io
import json
import subprocess
import sys
import tarfile
import urllib.request
from collections import Counter
from pathlib import Path

from tests.keras_suite.__main__ import (
    Outcomes,
    Verdict,
    environment,
    known_failures,
    print_tests,
)

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
BUILD = ROOT / "build" / "tf_keras_suite"
KNOWN = HERE / "known_failures.toml"
COMMIT = "v2.19.0"  # of keras-team/tf-keras
URL = f"https://codeload.github.com/keras-team/tf-keras/tar.gz/refs/tags/{COMMIT}"

# Tests of what `fit`, `evaluate`, `predict` and their callbacks compute. The others are of parts of
# legacy Keras that Keras 3 and tfmw have not: loops by `strategy.run`, graphs of TensorFlow 1, its
# distribute coordinator, wide and deep models, its own files, downloaded data.
FILES = (
    "distribute_strategy_test.py",
    "keras_dnn_correctness_test.py",
    "keras_embedding_model_correctness_test.py",
    "keras_image_model_correctness_test.py",
    "keras_metrics_test.py",
    "keras_models_test.py",
    "keras_optimizer_v2_test.py",
    "keras_rnn_model_correctness_test.py",
    "keras_save_load_test.py",
    "keras_stateful_lstm_model_correctness_test.py",
    "keras_utils_test.py",
)


def fetched() -> Path:
    """A folder with the checkout's tests; downloads it once."""
    folder = BUILD / f"tf-keras-{COMMIT}"
    if not folder.exists():
        with urllib.request.urlopen(URL, timeout=60) as answer:
            archive = io.BytesIO(answer.read())
        BUILD.mkdir(parents=True, exist_ok=True)
        with tarfile.open(fileobj=archive) as tar:
            tests = [m for m in tar.getmembers() if "/tf_keras/distribute/" in m.name]
            top = BUILD / tests[0].name.split("/")[0]
            tar.extractall(BUILD, tests, filter="data")
        top.rename(folder)
    return folder


def run(checkout: Path, where: str, files: list[str], only: list[str] | None = None) -> Outcomes:
    """Outcomes of the tests of these files, on "devices", "processes", or by stock "keras"."""
    BUILD.mkdir(parents=True, exist_ok=True)
    outcomes, log, tests = (BUILD / f"{where}.{kind}" for kind in ("json", "log", "tests"))
    outcomes.unlink(missing_ok=True)
    (BUILD / "pytest.ini").write_text("[pytest]\npython_files = *_test.py\n")
    command = [
        *("-m", "pytest", "-c", str(BUILD / "pytest.ini")),
        *("--rootdir", str(checkout), "--import-mode", "importlib", "-p", "no:cacheprovider"),
        *("-p", "tests.tf_keras_suite.plugin", "--checkout", str(checkout), "--where", where),
        *("--outcomes", str(outcomes), "--timeout", "300", "-q", "--no-header", "--no-summary"),
        *("--tb", "short", "--continue-on-collection-errors"),
        *(f"tf_keras/distribute/{file}" for file in files),
    ]
    if only is not None:
        tests.write_text("\n".join(only))
        command += ["--only", str(tests)]
    if where == "processes":
        command = ["-m", "tfmw", "run", "--workers", "2", "--max-restarts", "0", *command]
    with log.open("w") as notices:
        subprocess.run(
            [sys.executable, *command],
            env=environment(),
            cwd=checkout,
            stdout=notices,
            stderr=notices,
        )
    if not outcomes.exists():
        raise SystemExit(f"pytest has left no outcomes: see {log}")
    found: Outcomes = json.loads(outcomes.read_text())
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.tf_keras_suite", description=__doc__)
    parser.add_argument("files", nargs="*", default=FILES, metavar="FILE")
    parser.add_argument("--sources", type=Path, help="a checkout of keras-team/tf-keras")
    arguments = parser.parse_args()
    checkout = fetched() if arguments.sources is None else arguments.sources.resolve()

    files = list(arguments.files)
    tfmw: Outcomes = {}
    for where in ("devices", "processes"):
        for test, outcome in run(checkout, where, files).items():
            if tfmw.get(test, {}).get("outcome") != "failed":
                tfmw[test] = outcome
    failed = sorted(test for test, it in tfmw.items() if it["outcome"] == "failed")
    keras = run(checkout, "keras", files, failed) if failed else {}
    verdict = Verdict.of(tfmw, keras, known_failures(KNOWN), files == list(FILES))

    count = Counter(it["outcome"] for it in tfmw.values())
    calls = sum(it["calls"] for it in tfmw.values())
    print(
        f"{len(tfmw)} tests, {calls} calls of tfmw: {count['passed']} passed, "
        f"{len(verdict.shared)} need what Keras 3 has not, "
        f"{len(verdict.known) + len(verdict.new)} fail with tfmw only."
    )
    print_tests(verdict, tfmw, KNOWN)
    return 0 if verdict.holds else 1


if __name__ == "__main__":
    sys.exit(main())
