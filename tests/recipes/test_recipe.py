"""The recipe schema, inheritance, matching and command line; and every shipped recipe."""

import subprocess
import sys
import textwrap

import pytest

from replayssm_quant import recipe as rc
from replayssm_quant.state.geometry import LayerGeometry, ModelGeometry

NEMOTRON = {
    "model_type": "nemotron_h",
    "architectures": ["NemotronHForCausalLM"],
    "hidden_size": 3136,
    "layer_types": ["linear_attention", "mlp", "full_attention", "linear_attention"],
    "num_hidden_layers": 4,
    "mamba_num_heads": 96,
    "mamba_head_dim": 80,
    "ssm_state_size": 128,
    "n_groups": 8,
}
QWEN = {
    "model_type": "qwen3_5_text",
    "layer_types": ["linear_attention", "full_attention"],
    "num_hidden_layers": 2,
    "linear_num_value_heads": 32,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}


def write(tmp_path, text, name="mine.yaml"):
    path = tmp_path / name
    path.write_text(textwrap.dedent(text))
    return str(path)


@pytest.mark.parametrize("name", sorted(rc.shipped()))
def test_every_shipped_recipe_resolves_and_fits_its_kind(name):
    resolved = [rc.resolve(f"{name}/{v}") for v in ("default", "compact", "quality", "published")]
    kind = "gdn" if resolved[0].settings["update"]["format"] == "P8+4" else "mamba2"
    geometry = ModelGeometry("x", {3: LayerGeometry(kind, 8, 64, 128, 2)}, 4)
    digests = set()
    for r in resolved:
        config = r.configs(geometry)[3]
        assert config.buffer_len == 16 and config.rounding == "sr"
        digests.add(r.digest)
    assert len(digests) == 4
    sizes = {r.variant: r.config().update.nbytes(8, 64, 128) for r in resolved}
    assert sizes["compact"] <= sizes["published"]


def test_the_families_the_users_asked_for_are_there():
    asked = (
        "nemotron-3 nemotron-nano-v2 falcon-h1 granite-4 bamba zamba2 mamba2 qwen3.5 "
        "qwen3-next olmo-hybrid"
    )
    assert set(asked.split()) <= set(rc.shipped())


def test_auto_picks_the_most_specific_match():
    assert rc.resolve("auto", NEMOTRON).name == "nemotron-3"
    puzzle = NEMOTRON | {"model_type": "nemotron_h_puzzle", "ssm_state_size": 96}
    assert rc.resolve("auto", puzzle).name == "nemotron-3"
    v2 = NEMOTRON | {"mamba_num_heads": 128}
    assert rc.resolve("auto/compact", v2).label == "nemotron-nano-v2/compact"
    assert rc.resolve("auto", QWEN).name == "qwen3.5"
    assert rc.resolve("auto", QWEN | {"model_type": "qwen3_next"}).name == "qwen3-next"


def test_auto_without_a_model_says_so():
    with pytest.raises(rc.RecipeError, match="needs a model"):
        rc.resolve("auto")


def test_layer_rules_apply_in_order(tmp_path):
    path = write(
        tmp_path,
        """
        schema: 1
        name: mine
        description: layers
        extends: mamba2
        settings:
          layers:
            - {select: "all", set: {update: {format: fp16}, output: {format: nvfp4}}}
            - {select: "first:1", set: {update: {format: fp32}, output: {format: same}}}
            - {select: "7-9", set: {rotate: false}}
        """,
    )
    layers = {i: LayerGeometry("mamba2", 4, 64, 128, 1) for i in (1, 4, 8)}
    configs = rc.resolve(path).configs(ModelGeometry("x", layers, 10), seed=5)
    assert configs[1].update.name == "fp32" and configs[1].is_shared
    assert configs[4].update.name == "fp16" and configs[4].output.name == "nvfp4"
    assert configs[4].rotate and not configs[8].rotate
    assert {c.seed for c in configs.values()} == {5}


def test_a_new_format_drops_the_parents_block_and_output(tmp_path):
    path = write(
        tmp_path,
        """
        schema: 1
        name: mine
        description: blocks
        settings: {update: {format: e4m3, block: 32}, output: {format: nvfp4}}
        variants:
          other: {update: {format: int8}}
        """,
    )
    assert rc.resolve(path).config().update.name == "e4m3/b32"
    other = rc.resolve(f"{path}/other")
    assert other.config().update.name == "int8"
    assert "output" not in other.settings


