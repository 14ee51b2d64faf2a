"""Byte-level text from a small held-out slice that ships here: windows to score, openings to go
on from."""

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


def draw_openings(
    rng: np.random.Generator,
    n: int,
    length: int = 256,
    limit: int = 1024,
    paragraphs: int = 3,
    temperature: float = 0.7,
    corpus: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """Openings of ``length - 1`` bytes that a model goes on from: ids [n, length], mask at the last
    byte of the opening.

    The response ends at its ``paragraphs``-th empty line, after ``limit`` bytes at the latest; it
    is drawn at ``temperature`` with numbers that depend on the document alone, so that states that
    agree write the same. These three describe the response alone, not the openings. Raises
    ValueError for a setting out of range.
    """
    if limit < 1 or paragraphs < 1 or not temperature >= 0:
        raise ValueError(
            f"limit={limit}, paragraphs={paragraphs}, temperature={temperature}: need a limit and "
            "paragraphs of at least 1 and a temperature of at least 0"
        )
    ids, mask, _ = draw_windows(rng, n, length, corpus)
    mask[:] = False
    mask[:, -2] = True
    return ids, mask, {}
