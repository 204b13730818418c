"""The package's metadata: one version, groups of dependencies, types."""

from __future__ import annotations

import importlib.metadata
import subprocess
import tomllib

import tfmw
from tests.helpers.cluster import ROOT
from tests.package import TESTS

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def installed_by(target: str) -> str:
    """The arguments of `pip install` in what make would run in a fresh clone."""
    command = ["make", "--dry-run", "--always-make", "PYTHON=python3", target]
    lines = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return " ".join(lines.replace("\\\n", " ").split())


def test_the_demo_installs_nothing_but_the_package():
    lines = installed_by("demo")
    assert "--editable . touch" in lines
    assert "'.[" not in lines


def test_the_tests_install_all_groups():
    groups = PROJECT["project"]["optional-dependencies"]
    assert "--editable '.[dev,docs,engines,trackers]'" in installed_by("test-fast")
    assert {"dev", "docs", "engines", "trackers"} <= set(groups)
    base = " ".join(PROJECT["project"]["dependencies"])
    assert not {"ray", "pyspark", "mlflow", "wandb", "pytest"} & set(base.split())


def test_the_version_has_one_place():
    assert "version" in PROJECT["project"]["dynamic"]
    assert importlib.metadata.version("tfmw") == tfmw.__version__


def test_types_and_documents_are_packaged():
    assert "py.typed" in PROJECT["tool"]["setuptools"]["package-data"]["tfmw"]
    assert (ROOT / "tfmw/py.typed").exists()
    manifest = (ROOT / "MANIFEST.in").read_text()
    for name in ("CHANGELOG.md", "SECURITY.md", "CITATION.cff"):
        assert name in manifest
        assert (ROOT / name).exists()


def test_the_tests_of_the_sdist_exist():
    assert all((ROOT / path).exists() for path in TESTS)
