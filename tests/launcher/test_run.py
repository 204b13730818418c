"""Local clusters: their output, their failures, and that they leave nothing behind."""

from __future__ import annotations

import dataclasses
import errno
import io
import json
import os
import pickle
import platform
import pty
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import tfmw
from tests.helpers.cases import each
from tests.helpers.cluster import (
    MARK,
    ONE_THREAD,
    PROGRAMS,
    PYTHONPATH,
    ROOT,
    ClusterRun,
    children,
    marked,
    template_and_copies,
    tfmw_command,
    wait_gone,
)
from tests.programs import launch_functions
from tfmw.cluster.group import Group
from tfmw.cluster.sockets import reserved_ports
from tfmw.errors import TaskFailed, UsageError
from tfmw.launcher import fork_server, process
from tfmw.launcher import task as task_program
from tfmw.launcher.failure import Failure, describe_status
from tfmw.launcher.options import task_layout
from tfmw.launcher.output import Display, OutputPump, collapse
from tfmw.launcher.result import lines_about
from tfmw.launcher.run import launch_tasks
from tfmw.launcher.spawn import TASK_COMMAND, reap_orphans
from tfmw.observe import recorded_errors
from tfmw.observe.recorded_errors import record_error
from tfmw.train.callbacks import roles

PROGRAM = str(PROGRAMS / "launch_tasks.py")
NO_INIT = {"TFMW_NO_INIT": "1"}


@pytest.fixture(scope="module")
def run(run_cluster: Any) -> Any:
    """Runs launch_tasks.py without TensorFlow."""

    def start(*flags: str, **options: Any) -> ClusterRun:
        options = {"timeout_s": 60, "status": None, "env": NO_INIT, **options}
        found: ClusterRun = run_cluster("launch_tasks.py", *flags, **options)
        return found

    return start


# ---- a run that succeeds -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def two(run: Any) -> ClusterRun:
    found: ClusterRun = run("--epochs", "3", workers=2)
    return found


def without_note(run: ClusterRun) -> str:
    """Output of a run without its line on the tasks' network, which depends on the system."""
    first, _, rest = run.output.partition("\n")
    return rest if first.startswith("tfmw: ") and " network" in first else run.output


class TestSuccess:
    def test_success_has_no_summary(self, two):
        assert two.status == 0
        assert "tfmw:" not in without_note(two)

    def test_every_line_is_labelled(self, two):
        assert sorted(without_note(two).splitlines()) == [
            "[worker 0] to stderr",
            "[worker 0] to stdout",
            "[worker 1] to stderr",
            "[worker 1] to stdout",
        ]

    def test_every_task_has_a_log(self, two):
        for task in ("worker 0", "worker 1"):
            assert sorted(two.log(task).splitlines()) == ["to stderr", "to stdout"]

    def test_script_sees_the_same_argv_and_path_as_under_python(self, two):
        for result in each(two):
            assert result["argv"] == [PROGRAM, "--epochs", "3"]
            assert result["name"] == "__main__"
            assert result["path"] == str(PROGRAMS)

    def test_tf_config(self, two):
        assert [r["config"]["task"] for r in two] == [
            {"type": "worker", "index": 0},
            {"type": "worker", "index": 1},
        ]
        assert two[0]["config"]["cluster"] == two[1]["config"]["cluster"]
        addresses = two[0]["config"]["cluster"]["worker"]
        assert len(set(addresses)) == 2
        assert all(re.fullmatch(r"127\.0\.0\.1:\d+", address) for address in addresses)

    def test_the_environment_of_a_task(self, two):
        for i, result in enumerate(each(two)):
            env = result["env"]
            assert env["TFMW_LOCAL_TASKS"] == "2"
            assert env["TFMW_LOCAL_RANK"] == str(i)
            assert env["TFMW_TASK"] == f"worker {i}"
            assert Path(env["TFMW_ERROR_FILE"]) == two.log_dir / f"worker_{i}" / "error.json"
            assert env["TF_CPP_MIN_LOG_LEVEL"] == "2"
            assert "TFMW_TTY" not in env
            assert not result["terminal"]
            assert result["session"]

    def test_parameter_servers_add_a_chief(self, run):
        result = run(workers=2, ps=1, evaluator=True)
        assert result.status == 0
        assert sorted(result.by_task) == ["chief", "evaluator", "ps 0", "worker 0", "worker 1"]
        cluster = result.chief["config"]["cluster"]
        assert {job: len(a) for job, a in cluster.items()} == {"chief": 1, "worker": 2, "ps": 1}
        assert result.by_task["evaluator"]["config"]["task"] == {"type": "evaluator", "index": 0}
        assert result.by_task["ps 0"]["env"]["TFMW_LOCAL_TASKS"] == "5"
        assert result.chief["env"]["TFMW_EVALUATOR"] == "1"  # the training keeps its backups

    def test_child_processes_of_a_task_are_ended(self, run):
        """Also one in a session of its own; run_cluster looks for survivors."""
        assert run("worker 1=leave_children").status == 0

    def test_a_log_has_the_last_text_of_a_bar(self, run):
        assert run("worker 1=bar").log("worker 1").splitlines() == ["Epoch 1", " 9/9 ", "and"]

    def test_unfinished_lines_and_invalid_bytes_are_printed(self, run):
        assert "[worker 1] no newline \ufffd\ufffd\n" in run("worker 1=unfinished_line").output

    def test_without_a_log_dir_no_files_remain(self, tmp_path):
        with tfmw_command(
            "run",
            "--workers",
            "1",
            PROGRAM,
            env={**NO_INIT, "TMPDIR": str(tmp_path), "TFMW_RESULT": "/nowhere"},
        ) as p:
            failed, _ = p.communicate(timeout=600)
        assert p.returncode == 1
        kept = list(tmp_path.glob("tfmw-*/attempt_0/worker_0/output.log"))
        assert len(kept) == 1
        assert str(kept[0]) in failed
        with tfmw_command(
            "run",
            "--workers",
            "1",
            PROGRAM,
            env={**NO_INIT, "TMPDIR": str(tmp_path), "TFMW_RESULT": str(tmp_path)},
        ) as p:
            p.communicate(timeout=600)
        assert p.returncode == 0
        assert len(list(tmp_path.glob("tfmw-*"))) == 1  # fmt: skip


