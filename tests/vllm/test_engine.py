"""Whole engines: the plugin against plain vLLM and against the transformers backend.

On a CPU vLLM computes Mamba-2 models in fp32, where equal means token for token. Its Gated DeltaNet
kernels are bf16: there two runs may part where vLLM's own choice was a tie, within the rounding of
the logits. So may fp32 runs on a GPU, whose matrix products sum in an order that depends on the
batch. There engines compile and capture as they do by default, where a CPU runs them eagerly.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from replayssm_quant.backends.vllm.cursors import slot_keys
from replayssm_quant.formats.philox import request_key
from replayssm_quant.state.replay import first_offset

pytestmark = pytest.mark.slow

LENGTHS = [1, 2, 15, 16, 17, 33]
FP32 = {"update_dtype": "fp32"}
SHIPPED = [("nemotron_h", "float32"), ("qwen3_5_text", "bfloat16")]


def first_difference(a: list[int], b: list[int]) -> int | None:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), None)


class Scenarios:
    def __init__(
        self, model: Path, dtype: str, prompts: list[list[int]], how: dict[str, Any] | None = None
    ):
        """how: more of the engine; eager without it."""
        self.model, self.prompts, self.jobs = model, prompts, []
        self.engine = {
            "skip_tokenizer_init": True,
            "max_model_len": 512,
            "max_num_seqs": 8,
            "dtype": dtype,
        } | (how or {"enforce_eager": True})

    def add(self, name: str, options: dict | None, engine: dict | None = None, **more: Any) -> None:
        base = {"name": name, "model": str(self.model), "options": options, "tokens": 40}
        base |= {"prompts": self.prompts, "engine": self.engine | (engine or {})}
        self.jobs.append(base | more)


def add_common(s: Scenarios, excerpt: Any) -> None:
    s.add("stock", None)
    stock = {"against": "stock"}
    s.add("fp32", FP32, poison=True, **stock)
    s.add("fp32-L1", FP32 | {"buffer_len": 1}, poison=True, **stock)
    s.add("fp32-L5", FP32 | {"buffer_len": 5, "stagger": True}, **stock)
    s.add("arriving", FP32, arrive=[0, 3, 5, 9, 10, 20], poison=True, **stock)
    s.add("alone", FP32, alone=True, **stock)
    # 16 tokens a step, at most 15 of one prompt: the second prompt gets chunks of one token, which
    # run as decode rows, and then a longer one, which must fold them in
    chunks = {"max_num_batched_tokens": 16, "long_prefill_token_threshold": 15}
    prompts = [excerpt(45, 7), excerpt(40, 8)]
    s.add("chunks-stock", None, chunks, prompts=prompts)
    stock = {"prompts": prompts, "against": "chunks-stock"}
    at_once = {"stagger": False}  # as transformers' backend flushes
    s.add("chunks", FP32 | at_once, chunks, poison=True, **stock)
    s.add("chunks-L2", FP32 | at_once | {"buffer_len": 2}, chunks, **stock)
    s.add("published", {"update_dtype": "fp16", "rounding": "rn"} | at_once, poison=True)
    s.add("recipe", {"recipe": "auto"} | at_once, poison=True)
    s.add("coarse", {"update_dtype": "nvfp4", "buffer_len": 1, "rounding": "rn"})


@pytest.fixture(scope="module")
def mamba2(
    run_worker: Any,
    tiny_models: dict[str, Path],
    excerpt: Any,
    as_served: Any,
    attention_block: dict[str, int],
) -> dict[str, Any]:
    prompts = [excerpt(n) for n in LENGTHS]
    s = Scenarios(tiny_models["nemotron_h"], "float32", prompts, as_served({}))
    add_common(s, excerpt)
    # a cache of nine blocks: three requests fit, and not once they outgrow their attention block
    small = {"num_gpu_blocks_override": 10, "max_model_len": 1024}
    long = [excerpt(attention_block["mamba2"] - 19 + i) for i in range(5)]
    s.add("long-stock", None, {"max_model_len": 1024}, prompts=long, alone=True)
    s.add("preempted", FP32, small, prompts=long, poison=True, against="long-stock")
    # an engine whose user says nothing of prefix caching
    unset = {"enable_prefix_caching": None}
    s.add("caching-stock", None, unset, prompts=[excerpt(5)], tokens=2)
    s.add("caching", FP32, unset, against="stock")
    return run_worker(s.jobs)


@pytest.fixture(scope="module")
def gdn(
    run_worker: Any, tiny_models: dict[str, Path], excerpt: Any, as_served: Any
) -> dict[str, Any]:
    prompts = [excerpt(n) for n in LENGTHS]
    s = Scenarios(tiny_models["qwen3_5_text"], "bfloat16", prompts, as_served({}))
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
def test_mamba2_on_an_fp32_state_is_plain_vllm(
    mamba2: dict, name: str, wanted: str, assert_same: Any, ties: dict[str, float]
) -> None:
    assert_same(mamba2[name], mamba2[wanted], ties["mamba2"])


@pytest.mark.parametrize(("name", "wanted"), EQUAL)
def test_gdn_on_an_fp32_state_is_plain_vllm(
    gdn: dict, name: str, wanted: str, assert_same: Any, ties: dict[str, float]
) -> None:
    assert_same(gdn[name], gdn[wanted], ties["gdn"])


@pytest.mark.parametrize("family", ["mamba2", "gdn"])
def test_scenarios_did_what_they_are_for(family: str, request: pytest.FixtureRequest) -> None:
    found = request.getfixturevalue(family)
    assert found["stock"]["layers"] == 0 and found["fp32"]["layers"] > 0
    generated = sum(len(ids) for ids in found["fp32"]["ids"])
    log = found["fp32"]["log"]
    assert log["rows"] == generated - len(LENGTHS)  # the first token comes from the prefill
    # staggered: the first window of a request is as much shorter as its key says
    assert log["flushes"] == sum((39 + first_offset(key, 16)) // 16 for key in log["keys"])
    assert found["fp32-L1"]["log"]["flushes"] == log["rows"]
    assert found["chunks"]["log"]["folded"] > 0
    assert len(set(found["alone"]["log"]["slots"])) < len(LENGTHS)  # a slot was used again
    alone = found["alone"]["log"]
    turns = [alone["slots"][:i].count(slot) for i, slot in enumerate(alone["slots"])]
    assert max(turns) > 0
    if found["fp32"]["runner"] == "v1":  # shows no request: keys belong to slots, one a tenant
        assert log["keys"] == [request_key(0, slot) for slot in log["slots"]]
        assert alone["keys"] == [
            int(slot_keys(0, slot + 1, "cpu", turn)[slot])
            for slot, turn in zip(alone["slots"], turns, strict=True)
        ]
    else:
        assert log["keys"] == alone["keys"] and len(set(log["keys"])) == len(LENGTHS)
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


def test_prefix_caching_is_turned_off_where_nobody_asked_for_it(
    mamba2: dict, assert_same: Any, ties: dict[str, float]
) -> None:
    """With plain vLLM, which leaves it on, as the proof that the option is unset."""
    assert mamba2["caching-stock"]["prefix_caching"] is True
    assert not any("prefix caching" in line for line in mamba2["caching-stock"]["said"])
    found = mamba2["caching"]
    assert found["prefix_caching"] is False and found["layers"] > 0
    assert [line for line in found["said"] if "prefix caching" in line] == [
        "replayssm_quant turned prefix caching off, which split states do not support"
    ]
    assert_same(found, mamba2["stock"], ties["mamba2"])


def test_requests_were_preempted(mamba2: dict) -> None:
    assert mamba2["preempted"]["preempted"] > 0


class Forced:
    """A logits processor of transformers that has a model generate given tokens."""

    def __init__(self, tokens: list[int], after: int):
        self.tokens, self.after = tokens, after

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        forced = torch.full_like(scores, -torch.inf)
        forced[:, self.tokens[ids.shape[1] - self.after]] = 0
        return forced


@pytest.fixture
def torch_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have transformers prefill GDN in torch: where it is installed it takes FLA, which needs a
    GPU, and the models of this module are on the CPU."""
    from transformers.models.qwen3_5 import modeling_qwen3_5 as module

    name = "torch_chunk_gated_delta_rule"
    chosen = getattr(module, name)
    monkeypatch.setattr(module, name, getattr(chosen, "__wrapped__", chosen))


