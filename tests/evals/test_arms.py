"""Arms: what people type, what is compared, how many bytes it takes."""

import pytest

from replayssm_quant import StateConfig
from replayssm_quant.evals import arms
from replayssm_quant.state.geometry import LayerGeometry, ModelGeometry

GEOMETRY = ModelGeometry("nemotron_h", {1: LayerGeometry("mamba2", 4, 64, 128, 1)}, 2)


@pytest.mark.parametrize(
    "text, flags",
    [
        ("fp8", {"update_dtype": "fp8"}),
        ("fp8:same@1", {"update_dtype": "fp8", "output_dtype": "same", "buffer_len": 1}),
        ("int8:nvfp4:rn:rot@8", dict(update_dtype="int8", output_dtype="nvfp4", rounding="rn",
                                     rotate=True, buffer_len=8)),
        ("e4m3/b32:mxfp4", {"update_dtype": "e4m3/b32", "output_dtype": "mxfp4"}),
        (" P4+8 ", {"update_dtype": "P4+8"}),
    ],
)  # fmt: skip
def test_arm_syntax_means_the_flags(text: str, flags: dict) -> None:
    assert arms.parse_arm(text) == StateConfig.from_flags(**flags)


def test_arm_text_overrides_the_shared_flags() -> None:
    base = {"rounding": "rn", "buffer_len": 4}
    assert arms.parse_arm("fp16:nvfp4", base).rounding == "rn"
    assert arms.parse_arm("fp16:nvfp4:sr@2", base) == StateConfig.from_flags(
        "fp16", "nvfp4", buffer_len=2
    )


@pytest.mark.parametrize(
    "text, message",
    [
        ("fp9:nvfp4", "arm 'fp9:nvfp4': unknown state format 'fp9'"),
        ("fp8:nvfp4:fp4", "second output format"),
        ("fp8@x", "'x' after @"),
        ("fp8@0", "buffer_len 0"),
        ("P4+8:nvfp4", "already holds its output copy"),
    ],
)
def test_bad_arms_name_the_text(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("+", r"\+")):
        arms.parse_arm(text)


def test_bytes_of_the_published_pair() -> None:
    one = arms.arm("candidate", StateConfig.from_flags("fp8"))
    found = one.bytes(GEOMETRY)
    state = 4 * 64 * 128
    checkpoint = state + 4 * 64 * 4  # one byte an element, one fp32 scale a row
    copy = state // 2 + state // 16  # a nibble an element, one e4m3 scale a block of 16
    ring = 16 * (4 * 64 * 2 + 4 * 4 + 128 * 2)  # x and B in bf16, dt in fp32
    assert found.fp32 == 4 * state and found.ring == ring
    # the head scale's bytes are the formats' business; they are a rounding error here
    assert checkpoint + copy + ring <= found.stored <= checkpoint + copy + ring + 256
    assert found.ratio == found.fp32 / found.stored


def test_flushing_each_step_needs_no_ring() -> None:
    shared = arms.arm("shared", StateConfig.from_flags("fp16", "same", buffer_len=1))
    found = shared.bytes(GEOMETRY)
    assert found.ring == 0 and found.ratio == 2.0
    reference = arms.reference_arms(8)[0].bytes(GEOMETRY)
    assert reference.stored == reference.fp32 and reference.per_step == 2 * reference.fp32


def test_a_candidate_stands_beside_its_shared_design() -> None:
    shared, candidate = arms.candidate_arms(StateConfig.from_flags("fp8"))
    assert shared.role == "shared" and shared.config == candidate.config.per_step_shared()
    (alone,) = arms.candidate_arms(StateConfig.from_flags("fp8", "same", buffer_len=1))
    assert alone.role == "candidate"  # it is its own shared design


def test_noise_floor_has_another_batch_size() -> None:
    for batch in (1, 2, 8):
        reference, floor = arms.reference_arms(batch)
        assert floor.batch_size not in (None, batch) and floor.batch_size >= 1
        assert not floor.quantises and not floor.rounds
        assert floor.bytes(GEOMETRY) == reference.bytes(GEOMETRY)


def test_digest_covers_settings_but_not_seed() -> None:
    one = arms.arm("candidate", StateConfig.from_flags("fp8"))
    assert one.digest == arms.arm("shared", StateConfig.from_flags("fp8", seed=3)).digest
    assert one.digest != arms.arm("candidate", StateConfig.from_flags("fp8", rounding="rn")).digest
    assert one.seeded(5).seed == 5


def test_rounding_seeds_matter_only_where_bits_are_drawn() -> None:
    assert arms.arm("candidate", StateConfig.from_flags("fp8")).rounds
    assert not arms.arm("candidate", StateConfig.from_flags("fp8", rounding="rn")).rounds
    exact = arms.arm("candidate", StateConfig.from_flags("fp32", "same"))
    assert not exact.rounds and not exact.quantises
    assert arms.arm("candidate", StateConfig.from_flags("fp32", "nvfp4")).quantises


def test_story_shows_shared_and_split_once_each() -> None:
    story = arms.story_arms()
    assert len({a.digest for a in story}) == len({a.name for a in story}) == len(arms.STORY)
    assert [a.role for a in story].count("candidate") == 4
    for a in story:
        a.check(GEOMETRY)


def test_a_format_that_does_not_fit_names_the_layer() -> None:
    odd = ModelGeometry("nemotron_h", {3: LayerGeometry("mamba2", 2, 64, 24, 1)}, 4)
    with pytest.raises(ValueError, match=r"layer 3: .*24 is not a multiple"):
        arms.arm("candidate", StateConfig.from_flags("fp8")).check(odd)


def test_recipe_arms_follow_the_recipe() -> None:
    from replayssm_quant import recipe

    resolved = recipe.resolve("mamba2")
    config = {"model_type": "mamba2"}
    found = arms.recipe_arms("mamba2", GEOMETRY, config, "some-model")
    chosen = found[-1]
    assert chosen.role == "candidate" and chosen.recipe == "mamba2"
    assert chosen.record({}, 8).recipe_digest == resolved.digest
    assert set(chosen.configs) == set(resolved.configs(GEOMETRY).values())
    with pytest.raises(ValueError, match="unknown recipe 'mumba2': did you mean 'mamba2'"):
        arms.recipe_arms("mumba2", GEOMETRY, config, "some-model")


def test_an_arm_of_several_formats_names_them() -> None:
    texts = ("fp16:same", "int8:same:rot", "P4+4", "P8+4")
    configs = [arms.parse_arm(t) for t in texts]
    two = arms.Arm("x", "candidate", configs[0], dict(enumerate(configs[:2])), "mine")
    assert two.label == "mine (fp16 SR shared / int8 SR rot shared)"
    same = arms.Arm("x", "candidate", configs[0], {1: configs[0], 5: configs[0]})
    assert same.label == "fp16 SR shared"
    assert arms.Arm("x", "candidate", configs[0], dict(enumerate(configs))).label == "4 formats"