# ---- a run that fails --------------------------------------------------------------------------


def last_line(run: ClusterRun) -> str:
    return run.output.rstrip().splitlines()[-1]


class TestLines:
    """Output about failures."""

    def test_one_error_of_several_workers_is_one_line(self):
        cause = Failure("worker 0", "ValueError: bad", how="exit status 1", seconds=2.0)
        same = dataclasses.replace(cause, task="worker 2")
        later = dataclasses.replace(cause, task="worker 1", attempt=1)
        assert lines_about([cause, same], workers=2) == [
            "tfmw: both workers failed after 2.0 s: ValueError: bad (exit status 1)"
        ]
        cause = dataclasses.replace(cause, detail=("Traceback ...",))
        assert len(lines_about([cause, same])) == 3
        assert len(lines_about([cause, same], shown=True)) == 1
        assert "    Traceback ..." in lines_about([cause, later], shown=True), "below another error"
        cause = dataclasses.replace(cause, detail=())
        *others, last = lines_about([cause, same, later], workers=3)
        assert last.startswith("tfmw: worker 0, worker 2 failed first, in attempt 0 after 2.0 s: ")
        assert others == ["tfmw: worker 1 failed too in attempt 1: ValueError: bad (exit status 1)"]

    def test_an_echo_of_an_error_is_not_repeated(self):
        cause = Failure("worker 0", "ValueError: bad", how="exit status 1")
        echo = "InternalError: Error reported from /job:worker/task:0: worker 0: ValueError: bad"
        first, _ = lines_about([cause, Failure("worker 1", echo, secondary=True)], workers=2)
        assert first == "tfmw: worker 1 failed too: with the error of worker 0"


