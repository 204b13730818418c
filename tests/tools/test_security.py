"""Secrets stay out of reports and logs; nothing that others wrote is unpickled or executed."""

from __future__ import annotations

import ast
import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.cluster import ROOT, run_command
from tfmw.cli import reports

SECRETS = {
    "WANDB_API_KEY": "hush-1",
    "TFMW_TOKEN": "hush-2",
    "SLURM_JWT": "hush-3",
    "TF_DB": "postgres://me:hush-4@db/runs",
    "TF_CONFIG": json.dumps({"cluster": {}, "job": '{"args": ["--api_key=hush-5", "-v"]}'}),
    "KERAS_AUTH": "hush-6",
    "AWS_SECRET_ACCESS_KEY": "hush-7",
    "OMPI_URL": "https://hush-8@host/?sig=hush-9&n=1",
    "CLUSTER_SPEC": json.dumps({"job": {"password": "hush-10", "n": 3}}),
}


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("TFMW_PORT", "2222", "2222"),
        ("SLURM_STEP_NODELIST", "n[1-2]", "n[1-2]"),
        ("TF_CPP_MIN_LOG_LEVEL", "2", "2"),
        ("TFMW_API_KEY", "1a", "(hidden)"),
        ("TF_URL", "s3://me:1a@host/b", "s3://(hidden)@host/b"),
        ("TF_URL", "gs://bucket/a@b", "gs://bucket/a@b"),
        ("TF_ARGS", "--token=1a --epochs=3", "--token=(hidden) --epochs=3"),
        ("TF_JSON", '{"password": "1a", "n": 3}', '{"password": "(hidden)", "n": 3}'),
    ],
)
def test_secrets_are_hidden(name: str, value: str, shown: str) -> None:
    assert reports.shown(name, value) == shown


def test_the_report_has_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports, "ask_tensorflow", lambda: ("tensorflow", "none"))
    report = reports.environment({**SECRETS, "TFMW_PORT": "2222"})
    assert "hush" not in report
    assert "$TFMW_PORT: 2222" in report
    assert "-v" in report  # other words stay


def test_the_logs_of_a_run_have_no_secret(tmp_path: Path) -> None:
    """The launcher's output and files, and its report of a failed task, have no secret."""
    (tmp_path / "fails.py").write_text("raise SystemExit('as it should')\n")
    environ = {k: v for k, v in os.environ.items() if k != "TF_CONFIG"}
    environ |= {k: v for k, v in SECRETS.items() if k != "TF_CONFIG"}
    environ |= {"TFMW_NO_INIT": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tfmw", "run", "--workers", "2", "--log-dir", "logs"]
    run = subprocess.run(
        [*command, "fails.py", "--db=postgres://me:hush-4@db/runs", "--api_key=hush-1"],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert run.returncode == 1
    assert "as it should" in run.stderr
    kept = [p.read_bytes() for p in (tmp_path / "logs").rglob("*") if p.is_file()]
    assert len(kept) >= 2
    assert b"hush" not in (run.stdout + run.stderr).encode() + b"".join(kept)


@functools.cache
def calls() -> list[tuple[str, str]]:
    """(module, call) for every call in tfmw and the recipes, as its source says it."""
    return [
        (path.name, ast.unparse(node))
        for path in [*(ROOT / "tfmw").rglob("*.py"), *(ROOT / "recipes").rglob("*.py")]
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
    ]


def test_only_data_of_the_own_child_is_unpickled() -> None:
    """`call` reads what the launcher and its own child wrote to unnamed files; `wandb_run` is given
    what came that way. `folder` and `job` read what the user's own job wrote, through
    `engines.own_files` (tests/engines/test_own_files.py). All else on disk and in the network is
    JSON or plain arrays."""
    readers = ("pickle.load", "cloudpickle.load", "marshal.load", "shelve.open", "joblib.load")
    found = {module for module, call in calls() if call.startswith(readers)}
    assert found == {"call.py", "wandb_run.py", "folder.py", "job.py"}
    assert not [c for _, c in calls() if "allow_pickle=True" in c or c.startswith("yaml.load(")]


def test_safe_mode_is_never_turned_off() -> None:
    words = ("safe_mode=False", "enable_unsafe_deserialization")
    assert not [call for _, call in calls() if any(word in call for word in words)]


@pytest.mark.process
def test_safe_mode_is_on_after_training(tmp_path: Path) -> None:
    """A model file that holds code is refused, as without tfmw."""
    program = """
import sys
import keras, numpy as np
import tfmw

model = keras.Sequential([keras.Input([2]), keras.layers.Lambda(lambda x: x * 2)])
model.save(sys.argv[1])
trained = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
trained.compile("sgd", "mse")
tfmw.fit(trained, np.ones([4, 2]), np.ones([4, 1]), verbose=0, backup_dir=sys.argv[2])
try:
    keras.models.load_model(sys.argv[1])
except ValueError as error:
    print("refused", "unsafe" in str(error) or "lambda" in str(error))
"""
    arguments = [tmp_path / "m.keras", tmp_path / "backups"]
    status, output = run_command("python", "-c", program, *arguments)
    assert status == 0, output
    assert output.splitlines()[-1] == "refused True"
