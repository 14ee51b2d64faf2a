"""Store fp32 states into checkpoint and copy: the codec of ``formats/codec.py`` as one kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...config import StateConfig
from ...formats.rotation import rotate
from ...state.cache import StepRows
from ...state.geometry import LayerGeometry
from ...state.layout import StateViews
from .halves import encode_halves, store_halves, takes_halves
from .planes import PAIRS, decode_tile, encode_tile, fetch_tile, random_words
from .spec import kernel_format, slot_stride, words


@triton.jit
def encode_state(
    values,
    key,
    position,
    layer,
    head,
    pair,
    column,
    row_ok,
    column_ok,
    code_ptr,
    low_ptr,
    scale_ptr,
    tile_ptr,
    copy_ptr,
    copy_scale_ptr,
    copy_tile_ptr,
    following,
    UPDATE: tl.constexpr,
    OUTPUT: tl.constexpr,
    HAS_COPY: tl.constexpr,
    SR: tl.constexpr,
    BITS: tl.constexpr,
    ROUNDS: tl.constexpr,
    R: tl.constexpr,
    N: tl.constexpr,
    LOADED: tl.constexpr,
):
    """A tile into the checkpoint, then what it decodes to into the copy; pointers at the head.

    LOADED: lanes own what they own of a loaded tile. After products the compiler may have shared
    out values otherwise; then no instruction may count on it.
    following: () or (pair, row_ok, code, low and scale pointers) of a tile of the same format, of
    which ``fetch_tile`` is returned; its loads run meanwhile, from where registers are free.
    """
    random = ()
    if SR:
        random = random_words(
            key, position, layer, head, pair[:, None], column[None, :], R, N // 8, BITS, ROUNDS
        )
    WIDTH: tl.constexpr = column.shape[0]
    HALVES: tl.constexpr = HAS_COPY and takes_halves(UPDATE, OUTPUT, R, N, WIDTH, SR, BITS)
    if HALVES:
        stored = store_halves(values, random, pair, column, code_ptr, LOADED)
        fetched = fetch_following(following, column, column_ok, UPDATE, R, N)
        encode_halves(stored, pair, column, copy_ptr, copy_scale_ptr, copy_tile_ptr)
    else:
        back = encode_tile(
            values, random, pair, column, row_ok, column_ok,
            code_ptr, low_ptr, scale_ptr, tile_ptr, UPDATE, SR, BITS, R, N, HAS_COPY, LOADED,
        )  # fmt: skip
        fetched = fetch_following(following, column, column_ok, UPDATE, R, N)
    if HAS_COPY and not HALVES:
        encode_tile(
            back, (), pair, column, row_ok, column_ok,
            copy_ptr, copy_ptr, copy_scale_ptr, copy_tile_ptr, OUTPUT, False, BITS, R, N, False,
            LOADED,
        )  # fmt: skip
    return fetched


@triton.jit
def fetch_following(
    following, column, column_ok, FORMAT: tl.constexpr, R: tl.constexpr, N: tl.constexpr
):
    """``fetch_tile`` of (pair, row_ok, code, low and scale pointers), or () of ().

    After them (pointer, mask) pairs and plain pointers may follow, a tuple each: what is there.
    """
    if len(following) > 0:
        fetched = fetch_tile(
            following[0], column, following[1], column_ok, following[2], following[3],
            following[4], FORMAT, R, N,
        )  # fmt: skip
        if len(following) > 5:
            for k in tl.static_range(len(following[5])):
                fetched = fetched + (tl.load(following[5][k][0], mask=following[5][k][1], other=0),)
            for k in tl.static_range(len(following[6])):
                fetched = fetched + (tl.load(following[6][k]),)
        return fetched
    else:
        return ()


@triton.jit(do_not_specialize=("layer", "head_offset"))
def _store_kernel(
    state_ptr,  # fp32 [b, H, R, N]
    slot_ptr, key_ptr, position_ptr,  # [b] int64, int64, int32
    code_ptr, low_ptr, scale_ptr, tile_ptr, copy_ptr, copy_scale_ptr, copy_tile_ptr,
    code_stride, low_stride, scale_stride, tile_stride,
    copy_stride, copy_scale_stride, copy_tile_stride,
    layer, head_offset,
    H: tl.constexpr, R: tl.constexpr, N: tl.constexpr, WP: tl.constexpr,
    CODE_HEAD: tl.constexpr, LOW_HEAD: tl.constexpr, SCALE_HEAD: tl.constexpr,
    COPY_HEAD: tl.constexpr, COPY_SCALE_HEAD: tl.constexpr, TILES: tl.constexpr,
    UPDATE: tl.constexpr, OUTPUT: tl.constexpr, HAS_COPY: tl.constexpr,
    SR: tl.constexpr, BITS: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    i_t, i_h, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    slot = tl.load(slot_ptr + i_b).to(tl.int64)
    if slot < 0:
        return
    pair = i_t * PAIRS + tl.arange(0, PAIRS)
    column = tl.arange(0, WP)
    column_ok = column < N // 8
    row_ok = (2 * pair < R, 2 * pair + 1 < R)
    base = state_ptr + (i_b * H + i_h) * (R * N)
    values = ()
    for p in tl.static_range(2):
        row = 2 * pair + p
        mask = row_ok[p][:, None] & column_ok[None, :]
        for i in tl.static_range(8):
            at = row[:, None] * N + i * (N // 8) + column[None, :]
            values = values + (tl.load(base + at, mask=mask, other=0.0),)
    encode_state(
        values, tl.load(key_ptr + i_b), tl.load(position_ptr + i_b), layer, i_h + head_offset,
        pair, column, row_ok, column_ok,
        code_ptr + slot * code_stride + i_h * CODE_HEAD,
        low_ptr + slot * low_stride + i_h * LOW_HEAD,
        scale_ptr + slot * scale_stride + i_h * SCALE_HEAD,
        tile_ptr + slot * tile_stride + i_h * TILES,
        copy_ptr + slot * copy_stride + i_h * COPY_HEAD,
        copy_scale_ptr + slot * copy_scale_stride + i_h * COPY_SCALE_HEAD,
        copy_tile_ptr + slot * copy_tile_stride + i_h * TILES, (),
        UPDATE, OUTPUT, HAS_COPY, SR, BITS, ROUNDS, R, N, True,
    )  # fmt: skip


@triton.jit
def _read_kernel(
    state_ptr, slot_ptr, code_ptr, low_ptr, scale_ptr, tile_ptr,
    code_stride, low_stride, scale_stride, tile_stride,
    H: tl.constexpr, R: tl.constexpr, N: tl.constexpr, WP: tl.constexpr,
    CODE_HEAD: tl.constexpr, LOW_HEAD: tl.constexpr, SCALE_HEAD: tl.constexpr,
    TILES: tl.constexpr, UPDATE: tl.constexpr,
):  # fmt: skip
    i_t, i_h, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    slot = tl.load(slot_ptr + i_b).to(tl.int64)
    pair = i_t * PAIRS + tl.arange(0, PAIRS)
    column = tl.arange(0, WP)
    live = slot >= 0  # a padding row reads nothing and gives zeros
    slot = tl.maximum(slot, 0)
    column_ok = (column < N // 8) & live
    row_ok = ((2 * pair < R) & live, (2 * pair + 1 < R) & live)
    values = decode_tile(
        pair, column, row_ok, column_ok,
        code_ptr + slot * code_stride + i_h * CODE_HEAD,
        low_ptr + slot * low_stride + i_h * LOW_HEAD,
        scale_ptr + slot * scale_stride + i_h * SCALE_HEAD,
        tile_ptr + slot * tile_stride + i_h * TILES,
        UPDATE, R, N,
    )  # fmt: skip
    for p in tl.static_range(2):
        row = 2 * pair + p
        for i in tl.static_range(8):
            at = (i_b * H + i_h) * (R * N) + row[:, None] * N + i * (N // 8) + column[None, :]
            mask = (row < R)[:, None] & (column < N // 8)[None, :]
            tl.store(state_ptr + at, tl.where(live, values[p * 8 + i], 0.0), mask=mask)


def read_state(views: StateViews, config: StateConfig, slots: torch.Tensor) -> torch.Tensor:
    """The decoded checkpoint of the slots, fp32 [b, H, R, N] (rotated if config.rotate).

    Slots below zero give zeros. Raises ValueError before any launch.
    """
    heads, r = views.ckpt.shape[1:3]
    args, sizes = plane_arguments(views, config)
    n = sizes["CODE_HEAD"] * 32 // config.update.bits // r
    check_state_size(r, n)
    state = torch.empty(len(slots), heads, r, n, dtype=torch.float32, device=views.ckpt.device)
    if len(slots):
        planes = ("code", "low", "scale", "tile")
        _read_kernel[(-(-r // 16), heads, len(slots))](
            state,
            slots,
            H=heads,
            R=r,
            N=n,
            WP=triton.next_power_of_2(n // 8),
            num_warps=launch_warps(n),
            **{f"{p}{end}": args[f"{p}{end}"] for p in planes for end in ("_ptr", "_stride")},
            **{k: sizes[k] for k in ("CODE_HEAD", "LOW_HEAD", "SCALE_HEAD", "TILES", "UPDATE")},
        )
    return state


def plane_arguments(views: StateViews, config: StateConfig) -> tuple[dict, dict]:
    """(tensors and slot strides, compile-time sizes) of checkpoint and copy, by argument name.

    An absent plane is replaced by the code plane, which no kernel touches under that name.
    """
    heads = views.ckpt.shape[1]
    code = words(views.ckpt)
    args, sizes = {}, {}
    for name, view, plane in (
        ("code", views.ckpt, words(views.ckpt)),
        ("low", views.ckpt_low, words(views.ckpt_low)),
        ("scale", views.ckpt_scale, views.ckpt_scale),
        ("tile", views.ckpt_tile_scale, views.ckpt_tile_scale),
        ("copy", views.copy, words(views.copy)),
        ("copy_scale", views.copy_scale, views.copy_scale),
        ("copy_tile", views.copy_tile_scale, views.copy_tile_scale),
    ):
        args[f"{name}_ptr"] = code if plane is None else plane
        args[f"{name}_stride"] = slot_stride(plane)
        if not name.endswith("tile"):
            per_head = 0 if plane is None or view is None else plane[0].numel() // heads
            sizes[f"{name.upper()}_HEAD"] = per_head
    sizes["TILES"] = -(-views.ckpt.shape[2] // 16)
    sizes["UPDATE"] = kernel_format(config.update)
    sizes["OUTPUT"] = kernel_format(config.readout)
    sizes["HAS_COPY"] = config.has_copy
    return args, sizes


def rounding_sizes(config: StateConfig) -> dict:
    """Compile-time values of the checkpoint's rounding."""
    return {
        "SR": config.uses_random_bits,
        "BITS": config.random_bits,
        "ROUNDS": config.philox_rounds,
    }


