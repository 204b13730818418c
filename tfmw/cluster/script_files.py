"""Files that a script makes, although each task of the machine runs the script.

    share_files("/run/directory/files")    # before the script

A script often prepares its data: unless a directory is there, it makes the directory, extracts an
archive into it, and moves some files. If all tasks do so at the same time, one finds the directory
of another one half-made. So some functions of Python are replaced. They differ where the script
itself calls them, in its main thread, and outside of the calls that all tasks make:

- A task that asks for a missing file, or moves a file, takes its turn (see `turns`). The others
  wait until it comes to the next call of all tasks, and then find its files.
- One task extracts an archive, and moves or removes a file. The others leave these as they are.
- A directory that another task has made may be made again.

Checked with Python 3.11.
"""

from __future__ import annotations

import ast
import functools
import glob
import inspect
import linecache
import os
import pathlib
import shutil
import sys
import tarfile
import urllib.request
import zipfile
from collections.abc import Callable, Mapping
from email.message import Message
from types import FrameType, ModuleType
from typing import Any, NamedTuple

from tfmw.cluster import turns
from tfmw.cluster.turns import Turns
from tfmw.observe.late_imports import when_imported
from tfmw.observe.stacks import is_installed

_STANDARD_LIBRARY = os.path.dirname(os.__file__) + os.sep
_TARGETS = {  # parameter of each function that fills a directory or file
    "unpack_archive": "extract_dir",
    "copytree": "dst",
    "extractall": "path",
    "urlretrieve": "filename",
}
_HARMLESS = frozenset({"mkdir", "makedirs", "print"})  # of a block that only makes directories


def share_files(path: str) -> None:
    """Shares the operations of this process's script with the other tasks of the machine.

    Args:
        path: a file of this run on this machine, for `turns.begin`.
    """
    turns.begin(path)
    if turns.current() is None:
        return
    for owner, names, change in (
        (os.path, ("exists", "isfile", "isdir"), _asking),
        (pathlib.Path, ("exists", "is_file", "is_dir"), _asking),
        (os, ("listdir",), _asking),
        (glob, ("glob",), _asking),
        (os, ("mkdir",), _making),
        (os, ("remove", "unlink", "rmdir"), _removing),
        (os, ("rename", "replace"), _moving),
        (shutil, ("rmtree",), _removing),
        (shutil, ("move",), _moving),
        (shutil, ("unpack_archive", "copytree"), _once),
        (zipfile.ZipFile, ("extractall",), _once),
        (tarfile.TarFile, ("extractall",), _once),
        (urllib.request, ("urlretrieve",), _once),
    ):
        for name in names:
            setattr(owner, name, change(getattr(owner, name)))
    when_imported("h5py", _share_h5py)


# ---- the functions -----------------------------------------------------------------------------


def _asking(own: Callable[..., Any]) -> Callable[..., Any]:
    """A question for files, which waits for the task that may be making them."""

    @functools.wraps(own)
    def ask(*args: Any, **kwargs: Any) -> Any:
        found = own(*args, **kwargs)
        shared, frame = _shared(), sys._getframe(1)
        file, path = frame.f_code.co_filename, next(iter((*args, *kwargs.values())), os.curdir)
        if shared is None or shared.is_over or _is_installed(file) or not _is_local(path):
            return found
        if found:
            waits = shared.is_of_another()
        elif shared.is_waiting(os.path.abspath(os.fsdecode(path))):
            shared.give(complete=False)  # another task makes this file
            waits = False
        else:
            waits = not _only_makes_directories(frame) and _may_be_made(path)
        if waits:
            shared.take(_place(frame))
            found = own(*args, **kwargs)
        return found

    return ask


def _making(own: Callable[..., None]) -> Callable[..., None]:
    """`os.mkdir`, of a directory that another task may have made."""

    @functools.wraps(own)
    def make(path: Any, *args: Any, **kwargs: Any) -> None:
        if (caller := _caller(kwargs)) is None:
            return own(path, *args, **kwargs)
        shared, name = caller.shared, os.path.abspath(os.fsdecode(path))
        with shared.operations():
            try:
                own(path, *args, **kwargs)
            except FileExistsError:
                if not shared.is_of_run(name):
                    raise
            else:
                shared.add("make", name)

    return make


def _removing(own: Callable[..., None]) -> Callable[..., None]:
    """A removal, of what another task may have removed, and even made anew."""

    @functools.wraps(own)
    def remove(path: Any, *args: Any, **kwargs: Any) -> None:
        if (caller := _caller(kwargs)) is None:
            return own(path, *args, **kwargs)
        shared, name = caller.shared, os.path.abspath(os.fsdecode(path))
        with shared.operations():
            is_removed = shared.is_made("remove", name) and not os.path.lexists(name)
            if is_removed or shared.is_new_of_another(name):
                return None
            with shared.alone():
                own(path, *args, **kwargs)
            return shared.add("remove", name)

    return remove


