r"""Uninformative TensorFlow log lines: notices as it starts, follow-up errors of a lost peer.

    I0000 00:00:1795264727.917557   12869 cudart_stub.cc:31] Could not find cuda drivers on ...

    E0000 00:00:1795322305.180684    2442 ring_alg.cc:291] Aborting RingReduce with UNAVAILABLE: ...
    Additional GRPC error information from remote target /job:worker/replica:0/task:1 while ...
    :UNKNOWN:Error received from peer  {grpc_status:14, ...}

Each process writes several, and no setting disables them. With ten tasks they hide the tasks' own
output. The launcher does not print them; the log files keep them. Only these exact messages are
hidden: another message of the same source files, such as a driver of the wrong version, is printed.
Notices checked with TensorFlow 2.18.1 to 2.21.0, follow-up errors with 2.21.0.
"""

from __future__ import annotations

import re

# "I0000 00:00:1795264727.917557   12869 " before, "2026-01-31 12:00:00.123456: I path/to/" after
# absl's log is initialized.
_HEAD = r"(?:[IWE]\d{4} [\d:.]+ +\d+ |\d{4}-\d\d-\d\d [\d:.]+: [IWE] (?:[\w.]+/)*)"

_MESSAGES = (
    # source file, start of the message
    (r"cudart_stub\.cc", "Could not find cuda drivers on your machine, GPU will not be used"),
    (r"cpu_feature_guard\.cc", "This TensorFlow binary is optimized to use available CPU instr"),
    (r"(?:port|util)\.cc", "oneDNN custom operations are on"),
    # No driver and no device, as on every machine without a GPU; other failures are shown.
    (
        r"cuda_(?:platform|driver)\.cc",
        r"failed call to cuInit: (?:INTERNAL: CUDA error: Failed call to cuInit: )?"
        r"(?:UNKNOWN ERROR \(303\)|CUDA_ERROR_NO_DEVICE)",
    ),
    (r"cuda_(?:fft|dnn|blas)\.cc", r"Unable to register cu\w+ factory"),
    (r"tf_record_dataset_op\.cc", "The default buffer size is 262144, which is overridden by the"),
    (r"computation_placer\.cc", "computation placer already registered"),
)

_NOTICE = re.compile(
    "|".join(
        [
            r"WARNING: All log messages before absl::InitializeLog\(\) is called are written to",
            r"To enable the following instructions: [\w ]+, in other operations, rebuild TensorF",
            *(rf"{_HEAD}{file}:\d+\] {message}" for file, message in _MESSAGES),
        ]
    )
)

# A peer is lost. The task that lost it names it in its own error. Errors with another status may be
# the only report.
_FOLLOW_UP = re.compile(
    rf"{_HEAD}(?:ring_alg\.cc:\d+\] Aborting Ring\w+ with|"
    r"base_collective_executor\.cc:\d+\] BaseCollectiveExecutor::StartAbort) UNAVAILABLE: "
)
_FOLLOW_UP_CONTINUES = (
    "Additional GRPC error information from remote target",
    ":UNKNOWN:Error received",
)

_BEGINS = (
    "WARNING: All log messages",
    "To enable the following",
    *(f"{level}0000 00:00:00" for level in "IWE"),
    "0000-00-00 00:00:00",
)


def is_notice(line: str) -> bool:
    """Whether a whole line is one of the notices."""
    return _NOTICE.match(line) is not None


class Filter:
    """Selects the lines of one task that are not printed; call `hides` for each, in order."""

    def __init__(self) -> None:
        self._in_follow_up = False

    def hides(self, line: str) -> bool:
        """Whether a whole line is a notice, or part of a follow-up error."""
        if self._in_follow_up and line.startswith(_FOLLOW_UP_CONTINUES):
            return True
        self._in_follow_up = _FOLLOW_UP.match(line) is not None
        return self._in_follow_up or is_notice(line)

    def may_hide(self, begin: str) -> bool:
        """Whether the unfinished line `begin` may become a hidden line."""
        return any(
            all(c == p or (p == "0" and c.isdigit()) for c, p in zip(begin, pattern, strict=False))
            for pattern in (*_BEGINS, *(_FOLLOW_UP_CONTINUES if self._in_follow_up else ()))
        )

    def without_follow_up(self, line: str) -> str:
        """A whole line, cut where a follow-up error interrupted it, as in a progress bar."""
        follow_up = _FOLLOW_UP.search(line)
        self._in_follow_up = follow_up is not None
        return f"{line[: follow_up.start()]}\n" if follow_up else line
