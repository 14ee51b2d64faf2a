"""Acting on a module once it is imported, without importing it. No vLLM here."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class _Watch(MetaPathFinder):
    """Finds nothing itself: it has the others' loaders of the awaited modules call back."""

    def __init__(self) -> None:
        self.awaited: dict[str, list[Callable[[], object]]] = {}

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self.awaited:
            return None
        for finder in sys.meta_path:
            find: Any = getattr(finder, "find_spec", None)
            spec = None if finder is self or find is None else find(name, path, target)
            if spec is not None:
                self._call_back_from(spec)
                return spec
        return None

    def _call_back_from(self, spec: ModuleSpec) -> None:
        loader: Any = spec.loader
        if loader is None:
            return
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module  # the loader is its own again
            execute(module)
            for action in self.awaited.pop(spec.name, ()):
                action()

        loader.exec_module = exec_module


_watch = _Watch()


def when_imported(name: str, action: Callable[[], object]) -> None:
    """Call ``action`` at once if module ``name`` is there, else right after its first import.

    What waits already is not added again. A module whose import fails leaves the action waiting for
    the next attempt; what the action raises comes out of the import.
    """
    if name in sys.modules:
        action()
        return
    actions = _watch.awaited.setdefault(name, [])
    if action not in actions:
        actions.append(action)
    if _watch not in sys.meta_path:
        sys.meta_path.insert(0, _watch)
