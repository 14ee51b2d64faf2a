"""What a state format is: element, scale rule, planes, bytes. One table, ``FORMATS``; no torch
here.

Elements follow the OCP Microscaling specification 1.0 (e2m1, e2m3, e3m2, e4m3, e5m2, e8m0) and IEEE
754 (fp32, fp16); NVFP4 is e2m1 with one e4m3 scale per 16 elements under one fp32 scale (here: one
per tile of 16 rows of a head, so that a kernel can encode a tile in one pass). The planar integers
``P{h}+{l}`` hold one scaled integer in two bit planes: the high plane alone is the output copy,
both planes are the update checkpoint.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, replace
from typing import Literal

Granularity = Literal["none", "row", "block", "head"]
ScaleDtype = Literal["fp32", "fp16", "e4m3", "e8m0"]

STORAGE_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "u8": 1, "i32": 4}
TILE_ROWS = 16
"""Rows of a head under one fp32 scale where block scales are e4m3."""

MIN_SCALE = 2.0**-100
"""Smallest non-zero scale: keeps ``1 / scale`` finite in fp32 for vanishing rows."""


@dataclass(frozen=True)
class Element:
    """A number system: ``mantissa`` stored bits, smallest normal exponent ``emin``, largest
    ``max``."""

    name: str
    kind: Literal["float", "int"]
    bits: int
    mantissa: int
    emin: int
    max: float

    @property
    def max_magnitude_code(self) -> int:
        """The code (sign bit cleared) of ``max``."""
        if self.kind == "int":
            return int(self.max)
        return {"fp16": 0x7BFF, "bf16": 0x7F7F}.get(self.name) or _magnitude_code(self)


def _magnitude_code(e: Element) -> int:
    """Magnitude code of ``e.max``: ((exponent - emin) << mantissa) + max / ulp."""
    exponent = e.max.hex().split("p")
    exp = int(exponent[1])
    return ((exp - e.emin) << e.mantissa) + int(e.max / 2.0 ** (exp - e.mantissa))


ELEMENTS = {
    e.name: e
    for e in (
        Element("fp32", "float", 32, 23, -126, 3.4028234663852886e38),
        Element("fp16", "float", 16, 10, -14, 65504.0),
        Element("bf16", "float", 16, 7, -126, 3.3895313892515355e38),
        Element("e4m3", "float", 8, 3, -6, 448.0),
        Element("e5m2", "float", 8, 2, -14, 57344.0),
        Element("e3m2", "float", 6, 2, -2, 28.0),
        Element("e2m3", "float", 6, 3, 0, 7.5),
        Element("e2m1", "float", 4, 1, 0, 6.0),
        Element("int8", "int", 8, 0, 0, 127.0),
        Element("int4", "int", 4, 0, 0, 7.0),
    )
}


@dataclass(frozen=True)
class ScaleSpec:
    """How a group of elements shares a scale; the scale multiplies codes to decode them.

    ``row`` is one (head, row), ``block`` is ``block`` consecutive elements of a row along d_state
    (K for GDN), ``head`` is a whole [rows, d_state] matrix. An e4m3 block scale sits under one fp32
    scale for each ``TILE_ROWS`` rows of a head (``tile_scale``). ``round_up`` rounds an e4m3 scale
    up, so that the block's largest value never exceeds the top code.
    """

    granularity: Granularity = "none"
    block: int = 0
    dtype: ScaleDtype = "fp32"
    round_up: bool = False

    @property
    def has_tile_scale(self) -> bool:
        return self.granularity == "block" and self.dtype == "e4m3"


@dataclass(frozen=True)
class Plane:
    """One stored tensor of one (slot, layer); ``storage`` is a key of ``STORAGE_BYTES``."""

    name: str
    shape: tuple[int, ...]
    storage: str

    @property
    def nbytes(self) -> int:
        n = STORAGE_BYTES[self.storage]
        for s in self.shape:
            n *= s
        return n


@dataclass(frozen=True)
class Format:
    """A state format: an element (or a planar integer) and its scale rule.

    ``bits`` is the width of the plane that a readout loads, ``lo_bits`` the width of the low plane
    of a planar format (0 otherwise), ``max_code`` the largest magnitude of the scaled value before
    the scale.
    """

    name: str
    element: str
    kind: Literal["float", "int", "planar"]
    bits: int
    lo_bits: int
    max_code: float
    scale: ScaleSpec
    fixed_scale: bool = False

    @property
    def is_planar(self) -> bool:
        return self.kind == "planar"

    @property
    def is_scaled(self) -> bool:
        return self.scale.granularity != "none"

    @property
    def rounds(self) -> bool:
        """False for fp32, which stores the state as it is."""
        return self.name != "fp32"

    def check(self, rows: int, n: int) -> None:
        """Raise ValueError if a [rows, n] state cannot be stored in this format."""
        if rows < 1 or n < 1:
            raise ValueError(f"state shape {rows} x {n} is empty; both sides must be at least 1")
        if self.scale.granularity == "block" and n % self.scale.block:
            raise ValueError(
                f"{self.name}: d_state {n} is not a multiple of the scale block "
                f"{self.scale.block}; use a row scale, or a block that divides {n}"
            )
        if (self.bits == 4 or self.lo_bits == 4) and n % 8:
            raise ValueError(f"{self.name}: 4-bit planes need d_state a multiple of 8, not {n}")

    def scale_planes(self, heads: int, rows: int, n: int) -> tuple[Plane, ...]:
        storage = {"fp32": "fp32", "fp16": "fp16", "e4m3": "u8", "e8m0": "u8"}[self.scale.dtype]
        shape = {
            "row": (heads, rows),
            "block": (heads, rows, n // self.scale.block if self.scale.block else 0),
            "head": (heads,),
        }.get(self.scale.granularity)
        if shape is None:
            return ()
        planes: tuple[Plane, ...] = (Plane("scale", shape, storage),)
        if self.scale.has_tile_scale:
            planes += (Plane("tile_scale", (heads, -(-rows // TILE_ROWS)), "fp32"),)
        return planes

    def code_plane(self, heads: int, rows: int, n: int) -> Plane:
        """The plane that a readout loads: codes, or the high plane of a planar format."""
        if self.bits == 4:
            return Plane("codes", (heads, rows, n // 8), "i32")
        storage = self.name if self.name in ("fp32", "fp16", "bf16") else "u8"
        return Plane("codes", (heads, rows, n), storage)

    def low_plane(self, heads: int, rows: int, n: int) -> Plane | None:
        if not self.lo_bits:
            return None
        if self.lo_bits == 4:
            return Plane("low", (heads, rows, n // 8), "i32")
        return Plane("low", (heads, rows, n), "u8")

    def planes(self, heads: int, rows: int, n: int) -> tuple[Plane, ...]:
        """Every stored tensor of a [heads, rows, n] state in this format.

        Raises ValueError where the shape does not fit the format.
        """
        self.check(rows, n)
        low = self.low_plane(heads, rows, n)
        middle = (low,) if low is not None else ()
        return (self.code_plane(heads, rows, n), *middle, *self.scale_planes(heads, rows, n))

    def nbytes(self, heads: int, rows: int, n: int) -> int:
        """Stored bytes of a [heads, rows, n] state, scales included."""
        return sum(p.nbytes for p in self.planes(heads, rows, n))

    def bytes_per_element(self, rows: int = 64, n: int = 128) -> float:
        """Stored bytes an element, scales included (head and tile scales counted in)."""
        return self.nbytes(1, rows, n) / (rows * n)

    def readout_bytes(self, heads: int, rows: int, n: int) -> int:
        """Bytes that one readout loads: the code plane and the scales, never the low plane."""
        self.check(rows, n)
        scales = sum(p.nbytes for p in self.scale_planes(heads, rows, n))
        return self.code_plane(heads, rows, n).nbytes + scales


_NONE, _ROW = ScaleSpec(), ScaleSpec("row")
_B16 = ScaleSpec("block", 16, "e4m3")
_B16_UP = ScaleSpec("block", 16, "e4m3", round_up=True)
_MX = ScaleSpec("block", 32, "e8m0")


def _planar(high: int, low: int, scale: ScaleSpec) -> Format:
    max_code = float((2 ** (high - 1) - 1) * 2**low)
    return Format(f"P{high}+{low}", "int", "planar", high, low, max_code, scale)


FORMATS: dict[str, Format] = {
    f.name: f
    for f in (
        Format("fp32", "fp32", "float", 32, 0, ELEMENTS["fp32"].max, _NONE, True),
        Format("fp16", "fp16", "float", 16, 0, 65504.0, _NONE, True),
        Format("bf16", "bf16", "float", 16, 0, ELEMENTS["bf16"].max, _NONE, True),
        Format("e4m3", "e4m3", "float", 8, 0, 448.0, _ROW),
        Format("e5m2", "e5m2", "float", 8, 0, 57344.0, _ROW),
        Format("int8", "int8", "int", 8, 0, 127.0, _ROW),
        Format("int4", "int4", "int", 4, 0, 7.0, _B16),
        Format("nvfp4", "e2m1", "float", 4, 0, 6.0, _B16, True),
        Format("mxfp4", "e2m1", "float", 4, 0, 6.0, _MX, True),
        Format("mxfp8", "e4m3", "float", 8, 0, 448.0, _MX, True),
        _planar(4, 4, _B16_UP),
        _planar(4, 8, _B16_UP),
        _planar(8, 4, _ROW),
    )
}
"""Every format by its name, with its default scale rule.

