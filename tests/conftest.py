"""Settings that must hold before any test module is imported."""

import os
import sys
from pathlib import Path

# The tests exercise this checkout, installed or not; the root then leaves sys.path again, because
# its bare folder `kernels/` would pass for Hugging Face's package of that name.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from replayssm_quant._paths import drop_checkout  # noqa: E402  (the path comes first)

drop_checkout()

# Read once, when torch, triton and huggingface_hub are imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")  # pytest-xdist runs one worker a core
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest  # noqa: E402
import torch  # noqa: E402

HAS_CUDA = torch.cuda.is_available()
if not HAS_CUDA:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # fixed at the import of triton
torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip ``gpu`` tests, with the reason, where torch sees no CUDA GPU."""
    if HAS_CUDA:
        return
    skip = pytest.mark.skip(reason="needs a CUDA GPU and torch sees none")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
