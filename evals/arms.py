"""Arms: the ways to store the state that one run compares. No torch here.

Every run has the fp32 reference, and fp32 again with another batch size and replayed from a ring,
which is the same maths summed in another order: the noise floor. Beside a candidate stands the
*shared* design, one state of the same update format read and written every step.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..config import StateConfig
from ..state.geometry import ModelGeometry
from ..state.layout import StateLayout, fp32_bytes
from .schema import ArmRecord, Role, StateBytes

REFERENCE, FLOOR = "fp32", "fp32-again"

# What a bare run shows: states rounded to nearest at every step (fp8 by a plain cast, then with a
# scale a row), one shared state under replay, the published pairs, the planar recipes.
STORY: tuple[tuple[Role, str], ...] = (
    ("shared", "e4m3/none:same:rn@1"),
    ("shared", "fp8:same:rn@1"),
    ("shared", "nvfp4:same:rn@1"),
    ("shared", "fp8:same@16"),
    ("shared", "nvfp4:same@16"),
    ("shared", "int8:same:rot@16"),
    ("candidate", "fp16:nvfp4"),
    ("candidate", "fp8:nvfp4"),
    ("candidate", "P4+8:rot"),
    ("candidate", "P8+4:rot"),
)


@dataclass(frozen=True)
class Arm:
    """One way to store the state. config None is the model's own fp32 path; layers, where a recipe
    sets them, overrides config for the layer indices it holds. batch_size None: the run's own."""

    name: str
    role: Role
    config: StateConfig | None
    layers: Mapping[int, StateConfig] | None = None
    recipe: str | None = None
    batch_size: int | None = None
    recipe_digest: str | None = None

    @property
    def label(self) -> str:
        """Short name for tables."""
        if self.role == "floor":
            return "fp32 again"
        if self.config is None:
            return "fp32"
        labels = list(dict.fromkeys(c.label for c in self.configs))
        label = " / ".join(labels) if len(labels) <= 3 else f"{len(labels)} formats"
        return f"{self.recipe} ({label})" if self.recipe else label

    @property
    def configs(self) -> list[StateConfig]:
        """Every distinct config in use."""
        if self.config is None:
            return []
        return list(dict.fromkeys((self.layers or {0: self.config}).values()))

    @property
    def rounds(self) -> bool:
        """True if random bits matter, so that rounding seeds give different numbers."""
        return any(c.uses_random_bits for c in self.configs)

    @property
    def per_step(self) -> bool:
        """True if a state is rounded at every step, the slowest way to run."""
        return any(c.buffer_len == 1 and c.update.rounds for c in self.configs)

    @property
    def quantises(self) -> bool:
        """True if a rounded state is read at all."""
        return any(c.update.rounds or c.readout.rounds for c in self.configs)

    @property
    def digest(self) -> str:
        """Twelve hex digits over the settings; the seed and the batch size are not part of it."""
        if self.config is None:
            return "reference000"
        if self.role == "floor":
            return "floor0000000"
        core: Any = _plain(self.config)
        if self.layers is not None:
            core = {str(i): _plain(c) for i, c in sorted(self.layers.items())}
        return hashlib.sha256(json.dumps(core, sort_keys=True).encode()).hexdigest()[:12]

    def seeded(self, seed: int) -> StateConfig | dict[int, StateConfig] | None:
        """What the backend takes, with the rounding seed set."""
        if self.config is None:
            return None
        if self.layers is not None:
            return {i: replace(c, seed=seed) for i, c in self.layers.items()}
        return replace(self.config, seed=seed)

    def check(self, geometry: ModelGeometry) -> None:
        """Raise ValueError where a format does not fit a layer of the model."""
        for index, layer in geometry.layers.items():
            config = self._layer(index)
            if config is None:
                continue
            try:
                config.update.check(layer.rows, layer.n)
                config.readout.check(layer.rows, layer.n)
            except ValueError as error:
                raise ValueError(f"{self.label}, layer {index}: {error}") from None

    def _layer(self, index: int) -> StateConfig | None:
        if self.layers is not None:
            return self.layers.get(index)
        return self.config

    def bytes(self, geometry: ModelGeometry, ring_dtype: str = "bf16") -> StateBytes:
        """Bytes of one request over all recurrent layers, ring and scales included."""
        fp32 = stored = ring = 0
        moved = 0.0
        for index, layer in geometry.layers.items():
            plain = fp32_bytes(layer)
            fp32 += plain
            config = None if self.role == "floor" else self._layer(index)
            if config is None:
                stored += plain
                moved += 2 * plain
                continue
            layout = StateLayout(layer, config, ring_dtype)
            # one flush a step needs no ring: the step's own input is in registers
            kept = layout.ring_bytes if config.buffer_len > 1 else 0
            stored += layout.checkpoint_bytes + layout.copy_bytes + kept
            ring += kept
            moved += layout.bytes_per_step
        return StateBytes(
            fp32=fp32,
            stored=stored,
            ring=ring,
            ratio=fp32 / stored,
            per_step=moved,
            ring_dtype=ring_dtype,
        )

    def record(self, sizes: dict[str, StateBytes], batch_size: int) -> ArmRecord:
        """The arm as it goes into a result; sizes: bytes by model name."""
        layers = None
        if self.layers is not None:
            layers = {str(i): _plain(c) for i, c in sorted(self.layers.items())}
        return ArmRecord(
            name=self.name,
            role=self.role,
            label=self.label,
            config=None if self.config is None else _plain(self.config),
            layers=layers,
            recipe=self.recipe,
            recipe_digest=self.recipe_digest,
            digest=self.digest,
            rounds=self.rounds,
            batch_size=self.batch_size or batch_size,
            bytes=sizes,
        )


