"""Public operations on a split recurrent state: Triton on a GPU, the torch reference elsewhere.

Every function takes the views of one layer (``state.layout.StateLayout.views``), a ``StateConfig``
and the control rows of the step (``state.cache.StepRows``). ``impl`` forces ``"reference"`` or
``"triton"``; None picks Triton for CUDA tensors where Triton can be imported. Shapes and errors are
those of the references in ``kernels/*/reference.py``.

Under torch.compile each function is one operator, ``torch.ops.replayssm_quant.<its name>``, which
changes the pages and nothing else (``operators``); it takes any views that a ``StateLayout`` made.
Cursors belong outside of the compiled code: they are the caller's to advance.
"""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

import torch

from .config import StateConfig
from .formats.rotation import rotate
from .kernels.gdn import reference as gdn_reference
from .kernels.gdn import verify_reference as gdn_verify_reference
from .kernels.mamba2 import reference as mamba2_reference
from .kernels.mamba2 import verify_reference as mamba2_verify_reference
from .operators import like, nothing, operator, states, unpacked
from .state.cache import StepRows, VerifyRows, write_state
from .state.cache import compact as compact_reference
from .state.layout import StateViews

IMPLS = ("reference", "triton")


def _triton(
    family: str, tensor: torch.Tensor, impl: str | None, name: str = "triton_ops"
) -> ModuleType | None:
    """The family's Triton module (``kernels/<family>/<name>.py``), or None."""
    if impl not in (None, *IMPLS):
        raise ValueError(f"unknown impl '{impl}'; use reference, triton or None (pick by device)")
    if impl == "reference" or (impl is None and not tensor.is_cuda):
        return None
    if importlib.util.find_spec("triton") is None:
        if impl == "triton":
            raise ValueError("impl 'triton' needs the triton package: install the kernels extra")
        return None
    return importlib.import_module(f".kernels.{family}.{name}", __package__)


@operator(like("x"))
def mamba2_decode(
    views: StateViews,
    config: StateConfig,
    rows: StepRows,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    *,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    layer: int = 0,
    head_offset: int = 0,
    impl: str | None = None,
) -> torch.Tensor:
    """One Mamba-2 token a row; see ``kernels.mamba2.reference.decode_step``."""
    module = _triton("mamba2", x, impl)
    step = mamba2_reference.decode_step if module is None else module.decode_step
    return step(
        views,
        config,
        rows,
        x,
        dt,
        A,
        B,
        C,
        D=D,
        z=z,
        dt_bias=dt_bias,
        dt_softplus=dt_softplus,
        layer=layer,
        head_offset=head_offset,
    )


@operator(states, changes=False)
def mamba2_load(
    views: StateViews,
    config: StateConfig,
    rows: StepRows,
    A: torch.Tensor,
    *,
    impl: str | None = None,
) -> torch.Tensor:
    """fp32 states [b, H, P, N] with their rings folded in; see ``reference.load_state``."""
    module = _triton("mamba2", A, impl)
    load = mamba2_reference.load_state if module is None else module.load_state
    return load(views, config, rows, A)


@operator(like("v"))
def gdn_decode(
    views: StateViews,
    config: StateConfig,
    rows: StepRows,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    scale: float | None = None,
    l2norm: bool = True,
    layer: int = 0,
    head_offset: int = 0,
    impl: str | None = None,
) -> torch.Tensor:
    """One Gated DeltaNet token a row; see ``kernels.gdn.reference.decode_step``."""
    module = _triton("gdn", v, impl)
    step = gdn_reference.decode_step if module is None else module.decode_step
    return step(
        views,
        config,
        rows,
        q,
        k,
        v,
        g,
        beta,
        scale=scale,
        l2norm=l2norm,
        layer=layer,
        head_offset=head_offset,
    )


@operator(unpacked)
def gdn_decode_packed(
    views: StateViews,
    config: StateConfig,
    rows: StepRows,
    mixed_qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    *,
    scale: float | None = None,
    l2norm: bool = True,
    allow_neg_eigval: bool = False,
    layer: int = 0,
    head_offset: int = 0,
    impl: str | None = None,
) -> torch.Tensor:
    """``gdn_decode`` of what the layer's convolution and projections leave.

    mixed_qkv [b, 2 HK K + HV V] (q, then k, then v), raw gates a and b [b, HV], A_log and dt_bias
    [HV]; g and beta are made in fp32 (``kernels.gdn.reference.gates``). Returns y [b, HV, V].
    """
    module = _triton("gdn", mixed_qkv, impl)
    options = {"scale": scale, "l2norm": l2norm, "layer": layer, "head_offset": head_offset}
    if module is not None:
        raw = (mixed_qkv, a, b, A_log, dt_bias)
        options["allow_neg_eigval"] = allow_neg_eigval
        return module.decode_packed(views, config, rows, *raw, **options)
    q, k, v = gdn_reference.split_packed(views, mixed_qkv)
    g, beta = gdn_reference.gates(a, b, A_log, dt_bias, allow_neg_eigval=allow_neg_eigval)
    return gdn_reference.decode_step(views, config, rows, q, k, v, g, beta, **options)


