"""Trains recipes one after the other: `recipes.py FOLDER`, which gets their exports."""

import importlib
import sys
from pathlib import Path
from typing import Any

from tests.programs import _result

folder = sys.argv[1]
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "recipes"))

import common  # noqa: E402  (of the recipes)

modules = [importlib.import_module(name) for name in ("images", "text", "features")]
common.FLAGS(["recipe", "--epochs=4"])
result: dict[str, Any] = {}


def report(history: Any, cluster: Any) -> None:
    """Replaces the recipes' own report, which prints."""
    result[Path(common.FLAGS.export_dir).name] = history.history["val_accuracy"][-1]


common.report = report
for module in modules:
    common.FLAGS.export_dir = f"{folder}/{module.__name__}"
    module.main()
_result.write(result)
