r"""Uninformative TensorFlow log lines: notices as it starts, follow-up errors of a lost peer.

    I0000 00:00:1795264727.917557   12869 cudart_stub.cc:31] Could not find cuda drivers on ...

    E0000 00:00:1795322305.180684    2442 ring_alg.cc:291] Aborting RingReduce with UNAVAILABLE: ...
    Additional GRPC error information from remote target /job:worker/replica:0/task:1 while ...
    :UNKNOWN:Error received from peer  {grpc_status:14, ...}

TF_CPP_MIN_LOG_LEVEL=2 leaves TensorFlow's errors, of which these tell nothing. With ten tasks they
hide the tasks' own output. The launcher does not print them; the log files keep them. Only these
messages are hidden: another message of the same source files, such as a driver of the wrong
version, is printed. Notices checked with TensorFlow 2.18.1 to 2.21.0, follow-up errors with 2.21.0.
"""

from __future__ import annotations

import re

# "I0000 00:00:1795264727.917557   12869 " before, "2026-01-31 12:00:00.123456: I path/to/" after
# absl's log is initialized.
_HEAD = r"(?:[IWE]\d{4} [\d:.]+ +\d+ |\d{4}-\d\d-\d\d [\d:.]+: [IWE] (?:[\w.]+/)*)"
_ABORT = r"base_collective_executor\.cc:\d+\] BaseCollectiveExecutor::StartAbort"
_REST = r"[^\n]*(?:\n|$)"

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

_NOTICES = re.compile(
    "|".join(
        [
            rf"WARNING: All log messages before absl::InitializeLog\(\) is called are writ{_REST}",
            rf"To enable the following instructions: [\w ]+, in other operations, rebuild T{_REST}",
            *(rf"{_HEAD}{file}:\d+\] {message}{_REST}" for file, message in _MESSAGES),
            # A peer is lost: the task that lost it names it in its own error. Errors with another
            # status may be the only report.
            rf"{_HEAD}(?:ring_alg\.cc:\d+\] Aborting Ring\w+ with|{_ABORT}) UNAVAILABLE: {_REST}"
            r"(?:(?:Additional GRPC error information from remote target|"
            rf":UNKNOWN:Error received){_REST})*",
            # An error that a task reports to all, and also prints: "worker 1: ValueError: bad".
            rf"{_HEAD}{_ABORT} INTERNAL: (?:Error reported from /job:\w+/task:\d+: )?"
            r"\w+ \d+: \w+: (?:[^\n]|\n(?![IWE]\d{4} |Traceback))*?"
            rf"\[type\.googleapis\.com/tensorflow\.CoordinationServiceError={_REST}",
        ]
    )
)


def without_notices(text: str) -> str:
    """The text without notices and follow-up errors."""
    return _NOTICES.sub("", text)
