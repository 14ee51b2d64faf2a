"""The names under which Triton caches what it compiles, the same in every process.

Triton's key of a function holds the global variables of those functions that it calls whose own
key happens to be known by then (3.6 to 3.9), so that it depends on which kernel a process launches
first: a cache that one process filled is missed by the next. Keys that are computed in one order
before any launch are the same always.
"""

from __future__ import annotations

import importlib
import pkgutil

OWN = frozenset({"keys", "triton_ops"})
"""Modules of ``common`` that have no device functions for other modules."""


def settle_keys(*names: str) -> None:
    """Compute the keys of the Triton functions of ``common``, then of the modules named.

    In the interpreter functions have no keys, and nothing happens.
    """
    folder = importlib.import_module(__package__).__path__
    shared = sorted(m.name for m in pkgutil.iter_modules(folder) if m.name not in OWN)
    for name in (*(f"{__package__}.{n}" for n in shared), *names):
        for value in vars(importlib.import_module(name)).values():
            if hasattr(type(value), "cache_key"):  # a property, which keeps what it computes
                value.cache_key  # noqa: B018
