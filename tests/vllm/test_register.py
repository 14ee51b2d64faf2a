"""Registration on a small stand-in for vLLM's modules: imports, ranges of patches, refusals."""

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from replayssm_quant.backends.vllm import imports, plugin
from replayssm_quant.backends.vllm.blocks import MARK
from replayssm_quant.backends.vllm.checks import ANY_VERSION, ARCHITECTURES
from replayssm_quant.backends.vllm.options import KEY

FILES = {
    "version": "__version_tuple__ = {version}",
    "logger": "said = []\n"
    "class Logger:\n"
    "    def warning(self, line, *args): said.append(line % args)\n"
    "def init_logger(name): return Logger()",
    "engine.arg_utils": "class EngineArgs:\n"
    "    def _set_default_chunked_prefill_and_prefix_caching_args(self): return 1",
    "v1.worker.gpu_model_runner": "class GPUModelRunner:\n"
    "    def _determine_batch_execution_and_padding(self, num_tokens, num_reqs): return 1",
    "model_executor.models.registry": "class ModelRegistry:\n"
    "    models = {{}}\n"
    "    calls = []\n"
    "    @classmethod\n"
    "    def get_supported_archs(cls): return ['LlamaForCausalLM', 'NemotronHForCausalLM']\n"
    "    @classmethod\n"
    "    def register_model(cls, name, where):\n"
    "        cls.models[name] = where\n"
    "        cls.calls.append(name)",
    "model_executor.models.config": "class VerifyAndUpdateConfig:\n"
    "    seen = []\n"
    "    @classmethod\n"
    "    def verify_and_update_config(cls, config): cls.seen.append(config)\n"
    "MODELS_CONFIG_MAP = {{}}",
    "v1.core.sched.scheduler": "class Scheduler:\n"
    "    def __init__(self): pass\n"
    "    def _update_after_schedule(self, output): pass",
}
SCHEDULER, RUNNER = "v1.core.sched.scheduler", "v1.worker.gpu_model_runner"


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """make(version, **changed files): a package ``vllm`` that is forgotten after the test."""

    def make(version: tuple[int, ...], **changed: str) -> None:
        for name, text in FILES.items():
            path = tmp_path / "vllm" / (name.replace(".", "/") + ".py")
            path.parent.mkdir(parents=True, exist_ok=True)
            text = changed.get(name.rpartition(".")[2], text)
            path.write_text(text.replace("{version}", str(version)).replace("{{}}", "{}"))
        for folder in [tmp_path / "vllm", *(tmp_path / "vllm").rglob("*/")]:
            (folder / "__init__.py").touch()
        monkeypatch.syspath_prepend(tmp_path)

    def forget() -> None:
        for name in [n for n in sys.modules if n == "vllm" or n.startswith("vllm.")]:
            del sys.modules[name]

    forget()
    monkeypatch.delenv(ANY_VERSION, raising=False)
    monkeypatch.setattr(sys, "meta_path", [f for f in sys.meta_path if f is not imports._watch])
    monkeypatch.setattr(imports._watch, "awaited", {})
    monkeypatch.setattr(plugin, "_wanted", [])
    monkeypatch.setattr(plugin, "_failed", {})
    yield make
    forget()


def module(name: str) -> Any:
    return importlib.import_module(f"vllm.{name}")


def patched() -> dict[str, bool]:
    """Whether each function that the table names carries our mark, its module imported now."""
    scheduler = module(SCHEDULER).Scheduler
    arguments = module("engine.arg_utils").EngineArgs
    runner = module(RUNNER).GPUModelRunner
    return {
        "graphs": MARK in vars(runner._determine_batch_execution_and_padding),
        "init": MARK in vars(scheduler.__init__),
        "step": MARK in vars(scheduler._update_after_schedule),
        "arguments": MARK in vars(arguments._set_default_chunked_prefill_and_prefix_caching_args),
        "models": bool(module("model_executor.models.config").MODELS_CONFIG_MAP),
    }


def asked(architecture: str = "LlamaForCausalLM", **options: Any) -> SimpleNamespace:
    model = SimpleNamespace(architecture=architecture)
    return SimpleNamespace(additional_config=options, model_config=model)


