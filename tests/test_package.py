"""The package's metadata: one version, groups of dependencies, types."""

from __future__ import annotations

import ast
import dataclasses
import importlib.metadata
import inspect
import re
import subprocess
import tomllib

import tfmw
from tests.breaks import breaks
from tests.helpers.cluster import ROOT
from tests.package import TESTS
from tfmw.cli import jobs
from tfmw.cli import main as cli
from tfmw.launcher.engines.submit import ENTRY_POINTS

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
    assert "--editable '.[dev,docs,engines,trackers]'" in installed_by("test-keras")
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


def test_no_room_names_a_module_of_a_room_above_it_in_order_to_start_it():
    """Imports are kept by import-linter, which does not see `python -m tfmw.room.module`."""
    contract = PROJECT["tool"]["importlinter"]["contracts"][0]
    floors = {room: i for i, floor in enumerate(contract["layers"]) for room in floor.split(" | ")}
    found = []
    for file in (ROOT / "tfmw").glob("*/**/*.py"):
        own = file.relative_to(ROOT / "tfmw").parts[0]
        for node in ast.walk(ast.parse(file.read_text())):
            name = node.value if isinstance(node, ast.Constant) else None
            if not isinstance(name, str) or not re.fullmatch(r"tfmw(\.\w+)+", name):
                continue
            if name == ENTRY_POINTS:  # the name of a group, not of a module
                continue
            path = ROOT.joinpath(*name.split("."))
            if path.is_dir() or path.with_suffix(".py").exists():
                found.append((own, name.split(".")[1]))
    assert ("cluster", "compat") in found  # the methods of models, which only fit imports
    assert [(own, room) for own, room in found if floors[own] > floors[room]] == []


def test_the_tests_of_the_sdist_exist():
    assert all((ROOT / path).exists() for path in TESTS)


def test_nothing_restarts_unless_max_restarts_says_so():
    """One default everywhere: functions, engines and commands."""
    engines = [getattr(tfmw.engines, name) for name in tfmw.engines.__all__]
    engines = [engine for engine in engines if dataclasses.is_dataclass(engine)]
    assert tfmw.engines.Local in engines
    assert {engine.max_restarts for engine in engines} == {0}
    for function in (tfmw.launch, tfmw.submit):
        assert inspect.signature(function).parameters["max_restarts"].default == 0
    commands = cli._Parser().add_subparsers()
    cli._run_parser(commands)
    jobs.add_parsers(commands, cli._add_options)
    for command in ("run", "submit"):
        assert commands.choices[command].get_default("max_restarts") == 0


def test_each_break_can_be_made_and_its_tests_exist() -> None:
    found = list(breaks())
    assert len(found) >= 40
    for each in found:
        each.of((ROOT / each.file).read_text())
        for test in each.tests:
            file, *names = re.sub(r"\[.*", "", test).split("::")
            text = (ROOT / "tests" / file).read_text()
            assert all(re.search(rf"(def|class) {name}\b", text) for name in names), test