@operator(like("x"))
def mamba2_verify(
    views: StateViews,
    config: StateConfig,
    rows: VerifyRows,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    *,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    layer: int = 0,
    head_offset: int = 0,
    impl: str | None = None,
) -> torch.Tensor:
    """T Mamba-2 tokens a row; see ``kernels.mamba2.verify_reference.verify_step``."""
    module = _triton("mamba2", x, impl, "verify")
    step = mamba2_verify_reference.verify_step if module is None else module.verify_step
    options = {"D": D, "z": z, "dt_bias": dt_bias, "dt_softplus": dt_softplus}
    where = {"layer": layer, "head_offset": head_offset}
    return step(views, config, rows, x, dt, A, B, C, **options, **where)


@operator(like("v"))
def gdn_verify(
    views: StateViews,
    config: StateConfig,
    rows: VerifyRows,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    scale: float | None = None,
    l2norm: bool = True,
    layer: int = 0,
    head_offset: int = 0,
    impl: str | None = None,
) -> torch.Tensor:
    """T Gated DeltaNet tokens a row; see ``kernels.gdn.verify_reference.verify_step``."""
    module = _triton("gdn", v, impl, "verify")
    step = gdn_verify_reference.verify_step if module is None else module.verify_step
    where = {"layer": layer, "head_offset": head_offset}
    return step(views, config, rows, q, k, v, g, beta, scale=scale, l2norm=l2norm, **where)


@operator(unpacked)
def gdn_verify_packed(
    views: StateViews,
    config: StateConfig,
    rows: VerifyRows,
    mixed_qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    *,
    scale: float | None = None,
    l2norm: bool = True,
    allow_neg_eigval: bool = False,
    layer: int = 0,
    head_offset: int = 0,
    impl: str | None = None,
) -> torch.Tensor:
    """``gdn_verify`` of what the layer's convolution and projections leave.

    mixed_qkv [b, T, 2 HK K + HV V], a and b [b, T, HV], the others as in ``gdn_decode_packed``.
    Returns y [b, T, HV, V].
    """
    module = _triton("gdn", mixed_qkv, impl, "verify")
    options = {"scale": scale, "l2norm": l2norm, "layer": layer, "head_offset": head_offset}
    if module is not None:
        raw = (mixed_qkv, a, b, A_log, dt_bias)
        options["allow_neg_eigval"] = allow_neg_eigval
        return module.verify_packed(views, config, rows, *raw, **options)
    q, k, v = gdn_reference.split_packed(views, mixed_qkv)
    g, beta = gdn_reference.gates(a, b, A_log, dt_bias, allow_neg_eigval=allow_neg_eigval)
    return gdn_verify_reference.verify_step(views, config, rows, q, k, v, g, beta, **options)


@operator(states, changes=False)
def gdn_load(
    views: StateViews, config: StateConfig, rows: StepRows, *, impl: str | None = None
) -> torch.Tensor:
    """fp32 states [b, HV, V, K] with their rings folded in; see ``reference.load_state``."""
    module = _triton("gdn", views.ckpt, impl)
    load = gdn_reference.load_state if module is None else module.load_state
    return load(views, config, rows)


@operator(nothing)
def compact(
    views: StateViews, rows: VerifyRows, path: torch.Tensor, *, impl: str | None = None
) -> None:
    """Move the accepted path of a tree of drafts to the front; see ``state.cache.compact``.

    path int32 [b, T]: the accepted tokens' indices, ascending, then -1.
    """
    module = _triton("common", views.ckpt, impl, "verify")
    (compact_reference if module is None else module.compact)(views, rows, path)


@operator(nothing)
def store_state(
    views: StateViews,
    config: StateConfig,
    rows: StepRows,
    state: torch.Tensor,
    *,
    layer: int = 0,
    head_offset: int = 0,
    impl: str | None = None,
) -> None:
    """Store unrotated fp32 states [b, H, R, N], as a prefill leaves them, into both copies.

    Only ``rows.slots`` (no padding), ``rows.key`` and ``rows.position`` are used.
    """
    module = _triton("common", state, impl)
    if module is not None:
        module.store_state(views, config, rows, state, layer=layer, head_offset=head_offset)
        return
    if config.rotate:
        state = rotate(state)
    write_state(
        views,
        config,
        rows.slots,
        state,
        rows.key,
        rows.position,
        layer=layer,
        head_offset=head_offset,
    )
