"""Public operations on a split recurrent state: Triton on a GPU, the torch reference elsewhere.

Every function takes the views of one layer (``state.layout.StateLayout.views``), a ``StateConfig``
and the control rows of the step (``state.cache.StepRows``). ``impl`` forces ``"reference"`` or
``"triton"``; None picks Triton for CUDA tensors where Triton can be imported. Shapes and errors are
those of the references in ``kernels/*/reference.py``.
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


def gdn_load(
    views: StateViews, config: StateConfig, rows: StepRows, *, impl: str | None = None
) -> torch.Tensor:
    """fp32 states [b, HV, V, K] with their rings folded in; see ``reference.load_state``."""
    module = _triton("gdn", views.ckpt, impl)
    load = gdn_reference.load_state if module is None else module.load_state
    return load(views, config, rows)


def compact(
    views: StateViews, rows: VerifyRows, path: torch.Tensor, *, impl: str | None = None
) -> None:
    """Move the accepted path of a tree of drafts to the front; see ``state.cache.compact``.

    path int32 [b, T]: the accepted tokens' indices, ascending, then -1.
    """
    module = _triton("common", views.ckpt, impl, "verify")
    (compact_reference if module is None else module.compact)(views, rows, path)


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
