"""The study of formats on synthetic states: recurrences, verdicts and the committed result."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import replayssm_quant
from replayssm_quant.evals import numerics
from replayssm_quant.evals.numerics import (
    GROUPS,
    LENGTH,
    PROFILES,
    Cell,
    Check,
    Design,
    Row,
    all_rows,
    make_inputs,
    make_window,
    markdown,
    pure_decay,
    run,
    study,
)
from replayssm_quant.formats.rotation import rotate

RESULTS = Path(replayssm_quant.__file__).resolve().parents[1] / "evals" / "results"


def stepwise(x: numerics.Inputs, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(final state, outputs [T, H, R]) token by token in float64, as the papers write it."""
    heads, rows = x.v.shape[1:]
    state = torch.zeros(heads, rows, numerics.D_STATE, dtype=torch.float64)
    out = []
    for t in range(tokens):
        v, w = x.v[t].double(), x.weight[t][:, None]
        copies = heads // x.k.shape[1]
        k, q = (a[t].double().repeat(copies, 1)[:, None, :] for a in (x.k, x.q))
        state = state * x.log_decay[t].exp()[:, None, None]
        seen = (state * k).sum(-1) if x.family == "gdn" else 0
        state = state + (w * (v - seen))[..., None] * k
        out.append((state * q).sum(-1))
    return state, torch.stack(out)


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("family", ["mamba2", "gdn"])
@pytest.mark.parametrize("profile", ["base", "neg", "white"])
def test_windows_equal_the_step_recurrence(family: Any, profile: str, rotated: bool) -> None:
    x = make_inputs(family, PROFILES[profile], 5 * LENGTH, 2, seed=3)
    expected, outputs = stepwise(x, 5 * LENGTH)
    state = torch.zeros_like(expected)
    for at in range(0, 5 * LENGTH, LENGTH):
        w = make_window(x, at, rotated)
        d = w.corrections(state)
        y = w.read(state, d).transpose(0, 1)
        assert torch.allclose(
            y, outputs[at : at + LENGTH], rtol=1e-9, atol=1e-9 * float(y.abs().max())
        )
        state = w.fold(state, d)
    want = rotate(expected) if rotated else expected
    assert float((state - want).norm() / want.norm()) < 1e-12


@pytest.mark.parametrize("family", ["mamba2", "gdn"])
def test_fp32_is_exact_and_rounding_is_seen(family: Any) -> None:
    x = make_inputs(family, PROFILES["base"], 512, 1, seed=1)
    designs = [Design(), Design(rotated=True), Design(copy="fp32"), Design("int8"), Design("e4m3")]
    found = run(x, designs, [256, 512])
    for design in designs[:3]:
        for t in (256, 512):
            assert found[design, t].of(None, 0) < 1e-6
            assert found[design, t].of(None, 2) < 1e-6
    assert 1e-3 < found[designs[3], 512].of(None, 0) < found[designs[4], 512].of(None, 0) < 0.2


def test_exact_folding_keeps_the_copy_out_of_the_checkpoint_and_leaking_does_not() -> None:
    x = make_inputs("gdn", PROFILES["base"], 256, 1, seed=2)
    exact, mixed = Design(copy="nvfp4"), Design(copy="nvfp4", mode="mixed")
    leaky, clean = Design(copy="nvfp4", mode="leaky"), Design(copy="fp32", mode="leaky")
    found = run(x, [exact, mixed, leaky, clean], [256])
    assert found[exact, 256].of(None, 2) == found[mixed, 256].of(None, 2) < 1e-6
    assert found[clean, 256].of(None, 2) < 1e-6  # a copy without error leaks nothing
    assert 0.005 < found[leaky, 256].of(None, 2) < 0.2
    assert found[leaky, 256].of(None, 0) > found[exact, 256].of(None, 0) > 0.01


def test_the_leak_is_error_feedback() -> None:
    """With O = U + E, folding what O implies gives F(O) - g E instead of F(U)."""
    x = make_inputs("gdn", PROFILES["neg"], LENGTH, 2, seed=5)
    w = make_window(x, 0)
    g = torch.Generator().manual_seed(0)
    u, e = (torch.randn(8, 128, 128, generator=g, dtype=torch.float64) for _ in range(2))
    d = w.corrections(u + e)
    leaked = w.fold(u, d)
    decay = x.log_decay[:LENGTH].sum(0).exp()[:, None, None]
    assert torch.allclose(leaked, w.fold(u + e, d) - decay * e, atol=1e-11)
    assert not torch.allclose(leaked, w.fold(u, w.corrections(u)), atol=1e-3)


def test_inputs_are_reproducible_bf16_and_of_their_class() -> None:
    x, again = (make_inputs("gdn", PROFILES["neg"], 2000, 2, seed=4) for _ in range(2))
    assert torch.equal(x.v, again.v) and torch.equal(x.weight, again.weight)
    assert not torch.equal(x.v, make_inputs("gdn", PROFILES["neg"], 2000, 2, seed=5).v)
    norms = x.k.float().norm(dim=-1)
    assert float((norms - 1).abs().max()) < 0.01
    assert 1.5 < float(x.weight.max()) < 2 and float(x.weight.min()) > 0
    for name, (low, high) in numerics.CLASSES["gdn"].items():
        mean = float(-x.log_decay[:, x.classes[name]].mean())
        assert 0.9 * low < mean < 1.3 * high
    m = make_inputs("mamba2", PROFILES["base"], 2000, 4, seed=4)
    mild = make_inputs("mamba2", PROFILES["mild"], 2000, 4, seed=4)
    size, mild_size = (a.k.float().square().mean((0, 1)).sqrt() for a in (m, mild))
    assert float(size.max() / size.median()) > 3 > float(mild_size.max() / mild_size.median())


