"""Scoring a text in one forward: transformers' chunk functions replaced by the scan form."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ..config import StateConfig
from ..formats.philox import request_key
from ..kernels.gdn.scan import scan as gdn_scan
from ..kernels.mamba2.scan import scan as mamba2_scan
from ..state.replay import first_offset
from .hf_models import CHUNK_FUNCTIONS, RecurrentModel, request_ids
from .hf_state import patched

Record = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], None]


class ScanState:
    """What the replaced functions need to know: the layer that runs, its config and its keys.

    positions int [rows]: real tokens of each row in the first ``prefill`` columns.
    record(layer, checkpoint, copy, positions) sees every stored state.
    """

    def __init__(
        self,
        found: RecurrentModel,
        configs: Mapping[int, StateConfig],
        *,
        prefill: int,
        positions: torch.Tensor,
        requests: Sequence[int | str] | None,
        seed: int | None,
        record: Record | None = None,
    ):
        self.found, self.configs, self.prefill = found, configs, prefill
        self.positions, self.record = positions, record
        self.ids, self.seed = request_ids(requests, positions.numel()), seed
        self.layer: int | None = None

    def keys(self, config: StateConfig) -> torch.Tensor:
        seed = config.seed if self.seed is None else self.seed
        return torch.tensor([request_key(seed, r) for r in self.ids], dtype=torch.int64)

    def arguments(self, device: torch.device) -> dict[str, Any]:
        """Arguments of a scan for the layer that is running."""
        if self.layer is None:
            raise RuntimeError("a recurrent function was called outside its layer")
        layer, self.layer = self.layer, None
        config, record = self.configs.get(layer), None
        if self.record is not None:
            outer = self.record

            def record(*what: torch.Tensor) -> None:
                outer(layer, *what)

        keys = self.keys(config) if config is not None else torch.zeros_like(self.positions)
        return dict(
            config=config,
            prefill=self.prefill,
            keys=keys.to(device),
            positions=self.positions.to(device),
            layer=layer,
            record=record,
        )

    def stats(self, tokens: int) -> dict[int, dict[str, int]]:
        """What decoding ``tokens`` columns would have counted (``HFState.stats``)."""
        rows, steps = self.positions.numel(), tokens - self.prefill
        out = {}
        for layer, config in self.configs.items():
            length, offsets = config.buffer_len, [0] * rows
            if config.stagger:
                offsets = [first_offset(int(k), length) for k in self.keys(config)]
            flushes = sum((steps + offset) // length for offset in offsets)
            reads = flushes * config.update.rounds
            reads += (rows * steps - flushes) * config.readout.rounds
            out[layer] = dict(steps=rows * steps, flushes=flushes, quantised_reads=reads)
        return out

    def _mamba2(self, original: Callable) -> Callable:
        def mamba2_chunk_scan(
            hidden_states: torch.Tensor,
            dt: torch.Tensor,
            A: torch.Tensor,
            B: torch.Tensor,
            C: torch.Tensor,
            chunk_size: int,
            D: torch.Tensor | None = None,
            dt_bias: torch.Tensor | None = None,
            initial_states: Any = None,
            dt_softplus: bool = False,
            dt_limit: tuple[float, float] = (0.0, float("inf")),
            return_final_states: bool = False,
            **kwargs: Any,
        ) -> torch.Tensor:
            return mamba2_scan(
                hidden_states,
                dt,
                A,
                B,
                C,
                D=D,
                dt_bias=dt_bias,
                dt_softplus=dt_softplus,
                dt_limit=dt_limit,
                **self.arguments(hidden_states.device),
            )

        return mamba2_chunk_scan

    def _gdn(self, original: Callable) -> Callable:
        def torch_chunk_gated_delta_rule(
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            g: torch.Tensor,
            beta: torch.Tensor,
            use_qk_l2norm_in_kernel: bool = False,
            **kwargs: Any,
        ) -> tuple[torch.Tensor, None]:
            arguments = self.arguments(value.device)
            every = query.shape[2] // self.found.layers[arguments["layer"]].groups
            y = gdn_scan(
                query[:, :, ::every],
                key[:, :, ::every],
                value,
                g,
                beta,
                l2norm=use_qk_l2norm_in_kernel,
                **arguments,
            )
            return y, None

        return torch_chunk_gated_delta_rule

    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        make = self._mamba2 if self.found.kind == "mamba2" else self._gdn
        with (
            patched(self.found, {CHUNK_FUNCTIONS[self.found.kind]: make}),
            contextlib.ExitStack() as stack,
        ):
            for layer, mixer in self.found.mixers.items():

                def enter(module: Any, args: Any, layer: int = layer) -> None:
                    self.layer = layer

                stack.callback(mixer.register_forward_pre_hook(enter).remove)
            yield
