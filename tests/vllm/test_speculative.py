"""Whole engines that draft, by n-grams and by MTP heads, against plain vLLM that does not.

On a CPU plain vLLM 0.32 is no baseline with drafts: its Mamba-2 kernel ignores which of them were
accepted, and its Gated DeltaNet kernel raises where rows have different numbers of them. So tokens
are those of plain vLLM without drafts, and the drafts are counted by vLLM's own proposer. On a GPU
engines compile and capture as they do by default.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

pytestmark = pytest.mark.slow

FP32 = {"update_dtype": "fp32", "stagger": False}
TOKENS = 60
LENGTHS = [1, 2, 15, 16, 17, 33, 70]
FAMILIES = {"mamba2": ("nemotron_h", "float32"), "gdn": ("qwen3_5_text", "bfloat16")}
# what rounding a state may move the log-probabilities of these models by: far above the recipe's
# noise (KLD of 1e-5), far below the gaps of a coarse state's tokens
NOISE = {"mamba2": 0.1, "gdn": 2 * 2.0**-3}


def ngram(drafts: int, least: int = 1, most: int = 4) -> dict[str, Any]:
    return {
        "speculative_config": {
            "method": "ngram",
            "num_speculative_tokens": drafts,
            "prompt_lookup_min": least,
            "prompt_lookup_max": most,
        },
        "disable_log_stats": False,
    }


def chunked(tokens: int, prompt: int) -> dict[str, int]:
    """An engine of so many tokens a step, and of so many of one prompt."""
    return {"max_num_batched_tokens": tokens, "long_prefill_token_threshold": prompt}


def jobs(
    folder: Path, dtype: str, excerpt: Any, as_served: Any, block: int
) -> list[dict[str, Any]]:
    """block: tokens of an attention block of the Mamba-2 model."""
    common = {
        "skip_tokenizer_init": True,
        "max_model_len": 512,
        "max_num_seqs": 8,
        "dtype": dtype,
    }
    engine = as_served(common)

    def drafting(drafts: int, *lengths: int) -> dict[str, Any]:
        return as_served(common | ngram(drafts, *lengths), 1 + drafts)

    base = {
        "model": str(folder),
        "engine": engine,
        "prompts": [excerpt(n) for n in LENGTHS],
        "tokens": TOKENS,
        "options": FP32,
        "poison": True,
        "against": "stock",
    }
    alone = {k: v for k, v in base.items() if k != "against"}
    long = {"prompts": [excerpt(block - 19 + i) for i in range(5)], "tokens": 40}
    small = {"num_gpu_blocks_override": 10, "max_model_len": 1024}
    found = [
        alone | {"name": "stock", "options": None, "tokens": TOKENS + 7, "poison": False},
        base | {"name": "drafts", "engine": drafting(3)},
        base
        | {
            "name": "wide",
            "engine": drafting(7),
            "options": FP32 | {"buffer_len": 4, "stagger": True},
            "arrive": [0, 3, 5, 9, 10, 20, 21],
        },
        base
        | {
            "name": "every-step",
            "engine": drafting(2),
            "options": FP32 | {"buffer_len": 1},
        },
        # drafts are rare: steps with none in any row follow steps that had some accepted
        base | {"name": "sparse", "engine": drafting(4, 5, 5), "alone": True},
        base
        | {
            "name": "chunks",
            "engine": drafting(3) | chunked(19, 15),
        },
        # chunks of one token beside the first one's of fifteen, before any row has drafts; then a
        # longer one, which has to fold what they left in the ring
        base
        | {
            "name": "tails",
            "engine": drafting(3) | chunked(16, 15),
            "arrive": [6 - i for i in range(len(LENGTHS))],
        },
        alone | {"name": "recipe", "options": {"recipe": "auto"}, "poison": False},
        base
        | {"name": "recipe-drafts", "options": {"recipe": "auto"}, "engine": drafting(3)}
        | {"against": "recipe"},
        alone
        | {
            "name": "coarse",
            "engine": drafting(3),
            "options": {"update_dtype": "nvfp4", "buffer_len": 1, "rounding": "rn"},
        },
    ]
    if dtype == "float32":  # attention blocks of the other model are longer than its requests
        found += [
            alone
            | long
            | {"name": "long", "engine": engine | {"max_model_len": 1024}, "options": None}
            | {"poison": False},
            base | long | {"name": "preempted", "engine": drafting(3) | small, "against": "long"},
            # a request that resumes computes the tokens that it had generated in chunks, too
            base
            | long
            | {
                "name": "preempted-chunks",
                "against": "long",
                "engine": drafting(3) | small | chunked(16, 3),
            },
        ]
    return found


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def found(
    family: str,
    run_worker: Any,
    tiny_models: dict[str, Path],
    excerpt: Any,
    as_served: Any,
    attention_block: dict[str, int],
) -> dict[str, Any]:
    model, dtype = FAMILIES[family]
    block = attention_block["mamba2-drafts"]
    result = run_worker(jobs(tiny_models[model], dtype, excerpt, as_served, block))
    assert not [r["error"] for r in result.values() if "error" in r]
    return result


@pytest.mark.parametrize("name", ["drafts", "wide", "every-step", "sparse", "chunks", "tails"])
def test_drafts_on_an_fp32_state_give_the_tokens_of_plain_vllm(
    found: dict[str, Any], family: str, name: str, assert_same: Any, ties: dict[str, float]
) -> None:
    assert found[name]["layers"] == 2
    assert [len(ids) for ids in found[name]["ids"]] == [TOKENS] * len(LENGTHS)
    assert_same(found[name], found["stock"], ties[family])


def test_a_rounded_state_stays_within_its_noise(
    found: dict[str, Any], family: str, assert_same: Any
) -> None:
    assert_same(found["recipe-drafts"], found["recipe"], NOISE[family])
    coarse, plain = found["coarse"]["ids"], found["stock"]["ids"]
    assert any(a != b[:TOKENS] for a, b in zip(coarse, plain, strict=True))  # it could fail


def test_scenarios_did_what_they_are_for(found: dict[str, Any], family: str) -> None:
    for name in ("drafts", "wide", "every-step", "sparse", "chunks", "tails"):
        log, spec = found[name]["log"], found[name]["spec"]
        assert log["drafted"] > 0 and log["rolled"] > 0 and spec["accepted_tokens"] > 0, name
        assert log["flushes"] > 0, name
    if found["drafts"]["runner"] == "v1":  # V2 drafts as many for each request in each step
        assert found["wide"]["log"]["ragged"] > 0
        assert found["sparse"]["log"]["rolled_without_drafts"] > 0
    assert found["tails"]["log"]["folded"] > 0
    # a flush folds between 1 and L + drafts tokens, and every token but the last ones of a request
    generated = TOKENS * len(LENGTHS)
    flushes = found["every-step"]["log"]["flushes"]
    assert flushes == found["every-step"]["log"]["rows"] - len(LENGTHS)
    assert found["drafts"]["log"]["rows"] < 0.9 * generated  # fewer steps than tokens
    # a draft has no state of its own: the page grows by its ring and convolution entries alone
    assert found["recipe-drafts"]["page"][0] < 1.25 * found["recipe"]["page"][0]


def test_drafts_are_accepted_as_the_tokens_say(
    found: dict[str, Any], family: str, run_worker: Any
) -> None:
    if family == "gdn":
        pytest.skip("needs equal tokens: with GDN in bf16 a request may part at a tie")
    if found["drafts"]["runner"] == "v2":
        pytest.skip("needs the V1 runner; V2 drafts by a kernel of its own: see test_service.py")
    stock = found["stock"]
    for name, (least, most, drafts) in {"drafts": (1, 4, 3), "sparse": (5, 5, 4)}.items():
        asked = {"prompts": stock["prompts"], "ids": stock["ids"], "tokens": TOKENS}
        asked |= {"min": least, "max": most, "drafts": drafts, "length": 512}
        assert found[name]["spec"] == run_worker(asked), name


def test_preempted_requests_draft_on(
    found: dict[str, Any], family: str, assert_same: Any, ties: dict[str, float]
) -> None:
    if family == "gdn":
        pytest.skip("needs requests longer than an attention block, which GDN's page makes long")
    for name in ("preempted", "preempted-chunks"):
        assert found[name]["preempted"] > 0 and found[name]["spec"]["accepted_tokens"] > 0, name
        assert_same(found[name], found["long"], ties[family])


def with_mtp_head(model: Path, folder: Path) -> Path:
    """A shipped model with an MTP head that nobody trained: its own last attention layer."""
    shutil.copytree(model, folder)
    config = json.loads((model / "config.json").read_text())
    weights = load_file(model / "model.safetensors")
    size = config["hidden_size"]
    torch.manual_seed(0)
    both = torch.cat((0.5 * torch.eye(size), torch.eye(size)), dim=1)  # embedding, hidden state
    both += 0.01 * torch.randn(size, 2 * size)
    kinds = config.get("layer_types") or config["layers_block_type"]
    if config["model_type"] == "nemotron_h":
        config |= {"num_nextn_predict_layers": 1, "mtp_layers_block_type": ["full_attention"]}
        base, ones = "backbone", torch.ones(size)
        head = {"eh_proj": both, "enorm": ones, "hnorm": ones.clone()}
        head["final_layernorm"] = weights["backbone.norm_f.weight"].clone()
        head = {f"layers.0.{name}": w for name, w in head.items()}
    else:
        config |= {"mtp_num_hidden_layers": 1}
        base, head = "model", {"fc": both, "norm": weights["model.norm.weight"].clone()}
        head |= {f"pre_fc_norm_{n}": torch.zeros(size) for n in ("hidden", "embedding")}
    weights |= {f"mtp.{name}.weight": w for name, w in head.items()}
    first = f"{base}.layers.{kinds.index('full_attention')}."
    for name in [n for n in weights if n.startswith(first)]:
        damped = 0.3 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
        weights["mtp.layers.0." + name.removeprefix(first)] = damped * weights[name]
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def mtp(
    family: str,
    run_worker: Any,
    tiny_models: dict[str, Path],
    excerpt: Any,
    as_served: Any,
    gpu: bool,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Any]:
    if not gpu:
        pytest.skip("needs vLLM's GPU build, and a GPU: its MTP heads do not run on a CPU")
    model, dtype = FAMILIES[family]
    folder = with_mtp_head(tiny_models[model], tmp_path_factory.mktemp("mtp") / "model")
    common = {"skip_tokenizer_init": True, "max_model_len": 512, "max_num_seqs": 8}
    common |= {"dtype": dtype}
    drafting = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}}
    drafting |= {"disable_log_stats": False}
    base = {"model": str(folder), "prompts": [excerpt(n) for n in LENGTHS], "tokens": TOKENS}
    asked = []
    for name, options in {"fp32": FP32, "recipe": {"recipe": "auto"}}.items():
        base |= {"options": options, "poison": True}
        asked.append(base | {"name": name, "engine": as_served(common)})
        wide = as_served(common | drafting, 3)
        asked.append(base | {"name": "mtp-" + name, "engine": wide, "against": name})
    return run_worker(asked)


@pytest.mark.parametrize("name", ["fp32", "recipe"])
def test_an_mtp_head_drafts_on_a_split_state(
    mtp: dict[str, Any], family: str, name: str, assert_same: Any
) -> None:
    assert_same(mtp["mtp-" + name], mtp[name], NOISE[family])
    found = mtp["mtp-" + name]
    assert found["log"]["drafted"] > 0 and found["log"]["flushes"] > 0
    assert 0 < found["spec"]["accepted_tokens"] < found["spec"]["draft_tokens"]


@pytest.fixture(scope="module")
def steps(
    family: str,
    run_worker: Any,
    tiny_models: dict[str, Path],
    excerpt: Any,
    as_served: Any,
    attention_block: dict[str, int],
    gpu: bool,
) -> list[dict[str, Any]]:
    """Steps of two requests and a third, in rows as a captured graph of four of them has them."""
    if gpu:
        pytest.skip("needs vLLM's CPU build: the steps are planned by hand, on tensors there")
    model, dtype = FAMILIES[family]
    job = jobs(tiny_models[model], dtype, excerpt, as_served, attention_block["mamba2"])[1]
    pad = {"blocks": [1, 2, 3, 0], "prompts": [False] * 4, "drafts": [3, 3, 3, -1]}
    asked = [
        {"lengths": [5, 7, 6], "tokens": [5, 7, 6], "blocks": [1, 2, 3], "prompts": [True] * 3}
        | {"drafts": [-1] * 3},
        pad | {"lengths": [4, 4, 4, 0], "tokens": [9, 11, 10, 0], "padded": 16},
        # one, four and two tokens were kept
        pad
        | {"lengths": [4, 4, 4, 0], "tokens": [10, 15, 12, 0], "padded": 16}
        | {"moved": [5, 6, 7, 0]},
        {"lengths": [4, 1, 2], "tokens": [11, 16, 12], "blocks": [1, 2, 3], "drafts": [3, 0, 1]}
        | {"prompts": [False] * 3},
        # a row that verifies beside a prompt of a request that takes over block 3
        {"lengths": [4, 4, 6], "tokens": [12, 20, 6], "blocks": [1, 2, 3], "drafts": [3, 3, -1]}
        | {"prompts": [False, False, True]},
        {"lengths": [4, 4], "tokens": [4, 4], "blocks": [0, 0], "drafts": [3, 3]}
        | {"prompts": [False] * 2, "capture": True},
    ]
    return run_worker(job | {"options": FP32 | {"buffer_len": 3}, "steps": asked})


def test_padded_rows_of_a_graph_are_planned_in_place(steps: list[dict[str, Any]]) -> None:
    first, second, third, ragged, beside, capture = steps
    assert first["verify"] is None and first["prefill"] == [[1, 2, 3], [0, 0, 0], [0, 0, 0]]
    for step in (second["verify"], third["verify"]):
        assert step["slots"] == [1, 2, 3, -1] and step["count"] == [4, 4, 4, 0]
        assert step["starts"] == [0, 4, 8, 12, 12] and step["width"] == 4
        assert not step["ragged"]
    assert second["verify"]["valid"] == [0, 0, 0, 0]
    assert third["verify"]["valid"] == [1, 4, 2, 0] and third["verify"]["shift"] == [1, 4, 2, 1]
    # L = 3: the second request has four committed tokens to fold
    assert third["verify"]["flush"] == [False, True, False, False]
    assert third["verify"]["fold_slots"] == [-1, 2, -1, -1]
    assert second["verify"]["addresses"] == third["verify"]["addresses"]
    assert capture["verify"]["addresses"] == second["verify"]["addresses"]
    assert capture["verify"]["slots"] == [-1, -1] and capture["verify"]["width"] == 4
    moved = third["moved"]
    assert moved["slots"] == [5, 6, 7, -1] and moved["fold_slots"] == [-1, 6, -1, -1]
    assert [moved[n] for n in ("valid", "starts", "shift")] == [
        third["verify"][n] for n in ("valid", "starts", "shift")
    ]
    assert ragged["verify"]["ragged"] and ragged["verify"]["count"] == [4, 1, 2]
    assert ragged["verify"]["valid"] == [2, 4, 4] and ragged["verify"]["shift"] == [1, 4, 2]
    assert ragged["verify"]["flush"] == [False, True, True]
    assert beside["verify"]["slots"] == [1, 2] and beside["verify"]["valid"] == [3, 1]
    assert beside["verify"]["flush"] == [True, False]
    assert beside["prefill"][0] == [3] and beside["prefill"][2] == [0]
