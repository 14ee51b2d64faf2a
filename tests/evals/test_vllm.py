"""``--backend vllm``: what is refused, how arms become engines, and a paired run.

A stand-in answers in place of an engine; the slow test asks vLLM itself where VLLM_PYTHON names an
interpreter that has it.
"""

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from replayssm_quant import eval as door
from replayssm_quant import models
from replayssm_quant.backends.vllm import generate
from replayssm_quant.backends.vllm.generate import ArmResult, Completion
from replayssm_quant.backends.vllm.options import KEY, parse
from replayssm_quant.config import StateConfig
from replayssm_quant.evals import probes, vllm
from replayssm_quant.evals.arms import Arm, arm, parse_arm, recipe_arms, reference_arms
from replayssm_quant.evals.tasks import TASKS
from replayssm_quant.state.geometry import read_geometry

HERE = {
    "vllm": "0.33.0",
    "torch": "2.14.0",
    "transformers": "5.20.2",
    "hardware": "NVIDIA H200",
}


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The other interpreter has what ``HERE`` says."""
    vllm.installed.cache_clear()
    found = dict(HERE)
    monkeypatch.setattr(generate, "probe", lambda python: found)
    yield found
    vllm.installed.cache_clear()


ANSWERS: dict[tuple[int, ...], list[int]] = {}
"""The right answer to each ``tally`` prompt of the default suite."""
COUNTED: dict[tuple[int, ...], int] = {}
"""A token of it that counts as an answer."""


class Engine:
    """In place of ``generate.Session``: knows the answers, and gives some of them wrong."""

    made: list["Engine"] = []
    runner = "v1"

    def __init__(self, model: str, options: Any, **kwargs: Any):
        self.model, self.options, self.kwargs, self.asked = model, options, kwargs, []
        self.made_with = {"vllm": HERE["vllm"], "runner": self.runner}
        self.closed = False
        Engine.made.append(self)

    def answer(self, prompts: list[list[int]], **kwargs: Any) -> ArmResult:
        self.asked.append((prompts, kwargs))
        out = []
        for i, prompt in enumerate(prompts):
            ids = list(ANSWERS[tuple(prompt)])
            if self.options is not None and self.options["update_dtype"] == "nvfp4" and i == 0:
                at = COUNTED[tuple(prompt)]
                ids[at] = (ids[at] + 1) % 256
            out.append(Completion(ids))
        return ArmResult(out, 0.1, HERE["vllm"], self.runner)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[Engine]:
    monkeypatch.setattr(Engine, "made", [])
    monkeypatch.setattr(generate, "Session", Engine)
    monkeypatch.setattr(models, "load", lambda *a: pytest.fail("a model was loaded"))
    loaded = models.resolve("tiny-nemotron-h")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(loaded.location, local_files_only=True)
    docs = probes.prompts(TASKS["tally"], 3, {"decode": 192}, tokenizer)
    for prompt, target, counted in zip(docs.prompts, docs.targets, docs.counted, strict=True):
        ANSWERS[tuple(prompt.tolist())] = target.tolist()
        COUNTED[tuple(prompt.tolist())] = counted.tolist().index(True)
    return Engine.made


RUN = "--backend vllm --model tiny-nemotron-h --limit 3 --update-dtype nvfp4 --output-dtype same"


def run(argv: str, out: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert door.main([*argv.split(), "--out", str(out), "--quiet"]) == 0, capsys.readouterr().err
    return json.loads((out / "results.json").read_text())


def test_arms_are_engines_and_answers_pair_up(
    engines: list[Engine], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = run(RUN, tmp_path, capsys)
    # plain, replayed fp32, and a shared and the asked-for state with three rounding seeds each
    seeds = [0, 1, 2]
    made = [(e.options or {}).get("update_dtype") for e in engines]
    assert made == [None, "fp32"] + ["nvfp4"] * 6
    assert [e.options["seed"] for e in engines[2:]] == seeds * 2
    assert [e.options["buffer_len"] for e in engines[2:]] == [1] * 3 + [16] * 3
    assert all(e.closed for e in engines)
    for e in engines:
        (asked,) = e.asked
        assert len(asked[0]) == 3 and asked[1]["ignore_eos"]
        assert e.kwargs["engine"]["dtype"] == "float32"
        if e.options is not None:
            assert parse({KEY: e.options}) is not None
    assert engines[0].kwargs["engine"]["max_num_seqs"] == 8
    assert engines[1].kwargs["engine"]["max_num_seqs"] == 4
    assert record["settings"]["backend"] == "vllm"
    assert record["environment"]["hardware"] == "NVIDIA H200"
    assert record["environment"]["packages"]["vllm"] == "0.33.0"
    (model,) = record["models"]
    assert model["parameters"] > 10**6 and model["recurrent_layers"] == 2
    by_arm = {c["arm"]: c for c in record["comparisons"]}
    floor, shared, wanted = by_arm.values()
    assert floor["accuracy"] == floor["reference_accuracy"] == 1.0 and floor["flips_worse"] == 0
    assert wanted["flips_worse"] == 3 and wanted["delta"]["value"] < 0  # one answer a seed
    unit = next(u for u in record["units"] if u["arm"] == wanted["arm"])
    tokens = unit["tokens_generated"]
    used = unit["exercise"]
    assert used["steps"] == 2 * (tokens - 3) == used["quantised_reads"] and tokens > 3 * 20
    assert used["flushes"] == 2 * sum(
        (len(ANSWERS[tuple(p)]) - 1) // 16 for p in engines[0].asked[0][0]
    )


def test_a_run_goes_on_where_it_stopped(
    engines: list[Engine], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(RUN, tmp_path, capsys)
    count = len(engines)
    run(RUN, tmp_path, capsys)
    assert len(engines) == count  # nothing is measured twice
    run(RUN + ' --vllm-args {"block_size":32}', tmp_path, capsys)
    assert len(engines) == 2 * count and engines[-1].kwargs["engine"]["block_size"] == 32


def test_where_vllm_shows_requests_their_seeds_carry_the_rounding_seed(
    engines: list[Engine],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Engine, "runner", "v2")
    run(RUN, tmp_path, capsys)
    assert len(engines) == 4  # an engine an arm
    seeds = [tuple(asked[1]["seeds"]) for asked in engines[3].asked]
    assert len(seeds) == 3 and len({s for three in seeds for s in three}) == 9
    assert engines[2].asked[0][1]["seeds"] == list(seeds[0])  # arms pair up by request
    assert all(0 <= s < 2**63 for three in seeds for s in three)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--tasks count", "task count scores given text"),
        ("--tasks tally,text", "task text scores given text"),
        ("--tasks write", "task write draws with random numbers"),
        ("--suite general", "the suite has no task that generates"),
        ("--vllm-args [1]", "--vllm-args '[1]' is no JSON mapping"),
        ("--vllm-args {", "--vllm-args '{' is no JSON mapping"),
        ("--update-dtype fp9", "unknown state format 'fp9'"),
        ("--device cuda:1", "--device has no effect with --backend vllm"),
        ("--prefill 4", "--prefill has no effect"),
        ("--path decode", "--path has no effect"),
    ],
)
def test_what_cannot_run_is_refused(
    argv: str, message: str, engines: list[Engine], capsys: pytest.CaptureFixture[str]
) -> None:
    assert door.main(["--backend", "vllm", *argv.split()]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and message in err
    assert not engines


def test_flags_of_vllm_need_the_backend(capsys: pytest.CaptureFixture[str]) -> None:
    assert door.main(["--vllm-python", "python"]) == 2
    assert "--vllm-python needs --backend vllm" in capsys.readouterr().err


def test_another_vllm_is_refused(
    here: dict[str, str], engines: list[Engine], capsys: pytest.CaptureFixture[str]
) -> None:
    here["vllm"] = "0.31.2"
    assert door.main(["--backend", "vllm"]) == 2
    assert "not 0.31" in capsys.readouterr().err and not engines


def test_an_unsupported_architecture_is_refused(
    tmp_path: Path, engines: list[Engine], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "other"
    shutil.copytree(models.resolve("tiny-nemotron-h").location, folder)
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = ["NewHybridForCausalLM"]
    (folder / "config.json").write_text(json.dumps(config))
    argv = ["--backend", "vllm", "--model", str(folder), "--tasks", "tally"]
    assert door.main(argv) == 2
    assert "does not support NewHybridForCausalLM" in capsys.readouterr().err


def test_options_of_each_kind_of_arm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reference, floor = reference_arms(8)
    assert vllm.options(reference, None, 3) is None
    replayed = vllm.options(floor, None, 3)
    assert replayed is not None and replayed["update_dtype"] == "fp32" and replayed["seed"] == 3
    for text in ("fp16:nvfp4", "P4+8:rot", "fp8:same:rn@1", "int8:nvfp4:rot"):
        found = parse({KEY: vllm.options(arm("candidate", parse_arm(text)), None, 3)})
        assert found is not None and found.config is not None
        assert found.config.label == parse_arm(text).label and found.seed == 3
    config = models.resolve("tiny-nemotron-h").config
    *_, whole = recipe_arms("auto", read_geometry(config), config, "tiny-nemotron-h")
    layered = Arm("r", "candidate", whole.config, dict.fromkeys((0, 2), whole.configs[0]), "auto")
    assert vllm.options(layered, "auto", 1) == {"recipe": "auto", "seed": 1}
    path = tmp_path / "mine.yaml"
    path.write_text("x")
    monkeypatch.chdir(tmp_path)
    assert vllm.options(layered, "mine.yaml", 1) == {"recipe": str(path), "seed": 1}


def test_the_dtype_of_engines() -> None:
    cpu, gpu = "x86_64 CPU (AVX512)", "NVIDIA H200"
    gdn = {"text_config": {"linear_num_value_heads": 2, "dtype": "float32"}}
    for hardware in (cpu, gpu):  # its kernels take no fp32
        assert vllm.model_dtype(gdn, "auto", hardware) == "bfloat16"
        assert vllm.model_dtype(gdn, "bf16", hardware) == "bfloat16"
        with pytest.raises(ValueError, match="--dtype fp32: .* take .*; give --dtype bf16"):
            vllm.model_dtype(gdn, "fp32", hardware)
    assert vllm.model_dtype(gdn, "fp16", gpu) == "float16"
    with pytest.raises(ValueError, match="--dtype fp16: .* bf16 alone on a CPU"):
        vllm.model_dtype(gdn, "fp16", cpu)
    assert vllm.model_dtype({"dtype": "float32"}, "auto", gpu) == "float32"
    assert vllm.model_dtype({"torch_dtype": "bfloat16"}, "auto", gpu) == "bfloat16"


def test_counts_follow_from_the_tokens() -> None:
    configs = {1: StateConfig.from_flags("fp16", buffer_len=4), 3: StateConfig()}
    found = vllm.counts(configs, [1, 6, 0, 9])  # 0, 5, 0 and 8 decode steps
    assert found[1] == {"steps": 13, "flushes": 1 + 2, "quantised_reads": 13}
    assert found[3] == {"steps": 13, "flushes": 0, "quantised_reads": 0}


def test_the_harness_gets_answers_cut_at_their_stops() -> None:
    from replayssm_quant.evals.vllm_lm import MAX_TOKENS, VllmLM

    calls: list[Any] = []

    def answer(prompts: Any, **kwargs: Any) -> Any:
        calls.append((prompts, kwargs))
        return SimpleNamespace(completions=[Completion([97, 98, 10, 99]) for _ in prompts])

    class Tokenizer:
        def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
            return {"input_ids": list(text.encode())}

        def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
            return bytes(ids).decode()

    lm = VllmLM(SimpleNamespace(answer=answer), Tokenizer(), 5, {0: StateConfig.from_flags("fp8")})  # type: ignore[arg-type]
    greedy = {"until": ["\n"], "do_sample": False, "max_gen_toks": 9}
    warm = {"until": "b", "do_sample": True, "temperature": 0.5}
    asked = [("q1", greedy), ("q2", warm), ("q3", greedy)]
    assert lm.generate_until([SimpleNamespace(args=a) for a in asked]) == ["ab", "a", "ab"]
    assert [len(c[0]) for c in calls] == [2, 1]
    first, second = (c[1] for c in calls)
    assert (first["max_tokens"], first["temperature"], first["stop"]) == (9, 0.0, ["\n"])
    assert (second["max_tokens"], second["temperature"]) == (MAX_TOKENS, 0.5)
    assert len({*first["seeds"], *second["seeds"]}) == 3
    assert lm.generated == 12 and lm.counts[0]["steps"] == 9
    with pytest.raises(NotImplementedError):
        lm.loglikelihood([])


@pytest.mark.slow
def test_both_shipped_models_through_vllm(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    python = os.environ.get("VLLM_PYTHON", "")
    if not python:
        pytest.skip("needs VLLM_PYTHON: an interpreter with vLLM 0.32 or 0.33 (its CPU build does)")
    monkeypatch.undo()
    argv = f"--backend vllm --vllm-python {python} --limit 2 --seeds 0 --update-dtype fp16"
    record = run(argv, tmp_path, capsys)
    assert [m["dtype"] for m in record["models"]] == ["float32", "bfloat16"]
    floors = [c for c in record["comparisons"] if c["role"] == "floor"]
    # the same arithmetic in fp32 on the state: the same answers
    assert len(floors) == 2 and all(c["flips_worse"] == c["flips_better"] == 0 for c in floors)
    assert record["environment"]["packages"]["vllm"].startswith("0.3")
