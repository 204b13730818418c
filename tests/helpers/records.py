"""Records of backups that are changed and pass their checksum all the same."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any


def reseal(path: Path, **changes: Any) -> None:
    """Changes the record of a backup and gives it the checksum that fits."""
    body = json.loads(json.loads((path / "record.json").read_text())["body"])
    text = json.dumps({**body, **changes})
    digest = hashlib.sha256(text.encode()).hexdigest()
    (path / "record.json").write_text(json.dumps({"sha256": digest, "body": text}))
