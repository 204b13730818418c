"""Every command on every page: its options exist, and a test runs it, or a reason says why none."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import shlex
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.docs.test_readme import blocks
from tests.helpers.cluster import ONE_THREAD, ROOT
from tfmw.cli import main as cli

DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def commands() -> dict[str, list[str]]:
    """{command: pages} of all lines after a prompt, and of the programs named within sentences."""
    found: dict[str, list[str]] = {}
    for path in DOCUMENTS:
        text = path.read_text()
        given = []
        for block in re.findall(r"^ *```console\n(.*?)^ *```$", text, re.DOTALL | re.MULTILINE):
            given += re.findall(r"^ *\$ (.*)$", block.replace("\\\n", " "), re.MULTILINE)
        for script in re.findall(r"^ *```bash\n(.*?)^ *```$", text, re.DOTALL | re.MULTILINE):
            given += re.findall(r"^(srun .*)$", script, re.MULTILINE)
        prose = re.sub(r"^ *```.*?^ *```$", "", text, flags=re.DOTALL | re.MULTILINE)
        given += re.findall(r"`((?:sudo )?python (?:-m )?(?:bench|tests)[^`]+)`", prose)
        given += re.findall(r"`((?:tfmw (?:run|bench)|sbatch|mpirun) [^`]*\.py[^`]*)`", prose)
        given += re.findall(r"`(make [a-z-]+)`", prose)
        for line in given:
            command = " ".join(re.sub(r"\s+#(\s.*)?$", "", line).split())
            found.setdefault(command, []).append(str(path.relative_to(ROOT)))
    return found


COMMANDS = commands()
MINUTES = "takes minutes to an hour; Benchmarks has the figures that it printed"
CLUSTER = "needs a cluster"
HOSTS = "tests/cluster/test_hosts.py::test_two_hosts_train_by_the_same_command"


class Here:
    """Runs below, as it stands, in `make nightly`."""


@dataclass(frozen=True)
class Reason:
    """No test runs the command."""

    text: str


RUN: dict[str, Here | Reason | str] = {
    # start and README
    "pip install .": "tests/package.py::check_wheel",
    r"pip install (dist/)?tfmw-\*\.whl": "tests/package.py::check_wheel",
    "pip install build && python -m build --wheel": Reason("make package builds both"),
    r"pip install '(\.\[\w+\]|tensorflow\[and-cuda\])'": Reason("installs from PyPI"),
    "python train.py": "tests/docs/test_readme.py::test_the_readme",
    "CUDA_VISIBLE_DEVICES=0 python train.py": Reason("needs a GPU"),
    "tfmw run --workers 2 train.py": "tests/docs/test_readme.py::test_the_readme",
    "tfmw run --workers 2 --log-dir logs train.py": Here(),
    "tfmw run --keras on train.py": Here(),
    "tfmw env": "tests/test_cli.py::test_the_command",
    "tfmw token": "tests/hosts/test_launch.py::test_a_token_is_long_and_new_each_time",
    "mpirun .*": Reason(CLUSTER),
    "tfmw (status|stacks)": "tests/launcher/test_stands_still.py::"
    "test_what_is_reported_of_one_worker",
    r"export TFMW_TOKEN=.*": "tests/hosts/test_hosts.py::test_hosts_come_and_go",
    "tfmw check --hosts h0,h1.*": "tests/cluster/test_check.py::test_a_cluster_that_works",
    "tfmw run --hosts h0,h1 train.py": HOSTS,
    "tfmw run --hosts localhost:.* --host-index [01] train.py": HOSTS,
    r"tfmw run --hosts .* --max-restarts .*": "tests/hosts/test_hosts.py::test_hosts_come_and_go",
    "tfmw run train.py": "tests/test_cli.py::test_run_as_one_task_of_an_existing_cluster",
    "TF_CONFIG=.* python train.py": "tests/recipes/test_recipes.py::test_two_terminals",
    # make
    "make demo": "tests/recipes/test_recipes.py::test_make_demo",
    "make docs": "tests/docs/test_docs.py::test_site_is_built",
    "make notebooks": "tests/notebooks/test_notebooks.py::test_first_fit",
    r"make (test|test-[a-z-]+( SUITE=[a-z-]+)?|nightly( TESTS=.+)?|updates|flaky)": Reason(
        "are the tests"
    ),
    "make (lint|lint type|test JOBS=1)": Reason("are parts of make test"),
    r"make package|(\.venv/bin/)?python -m tests\.(keras_compat\.survey|on_gpus)": Reason(
        "tests of their own, by hand before a release"
    ),
    "make diagrams": Reason("needs npm and chromium"),
    "make bench": Reason("installs PyTorch and tf_keras; an hour"),
    # one machine
    "tfmw run --workers 2 --max-restarts 3 train.py": Here(),
    "tfmw run --workers 4 --max-restarts 3 train.py": Here(),
    "tfmw run --workers 4 --max-restarts 3 --hang-timeout 300 train.py --backup_dir build/backup": (
        Here()
    ),
    "tfmw run --workers 2 --max-restarts 3 --backup-dir build/backup train.py": (
        "tests/training/test_plain_calls.py::"
        "test_a_plain_script_of_two_trainings_resumes_the_second"
    ),
    "tfmw run --workers 4 --metrics-port 9400 train.py": Here(),
    "curl localhost:9400/metrics": "tests/training/test_reports.py::"
    "test_a_training_is_seen_everywhere",
    "tfmw run --workers 4 --trace traces --trace-steps 100:110 train.py": Here(),
    r"tfmw run --workers [23] --ps [12] train.py": "tests/docs/test_readme.py::"
    "test_migration_from_parameter_server_scripts",
    "tfmw bench --workers 2 train.py:make_model_and_dataset": Here(),
    "tfmw run train.py --workers 2": "tests/test_cli.py::test_misplaced_options_are_named",
    # recipes
    "python recipes/images.py --max_steps=5": Here(),
    "tfmw run --workers 2 recipes/images.py --epochs=4 --export_dir=build/images": Here(),
    r"tfmw run --workers 2 --max-restarts 3 recipes/images.py --tars=s3://.*": "tests/recipes/"
    "test_recipes.py::test_recipes_in_a_bucket_on_two_workers_killed_three_times",
    "tfmw run --workers 2 --ps 2 recipes/recommender.py --strategy=parameter_server": Here(),
    "python recipes/digits.py --worker_hosts=.*": "tests/recipes/test_recipes.py::"
    "test_two_terminals",
    "python recipes/recommender.py --ps_hosts=.*": "tests/parameter_server/test_recipes.py::"
    "test_four_terminals",
    "tfmw run --workers 1 --ps 2 recipes/recommender.py .* --buckets=.*": Reason(MINUTES),
    # clusters
    "(sbatch|srun) .*": "tests/schedulers/test_slurm.py::test_preempted_job_is_requeued",
    "tfmw (submit|jobs|status|logs|cancel) .*slurm.*": "tests/engines/contract.py::test_commands",
    "kubectl .*": Reason(CLUSTER),
    "tfmw check --kubernetes .*": "tests/engines/test_kubernetes.py::test_check_of_a_cluster",
    # measurements
    r"python -m tests.keras_compat.survey .*": "tests/keras_compat/test_survey.py::",
    r"(sudo )?python (-m bench|bench/).*": Reason(MINUTES),
    "tfmw run --workers 2 bench/ring.py --mb 64": Here(),
    r"tfmw run --workers 2 --ps [12] bench/.*": Reason(MINUTES),
    # contributors
    r"\.venv/bin/python -m pytest .*": Reason("is a test"),
    "(cosmic-ray|cr-report) .*": Reason("changes the sources"),
}


def how(command: str) -> Here | Reason | str | None:
    """The first entry of RUN that is for a command."""
    return next((way for form, way in RUN.items() if re.fullmatch(form, command)), None)


def test_commands_are_collected():
    assert len(COMMANDS) > 60
    assert how("tfmw run --workers 9 other.py") is None


@pytest.mark.parametrize("command", COMMANDS)
def test_a_test_runs_it_or_a_reason_says_why_none(command):
    way = how(command)
    assert way is not None, f"{COMMANDS[command]}: name its test in RUN: {command}"
    if isinstance(way, str):
        file, _, name = way.partition("::")
        assert f"def {name}" in (ROOT / file).read_text(), way


@pytest.mark.parametrize("form", RUN)
def test_each_entry_is_for_a_command(form):
    way = RUN[form]
    assert [command for command in COMMANDS if how(command) is way], f"no page has it: {form}"


# ---- spelling -----------------------------------------------------------------------------------


class ParsedError(Exception):
    """A command's arguments were read without an error."""


