"""Whole engines: the plugin against plain vLLM and against the transformers backend.

On a CPU vLLM computes Mamba-2 models in fp32, where equal means token for token. Its Gated DeltaNet
kernels are bf16: there two runs may part where vLLM's own choice was a tie, within the rounding of
the logits.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from replayssm_quant.backends.vllm.cursors import slot_keys
from replayssm_quant.formats.philox import request_key

pytestmark = pytest.mark.slow

LENGTHS = [1, 2, 15, 16, 17, 33]
FP32 = {"update_dtype": "fp32"}
SHIPPED = [("nemotron_h", "float32"), ("qwen3_5_text", "bfloat16")]
# logits of these models stay below 32, where a bf16 step is 2**-3; a log-probability moves by the
# rounding of two logits
BF16_TIE = 2 * 2.0**-3


def first_difference(a: list[int], b: list[int]) -> int | None:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), None)


def assert_same(found: dict[str, Any], wanted: dict[str, Any], tie: float = 0.0) -> None:
    """Token for token, or parting where both runs saw a gap of at most ``tie``."""
    assert "error" not in found, found
    for row, (a, b) in enumerate(zip(found["ids"], wanted["ids"], strict=True)):
        at = first_difference(a, b)
        if at is None:
            continue
        gap = max(found["gaps"][row][at], wanted["gaps"][row][at])
        assert gap <= tie, f"row {row} parts at token {at} with a gap of {gap}"


class Scenarios:
    def __init__(self, model: Path, dtype: str, prompts: list[list[int]]):
        self.model, self.prompts, self.jobs = model, prompts, []
        self.engine = {
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "max_model_len": 512,
            "max_num_seqs": 8,
            "dtype": dtype,
        }

    def add(self, name: str, options: dict | None, engine: dict | None = None, **more: Any) -> None:
        base = {"name": name, "model": str(self.model), "options": options, "tokens": 40}
        base |= {"prompts": self.prompts, "engine": self.engine | (engine or {})}
        self.jobs.append(base | more)


def add_common(s: Scenarios, excerpt: Any) -> None:
    s.add("stock", None)
    s.add("fp32", FP32, poison=True)
    s.add("fp32-L1", FP32 | {"buffer_len": 1}, poison=True)
    s.add("fp32-L5", FP32 | {"buffer_len": 5, "stagger": True})
    s.add("arriving", FP32, arrive=[0, 3, 5, 9, 10, 20], poison=True)
    s.add("alone", FP32, alone=True)
    # 16 tokens a step, at most 15 of one prompt: the second prompt gets chunks of one token, which
    # run as decode rows, and then a longer one, which must fold them in
    chunks = {"max_num_batched_tokens": 16, "long_prefill_token_threshold": 15}
    prompts = [excerpt(45, 7), excerpt(40, 8)]
    s.add("chunks-stock", None, chunks, prompts=prompts)
    s.add("chunks", FP32, chunks, prompts=prompts, poison=True)
    s.add("chunks-L2", FP32 | {"buffer_len": 2}, chunks, prompts=prompts)
    at_once = {"stagger": False}  # as transformers' backend flushes
    s.add("published", {"update_dtype": "fp16", "rounding": "rn"} | at_once, poison=True)
    s.add("recipe", {"recipe": "auto"} | at_once, poison=True)
    s.add("coarse", {"update_dtype": "nvfp4", "buffer_len": 1, "rounding": "rn"})


@pytest.fixture(scope="module")
def mamba2(run_worker: Any, tiny_models: dict[str, Path], excerpt: Any) -> dict[str, Any]:
    s = Scenarios(tiny_models["nemotron_h"], "float32", [excerpt(n) for n in LENGTHS])
    add_common(s, excerpt)
    # a cache of nine blocks: three requests fit, and not once they outgrow their attention block
    small = {"num_gpu_blocks_override": 10, "max_model_len": 1024}
    long = [excerpt(365 + i) for i in range(5)]
    s.add("long-stock", None, {"max_model_len": 1024}, prompts=long, alone=True)
    s.add("preempted", FP32, small, prompts=long, poison=True)
    return run_worker(s.jobs)


@pytest.fixture(scope="module")
def gdn(run_worker: Any, tiny_models: dict[str, Path], excerpt: Any) -> dict[str, Any]:
    s = Scenarios(tiny_models["qwen3_5_text"], "bfloat16", [excerpt(n) for n in LENGTHS])
    add_common(s, excerpt)
    return run_worker(s.jobs)


EQUAL = [
    ("fp32", "stock"),
    ("fp32-L1", "stock"),
    ("fp32-L5", "stock"),
    ("arriving", "stock"),
    ("alone", "stock"),
    ("chunks", "chunks-stock"),
    ("chunks-L2", "chunks-stock"),
]


@pytest.mark.parametrize(("name", "wanted"), [*EQUAL, ("preempted", "long-stock")])
def test_mamba2_on_an_fp32_state_is_plain_vllm(mamba2: dict, name: str, wanted: str) -> None:
    assert_same(mamba2[name], mamba2[wanted])


@pytest.mark.parametrize(("name", "wanted"), EQUAL)
def test_gdn_on_an_fp32_state_is_plain_vllm(gdn: dict, name: str, wanted: str) -> None:
    assert_same(gdn[name], gdn[wanted], BF16_TIE)


@pytest.mark.parametrize("family", ["mamba2", "gdn"])
def test_scenarios_did_what_they_are_for(family: str, request: pytest.FixtureRequest) -> None:
    found = request.getfixturevalue(family)
    assert found["stock"]["layers"] == 0 and found["fp32"]["layers"] > 0
    assert not found["fp32"]["prefix_caching"]
    generated = sum(len(ids) for ids in found["fp32"]["ids"])
    log = found["fp32"]["log"]
    assert log["rows"] == generated - len(LENGTHS)  # the first token comes from the prefill
    assert log["flushes"] == len(LENGTHS) * (39 // 16)
    assert found["fp32-L1"]["log"]["flushes"] == log["rows"]
    assert found["chunks"]["log"]["folded"] > 0
    assert len(set(found["alone"]["log"]["slots"])) < len(LENGTHS)  # a slot was used again
    # the V1 runner shows no request: keys belong to slots, each tenant's its own
    assert log["keys"] == [request_key(0, slot) for slot in log["slots"]]
    alone = found["alone"]["log"]
    turns = [alone["slots"][:i].count(slot) for i, slot in enumerate(alone["slots"])]
    assert max(turns) > 0
    assert alone["keys"] == [
        int(slot_keys(0, slot + 1, "cpu", turn)[slot])
        for slot, turn in zip(alone["slots"], turns, strict=True)
    ]
    # the checks above can fail: a coarse state gives other tokens
    coarse, stock = found["coarse"]["ids"], found["stock"]["ids"]
    assert any(first_difference(a, b) is not None for a, b in zip(coarse, stock, strict=True))


@pytest.mark.parametrize("family", ["mamba2", "gdn"])
def test_a_pipeline_rank_without_such_layers_has_pages_of_the_same_size(
    family: str, request: pytest.FixtureRequest
) -> None:
    found = request.getfixturevalue(family)
    for result in found.values():
        pages = result["cache_pages"]
        assert pages["bare"] == pages["rank"] and max(pages["rank"], default=0) > 0
        assert set(result["page"]) <= set(pages["rank"])
    stock, recipe = (max(found[n]["cache_pages"]["bare"]) for n in ("stock", "recipe"))
    assert recipe < stock


def test_requests_were_preempted(mamba2: dict) -> None:
    assert mamba2["preempted"]["preempted"] > 0


@pytest.mark.parametrize("family", ["mamba2", "gdn"])
@pytest.mark.parametrize("name", ["published", "recipe"])
def test_split_formats_give_the_tokens_of_the_transformers_backend(
    family: str, name: str, request: pytest.FixtureRequest, tiny_models: dict[str, Path]
) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    from replayssm_quant.backends.hf import split_state
    from replayssm_quant.config import StateConfig
    from replayssm_quant.recipe import resolve
    from replayssm_quant.state.geometry import read_geometry

    found = request.getfixturevalue(family)[name]
    folder = tiny_models["nemotron_h" if family == "mamba2" else "qwen3_5_text"]
    dtype = torch.float32 if family == "mamba2" else torch.bfloat16
    hf = AutoConfig.from_pretrained(folder)
    configs = dict.fromkeys(read_geometry(hf).layers, StateConfig.from_flags("fp16", rounding="rn"))
    if name == "recipe":
        configs = resolve("auto", hf).configs(read_geometry(hf))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    wanted: dict[str, Any] = {"ids": [], "gaps": []}
    slots = found["log"]["slots"]
    assert len(slots) == len(LENGTHS)
    # vLLM's V1 runner keys the random bits by slot; request i of the other backend has that key
    for prompt, slot in zip(found["prompts"], slots, strict=True):
        ids = torch.tensor([prompt])
        with split_state(model, configs, requests=[slot]):
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=40,
                min_new_tokens=40,
                do_sample=False,
                output_logits=True,
                return_dict_in_generate=True,
            )
        wanted["ids"].append(out.sequences[0, len(prompt) :].tolist())
        top = torch.stack(out.logits)[:, 0].float().log_softmax(-1).topk(2).values
        wanted["gaps"].append((top[:, 0] - top[:, 1]).tolist())
    assert_same(found, wanted, BF16_TIE if family == "gdn" else 1e-3)


def _falcon_h1() -> Any:
    from transformers import FalconH1Config, FalconH1ForCausalLM

    sizes = {"mamba_d_ssm": 256, "mamba_n_heads": 4, "mamba_d_head": 64, "mamba_d_state": 64}
    return FalconH1ForCausalLM(
        FalconH1Config(**SMALL, **sizes, num_key_value_heads=1, head_dim=64, mamba_chunk_size=64)
    )


def _granite() -> Any:
    from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM

    sizes = {"mamba_n_heads": 4, "mamba_d_head": 64, "mamba_d_state": 64, "mamba_chunk_size": 64}
    return GraniteMoeHybridForCausalLM(
        GraniteMoeHybridConfig(
            **SMALL,
            **sizes,
            layer_types=["mamba", "attention"],
            num_key_value_heads=1,
            num_local_experts=0,
            shared_intermediate_size=256,
            position_embedding_type="rope",
        )
    )


def _zamba2() -> Any:
    from transformers import Zamba2Config, Zamba2ForCausalLM

    return Zamba2ForCausalLM(
        Zamba2Config(
            **SMALL | {"num_hidden_layers": 3},
            layers_block_type=["mamba", "hybrid", "mamba"],
            mamba_d_state=64,
            n_mamba_heads=4,
            num_key_value_heads=2,
            num_mem_blocks=1,
            adapter_rank=8,
            chunk_size=64,
        )
    )


def _mamba2() -> Any:
    from transformers import Mamba2Config, Mamba2ForCausalLM

    sizes = {"num_heads": 4, "head_dim": 64, "state_size": 64, "n_groups": 1, "chunk_size": 64}
    return Mamba2ForCausalLM(Mamba2Config(**SMALL, **sizes))


SMALL = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "eos_token_id": None,
}
NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 4,
}
FAMILIES = {"falcon_h1": _falcon_h1, "granite": _granite, "zamba2": _zamba2, "mamba2": _mamba2}


@pytest.fixture(scope="module")
def families(run_worker: Any, tmp_path_factory: pytest.TempPathFactory, excerpt: Any) -> Any:
    """Random models of the families that do not ship, with and without the plugin."""
    jobs = []
    for name, make in FAMILIES.items():
        torch.manual_seed(0)
        model, folder = make().float(), tmp_path_factory.mktemp(name)
        with torch.no_grad():  # spread the logits, so that greedy choices are no ties
            for key, p in model.named_parameters():
                if p.ndim >= 2 and "conv" not in key:
                    p.normal_(0, 1.0 if "embed" in key else p.shape[-1] ** -0.5)
        model.save_pretrained(folder)
        s = Scenarios(folder, "float32", [excerpt(n) for n in LENGTHS])
        s.add(name + "-stock", None)
        s.add(name, FP32, poison=True)
        s.add(name + "-drafts", FP32, {"speculative_config": NGRAM}, poison=True)
        jobs += s.jobs
    return run_worker(jobs)


@pytest.mark.parametrize("name", FAMILIES)
def test_other_families_on_an_fp32_state_are_plain_vllm(families: dict, name: str) -> None:
    assert families[name].get("layers", 0) > 0, families[name]
    assert_same(families[name], families[name + "-stock"])
    drafts = families[name + "-drafts"]
    assert_same(drafts, families[name + "-stock"])
    assert drafts["log"]["drafted"] > 0 and drafts["log"]["flushes"] > 0


@pytest.mark.parametrize(("model", "dtype"), SHIPPED)
def test_an_unused_plugin_changes_no_token(
    model: str, dtype: str, run_worker: Any, tiny_models: dict, excerpt: Any
) -> None:
    s = Scenarios(tiny_models[model], dtype, [excerpt(n) for n in LENGTHS])
    s.add("plain", None)
    found = run_worker(s.jobs)["plain"]
    without = run_worker(s.jobs, VLLM_PLUGINS="none")["plain"]
    assert found["ids"] == without["ids"] and found["gaps"] == without["gaps"]


def test_overrides_fit_the_installed_vllm(run_worker: Any) -> None:
    found = run_worker("signatures")
    assert found["problems"] == [] and found["checked"] >= 20
    assert len(found["marks"]) == 4 and set(found["marks"].values()) == {1}
    assert found["imported"] == []  # by registering, twice