def check_of(architecture: str) -> Callable[[Any], None]:
    table = module("model_executor.models.config").MODELS_CONFIG_MAP
    return table[architecture].verify_and_update_config


def test_registration_imports_nothing_of_vllm_and_changes_it_once_it_is_there(
    stand_in: Callable[..., None],
) -> None:
    stand_in((0, 33, 1))
    plugin.register()
    there = {n for n in sys.modules if n.startswith("vllm.")}
    assert there == {"vllm.version"}
    assert all(patched().values())
    models = module("model_executor.models.registry").ModelRegistry.models
    assert set(models) == set(ARCHITECTURES)
    assert models["Zamba2ForCausalLM"] == f"{plugin.MODELS}:Zamba2ForCausalLM"
    assert not imports._watch.awaited and not plugin._failed


@pytest.mark.parametrize("early", [False, True], ids=["before", "after"])
def test_registering_twice_doubles_nothing(stand_in: Callable[..., None], early: bool) -> None:
    """Both before vLLM's modules are imported, or once more after."""
    stand_in((0, 32, 0))
    plugin.register()
    if early:
        plugin.register()
    assert all(patched().values())
    scheduler, table = module(SCHEDULER).Scheduler, module("model_executor.models.config")
    functions = [vars(scheduler)["__init__"], vars(scheduler)["_update_after_schedule"]]
    bases = {k: v.__mro__ for k, v in table.MODELS_CONFIG_MAP.items()}
    plugin.register()
    assert functions == [vars(scheduler)["__init__"], vars(scheduler)["_update_after_schedule"]]
    assert {k: v.__mro__ for k, v in table.MODELS_CONFIG_MAP.items()} == bases
    assert all(not hasattr(f.__wrapped__, "__wrapped__") for f in functions)
    assert all(sum(MARK in vars(c) for c in mro) == 1 for mro in bases.values())
    calls = module("model_executor.models.registry").ModelRegistry.calls
    assert len(calls) == 2 * len(ARCHITECTURES)  # the second call writes the same names again
    assert [f for f in sys.meta_path if f is imports._watch] == [imports._watch]
    config = asked()
    check_of("LlamaForCausalLM")(config)
    assert table.VerifyAndUpdateConfig.seen == [config]


def test_another_version_gets_the_check_alone(stand_in: Callable[..., None]) -> None:
    stand_in((0, 34, 0))
    plugin.register()
    assert [name for name, found in patched().items() if found] == ["models"]
    assert not module("model_executor.models.registry").ModelRegistry.models
    check_of("LlamaForCausalLM")(asked())
    with pytest.raises(ValueError, match="written for vLLM 0.32 and 0.33, not 0.34"):
        check_of("LlamaForCausalLM")(asked(**{KEY: {"recipe": "auto"}}))


def test_another_version_without_the_check_s_place_goes_on(stand_in: Callable[..., None]) -> None:
    stand_in((0, 99, 0), config="nothing = 1")
    plugin.register()
    module("model_executor.models.config")
    (line,) = module("logger").said
    assert line.startswith("replayssm_quant is written for vLLM") and "MODELS_CONFIG_MAP" in line