@pytest.fixture
def only_parse(monkeypatch: pytest.MonkeyPatch) -> None:
    parse = argparse.ArgumentParser.parse_known_args
    within: list[argparse.ArgumentParser] = []

    def stop(self, args=None, namespace=None):
        if within:  # the parser of a subcommand
            return parse(self, args, namespace)
        within.append(self)
        _, unknown = parse(self, args, namespace)
        assert not unknown
        raise ParsedError

    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", stop)


def words_of(command: str) -> list[str]:
    """Its words, without assignments, `sudo` and the path of an environment."""
    words = shlex.split(command)
    while words[0] == "sudo" or re.fullmatch(r"\w+=.*", words[0], re.DOTALL):
        del words[0]
    return [words[0].removeprefix(".venv/bin/"), *words[1:]]


SPELLED = [command for command in COMMANDS if re.match(r"(sudo )?(tfmw|python|make|pip)", command)]


@pytest.mark.parametrize("command", SPELLED)
def test_its_options_exist(command, only_parse, monkeypatch):
    program, *words = words_of(command)
    monkeypatch.syspath_prepend(str(ROOT))
    if program == "make":
        targets = [word for word in words if "=" not in word]
        text = (ROOT / "Makefile").read_text()
        assert all(re.search(rf"^{target}:", text, re.MULTILINE) for target in targets)
    elif program == "pip":
        for package, extra in re.findall(r"(\w+)\[([\w-]+)\]", command):
            assert package == "tensorflow" or extra in PROJECT["optional-dependencies"]
    elif program == "tfmw":
        with pytest.raises(ParsedError):
            cli._main(words)
        recipe = [word for word in words if word.startswith("recipes/")]
        assert not recipe or flags_exist(recipe[0], words[words.index(recipe[0]) :])
    elif words[0].startswith("recipes/"):
        assert flags_exist(words[0], words)
    elif "bench" in " ".join(words):
        name, *flags = words[1:] if words[0] == "-m" else words
        name = "bench.__main__" if name == "bench" else name
        monkeypatch.setattr(sys, "argv", [name, *flags])
        with pytest.raises(ParsedError):
            importlib.import_module(name.removesuffix(".py").replace("/", ".")).main()


