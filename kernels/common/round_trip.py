"""What a store leaves of a state, without storing it: decode(encode(state)), bit for bit, fast.

``formats.codec`` packs codes and unpacks them again; a scan over a whole text needs only the fp32
values in between, hundreds of times a layer. ``RoundTrip`` computes them in a few passes over
pieces that stay in the cache: rounding by adding and subtracting a number whose ulp is the format's
(nearest even), or by a floor in units of that ulp (stochastic), and Philox words for a whole piece
at once. Same values as the codec and the same random bits as ``philox.element_bits``; only the sign
of a zero may differ. Formats with 16 random bits go through the codec itself, and on a GPU with
Triton the state is really stored and read again, by the kernels that decoding uses.
"""

from __future__ import annotations

import importlib.util

import torch
import torch.nn.functional as F

from ...config import StateConfig
from ...formats.codec import _encode_scale, _floored, decode, encode
from ...formats.philox import _KEY_A, _KEY_B, _MASK, _ROUND_A, _ROUND_B, element_bits
from ...formats.spec import ELEMENTS, TILE_ROWS, Element, Format

PIECE = 1 << 18
"""Elements that are rounded at once: a megabyte a buffer."""

_EXPONENT = 0x7F800000


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int32)


class RoundTrip:
    """Rounds the states of one layer as a store at a flush does.

    heads, rows, n: shape of a request's state. keys int64 [b]: the requests' random keys. layer and
    head_offset in global numbering, as in ``philox.element_bits``. impl: ``torch``, ``triton`` or
    None (Triton for CUDA keys, where it can be imported and has the format).
    """

    def __init__(
        self,
        config: StateConfig,
        heads: int,
        rows: int,
        n: int,
        keys: torch.Tensor,
        *,
        layer: int = 0,
        head_offset: int = 0,
        impl: str | None = None,
    ):
        for fmt in (config.update, config.output):
            if fmt is not None:
                fmt.check(rows, n)
        self.config, self.shape, self.keys = config, (heads, rows, n), keys
        self.layer, self.head_offset = layer, head_offset
        self.fast = n % 8 == 0 and config.random_bits == 8
        self.piece = max(1, PIECE // (heads * rows * n))
        if keys.is_cuda:  # no cache to stay in, and every launch costs
            self.piece = max(1, keys.numel())
        self._stored = None
        if impl is None and keys.is_cuda and importlib.util.find_spec("triton") is not None:
            impl = "triton"
        if impl == "triton":
            from .round_trip_triton import TritonRoundTrip, takes

            if takes(config, rows, n):
                self._stored = TritonRoundTrip(config, self.shape, keys, layer, head_offset)
        self._unit = 1.0
        if config.update.kind == "float":
            self._unit = 2.0 ** (23 - ELEMENTS[config.update.element].mantissa)
        device = keys.device
        if self.fast and config.uses_random_bits:
            pairs, words = -(-rows // 2), n // 8
            count = torch.arange(heads * pairs * words, device=device, dtype=torch.int64)
            first = (count + head_offset * pairs * words) & _MASK
            product = first * _ROUND_A  # wraps modulo 2**64; both halves are exact
            self._first_high, self._first_low = (product >> 32) & _MASK, product & _MASK
            self._shift = torch.arange(0, 32, 8, device=device, dtype=torch.int32)[:, None]
        self._scratch: dict[tuple[str, int], torch.Tensor] = {}

    def __call__(
        self, state: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(checkpoint, copy) that a flush at ``positions`` int [b] leaves of ``state``.

        state fp32 [b, H, R, N]; both results have its shape and are one tensor if the state is
        shared. The copy of a planar format is its high plane. The argument is not changed; the
        results live in buffers that the next call overwrites.
        """
        config = self.config
        if self._stored is not None:
            return self._stored(state, positions)
        if not self.fast:
            return self._by_codec(state, positions)
        if not config.update.rounds and config.output is None:
            return state, state
        checkpoint = self._buffer("checkpoint", state) if config.update.rounds else state
        copy = checkpoint if config.is_shared else self._buffer("copy", state)
        for start in range(0, state.shape[0], self.piece):
            part = slice(start, start + self.piece)
            if config.update.rounds:
                u = self._uniform(self.keys[part], positions[part])
                high = copy[part] if config.update.is_planar else None
                self._round(state[part], config.update, u, checkpoint[part], high)
            if config.output is not None:
                self._round(checkpoint[part], config.output, None, copy[part], None)
        return checkpoint, copy

    def _by_codec(
        self, state: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        config, rand = self.config, None
        if config.uses_random_bits:
            rand = element_bits(
                self.keys,
                positions,
                self.layer,
                *self.shape,
                head_offset=self.head_offset,
                bits=config.random_bits,
                rounds=config.philox_rounds,
            )
        enc = encode(state, config.update, rand, config.random_bits)
        checkpoint = decode(enc, config.update)
        if config.update.is_planar:
            return checkpoint, decode(enc, config.update, high_only=True)
        if config.output is None:
            return checkpoint, checkpoint
        return checkpoint, decode(encode(checkpoint, config.output), config.output)

    def _buffer(self, name: str, like: torch.Tensor) -> torch.Tensor:
        """An fp32 buffer of the shape of ``like``, kept for the next piece or call."""
        key = (name, like.shape[0])
        if key not in self._scratch:
            self._scratch[key] = torch.empty(like.shape, device=like.device)
        return self._scratch[key]

    def _constant(self, value: float, like: torch.Tensor) -> torch.Tensor:
        """A number as a tensor: dividing by a plain number, a GPU multiplies by its reciprocal."""
        key = (str(value), 0)
        if key not in self._scratch:
            self._scratch[key] = torch.full((), value, device=like.device)
        return self._scratch[key]

    # --- random bits ------------------------------------------------------------------------------

    def _uniform(self, keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor | None:
        """The draw of each element, fp32 [b, H, R, N]; None for nearest rounding.

        For integers (r - 127.5) / 256; for floats (r + 0.5) / 256 of one step of the format,
        counted in the last places of an fp32 number.
        """
        if not self.config.uses_random_bits:
            return None
        heads, rows, n = self.shape
        words, pairs = n // 8, -(-rows // 2)
        out = torch.stack(self._philox(keys, positions), 2).to(torch.int32)
        byte = (out.view(-1, heads, pairs, 4, 1, words) >> self._shift).bitwise_and_(255)
        u = byte.to(torch.float32).view(-1, heads, 2 * pairs, n)[:, :, :rows]
        first = self._unit * 2.0**-9
        if self.config.update.kind != "float":
            first -= 0.5
        return u.mul_(self._unit * 2.0**-8).add_(first)

    def _philox(self, keys: torch.Tensor, positions: torch.Tensor) -> list[torch.Tensor]:
        """The four words int64 [b, H * pairs, W] (flat in the last two) of every counter."""
        k0, k1 = keys & _MASK, (keys >> 32) & _MASK
        layer = self.layer * _ROUND_B
        # round 1: counter words 1 to 3 are the same for all elements, word 0 for all requests
        w0 = ((layer >> 32) & _MASK) ^ (positions.to(torch.int64) & _MASK) ^ k0
        w0, w1 = w0[:, None], torch.tensor(layer & _MASK, device=keys.device)
        w2, w3 = self._first_high ^ k1[:, None], self._first_low
        for _ in range(self.config.philox_rounds - 1):
            k0, k1 = (k0 + _KEY_A) & _MASK, (k1 + _KEY_B) & _MASK
            a, b = w0 * _ROUND_A, w2 * _ROUND_B
            w0 = (b >> 32).bitwise_and_(_MASK) ^ w1 ^ k0[:, None]
            w2 = (a >> 32).bitwise_and_(_MASK) ^ w3 ^ k1[:, None]
            w1, w3 = b.bitwise_and_(_MASK), a.bitwise_and_(_MASK)
        shape = (keys.shape[0], -1, self.shape[2] // 8)
        return [
            w.expand(keys.shape[0], self._first_low.numel()).view(shape) for w in (w0, w1, w2, w3)
        ]

    # --- rounding ---------------------------------------------------------------------------------

    def _round(
        self,
        x: torch.Tensor,
        fmt: Format,
        u: torch.Tensor | None,
        out: torch.Tensor,
        high: torch.Tensor | None,
    ) -> None:
        """Values of x in ``fmt`` into out, those of the high plane alone into high."""
        scale = None
        if fmt.is_scaled:
            scale, inverse = self._scales(x, fmt)
            t = torch.mul(_grouped(x, fmt), inverse, out=_grouped(out, fmt)).view(x.shape)
            t.clamp_(-fmt.max_code, fmt.max_code)
        else:
            t = torch.clamp(x, -fmt.max_code, fmt.max_code, out=out)
        if fmt.kind != "float":
            (t if u is None else t.add_(u)).round_()
            if u is not None:
                t.clamp_(-fmt.max_code, fmt.max_code)
            if high is not None:
                half = float(1 << (fmt.lo_bits - 1))
                torch.add(t, half, out=high).mul_(2.0**-fmt.lo_bits).floor_()
                high.mul_(float(1 << fmt.lo_bits))
                _grouped(high, fmt).mul_(scale)
        else:
            element = ELEMENTS[fmt.element]
            if u is None:
                self._nearest(t, element)
            elif element.name == "fp16":
                self._draw_fp16(x, t, element, u)
            else:
                self._stochastic(t, element, u)
        if scale is not None:
            _grouped(t, fmt).mul_(scale)

    def _scales(self, x: torch.Tensor, fmt: Format) -> tuple[torch.Tensor, torch.Tensor]:
        """(scale, 1 / scale) of each group, shaped to broadcast over ``_grouped`` elements."""
        mag = torch.abs(x, out=self._buffer("a", x))
        kind, block = fmt.scale.granularity, fmt.scale.block
        if kind == "block":  # the fastest maximum of short runs that torch has
            flat = F.max_pool1d(mag.view(1, 1, -1), block)
            amax = flat.view(*x.shape[:-1], -1)
        else:
            amax = mag.amax(-1) if kind == "row" else mag.amax((-1, -2))
        scale = self._tiled(amax, fmt) if fmt.scale.dtype == "e4m3" else _encode_scale(amax, fmt)[2]
        inverse = scale.reciprocal().nan_to_num_(nan=0.0, posinf=0.0)
        if kind == "head":
            return scale[..., None, None], inverse[..., None, None]
        return scale[..., None], inverse[..., None]

    def _tiled(self, amax: torch.Tensor, fmt: Format) -> torch.Tensor:
        """e4m3 block scales under fp32 tile scales, as ``codec`` makes them, decoded."""
        raw = amax / self._constant(fmt.max_code, amax)
        rows = raw.shape[-2]
        tiles = -(-rows // TILE_ROWS)
        largest = F.pad(amax.amax(-1), (0, tiles * TILE_ROWS - rows))
        largest = largest.unflatten(-1, (tiles, TILE_ROWS)).amax(-1)
        tile = _floored(largest / self._constant(fmt.max_code * 448.0, amax))
        tile = tile.repeat_interleave(TILE_ROWS, -1)[..., :rows, None]
        ratio = (raw / tile).nan_to_num_(nan=0.0).clamp_(max=448.0)
        # e4m3: 3 bits behind the leading one, smallest exponent -6
        field = (_bits(ratio) & _EXPONENT).clamp_(min=121 << 23)
        if fmt.scale.round_up:
            ulp = (field - (3 << 23)).view(torch.float32)
            return ratio.div_(ulp).ceil_().mul_(ulp).mul_(tile)
        magic = field.add_((20 << 23) + 0x400000).view(torch.float32)
        return ratio.add_(magic).sub_(magic).mul_(tile)

    def _nearest(self, t: torch.Tensor, element: Element) -> None:
        """t, at most element.max, to the nearest value of the element, ties to even."""
        m, emin = element.mantissa, element.emin
        if element.bits == 16:
            dtype = torch.float16 if element.name == "fp16" else torch.bfloat16
            t.copy_(t.to(dtype))
            return
        magic = self._buffer("a", t)
        if element.name == "e2m1":  # what lies within 2**-23 of a tie below 1 is one
            torch.abs(t, out=magic)
            near = magic.add(1.0).sub_(1.0)
            torch.where(magic < 1, near, magic, out=magic)
            torch.copysign(magic, t, out=t)
        # 1.5 * 2**(exponent + 23 - m): t added to it keeps m bits behind its leading one
        field = torch.bitwise_and(_bits(t), _EXPONENT, out=_bits(magic))
        field.clamp_(min=(emin + 127) << 23).add_(((23 - m) << 23) + 0x400000)
        t.add_(magic).sub_(magic)

    def _draw_fp16(
        self, x: torch.Tensor, t: torch.Tensor, element: Element, u: torch.Tensor
    ) -> None:
        """t, x clamped, to fp16: the draw is added in fp32 and the sum cut. Infinities stay."""
        mag = torch.abs(t, out=self._buffer("a", t))
        power = self._buffer("b", t)
        field = torch.bitwise_and(_bits(mag), _EXPONENT, out=_bits(power))
        field.clamp_(min=(element.emin + 127) << 23)
        mag.add_(torch.mul(power, u, out=self._buffer("c", t)).mul_(2.0**-23))
        # the fp32 bits of mag times this are its code and then the bits that are cut
        align = 2.0 ** (-126 - element.emin)
        _bits(mag.clamp_(max=element.max).mul_(align)).bitwise_and_(-1 << (23 - element.mantissa))
        mag.mul_(1 / align)
        torch.copysign(mag, t, out=t)
        t.copy_(torch.where(x.isinf(), x, t))

    def _stochastic(self, t: torch.Tensor, element: Element, u: torch.Tensor) -> None:
        """t, at most element.max, to the value below or above in magnitude, by u in (0, unit).

        The codec adds u to the fp32 bits and cuts them, below the smallest normal number after
        rounding to the last place that they have there.
        """
        m, emin = element.mantissa, element.emin
        mag = torch.abs(t, out=self._buffer("a", t))
        ulp, inverse = self._buffer("b", t), self._buffer("c", t)
        if element.name == "bf16":  # its ulp may be no normal number: round in the integer
            field = _bits(mag).add_(u.to(torch.int32))
            field.bitwise_and_(-0x10000).clamp_(max=element.max_magnitude_code << 16)
            mag.add_(torch.sub(t, t, out=ulp))  # the integer would make a NaN finite
            torch.copysign(mag, t, out=t)
            return
        field = torch.bitwise_and(_bits(mag), _EXPONENT, out=_bits(ulp))
        field.clamp_(min=(emin + 127) << 23)
        # 2**(23 - exponent): places below 2**24. The sum is exact below 2**24, and above it the
        # floor is the same however it rounds. The constant wraps in 32 bits, the result does not.
        torch.mul(field, -1, out=_bits(inverse)).add_((277 << 23) - 2**32)
        field.sub_(m << 23)
        mag.mul_(inverse).round_().add_(u).mul_(2.0 ** (m - 23)).floor_().mul_(ulp)
        torch.copysign(mag, t, out=t)


def _grouped(x: torch.Tensor, fmt: Format) -> torch.Tensor:
    """x [..., N] with the last axis split into scale blocks, if the format has them."""
    return x.unflatten(-1, (-1, fmt.scale.block)) if fmt.scale.granularity == "block" else x
