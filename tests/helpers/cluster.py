"""Real clusters for tests, through `tfmw run`.

    run = run_cluster("sync_fit.py", workers=2)     # tests/programs/sync_fit.py
    assert run[0]["weights"] == run[1]["weights"]   # what each worker gave to `_result.write`

A plain function, so that a module-scoped fixture can call it; `run_cluster` is a fixture too.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.helpers.template import Run, Template
from tfmw.launcher.environment import task_environment

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ROOT / "tests/programs"
LEAN = ROOT / "tests/helpers/lean"
PYTHONPATH = f"{ROOT}{os.pathsep}{LEAN}"

MARK = "TFMW_TEST_RUN"  # in the environment of every process of a run, children's children too

# Tests share few cores: a task that starts a pool per core slows all others down.
ONE_THREAD = {
    "TF_NUM_INTRAOP_THREADS": "1",
    "TF_NUM_INTEROP_THREADS": "1",
    "OMP_NUM_THREADS": "1",
}

# Variables that have no effect in a process whose imports are done.
READ_AT_IMPORT = ("KERAS_", "LD_", "OMP_", "PYTHON", "TF_", "XLA_")


class ClusterRun(list[dict[str, Any]]):
    """Results of the workers, in order, and the end of the run.

    Attributes:
        status: exit status of `tfmw run`.
        output: everything that it printed.
        by_task: the result of each task, by name: "chief", "worker 0", "ps 0".
        log_dir: the folder of the attempt, with one folder per task.
        seconds: how long the run took.
    """

    def __init__(
        self, status: int, output: str, by_task: dict[str, Any], log_dir: Path, seconds: float
    ) -> None:
        workers = sum(name.startswith("worker ") for name in by_task)
        super().__init__(by_task[f"worker {i}"] for i in range(workers) if f"worker {i}" in by_task)
        self.status = status
        self.output = output
        self.by_task = by_task
        self.log_dir = log_dir
        self.seconds = seconds

    @property
    def chief(self) -> dict[str, Any]:
        """Result of the chief: the task of that name, or worker 0."""
        found: dict[str, Any] = self.by_task.get("chief") or self.by_task["worker 0"]
        return found

    def log(self, task: str) -> str:
        """Output of one task."""
        return (self.log_dir / task.replace(" ", "_") / "output.log").read_text()


def run_cluster(
    program: str | os.PathLike[str],
    *args: str,
    workers: int = 2,
    ps: int = 0,
    evaluator: bool = False,
    timeout_s: float = 1000,
    env: Mapping[str, str] | None = None,
    status: int | None = 0,
    options: Sequence[str] = (),
) -> ClusterRun:
    """Runs tests/programs/<program> in a fresh local cluster.

    Args:
        program: a file under tests/programs, with or without "programs/", or any other path.
        *args: its flags.
        workers: number of workers.
        ps: number of parameter servers; with any, one more task, the chief.
        evaluator: whether to add an evaluator.
        timeout_s: seconds until the run is ended and the test fails.
        env: added to the environment.
        status: the exit status that is expected; None accepts any.
        options: more options of `tfmw run`.
    """
    # By default `tfmw run` forks no single task, and none that calls `tfmw.init` by itself: each
    # would import TensorFlow, which takes seven seconds of a core.
    options = ["--standby", "on", "--workers", str(workers), "--ps", str(ps), *options]
    options += ["--evaluator"] if evaluator else []
    path = PROGRAMS / Path(program).name
    path = path if path.exists() else Path(program)
    folder = Path(tempfile.mkdtemp(prefix="run-"))
    (folder / "results").mkdir()
    command = ["run", *options, "--log-dir", str(folder / "logs"), str(path), *args]
    begin = time.monotonic()
    environ = _environment({"TFMW_RESULT": str(folder / "results"), **(env or {})})
    returncode, output = _run(["tfmw", *command], environ, timeout_s)
    seconds = time.monotonic() - begin
    assert status is None or returncode == status, f"status {returncode}:\n{output}"
    by_task = {
        file.stem.replace("_", " "): json.loads(file.read_text())
        for file in sorted((folder / "results").glob("*.json"))
    }
    log_dir = next(iter((folder / "logs").glob("*/attempt_0")), folder / "logs")
    return ClusterRun(returncode, output, by_task, log_dir, seconds)


def run_command(
    *command: str | os.PathLike[str],
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    timeout_s: float = 400,
) -> tuple[int, str]:
    """Exit status and output of `tfmw ...`, `python -c CODE ...` or `python FILE ...`.

    It starts with TensorFlow and tfmw imported, which takes six seconds of a core otherwise.
    """
    environ = _environment(env or {})
    return _run([str(part) for part in command], environ, timeout_s, str(cwd or os.getcwd()))


def _run(
    command: list[str], environ: dict[str, str], timeout_s: float, cwd: str | None = None
) -> tuple[int, str]:
    """Its exit status and output; none of its processes is left."""
    changed = {name for name, _ in environ.items() ^ _environment({}).items()} - {"TF_CONFIG"}
    if any(name.startswith(READ_AT_IMPORT) for name in changed):
        assert command[0] == "tfmw", f"read when TensorFlow is imported: {changed}"
        with tfmw_command(*command[1:], env=environ, cwd=cwd) as process:
            try:
                output, _ = process.communicate(timeout=timeout_s)
            except subprocess.TimeoutExpired:
                process.terminate()
                output, _ = process.communicate()
                raise AssertionError(f"no end after {timeout_s} s:\n{output}") from None
        return process.returncode, output
    run = _template().start(command, environ, cwd or os.getcwd())
    printed = run.communicate(timeout_s)
    if printed is None:
        os.kill(run.pid, signal.SIGTERM)
        raise AssertionError(f"no end after {timeout_s} s:\n{run.communicate(60)}")
    status, left = run.wait()
    assert not left, f"processes survive the run: {left}"
    return status, printed


def forked(*command: str, env: Mapping[str, str] | None = None, network: str = "") -> Run:
    """`tfmw ...`, started as `run_cluster` does, in a network namespace if one is given."""
    return _template().start(["tfmw", *command], _environment(env or {}), os.getcwd(), network)


@contextlib.contextmanager
def forked_command(*command: str, env: Mapping[str, str] | None = None) -> Iterator[Run]:
    """`tfmw ...`, started as `run_cluster` does; the caller reads its lines, and waits for it."""
    run = forked(*command, env=env)
    try:
        yield run
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            os.kill(run.pid, signal.SIGKILL)  # its keeper ends the tasks
        raise


_one_at_a_time = threading.Lock()  # fixtures start runs in several threads


def _template() -> Template:
    with _one_at_a_time:
        return _only_template()


@functools.cache
def _only_template() -> Template:
    """Template of this process, with the launcher's settings for a fork server."""
    template = Template(task_environment(_environment({}), terminal=False))
    atexit.register(template.close)
    return template


