"""What a model name means, and which folders are refused before anything is read."""

import json
import shutil

import pytest

from replayssm_quant import models
from replayssm_quant.models import ModelError


def test_shipped_names_come_first() -> None:
    names = models.shipped()
    assert {"tiny-nemotron-h", "tiny-qwen3.5"} <= set(names)
    found = models.resolve("tiny-qwen3.5")
    assert found.source == "shipped" and found.config["model_type"] == "qwen3_5_text"
    assert [m.name for m in models.default_models()] == sorted(
        n for n in names if n.startswith("tiny-")
    )


def test_folders_and_hub_ids(tiny_mamba2) -> None:
    folder = models.resolve(str(tiny_mamba2))
    assert (folder.source, folder.name) == ("folder", "tiny-mamba2")
    hub = models.resolve("nvidia/Some-Model")
    assert (hub.source, hub.config, hub.slug) == ("hub", None, "nvidia--Some-Model")


@pytest.mark.parametrize(
    "name, message",
    [
        ("tiny-qwen35", "did you mean 'tiny-qwen3.5'"),
        ("./absent", "unknown model './absent'"),
        ("", "unknown model ''"),
        ("a/b/c", "unknown model 'a/b/c'"),
    ],
)
def test_unknown_names_get_a_suggestion(name: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        models.resolve(name)


def test_bad_folders_are_refused_in_one_line(tmp_path, tiny_mamba2) -> None:
    with pytest.raises(ModelError, match="no config.json"):
        models.resolve(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="not readable JSON"):
        models.resolve(str(tmp_path))
    shutil.copy(tiny_mamba2 / "config.json", tmp_path)
    with pytest.raises(ModelError, match=r"no \*.safetensors weights"):
        models.resolve(str(tmp_path))
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelError, match=r"only pickle weights \(pytorch_model.bin\)"):
        models.resolve(str(tmp_path))
    shutil.copy(tiny_mamba2 / "model.safetensors", tmp_path / "model-00001-of-00002.safetensors")
    index = {
        "weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002.safetensors"}
    }
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match="lacks the weight file model-00002.safetensors"):
        models.resolve(str(tmp_path))
    with pytest.raises(ModelError, match="is a file"):
        models.resolve(str(tmp_path / "config.json"))


def test_loading_gives_the_model_its_tokenizer_and_a_digest(tiny_mamba2, tmp_path) -> None:
    loaded = models.load(models.resolve(str(tiny_mamba2)))
    assert not loaded.model.training and next(loaded.model.parameters()).dtype.is_floating_point
    assert loaded.tokenizer("~c")["input_ids"] == [126, 99]
    assert loaded.digest == models.weights_digest(tiny_mamba2)
    other = tmp_path / "other"
    shutil.copytree(tiny_mamba2, other)
    data = bytearray((other / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (other / "model.safetensors").write_bytes(data)
    assert models.weights_digest(other) != loaded.digest


def test_missing_weights_are_not_made_up(tiny_mamba2, tmp_path) -> None:
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "holes"
    shutil.copytree(tiny_mamba2, folder)
    weights = load_file(folder / "model.safetensors")
    gone = next(k for k in weights if k.endswith("A_log"))
    del weights[gone]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match="lacks 1 weights"):
        models.load(models.resolve(str(folder)))


def test_a_folders_code_needs_consent(tiny_mamba2, tmp_path) -> None:
    folder = tmp_path / "with-code"
    shutil.copytree(tiny_mamba2, folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "homemade", "auto_map": {"AutoConfig": "code.Homemade"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "code.py").write_text("raise SystemExit('ran')\n")
    with pytest.raises(ModelError, match="--trust-remote-code"):
        models.load(models.resolve(str(folder)))


def test_hub_ids_are_not_fetched_offline(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with pytest.raises(ModelError, match="HF_HUB_OFFLINE is set"):
        models.load(models.resolve("nobody/nothing-at-all"))


def test_unknown_dtype_is_refused(tiny_mamba2) -> None:
    with pytest.raises(ModelError, match="unknown model dtype 'fp8'"):
        models.load(models.resolve(str(tiny_mamba2)), dtype="fp8")
