"""The tiny hybrids of evals/models: they load offline, are right, and need their state."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from replayssm_quant.evals.tasks import TASKS

MODELS = Path(__file__).resolve().parents[1] / "evals" / "models"
NAMES = ["tiny-nemotron-h", "tiny-qwen3.5"]


@pytest.fixture(scope="module", params=NAMES)
def shipped(request: pytest.FixtureRequest) -> tuple[str, torch.nn.Module]:
    folder = MODELS / request.param
    return request.param, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def hits(model: torch.nn.Module, task: str, n: int, reset: int | None = None) -> np.ndarray:
    """Right answers of ``n`` streams; with ``reset`` the recurrent state is zeroed every so often.

    The convolution and attention caches are left alone: only the state is taken away.
    """
    batch = TASKS[task].sample(n, seed=99)
    ids = torch.from_numpy(batch.ids)
    if reset is None:
        logits = model(input_ids=ids, use_cache=False).logits
    else:
        cache, parts, zeroed = DynamicCache(config=model.config), [], 0
        for piece in ids.split(reset, 1):
            out = model(input_ids=piece, past_key_values=cache, use_cache=True)
            parts.append(out.logits)
            for layer in cache.layers:
                for state in getattr(layer, "recurrent_states", {}).values():
                    if state is not None:
                        zeroed += int(state.abs().sum() > 0)
                        state.zero_()
        assert zeroed == 2 * len(parts)  # two recurrent layers, each holding something every time
        logits = torch.cat(parts, 1)
    guess = logits.argmax(-1).numpy()
    return (guess[:, :-1] == batch.ids[:, 1:])[batch.mask[:, :-1]]


@pytest.mark.parametrize("name", NAMES)
def test_files_are_small_and_described(name: str) -> None:
    folder = MODELS / name
    assert sum(p.stat().st_size for p in folder.iterdir()) < 10 * 2**20
    card = (folder / "README.md").read_text()
    for word in ("license: apache-2.0", "H200", "tools/train_tiny.py", "PSF"):
        assert word in card
    assert not list(folder.glob("*.py")) and not list(folder.glob("*.bin"))


@pytest.mark.parametrize("name", NAMES)
def test_config_and_names_suit_the_loaders(name: str) -> None:
    """What vLLM's loaders read: ``backbone.*`` names, no tying, state dtype, head sizes."""
    config = json.loads((MODELS / name / "config.json").read_text())
    with safe_open(MODELS / name / "model.safetensors", "pt") as f:
        keys = set(f.keys())
        dtypes = {f.get_slice(k).get_dtype() for k in keys}
    assert dtypes == {"F32"} and "lm_head.weight" in keys
    assert config["tie_word_embeddings"] is False and config["head_dim"] == 64
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (
        256,
        257,
        258,
    )
    if name == "tiny-nemotron-h":
        assert config["architectures"] == ["NemotronHForCausalLM"]
        assert config["time_step_min"] == 0.0
        assert (config["mamba_head_dim"], config["ssm_state_size"]) == (64, 128)
        assert config["mamba_num_heads"] // config["n_groups"] in (1, 2, 4, 8)
        assert config["layers_block_type"][0] == "full_attention"
        assert all(k.startswith("backbone.") for k in keys - {"lm_head.weight"})
    else:
        assert config["architectures"] == ["Qwen3_5ForCausalLM"]
        assert config["model_type"] == "qwen3_5_text"
        assert config["mamba_ssm_dtype"] == "float32"
        assert (config["linear_key_head_dim"], config["linear_value_head_dim"]) == (128, 128)
        assert config["layer_types"] == ["full_attention", "linear_attention", "linear_attention"]
        assert all(k.startswith("model.") for k in keys - {"lm_head.weight"})


@pytest.mark.parametrize("name", NAMES)
def test_token_ids_are_bytes(name: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODELS / name)
    everything = "".join(chr(c) for c in range(32, 127)) + "\n\t é € 漢 🙂"
    ids = tokenizer(everything)["input_ids"]
    assert ids == list(everything.encode())
    assert tokenizer.decode(ids) == everything
    for generation in TASKS["tally"].generations(2, 0):
        assert tokenizer(generation.prompt)["input_ids"] == list(generation.prompt.encode())
    special = [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id]
    assert special == [256, 257, 258]
    assert tokenizer("<eos>")["input_ids"] == [257]


@pytest.mark.parametrize("task", ["count", "recall", "tally"])
def test_fp32_is_nearly_perfect(shipped: tuple[str, torch.nn.Module], task: str) -> None:
    right = hits(shipped[1], task, 4)
    assert len(right) > 200 and right.mean() >= 0.97


def test_the_answer_is_in_the_state(shipped: tuple[str, torch.nn.Module]) -> None:
    """Without its state a model falls to what the last 16 tokens and bare attention can tell."""
    name, model = shipped
    for task, most in (("count", 0.4), ("recall", 0.2)):
        right = hits(model, task, 4, reset=16)
        assert right.mean() < most, (name, task, right.mean())
    # the same walk in pieces, state kept: the fall is the state's, not the pieces'
    batch = TASKS["recall"].sample(1, seed=99)
    ids = torch.from_numpy(batch.ids)
    cache, parts = DynamicCache(config=model.config), []
    with torch.no_grad():
        for piece in ids.split(16, 1):
            parts.append(model(input_ids=piece, past_key_values=cache, use_cache=True).logits)
        whole = model(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-3, rtol=1e-3)


def test_decoding_tallies(shipped: tuple[str, torch.nn.Module]) -> None:
    """Greedy generation through the decode path yields the target, symbol for symbol."""
    generation = TASKS["tally"].generations(1, seed=99)[0]
    ids = torch.tensor([list(generation.prompt.encode())])
    out = shipped[1].generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=96,
        do_sample=False,
    )
    assert bytes(out[0, ids.shape[1] :].tolist()).decode() == generation.target[:96]
