"""Recipes: which state formats a model family uses, checked against a schema; without torch.

``python -m replayssm_quant.recipe list|show|validate``. A recipe file (``recipes/<family>.yaml``,
or one of your own) has match rules, settings shared by its variants, and the variants themselves;
recipes/README.md describes the fields. ``resolve`` turns a name such as ``nemotron-3/compact``, a
path, or ``auto`` into the settings for a model; ``ResolvedRecipe.configs`` gives one StateConfig a
layer.
"""

from __future__ import annotations

import argparse
import difflib
import fnmatch
import hashlib
import json
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from .config import StateConfig
from .state.geometry import LayerGeometry, ModelGeometry, read_geometry

FOLDER = Path(__file__).resolve().parent / "recipes"
RESULTS = Path(__file__).resolve().parent / "evals" / "results"
DEFAULT_VARIANT = "default"
SCHEMA = 1


class RecipeError(ValueError):
    """A recipe that cannot be used; one line that names the file, the value and the remedy."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Update(_Strict):
    """The update checkpoint; block is ``row``, ``head``, ``none``, 16 or 32."""

    format: str | None = None
    block: int | Literal["row", "head", "none"] | None = None
    scale: Literal["fp32", "fp16", "e4m3", "e8m0"] | None = None
    rounding: Literal["sr", "rn"] | None = None
    random_bits: Literal[8, 16] | None = None


class Output(_Strict):
    """The output copy; format ``same`` reads the checkpoint itself."""

    format: str | None = None
    block: int | Literal["row", "head", "none"] | None = None
    scale: Literal["fp32", "fp16", "e4m3", "e8m0"] | None = None


class Replay(_Strict):
    """buffer_len is L, tokens from flush to flush; stagger shortens a request's first window."""

    buffer_len: int | None = Field(default=None, ge=1, le=64)
    stagger: bool | None = None


class LayerSettings(_Strict):
    """What a layer rule may set."""

    update: Update | None = None
    output: Output | None = None
    rotate: bool | None = None


class LayerRule(_Strict):
    """Settings for some recurrent layers; later rules win.

    select: ``all``, ``first:N``, ``last:N``, or indices into the model's layers such as ``3``,
    ``0-5`` and ``0,4,9``.
    """

    select: str
    change: LayerSettings = Field(alias="set")

    @field_validator("select")
    @classmethod
    def _known(cls, text: str) -> str:
        if not re.fullmatch(r"all|(first|last):[1-9]\d*|\d+(-\d+)?(,\d+(-\d+)?)*", text.strip()):
            raise ValueError(f"'{text}' is not all, first:N, last:N, or indices such as 0-5,9")
        return text.strip()

    def layers(self, recurrent: Iterable[int]) -> set[int]:
        """The selected ones among the model's recurrent layers."""
        known = sorted(recurrent)
        if self.select == "all":
            return set(known)
        head, _, count = self.select.partition(":")
        if head == "first":
            return set(known[: int(count)])
        if head == "last":
            return set(known[-int(count) :])
        chosen: set[int] = set()
        for part in self.select.split(","):
            low, _, high = part.partition("-")
            chosen |= set(range(int(low), int(high or low) + 1))
        return chosen & set(known)


class Gate(_Strict):
    """One accuracy gate: the metric of a task against its threshold.

    kld_mean and kld_p99 are in nats and must not exceed the threshold, top1 is a share that must
    reach it; accuracy_delta (candidate minus fp32, as a share) passes as non-inferiority if its
    lower one-sided bound at ``confidence`` stays above -threshold. length_change is the change of
    the mean response length as a share of fp32's, in either direction, and must not exceed it.
    """

    metric: Literal["kld_mean", "kld_p99", "top1", "accuracy_delta", "length_change", "kld_slope"]
    task: str | None = None
    threshold: float
    confidence: float = Field(default=0.95, gt=0.5, lt=1.0)


class Evidence(_Strict):
    """A committed result that was measured with these settings."""

    model: str
    result: str
    commit: str | None = None
    note: str | None = None


class Settings(_Strict):
    """Formats and gates; every field may be left to the parent."""

    description: str | None = None
    update: Update | None = None
    output: Output | None = None
    replay: Replay | None = None
    rotate: bool | None = None
    philox_rounds: int | None = Field(default=None, ge=1, le=16)
    layers: tuple[LayerRule, ...] | None = None
    seeds: tuple[int, ...] | None = None
    gates: tuple[Gate, ...] | None = None
    evidence: tuple[Evidence, ...] | None = None


