"""When and for what an engine's kernels are compiled ahead; the layers are stand-ins."""

from types import SimpleNamespace

import pytest
import torch

from replayssm_quant.backends.vllm import rehearsal
from replayssm_quant.backends.vllm.rehearsal import Rehearsal, batches, empty_rows


@pytest.mark.parametrize("kind", ["mamba2", "gdn"])
def test_every_launch_of_the_tables_is_among_the_batches(kind: str) -> None:
    module = rehearsal.importlib.import_module(f"replayssm_quant.kernels.{kind}.triton_ops")

    def compiled(table: tuple, batch: int) -> tuple:
        launch = [c for least, c in table if least <= batch][-1]
        return launch, "one" if batch == 1 else batch % 16 == 0  # Triton knows no more of a number

    for table in module.LAUNCH.values():
        wanted = {compiled(table, b) for b in range(1, 257)}
        assert {compiled(table, b) for b in batches(kind, 256)} == wanted
        wanted = {compiled(table, b) for b in range(1, 6)}
        assert {compiled(table, b) for b in batches(kind, 5)} == wanted
    assert batches(kind, 1) == [1]


def test_rows_that_do_nothing() -> None:
    rows = empty_rows(3, torch.device("cpu"))
    assert rows.slots.tolist() == [-1] * 3 and rows.slots.dtype == torch.int64
    assert rows.valid.dtype == rows.position.dtype == torch.int32
    assert rows.flush.dtype == torch.bool and rows.key.dtype == torch.int64


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
