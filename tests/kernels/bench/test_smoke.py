"""What the script for compute-sanitizer runs; the kernels themselves are tested elsewhere."""

from __future__ import annotations

import itertools

import pytest
import torch

pytest.importorskip("triton")

from replayssm_quant.kernels.bench import smoke  # noqa: E402
from replayssm_quant.state.geometry import LayerGeometry  # noqa: E402


def test_every_operation_runs_at_both_geometries(monkeypatch) -> None:
    ran = []
    for name in ("step", "verify"):
        monkeypatch.setattr(smoke, name, lambda *case, n=name: ran.append((n, *case[:3])))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert smoke.main(["--design", "fp32,e4m3-sr"]) == 0
    wanted = []
    for family, kind in itertools.product(("mamba2", "gdn"), ("decode", "verify")):
        both = smoke.GEOMETRIES[f"{family}_{kind}"]
        assert {g.kind for g in both} == {family} and [g.n for g in both] == [128, 96]
        which = "step" if kind == "decode" else "verify"
        wanted += [(which, f"{family}_{kind}", g, d) for g in both for d in ("fp32", "e4m3-sr")]
    assert sorted(ran, key=repr) == sorted(wanted, key=repr)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mamba2", "gdn"])
def test_a_verify_case_folds_appends_and_compacts(kind: str) -> None:
    """fp32 activations, which the interpreter can: rows that flush start their rings anew."""
    geometry = LayerGeometry(kind, 1, 16, 16, 1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    problem = smoke.verify(f"{kind}_verify", geometry, "e4m3-sr", device, torch.float32)
    ring, given = problem.views.ring_x, problem.inputs[0]
    if kind == "gdn":
        ring, given = problem.views.ring_v, given.v
    else:
        given = given.x
    slots = problem.slots[0]
    for row, base in ((0, 0), (1, 3), (2, 0)):
        count = 4 if row == 1 else 5
        path = [i for i in (0, 2, 4) if i < count]
        assert torch.equal(ring[slots[row], base : base + len(path)], given[row, path])
    assert torch.isfinite(problem.views.ckpt_scale).all()
