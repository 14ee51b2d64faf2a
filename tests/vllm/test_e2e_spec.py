"""The end-to-end benchmark of drafts without vLLM: arms, bytes, what it counts, its report."""

import json
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from replayssm_quant.backends.vllm.options import KEY, parse
from replayssm_quant.kernels.bench import e2e, e2e_spec
from replayssm_quant.state.geometry import read_geometry


@pytest.mark.parametrize("model", e2e.MODELS)
@pytest.mark.parametrize("arm", e2e_spec.ARMS)
def test_every_arm_is_plain_vllm_or_valid_options(model: str, arm: str) -> None:
    args = Namespace(
        model=model,
        batches=[(8, 80), (2, 80)],
        drafts=4,
        accepted=2.5,
        length=2048,
        memory_share=0.1,
        cache_gib=0.25,
        engine='{"seed": 3}',
        profile=None,
        rehearse=False,
    )
    found = e2e_spec.engine_arguments(Path("m"), e2e_spec.arm_of(arm), args)
    width = 1 if arm == "plain" else 5
    assert found["compilation_config"]["cudagraph_capture_sizes"] == [2 * width, 8 * width]
    assert found["kv_cache_memory_bytes"] <= 2**28 and found["seed"] == 3
    spec = found.get("speculative_config")
    assert (spec is None) == (arm == "plain")
    if spec is not None:
        assert spec["rejection_sample_method"] == "synthetic"
        assert (spec["num_speculative_tokens"], spec["synthetic_acceptance_length"]) == (4, 2.5)
    options = parse(found["additional_config"])
    assert (
        (options is None) == (arm in ("plain", "vllm")) == (KEY not in found["additional_config"])
    )
    if options is None:
        assert found["mamba_ssm_cache_dtype"] == "float32"
    else:
        options.layer_configs(e2e.MODELS[model])


def test_plain_vllm_keeps_a_state_for_each_draft() -> None:
    layers = read_geometry(e2e.MODELS["nemotron-3-nano-4b"]).layers.values()
    (layer, *_) = layers
    plain, vllm, ours = (e2e_spec.arm_of(a) for a in ("plain", "vllm", "fp32"))
    assert [e2e_spec.states(a, 4) for a in (plain, vllm, ours)] == [1, 5, 1]
    # 96 heads of 80 x 128 in fp32, three columns of the convolution and one for each draft
    assert e2e_spec.page_bytes(layer, plain, 4) == 3_990_528
    assert e2e_spec.page_bytes(layer, vllm, 4) == 3_990_528 + 4 * layer.conv_channels * 2
    grown = e2e_spec.page_bytes(layer, ours, 4) - e2e_spec.page_bytes(layer, vllm, 4)
    assert 0 < grown < 0.12 * 3_990_528  # a ring of 16 + 5 inputs
    room = [e2e_spec.cache_bytes("nemotron-3-nano-4b", a, 64, 2048, 4) for a in (plain, vllm, ours)]
    assert room[2] == pytest.approx(room[0], rel=0.1) and room[1] > 3 * room[0]


def test_graphs_are_captured_where_room_ends() -> None:
    assert e2e_spec.captured([8, 512], {8: 8, 512: 600}) == [8, 512]
    found = e2e_spec.captured([8, 512], {8: 8, 512: 262})
    assert found[0] == 8 and found[-1] == 512
    near = found[1:-1]
    assert near[0] <= 0.95 * 262 and near[-1] >= 1.03 * 262
    assert {b - a for a, b in zip(near, near[1:], strict=False)} == {8}
    assert e2e_spec.captured([16], {16: 3}) == [8, 16]
    vllm = e2e_spec.arm_of("vllm")
    cache = e2e_spec.cache_bytes("qwen3.5-4b", vllm, 98, 300, 4)
    assert e2e_spec.room_of(cache, "qwen3.5-4b", vllm, 300, 4) == 100  # two spare


def steps(*parts: tuple[int, int, int]) -> list[tuple[float, int, int, bool]]:
    """(steps, requests, tokens of a request) one after the other, a step in 10 ms; all end last."""
    out: list[tuple[float, int, int, bool]] = []
    for count, requests, each in parts:
        for _ in range(count):
            out.append((len(out) * 0.01, requests, requests * each, False))
    return [*out, (len(out) * 0.01, 1, 1, True)]


def test_the_window_counts_the_steps_that_ran_together() -> None:
    # two steps of prefills, 30 of all requests, and what is behind the first that ended
    seen = [*steps((2, 1, 1), (30, 4, 3)), (0.9, 3, 9, False)]
    row = e2e_spec.window(seen, 6, 100)
    assert (row["batch"], row["running"], row["steps"]) == (6, 4, 27)
    assert row["step_ms"] == pytest.approx(10)
    assert row["tokens_a_step"] == pytest.approx(3)
    assert row["tokens_per_s"] == pytest.approx(1200)


@pytest.mark.parametrize("parts", [((5, 4, 3),), ((1, 4, 1), (20, 2, 1), (12, 4, 3), (20, 2, 3))])
def test_a_window_that_is_too_short_or_broken_is_refused(parts: tuple) -> None:
    with pytest.raises(RuntimeError, match="ran together"):
        e2e_spec.window(steps(*parts), 4, 100)


