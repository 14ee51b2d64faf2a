"""StateLayout: where each byte of a request's state lives within one layer's page.

A page holds, in this order, the update checkpoint, the output copy, their scales and the ring;
every tensor starts on 128 bytes. A pool is uint8 [slots, page stride]; ``views`` reinterprets it
without a copy, so a slot's stride may be anything an engine chooses.
"""

from __future__ import annotations

import json
from dataclasses import astuple, dataclass, fields
from functools import lru_cache
from typing import TYPE_CHECKING

from ..config import StateConfig
from ..formats.spec import Plane
from .geometry import LayerGeometry

if TYPE_CHECKING:
    import torch

ALIGN = 128
CURSOR_BYTES = 20
"""Of one request, for all layers together: valid, offset and position int32, key int64."""
PENDING_BYTES = 4
"""More of them with drafts: the number of tokens that await acceptance, int32."""
MAX_DRAFTS = 7
"""Draft tokens that a step may verify; with the token they follow, T = 8."""


def ring_capacity(buffer_len: int, drafts: int = 0) -> int:
    """Inputs that a ring holds: L, or L + T where a step verifies T = 1 + drafts tokens.

    A step meets at most L - 1 committed inputs that are not due for a flush, so that up to
    L - 1 + T may be committed before the next one, which folds them all; a plain step then folds
    its own token with them. Raises ValueError or TypeError for drafts out of range.
    """
    if isinstance(drafts, bool) or not isinstance(drafts, int):
        raise TypeError(f"drafts {drafts!r} is not an integer; use 0 to {MAX_DRAFTS}")
    if not 0 <= drafts <= MAX_DRAFTS:
        raise ValueError(f"drafts {drafts} is out of range; use 0 (none) to {MAX_DRAFTS}")
    return buffer_len + 1 + drafts if drafts else buffer_len


