"""Gated DeltaNet decode on Triton: the signatures of ``reference``, and vLLM's packed input.

A step is four launches: ``prepare`` (norms, gates, the query pushed back through the window, the
append) and the readout of the output copy for rows that do not flush, ``window`` and ``flush`` for
those that do. Which rows flush is data; nothing waits for the device, so a CUDA graph may hold the
step. For fewer than twelve sequences one launch does it all (``step``).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from ...config import StateConfig
from ...formats.rotation import unrotate
from ...state.cache import StepRows
from ...state.geometry import LayerGeometry
from ...state.layout import StateViews
from ..common.check import check_gpu, check_rows, check_views
from ..common.hadamard import rotation_signs as _rotation_signs
from ..common.keys import settle_keys
from ..common.launch import (
    beside,
    early,
    multiprocessors,
    register_limit,
    rejoin,
    starts_early,
)
from ..common.matrix import block_rows, matrix_path
from ..common.planes import PTX
from ..common.store import (
    check_state_size,
    fold_warps,
    launch_warps,
    plane_arguments,
    rounding_sizes,
)
from .decode import readout_kernel
from .flush import flush_kernel, load_kernel
from .prepare import keys_kernel, prepare_kernel, window_base, window_kernel
from .reference import NORM_EPS, check_inputs, split_packed
from .step import step_kernel


@dataclass(frozen=True)
class LaunchConfig:
    """How a step is launched.

    rows: of a readout block; blocks: of a program; ahead: 1 to load the next block while one is
    worked on; warps: of a readout program without matrix units; registers: of one, at most.
    prepare_registers: of a program that prepares reads, at most, where it loads words (windows
    of 16, d_state 128); others need more.

    window: warps of a program that prepares flushes (1, 2 or 4: several hold fewer registers each).
    flush: programs that flush for each multiprocessor; flush_registers: of one, at most; beside: 1
    to flush on a stream beside the reads, 0 after them; dot_from: windows of at least this length
    fold by matrix products, shorter ones token by token.

    single: 1 to do all of that in one launch whose programs serve ``rows`` rows of a head each,
    whether they read or flush, and prepare for themselves; of the others only dot_from counts then.
    It stores the same bytes.
    """

    rows: int
    blocks: int = 1
    ahead: int = 0
    warps: int = 1
    flush: int = 16
    flush_registers: int = 128
    window: int = 1
    beside: int = 0
    dot_from: int = 5
    single: int = 0
    registers: int = 255
    prepare_registers: int = 255


WINDOW_WARPS = 16
"""Warps that prepare flushes, for each multiprocessor."""

_ONE = LaunchConfig(32, single=1)
_MANY = {"flush": 12, "flush_registers": 168, "beside": 1, "prepare_registers": 64}
_WIDE = LaunchConfig(64, warps=4, **_MANY)
LAUNCH: dict[int, tuple[tuple[int, LaunchConfig], ...]] = {
    4: ((1, _ONE), (4225, LaunchConfig(64, **_MANY))),
    8: (
        (1, _ONE),
        (4225, LaunchConfig(32, 2, ahead=1, warps=2, registers=80, **(_MANY | {"flush": 8}))),
    ),
    16: ((1, _ONE), (4225, _WIDE)),
    32: ((1, _ONE), (4225, _WIDE)),
}
"""Bits of the readout's codes -> (smallest ``fold_warps`` of the batch, launch configuration),
ascending. The H200 holds 2,112 warps of the kernels that fold: one launch takes up to two rounds.

