"""Data that a user brings for lm-eval tasks: which columns, and whether a file has them. No torch.

The columns are those of the data set that the task names, so that a file saved from it fits as it
is; others are refused before a model is loaded.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

COLUMNS: dict[str, tuple[str, ...]] = {
    "openai/gsm8k": ("question", "answer"),
    "Idavidrein/gpqa": (
        "Question", "Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2",
        "Incorrect Answer 3",
    ),
    "HuggingFaceH4/MATH-500": ("problem", "solution", "answer"),
    "Maxwell-Jia/AIME_2024": ("Problem", "Answer"),
    "math-ai/aime25": ("problem", "answer"),
    "PrincetonPli/LongProc": ("input_prompt", "reference_output", "metadata"),
    "TIGER-Lab/MMLU-Pro": ("question", "options", "answer", "category", "cot_content"),
}  # fmt: skip
"""Columns that a task reads, by the data set it names."""


class DataError(ValueError):
    """A data file that cannot be used; one line with the file, what is wrong and the remedy."""


def columns(path: Path) -> list[str]:
    """Column names of a parquet, .jsonl or .json file. Raises DataError."""
    try:
        if path.suffix == ".parquet":
            import pyarrow.parquet

            return list(pyarrow.parquet.read_schema(path).names)
        text = path.read_text(encoding="utf-8")
        first = json.loads(text.splitlines()[0] if path.suffix == ".jsonl" else text)
        row = first[0] if isinstance(first, list) else first
        if not isinstance(row, dict):
            raise ValueError(f"a row is {type(row).__name__}, not a mapping")
        return list(row)
    except (OSError, ValueError, LookupError, TypeError) as error:
        line = " ".join(str(error).split())[:80] or type(error).__name__
        raise DataError(
            f"data file {path}: unreadable ({line}); give rows as parquet or as JSON lines"
        ) from None


def check(task: str, source: str | None, files: Iterable[str]) -> None:
    """Refuse files that lack a column the task reads. Raises DataError."""
    needed = COLUMNS.get(source or "", ())
    for name in files:
        have = columns(Path(name))
        missing = [c for c in needed if c not in have]
        if missing:
            raise DataError(
                f"data file {name}: task '{task}' reads the columns {', '.join(needed)} of "
                f"{source}; this file has {', '.join(have)}, so '{missing[0]}' is missing"
            )