def test_evidence_is_not_inherited_by_changed_settings(tmp_path):
    path = write(
        tmp_path,
        """
        schema: 1
        name: mine
        description: evidence
        settings:
          update: {format: fp16}
          evidence: [{model: m, result: r.json}]
        variants:
          other: {update: {format: P4+8}}
        """,
    )
    assert rc.resolve(path).has_evidence("m")
    assert not rc.resolve(f"{path}/other").has_evidence("m")


def test_the_digest_ignores_text_and_gates(tmp_path):
    body = "schema: 1\nname: mine\ndescription: {}\nsettings: {{update: {{format: fp16}}{}}}\n"
    plain = rc.resolve(write(tmp_path, body.format("a", ""), "a.yaml"))
    gates = ", gates: [{metric: kld_mean, threshold: 0.1}]"
    gated = rc.resolve(write(tmp_path, body.format("b", gates), "b.yaml"))
    rotated = rc.resolve(write(tmp_path, body.format("c", ", rotate: true"), "c.yaml"))
    assert plain.digest == gated.digest != rotated.digest
    assert gated.gates[0].threshold == 0.1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("schema: 1\nname: a\ndescription: b\nsettngs: {}", "unknown key 'settngs'.*'settings'"),
        (
            "schema: 1\nname: a\ndescription: b\nsettings: {update: {formt: fp16}}",
            "'settings.update.formt'.*'format'",
        ),
        (
            "schema: 1\nname: a\ndescription: b\nvariants: {c: {replay: {buffer: 3}}}",
            "'variants.c.replay.buffer'.*'buffer_len'",
        ),
        (
            "schema: 1\nname: a\ndescription: b\nsettings: {update: {format: fp61}}",
            "unknown state format 'fp61'.*'fp16'",
        ),
        (
            "schema: 1\nname: a\ndescription: b\nsettings: {update: {format: fp16}, "
            "replay: {buffer_len: 0}}",
            "buffer_len.*given: 0",
        ),
        ("schema: 2\nname: a\ndescription: b", "schema"),
        ("schema: 1\nname: a\ndescription: b", "no update format"),
        ("a: [", "line 1.*YAML"),
        ("- 1", "a recipe is a mapping"),
        (
            "schema: 1\nname: a\ndescription: b\nsettings: {update: {format: fp16}, "
            "layers: [{select: most, set: {rotate: true}}]}",
            "'most' is not all",
        ),
        ("schema: 1\nname: a\ndescription: b\nextends: mamba3", "unknown recipe 'mamba3'.*mamba2"),
    ],
)
def test_a_bad_recipe_gives_one_clear_line(tmp_path, text, message):
    with pytest.raises(rc.RecipeError, match=message) as error:
        rc.resolve(write(tmp_path, text))
    assert "\n" not in str(error.value)


def test_a_block_that_does_not_fit_names_the_layer(tmp_path):
    text = "schema: 1\nname: a\ndescription: b\nsettings: {update: {format: e4m3, block: 32}}"
    layers = {2: LayerGeometry("mamba2", 4, 64, 48, 1)}
    with pytest.raises(rc.RecipeError, match="layer 2.*48"):
        rc.resolve(write(tmp_path, text)).configs(ModelGeometry("x", layers, 3))


def test_command_line(capsys, tmp_path):
    assert rc.main(["list"]) == 0
    assert "nemotron-3 | compact" in capsys.readouterr().out
    assert rc.main(["show", "qwen3.5/compact"]) == 0
    assert "format: P4+8" in capsys.readouterr().out
    assert rc.main(["validate"]) == 0
    assert "falcon-h1/published" in capsys.readouterr().out
    assert rc.main(["show", "nemotron3"]) == 2
    assert "did you mean 'nemotron-3'" in capsys.readouterr().err
    assert rc.main(["validate", write(tmp_path, "name: x")]) == 2
    with pytest.raises(SystemExit) as usage:
        rc.main([])
    assert usage.value.code == 2


def test_recipes_need_no_torch():
    code = (
        "import sys; from replayssm_quant import recipe; recipe.validate([]); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
