"""The operators behind ``ops``: schemas, fake results, and compiled code that keeps every byte."""

from __future__ import annotations

import dataclasses
import shutil
from dataclasses import dataclass

import pytest
import torch

from replayssm_quant import ops
from replayssm_quant.config import StateConfig
from replayssm_quant.formats.philox import request_key
from replayssm_quant.kernels.gdn.reference import gates, split_packed
from replayssm_quant.state.cache import PAD_SLOT, StepRows, VerifyRows, tree_ancestors
from replayssm_quant.state.geometry import LayerGeometry
from replayssm_quant.state.layout import StateLayout, StateViews

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CONFIG = StateConfig.from_flags("fp16", "nvfp4", buffer_len=4, rotate=True)
MAMBA2 = LayerGeometry("mamba2", 2, 16, 32, 1)
GDN = LayerGeometry("gdn", 2, 16, 32, 1)
BATCH, SLOTS, DRAFTS = 3, 8, 2
LOADS = ("mamba2_load", "gdn_load")
NAMES = (
    "mamba2_decode",
    "mamba2_verify",
    "mamba2_load",
    "gdn_decode",
    "gdn_decode_packed",
    "gdn_verify",
    "gdn_verify_packed",
    "gdn_load",
    "compact",
    "store_state",
)


def operator_of(name: str):
    return getattr(torch.ops.replayssm_quant, name).default


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    """In (-1, 1)."""
    return (2 * torch.rand(shape, generator=torch.Generator().manual_seed(seed)) - 1).to(DEVICE)


def step_rows(batch: int = BATCH, first: int = 0) -> StepRows:
    """Slots from ``first`` on; the first row flushes, the second is padding, the others read."""
    row = torch.arange(batch)
    slots = torch.where(row == 1, PAD_SLOT, first + row)
    valid = torch.where(row == 0, CONFIG.buffer_len - 1, row % 3).int()
    keys = torch.tensor([request_key(0, i) for i in range(batch)])
    rows = (slots, valid, row == 0, (row + 20).int(), keys)
    return StepRows(*(t.to(DEVICE) for t in rows))


def verify_rows(tree: bool = True) -> VerifyRows:
    one = step_rows()
    parents = torch.tensor([[-1, 0, 0]] * BATCH, device=DEVICE)
    count = torch.tensor([3, 2, 1], dtype=torch.int32, device=DEVICE)
    return VerifyRows(
        one.slots, one.valid, one.flush, count, one.position, one.key,
        tree_ancestors(parents) if tree else None, torch.where(one.flush, one.slots, PAD_SLOT),
    )  # fmt: skip


def pages_of(layout: StateLayout, seed: int = 0) -> torch.Tensor:
    """Pages in a wider buffer, as an engine's, that hold states and inputs of small numbers."""
    wide = torch.zeros(SLOTS, layout.page_bytes + 384, dtype=torch.uint8, device=DEVICE)
    pages = wide[:, 128 : 128 + layout.page_bytes]
    views, g = layout.views(pages), layout.geometry
    for name, view in views.tensors().items():
        if name.startswith("ring"):
            view.copy_(random(*view.shape, seed=seed) * 0.3)
    keys = torch.arange(SLOTS, device=DEVICE)
    every = StepRows(keys, keys.int(), keys < 0, keys.int(), keys)
    ops.store_state(views, layout.config, every, random(SLOTS, g.heads, g.rows, g.n, seed=seed))
    return pages


