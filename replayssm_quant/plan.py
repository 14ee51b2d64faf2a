"""``python -m replayssm_quant.plan``: what a state format costs on a model. Needs no torch."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from ._paths import drop_checkout
from .config import StateConfig
from .state.budget import Budget, budget
from .state.geometry import ModelGeometry, read_geometry
from .state.known import KNOWN, nearest

_UNITS = {"": 1, "b": 1} | {
    f"{p}{suffix}": base**i
    for i, p in enumerate(("k", "m", "g", "t"), 1)
    for suffix, base in (("b", 1000), ("ib", 1024))
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line and exit code 2."""
        self.exit(2, f"error: {message}\n")


def parse_bytes(text: str) -> int:
    """``80GiB``, ``80 GB`` or a number of bytes. Raises ValueError."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", text.lower())
    value = float(found[1]) * _UNITS[found[2]] if found and found[2] in _UNITS else 0
    if value < 1:
        raise ValueError(f"memory '{text}' is not an amount of bytes; write 80GiB, 640GB or 512MiB")
    return int(value)


def resolve_geometry(name: str) -> tuple[str, ModelGeometry, Mapping[str, object] | None]:
    """(name, geometry, config.json or None for a known name) of what --model says.

    A shipped model's name, a name of ``state.known``, a folder with config.json, or that file.
    Raises ValueError.
    """
    from .models import shipped

    path = shipped().get(name)
    if path is None and name.lower() in KNOWN:
        return name.lower(), KNOWN[name.lower()].geometry, None
    path = Path(name).expanduser() if path is None else path
    path = path / "config.json" if path.is_dir() else path
    if not name or not path.is_file():
        near = nearest(name)
        hint = f"did you mean '{near}'? " if near else ""
        raise ValueError(
            f"unknown model '{name}': {hint}give a folder with config.json, a shipped model "
            f"({', '.join(shipped()) or 'none'}) or one of {', '.join(KNOWN)}"
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise ValueError(f"{path} is not readable JSON; give a model's config.json") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path} is not a model configuration; give a model's config.json")
    label = path.resolve().parent.name if path.name == "config.json" else path.stem
    return label, read_geometry(config), config


def _positive(args: argparse.Namespace, name: str) -> None:
    value = getattr(args, name)
    if value is not None and value < 1:
        raise ValueError(f"--{name} {value} must be at least 1")


def _plan(args: argparse.Namespace) -> Budget:
    _positive(args, "tp")
    _positive(args, "batch")
    name, geometry, model_config = resolve_geometry(args.model)
    config: StateConfig | Mapping[int, StateConfig]
    flags = ("update_dtype", "output_dtype", "block_size", "buffer_len", "rotate")
    if args.recipe is not None:
        given = [f for f in flags if getattr(args, f) not in (None, False)]
        if given:
            raise ValueError(
                f"--recipe and --{given[0].replace('_', '-')} both set the format; give one"
            )
        from .recipe import resolve

        config = resolve(args.recipe, model_config, name).configs(geometry)
    else:
        config = StateConfig.from_flags(
            "fp8" if args.update_dtype is None else args.update_dtype,
            args.output_dtype,
            block_size=args.block_size,
            buffer_len=16 if args.buffer_len is None else args.buffer_len,
            rotate=args.rotate,
        )
    source = "config.json" if model_config is not None else KNOWN[name].source
    return budget(
        name,
        geometry,
        config,
        ring_storage=args.ring_dtype,
        tp=args.tp,
        source=source,
        drafts=args.drafts,
    )


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit code (0, or 2 for bad input, with one line on stderr)."""
    drop_checkout()
    parser = _Parser(
        prog="python -m replayssm_quant.plan",
        description="Bytes a request, bytes moved a token and requests that fit, for a state "
        "format on a model.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--model", required=True, help="a shipped model, a known name, or a folder")
    add("--update-dtype", help="checkpoint format, fp8 if not given")
    add("--output-dtype", help="output copy format, or same")
    add("--block-size", type=int, help="scale block of the checkpoint: 16 or 32")
    add("--buffer-len", type=int, help="tokens from flush to flush, 1 to 64 (default 16)")
    add("--rotate", action="store_true", help="Hadamard rotation (costs no bytes)")
    add("--recipe", help="a recipe instead of formats")
    add("--ring-dtype", default="bf16", help="dtype of the ring's inputs: bf16, fp16 or fp32")
    add("--tp", type=int, default=1, help="tensor-parallel ranks; the figures are one rank's")
    add(
        "--drafts",
        type=int,
        default=0,
        help="draft tokens that a step verifies at most, 0 to 7 (speculative decoding)",
    )
    add("--memory", help="memory for states, for example 80GiB: how many requests fit")
    add("--batch", type=int, help="also print the figures of this many requests")
    add("--format", default="md", choices=("md", "json"), help="output (default md)")
    args = parser.parse_args(argv)
    try:
        memory = None if args.memory is None else parse_bytes(args.memory)
        plan = _plan(args)
    except (ValueError, TypeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if args.format == "json":
        print(json.dumps(plan.to_dict(memory, args.batch), indent=2))
    else:
        print(plan.to_markdown(memory, args.batch))
    return 0


if __name__ == "__main__":
    sys.exit(main())
