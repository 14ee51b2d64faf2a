"""The format table: bytes against hand-computed numbers, names, aliases and error messages."""

import pytest

from replayssm_quant.formats import ALIASES, ELEMENTS, FORMATS, Format, parse_format, with_scale

# An element, then its share of the scales, for a [64, 128] head: a row scale is shared by 128
# elements, a block scale by 16 or 32, a tile scale by 16 * 128 = 2048, a head scale by 64 * 128.
BYTES = {
    "fp32": 4,
    "fp16": 2,
    "bf16": 2,
    "e4m3": 1 + 4 / 128,  # 1.03
    "e5m2": 1 + 4 / 128,
    "int8": 1 + 4 / 128,
    "int8/head": 1 + 4 / 8192,  # 1.00
    "e4m3/head": 1 + 4 / 8192,
    "e4m3/none": 1,
    "int8/row/fp16": 1 + 2 / 128,
    "e4m3/b32": 1 + 4 / 32,  # 1.125
    "int8/b32": 1 + 4 / 32,
    "e4m3/b32/fp16": 1 + 2 / 32,  # 1.06
    "e4m3/b32/e8m0": 1 + 1 / 32,  # 1.03
    "mxfp8": 1 + 1 / 32,
    "nvfp4": 1 / 2 + 1 / 16 + 4 / 2048,  # .5625 and the tile scale
    "int4": 1 / 2 + 1 / 16 + 4 / 2048,
    "int4/row": 1 / 2 + 4 / 128,  # .53
    "mxfp4": 1 / 2 + 1 / 32,  # .53
    "P4+4": 1 + 1 / 16 + 4 / 2048,  # 1.06
    "P4+4/row": 1 + 4 / 128,  # 1.03
    "P4+8": 3 / 2 + 1 / 16 + 4 / 2048,  # 1.56
    "P8+4": 3 / 2 + 4 / 128,  # 1.53
}
READ = {  # what a readout loads: never the low plane
    "fp32": 4,
    "e4m3": 1 + 4 / 128,
    "nvfp4": 9 / 16 + 4 / 2048,
    "P4+4": 9 / 16 + 4 / 2048,
    "P4+8": 9 / 16 + 4 / 2048,
    "P8+4": 1 + 4 / 128,
}
RULES = [
    f"{g}{d}"
    for g in ("none", "row", "head", "b16", "b32")
    for d in ("", "/fp32", "/fp16", "/e4m3", "/e8m0")
]


def every_name() -> list[str]:
    """All names that parse: each base with each scale rule that it takes."""
    names = list(FORMATS)
    for base in FORMATS:
        for rule in RULES:
            try:
                parse_format(f"{base}/{rule}")
            except ValueError:
                continue
            names.append(f"{base}/{rule}")
    return names


@pytest.mark.parametrize("name", BYTES)
def test_bytes_an_element(name: str) -> None:
    fmt = parse_format(name)
    assert fmt.bytes_per_element(64, 128) == BYTES[name]
    assert fmt.nbytes(5, 64, 128) == BYTES[name] * 5 * 64 * 128


@pytest.mark.parametrize("name", READ)
def test_bytes_of_a_readout(name: str) -> None:
    assert parse_format(name).readout_bytes(3, 64, 128) == READ[name] * 3 * 64 * 128


def test_every_format_of_the_table_has_its_bytes_above() -> None:
    assert set(FORMATS) <= set(BYTES)


@pytest.mark.parametrize(
    ("name", "max_code"),
    [("P4+4", 112), ("P4+8", 1792), ("P8+4", 2032), ("int8", 127), ("int4", 7), ("nvfp4", 6)],
)
def test_largest_code(name: str, max_code: int) -> None:
    assert parse_format(name).max_code == max_code


def test_largest_magnitudes_of_the_elements() -> None:
    assert {e.name: e.max_magnitude_code for e in ELEMENTS.values() if e.name != "fp32"} == {
        "fp16": 0x7BFF,
        "bf16": 0x7F7F,
        "e4m3": 0x7E,  # S.1111.110 = 448; 0x7F is NaN
        "e5m2": 0x7B,  # S.11110.11 = 57344; 0x7C is Inf
        "e3m2": 0x1F,
        "e2m3": 0x1F,
        "e2m1": 0x7,
        "int8": 127,
        "int4": 7,
    }


