"""The plan command and the byte accounting behind it, against numbers from elsewhere."""

import json
import subprocess
import sys

import pytest
import torch

from replayssm_quant.config import StateConfig
from replayssm_quant.plan import main, parse_bytes
from replayssm_quant.state.budget import budget, human
from replayssm_quant.state.cache import StatePool
from replayssm_quant.state.geometry import LayerGeometry, ModelGeometry
from replayssm_quant.state.known import KNOWN
from replayssm_quant.state.layout import CURSOR_BYTES, StateLayout

SPLIT = StateConfig.from_flags("fp8")


def plan(capsys, *args: str) -> dict:
    assert main([*args, "--format", "json"]) == 0
    return json.loads(capsys.readouterr().out)


# Megabytes a request as the model reports and serving logs give them.
FP32_MEGABYTES = {
    "nemotron-3-nano-4b": 82.6,
    "nemotron-3-nano-30b": 48.2,
    "nemotron-3-super-120b": 167.8,
    "nemotron-3-ultra-550b": 402.7,
}


@pytest.mark.parametrize("name", FP32_MEGABYTES)
def test_fp32_state_of_published_models(capsys, name):
    out = plan(capsys, "--model", name)
    assert round(out["bytes_per_request"]["fp32"] / 1e6, 1) == FP32_MEGABYTES[name]


def test_fp32_and_convolution_of_a_serving_slot(capsys):
    """Qwen3.6-27B: 153.9 MB a slot, state and convolution together."""
    got = plan(capsys, "--model", "qwen3.6-27b")["bytes_per_request"]
    assert round((got["fp32"] + got["conv"]) / 1e6, 1) == 153.9


# Bytes of one layer and request at L = 16 and a bf16 ring, from an engine's own page sizes. Ours
# differ where noted: scales of the fp8 checkpoint and nvfp4's fp32 scale a 16-row tile come on top.
# The engine's GDN ring is d, k, g; ours k, v, g, beta, 1 / |k|, so beta (HV) and 1 / |k| (HK) more.
ENGINE = {
    #                        conv    fp32       fp16       fp8        nvfp4    mxfp4    ring
    "nemotron-3-nano-4b": (58_368, 3_932_160, 1_966_080, 983_040, 552_960, 522_240, 284_672),
    "nemotron-3-super-120b": (61_440, 4_194_304, 2_097_152, 1_048_576, 589_824, 557_056, 303_104),
    "qwen3.5-4b": (49_152, 2_097_152, 1_048_576, 524_288, 294_912, 278_528, 198_656),
}


