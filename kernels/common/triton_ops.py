"""Triton entry points that both families share."""

from .keys import settle_keys
from .store import store_state

__all__ = ["store_state"]

settle_keys()
