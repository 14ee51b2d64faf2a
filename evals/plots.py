"""Figures of a result as SVG: every one carries its data, and its colours are CSS variables.

matplotlib draws with placeholder colours that are replaced by ``var(--...)``; the page (or the
``<style>`` of a file of its own) says what they are in light and in dark. No number is computed
here beyond units.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .report import (
    drift_rows,
    finite_kld,
    group_of,
    label_of,
    layer_cells,
    layer_table,
    nats,
    percent,
    recipes_of,
    size,
)
from .schema import (
    ArmRecord,
    Comparison,
    IntervalRecord,
    ModelRecord,
    ResultError,
    RunRecord,
    TaskRecord,
)

INK, MUTED, GRID, PAPER, BAND, HEAT = (f"#0{i}0{i}0{i}" for i in range(1, 7))
SERIES = tuple(f"#0a000{i}" for i in range(8))
MARKS = ("o", "s", "^", "D", "v", "P", "X", "<")
DASHES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (5, 1)), (0, (1, 1)), (0, (3, 1, 1, 1)), "-")
VARIABLES = {
    INK: "ink",
    MUTED: "muted",
    GRID: "grid",
    PAPER: "paper",
    BAND: "band",
    HEAT: "heat",
    **{c: f"s{i}" for i, c in enumerate(SERIES)},
}
LIGHT = {
    "ink": "#1b1f24",
    "muted": "#57606a",
    "grid": "#d8dee4",
    "paper": "#ffffff",
    "band": "#8c959f",
    "heat": "#0f6ab4",
    # Okabe and Ito's palette, darkened to 3:1 on white
    "s0": "#0072b2",
    "s1": "#c44e00",
    "s2": "#007a5a",
    "s3": "#b0458a",
    "s4": "#8a6d00",
    "s5": "#2a8cbf",
    "s6": "#555555",
    "s7": "#6a3d9a",
}
DARK = {
    "ink": "#e6edf3",
    "muted": "#9da7b1",
    "grid": "#30363d",
    "paper": "#161b22",
    "band": "#6e7681",
    "heat": "#58a6ff",
    "s0": "#56b4e9",
    "s1": "#ff9248",
    "s2": "#3fc79a",
    "s3": "#e29bc8",
    "s4": "#f0e442",
    "s5": "#9bd1f5",
    "s6": "#b8bfc6",
    "s7": "#b893e6",
}
GROUPS = {
    "published": ("published pair", SERIES[1], "s"),
    "planar": ("planar", SERIES[0], "o"),
    "shared": ("one state, replayed", SERIES[2], "^"),
    "per-step": ("one state, rounded each token", SERIES[3], "X"),
}
MOST_LINES, MOST_ROWS, MOST_NAMES = 8, 24, 12


@dataclass
class Figure:
    """svg: inline SVG text. head and rows: the data that it shows. wide: takes a whole row."""

    title: str
    note: str
    svg: str
    head: list[str]
    rows: list[list[str]] = field(default_factory=list)
    wide: bool = False


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise ResultError(
            "plots need matplotlib: pip install 'replayssm-quant[report]', or use --format md"
        ) from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def available() -> None:
    """Raise ResultError, with the remedy, where matplotlib is not installed."""
    _pyplot()


def css(values: dict[str, str]) -> str:
    """CSS declarations of the colours."""
    return "".join(f"--{k}:{v};" for k, v in values.items())


def _draw(
    paint: Callable[[Any, Any], None], width: float, height: float, title: str, text: str
) -> str:
    """Inline SVG of one pair of axes, as wide as its container."""
    plt = _pyplot()
    style = {
        "svg.fonttype": "none",
        "svg.hashsalt": title,
        "font.family": "sans-serif",
        "font.size": 9.5,
        "text.color": INK,
        "axes.labelcolor": INK,
        "axes.edgecolor": MUTED,
        "axes.facecolor": "none",
        "axes.linewidth": 0.8,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": GRID,
        "grid.linewidth": 0.7,
        "xtick.color": MUTED,
        "ytick.color": MUTED,
        "xtick.labelcolor": INK,
        "ytick.labelcolor": INK,
        "legend.frameon": False,
        "legend.fontsize": 8.5,
        "figure.facecolor": "none",
        "savefig.facecolor": "none",
    }
    with plt.rc_context(style):
        fig, ax = plt.subplots(figsize=(width, height), layout="constrained")
        try:
            paint(fig, ax)
            out = io.StringIO()
            fig.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
        finally:
            plt.close(fig)
    svg = out.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<!--.*?-->", "", svg, flags=re.DOTALL)
    for colour, name in VARIABLES.items():
        svg = svg.replace(colour, f"var(--{name})")
    svg = re.sub(r'font: ([\d.]+)px [^;"]*', r"font: \1px system-ui, sans-serif", svg)
    svg = re.sub(r"\n\s*\n+", "\n", svg)
    box = re.search(r'viewBox="([^"]+)"', svg)
    label = f"<title>{_escape(title)}</title><desc>{_escape(text)}</desc>"
    head = f'<svg role="img" viewBox="{box[1] if box else ""}" xmlns="http://www.w3.org/2000/svg"'
    head += ' xmlns:xlink="http://www.w3.org/1999/xlink">'
    return head + label + svg[svg.index(">") + 1 :].strip()


def _escape(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def standalone(figure: Figure) -> str:
    """The figure as a file: its own colours, dark where the reader prefers that."""
    style = f"<style>svg{{{css(LIGHT)}background:var(--paper)}}"
    style += f"@media(prefers-color-scheme:dark){{svg{{{css(DARK)}}}}}</style>"
    return figure.svg.replace("<title>", style + "<title>", 1) + "\n"


def _name_points(
    fig: Any, ax: Any, named: Sequence[tuple[float, float, str]], others: Sequence[Any] = ()
) -> None:
    """Names beside points (x, y, name) where nothing else is; a thin line where that is not near.

    Limits and scales must be set: places are searched on the drawn canvas, in points.
    """
    fig.canvas.draw()
    unit = 72 / fig.dpi

    def place(x: float, y: float) -> tuple[float, float]:
        px, py = ax.transData.transform((x, y))
        return px * unit, py * unit

    box = ax.get_window_extent()
    right, low, high = box.x1 * unit + 8, box.y0 * unit, box.y1 * unit
    taken = [(x - 3, y - 3, x + 3, y + 3) for x, y in (place(*o[:2]) for o in (*named, *others))]
    for x, y, name in sorted(named, key=lambda p: -p[1]):
        px, py = place(x, y)
        width, best = 4.7 * len(name), None
        for shift in sorted(range(-90, 91, 5), key=abs):
            for side in (7, -7 - width, 16, -16 - width):
                at = (px + side, py + shift - 4.5, px + side + width, py + shift + 4.5)
                inside = at[2] < right and at[1] > low and at[3] < high and at[0] > box.x0 * unit
                free = all(
                    at[2] < t[0] or at[0] > t[2] or at[3] < t[1] or at[1] > t[3] for t in taken
                )
                if inside and free:
                    best = (side, shift, at)
                    break
            if best is not None:
                break
        side, shift, at = best or (7, 0, (px, py, px, py))
        taken.append(at)
        arrow = None
        if abs(shift) > 6:
            arrow = {"arrowstyle": "-", "color": MUTED, "lw": 0.5, "shrinkA": 0, "shrinkB": 3}
        ax.annotate(
            name, (x, y), (side if side > 0 else side + width, shift), textcoords="offset points",
            fontsize=8, color=INK, va="center", ha="left" if side > 0 else "right",
            arrowprops=arrow,
        )  # fmt: skip


def _arms(run: RunRecord) -> dict[str, ArmRecord]:
    return {a.name: a for a in run.arms}


def _found(run: RunRecord, model: str, task: str) -> list[Comparison]:
    """Comparisons of a task, without states that one layer alone is in."""
    single = {a.name for a in run.arms if a.layers is not None and len(a.layers) == 1}
    found = [c for c in run.comparisons if (c.model, c.task) == (model, task)]
    return [c for c in found if c.arm not in single]


def _picked(
    run: RunRecord, model: ModelRecord, found: Sequence[Comparison], most: int
) -> list[Comparison]:
    """At most ``most`` comparisons in the run's order: recipes, then states that are rounded at
    every token, then stochastic rounding at L = 16."""
    arms = _arms(run)

    def rank(c: Comparison) -> tuple[bool, bool, bool]:
        a = arms[c.arm]
        config = a.config or {}
        usual = config.get("buffer_len") == 16 and config.get("rounding") == "sr"
        return (not recipes_of(a, model), group_of(a) != "per-step", not usual)

    kept = sorted(found, key=rank)[:most]
    return [c for c in found if c in kept]


def position(run: RunRecord, model: ModelRecord, task: TaskRecord) -> Figure | None:
    """Mean divergence by position, log-log, over the band of fp32 against itself."""
    found = [c for c in _found(run, model.name, task.name) if c.buckets]
    lines = [c for c in found if c.role != "floor" and all(finite_kld(b.kld) for b in c.buckets)]
    if not lines or len(lines[0].buckets) < 3:
        return None
    floor = next((c for c in found if c.role == "floor"), None)
    arms, title = _arms(run), f"Divergence by position: {model.name}, {task.name}"
    shown = _picked(run, model, lines, MOST_LINES)

    def paint(fig: Any, ax: Any) -> None:
        least = min(b.kld for c in shown for b in c.buckets if b.kld > 0)
        for i, c in enumerate(shown):
            x = [math.sqrt(max(b.low, 1) * b.high) for b in c.buckets]
            y = [max(b.kld, least / 3) for b in c.buckets]
            ax.plot(
                x, y, color=SERIES[i], marker=MARKS[i], ms=4, lw=1.4, ls=DASHES[i],
                label=label_of(arms[c.arm]),
            )  # fmt: skip
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        if floor is not None:
            x = [math.sqrt(max(b.low, 1) * b.high) for b in floor.buckets]
            y = [max(b.kld, 1e-16) for b in floor.buckets]
            low = min(least, *y) / 3
            ax.fill_between(x, [low] * len(x), y, color=BAND, alpha=0.25, lw=0, label="noise floor")
            ax.set_ylim(bottom=low)
        ticks = [b.high for b in shown[0].buckets]
        ax.set_xticks(ticks, [f"{t // 1024}k" if t >= 1024 else str(t) for t in ticks])
        ax.minorticks_off()
        ax.set_xlabel("recurrent updates before the token")
        ax.set_ylabel("KLD, nats a token")
        fig.legend(loc="outside lower center", ncols=2)

    spans = [(b.low, b.high) for b in found[0].buckets]
    head = ["state", *(f"{low}–{high - 1}" for low, high in spans), "slope"]
    rows = []
    for c in found:
        by_span = {(b.low, b.high): b.kld for b in c.buckets}
        slope = "–" if c.kld_slope is None else f"{c.kld_slope:.2f}"
        rows.append([label_of(arms[c.arm]), *(nats(by_span.get(s)) for s in spans), slope])
    height = 3.1 + 0.19 * math.ceil((len(shown) + 1) / 2)
    note = "Mean KL(fp32 || it) in buckets that double. Grey: fp32 against fp32, summed otherwise."
    if len(shown) < len(lines):
        note += f" {len(shown)} of {len(lines)} states; all are in the data."
    return Figure(title, note, _draw(paint, 5.4, height, title, note), head, rows)


def pareto(run: RunRecord, model: ModelRecord, task: TaskRecord) -> Figure | None:
    """Divergence against stored bytes a request; the line joins what nothing beats on both."""
    found = _found(run, model.name, task.name)
    points = [
        (run_arm.bytes[model.name].stored, c.kld.mean, c, run_arm)
        for c in found
        for run_arm in [_arms(run)[c.arm]]
        if c.role != "floor" and c.kld and finite_kld(c.kld.mean) and run_arm.config
    ]  # fmt: skip
    points = [p for p in points if p[1] > 0]
    if len(points) < 3:
        return None
    floor = next((c.kld.mean for c in found if c.role == "floor" and c.kld), None)
    title = f"Divergence against bytes: {model.name}, {task.name}"
    best: list[tuple[int, float, Comparison, ArmRecord]] = []
    for p in sorted(points, key=lambda p: (p[0], p[1])):
        if not best or p[1] < best[-1][1]:
            best.append(p)
    recipes = [p for p in points if recipes_of(p[3], model)]
    named = best[:: math.ceil(len(best) / max(1, MOST_NAMES - len(recipes)))]
    named += [p for p in recipes if p not in named]
    if len(points) <= MOST_NAMES:
        named = points
    unit = 1e6 if max(p[0] for p in points) >= 1e6 else 1e3

    def paint(fig: Any, ax: Any) -> None:
        ax.plot([p[0] / unit for p in best], [p[1] for p in best], color=MUTED, lw=1, zorder=1)
        for group, (label, colour, mark) in GROUPS.items():
            mine = [p for p in points if group_of(p[3]) == group]
            if mine:
                ax.scatter(
                    [p[0] / unit for p in mine], [p[1] for p in mine], s=26, c=colour, marker=mark,
                    edgecolors=PAPER, linewidths=0.5, label=label, zorder=2,
                )  # fmt: skip
        ax.set_yscale("log")
        low = min(p[1] for p in points)
        if floor is not None and floor > 0:
            ax.axhspan(min(floor, low) / 3, floor, color=BAND, alpha=0.25, lw=0)
            if floor > low / 1e4:
                ax.set_ylim(bottom=min(floor, low) / 3)
            else:
                ax.set_ylim(bottom=low / 5)
        ax.set_xlim(right=max(p[0] for p in points) / unit * 1.3)
        ax.set_xlabel("MB a request" if unit == 1e6 else "kB a request")
        ax.set_ylabel("KLD, nats a token")
        fig.legend(loc="outside lower center", ncols=2)
        _name_points(
            fig,
            ax,
            [(p[0] / unit, p[1], p[3].label) for p in named],
            [(p[0] / unit, p[1]) for p in points if p not in named],
        )

    rows = [
        [a.label, size(stored), nats(kld), "yes" if any(b[2] is c for b in best) else ""]
        for stored, kld, c, a in sorted(points, key=lambda p: p[0])
    ]
    note = "Checkpoint, copy, scales and ring, all recurrent layers. Lower left is better; named: "
    if len(points) <= MOST_NAMES:
        note = "Checkpoint, copy, scales and ring, all recurrent layers. Lower left is better; "
        note += "the line joins what no other state beats in both."
    else:
        note += "recipes, and some of what no other state beats in both (the line)."
    head = ["state", "bytes a request", "KLD", "best"]
    return Figure(title, note, _draw(paint, 5.4, 3.9, title, note), head, rows)


def forest(run: RunRecord, model: ModelRecord, task: TaskRecord) -> Figure | None:
    """Change of accuracy with its interval, beside the margin."""
    found = [c for c in _found(run, model.name, task.name) if math.isfinite(c.delta.value)]
    others = [c for c in found if c.role != "floor"]
    if not others or task.scored == "likelihood" or task.metric == "ended":
        return None
    arms = _arms(run)
    shown = _picked(run, model, others, MOST_ROWS)
    shown = [c for c in found if c.role == "floor"] + sorted(shown, key=lambda c: -c.delta.value)
    title = f"Change of accuracy: {model.name}, {task.name}"
    looks = {"PASS": (SERIES[2], "o"), "FAIL": (SERIES[1], "X")}
    other = (SERIES[6], "D")

    def look(c: Comparison) -> tuple[str, str]:
        return (BAND, "o") if c.role == "floor" else looks.get(c.verdict, other)

    def paint(fig: Any, ax: Any) -> None:
        _intervals(ax, [(label_of(arms[c.arm]), c.delta, *look(c)) for c in shown])
        ax.axvline(-100 * task.margin, color=SERIES[1], lw=1, ls="--")
        ax.set_xlabel("points against fp32, 95 % interval")

    rows = []
    for c in found:
        d = c.delta
        interval = f"{100 * d.value:+.2f} [{100 * d.low:+.2f}, {100 * d.high:+.2f}]"
        name = "noise floor" if c.role == "floor" else c.verdict
        rows.append([label_of(arms[c.arm]), interval, f"{c.flips_worse} / {c.flips_better}", name])
    note = f"Dashed: the margin of {100 * task.margin:g} points. fp32: "
    note += (
        f"{percent(found[0].reference_accuracy)} %. Circle: PASS, cross: FAIL, diamond: open or "
    )
    note += "not learned. Linear between -2 and 2, logarithmic beyond."
    if len(shown) < len(found):
        note += f" {len(shown)} of {len(found)} states; all are in the data."
    head = ["state", "points [95 %]", "flips worse / better", "verdict"]
    height = 1.0 + 0.2 * len(shown)
    return Figure(title, note, _draw(paint, 5.4, height, title, note), head, rows)


def _intervals(ax: Any, rows: Sequence[tuple[str, IntervalRecord, str, str]]) -> None:
    """Changes in percent with their intervals, (label, change, colour, mark), the first on top."""
    rows = rows[::-1]
    for y, (_, d, colour, mark) in enumerate(rows):
        ax.plot([100 * d.low, 100 * d.high], [y, y], color=colour, lw=1.6)
        ax.plot([100 * d.value], [y], color=colour, marker=mark, ms=5)
    ax.axvline(0, color=MUTED, lw=0.8)
    ax.set_xscale("symlog", linthresh=2, linscale=1.2)
    low = min(100 * d.low for _, d, _, _ in rows)
    high = max(100 * d.high for _, d, _, _ in rows)
    ticks = [t for t in (-100, -50, -10, -5, -2, -1, 0, 1, 2, 5, 10, 50, 100) if low < t * 1.01]
    ticks = [t for t in ticks if t <= max(high, 1)]
    ax.set_xticks(ticks, [f"{t:+d}" if t else "0" for t in ticks])
    ax.minorticks_off()
    ax.set_yticks(range(len(rows)), [label for label, _, _, _ in rows])
    ax.set_ylim(-0.7, len(rows) - 0.3)
    ax.grid(axis="y", visible=False)
    ax.tick_params(axis="y", length=0)


def lengths(run: RunRecord, model: ModelRecord, task: TaskRecord) -> Figure | None:
    """Change of the response length of a free-running task, with its interval."""
    found = [
        c
        for c in _found(run, model.name, task.name)
        if c.length_change is not None and math.isfinite(c.length_change.low)
    ]
    if not any(c.role != "floor" for c in found):
        return None
    arms = _arms(run)
    others = _picked(run, model, [c for c in found if c.role != "floor"], MOST_ROWS)
    shown = [c for c in found if c.role == "floor"] + others
    title = f"Response length: {model.name}, {task.name}"

    def paint(fig: Any, ax: Any) -> None:
        rows = []
        for c in shown:
            assert c.length_change is not None
            colour = BAND if c.role == "floor" else GROUPS[group_of(arms[c.arm])][1]
            mark = "o" if c.role == "floor" else GROUPS[group_of(arms[c.arm])][2]
            rows.append((label_of(arms[c.arm]), c.length_change, colour, mark))
        _intervals(ax, rows)
        ax.set_xlabel("% more or fewer tokens than fp32, 95 % interval")

    head, rows = drift_rows(run, model.name, task)
    note = f"Mean length of a response; fp32: {found[0].reference_length:.0f} tokens, of which "
    note += f"{percent(found[0].reference_finished, 0)} % end before the limit. Grey: fp32 again."
    if len(shown) < len(found):
        note += f" {len(shown)} of {len(found)} states; all are in the data."
    height = 1.0 + 0.2 * len(shown)
    return Figure(title, note, _draw(paint, 5.4, height, title, note), head, rows)


def survival(run: RunRecord, model: ModelRecord, task: TaskRecord) -> Figure | None:
    """Share of the responses that still equal fp32's, by place."""
    found = [c for c in _found(run, model.name, task.name) if len(c.survival) > 2]
    lines = [c for c in found if c.role != "floor"]
    if not lines:
        return None
    arms, title = _arms(run), f"Responses that still equal fp32's: {model.name}, {task.name}"
    shown = _picked(run, model, lines, MOST_LINES)
    floor = next((c for c in found if c.role == "floor"), None)

    def paint(fig: Any, ax: Any) -> None:
        if floor is not None:
            x = [s.characters for s in floor.survival]
            y = [100 * s.same for s in floor.survival]
            ax.plot(x, y, color=BAND, lw=4, alpha=0.35, label="fp32 again")
        for i, c in enumerate(shown):
            ax.plot(
                [s.characters for s in c.survival], [100 * s.same for s in c.survival],
                color=SERIES[i], marker=MARKS[i], ms=4, lw=1.4, ls=DASHES[i],
                label=label_of(arms[c.arm]),
            )  # fmt: skip
        ax.set_xscale("log", base=2)
        ticks = [s.characters for s in shown[0].survival]
        ax.set_xticks(ticks, [f"{t // 1024}k" if t >= 1024 else str(t) for t in ticks])
        ax.minorticks_off()
        ax.set_ylim(0, 103)
        ax.set_xlabel("characters of the response")
        ax.set_ylabel("% without a difference so far")
        fig.legend(loc="outside lower center", ncols=2)

    places = [s.characters for s in found[0].survival]
    head = ["state", *(f"through {p}" for p in places), "first difference, median"]
    rows = []
    for c in found:
        same = {s.characters: s.same for s in c.survival}
        first = "–" if c.first_difference is None else f"{c.first_difference:.0f}"
        rows.append([label_of(arms[c.arm]), *(percent(same.get(p), 0) for p in places), first])
    height = 3.1 + 0.19 * math.ceil((len(shown) + 1) / 2)
    note = "Free-running: both write on from their own answers. A response that ends without a "
    note += "difference counts as equal from there on."
    if len(shown) < len(lines):
        note += f" {len(shown)} of {len(lines)} states; all are in the data."
    return Figure(title, note, _draw(paint, 5.4, height, title, note), head, rows)


