"""Activations that both families apply in fp32 before a step."""

import triton
import triton.language as tl


@triton.jit
def softplus(x):
    """log(1 + e^x) to a few ulp, also where it is small; large arguments return themselves."""
    e = tl.exp(tl.minimum(x, 20.0))
    u = 1.0 + e  # log(u) * e / (u - 1) undoes the rounding of u
    small = u == 1.0
    y = tl.where(small, e, tl.log(u) * (e / tl.where(small, 1.0, u - 1.0)))
    return tl.where(x > 20.0, x, y)
