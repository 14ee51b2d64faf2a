"""Formats for each layer of a model, found by measuring: sensitivity, search, verification.

One recurrent layer (or group of neighbours) at a time is stored in each candidate format while the
rest stays fp32, which gives its divergence from fp32 and the error of its state. Divergences of
small errors add up nearly, so the sums over layers give a predicted frontier of bytes against
divergence. Its points near the target are then measured whole, beside every candidate format used
throughout; the best measured one is chosen, and measured again on documents that had no part in
the choice.
"""

from __future__ import annotations

import datetime
import itertools
import json
import math
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict

from .. import recipe as recipes
from ..config import StateConfig
from ..formats.spec import Format
from ..state.geometry import ModelGeometry
from . import stats
from .arms import FLOOR, REFERENCE, Arm, parse_arm, reference_arms, slug
from .files import write_text
from .schema import Environment, IntervalRecord

if TYPE_CHECKING:
    from ..models import LoadedModel, ResolvedModel
    from .probes import Streams
    from .store import Unit

SCHEMA: Literal["replayssm-tune/1"] = "replayssm-tune/1"
FORMATS = (
    "nvfp4:same",
    "P4+4:rot",
    "int8:same:rot",
    "fp8:same",
    "P4+8:rot",
    "P8+4:rot",
    "fp8:nvfp4",
    "fp16:same",
    "fp16:nvfp4",
    "fp32",
)
"""Candidates of a run that names none, in the syntax of ``--arms`` without ``@L``."""
FRESH = 1
"""Added to the seed of the documents for those that only verify."""
WIDTH = 4096
"""Points of a frontier that are kept while layers are added to it."""
NEAR = 4
"""Predicted points that are measured whole."""

Assignment = tuple[StateConfig, ...]


class TuneError(ValueError):
    """A search that cannot start or end; one line with the cause and the remedy."""


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="strings")


class Sensitivity(_Record):
    """Layers stored in one format while the rest stays fp32. kld: nats an answer; checkpoint and
    copy: root mean square error relative to the state, at the last flush."""

    layers: list[int]
    format: str
    label: str
    bytes: int
    kld: float
    checkpoint: float
    copy_: float


class Whole(_Record):
    """A whole assignment, measured. bytes: stored for a request; per_step: moved by a decode step,
    averaged over a window. predicted: sum of its layers' divergences."""

    name: str
    bytes: int
    per_step: float
    predicted: float
    kld: IntervalRecord
    top1: float
    layers: dict[str, str]


class Verified(_Record):
    """What fresh documents say of the chosen assignment, the recipe beside it, or fp32 again."""

    task: str
    name: str
    bytes: int
    per_step: float
    documents: int
    seeds: list[int]
    kld: IntervalRecord
    kld_p99: float
    slope: float | None
    top1: float
    floor: float


class TuneRecord(_Record):
    """The result file of a search. ratio: divergence of the chosen assignment over that of the
    recipe ``beside``, paired by fresh document."""

    schema_version: Literal["replayssm-tune/1"] = SCHEMA
    created: str
    command: list[str]
    environment: Environment
    model: str
    weights: str
    task: str
    settings: dict[str, Any]
    target: dict[str, float]
    beside: str
    fp32_bytes: int
    sensitivity: list[Sensitivity]
    frontier: list[tuple[int, float]]
    measured: list[Whole]
    chosen: str
    verified: list[Verified]
    ratio: IntervalRecord
    recipe: str


@dataclass(frozen=True)
class Point:
    """A partial or whole assignment: bytes, predicted divergence, one choice a group."""

    bytes: int
    kld: float
    choice: tuple[int, ...] = ()


def frontier(options: Sequence[Sequence[tuple[int, float]]], width: int = WIDTH) -> list[Point]:
    """Assignments that no other one beats in bytes and predicted divergence, fewest bytes first.

    options[g][c]: (bytes, divergence) of choice c for group g. Exact while a frontier holds no more
    than ``width`` points; beyond, points closest in bytes to a kept one are dropped.
    """
    points = [Point(0, 0.0)]
    for group in options:
        grown = [
            Point(p.bytes + size, p.kld + kld, (*p.choice, c))
            for p in points
            for c, (size, kld) in enumerate(group)
        ]
        grown.sort(key=lambda p: (p.bytes, p.kld))
        points = []
        for p in grown:
            if not points or p.kld < points[-1].kld:
                if points and points[-1].bytes == p.bytes:
                    points.pop()
                points.append(p)
        if len(points) > width:
            last = len(points) - 1
            keep = sorted({round(i * last / (width - 1)) for i in range(width)})
            points = [points[i] for i in keep]
    return points


