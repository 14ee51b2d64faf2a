"""The training code in tools/: fast scans equal transformers, batches weigh the tasks."""

import importlib
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

TOOLS = Path(__file__).resolve().parents[1] / "tools"


@pytest.fixture(scope="module")
def tools() -> dict[str, ModuleType]:
    sys.path.insert(0, str(TOOLS))
    try:
        return {n: importlib.import_module(n) for n in ("tiny_models", "train_tiny")}
    finally:
        sys.path.remove(str(TOOLS))


@pytest.mark.parametrize("name", ["tiny-nemotron-h", "tiny-qwen3.5"])
def test_fast_scans_equal_transformers(
    tools: dict[str, ModuleType], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = tools["tiny_models"]
    torch.manual_seed(0)
    model = tiny.build(name).eval()
    ids = torch.randint(0, 128, (2, 150))  # two whole chunks and a part
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=False).logits
        scan = (tiny.modeling_nemotron_h, "mamba2_chunk_scan", tiny.mamba2_scan)
        if name == "tiny-qwen3.5":
            scan = (tiny.modeling_qwen3_5, "torch_chunk_gated_delta_rule", tiny.gdn_scan)
        calls = []
        monkeypatch.setattr(scan[0], scan[1], lambda *a, **k: calls.append(1) or scan[2](*a, **k))
        got = model(input_ids=ids, use_cache=False).logits
    assert len(calls) == 2
    # fp32 sums of 64 x 128 terms in another order: 1e-6 of unit logits, with a margin of ten
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=2e-5)


def test_batches_hold_every_task_at_its_weight(tools: dict[str, ModuleType]) -> None:
    train = tools["train_tiny"]
    corpus = np.frombuffer(b"text " * 400, np.uint8)
    batches = train.block_of_batches(np.random.default_rng(0), 128, 32, corpus)
    assert len(batches) == train.BLOCK
    for ids, weight, task in batches:
        assert ids.shape == weight.shape == (32, 128) and ids.dtype == np.uint8
        for i, (name, (share, loss)) in enumerate(train.MIX.items()):
            assert abs((task == i).sum() - share * 32) <= 1
            assert weight[task == i].sum() == pytest.approx(loss, rel=1e-4), name
        assert not weight[:, -1].any()  # nothing follows the last token
    assert sum(loss for _, loss in train.MIX.values()) == pytest.approx(1)


def test_the_stages_use_all_the_time(tools: dict[str, ModuleType]) -> None:
    for longest, plan in tools["train_tiny"].STAGES.items():
        assert sum(share for share, _, _ in plan) == pytest.approx(1)
        assert max(length for _, length, _ in plan) == longest
        assert {length * size for _, length, size in plan} <= {16384, 32768}


def test_long_streams_are_sparse_and_end(tools: dict[str, ModuleType]) -> None:
    """Counting stays answerable to the end of a long stream; the end of a tally carries loss."""
    train = tools["train_tiny"]
    rng = np.random.default_rng(0)
    ids, mask, meta = train.streams.draw_count(rng, 4, 4096, **train.sparse(rng, 4096))
    assert mask[:, 3500:].any(1).all() and 8 < meta["count"].max() <= 31
    ids, mask, _ = train.streams.draw_tally(rng, 8, 512)
    ends = train.with_ends(ids, mask) & ~mask
    rows, at = np.nonzero(ends)
    assert len(rows) >= 6 and (np.bincount(rows) <= 1).all()
    assert np.isin(ids[rows, at + 1], train.streams.FILL).all() and mask[rows, at - 1].all()
