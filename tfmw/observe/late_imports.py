"""Changes of other libraries once they are imported, if they ever are.

when_imported("mlflow", silence)     # calls silence(mlflow), now or after its import
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

_Act = Callable[[ModuleType], Any]


def when_imported(name: str, act: _Act) -> None:
    """Calls `act(module)`: at once if the module is imported, else after its import."""
    if name in sys.modules:
        act(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Finder(name, act))


class _Finder(importlib.abc.MetaPathFinder):
    """Finds one module as the other finders do, and calls `act(module)` after its import."""

    def __init__(self, name: str, act: _Act) -> None:
        self._name = name
        self._act = act

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        loader = None if spec is None else spec.loader
        if loader is not None and hasattr(loader, "exec_module"):
            execute = loader.exec_module

            def then_act(module: ModuleType) -> None:
                execute(module)
                self._act(module)

            loader.exec_module = then_act  # type: ignore[method-assign]
        return spec
