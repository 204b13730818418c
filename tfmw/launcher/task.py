"""The main program of a task: joins the cluster, then runs the user's program.

    python .../tfmw/launcher/task.py script train.py --epochs 3
    python .../tfmw/launcher/task.py module package.train --epochs 3
    python .../tfmw/launcher/task.py call                   # a function: see `tfmw.launch`
    python .../tfmw/launcher/task.py fork-server 7 script ...  # see `fork_server`

The launcher starts this file by its path. So the process can first request to be killed with the
launcher, and it finds tfmw without a change of PYTHONPATH.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from types import TracebackType
from typing import NoReturn

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


def _die_with_the_launcher() -> None:
    """Asks Linux to send SIGKILL to this process when the launcher's thread ends.

    prctl(2), PR_SET_PDEATHSIG. If the launcher died before the call took effect, this process
    already has another parent.
    """
    launcher = os.environ.pop("TFMW_LAUNCHER_PID", None)
    if launcher is None or not sys.platform.startswith("linux"):
        return
    import ctypes

    pr_set_pdeathsig = 1
    ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(launcher):
        os.kill(os.getpid(), signal.SIGKILL)


def _enter_namespaces() -> None:
    """Enters the private network of the run (see `isolation`), while there is only one thread."""
    namespaces = os.environ.pop("TFMW_NAMESPACES", "")
    if namespaces:
        from tfmw.launcher import isolation

        isolation.enter([int(descriptor) for descriptor in namespaces.split(",")])


def _find_tfmw() -> None:
    """Replaces this file's folder in the search path by the package's parent folder."""
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [p for p in sys.path if os.path.abspath(p or os.curdir) != here]
    parent = os.path.dirname(os.path.dirname(here))
    if parent not in map(os.path.abspath, sys.path):
        sys.path.append(parent)


def _run(mode: str, program: str, args: list[str]) -> None:
    """Runs a script or a module, as Python does."""
    import runpy

    sys.argv = [program, *args]
    if mode == "module":
        sys.path.insert(0, os.getcwd())
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, os.path.dirname(os.path.realpath(program)))
        runpy.run_path(program, run_name="__main__")


def _write_stacks_on_request() -> None:
    """Installs a handler that writes stacks to a file, not to the log, for `tfmw stacks`."""
    import contextlib
    import faulthandler

    from tfmw.cluster.signals import STACKS, STACKS_FILE

    path = os.environ.get(STACKS_FILE, "")
    with contextlib.suppress(OSError):
        # The file stays open: the handler writes to its descriptor.
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        faulthandler.register(STACKS, file=file, all_threads=True)


def _end_without_launcher() -> None:
    """Prints the run's goodput on the chief, as a launcher does at the end of a run."""
    from tfmw.cluster import Cluster
    from tfmw.launcher.run_files import remove_files
    from tfmw.observe import goodput

    line = goodput.line({"": goodput.division()})
    if line is not None and Cluster.resolve(os.environ).is_chief:
        print(f"tfmw: {line}", file=sys.stderr)
    remove_files(os.environ)


def main(argv: list[str]) -> int:
    """Runs one task; returns its exit status. Errors are recorded for the launcher."""
    import faulthandler
    import importlib

    from tfmw.errors import PREEMPTED, UsageError
    from tfmw.launcher.call import receive
    from tfmw.observe import progress
    from tfmw.observe.recorded_errors import ERROR_FILE, is_secondary, record_error

    faulthandler.enable()
    # The launcher sends this signal to get the stacks of hung tasks.
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    _write_stacks_on_request()
    progress.report_progress(progress.UP)
    mode, *rest = argv
    try:
        run = receive() if mode == "call" else lambda: _run(mode, rest[0], rest[1:])
        if os.environ.get("TFMW_NO_INIT") != "1":
            cluster = importlib.import_module("tfmw.cluster.joining")  # imports TensorFlow
            cluster.init() if mode == "call" else cluster.join_for_script()
        progress.report_progress(progress.JOINED)
        run()
    except SystemExit as leaving:
        if leaving.code not in (None, 0, PREEMPTED):
            record_error(leaving, fatal=True)
        raise
    except UsageError as error:
        record_error(error, fatal=True)
        if joining := sys.modules.get("tfmw.cluster.membership"):  # this process may have joined
            joining.report_failure(error)
        if ERROR_FILE not in os.environ:  # otherwise the launcher prints it, once for all tasks
            print(f"tfmw: {error}", file=sys.stderr)
        return error.status
    except BaseException as error:
        # If another task has caused the error, lines of libraries are no help.
        shown = _from_the_users_code(error.__traceback__, users_only=is_secondary(error))
        error = error.with_traceback(shown)
        if mode != "call" and (hint := _hint(error)):
            error.add_note(hint)
        record_error(error, fatal=True)
        sys.excepthook(type(error), error, error.__traceback__)
        return 130 if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _hint(error: BaseException) -> str:
    """Advice on a file of a script that all workers run; "" for other errors."""
    from tfmw.cluster import turns
    from tfmw.observe.recorded_errors import misses_file_of_chief

    if isinstance(error, FileExistsError) and turns.current() is None:
        return (
            "Every worker runs the whole script, in each attempt: os.makedirs(..., "
            "exist_ok=True) makes a directory that may exist."
        )
    if misses_file_of_chief(error):
        return (
            "Callbacks such as ModelCheckpoint write files on the chief only. Another worker finds "
            "them if its path is the same, without the time of its own clock, on a disk that both "
            'share: a name for the run is os.environ["TFMW_RUN_ID"].'
        )
    return ""


def _from_the_users_code(
    first: TracebackType | None, users_only: bool = False
) -> TracebackType | None:
    """The traceback without the frames before the user's first line.

    If the user's own code raised the error, as in a callback, tfmw's frames between the user's are
    no help and are left out, too.

    Args:
        users_only: whether to leave out all frames of libraries.
    """
    links = []
    while first is not None:
        links.append(first)
        first = first.tb_next
    # Names as they are: an absolute one needs the working directory, which may be gone.
    files = [link.tb_frame.f_code.co_filename for link in links]
    of_users = [not file.startswith(_PACKAGE) and "site-packages" not in file for file in files]
    left_out = (__file__, "<frozen runpy>", *([_PACKAGE] if of_users[-1:] == [True] else []))
    kept = [
        link
        for link, file, of_user in zip(links, files, of_users, strict=True)
        if not file.startswith(left_out) and (of_user or not users_only)
    ]
    result: TracebackType | None = None
    for link in reversed(kept or links):
        result = TracebackType(result, link.tb_frame, link.tb_lasti, link.tb_lineno)
    return result


if __name__ == "__main__":
    _find_tfmw()
    end: Callable[[int], NoReturn] = sys.exit
    if sys.argv[1] == "fork-server":
        from tfmw.launcher import fork_server

        _die_with_the_launcher()
        sys.argv[1:] = fork_server.serve(int(sys.argv[2]))  # returns in forked tasks only
        end = fork_server.end_task
    _enter_namespaces()  # resets the setting of the next line
    _die_with_the_launcher()
    try:
        status = main(sys.argv[1:])
    except SystemExit as leaving:
        if not isinstance(leaving.code, int | None):
            print(leaving.code, file=sys.stderr)  # as Python does
            leaving.code = 1
        status = leaving.code or 0
    finally:
        if "TFMW_OWN_FILES" in os.environ:
            _end_without_launcher()
    end(status)
