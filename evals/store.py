"""Measured units on disk: written whole, found again by a key, so that a run can be resumed."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .files import write_bytes, write_text
from .probes import short_hash
from .schema import ResultError, UnitRecord, lines, read_record, write_json


@dataclass
class Unit:
    """A measured unit. samples: one mapping a document, with doc_hash, prompt_hash, answers (how
    many), right (a number), flags (a 0 or 1 each answer) and output; tokens: arrays [n, T - 1] of a
    stream task."""

    record: UnitRecord
    samples: list[dict[str, Any]]
    tokens: dict[str, np.ndarray] | None = None


def unit_key(parts: Mapping[str, Any]) -> str:
    """Digest of everything that decides a unit's numbers."""
    return short_hash(json.dumps(parts, sort_keys=True, default=str))


def _safe(name: str) -> str:
    return re.sub(r"[^\w.\-]+", "--", name)


class UnitStore:
    """Units under ``folder/units/<model>/<task>/<arm>.s<seed>.{json,jsonl,npz}``."""

    def __init__(self, folder: Path):
        self.folder = folder

    def _base(self, model: str, task: str, arm: str, seed: int) -> Path:
        return self.folder / "units" / _safe(model) / _safe(task) / f"{_safe(arm)}.s{seed}"

    def path(self, model: str, task: str, arm: str, seed: int) -> Path:
        """The file that exists once a unit is complete."""
        base = self._base(model, task, arm, seed)
        return base.with_name(base.name + ".json")

    def load(self, model: str, task: str, arm: str, seed: int, key: str) -> Unit | None:
        """The unit if it was measured with exactly these settings, else None.

        The record is written last, so a unit without one was interrupted and counts as missing.
        """
        base = self._base(model, task, arm, seed)
        path = base.with_name(base.name + ".json")
        if not path.is_file():
            return None
        try:
            record = read_record(path, UnitRecord)
        except ResultError:
            return None
        if record.key != key:
            return None
        return self._read(base, record)

    def _read(self, base: Path, record: UnitRecord) -> Unit:
        rows = base.with_name(base.name + ".jsonl")
        try:
            samples = [json.loads(line) for line in rows.read_text(encoding="utf-8").splitlines()]
        except (OSError, ValueError):
            raise ResultError(
                f"{rows}: missing or damaged; remove {base.name}.json, then run again"
            ) from None
        arrays = base.with_name(base.name + ".npz")
        tokens = None
        if arrays.is_file():
            with np.load(arrays, allow_pickle=False) as file:
                tokens = {k: file[k] for k in file.files}
        return Unit(record, samples, tokens)

    def save(self, unit: Unit) -> None:
        """Write samples and arrays, then the record."""
        r = unit.record
        base = self._base(r.model, r.task, r.arm, r.seed)
        write_text(base.with_name(base.name + ".jsonl"), lines(unit.samples))
        if unit.tokens is not None:
            buffer = io.BytesIO()
            np.savez_compressed(buffer, **unit.tokens)
            write_bytes(base.with_name(base.name + ".npz"), buffer.getvalue())
        write_json(base.with_name(base.name + ".json"), r)

    def read_all(self) -> list[Unit]:
        """Every complete unit, in the order of the file names."""
        out = []
        for path in sorted((self.folder / "units").glob("*/*/*.json")):
            record = read_record(path, UnitRecord)
            out.append(self._read(path.with_name(path.name.removesuffix(".json")), record))
        return out