def _environment(added: Mapping[str, str]) -> dict[str, str]:
    """Environment of a run: that of this process, with one thread for each pool."""
    environ = {k: v for k, v in os.environ.items() if k not in ("TF_CONFIG", "TFMW_TTY")}
    return environ | {**ONE_THREAD, "PYTHONPATH": PYTHONPATH, **added}


@contextlib.contextmanager
def tfmw_command(
    *command: str, env: Mapping[str, str] | None = None, **popen: Any
) -> Iterator[subprocess.Popen[str]]:
    """`python -m tfmw ...`, whose processes must all be gone at the end of the `with`."""
    mark = uuid.uuid4().hex
    environ = _environment({**(env or {}), MARK: mark})
    popen = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, **popen}
    process = subprocess.Popen(
        [sys.executable, "-m", "tfmw", *command], env=environ, text=True, **popen
    )
    try:
        yield process
        process.wait(timeout=30)
        if process.returncode == -signal.SIGKILL:
            wait_gone([*marked(mark)], 30)  # nobody waits for those that its death ends
        assert not (left := marked(mark)), f"processes survive the run: {left}"
    finally:
        process.kill()
        for pid in marked(mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
        if process.stdout:
            process.stdout.close()


def assert_examples_per_step(output: str, expected: float) -> None:
    """Compares the two rates in the last line of training that a chief has printed.

    They are rounded: to 0.1 steps and to 1 example.
    """
    *_, (steps, examples) = re.findall(r"train \| .* ([\d.]+) steps/s \| +([\d,]+) exam", output)
    rounding = 0.05 * expected + 0.5
    found = float(examples.replace(",", ""))
    assert abs(found - expected * float(steps)) <= rounding + 0.02 * found, (steps, examples)


def marked(mark: str) -> dict[int, str]:
    """The living processes with the mark in their environment: {pid: command line}."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes():
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                found[int(folder.name)] = command
    return found


def children(pid: int) -> list[int]:
    """Child processes of a process's main thread."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def template_and_copies(pids: Iterable[int]) -> tuple[list[int], list[int]]:
    """Templates among these processes, which print nowhere, and the copies that run tasks."""
    found: tuple[list[int], list[int]] = ([], [])
    for pid in pids:
        with contextlib.suppress(OSError):
            if b"\0fork-server\0" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found[os.readlink(f"/proc/{pid}/fd/1") != os.devnull].append(pid)
    return found


def wait_gone(pids: list[int], timeout_s: float) -> list[int]:
    """Waits for the end of processes that aren't our children; returns those that remain."""
    deadline = time.monotonic() + timeout_s
    left = []
    for pid in pids:
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            ready, _, _ = select.select([handle], [], [], max(0, deadline - time.monotonic()))
        finally:
            os.close(handle)
        left += [] if ready else [pid]
    return left
