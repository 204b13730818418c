"""Stack frames of the user's program, apart from those of Python, installed packages and tfmw."""

from __future__ import annotations

import os
import re
from types import FrameType

_TFMW = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
# "__autograph_generated_file" is code that AutoGraph has written.
_LIBRARY = re.compile(r"/lib/python\d|site-packages|__autograph_generated_file")
_TYPED = ("<stdin", "<ipython-input", "<python-input")  # code of prompts and notebooks


def is_installed(file: str) -> bool:
    """Whether a file belongs to Python, to an installed package or to tfmw."""
    generated = file.startswith("<") and not file.startswith(_TYPED)
    return generated or file.startswith(_TFMW) or _LIBRARY.search(file) is not None


def users_call(frame: FrameType | None) -> str:
    """Current call of the user's program: "tfmw.evaluate at train.py:31", "model.fit ...", or "".

    Args:
        frame: innermost frame of a thread.
    """
    name = ""
    while frame is not None:
        code = frame.f_code
        if not is_installed(code.co_filename):
            return f"{name} at {code.co_filename}:{frame.f_lineno}" if name else ""
        if (
            code.co_name == "plain_call"
        ):  # the callers of `train.plain_calls.plain_call` are Keras's
            name = f"model.{frame.f_locals['name']}"
        elif "<locals>" not in code.co_qualname and not name.startswith("model."):
            name = f"tfmw.{code.co_name}"  # not a function of a decorator
        frame = frame.f_back
    return ""
