"""Launch configurations by name, from files, and from what a tuning run saved."""

from __future__ import annotations

import dataclasses
import json

import pytest

pytest.importorskip("triton")

from replayssm_quant.kernels.bench import tune, warm
from replayssm_quant.kernels.bench.registry import DESIGNS, OPS

KINDS = ("mamba2", "gdn")


@pytest.mark.parametrize("kind", KINDS)
def test_every_candidate_is_a_configuration(kind):
    module = tune.kernels_of(kind)
    default = module.launch_for(DESIGNS["nvfp4+fp16-sr"], 256)
    for goal, texts in tune.SEARCH[kind]:
        assert goal in ("readout", "mix")
        assert len({tune.parse(text, default) for text in texts}) >= len(texts) - 1


@pytest.mark.parametrize("text", ["rows", "rows=two", "lanes=3"])
def test_a_wrong_launch_is_named(text):
    default = tune.kernels_of("gdn").launch_for(DESIGNS["fp32"], 1)
    with pytest.raises(SystemExit, match="rows"):
        tune.parse(text, default)


def test_variants_come_from_a_file(tmp_path):
    path = tmp_path / "variants.txt"
    path.write_text("# first\nrows=32,blocks=2\n\nrows=64  # wide\n")
    assert tune.read_variants(path) == ["rows=32,blocks=2", "rows=64"]
    with pytest.raises(SystemExit, match="no such file"):
        tune.read_variants(tmp_path / "other.txt")


@pytest.mark.parametrize("kind", KINDS)
def test_saved_launches_are_taken_and_forgotten(kind, tmp_path):
    module = tune.kernels_of(kind)
    design, other = "nvfp4+fp16-sr", "P4+4-sr-rot"  # both read four bits
    table = module.launch_for(DESIGNS[design], 256)
    small, large = (dataclasses.replace(table, rows=64, flush=n) for n in (3, 5))
    rows = [
        {"op": f"{kind}_decode", "batch": b, "design": design, "launch": dataclasses.asdict(c)}
        for b, c in ((256, large), (8, small))
    ]
    path = tmp_path / "launches.json"
    path.write_text(json.dumps(rows))
    with tune.launches_from(path):
        for name in (design, other):
            found = [module.launch_for(DESIGNS[name], b) for b in (1, 8, 255, 256, 512)]
            assert found == [small, small, small, large, large]
        assert module.launch_for(DESIGNS["fp32"], 8) != small
        op = OPS[f"{kind}_decode"]
        task = warm.shrink(warm.tasks_of(op, [(op.default, 512)], [design])[0])
        assert task.batch == 16 and dict(task.launch) == dataclasses.asdict(large)
    assert module.launch_for(DESIGNS[design], 256) == table


def test_a_file_that_is_no_saved_one_is_refused(tmp_path):
    path = tmp_path / "launches.json"
    path.write_text('[{"op": "gdn_decode"}]')
    with pytest.raises(SystemExit, match="--launches"), tune.launches_from(path):
        pass