@pytest.mark.parametrize("name", ENGINE)
def test_layer_bytes_equal_an_engines_pages(capsys, name):
    conv, fp32, fp16, fp8, nvfp4, mxfp4, ring = ENGINE[name]
    layer = KNOWN[name].layer
    if layer.kind == "gdn":
        ring += 16 * 4 * (layer.heads + layer.groups)
    got = {}
    for update, output in (("fp16", "nvfp4"), ("fp8", "mxfp4")):
        args = ("--model", name, "--update-dtype", update, "--output-dtype", output)
        (got[update],) = plan(capsys, *args)["layers"]
    parts = got["fp16"]["bytes"]
    assert (parts["conv"], parts["fp32"], parts["ring"]) == (conv, fp32, ring)
    assert parts["checkpoint"] == fp16
    assert parts["copy"] + parts["scales"] == nvfp4 + 4 * layer.heads * -(-layer.rows // 16)
    parts = got["fp8"]["bytes"]
    assert parts["checkpoint"] == fp8
    assert parts["copy"] + parts["scales"] == mxfp4 + 4 * layer.heads * layer.rows


# (update, output) -> stored and moved bytes an element, ring apart, heads of 64 x 128, L = 16:
# the traffic model ((L - 1) O + 2 U + O) / L, or ((L - 1) high + 2 (high + low)) / L for planes.
MOVED = {
    ("fp32", None): (4.00, 4.25),
    ("fp16", "same"): (2.00, 2.13),
    ("fp8", "same"): (1.03, 1.10),
    ("fp16", "nvfp4"): (2.56, 0.81),
    ("fp8", "nvfp4"): (1.59, 0.69),
    ("P4+4", None): (1.06, 0.66),
    ("P4+8", None): (1.56, 0.72),
    ("P4+8/row", None): (1.53, 0.69),
    ("P8+4", None): (1.53, 1.16),
}


@pytest.mark.parametrize(("update", "output"), MOVED)
def test_bytes_an_element_and_token(update, output):
    geometry = LayerGeometry("mamba2", 16, 64, 128, 1)
    layout = StateLayout(geometry, StateConfig.from_flags(update, output))
    stored, moved = MOVED[update, output]
    elements = geometry.elements
    assert (layout.checkpoint_bytes + layout.copy_bytes) / elements == pytest.approx(
        stored, abs=0.006
    )
    assert layout.state_bytes_per_step / elements == pytest.approx(moved, abs=0.006)
    # the ring: 0.154 moved and 0.29 stored, of x, dt and a sixteenth of B
    assert layout.ring_bytes / elements == pytest.approx(0.29, abs=0.005)
    assert layout.ring_bytes_per_step / elements == pytest.approx(0.154, abs=0.003)


def test_ring_of_gated_deltanet():
    """0.64 stored and .236 moved hold d as well; without it (a bf16 v's worth) ours is smaller."""
    geometry = LayerGeometry("gdn", 16, 128, 128, 8)
    layout = StateLayout(geometry, SPLIT)
    d = 16 * 16 * 128 * 2
    assert (layout.ring_bytes + d) / geometry.elements == pytest.approx(0.64, abs=0.006)


def test_plain_fp32_moves_eight_bytes(capsys):
    out = plan(capsys, "--model", "qwen3.5-4b", "--update-dtype", "fp32", "--buffer-len", "1")
    elements = out["bytes_per_request"]["fp32"] / 4
    assert out["bytes_per_token"]["fp32"] == 8 * elements
    assert out["bytes_per_token"]["total"] == 8 * elements and out["moved_ratio"] == 1.0


@pytest.mark.parametrize("ring", ["bf16", "fp32"])
def test_plan_equals_what_a_pool_allocates(ring):
    layers = {0: LayerGeometry("mamba2", 6, 20, 32, 3), 3: LayerGeometry("gdn", 4, 24, 32, 2)}
    configs = {0: SPLIT, 3: StateConfig.from_flags("P8+4")}
    pool = StatePool(layers, configs, 7, ring_storage=ring)
    tensors = [*pool.pages.values(), pool.valid, pool.offset, pool.position, pool.key]
    allocated = sum(t.numel() * t.element_size() for t in tensors)
    got = budget("x", ModelGeometry("x", layers, 5), configs, ring_storage=ring)
    assert 7 * got.request == allocated
    assert got.request == pool.bytes_per_slot + CURSOR_BYTES
    assert got.recurrent_layers == 2 and len(got.layers) == 2


def test_requests_that_fit_and_batch(capsys):
    args = ("--model", "nemotron-3-super-120b", "--memory", "80GiB", "--batch", "256")
    out = plan(capsys, *args)
    one = out["bytes_per_request"]["state"] + out["bytes_per_request"]["conv"]
    fit = out["memory"]["requests"]
    assert fit * one <= 80 * 2**30 < (fit + 1) * one
    assert fit > 1.9 * out["memory"]["requests_fp32"]
    assert out["batch"]["bytes"] == 256 * one
    assert out["batch"]["bytes_per_step"] == 256 * out["bytes_per_token"]["total"]


def test_ranks_share_the_state(capsys):
    whole, part = (
        plan(capsys, "--model", "nemotron-3-super-120b", "--tp", tp)["bytes_per_request"]
        for tp in ("1", "4")
    )
    for key in ("checkpoint", "copy", "scales", "ring", "conv", "fp32"):
        assert part[key] * 4 == whole[key]


def test_markdown_says_what_json_says(capsys):
    args = ["--model", "nemotron-3-nano-4b", "--memory", "80GiB", "--rotate"]
    out = plan(capsys, *args)
    assert main(args) == 0
    text = capsys.readouterr().out
    state = out["bytes_per_request"]["state"]
    assert f"| {state:,} | **{100 * out['ratio']:.1f} %** |" in text
    assert f"{out['memory']['requests']:,} requests" in text and human(state) in text
    assert "21 of 42 layers" in text and "e4m3 SR rot" in text
    assert "82.6 MB" in text and "published config.json" in text


def test_folder_and_shipped_models(capsys, tmp_path):
    values = {"model_type": "nemotron_h", "hybrid_override_pattern": "M*M-", "mamba_num_heads": 16}
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text(json.dumps(values))
    out = plan(capsys, "--model", str(tmp_path / "mine"))
    assert out["model"] == "mine" and out["recurrent_layers"] == 2
    assert out["layers"][0]["indices"] == [0, 2]
    from replayssm_quant.models import shipped

    for name in shipped():
        assert plan(capsys, "--model", name)["model"] == name


def test_recipe_sets_the_formats(capsys):
    out = plan(capsys, "--model", "qwen3.5-4b", "--recipe", "qwen3.5")
    assert out["layers"][0]["label"].startswith("P8+4")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--model", "qwen3.5-5b"], "did you mean 'qwen3.5-4b'"),
        (["--model", ""], "unknown model ''"),
        (["--model", "/nowhere"], "unknown model '/nowhere'"),
        (["--model", "qwen3.5-4b", "--update-dtype", "fp9"], "unknown state format 'fp9'"),
        (["--model", "qwen3.5-4b", "--output-dtype", "fp32"], "wider than"),
        (["--model", "qwen3.5-4b", "--block-size", "7"], "block 7"),
        (["--model", "qwen3.5-4b", "--buffer-len", "0"], "buffer_len 0"),
        (["--model", "qwen3.5-4b", "--buffer-len", "x"], "invalid int value: 'x'"),
        (["--model", "qwen3.5-4b", "--tp", "5"], "32 heads do not divide over 5"),
        (["--model", "qwen3.5-4b", "--tp", "0"], "--tp 0"),
        (["--model", "qwen3.5-4b", "--batch", "-1"], "--batch -1"),
        (["--model", "qwen3.5-4b", "--memory", "80 parsecs"], "memory '80 parsecs'"),
        (["--model", "qwen3.5-4b", "--ring-dtype", "fp8"], "ring dtype 'fp8'"),
        (["--model", "qwen3.5-4b", "--recipe", "qwen3.5", "--rotate"], "--recipe and --rotate"),
        (["--model", "qwen3.5-4b", "--recipe", "none-such"], "none-such"),
        (["--model", "qwen3.5-4b", "--format", "pdf"], "invalid choice: 'pdf'"),
        ([], "required: --model"),
    ],
)
def test_bad_input_is_one_line_and_two(capsys, args, words):
    try:
        code = main(args)
    except SystemExit as stop:
        code = stop.code
    out, err = capsys.readouterr()
    assert code == 2 and out == ""
    assert err.startswith("error: ") and err.count("\n") == 1 and words in err


