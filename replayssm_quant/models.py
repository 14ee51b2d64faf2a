"""Which model a name means, and loading it: a shipped one, a local folder, or a hub id.

Weights are read from safetensors only. Code in a model's folder runs only if asked. The network is
touched only for a hub id, and not then where HF_HUB_OFFLINE is set. ``resolve`` needs no torch.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

FOLDER = Path(__file__).resolve().parent / "evals" / "models"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
HUB_ID = re.compile(r"[A-Za-z0-9][\w.\-]*/[A-Za-z0-9][\w.\-]*")
DTYPES = ("auto", "fp32", "bf16", "fp16")
_HASHED = 2**30


class ModelError(ValueError):
    """A model that cannot be used; one line that names it and the remedy."""


@dataclass(frozen=True)
class ResolvedModel:
    """name: for tables and file names. location: a folder, or a hub id. config: config.json of a
    folder, None for a hub id, whose files are not here yet."""

    name: str
    source: Literal["shipped", "folder", "hub"]
    location: str
    config: dict[str, Any] | None

    @property
    def slug(self) -> str:
        return re.sub(r"[^\w.\-]+", "--", self.name)


@dataclass
class LoadedModel:
    """A model ready to run, its tokenizer, and a digest of its weights."""

    resolved: ResolvedModel
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    digest: str


def shipped() -> dict[str, Path]:
    """Names and folders of the models that come with the package."""
    return {p.parent.name: p.parent for p in sorted(FOLDER.glob("*/config.json"))}


def offline() -> bool:
    """True if the environment forbids the hub."""
    values = (os.environ.get(k, "") for k in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))
    return any(v.strip().upper() in ("1", "ON", "YES", "TRUE") for v in values)


def check_folder(folder: Path) -> dict[str, Any]:
    """config.json of a model folder. Raises ModelError for one that cannot be loaded safely."""
    path = folder / "config.json"
    if not path.is_file():
        raise ModelError(
            f"model folder {folder} has no config.json; give the folder that save_pretrained wrote"
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise ModelError(f"{path} is not readable JSON; save the model again") from None
    if not isinstance(config, dict):
        raise ModelError(f"{path} is not a model configuration; save the model again")
    weights = sorted(folder.glob("*.safetensors"))
    index = folder / "model.safetensors.index.json"
    if not weights:
        pickles = [p.name for pattern in PICKLES for p in folder.glob(pattern)]
        if pickles:
            raise ModelError(
                f"model folder {folder} has only pickle weights ({pickles[0]}), which may run code "
                "when read; convert them to safetensors with save_pretrained"
            )
        raise ModelError(f"model folder {folder} has no *.safetensors weights; copy them there")
    if index.is_file():
        try:
            shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (OSError, ValueError, KeyError, AttributeError):
            raise ModelError(f"{index} is not a weight index; copy it again") from None
        missing = sorted(shards - {p.name for p in weights})
        if missing:
            raise ModelError(f"model folder {folder} lacks the weight file {missing[0]}")
    return config


def resolve(name: str) -> ResolvedModel:
    """What ``name`` means: a shipped model's name, else an existing folder, else a hub id.

    Raises ModelError with a suggestion; reads no weights and touches no network.
    """
    text = name.strip()
    known = shipped()
    if text in known:
        return ResolvedModel(text, "shipped", str(known[text]), check_folder(known[text]))
    folder = Path(text).expanduser()
    looks_local = text.startswith((".", "/", "~")) or text.endswith("/")
    if text and folder.is_dir():
        return ResolvedModel(folder.resolve().name, "folder", str(folder), check_folder(folder))
    if folder.is_file():
        raise ModelError(f"model '{text}' is a file; give the folder that holds config.json")
    if not looks_local and HUB_ID.fullmatch(text):
        return ResolvedModel(text, "hub", text, None)
    near = difflib.get_close_matches(text, list(known), 1)
    hint = f"did you mean '{near[0]}'? " if near else ""
    here = ", ".join(known) or "none"
    raise ModelError(
        f"unknown model '{text}': {hint}give a shipped model ({here}), an existing folder, or a "
        "hub id such as org/name"
    )


def default_models() -> list[ResolvedModel]:
    """The shipped pair. Raises ModelError where the package holds no model."""
    names = [n for n in shipped() if n.startswith("tiny-")]
    if not names:
        raise ModelError(
            "no shipped model is installed; name one with --model (a folder or a hub id)"
        )
    return [resolve(n) for n in names]


def weights_digest(folder: Path) -> str:
    """Sixteen hex digits over names and sizes of the weight files, and over the contents of those
    up to 1 GiB."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        digest.update(f"{path.name}:{path.stat().st_size};".encode())
        if path.stat().st_size <= _HASHED:
            with path.open("rb") as file:
                while block := file.read(1 << 22):
                    digest.update(block)
    return digest.hexdigest()[:16]


def hub_folder(location: str, code: bool) -> Path:
    """Download a hub model, or find it in the cache: never its pickles, its code only if asked."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    patterns = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
    if code:
        patterns.append("*.py")
    try:
        return Path(
            snapshot_download(location, allow_patterns=patterns, local_files_only=offline())
        )
    except LocalEntryNotFoundError:
        why = "HF_HUB_OFFLINE is set" if offline() else "the hub cannot be reached"
        raise ModelError(
            f"model '{location}' is not in the local cache and {why}; download it first, or give "
            "a folder"
        ) from None
    except (HfHubHTTPError, OSError) as error:
        line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(f"model '{location}' cannot be downloaded: {line}") from None


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """transformers without progress bars and warnings; what matters is checked by ``load``."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def load(
    resolved: ResolvedModel,
    device: str = "cpu",
    dtype: str = "auto",
    trust_remote_code: bool = False,
) -> LoadedModel:
    """Load model and tokenizer, in evaluation mode, on ``device``.

    dtype: ``auto`` is fp32 on a CPU and the checkpoint's own dtype on a GPU. Raises ModelError.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if dtype not in DTYPES:
        raise ModelError(f"unknown model dtype '{dtype}'; use {', '.join(DTYPES)}")
    folder = Path(resolved.location)
    if resolved.source == "hub":
        folder = hub_folder(resolved.location, trust_remote_code)
    config = check_folder(folder)
    if config.get("auto_map") and not trust_remote_code:
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        if config.get("model_type") not in CONFIG_MAPPING:
            raise ModelError(
                f"model '{resolved.name}' brings its own code (auto_map in config.json); read it, "
                "then pass --trust-remote-code to run it"
            )
    names = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    wanted: Any = names.get(dtype, torch.float32 if device == "cpu" else "auto")
    if device != "cpu" and dtype == "fp32":  # the convolutions too: decode computes them by hand
        torch.backends.cudnn.allow_tf32 = False
    options: dict[str, Any] = {
        "local_files_only": True,
        "trust_remote_code": trust_remote_code,
    }
    try:
        with quiet():
            model, info = AutoModelForCausalLM.from_pretrained(
                folder, dtype=wanted, use_safetensors=True, output_loading_info=True, **options
            )
            tokenizer = AutoTokenizer.from_pretrained(folder, **options)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        line = " ".join(str(error).split())[:300]
        raise ModelError(f"model '{resolved.name}' cannot be loaded: {line}") from None
    missing = sorted(info["missing_keys"]) + sorted(str(k) for k in info["mismatched_keys"])
    if missing:
        raise ModelError(
            f"model '{resolved.name}' lacks {len(missing)} weights that its configuration asks for "
            f"({missing[0]}); they would be random, so save the model again"
        )
    return LoadedModel(resolved, model.to(device).eval(), tokenizer, weights_digest(folder))
