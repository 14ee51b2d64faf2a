"""How far the stored states of an arm are from fp32's at the same place of the same text.

The divergence of a model's answers says what a format costs; the error of the state says where it
comes from, layer by layer, and shows a wrong fold or scale that answers would hide.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ..config import StateConfig

if TYPE_CHECKING:
    from ..models import LoadedModel
    from .probes import Streams

Configs = Mapping[int, StateConfig]


@dataclass(frozen=True)
class StateError:
    """Squared errors of one layer's last stored state, summed over its elements, a value a
    document: of the checkpoint, of the copy, and the squared fp32 state that both are relative
    to."""

    checkpoint: list[float]
    copy: list[float]
    norm: list[float]

    @property
    def relative(self) -> tuple[float, float]:
        """Root mean square error of checkpoint and copy, relative to the state's."""
        norm = sum(self.norm)
        if norm == 0:
            return 0.0, 0.0
        return (sum(self.checkpoint) / norm) ** 0.5, (sum(self.copy) / norm) ** 0.5


@torch.no_grad()
def last_states(
    loaded: LoadedModel, ids: torch.Tensor, configs: Configs, requests: list[str], prefill: int = 1
) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """(checkpoint, copy) fp32 [b, H, R, N] that each layer of ``configs`` held after its last
    flush of ids [b, T], rotated where the config rotates."""
    from ..backends.hf_models import find_layers, layer_configs, takes_position_ids
    from ..backends.hf_scan import ScanState

    found = find_layers(loaded.model)
    kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def record(layer: int, checkpoint: torch.Tensor, copy: torch.Tensor, at: torch.Tensor) -> None:
        old = kept.get(layer)
        if old is None:
            kept[layer] = (checkpoint.clone(), copy.clone())
        else:
            old[0].copy_(checkpoint)
            old[1].copy_(copy)

    positions = torch.full((ids.shape[0],), prefill, dtype=torch.int64)
    state = ScanState(
        found,
        layer_configs(found.layers, configs),
        prefill=prefill,
        positions=positions,
        requests=requests,
        seed=None,
        record=record,
    )
    extra: dict[str, Any] = {}
    if takes_position_ids(loaded.model):
        extra["position_ids"] = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    with state.attached():
        loaded.model(input_ids=ids, use_cache=False, **extra)
    return kept


@dataclass
class StateProbe:
    """States of one task's first documents, against fp32 states that are computed once for each
    way to place the flushes."""

    loaded: LoadedModel
    docs: Streams
    batch_size: int = 8
    prefill: int = 1
    _exact: dict[StateConfig, list[dict[int, torch.Tensor]]] = field(default_factory=dict)

    def _batches(self) -> list[tuple[torch.Tensor, list[str]]]:
        out = []
        for start in range(0, len(self.docs), self.batch_size):
            part = slice(start, start + self.batch_size)
            ids = torch.from_numpy(self.docs.ids[part]).to(self.loaded.model.device)
            out.append((ids, self.docs.doc_hashes[part]))
        return out

    def _reference(self, config: StateConfig) -> list[dict[int, torch.Tensor]]:
        """fp32 states of every layer at the flushes of ``config``, by batch."""
        from ..backends import hf

        exact = StateConfig(
            buffer_len=config.buffer_len,
            rotate=config.rotate,
            stagger=config.stagger,
            seed=config.seed if config.stagger else 0,
        )
        if exact not in self._exact:
            every = dict.fromkeys(hf.recurrent_layers(self.loaded.model), exact)
            batches = []
            for ids, hashes in self._batches():
                states = last_states(self.loaded, ids, every, hashes, self.prefill)
                batches.append({layer: pair[0] for layer, pair in states.items()})
            self._exact[exact] = batches
        return self._exact[exact]

    def measure(self, config: StateConfig | Configs) -> dict[int, StateError]:
        """Errors by layer; layers that ``config`` leaves out stay fp32 and are not reported."""
        from ..backends import hf

        layers = hf.recurrent_layers(self.loaded.model)
        configs = dict(config) if isinstance(config, Mapping) else dict.fromkeys(layers, config)
        out = {i: StateError([], [], []) for i in configs}
        for i, (ids, hashes) in enumerate(self._batches()):
            found = last_states(self.loaded, ids, configs, hashes, self.prefill)
            for layer, (checkpoint, copy) in found.items():
                want = self._reference(configs[layer])[i][layer]
                error = out[layer]
                for name, value in (
                    ("checkpoint", checkpoint - want),
                    ("copy", copy - want),
                    ("norm", want),
                ):
                    sums = value.double().square().flatten(1).sum(1)
                    getattr(error, name).extend(sums.tolist())
        return out


def attach(samples: list[dict[str, Any]], errors: Mapping[int, StateError]) -> None:
    """Write each document's [checkpoint, copy, norm] by layer into its sample as ``state``."""
    for layer, error in errors.items():
        rows = zip(error.checkpoint, error.copy, error.norm, strict=True)
        for sample, row in zip(samples, rows, strict=False):
            sample.setdefault("state", {})[str(layer)] = list(row)
