"""The command line: wrong usages, the program's flags, the report."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

import tfmw as tfmw_package
from tests.helpers.cluster import PROGRAMS, ROOT
from tfmw.cli import main as cli
from tfmw.cli import program_flags, reports
from tfmw.cluster import versions

PROGRAM = str(PROGRAMS / "launch_tasks.py")
TWO = {"cluster": {"worker": ["127.0.0.1:1", "127.0.0.1:2"]}}


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)
    monkeypatch.setenv("TFMW_NO_INIT", "1")


def tfmw(
    *args: str, env: Mapping[str, str] | None = None, cwd: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": str(ROOT), **(env or {})}
    command = [sys.executable, "-m", "tfmw", *args]
    return subprocess.run(
        command, capture_output=True, text=True, env=environ, cwd=cwd, timeout=600
    )


def test_version():
    done = tfmw("--version")
    assert (done.returncode, done.stdout) == (0, f"tfmw {tfmw_package.__version__}\n")


def test_a_path_that_is_not_there_is_named_without_tensorflow(tmp_path):
    """TensorFlow prints notices when it is imported, which takes seconds."""
    done = tfmw("check", str(tmp_path / "gone"))
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.startswith(f"not found: {tmp_path / 'gone'}")


def test_report_progress_in_a_custom_loop(tmp_path):
    """The loop imports no TensorFlow."""
    from tfmw.launcher.process import TaskFiles
    from tfmw.observe.progress import PROGRESS_FILE

    task = TaskFiles("worker", 0, tmp_path)
    task.make()
    code = "import sys, tfmw; tfmw.report_progress(7); print('tensorflow' in sys.modules)"
    own = {PROGRESS_FILE: str(task.files[PROGRESS_FILE]), "PYTHONPATH": str(ROOT)}
    environ = {**os.environ, **own}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=600)
    assert done.stdout == "False\n", done.stderr
    assert task.progress().step == 7


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["run", "--workers", "2"], ["received no script"]),
        (["run", "--workers", "2", "nowhere.py"], ["no script 'nowhere.py'", str(ROOT)]),
        (["run", "--workers", "2", "-m", "no_such_module.train"], ["no module 'no_such_module"]),
        (["run", "--workers", "2", "-m"], ["-m"]),
        (["run", "--workers", "0", PROGRAM], ["workers is 0", "at least 1"]),
        (["run", "--workers", "-1", PROGRAM], ["workers is -1"]),
        (["run", "--workers", "two", PROGRAM], ["'two'"]),
        (["run", "--workers", "1", "--ps", "-1", PROGRAM], ["ps is -1"]),
        (["run", "--ps", "1", PROGRAM], ["require --workers"]),
        (["run", "--wrokers", "1", PROGRAM], ["--wrokers", "Did you mean --workers?"]),
        (["run", "--work", "1", PROGRAM], ["--work"]),
        (["jobs", "--on", "local", "mine"], ["tfmw jobs does not take mine. See tfmw jobs --help"]),
        (["run", "--workers", "1", "--log-dir", PROGRAM, PROGRAM], [PROGRAM, "--log-dir"]),
        (["run", "--workers", "1", "--log-dir", f"{PROGRAM}/a", PROGRAM], ["Not a directory"]),
        (["run", "--workers", "1", "--log-dir", "s3://b/a", PROGRAM], ["tfmw.storage.upload"]),
        (["run", "--trace", "traces", PROGRAM], ["needs --workers"]),
        (["run", "--workers", "1", "--trace-steps", "1:2", PROGRAM], ["needs --trace"]),
        (["run", "--workers", "1", "--metrics-port", ":1", PROGRAM], ["expected a port"]),
        (["walk"], ["walk"]),
        ([], ["COMMAND"]),
    ],
)
def test_wrong_usage_is_one_sentence_and_status_2(args, words, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert cli.main(args) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("tfmw: ")
    assert captured.err.endswith(".\n")
    assert [word for word in words if word not in captured.err] == []


def test_workers_with_tf_config_set_is_refused(capsys, monkeypatch):
    monkeypatch.setenv("TF_CONFIG", json.dumps(TWO))
    assert cli.main(["run", "--workers", "2", PROGRAM]) == 2
    assert capsys.readouterr().err == (
        f"tfmw: TF_CONFIG is already set to {json.dumps(TWO)}; unset it or drop --workers.\n"
    )


def test_wrong_cluster_description_raises_before_any_task_starts():
    done = tfmw("run", PROGRAM, env={"TF_CONFIG": json.dumps(TWO)})
    assert done.returncode == 2
    assert done.stderr.startswith("tfmw: TF_CONFIG lists 2 tasks")
    assert done.stderr.count("\n") == 1


class TestSplit:
    """Division of the flags between tfmw and the script."""

    @pytest.mark.parametrize(
        ("given", "own", "program"),
        [
            ("--workers 2 a.py --workers 3", "--workers 2", "a.py --workers 3"),
            ("--workers=2 --ps 1 a.py", "--workers=2 --ps 1", "a.py"),
            ("--log_dir x_y a.py --log_dir z", "--log-dir x_y", "a.py --log_dir z"),
            ("--log_dir=x_y a.py", "--log-dir=x_y", "a.py"),
            ("--evaluator a.py -m b", "--evaluator", "a.py -m b"),
            ("--workers 2 -m a.b --log_dir z -- x", "--workers 2 -m a.b", "a.b --log_dir z -- x"),
            ("--workers 2 -- a.py -- x", "--workers 2", "a.py -- x"),
            ("-h", "-h", ""),
            ("--workers", "--workers", ""),
        ],
    )
    def test_options_after_the_program_belong_to_it(self, given, own, program):
        commands = cli._Parser().add_subparsers()
        found = program_flags.split(given.split(), cli._run_parser(commands))
        assert found == (own.split(), program.split())


@pytest.mark.parametrize(
    ("script", "flags", "found"),
    [
        ("fit(model)", "--workers 2 --epochs 3", ["--workers"]),
        ("num_workers = 3", "--workers=2 --max_restarts 3", ["--workers", "--max-restarts"]),
        ("parser.add_argument('--workers')", "--workers=2", []),
        ("flags.DEFINE_string('log_dir', '', '')", "--log_dir=x --log-dir y", []),
        ("fit(model)  # of several workers, the chief writes", "--workers 2", ["--workers"]),
        ("def main(workers: int): ...", "--workers 2", []),
        ('"""Usage: train.py [--workers N]"""', "--workers 2", []),
        ("fit(model)", "workers -m x -- --epochs", []),
    ],
)
def test_options_behind_a_script_that_does_not_know_them(script, flags, found, tmp_path):
    (tmp_path / "train.py").write_text(script)
    own = ("--workers", "--max-restarts", "--log-dir")
    program = [str(tmp_path / "train.py"), *flags.split()]
    assert program_flags.passed_by_mistake(program, own) == found
    assert program_flags.passed_by_mistake(["a.module", *flags.split()], own) == []


def test_misplaced_options_are_named(tmp_path):
    (tmp_path / "train.py").write_text("print('trains')\n")
    done = tfmw("run", str(tmp_path / "train.py"), "--workers", "2")
    assert done.stderr == (
        f"tfmw: {tmp_path}/train.py gets --workers, which it does not mention: options of tfmw run "
        "belong before the script\n"
    )
    assert done.stdout == "trains\n"


def test_run_as_one_task_of_an_existing_cluster(tmp_path):
    config = {**TWO, "task": {"type": "worker", "index": 1}}
    env = {"TF_CONFIG": json.dumps(config), "TFMW_TASK": "worker 1", "TFMW_RESULT": str(tmp_path)}
    done = tfmw("run", PROGRAM, "--epochs", "3", env=env)
    assert (done.returncode, done.stdout) == (0, "to stdout\n")
    result = json.loads((tmp_path / "worker_1.json").read_text())
    assert result["argv"] == [PROGRAM, "--epochs", "3"]
    assert result["config"] == config


def test_a_module(tmp_path):
    env = {"TFMW_RESULT": str(tmp_path)}
    module = "tests.programs.launch_tasks"
    done = tfmw("run", "--workers", "1", "-m", module, "--epochs", "3", env=env)
    assert (done.returncode, done.stderr) == (0, "")
    result = json.loads((tmp_path / "worker_0.json").read_text())
    assert result["argv"] == [PROGRAM, "--epochs", "3"]
    assert (result["name"], result["path"]) == ("__main__", str(ROOT))


def test_modules_of_tfmw_are_not_importable_by_short_names(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import importlib.util, sys, tfmw\nimport cluster\n"
        "print(cluster.OWN, sys.path[0], importlib.util.find_spec('strategies'))\n"
    )
    (tmp_path / "cluster.py").write_text("OWN = 'mine'\n")
    done = tfmw("run", "--workers", "1", str(script))
    assert done.stdout == f"[worker 0] mine {tmp_path} None\n"


def test_tasks_import_the_launchers_tfmw(tmp_path, monkeypatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    (tmp_path / "script.py").write_text("import tfmw\nprint(tfmw.__file__)\n")
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from tfmw.cli.main import main; main()"
    command = [sys.executable, "-c", code, "run", "--workers", "1", "script.py"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=600)
    assert done.stdout == f"[worker 0] {ROOT / 'tfmw' / '__init__.py'}\n"


def test_a_run_that_fails_ends_with_its_error_on_stderr():
    done = tfmw("run", "--workers", "2", PROGRAM, "worker 0=wait", "worker 1=fail")
    assert done.returncode == 1
    assert "tfmw:" not in done.stdout
    assert "worker 1 failed after" in done.stderr.splitlines()[-1]


def test_init_runs_before_the_script(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("print('the script')\n")
    # Python imports sitecustomize when it starts: here it stands in for the join of the cluster.
    (tmp_path / "sitecustomize.py").write_text(
        "import sys, types\n"
        "joining = types.ModuleType('tfmw.cluster.joining')\n"
        "joining.join_for_script = lambda: print('init')\n"
        "sys.modules['tfmw.cluster.joining'] = joining\n"
    )
    env = {"TFMW_NO_INIT": "0", "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    done = tfmw("run", "--workers", "1", str(script), env=env)
    assert done.stdout.splitlines() == ["[worker 0] init", "[worker 0] the script"]


def test_help_is_quick():
    """The help imports the standard library only, which takes a tenth of a second."""
    command = [sys.executable, "-X", "importtime", "-m", "tfmw", "run", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=600)
    assert done.returncode == 0
    assert "--workers N" in done.stdout
    modules = {line.split("|")[-1].strip() for line in done.stderr.splitlines() if "|" in line}
    others = {"tensorflow", "keras", "numpy", "absl", "prometheus_client", "cloudpickle"}
    assert "tfmw.cli" in modules
    assert modules.isdisjoint({*others, "asyncio", "http.client", "multiprocessing", "ssl"})


def test_each_command_says_what_it_does(capsys):
    """`tfmw COMMAND --help` has a sentence between the usage and the arguments."""
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--help"])
    commands = re.findall(r"^    (\w+) ", capsys.readouterr().out, re.MULTILINE)
    assert {"run", "token", "jobs", "cancel"} <= set(commands)
    for command in commands:
        with pytest.raises(SystemExit, match="0"):
            cli.main([command, "--help"])
        assert re.search(r"\n\n[A-Z][^\n]*[^:]\n", capsys.readouterr().out), command


def test_status_without_a_run_is_json_too(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("TFMW_RUNTIME_DIR", str(tmp_path))
    assert cli.main(["status", "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == []
    assert cli.main(["status"]) == 1
    assert "no run of this user is alive" in capsys.readouterr().out


class TestEnv:
    def test_facts(self, monkeypatch):
        monkeypatch.setattr(reports, "ask_tensorflow", lambda: ("tensorflow", "none"))
        environ = {
            "TF_CONFIG": json.dumps({**TWO, "task": {"type": "worker", "index": 0}}),
            "TFMW_API_TOKEN": "hush",
            "SLURM_JOB_ID": "7",
            "HOME": "/home/me",
        }
        lines = reports.environment(environ).splitlines()
        assert f"python: {sys.version.split()[0]} (CPython)" in lines
        assert "cluster: Cluster(worker 0 of 2 at 127.0.0.1:1, from TF_CONFIG)" in lines
        assert "gpus: none" in lines
        assert "$SLURM_JOB_ID: 7" in lines
        assert "$TFMW_API_TOKEN: (hidden)" in lines
        assert not any("hush" in line or "HOME" in line for line in lines)
        named = {line.partition(":")[0] for line in lines}
        assert {"tfmw", "tensorflow", "keras", "tensorflow-datasets", "numpy", "cores"} <= named

    def test_a_wrong_description_is_reported(self, monkeypatch):
        monkeypatch.setattr(reports, "ask_tensorflow", lambda: ("tensorflow", "none"))
        assert "cluster: wrong: TF_CONFIG is not valid JSON" in reports.environment(
            {"TF_CONFIG": "{"}
        )

    def test_a_tensorflow_that_cannot_be_imported_is_reported(self, tmp_path):
        python = tmp_path / "python"
        python.write_text("#!/bin/sh\necho 'ImportError: no libcuda' >&2\nexit 1\n")
        python.chmod(0o755)
        assert versions.ask_tensorflow(str(python)) == (
            "unknown",
            "unknown: TensorFlow can't be imported: ImportError: no libcuda",
        )

    @pytest.mark.process
    def test_the_command(self):
        done = tfmw("env", env={"TFMW_SECRET": "hush"})
        assert done.returncode == 0
        assert "keras backend: tensorflow" in done.stdout
        assert "hush" not in done.stdout
