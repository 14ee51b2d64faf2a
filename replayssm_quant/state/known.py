"""Recurrent layers of published models, for planning without their files. No torch here.

Geometry as in each model's own config.json, unless the note says otherwise; layer numbers count the
recurrent layers alone. A model folder, where there is one, always wins over this table.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from .geometry import LayerGeometry, ModelGeometry

_CONFIG = "published config.json"
_DERIVED = "head count from hidden size, expansion and head width; check the model's config.json"


@dataclass(frozen=True)
class Known:
    """``recurrent`` of ``total`` layers have the geometry ``layer``; ``source``: where from."""

    model_type: str
    layer: LayerGeometry
    recurrent: int
    total: int
    source: str = _CONFIG

    @property
    def geometry(self) -> ModelGeometry:
        layers = dict.fromkeys(range(self.recurrent), self.layer)
        return ModelGeometry(self.model_type, layers, self.total)


def _mamba2(heads: int, rows: int, n: int, groups: int) -> LayerGeometry:
    return LayerGeometry("mamba2", heads, rows, n, groups)


def _gdn(keys: int, values: int, k: int = 128, v: int = 128) -> LayerGeometry:
    return LayerGeometry("gdn", values, v, k, keys)


KNOWN = {
    "nemotron-3-nano-4b": Known("nemotron_h", _mamba2(96, 80, 128, 8), 21, 42),
    "nemotron-3-nano-30b": Known("nemotron_h", _mamba2(64, 64, 128, 8), 23, 52),
    "nemotron-3-super-120b": Known("nemotron_h", _mamba2(128, 64, 128, 8), 40, 88),
    "nemotron-3-ultra-550b": Known("nemotron_h", _mamba2(256, 64, 128, 8), 48, 108),
    "nemotron-nano-9b-v2": Known("nemotron_h", _mamba2(128, 80, 128, 8), 27, 56),
    "falcon-h1-1.5b": Known("falcon_h1", _mamba2(48, 64, 256, 1), 24, 24),
    "falcon-h1-7b": Known("falcon_h1", _mamba2(24, 128, 256, 1), 44, 44),
    "falcon-h1-34b": Known("falcon_h1", _mamba2(32, 128, 256, 2), 72, 72),
    "granite-4.0-h-350m": Known("granitemoehybrid", _mamba2(48, 32, 128, 1), 28, 32),
    "granite-4.0-h-micro": Known("granitemoehybrid", _mamba2(64, 64, 128, 1), 36, 40, _DERIVED),
    "granite-4.0-h-small": Known("granitemoehybrid", _mamba2(128, 64, 128, 1), 36, 40, _DERIVED),
    "bamba-9b": Known("bamba", _mamba2(128, 64, 128, 1), 29, 32, _DERIVED),
    "zamba2-2.7b": Known("zamba2", _mamba2(80, 64, 64, 1), 54, 54, _DERIVED),
    "qwen3.5-4b": Known("qwen3_5_text", _gdn(16, 32), 24, 32),
    "qwen3.5-35b-a3b": Known("qwen3_5_moe_text", _gdn(16, 32), 30, 40),
    "qwen3.5-122b-a10b": Known("qwen3_5_moe_text", _gdn(16, 64), 36, 48),
    "qwen3.5-397b-a17b": Known("qwen3_5_moe_text", _gdn(16, 64), 45, 60),
    "qwen3.6-27b": Known("qwen3_5_text", _gdn(16, 48), 48, 64),
    "qwen3-next-80b-a3b": Known("qwen3_next", _gdn(16, 32), 36, 48),
    "olmo-hybrid-7b": Known("olmo_hybrid", _gdn(30, 30, 96, 192), 24, 32),
}
"""Geometries by lower-case name."""


def nearest(name: str) -> str | None:
    """The known name that is spelt most like ``name``."""
    close = difflib.get_close_matches(name.lower(), list(KNOWN), 1)
    return close[0] if close else None
