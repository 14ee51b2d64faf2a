"""The plugin's options: what is understood, what is refused and how."""

import dataclasses
from pathlib import Path

import pytest

from replayssm_quant.backends.vllm.options import KEY, parse
from replayssm_quant.config import StateConfig
from replayssm_quant.formats import parse_format

NEMOTRON = {
    "model_type": "nemotron_h",
    "hybrid_override_pattern": "M-M*",
    "hidden_size": 64,
    "mamba_num_heads": 4,
    "mamba_head_dim": 64,
    "ssm_state_size": 128,
    "n_groups": 1,
}


@pytest.mark.parametrize("value", [None, {}, {"gdn_prefill_backend": "triton"}, object(), "x"])
def test_without_the_key_the_plugin_is_off(value: object) -> None:
    assert parse(value) is None


def test_explicit_settings() -> None:
    options = parse({KEY: {"update_dtype": "fp16", "buffer_len": 8, "seed": 5}})
    assert options is not None
    expected = StateConfig.from_flags("fp16", buffer_len=8, seed=5, stagger=True)
    assert options.layer_configs(NEMOTRON) == {0: expected, 2: expected}
    assert expected.output == parse_format("nvfp4")


@pytest.mark.parametrize("settings", [{"recipe": "auto"}, {"update_dtype": "fp16"}])
def test_the_block_shortcut_is_on_unless_turned_off(settings: dict[str, str]) -> None:
    options = parse({KEY: settings})
    assert options is not None and options.block_shortcut
    options = parse({KEY: settings | {"block_shortcut": False}})
    assert options is not None and not options.block_shortcut
    assert options.layer_configs(NEMOTRON) == parse({KEY: settings}).layer_configs(NEMOTRON)  # type: ignore[union-attr]


def test_a_recipe_gives_each_layer_its_config() -> None:
    options = parse({KEY: {"recipe": "nemotron-3/compact", "seed": 9}})
    assert options is not None
    configs = options.layer_configs(NEMOTRON)
    assert set(configs) == {0, 2}
    assert {c.seed for c in configs.values()} == {9}
    assert configs[0].update.name == "P4+4"
    auto = parse({KEY: {"recipe": "auto/compact", "seed": 9}})
    assert auto is not None and auto.layer_configs(NEMOTRON) == configs


@pytest.mark.parametrize("settings", [{"recipe": "auto"}, {"update_dtype": "fp16"}])
def test_flushes_are_staggered_unless_refused(settings: dict[str, str]) -> None:
    for stagger in (False, True):
        options = parse({KEY: settings | {"stagger": stagger}})
        assert options is not None
        assert {c.stagger for c in options.layer_configs(NEMOTRON).values()} == {stagger}
    unsaid, at_once = (parse({KEY: settings | more}) for more in ({}, {"stagger": False}))
    assert unsaid is not None and at_once is not None
    for i, c in at_once.layer_configs(NEMOTRON).items():  # and nothing else changes
        assert dataclasses.replace(c, stagger=True) == unsaid.layer_configs(NEMOTRON)[i]


def test_a_recipe_may_say_whether_flushes_are_staggered(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    for said in (False, True):
        settings = f"settings: {{replay: {{stagger: {str(said).lower()}}}}}"
        head = "schema: 1\nname: mine\ndescription: Mine.\nextends: nemotron-3\n"
        path.write_text(head + settings + "\n")
        for asked in (None, True, False):
            more = {} if asked is None else {"stagger": asked}
            options = parse({KEY: {"recipe": str(path)} | more})
            assert options is not None
            found = {c.stagger for c in options.layer_configs(NEMOTRON).values()}
            assert found == {said if asked is None else asked}


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        ({KEY: "nemotron-3"}, TypeError, "give a mapping"),
        ({KEY: {}}, ValueError, "give a recipe"),
        ({KEY: {"recipes": "auto"}}, ValueError, "did you mean 'recipe'"),
        ({KEY: {"updat_dtype": "fp16"}}, ValueError, "did you mean 'update_dtype'"),
        ({KEY: {"recipe": "auto", "buffer_len": 8}}, ValueError, "recipe and buffer_len both"),
        ({KEY: {"recipe": 3}}, TypeError, "is not a name"),
        ({KEY: {"recipe": "auto", "seed": "1"}}, TypeError, "seed '1' is not an integer"),
        ({KEY: {"recipe": "auto", "seed": True}}, TypeError, "seed True"),
        ({KEY: {"recipe": "auto", "stagger": "yes"}}, TypeError, "stagger 'yes' is not true"),
        ({KEY: {"update_dtype": "fp16", "stagger": 1}}, TypeError, "stagger 1 is not true"),
        ({KEY: {"recipe": "auto", "block_shortcut": 0}}, TypeError, "block_shortcut 0 is not true"),
        ({KEY: {"update_dtype": "fp16", "buffer_len": 65}}, ValueError, "buffer_len 65"),
        ({KEY: {"update_dtype": "fp15"}}, ValueError, "fp15"),
        ({KEY: {"update_dtype": {1}}}, TypeError, "plain JSON"),
        ({"replayssm-quant": {"recipe": "auto"}}, ValueError, "the plugin's key is"),
        ({"replayssm_quan": {"recipe": "auto"}}, ValueError, "the plugin's key is"),
    ],
)
def test_refused(value: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as found:
        parse(value)
    assert "\n" not in str(found.value)


def test_an_unknown_recipe_is_refused_with_a_suggestion() -> None:
    options = parse({KEY: {"recipe": "nemotron3"}})
    assert options is not None
    with pytest.raises(ValueError, match="did you mean 'nemotron-3'"):
        options.layer_configs(NEMOTRON)


def test_a_format_that_does_not_fit_the_layer_is_refused() -> None:
    options = parse({KEY: {"update_dtype": "int8", "block_size": 32}})
    assert options is not None
    with pytest.raises(ValueError, match="24"):
        options.layer_configs({**NEMOTRON, "ssm_state_size": 24})
