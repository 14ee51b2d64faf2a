"""What the heads of a group share in a Mamba-2 step that does not flush, made once.

One program serves a (group, row): it appends dt and B to the ring and leaves each head's weights of
the window and C in the form in which ``decode`` reads them, so that the programs that stream the
state wait for nothing but loads. ``step`` does the same for one head at a time.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.activation import softplus
from ..common.hadamard import rotate_rows
from ..common.launch import dependents_may_start
from ..common.readout import store_vector


@triton.jit
def ask_inputs(
    i_b, i_g, first, dt_ptr, B_ptr, C_ptr, A_ptr, D_ptr, bias_ptr, dt_stride, B_stride, C_stride,
    N: tl.constexpr, NP: tl.constexpr, PER: tl.constexpr, PERP: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_D: tl.constexpr,
):  # fmt: skip
    """(B, C [1, NP], dt, A, bias, D [PERP]) of the new token and of PER heads from ``first`` on.

    They depend on no slot: asked for before the row's slot is known.
    """
    n, head = tl.arange(0, NP)[None, :], tl.arange(0, PERP)
    head_ok, n_ok = head < PER, n < N
    B = tl.load(B_ptr + i_b * B_stride + i_g * N + n, mask=n_ok, other=0.0)
    C = tl.load(C_ptr + i_b * C_stride + i_g * N + n, mask=n_ok, other=0.0).to(tl.float32)
    dt = tl.load(dt_ptr + i_b * dt_stride + first + head, mask=head_ok, other=0.0).to(tl.float32)
    A = tl.load(A_ptr + first + head, mask=head_ok, other=0.0).to(tl.float32)
    bias = dt * 0.0
    if HAS_BIAS:
        bias = tl.load(bias_ptr + first + head, mask=head_ok, other=0.0).to(tl.float32)
    D = dt * 0.0
    if HAS_D:
        D = tl.load(D_ptr + first + head, mask=head_ok, other=0.0).to(tl.float32)
    return B, C, dt, A, bias, D


@triton.jit
def prepare_heads(
    inputs, valid, appends_dt, appends_B,
    ring_dt_ptr, ring_B_ptr,  # at the row's slot and the first head or the group
    sign_ptr, weight_ptr, dot_ptr, c_ptr, top_ptr,  # fp32 [PER, LP + 2], [LP], int32 [N], fp32 [1]
    H: tl.constexpr, G: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, LP: tl.constexpr,
    PER: tl.constexpr, PERP: tl.constexpr, OUTPUT: tl.constexpr, MATRIX: tl.constexpr,
    ROTATE: tl.constexpr, SOFTPLUS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_D: tl.constexpr,
):  # fmt: skip
    """Weights, C and its largest magnitude as ``prepare_kernel`` says; appends dt and B if asked.

    inputs from ``ask_inputs``; dot_ptr takes the products of the ring's B with C. The bits do not
    depend on PER: there are no sums over heads, and those of a head run from token to token.
    """
    B_now, C, dt_now, A, bias, D = inputs
    token, n, head = tl.arange(0, LP), tl.arange(0, NP)[None, :], tl.arange(0, PERP)
    head_ok, n_ok = head < PER, n < N
    # every load before the first use
    B = tl.load(
        ring_B_ptr + token[:, None] * (G * N) + n, mask=(token < valid)[:, None] & n_ok, other=0.0
    )
    dt = ()
    for j in tl.static_range(LP):
        dt = dt + (tl.load(ring_dt_ptr + j * H + head, mask=head_ok & (j < valid), other=0.0),)
    # C while the window is on its way. What reads memory after a barrier comes after it, and so
    # does all that a compiler might otherwise wait for before it asks for the window
    tl.debug_barrier()
    turned = C
    if ROTATE:
        turned = rotate_rows(turned, sign_ptr, 1, N, NP, True)
    top = tl.max(tl.max(tl.abs(turned), 1), 0)
    tl.store(top_ptr, top)
    one = tl.zeros([1, 1], tl.int32)
    inverse = 1.0 / tl.where(top > 0, top, 1.0)
    store_vector(c_ptr + one, turned, inverse, one == 0, N, NP, OUTPUT, MATRIX)
    if HAS_BIAS:
        dt_now += bias
    if SOFTPLUS:
        dt_now = softplus(dt_now)
    B_now = B_now.to(ring_B_ptr.dtype.element_ty)
    tl.store(ring_dt_ptr + valid * H + head, dt_now, mask=head_ok & appends_dt)
    tl.store(ring_B_ptr + valid * (G * N) + n, B_now, mask=n_ok & appends_B)
    tl.store(dot_ptr + token, tl.sum(B.to(tl.float32) * C, 1))
    weight_now = dt_now * tl.sum(tl.sum(B_now.to(tl.float32) * C, 1), 0)
    if HAS_D:
        weight_now += D
    out = weight_ptr + head * (LP + 2)
    tl.store(out + LP + 1, weight_now, mask=head_ok)
    tl.debug_barrier()  # other lanes read what this program has just written
    dots = ()
    for j in tl.static_range(LP):
        dots = dots + (tl.load(dot_ptr + j),)
    # decays are sums of what comes after a token, none a difference: no exponent is positive
    after = dt_now * A
    for i in tl.static_range(LP):
        weight = tl.exp(after) * dt[LP - 1 - i] * dots[LP - 1 - i]
        tl.store(out + LP - 1 - i, weight, mask=head_ok & (LP - 1 - i < valid))
        after += dt[LP - 1 - i] * A
    tl.store(out + LP, tl.exp(after), mask=head_ok)


@triton.jit
def prepare_kernel(
    dt_ptr, B_ptr, C_ptr,  # [b, ...] with a row stride each, contiguous within a row
    A_ptr, D_ptr, bias_ptr,  # [H] fp32, [H], [H]
    sign_ptr,  # fp32 [N], see hadamard.rotate_rows
    slot_ptr, valid_ptr, flush_ptr,  # [b]
    ring_dt_ptr, ring_B_ptr,
    # fp32 [b, H, LP + 2], [b, G, LP], int32 [b, G, N], fp32 [b, G]
    weight_ptr, dot_ptr, c_ptr, top_ptr,
    dt_stride, B_stride, C_stride, ring_dt_stride, ring_B_stride,
    H: tl.constexpr, G: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, LP: tl.constexpr,
    PER: tl.constexpr, PERP: tl.constexpr,
    OUTPUT: tl.constexpr, MATRIX: tl.constexpr, ROTATE: tl.constexpr,
    SOFTPLUS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_D: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """weights[h] of a row that does not flush: exp(a - a_j) dt_j B_j.C of the ring's tokens j, at
    LP the decay exp(a) of the whole window, at LP + 1 the weight of this token (and D, one a head,
    if HAS_D).

    PER = H / G heads a group, PERP padded. EARLY: programs of the next launch may start.
    """
    if EARLY:
        dependents_may_start()
    i_g, i_b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    first = i_g * PER
    slot = tl.load(slot_ptr + i_b).to(tl.int64)
    flush = tl.load(flush_ptr + i_b).to(tl.int32)
    valid = tl.load(valid_ptr + i_b)
    inputs = ask_inputs(
        i_b, i_g, first, dt_ptr, B_ptr, C_ptr, A_ptr, D_ptr, bias_ptr,
        dt_stride, B_stride, C_stride, N, NP, PER, PERP, HAS_BIAS, HAS_D,
    )  # fmt: skip
    if (slot < 0) | (flush != 0):
        return
    of = i_b * G + i_g
    prepare_heads(
        inputs, valid, True, True,
        ring_dt_ptr + slot * ring_dt_stride + first, ring_B_ptr + slot * ring_B_stride + i_g * N,
        sign_ptr, weight_ptr + (i_b * H + first) * (LP + 2), dot_ptr + of * LP,
        c_ptr + of * N, top_ptr + of,
        H, G, N, NP, LP, PER, PERP, OUTPUT, MATRIX, ROTATE, SOFTPLUS, HAS_BIAS, HAS_D,
    )  # fmt: skip