def _plain(config: StateConfig) -> dict[str, Any]:
    """to_dict without the seed, which belongs to the unit."""
    return {k: v for k, v in config.to_dict().items() if k != "seed"}


def slug(config: StateConfig) -> str:
    """A file name for a config, for example ``e4m3-sr_nvfp4_L16``."""
    update = config.update.name + (f"-{config.rounding}" if config.update.rounds else "")
    parts = [update]
    if config.output is not None:
        parts.append(config.output.name)
    elif config.is_shared:
        parts.append("shared")
    parts.append(f"L{config.buffer_len}")
    if config.rotate:
        parts.append("rot")
    if config.stagger:
        parts.append("stagger")
    if config.uses_random_bits and config.random_bits != 8:
        parts.append(f"r{config.random_bits}")
    if config.philox_rounds != 7:
        parts.append(f"ph{config.philox_rounds}")
    return re.sub(r"[^\w.\-]+", "-", "_".join(parts))


def arm(role: Role, config: StateConfig) -> Arm:
    return Arm(slug(config), role, config)


def parse_arm(text: str, base: Mapping[str, Any] | None = None) -> StateConfig:
    """``UPDATE[:OUTPUT][:rn|sr][:rot][@L]``, for example ``fp8:same@1`` or ``int8:nvfp4:rot``.

    ``base``: keyword values of StateConfig.from_flags for what the text leaves out. Raises
    ValueError naming the text.
    """
    values = dict(base or {})
    body, at, length = text.strip().partition("@")
    if at:
        try:
            values["buffer_len"] = int(length)
        except ValueError:
            raise ValueError(
                f"arm '{text}': '{length}' after @ is no buffer length; write for example fp8@16"
            ) from None
    update, *rest = body.split(":")
    values["update_dtype"] = update
    for word in rest:
        if word.lower() in ("rn", "sr"):
            values["rounding"] = word.lower()
        elif word.lower() == "rot":
            values["rotate"] = True
        elif "output_dtype" in values:
            raise ValueError(
                f"arm '{text}': '{word}' is a second output format; write UPDATE[:OUTPUT][:rn|sr]"
                "[:rot][@L]"
            )
        else:
            values["output_dtype"] = word
    try:
        return StateConfig.from_flags(**values)
    except (ValueError, TypeError) as error:
        raise ValueError(f"arm '{text}': {error}") from None


def reference_arms(batch_size: int) -> list[Arm]:
    """fp32, and fp32 again: another batch size, replayed."""
    other = batch_size // 2 if batch_size > 1 else 2
    return [
        Arm(REFERENCE, "reference", None),
        Arm(FLOOR, "floor", StateConfig(), batch_size=other),
    ]


def unique(arms: Iterable[Arm]) -> list[Arm]:
    """Drop arms whose settings occurred before, a candidate counting before a comparison."""
    out: list[Arm] = []
    for new in arms:
        same = [i for i, old in enumerate(out) if old.digest == new.digest and new.config]
        if not same:
            out.append(new)
        elif new.role == "candidate":
            out[same[0]] = replace(new, name=out[same[0]].name)
    names: dict[str, int] = {}
    for i, one in enumerate(out):
        names[one.name] = count = names.get(one.name, 0) + 1
        if count > 1:
            out[i] = replace(one, name=f"{one.name}-{one.digest[:6]}")
    return out


def story_arms(rounding: str = "sr") -> list[Arm]:
    """The comparison that a run without formats shows."""
    return [arm(role, parse_arm(text, {"rounding": rounding})) for role, text in STORY]


def candidate_arms(candidate: StateConfig) -> list[Arm]:
    """The shared design of the same update format, then the candidate."""
    out = []
    if candidate.update.rounds:
        out.append(arm("shared", candidate.per_step_shared()))
    out.append(arm("candidate", candidate))
    return unique(out)


def recipe_arms(name: str, geometry: ModelGeometry, model_config: Any, model: str) -> list[Arm]:
    """The arms of a recipe on one model: its shared design and itself, layer by layer.

    Raises ValueError naming the recipe and the remedy.
    """
    try:
        from .. import recipe as recipes
    except ImportError:
        raise ValueError(
            f"recipe '{name}': this version has no recipes; give --update-dtype and --output-dtype"
        ) from None
    resolved = recipes.resolve(name, model_config, model)
    layers = resolved.configs(geometry)
    whole = resolved.config()
    out = []
    if whole.update.rounds:
        out.append(arm("shared", whole.per_step_shared()))
    label = resolved.label
    if len(set(layers.values())) == 1 and whole in layers.values():
        layers = {}
    one = Arm(f"recipe-{_file(label)}", "candidate", whole, layers or None, label)
    return unique([*out, replace(one, recipe_digest=resolved.digest)])


def _file(text: str) -> str:
    return re.sub(r"[^\w.\-]+", "-", text)