@pytest.mark.usefixtures("torch_prefill")
@pytest.mark.parametrize("family", ["mamba2", "gdn"])
@pytest.mark.parametrize("name", ["fp32", "published", "recipe"])
def test_tokens_are_those_of_the_transformers_backend(
    family: str,
    name: str,
    request: pytest.FixtureRequest,
    tiny_models: dict[str, Path],
    ties: dict[str, float],
    gpu: bool,
) -> None:
    """The other backend is given vLLM's tokens one by one, so that every one of them is compared
    on a state that has seen the same ones, also behind a tie."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from replayssm_quant.backends.hf import split_state
    from replayssm_quant.config import StateConfig
    from replayssm_quant.recipe import resolve
    from replayssm_quant.state.geometry import read_geometry

    found = request.getfixturevalue(family)[name]
    if name == "recipe" and found["runner"] != "v1":
        pytest.skip("needs VLLM_USE_V2_MODEL_RUNNER=0, under which random keys belong to slots")
    folder = tiny_models["nemotron_h" if family == "mamba2" else "qwen3_5_text"]
    dtype = torch.float32 if family == "mamba2" else torch.bfloat16
    hf = AutoConfig.from_pretrained(folder)
    of_all = {"fp32": StateConfig(), "published": StateConfig.from_flags("fp16", rounding="rn")}
    if name == "recipe":
        configs = resolve("auto", hf).configs(read_geometry(hf))
    else:
        configs = dict.fromkeys(read_geometry(hf).layers, of_all[name])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    slots = found["log"]["slots"]
    assert len(slots) == len(LENGTHS) == len(found["prompts"])
    parts, near, tie = [], 0, ties["gdn"] if family == "gdn" else 1e-3
    # vLLM's V1 runner keys the random bits by slot; request i of the other backend has the key of
    # the slot's first tenant
    for row, (prompt, slot) in enumerate(zip(found["prompts"], slots, strict=True)):
        ids, tokens = torch.tensor([prompt]), found["ids"][row]
        with split_state(model, configs, requests=[slot]):
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=40,
                min_new_tokens=40,
                do_sample=False,
                logits_processor=[Forced(tokens, len(prompt))],
                output_logits=True,
                return_dict_in_generate=True,
            )
        assert out.sequences[0, len(prompt) :].tolist() == tokens and len(tokens) == 40
        logs = torch.stack(out.logits)[:, 0].float().log_softmax(-1)
        best = logs.max(-1)
        behind = best.values - logs[torch.arange(40), torch.tensor(tokens)]
        for at in (best.indices != torch.tensor(tokens)).nonzero()[:, 0].tolist():
            parts.append((row, at, max(float(behind[at]), found["gaps"][row][at])))
        near += sum(gap <= tie for gap in found["gaps"][row])
    assert all(gap <= tie for _, _, gap in parts), parts
    # bf16 outputs of two implementations are rounded apart, so that a tie may well go either way
    assert len(parts) <= near / 4, (len(parts), near)
    if family == "mamba2" and not gpu:
        assert not parts


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


def _puzzle() -> Any:
    from transformers import NemotronHConfig, NemotronHForCausalLM

    kinds = ["linear_attention", "mlp", "full_attention", "linear_attention", "mlp"]
    sizes = {"mamba_num_heads": 4, "mamba_head_dim": 64, "ssm_state_size": 96, "n_groups": 2}
    common = {k: v for k, v in SMALL.items() if k != "num_hidden_layers"}
    return NemotronHForCausalLM(
        NemotronHConfig(
            **common,
            **sizes,
            layers_block_type=kinds,
            num_key_value_heads=1,
            head_dim=64,
            chunk_size=64,
        )
    )


PUZZLE = """
import copy
from types import SimpleNamespace