def format_settings(fmt: Format) -> dict[str, Any]:
    """A format as a recipe writes it, its scale rule spelled out."""
    out: dict[str, Any] = {"format": fmt.name.split("/")[0]}
    if fmt.fixed_scale:
        return out
    scale = fmt.scale
    out["block"] = scale.block if scale.granularity == "block" else scale.granularity
    if fmt.is_scaled:
        out["scale"] = scale.dtype
    return out


def layer_settings(config: StateConfig) -> dict[str, Any]:
    """What a recipe's rule sets to store a layer as ``config`` says."""
    update = format_settings(config.update)
    if config.update.rounds:
        update |= {"rounding": config.rounding, "random_bits": config.random_bits}
    out: dict[str, Any] = {"update": update}
    if not config.update.is_planar:
        same = config.output is None
        out["output"] = {"format": "same"} if same else format_settings(config.output)  # type: ignore[arg-type]
    return out | {"rotate": config.rotate}


def _select(layers: Iterable[int]) -> str:
    """Indices as a recipe's rule writes them, runs as ``a-b``."""
    parts = []
    for _, run in itertools.groupby(enumerate(sorted(layers)), lambda p: p[1] - p[0]):
        found = [i for _, i in run]
        parts.append(str(found[0]) if len(found) == 1 else f"{found[0]}-{found[-1]}")
    return ",".join(parts)


def settings_of(layers: Mapping[int, StateConfig]) -> dict[str, Any]:
    """Recipe settings that resolve to these configs. The base is the most used one, but a format
    without scales goes before the same one with them: a rule can add a scale, not take it away."""
    counts = Counter(layers.values())

    def rank(c: StateConfig) -> tuple[bool, int, int]:
        bare = not c.update.fixed_scale and not c.update.is_scaled
        return bare, counts[c], -min(i for i in layers if layers[i] == c)

    base = max(counts, key=rank)
    out: dict[str, Any] = layer_settings(base)
    out["replay"] = {"buffer_len": base.buffer_len}
    if base.stagger:
        out["replay"]["stagger"] = True
    if base.philox_rounds != 7:
        out["philox_rounds"] = base.philox_rounds
    rules = []
    for other in counts:
        if other != base:
            select = _select(i for i, c in layers.items() if c == other)
            rules.append({"select": select, "set": layer_settings(other)})
    if rules:
        out["layers"] = rules
    return out