def check_state_size(rows: int, n: int) -> None:
    """Raise ValueError for shapes that no kernel takes."""
    if n % 8 or not 8 <= n <= 256:
        raise ValueError(
            f"d_state {n} has no kernel; use a multiple of 8 from 8 to 256, or impl='reference'"
        )
    if rows > 1024:
        raise ValueError(f"{rows} rows a head have no kernel; use up to 1024")


def launch_warps(n: int) -> int:
    """Warps of a program that owns one tile: 64 elements a thread."""
    return max(1, triton.next_power_of_2(n) // 128)


def fold_warps(geometry: LayerGeometry) -> int:
    """Warps that fold the state of one sequence, a program for each tile of 16 rows of a head."""
    return geometry.heads * -(-geometry.rows // 16) * launch_warps(geometry.n)


def store_state(
    views: StateViews,
    config: StateConfig,
    rows: StepRows,
    state: torch.Tensor,
    *,
    layer: int = 0,
    head_offset: int = 0,
) -> None:
    """Round fp32 states [b, H, R, N] (unrotated) into checkpoint and copy of ``rows.slots``.

    Rows whose slot is negative are skipped. Raises TypeError or ValueError before any launch.
    """
    if state.dtype != torch.float32 or state.ndim != 4:
        raise TypeError(f"states must be fp32 [b, H, R, N], not {state.dtype} {state.shape}")
    batch, heads, r, n = state.shape
    if (heads, r) != tuple(views.ckpt.shape[1:3]):
        raise ValueError(f"states {tuple(state.shape)} do not fit slots of {views.ckpt.shape[1:]}")
    check_state_size(r, n)
    if batch == 0:
        return
    if config.rotate:
        state = rotate(state)
    args, sizes = plane_arguments(views, config)
    _store_kernel[(-(-r // 16), heads, batch)](
        state.contiguous(),
        rows.slots,
        rows.key,
        rows.position,
        layer=layer,
        head_offset=head_offset,
        H=heads,
        R=r,
        N=n,
        WP=triton.next_power_of_2(n // 8),
        num_warps=launch_warps(n),
        **args,
        **sizes,
        **rounding_sizes(config),
    )