from transformers import NemotronHConfig

KINDS = {"mamba": "linear_attention", "attention": "full_attention", "mlp": "mlp", "moe": "moe"}


class PuzzleConfig(NemotronHConfig):
    model_type = "nemotron_h_puzzle"

    def __init__(self, block_configs=(), **kwargs):
        kinds = [KINDS[block["block_type"]] for block in block_configs]
        if kinds:
            kwargs["layers_block_type"] = kinds
        super().__init__(**kwargs)
        self.block_configs = [SimpleNamespace(**block) for block in block_configs]

    def to_dict(self):
        plain = copy.copy(self)
        plain.block_configs = [vars(block) for block in self.block_configs]
        return super(PuzzleConfig, plain).to_dict()

    def get_nemotron_h_config_for_layer(self, layer):
        own = copy.copy(self)
        for name, value in vars(self.block_configs[layer]).items():
            setattr(own, name, value)
        return own
"""


def _as_puzzle(folder: Path) -> None:
    """Make a NemotronH model a Puzzle one: blocks of their own sizes, a class that knows them."""
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    weights = load_file(path)
    widths = {1: 320, 4: 256}
    for name in [k for k in weights if "layers.1.mixer" in k]:
        axis = 0 if "up_proj" in name else 1
        weights[name] = torch.cat((weights[name], weights[name].narrow(axis, 0, 64).flip(1)), axis)
    save_file(weights, path, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    words = {"linear_attention": "mamba", "full_attention": "attention", "mlp": "mlp"}
    blocks: list[dict[str, Any]] = [
        {"block_type": words[kind]} for kind in config.pop("layers_block_type")
    ]
    for layer, width in widths.items():
        blocks[layer]["intermediate_size"] = width
    config |= {"model_type": "nemotron_h_puzzle", "block_configs": blocks}
    config |= {"architectures": ["NemotronHPuzzleForCausalLM"]}
    config |= {"auto_map": {"AutoConfig": "configuration_puzzle.PuzzleConfig"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "configuration_puzzle.py").write_text(PUZZLE)


def _qwen3_next() -> Any:
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    return Qwen3NextForCausalLM(Qwen3NextConfig(**QWEN, decoder_sparse_step=1))


def _qwen3_5_moe() -> Any:
    from transformers import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig

    return Qwen3_5MoeForCausalLM(
        Qwen3_5MoeTextConfig(**{k: v for k, v in QWEN.items() if k != "intermediate_size"})
    )


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
QWEN = SMALL | {
    "layer_types": ["linear_attention", "full_attention"],
    "num_key_value_heads": 1,
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
}
FAMILIES = {
    "falcon_h1": _falcon_h1,
    "granite": _granite,
    "zamba2": _zamba2,
    "mamba2": _mamba2,
    "puzzle": _puzzle,
    "qwen3_next": _qwen3_next,
    "qwen3_5_moe": _qwen3_5_moe,
}
GDN = ("qwen3_next", "qwen3_5_moe")  # which vLLM's CPU build computes in bf16 alone


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
        dtype = "bfloat16" if name in GDN else "float32"
        model.to(getattr(torch, dtype)).save_pretrained(folder)
        s = Scenarios(folder, dtype, [excerpt(n) for n in LENGTHS])
        if name == "puzzle":
            _as_puzzle(folder)
            s.engine["trust_remote_code"] = True
        s.add(name + "-stock", None)
        stock = {"against": name + "-stock"}
        s.add(name, FP32, poison=True, **stock)
        s.add(name + "-drafts", FP32, {"speculative_config": NGRAM}, poison=True, **stock)
        jobs += s.jobs
    return run_worker(jobs)


@pytest.mark.parametrize("name", FAMILIES)
def test_other_families_on_an_fp32_state_are_plain_vllm(
    families: dict, name: str, assert_same: Any, ties: dict[str, float]
) -> None:
    assert families[name].get("layers", 0) > 0, families[name]
    stock = families[name + "-stock"]
    tie = ties["gdn" if name in GDN else "mamba2"]
    assert_same(families[name], stock, tie)
    drafts = families[name + "-drafts"]
    assert_same(drafts, stock, tie)
    assert drafts["log"]["drafted"] > 0 and drafts["log"]["flushes"] > 0


@pytest.mark.parametrize(("model", "dtype"), SHIPPED)
def test_an_unused_plugin_changes_no_token(
    model: str, dtype: str, run_worker: Any, tiny_models: dict, excerpt: Any, as_served: Any
) -> None:
    s = Scenarios(tiny_models[model], dtype, [excerpt(n) for n in LENGTHS], as_served({}))
    s.add("plain", None)
    found = run_worker(s.jobs)["plain"]
    without = run_worker(s.jobs, VLLM_PLUGINS="none")["plain"]
    assert found["ids"] == without["ids"] and found["gaps"] == without["gaps"]


def test_overrides_fit_the_installed_vllm(run_worker: Any) -> None:
    found = run_worker("signatures")
    assert found["problems"] == [] and found["checked"] >= 20
    assert len(found["marks"]) == 5 and set(found["marks"].values()) == {1}
    assert found["imported"] == []  # by registering, twice
