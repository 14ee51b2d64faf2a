"""Triton entry points that both families share."""

from .store import store_state

__all__ = ["store_state"]
