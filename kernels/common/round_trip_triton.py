"""``round_trip.RoundTrip`` on a GPU: the store kernel and the read kernel, one after the other."""

from __future__ import annotations

import torch
import triton

from ...config import StateConfig
from ...formats.spec import Format, Plane
from ...state.layout import StateViews
from .spec import kernel_format, words
from .store import (
    _read_kernel,
    _store_kernel,
    check_state_size,
    launch_warps,
    plane_arguments,
    rounding_sizes,
)

_DTYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "u8": torch.uint8,
    "i32": torch.int32,
}


CAPTURE_AFTER = 3
"""Calls before the kernels become a graph: they are compiled by then, and short texts end."""


def takes(config: StateConfig, rows: int, n: int) -> bool:
    """True if the kernels store states [rows, n] a head in these formats."""
    try:
        check_state_size(rows, n)
        kernel_format(config.update)
        kernel_format(config.readout)
    except ValueError:
        return False
    return True


class TritonRoundTrip:
    """The same values as ``RoundTrip``, from the bytes that a flush on this device stores."""

    def __init__(
        self,
        config: StateConfig,
        shape: tuple[int, int, int],
        keys: torch.Tensor,
        layer: int,
        head_offset: int,
    ):
        self.config, self.shape, self.keys = config, shape, keys
        self.layer, self.head_offset = layer, head_offset
        batch, device = keys.numel(), keys.device
        names = {"codes": "", "low": "_low", "scale": "_scale", "tile_scale": "_tile_scale"}

        def stored(prefix: str, planes: tuple[Plane, ...]) -> dict[str, torch.Tensor]:
            return {
                prefix + names[p.name]: torch.zeros(
                    batch, *p.shape, dtype=_DTYPES[p.storage], device=device
                )
                for p in planes
            }

        held: dict[str, torch.Tensor | None] = dict.fromkeys(
            ("ckpt", "ckpt_low", "ckpt_scale", "ckpt_tile_scale"), None
        )
        held |= dict.fromkeys(("copy", "copy_scale", "copy_tile_scale"), None)
        held |= stored("ckpt", config.update.planes(*shape))
        if config.output is not None:
            held |= stored("copy", config.output.planes(*shape))
        else:
            held |= {"copy" + s: held["ckpt" + s] for s in ("", "_scale", "_tile_scale")}
        self.views = StateViews(**held)  # type: ignore[arg-type]
        self.slots = torch.arange(batch, device=device)
        self.args, self.sizes = plane_arguments(self.views, config)
        self.grid = (-(-shape[1] // 16), shape[0], batch)
        self.width = triton.next_power_of_2(shape[2] // 8)
        self._calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(
        self, state: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(checkpoint, copy) fp32 [b, H, R, N]; as ``RoundTrip.__call__``. On a GPU the kernels are
        one captured graph from the fourth call on, and its results the same buffers each time."""
        if not self.config.update.rounds and self.config.output is None:
            return state, state
        self._calls += 1
        if self._graph is None and state.is_cuda and self._calls == CAPTURE_AFTER + 1:
            self._capture(state, positions)
        if self._graph is None:
            return self._run(state.contiguous(), positions.to(torch.int32))
        self._state.copy_(state)
        self._position.copy_(positions)
        self._graph.replay()
        return self._result

    def _capture(self, state: torch.Tensor, positions: torch.Tensor) -> None:
        self._state = state.contiguous().clone()
        self._position = positions.to(torch.int32).clone()
        graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(side):
                graph.capture_begin()
                try:
                    self._result = self._run(self._state, self._position)
                finally:
                    graph.capture_end()
        except RuntimeError:  # something else of this process was busy: launch one by one
            return
        torch.cuda.current_stream().wait_stream(side)
        self._graph = graph

    def _run(
        self, state: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        config, (heads, rows, n) = self.config, self.shape
        _store_kernel[self.grid](
            state,
            self.slots,
            self.keys,
            positions,
            layer=self.layer,
            head_offset=self.head_offset,
            H=heads,
            R=rows,
            N=n,
            WP=self.width,
            num_warps=launch_warps(n),
            **self.args,
            **self.sizes,
            **rounding_sizes(config),
        )
        checkpoint = self._read("ckpt", config.update)
        if config.update.is_planar:
            fmt = kernel_format(config.update)
            high = self._read("ckpt", config.update, (fmt[0], 0, *fmt[2:]))
            return checkpoint, high.mul_(float(1 << config.update.lo_bits))
        if config.output is None:
            return checkpoint, checkpoint
        return checkpoint, self._read("copy", config.output)

    def _read(self, prefix: str, fmt: Format, kernel: tuple | None = None) -> torch.Tensor:
        """What the planes under ``prefix`` decode to."""
        heads, rows, n = self.shape
        out = torch.empty(len(self.slots), heads, rows, n, device=self.keys.device)
        code = getattr(self.views, prefix)
        planes = {
            "code": words(code),
            "low": words(self.views.ckpt_low) if prefix == "ckpt" else None,
            "scale": getattr(self.views, f"{prefix}_scale"),
            "tile": getattr(self.views, f"{prefix}_tile_scale"),
        }
        given = {k: planes["code"] if p is None else p for k, p in planes.items()}
        per_head = {
            k: 0 if planes[k] is None else given[k][0].numel() // heads
            for k in ("code", "low", "scale")
        }
        _read_kernel[self.grid](
            out,
            self.slots,
            **{f"{k}_ptr": p for k, p in given.items()},
            **{f"{k}_stride": 0 if planes[k] is None else p.stride(0) for k, p in given.items()},
            H=heads,
            R=rows,
            N=n,
            WP=self.width,
            CODE_HEAD=per_head["code"],
            LOW_HEAD=per_head["low"],
            SCALE_HEAD=per_head["scale"],
            TILES=-(-rows // 16),
            UPDATE=kernel_format(fmt) if kernel is None else kernel,
            num_warps=launch_warps(n),
        )
        return out