def test_pure_decay_is_free_only_with_an_exact_scale() -> None:
    assert pure_decay(Design("int8"), 200) < 1e-5
    assert pure_decay(Design("int8", "sr"), 200) < 1e-3
    assert pure_decay(Design("bf16"), 200) > 0.3


@pytest.mark.parametrize(
    ("measured", "note", "verdict"),
    [
        (1.29, 1.0, "within"),
        (0.71, 1.0, "within"),
        (1.31, 1.0, "outside"),
        (0.69, 1.0, "outside"),
        (2.9e-7, 1e-7, "floor"),
        (3.1e-7, 1e-7, "outside"),
        (2.9e-5, 1e-5, "outside"),
        (1e-8, 1e-7, "floor"),
    ],
)
def test_verdicts(measured: float, note: float, verdict: str) -> None:
    cell = numerics._cell(Row("3", "gdn base", Design(), {"y@end": note}), "y@end", measured)
    assert cell.verdict == verdict and cell.ratio == measured / note


def test_the_note_s_table_is_well_formed() -> None:
    rows = all_rows()
    assert len({(r.section, r.group, r.design) for r in rows}) == len(rows)
    assert {r.section for r in rows} == {"2a", "2b", "2c", "3", "5"}
    for row in rows:
        assert row.group in GROUPS or row.group == "pure decay"
        assert all(v > 0 for v in row.note.values())
        tokens = GROUPS[row.group].tokens if row.group in GROUPS else 0
        for column in row.note:
            at = column.partition("@")[2]
            assert at in ("", "end") or numerics.TIMES[at] <= tokens


@pytest.fixture(scope="module")
def quick() -> dict[str, Any]:
    return study([], quick=True, seed=0)


@pytest.mark.slow
def test_quick_mode_agrees_with_the_note(quick: dict[str, Any]) -> None:
    """One head of each class and 2048 tokens: nearly all of white, most of the rest, all orders."""
    cells = [Cell(**c) for c in quick["cells"]]
    assert len(cells) > 180
    assert all(math.isfinite(c.measured) and c.measured > 0 for c in cells)
    share = sum(c.verdict != "outside" for c in cells) / len(cells)
    assert share > 0.75
    white = [c for c in cells if "white" in c.group or "constant" in c.group]
    good = sum(c.verdict != "outside" for c in white)
    assert len(white) > 35 and good >= len(white) - 4
    failed = [c["statement"] for c in quick["checks"] if not c["passed"]]
    assert not failed and len(quick["checks"]) > 15


@pytest.mark.slow
def test_the_report_of_a_quick_run(quick: dict[str, Any]) -> None:
    text = markdown(json.loads(json.dumps(quick)))
    assert text.startswith("# State formats on synthetic states") and "Quick run, seed 0" in text
    cells = [Cell(**c) for c in quick["cells"]]
    outside = [c for c in cells if c.verdict == "outside"]
    listed = text.split("## Outside 30 %")[1]
    assert listed.count("\n| ") == len(outside) + 1
    shown = numerics.terminal(cells, [Check(**c) for c in quick["checks"]])
    assert f"{len(cells) - len(outside)} of {len(cells)} numbers within 30 %" in shown


def test_the_command_writes_both_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = numerics.main(["--quick", "--sections", "2c", "--out", str(tmp_path)])
    assert status == 0
    names = sorted(p.name for p in tmp_path.iterdir())
    assert names == ["NUMERICS.md", "numerics-quick.json"]
    result = json.loads((tmp_path / "numerics-quick.json").read_text("utf-8"))
    assert result["schema"] == numerics.SCHEMA and result["quick"] is True
    assert {c["section"] for c in result["cells"]} == {"2c"}
    assert "Section 2c" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sections", "7"], "unknown section '7': use some of 2a, 2b, 2c, 3, 5"),
        (["--threads", "0"], "--threads 0: use 1 or more"),
    ],
)
def test_bad_arguments(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        numerics.main(["--quick", *arguments])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_the_committed_report_is_that_of_the_committed_result() -> None:
    result = json.loads((RESULTS / "numerics-full.json").read_text("utf-8"))
    assert (RESULTS / "NUMERICS.md").read_text("utf-8") == markdown(result)
    assert result["quick"] is False
    note = {
        (r.section, r.group, r.design.label, column): value
        for r in all_rows()
        for column, value in r.note.items()
    }
    cells = [Cell(**c) for c in result["cells"]]
    assert {(c.section, c.group, c.design, c.column): c.note for c in cells} == note
    for c in cells:
        assert c.ratio == c.measured / c.note
    for sections, share in ((("2a", "2b", "2c", "3", "5"), 0.75), (("3", "5"), 0.95)):
        mine = [c for c in cells if c.section in sections]
        assert sum(c.verdict != "outside" for c in mine) >= share * len(mine)
