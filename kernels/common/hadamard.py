"""The randomised Hadamard rotation of ``formats/rotation.py`` on a vector in registers."""

import triton
import triton.language as tl


@triton.constexpr_function
def factors(n):
    """(blocks of the padded vector, a, d): the Hadamard block of ``n`` is a * d."""
    block = n & -n
    padded = 1 << (n - 1).bit_length()
    log = block.bit_length() - 1
    a = 1 << (log // 2)
    return padded // block, a, block // a


@triton.jit
def _signs(SIZE: tl.constexpr):
    """Sylvester's Hadamard matrix [SIZE, SIZE] as fp32: (-1) ** popcount(i & j)."""
    i = tl.arange(0, SIZE)
    both = i[:, None] & i[None, :]
    both = both ^ (both >> 4)
    both = both ^ (both >> 2)
    both = both ^ (both >> 1)
    return 1.0 - 2.0 * (both & 1).to(tl.float32)


@triton.jit
def rotate_vector(x, sign_ptr, N: tl.constexpr, NP: tl.constexpr):
    """x R for fp32 x [NP] (zero beyond N); sign_ptr: the signs, fp32 [N]."""
    FACTORS: tl.constexpr = factors(N)
    A: tl.constexpr = FACTORS[1]
    D: tl.constexpr = FACTORS[2]
    n = tl.arange(0, NP)
    x = x * tl.load(sign_ptr + n, mask=n < N, other=0.0)
    y = tl.reshape(x, [FACTORS[0], A, D])
    y = tl.sum(_signs(A)[None, :, :, None] * y[:, None, :, :], 2)
    y = tl.sum(_signs(D)[None, None, :, :] * y[:, :, None, :], 3)
    return tl.reshape(y, [NP]) * ((A * D) ** -0.5)
