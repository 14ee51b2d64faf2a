"""The matrix-unit reads of verify steps: their PTX on 32 emulated lanes.

That lanes hold what it takes for granted is seen where the kernels are compiled (test_compile).
"""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from replayssm_quant.config import StateConfig
from replayssm_quant.formats.codec import float_values
from replayssm_quant.formats.packing import pack_nibbles, to_page
from replayssm_quant.formats.spec import ELEMENTS
from replayssm_quant.kernels.common import verify_matrix
from replayssm_quant.kernels.common.spec import kernel_format

LANE = np.arange(32)
G, Q = LANE // 4, LANE % 4
WORD = np.uint32


def plain(value):
    """The value of a compile-time function's result."""
    return getattr(value, "value", value)


def halves(word: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(word, WORD).view(np.float16).reshape(-1, 2)


def from_halves(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x.astype(np.float16)).view(WORD)[:, 0]


def bf16(word: np.ndarray) -> np.ndarray:
    """Both bf16 numbers of words, low half first."""
    low, high = (word << WORD(16)).view(np.float32), (word & WORD(0xFFFF0000)).view(np.float32)
    return np.stack([low, high], 1)


def to_bf16(x: np.ndarray) -> np.ndarray:
    """fp32 -> bf16 bits, nearest even."""
    tensor = torch.from_numpy(np.ascontiguousarray(x, np.float32)).to(torch.bfloat16)
    return tensor.view(torch.int16).numpy().astype(np.uint16).astype(WORD)


def multiply(name: str, d: list, a: list, b: list) -> list:
    """One product as the PTX ISA lays out the fragments of its shapes."""
    if ".s8." in name:
        take = lambda w: np.ascontiguousarray(w).view(np.int8).reshape(-1, 4).astype(np.int64)  # noqa: E731
        kind, per = np.int32, 4
    else:
        take = bf16 if "bf16" in name else halves
        kind, per = np.float32, 2
    depth = 4 * per * len(b)
    A, B = np.zeros((16, depth)), np.zeros((depth, 8))
    for i, word in enumerate(a):
        for e in range(per):
            A[G + 8 * (i % 2), Q * per + e + 4 * per * (i // 2)] = take(word)[:, e]
    for i, word in enumerate(b):
        for e in range(per):
            B[Q * per + e + 4 * per * i, G] = take(word)[:, e]
    D = A @ B
    out = []
    for i in range(4):
        part = D[G + 8 * (i // 2), 2 * Q + i % 2]
        out.append((d[i].view(kind) + part.astype(kind)).view(WORD))
    return out


def permute(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
    pool = np.concatenate(
        [np.ascontiguousarray(t).view(np.uint8).reshape(-1, 4) for t in (a, b)], 1
    )
    at = [(selector >> WORD(4 * i) & WORD(7)).astype(int) for i in range(4)]
    picked = [pool[LANE, at[i]].astype(WORD) << WORD(8 * i) for i in range(4)]
    return picked[0] | picked[1] | picked[2] | picked[3]


def emulate(text: str, regs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Run instructions on 32 lanes; registers are uint32 [32]."""
    e4m3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    regs = dict(regs)

    def value(name: str) -> np.ndarray:
        if name == "%laneid":
            return LANE.astype(WORD)
        if name.startswith("0f"):
            return np.full(32, int(name[2:], 16), WORD)
        if name[0].isdigit() or name == "-1":
            return np.full(32, int(name, 0) & 0xFFFFFFFF, WORD)
        return regs[name]

    for line in text.strip("{} ").split(";"):
        line = line.strip()
        if not line or line.startswith(".reg"):
            continue
        name, rest = line.split(" ", 1)
        groups = [[t.strip() for t in g.split(",")] for g in re.findall(r"{(.*?)}", rest)]
        if name.startswith("mma"):
            left, right, sums = ([value(t) for t in g] for g in groups[1:])
            new = multiply(name, sums, left, right)
            regs.update(zip(groups[0], new, strict=True))
            continue
        args = [t.strip(" {}") for t in rest.split(",")]
        if groups:  # both halves of a word
            regs["p"], regs["q"] = (value(args[2]) >> WORD(s) & WORD(0xFFFF) for s in (0, 16))
            continue
        v = [value(t) for t in args[1:]]
        f = [t.view(np.float32) for t in v]
        if name in ("mov.b32", "mov.f32", "mov.u32"):
            out = v[0].copy()
        elif name in ("shl.b32", "shr.u32"):
            out = v[0] << v[1] if name == "shl.b32" else v[0] >> v[1]
        elif name == "and.b32":
            out = v[0] & v[1]
        elif name == "lop3.b32":
            assert args[4] == "0xEA"
            out = (v[0] & v[1]) | v[2]
        elif name == "prmt.b32":
            out = permute(v[0], v[1], v[2])
        elif name == "shr.s32":
            out = (v[0].view(np.int32) >> v[1].view(np.int32)).view(WORD)
        elif name in ("add.s32", "sub.s32"):
            out = v[0] + v[1] if name == "add.s32" else v[0] - v[1]
        elif name == "setp.ne.u32":
            out = (v[0] != v[1]).astype(WORD)
        elif name == "selp.b32":
            out = np.where(v[2] != 0, v[0], v[1])
        elif name == "shfl.sync.bfly.b32":
            out = v[0][LANE ^ int(v[1][0])]
        elif name == "fma.rn.f32":
            out = (f[0].astype(np.float64) * f[1] + f[2]).astype(np.float32).view(WORD)
        elif name == "cvt.rmi.s32.f32":
            out = np.floor(f[0]).astype(np.int32).view(WORD)
        elif name == "cvt.rn.f16x2.f32":
            out = from_halves(np.stack([f[1], f[0]], 1))
        elif name == "mul.rn.f16x2":
            out = from_halves(halves(v[0]).astype(np.float64) * halves(v[1]).astype(np.float64))
        elif name == "fma.rn.f16x2":
            a, b, c = (halves(t).astype(np.float64) for t in v)
            out = from_halves(a * b + c)
        elif name == "mad.lo.s32":
            out = v[0] * v[1] + v[2]
        elif name == "cvt.rn.f32.s32":
            out = v[0].view(np.int32).astype(np.float32).view(WORD)
        elif name == "sub.rn.f32":
            out = (f[0] - f[1]).view(WORD)
        elif name == "cvt.rn.bf16x2.f32":
            out = to_bf16(f[1]) | (to_bf16(f[0]) << WORD(16))
        else:
            assert name == "cvt.rn.f16x2.e4m3x2", name
            both = np.stack([e4m3[v[0] & WORD(255)], e4m3[v[0] >> WORD(8) & WORD(255)]], 1)
            out = from_halves(both)
        regs[args[0]] = out
    return regs


@triton.jit
def _words_kernel(c_ptr, x_ptr, out_ptr, OUTPUT: tl.constexpr):
    """Words of queries x [8, 128], then what ``load_queries`` makes of them: [16, 8, 4]."""
    t, n = tl.arange(0, 8)[:, None], tl.arange(0, 64)[None, :]
    low, high = tl.load(x_ptr + t * 128 + n), tl.load(x_ptr + t * 128 + 64 + n)
    token = tl.arange(0, 8)
    verify_matrix.store_queries(c_ptr, low, high, token, token >= 0, OUTPUT)
    c = verify_matrix.load_queries(c_ptr)
    at = tl.arange(0, 8)[None, :, None] * 4 + tl.arange(0, 4)[None, None, :]
    for k in tl.static_range(16):
        tl.store(out_ptr + k * 32 + at, c[k])


@triton.jit
def _one_query_kernel(c_ptr, word_ptr, t, OUTPUT: tl.constexpr):
    """Store the words that the lanes made of query t."""
    n = tl.arange(0, 128)[None, :]
    verify_matrix.store_words(c_ptr, tl.load(word_ptr + n), t, OUTPUT)


CONFIGS = {"e2m1": ("fp16", "nvfp4"), "int4": ("P4+8", None), "int8": ("P8+4", None),
           "e4m3": ("e4m3", "same")}  # fmt: skip


def random_codes(elem: str, gen: torch.Generator) -> tuple[np.ndarray, np.ndarray]:
    """(stored words [16, W], values float64 [16, 128]) of sixteen rows of random codes."""
    if elem in ("e2m1", "int4"):
        codes = torch.randint(0, 16, (16, 128), generator=gen)
        values = codes - 8 if elem == "int4" else float_values(codes, ELEMENTS["e2m1"])
        stored = pack_nibbles(codes)
    else:
        codes = torch.randint(0, 256, (16, 128), generator=gen).to(torch.uint8)
        if elem == "e4m3":
            codes = torch.where(codes & 127 == 127, 0, codes)
        values = codes.view(torch.int8) if elem == "int8" else float_values(codes, ELEMENTS["e4m3"])
        stored = to_page(codes).view(torch.int32)
    return stored.numpy().view(WORD), values.double().numpy()


def part_of(regs: dict[str, np.ndarray]) -> np.ndarray:
    """$0 .. $3 as [16 rows, 8 tokens]."""
    part = np.zeros((16, 8))
    for i in range(4):
        part[G + 8 * (i % 2), 2 * Q + i // 2] = regs[f"${i}"].view(np.float32)
    return part


@pytest.mark.parametrize("elem", CONFIGS)
def test_product(elem):
    """The PTX, emulated, gives O c of eight queries, but for their rounding, and with any scale.

    Bounds: queries are rounded to 2**-11 of each element (fp16), int8
    to 1 / 32512 of the largest.
    """
    kernel = kernel_format(StateConfig.from_flags(*CONFIGS[elem], buffer_len=4).readout)
    gen = torch.Generator().manual_seed(5)
    raw, values = random_codes(elem, gen)
    c = torch.randn(8, 128, generator=gen)
    c /= c.abs().amax(1, keepdim=True)
    words = torch.full((512,), -7, dtype=torch.int32)
    right = torch.empty(16, 8, 4, dtype=torch.int32)
    _words_kernel[(1,)](words, c, right, OUTPUT=kernel)
    text, constraints = (plain(t) for t in verify_matrix._read_asm(elem))
    wide, operands = raw.shape[1] // 16, []
    for h in range(wide):
        for j in range(4):  # lane 4 g + q holds words 4 q .. 4 q + 3 of rows g and g + 8
            operands += [raw[G + 8 * row, 16 * h + 4 * Q + j] for row in range(2)]
    if elem in ("e2m1", "int4"):
        scales = torch.randint(1, 127, (16, 8), generator=gen).to(torch.uint8)
        scales[0, :2] = torch.tensor([1, 126])  # the smallest and the largest
        stored = scales.numpy().view(WORD)
        operands += [stored[G + 8 * row, word] for word in range(2) for row in range(2)]
        values = values * scales.view(torch.float8_e4m3fn).double().repeat_interleave(16, 1).numpy()
    for k in range(16):
        operands += [right[k].numpy().view(WORD)[G, Q]] * 2
    assert len(constraints.split(",")) == 4 + len(operands)
    regs = emulate(text, {f"${4 + i}": word for i, word in enumerate(operands)})
    got = part_of(regs) * plain(verify_matrix.read_scale((elem, 0)))
    want = values @ c.double().numpy().T
    bound = 5e-5 if elem == "int8" else 3e-4
    assert np.sqrt(((got - want) ** 2).mean() / (want**2).mean()) < bound
    if elem in ("e2m1", "int4"):  # against the same queries the product is exact in fp32
        rounded = c.half().double().numpy()
        np.testing.assert_allclose(
            got, values @ rounded.T, rtol=2e-6, atol=1e-6 * np.abs(want).max()
        )


@pytest.mark.parametrize("elem", CONFIGS)
def test_one_query_at_a_time(elem):
    """The words that lanes make of one query of four neighbours each are those of all at once."""
    kernel = kernel_format(StateConfig.from_flags(*CONFIGS[elem], buffer_len=4).readout)
    c = torch.randn(8, 128, generator=torch.Generator().manual_seed(1))
    c /= c.abs().amax(1, keepdim=True)
    words = torch.full((512,), -7, dtype=torch.int32)
    _words_kernel[(1,)](words, c, torch.empty(16, 8, 4, dtype=torch.int32), OUTPUT=kernel)
    text, constraints = (plain(t) for t in verify_matrix._query_asm(elem))
    assert len(constraints.split(",")) == 8
    got = torch.full((512,), -7, dtype=torch.int32)
    for t in range(8):
        x = c[t].numpy().reshape(32, 4)
        regs = emulate(text, {f"${4 + i}": x[:, i].copy().view(WORD) for i in range(4)})
        made = torch.from_numpy(np.stack([regs[f"${i}"] for i in range(4)], 1).view(np.int32))
        _one_query_kernel[(1,)](got, made, t, OUTPUT=kernel)
    assert torch.equal(got, words)


@pytest.mark.parametrize("tokens", [8, 16])
def test_inputs_times_weights(tokens):
    """Rows j, j + 1 of each lane in one word a token, weights as two bf16 terms: within 2**-16."""
    rng = np.random.default_rng(3)
    loaded = tokens // 4
    x = torch.from_numpy(rng.normal(size=(tokens, 16))).bfloat16()  # token, rows g (even), g + 8
    w = rng.normal(size=(tokens, 8)).astype(np.float32)
    before = rng.normal(size=(16, 8)).astype(np.float32)
    bits = x.view(torch.int16).numpy().astype(np.uint16).astype(WORD)
    operands = [before[G + 8 * row, 2 * Q + i].view(WORD) for i in range(2) for row in range(2)]
    for i in range(loaded):
        operands.append(bits[4 * i + Q, G] | bits[4 * i + Q, G + 8] << WORD(16))
    terms = []
    for i in range(0, loaded, 2):
        made = {"$2": w[4 * i + Q, G].view(WORD), "$3": w[4 * i + 4 + Q, G].view(WORD)}
        terms.append(emulate(verify_matrix._TERMS.value, made))
    for name in ("$0", "$1"):
        for made in terms:
            operands += [made[name]] * 2
    text, constraints = (plain(t) for t in verify_matrix._window_asm(tokens))
    assert len(constraints.split(",")) == 4 + len(operands)
    got = part_of(emulate(text, {f"${4 + i}": word for i, word in enumerate(operands)}))
    want = before + x.double().numpy().T @ w.astype(np.float64)
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-5 * np.abs(want).max())


@pytest.mark.parametrize(("rows", "sizes"), [(64, [64]), (80, [64, 16]), (112, [64, 32, 16]),
                                             (128, [64, 64]), (192, [64] * 3)])  # fmt: skip
def test_blocks_of_a_head(rows, sizes):
    count = plain(verify_matrix.block_count(rows, 64))
    assert [plain(verify_matrix.block_size(k, rows, 64)) for k in range(count)] == sizes
    starts = [plain(verify_matrix.block_start(k, rows, 64)) for k in range(count)]
    assert starts == [sum(sizes[:k]) for k in range(count)]