@dataclass
class Search:
    """A search on a loaded model. groups: layers that share a format."""

    loaded: LoadedModel
    geometry: ModelGeometry
    task: str
    settings: dict[str, Any]
    documents: int
    fresh: int
    seeds: tuple[int, ...]
    batch_size: int
    ring: str
    work: Path
    candidates: list[StateConfig]
    groups: list[list[int]]
    tick: Callable[[int], None] = lambda n: None
    _docs: dict[tuple[str, int], Streams] = field(default_factory=dict)
    _references: dict[tuple[str, int], tuple[Any, Unit]] = field(default_factory=dict)

    # --- measuring --------------------------------------------------------------------------------

    def docs(self, task: str, offset: int) -> Streams:
        """Documents of a task; offset 0 to tune, ``FRESH`` to verify."""
        from .probes import DATA_SEED, streams
        from .tasks import TASKS

        if (task, offset) not in self._docs:
            n = self.fresh if offset else self.documents
            asked = self.settings if task == self.task else {}
            self._docs[task, offset] = streams(
                TASKS[task], n, asked, self.loaded.tokenizer, DATA_SEED + offset
            )
        return self._docs[task, offset]

    def reference(self, task: str, offset: int) -> tuple[Any, Unit]:
        """(what fp32 said of every token, its unit)."""
        from .measure import Options, measure_streams
        from .signals import Reference

        if (task, offset) not in self._references:
            found = Reference()
            unit = measure_streams(
                self.loaded,
                self.docs(task, offset),
                Arm(REFERENCE, "reference", None),
                self.seeds[0],
                Options(self.batch_size),
                found,
                "",
            )
            self._references[task, offset] = (found, unit)
        return self._references[task, offset]

    def unit(self, one: Arm, seed: int, task: str, offset: int) -> Unit:
        """One arm and seed, from the work folder if it was measured before."""
        from .measure import Options, measure_streams
        from .probes import digest_of
        from .store import UnitStore, unit_key

        docs = self.docs(task, offset)
        key = unit_key(
            {
                "weights": self.loaded.digest,
                "dtype": str(next(self.loaded.model.parameters()).dtype),
                "documents": digest_of(docs.doc_hashes),
                "arm": one.digest,
                "seed": seed,
                "batch": one.batch_size or self.batch_size,
            }
        )
        store, name = UnitStore(self.work), self.loaded.resolved.name
        label = f"{task}-{offset}"
        found = store.load(name, label, one.name, seed, key)
        if found is None:
            reference, _ = self.reference(task, offset)
            found = measure_streams(
                self.loaded, docs, one, seed, Options(self.batch_size), reference, key
            )
            found.record.task = label
            store.save(found)
        self.tick(1)
        return found

    def measured(self, one: Arm, task: str | None = None, offset: int = 0) -> Any:
        """``gates.Measured`` of an arm over the seeds that matter."""
        from .gates import measured

        task = task or self.task
        seeds = self.seeds if one.rounds else self.seeds[:1]
        units = [self.unit(one, s, task, offset) for s in seeds]
        return measured(self.reference(task, offset)[1], units, "likelihood")

    # --- sensitivity ------------------------------------------------------------------------------

    def arm(self, name: str, layers: Mapping[int, StateConfig]) -> Arm:
        first = next(iter(layers.values()))
        return Arm(name, "candidate", first, dict(layers))

    def stored(self, layers: Mapping[int, StateConfig]) -> int:
        """Bytes of one request; layers that are left out count as plain fp32."""
        return self.arm("x", layers).bytes(self.geometry, self.ring).stored

    def group_bytes(self, group: Sequence[int], config: StateConfig) -> int:
        rest = sum(4 * g.elements for i, g in self.geometry.layers.items() if i not in group)
        return self.stored(dict.fromkeys(group, config)) - rest

    def sensitivity(self, text: Mapping[StateConfig, str]) -> list[list[Sensitivity]]:
        """By group, then candidate."""
        from .gates import against_fp32
        from .state_error import StateProbe

        docs = self.docs(self.task, 0).first(min(self.batch_size, self.documents))
        probe = StateProbe(self.loaded, docs, self.batch_size)
        out = []
        for group in self.groups:
            row = []
            for config in self.candidates:
                layers = dict.fromkeys(group, config)
                kld, errors = 0.0, (0.0, 0.0)
                if config.update.rounds or config.readout.rounds:
                    name = f"layers-{_select(group)}-{slug(config)}"
                    m = self.measured(self.arm(name, layers))
                    found = against_fp32("kld_mean", m, 0.95)
                    kld = found.value if math.isfinite(found.value) else math.inf
                    every = [e.relative for e in probe.measure(layers).values()]
                    errors = (max(e[0] for e in every), max(e[1] for e in every))
                row.append(
                    Sensitivity(
                        layers=list(group),
                        format=text[config],
                        label=config.label,
                        bytes=self.group_bytes(group, config),
                        kld=kld,
                        checkpoint=errors[0],
                        copy_=errors[1],
                    )
                )
            out.append(row)
        return out

    # --- choosing ---------------------------------------------------------------------------------

    def layers_of(self, choice: Sequence[int]) -> dict[int, StateConfig]:
        return {
            i: self.candidates[c]
            for group, c in zip(self.groups, choice, strict=True)
            for i in group
        }

    def whole(self, name: str, layers: Mapping[int, StateConfig], predicted: float) -> Whole:
        """Measure an assignment on the tuning documents."""
        from .compare import interval
        from .gates import against_fp32

        m = self.measured(self.arm(name, layers))
        kld = against_fp32("kld_mean", m, 0.95)
        sizes = self.arm(name, layers).bytes(self.geometry, self.ring)
        return Whole(
            name=name,
            bytes=sizes.stored,
            per_step=sizes.per_step,
            predicted=predicted,
            kld=interval(kld),
            top1=float(m.agree.sum() / m.answers.sum()),
            layers={str(i): c.label for i, c in sorted(layers.items())},
        )

    def verify(
        self, name: str, one: Arm, task: str, floor: float | None = None
    ) -> tuple[Verified, Any]:
        """Measure an arm on fresh documents; the second value pairs arms by document."""
        from .compare import interval
        from .gates import against_fp32

        m = self.measured(one, task, FRESH)
        kld, p99, slope = (against_fp32(k, m, 0.95) for k in ("kld_mean", "kld_p99", "kld_slope"))
        sizes = one.bytes(self.geometry, self.ring)
        found = Verified(
            task=task,
            name=name,
            bytes=sizes.stored,
            per_step=sizes.per_step,
            documents=len(m.answers),
            seeds=list(self.seeds if one.rounds else self.seeds[:1]),
            kld=interval(kld),
            kld_p99=p99.value,
            slope=slope.value if math.isfinite(slope.value) else None,
            top1=float(m.agree.sum() / m.answers.sum()),
            floor=kld.value if floor is None else floor,
        )
        return found, m