class Bounds(_Strict):
    """Inclusive bounds of a size."""

    min: int | None = None
    max: int | None = None

    def holds(self, value: int) -> bool:
        low = self.min if self.min is not None else value
        high = self.max if self.max is not None else value
        return low <= value <= high


class Match(_Strict):
    """Which models a recipe is for: every given rule must hold; more rules are more specific."""

    model_type: tuple[str, ...] = ()
    architectures: tuple[str, ...] = ()
    name: str | None = None
    mixer: Literal["mamba2", "gdn"] | None = None
    heads: int | Bounds | None = None
    rows: int | Bounds | None = None
    n: int | Bounds | None = None


class Recipe(_Strict):
    """A recipe file."""

    schema_: Literal[1] = Field(alias="schema")
    name: str = Field(pattern=r"^[a-z0-9][a-z0-9.\-]*$")
    description: str
    extends: str | None = None
    match: Match = Match()
    settings: Settings = Settings()
    variants: dict[str, Settings] = {}


def _known_keys(model: type[BaseModel], path: tuple[Any, ...]) -> list[str]:
    """Field names that are valid where ``path`` (a pydantic error location) ends."""
    nested = {
        "settings": Settings,
        "match": Match,
        "update": Update,
        "output": Output,
        "replay": Replay,
        "layers": LayerRule,
        "set": LayerSettings,
        "gates": Gate,
        "evidence": Evidence,
        "heads": Bounds,
        "rows": Bounds,
        "n": Bounds,
    }
    current: Any = model
    previous: Any = None
    for key in path[:-1]:
        if isinstance(key, str) and key in nested:
            current = nested[key]
        elif previous == "variants":
            current = Settings
        previous = key
    return [f.alias or n for n, f in current.model_fields.items()]


def parse(text: str, source: str) -> Recipe:
    """A recipe from YAML text. Raises RecipeError naming the source, the key and the remedy."""
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        where = getattr(error, "problem_mark", None)
        line = f", line {where.line + 1}" if where else ""
        raise RecipeError(f"{source}{line}: not valid YAML; check indentation and quotes") from None
    if not isinstance(data, dict):
        raise RecipeError(f"{source}: a recipe is a mapping with name, description and settings")
    try:
        return Recipe.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        path = tuple(first["loc"])
        where = ".".join(str(p) for p in path)
        if first["type"] == "extra_forbidden":
            known = _known_keys(Recipe, path)
            near = difflib.get_close_matches(str(path[-1]), known, 1)
            hint = f"did you mean '{near[0]}'? " if near else ""
            raise RecipeError(
                f"{source}: unknown key '{where}': {hint}known keys: {', '.join(known)}"
            ) from None
        message = first["msg"].removeprefix("Value error, ")
        value = first.get("input")
        given = "" if isinstance(value, dict | list | None) else f" (given: {value!r})"
        raise RecipeError(f"{source}: {where}: {message}{given}") from None


def read(path: Path) -> Recipe:
    """A recipe file. Raises RecipeError."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise RecipeError(
            f"{path}: cannot be read ({error.strerror}); give a recipe file"
        ) from None
    return parse(text, path.name)


def shipped() -> dict[str, Path]:
    """Names and files of the recipes that ship with the package."""
    return {p.stem: p for p in sorted(FOLDER.glob("*.yaml"))}


def _merge(parent: Any, child: Any) -> Any:
    """Child over parent: mappings merge key by key, anything else is replaced."""
    if isinstance(parent, dict) and isinstance(child, dict):
        merged = dict(parent)
        for key, value in child.items():
            merged[key] = _merge(merged.get(key), value)
        return merged
    return parent if child is None else child


def _merge_settings(parent: dict[str, Any], child: dict[str, Any]) -> dict[str, Any]:
    """As ``_merge``, but naming another format drops the parent's block and scale."""
    parent = dict(parent)
    for part in ("update", "output"):
        theirs, ours = parent.get(part), child.get(part)
        if theirs and ours and ours.get("format") not in (None, theirs.get("format")):
            parent[part] = {k: v for k, v in theirs.items() if k not in ("block", "scale")}
    new_update = (child.get("update") or {}).get("format")
    if new_update is not None and child.get("output") is None:
        parent.pop("output", None)  # an output belongs to the update format it was chosen for
    if child:
        parent.pop(
            "evidence", None
        )  # a result speaks for exactly the settings it was measured with
    return _merge(parent, child)


