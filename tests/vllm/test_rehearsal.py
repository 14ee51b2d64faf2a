"""When and for what an engine's kernels are compiled ahead; the layers are stand-ins."""

from types import SimpleNamespace

import pytest
import torch

from replayssm_quant.backends.vllm import rehearsal
from replayssm_quant.backends.vllm.cursors import SlotCursors
from replayssm_quant.backends.vllm.drafts import DraftCursors, shapes
from replayssm_quant.backends.vllm.rehearsal import (
    Rehearsal,
    batches,
    empty_rows,
    rehearse_cursors,
)
from replayssm_quant.config import StateConfig
from replayssm_quant.kernels.bench.registry import DESIGNS
from replayssm_quant.state.geometry import LayerGeometry


@pytest.mark.parametrize(
    "geometry",
    [
        LayerGeometry("mamba2", 96, 80, 128, 8),
        LayerGeometry("mamba2", 24, 128, 256, 1),
        LayerGeometry("gdn", 32, 128, 128, 16),
        LayerGeometry("gdn", 8, 128, 128, 4),
    ],
    ids=str,
)
@pytest.mark.parametrize("design", ["nvfp4+fp16-sr", "P8+4-sr-rot", "e4m3-sr", "fp32"])
def test_every_launch_of_the_tables_is_among_the_batches(
    geometry: LayerGeometry, design: str
) -> None:
    module = rehearsal.importlib.import_module(
        f"replayssm_quant.kernels.{geometry.kind}.triton_ops"
    )

    def compiled(batch: int) -> tuple:
        launch = module.launch_for(DESIGNS[design], batch, geometry)
        return launch, "one" if batch == 1 else batch % 16 == 0  # Triton knows no more of a number

    for most in (5, 256):
        wanted = {compiled(b) for b in range(1, most + 1)}
        assert {compiled(b) for b in batches(geometry, most)} == wanted
    assert len({launch for launch, _ in map(compiled, range(1, 257))}) > 1
    assert batches(geometry, 1) == [1]


def test_rows_that_do_nothing() -> None:
    rows = empty_rows(3, torch.device("cpu"))
    assert rows.slots.tolist() == [-1] * 3 and rows.slots.dtype == torch.int64
    assert rows.valid.dtype == rows.position.dtype == torch.int32
    assert rows.flush.dtype == torch.bool and rows.key.dtype == torch.int64


def test_steps_with_drafts_have_every_shape_that_a_layer_meets() -> None:
    plain, uniform, mixed = shapes(2, 3, "cpu")
    assert [s.width for s in (plain, uniform, mixed)] == [1, 4, 4]
    x = torch.arange(24.0).view(8, 3)
    assert plain.gather is None and uniform.gather is None and mixed.gather is not None
    assert uniform.pack(x).stride() == (12, 3, 1) and mixed.pack(x).equal(uniform.pack(x))
    wide = torch.zeros(8, 5)[:, :3]
    assert uniform.pack(wide).stride() == (20, 5, 1)  # a view; a mixed step gathers
    assert mixed.pack(wide).stride() == (12, 3, 1)
    assert mixed.rows.slots.shape == (2,)


@pytest.mark.parametrize("drafts", [0, 3])
def test_cursors_are_planned_and_moved_with_keys_and_without(
    drafts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[object] = []
    owner, name = (DraftCursors, "verify") if drafts else (SlotCursors, "decode")
    plan = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda self, *a: (seen.append(a[-1]), plan(self, *a)))
    rehearse_cursors(StateConfig(), drafts, torch.device("cpu"))
    assert seen[0] is None and None not in seen[1:] and len(seen) == (2 if drafts else 4)


def test_it_runs_once_all_layers_have_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    layers = [SimpleNamespace(name=n, views=SimpleNamespace()) for n in "ab"]
    found = Rehearsal(layers, ran.append)
    monkeypatch.setattr(found, "run", lambda: ran.append("run"))
    for layer in layers:
        layer.views.ckpt = SimpleNamespace(is_cuda=True)
    found.bound(layers[0])
    found.bound(layers[0])
    assert ran == []
    found.bound(layers[1])
    assert ran == ["run"]
    found.bound(layers[1])  # vLLM makes another cache, after it has measured
    assert ran == ["run"]
    found.bound(layers[0])
    assert ran == ["run", "run"]
    layers[0].views.ckpt = SimpleNamespace(is_cuda=False)  # references compile nothing
    for layer in layers:
        found.bound(layer)
    assert ran == ["run", "run"]


def test_a_failure_leaves_the_kernels_to_their_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    geometry = LayerGeometry("gdn", 4, 16, 16, 2)
    assert batches(geometry, 4) == [1, 2]  # imports kernels, which are to be interpreted
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)

    def rehearse(rows: int) -> None:
        raise ValueError(f"no step of {rows} rows")

    said: list[str] = []
    layer = SimpleNamespace(geometry=geometry, max_rows=4, rehearse=rehearse)
    layer.config, layer.drafts = StateConfig(), 0
    layer.views = SimpleNamespace(ckpt=torch.zeros(1))
    Rehearsal([layer], said.append).run()
    assert len(said) == 1 and "one by one" in said[0] and "no step of 1 rows" in said[0]