NVIDIA H200, triton 3.6.0, 32 heads of 128 x 128, microseconds of the mix. From batch 32 on 4 and 8
bits have the fastest of ten to fourteen at batch 256 (commit d0d926b): P4+8 73 (88 with the flush
after the reads), nvfp4 + fp16 75 (88), P8+4 78 (95), e4m3 77 (93). In one launch nvfp4 + fp16 takes
5.7 at batch 1 and 13.0 at 8, where vLLM's fp32 step takes 6.0 and 13.8; P8+4 5.6 and 13.6, fp32
states 6.3 and 15.1 (commit effcc5a). At 4,096 warps both ways take as long (commit 7a0a659): 22.2
and 22.0 on Qwen3.5-4B at 16 (P8+4 22.2 and 23.1, fp32 23.2 and 26.0), 17.5 and 18.5 on Qwen3.5-122B
at 8. Heads of 96 columns are faster in several launches from 2,880 on (OLMo-Hybrid at 8 23.8 and
21.7), and slower than vLLM's either way. 16 and 32 bits are not tuned further. Preparing with 64
registers, nvfp4 + fp16 takes 77.5 where it takes 75.5 with as many as it likes, P8+4 80.1 and 79.8;
reads alone 53.6 and 57.2, 62.5 and 65.8 (commit 47fd9ad).
"""


def launch_for(
    config: StateConfig, batch: int, geometry: LayerGeometry | None = None
) -> LaunchConfig:
    """What ``LAUNCH`` says for a readout format and a batch (default: of Qwen3.5-4B)."""
    warps = max(batch, 1) * (256 if geometry is None else fold_warps(geometry))
    return [c for least, c in LAUNCH[config.readout.bits] if least <= warps][-1]


_RING = ("ring_k", "ring_v", "ring_g", "ring_beta", "ring_rk")


def _ring_arguments(views: StateViews, names: tuple[str, ...] = _RING) -> dict:
    args = {}
    for name in names:
        ring = getattr(views, name)
        args[f"{name}_ptr"], args[f"{name}_stride"] = ring, ring.stride(0)
    return args


def _sizes(views: StateViews) -> dict:
    assert views.ring_k is not None and views.ring_v is not None and views.ring_g is not None
    length, keys, n = views.ring_k.shape[1:]
    heads, width = views.ring_v.shape[2:]
    return {"HK": keys, "HV": heads, "K": n, "V": width, "L": length}


def _check_layer(views: StateViews, config: StateConfig, rows: StepRows) -> None:
    """Raise TypeError or ValueError for a layer or rows that no kernel takes."""
    if views.ring_k is None or views.ring_v is None or views.ring_g is None:
        raise ValueError("these views belong to a Mamba-2 layer; use mamba2_decode")
    check_gpu(views.ckpt.device)
    check_state_size(views.ring_v.shape[3], views.ring_k.shape[3])
    if views.ring_g.shape[3] not in (1, views.ring_k.shape[3]):
        raise ValueError(
            f"a gate of {views.ring_g.shape[3]} columns has no kernel; use 1, or "
            f"{views.ring_k.shape[3]} (one a key channel)"
        )
    check_rows(rows, views.ckpt.device)
    check_views(views, views.ring_k, config)


def _row_strided(name: str, t: torch.Tensor, device: torch.device) -> torch.Tensor:
    """``t`` if only its first stride is free, else a contiguous copy (it is only read)."""
    if t.device != device:
        raise ValueError(f"{name} is on {t.device}, the state on {device}; move it there")
    if not t.is_floating_point():
        raise TypeError(f"{name} is {t.dtype}; it must be a floating-point tensor")
    return t if t[:1].is_contiguous() else t.contiguous()


def _in_words(*tensors: torch.Tensor) -> bool:
    """True if these are of one 16-bit type, and Triton may load 16 bytes of a row at once."""
    one = tensors[0].dtype
    return one in (torch.bfloat16, torch.float16) and all(
        t.dtype == one and t.data_ptr() % 16 == 0 and t.stride(0) % 16 == 0 for t in tensors
    )


# compiled code calls the operators of ``ops``; a direct call stays out of its graph
@torch.compiler.disable
def _run(
    out: torch.Tensor,
    views: StateViews,
    config: StateConfig,
    rows: StepRows,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    A_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    scale: float,
    l2norm: bool,
    negative: bool,
    layer: int,
    head_offset: int,
    launch: LaunchConfig | None = None,
    readout: bool = True,
) -> None:
    """One step into ``out`` [b, HV, V]; g and beta are raw projections if A_log is given.

    Without readout only rows that flush are stepped; the caller makes the others padding.
    """
    size = _sizes(views)
    hk, hv, n, width, length = size.values()
    batch, device = out.shape[0], out.device
    gate_width = views.ring_g.shape[3]
    per_key = hv // hk
    empty = torch.empty
    launch = launch or launch_for(config, batch, LayerGeometry("gdn", hv, width, n, hk))
    dot = (
        length >= launch.dot_from
        and gate_width == 1
        and l2norm  # fp16 halves need keys of norm 1
        and length <= 32
        and 64 < n <= 128  # a plane of a key is the product's inner size, which must be 16
    )
    window = max(16, triton.next_power_of_2(length))
    single = bool(launch.single) and length > 1 and readout
    planes, plane_sizes = plane_arguments(views, config)
    matrix = matrix_path(PTX.value, n, plane_sizes["OUTPUT"]) != "" and width % 8 == 0
    block = launch.rows
    if single:
        block = min(block, max(16, triton.next_power_of_2(width)))
    if matrix:
        block = block_rows(block, n, views.ring_v.dtype, config.readout)
    # scratch: of a row's heads and key heads, or of each program of the one launch
    heads, owners = hv, hk
    if single:
        heads = owners = hv * triton.cdiv(width, block)
    padded = triton.next_power_of_2(n)
    per_padded = triton.next_power_of_2(1 if single else per_key)
    rate = empty(batch, heads, device=device)
    folding = dict.fromkeys(("keys", "left", "right", "base", "total"), rate)
    folding["rate"] = rate
    folding["gate"] = empty(batch, heads, gate_width, device=device)
    folding["query"] = empty(batch, owners, n, device=device)
    if dot:
        half = {"dtype": torch.float16, "device": device}
        folding["left"] = empty(batch, heads, 2, window, padded, **half)
        folding["right"] = empty(batch, owners, 2, window, padded, **half)
        folding["base"] = empty(batch, heads, window_base(width, window), device=device)
        folding["total"] = empty(batch, heads, device=device)
    else:
        folding["keys"] = empty(batch, owners, length, n, device=device)
    folding = {f"{name}_ptr": value for name, value in folding.items()}
    inputs = {
        "q_ptr": q, "k_ptr": k, "v_ptr": v, "g_ptr": g, "beta_ptr": beta,
        "A_log_ptr": rate if A_log is None else A_log,
        "dt_bias_ptr": rate if dt_bias is None else dt_bias,
        "sign_ptr": _rotation_signs(n, device) if config.rotate else rate,
        "slot_ptr": rows.slots, "valid_ptr": rows.valid, "flush_ptr": rows.flush,
        "q_stride": q.stride(0), "k_stride": k.stride(0), "v_stride": v.stride(0),
        "g_stride": g.stride(0), "beta_stride": beta.stride(0), "scale": scale,
        "KP": padded, "PER": per_key, "GW": gate_width, "LP": window,
        "RAW_GATES": A_log is not None, "NEGATIVE": negative, "L2NORM": l2norm, "EPS": NORM_EPS,
        "ROTATE": config.rotate, **_ring_arguments(views), **size,
    }  # fmt: skip
    stored = {
        "position_ptr": rows.position, "key_ptr": rows.key, "layer": layer,
        "head_offset": head_offset, "DOT": dot, "WARPS": launch_warps(n),
        **rounding_sizes(config),
    }  # fmt: skip
    reading = {
        "scratch_ptr": empty(
            batch, owners, window * window + per_padded * (window + padded), device=device
        ),
        "c_ptr": empty(batch, heads, n, dtype=torch.int32, device=device),
        "top_ptr": empty(batch, heads, device=device),
        "w_ptr": empty(batch, heads, length, device=device),
    }
    words = (
        PTX.value and n == 128 and window == 16 and gate_width == 1
        and (single or per_key <= 4) and _in_words(views.ring_k, q, k)
    )  # fmt: skip
    shorter = max(4, triton.next_power_of_2(length))  # the window that is read
    if single:
        step_kernel[(batch * heads,)](
            y_ptr=out, y_stride=out.stride(0), WP=padded // 8, LPR=shorter, ROWS=block,
            MATRIX=matrix, WORDS=words, num_warps=1 if matrix else launch_warps(n), num_stages=1,
            **inputs, **stored, **folding, **reading, **planes, **plane_sizes,
        )  # fmt: skip
        return
    common = {"slot_ptr": rows.slots, "valid_ptr": rows.valid, "y_ptr": out, "WP": padded // 8}
    common |= {"y_stride": out.stride(0), **size}
    tiles = batch * hv * plane_sizes["TILES"]
    listed = empty(batch + 1, dtype=torch.int32, device=device)

    def fold_rows() -> None:
        cores = multiprocessors(device)
        made = {name: value for name, value in folding.items() if name != "scratch_ptr"}
        programs = min(tiles, launch.flush * cores)
        warps = launch.window if dot and k.dtype == views.ring_k.dtype else 1
        window_kernel[(min(batch * hv, WINDOW_WARPS // warps * cores) + 1,)](
            list_ptr=listed, batch=batch, DOT=dot, WARPS=warps, num_warps=warps, num_stages=1,
            **inputs, **made, **register_limit(96 if warps > 1 else 255),
        )  # fmt: skip
        flush_kernel[(programs,)](
            list_ptr=listed, v_ptr=v, v_stride=v.stride(0), PER=per_key, GW=gate_width, LP=window,
            num_warps=launch_warps(n), num_stages=1, **stored, **made, **common, **planes,
            **_ring_arguments(views, ("ring_v", "ring_g", "ring_beta")), **plane_sizes,
            **register_limit(launch.flush_registers),
        )  # fmt: skip

    if length == 1 or not readout:
        if readout:
            out.zero_()  # padding rows, which no program visits
        fold_rows()
        return
    if launch.beside:
        with beside(device):
            fold_rows()
    names = ("copy", "copy_scale", "copy_tile")
    copy = {name + end: planes[name + end] for name in names for end in ("_ptr", "_stride")}
    copy |= {s: plane_sizes[s] for s in ("COPY_HEAD", "COPY_SCALE_HEAD", "TILES", "OUTPUT")}
    start = starts_early(device)
    prepare_kernel[(batch, hk)](
        VP=triton.next_power_of_2(width), PERP=per_padded, OUTPUT=plane_sizes["OUTPUT"],
        MATRIX=matrix, WORDS=words, EARLY=start, num_warps=1, num_stages=1, **inputs,
        **reading, **register_limit(launch.prepare_registers if words else 255),
    )  # fmt: skip
    blocks = launch.blocks * launch.rows // block
    given = {name: value for name, value in reading.items() if name != "scratch_ptr"}
    readout_kernel[(batch * hv * triton.cdiv(width, block * blocks),)](
        flush_ptr=rows.flush, LP=shorter, ROWS=block, BLOCKS=blocks, MATRIX=matrix,
        EARLY=start, AHEAD=bool(launch.ahead) and matrix,
        num_warps=1 if matrix else launch.warps,
        **given, **copy, **early(start), **_ring_arguments(views, ("ring_v",)),
        **{name: value for name, value in common.items() if name != "HK"},
        **register_limit(launch.registers),
    )  # fmt: skip
    if launch.beside:
        rejoin(device)
    else:
        fold_rows()


def _step(
    out: torch.Tensor | None,
    views: StateViews,
    config: StateConfig,
    rows: StepRows,
    inputs: tuple[torch.Tensor, ...],
    weights: tuple[torch.Tensor, torch.Tensor] | None,
    scale: float | None,
    l2norm: bool,
    negative: bool,
    layer: int,
    head_offset: int,
    launch: LaunchConfig | None,
) -> torch.Tensor:
    """The step of a checked layer (``_check_layer``)."""
    device = views.ckpt.device
    names = ("q", "k", "v", "g" if weights is None else "a", "beta" if weights is None else "b")
    q, k, v, g, beta = (
        _row_strided(name, t, device) for name, t in zip(names, inputs, strict=True)
    )
    shape = (rows.slots.shape[0], *views.ring_v.shape[2:])
    if out is None:
        out = torch.empty(shape, dtype=v.dtype, device=device)
    elif tuple(out.shape) != shape or out.device != device or not out[:1].is_contiguous():
        raise ValueError(
            f"out is {tuple(out.shape)} on {out.device}; the step writes {shape} on {device}, "
            "contiguous within a row"
        )
    if out.shape[0] == 0:
        return out
    A_log, dt_bias = weights if weights is not None else (None, None)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    _run(
        out, views, config, rows, q, k, v, g, beta, A_log, dt_bias, scale, l2norm, negative,
        layer, head_offset, launch,
    )  # fmt: skip
    return out


def decode_step(
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
    out: torch.Tensor | None = None,
    launch: LaunchConfig | None = None,
) -> torch.Tensor:
    """One token for each row: read, append or flush; see ``reference.decode_step``.

    q, k [b, HK, K], v [b, HV, V], g [b, HV] or [b, HV, 1 or K], beta [b, HV]; the stride from row
    to row is free (slices of one buffer). out [b, HV, V] is written if given. Padding rows (slot
    -1) give zeros. Raises TypeError or ValueError before any launch.
    """
    check_inputs(views, rows, q, k, v, g, beta)
    _check_layer(views, config, rows)
    inputs = (q, k, v, g, beta)
    return _step(
        out, views, config, rows, inputs, None, scale, l2norm, False, layer, head_offset, launch
    )


def decode_packed(
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
    out: torch.Tensor | None = None,
    launch: LaunchConfig | None = None,
) -> torch.Tensor:
    """One token from what the layer's convolution and projections leave, as vLLM packs it.

    mixed_qkv [b, 2 HK K + HV V] (q, then k, then v), raw gates a, b [b, HV], A_log, dt_bias [HV]:
    g = -exp(A_log) softplus(a + dt_bias) and beta = sigmoid(b) (doubled with allow_neg_eigval) are
    made in fp32. Everything else as ``decode_step``.
    """
    _check_layer(views, config, rows)
    batch, hv = rows.slots.shape[0], views.ring_v.shape[2]
    mixed_qkv = _row_strided("mixed_qkv", mixed_qkv, views.ckpt.device)
    q, k, v = split_packed(views, mixed_qkv)
    wanted = {
        "mixed_qkv": (mixed_qkv, (batch, mixed_qkv.shape[-1])),
        "a": (a, (batch, hv)),
        "b": (b, (batch, hv)),
        "A_log": (A_log, (hv,)),
        "dt_bias": (dt_bias, (hv,)),
    }
    for name, (t, shape) in wanted.items():
        if tuple(t.shape) != shape:
            raise ValueError(f"{name} has shape {tuple(t.shape)}; rows and layer need {shape}")
    inputs = (q, k, v, a, b)
    weights = (A_log.contiguous(), dt_bias.contiguous())
    return _step(
        out, views, config, rows, inputs, weights, scale, l2norm, allow_neg_eigval, layer,
        head_offset, launch,
    )  # fmt: skip


def load_state(views: StateViews, config: StateConfig, rows: StepRows) -> torch.Tensor:
    """The state of each row with its ring folded in, unrotated fp32 [b, HV, V, K].

    Nothing is written to the pool. Padding rows (slot -1) give zeros. Raises TypeError or
    ValueError before any launch.
    """
    _check_layer(views, config, rows)
    size = _sizes(views)
    hk, hv, n, width, length = size.values()
    batch, device = rows.slots.shape[0], views.ckpt.device
    state = torch.empty(batch, hv, width, n, device=device)
    if batch == 0:
        return state
    keys = torch.empty(batch, hk, length, n, device=device)
    padded = triton.next_power_of_2(n)
    keys_kernel[(batch, hk)](
        keys, _rotation_signs(n, device) if config.rotate else keys,
        slot_ptr=rows.slots, valid_ptr=rows.valid,
        HK=hk, K=n, L=length, KP=padded, ROTATE=config.rotate, num_warps=1,
        **_ring_arguments(views, ("ring_k", "ring_rk")),
    )  # fmt: skip
    planes, sizes = plane_arguments(views, config)
    names = ("code", "low", "scale", "tile")
    load_kernel[(sizes["TILES"], hv, batch)](
        state, keys, slot_ptr=rows.slots, valid_ptr=rows.valid,
        WP=padded // 8, PER=hv // hk, GW=views.ring_g.shape[3], num_warps=launch_warps(n),
        **_ring_arguments(views, ("ring_v", "ring_g", "ring_beta")),
        **{f"{name}{end}": planes[f"{name}{end}"] for name in names for end in ("_ptr", "_stride")},
        **{s: sizes[s] for s in ("CODE_HEAD", "LOW_HEAD", "SCALE_HEAD", "TILES", "UPDATE")},
        **size,
    )  # fmt: skip
    return unrotate(state) if config.rotate else state


settle_keys(*(f"{__package__}.{name}" for name in ("decode", "flush", "prepare", "step")))
