"""The end-to-end benchmark without vLLM: its arms, its geometries, and how it drives engines."""

import gzip
import json
import sys
import threading
from argparse import Namespace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from replayssm_quant.backends.vllm.options import KEY, parse
from replayssm_quant.kernels.bench import e2e, e2e_spec
from replayssm_quant.state.geometry import read_geometry
from replayssm_quant.state.known import KNOWN

# A stand-in for a child: says what vLLM says, then answers each line or fails.
CHILD = """#!{python}
import json, os, sys
job = json.loads(sys.argv[-1])
options = job["engine"]["additional_config"].get("replayssm_quant")
if options:
    print("INFO replayssm_quant: explicit settings, state X")
print("INFO Maximum concurrency for 1,024 tokens per request: 310.22x")
print("READY", flush=True)
runner = "v1" if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "0" else "v2"
found = {{"gpu": "NVIDIA H200", "vllm": "0.33.0", "torch": "2.11", "runner": runner, "rows": []}}
for line in sys.stdin:
    if options and options["update_dtype"] == "e4m3":
        print("RuntimeError: out of memory")
        sys.exit(1)
    point = json.loads(line)
    step = 10.0 if options else 25.0 if runner == "v2" else 20.0
    row = {{"steps": 9, "step_ms": step, "median_ms": step, "p90_ms": step}}
    row |= point | {{"tokens_per_s": point["batch"] / step * 1e3}}
    served = os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "1"
    assert len(job["parts"]) == (0 if served else 5)
    if served:
        row["step_ms"] = 30.0
    if "kind" in point:
        row["op"] = point["kind"]
        row["within"] = [["scheduler.py:Scheduler.schedule", 2.5], ["a.py:f", 1.0]]
        row["own"] = [["a.py:f:3", 1.0]]
        row |= {{"busy_us": 5e3, "span_us": 1e4, "kernels": []}}
    if os.environ.get("VLLM_PLUGINS") == "none":
        row = point | {{"error": "no plugin"}}
    found["rows"].append(row)
    open(job["out"] + ".x", "w").write(json.dumps(found))
    os.replace(job["out"] + ".x", job["out"])
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
        model=model,
        batches=[(8, 40), (1, 9)],
        memory_share=0.2,
        cache_gib=1.0,
        engine='{"seed": 3}',
        profile=None,
        host_profile=None,
        rehearse=False,
    )
    engine = e2e.engine_arguments(Path("m"), e2e.ARMS[arm], args)
    assert engine["max_num_seqs"] == 8 and engine["seed"] == 3
    assert engine["max_model_len"] == 64  # 22 of the prompt, 40, and the token beyond
    assert engine["kv_cache_memory_bytes"] == 2**30
    assert engine["compilation_config"]["cudagraph_capture_sizes"] == [1, 8]
    options = parse(engine["additional_config"])
    assert (options is None) != ("options" in e2e.ARMS[arm])
    assert (KEY in engine["additional_config"]) == (options is not None)
    if options is not None:
        configs = options.layer_configs(e2e.MODELS[model])
        assert set(configs) == set(read_geometry(e2e.MODELS[model]).layers)


@pytest.mark.parametrize("arm", ["fp32", "fp16", "fp16+nvfp4", "P4+8"])
def test_bytes_are_those_that_vllm_reported(arm: str) -> None:
    # MiB a request on the Nano geometry, from the plugin's log line in vLLM 0.33
    said = {"fp32": 79.92, "fp16": 40.54, "fp16+nvfp4": 57.36, "P4+8": 37.67}
    nbytes = e2e.state_bytes("nemotron-3-nano-4b", e2e.ARMS[arm])
    assert nbytes / 2**20 == pytest.approx(said[arm], abs=0.006)


@pytest.mark.parametrize(("arm", "room"), [("fp32", 223.78), ("P4+8", 385.18)])
def test_the_cache_fits_the_batch_as_vllm_counts(arm: str, room: float) -> None:
    # vLLM 0.33 reported this "Maximum concurrency" for 2,048 tokens in 30 GiB; two requests spare
    need = e2e.cache_bytes("nemotron-3-nano-4b", e2e.ARMS[arm], round(room) - 2, 2048)
    assert need / 2**30 == pytest.approx(30, rel=0.005)


def test_the_native_kernel_gets_the_launches_of_the_kernel_benchmark(tmp_path: Path) -> None:
    rows = [
        {"design": "vllm-native-fp32", "geometry": "super", "batch": 8, "launch": [8, 4]},
        {"design": "vllm-native-fp32", "geometry": "super", "batch": 256, "launch": [8, 1]},
        {"design": "vllm-replay-fp32", "geometry": "super", "batch": 8, "launch": [32, 1, 64]},
        {"design": "P4+8-sr-rot", "geometry": "super", "batch": 8},
        {"design": "vllm-native-fp16", "geometry": "other", "batch": 8, "launch": [8, 4]},
        {"design": "vllm-native-fp16", "geometry": "super", "batch": 8, "launch": None},
    ]
    (tmp_path / "mamba2_decode-h200-2026-01-01.json").write_text("[]")
    (tmp_path / "mamba2_decode-h200-2026-01-02.json").write_text(json.dumps(rows))
    (path,) = e2e.write_tuned(tmp_path / "tuned", "NVIDIA H200", tmp_path).iterdir()
    assert path.name == "headdim=80,dstate=128,device_name=NVIDIA_H200,cache_dtype=float32.json"
    assert json.loads(path.read_text()) == {  # 128 heads
        "1024": {"BLOCK_SIZE_M": 8, "num_warps": 4},
        "32768": {"BLOCK_SIZE_M": 8, "num_warps": 1},
    }
    assert not list(e2e.write_tuned(tmp_path / "none", "NVIDIA B200", tmp_path).iterdir())


def test_suffixes_choose_the_runner_and_leave_the_plugin_out() -> None:
    assert e2e.arm_of("P4+8-v1")["runner"] == "v1"
    assert e2e.arm_of("fp32-bare") == e2e.ARMS["fp32"] | {"plugins": "none"}
    staggered = e2e.arm_of("P4+8-stagger")["options"]
    assert staggered == e2e.ARMS["P4+8"]["options"] | {"stagger": True}
    for name in ("P4+8", "P4+8-v1"):  # the plugin's default would be theirs
        assert e2e.arm_of(name)["options"] == e2e.ARMS["P4+8"]["options"] | {"stagger": False}
    for name in ("fp32-v3", "fp32-stagger"):
        with pytest.raises(ValueError, match=f"unknown arm '{name}'"):
            e2e.arm_of(name)


class Core:
    """Engine core that prefills one request a step, then gives every live one a token."""

    def __init__(self) -> None:
        self.waiting: list[Any] = []
        self.left: dict[str, int] = {}

    def get_output(self) -> Any:
        if self.waiting:
            name, params = self.waiting.pop(0)
            self.left[name] = params.max_tokens
        out = list(self.left)
        for name in out:
            self.left[name] -= 1
            if not self.left[name]:
                del self.left[name]
        return SimpleNamespace(outputs=out)


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> Any:
    vllm = ModuleType("vllm")
    vllm.SamplingParams = SimpleNamespace  # type: ignore[attr-defined]
    sampling = ModuleType("vllm.sampling_params")
    sampling.RequestOutputKind = SimpleNamespace(FINAL_ONLY=1)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", sampling)
    core = Core()
    engine = SimpleNamespace(
        engine_core=core,
        add_request=lambda name, prompt, params: core.waiting.append((name, params)),
        has_unfinished_requests=lambda: bool(core.waiting or core.left),
        step=lambda: core.get_output(),
    )
    return SimpleNamespace(llm_engine=engine)


def test_only_steps_of_the_whole_batch_are_timed(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(10**6))
    monkeypatch.setattr(e2e.time, "perf_counter", lambda: next(clock) * 1e-3)
    row = e2e.measure(llm, 4, 30, 100)
    # 30 tokens for the first request, whose last three companions come one a step later
    assert row["steps"] == 30 - 3 - 3 and row["step_ms"] == row["median_ms"] == 1.0
    assert row["tokens_per_s"] == 4000.0
    assert row["spread_ms"] == [1.0] * len(e2e.SPREAD) and row["cores"] >= 1 and row["load"] >= 0


def test_a_batch_that_never_is_whole_is_an_error(llm: Any) -> None:
    with pytest.raises(RuntimeError, match="only 0 of 30 steps had all of 40 requests"):
        e2e.measure(llm, 40, 30, 100)


def test_arms_run_in_waves_and_a_failure_is_a_row(
    python: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "e2e.json"
    code = e2e.main(
        ["--arms", "fp32,e4m3,P4+8", "--parallel", "2", "--python", python, "--out", str(out)]
        + ["--batches", "1:9,256", "--lock", str(tmp_path / "lock")]
    )
    assert code == 0
    rows = json.loads(out.read_text())
    assert [(r["arm"], r.get("batch"), r.get("tokens")) for r in rows] == [
        ("fp32", 1, 9),
        ("fp32", 256, 1000),
        ("e4m3", None, None),
        ("P4+8", 1, 9),
        ("P4+8", 256, 1000),
    ]
    plain, failed, ours = rows[1:4]
    assert plain["state"] == "plain vLLM" and ours["state"] == "explicit settings, state X"
    assert plain["max_concurrency"] == 310.22 and plain["concurrency_tokens"] == 1024
    assert plain["op"] == "e2e_decode_speedup" and plain["commit"] and ours["step_ms"] == 10.0
    assert failed["error"] == "RuntimeError: out of memory"
    said = capsys.readouterr().out
    assert "e4m3: failed: RuntimeError: out of memory" in said and "10.00 ms" in said


def test_the_report_compares_within_a_runner(python: str, tmp_path: Path) -> None:
    results = tmp_path / "results"
    results.mkdir()
    out = results / "e2e_decode_speedup-h200-2026-01-01.json"
    arms = "fp32,vllm-replay,fp32-v1,P4+8,e4m3,P4+8-v1,fp32-bare"
    assert e2e.main(["--arms", arms, "--python", python, "--out", str(out)]) == 0
    text = e2e.report(results, tmp_path).read_text()
    table = {x.split(" | ")[0].strip("| "): x for x in text.splitlines() if x.startswith("| ")}
    # steps: fp32 25 (V2) and 20 (V1), upstream 20 (V1), ours 10
    assert " v2 | 25,600 | 10.00 | 10.00 | 10.00 | 2.50 | 2.00* | 37.7 |" in table["P4+8"]
    assert " v1 | 25,600 | 10.00 | 10.00 | 10.00 | 2.00 | 2.00 | 37.7 |" in table["P4+8-v1"]
    assert "| 2.20 | 2.50 | yes |" in table["best arm: x fp32, lean host"]
    room = "P4+8 or P8+4: requests in the state of one fp32 request"
    assert "| 2.40 | 2.12 | no |" in table[room]
    assert "e4m3 failed: RuntimeError: out of memory" in text
    assert "fp32-bare failed: no plugin" in text


def test_a_ratio_between_runs_is_marked(python: str, tmp_path: Path) -> None:
    out = tmp_path / "e2e_decode_speedup-h200-2026-01-01.json"
    arms = ["--arms", "fp32,vllm-replay,P4+8", "--python", python, "--out", str(out)]
    assert e2e.main(arms) == 0
    rows = json.loads(out.read_text())
    later = [r | {"arm": "P8+4", "commit": "fedcba98"} for r in rows if r["arm"] == "P4+8"]
    out.write_text(json.dumps(rows + later))
    text = e2e.report(tmp_path, tmp_path).read_text()
    commit = rows[0]["commit"][:7]
    assert f"commits {commit} and fedcba9, vLLM" in text
    line = next(x for x in text.splitlines() if x.startswith("| P8+4 (fedcba9) |"))
    assert "| 2.50† | 2.00*† |" in line
    line = next(x for x in text.splitlines() if x.startswith(f"| P4+8 ({commit}) |"))
    assert "| 2.50 | 2.00* |" in line


def test_hosts_are_compared_apart(python: str, tmp_path: Path) -> None:
    out = tmp_path / "e2e_decode_speedup-h200-2026-01-01.json"
    argv = ["--arms", "fp32,P4+8,P4+8-served", "--python", python, "--out", str(out)]
    argv += ["--parallel", "3", "--batches", "8:9,256:300", "--host-parts", "P4+8,P4+8-served"]
    assert e2e.main([*argv, "--host-profile"]) == 0
    rows = json.loads(out.read_text())
    # the host of a served arm is in another process: neither its parts nor its profile
    assert [r["arm"] for r in rows if "parts" in r] == 7 * ["P4+8"]
    assert [r["arm"] for r in rows if r["op"] == e2e.HOST_PROFILE] == ["fp32", "P4+8"]
    text = e2e.report(tmp_path, tmp_path).read_text()
    assert "| best arm: x fp32, lean host | 2.20 | 2.50 | yes |" in text
    assert "x fp32, as served" not in text  # its plain arm was not measured
    _, lean, served = text.split("### Batch 256, 300 tokens")
    assert lean.startswith(", lean host") and served.startswith(", as served")
    assert "| P4+8-served | v2 |" in served and " | 30.00 | 10.00 | 10.00 | – | – | " in served
    assert (
        "| arm | none | blocks | spin | gc | hooks | answers | blocks, spin, gc, hooks, answers |"
        in text
    )
    assert "| P4+8, batch 256 |" + 7 * " 10.00 |" in text
    assert "| fp32, batch 256 | 25.00 | 2.50 | – | – |" in text


def test_a_note_of_the_rows_is_in_the_report(python: str, tmp_path: Path) -> None:
    out = tmp_path / "e2e_decode_speedup-h200-2026-01-01.json"
    assert e2e.main(["--arms", "fp32", "--python", python, "--out", str(out)]) == 0
    rows = json.loads(out.read_text())
    out.write_text(json.dumps([r | {"note": "Not a quiet machine."} for r in rows]))
    text = e2e.report(tmp_path, tmp_path).read_text()
    assert text.count("\nNot a quiet machine.\n") == 1


def test_what_ran_out_of_time_says_so(python: str, tmp_path: Path) -> None:
    out = tmp_path / "e2e.json"
    Path(python).write_text("#!/bin/sh\nexec sleep 3\n")
    args = ["--arms", "fp32", "--python", python, "--out", str(out), "--seconds", "0"]
    assert e2e.main(args) == 1
    (row,) = json.loads(out.read_text())
    assert row["error"] == "ran out of time, starting"


def test_a_wave_waits_for_its_turn(python: str, tmp_path: Path) -> None:
    out, turn = tmp_path / "e2e.json", tmp_path / "turn"
    args = ["--arms", "fp32", "--python", python, "--out", str(out), "--after", str(turn)]
    timer = threading.Timer(1.5, turn.touch)
    timer.start()
    assert e2e.main(args) == 0 and turn.exists()
    turn.unlink()
    assert e2e.main([*args, "--seconds", "8"]) == 1
    (row,) = json.loads(out.read_text())
    assert row["error"] == "ran out of time, up"


def test_a_slow_start_does_not_hold_up_the_others(python: str, tmp_path: Path) -> None:
    slow = Path(python).read_text().replace("import json,", "import time, json,", 1)
    slow = slow.replace('print("READY', 'time.sleep(6 * bool(options))\nprint("READY', 1)
    Path(python).write_text(slow)
    out = tmp_path / "e2e.json"
    args = ["--arms", "P4+8,fp32", "--parallel", "2", "--python", python, "--out", str(out)]
    assert e2e.main([*args, "--start-seconds", "2", "--batches", "8:9"]) == 0
    late, plain = json.loads(out.read_text())
    assert late["error"] == "ran out of time, starting" and plain["step_ms"] == 25.0


def test_an_engine_that_hangs_ends_and_the_others_go_on(python: str, tmp_path: Path) -> None:
    slow = Path(python).read_text().replace("import json,", "import time, json,", 1)
    slow = slow.replace(
        "    point = json", "    time.sleep(60 * bool(options))\n    point = json", 1
    )
    Path(python).write_text(slow)
    out = tmp_path / "e2e.json"
    args = ["--arms", "P4+8,fp32", "--parallel", "2", "--python", python, "--out", str(out)]
    assert e2e.main([*args, "--point-seconds", "1", "--batches", "8:9,1:9"]) == 0
    hung, *plain = json.loads(out.read_text())
    assert hung["arm"] == "P4+8" and "error" in hung
    assert [r["batch"] for r in plain] == [8, 1]


def test_an_engine_that_dies_keeps_its_rows_and_says_why(python: str, tmp_path: Path) -> None:
    text = Path(python).read_text()
    text = text.replace('== "e4m3":', '== "e4m3" and found["rows"]:', 1)
    Path(python).write_text(text)
    out = tmp_path / "e2e.json"
    args = ["--arms", "e4m3", "--python", python, "--out", str(out), "--batches", "8:9,1:9"]
    assert e2e.main(args) == 0
    first, last = json.loads(out.read_text())
    assert first["step_ms"] == 10.0 and last["error"] == "RuntimeError: out of memory"


def test_a_plan_has_engines_of_several_models_in_waves(python: str, tmp_path: Path) -> None:
    plan, out, logs = tmp_path / "plan.txt", tmp_path / "e2e.json", tmp_path / "logs"
    plan.write_text(
        "# one wave\n\n"
        "--model qwen3.5-4b --arms fp32,P8+4 --batches 256:300,512:9 --profile 256  # two\n"
        "--arms P4+8 --batches 8:20\n\n\n"
        "--arms fp32 --batches 8:20"
    )
    argv = ["--plan", str(plan), "--python", python, "--out", str(out), "--logs", str(logs)]
    assert e2e.main(argv) == 0
    rows = json.loads(out.read_text())
    assert [(r["model"][:4], r["arm"], r["batch"], r["op"]) for r in rows] == [
        *(("qwen", "fp32", b, o) for b, o in ((256, e2e.OP), (512, e2e.OP), (256, e2e.PROFILE))),
        *(("qwen", "P8+4", b, o) for b, o in ((256, e2e.OP), (512, e2e.OP), (256, e2e.PROFILE))),
        ("nemo", "P4+8", 8, e2e.OP),
        ("nemo", "fp32", 8, e2e.OP),
    ]
    # room for 256 requests of 300 tokens or 512 of 9, whichever takes more
    need = e2e.cache_bytes("qwen3.5-4b", e2e.ARMS["P8+4"], 512, 32)
    assert rows[3]["cache_gib"] == round(need / 2**30, 3)
    assert {p.name for p in logs.glob("*.log")} == {
        "qwen3.5-4b-fp32-512.log",
        "qwen3.5-4b-P8+4-512.log",
        "nemotron-3-nano-4b-P4+8-8.log",
        "nemotron-3-nano-4b-fp32-8.log",
    }
    assert e2e.main([*argv, "--rehearse"]) == 0
    rehearsed = json.loads(out.read_text())
    assert [(r["batch"], r["tokens"]) for r in rehearsed] == [(256, 8), (256, 8), (8, 8), (8, 8)]
    share = rehearsed[1]["cache_gib"] / rows[3]["cache_gib"]
    assert share == pytest.approx(e2e.REHEARSED, rel=1e-3)


@pytest.mark.parametrize(
    ("text", "message"), [("# none\n", "names no engine"), ("--arms fp33", "unknown arm 'fp33'")]
)
def test_an_unusable_plan_is_refused(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "plan.txt").write_text(text)
    with pytest.raises(SystemExit):
        e2e.main(["--plan", str(tmp_path / "plan.txt")])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("module", "beside"), [(e2e, 10), (e2e_spec, 12)])
def test_the_waves_of_the_plans_fit_one_gpu(
    module: ModuleType, beside: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    waves: list[Any] = []
    monkeypatch.setattr(e2e, "run", lambda args, kind, line, plan: waves.extend(plan))
    name = module.__name__.rsplit(".", 1)[-1]
    with pytest.raises(TypeError):  # no rows
        module.main(["--plan", str(Path(e2e.__file__).with_name(f"{name}-h200.txt"))])
    assert len(waves) >= 5
    for wave in waves:
        taken = 0.0
        for line in wave:
            for arm in map(module.arm_of, line.arms):
                made = module.engine_arguments(Path("m"), arm, line)
                taken += made["kv_cache_memory_bytes"] / 2**30 + beside
        assert 30 < taken < 133


def test_rows_of_a_run_replace_those_that_they_measure_again(python: str, tmp_path: Path) -> None:
    results, run = tmp_path / "results", tmp_path / "run.json"
    results.mkdir()
    argv = ["--python", python, "--batches", "256:300,8:9"]
    old = results / "e2e_decode_speedup-h200-2026-01-01.json"
    assert e2e.main([*argv, "--arms", "P4+8,fp32,fp16", "--out", str(old)]) == 0
    rows = json.loads(old.read_text())
    old.write_text(json.dumps([r | {"commit": "0ld", "date": "2026-01-01"} for r in rows]))
    assert e2e.main([*argv, "--arms", "e4m3,fp32", "--batches", "256:300", "--out", str(run)]) == 0
    late = rows[0] | {"arm": "P4+8", "error": "ran out of time, up"}
    run.write_text(json.dumps([*json.loads(run.read_text()), late]))
    path = e2e.add_rows([run], results, e2e.OP, list(e2e.ARMS))
    assert path.name > old.name
    found = [(r["arm"], r.get("batch"), r["commit"] == "0ld") for r in json.loads(path.read_text())]
    assert found == [
        ("fp32", 256, False),
        ("fp32", 8, True),
        ("fp16", 256, True),
        ("fp16", 8, True),
        ("P4+8", 256, True),
        ("P4+8", 8, True),
        ("e4m3", None, False),  # failed
    ]
    run.write_text(json.dumps([late]))
    with pytest.raises(ValueError, match="no measured row"):
        e2e.add_rows([run], results, e2e.OP, list(e2e.ARMS))


def test_a_report_without_results_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no e2e_decode_speedup file"):
        e2e.report(tmp_path, tmp_path)


def test_the_exit_code_says_that_nothing_ran(python: str, tmp_path: Path) -> None:
    out = str(tmp_path / "e2e.json")
    assert e2e.main(["--arms", "e4m3", "--python", python, "--out", out]) == 1


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--arms", "fp33"], "unknown arm 'fp33'"),
        (["--batches", "8x"], "'8x' is no batch"),
        (["--batches", "8:4"], "8 tokens or more"),
    ],
)
def test_unusable_arguments_are_refused(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as error:
        e2e.main(argv)
    assert error.value.code == 2 and message in capsys.readouterr().err


def test_a_trace_is_summed_by_kernel(tmp_path):
    events = [
        {"cat": "kernel", "name": "readout_kernel", "ts": 10.0, "dur": 4.0},
        {"cat": "kernel", "name": "flush_kernel", "ts": 12.0, "dur": 4.0},  # 2 of them alone
        {"cat": "kernel", "name": "readout_kernel", "ts": 20.0, "dur": 5.0},
        {"cat": "cpu_op", "name": "aten::mm", "ts": 0.0, "dur": 100.0},
        {"name": "process_name", "ph": "M"},
    ]
    path = tmp_path / "trace.json.gz"
    with gzip.open(path, "wt") as stream:
        json.dump({"traceEvents": events}, stream)
    found = e2e.read_trace(path)
    assert found["span_us"] == 15.0 and found["busy_us"] == 11.0
    assert found["kernels"] == [["readout_kernel", 2, 9.0], ["flush_kernel", 1, 4.0]]
    row = {"arm": "P4+8", "batch": 256, **found, "steps": 2, "busy_us": 11e3, "span_us": 15e3}
    text = "\n".join(e2e._profile_table([row | {"arm": "fp32", "busy_us": 22e3}, row]))
    assert "| P4+8, batch 256 | 5.50 | 2.00 | – | 73% |" in text


def test_a_trace_is_of_steps_with_as_many_requests_as_run_together(
    llm: Any, tmp_path: Path
) -> None:
    said, steps = [], []
    llm.llm_engine.start_profile = lambda: said.append(len(steps))
    llm.llm_engine.stop_profile = lambda: said.append(len(steps))
    inner = llm.llm_engine.step
    llm.llm_engine.step = lambda: (steps.append(1), inner())
    events = [{"cat": "kernel", "name": "verify_kernel", "ts": 0.0, "dur": 4.0}]
    (tmp_path / "a.json").write_text(json.dumps({"traceEvents": events}))
    found = e2e.profile(llm, 4, 100, tmp_path, steps=5, tokens=40)
    # one request more a step up to the fourth, which is the first of eight that are left out
    assert said == [11, 16] and found["steps"] == 5 and found["busy_us"] == 4.0
    table = e2e._profile_table([found | {"arm": "P4+8", "batch": 512}], ("vllm",))
    assert "From a trace of 5 decode steps" in table[2]
    assert table[4].startswith("| arm | GPU, ms a step | x vllm | busy | read |")


def test_a_trace_without_kernels_is_refused(tmp_path):
    path = tmp_path / "trace.json"
    path.write_text(
        json.dumps({"traceEvents": [{"cat": "cpu_op", "ts": 0, "dur": 1, "name": "x"}]})
    )
    with pytest.raises(ValueError, match=r"trace\.json holds no GPU kernel"):
        e2e.read_trace(path)