def inputs_of(name: str, g: LayerGeometry, batch: int = BATCH, seed: int = 0) -> dict:
    """The arguments of a function beside views, config and rows."""
    lead = (batch, 1 + DRAFTS) if "verify" in name else (batch,)
    if name == "compact":
        return {"path": torch.tensor([[0, 2, -1]] * batch, dtype=torch.int32, device=DEVICE)}
    if name == "store_state":
        return {"state": random(batch, g.heads, g.rows, g.n), "layer": 3}
    if g.kind == "mamba2":
        A = -random(g.heads).abs()
        if name == "mamba2_load":
            return {"A": A}
        x, z = random(2, *lead, g.heads, g.rows, seed=seed)
        B, C = random(2, *lead, g.groups, g.n, seed=seed + 1)
        more = {"D": random(g.heads), "dt_bias": random(g.heads, seed=2), "dt_softplus": True}
        dt = random(*lead, g.heads, seed=seed + 2)
        return {"x": x, "dt": dt, "A": A, "B": B, "C": C, "z": z, "layer": 1, **more}
    if name == "gdn_load":
        return {}
    a, b = random(2, *lead, g.heads, seed=seed + 3)
    if name.endswith("packed"):
        mixed = random(*lead, 24 + g.conv_channels, seed=seed)[..., 8:-16]
        weights = {"A_log": random(g.heads), "dt_bias": random(g.heads, seed=2)}
        return {"mixed_qkv": mixed, "a": a, "b": b, "allow_neg_eigval": True, **weights}
    q, k = random(2, *lead, g.groups, g.n, seed=seed)
    v = random(*lead, g.heads, g.rows, seed=seed + 1)
    return {"q": q, "k": k, "v": v, "g": -a.abs(), "beta": b.abs(), "head_offset": 2}


@dataclass
class Call:
    """One call of a function of ``ops``, eagerly on views or as an operator on pages."""

    name: str
    pages: torch.Tensor
    layout: StateLayout
    rows: StepRows | VerifyRows
    inputs: dict

    def eager(self) -> torch.Tensor | None:
        views = self.layout.views(self.pages)
        config = {} if self.name == "compact" else {"config": CONFIG}
        return getattr(ops, self.name)(views=views, rows=self.rows, **config, **self.inputs)

    @property
    def plain(self) -> dict:
        text = {"layout": self.layout.text}
        if self.name != "compact":
            text["config"] = CONFIG.text
        return {"pages": self.pages, **text, **vars(self.rows), **self.inputs}


def call_of(name: str) -> Call:
    g = GDN if name.startswith("gdn") else MAMBA2
    drafts = "verify" in name or name == "compact"
    layout = StateLayout(g, CONFIG, "fp32", DRAFTS if drafts else 0)
    rows = verify_rows() if drafts else step_rows()
    if name in (*LOADS, "store_state"):  # the references take no padding
        rows = rows.take(rows.live)
    return Call(name, pages_of(layout), layout, rows, inputs_of(name, g, len(rows.slots)))


@pytest.mark.parametrize("name", NAMES)
def test_the_operator_is_what_its_schema_and_fake_say(name: str) -> None:
    """By torch's own checks: it changes the pages alone, a fake result is like the real one, and
    traced with symbolic sizes it gives what it gives eagerly."""
    call = call_of(name)
    written = [a.name for a in operator_of(name)._schema.arguments if a.alias_info is not None]
    assert written == ([] if name in LOADS else ["pages"])
    torch.library.opcheck(operator_of(name), (), call.plain)


@pytest.mark.parametrize("name", NAMES)
def test_the_operator_is_the_function(name: str) -> None:
    call, before = call_of(name), call_of(name).pages
    twin = dataclasses.replace(call, pages=before.clone())
    want, got = call.eager(), operator_of(name)(**twin.plain)
    assert (want is None and got is None) or torch.equal(want, got)
    assert torch.equal(call.pages, twin.pages)
    assert torch.equal(call.pages, before) == (name in LOADS)