def flags_exist(recipe: str, words: list[str]) -> bool:
    """Whether a recipe or the module of common flags defines each flag."""
    text = (ROOT / recipe).read_text() + (ROOT / "recipes/common.py").read_text()
    defined = set(re.findall(r"DEFINE_\w+\(\s*\"(\w+)\"", text))
    return {w[2:].partition("=")[0] for w in words if w.startswith("--")} <= defined


# ---- running ------------------------------------------------------------------------------------

# The README's program, with a flag for backups, and a function for `tfmw bench`.
TRAIN = """
import sys

def make_model_and_dataset():
    keras.utils.set_random_seed(1)
    layers = [keras.Input((8, 8, 1)), keras.layers.Flatten(), keras.layers.Dense(10)]
    model = keras.Sequential(layers)
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model, datasets.load("tfmw_digits", "train", as_supervised=True).batch(64)
"""


def shell(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs a command as a reader types it, beside this repository's files and a `train.py`."""
    (program,) = blocks("README.md")
    fit = "history = model.fit(dataset, epochs=5)"
    assert fit in program
    body = program.replace(fit, f"with tfmw.options(backup_dir=BACKUP):\n    {fit}")
    (folder / "train.py").write_text(
        "import keras\nimport tfmw\nfrom tfmw import datasets\n"
        f"{TRAIN}\nBACKUP = sys.argv[2] if len(sys.argv) > 2 else None\n"
        'if __name__ == "__main__":\n' + re.sub(r"^(?=.)", "    ", body, flags=re.MULTILINE)
    )
    for name in ("recipes", "bench", "tests"):
        (folder / name).symlink_to(ROOT / name)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, **ONE_THREAD, "PATH": path, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=580,
        check=False,
    )


@pytest.mark.nightly
@pytest.mark.process
@pytest.mark.parametrize("command", [c for c in COMMANDS if isinstance(how(c), Here)])
def test_it_runs(command, tmp_path):
    done = shell(command, tmp_path)
    assert done.returncode == 0, done.stdout
