"""Byte-level text for likelihood scoring: windows of a small held-out slice that ships here."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import numpy as np

DATA = Path(__file__).resolve().parent / "data" / "pydocs-heldout.txt"


@lru_cache(maxsize=1)
def heldout() -> np.ndarray:
    """The held-out slice as uint8 bytes. See ``data/README.md`` for source and licence."""
    if not DATA.is_file():
        raise FileNotFoundError(f"{DATA} is missing: reinstall the package or restore the file")
    return np.frombuffer(DATA.read_bytes(), np.uint8)


def draw_windows(
    rng: np.random.Generator, n: int, length: int = 512, corpus: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """Random windows of ``corpus`` (uint8; default: the held-out slice): ids, mask, no metadata.

    Every token but the first is scored.
    """
    corpus = heldout() if corpus is None else corpus
    if not 2 <= length <= len(corpus):
        raise ValueError(f"length={length}: need 2 <= length <= {len(corpus)} bytes of text")
    start = rng.integers(0, len(corpus) - length + 1, n)
    ids = corpus[start[:, None] + np.arange(length)].astype(np.int64)
    mask = np.ones(ids.shape, bool)
    mask[:, -1] = False
    return ids, mask, {}
