"""Looking for cache blocks only in steps that can need one.

In every step vLLM's scheduler asks each cache group for the blocks of each request. Hybrid models
have four to seven groups, and a decode step rarely needs a block, so at 256 requests that took two
thirds of the host's time of a step. No block, no token and no order of requests changes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from .options import KEY, parse

MARK = f"_{KEY}"


def covered(manager: Any, tokens: int) -> int:
    """Tokens for which the blocks of a request do that has just needed none for ``tokens``.

    0 if that is not known: for prefix caching, and for groups other than full attention and states
    that keep one page a request, which alone are known to need nothing until a block is full.
    """
    until = None
    for group in manager.coordinator.single_type_managers:
        spec = group.kv_cache_spec
        one_page = getattr(spec, "mamba_cache_mode", None) == "none"
        if group.enable_caching or not (type(spec).__name__ == "FullAttentionSpec" or one_page):
            return 0
        full = -(-tokens // group.block_size) * group.block_size
        until = full if until is None else min(until, full)
    return until or 0


def nothing(empty: Any) -> Any:
    """``empty``, no blocks of any group, that says so without looking at each group."""

    class Nothing(type(empty)):  # type: ignore[misc]
        def get_block_ids(self, allow_none: bool = False, **more: Any) -> Any:
            return None if allow_none else super().get_block_ids(**more)

    return Nothing(empty.blocks)


def shortcut(allocate: Callable) -> Callable:
    """``KVCacheManager.allocate_slots`` that returns at once while a request's blocks suffice.

    A group needs the next block only when its last is full, so what was found for a number of
    tokens holds up to the end of the shortest block. Any other call than that of a running request
    goes through.
    """

    @functools.wraps(allocate)
    def allocate_slots(self: Any, request: Any, new: int, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs.keys() - {"num_lookahead_tokens"}:
            return allocate(self, request, new, *args, **kwargs)
        tokens = request.num_computed_tokens + new + kwargs.get("num_lookahead_tokens", 0)
        blocks = self.coordinator.single_type_managers[0].req_to_blocks.get(request.request_id)
        known = getattr(request, "_covered", None)
        # another list: the request has lost its blocks since and got new ones
        if known is not None and known[0] is blocks and tokens <= known[1]:
            return self._no_blocks
        found = allocate(self, request, new, **kwargs)
        if found is self.empty_kv_cache_blocks and blocks:
            request._covered = (blocks, covered(self, tokens))
            if not hasattr(self, "_no_blocks"):
                self._no_blocks = nothing(self.empty_kv_cache_blocks)
        return found

    setattr(allocate_slots, MARK, True)
    return allocate_slots


def shorten_scheduler(original: Callable) -> Callable:
    """``Scheduler.__init__`` that gives the scheduler's cache manager the shortcut.

    Only where the plugin is asked for, has not been told otherwise (``block_shortcut``), and no
    connector moves blocks behind the scheduler's back.
    """
    if MARK in vars(original):
        return original

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        options = parse(self.vllm_config.additional_config)
        connectors = (getattr(self, name, None) for name in ("connector", "ec_connector"))
        if options is None or not options.block_shortcut or any(connectors):
            return
        manager = self.kv_cache_manager
        allocate = type(manager).allocate_slots
        if MARK not in vars(allocate):
            manager.allocate_slots = functools.partial(shortcut(allocate), manager)

    setattr(init, MARK, True)
    return init
