"""Whether what would be published works: `make package`, after the sdist and wheel are in dist.

The wheel is installed into an empty environment of each supported Python that is found. The
README's program runs there on one process and on two workers. The tests of the unpacked sdist run
here.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

from tests.docs.test_readme import blocks
from tests.helpers.cluster import ONE_THREAD, ROOT

VERSIONS = ("3.11", "3.12", "3.13")
FOLDER = ROOT / "build/package"
# They read the documentation, notebooks and recipes, and start processes.
TESTS = (
    "tests/test_cli.py",
    "tests/cluster",
    "tests/docs/test_docs.py",
    "tests/docs/test_commands.py",
    "tests/test_package.py",
)


def main() -> None:
    """Exits with an error unless there is a Python of each version, and everything works."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    (wheel,), (sdist,) = ROOT.glob("dist/*.whl"), ROOT.glob("dist/*.tar.gz")
    (program,) = blocks("README.md")
    missing = [version for version in VERSIONS if not check_wheel(version, wheel, program)]
    with tarfile.open(sdist) as archive:
        archive.extractall(FOLDER, filter="data")
    unpacked = FOLDER / sdist.name.removesuffix(".tar.gz")
    run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-m",
            "not nightly",
            *TESTS,
        ],
        unpacked,
    )
    print(f"{sdist.name}: its tests pass")
    if missing:
        sys.exit(f"make package: no Python {', '.join(missing)} was found; put it on PATH.")


def check_wheel(version: str, wheel: Path, program: str) -> bool:
    """Installs the wheel for a version of Python, and trains; whether there is such a Python."""
    python = f"python{version}"
    if subprocess.run([python, "--version"], capture_output=True, check=False).returncode:
        return False
    environment = FOLDER / version
    run([python, "-m", "venv", str(environment)], ROOT)
    bin = environment / "bin"
    run([str(bin / "python"), "-m", "pip", "install", "--quiet", str(wheel)], ROOT)
    for command in ([bin / "python"], [bin / "tfmw", "run", "--workers", "2"]):
        folder = environment / f"work-{len(command)}"
        folder.mkdir()
        (folder / "train.py").write_text(program)
        run([*map(str, command), "train.py"], folder)
        assert (folder / "build/model/saved_model.pb").exists()
    print(
        f"{wheel.name} on Python {version}: the README's program trains, alone and on two workers"
    )
    shutil.rmtree(environment)
    return True


def run(command: list[str], folder: Path) -> None:
    """Runs a command without this repository on its path; its output is printed if it fails."""
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | ONE_THREAD
    env["PIP_DISABLE_PIP_VERSION_CHECK"] = "1"
    done = subprocess.run(
        command,
        cwd=folder,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"{done.stdout}\n{' '.join(command)}: exit status {done.returncode}")


if __name__ == "__main__":
    main()
