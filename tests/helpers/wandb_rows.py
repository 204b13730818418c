"""The rows in W&B's file of a run, `run-ID.wandb`: LevelDB's log format behind seven bytes."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def wandb_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The complete rows of a file, which may still grow."""
    from wandb.proto import wandb_internal_pb2

    data, at, record = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        body, at = data[at + 7 : at + 7 + length], at + 7 + length
        if kind not in (1, 2, 3, 4) or len(body) < length:
            return
        record = body if kind in (1, 2) else record + body
        if kind in (1, 4):
            parsed = wandb_internal_pb2.Record.FromString(record)
            if parsed.WhichOneof("record_type") == "history":
                yield {
                    item.key or "/".join(item.nested_key): json.loads(item.value_json)
                    for item in parsed.history.item
                }