def parse_candidates(texts: Iterable[str], buffer_len: int) -> dict[StateConfig, str]:
    """Candidate configs and how they were written. Raises ValueError."""
    out: dict[StateConfig, str] = {}
    for text in texts:
        if "@" in text:
            raise TuneError(
                f"format '{text}': every layer flushes after the same number of tokens; give it "
                "once, with --buffer-len"
            )
        out.setdefault(parse_arm(text, {"buffer_len": buffer_len}), text.strip())
    if not out:
        raise TuneError("no candidate format; name some with --formats, as P4+8:rot,fp16:same")
    return out


def parse_bytes(text: str) -> int:
    """Bytes from ``300000``, ``300k``, ``1.5M`` or ``2Gi``. Raises TuneError."""
    units = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}
    body = text.strip().lower().removesuffix("b")
    number = body.rstrip("kmgi")
    try:
        value = float(number) * units[body[len(number) :]]
    except (ValueError, KeyError):
        raise TuneError(f"bytes '{text}': write a number, as 300000, 300k or 1.5M") from None
    if not value >= 1 or not math.isfinite(value):
        raise TuneError(f"bytes '{text}' is no budget; give the bytes of one request's state")
    return int(value)


def recipe_text(
    name: str, description: str, model: ResolvedModel, search: Search, settings: dict[str, Any]
) -> str:
    """The YAML of a tuned recipe."""
    layer = next(iter(search.geometry.layers.values()))
    data = {
        "schema": 1,
        "name": name,
        "description": description,
        "match": {
            "model_type": [search.geometry.model_type],
            "mixer": layer.kind,
            "heads": layer.heads,
            "rows": layer.rows,
            "n": layer.n,
        },
        "settings": settings,
    }
    return yaml.safe_dump(data, sort_keys=False, width=98)


