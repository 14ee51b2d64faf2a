"""The end-to-end benchmark without vLLM: its arms, its geometries, and how it drives engines."""

import json
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from replayssm_quant.backends.vllm.options import KEY, parse
from replayssm_quant.kernels.bench import e2e
from replayssm_quant.state.geometry import read_geometry
from replayssm_quant.state.known import KNOWN

# A stand-in for a child: says what vLLM says, waits for its line, then answers or fails.
CHILD = """#!{python}
import json, sys
job = json.loads(sys.argv[-1])
options = job["engine"]["additional_config"].get("replayssm_quant")
if options:
    print("INFO replayssm_quant: explicit settings, state X")
print("INFO Maximum concurrency for 2,048 tokens per request: 310.22x")
print("READY", flush=True)
assert sys.stdin.readline() == "go\\n"
if options and options["update_dtype"] == "e4m3":
    print("RuntimeError: out of memory")
    sys.exit(1)
row = {{"step_ms": 12.5, "tokens_per_s": 1.0, "short_s": [1], "long_s": [2]}}
found = {{"vllm": "0.33.0", "runner": "v2", "batches": {{str(b): row for b in job["batches"]}}}}
open(job["out"], "w").write(json.dumps(found))
"""


@pytest.fixture
def python(tmp_path: Path) -> str:
    path = tmp_path / "child"
    path.write_text(CHILD.format(python=sys.executable))
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize("model", e2e.MODELS)
def test_geometries_are_those_that_the_plan_knows(model: str) -> None:
    found, known = read_geometry(e2e.MODELS[model]), KNOWN[model].geometry
    assert list(found.layers.values()) == list(known.layers.values())
    assert found.total_layers == known.total_layers


@pytest.mark.parametrize("model", e2e.MODELS)
@pytest.mark.parametrize("arm", e2e.ARMS)
def test_every_arm_is_plain_vllm_or_valid_options(model: str, arm: str) -> None:
    args = Namespace(
        batches=[8, 1], max_model_len=64, memory_share=0.2, cache_gib=1.0, engine='{"seed": 3}'
    )
    engine = e2e.engine_arguments(Path("m"), e2e.ARMS[arm], args)
    assert engine["max_num_seqs"] == 8 and engine["seed"] == 3
    assert engine["kv_cache_memory_bytes"] == 2**30
    options = parse(engine["additional_config"])
    assert (options is None) != ("options" in e2e.ARMS[arm])
    assert (KEY in engine["additional_config"]) == (options is not None)
    if options is not None:
        configs = options.layer_configs(e2e.MODELS[model])
        assert set(configs) == set(read_geometry(e2e.MODELS[model]).layers)


def test_arms_run_in_waves_and_a_failure_is_a_row(
    python: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "e2e.json"
    code = e2e.main(
        ["--arms", "fp32,e4m3,P4+8", "--parallel", "2", "--python", python, "--out", str(out)]
        + ["--batches", "1,256", "--lock", str(tmp_path / "lock")]
    )
    assert code == 0
    record = json.loads(out.read_text())
    assert list(record["arms"]) == ["fp32", "e4m3", "P4+8"]
    plain, failed, ours = record["arms"].values()
    assert plain["state"] == "plain vLLM" and ours["state"] == "explicit settings, state X"
    assert plain["max_concurrency"] == 310.22
    assert set(ours["batches"]) == {"1", "256"} and ours["batches"]["1"]["step_ms"] == 12.5
    assert failed["error"] == "RuntimeError: out of memory" and "batches" not in failed
    said = capsys.readouterr().out
    assert "e4m3: failed: RuntimeError: out of memory" in said and "12.50 ms" in said


def test_the_exit_code_says_that_nothing_ran(python: str, tmp_path: Path) -> None:
    out = str(tmp_path / "e2e.json")
    assert e2e.main(["--arms", "e4m3", "--python", python, "--out", out]) == 1


def test_an_unknown_arm_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        e2e.main(["--arms", "fp33"])
    assert "unknown arm fp33" in capsys.readouterr().err