@pytest.mark.parametrize("name", ["gdn_decode_packed", "gdn_verify_packed"])
def test_packed_inputs_are_the_unpacked_ones(name: str) -> None:
    call = call_of(name)
    twin = dataclasses.replace(call, pages=call.pages.clone())
    y, i, views = call.eager(), twin.inputs, twin.layout.views(twin.pages)
    g, beta = gates(i["a"], i["b"], i["A_log"], i["dt_bias"], allow_neg_eigval=True)
    plain = getattr(ops, name.removesuffix("_packed"))
    z = plain(views, CONFIG, twin.rows, *split_packed(views, i["mixed_qkv"]), g, beta)
    if DEVICE.type == "cpu":
        assert torch.equal(y, z) and torch.equal(call.pages, twin.pages)
    else:  # the kernels make the gates themselves
        torch.testing.assert_close(y, z, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="mixed_qkv has shape"):
        dataclasses.replace(call, inputs={**i, "mixed_qkv": i["mixed_qkv"][..., 1:]}).eager()


# --- compiled -------------------------------------------------------------------------------------


class Model(torch.nn.Module):
    """Two layers of a family; the second gets what the first gives."""

    def __init__(self, name: str, views: list[StateViews], firsts: list[int]):
        super().__init__()
        self.step, self.views, self.firsts = getattr(ops, name), views, firsts
        self.value = {"mamba2_decode": "x", "gdn_decode": "v"}.get(name)

    def forward(self, inputs: dict, rows: list[StepRows]) -> torch.Tensor:
        y = torch.zeros((), device=DEVICE)
        for layer, views in enumerate(self.views):
            mine = {**inputs, "layer": layer}
            if self.value is None:
                mine["b"] = mine["b"] + y.sum(-1)
            else:
                mine[self.value] = mine[self.value] * 0.5 + y
            y = y + self.step(views, CONFIG, rows[layer], **mine)
        return y


