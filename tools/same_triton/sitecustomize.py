"""First on PYTHONPATH: Triton names its cache by its version alone, not by its build.

Wheels of one version differ in bytes and so in the names of all they cache. Python imports this
module by itself at start.
"""

import importlib.abc
import importlib.util
import sys
from types import ModuleType
from typing import Any

_CACHE = "triton.runtime.cache"


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> Any:
        if name != _CACHE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.loader is not None
        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            import triton

            module.triton_key = lambda: f"triton-{triton.__version__}"  # type: ignore[attr-defined]

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _Finder())
