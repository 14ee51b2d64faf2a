"""Run the compiled PTX of our kernels on a CPU, instruction by instruction, without a GPU.

Triton's interpreter runs what a kernel says; this runs what the compiler made of it, inline PTX and
layouts included, for any architecture that Triton compiles for. Within ``emulated`` every launch is
compiled, and its programs run one after another on the CPU tensors that it was given. Numbers are
those of the PTX ISA but in two places: a sum of a matrix unit is rounded once, and approximate
functions are exact to fp32. It knows what our kernels use; anything else is named in an error. An
instruction of a warp takes some 10 us: keep shapes tiny. ``TRITON_INTERPRET`` must not be set.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import re
import struct
from collections.abc import Callable, Generator, Iterator
from typing import Any

import numpy as np

from . import inspect_sass

Lanes = np.ndarray  # one number for each of the 32 lanes
_LANE = np.arange(32, dtype=np.uint32)
_UNSIGNED: dict[int, Any] = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
_SIGNED: dict[int, Any] = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}
_FLOAT: dict[int, Any] = {16: np.float16, 32: np.float32, 64: np.float64}
_TYPES = {"u": _UNSIGNED, "s": _SIGNED, "b": _UNSIGNED, "f": _FLOAT}
_NAN16 = np.uint16(0x7FFF)
_NAN32 = np.uint32(0x7FFFFFFF)
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


class UnknownInstruction(NotImplementedError):
    """A PTX instruction that the emulator does not know."""


def _type(name: str) -> Any:
    return _TYPES[name[0]][int(re.match(r"\d+", name[1:])[0])]  # type: ignore[index]


def _split(text: str) -> list[str]:
    """Operands; a vector in braces or an address in brackets is one."""
    out, depth, current = [], 0, ""
    for c in text:
        depth += (c in "{[") - (c in "}]")
        if c == "," and depth == 0:
            out.append(current.strip())
            current = ""
        else:
            current += c
    return [*out, current.strip()] if current.strip() else out


class Program:
    """The statements of a PTX entry: (predicate, opcode, operands) each, and where labels point."""

    def __init__(self, ptx: str):
        ptx = ptx[ptx.index(".visible .entry") :]
        head = ptx[: ptx.index("{")]
        self.parameters = re.findall(r"\w+_param_\d+", head)
        body = re.sub(r"//[^\n]*|\.loc[^\n]*", "", ptx[ptx.index("{") + 1 :])
        body = re.sub(r"\.section.*", "", body, flags=re.S)
        body = body[: body.rindex("}")]
        self.code: list[tuple[str, list[str], list[str]]] = []
        self.labels: dict[str, int] = {}
        for statement in body.split(";"):
            text = " ".join(statement.split())
            while True:
                label = re.match(r"^(\$?\w+):\s*(.*)$", text)
                scope = re.match(r"^[{}]\s*(.*)$", text)
                if label:
                    self.labels[label[1]] = len(self.code)
                    text = label[2]
                elif scope:  # scopes of inline assembly: their registers are set before use
                    text = scope[1]
                else:
                    break
            if text and not text.startswith("."):
                self._add(text)

    def _add(self, text: str) -> None:
        predicate = ""
        if text.startswith("@"):
            predicate, text = text[1:].split(" ", 1)
        opcode, _, operands = text.partition(" ")
        self.code.append((predicate, opcode.split("."), _split(operands)))


def _fma(a: Lanes, b: Lanes, c: Lanes) -> Lanes:
    """fp32 a b + c with one rounding: the fp64 sum is rounded to odd first."""
    product, c = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)
    total = product + c
    part = total - product
    error = (product - (total - part)) + (c - part)
    bits = total.view(np.int64)
    away = (error > 0) == (total > 0)
    odd = np.where(away | (total == 0), bits | 1, bits - 1)
    exact = ~np.isfinite(total) | (error == 0) | (bits & 1 == 1) | (total == 0)
    return np.where(exact, bits, odd).view(np.float64).astype(np.float32)


def _to_bf16(x: Lanes) -> Lanes:
    bits = x.astype(np.float32).view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), _NAN16, rounded)


def _from_bf16(bits: Lanes) -> Lanes:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _to_fp16(x: Lanes, toward_zero: bool = False) -> Lanes:
    half = x.astype(np.float16)
    bits = half.view(np.uint16)
    if toward_zero:
        bits = bits - (np.abs(half.astype(np.float64)) > np.abs(x.astype(np.float64)))
    return np.where(np.isnan(x), _NAN16, bits).astype(np.uint16)


def _by_chance(x: Lanes, bits: Lanes) -> Lanes:
    """fp16 bits of x and thirteen random bits below its last place: the exact sum, rounded down."""
    size = np.where(np.isfinite(x), np.abs(x.astype(np.float64)), 0.0)
    step = np.exp2(np.maximum(np.frexp(size)[1] - 1, -14) - 10.0)
    size = np.minimum(np.floor(size / step + bits / 8192.0) * step, 65504.0)
    size = np.where(np.isinf(x), 65504.0, size)
    return np.where(np.isnan(x), _NAN16, np.copysign(size, x).astype(np.float16).view(np.uint16))


def _small_values(mantissa: int, bias: int, codes: Lanes) -> Lanes:
    """Magnitudes of small floats, NaN apart."""
    exponent, fraction = codes >> mantissa, codes & ((1 << mantissa) - 1)
    normal = (exponent > 0).astype(np.int64)
    return (fraction + (normal << mantissa)) * np.exp2(
        np.maximum(exponent, 1).astype(np.float64) - bias - mantissa
    )


def _from_fp8(name: str, bits: Lanes) -> Lanes:
    mantissa, bias = (3, 7) if name == "e4m3" else (2, 15)
    codes = bits.astype(np.int64) & 0x7F
    value = _small_values(mantissa, bias, codes)
    value = np.where(codes == 0x7F if name == "e4m3" else codes > 0x7C, np.nan, value)
    if name == "e5m2":
        value = np.where(codes == 0x7C, np.inf, value)
    return np.copysign(value, np.where(bits & 0x80, -1.0, 1.0)).astype(np.float16)


def _nearest(x: Lanes, values: Lanes) -> Lanes:
    """Number of the nearest of ascending values to |x|, even on a tie, at most the last."""
    size = np.minimum(np.abs(x.astype(np.float64)), values[-1])
    size = np.where(np.isnan(size), values[-1], size)
    above = np.clip(np.searchsorted(values, size), 0, len(values) - 1)
    below = np.maximum(above - 1, 0)
    up, down = values[above] - size, size - values[below]
    tie = np.where(above % 2 == 0, above, below)
    return np.where(up < down, above, np.where(down < up, below, tie))


def _to_small(name: str, x: Lanes) -> Lanes:
    if name == "e2m1":
        return _nearest(x, _E2M1) | np.where(np.signbit(x), 8, 0)
    code = _nearest(x, _small_values(3, 7, np.arange(127)))
    return np.where(np.isnan(x), 0x7F, code | np.where(np.signbit(x), 0x80, 0))


class Warp:
    """32 lanes: their registers, and the memory that their program shares."""

    def __init__(
        self,
        program: Program,
        arguments: dict[str, int],
        shared: bytearray,
        block: tuple[int, int, int],
        grid: tuple[int, ...],
        number: int,
        warps: int,
    ):
        self.program, self.arguments, self.shared = program, arguments, shared
        self.registers: dict[str, Lanes] = {}
        self.special = {
            "%laneid": _LANE,
            "%tid.x": _LANE + 32 * number,
            "%ntid.x": np.full(32, 32 * warps),
            "global_smem": np.zeros(32),
        }
        for axis, here, size in zip("xyz", block, grid, strict=True):
            self.special[f"%ctaid.{axis}"] = np.full(32, here)
            self.special[f"%nctaid.{axis}"] = np.full(32, size)

    # --- operands -----------------------------------------------------------------------------

    def read(self, name: str, dtype: Any) -> Lanes:
        """A register or a literal, its low bits as ``dtype``; registers never set are zero."""
        wanted = np.dtype(dtype)
        if name in self.registers:
            value = self.registers[name]
            if value.dtype.itemsize == wanted.itemsize:
                return value.view(wanted)
            value = value.view(_UNSIGNED[8 * value.dtype.itemsize])
            return value.astype(_UNSIGNED[8 * wanted.itemsize]).view(wanted)
        if name in self.special:
            return self.special[name].astype(dtype)
        if name.startswith(("0f", "0d")):
            return np.full(32, int(name[2:], 16), _UNSIGNED[32 if name[1] == "f" else 64]).view(
                wanted
            )
        if re.fullmatch(r"-?(0x)?[0-9a-fA-F]+U?", name):
            bits = 8 * wanted.itemsize
            return np.full(32, int(name.rstrip("U"), 0) % 2**bits, _UNSIGNED[bits]).view(wanted)
        if re.fullmatch(r"%\w+", name):
            return np.zeros(32, dtype)
        raise UnknownInstruction(f"operand {name}")

    def predicate(self, name: str) -> Lanes:
        if name.startswith("!"):
            return ~self.predicate(name[1:])
        if name in ("0", "-1"):
            return np.full(32, name != "0")
        return self.registers[name]

    def write(self, name: str, value: Lanes, mask: Lanes | None) -> None:
        if mask is not None:
            old = self.registers.get(name)
            if old is None or old.dtype.itemsize != value.dtype.itemsize:
                old = np.zeros_like(value)
            value = np.where(mask, value, old.view(value.dtype))
        self.registers[name] = value

    def _address(self, text: str) -> Lanes:
        base, _, offset = text.strip("[] ").replace(" ", "").partition("+")
        return self.read(base, np.uint64).astype(np.int64) + int(offset or 0)

    def _fetch(self, shared: bool, address: int, count: int) -> bytes:
        if shared:
            return bytes(self.shared[address : address + count])
        return ctypes.string_at(address, count)

    def _store(self, shared: bool, address: int, data: bytes) -> None:
        if shared:
            self.shared[address : address + len(data)] = data
        else:
            ctypes.memmove(address, data, len(data))

    # --- execution ----------------------------------------------------------------------------

    def run(self) -> Generator[None]:
        """Execute to the end; pauses at barriers."""
        at = 0
        while at < len(self.program.code):
            name, op, args = self.program.code[at]
            at += 1
            mask = None
            if name:
                mask = self.predicate(name)
                if not mask.any():
                    continue
                if op[0] == "bra" and not mask.all():
                    raise UnknownInstruction("a branch that divides a warp")
                mask = None if mask.all() else mask
            if op[0] == "bra":
                at = self.program.labels[args[0]]
            elif op[0] == "ret":
                return
            elif op[0] == "bar" and op[1] == "sync" or op[0] == "barrier":
                yield
            elif op[0] not in ("bar", "prefetch", "griddepcontrol", "fence", "membar"):
                step: Callable[..., None] | None = getattr(self, f"_{op[0]}", None)
                if step is None and op[0] in _ARITHMETIC:
                    step = self._arithmetic
                if step is None:
                    raise UnknownInstruction(".".join(op))
                step(op, args, mask)

    def _ld(self, op: list[str], args: list[str], mask: Lanes | None) -> None:
        dtype = _type(op[-1])
        if "param" in op:
            bits = 8 * np.dtype(dtype).itemsize
            value = self.arguments[args[1].strip("[] ")] % 2**bits
            return self.write(args[0], np.full(32, value, _UNSIGNED[bits]).view(dtype), mask)
        names = _split(args[0].strip("{} "))
        size, raw = np.dtype(dtype).itemsize, _UNSIGNED[8 * np.dtype(dtype).itemsize]
        address = self._address(args[1])
        out = np.zeros((len(names), 32), raw)
        for lane in range(32):
            if mask is None or mask[lane]:
                data = self._fetch("shared" in op, int(address[lane]), size * len(names))
                out[:, lane] = np.frombuffer(data, raw)
        for name, value in zip(names, out, strict=True):
            self.write(name, value.astype(np.uint16) if size == 1 else value.view(dtype), mask)

    def _st(self, op: list[str], args: list[str], mask: Lanes | None) -> None:
        dtype = _type(op[-1])
        address = self._address(args[0])
        values = np.stack([self.read(n, dtype) for n in _split(args[1].strip("{} "))])
        for lane in range(32):
            if mask is None or mask[lane]:
                self._store("shared" in op, int(address[lane]), values[:, lane].tobytes())

    def _cp(self, op: list[str], args: list[str], mask: Lanes | None) -> None:
        if len(op) < 4:  # commit_group, wait_group: copies are done at once
            return
        to, source, most = self._address(args[0]), self._address(args[1]), int(args[2], 0)
        some = self.read(args[3], np.uint32) if len(args) > 3 else np.full(32, most)
        for lane in range(32):
            if mask is None or mask[lane]:
                data = self._fetch(False, int(source[lane]), int(some[lane])) if some[lane] else b""
                self._store(True, int(to[lane]), data.ljust(most, b"\0"))

    def _mov(self, op: list[str], args: list[str], mask: Lanes | None) -> None:
        if op[-1] == "pred":
            return self.write(args[0], self.predicate(args[1]), mask)
        dtype = _type(op[-1])
        packed = args[0] if args[0].startswith("{") else args[1]
        if not packed.startswith("{"):
            return self.write(args[0], self.read(args[1], dtype), mask)
        names = _split(packed.strip("{} "))
        whole = 8 * np.dtype(dtype).itemsize
        part = whole // len(names)
        if packed is args[0]:
            value = self.read(args[1], _UNSIGNED[whole])
            for i, name in enumerate(names):
                piece = value >> _UNSIGNED[whole](part * i)
                self.write(name, piece.astype(_UNSIGNED[part]), mask)
        else:
            value = np.zeros(32, _UNSIGNED[whole])
            for i, name in enumerate(names):
                piece = self.read(name, _UNSIGNED[part]).astype(_UNSIGNED[whole])
                value |= piece << _UNSIGNED[whole](part * i)
            self.write(args[0], value, mask)

    def _shfl(self, op: list[str], args: list[str], mask: Lanes | None) -> None:
        value = self.read(args[1], np.uint32)
        by = self.read(args[2], np.uint32).astype(np.int64)
        lane, clamp = _LANE.astype(np.int64), int(self.read(args[3], np.uint32)[0])
        segment, limit = clamp >> 8 & 31, clamp & 31
        last = (lane & segment) | (limit & ~segment)
        if op[2] == "up":
            source = lane - by
            inside = source >= (lane & segment)
        else:
            source = {
                "bfly": lane ^ by,
                "idx": (lane & segment) | (by & ~segment & 31),
                "down": lane + by,
            }[op[2]]
            inside = source <= last
        name, _, flag = args[0].partition("|")
        self.write(name, value[np.where(inside, source, lane)], mask)
        if flag:
            self.write(flag, inside, mask)

    def _redux(self, op: list[str], args: list[str], mask: Lanes | None) -> None:
        value = self.read(args[1], _type(op[-1]))
        reduce = {
            "add": np.add, "min": np.minimum, "max": np.maximum,
            "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
        }[op[2]].reduce  # fmt: skip
        self.write(args[0], np.full(32, reduce(value), value.dtype), mask)

    def _vote(self, op: list[str], args: list[str], mask: Lanes | None) -> None:
        p = self.predicate(args[1])
        if "ballot" in op:
            bits = int(np.sum(p.astype(np.int64) << _LANE.astype(np.int64)))
            self.write(args[0], np.full(32, bits, np.uint32), mask)
        else:
            self.write(args[0], np.full(32, p.any() if "any" in op else p.all()), mask)

    def _popc(self, op: list[str], args: list[str], mask: Lanes | None) -> None:
        counts = [bin(int(x)).count("1") for x in self.read(args[1], _type(op[-1]))]
        self.write(args[0], np.array(counts, np.uint32), mask)

    def _setp(self, op: list[str], args: list[str], mask: Lanes | None) -> None:
        dtype = _type(op[-1])
        x, y = self.read(args[1], dtype), self.read(args[2], dtype)
        test, nan = op[1], np.zeros(32, bool)
        if np.dtype(dtype).kind == "f":
            nan = np.isnan(x) | np.isnan(y)
        unordered = test in ("equ", "neu", "ltu", "leu", "gtu", "geu")
        value = {
            "eq": x == y, "ne": x != y, "lt": x < y, "le": x <= y, "gt": x > y, "ge": x >= y,
            "lo": x < y, "ls": x <= y, "hi": x > y, "hs": x >= y, "nan": nan, "num": ~nan,
        }[test.rstrip("u") if unordered else test]  # fmt: skip
        if test != "nan":
            value = (value | nan) if unordered else (value & ~nan)
        if op[2] in ("and", "or", "xor"):
            q = self.predicate(args[3])
            value = {"and": value & q, "or": value | q, "xor": value ^ q}[op[2]]
        self.write(args[0], value, mask)

    def _selp(self, op: list[str], args: list[str], mask: Lanes | None) -> None:
        x, y = (self.read(a, _type(op[-1])) for a in args[1:3])
        self.write(args[0], np.where(self.predicate(args[3]), x, y), mask)

    def _prmt(self, op: list[str], args: list[str], mask: Lanes | None) -> None:
        a, b, selector = (self.read(x, np.uint32).astype(np.uint64) for x in args[1:4])
        both = a | b << np.uint64(32)
        out = np.zeros(32, np.uint64)
        for i in range(4):
            pick = selector >> np.uint64(4 * i) & np.uint64(15)
            byte = both >> (pick & np.uint64(7)) * np.uint64(8) & np.uint64(255)
            sign = np.where(byte & np.uint64(128), np.uint64(255), np.uint64(0))
            out |= np.where(pick & np.uint64(8), sign, byte) << np.uint64(8 * i)
        self.write(args[0], out.astype(np.uint32), mask)

    def _lop3(self, op: list[str], args: list[str], mask: Lanes | None) -> None:
        a, b, c = (self.read(x, np.uint32) for x in args[1:4])
        table, out = int(args[4], 0), np.zeros(32, np.uint32)
        for i in range(8):
            if table >> i & 1:
                out |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
        self.write(args[0], out, mask)

    def _bfe(self, op: list[str], args: list[str], mask: Lanes | None) -> None:
        dtype = _type(op[-1])
        bits = 8 * np.dtype(dtype).itemsize
        out = []
        for x, at, length in zip(
            self.read(args[1], _UNSIGNED[bits]), self.read(args[2], np.uint32),
            self.read(args[3], np.uint32), strict=True,
        ):  # fmt: skip
            value = int(x) >> int(at) & ((1 << int(length)) - 1)
            if dtype in _SIGNED.values() and length and value >> (int(length) - 1):
                value -= 1 << int(length)
            out.append(value % 2**bits)
        self.write(args[0], np.array(out, _UNSIGNED[bits]).view(dtype), mask)

    def _logic(self, op: list[str], args: list[str], mask: Lanes | None) -> None:
        if op[-1] == "pred":
            values = [self.predicate(a) for a in args[1:]]
        else:
            values = [self.read(a, _type(op[-1])) for a in args[1:]]
        x, y = values[0], values[-1]
        out = {"and": x & y, "or": x | y, "xor": x ^ y, "not": ~x}[op[0]]
        self.write(args[0], out, mask)

    _and = _or = _xor = _not = _logic

    def _shift(self, op: list[str], args: list[str], mask: Lanes | None) -> None:
        dtype = _type(op[-1])
        bits = 8 * np.dtype(dtype).itemsize
        x, by = self.read(args[1], dtype), self.read(args[2], np.uint32)
        least = np.minimum(by, bits - 1).astype(dtype)
        out = x << least if op[0] == "shl" else x >> least
        if op[0] == "shl" or dtype in _UNSIGNED.values():
            out = np.where(by >= bits, np.zeros_like(out), out)
        self.write(args[0], out, mask)

    _shl = _shr = _shift

    def _arithmetic(self, op: list[str], args: list[str], mask: Lanes | None) -> None:
        if op[-1] in ("f16x2", "bf16x2"):
            return self._packed(op, args, mask)
        if op[-1] == "f32x2":
            pairs = [self.read(a, np.uint64) for a in args[1:]]
            low = _float_result(op, [p.astype(np.uint32).view(np.float32) for p in pairs])
            pairs = [(p >> np.uint64(32)).astype(np.uint32).view(np.float32) for p in pairs]
            bits = [x.astype(np.float32).view(np.uint32) for x in (low, _float_result(op, pairs))]
            out = bits[0].astype(np.uint64) | bits[1].astype(np.uint64) << np.uint64(32)
            return self.write(args[0], out, mask)
        dtype = _type(op[-1])
        kind, bits = np.dtype(dtype).kind, 8 * np.dtype(dtype).itemsize
        if "wide" in op:
            wide = (_SIGNED if kind == "i" else _UNSIGNED)[2 * bits]
            out = self.read(args[1], dtype).astype(wide) * self.read(args[2], dtype).astype(wide)
            if op[0] == "mad":
                out = out + self.read(args[3], wide)
            return self.write(args[0], out, mask)
        x = [self.read(a, dtype) for a in args[1:]]
        if kind == "f":
            out = _float_result(op, x).astype(dtype)
            if bits == 32 and op[0] in ("add", "sub", "mul", "fma"):
                out = np.where(np.isnan(out), _NAN32, out.view(np.uint32)).view(dtype)
        elif "hi" in op:
            products = [int(a) * int(b) >> bits for a, b in zip(x[0], x[1], strict=True)]
            out = np.array([p % 2**bits for p in products], _UNSIGNED[bits]).view(dtype)
        else:
            out = _integer_result(op, x).astype(dtype)
        self.write(args[0], out, mask)

    def _halves(self, name: str, bf16: bool) -> list[Lanes]:
        word = self.read(name, np.uint32)
        parts = [(word >> np.uint32(s)).astype(np.uint16) for s in (0, 16)]
        return [_from_bf16(p) if bf16 else p.view(np.float16) for p in parts]

    def _packed(self, op: list[str], args: list[str], mask: Lanes | None) -> None:
        bf16 = op[-1] == "bf16x2"
        values = [self._halves(a, bf16) for a in args[1:]]
        word = np.zeros(32, np.uint32)
        for i in range(2):
            x = [v[i].astype(np.float64) for v in values]
            if "abs" in op:  # magnitudes are compared, signs are multiplied
                sign = np.copysign(1.0, x[0]) * np.copysign(1.0, x[1])
                out = _float_result(op, [np.abs(v) for v in x]) * sign
            else:
                out = x[0] * x[1] + x[2] if op[0] == "fma" else _float_result(op, x)
            bits = _to_bf16(out.astype(np.float32)) if bf16 else _to_fp16(out)
            word |= bits.astype(np.uint32) << np.uint32(16 * i)
        self.write(args[0], word, mask)

    def _cvt(self, op: list[str], args: list[str], mask: Lanes | None) -> None:
        to, source = [p for p in op[1:] if re.match(r"[usb]\d|b?f\d|e\dm\d", p)]
        if to in ("f16x2", "bf16x2") and source == "f32":
            high, low = (self.read(a, np.float32) for a in args[1:3])
            if "rs" in op:
                chance = self.read(args[3], np.uint32)
                parts = [
                    _by_chance(x, chance >> np.uint32(s) & np.uint32(0x1FFF))
                    for x, s in ((low, 0), (high, 16))
                ]
            else:
                convert = _to_bf16 if to == "bf16x2" else lambda x: _to_fp16(x, "rz" in op)
                parts = [convert(low), convert(high)]
            word = parts[0].astype(np.uint32) | parts[1].astype(np.uint32) << np.uint32(16)
            return self.write(args[0], word, mask)
        if to in ("e4m3x2", "e2m1x2"):
            high, low = (_to_small(to[:4], self.read(a, np.float32)) for a in args[1:3])
            pair = low | high << (8 if to == "e4m3x2" else 4)
            return self.write(args[0], pair.astype(np.uint16 if to == "e4m3x2" else np.uint8), mask)
        if to == "f16x2":
            pair = self.read(args[1], np.uint16)
            parts = [_from_fp8(source[:4], p).view(np.uint16) for p in (pair & 255, pair >> 8)]
            word = parts[0].astype(np.uint32) | parts[1].astype(np.uint32) << np.uint32(16)
            return self.write(args[0], word, mask)
        x = (
            _from_bf16(self.read(args[1], np.uint16))
            if source == "bf16"
            else self.read(args[1], _type(source))
        )
        if to == "bf16":
            return self.write(args[0], _to_bf16(x), mask)
        dtype = _type(to)
        if x.dtype.kind == "f":
            whole = [p for p in op if p in ("rni", "rzi", "rmi", "rpi")]
            if whole:
                rounding = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
                x = rounding[whole[0]](x)
            if np.dtype(dtype).kind != "f":
                limits = np.iinfo(dtype)
                x = np.clip(np.nan_to_num(x.astype(np.float64)), limits.min, limits.max)
        self.write(args[0], x.astype(dtype), mask)

    def _mma(self, op: list[str], args: list[str], mask: Lanes | None) -> None:
        """Rows of the left operand by group of four lanes, columns by lane, four bytes at once."""
        kind, whole = op[7], op[7] in ("s8", "u8")
        depth = {"m16n8k8": 8, "m16n8k16": 16, "m16n8k32": 32}.get(op[3])
        if depth is None or kind not in ("f16", "bf16", "s8", "u8") or whole != (depth == 32):
            raise UnknownInstruction(".".join(op))
        out, left, right, add = ([x.strip() for x in a.strip("{} ").split(",")] for a in args)
        g, q = np.arange(32) // 4, np.arange(32) % 4
        a, b, c = np.zeros((16, depth)), np.zeros((depth, 8)), np.zeros((16, 8))
        wide = 4 if whole else 2  # numbers in a word

        def parts(name: str, kind: str) -> list[Lanes]:
            if not whole:
                return self._halves(name, kind == "bf16")
            word = self.read(name, np.uint32)
            form = np.int8 if kind == "s8" else np.uint8
            return [(word >> np.uint32(8 * e)).astype(np.uint8).view(form) for e in range(4)]

        for i, name in enumerate(left):
            for e, part in enumerate(parts(name, kind)):
                a[g + 8 * (i % 2), wide * (q + 4 * (i // 2)) + e] = part
        for i, name in enumerate(right):
            for e, part in enumerate(parts(name, op[8])):
                b[wide * (q + 4 * i) + e, g] = part
        form = np.int32 if whole else np.float32
        for i, name in enumerate(add):
            c[g + 8 * (i // 2), 2 * q + i % 2] = self.read(name, form)
        total = (a @ b + c).astype(form)
        for i, name in enumerate(out):
            self.write(name, total[g + 8 * (i // 2), 2 * q + i % 2], mask)

    def _matrices(self, op: list[str], args: list[str], mask: Lanes | None) -> None:
        """ldmatrix and stmatrix: 8 x 8 matrices of 16-bit numbers, a row an address."""
        load = op[0] == "ldmatrix"
        address = self._address(args[1 if load else 0])
        names = _split(args[0 if load else 1].strip("{} "))
        g, q = np.arange(32) // 4, np.arange(32) % 4
        for i, name in enumerate(names):
            rows = [int(address[8 * i + r]) for r in range(8)]
            if load:
                data = [np.frombuffer(self._fetch(True, r, 16), np.uint16) for r in rows]
                m = np.stack(data).T if "trans" in op else np.stack(data)
                word = m[g, 2 * q].astype(np.uint32) | m[g, 2 * q + 1].astype(np.uint32) << 16
                self.write(name, word.astype(np.uint32), mask)
            else:
                word, m = self.read(name, np.uint32), np.zeros((8, 8), np.uint16)
                m[g, 2 * q], m[g, 2 * q + 1] = word & np.uint32(0xFFFF), word >> np.uint32(16)
                for r, row in zip(rows, m.T if "trans" in op else m, strict=True):
                    self._store(True, r, row.tobytes())

    _ldmatrix = _stmatrix = _matrices


_ARITHMETIC = frozenset(
    "add sub mul mad fma min max abs neg div rem copysign ex2 lg2 rcp rsqrt sqrt".split()
)


def _float_result(op: list[str], x: list[Lanes]) -> Lanes:
    wide = [v.astype(np.float64) for v in x]
    name = op[0]
    if name in ("min", "max"):
        quiet, loud = (np.fmin, np.minimum) if name == "min" else (np.fmax, np.maximum)
        return functools.reduce(loud if "NaN" in op else quiet, x)  # two, or on sm_100 three
    if name in ("fma", "mad"):
        return _fma(*x) if x[0].dtype == np.float32 else x[0] * x[1] + x[2]
    if name in ("add", "sub", "mul"):
        return {"add": x[0] + x[-1], "sub": x[0] - x[-1], "mul": x[0] * x[-1]}[name]
    if name == "div":
        return wide[0] / wide[1]
    if name == "copysign":
        return np.copysign(x[1], x[0])
    one: dict[str, Callable[[Lanes], Lanes]] = {
        "abs": np.abs, "neg": np.negative, "ex2": np.exp2, "lg2": np.log2, "sqrt": np.sqrt,
        "rcp": lambda v: 1.0 / v, "rsqrt": lambda v: 1.0 / np.sqrt(v),
    }  # fmt: skip
    return one[name](wide[0])


def _integer_result(op: list[str], x: list[Lanes]) -> Lanes:
    name = op[0]
    if name in ("div", "rem"):
        pairs = [(int(a), int(b) or 1) for a, b in zip(x[0], x[1], strict=True)]
        quotients = [abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1) for a, b in pairs]
        if name == "div":
            return np.array(quotients)
        return np.array([a - b * q for (a, b), q in zip(pairs, quotients, strict=True)])
    if name == "mad":
        return x[0] * x[1] + x[2]
    return {
        "add": lambda: x[0] + x[1], "sub": lambda: x[0] - x[1], "mul": lambda: x[0] * x[1],
        "min": lambda: functools.reduce(np.minimum, x),
        "max": lambda: functools.reduce(np.maximum, x),
        "abs": lambda: np.abs(x[0]), "neg": lambda: -x[0],
    }[name]()  # fmt: skip


def run(ptx: str, arguments: list[int], grid: tuple[int, ...], warps: int) -> None:
    """Run every program of a launch; arguments as the entry takes them, pointers as addresses."""
    program = Program(ptx)
    missing = len(program.parameters) - len(arguments)
    named = dict(zip(program.parameters, arguments + [0] * missing, strict=True))
    with np.errstate(all="ignore"):
        for z in range(grid[2]):
            for y in range(grid[1]):
                for x in range(grid[0]):
                    shared = bytearray(1 << 18)
                    going = [
                        Warp(program, named, shared, (x, y, z), grid, w, warps).run()
                        for w in range(warps)
                    ]
                    while going:  # from barrier to barrier
                        going = [w for w in going if next(w, w) is not w]


@contextlib.contextmanager
def emulated(arch: int) -> Iterator[list[str]]:
    """Within it Triton kernels are compiled for ``sm_<arch>`` and run on CPU tensors, by this
    module; yields the names of those that ran. Raises ValueError under the interpreter.
    """
    from triton.runtime import jit

    ran: list[str] = []
    with inspect_sass.compile_only(arch):
        compile_launch = jit.JITFunction.run

        def launch(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
            kernel = compile_launch(self, *args, grid=grid, warmup=True, **kwargs)
            bound = dict(zip(self.arg_names, args, strict=False)) | kwargs
            shape = tuple(grid(bound) if callable(grid) else grid)
            values: list[int] = []
            for name, kind in kernel.src.signature.items():
                if kind == "constexpr":
                    continue
                value = bound[name]
                if hasattr(value, "data_ptr"):
                    values.append(value.data_ptr())
                elif isinstance(value, float):
                    values.append(struct.unpack("<I", struct.pack("<f", value))[0])
                else:
                    values.append(int(value))
            grid3 = shape + (1,) * (3 - len(shape))
            run(kernel.asm["ptx"], values, grid3, kernel.metadata.num_warps)
            ran.append(self.__name__)
            return kernel

        jit.JITFunction.run = launch
        try:
            yield ran
        finally:
            jit.JITFunction.run = compile_launch