def layers(run: RunRecord, model: ModelRecord, task: TaskRecord) -> Figure | None:
    """Divergence with one layer at a time stored in a format, every other in fp32."""
    cells = layer_cells(run, model, task)
    formats = list(dict.fromkeys(f for f, _ in cells))
    rows_of = sorted({i for _, i in cells})
    if len(rows_of) < 2 or len(formats) < 2:
        return None
    values = [v for v in cells.values() if finite_kld(v) and v > 0]
    low, high = math.log10(min(values)), math.log10(max(values))
    title = f"Divergence by layer and format: {model.name}, {task.name}"

    def paint(fig: Any, ax: Any) -> None:
        plt = _pyplot()
        for (fmt, index), v in cells.items():
            x, y = rows_of.index(index), formats.index(fmt)
            share = 1.0
            if finite_kld(v):
                share = (math.log10(max(v, 10**low)) - low) / max(high - low, 1e-9)
            box = plt.Rectangle(
                (x - 0.5, y - 0.5), 1, 1, facecolor=HEAT, alpha=0.06 + 0.6 * share, lw=0
            )
            ax.add_patch(box)
            ax.text(x, y, nats(v), ha="center", va="center", fontsize=8.5)
        ax.set_xlim(-0.5, len(rows_of) - 0.5)
        ax.set_ylim(len(formats) - 0.5, -0.5)
        ax.set_xticks(range(len(rows_of)), [f"layer {i}" for i in rows_of])
        ax.set_yticks(range(len(formats)), formats)
        ax.grid(visible=False)
        ax.tick_params(length=0)
        for side in ax.spines.values():
            side.set_visible(False)

    head, rows = layer_table(run, model, task)
    note = "Mean KLD, nats a token, with this layer alone in the format and the others in fp32. "
    note += "The stronger the colour, the larger, on a logarithmic scale."
    height = 0.6 + 0.32 * len(formats)
    return Figure(title, note, _draw(paint, 5.4, height, title, note), head, rows)


