"""Product of the rows of an output copy with the T vectors of a verify step.

y[r, t] = sum_n O[r, n] c[n, t] on matrix units, the codes read once for all T. Codes become fp16
operands, which hold every one of them exactly (wider copies become tf32 ones); scales are applied
to the sums in fp32. c comes scaled to a largest magnitude of one for each t and rounded to fp16:
within 3e-4 of the exact product, far below the error of the codes. fp32 copies and c take three
tf32 products, within 1e-6.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl

from ...formats.rotation import block_of, signs
from ...state.cache import VerifyRows
from ...state.layout import StateViews
from .launch import beside, rejoin
from .matrix import matrix_path
from .planes import PTX, code_values, e4m3_scale, e8m0_scale, element_bits_of, load_words
from .spec import KernelFormat

TOKENS = tl.constexpr(8)
"""Columns of a product: T padded."""


@triton.constexpr_function
def operand_of(output):
    """Type of both operands of a format's product: "fp16", "tf32" or "tf32x3"."""
    return {"fp32": "tf32x3", "bf16": "tf32"}.get(output[0], "fp16")


@triton.constexpr_function
def by_planes(n, output):
    """True if a plane of a row (n / 8 codes) is an inner size of its own, in one block each."""
    w, gran, block = n // 8, output[3], output[4]
    return w >= 16 and w & (w - 1) == 0 and (gran != "block" or block % w == 0)


