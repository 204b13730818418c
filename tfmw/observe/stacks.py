"""Stack frames of the user's program, apart from those of Python, installed packages and tfmw."""

from __future__ import annotations

import os
import re
from pathlib import Path
from types import FrameType

_TFMW = str(Path(__file__).resolve().parents[1]) + os.sep
_LIBRARY = re.compile(r"/lib/python\d")


def is_installed(file: str) -> bool:
    """Whether a file is of Python, of an installed package or of tfmw."""
    return (
        file.startswith(("<", _TFMW))
        or "site-packages" in file
        or _LIBRARY.search(file) is not None
    )


def users_call(frame: FrameType | None) -> str:
    """The call that the user's program is in: "evaluate at train.py:31"; "" if none is.

    Args:
        frame: the innermost one of a thread.
    """
    name = ""
    while frame is not None:
        code = frame.f_code
        if not is_installed(code.co_filename):
            return f"{name} at {code.co_filename}:{frame.f_lineno}" if name else ""
        if "<locals>" not in code.co_qualname:  # not a decorator's
            name = code.co_name
        frame = frame.f_back
    return ""