def throughput(rows: Sequence[dict[str, Any]], batch: int) -> list[Figure]:
    """Bytes that a token moves in a layer against tokens a second, one figure an operation.

    rows: result rows of ``kernels.bench`` (steps mixed as in a window of L tokens).
    """
    out = []
    keys = dict.fromkeys((r["op"], r["geometry"]) for r in rows)
    for op, geometry in keys:
        mine = [
            r for r in rows
            if (r["op"], r["geometry"], r["batch"], r["phase"]) == (op, geometry, batch, "mix")
            and r.get("gbps")
        ]  # fmt: skip
        if len(mine) < 2:
            continue
        points = [
            (r["gbps"] * r["time_us"] * 1e3 / batch, batch / r["time_us"] * 1e6, r) for r in mine
        ]
        points.sort(key=lambda p: p[0])
        title = f"Bytes against speed: {op}, {geometry}, batch {batch}"

        def paint(fig: Any, ax: Any, points: list[Any] = points) -> None:
            top = max(p[1] for p in points)
            for p in points:
                theirs = p[2]["design"].startswith("vllm")
                ax.plot(
                    [p[0] / 1e3], [p[1] / 1e6], ls="", ms=6,
                    color=SERIES[1] if theirs else SERIES[0], marker="s" if theirs else "o",
                )  # fmt: skip
            ax.set_xlim(0, max(p[0] for p in points) / 1e3 * 1.3)
            ax.set_ylim(0, top / 1e6 * 1.08)
            ax.set_xlabel("kB that a token moves in a layer")
            ax.set_ylabel("million tokens a second, one layer")
            _name_points(fig, ax, [(p[0] / 1e3, p[1] / 1e6, p[2]["design"]) for p in points])

        table = [
            [r["design"], size(b), f"{t / 1e6:.3g} M/s", f"{r['time_us']:.1f} us", r["gpu"]]
            for b, t, r in points
        ]
        note = "Mean step over a window of L tokens: readouts and one flush. Squares: vLLM's own."
        head = ["design", "bytes a token", "tokens a second", "a step", "GPU"]
        out.append(Figure(title, note, _draw(paint, 5.4, 3.7, title, note), head, table))
    return out


def figures(run: RunRecord, model: ModelRecord) -> list[Figure]:
    """Every figure of one model of a run that its tasks allow."""
    out = []
    for kind in (pareto, position, forest, lengths, survival, layers):
        for task in run.tasks:
            figure = kind(run, model, task)
            if figure is not None:
                out.append(figure)
    return out