def row(arm: str, tokens_per_s: float, room: float, batch: int = 512) -> dict:
    layer = next(iter(read_geometry(e2e.MODELS["qwen3.5-4b"]).layers.values()))
    drafts = 0 if arm == "plain" else 4
    made = {"op": e2e_spec.OP, "model": "qwen3.5-4b", "arm": arm, "runner": "v2", "batch": batch}
    made |= {"drafts": drafts, "accepted": 3.0 if drafts else 1.0, "running": batch, "steps": 99}
    made |= {"step_ms": 20.0, "tokens_a_step": 3.0, "tokens_per_s": tokens_per_s, "cache_gib": 50.0}
    made |= {"state_bytes": e2e_spec.page_bytes(layer, e2e_spec.arm_of(arm), 4)}
    made |= {"max_concurrency": room, "concurrency_tokens": 2048, "date": "2026-01-02"}
    return made | dict.fromkeys(("gpu", "commit", "vllm", "torch", "triton"), "x")


def test_the_report_has_its_ratios_and_targets(tmp_path: Path) -> None:
    rows = [row("plain", 900.0, 200.0), row("vllm", 1000.0, 100.0), row("P8+4", 2100.0, 300.0)]
    rows.append(row("fp32", 1500.0, 180.0) | {"error": "out of memory"})
    (tmp_path / f"{e2e_spec.OP}-x-2026-01-02.json").write_text(json.dumps(rows))
    text = e2e_spec.report(tmp_path, tmp_path).read_text()
    line = next(x for x in text.splitlines() if x.startswith("| P8+4"))
    assert [c.strip() for c in line.strip("|").split("|")][:5] == [
        "P8+4",
        "v2",
        "512",
        "2,100",
        "2.10",
    ]
    assert "| 600 |" in line  # 300 in 50 GiB are 600 in 100 GiB
    targets = [x for x in text.splitlines() if x.startswith(("| x vllm", "| room,"))]
    assert ["yes" in x for x in targets] == [True, False]
    assert "2.10" in targets[0] and "3.00" in targets[1]
    assert "fp32 failed: out of memory" in text and "requests of\n2,048 tokens" in text
    assert "†" not in text.split("## qwen")[1]
    later = row("P8+4", 2200.0, 300.0) | {"commit": "fedcba98"}
    (tmp_path / f"{e2e_spec.OP}-x-2026-01-02.json").write_text(json.dumps([*rows, later]))
    text = e2e_spec.report(tmp_path, tmp_path).read_text()
    assert "| P8+4 (fedcba9) | v2 | 512 | 2,200 | 2.20† |" in text
    assert "| P8+4 (x) | v2 | 512 | 2,100 | 2.10 |" in text
    with pytest.raises(ValueError, match="no e2e_spec"):
        e2e_spec.report(tmp_path / "none", tmp_path)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        (["--arms", "fp33"], "unknown arm 'fp33'"),
        (["--drafts", "8"], "use 1 to 7"),
        (["--accepted", "6"], "use 1 to 5"),
        (["--batches", "8:3000"], "raise it"),
        (["--batches", "8:20"], "80 tokens or more"),
    ],
)
def test_bad_arguments_are_refused(
    argument: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        e2e_spec.main(argument)
    assert stopped.value.code == 2 and message in capsys.readouterr().err


# A stand-in for a child: says what vLLM says, then answers each line or fails.
CHILD = """#!{python}
import json, os, sys
job = json.loads(sys.argv[-1])
options = job["engine"]["additional_config"].get("replayssm_quant")
if options:
    print("INFO replayssm_quant: explicit settings, state X")
print("INFO Maximum concurrency for 2,048 tokens per request: 310.22x")
print("READY", flush=True)
found = {{"gpu": "NVIDIA H200", "vllm": "0.33.0", "torch": "2.11", "runner": "v2", "rows": []}}
for line in sys.stdin:
    if options and options["update_dtype"] == "P4+8":
        print("RuntimeError: out of memory")
        sys.exit(1)
    row = json.loads(line)
    row |= {{"running": row["batch"], "steps": 50, "step_ms": 10.0, "tokens_a_step": 3.0}}
    found["rows"].append(row | {{"tokens_per_s": row["batch"] * 300.0}})
    open(job["out"] + ".x", "w").write(json.dumps(found))
    os.replace(job["out"] + ".x", job["out"])
"""


def test_engines_are_driven_through_all_points(tmp_path: Path) -> None:
    python = tmp_path / "child"
    python.write_text(CHILD.format(python=sys.executable))
    python.chmod(0o755)
    out = tmp_path / "out.json"
    arguments = ["--python", str(python), "--out", str(out), "--batches", "8:80,2:90"]
    arguments += ["--arms", "vllm,fp32,P4+8", "--parallel", "2", "--seconds", "60", "--drafts", "3"]
    assert e2e_spec.main(arguments) == 0
    rows = json.loads(out.read_text())
    good = [r for r in rows if "error" not in r]
    assert [(r["arm"], r["batch"]) for r in good] == [
        ("vllm", 8),
        ("vllm", 2),
        ("fp32", 8),
        ("fp32", 2),
    ]
    assert {(r["arm"], r["state"]) for r in good} == {
        ("vllm", "plain vLLM"),
        ("fp32", "explicit settings, state X"),
    }
    first = good[0]
    assert (first["op"], first["drafts"], first["accepted"]) == (e2e_spec.OP, 3, 3.0)
    assert (first["max_concurrency"], first["concurrency_tokens"]) == (310.22, 2048)
    (bad,) = (r for r in rows if "error" in r)
    assert bad["arm"] == "P4+8" and "out of memory" in bad["error"]
