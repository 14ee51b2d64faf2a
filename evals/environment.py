"""What a result was made with: versions, hardware class, commit. Never a host name or a path."""

from __future__ import annotations

import hashlib
import platform
from importlib import metadata
from pathlib import Path

import replayssm_quant

from .._source import source_commit
from .schema import Environment

PACKAGES = ("torch", "transformers", "triton", "numpy", "lm_eval", "datasets", "vllm")


def versions() -> dict[str, str]:
    """Versions of the packages that numbers depend on, those that are installed."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def hardware(device: str) -> tuple[str, int]:
    """(hardware class, torch threads): a GPU's product name, or the CPU's instruction set."""
    import torch

    if device.startswith("cuda"):
        return torch.cuda.get_device_name(torch.device(device)), torch.get_num_threads()
    capability = torch.backends.cpu.get_cpu_capability()
    return f"{platform.machine()} CPU ({capability})", torch.get_num_threads()


def describe(device: str, threads: int | None = None) -> Environment:
    """The record of this process; ``threads`` overrides what torch says (worker processes)."""
    commit, dirty = source_commit()
    name, found = hardware(device)
    return Environment(
        toolkit=replayssm_quant.__version__,
        commit=commit,
        dirty=dirty,
        python=platform.python_version(),
        packages=versions(),
        hardware=name,
        threads=threads or found,
    )


def code_digest() -> str:
    """Sixteen hex digits over the sources that decide a measurement on one machine."""
    root = Path(replayssm_quant.__file__).resolve().parent
    digest = hashlib.sha256()
    for folder in ("formats", "state", "kernels", "backends", "evals"):
        base = (root / folder).resolve()
        for path in sorted(base.rglob("*.py")):
            if not {"bench", "vllm"} & set(path.relative_to(base).parts):
                digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
