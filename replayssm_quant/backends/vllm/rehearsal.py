"""Compiles what the layers of an engine will launch while it starts, all of it at once.

Otherwise every kernel is compiled at its first launch, one after the other: minutes in which the
engine is not up, or a request waits. Layers are asked to launch their steps on inputs that mean
nothing (``SplitLayer.rehearse``) where launches are compiled and not run. No vLLM here.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ...config import StateConfig
from ...state.cache import StepRows
from ...state.geometry import LayerGeometry
from .cursors import GroupRows, SlotCursors, move
from .drafts import DraftCursors, move_verify, shapes


def batches(geometry: LayerGeometry, most: int) -> list[int]:
    """Batches of up to ``most`` rows whose steps are launched differently.

    Launches change where the tables say so; a batch of one and multiples of 16 may compile to
    kernels of their own.
    """
    from ...kernels.common.store import fold_warps

    module = importlib.import_module(f"replayssm_quant.kernels.{geometry.kind}.triton_ops")
    found, each = {1, 2, 16}, fold_warps(geometry)
    for table in module.LAUNCH.values():
        for warps, _ in table:
            least = -(-warps // each)
            found |= {least, least + 1, -(-least // 16) * 16}
    return sorted(b for b in found if b <= max(most, 1))


def empty_rows(count: int, device: torch.device) -> StepRows:
    """Control rows of ``count`` padding rows."""

    def zeros(dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(count, dtype=dtype, device=device)

    slots = torch.full((count,), -1, dtype=torch.int64, device=device)
    return StepRows(
        slots, zeros(torch.int32), zeros(torch.bool), zeros(torch.int32), zeros(torch.int64)
    )


def rehearse_cursors(config: StateConfig, drafts: int, device: torch.device) -> None:
    """Launch what the metadata builders launch, with the requests' keys (V2) and without (V1)."""
    size = (2, config.buffer_len)
    how = {"stagger": config.stagger, "seed": config.seed, "device": device}
    blocks, lens, starts = (torch.zeros(n, dtype=torch.int32, device=device) for n in (1, 1, 2))
    for keys in (None, torch.zeros(1, dtype=torch.int64, device=device)):
        if drafts:
            step, other, _ = shapes(1, drafts, device)
            DraftCursors(*size, drafts, **how).verify(step, blocks, lens, starts, keys)
            move_verify(step, blocks, other)
        else:
            rows = empty_rows(1, device)
            SlotCursors(*size, **how).decode(rows, blocks, lens, keys)
            move(rows, blocks, empty_rows(1, device))
            for dtype in (torch.int32, torch.int64):
                if keys is not None:
                    index = torch.zeros(1, dtype=dtype, device=device)
                    cursors, tables = SlotCursors(*size, **how), [blocks[:, None]]
                    GroupRows(1, 1, device).plan(cursors, tables, lens, keys, index, 1, 1)


class Rehearsal:
    """Runs once for every cache that the layers of this rank are given."""

    def __init__(self, layers: Iterable[Any], log: Callable[[str], object]):
        self.layers, self.log = list(layers), log
        self.waiting = {id(layer) for layer in self.layers}

    def bound(self, layer: Any) -> None:
        """Told by each layer that it has its cache; the last one starts it."""
        self.waiting.discard(id(layer))
        if self.waiting:
            return
        self.waiting = {id(layer) for layer in self.layers}
        if self.layers[0].views.ckpt.is_cuda:
            self.run()

    def _name(self) -> str:
        """One for all ranks whose layers are of the same kinds."""
        kinds = {(str(x.geometry), str(x.config), x.drafts, x.max_rows) for x in self.layers}
        return hashlib.sha256(repr(sorted(kinds)).encode()).hexdigest()[:16]

    def run(self) -> None:
        """Compile; says how many kernels and how long, if it took more than a second.

        A failure is only logged: the launch that needs the kernel raises it, if there is one.
        """
        from ...kernels.common.ahead import can_compile_ahead, compile_ahead, first_alone

        if not can_compile_ahead():
            return
        try:
            with torch.inference_mode(), first_alone(self._name()), compile_ahead() as found:
                first = self.layers[0]
                rehearse_cursors(first.config, first.drafts, first.views.ckpt.device)
                for layer in self.layers:
                    for rows in batches(layer.geometry, layer.max_rows):
                        layer.rehearse(rows)
        except Exception as error:
            self.log(f"replayssm_quant: kernels are compiled one by one, since {error!r:.300}")
            return
        if found.seconds > 1:
            self.log(
                f"replayssm_quant: compiled {found.kernels} kernels in {found.seconds:.0f} s "
                f"({found.threads} threads)"
            )
        for problem in found.errors:
            self.log(f"replayssm_quant: a kernel did not compile: {problem[:300]}")
