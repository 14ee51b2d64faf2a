"""The plugin's options: ``additional_config["replayssm_quant"]``, plain JSON. No vLLM here.

Either a recipe, ``{"recipe": "nemotron-3"}`` (a shipped name, name/variant, a .yaml path or
``auto``), or the fields of a ``StateConfig``, ``{"update_dtype": "fp16", "output_dtype":
"nvfp4"}``. ``seed``, ``stagger`` (on unless it is false: an engine serves many requests, which
should not flush at once) and ``block_shortcut`` go with both. vLLM hashes the mapping into
its compile cache and hands it to every process, which an environment variable would not do.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...config import StateConfig
from ...state.geometry import read_geometry

KEY = "replayssm_quant"
FIELDS = tuple(StateConfig().to_dict()) + ("block_size",)
COMMON = ("seed", "stagger", "block_shortcut")
KNOWN = ("recipe", *FIELDS, "block_shortcut")


@dataclass(frozen=True)
class Options:
    """What the user asked for: a recipe's name, or one config for every layer.

    block_shortcut: whether vLLM's scheduler looks for cache blocks only in steps that can need one
    (``blocks``). stagger, beside a recipe: whether requests that start together flush in different
    steps; None: as the recipe says, or else yes.
    """

    recipe: str | None
    config: StateConfig | None
    seed: int = 0
    block_shortcut: bool = True
    stagger: bool | None = None

    @property
    def label(self) -> str:
        return f"recipe {self.recipe}" if self.config is None else "explicit settings"

    def layer_configs(self, model_config: Any, model_name: str = "") -> dict[int, StateConfig]:
        """A StateConfig for each recurrent layer of a transformers configuration.

        Raises ValueError for a model or a format that does not fit.
        """
        geometry = read_geometry(model_config)
        if self.config is not None:
            for layer in geometry.layers.values():
                self.config.update.check(layer.rows, layer.n)
                self.config.readout.check(layer.rows, layer.n)
            return dict.fromkeys(geometry.layers, self.config)
        from ...recipe import resolve

        assert self.recipe is not None
        recipe = resolve(self.recipe, model_config, model_name)
        configs, stagger = recipe.configs(geometry, self.seed), self.stagger
        if stagger is None:
            if (recipe.settings.get("replay") or {}).get("stagger") is not None:
                return configs
            stagger = True
        return {i: dataclasses.replace(c, stagger=stagger) for i, c in configs.items()}


def _unknown(key: object, known: tuple[str, ...], where: str) -> ValueError:
    near = difflib.get_close_matches(str(key), known, 1)
    hint = f"did you mean '{near[0]}'? " if near else ""
    return ValueError(f"{where}: unknown key '{key}': {hint}known keys: {', '.join(known)}")


def parse(additional_config: Any) -> Options | None:
    """The options in vLLM's ``additional_config``; None if the plugin is not asked for.

    Raises ValueError or TypeError, with the key and a remedy, for anything that is not understood,
    a misspelt ``replayssm_quant`` included.
    """
    if not isinstance(additional_config, Mapping):
        return None
    if KEY not in additional_config:
        for key in additional_config:
            if difflib.SequenceMatcher(None, str(key).lower().replace("-", "_"), KEY).ratio() > 0.8:
                raise ValueError(f"additional_config has '{key}'; the plugin's key is '{KEY}'")
        return None
    values = additional_config[KEY]
    where = f"additional_config['{KEY}']"
    if not isinstance(values, Mapping):
        raise TypeError(f"{where} is {values!r}; give a mapping such as {{'recipe': 'auto'}}")
    for key in values:
        if key not in KNOWN:
            raise _unknown(key, KNOWN, where)
    try:
        json.dumps(values)
    except TypeError as error:
        raise TypeError(f"{where} must be plain JSON: {error}") from None
    seed = values.get("seed", 0)
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"{where}: seed {seed!r} is not an integer")
    block_shortcut = values.get("block_shortcut", True)
    if not isinstance(block_shortcut, bool):
        raise TypeError(f"{where}: block_shortcut {block_shortcut!r} is not true or false")
    stagger = values.get("stagger")
    if not (stagger is None or isinstance(stagger, bool)):
        raise TypeError(f"{where}: stagger {stagger!r} is not true or false")
    rest = {k: v for k, v in values.items() if k not in ("recipe", *COMMON)}
    if "recipe" in values:
        recipe = values["recipe"]
        if not isinstance(recipe, str) or not recipe:
            raise TypeError(f"{where}: recipe {recipe!r} is not a name; use for example 'auto'")
        if rest:
            raise ValueError(
                f"{where}: recipe and {next(iter(rest))} both set the format; give one of them"
            )
        return Options(recipe, None, seed, block_shortcut, stagger)
    if "update_dtype" not in values:
        raise ValueError(f"{where}: give a recipe (for example 'auto') or an update_dtype")
    config = StateConfig.from_dict({**rest, "seed": seed, "stagger": stagger is not False})
    return Options(None, config, seed, block_shortcut)