The e4m3 block scales of nvfp4 and int4 are rounded to nearest: where one comes out low, by at most
1/17 of itself (more below the smallest normal scale), the largest values of its block are clipped.
Planar formats round it up instead, because a clipped checkpoint would lose mass at every flush.
"""

ALIASES = {
    "fp8": "e4m3",
    "float8": "e4m3",
    "fp8_e4m3": "e4m3",
    "float8_e4m3fn": "e4m3",
    "fp8_e5m2": "e5m2",
    "float8_e5m2": "e5m2",
    "fp4": "nvfp4",
    "float32": "fp32",
    "float16": "fp16",
    "half": "fp16",
    "float": "fp32",
    "bfloat16": "bf16",
}
"""What people type, and the format that it means."""

_BLOCKS = (16, 32)
_SCALE_DTYPES = ("fp32", "fp16", "e4m3", "e8m0")


def _unknown(name: str) -> ValueError:
    known = [*FORMATS, *ALIASES]
    near = difflib.get_close_matches(name, known, 1)
    hint = f"did you mean '{near[0]}'? " if near else ""
    return ValueError(f"unknown state format '{name}': {hint}known formats: {', '.join(FORMATS)}")


def parse_format(text: str | Format) -> Format:
    """The format that ``text`` names: ``name[/granularity][/scale dtype]``.

    ``name`` is a key of ``FORMATS`` or ``ALIASES`` (letter case is ignored); the granularity is
    ``none``, ``row``, ``head``, ``b16`` or ``b32``; the scale dtype is fp32, fp16, e4m3 (blocks
    only) or e8m0. Examples: ``fp8``, ``e4m3/b32``, ``int8/row/fp16``, ``P4+8/row``. Raises
    ValueError, naming the value and what is known.
    """
    if isinstance(text, Format):
        return text
    if not isinstance(text, str):
        raise TypeError(f"a state format is a name, not {type(text).__name__} {text!r}")
    parts = [p.strip() for p in text.strip().split("/")]
    base = parts[0].lower()
    base = ALIASES.get(base, base)
    by_lower = {k.lower(): f for k, f in FORMATS.items()}
    if base not in by_lower:
        raise _unknown(parts[0])
    fmt = by_lower[base]
    if len(parts) == 1:
        return fmt
    if len(parts) > 3:
        raise ValueError(f"'{text}': write name/granularity/scale dtype, for example e4m3/b32/fp16")
    if fmt.fixed_scale:
        raise ValueError(f"'{text}': {fmt.name} fixes its own scale; write just '{fmt.name}'")
    return with_scale(fmt, parts[1], parts[2] if len(parts) == 3 else None)


def with_scale(fmt: Format, granularity: str, dtype: str | None = None) -> Format:
    """``fmt`` with another scale rule; arguments as in ``parse_format``. Raises ValueError."""
    block = 0
    match = re.fullmatch(r"b(?:lock)?(\d+)", granularity.lower())
    if match:
        block = int(match[1])
        if block not in _BLOCKS:
            raise ValueError(f"scale block {block} is not supported; use 16 or 32")
        kind = "block"
    else:
        kind = granularity.lower()
        if kind not in ("none", "row", "head"):
            raise ValueError(
                f"unknown granularity '{granularity}': use none, row, head, b16 or b32"
            )
    if kind == "none":
        if fmt.kind != "float":
            raise ValueError(
                f"{fmt.name} is an integer format and needs a scale: row, head, b16, b32"
            )
        if dtype is not None:
            raise ValueError(f"'{fmt.name}/none' has no scale, so no scale dtype '{dtype}'")
    default = "e4m3" if fmt.kind == "planar" and kind == "block" else "fp32"
    dtype = (dtype or default).lower()
    if dtype not in _SCALE_DTYPES:
        raise ValueError(f"unknown scale dtype '{dtype}': use one of {', '.join(_SCALE_DTYPES)}")
    if dtype == "e4m3" and kind != "block":
        raise ValueError(f"an e4m3 scale needs blocks (b16 or b32), not granularity '{kind}'")
    scale = ScaleSpec(
        kind,  # type: ignore[arg-type]
        block,
        dtype,  # type: ignore[arg-type]
        fmt.kind == "planar" and dtype == "e4m3",
    )
    base = fmt.name.split("/")[0]
    if scale == FORMATS[base].scale:
        return FORMATS[base]
    suffix = f"/b{block}" if block else f"/{kind}"
    suffix += "" if dtype == default or kind == "none" else f"/{dtype}"
    return replace(fmt, name=base + suffix, scale=scale)
