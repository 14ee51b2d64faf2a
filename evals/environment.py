"""What a result was made with: versions, hardware class, commit. Never a host name or a path."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path

import replayssm_quant

from .schema import Environment

PACKAGES = ("torch", "transformers", "triton", "numpy", "lm_eval", "datasets", "vllm")
ROOT = Path(replayssm_quant.__file__).resolve().parents[1]


def _git(*args: str) -> str | None:
    """Output of git in the checkout that this package runs from; None in an installed wheel."""
    if not (ROOT / ".git").exists():
        return None
    try:
        done = subprocess.run(
            ["git", "-C", str(ROOT), *args], capture_output=True, text=True, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


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
    """The record of this process; ``threads`` overrides what torch says (worker processes).

    ``REPLAYSSM_COMMIT`` names the commit where the sources lie outside git, or in a copy of it that
    is not whole; git is not asked then.
    """
    named = os.environ.get("REPLAYSSM_COMMIT")
    status = None if named else _git("status", "--porcelain", "--untracked-files=no")
    name, found = hardware(device)
    return Environment(
        toolkit=replayssm_quant.__version__,
        commit=named or _git("rev-parse", "HEAD"),
        dirty=None if status is None else bool(status),
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
