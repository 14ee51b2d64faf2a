"""StateConfig: how the recurrent state of every layer is stored. Frozen, checked, without
torch."""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from .formats.spec import Format, parse_format, with_scale

MAX_BUFFER_LEN = 64
SAME = "same"
PUBLISHED_OUTPUT = "nvfp4"
"""The output copy beside a low-precision checkpoint that names no other: the published pair."""


@dataclass(frozen=True)
class StateConfig:
    """Formats and replay of one model's recurrent state.

    update: format of the checkpoint, read and written only at a flush. output: format of the copy
    that every other step reads; None means that the checkpoint itself is read (one shared state).
    A planar checkpoint carries its copy as its high plane, so its output is None too and the
    readout uses the high plane. buffer_len: L, tokens from flush to flush (1 flushes every step).
    rounding: ``sr`` (stochastic) or ``rn`` (nearest even) for the checkpoint; the copy is always
    nearest. rotate: randomised Hadamard along d_state. stagger: the first window of a request is
    shortened by a hash of the request, so that rows of a batch flush at different steps.
    """

    update: Format = dataclasses.field(default_factory=lambda: parse_format("fp32"))
    output: Format | None = None
    buffer_len: int = 16
    rounding: Literal["sr", "rn"] = "sr"
    rotate: bool = False
    random_bits: int = 8
    philox_rounds: int = 7
    seed: int = 0
    stagger: bool = False
    text: str = dataclasses.field(init=False, repr=False, compare=False)
    """The settings in one line, for ``from_text``: what an operator takes in a compiled graph."""

    def __post_init__(self) -> None:
        use = {"buffer_len": "1 to 64", "random_bits": "8 or 16", "philox_rounds": "7 or 10"}
        for name in ("buffer_len", "random_bits", "philox_rounds", "seed"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                hint = use.get(name, "any whole number")
                raise TypeError(f"{name} {value!r} is not an integer; use {hint}")
        for name in ("rotate", "stagger"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} {getattr(self, name)!r} is neither True nor False")
        if not 1 <= self.buffer_len <= MAX_BUFFER_LEN:
            raise ValueError(
                f"buffer_len {self.buffer_len} is out of range; use 1 (flush at every step) to "
                f"{MAX_BUFFER_LEN}, 16 is a good default"
            )
        if self.rounding not in ("sr", "rn"):
            raise ValueError(
                f"unknown rounding '{self.rounding}'; use sr (stochastic) or rn (nearest even)"
            )
        if self.random_bits not in (8, 16):
            raise ValueError(f"random_bits {self.random_bits} is not supported; use 8 or 16")
        if not 1 <= self.philox_rounds <= 16:
            raise ValueError(f"philox_rounds {self.philox_rounds}; use 7 (default) or 10")
        if self.output is not None:
            if self.update.is_planar:
                raise ValueError(
                    f"update format {self.update.name} already holds its output copy (the high "
                    f"plane); leave the output format out instead of '{self.output.name}'"
                )
            if self.output.is_planar:
                raise ValueError(
                    f"output format {self.output.name} is planar, so it is checkpoint and copy in "
                    "one; give it as the update format"
                )
            if self.output.bits > self.update.bits:
                raise ValueError(
                    f"output format {self.output.name} ({self.output.bits} bits) is wider than "
                    f"the checkpoint {self.update.name} ({self.update.bits} bits) that it is made "
                    "from; use output 'same' or a narrower format"
                )
        values = [getattr(self, f.name) for f in dataclasses.fields(self) if f.init]
        text = json.dumps([v.name if isinstance(v, Format) else v for v in values])
        object.__setattr__(self, "text", text)

    @property
    def is_shared(self) -> bool:
        """True if readout and update use the same stored state."""
        return self.output is None and not self.update.is_planar

    @property
    def has_copy(self) -> bool:
        """True if the copy is stored beside the checkpoint (neither shared nor a bit plane)."""
        return self.output is not None

    @property
    def readout(self) -> Format:
        """The format that a non-flush step reads (planar: its high plane)."""
        return self.output if self.output is not None else self.update

    @property
    def uses_random_bits(self) -> bool:
        return self.rounding == "sr" and self.update.rounds

    @property
    def label(self) -> str:
        """Short name for tables, for example ``e4m3 SR + nvfp4``."""
        name = self.update.name + (" SR" if self.uses_random_bits else "")
        if self.update.rounds and not self.uses_random_bits:
            name += " RN"
        if self.rotate:
            name += " rot"
        if self.is_shared:
            name += " shared"
        elif self.output is not None:
            name += f" + {self.output.name}"
        return name if self.buffer_len == 16 else f"{name} L{self.buffer_len}"

    @classmethod
    def from_flags(
        cls,
        update_dtype: str = "fp32",
        output_dtype: str | None = None,
        *,
        block_size: int | None = None,
        buffer_len: int = 16,
        rounding: str = "sr",
        rotate: bool = False,
        random_bits: int = 8,
        philox_rounds: int = 7,
        seed: int = 0,
        stagger: bool = False,
    ) -> StateConfig:
        """Build from what a user types.

        Without output_dtype: fp32 and planar checkpoints are read themselves, any other gets the
        published NVFP4 copy. ``same`` shares one state, as does an output equal to the update.
        block_size 16 or 32 blocks the checkpoint's scales. Raises ValueError or TypeError.
        """
        update = parse_format(update_dtype)
        if block_size is not None:
            if update.fixed_scale:
                raise ValueError(
                    f"block size {block_size} does not apply to {update.name}, which fixes its "
                    "own scale; use it with e4m3, e5m2, int8, int4 or a planar format"
                )
            update = with_scale(update, f"b{block_size}")
        output: Format | None
        if output_dtype is None:
            single = update.is_planar or update.name == "fp32" or update.bits <= 4
            output = None if single else parse_format(PUBLISHED_OUTPUT)
        elif output_dtype.strip().lower() == SAME:
            if update.is_planar:
                raise ValueError(
                    f"output 'same' makes no sense with {update.name}: its readout is the high "
                    "plane; leave the output out"
                )
            output = None
        else:
            output = parse_format(output_dtype)
            if output == update:
                output = None
        return cls(
            update,
            output,
            buffer_len,
            rounding.lower() if isinstance(rounding, str) else rounding,  # type: ignore[arg-type]
            rotate,
            random_bits,
            philox_rounds,
            seed,
            stagger,
        )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> StateConfig:
        """Build from a mapping with the keyword names of ``from_flags``.

        Raises ValueError for an unknown key, with the nearest known one.
        """
        known = (
            "update_dtype output_dtype block_size buffer_len rounding rotate random_bits "
            "philox_rounds seed stagger"
        ).split()
        for key in values:
            if key not in known:
                near = difflib.get_close_matches(str(key), known, 1)
                hint = f"did you mean '{near[0]}'? " if near else ""
                raise ValueError(
                    f"unknown state setting '{key}': {hint}known settings: {', '.join(known)}"
                )
        return cls.from_flags(**values)

    def to_dict(self) -> dict[str, Any]:
        """Plain values that ``from_dict`` turns into an equal config."""
        output: str | None = None
        if not self.update.is_planar:
            output = SAME if self.output is None else self.output.name
        return {
            "update_dtype": self.update.name,
            "output_dtype": output,
            "buffer_len": self.buffer_len,
            "rounding": self.rounding,
            "rotate": self.rotate,
            "random_bits": self.random_bits,
            "philox_rounds": self.philox_rounds,
            "seed": self.seed,
            "stagger": self.stagger,
        }

    @classmethod
    def from_text(cls, text: str) -> StateConfig:
        """The config whose ``text`` this is."""
        update, output, *others = json.loads(text)
        return cls(parse_format(update), None if output is None else parse_format(output), *others)

    @property
    def digest(self) -> str:
        """Twelve hex digits that identify the settings."""
        text = json.dumps(self.to_dict(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def per_step_shared(self) -> StateConfig:
        """The shared design: one state of the same update format, read and written every step."""
        update = self.update
        if update.is_planar:  # its checkpoint as one integer of the same total width
            update = parse_format("int8")
        return dataclasses.replace(self, update=update, output=None, buffer_len=1)