def model_of(name: str, storage: str) -> tuple[Model, torch.Tensor]:
    """(model, all of its bytes). storage: its layers have pages of their own ("own"), take turns in
    the slots of one tensor ("between"), or take other slots of the same pages ("same")."""
    layout = StateLayout(GDN if name.startswith("gdn") else MAMBA2, CONFIG, "fp32")
    pages, size = [pages_of(layout, seed) for seed in range(2)], layout.page_bytes
    if storage == "own":
        whole = torch.cat([p._base.view(1, SLOTS, -1) for p in pages])
        return Model(name, [layout.views(w[:, 128 : 128 + size]) for w in whole], [0, 0]), whole
    if storage == "between":
        whole = torch.stack([p._base for p in pages], 1)
        parts = [whole[:, i, 128 : 128 + size] for i in range(2)]
        return Model(name, [layout.views(p) for p in parts], [0, 0]), whole
    whole = pages[0]._base.clone()
    parts = [whole[:, 128 : 128 + size] for _ in range(2)]
    return Model(name, [layout.views(p) for p in parts], [0, SLOTS // 2]), whole


def check_compiled(name: str, storage: str, backend: str) -> None:
    """Steps of two batch sizes, so that the second graph has a symbolic batch."""
    torch._dynamo.reset()
    ours, exact = model_of(name, storage), model_of(name, storage)
    before = exact[1].clone()
    compiled = torch.compile(ours[0], fullgraph=True, backend=backend)
    with torch.no_grad():
        for seed, batch in enumerate((3, 4, 3)):
            inputs = inputs_of(name, MAMBA2 if name[0] == "m" else GDN, batch, seed)
            inputs.pop("layer", None)
            rows = [step_rows(batch, first) for first in exact[0].firsts]
            want = exact[0](inputs, rows)
            assert torch.equal(compiled(inputs, rows), want)
            assert torch.equal(ours[1], exact[1])
    assert not torch.equal(exact[1], before)


@pytest.mark.parametrize(
    ("name", "storage"),
    [
        *(("mamba2_decode", storage) for storage in ("own", "between", "same")),
        ("gdn_decode", "own"),
        ("gdn_decode_packed", "between"),
    ],
)
def test_compiled_layers_keep_every_byte(name: str, storage: str) -> None:
    check_compiled(name, storage, "aot_eager")


@pytest.mark.slow
@pytest.mark.skipif(
    DEVICE.type == "cpu" and shutil.which("c++") is None, reason="inductor needs a C++ compiler"
)
def test_layers_compiled_by_inductor_keep_every_byte() -> None:
    check_compiled("mamba2_decode", "between", "inductor")


@pytest.mark.parametrize("storage", ["own", "between", "same"])
def test_inductor_allocates_no_page(storage: str) -> None:
    """The operators write to the pages given, whether layers have a storage each or share one."""
    torch._dynamo.reset()
    ours, exact = (model_of("mamba2_decode", storage) for _ in range(2))
    inputs = inputs_of("mamba2_decode", MAMBA2)
    inputs.pop("layer")

    def run(model: Model, x: torch.Tensor, rows: list[StepRows]) -> torch.Tensor:
        for views, one in zip(model.views, rows, strict=True):
            x = ops.mamba2_decode(views, CONFIG, one, **{**inputs, "x": x})
        return x

    rows = [step_rows(first=first) for first in exact[0].firsts]
    # a cached graph may come from layers that share their storage in another way
    with torch._inductor.config.patch(force_disable_caches=True):
        compiled = torch.compile(run, fullgraph=True, backend="inductor")
        got, code = torch._inductor.utils.run_and_get_code(compiled, ours[0], inputs["x"], rows)
    assert torch.equal(got, run(exact[0], inputs["x"], rows))
    assert torch.equal(ours[1], exact[1])
    lines = code[0].splitlines()
    assert sum("= torch.ops.replayssm_quant.mamba2_decode" in line for line in lines) == 2
    assert not [line for line in lines if "= empty_strided" in line and "uint8" in line]


@pytest.mark.parametrize("family", ["mamba2", "gdn"])
def test_compiled_code_stores_verifies_and_loads(family: str) -> None:
    """Operations after one another on the same pages, in their order."""
    torch._dynamo.reset()
    calls = {name: call_of(f"{family}_{name}") for name in ("verify", "load")}
    layout, rows = calls["verify"].layout, calls["verify"].rows
    live = calls["load"].rows
    state = random(len(live.slots), layout.geometry.heads, 16, 32, seed=9)
    path = torch.tensor([[0, 2, -1]] * BATCH, dtype=torch.int32, device=DEVICE)

    def run(views: StateViews, state: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ops.store_state(views, CONFIG, live, state * 2.0, layer=1)
        y = getattr(ops, f"{family}_verify")(views, CONFIG, rows, **calls["verify"].inputs)
        ops.compact(views, rows, path)
        loaded = getattr(ops, f"{family}_load")(views, CONFIG, live, **calls["load"].inputs)
        return y + 1.0, loaded

    ours, exact = (calls["verify"].pages.clone() for _ in range(2))
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    got, want = compiled(layout.views(ours), state), run(layout.views(exact), state)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert torch.equal(ours, exact) and not torch.equal(ours, calls["verify"].pages)


def test_compiled_code_runs_beside_weights_that_want_gradients() -> None:
    """Outside of no_grad too; what a step gives has no gradient."""
    call = call_of("mamba2_decode")
    names = ("A", "D", "dt_bias")
    weights = {name: torch.nn.Parameter(call.inputs[name]) for name in names}
    ours = call.layout.views(call.pages.clone())
    step = torch.compile(
        lambda x: ops.mamba2_decode(ours, CONFIG, call.rows, **{**call.inputs, **weights, "x": x}),
        fullgraph=True,
        backend="aot_eager",
    )
    y = step(call.inputs["x"])
    assert torch.equal(y, call.eager()) and not y.requires_grad
    assert torch.equal(ours.pages, call.pages)


def test_compiled_code_refuses_views_without_pages() -> None:
    call = call_of("mamba2_decode")
    views = dataclasses.replace(call.layout.views(call.pages), pages=None)
    step = torch.compile(
        lambda x: ops.mamba2_decode(views, CONFIG, call.rows, **{**call.inputs, "x": x}),
        fullgraph=True,
        backend="aot_eager",
    )
    with pytest.raises(Exception, match="compiled code needs views of pages"):
        step(call.inputs["x"])