def test_names_parse_back_to_the_same_format() -> None:
    names = every_name()
    assert len(names) > 60
    for name in names:
        fmt = parse_format(name)
        assert parse_format(fmt.name) == fmt, name
        assert parse_format(fmt) is fmt


def test_the_default_rule_spelt_out_is_the_default() -> None:
    assert parse_format("e4m3/row") is FORMATS["e4m3"]
    assert parse_format("int8/row/fp32") is FORMATS["int8"]
    assert parse_format("P4+8/b16") is FORMATS["P4+8"]
    assert parse_format("int4/b16/e4m3") is FORMATS["int4"]
    assert parse_format("P8+4/row") is FORMATS["P8+4"]


def test_planar_blocks_round_their_scale_up() -> None:
    assert parse_format("P4+8").scale.round_up
    assert parse_format("P8+4/b32").scale.round_up
    assert not parse_format("nvfp4").scale.round_up
    assert not parse_format("P4+8/row").scale.round_up


@pytest.mark.parametrize("alias", ALIASES)
def test_aliases(alias: str) -> None:
    assert parse_format(alias) is FORMATS[ALIASES[alias]]
    assert parse_format(alias.upper()) is FORMATS[ALIASES[alias]]


def test_what_people_type() -> None:
    assert parse_format("fp8") is FORMATS["e4m3"]
    assert parse_format("fp4") is FORMATS["nvfp4"]
    assert parse_format(" BFloat16 ") is FORMATS["bf16"]
    assert parse_format("p4+8") is FORMATS["P4+8"]
    assert parse_format("fp8/block32").name == "e4m3/b32"


@pytest.mark.parametrize(
    ("text", "value", "remedy"),
    [
        ("nvpf4", "'nvpf4'", "did you mean 'nvfp4'"),
        ("int88", "'int88'", "did you mean 'int8'"),
        ("P4+9", "'P4+9'", "did you mean 'P4+8'"),
        ("zzz", "'zzz'", "known formats: fp32, fp16"),
        ("", "''", "known formats"),
        ("int8/col", "'col'", "row, head, b16 or b32"),
        ("int8/b64", "block 64", "use 16 or 32"),
        ("int8/none", "int8", "needs a scale"),
        ("P4+4/none", "P4+4", "needs a scale"),
        ("e4m3/none/fp16", "'fp16'", "has no scale"),
        ("int8/row/bf16", "'bf16'", "fp32, fp16, e4m3, e8m0"),
        ("int8/row/e4m3", "e4m3", "needs blocks"),
        ("int8/head/e4m3", "'head'", "needs blocks"),
        ("nvfp4/row", "nvfp4", "write just 'nvfp4'"),
        ("fp16/row", "fp16", "write just 'fp16'"),
        ("e4m3/b32/fp16/x", "'e4m3/b32/fp16/x'", "name/granularity/scale dtype"),
    ],
)
def test_bad_names_say_what_is_wrong_and_what_to_write(text: str, value: str, remedy: str) -> None:
    with pytest.raises(ValueError) as error:
        parse_format(text)
    assert value in str(error.value) and remedy in str(error.value)


def test_a_format_is_a_string() -> None:
    with pytest.raises(TypeError, match="int 8"):
        parse_format(8)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "rows", "n", "message"),
    [
        ("nvfp4", 64, 40, "d_state 40 is not a multiple of the scale block 16"),
        ("mxfp8", 64, 80, "d_state 80 .* block 32"),
        ("int4/row", 64, 12, "multiple of 8, not 12"),
        ("P8+4", 64, 12, "multiple of 8, not 12"),
        ("e4m3", 0, 128, "0 x 128 is empty"),
    ],
)
def test_shapes_that_do_not_fit(name: str, rows: int, n: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_format(name).planes(1, rows, n)


def test_with_scale_keeps_the_base() -> None:
    twice = with_scale(parse_format("int8/head"), "row")
    assert twice is FORMATS["int8"]
    assert isinstance(twice, Format) and hash(twice) == hash(FORMATS["int8"])