class TestFailure:
    def test_the_last_line_names_the_task_and_its_error(self, run):
        result = run("worker 0=wait", "worker 1=fail")
        assert result.status == 1
        assert re.fullmatch(
            r"tfmw: worker 1 failed after \d+\.\d s: ValueError: bad batch \(exit status 1\)",
            last_line(result),
        )
        log = result.log_dir / "worker_1" / "output.log"
        assert f"tfmw: log of worker 1: {log}" in result.output
        assert 'raise ValueError("bad batch")' in log.read_text()
        # The traceback starts in the user's file.
        assert "launcher/task.py" not in log.read_text()

    def test_an_error_is_shown_though_the_working_directory_is_gone(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        tmp_path.rmdir()
        with pytest.raises(LookupError) as caught:
            exec(compile("raise LookupError", "script.py", "exec"))
        shown = task_program._from_the_users_code(caught.value.__traceback__)
        assert traceback.extract_tb(shown)[-1].filename == "script.py"

    def test_tfmws_frames_are_shown_only_if_the_error_is_its_own(self):
        def of_the_user():
            raise LookupError

        def files_of(call: Callable[[], Any], error: type[Exception]) -> set[str]:
            with pytest.raises(error) as caught:
                call()
            shown = task_program._from_the_users_code(caught.value.__traceback__)
            return {Path(frame.filename).name for frame in traceback.extract_tb(shown)}

        alone = Group(0, 1)
        assert files_of(lambda: alone.from_chief(of_the_user), LookupError) == {"test_run.py"}
        ours = files_of(lambda: task_layout(0, 0, False), UsageError)
        assert ours == {"test_run.py", "options.py"}
        with pytest.raises(UsageError) as caught:  # of a task that only reports a lost peer
            task_layout(0, 0, False)
        shown = task_program._from_the_users_code(caught.value.__traceback__, users_only=True)
        assert [frame.name for frame in traceback.extract_tb(shown)] == [
            "test_tfmws_frames_are_shown_only_if_the_error_is_its_own"
        ]

    def test_the_last_line_has_the_whole_message_of_an_error_of_several_lines(self, run):
        result = run("worker 0=wait", "worker 1=fail_in_a_layer")
        assert last_line(result).endswith(
            ": ValueError: expected 3 features, received 4 (exit status 1)"
        )

    def test_a_directory_that_each_worker_makes(self, run):
        """The worker that comes second fails."""
        result = run("worker 0=make_folder", "worker 1=make_folder")
        assert result.status == 1
        assert "FileExistsError: [Errno 17] File exists: " in last_line(result)
        hint = (
            "Every worker runs the whole script, in each attempt: os.makedirs(..., exist_ok=True)"
        )
        assert hint in result.output

    @pytest.mark.parametrize("is_chief", [False, True])
    def test_a_file_that_only_the_chief_has_written(self, monkeypatch, is_chief):
        monkeypatch.setattr(recorded_errors, "_files_of_chief", set())
        checkpoint = keras.callbacks.ModelCheckpoint("runs/093107/{epoch}.keras")
        log = roles.ChiefOnly(keras.callbacks.CSVLogger("runs/093107.csv"))
        roles.for_task([checkpoint, log], is_chief, workers=2)
        errors = [
            ValueError("File not found: filepath=runs/093107/2.keras."),
            FileNotFoundError(2, "No such file or directory", "runs/093107.csv"),
            FileNotFoundError(2, "No such file or directory", "data.csv"),
            ValueError("runs/093107.csv has a bad line"),
        ]
        hints = ["write files on the chief only" in task_program._hint(e) for e in errors]
        assert hints == [not is_chief, not is_chief, False, False]

    @pytest.mark.parametrize("peer", ["wait", "stubborn"])
    def test_other_tasks_are_ended(self, run, peer):
        result = run(f"worker 0={peer}", "worker 1=fail", f"worker 2={peer}", workers=3)
        assert result.status == 1
        assert "worker 1 failed" in last_line(result)

    @pytest.mark.parametrize(
        ("first", "second"),
        [
            ("echo_last", "fail_and_hang"),  # the one to blame told of it, and is still dying
            ("echo", "fail_last"),  # its echo was heard before it spoke
            ("echo_last", "fail"),
        ],
    )
    def test_root_cause_is_named_not_a_secondary_error(self, run, first, second):
        result = run(f"worker 0={first}", f"worker 1={second}")
        assert result.status == 1
        assert re.match("tfmw: worker 1 failed (first, )?", last_line(result))
        assert "ValueError: bad batch" in last_line(result)
        assert "SIG" not in last_line(result)  # a task that we ended had no such end of its own
        if second != "fail":  # then the echo may come too late to be heard
            assert "tfmw: worker 0 failed too: RuntimeError: training failed" in result.output

    def test_secondary_error_is_named_if_there_is_no_other(self, run):
        result = run("worker 0=wait", "worker 1=echo")
        assert "worker 1 failed after" in last_line(result)
        assert "RuntimeError: training failed" in last_line(result)

    def test_dead_task_is_the_root_cause_of_a_secondary_error(self, run):
        result = run("worker 0=echo", "worker 1=kill_last")
        assert "worker 1 failed" in last_line(result)

    def test_a_relative_log_directory_of_a_script_that_changes_its_own(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        program = [PROGRAM, "worker 0=wait", "worker 1=fail_elsewhere"]
        result = launch_tasks(program, log_dir="logs", env=NO_INIT)
        assert result.failures[0].error == "ValueError: bad batch"

    def test_a_task_that_caught_its_error(self, run):
        result = run("worker 0=echo_last", "worker 1=catch")
        assert last_line(result).endswith(
            "ValueError: bad batch (caught by the program, which ended with status 0)"
        )

    def test_a_killed_task(self, run):
        result = run("worker 0=wait", "worker 1=kill")
        assert result.status == 1
        assert "worker 1 failed" in last_line(result)
        assert "SIGKILL" in last_line(result)
        assert "memory" in last_line(result)
        assert (
            "tfmw: with --max-restarts 3 a new task would have taken its place\n" in result.output
        )

    @pytest.mark.parametrize(
        ("action", "options", "said"),
        [
            ("kill", ["--backup-dir", "backups"], "; the same command resumes from the newest"),
            ("fail", [], None),
            ("kill", ["--max-restarts", "1"], None),
        ],
    )
    def test_a_run_without_restarts_says_what_they_would_do(self, run, action, options, said):
        result = run("worker 0=wait", f"worker 1={action}", options=options)
        assert result.status == 1
        found = re.search("would have taken its place(.*)", result.output)
        assert (found and found[1].startswith(said)) if said else found is None

    @pytest.mark.parametrize(
        ("action", "words"), [("leave_3", "exit status 3"), ("leave_words", "no data here")]
    )
    def test_task_that_exits_with_a_status(self, run, action, words):
        result = run("worker 0=wait", f"worker 1={action}")
        assert result.status == 1
        assert "worker 1 failed" in last_line(result)
        assert words in last_line(result)

    def test_wrong_usage_is_one_sentence_and_status_2(self, run):
        result = run("worker 0=wait", "worker 1=usage")
        assert result.status == 2
        sentence = "the model is not compiled; call compile first."
        assert result.log("worker 1") == f"tfmw: {sentence}\n"
        assert last_line(result).endswith(f": {sentence} (exit status 2)")
        assert "Traceback" not in result.output

    def test_an_error_of_all_workers_is_printed_once(self, run):
        result = run("worker 0=usage_too", "worker 1=usage")
        assert result.status == 2
        sentence = "the model is not compiled; call compile first."
        assert result.output.count(sentence) == 1
        assert re.fullmatch(
            rf"tfmw: both workers failed after \d+\.\d s: {sentence} \(exit status 2\)",
            last_line(result),
        )
        assert result.log("worker 0") == result.log("worker 1") == f"tfmw: {sentence}\n"

    def test_a_parameter_server_that_dies_ends_the_run(self, run):
        result = run("chief=wait", "worker 0=wait", "ps 0=kill", workers=1, ps=1)
        assert result.status == 1
        assert "ps 0 failed" in last_line(result)

    def test_serving_tasks_that_stay_are_no_failures(self, tmp_path):
        result = launch_tasks(
            [PROGRAM, "worker 0=wait", "ps 0=stubborn"],
            workers=1,
            ps=1,
            env={
                **NO_INIT,
                "TFMW_RESULT": str(tmp_path),
                "PYTHONPATH": str(PROGRAMS.parent.parent),
            },
            stdout=io.StringIO(),
            farewell_s=0.2,
        )
        assert (result.status, result.failures) == (0, ())
        assert result.tasks["ps 0"] == -signal.SIGKILL


# ---- signals, and the launcher's own end -------------------------------------------------------


@pytest.fixture
def waiting(tmp_path: Path) -> Iterator[Any]:
    """A run whose tasks wait: (launcher, what it printed, the pids of all its processes)."""
    flags = ["worker 0=parent", "worker 1=stubborn"]
    command = ["run", "--workers", "2", "--log-dir", str(tmp_path), PROGRAM, *flags]
    with tfmw_command(*command, env=NO_INIT) as launcher:
        assert launcher.stdout
        seen = ""
        while seen.count("ready") < 2 or seen.count("child") < 2:
            line = launcher.stdout.readline()
            assert line, f"the run ended:\n{seen}"
            seen += line
        environ = Path(f"/proc/{launcher.pid}/environ").read_bytes().decode()
        mark = re.search(rf"{MARK}=(\w+)", environ)
        assert mark
        yield launcher, [pid for pid in marked(mark[1]) if pid != launcher.pid]


class TestEnd:
    @pytest.mark.parametrize(
        ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
    )
    def test_a_signal_ends_every_process(self, waiting, number, status):
        launcher, pids = waiting
        assert len(pids) == 5  # with the reaper, see `_spawn`
        launcher.send_signal(number)
        output, _ = launcher.communicate(timeout=600)
        assert launcher.returncode == status
        assert number.name in output.splitlines()[-1]
        assert wait_gone(pids, 0) == []

    def test_a_second_signal_does_not_wait_for_the_grace(self, tmp_path):
        class Output(io.StringIO):
            def write(self, text: str) -> int:
                before = self.getvalue().count("ready")
                written = super().write(text)
                if before < 2 <= self.getvalue().count("ready"):
                    signal.raise_signal(signal.SIGINT)
                    signal.raise_signal(signal.SIGTERM)
                return written

        result = launch_tasks(
            [PROGRAM, "worker 0=stubborn", "worker 1=stubborn"],
            workers=2,
            log_dir=tmp_path,
            env=NO_INIT,
            stdout=Output(),
            grace_s=1e4,
        )
        assert result.status == 130

    def test_row_15_no_process_outlives_a_launcher_that_is_killed(self, waiting):
        launcher, pids = waiting
        assert len(pids) == 5  # a task's own children, which asked for nothing, and the reaper too
        launcher.kill()
        launcher.wait()
        assert wait_gone(pids, 60) == []

    def test_no_files_outlive_a_caller_that_is_killed(self, tmp_path):
        """A notebook's kernel may be killed; the folder of fit is large, as it has backups."""
        script = (
            "import os, signal, tfmw\nfrom tfmw.launcher.run import launch\n"
            "os.mkdir(folder := os.environ['TMPDIR'] + '/tfmw-fit-1')\n"
            "launch(os.kill, (os.getpid(), signal.SIGKILL), 1, scratch=folder)\n"
        )
        mark = os.urandom(8).hex()
        env = {**os.environ, **NO_INIT, "PYTHONPATH": PYTHONPATH, "TMPDIR": str(tmp_path)}
        done = subprocess.run([sys.executable, "-c", script], env={**env, MARK: mark})
        assert done.returncode == -signal.SIGKILL
        assert wait_gone(list(marked(mark)), 30) == []
        assert list(tmp_path.iterdir()) == []

    def test_children_that_are_no_tasks_are_reaped(self):
        ended = [subprocess.Popen(["true"]) for _ in range(2)]
        pids = [child.pid for child in ended]
        for child in ended:
            os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
            child.returncode = 0  # it is waited for here
        reap_orphans(pids[:1])
        assert os.waitpid(pids[0], os.WNOHANG) == (pids[0], 0)
        with pytest.raises(ChildProcessError):
            os.waitpid(pids[1], os.WNOHANG)

    def test_closed_output_ends_the_run(self, tmp_path):
        command = ["run", "--workers", "2", "--log-dir", str(tmp_path), PROGRAM, "worker 1=babble"]
        env = {**NO_INIT, "TFMW_RESULT": str(tmp_path)}
        with tfmw_command(*command, env=env) as launcher:
            assert launcher.stdout
            launcher.stdout.readline()
            launcher.stdout.close()
            assert launcher.wait(timeout=600) == 128 + signal.SIGPIPE

    def test_a_run_outlives_its_terminal(self, tmp_path):
        """The run continues as after `disown`: no SIGHUP arrives, and output fails."""
        gates = [tmp_path / f"gate of worker {i}" for i in (0, 1)]
        for gate in gates:
            os.mkfifo(gate)
        script = tmp_path / "train.py"
        script.write_text(
            "import os\ntask = os.environ['TFMW_TASK']\n"
            "print('before', flush=True)\nopen(f'gate of {task}').read()\n"
            "print('after', flush=True)\nopen(task, 'w')\n"
        )
        ours, theirs = pty.openpty()
        command = [sys.executable, "-m", "tfmw", "run", "--workers=2", "--log-dir=logs", script]
        launcher = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs, cwd=tmp_path,
            env={**os.environ, **NO_INIT, "PYTHONPATH": PYTHONPATH}, start_new_session=True,
        )  # fmt: skip
        os.close(theirs)
        seen = b""
        while seen.count(b"before") < 2:
            seen += os.read(ours, 1 << 16)
        os.close(ours)
        for gate in gates:
            gate.write_text("")
        assert launcher.wait() == 0
        logs = [log.read_text().split() for log in tmp_path.glob("logs/*/attempt_0/*/output.log")]
        assert logs == [["before", "after"]] * 2
        assert all((tmp_path / f"worker {i}").exists() for i in (0, 1))

    @pytest.mark.parametrize(
        ("shell", "status", "words"),
        [
            (
                "cd gone && rmdir ../gone && exec {command}",
                2,
                "working directory of this process is",
            ),
            ("exec {command} >&-", 2, "standard output is closed"),
            ("exec {command} > /dev/full", 0, "output could not be written (No space left"),
            ("{command} | head -c 0", 0, ""),
        ],
    )
    def test_a_place_that_is_gone_is_one_sentence(self, tmp_path, shell, status, words):
        (tmp_path / "gone").mkdir()
        command = f"{sys.executable} -m tfmw run --workers 2 {PROGRAM}"
        env = {**os.environ, **NO_INIT, "PYTHONPATH": PYTHONPATH, "TFMW_RESULT": str(tmp_path)}
        done = subprocess.run(
            shell.format(command=command), shell=True, cwd=tmp_path, env=env,
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert done.returncode == status, done.stderr
        said = [line for line in done.stderr.splitlines() if " network" not in line]
        assert [words in line for line in said if "SIGPIPE" not in line] == [True] * bool(words)

    def test_files_that_cannot_be_written_are_one_sentence(self, tmp_path, monkeypatch):
        """The disk is full by the time the tasks start."""

        def full(path: Path) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

        monkeypatch.setattr(process, "make_file", full)
        with pytest.raises(UsageError, match=f"files in {tmp_path}.* cannot be written.*No space"):
            launch_tasks([PROGRAM, "worker 0=wait"], log_dir=tmp_path, env=NO_INIT)

    def test_no_temporary_directory_is_one_sentence(self, tmp_path, monkeypatch):
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
        with pytest.raises(
            UsageError, match=r"no temporary folder can be made \(No such .* TMPDIR"
        ):
            launch_tasks([PROGRAM], env=NO_INIT)

    def test_a_call_needs_no_temporary_directory_beside_that_of_logs(self, tmp_path, monkeypatch):
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
        settings = {"log_dir": tmp_path / "logs", "env": NO_INIT, "stdout": io.StringIO()}
        assert tfmw.launch(launch_functions.rank_and, [7], 1, **settings) == [(0, 7)]

    def test_a_child_that_outlived_its_launcher_ends_at_once(self):
        env = {**os.environ, **NO_INIT, "TFMW_LAUNCHER_PID": str(os.getpid() + 1)}
        task = Path(tfmw.__file__).parent / "launcher/task.py"
        process = subprocess.run([sys.executable, str(task), "script", PROGRAM], env=env)
        assert process.returncode == -signal.SIGKILL


# ---- output ------------------------------------------------------------------------------------


class TestOutput:
    def test_live_progress_bar_on_a_terminal(self, tmp_path):
        ours, theirs = pty.openpty()
        flags = ["worker 0=progress", "worker 1=interrupt"]
        command = ["run", "--workers", "2", "--isolate", "off", PROGRAM, *flags]
        env = {**NO_INIT, "TFMW_RESULT": str(tmp_path)}
        with tfmw_command(*command, env=env, stdout=theirs, stderr=theirs) as launcher:
            os.close(theirs)
            shown = self.until(ours, b"\x1b[0m.")
            (tmp_path / "in_the_middle").touch()
            shown += self.until(ours, b"from the middle")
            (tmp_path / "second_half").touch()
            shown += self.until(ours, None)
            os.close(ours)
            assert launcher.wait(timeout=600) == 0
        text = shown.decode().replace("\r\n", "\n")
        bar = "\r1/2 \x1b[32m=\x1b[0m."
        assert text == (
            f"a terminal: True 1\n{bar}"
            f"\r{' ' * 6}\r[worker 1] hello from the middle\n{bar[1:]}"
            "\b\b\b\b\b\b\r2/2 ==\n"
        )

    @staticmethod
    def until(terminal: int, words: bytes | None) -> bytes:
        """Output on the terminal up to these words, or up to its end."""
        shown = b""
        while words is None or words not in shown:
            try:
                shown += os.read(terminal, 1 << 16)
            except OSError:
                break
        return shown

    def test_streams_that_are_ready_without_bytes_keep_nobody_waiting(self, tmp_path, monkeypatch):
        out, ends = io.StringIO(), [pty.openpty(), os.pipe()]
        pump = OutputPump(Display(out, live="worker 0"))
        for index, (local, _) in enumerate(ends):
            task = process.Task("worker", index, tmp_path)
            task.stream = local
            pump.add(task)
        keys = [(key, 1) for key in pump._selector.get_map().values()]
        monkeypatch.setattr(pump._selector, "select", lambda timeout_s: keys)
        for text in (b"hello", b" from worker 1", b"\n"):
            pump.pump(0.0)
            os.write(ends[1][1], text)
        pump.pump(0.0)
        assert out.getvalue() == "[worker 1] hello from worker 1\n"
        pump.close()
        for end in [*ends[0], *ends[1]]:
            os.close(end)

    @pytest.mark.parametrize(
        ("line", "shown"),
        [
            ("hello", "hello"),
            ("\r1/2\b\b\b\r2/2", "2/2"),
            ("1/2\r", "1/2"),
            ("\b\b\b\r1/9 [=>..]\b\b", "1/9 [=>..]"),
            ("", ""),
        ],
    )
    def test_collapse_of_overwritten_lines(self, line, shown):
        assert collapse(line) == shown

    def test_lines_wait_until_they_are_complete(self):
        out = io.StringIO()
        display = Display(out)
        for task, data in (
            ("a", b"1\n2"),
            ("b", b"x\n"),
            ("a", b"2\r\n3"),
            ("b", "é".encode()[:1]),
        ):
            display.feed(task, data)
        display.feed("b", "é".encode()[1:])
        display.feed("a", b"", final=True)
        display.feed("b", b"", final=True)
        assert out.getvalue() == "[a] 1\n[b] x\n[a] 22\n[a] 3\n[b] é\n"

    def test_one_error_of_several_tasks_is_printed_once(self):
        out = io.StringIO()
        display = Display(out)
        error = ["Traceback (most recent call last):", '  File "a.py", line 1', "KeyError: 3"]
        text = "".join(f"{line}\n" for line in error).encode()
        display.feed("b", b"begin\n" + text[:50])
        display.feed("b", text[50:] + b"end\n")
        for task, data in (
            ("c", text),
            ("d", text[:40]),
            ("e", text + b"x\n"),
            ("f", b"KeyError: 3\n"),
        ):
            display.feed(task, data)
            display.feed(task, b"", final=True)
        lines = out.getvalue().splitlines()
        assert lines[:5] == [f"[b] {line}" for line in ("begin", *error, "end")]
        assert lines[5] == "[c] the same error as b"
        assert lines[6:8] == [f"[d] {error[0]}", "[d]   Fil"]
        assert lines[8:12] == [f"[e] {line}" for line in (*error, "x")]
        assert lines[12:] == ["[f] KeyError: 3"]
        assert display.has_shown(error)
        assert not display.has_shown([error[0], "KeyError: 4"])

    @pytest.mark.parametrize("first", ["a", "b"])
    def test_one_error_is_printed_once_beside_a_progress_bar(self, first):
        out = io.StringIO()
        display = Display(out, live="a")
        error = 'Traceback (most recent call last):\n  File "a.py", line 1\nKeyError: 3\n'
        display.feed("a", b" 1/9\r")
        for task in (first, "b" if first == "a" else "a"):
            display.feed(task, error[:60].encode())
            display.feed(task, error[60:].encode())
            display.feed(task, b"", final=True)
        assert out.getvalue().count("KeyError: 3") == out.getvalue().count("Traceback") == 1
        assert out.getvalue().count(f"the same error as {first}") == 1
        assert out.getvalue().startswith(" 1/9\r")

    def test_endless_line_is_printed_in_parts(self):
        out = io.StringIO()
        display = Display(out)
        for _ in range(100):
            display.feed("a", b"x" * 1000)
        assert out.getvalue().startswith("[a] xxx")

    def test_log_of_lines_that_are_overwritten(self, tmp_path):
        task = process.Task("worker", 0, tmp_path)
        with open(task.log.parent.parent / "log", "w+b", buffering=0) as log:
            task._log = log
            shown = []
            for data in (
                b"a\n 1/9",
                b"\b\b\b\r 2/9",
                b"\r",
                b"\nb\r\n",
                b"\bkept\n",
                b"x" * 70_000,
                b"y\n",
            ):
                task._write_log(data)
                log.seek(0)
                shown.append(log.read())
        lines = b"a\n 2/9\nb\nkept\n"
        assert shown[:3] == [b"a\n 1/9", b"a\n 2/9", b"a\n 2/9"]
        assert shown[3:5] == [lines[:9], lines]
        assert shown[5:] == [lines + b"x" * 70_000, lines + b"x" * 70_000 + b"y\n"]

    def test_output_continues_after_a_disk_was_full(self, capsys):
        class Disk(io.StringIO):
            full = False

            def flush(self) -> None:
                if self.full:
                    raise OSError(errno.ENOSPC, "No space left on device")

        display = Display(disk := Disk())
        display.close()
        assert capsys.readouterr().err == ""
        display.line("one")
        disk.full = True
        display.line("two")
        disk.full = False
        display.line("three")
        assert not display.broken
        assert disk.getvalue().split()[-1] == "three"
        display.close()
        assert "could not be written (No space left on device)" in capsys.readouterr().err

    def test_stream_that_cannot_encode_a_character(self):
        raw = io.BytesIO()
        display = Display(io.TextIOWrapper(raw, encoding="ascii"))
        display.feed("a", "━ 1/2\n".encode())
        assert raw.getvalue() == b"[a] ? 1/2\n"


# ---- ports, statuses, records ------------------------------------------------------------------


def test_ports_are_held_until_the_end_of_the_reservation():
    with reserved_ports(8) as ports:
        assert len(set(ports)) == 8
        for port in ports:
            with socket.socket() as other, pytest.raises(OSError, match="in use"):
                other.bind(("127.0.0.1", port))
    with socket.socket() as other:
        other.bind(("127.0.0.1", ports[0]))


@pytest.mark.parametrize(
    ("status", "words"),
    [(3, "exit status 3"), (-15, "SIGTERM"), (-11, "SIGSEGV (a crash"), (-99, "signal 99")],
)
def test_describe_status(status, words):
    assert describe_status(status).startswith(words)


class TestRecords:
    @pytest.fixture
    def path(self, tmp_path, monkeypatch):
        monkeypatch.setenv("TFMW_ERROR_FILE", str(tmp_path / "error.json"))
        return tmp_path / "error.json"

    def test_nothing_without_a_launcher(self, tmp_path, monkeypatch):
        monkeypatch.delenv("TFMW_ERROR_FILE", raising=False)
        monkeypatch.chdir(tmp_path)
        record_error(ValueError("x"))
        assert list(tmp_path.iterdir()) == []

    def test_an_error_raised_from_another_keeps_its_time(self, path):
        first = ValueError("first")
        record_error(first)
        before = json.loads(path.read_text())
        second = RuntimeError("second")
        second.__cause__ = first
        record_error(second, fatal=True)
        after = json.loads(path.read_text())
        assert (after["type"], after["message"], after["fatal"]) == ("RuntimeError", "second", True)
        assert after["monotonic"] == before["monotonic"]
        record_error(KeyError("unrelated"))
        assert json.loads(path.read_text())["monotonic"] > before["monotonic"]

    def test_error_reported_by_a_peer_is_secondary(self, path):
        for message, secondary in (
            ("Error reported from /job:worker/task:1: ValueError: bad batch", True),
            ("Graph execution error", False),
        ):
            record_error(RuntimeError(message))
            assert json.loads(path.read_text())["secondary"] is secondary

    def test_the_name_of_a_file_that_is_not_utf_8(self, path):
        record_error(UsageError(f"cannot read {os.fsdecode(b'caf' + bytes([0xE9]))}"))
        record = json.loads(path.read_text())
        assert record["message"] == r"cannot read caf\udce9"
        assert record["traceback"].encode().endswith(rb"cannot read caf\udce9" + b"\n")

    def test_missing_folder_is_reported_without_an_error(self, path, monkeypatch, capsys):
        monkeypatch.setenv("TFMW_ERROR_FILE", str(path.parent / "gone" / "error.json"))
        record_error(ValueError("x"))
        assert "could not write" in capsys.readouterr().err


# ---- functions ---------------------------------------------------------------------------------


def launch(fn: Any, *args: Any, workers: int = 2) -> list[Any]:
    return tfmw.launch(fn, args, workers, env=NO_INIT, stdout=io.StringIO())


class TestFunctions:
    def test_results_are_in_order(self):
        value = {"large": b"x" * 300_000}  # more than a pipe holds
        assert launch(launch_functions.rank_and, value, workers=3) == [
            (0, value),
            (1, value),
            (2, value),
        ]

    def test_exception_is_raised_with_the_workers_traceback(self):
        with pytest.raises(KeyError, match="lost") as caught:
            launch(launch_functions.fail_on_1, KeyError("lost"))
        cause = caught.value.__cause__
        assert isinstance(cause, TaskFailed)
        assert "worker 1 failed" in str(cause)
        assert "in fail_on_1\n    raise error\nKeyError: 'lost'" in str(cause)

    def test_exception_that_cannot_be_pickled(self):
        error = pickle.dumps(launch_functions.Awkward(1, 2))
        with pytest.raises(TypeError):
            pickle.loads(error)
        with pytest.raises(TaskFailed, match="Awkward: 1 and 2"):
            launch(launch_functions.fail_awkwardly_on_1)

    def test_a_worker_that_dies(self):
        with pytest.raises(TaskFailed, match=r"worker 1 failed after .*SIGKILL"):
            launch(launch_functions.die_on_1)

    def test_worker_that_exits_without_a_result(self):
        with pytest.raises(TaskFailed, match="before the function returned"):
            launch(launch_functions.leave)

    def test_a_local_function_needs_cloudpickle(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "cloudpickle", None)
        with pytest.raises(UsageError, match="install cloudpickle"):
            launch(lambda: 1)

    def test_local_function_is_pickled_by_cloudpickle(self):
        offset = 40
        assert launch(lambda x: x + offset, 2) == [42, 42]

    def test_arguments_that_cannot_be_pickled(self):
        with pytest.raises(UsageError, match="can't send"):
            launch(launch_functions.rank_and, threading.Lock())

    def test_launch_inside_a_cluster_is_refused(self, monkeypatch):
        monkeypatch.setenv("TF_CONFIG", '{"cluster": {}}')
        with pytest.raises(UsageError, match=r"TF_CONFIG is already set to \{\"cluster\": \{\}\}"):
            launch(launch_functions.rank_and, 1)

    @pytest.mark.parametrize("workers", [0, -1, 1.5, "2", True])
    def test_a_wrong_number_of_workers(self, workers):
        with pytest.raises(UsageError, match="at least 1"):
            launch(launch_functions.rank_and, 1, workers=workers)

    def test_notes_are_printed_once_per_process(self, monkeypatch, capfd):
        monkeypatch.setattr("tfmw.launcher.attempts.choose_network", lambda *_: (None, "a note"))
        for _ in range(2):
            launch(launch_functions.rank_and, 1, workers=1)
        assert capfd.readouterr().err.count("tfmw: a note") == 1

    def test_signal_handlers_are_restored(self):
        before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
        launch(launch_functions.rank_and, 1, workers=1)
        assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


@pytest.mark.process
@pytest.mark.nightly
def test_fork_server_is_kept_for_the_next_run():
    def kept(**env: str) -> list[int]:
        tfmw.launch(launch_functions.rank_and, [1], 2, env=ONE_THREAD | env, stdout=io.StringIO())
        return template_and_copies(children(os.getpid()))[0]

    (template,) = kept()
    copies = (launch_functions.is_copy_of, [template], 2)
    assert tfmw.launch(*copies, env=ONE_THREAD, stdout=io.StringIO()) == [True, True]
    assert kept() == [template]
    one, other = tfmw.launch(launch_functions.draw, [], 2, env=ONE_THREAD, stdout=io.StringIO())
    assert all(a != b for a, b in zip(one, other, strict=True)), "copies draw the same numbers"
    (another,) = kept(TF_ENABLE_ONEDNN_OPTS="0")  # which TensorFlow reads when it is imported
    assert another != template
    os.kill(another, signal.SIGKILL)
    os.waitid(os.P_PID, another, os.WEXITED | os.WNOWAIT)
    assert len(kept(TF_ENABLE_ONEDNN_OPTS="0")) == 1


def test_a_forked_task_can_be_ended_from_its_first_moment(tmp_path):
    """The task has its group already; a launcher that ends it at once would wait forever."""
    (tmp_path / "tensorflow.py").write_text("raise ImportError('not needed here')\n")
    env = {**os.environ, "PYTHONPATH": str(tmp_path), "TFMW_LAUNCHER_PID": str(os.getpid())}
    server = fork_server.ForkServer([*TASK_COMMAND, "fork-server"], ["script"], env)
    try:
        server.wait([], 60)
        for _ in range(20):
            with open(os.devnull, "r+b") as nothing:
                streams = dict.fromkeys(range(3), nothing.fileno())
                pid = server.fork(["script", "none.py"], env, streams)
            assert pid is not None
            os.killpg(pid, signal.SIGKILL)
            assert os.waitpid(pid, 0) == (pid, signal.SIGKILL)
    finally:
        server.close()


def test_threads_share_a_fork_server(tmp_path):
    """Each gets the task that it asked for, as a child of this process."""
    (tmp_path / "tensorflow.py").write_text("raise ImportError('not needed here')\n")
    (tmp_path / "ends.py").write_text("import sys\nsys.exit(int(sys.argv[1]))\n")
    env = {**os.environ, **NO_INIT, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    env["TFMW_LAUNCHER_PID"] = str(os.getpid())
    server = fork_server.ForkServer([*TASK_COMMAND, "fork-server"], ["script"], env)

    def status_of_a_task(status: int) -> int | None:
        server.wait([], 60)
        with open(os.devnull, "r+b") as nothing:
            streams = dict.fromkeys(range(3), nothing.fileno())
            command = ["script", str(tmp_path / "ends.py"), str(status)]
            pid = server.fork(command, env, streams)
        return pid and os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    try:
        with ThreadPoolExecutor(8) as threads:
            assert list(threads.map(status_of_a_task, range(40))) == list(range(40))
    finally:
        server.close()


ENDS = """
import atexit, ctypes, json, sys, threading, time

class Finalized:
    def __del__(self):
        print("finalized")

file = open(sys.path[0] + "/held_by_a_cycle", "w")
file.write("written")
json.of_a_task = open(sys.path[0] + "/held_by_an_earlier_module", "w")
json.of_a_task.write("written")
one = Finalized()

def cycle():
    return file, one, cycle

atexit.register(print, "at exit")
threading.Thread(target=lambda: (time.sleep(0.5), print("thread"))).start()
print("script")
sys.exit(ENDS_WITH)
"""


@pytest.mark.parametrize(("code", "status", "last"), [("3", 3, ""), ("'why'", 1, "why")])
def test_a_forked_task_ends_as_other_processes_do(tmp_path, code, status, last):
    (tmp_path / "tensorflow.py").write_text("raise ImportError('not needed here')\n")
    (tmp_path / "ends.py").write_text(ENDS.replace("ENDS_WITH", code))
    env = {**os.environ, **NO_INIT, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    env["TFMW_LAUNCHER_PID"] = str(os.getpid())
    server = fork_server.ForkServer([*TASK_COMMAND, "fork-server"], ["script"], env)
    try:
        server.wait([], 60)
        with open(os.devnull, "rb") as nothing, open(tmp_path / "output", "w+") as output:
            streams = {0: nothing.fileno(), 1: output.fileno(), 2: output.fileno()}
            pid = server.fork(["script", str(tmp_path / "ends.py")], env, streams)
            assert pid is not None
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == status
            output.seek(0)
            lines = output.read().split()
    finally:
        server.close()
    assert lines == ["script", *[last] * bool(last), "thread", "at", "exit", "finalized"]
    assert (tmp_path / "held_by_a_cycle").read_text() == "written"
    assert (tmp_path / "held_by_an_earlier_module").read_text() == "written"


def test_forked_tasks_draw_different_random_numbers():
    drawn = []
    for _ in range(2):
        np.random.seed(1)
        fork_server._reseed()
        drawn.append(np.random.rand())
    assert drawn[0] != drawn[1]


# Elsewhere TensorFlow's own choice stays.
ASKED = "1" if platform.machine() == "x86_64" else None

WHICH_KERNELS = """
import os
print("asked:", os.environ.get("TF_ENABLE_ONEDNN_OPTS"))
if os.environ["LOOK"]:
    from tensorflow.python.util import _pywrap_util_port
    print("oneDNN:", _pywrap_util_port.IsMklEnabled())
"""


@pytest.mark.process
@pytest.mark.parametrize(
    ("options", "chosen", "expected"),
    [
        pytest.param(
            *(["--workers=1"], {"LOOK": "1"}, [f"asked: {ASKED}", f"oneDNN: {ASKED == '1'}"]),
            marks=pytest.mark.nightly,  # with an import of TensorFlow
        ),
        ([], {"LOOK": ""}, [f"asked: {ASKED}"]),
        (["--workers=1"], {"LOOK": "", "TF_ENABLE_ONEDNN_OPTS": "0"}, ["asked: 0"]),
    ],
)
def test_tasks_compute_with_onednn_unless_disabled(
    tmp_path: Path, options: list[str], chosen: dict[str, str], expected: list[str]
):
    (tmp_path / "which.py").write_text(WHICH_KERNELS)
    env = {**NO_INIT, **chosen}
    with tfmw_command("run", *options, str(tmp_path / "which.py"), env=env) as process:
        output = process.communicate(timeout=600)[0]
    assert process.returncode == 0, output
    said = [line.rpartition("] ")[2] for line in output.splitlines()]
    assert [line for line in said if line.startswith(("asked", "oneDNN"))] == expected
