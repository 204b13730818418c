"""An error's message in one line, without the text that TensorFlow and Keras add around it.

    Graph execution error:

    Detected at node model/embedding/GatherV2 defined at (most recent call last):
      File "train.py", line 28, in <module>

    indices[0,1] = 9 is not in [0, 3)
             [[{{node model/embedding/GatherV2}}]] [Op:__inference_multi_step_on_iterator_546]

becomes "indices[0,1] = 9 is not in [0, 3)".
"""

from __future__ import annotations

import re

MAX_LENGTH = 1000
"""Length to which a message is cut; the task's log has all of it."""

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_GENERIC = re.compile(
    r"Graph execution error:|Exception encountered when calling \S+\.$|Node: '|"
    r"<stack traces unavailable>|\[\[\{\{node |\d+ root error\(s\) found\.|0 successful operations"
)
_FRAMES = re.compile(
    r'Traceback \(most recent call last\)|Detected at node |\s*File "|Original stack trace for '
)
_ARGUMENTS = re.compile(r"Arguments received by \S+:$")  # Keras appends them
_NOISE = re.compile(r"\{\{function_node [^}]*\}\}|\[Op:\w+\](?: name:\s*)?")


def informative_part(message: str) -> str:
    """The message in one line, up to `MAX_LENGTH` characters; "(no message)" for an empty one."""
    lines = _ANSI.sub("", message).splitlines()
    kept = [" ".join(_NOISE.sub("", line).split()) for line in _without_frames(lines)]
    text = " ".join(line for line in kept if line and not _GENERIC.match(line))
    text = text or " ".join(message.split()) or "(no message)"
    return text if len(text) <= MAX_LENGTH else text[: MAX_LENGTH - 3] + "..."


def _without_frames(lines: list[str]) -> list[str]:
    """The lines without stack frames, whose source lines are indented, and without arguments."""
    kept = []
    in_frames = False
    for line in lines:
        if _ARGUMENTS.match(line):
            break
        in_frames = bool(_FRAMES.match(line)) or (
            in_frames and (not line.strip() or line[0].isspace())
        )
        if not in_frames:
            kept.append(line)
    return kept
