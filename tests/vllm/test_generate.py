"""The worker that runs vLLM in another interpreter: what is checked before, and what comes back."""

import json
import sys
from importlib.metadata import Distribution
from pathlib import Path

import pytest

from replayssm_quant.backends.vllm.generate import (
    Completion,
    Session,
    _cause,
    generate,
    plugin_site,
    probe,
)


def test_the_site_folder_holds_the_package_and_its_entry_point(tmp_path: Path) -> None:
    site = plugin_site(tmp_path / "site")
    assert plugin_site(site) == site  # again
    assert (site / "replayssm_quant" / "backends" / "vllm" / "plugin.py").is_file()
    info = Distribution.at(site / "replayssm_quant-0.dist-info")
    (entry,) = info.entry_points
    assert (entry.group, entry.name) == ("vllm.general_plugins", "replayssm_quant")
    assert callable(entry.load())


def test_the_entry_point_is_the_one_of_the_package(tmp_path: Path) -> None:
    import tomllib

    project = Path(__file__).resolve().parents[2] / "pyproject.toml"
    declared = tomllib.loads(project.read_text())["project"]["entry-points"]
    info = Distribution.at(plugin_site(tmp_path) / "replayssm_quant-0.dist-info")
    assert {e.name: e.value for e in info.entry_points} == declared["vllm.general_plugins"]


@pytest.mark.parametrize(
    ("prompts", "arms", "seeds", "message"),
    [
        ([], {"a": None}, None, "no prompts"),
        (["x"], {}, None, "no arms"),
        (["x"], {"a": None}, [1, 2], "2 seeds do not pair with 1 prompts"),
    ],
)
def test_unusable_arguments_are_refused(prompts, arms, seeds, message) -> None:
    with pytest.raises(ValueError, match=message):
        generate("m", prompts, arms, seeds=seeds)


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """An interpreter that sees the standard library alone."""
    path = tmp_path / "python"
    path.write_text(f'#!/bin/sh\nexec {sys.base_prefix}/bin/python3 -S "$@"\n')
    path.chmod(0o755)
    return path


def test_an_interpreter_without_vllm_is_named_in_the_error(
    python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(RuntimeError, match="arm a: vLLM failed: No module named") as failed:
        generate("m", [[1]], {"a": None}, python=str(python))
    (kept,) = tmp_path.glob("replayssm-vllm-*")  # the session's folder is gone
    assert str(failed.value).endswith(f"; its log: {kept}")
    assert "ModuleNotFoundError" in kept.read_text()
    with pytest.raises(ValueError, match=r"cannot run vLLM \(No module named.*vLLM 0.32 or 0.33"):
        probe(str(python))
    with pytest.raises(ValueError, match="interpreter '/no/python' does not run"):
        probe("/no/python")


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        ("x\nValueError: bad thing\nlater line\n", "bad thing"),
        (
            "pydantic_core.ValidationError: 1 validation error for VllmConfig\n"
            "  Value error, replayssm_quant: no [type=value_error, input_value=A, input_type=B]\n"
            "    For further information visit u\n",
            "replayssm_quant: no",
        ),
        (
            "(EngineCore pid=7) ERROR 11-30 core.py:1] ValueError: too little memory\n"
            "RuntimeError: Engine core initialization failed. See root cause above.\n",
            "too little memory",
        ),
        ("RuntimeError: See root cause above.\n", "See root cause above."),
        (
            "(EngineCore pid=7) ERROR 11-30 core.py:1] AssertionError: no float32\n"
            "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack "
            "trace (above) for the root cause.\n",
            "no float32",
        ),
        ("only this\n\n", "only this"),
        ("", "no output"),
    ],
)
def test_the_cause_is_found_in_a_log(log: str, cause: str, tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    path.write_text(log)
    assert _cause(path) == cause


@pytest.mark.slow
def test_arms_pair_up_and_differ_only_by_the_state(
    vllm_python: str, tiny_models: dict[str, Path], cpu_environment: dict[str, str]
) -> None:
    arms = {"plain": None, "fp32": {"update_dtype": "fp32"}, "recipe": {"recipe": "auto"}}
    prompts = ["import os\n\nclass ", "def f("]
    found = generate(
        str(tiny_models["nemotron_h"]),
        prompts,
        arms,
        python=vllm_python,
        max_tokens=24,
        gaps=True,
        engine={"enforce_eager": True, "max_model_len": 256, "dtype": "float32"},
        env=cpu_environment,
    )
    assert list(found) == list(arms)
    assert [c.token_ids for c in found["plain"].completions] == [
        c.token_ids for c in found["fp32"].completions
    ]
    for result in found.values():
        assert result.vllm.startswith("0.3") and result.runner in ("v1", "v2")
        for c in result.completions:
            assert isinstance(c, Completion) and len(c.token_ids) == len(c.gaps) == 24 and c.text
    json.dumps(found["recipe"].completions[0].text)


@pytest.mark.slow
def test_a_refusal_of_the_plugin_comes_back_as_one_line(
    vllm_python: str, tiny_models: dict[str, Path], cpu_environment: dict[str, str]
) -> None:
    with pytest.raises(RuntimeError, match="did you mean 'nemotron-3'") as error:
        generate(
            str(tiny_models["nemotron_h"]),
            [[1, 2]],
            {"a": {"recipe": "nemotron3"}},
            python=vllm_python,
            env=cpu_environment,
        )
    assert "\n" not in str(error.value)


@pytest.mark.slow
def test_a_session_answers_until_it_is_closed(
    vllm_python: str, tiny_models: dict[str, Path], cpu_environment: dict[str, str]
) -> None:
    found = probe(vllm_python)
    assert found["vllm"].startswith("0.3") and found["torch"] and found["hardware"]
    with Session(
        str(tiny_models["nemotron_h"]),
        {"update_dtype": "fp32"},
        python=vllm_python,
        tokenizer=False,
        engine={"enforce_eager": True, "max_model_len": 256, "dtype": "float32"},
        env=cpu_environment,
    ) as session:
        first = session.answer([[65, 66], [67]], max_tokens=5, ignore_eos=True)
        again = session.answer([[67], [65, 66]], max_tokens=7, ignore_eos=True)
    ids = [c.token_ids for c in again.completions]
    assert [x[:5] for x in reversed(ids)] == [c.token_ids for c in first.completions]
    assert [len(x) for x in ids] == [7, 7]
    with pytest.raises(RuntimeError, match="vLLM"):
        session.answer([[1]])