def write_recipe(path: Path, text: str, layers: Mapping[int, StateConfig], geometry: Any) -> None:
    """Write a recipe if, read back, it means exactly ``layers``. Raises TuneError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".tune-") as scratch:
        trial = Path(scratch) / path.name
        trial.write_text(text, encoding="utf-8")
        read = recipes.resolve(str(trial)).configs(geometry)
        if {i: c.digest for i, c in read.items()} != {i: c.digest for i, c in layers.items()}:
            raise TuneError(f"{path}: the recipe does not read back as what was measured")
        os.replace(trial, path)


def near_target(
    points: Sequence[Point], measure: Callable[[Point], Whole], limit: float, tries: int = 12
) -> Whole | None:
    """The smallest point whose measured divergence stays at or below ``limit``, with 95 %
    confidence: a bisection that starts where the prediction says."""
    low, high, best = 0, len(points) - 1, None
    at = next((i for i, p in enumerate(points) if p.kld <= limit), high)
    for _ in range(tries):
        if low > high:
            break
        found = measure(points[at])
        if found.kld.upper <= limit:
            best, high = found, at - 1
        else:
            low = at + 1
        at = min(max((low + high) // 2, low), max(high, low))
        if at >= len(points):
            break
    return best


class _Bar:
    def __init__(self, total: int, quiet: bool):
        self._bar = None
        if not quiet and sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=total, unit="run", leave=False, dynamic_ncols=True)

    def __call__(self, n: int) -> None:
        if self._bar is not None:
            self._bar.update(n)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


@dataclass(frozen=True)
class Asked:
    """What a user asks for. budget in bytes or limit in nats, or neither: ``beside``'s bytes."""

    model: ResolvedModel
    budget: int | None
    limit: float | None
    beside: str
    formats: tuple[str, ...]
    buffer_len: int
    task: str
    documents: int
    fresh: int
    seeds: tuple[int, ...]
    group: int
    batch_size: int
    device: str
    dtype: str
    trust_remote_code: bool
    out: Path
    work: Path
    quiet: bool
    command: tuple[str, ...]


def check(asked: Asked) -> dict[StateConfig, str]:
    """The candidates; refuses before a model is loaded what cannot work. Raises ValueError."""
    from .tasks import TASKS

    for name, value in (
        ("documents", asked.documents),
        ("verification documents", asked.fresh),
        ("group", asked.group),
        ("batch size", asked.batch_size),
    ):
        if value < (2 if "documents" in name else 1):
            raise TuneError(f"{name} {value} is too small; an interval needs two documents")
    if asked.task not in TASKS or TASKS[asked.task].generates:
        known = ", ".join(n for n, t in TASKS.items() if not t.generates)
        raise TuneError(f"task '{asked.task}' is not teacher-forced; use one of {known}")
    if asked.limit is not None and not 0 < asked.limit < math.inf:
        raise TuneError(f"--max-kld {asked.limit} is no divergence; give nats, such as 0.001")
    if asked.out.suffix not in (".yaml", ".yml"):
        raise TuneError(f"--out {asked.out}: name the recipe file, ending in .yaml")
    texts = parse_candidates(asked.formats, asked.buffer_len)
    if asked.model.config is not None:
        recipes.resolve(asked.beside, asked.model.config, asked.model.name)
    return texts


