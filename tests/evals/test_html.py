"""The page and its figures show the record's numbers, and load nothing."""

import json
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from replayssm_quant import report as door
from replayssm_quant.evals import html, matrix, plots, report
from replayssm_quant.evals.schema import write_json


@pytest.fixture(scope="module")
def run(tiny_gdn, tmp_path_factory):
    """A real run: four arms and one layer on its own, teacher-forced counting and text."""
    folder = tmp_path_factory.mktemp("page")
    argv = ["formats", "--model", str(tiny_gdn), "--out", str(folder), "--device", "cpu"]
    argv += ["--arms", "P8+4:rot,fp8:same,fp8:nvfp4,fp8:same:rn@1", "--tasks", "count,text"]
    args = matrix.parser().parse_args([*argv, "--seeds", "2", "--limit", "3"])
    plan = matrix.make_plan(args, argv)
    for spec in plan.specs:
        spec.settings["length"] = 96
    return matrix.measure(plan, folder)


@pytest.fixture(scope="module")
def drawn(run):
    """The run's figures, drawn once."""
    return html.draw({"results.json": run})


class Reader(HTMLParser):
    """Tags that stay open, text of table cells, and every address that would be fetched."""

    def __init__(self):
        super().__init__()
        self.open, self.cells, self.addresses, self.tags = [], [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        values = dict(attrs)
        self.addresses += [values[k] for k in ("src", "href", "xlink:href") if values.get(k)]
        if tag not in ("meta", "br", "path", "use", "rect", "circle"):
            self.open.append(tag)
        if tag in ("td", "th"):
            self.cells.append("")

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if self.open and self.open[-1] == tag:
            self.open.pop()

    def handle_endtag(self, tag):
        if self.open and self.open[-1] == tag:
            self.open.pop()
        elif tag not in ("path", "use", "rect", "circle"):
            raise AssertionError(f"</{tag}> closes nothing; open: {self.open[-3:]}")

    def handle_data(self, data):
        if self.open and self.open[-1] in ("td", "th"):
            self.cells[-1] += data


def test_the_page_is_whole_and_loads_nothing(run, drawn):
    text = html.page({"results.json": run}, drawn)
    reader = Reader()
    reader.feed(text)
    assert reader.open == [] and "script" not in reader.tags and "link" not in reader.tags
    assert all(a.startswith("#") for a in reader.addresses)
    assert not re.search(r"url\((?!#)|@import", text)
    assert "prefers-color-scheme:dark" in text and 'name="viewport"' in text
    for row in report.overview(run, run.models[0]):
        cells = report.overview_cells(row)
        assert set(cells) <= set(reader.cells) | {"–"}, cells
    assert reader.tags.count("figure") == len(drawn[0][("results.json", "tiny-gdn")]) >= 4


def test_every_figure_is_xml_with_a_title_and_its_data(run, drawn):
    found = drawn[0][("results.json", "tiny-gdn")]
    kinds = {f.title.partition(":")[0] for f in found}
    assert kinds >= {"Divergence against bytes", "Divergence by position", "Change of accuracy"}
    labels = {a.label for a in run.arms[2:]}
    for f in found:
        root = ElementTree.fromstring(f.svg)
        assert root.get("role") == "img" and root[0].text == f.title and root[1].text == f.note
        assert labels <= {row[0] for row in f.rows}
        assert all(len(row) == len(f.head) for row in f.rows)
        assert "#0" not in f.svg and "var(--ink)" in f.svg
    alone = plots.standalone(found[0])
    ElementTree.fromstring(alone)
    assert "prefers-color-scheme:dark" in alone


def test_the_best_points_beat_all_cheaper_ones(run):
    model = run.models[0]
    figure = plots.pareto(run, model, run.tasks[1])
    kld = {
        a.label: (a.bytes[model.name].stored, c.kld.mean)
        for c in run.comparisons
        if c.task == run.tasks[1].name and c.role != "floor"
        for a in run.arms
        if a.name == c.arm
    }
    for label, _, _, best in figure.rows:
        mine = kld[label]
        beaten = any(b < mine and b[1] <= mine[1] for b in kld.values() if b[0] <= mine[0])
        assert (best == "yes") == (not beaten), label


def test_a_folder_becomes_three_reports(run, tmp_path, capsys):
    write_json(tmp_path / "results.json", run)
    rows = [
        dict(op="op", geometry="g", batch=8, design=d, phase="mix", time_us=t, gbps=g, gpu="GPU")
        for d, t, g in (("vllm-native", 20.0, 100.0), ("ours", 10.0, 50.0))
    ]
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench" / "speed.json").write_text(json.dumps(rows))
    assert door.main([str(tmp_path), "--bench", str(tmp_path / "bench")]) == 0
    assert {p.rsplit("/", 1)[1] for p in capsys.readouterr().out.split()} == set(door.RENDERED)
    data = json.loads((tmp_path / "report.json").read_text())
    one = data["runs"][tmp_path.name]
    assert [r["state"] for r in one["models"]["tiny-gdn"]] == [a.label for a in run.arms[1:]]
    # 100 GB/s for 20 us over 8 rows
    assert data["speed"][0]["rows"][1][:3] == ["vllm-native", "250 kB", "0.4 M/s"]
    page = (tmp_path / "report.html").read_text()
    assert "Bytes against speed" in page and page.count("<details") >= len(one["figures"])
    assert (tmp_path / "report.md").read_text() == report.markdown(run)


@pytest.mark.parametrize(
    ("bench", "message"), [("{}", "no kernel timings"), ("[", "cannot be read as JSON")]
)
def test_wrong_timings_are_refused_before_any_work(run, tmp_path, bench, message, capsys):
    write_json(tmp_path / "results.json", run)
    (tmp_path / "b.json").write_text(bench)
    assert door.main([str(tmp_path), "--bench", str(tmp_path / "b.json")]) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "report.md").exists()


