"""StateLayout: bytes, alignment, views over an engine's pages."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from replayssm_quant.config import StateConfig
from replayssm_quant.formats import FORMATS
from replayssm_quant.state.geometry import LayerGeometry
from replayssm_quant.state.layout import ALIGN, StateLayout

geometries = st.builds(
    lambda kind, groups, per, rows, n: LayerGeometry(kind, groups * per, rows, n, groups),
    st.sampled_from(["mamba2", "gdn"]),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 12),
    st.sampled_from([32, 64, 96, 128]),
)
pairs = st.sampled_from(
    [("fp32", None), ("fp16", "nvfp4"), ("fp8", "mxfp4"), ("e4m3/b16", "e4m3"), ("int8", "same")]
    + [("P4+4", None), ("P4+8", None), ("P8+4", None), ("int4", None), ("bf16", "int8/head")]
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(geometries, pairs, st.integers(1, 64), st.sampled_from(["bf16", "fp16", "fp32"]))
def test_fields_are_aligned_disjoint_and_counted(geometry, pair, length, ring):
    layout = StateLayout(geometry, StateConfig.from_flags(*pair, buffer_len=length), ring)
    end = 0
    for f in layout.fields.values():
        assert f.offset % ALIGN == 0 and f.offset >= end
        end = f.offset + f.nbytes
    assert end <= layout.page_bytes < end + ALIGN and layout.page_bytes % ALIGN == 0
    counted = layout.checkpoint_bytes + layout.copy_bytes + layout.ring_bytes
    assert counted == sum(f.nbytes for f in layout.fields.values())
    update, output = layout.config.update, layout.config.output
    shape = (geometry.heads, geometry.rows, geometry.n)
    assert layout.checkpoint_bytes == update.nbytes(*shape)
    assert layout.copy_bytes == (output.nbytes(*shape) if output else 0)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(geometries, pairs, st.integers(1, 20), st.sampled_from([0, 4, 124, 4096]))
def test_views_cover_their_bytes_and_no_others(geometry, pair, length, gap):
    """Every view written with ones, in a page with a wider stride: exactly its bytes change."""
    layout = StateLayout(geometry, StateConfig.from_flags(*pair, buffer_len=length))
    pages = torch.zeros(2, layout.page_bytes + gap, dtype=torch.uint8)
    views = layout.views(pages)
    for name, t in views.tensors().items():
        if name.startswith("copy") and layout.config.output is None:
            assert t.data_ptr() == getattr(views, name.replace("copy", "ckpt")).data_ptr()
            continue
        t[1].copy_(torch.full_like(t[1], 1))
        assert t.shape[0] == 2 and t.stride(0) * t.element_size() == layout.page_bytes + gap
    used = torch.zeros(layout.page_bytes + gap, dtype=torch.bool)
    for f in layout.fields.values():
        used[f.offset : f.offset + f.nbytes] = True
    assert not pages[0].any() and not pages[1][~used].any()
    assert views.pages is pages and views.layout is layout
    assert pages[1].ne(0).sum() >= sum(
        f.nbytes // {"fp32": 4, "fp16": 2, "bf16": 2, "u8": 1, "i32": 4}[f.storage]
        for f in layout.fields.values()
    )


@settings(max_examples=40, deadline=None, derandomize=True)
@given(geometries, pairs, st.integers(1, 20), st.sampled_from(["bf16", "fp32"]), st.integers(0, 7))
def test_its_text_gives_an_equal_layout(geometry, pair, length, ring, drafts):
    config = StateConfig.from_flags(*pair, buffer_len=length, rotate=True, seed=length)
    layout = StateLayout(geometry, config, ring, drafts)
    again = StateLayout.from_text(layout.text)
    assert again.signature == layout.signature and again.config == config
    assert (again.drafts, again.capacity, again.text) == (drafts, layout.capacity, layout.text)


def test_views_refuse_pages_that_do_not_fit():
    layout = StateLayout(LayerGeometry("gdn", 2, 4, 32, 1), StateConfig.from_flags("fp8"))
    for pages in (
        torch.zeros(2, layout.page_bytes - 1, dtype=torch.uint8),
        torch.zeros(2, layout.page_bytes, dtype=torch.int8),
        torch.zeros(layout.page_bytes, dtype=torch.uint8),
    ):
        with pytest.raises(ValueError, match="pages must be uint8"):
            layout.views(pages)


@pytest.mark.parametrize("name", FORMATS)
def test_geometries_that_a_format_cannot_hold(name):
    geometry = LayerGeometry("mamba2", 2, 4, 20, 1)
    fmt = FORMATS[name]
    config = StateConfig.from_flags(name, None if fmt.is_planar else "same")
    if fmt.scale.granularity == "block" or fmt.bits == 4 or fmt.lo_bits == 4:
        with pytest.raises(ValueError, match=f"{name.replace('+', '.')}.*d_state.*20"):
            StateLayout(geometry, config)
    else:
        assert StateLayout(geometry, config).page_bytes > 0


def test_ring_dtype_is_checked():
    with pytest.raises(ValueError, match="ring dtype 'int8'"):
        StateLayout(LayerGeometry("gdn", 2, 4, 32, 1), StateConfig.from_flags("fp8"), "int8")
