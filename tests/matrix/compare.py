"""Compares columns with the reference: `python -m tests.matrix.compare FOLDER COLUMN`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.matrix import rows  # noqa: F401  registers all rows
from tests.matrix.columns import load
from tests.matrix.row import ROWS, compared, difference

if __name__ == "__main__":
    folder, column = Path(sys.argv[1]), sys.argv[2]
    times = json.loads((folder / f"{column}.json").read_text())[0]
    for name in times:
        row = ROWS[name]
        if times[name]["error"]:
            print("ERROR", name, times[name]["error"].strip().splitlines()[-1])
            continue
        try:
            expected, got = load(folder, "reference", row), load(folder, column, row)
        except FileNotFoundError:
            print(f"NOREF {name}")
            continue
        by_kind: dict[str, float] = {}
        worst: dict[str, str] = {}
        for key, value in compared(expected).items():
            d = difference(got[key], value) if key in got else float("inf")
            kind = key.split("/")[0]
            if d >= by_kind.get(kind, 0.0):
                by_kind[kind], worst[kind] = d, key
        more = sorted(set(got) - set(expected))
        bad = max(by_kind.values()) > row.tol
        text = " ".join(f"{k}={v:.1e}" for k, v in by_kind.items())
        print("BAD  " if bad else "ok   ", f"{times[name]['seconds']:5.1f}s", name, text, more)
        if bad:
            print("        ", {k: worst[k] for k, v in by_kind.items() if v > row.tol})
