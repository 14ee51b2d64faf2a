"""Units on disk: whole or not at all, and found again only under the same settings."""

import json
import os

import numpy as np
import pytest

from replayssm_quant.evals import files
from replayssm_quant.evals.schema import (
    SCHEMA,
    ResultError,
    TailRecord,
    UnitRecord,
    read_record,
    write_json,
)
from replayssm_quant.evals.store import UnitStore, unit_key


def test_a_unit_comes_back_as_it_was(tmp_path, make_unit) -> None:
    tokens = {"kld": np.arange(6, dtype=np.float32).reshape(2, 3), "scored": np.ones((2, 3), bool)}
    summary = TailRecord(mean=float("inf"), median=0, p90=0, p99=1, p999=2, max=3, n=4)
    unit = make_unit(["110", "011"], tokens=tokens, kld=summary)
    store = UnitStore(tmp_path)
    store.save(unit)
    found = store.load("model", "task", "arm", 0, "key")
    assert found.record == unit.record and found.samples == unit.samples
    for name, value in tokens.items():
        np.testing.assert_array_equal(found.tokens[name], value)
    assert not list(tmp_path.rglob("*.tmp"))
    assert "Infinity" in next(tmp_path.rglob("*.json")).read_text()
    json.loads(next(tmp_path.rglob("*.json")).read_text(), parse_constant=pytest.fail)


def test_other_settings_are_another_unit(tmp_path, make_unit) -> None:
    store = UnitStore(tmp_path)
    store.save(make_unit(["1"]))
    assert store.load("model", "task", "arm", 0, "another key") is None
    assert store.load("model", "task", "arm", 1, "key") is None
    assert unit_key({"a": 1, "b": 2}) == unit_key({"b": 2, "a": 1}) != unit_key({"a": 1, "b": 3})


def test_an_interrupted_unit_counts_as_missing(tmp_path, make_unit) -> None:
    store = UnitStore(tmp_path)
    store.save(make_unit(["1"]))
    record = next(tmp_path.rglob("*.json"))
    text = record.read_text()
    record.unlink()
    assert store.load("model", "task", "arm", 0, "key") is None
    record.write_text(text[: len(text) // 2])
    assert store.load("model", "task", "arm", 0, "key") is None
    record.write_text(text)
    next(tmp_path.rglob("*.jsonl")).unlink()
    with pytest.raises(ResultError, match="missing or damaged"):
        store.load("model", "task", "arm", 0, "key")


def test_names_with_slashes_stay_inside_the_folder(tmp_path, make_unit) -> None:
    unit = make_unit(["1"])
    unit.record.model = "org/../../name"
    UnitStore(tmp_path / "out").save(unit)
    assert {p.parent.parent.parent.name for p in tmp_path.rglob("*.json")} == {"units"}
    assert not (tmp_path / "name").exists()


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch) -> None:
    path = tmp_path / "results.json"
    files.write_text(path, "old")

    def broken(*args):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", broken)
    with pytest.raises(OSError, match="disk full"):
        files.write_text(path, "new")
    assert path.read_text() == "old" and [p.name for p in tmp_path.iterdir()] == ["results.json"]


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda d: d.update(schema_version="replayssm-eval/0"), "schema 'replayssm-eval/0'"),
        (lambda d: d.update(extra=1), "extra"),
        (lambda d: d.pop("documents"), "documents"),
        (lambda d: d.update(documents="many"), "documents"),
    ],
)
def test_records_of_another_shape_are_refused(tmp_path, make_unit, change, message) -> None:
    path = tmp_path / "unit.json"
    write_json(path, make_unit(["1"]).record)
    data = json.loads(path.read_text())
    assert data["schema_version"] == SCHEMA
    change(data)
    path.write_text(json.dumps(data))
    with pytest.raises(ResultError, match=message):
        read_record(path, UnitRecord)


def test_text_that_is_no_json_is_refused(tmp_path) -> None:
    path = tmp_path / "unit.json"
    path.write_text("{")
    with pytest.raises(ResultError, match="not valid JSON"):
        read_record(path, UnitRecord)
