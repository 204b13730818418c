"""Versions that must be the same on every task."""

from __future__ import annotations

import importlib.metadata

import keras
import pytest

from tfmw.cluster.versions import common_versions


def test_a_package_that_is_installed_under_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = importlib.metadata.version

    def version(name: str) -> str:
        if name == "tensorflow":
            raise importlib.metadata.PackageNotFoundError(name)
        return "2.99" if name == "tensorflow-cpu" else usual(name)

    found = common_versions()
    assert found["keras"] == keras.__version__
    monkeypatch.setattr(importlib.metadata, "version", version)
    others = {"tensorflow": ["tensorflow-cpu"]}
    monkeypatch.setattr(importlib.metadata, "packages_distributions", lambda: others)
    assert common_versions() == {**found, "tensorflow": "2.99"}
    others.clear()  # without metadata
    assert "tensorflow" not in common_versions()
