"""Tiny random models on disk, and made-up units, shared by the evaluation's tests."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import replayssm_quant
from replayssm_quant.evals.schema import Exercise, TaskRecord, UnitRecord
from replayssm_quant.evals.store import Unit

SHIPPED = Path(replayssm_quant.__file__).parent / "evals" / "models"
COMMON = {"vocab_size": 260, "bos_token_id": 256, "eos_token_id": 257, "pad_token_id": 258}


def _tokenizer(folder: Path) -> None:
    """The byte-level tokenizer of the shipped models."""
    source = next(iter(sorted(SHIPPED.glob("*/tokenizer.json")))).parent
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, folder / name)


@pytest.fixture(scope="session")
def tiny_mamba2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random NemotronH with one Mamba-2 layer (2 heads of 8 x 16) in a folder."""
    from transformers import NemotronHConfig, NemotronHForCausalLM

    folder = tmp_path_factory.mktemp("models") / "tiny-mamba2"
    config = NemotronHConfig(
        **COMMON,
        hidden_size=16,
        hybrid_override_pattern="*-M-",
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        intermediate_size=32,
        mamba_num_heads=2,
        mamba_head_dim=8,
        ssm_state_size=16,
        n_groups=1,
        expand=1,
        chunk_size=32,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = NemotronHForCausalLM(config)
    for p in model.parameters():
        if p.ndim == 2:
            torch.nn.init.normal_(p, std=p.shape[1] ** -0.5)
    for name, p in model.named_parameters():  # a state that is written and read
        if name.endswith("dt_bias"):
            torch.nn.init.constant_(p, -1.0)
        elif name.endswith(("A_log", ".D")):
            torch.nn.init.constant_(p, -3.0 if name.endswith("A_log") else 0.1)
    model.config.time_step_min = 0.0
    model.save_pretrained(folder)
    _tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_gdn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3.5 with one Gated DeltaNet layer (2 heads of 16 x 16) in a folder."""
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM

    folder = tmp_path_factory.mktemp("models") / "tiny-gdn"
    config = Qwen3_5TextConfig(
        **COMMON,
        hidden_size=16,
        num_hidden_layers=2,
        layer_types=["full_attention", "linear_attention"],
        intermediate_size=32,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        linear_num_key_heads=1,
        linear_num_value_heads=2,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        max_position_embeddings=1024,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            "mrope_section": [1, 1, 0],
            "mrope_interleaved": True,
        },
    )
    torch.manual_seed(0)
    model = Qwen3_5ForCausalLM(config)
    for p in model.parameters():
        if p.ndim == 2:
            torch.nn.init.normal_(p, std=p.shape[1] ** -0.5)
    for name, p in model.named_parameters():  # a state that lasts
        if name.endswith("dt_bias"):
            torch.nn.init.constant_(p, -2.0)
        elif name.endswith("A_log"):
            torch.nn.init.constant_(p, -1.0)
    model.save_pretrained(folder)
    _tokenizer(folder)
    return folder


@pytest.fixture
def short_suite(tmp_path: Path) -> Path:
    """A suite of three short local tasks: teacher-forced, free-running and likelihood."""
    path = tmp_path / "short.yaml"
    tasks = [
        {"task": "count", "documents": 3, "settings": {"length": 48}},
        {"task": "tally", "documents": 2, "settings": {"length": 96, "decode": 24}},
        {"task": "text", "documents": 2, "settings": {"length": 40}},
    ]
    path.write_text(
        json.dumps({"schema": 1, "name": "short", "description": "short", "tasks": tasks})
    )
    return path


@pytest.fixture
def task_record():
    """Maker of a TaskRecord."""

    def make(kind="generate", scored="accuracy", margin=0.01, threshold=None) -> TaskRecord:
        return TaskRecord(
            name="task",
            kind=kind,
            description="made up",
            scored=scored,
            settings={},
            chance=None,
            threshold=threshold,
            margin=margin,
            metric="accuracy",
        )

    return make


@pytest.fixture
def make_unit():
    """Maker of a Unit from flags ("1101" a document) or, for streams, from token arrays."""

    def make(
        flags: list[str],
        arm: str = "arm",
        seed: int = 0,
        tokens: dict[str, np.ndarray] | None = None,
        outputs: list[str] | None = None,
        kld=None,
        nonfinite: int = 0,
    ) -> Unit:
        samples = [
            {
                "doc_id": i,
                "doc_hash": f"doc{i}",
                "prompt_hash": f"prompt{i}",
                "answers": len(f),
                "right": f.count("1"),
                "flags": f,
                "output": outputs[i] if outputs else f,
                "generated": len(f),
            }
            for i, f in enumerate(flags)
        ]
        answers = sum(map(len, flags))
        exercise = Exercise(
            steps=answers,
            flushes=answers // 16,
            quantised_reads=answers,
            writes_per_document=1.0,
            scored_tokens=answers,
            decode_share=1.0,
            path="decode",
        )
        record = UnitRecord(
            key="key",
            model="model",
            task="task",
            arm=arm,
            seed=seed,
            documents=len(flags),
            answers=answers,
            prompts="prompts",
            accuracy=sum(f.count("1") for f in flags) / answers,
            kld=kld,
            kld_support="full vocabulary" if kld else None,
            nonfinite_tokens=nonfinite,
            exercise=exercise,
            seconds=0.0,
        )
        return Unit(record, samples, tokens)

    return make