def test_a_patch_is_applied_in_its_range_alone(
    stand_in: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    old = [plugin.Patch(p.target, p.reason, p.make, ((0, 32), (0, 32))) for p in plugin.PATCHES]
    monkeypatch.setattr(plugin, "PATCHES", (*plugin.PATCHES[:2], *old[2:]))
    stand_in((0, 33, 0))
    plugin.register()
    assert [name for name, found in patched().items() if found] == ["arguments", "models"]
    monkeypatch.setenv(ANY_VERSION, "1")  # 0.33 is known to do without them
    plugin.register()
    assert not patched()["init"] and not hasattr(sys.modules.get("vllm.logger"), "said")


def test_the_override_applies_every_patch_and_names_it(
    stand_in: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ANY_VERSION, "1")
    stand_in((0, 34, 2))
    plugin.register()
    assert all(patched().values())
    said = module("logger").said
    assert [p.target in line for p, line in zip(plugin.PATCHES, said, strict=True)] == [True] * 5
    assert all("as in vLLM 0.32 to 0.33, though this is 0.34" in line for line in said)


@pytest.mark.parametrize(
    ("name", "text", "lacking"),
    [
        ("scheduler", "class Scheduler:\n    def __init__(self): pass", "_update_after_schedule"),
        ("scheduler", "import no_such_module", "no_such_module"),
        ("arg_utils", "", "EngineArgs"),
    ],
)
def test_a_place_that_is_gone_is_one_line_for_those_who_ask(
    stand_in: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    text: str,
    lacking: str,
) -> None:
    monkeypatch.setenv(ANY_VERSION, "1")
    monkeypatch.setattr(plugin, "check", lambda config, problem: config.additional_config or None)
    stand_in((0, 34, 0), **{name: text})
    plugin.register()
    run = check_of("LlamaForCausalLM")
    run(asked())  # nobody asks for the plugin: vLLM goes on
    with pytest.raises(ValueError, match=f"cannot change vllm.*{lacking}") as found:
        run(asked(**{KEY: {"recipe": "auto"}}))
    assert "\n" not in str(found.value)


def test_a_place_of_one_model_runner_is_left_to_its_process(
    stand_in: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugin, "check", lambda config, problem: config.additional_config or None)
    stand_in((0, 33, 0), gpu_model_runner="raise ValueError('no GPU here')")
    plugin.register()
    check_of("LlamaForCausalLM")(asked(**{KEY: {"recipe": "auto"}}))
    assert f"vllm.{RUNNER}" not in sys.modules
    stand_in((0, 33, 0), gpu_model_runner="class GPUModelRunner: pass")
    module(RUNNER)
    (line,) = module("logger").said
    assert "cannot change vllm.v1.worker.gpu_model_runner" in line


def test_an_import_that_fails_is_waited_for_again(stand_in: Callable[..., None]) -> None:
    stand_in((0, 33, 0), arg_utils="raise ValueError('first')")
    plugin.register()
    with pytest.raises(ValueError, match="first"):
        module("engine.arg_utils")
    stand_in((0, 33, 0))
    assert patched()["arguments"]


@pytest.mark.parametrize("asked", [True, False])
def test_prompts_as_long_as_decode_rows_get_no_graph_of_decode_steps(asked: bool) -> None:
    """V1's runner asks for lengths alone; rows 0 and 1 are those of the step, 2 is stale."""

    class Runner:
        vllm_config = SimpleNamespace(
            additional_config={"replayssm_quant": {"update_dtype": "fp16"}} if asked else {}
        )

        def determine(
            self, num_tokens: int, num_reqs: int, force_uniform_decode: bool | None = None
        ) -> bool:
            if force_uniform_decode is None:
                return num_tokens == num_reqs
            return force_uniform_decode

    make = plugin._no_decode_graph_for_prompts
    Runner.determine = make(make(Runner.determine))  # type: ignore[method-assign]
    assert times_wrapped(Runner.determine) == 1
    for computed, prompt, decodes in [
        ([3, 9, 0], [3, 4, 7], True),
        ([3, 0, 0], [3, 1, 7], False),  # a prompt of one token
        ([0, 0, 0], [1, 1, 7], False),
        ([3, 6, 9], [3, 7, 7], False),  # the last token of a longer one
    ]:
        runner = Runner()
        batch = {"num_computed_tokens_cpu": computed, "num_prompt_tokens": prompt}
        runner.input_batch = SimpleNamespace(  # type: ignore[attr-defined]
            **{name: np.array(values) for name, values in batch.items()}
        )
        assert runner.determine(num_tokens=2, num_reqs=2) is (decodes or not asked)
        # a capture says which graph it is for
        assert runner.determine(num_tokens=2, num_reqs=2, force_uniform_decode=True) is True


def times_wrapped(function: Any) -> int:
    count = 0
    while hasattr(function, "__wrapped__"):
        count, function = count + 1, function.__wrapped__
    return count
