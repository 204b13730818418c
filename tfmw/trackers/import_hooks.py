"""Acts on a module when it is imported, without importing it."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

Act = Callable[[ModuleType], Any]


def when_imported(name: str, act: Act) -> None:
    """Calls `act(module)` at the end of the module's import; at once if it is imported already.

    Args:
        name: of a top-level package.
        act: called once.
    """
    module = sys.modules.get(name)
    if module is not None:
        act(module)
    else:
        sys.meta_path.insert(0, _Finder(name, act))


class _Finder(importlib.abc.MetaPathFinder):
    """Finds one module as the other finders do, and adds the call to its loader."""

    def __init__(self, name: str, act: Act) -> None:
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