def _format_text(part: Mapping[str, Any]) -> str:
    text = str(part["format"])
    block, scale = part.get("block"), part.get("scale")
    if block is None and scale is None:
        return text
    if block is None:
        raise RecipeError(
            f"format {text}: a scale dtype '{scale}' needs a block (row, head, 16, 32)"
        )
    text += f"/b{block}" if isinstance(block, int) else f"/{block}"
    return text + (f"/{scale}" if scale else "")


@dataclass(frozen=True)
class ResolvedRecipe:
    """A recipe and variant with parents merged: plain ``settings``, and where they come from."""

    name: str
    variant: str
    description: str
    settings: dict[str, Any]

    @property
    def label(self) -> str:
        return self.name if self.variant == DEFAULT_VARIANT else f"{self.name}/{self.variant}"

    @property
    def digest(self) -> str:
        """Twelve hex digits over everything that changes a result (not gates, text or evidence)."""
        skip = ("description", "evidence", "gates", "seeds")
        core = {k: v for k, v in self.settings.items() if k not in skip}
        text = json.dumps(core, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    @property
    def gates(self) -> tuple[Gate, ...]:
        return tuple(Gate(**g) for g in self.settings.get("gates") or ())

    @property
    def evidence(self) -> tuple[Evidence, ...]:
        """Named in the recipe itself, then committed results of exactly these settings."""
        own = self.settings.get("evidence") or ()
        return tuple(Evidence(**e) for e in (*own, *committed_evidence().get(self.digest, ())))

    def has_evidence(self, model: str) -> bool:
        """True if a committed result of exactly this model backs the settings."""
        return any(e.model == model for e in self.evidence)

    def _config(self, settings: Mapping[str, Any], seed: int) -> StateConfig:
        update = settings.get("update") or {}
        if "format" not in update:
            raise RecipeError(f"recipe {self.label}: no update format; set update.format")
        output = settings.get("output") or {}
        replay = settings.get("replay") or {}
        extra = {
            "rounding": update.get("rounding"),
            "random_bits": update.get("random_bits"),
            "buffer_len": replay.get("buffer_len"),
            "stagger": replay.get("stagger"),
            "rotate": settings.get("rotate"),
            "philox_rounds": settings.get("philox_rounds"),
        }
        try:
            return StateConfig.from_flags(
                _format_text(update),
                _format_text(output) if output.get("format") else None,
                seed=seed,
                **{k: v for k, v in extra.items() if v is not None},
            )
        except ValueError as error:
            raise RecipeError(f"recipe {self.label}: {error}") from None

    def config(self, seed: int = 0) -> StateConfig:
        """The settings without layer rules."""
        return self._config(self.settings, seed)

    def configs(self, geometry: ModelGeometry, seed: int = 0) -> dict[int, StateConfig]:
        """One StateConfig for each recurrent layer, layer rules applied in order.

        Raises RecipeError where a format does not fit a layer.
        """
        out = {}
        rules = [LayerRule(**r) for r in self.settings.get("layers") or ()]
        for index, layer in geometry.layers.items():
            settings = {k: v for k, v in self.settings.items() if k != "layers"}
            for rule in rules:
                if index in rule.layers(geometry.layers):
                    settings = _merge_settings(settings, rule.change.model_dump(exclude_none=True))
            config = self._config(settings, seed)
            try:
                config.update.check(layer.rows, layer.n)
                config.readout.check(layer.rows, layer.n)
            except ValueError as error:
                raise RecipeError(f"recipe {self.label}, layer {index}: {error}") from None
            out[index] = config
        return out


@cache
def committed_evidence() -> dict[str, list[dict[str, str]]]:
    """``recipes/evidence.json``, made from committed results: evidence by settings' digest."""
    path = FOLDER / "evidence.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _load(name: str, base: Path | None = None) -> Recipe:
    """A recipe by path or shipped name. Raises RecipeError with a suggestion."""
    path = Path(name)
    if path.suffix in (".yaml", ".yml"):
        return read(path if path.is_absolute() or base is None else base / path)
    files = shipped()
    if name not in files:
        near = difflib.get_close_matches(name, list(files), 1)
        hint = f"did you mean '{near[0]}'? " if near else ""
        raise RecipeError(
            f"unknown recipe '{name}': {hint}shipped recipes: {', '.join(files)}; or give a file "
            "that ends in .yaml"
        )
    return read(files[name])


def _flatten(recipe: Recipe, seen: tuple[str, ...] = ()) -> tuple[dict[str, Any], dict[str, Any]]:
    """(settings, variants) of a recipe with its parents merged in."""
    settings = recipe.settings.model_dump(exclude_none=True, mode="json", by_alias=True)
    variants = {
        k: v.model_dump(exclude_none=True, mode="json", by_alias=True)
        for k, v in recipe.variants.items()
    }
    if recipe.extends is None:
        return settings, variants
    if recipe.extends in (*seen, recipe.name):
        chain = " -> ".join((*seen, recipe.name, recipe.extends))
        raise RecipeError(f"recipe {recipe.name}: extends itself ({chain}); break the circle")
    parent_settings, parent_variants = _flatten(_load(recipe.extends), (*seen, recipe.name))
    merged = {
        k: _merge_settings(v, variants.get(k, {})) if k in variants else _without_evidence(v)
        for k, v in parent_variants.items()
    }
    merged |= {k: v for k, v in variants.items() if k not in merged}
    return _merge_settings(parent_settings, settings), merged


def _without_evidence(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in settings.items() if k != "evidence"}


def _resolve(recipe: Recipe, variant: str) -> ResolvedRecipe:
    settings, variants = _flatten(recipe)
    if variant != DEFAULT_VARIANT and variant not in variants:
        known = sorted({DEFAULT_VARIANT, *variants})
        near = difflib.get_close_matches(variant, known, 1)
        hint = f"did you mean '{near[0]}'? " if near else ""
        raise RecipeError(
            f"recipe {recipe.name} has no variant '{variant}': {hint}variants: {', '.join(known)}"
        )
    if variant in variants:
        settings = _merge_settings(settings, variants[variant])
    text = settings.get("description") or recipe.description
    resolved = ResolvedRecipe(recipe.name, variant, text, settings)
    resolved.config()  # a recipe that makes no valid config is refused here, not in a run
    return resolved


def variants(recipe: Recipe) -> list[ResolvedRecipe]:
    """Every variant of a recipe, the default first. Raises RecipeError."""
    names = [n for n in _flatten(recipe)[1] if n != DEFAULT_VARIANT]
    return [_resolve(recipe, n) for n in (DEFAULT_VARIANT, *names)]


def resolve(name: str, model_config: Any = None, model_name: str = "") -> ResolvedRecipe:
    """``family``, ``family/variant``, a .yaml path (``file.yaml/variant``), or ``auto[/variant]``.

    ``auto`` picks the shipped recipe with the most specific match on the model's configuration.
    Raises RecipeError.
    """
    base, variant = name, DEFAULT_VARIANT
    found = re.fullmatch(r"(.*\.ya?ml|[^/]+)/([a-z0-9\-]+)", name)
    if found and not Path(name).is_file():
        base, variant = found[1], found[2]
    if base == "auto":
        if model_config is None:
            raise RecipeError("recipe 'auto' needs a model to match; name a recipe instead")
        return _resolve(best_match(model_config, model_name), variant)
    return _resolve(_load(base), variant)


def _specificity(match: Match, config: Any, model_name: str) -> int | None:
    """How many rules of ``match`` hold for the model, or None if one does not."""
    geometry = read_geometry(config)
    layer: LayerGeometry = next(iter(geometry.layers.values()))

    def get(key: str) -> Any:
        return config.get(key) if isinstance(config, Mapping) else getattr(config, key, None)

    checks: list[bool] = []
    if match.model_type:
        checks.append(geometry.model_type in match.model_type)
    if match.architectures:
        have = get("architectures") or ()
        checks.append(any(fnmatch.fnmatch(a, g) for a in have for g in match.architectures))
    if match.name is not None:
        checks.append(re.search(match.name, model_name, re.IGNORECASE) is not None)
    if match.mixer is not None:
        checks.append(match.mixer == layer.kind)
    for rule, value in ((match.heads, layer.heads), (match.rows, layer.rows), (match.n, layer.n)):
        if rule is not None:
            checks.append(rule == value if isinstance(rule, int) else rule.holds(value))
    return len(checks) if all(checks) else None


def best_match(config: Any, model_name: str = "") -> Recipe:
    """The shipped recipe that matches a model most specifically. Raises RecipeError."""
    scored = []
    for path in shipped().values():
        recipe = read(path)
        score = _specificity(recipe.match, config, model_name)
        if score:
            scored.append((score, recipe.name, recipe))
    if not scored:
        raise RecipeError("no shipped recipe matches this model; name one with --recipe")
    best = max(s for s, _, _ in scored)
    winners = [r for s, _, r in scored if s == best]
    if len(winners) > 1:
        names = ", ".join(r.name for r in winners)
        raise RecipeError(f"recipes {names} match this model equally; name one with --recipe")
    return winners[0]


def _list() -> str:
    rows = ["| recipe | variant | state | description |", "|---|---|---|---|"]
    for name in shipped():
        recipe = _load(name)
        _, variants = _flatten(recipe)
        order = {DEFAULT_VARIANT: 0, "compact": 1, "quality": 2}
        for variant in sorted({DEFAULT_VARIANT, *variants}, key=lambda v: (order.get(v, 9), v)):
            resolved = _resolve(recipe, variant)
            rows.append(
                f"| {name} | {variant} | {resolved.config().label} | {resolved.description} |"
            )
    return "\n".join(rows)


def validate(paths: Iterable[str]) -> list[str]:
    """Check recipe files or names, every variant of each; the shipped ones if none is given."""
    done = []
    for name in list(paths) or list(shipped()):
        recipe = _load(name)
        _, variants = _flatten(recipe)
        for variant in sorted({DEFAULT_VARIANT, *variants}):
            resolved = _resolve(recipe, variant)
            _check_evidence(resolved, Path(name).parent)
            done.append(f"{resolved.label}: {resolved.config().label} ({resolved.digest})")
    return done


def _check_evidence(resolved: ResolvedRecipe, beside: Path) -> None:
    """Refuse evidence of the recipe itself whose result file, beside the recipe or among the
    committed ones, is not there or is not about the model it names. Raises RecipeError."""
    for named in resolved.settings.get("evidence") or ():
        one = Evidence(**named)
        found = [p for p in (beside / one.result, RESULTS / one.result) if p.is_file()]
        where = f"recipe {resolved.label}: evidence {one.result}"
        if not found:
            raise RecipeError(
                f"{where}: no such file beside the recipe or in {RESULTS}; copy it there, or "
                "measure again"
            )
        try:
            data = json.loads(found[0].read_text(encoding="utf-8"))
            models = data.get("models") or [data.get("model")]
            names = [m["name"] if isinstance(m, dict) else m for m in models]
        except (OSError, ValueError, AttributeError, KeyError, TypeError):
            raise RecipeError(f"{where}: {found[0]} is not a result file; measure again") from None
        if one.model not in names:
            raise RecipeError(
                f"{where}: it is about {', '.join(map(str, names))}, not about {one.model}"
            )


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit code (0, or 2 for a recipe or usage error)."""
    parser = argparse.ArgumentParser(
        prog="python -m replayssm_quant.recipe", description="State recipes of model families."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="every shipped recipe and variant")
    show = commands.add_parser("show", help="a recipe with its parents merged, as YAML")
    show.add_argument("name", help="family, family/variant or a .yaml file")
    check = commands.add_parser("validate", help="check recipe files")
    check.add_argument("names", nargs="*", help="files or names; all shipped recipes if none")
    args = parser.parse_args(argv)
    try:
        if args.command == "list":
            print(_list())
        elif args.command == "show":
            resolved = resolve(args.name)
            head = {"name": resolved.label, "digest": resolved.digest}
            head["state"] = resolved.config().label
            settings = dict(resolved.settings)
            if resolved.evidence:
                settings["evidence"] = [e.model_dump(exclude_none=True) for e in resolved.evidence]
            print(yaml.safe_dump(head | settings, sort_keys=False, width=98), end="")
        else:
            print("\n".join(validate(args.names)))
    except RecipeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