@dataclass
class StateViews:
    """Strided tensors of one layer over a pool; the leading axis of each is the slot.

    Shapes and storage types: ``formats.spec.Format.planes`` for checkpoint and copy. Where the
    readout uses the checkpoint itself (shared), or its high plane (planar), copy views alias it.
    Rings of Mamba-2: ring_x [slots, L, H, P] and ring_B [slots, L, G, N] as the model computes
    them, ring_dt [slots, L, H] fp32 after bias and softplus. Of GDN: ring_k [slots, L, HK, K] raw,
    ring_v [slots, L, HV, V], and fp32 ring_g [slots, L, HV, 1] (log decay), ring_beta
    [slots, L, HV], ring_rk [slots, L, HK] = 1 / |k|. drafts: what a step may verify; with some a
    ring has L + T entries (``ring_capacity``) instead of L. pages and layout: where the views come
    from, which is what a compiled graph works on; None where each has a storage of its own.
    """

    ckpt: torch.Tensor
    ckpt_low: torch.Tensor | None
    ckpt_scale: torch.Tensor | None
    ckpt_tile_scale: torch.Tensor | None
    copy: torch.Tensor
    copy_scale: torch.Tensor | None
    copy_tile_scale: torch.Tensor | None
    ring_x: torch.Tensor | None = None
    ring_dt: torch.Tensor | None = None
    ring_B: torch.Tensor | None = None
    ring_k: torch.Tensor | None = None
    ring_v: torch.Tensor | None = None
    ring_g: torch.Tensor | None = None
    ring_beta: torch.Tensor | None = None
    ring_rk: torch.Tensor | None = None
    drafts: int = 0
    pages: torch.Tensor | None = None
    layout: StateLayout | None = None

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every view that is present, by name."""
        pairs = ((name, getattr(self, name)) for name in VIEWS)
        return {name: t for name, t in pairs if t is not None}

    def check_ring(self, ring: torch.Tensor, buffer_len: int) -> None:
        """Raise ValueError unless a ring view has the entries of windows of L and these drafts."""
        wanted = ring_capacity(buffer_len, self.drafts)
        if ring.shape[1] != wanted:
            drafts = f" with {self.drafts} drafts" if self.drafts else ""
            raise ValueError(
                f"the ring holds {ring.shape[1]} tokens but buffer_len is {buffer_len}{drafts}, "
                f"which needs {wanted}; build the pool and the step from one StateConfig"
            )


VIEWS = tuple(f.name for f in fields(StateViews) if f.name not in ("drafts", "pages", "layout"))
"""Names of the tensors of ``StateViews``."""


@dataclass(frozen=True)
class Field:
    """One tensor of a page: shape of one slot, storage type, byte offset in the page."""

    name: str
    shape: tuple[int, ...]
    storage: str
    offset: int

    @property
    def nbytes(self) -> int:
        return Plane(self.name, self.shape, self.storage).nbytes


class StateLayout:
    """Fields and bytes of one layer's page for a geometry, a config and an activation dtype.

    ring_storage is the dtype of the ring's activations (``bf16``, ``fp16`` or ``fp32``). drafts:
    draft tokens that a step verifies at most (speculative decoding); they only lengthen the ring.
    text is all of that in one line, for ``from_text``. Raises ValueError where a format does not
    fit the geometry.
    """

    def __init__(
        self,
        geometry: LayerGeometry,
        config: StateConfig,
        ring_storage: str = "bf16",
        drafts: int = 0,
    ):
        if ring_storage not in ("bf16", "fp16", "fp32"):
            raise ValueError(f"ring dtype '{ring_storage}' is not supported; use bf16, fp16, fp32")
        self.geometry, self.config, self.ring_storage = geometry, config, ring_storage
        self.drafts, self.capacity = drafts, ring_capacity(config.buffer_len, drafts)
        self.text = json.dumps([astuple(geometry), config.text, ring_storage, drafts])
        g, length = geometry, self.capacity
        shape = (g.heads, g.rows, g.n)
        planes = [("ckpt", p) for p in config.update.planes(*shape)]
        if config.output is not None:
            planes += [("copy", p) for p in config.output.planes(*shape)]
        self.fields: dict[str, Field] = {}
        self._end = 0
        for prefix, plane in planes:
            name = prefix if plane.name == "codes" else f"{prefix}_{plane.name}"
            self._add(name, plane.shape, plane.storage)
        act = ring_storage
        if g.kind == "mamba2":
            self._add("ring_x", (length, g.heads, g.rows), act)
            self._add("ring_dt", (length, g.heads), "fp32")
            self._add("ring_B", (length, g.groups, g.n), act)
        else:
            self._add("ring_k", (length, g.groups, g.n), act)
            self._add("ring_v", (length, g.heads, g.rows), act)
            self._add("ring_g", (length, g.heads, g.gate_width), "fp32")
            self._add("ring_beta", (length, g.heads), "fp32")
            self._add("ring_rk", (length, g.groups), "fp32")

    @staticmethod
    @lru_cache(maxsize=1024)
    def from_text(text: str) -> StateLayout:
        """The layout whose ``text`` this is."""
        geometry, config, *others = json.loads(text)
        return StateLayout(LayerGeometry(*geometry), StateConfig.from_text(config), *others)

    def _add(self, name: str, shape: tuple[int, ...], storage: str) -> None:
        offset = -(-self._end // ALIGN) * ALIGN
        field = Field(name, shape, storage, offset)
        self.fields[name] = field
        self._end = offset + field.nbytes

    @property
    def page_bytes(self) -> int:
        """Bytes of one slot, padded to the alignment."""
        return -(-self._end // ALIGN) * ALIGN

    @property
    def signature(self) -> tuple[object, ...]:
        """What two layouts must share for a page of one to mean the same in the other."""
        c = self.config
        fields_ = tuple((f.name, f.shape, f.storage, f.offset) for f in self.fields.values())
        formats = (c.update.name, None if c.output is None else c.output.name, c.rotate)
        return (self.geometry, formats, fields_)

    def _sum(self, prefix: str, suffix: str = "") -> int:
        named = (f for f in self.fields.values() if f.name.startswith(prefix))
        return sum(f.nbytes for f in named if f.name.endswith(suffix))

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of the checkpoint with its scales; of a planar format both planes."""
        return self._sum("ckpt")

    @property
    def copy_bytes(self) -> int:
        """Bytes stored for the output copy alone; 0 if it is the checkpoint or its high plane."""
        return self._sum("copy")

    @property
    def scale_bytes(self) -> int:
        """Bytes of every scale, of the checkpoint and of the copy."""
        return self._sum("ckpt", "scale") + self.copy_scale_bytes

    @property
    def copy_scale_bytes(self) -> int:
        return self._sum("copy", "scale")

    @property
    def ring_bytes(self) -> int:
        return self._sum("ring")

    @property
    def ring_row_bytes(self) -> float:
        """Ring bytes of one token."""
        return self.ring_bytes / self.capacity

    @property
    def state_bytes_per_step(self) -> float:
        """Bytes of checkpoint and copy that a token moves, averaged over a window of L.

        The readout on L - 1 steps; at the flush the checkpoint in and out, and the copy out.
        """
        g, c, length = self.geometry, self.config, self.config.buffer_len
        readout = c.readout.readout_bytes(g.heads, g.rows, g.n)
        flush = 2 * self.checkpoint_bytes + self.copy_bytes
        return ((length - 1) * readout + flush) / length

    @property
    def ring_bytes_per_step(self) -> float:
        """Ring bytes that a token moves: step i of a window reads i rows, all but the last write
        one."""
        length = self.config.buffer_len
        return (sum(range(length)) + length - 1) * self.ring_row_bytes / length

    @property
    def bytes_per_step(self) -> float:
        """State and ring bytes that one token moves, averaged over a window of L."""
        return self.state_bytes_per_step + self.ring_bytes_per_step

    def verify_bytes(self, kept: int) -> tuple[float, float]:
        """(state, ring) bytes that a step of T = 1 + drafts tokens moves if it keeps ``kept``.

        Averaged from flush to flush, which are ceil(L / kept) steps: every step reads the copy once
        and the committed inputs, and writes T; one of them folds all committed inputs first.
        Raises ValueError for kept outside 1 to T.
        """
        if not 1 <= kept <= 1 + self.drafts:
            raise ValueError(f"kept {kept} is out of range; a step keeps 1 to {1 + self.drafts}")
        g, c = self.geometry, self.config
        steps = -(-c.buffer_len // kept)
        flush = (2 * self.checkpoint_bytes + self.copy_bytes) / steps
        state = c.readout.readout_bytes(g.heads, g.rows, g.n) + flush
        read = sum(kept * i for i in range(steps)) + kept * steps
        rows = read / steps + 1 + self.drafts
        return state, rows * self.ring_row_bytes

    def views(self, pages: torch.Tensor) -> StateViews:
        """Typed views over uint8 pages [slots, stride >= page_bytes], stride a multiple of 4."""
        import torch

        dtypes = {
            "fp32": torch.float32,
            "fp16": torch.float16,
            "bf16": torch.bfloat16,
            "u8": torch.uint8,
            "i32": torch.int32,
        }
        if pages.dtype != torch.uint8 or pages.ndim != 2 or pages.shape[1] < self.page_bytes:
            raise ValueError(
                f"pages must be uint8 [slots, >= {self.page_bytes}], not "
                f"{pages.dtype} {tuple(pages.shape)}"
            )

        def view(name: str) -> torch.Tensor | None:
            f = self.fields.get(name)
            if f is None:
                return None
            flat = pages[:, f.offset : f.offset + f.nbytes].view(dtypes[f.storage])
            return flat.unflatten(1, f.shape)

        found = {name: view(name) for name in VIEWS}
        if self.config.output is None:
            for part in ("", "_scale", "_tile_scale"):
                found["copy" + part] = found["ckpt" + part]
        return StateViews(**found, drafts=self.drafts, pages=pages, layout=self)  # type: ignore[arg-type]


def fp32_bytes(geometry: LayerGeometry) -> int:
    """Bytes of the plain fp32 state of one request in one layer: the reference of every ratio."""
    return 4 * geometry.elements