def run(asked: Asked) -> tuple[TuneRecord, dict[int, StateConfig]]:
    """Search, verify, and write the recipe with its result beside it. Raises ValueError."""
    import torch

    from .. import models
    from ..backends import hf
    from ..state.geometry import read_geometry
    from . import environment
    from .compare import interval
    from .runner import _guard

    texts = check(asked)
    device = asked.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise TuneError(f"device '{device}': torch sees no CUDA GPU; use --device cpu")
    loaded = models.load(asked.model, device, asked.dtype, asked.trust_remote_code)
    geometry = read_geometry(loaded.model.config)
    recurrent = sorted(hf.recurrent_layers(loaded.model))
    beside = recipes.resolve(asked.beside, loaded.model.config, asked.model.name)
    baseline = beside.configs(geometry)
    for config in dict.fromkeys(baseline.values()):
        if config.buffer_len == asked.buffer_len:
            texts.setdefault(config, config.label)
    fits = {}
    for config, text in texts.items():
        try:
            for layer in geometry.layers.values():
                config.update.check(layer.rows, layer.n)
                config.readout.check(layer.rows, layer.n)
        except ValueError:
            continue
        fits[config] = text
    if not fits:
        raise TuneError(f"no candidate fits the states of {asked.model.name}; name others")
    dtype = str(next(loaded.model.parameters()).dtype).removeprefix("torch.")
    ring = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}[dtype]
    groups = [recurrent[i : i + asked.group] for i in range(0, len(recurrent), asked.group)]
    search = Search(
        loaded,
        geometry,
        asked.task,
        {},
        asked.documents,
        asked.fresh,
        asked.seeds,
        asked.batch_size,
        ring,
        asked.work,
        list(fits),
        groups,
    )
    _guard(loaded, [search.docs(asked.task, 0)])
    target = asked.budget
    if asked.limit is None and target is None:
        target = search.stored(baseline)
    runs = sum(len(asked.seeds) if c.uses_random_bits else 1 for c in fits if c.update.rounds)
    bar = _Bar(runs * len(groups) + (len(fits) + NEAR + 6) * len(asked.seeds), asked.quiet)
    search.tick = bar
    try:
        rows = search.sensitivity(fits)
        points = frontier([[(s.bytes, s.kld) for s in row] for row in rows])
        measured: dict[str, Whole] = {}
        layers_by_name: dict[str, dict[int, StateConfig]] = {}
        known: dict[tuple[str, ...], str] = {}

        def whole(name: str, layers: dict[int, StateConfig], predicted: float) -> Whole:
            key = tuple(c.digest for _, c in sorted(layers.items()))
            name = known.setdefault(key, name)
            if name not in measured:
                measured[name] = search.whole(name, layers, predicted)
                layers_by_name[name] = layers
            return measured[name]

        def at(point: Point) -> Whole:
            name = "mixed-" + "-".join(map(str, point.choice))
            if len(name) > 80:
                name = f"mixed-{points.index(point)}-{point.bytes}"
            if len(set(point.choice)) == 1:
                name = f"all-{slug(search.candidates[point.choice[0]])}"
            return whole(name, search.layers_of(point.choice), point.kld)

        uniform = []
        for c, config in enumerate(search.candidates):
            size = sum(row[c].bytes for row in rows)
            uniform.append((size, sum(row[c].kld for row in rows), config))
        if target is not None:
            smallest = points[0].bytes
            inside = [p for p in points if p.bytes <= target]
            if not inside:
                raise TuneError(
                    f"a budget of {target} bytes is below the smallest state that the candidates "
                    f"make ({smallest} bytes a request); raise it, or add formats"
                )
            for point in inside[-NEAR:]:
                at(point)
            for size, kld, config in sorted(uniform, key=lambda u: u[1]):
                if size <= target and len(measured) < 2 * NEAR:
                    whole(f"all-{slug(config)}", dict.fromkeys(recurrent, config), kld)
            if search.stored(baseline) <= target:
                whole("recipe", baseline, math.nan)
            chosen = min(measured.values(), key=lambda w: (w.kld.value, w.bytes))
        else:
            assert asked.limit is not None
            found = near_target(points, at, asked.limit)
            if found is None:
                best = min((w.kld.upper for w in measured.values()), default=math.nan)
                raise TuneError(
                    f"no assignment stays at or below {asked.limit:g} nats; the best one measured "
                    f"reaches {best:.3g}; raise --max-kld, or add formats such as fp16:same"
                )
            chosen = found
        layers = layers_by_name[chosen.name]
        verified, ratio = _verify(search, chosen, layers, beside.label, baseline)
    finally:
        bar.close()
    result = asked.out.with_suffix(".json")
    record = TuneRecord(
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        command=list(asked.command),
        environment=environment.describe(device),
        model=asked.model.name,
        weights=loaded.digest,
        task=asked.task,
        settings={
            "documents": asked.documents,
            "verification_documents": asked.fresh,
            "seeds": list(asked.seeds),
            "buffer_len": asked.buffer_len,
            "group": asked.group,
            "batch_size": asked.batch_size,
            "ring": ring,
        },
        target={"bytes": float(target)} if target is not None else {"kld": float(asked.limit or 0)},
        beside=beside.label,
        fp32_bytes=4 * sum(g.elements for g in geometry.layers.values()),
        sensitivity=[s for row in rows for s in row],
        frontier=[(p.bytes, p.kld) for p in _thinned(points, 200)],
        measured=sorted(measured.values(), key=lambda w: w.bytes),
        chosen=chosen.name,
        verified=verified,
        ratio=interval(ratio),
        recipe=asked.out.name,
    )
    mine = next(v for v in verified if v.name == chosen.name and v.task == asked.task)
    settings = settings_of(layers)
    settings["seeds"] = [0, 1, 2]
    settings["gates"] = [
        {
            "metric": "kld_mean",
            "task": asked.task,
            "threshold": float(f"{1.5 * mine.kld.upper:.2g}"),
        }
    ]
    commit = record.environment.commit
    evidence = {"model": asked.model.name, "result": result.name}
    if commit:
        evidence["commit"] = commit[:12]
    settings["evidence"] = [evidence]
    description = (
        f"Tuned for {asked.model.name} on {asked.task}: {mine.bytes} bytes a request, mean KLD "
        f"{mine.kld.value:.3g} on fresh documents."
    )
    name = "".join(ch if ch.isalnum() or ch in ".-" else "-" for ch in asked.out.stem.lower())
    text = recipe_text(name.lstrip(".-") or "tuned", description, asked.model, search, settings)
    write_text(result, json.dumps(json.loads(record.model_dump_json()), indent=1) + "\n")
    write_recipe(asked.out, text, layers, geometry)
    return record, layers


