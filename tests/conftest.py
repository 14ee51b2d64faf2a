"""Settings that must hold before any test module is imported."""

import dataclasses
import functools
import importlib.util
import inspect
import os
import sys
import types
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


def _set_the_interpreter_up() -> None:
    """Let interpreted kernels give the same bits on every CPU, in half the time.

    ``tl.dot`` gives a row the bits that it gets beside any number of others. The interpreter
    multiplies by NumPy, whose BLAS sums fp32 on some processors (AMD's Zen) in an order that
    depends on the number of rows, which a GPU does not. Here the sums are in fp64 and rounded once:
    what an order changes is then 2^-29 of what fp32 can hold.

    Each call of a device function patches the whole of ``triton.language`` again, which takes more
    than half of the time: here, once a launch. And each integer sum is made and compared a second
    time in 64 bits for an assertion that is dropped: here, not at all.
    """
    import numpy as np
    from triton.runtime import interpreter

    class Wide(types.ModuleType):
        def __getattr__(self, name: str) -> object:  # what NumPy imports at its first use
            return getattr(np, name)

        @staticmethod
        def matmul(a, b, dtype):
            wide = np.float64 if dtype == np.float32 else dtype
            return np.matmul(a, b, dtype=wide).astype(dtype)

    wide = Wide(np.__name__)
    wide.__dict__.update({k: v for k, v in vars(np).items() if k != "matmul"})
    interpreter.np = wide

    patch, launch, patched = interpreter._patch_lang, interpreter.GridExecutor.__call__, set()

    def patch_once(fn):
        langs = languages(fn)
        if not langs or not langs <= patched:
            patched.update(langs)
            return patch(fn)

    @functools.cache
    def languages(fn) -> frozenset[str]:
        names = (v.__name__ for v in vars(inspect.getmodule(fn)).values() if inspect.ismodule(v))
        return frozenset(names) & {"triton.language", "triton.language.core"}

    def launch_afresh(self, *args, **kwargs):
        patched.clear()
        return launch(self, *args, **kwargs)

    interpreter._patch_lang = patch_once
    interpreter.GridExecutor.__call__ = launch_afresh
    options = dataclasses.replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
    interpreter.interpreter_builder.options = options


if not HAS_CUDA and importlib.util.find_spec("triton") is not None:
    _set_the_interpreter_up()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip ``gpu`` tests, with the reason, where torch sees no CUDA GPU."""
    if HAS_CUDA:
        return
    skip = pytest.mark.skip(reason="needs a CUDA GPU and torch sees none")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