def test_without_matplotlib_the_remedy_is_named(run, tmp_path, monkeypatch, capsys):
    write_json(tmp_path / "results.json", run)
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    assert door.main([str(tmp_path)]) == 2
    assert "replayssm-quant[report]" in capsys.readouterr().err
    assert door.main([str(tmp_path), "--format", "md"]) == 0


def test_recipes_are_named_and_missing_evidence_is_said(run):
    model = run.models[0].model_copy(update={"model_type": "qwen3_5_text"})
    names = {r["state"]: r["recipes"] for r in report.overview(run, model)}
    assert names["P8+4 SR rot"] == ["qwen3.5"] and names["e4m3 SR shared"] == []
    changed = run.model_copy(deep=True)
    changed.arms[2].recipe = "qwen3.5"
    assert any("no committed evidence on tiny-gdn" in n for n in report.notes(changed))
    assert not any("no committed evidence" in n for n in report.notes(run))


def test_single_layers_become_a_heat_map_and_nothing_else(run, drawn):
    changed = run.model_copy(deep=True)
    formats = ("P8+4 SR rot", "e4m3 SR + nvfp4")
    names = {a.label: a.name for a in changed.arms}
    wanted = {}
    for layer in (1, 3):
        for label in formats:
            arm = next(a for a in run.arms if a.label == label)
            name = f"layer{layer}_{arm.name}"
            changed.arms.append(
                arm.model_copy(update={"name": name, "layers": {str(layer): arm.config}})
            )
            old = next(c for c in run.comparisons if (c.task, c.arm) == ("text", names[label]))
            new = old.model_copy(deep=True, update={"arm": name})
            new.kld.mean = wanted[(label, layer)] = layer * 10.0 ** -len(label)
            changed.comparisons.append(new)
    before = {f.title for f in drawn[0][("results.json", "tiny-gdn")]}
    found = {f.title: f for f in plots.figures(changed, run.models[0])}
    title = "Divergence by layer and format: tiny-gdn, text"
    assert set(found) == before | {title}
    assert found[title].head == ["state", "layer 1", "layer 3"]
    for row in found[title].rows:
        assert row[1:] == [report.nats(wanted[(row[0], layer)]) for layer in (1, 3)]


@pytest.fixture(scope="module")
def free(tiny_gdn, tmp_path_factory):
    """A real run of the free-running matrix, shortened."""
    folder = tmp_path_factory.mktemp("free")
    argv = ["free", "--model", str(tiny_gdn), "--out", str(folder), "--device", "cpu"]
    argv += ["--arms", "P4+4:rot,nvfp4:same"]
    args = matrix.parser().parse_args([*argv, "--seeds", "1", "--limit", "3"])
    plan = matrix.make_plan(args, argv)
    for spec, record in zip(plan.specs, plan.tasks, strict=True):
        short = {"limit": 80, "length": 24} if spec.task == "write" else {"length": 320}
        spec.settings.update(short)
        record.settings.update(short)
    return matrix.measure(plan, folder)


def test_free_running_tasks_show_lengths_and_where_responses_differ(free):
    assert {t.name: t.metric for t in free.tasks} == {"write": "ended", "tally-end": "accuracy"}
    found = plots.figures(free, free.models[0])
    kinds = [f.title.partition(":")[0] for f in found]
    assert kinds.count("Response length") == kinds.count("Responses that still equal fp32's") == 2
    assert kinds.count("Change of accuracy") == 1  # a share that ends is no accuracy
    for f in found:
        ElementTree.fromstring(f.svg)
        assert [row[0] for row in f.rows][:1] == ["fp32 again"]
        assert all(len(row) == len(f.head) for row in f.rows)
    for c in free.comparisons:
        assert c.length is not None and c.length_change is not None
        shares = [s.same for s in c.survival]
        assert shares == sorted(shares, reverse=True)
        if c.role == "floor":
            assert shares and set(shares) == {1.0} and c.first_difference is None
    text = report.markdown(free)
    assert "ended, fp32 -> it %" in text and "change of length % [95 %]" in text