def _verify(
    search: Search,
    chosen: Whole,
    layers: Mapping[int, StateConfig],
    label: str,
    baseline: Mapping[int, StateConfig],
) -> tuple[list[Verified], stats.Interval]:
    """Fresh documents: fp32 again, the chosen assignment and the recipe beside it."""
    out: list[Verified] = []
    ratio = None
    from .probes import is_byte_level

    tasks = [search.task]
    if "text" not in tasks and is_byte_level(search.loaded.tokenizer):
        tasks.append("text")
    for task in tasks:
        again = next(a for a in reference_arms(search.batch_size) if a.name == FLOOR)
        floor, _ = search.verify(FLOOR, again, task)
        mine, m = search.verify(chosen.name, search.arm(chosen.name, layers), task, floor.floor)
        theirs, t = search.verify(label, search.arm("recipe", baseline), task, floor.floor)
        out += [floor, mine, theirs]
        if task == search.task:
            mine_kld, their_kld = m.kld.sum(1), t.kld.sum(1)
            ratio = stats.bootstrap_ratio(mine_kld, their_kld)
    assert ratio is not None
    return out, ratio


def _thinned(points: Sequence[Point], most: int) -> list[Point]:
    if len(points) <= most:
        return list(points)
    return [points[round(i * (len(points) - 1) / (most - 1))] for i in range(most)]


def report(record: TuneRecord) -> str:
    """What was found, as Markdown tables."""
    from .report import markdown_table, nats, size

    labels = list(dict.fromkeys(s.label for s in record.sensitivity))
    groups = list(dict.fromkeys(tuple(s.layers) for s in record.sensitivity))
    by = {(tuple(s.layers), s.label): s for s in record.sensitivity}
    rows = [
        [
            label,
            size(sum(by[g, label].bytes for g in groups)),
            *(nats(by[g, label].kld) for g in groups),
        ]
        for label in labels
    ]
    head = ["format", "bytes", *(f"layer {_select(g)}" for g in groups)]
    parts = [f"KLD of one layer at a time, {record.task}:", markdown_table(head, rows)]
    rows = [
        [
            w.name + (" (chosen)" if w.name == record.chosen else ""),
            size(w.bytes),
            size(w.per_step),
            nats(w.predicted) if math.isfinite(w.predicted) else "–",
            f"{nats(w.kld.value)} [{nats(w.kld.low)}, {nats(w.kld.high)}]",
        ]
        for w in record.measured
    ]
    head = ["state", "bytes", "moved a token", "predicted", "KLD"]
    parts += ["Measured whole:", markdown_table(head, rows)]
    rows = [
        [
            v.name,
            v.task,
            size(v.bytes),
            size(v.per_step),
            f"{nats(v.kld.value)} [{nats(v.kld.low)}, {nats(v.kld.high)}]",
            nats(v.floor),
            f"{100 * v.top1:.2f}",
        ]
        for v in record.verified
    ]
    head = ["state", "task", "bytes", "moved a token", "KLD", "floor", "top-1 %"]
    parts += ["On fresh documents:", markdown_table(head, rows)]
    r = record.ratio
    parts.append(
        f"KLD of the chosen state / {record.beside}: {r.value:.3g} [{r.low:.3g}, {r.high:.3g}]"
    )
    return "\n\n".join(parts)