@triton.constexpr_function
def ends_block(i, n, block):
    """True if plane i is the last of its scale block (or of the row)."""
    w = n // 8
    return i == 7 or (block > 0 and (i * w) // block != ((i + 1) * w) // block)


@triton.jit
def in_part(slot, flush, PART: tl.constexpr):
    """True if a launch for PART takes the row: 0 every row, 1 all but 2, 2 the rows that flush."""
    due = (slot >= 0) & (flush != 0)
    if PART == 0:
        return slot == slot
    elif PART == 1:
        return due == 0
    else:
        return due


@triton.jit
def window_dot(a, b):
    """a [M, K] of the ring's dtype times fp32 b [K, N], as exact as fp32."""
    if PTX and a.dtype == tl.bfloat16:
        high = b.to(tl.bfloat16)
        rest = b - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
        out = tl.dot(a, low)
        out = tl.dot(a, middle, out)
        return tl.dot(a, high, out)
    else:
        return tl.dot(a.to(tl.float32), b, input_precision="tf32x3")


@triton.jit
def _operand(x, KIND: tl.constexpr):
    return x.to(tl.float16) if KIND == "fp16" else x.to(tl.float32)


@triton.jit
def _product(a, b, acc, KIND: tl.constexpr):
    if KIND == "fp16":
        return tl.dot(a, b, acc)
    else:
        return tl.dot(a, b, acc, input_precision=KIND)


@triton.jit
def _block_scale(scale_ptr, index, row_ok, SCALE: tl.constexpr):
    """fp32 scales at ``index``; of e4m3 without the tile's."""
    stored = tl.load(scale_ptr + index, mask=row_ok, other=0)
    if SCALE == "e4m3":
        return e4m3_scale(stored.to(tl.int32))
    elif SCALE == "e8m0":
        return e8m0_scale(stored.to(tl.int32))
    else:
        return stored.to(tl.float32)


@triton.jit
def copy_words(
    code_ptr, row, row_ok, N: tl.constexpr, OUTPUT: tl.constexpr
):  # fmt: skip
    """The codes of rows as ``copy_product`` takes them: loaded early, used late."""
    W: tl.constexpr = N // 8
    ELEM: tl.constexpr = OUTPUT[0]
    WORDS: tl.constexpr = element_bits_of(ELEM) // 4
    if by_planes(N, OUTPUT):
        column = tl.arange(0, W)
        at = row[:, None] * (WORDS * W) + column[None, :]
        return load_words(code_ptr, at, row_ok[:, None] & (column < W)[None, :], W, ELEM)
    else:
        return ()


@triton.jit
def copy_product(
    words, code_ptr, scale_ptr, tile_ptr, c_ptr, row, row_ok,
    N: tl.constexpr, NP: tl.constexpr, OUTPUT: tl.constexpr,
):  # fmt: skip
    """sum_n O[row, n] c[n, t] as fp32 [rows, TOKENS].

    Pointers are at the head: codes int32, scales as stored, tile fp32; ``row`` counts within it.
    words from ``copy_words``. c [N, TOKENS] in the operand's type, n in natural order.
    """
    ELEM: tl.constexpr = OUTPUT[0]
    GRAN: tl.constexpr = OUTPUT[3]
    BLOCK: tl.constexpr = OUTPUT[4]
    SCALE: tl.constexpr = OUTPUT[5]
    KIND: tl.constexpr = operand_of(OUTPUT)
    W: tl.constexpr = N // 8
    BITS: tl.constexpr = element_bits_of(ELEM)
    SHIFT: tl.constexpr = 2.0 ** OUTPUT[1]
    t = tl.arange(0, TOKENS)
    total = tl.zeros([row.shape[0], TOKENS], tl.float32)
    if by_planes(N, OUTPUT):
        column = tl.arange(0, W)
        values = code_values(words, ELEM, GRAN == "none")
        acc = total
        for i in tl.static_range(8):
            c = tl.load(c_ptr + (i * W + column)[:, None] * TOKENS + t[None, :])
            acc = _product(_operand(values[i], KIND), c, acc, KIND)
            if GRAN == "block":
                if ends_block(i, N, BLOCK):
                    at = row * (N // BLOCK) + i * W // BLOCK
                    total += acc * _block_scale(scale_ptr, at, row_ok, SCALE)[:, None]
                    acc = tl.zeros([row.shape[0], TOKENS], tl.float32)
            else:
                total = acc
    else:  # element by element, for state sizes whose planes are too narrow for a product
        PER: tl.constexpr = 32 // BITS
        n = tl.arange(0, NP)
        plane = n // W
        word = plane // PER * W + n % W
        mask = row_ok[:, None] & (n < N)[None, :]
        at = row[:, None] * (BITS // 4 * W) + word[None, :]
        stored = tl.load(code_ptr + at, mask=mask, other=0)
        stored = stored >> ((plane % PER) * BITS)[None, :]
        value = code_values((stored,) * 8, ELEM, GRAN == "none")[0]
        c = tl.load(c_ptr + n[:, None] * TOKENS + t[None, :], mask=(n < N)[:, None], other=0.0)
        if GRAN == "block":
            at = row[:, None] * (N // BLOCK) + (n // BLOCK)[None, :]
            value = value * _block_scale(scale_ptr, at, mask, SCALE)
            value = tl.where(mask, value, 0.0)
            total = _product(value, c.to(tl.float32), total, "tf32x3")
        else:
            value = tl.where(mask, value, 0.0)
            total = _product(_operand(value, KIND), c, total, KIND)
    if GRAN == "block" and SCALE == "e4m3":
        total *= tl.load(tile_ptr + row // 16, mask=row_ok, other=0.0)[:, None]
    elif GRAN == "row":
        total *= tl.load(scale_ptr + row, mask=row_ok, other=0.0).to(tl.float32)[:, None]
    return total * SHIFT


@triton.jit
def store_vectors(c_ptr, x, OUTPUT: tl.constexpr, N: tl.constexpr, NP: tl.constexpr):
    """Vectors x [M, NP] (zero beyond N) as ``copy_product`` reads the first TOKENS of them.

    A vector is divided by its largest magnitude, if that is above zero; returns those [M].
    """
    M: tl.constexpr = x.shape[0]
    top = tl.max(tl.abs(x), 1)
    # NaN and Inf stay in their own column
    scale = tl.where(top > 0, top, 1.0)
    t, n = tl.arange(0, M), tl.arange(0, NP)
    value = _operand(x / scale[:, None], operand_of(OUTPUT))
    at = c_ptr + n[None, :] * TOKENS + t[:, None]
    tl.store(at, value, mask=(n < N)[None, :] & (t < TOKENS)[:, None])
    return top


@triton.jit
def sees(entry, base, count, ancestors_ptr, TREE: tl.constexpr):
    """Which ring entries [LP] each token of the step sees [LP, TOKENS], and the paths [T, T].

    ancestors_ptr int32 [T] of the row if TREE; paths[s, t]: token s is on the path of token t.
    """
    t = tl.arange(0, TOKENS)
    if TREE:
        path = tl.load(ancestors_ptr + t, mask=t < count, other=0)
    else:
        path = (2 << t) - 1
    path = tl.where(t < count, path, 0)
    new = entry - base
    own = (new >= 0) & (new < count)
    bit = (path[None, :] >> tl.where(own, new, 0)[:, None]) & 1
    # a token beyond the count sees nothing
    seen = ((entry < base)[:, None] | (own[:, None] & (bit != 0))) & (t < count)[None, :]
    paths = ((path[None, :] >> t[:, None]) & 1) != 0
    return seen, paths


@triton.jit
def seen_dot(inputs, weight, seen):
    """The step's own inputs [M, 16] times weight [16, TOKENS]; of what is unseen, nothing.

    A draft may be Inf or NaN: that must reach the tokens that see it (seen [16, TOKENS]) and no
    others, although a product takes every entry. (A committed input is seen by all.)
    """
    wide = inputs.to(tl.float32)
    bad = (wide - wide) != 0
    if tl.max(tl.max(bad.to(tl.int32), 1), 0) != 0:
        y = window_dot(tl.where(bad, 0.0, inputs).to(inputs.dtype), weight)
        hit = tl.dot(bad.to(tl.float16), seen.to(tl.float16))
        y = tl.where(hit > 0, float("nan"), y)
    else:
        y = window_dot(inputs, weight)
    return y


@triton.jit
def verify_compact_kernel(
    ring_ptr, path_ptr, slot_ptr, valid_ptr, flush_ptr,
    ring_stride, width,
    ENTRY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row's accepted tokens to the front of its step's ring entries, ENTRY numbers each.

    path int32 [b, width]. A token never moves up and the path ascends, so nothing that is still to
    be read is written over.
    """
    i_b = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + i_b).to(tl.int64)
    if slot < 0:
        return
    base = tl.where(tl.load(flush_ptr + i_b).to(tl.int32) != 0, 0, tl.load(valid_ptr + i_b))
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ring = ring_ptr + slot * ring_stride + base * ENTRY + at
    for i in range(width):
        source = tl.load(path_ptr + i_b * width + i)
        ok = (at < ENTRY) & (source > i)
        tl.store(ring + i * ENTRY, tl.load(ring + source * ENTRY, mask=ok, other=0), mask=ok)


def compact(views: StateViews, rows: VerifyRows, path: torch.Tensor) -> None:
    """``state.cache.compact`` without waiting for the device; path int32 [b, T]."""
    if path.dtype != torch.int32 or path.shape[:1] != rows.slots.shape or path.ndim != 2:
        raise ValueError(f"path is {path.dtype} {tuple(path.shape)}; it must be int32 [b, T]")
    check_devices(views.ckpt.device, rows, {"path": path}, path.shape[1])
    batch, width = path.shape
    if batch == 0:
        return
    path = path.contiguous()
    for name, ring in views.tensors().items():
        if name.startswith("ring"):
            entry = ring[0, 0].numel()
            verify_compact_kernel[(batch, triton.cdiv(entry, 1024))](
                ring, path, rows.slots, rows.valid, rows.flush, ring.stride(0), width,
                ENTRY=entry, BLOCK=min(1024, triton.next_power_of_2(entry)),
            )  # fmt: skip


@dataclass(frozen=True)
class LaunchConfig:
    """How a verify step is launched.

    rows: of a block (a power of two from 16 on; a head's at most); warps: of a program without
    matrix units. With them, heads: of a program, at most (for Mamba-2 one that reads, for GDN one
    that prepares); blocks: of a program (GDN);
    ahead: 1 to load the next block while one is worked on; registers: of a thread, at most.
    solve: 1 to push queries back through a window by one small system, 0 token by token (GDN).
    fused: 1 to fold the rows that flush in the launch that reads, each block of rows by the program
    that reads it (matrix units). Otherwise beside: 1 to fold, and then read, the rows that flush on
    a stream beside the others; flush: programs that flush for each multiprocessor.
    flush_registers: of a thread that folds, at most (windows of more than 16 tokens need more than
    a plain step's).
    """

    rows: int = 64
    warps: int = 2
    heads: int = 2
    blocks: int = 1
    ahead: int = 0
    registers: int = 128
    solve: int = 1
    fused: int = 1
    beside: int = 0
    flush: int = 12
    flush_registers: int = 168


@lru_cache(maxsize=32)
def rotation_signs(n: int, device: torch.device) -> torch.Tensor:
    """The signs of the rotation with its 1 / sqrt(block), fp32 [n]."""
    return (signs(n) * block_of(n) ** -0.5).to(device)


@lru_cache(maxsize=64)
def zero_token(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros [1, ...] that stand for one token of every row, as a fold of committed inputs needs."""
    return torch.zeros(1, *shape, dtype=dtype, device=device)


def query_scratch(
    batch: int, vectors: int, n: int, output: KernelFormat, matrix: bool, device: torch.device
) -> torch.Tensor:
    """Room for the queries of a step, as ``copy_product`` or ``verify_matrix`` wants them."""
    if matrix:
        return torch.empty(batch, vectors, 16 * TOKENS.value * 4, dtype=torch.int32, device=device)
    dtype = torch.float16 if operand_of(output) == "fp16" else torch.float32
    return torch.empty(batch, vectors, n, TOKENS.value, dtype=dtype, device=device)


def aligned(*tensors: torch.Tensor | None) -> bool:
    """True if sixteen bytes load at once from what belongs to any row (and token) of these."""
    return all(
        t is None
        or (t.data_ptr() % 16 == 0 and all(step % 16 == 0 for step in t.stride()[: t.ndim - 2]))
        for t in tensors
    )


def takes_matrix(
    views: StateViews, output: KernelFormat, rows: int, n: int, inputs: torch.Tensor
) -> bool:
    """True if the reads of a layer go through ``verify_matrix``; inputs [b, T, H, R]."""
    ring = views.ring_x if views.ring_x is not None else views.ring_v
    assert ring is not None
    return (
        matrix_path(PTX.value, n, output) != ""
        and n == 128
        and rows % 16 == 0
        and ring.dtype == inputs.dtype == torch.bfloat16
        and aligned(inputs)
        and all(t.stride(0) % 16 == 0 for t in views.tensors().values())
    )


def fold_and_read(
    fold: Callable[[], None], read: Callable[[int], None], apart: bool, device: torch.device
) -> None:
    """Launch a step: the rows that flush read what their fold leaves. read takes an ``in_part``.

    apart: they do so on a stream beside the others.
    """
    if apart:
        with beside(device):
            fold()
            read(2)
        read(1)
        rejoin(device)
    else:
        fold()
        read(0)


def divisor_up_to(total: int, limit: int) -> int:
    """The largest divisor of ``total`` that is at most ``limit``."""
    return next(d for d in range(min(total, limit), 0, -1) if total % d == 0)


def output_of(x: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    """Where y of inputs x [b, T, H, R] goes: ``out``, or a new tensor. Raises ValueError."""
    if out is None:
        return torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.shape != x.shape or not out[:1, :1].is_contiguous():
        raise ValueError(
            f"out has shape {tuple(out.shape)} and strides {out.stride()}; the step writes "
            f"{tuple(x.shape)}, what belongs to a token contiguous"
        )
    return out


def row_strided(name: str, t: torch.Tensor) -> torch.Tensor:
    """``t`` [b, T, ...] if what belongs to a token is contiguous, else a contiguous copy."""
    if not t.is_floating_point():
        raise TypeError(f"{name} is {t.dtype}; it must be a floating-point tensor")
    return t if t[:1, :1].is_contiguous() else t.contiguous()


def check_devices(
    device: torch.device, rows: VerifyRows, tensors: dict[str, torch.Tensor | None], width: int
) -> None:
    """Raise unless all is on one device, the rows' vectors are contiguous and T is not too wide."""
    if width > TOKENS.value:
        raise ValueError(f"{width} tokens a row; a verify step takes at most {TOKENS.value}")
    vectors = {f"rows.{n}": getattr(rows, n) for n in rows.__dataclass_fields__}
    for name, t in {**vectors, **tensors}.items():
        if t is not None and t.device != device:
            raise ValueError(f"{name} is on {t.device}, the state on {device}; move it there")
    for name, t in vectors.items():
        if t is not None and not t.is_contiguous():
            raise ValueError(f"{name} has strides {t.stride()}; it must be contiguous")
    tree = rows.ancestors
    if tree is not None and (tree.dtype != torch.int32 or tree.shape[1:] != (width,)):
        raise ValueError(f"rows.ancestors is {tree.dtype} {tuple(tree.shape)}; need int32 [b, T]")
