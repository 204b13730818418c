"""Hides secrets in output: values of variables with telling names, and passwords inside values.

shown("WANDB_API_KEY", "1a2b")                     # "(hidden)"
shown("TFMW_DATA", "s3://user:1a2b@host/data")     # "s3://(hidden)@host/data"
"""

from __future__ import annotations

import re

HIDDEN = "(hidden)"

_NAME = re.compile("KEY|TOKEN|SECRET|PASS|PWD|CREDENTIAL|JWT|AUTH|COOKIE|SIGNATURE", re.IGNORECASE)
# postgres://user:password@host, https://token@host
_IN_URL = re.compile(r"(?<=://)[^/\s@'\"]+(?=@)")
# --api_key=1a2b, "password": "1a2b", ?sig=1a2b, in command lines and JSON inside variables
_IN_TEXT = re.compile(
    r"((?:key|token|secret|password|passwd|pwd|credentials?|jwt|sig(?:nature)?)\\*[\"']?\s*[=:]"
    r"\s*\\*[\"']?)[^\s\"'&,;\\}]+",
    re.IGNORECASE,
)


def shown(name: str, value: str) -> str:
    """The value of an environment variable, without secrets."""
    return HIDDEN if _NAME.search(name) else without_secrets(value)


def without_secrets(text: str) -> str:
    """The text without passwords in URLs, and without values whose names denote secrets."""
    return _IN_TEXT.sub(rf"\1{HIDDEN}", _IN_URL.sub(HIDDEN, text))