def _moving(own: Callable[..., Any]) -> Callable[..., Any]:
    """A move of a file, which one task makes.

    Another task may choose other files to move, as these are missing: it moves none of the data,
    only what it has written itself.
    """

    @functools.wraps(own)
    def move(src: Any, dst: Any, *args: Any, **kwargs: Any) -> Any:
        if (caller := _caller(kwargs)) is None:
            return own(src, dst, *args, **kwargs)
        shared, place = caller
        shared.take(place)
        path, target = (os.path.abspath(os.fsdecode(each)) for each in (src, dst))
        with shared.operations():
            was_moved = shared.is_made("move", path, target) and not os.path.lexists(path)
            if was_moved or (shared.is_made("move", place) and shared.is_of_data(path)):
                return dst if own.__name__ == "move" else None
            with shared.alone():
                result = own(src, dst, *args, **kwargs)
            shared.add("move", path, target)
            shared.add("move", place)
        return result

    return move


def _once(own: Callable[..., Any]) -> Callable[..., Any]:
    """A function that fills a directory or a file, which one task does while others wait."""
    name, signature = own.__name__, inspect.signature(own)

    @functools.wraps(own)
    def once(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments.get(_TARGETS[name])
        caller = _caller(kwargs)
        if caller is None or (given is None and name == "urlretrieve"):
            return own(*args, **kwargs)
        shared, place = caller
        target = os.path.abspath(os.fsdecode(given or os.curdir))
        with shared.operations():
            if shared.is_made(name, place, target) and os.path.exists(target):
                return {"copytree": given, "urlretrieve": (given, Message())}.get(name)
            with shared.alone():
                result = own(*args, **kwargs)
            shared.add(name, place, target)
            shared.add("make", target)
        return result

    return once


def _share_h5py(h5py: ModuleType) -> None:
    """Makes a task take its turn before it writes a file of HDF5, which locks the file."""
    begin = h5py.File.__init__

    @functools.wraps(begin)
    def begin_in_turn(self: Any, name: Any, mode: str = "r", *args: Any, **kwargs: Any) -> None:
        if mode != "r" and (caller := _caller(kwargs)) is not None:
            caller.shared.take(caller.place)
        begin(self, name, mode, *args, **kwargs)

    h5py.File.__init__ = begin_in_turn


# ---- who calls ---------------------------------------------------------------------------------


def _shared() -> Turns | None:
    """The turns of this process, if the tasks share the operations of this thread now."""
    shared = turns.current()
    return shared if shared is not None and shared.usable else None


_is_installed = functools.cache(is_installed)


class _Caller(NamedTuple):
    """A line of the script that calls a wrapper."""

    shared: Turns
    place: str


def _caller(kwargs: Mapping[str, Any]) -> _Caller | None:
    """The script's line that calls a wrapper, through functions of Python alone.

    None if none does, or if the paths are relative to a descriptor.
    """
    shared = _shared()
    if shared is None or any(name.endswith("dir_fd") for name in kwargs):
        return None
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if not _is_installed(file):
            return _Caller(shared, _place(frame))
        is_python = file.startswith(_STANDARD_LIBRARY) and "-packages" not in file
        if not is_python and not (file.startswith("<frozen ") and "importlib" not in file):
            return None
        frame = frame.f_back
    return None


def _place(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _is_local(path: Any) -> bool:
    return isinstance(path, str | bytes | os.PathLike) and "://" not in os.fsdecode(path)


def _may_be_made(path: Any) -> bool:
    """Whether this process could make a missing file."""
    parent = os.path.dirname(os.path.abspath(os.fsdecode(path)))
    while not os.path.lexists(parent):
        parent = os.path.dirname(parent)
    return os.access(parent, os.W_OK)


def _only_makes_directories(frame: FrameType) -> bool:
    """Whether the answer to a question decides only on making directories.

    `if not os.path.exists(logs): os.makedirs(logs)` needs no turn, as both may make them.
    """
    line, found = frame.f_lineno, None
    for statement in _statements_by_questions(frame.f_code.co_filename):
        if statement.test.lineno <= line <= (statement.test.end_lineno or line):
            found = statement
    return found is not None and all(
        isinstance(each, ast.Expr)
        and isinstance(each.value, ast.Call)
        and getattr(each.value.func, "attr", getattr(each.value.func, "id", "")) in _HARMLESS
        for each in found.body + found.orelse
    )


@functools.cache
def _statements_by_questions(file: str) -> list[ast.If]:
    """The `if` statements of a source file; none if it cannot be read."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return []
    return [node for node in ast.walk(tree) if isinstance(node, ast.If)]
