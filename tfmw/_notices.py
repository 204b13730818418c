r"""TensorFlow's start-up notices, which say nothing about the run, and which no setting silences.

    I0000 00:00:1795264727.917557   12869 cudart_stub.cc:31] Could not find cuda drivers on ...

Each process writes a handful, so that those of ten tasks drown what the tasks have to say. The
launcher doesn't show them; the log files keep them. Only lines that are known word for word count:
another message of the same source files, such as a driver that doesn't fit, is shown.
Seen with TensorFlow 2.18.1 to 2.21.0.
"""

from __future__ import annotations

import re

# "I0000 00:00:1795264727.917557   12869 " before, "2026-01-31 12:00:00.123456: I path/to/" after
# absl's log is initialized.
_HEAD = r"(?:[IWE]\d{4} [\d:.]+ +\d+ |\d{4}-\d\d-\d\d [\d:.]+: [IWE] (?:[\w.]+/)*)"

_MESSAGES = (
    # source file, begin of the message
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

_BEGINS = (
    "WARNING: All log messages",
    "To enable the following",
    *(f"{level}0000 00:00:00" for level in "IWE"),
    "0000-00-00 00:00:00",
)


def is_notice(line: str) -> bool:
    """Whether a whole line is one of the notices."""
    return _NOTICE.match(line) is not None


def may_become_notice(begin: str) -> bool:
    """Whether the unfinished line `begin` can still become one: then its end is awaited."""
    return any(
        all(c == p or (p == "0" and c.isdigit()) for c, p in zip(begin, pattern, strict=False))
        for pattern in _BEGINS
    )
