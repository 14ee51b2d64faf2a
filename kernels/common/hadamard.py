"""The randomised Hadamard rotation of ``formats/rotation.py`` on a vector in registers."""

from functools import lru_cache

import torch
import triton
import triton.language as tl

from ...formats.rotation import block_of, signs
from .planes import PTX


@lru_cache(maxsize=32)
def rotation_signs(n: int, device: torch.device) -> torch.Tensor:
    """The signs of the rotation with its 1 / sqrt(block), fp32 [n]."""
    return (signs(n) * block_of(n) ** -0.5).to(device)


@triton.constexpr_function
def _butterfly_asm():
    """(instructions, constraints): 128 values, four neighbours a lane, $4..$7 -> $0..$3."""
    out = ["{ .reg .pred p; .reg .b32 l, b; .reg .f32 f, v, x0, x1, x2, x3; mov.u32 l, %laneid;"]
    for low, high in ((0, 1), (2, 3)):
        out.append(f"add.rn.f32 x{low}, ${4 + low}, ${4 + high};")
        out.append(f"sub.rn.f32 x{high}, ${4 + low}, ${4 + high};")
    for low, high in ((0, 2), (1, 3)):
        out.append(f"add.rn.f32 ${low}, x{low}, x{high};")
        out.append(f"sub.rn.f32 ${high}, x{low}, x{high};")
    for stage in range(5):
        out.append(f"and.b32 b, l, {1 << stage}; setp.ne.u32 p, b, 0;")
        out.append("selp.f32 f, 0fBF800000, 0f3F800000, p;")
        for i in range(4):
            out.append(f"shfl.sync.bfly.b32 v, ${i}, {1 << stage}, 31, -1;")
            out.append(f"fma.rn.f32 ${i}, ${i}, f, v;")
    return " ".join([*out, "}"]), ",".join(["=&f"] * 4 + ["f"] * 4)


@triton.jit
def rotate_rows(x, sign_ptr, ROWS: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
                LANES: tl.constexpr = False):  # fmt: skip
    """x R for rows [ROWS, KP] in natural order, zero beyond K; signs carry the 1 / sqrt(block).

    LANES: a row is one warp's and a lane holds four neighbours of it, as loads of four
    elements or of one row of 128 leave them; then K = 128 takes no gathers. The bits are the same.
    """
    n = tl.arange(0, KP)[None, :]
    if PTX and LANES and K == 128:
        # in the shape of x: of several warps a row of its own would be shared out otherwise, and
        # Triton would then make the butterfly for that layout, too, where lanes hold other elements
        n = tl.broadcast_to(n, [ROWS, KP])
        x = x * tl.load(sign_ptr + n)
        ASM: tl.constexpr = _butterfly_asm()
        return tl.inline_asm_elementwise(
            ASM[0], ASM[1], [x], dtype=tl.float32, is_pure=True, pack=4
        )
    else:
        x = x * tl.load(sign_ptr + n, mask=n < K, other=0.0)
        n = tl.broadcast_to(n, [ROWS, KP])
        for stage in tl.static_range(8):
            if K % (2 << stage) == 0:  # the block is the largest power of two that divides K
                other = tl.gather(x, n ^ (1 << stage), 1)
                x = tl.where((n & (1 << stage)) != 0, other - x, x + other)
        return x