@pytest.mark.parametrize("text", ["{", "[]", '{"model_type": "llama"}'])
def test_bad_folder_is_one_line_and_two(capsys, tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    assert main(["--model", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_amounts_of_memory():
    assert parse_bytes("80GiB") == 80 * 2**30 and parse_bytes("1.5 gb") == 1_500_000_000
    assert parse_bytes("640") == 640 and parse_bytes("2TiB") == 2**41
    for text in ("", "GiB", "-1GB", "0", "1 Gb/s"):
        with pytest.raises(ValueError, match="is not an amount of bytes"):
            parse_bytes(text)


def test_planning_needs_no_torch():
    code = (
        "import sys; from replayssm_quant.plan import main; "
        "assert main(['--model', 'qwen3.5-4b', '--memory', '1GiB']) == 0; "
        "assert not {'torch', 'transformers', 'triton'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "24 of 32 layers" in done.stdout


def test_known_geometries_fit_the_formats():
    for name, known in KNOWN.items():
        assert known.recurrent <= known.total and name == name.lower()
        for update in ("fp8", "P4+8", "P8+4"):
            layout = StateLayout(known.layer, StateConfig.from_flags(update))
            page = torch.zeros(1, layout.page_bytes, dtype=torch.uint8)
            assert layout.views(page).ckpt.shape[1] == known.layer.heads
