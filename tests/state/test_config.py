"""StateConfig: what the flags mean, what is refused, and that it survives a round trip."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replayssm_quant.config import StateConfig
from replayssm_quant.formats import FORMATS, parse_format

flags = StateConfig.from_flags


def test_published_pair_is_the_default_copy():
    c = flags("fp8")
    assert (c.update.name, c.output.name, c.buffer_len, c.rounding) == ("e4m3", "nvfp4", 16, "sr")
    assert c.has_copy and not c.is_shared and c.readout.name == "nvfp4" and c.uses_random_bits
    for name in ("fp32", "int4", "nvfp4"):
        assert flags(name).is_shared
    planar = flags("P4+8")
    assert planar.output is None and not planar.is_shared and not planar.has_copy
    assert planar.readout is planar.update


def test_same_shares_one_state():
    for output in ("same", "SAME", "fp8", "e4m3"):
        assert flags("fp8", output).is_shared
    assert not flags("fp8", "e4m3/b16").is_shared


@pytest.mark.parametrize(
    ("kw", "error", "words"),
    [
        (dict(update_dtype="fp9"), ValueError, "unknown state format 'fp9'"),
        (dict(update_dtype=8), TypeError, "not int 8"),
        (dict(update_dtype="fp8", output_dtype="fp16"), ValueError, "fp16 .*is wider than"),
        (dict(update_dtype="P4+8", output_dtype="nvfp4"), ValueError, "already holds its output"),
        (dict(update_dtype="P4+8", output_dtype="same"), ValueError, "'same' makes no sense"),
        (dict(update_dtype="fp16", output_dtype="P4+4"), ValueError, "give it as the update"),
        (dict(update_dtype="fp8", block_size=64), ValueError, "block 64"),
        (dict(update_dtype="fp16", block_size=16), ValueError, "block size 16 does not apply"),
        (dict(buffer_len=0), ValueError, "buffer_len 0 .* 1 .*to 64"),
        (dict(buffer_len=65), ValueError, "buffer_len 65"),
        (dict(buffer_len=4.0), TypeError, "buffer_len 4.0"),
        (dict(buffer_len=True), TypeError, "buffer_len True"),
        (dict(rounding="up"), ValueError, "unknown rounding 'up'"),
        (dict(rounding=None), ValueError, "unknown rounding 'None'"),
        (dict(random_bits=4), ValueError, "random_bits 4"),
        (dict(philox_rounds=0), ValueError, "philox_rounds 0"),
        (dict(seed="a"), TypeError, "seed 'a'"),
        (dict(rotate="no"), TypeError, "rotate 'no'"),
    ],
)
def test_bad_settings_name_the_value(kw, error, words):
    with pytest.raises(error, match=words) as caught:
        flags(**kw)
    assert "\n" not in str(caught.value)


def test_unknown_setting_suggests():
    with pytest.raises(ValueError, match="'bufer_len': did you mean 'buffer_len'"):
        StateConfig.from_dict({"bufer_len": 4})
    with pytest.raises(ValueError, match="unknown state setting 'xyzzy': known settings"):
        StateConfig.from_dict({"xyzzy": 4})


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    update=st.sampled_from([*FORMATS, "e4m3/b32/fp16", "int8/head", "P4+8/row"]),
    output=st.sampled_from([None, "same", "nvfp4", "mxfp4", "int4/b32", "e4m3"]),
    length=st.integers(1, 64),
    rounding=st.sampled_from(["sr", "rn"]),
    rotate=st.booleans(),
    bits=st.sampled_from([8, 16]),
    seed=st.integers(0, 9),
    stagger=st.booleans(),
)
def test_round_trip_and_digest(update, output, length, rounding, rotate, bits, seed, stagger):
    kw = dict(buffer_len=length, rounding=rounding, rotate=rotate, random_bits=bits, seed=seed)
    try:
        c = flags(update, output, stagger=stagger, **kw)
    except ValueError:
        return
    assert StateConfig.from_text(c.text) == c
    again = StateConfig.from_dict(c.to_dict())
    assert again == c and again.digest == c.digest and hash(again) == hash(c)
    for change in (dict(seed=seed + 1), dict(rotate=not rotate), dict(buffer_len=length % 64 + 1)):
        assert dataclasses.replace(c, **change).digest != c.digest
    assert c.label.startswith(c.update.name)


def test_shared_reference_design():
    c = flags("fp8", "nvfp4", rotate=True).per_step_shared()
    assert c.is_shared and c.buffer_len == 1 and c.update == parse_format("fp8")
    assert flags("P8+4").per_step_shared().update.name == "int8"


def test_settings_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        flags("fp8").buffer_len = 4
